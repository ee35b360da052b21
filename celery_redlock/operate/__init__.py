"""For the people who operate workers and locks.

Read `control.py` first: what a worker says of the locks that it holds and the messages that wait in
it. `cli/` is the command `celery redlock`. `metrics.py` serves Prometheus, also from the files of
counters that pool processes share; `tracing.py` writes to the spans of OpenTelemetry; `lints.py`
finds what is wrong with the settings, and `start_report.py` says it. Nothing here is needed to run
a task: the lock (`lock/`) and the tasks (`tasks/`) import nothing of it.
"""
