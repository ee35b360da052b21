"""The id of a run: one spelling for the lock's holder, the completion marker and the journal."""

from __future__ import annotations

import re
from typing import Any, NamedTuple
from urllib.parse import quote

from celery_redlock.tasks.delivery.route import QUEUE

_TEXT = re.compile(
    r"(?P<task_id>.+):(?P<name>[^:\s]+):(?P<retries>\d+):(?P<nesting>\d+)(?:\+(?P<life>\d+))?(?:@(?P<queue>[^@\s]+))?",
    re.DOTALL,
)


class RunId(NamedTuple):
    """What tells one run from all others.

    A retry is another run than the one before, and so is what a task is replaced by. Each copy of a
    message that an exchange may have given to several queues is a run of its own, too.
    nesting: how often the task was replaced. queue: of a copy, quoted; "" for a message to one
    queue.
    """

    task_id: str
    name: str
    retries: int = 0
    nesting: int = 0
    queue: str = ""
    life: int = 0

    @classmethod
    def of(cls, name: str, request: Any, life: int = 0) -> RunId:
        """Return the id of a task's run. name: the task's; request: Celery's `Context`.

        life: as of `LockHeader`.
        """
        queue = ""
        if (request.delivery_info or {}).get("exchange"):
            queue = quote((request.properties or {}).get(QUEUE) or "", safe="")
        return cls(
            request.id, name, request.retries, request.replaced_task_nesting or 0, queue, life
        )

    @classmethod
    def parse(cls, text: str) -> RunId | None:
        """Return the inverse of `str`; None for a text that names no run."""
        found = _TEXT.fullmatch(text)
        if found is None:
            return None
        retries, nesting = int(found["retries"]), int(found["nesting"])
        queue, life = found["queue"] or "", int(found["life"] or 0)
        return cls(found["task_id"], found["name"], retries, nesting, queue, life)

    def __str__(self) -> str:
        text = f"{self.task_id}:{self.name}:{self.retries}:{self.nesting}"
        text = f"{text}+{self.life}" if self.life else text
        return f"{text}@{self.queue}" if self.queue else text

    @property
    def of_all_copies(self) -> RunId:
        """The id without its queue and its life, as the sender of the message knows it."""
        return RunId(self.task_id, self.name, self.retries, self.nesting)

    def label(self, hostname: str | None) -> str:
        """Return what the nodes show of the lock's holder: the run, and the worker's name."""
        return f"{self} {hostname}"
