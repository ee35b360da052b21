"""The lock without Celery: a majority of independent nodes grants it.

Read `lock.py` first (`Lock`: acquire, extend, release). Then read `engine/acquirer.py` (all keys or
none, one round for each key) and `model/lease.py` (for how long a lock is valid). By topic:

- `client.py`: `Redlock`, its settings, `trust`. `validation.py`: checks of settings and arguments.
- `ownership.py`: what one lock has acquired, and its release. `retry.py`: the tries of one acquire.
- `node_status.py`, `inspection.py`: queries of operators about nodes, locks and waiters.
- `engine/`: acquires, renews, releases; the watchdog; who waits; the reports of events.
- `postgres/`: what a node does and says if it is a PostgreSQL server.
- `server/`: the Lua scripts, the restart guard, what a server's errors mean.
- `model/`: options, names on the nodes, votes, leases, fencing tokens. No clock, no I/O.
- `transport/`: connections, commands and replies. Not locks.
- `platform/`: time, threads, mutexes, polls; gevent and the GIL.

A folder imports only folders below it on this list, and no module here imports Celery.
"""
