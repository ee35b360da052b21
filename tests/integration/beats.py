"""The app of the tests' workers as beats run it: each send is written down, with its process."""

from __future__ import annotations

import os
from typing import Any

from celery.signals import after_task_publish, worker_init

from celery_redlock.tasks.per_app import redlock_of
from tests.integration.app import app, write

if os.environ.get("DJANGO_SETTINGS_MODULE"):  # of `beats_site.py`, whose tables are made by a test
    import django

    django.setup()

__all__ = ["app"]


@after_task_publish.connect(weak=False)
def write_sent(sender: Any, **_: Any) -> None:
    write("sent", str(sender))


@worker_init.connect(weak=False)
def use_nodes(**_: Any) -> None:
    """Connect a worker to its nodes before it forks its beat."""
    with redlock_of(app).lock("used before the fork", wait=60):
        pass
