"""The messages that workers took without a worker lease, and which worker still has them.

Such a message does not say whose it is. So the workers are asked, and one that does not answer
may have it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from celery_redlock.operate.cli.group import format_duration
from celery_redlock.operate.cli.stranded import MOVER, MessagesLint, StrandedView, ask_broker
from celery_redlock.operate.cli.views import ask_workers
from celery_redlock.operate.lints import ADVICE, WARNING
from celery_redlock.tasks.recovery.survey import ALIVE, Survey, Unacknowledged
from celery_redlock.tasks.recovery.tags import DeliveryTag

# remote control commands that list the messages of a worker, in the order in which a message goes
# through them: one that goes on between two questions is in the later answer
TASK_QUERIES = ("scheduled", "redlock_waiting", "reserved", "active")
SETTLED = 60.0  # s after which a living worker shows a message that it took, or has ended it
MAX_READ = 10_000  # messages: the oldest ones tell enough


def ids_by_worker(app: Any) -> tuple[Mapping[str, set[str]], str]:
    """Return the task ids of the messages that each worker has, and why none could be asked."""
    ids: dict[str, set[str]] = {}
    for command in TASK_QUERIES:
        by_worker, cause = ask_workers(app, command)
        if cause:
            return {}, cause
        for worker, rows in by_worker.items():
            ids.setdefault(worker, set()).update(_ids_in(rows))
    return ids, ""


def _ids_in(rows: Any) -> list[str]:
    """Return the ids of the tasks in a worker's answer; none if the answer is an error."""
    tasks = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    scheduled = [row["request"] for row in tasks if isinstance(row.get("request"), dict)]
    return [str(row.get("id") or row.get("task_id") or "") for row in (*tasks, *scheduled)]


def lint_of_taken(app: Any, view: StrandedView) -> MessagesLint | None:
    """Return a lint of the messages without a worker lease that no worker that answers has.

    It is only advice if a worker with a lease does not answer: they may be its messages.
    """
    if not view.is_possible or view.cause:
        return None
    found, _ = ask_broker(app, _taken_without_lease)
    by_worker, cause = ids_by_worker(app) if found else ({}, "")
    if not found or cause:
        return None
    owned = {task_id for ids in by_worker.values() for task_id in ids}
    messages = [message for message in found if message.task_id not in owned]
    times, _ = ask_broker(app, lambda survey: survey.taken([one.tag for one in messages]))
    messages = [one for one in messages if times and times.get(one.tag) == one.taken]
    if not messages:
        return None
    silent = [one for one in view.leases if one.state == ALIVE and one.worker not in by_worker]
    ages = [message.taken_for for message in messages]
    hint = (
        f"taken up to {format_duration(max(ages))} ago, and no worker that answers has them: if "
        f"theirs is gone, they are back {view.after_visibility(min(ages))}, or {MOVER} moves them"
    )
    level = ADVICE if silent else WARNING
    return MessagesLint(level, "messages without a worker lease", str(len(messages)), hint)


def _taken_without_lease(survey: Survey) -> list[Unacknowledged]:
    """Return the tasks' messages that name no worker lease and should have been seen by now.

    Without those that may wait for Celery's rate limit: no answer of a worker shows these.
    """
    tasks = survey.app.tasks
    return [
        replace(message, entry="")
        for message in itertools.islice(survey.older_than(SETTLED), MAX_READ)
        if message.task and DeliveryTag.of(message.tag) is None
        if getattr(tasks.get(message.task), "rate_limit", None) is None
    ]
