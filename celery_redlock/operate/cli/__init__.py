"""The command `celery redlock`: what it shows, what it does, and how that is printed.

Read `group.py` first. Commands that only read are in `inspect.py`, commands that change something
in `actions.py`, commands about settings in `config.py`. What they show, as tables and as JSON, is
in `node_views.py` and `task_views.py`; `render.py` prints it, and `live_view.py` shows `top`.

Not here: the queries to the nodes (`lock/held_locks.py`, `lock/waiting_processes.py`,
`lock/node_status.py`), and the answers of workers (`operate/control.py`).
"""

from celery_redlock.operate.cli import actions, config, inspect  # noqa: F401 - adds the commands
from celery_redlock.operate.cli.group import redlock

__all__ = ["redlock"]
