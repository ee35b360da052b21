"""The command `celery redlock`: what it shows, what it does, and how that is printed.

Read `commands.py` first: each of the commands. `group.py` has what they share: the app, deadlines
of a question to the broker, and printing. `listing.py` has the form of a list, which may lack what
nodes did not say. `views.py` has what they show, as tables and as JSON. `stranded.py` has what they
show of workers that are gone, `task_view.py` where one task stands. `top.py`, `hold.py` and
`recover.py` have one command each, `explain.py` the pages that errors and logs name.

Not here: the queries to the nodes (`lock/inspection.py`, `lock/node_status.py`), and the answers of
workers (`operate/control.py`).
"""

from celery_redlock.operate.cli import (  # noqa: F401 - adds them
    commands,
    explain,
    hold,
    recover,
    top,
)
from celery_redlock.operate.cli.group import redlock

__all__ = ["redlock"]
