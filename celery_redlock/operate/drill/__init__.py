"""A drill: faults for worker processes of its own, on the nodes and the broker of an app.

Read `drill.py` first.

- `drill.py`: `Drill`, `DrillReport`: from the begin to the end: it sends, brings the faults, reads
  the journal, and removes its keys.
- `schedule.py`: `plan_faults`, `Fault`: which faults come when, decided by a seed.
- `audit.py`: `audit`, `Audit`, `DrillRun`, `JournalLine`: what the journal proves.
- `crew.py`: `DrillWorker`: a worker process, which is stopped, killed and started again.
- `worker.py`: `isolate`, `WorkerOrder`: the program of that process: the app, set to a queue of the
  drill's own.
- `body.py`: `add_task`, `hold_for`, `cut_connections`: the task, and what cuts connections.
- `own_queue.py`: `OwnQueue`, `BrokerError`: the queue and its keys on the broker.
- `removal.py`: `remove_drill`, `keys_of`: what is removed at its end, or later.
- `reaper.py`: `watch_group`, `forget_group`, `reap`: kills process groups if their starter dies.

Not here: the command (`operate/cli/drill.py`). Nothing of this is imported but by that command.
"""
