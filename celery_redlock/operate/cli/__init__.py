"""The command `celery redlock`: what it shows, what it does, and how that is printed.

Read `commands.py` first.

- `commands.py`: `status`, `locks`, `break_`, `options`: each of the commands that read, change
  something or show settings; also `waiters`, `claims`, `trust`, `setup`.
- `doctor.py`: `doctor`, `Examination`: checks nodes, rights and settings, and lists neighbours.
- `drill.py`: `drill`: runs workers of its own on the app's nodes and broker, with faults.
- `group.py`: `RedlockGroup`, `Table`, `app_from`, `within_deadline`: what the commands share: the
  app, deadlines of a question to the broker, printing as text or JSON (`as_data`).
- `listing.py`: `Listing`, `list_command`: the output of a command that lists; a list is incomplete
  if nodes did not answer.
- `views.py`: `WaitersView`, `node_table`, `lock_tables`, `ask_workers`: what the commands show of
  nodes, locks and waiters, as tables and as JSON.
- `show.py`: `show`, `TaskView`: the state of one resource, or of one task by its id.
- `stranded.py`: `StrandedView`, `RecoveryTime`: the messages of workers that are gone, and when
  they are back in their queues.
- `taken.py`: `lint_of_taken`, `ids_by_worker`: the messages without a worker lease, and which
  worker has them.
- `top.py`: `top`, `Snapshot`: the live screen of nodes, locks and waiting tasks.
- `hold.py`: `hold`, `ResourceHold`: an operator holds a resource: its tasks wait, and it is drained
  once no run is left.
- `recover.py`: `recover`, `recover_dead`, `Older`: moves the messages of dead workers back to their
  queues.
- `uninstall.py`: `uninstall`, `Remains`: removes what the package leaves on nodes and broker, once
  nobody uses it.
- `explain.py`: `explain`, `find_passage`, `Passage`: prints the passage of the documentation that
  an error or a log line names.

Not here: the queries to the nodes (`lock/inspection.py`, `lock/node_status.py`), and the answers of
workers (`operate/control.py`).
"""

from celery_redlock.operate.cli import (  # noqa: F401 - adds them
    commands,
    doctor,
    drill,
    explain,
    hold,
    recover,
    show,
    top,
    uninstall,
)
from celery_redlock.operate.cli.group import redlock

__all__ = ["redlock"]
