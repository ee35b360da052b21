"""The lock in a task's life: from its settings and its send to its run and its release.

Read `task.py` first (`LockedTask`), then `execution/run.py`, one run of a task under its lock.
By topic, from the settings to a worker's start:

- `settings/`: the options, merged from five levels and checked; the keys made of arguments.
- `declaration.py`: what a task's class declares, and what its functions take.
- `typed_options.py`: the types of options. `wrapping.py`: the wrapper of a task's `run` and hooks.
- `delivery/`: one message: its header, its route, its run id; how it is published again.
- `execution/`: a run from its delivery to its end, and what becomes of it without its lock.
- `body.py`: how LockLost is raised in a running body. `unique/`: deduplication of sends.
- `reporting.py`: what is stored in the result backend and sent as an event: DEFERRED, SKIPPED.
- `per_app.py`: the settings and the `Redlock` of an app.
- `waiting/`, `untried.py`: deferred messages in a worker's main process, and those that are
  deferred there without a try. `recovery/`: the messages of a dead worker.
- `children/`, `worker_request.py`: the locks of dead children, and what Celery decides of a message
  in a worker's main process: revoked, expired, aborted.
- `startup.py`: an app that finalizes adopts tasks of others; what a worker checks at its start.

Not here: how a lock is acquired (`lock/`), and when Celery calls which part (the module `wiring`).
"""
