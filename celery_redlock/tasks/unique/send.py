"""Deduplication when sending: the first send makes a claim, and a second one is a duplicate."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, TypeVar

from celery.utils import uuid
from celery.utils.time import maybe_iso8601, maybe_make_aware

from celery_redlock.errors import DuplicateTask, QuorumUnreachable, SettingsError
from celery_redlock.lock.client import Redlock
from celery_redlock.lock.model.keys import name_of_all
from celery_redlock.tasks.delivery.delivery import utc_now
from celery_redlock.tasks.delivery.header import HEADER
from celery_redlock.tasks.per_app import redlock_of, settings_of
from celery_redlock.tasks.settings.app import AppSettings
from celery_redlock.tasks.settings.levels import check_options
from celery_redlock.tasks.settings.options import BUILT_IN, TaskLockOptions
from celery_redlock.tasks.settings.sources import OptionSource
from celery_redlock.tasks.unique.claim import UniqueClaim, UniqueSend
from celery_redlock.tasks.unique.rounds import EarlierSend

logger = logging.getLogger(__name__)
T = TypeVar("T")


def send_unique(
    app: Any, name: str, args: Any = None, kwargs: Any = None, *, resource: str,
    unique_for: float, unique_until: str = "finished", on_duplicate: str = "existing",
    on_unreachable: str = "defer", **options: Any,
) -> Any:  # fmt: skip
    """Send a task by its name, as `app.send_task` does, unless it is a duplicate.

    For processes that do not have the task, and so cannot make its key. resource: what its
    `lock_key` or `lock_args` gives for these arguments, as "stock:42"; then sends by class and by
    name are each other's duplicates. The rest as the options of these names, and of `send_task`.
    Returns an AsyncResult. Raises DuplicateTask, SettingsError, QuorumUnreachable.
    """
    given = {
        "unique_for": unique_for,
        "unique_until": unique_until,
        "on_duplicate": on_duplicate,
        "on_unreachable": on_unreachable,
    }
    settings, level = settings_of(app), "send_unique"
    given = check_options(given, settings, lambda option: OptionSource(level, option), travels=True)
    if not isinstance(resource, str) or not resource:
        raise SettingsError(level, "resource", repr(resource), "must be a text, not empty")
    if given["unique_for"] is None or is_awaited(options) or app.conf.task_always_eager:
        return app.send_task(name, args, kwargs, **options)
    options["task_id"] = uuid()
    rules = TaskLockOptions(**{**BUILT_IN, "ttl": settings.max_ttl, **given})
    send = send_of(app, name, (resource,), options, rules, settings)
    sent = publish_once(app, send, options, functools.partial(app.send_task, name, args, kwargs))
    return app.AsyncResult(told(sent, rules, (resource,))) if type(sent) is EarlierSend else sent


def send_of(
    app: Any,
    name: str,
    resources: tuple[str, ...],
    options: Mapping[str, Any],
    rules: TaskLockOptions,
    settings: AppSettings,
) -> UniqueSend:
    """Return what is known of a send that is to be deduplicated.

    options: Celery's, with its id. The window is never longer than the message is good: one that
    expired in its queue may be dropped there, and no worker would end its window.
    """
    later = seconds_until(app, options.get("eta") or options.get("countdown") or 0.0)
    of_task = getattr(app._tasks.get(name), "expires", None)
    expires = options.get("expires", of_task)
    window = rules.unique_for or 0.0
    if expires is not None:
        window = max(0.0, min(window, seconds_until(app, expires)))
    return UniqueSend(
        name=name_of(name, resources),
        task_id=options["task_id"],
        run=f"{options['task_id']}:{name}:0:0",
        window=window,
        until=rules.unique_until,
        on_duplicate=rules.on_duplicate,
        on_unreachable=rules.on_unreachable,
        later=max(0.0, later),
        lateness=settings.done_ttl,
    )


def seconds_until(app: Any, moment: float | str | datetime) -> float:
    """Return the s until a moment, which Celery takes as such, as ISO 8601, or as these s."""
    if isinstance(moment, (str, datetime)):
        at: datetime = maybe_make_aware(maybe_iso8601(moment), app.timezone)
        return (at - utc_now()).total_seconds()
    return float(moment)


def publish_once(
    app: Any, send: UniqueSend, options: dict[str, Any], plain: Callable[..., Any]
) -> Any:
    """Return what `plain` gives, called with the options, or the earlier send that it repeats."""

    def publish(ticket: Mapping[str, Any] | None) -> Any:
        if ticket is not None:
            put_ticket(options, ticket)
        return plain(**options)

    return send_once(redlock_of(app), send, publish)


def told(earlier: EarlierSend, rules: TaskLockOptions, resources: tuple[str, ...]) -> str:
    """Return the id of the earlier send; raises DuplicateTask where that is asked for."""
    if rules.on_duplicate == "fail":
        raise DuplicateTask(", ".join(resources), earlier.task_id)
    return earlier.task_id


AWAITED = ("task_id", "link", "link_error", "chord", "group_id")


def is_awaited(options: Mapping[str, Any]) -> bool:
    """Tell whether something waits for this very message, so that it must be sent.

    options: of the send. Who chose its id may wait for it: a canvas for its members and their
    body, a caller for what it has replaced itself by; and a retry or a deferral is no new send.
    Source: celery.canvas freezes ids; celery.app.trace passes `chain`, empty with the last step.
    """
    if not options:
        return False
    return options.get("chain") is not None or any(map(options.get, AWAITED))


def name_of(task_name: str, resources: tuple[str, ...]) -> str:
    """Return what of a task is sent once: tasks that share a lock are not each other's duplicates.

    resources: those of its lock.
    """
    task = task_name.replace("%", "%25").replace(":", "%3A")  # so that the first ":" parts the two
    return f"{task}:{name_of_all(resources)}"


def send_once(
    redlock: Redlock, send: UniqueSend, publish: Callable[[Mapping[str, Any] | None], T]
) -> T | EarlierSend:
    """Publish a message unless it is a duplicate; returns the earlier send where it is one.

    publish: takes what the message is to carry of its window, None where it has none. What it
    raises ends the window. Raises QuorumUnreachable where on_unreachable="fail", SettingsError.
    """
    window = UniqueClaim(redlock.session, send)
    try:
        try:
            earlier = window.open()
        except QuorumUnreachable as error:
            if send.on_unreachable == "fail":
                raise
            told = {"event": "sent_without_check", "resource": send.name}
            logger.warning("sending %s without deduplication: %s", send.run, error, extra=told)
            return publish(None)
        if earlier is not None:
            return earlier
        if not window.is_open:
            logger.warning(
                "sending %s without deduplication: no quorum of nodes agrees on an earlier send "
                "of %r", send.run, send.name,
                extra={"event": "sent_without_check", "resource": send.name},
            )  # fmt: skip
            return publish(None)
        result = publish(window.to_message())
    except BaseException:
        window.give_up()
        raise
    window.confirm()
    return result


def put_ticket(options: dict[str, Any], ticket: Mapping[str, Any]) -> None:
    """Put what a message carries of its window into the headers of its send."""
    headers, task_id = options.get("headers"), options["task_id"]
    slip = headers.get(HEADER) if headers else None
    if slip is None or not isinstance(slip, Mapping) or slip.get("id") != task_id:  # a parent's
        slip = {"options": {}, "id": task_id}
    options["headers"] = {**(headers or {}), HEADER: {**slip, "unique": ticket}}
