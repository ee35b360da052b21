"""The lock without Celery: a majority of independent nodes grants it.

Read `lock.py` first. Then read `engine/acquirer.py` (all keys or none, one round for each key) and
`model/lease.py` (for how long a lock is valid).

- `lock.py`: `Lock`: acquire, extend, release, fencing token. `Lock.confirm_in` confirms the lock in
  a transaction.
- `client.py`: `Redlock`: the client of one set of nodes, made once per program. `sessions` lists
  what this process has open; `session_of` finds one.
- `ownership.py`: `Ownership`: what one lock has acquired: its owner, reentrancy (nested acquires),
  release, and why it is not held.
- `fenced_rows.py`: `token_of`, `rows_written`: what a fenced update needs, and what its rows mean.
- `retry.py`: `Attempts`, `Wait`: the tries of one acquire: when to try again, at a release or after
  a random pause, and when to give up.
- `validation.py`: `check_nodes`, `check_ttl`, `check_resources`, `check_limit`: checks of settings
  and arguments; each raises SettingsError with a hint.
- `reports.py`: `NodeStatus`, `LockReport`, `WaitingProcess`, `ClaimReport`: the records that
  operators see, without I/O.
- `inspection.py`: `list_locks`, `list_waiting`, `break_lock`, `break_rate`: queries about locks,
  rates and waiters; breaks a lock by force.
- `claims.py`: `list_claims`, `delete_claim`: queries about the claims of deduplicated sends; ends
  one.
- `node_status.py`: `ask_nodes`, `read_nodes`, `missing_rights`: whether each node votes, its clock,
  and settings that differ between clients.
- `removal.py`: `list_keys`, `remove_from_nodes`: what a prefix has on the nodes, and which of it
  goes with the package.
- `engine/`: `Acquirer`, `Renewer`, `Releaser`, `Watchdog`: acquires, renews, releases; who waits;
  the log and the events.
- `postgres/`: `PostgresAddress`: one PostgreSQL server as the lock node.
- `server/`: `RestartGuard`, `Requests`: the Lua scripts, the restart guard, what a server's errors
  mean.
- `model/`: `Lease`, `Tally`, `Fence`: options, names on the nodes, votes, leases, fencing tokens.
  No clock, no I/O.
- `transport/`: `Nodes`, `Node`: connections, commands and replies. Not locks.
- `platform/`: `Platform`, `Clock`: time, threads, mutexes, polls; gevent and the GIL.

A folder imports only folders below it on this list, and no module here imports Celery.

Not here: the lock in a task's life (`tasks/`), and what the commands show (`operate/cli`).
"""
