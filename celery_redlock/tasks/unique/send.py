"""The steps of a unique send: claim the key, publish, confirm; or return the earlier send."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from celery.utils import uuid
from celery.utils.time import maybe_iso8601, maybe_make_aware

from celery_redlock.errors import DuplicateTask, QuorumUnreachable, SettingsError
from celery_redlock.lock.client import Redlock
from celery_redlock.lock.model.keys import name_of_all
from celery_redlock.lock.validation import check_resources
from celery_redlock.tasks.delivery.delivery import RunId, utc_now
from celery_redlock.tasks.delivery.header import HEADER
from celery_redlock.tasks.per_app import redlock_of, settings_of
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

    For processes that do not have the task, and so cannot make its key. resource: what the task's
    `lock_key` or `lock_args` gives for these arguments, such as "stock:42". Then a send by name and
    a send of the task are duplicates of each other. unique_for, unique_until, on_duplicate and
    on_unreachable: the options of these names. options: as in `app.send_task`.
    Returns an AsyncResult. Raises DuplicateTask, SettingsError and QuorumUnreachable.
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
    check_resources(level, resource)
    if given["unique_for"] is None or is_awaited(options) or app.conf.task_always_eager:
        return app.send_task(name, args, kwargs, **options)
    options["task_id"] = uuid()
    lock_options = TaskLockOptions(**{**BUILT_IN, "ttl": settings.max_ttl, **given})
    call = UniqueCall(app, name, (resource,), lock_options, options)
    return call.send(functools.partial(app.send_task, name, args, kwargs), app.AsyncResult)


@dataclass
class UniqueCall:
    """One call of `apply_async` or `send_unique` whose send is to be deduplicated.

    resources: of the task's lock. options: Celery's for this send, with its task id; they are
    changed.
    """

    app: Any
    task_name: str
    resources: tuple[str, ...]
    lock_options: TaskLockOptions
    options: dict[str, Any]

    def send(self, publish: Callable[..., T], result_of: Callable[[str], T]) -> T:
        """Return the result of `publish(**options)`, or that of the earlier send.

        result_of: returns the result of a task id. Raises DuplicateTask, and what `send_once` does.
        """

        def publish_with(token: Mapping[str, Any] | None) -> T:
            if token is not None:
                add_token(self.options, token)
            return publish(**self.options)

        sent = send_once(redlock_of(self.app), self.unique_send(), publish_with)
        if not isinstance(sent, EarlierSend):
            return sent
        if self.lock_options.on_duplicate == "fail":
            raise DuplicateTask(", ".join(self.resources), sent.task_id)
        return result_of(sent.task_id)

    def unique_send(self) -> UniqueSend:
        """Return what the claim must know of the send.

        The claim never outlasts the message: a queue may drop an expired one, and then no worker
        would release the key.
        """
        app, options, lock_options = self.app, self.options, self.lock_options
        countdown = seconds_until(app, options.get("eta") or options.get("countdown") or 0.0)
        of_task = getattr(app._tasks.get(self.task_name), "expires", None)
        expires = options.get("expires", of_task)
        unique_for = lock_options.unique_for or 0.0
        if expires is not None:
            unique_for = max(0.0, min(unique_for, seconds_until(app, expires)))
        return UniqueSend(
            name=unique_name(self.task_name, self.resources),
            run_id=str(RunId(options["task_id"], self.task_name)),
            unique_for=unique_for,
            unique_until=lock_options.unique_until,
            on_duplicate=lock_options.on_duplicate,
            on_unreachable=lock_options.on_unreachable,
            countdown=max(0.0, countdown),
            max_delay=settings_of(app).done_ttl,
        )


def seconds_until(app: Any, moment: float | str | datetime) -> float:
    """Return the seconds until a moment: a datetime, ISO 8601, or a number of seconds."""
    if isinstance(moment, (str, datetime)):
        at: datetime = maybe_make_aware(maybe_iso8601(moment), app.timezone)
        return (at - utc_now()).total_seconds()
    return float(moment)


AWAITED = ("task_id", "link", "link_error", "chord", "group_id")


def is_awaited(options: Mapping[str, Any]) -> bool:
    """Return whether something waits for this very message, so that it must be sent.

    options: of the send. A caller that chose its id may wait for it: a canvas for its members and
    their body, a task for what it has replaced itself by. A retry or a deferral is no new send.
    Source: celery.canvas freezes ids; celery.app.trace passes `chain`, empty with the last step.
    """
    if not options:
        return False
    return options.get("chain") is not None or any(map(options.get, AWAITED))


def unique_name(task_name: str, resources: tuple[str, ...]) -> str:
    """Return the name of a unique key: tasks that share a lock are not each other's duplicates.

    resources: of the task's lock.
    """
    task = task_name.replace("%", "%25").replace(":", "%3A")  # so that the first ":" parts the two
    return f"{task}:{name_of_all(resources)}"


def send_once(
    redlock: Redlock, send: UniqueSend, publish: Callable[[Mapping[str, Any] | None], T]
) -> T | EarlierSend:
    """Publish a message, or return the earlier send that it is a duplicate of.

    publish: takes the token for the message, None without a claim. If it raises, the claim is given
    up. Raises QuorumUnreachable if on_unreachable="fail", and SettingsError.
    """
    claim = UniqueClaim(redlock.session, send)
    try:
        try:
            earlier = claim.open()
        except QuorumUnreachable as error:
            if send.on_unreachable == "fail":
                raise
            _warn_unchecked(send, str(error))
            return publish(None)
        if earlier is not None:
            return earlier
        if not claim.is_open:
            why = f"no quorum of nodes agrees on an earlier send of {send.name!r}"
            _warn_unchecked(send, why)
            return publish(None)
        result = publish(claim.to_message())
    except BaseException:  # also if it was interrupted in `open`: the key must not stay claimed
        claim.give_up()
        raise
    if not claim.confirm():
        extra = {"event": "send_not_remembered", "resource": send.name}
        text = "%s was published too slowly to be remembered: a later send is no duplicate of it"
        logger.warning(text, send.run_id, extra=extra)
    return result


def _warn_unchecked(send: UniqueSend, why: str) -> None:
    extra = {"event": "sent_without_check", "resource": send.name}
    logger.warning("sending %s without deduplication: %s", send.run_id, why, extra=extra)


def add_token(options: dict[str, Any], token: Mapping[str, Any]) -> None:
    """Put the token of a claim into the headers of its send."""
    headers = options.get("headers")
    header = header_of_send(headers, options["task_id"])
    options["headers"] = {**(headers or {}), HEADER: {**header, "unique": token}}


def header_of_send(headers: Mapping[str, Any] | None, task_id: object) -> Mapping[str, Any]:
    """Return our header of a send; a new one if the caller passed on the headers of its own run."""
    header = headers.get(HEADER) if headers else None
    if not isinstance(header, Mapping) or header.get("id") != task_id:
        return {"options": {}, "id": task_id}
    return header
