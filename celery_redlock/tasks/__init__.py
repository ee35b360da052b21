"""The lock in a task's life: from its settings and its send to its run and its release.

Read `task.py` first, then `execution/run.py`, one run of a task under its lock. By topic, from the
settings to a worker's start:

- `task.py`: `LockedTask`, `current_lock`: the task class of users, and the lock of the running
  task.
- `settings/`: `TaskLockOptions`, `TaskLockConfig`, `AppSettings`: the options, merged from five
  levels and checked; the keys made of arguments.
- `declaration.py`: `config_of`, `may_lock_anywhere`, `refuse_awaitable`: what a task's class
  declares, as one configuration; what its body takes.
- `arguments.py`: `parameters_of`, `Parameters`, `Arrivals`: what a task's function takes of a call,
  also behind decorators, and whether the arguments arrive where the key took them.
- `typed_options.py`: `TaskOptions`, `CallOptions`: the types of options, for editors and type
  checkers.
- `wrapping.py`: `wrap_run`, `wrap_hook`, `keep_tracebacks`: the wrapper of a task's `run` and
  hooks, and what Celery keeps of the traceback of our errors.
- `sending.py`: `publish_or_drop`, `publish_through`, `check_send`: what a send does: its route, its
  claim, the options of its call.
- `unique/`: `Claim`, `send_unique`: deduplication and debounce of sends.
- `delivery/`: `Delivery`, `LockHeader`, `Route`: one message: its header, its route, its run id;
  how it is published again.
- `execution/`: `LockedRun`, `decide`: a run from its delivery to its end, and what becomes of it
  without its lock.
- `body.py`: `MonitoredBody`, `SignalInterrupter`, `GreenletInterrupter`: raises LockLost in a
  running body, by a signal or by gevent's hub.
- `reporting.py`: `StateReporter`, `StoringThread`: what is stored in the result backend and sent as
  an event: DEFERRED, STARTED, SKIPPED, REVOKED.
- `per_app.py`: `settings_of`, `redlock_of`: the settings and the `Redlock` of an app in this
  process.
- `waiting/`: `WaitingRoom`, `Successor`: deferred messages in a worker's main process: order,
  prefetch, capacity, dispatch.
- `untried.py`: `defer_untried`: defers a new message in the main process, without a try, if its run
  would be refused.
- `worker_request.py`: `Request`: a message in the main process, and what Celery decides of it
  there: revoked, expired, killed at a time limit, given back at a shutdown, kept if it was refused
  its lock.
- `recovery/`: `RecoverMessages`, `Keeper`: the messages of a dead worker.
- `children/`: `ChildReaper`: the locks of pool processes that were killed.
- `startup.py`: `install`, `AdoptingRegistry`, `adopt_task`, `RefuseToStart`, `report_nodes`: an app
  that finalizes adopts the tasks that `redlock_tasks` names, each by `adopt_task`; what a worker
  checks and logs at its start.

Not here: how a lock is acquired (`lock/`), and when Celery calls which part (the module `wiring`).
"""
