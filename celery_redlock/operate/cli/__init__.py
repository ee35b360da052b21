"""The command `celery redlock`: what it shows, what it does, and how that is written.

Read `group.py` first. Commands that only look are in `inspect.py`, commands that change something
in `actions.py`, commands about settings in `config.py`; `render.py` makes tables and JSON of what
they found. What is asked of the nodes is below, in `lock/held_locks.py` and `lock/node_status.py`.
"""

from celery_redlock.operate.cli import actions, config, inspect  # noqa: F401 - adds the commands
from celery_redlock.operate.cli.group import redlock

__all__ = ["redlock"]
