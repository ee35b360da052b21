"""For the people who operate workers and locks.

Read `control.py` first.

- `control.py`: `redlock_held`, `redlock_waiting`, `redlock_settings`: the remote control commands:
  a worker's locks, its waiting messages, and its settings.
- `cli/`: the command `celery redlock`.
- `drill/`: a drill: faults for worker processes of its own, for the command of that name.
- `metrics.py`: `Metrics`, `StateCollector`, `Exporter`, `ValueFactory`: serves Prometheus: counters
  by signals, gauges at a scrape; also from the files of counters that pool processes share.
- `tracing.py`: `connect_if_recording`: writes the outcome of a run's lock to the spans of
  OpenTelemetry.
- `lints.py`: `lint`, `Lint`, `refuse_errors`: finds what is wrong with the settings.
- `pass_through.py`: `changing_call`: finds a `__call__` that may change the arguments of a body.
- `start_report.py`: `report_lints`, `open_decisions`: logs the lints at a worker's start, and lists
  the decisions that the defaults leave to the user.
- `works_with.py`: `neighbours_among`, `InstalledNeighbour`: what was run beside the package, and
  which of it is installed here; the rows are in `works_with.json`.

No run of a task needs this folder: `lock/` and `tasks/` import nothing of it. Not here: checks of
single values (`tasks/settings`), and queries to the nodes (`lock/inspection.py`).
"""
