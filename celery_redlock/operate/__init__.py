"""For the people who operate workers and locks.

Read `control.py` first.

- `control.py`: `redlock_held`, `redlock_waiting`, `redlock_settings`: the remote control commands:
  what a worker says of the locks that it holds, the messages that wait in it, and its settings.
- `cli/`: the command `celery redlock`.
- `metrics.py`: `Metrics`, `StateCollector`, `Exporter`, `ValueFactory`: serves Prometheus: counters
  by signals, gauges at a scrape; also from the files of counters that pool processes share.
- `tracing.py`: `connect_if_recording`: writes the outcome of a run's lock to the spans of
  OpenTelemetry.
- `lints.py`: `lint`, `Lint`, `refuse_errors`: finds what is wrong with the settings.
- `start_report.py`: `report_lints`, `left_open`: logs the lints at a worker's start, and says what
  the defaults leave to decide.

Nothing here is needed to run a task: the lock (`lock/`) and the tasks (`tasks/`) import nothing of
it. Not here: checks of single values (`tasks/settings`), and queries to the nodes
(`lock/inspection.py`).
"""
