"""A run from its delivery to its end, in the process that runs the body.

Read `run.py` first: `LockedRun.execute` is the whole way, and `release_after_run` the end, after
Celery has stored the outcome: which ends are recorded on the nodes as done, and which run again.
`deferral.py` decides what becomes of a message that did not get its lock, and with what countdown.
`outcomes.py` does it, and logs it: deferred, skipped, failed, discarded, cancelled, or republished
because its first delivery still runs. `completion_markers.py` asks whether another delivery of the
same message runs or is done.

Not here: how a state is stored and sent (`tasks/reporting.py`), how a deferred message waits in a
worker's memory (`tasks/waiting/`), what a running body learns of its lock (`tasks/body.py`), how
the claim of a message ends that starts no run (`tasks/unique/`), how an error describes the holder
(the module `errors`), and the bounds of a countdown (`tasks/settings/`).
"""
