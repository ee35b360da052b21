"""The plugin's tasks. Celery finds them, as the plugin is in INSTALLED_APPS."""

from __future__ import annotations

from typing import Any

from celery import shared_task

from neighbours.story_tasks import LATE, body


@shared_task(name="story.work", bind=True, **LATE)
def work(task: Any, key: str, until: str = "") -> str:
    return body(task.request.id, key, until)


@shared_task(name="story.once", bind=True, **LATE)
def once(task: Any, key: str, until: str = "") -> str:
    return body(task.request.id, key, until)
