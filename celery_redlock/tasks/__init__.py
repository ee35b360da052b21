"""The lock in a task's life: from its settings and its send to its run and its release.

Read `task.py` first (`LockedTask`), then `execution/run.py`, one run of a task under its lock.
`settings/` merges and checks the options, `delivery/` reads and writes the message, `unique/`
deduplicates sends. In a worker's main process, `waiting/` dispatches deferred messages, and
`children/` releases the locks of dead children. Not here: how a lock is acquired (`lock/`), and
when Celery calls which part (`celery_redlock/wiring.py`).
"""
