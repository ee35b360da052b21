"""Bodies that run under a lock, and how LockLost is raised in one whose lock is lost.

Not here: how a loss is found (`lock/engine/watchdog.py`), and what a run ends with then
(`tasks/execution`). Read `monitored.py` first: a running body, and at which frames it may be
interrupted. `interrupt.py` raises the exception: by a signal in a main thread, by the hub in a
greenlet, and not at all in other threads.
"""
