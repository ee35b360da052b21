"""How one process acquires, renews and releases.

Read `acquirer.py` first, then `renewer.py` and `releaser.py`.

- `acquirer.py`: `Acquirer.try_acquire`: one try: all keys or none, one round for each key, and a
  rollback if it fails. `Acquirer.begin_body` counts the starts of a rate as the body begins.
- `renewer.py`: `Renewer`: renews many leases in one batch and reclaims missing keys.
  `Renewer.confirm_fencing_token` has a majority confirm a fencing token.
- `releaser.py`: `Releaser`, `KeyRelease`, `Outbox`: writes releases to every node, keeps them for
  nodes that are away, and removes what a late grant or a dead process (orphans) leaves.
- `watchdog.py`: `Watchdog`: renews in time, and detects a lost lock by its deadline, in two
  threads.
- `rounds.py`: `AcquireRound`, `RenewRound`, `PlaceRound`: turns the nodes' replies into votes,
  leases and places of waiters.
- `permits.py`: `PermitRound`: the same for one permit of a lock with several holders (semaphore).
- `starts.py`: `StartRound`: the same for one start of a rate limit.
- `callers.py`: `Callers`, `Caller`: who waits for a lock in this process: threads, greenlets and
  coroutines, in order of arrival.
- `inbox.py`: `Inbox`, `Line`: registers this process as a waiter on the nodes, and hears the
  messages by which a release names it.
- `events.py`: `Events`: writes the log and sends the records of the public signals, as
  `LockAcquiredEvent`, `LockLostEvent`, `NodeFailedEvent`.
- `core.py`: `Core`: what all of these use: nodes, guard, options, clock. `Core.check_distinct`
  raises SettingsError if the guard has found that two nodes are one server.
- `session.py`: `Session`: the core with the parts: builds, maintains and ends them. No other file
  of this folder imports it.

Not here: how bytes travel (`lock/transport`), what is sent to a server (`lock/server`), the
arithmetic of leases (`lock/model`), and how often a caller tries (`lock/retry.py`).
"""
