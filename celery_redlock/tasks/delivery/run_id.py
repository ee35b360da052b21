"""The id of a run."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote

from celery_redlock.tasks.delivery.route import QUEUE

_OF_A_COPY = re.compile(r"(.*:[0-9]+:[0-9]+)@[^@\s]+", re.DOTALL)


def name_of_run(task: Any, request: Any) -> str:
    """Return the name of a run: a retry is another one, and so is what a task is replaced by.

    And so is each copy of a message that an exchange may have given to several queues.
    """
    nesting = request.replaced_task_nesting or 0
    name = f"{request.id}:{task.name}:{request.retries}:{nesting}"
    if not (request.delivery_info or {}).get("exchange"):
        return name  # of a message to one queue
    queue = (request.get("properties") or {}).get(QUEUE)
    return name if queue is None else f"{name}@{quote(queue, safe='')}"


def name_of_all_copies(run: str) -> str:
    """Return the name of a run without its queue, as a sender knows it."""
    found = _OF_A_COPY.fullmatch(run)
    return run if found is None else found[1]
