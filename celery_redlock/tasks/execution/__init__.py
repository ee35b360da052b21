"""A run from its delivery to its end, in the process that runs the body.

Read `run.py` first, then `end.py`.

- `run.py`: `LockedRun`, `run_of`, `lock_of_run`: one run; `LockedRun.execute` is the whole way:
  options, acquire, body.
- `end.py`: `release_after_run`, `end_run`, `is_completed`: the end, after Celery has stored the
  outcome: which ends are recorded on the nodes as completed, and which run again; the release.
- `deferral.py`: `decide`, `Contention`, `countdown_of`: decides what becomes of a message that did
  not get its lock (defer, skip, fail), and with what countdown (backoff). Pure.
- `outcomes.py`: `end_refused`, `defer`, `skip`, `wait_for_first_delivery`: does it and logs it:
  deferred, skipped, failed, revoked. A redelivery is republished while its first delivery still
  runs, and `discard_redelivery` drops it once that is completed.
- `completion_markers.py`: `completion_marker`, `read_markers`, `check_not_superseded`: whether
  another delivery of the same message has completed the run, or a later send replaces it
  (idempotency record).

Not here: how a state is stored and sent (`tasks/reporting.py`), how a deferred message waits in a
worker's memory (`tasks/waiting`), what a running body learns of its lock (`tasks/body.py`), how the
claim of a message ends that starts no run (`tasks/unique`), how an error describes the holder (the
module `errors`), and the bounds of a countdown (`tasks/settings`).
"""
