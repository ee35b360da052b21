"""The lock without Celery: a majority of independent nodes grants it.

Read in this order: `lock.py` (`Lock`: acquire, extend, release), `engine/acquirer.py` (all keys or
none, one round a key), `model/lease.py` (for how long a lock may be trusted). Then read by topic:

- `client.py`: `Redlock`, its settings, `trust`. `validation.py`: what is refused, and why.
- `hold.py`, `retry.py`, `release.py`: one acquire; waiting; ending a lock from outside.
- `node_status.py`, `held_locks.py`: what operators ask the nodes.
- `engine/`: acquires, renews, releases; the watchdog; the wait queue; the events for observers.
- `server/`: the Lua scripts, the restart guard, what a server's errors mean.
- `model/`: options, names on the nodes, votes, leases, fencing tokens. No clock, no I/O.
- `transport/`: connections, commands and replies. It knows no locks.
- `platform/`: time, threads, mutexes, polls; gevent and the GIL.

A folder imports only folders below it on this list, and no module here imports Celery.
"""
