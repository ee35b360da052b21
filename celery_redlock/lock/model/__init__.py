"""Values and arithmetic of a lock. No clock and no I/O: times are arguments.

Read `lease.py` first, then `acquisition.py`.

- `lease.py`: `Lease`, `LockKey`, `validity`: one key and each node's deadline for it: for how long
  a quorum keeps it, at risk, lost, to reclaim. `Probation` is a late node that is not counted yet.
- `acquisition.py`: `Acquisition`, `Hold`, `Flow`: what one acquire holds (all keys or none), when
  it is renewed, and the nested acquires that rely on it.
- `votes.py`: `Vote`, `Tally`, `quorum_of`: counts the votes of one round and decides it.
  `is_split`: rivals share the nodes.
- `fencing.py`: `Fence`, `proposal`: the fencing token: a client proposes it, the nodes count it, a
  majority confirms it.
- `handoff.py`: `Named`, `Place`, `next_move`: whom a release names as the next, whose turn it is,
  and what a waiter does next. `place_of_quorum` joins the nodes' answers.
- `rate.py`: `Rate`, `Start`, `RateKey`: a rate limit over all clients: at most so many starts in a
  period.
- `keys.py`: `lock_key`, `waiting_key`, `unique_key`, `value_of`: names and values of keys and
  channels on the nodes; `in_order` is the common order of several resources.
- `options.py`: `LockOptions`, `ClientOptions`, `Guard`: what callers ask for. `grace_period`: for
  how long a node that lost its data must not vote. `CompletionMarker`: the record that a run has
  ended.

Not here: the code that changes these values (`lock/engine`).
"""
