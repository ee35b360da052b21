"""Puts the lock options of a call, and the token of a unique send, into the message.

Not here: how a unique send claims its key (`claim.py`).
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any, TypeVar, cast
from uuid import uuid4

from celery import current_task
from celery._state import _get_active_apps

from celery_redlock import signals
from celery_redlock.errors import DuplicateTask, SettingsError
from celery_redlock.label import RunId
from celery_redlock.lock.model.keys import name_of_all
from celery_redlock.lock.validation import check_resources, check_text
from celery_redlock.tasks.delivery.delivery import moment_of, utc_now
from celery_redlock.tasks.delivery.header import HEADER, hop_of, new_header
from celery_redlock.tasks.per_app import redlock_as_set, settings_of
from celery_redlock.tasks.settings.app import OptionSource, pattern_for
from celery_redlock.tasks.settings.levels import (
    DEFAULT_VISIBILITY_TIMEOUT,
    check_options,
    check_together,
    visibility_timeout,
)
from celery_redlock.tasks.settings.options import (
    BUILT_IN,
    NEWEST,
    UNIQUE_BY,
    Backoff,
    TaskLockOptions,
)
from celery_redlock.tasks.unique.claim import Claim, ClaimToken
from celery_redlock.tasks.unique.rounds import EarlierSend
from celery_redlock_entry import without_proxy

logger = logging.getLogger(__name__)
T = TypeVar("T")
# the ids of the messages that this thread or greenlet publishes for a claim; None without one
_published: ContextVar[list[object] | None] = ContextVar("published", default=None)
_checked_task_names: set[Any] = set()  # names of tasks that this process has sent
AWAITED_OPTIONS = ("task_id", "link", "link_error", "chord", "group_id")


def send_unique(
    app: Any, name: str, args: Any = None, kwargs: Any = None, *, resource: str,
    unique_for: float | None = None, unique_until: str = "finished",
    on_duplicate: str = "existing", debounce: float | None = None,
    debounce_max: float | None = None, on_unreachable: str = "defer", **options: Any,
) -> Any:  # fmt: skip
    """Send a task by its name, as `app.send_task` does, unless it is a duplicate.

    For processes that do not have the task, and so cannot make its key. One of unique_for and
    debounce is needed. resource: what the task's `lock_key` or `lock_args` gives for these
    arguments, such as "stock:42". Then a send by name and a send of the task are duplicates of each
    other. unique_for, unique_until, on_duplicate, debounce, debounce_max, on_unreachable: the
    options of these names. options: as in `app.send_task`.
    Returns an AsyncResult, whose `is_duplicate` is True if it is that of an earlier send. Raises
    DuplicateTask, SettingsError and QuorumUnreachable.
    """
    unique_options = {
        "unique_for": unique_for,
        "unique_until": unique_until,
        "on_duplicate": on_duplicate,
        "debounce": debounce,
        "debounce_max": debounce_max,
        "on_unreachable": on_unreachable,
    }
    app = without_proxy(app)
    settings = settings_of(app)
    level = "send_unique"
    unique_options = check_options(
        unique_options, settings, lambda option: OptionSource(level, option), travels=True
    )
    check_together(level, unique_options)
    check_resources(level, check_text(level, "resource", resource))
    if unique_for is None and debounce is None:
        hint = "set unique_for or debounce: without them each call is sent; then use app.send_task"
        raise SettingsError(level, "unique_for", "None", hint)
    add_is_duplicate(app)
    publish = functools.partial(app.send_task, name, args, kwargs)
    lock_options = TaskLockOptions(**{**BUILT_IN, "ttl": settings.max_ttl, **unique_options})
    if not lock_options.is_unique or is_awaited(options) or app.conf.task_always_eager:
        return publish(**options)
    check_timing(app, name, options, lock_options)
    options["task_id"] = str(uuid4())
    return send_claimed(
        app, name, (resource,), lock_options, options, publish=publish, result_of=app.AsyncResult
    )


def send_claimed(
    app: Any, task_name: str, resources: tuple[str, ...], lock_options: TaskLockOptions,
    options: dict[str, Any], *, publish: Callable[..., T], result_of: Callable[[str], T],
) -> T:  # fmt: skip
    """Return the result of `publish(**options)`, or that of the earlier send.

    resources: of the task's lock. options: Celery's for this send, with its task id; they are
    changed. result_of: returns the result of a task id. Raises DuplicateTask, and what `Claim.send`
    does. The claim never outlasts the message: a queue may drop an expired one, and then no worker
    would release the key.
    """
    _, expires_in = _expiry(app, task_name, options)
    debounce = lock_options.debounce
    cap = settings_of(app).countdown_cap
    name = unique_name(task_name, resources)
    run_id = RunId(options["task_id"], task_name)
    late_delivery = 0.0
    if debounce is not None or lock_options.on_duplicate == NEWEST:  # the others do not use it
        late_delivery = max(DEFAULT_VISIBILITY_TIMEOUT, visibility_timeout(app.conf) or 0.0)
    redlock = redlock_as_set(app)  # kept until the end: an app may leave its own meanwhile
    unique_for = min(lock_options.unique_for or 0.0, expires_in)
    claim = Claim(redlock.session, name, run_id, lock_options, unique_for, late_delivery)

    def publish_with(token: ClaimToken | None) -> T:
        if debounce is not None:
            options["countdown"] = hop_of(claim.duration, cap)
            deferral = {"at": redlock.session.guard.wall(), "countdown": claim.duration}
            add_to_header(options, deferral=deferral)
        if token is not None:
            add_to_header(options, unique=token.to_message())
        published: list[object] = []
        context_token = _published.set(published)
        try:
            result = publish(**options)
        finally:
            _published.reset(context_token)
        if options["task_id"] not in published:
            raise _NotPublishedError(result)
        return result

    try:
        outcome = claim.send(publish_with)
    except _NotPublishedError as unpublished:
        warn_unchecked(task_name, "send_task returned before it was published", run_id.task_id)
        return cast("T", unpublished.result)
    resource = ", ".join(resources)
    if isinstance(outcome, EarlierSend):
        _report_deduplicated(app, resource, task_name, outcome.task_id, "dropped")
        return _duplicate_of(outcome, resource, task_name, lock_options.on_duplicate, result_of)
    if claim.replaced_id:
        how = "replaced" if debounce is None else "debounced"
        _report_deduplicated(app, resource, task_name, claim.replaced_id, how)
    return outcome


def _report_deduplicated(
    app: Any, resource: str, task_name: str, earlier_id: str, how: str
) -> None:
    event = signals.SendDeduplicatedEvent(resource, task_name, earlier_id, how)
    signals.send_deduplicated.send(app._tasks.get(task_name), event=event)


def _duplicate_of(
    earlier: EarlierSend, resource: str, task_name: str, on_duplicate: str,
    result_of: Callable[[str], T],
) -> T:  # fmt: skip
    """Return the result of an earlier send; raise DuplicateTask if on_duplicate="fail"."""
    _warn_of_own_duplicate(task_name, earlier.task_id)
    if on_duplicate == "fail":
        ends = earlier.expires_in if math.isfinite(earlier.expires_in) else None
        raise DuplicateTask(resource, earlier.task_id, ends)
    return _mark_duplicate(result_of(earlier.task_id))


class _NotPublishedError(Exception):
    """A send returned without a message. result: what it returned."""

    def __init__(self, result: object) -> None:
        super().__init__(result)
        self.result = result


def warn_unchecked(task_name: str, reason: str, task_id: str = "") -> None:
    """Log that a send is not deduplicated."""
    label = f"{task_name}[{task_id}]" if task_id else task_name
    extra = {"event": "sent_without_check", "task": task_name}
    logger.warning("sending %s without deduplication: %s", label, reason, extra=extra)


def _warn_if_not_adopted(task_name: str) -> None:
    """Log that a task is not deduplicated, as its app has not looked at `redlock_tasks` yet.

    Only workers and Celery's commands finalize an app by themselves.
    """
    for app in list(_get_active_apps()):
        if app.finalized or not app.configured or task_name not in app._tasks:
            continue
        entries = app.conf.get("redlock_tasks")
        pattern = pattern_for(task_name, entries) if isinstance(entries, Mapping) else None
        if pattern is None or not isinstance(entries[pattern], Mapping):
            continue
        options = {name: app.conf.get(f"redlock_{name}") for name in UNIQUE_BY} | entries[pattern]
        if any(map(options.get, UNIQUE_BY)):
            reason = "redlock_tasks waits for app.finalize(): call it once at the start"
            warn_unchecked(task_name, reason)


def _warn_of_own_duplicate(task_name: str, earlier: str) -> None:
    """Log that a run's send is dropped as a duplicate of that very run."""
    if current_task and current_task.request.id == earlier:
        extra = {"event": "duplicate_of_own_run", "task": task_name}
        logger.warning(
            "%s[%s] sends itself from its own run, which is a duplicate of that run: set "
            "unique_until='started'",
            task_name, earlier, extra=extra,
        )  # fmt: skip


def _expiry(app: Any, task_name: str, options: Mapping[str, Any]) -> tuple[object, float]:
    """Return when a send's message expires, and the seconds until then."""
    expires = options.get("expires", getattr(app._tasks.get(task_name), "expires", None))
    return expires, math.inf if expires is None else max(0.0, seconds_until(app, expires))


def check_timing(
    app: Any, task_name: str, options: Mapping[str, Any], lock_options: TaskLockOptions
) -> None:
    """Raise SettingsError for times of a send that contradict its debounce, or its order."""
    debounce = lock_options.debounce
    if debounce is not None:
        hint = (
            "the option debounce says when the run starts: leave this out, or set the seconds "
            'of this call by lock={"debounce": ...}; lock={"debounce": None} is a plain send'
        )
    elif lock_options.on_duplicate == NEWEST:
        hint = (
            'cannot be combined with on_duplicate="newest", whose message takes the place of the '
            'queued one: leave this out; lock={"unique_for": None, "on_duplicate": "existing"} is '
            "a plain send"
        )
    else:
        return
    for name in ("countdown", "eta"):
        if options.get(name) is not None:
            raise SettingsError("call", name, repr(options[name]), hint)
    expires, expires_in = _expiry(app, task_name, options)
    if debounce is not None and expires_in <= debounce:
        hint = f"ends the message before its run is due: must be later than debounce={debounce:g} s"
        raise SettingsError("call", "expires", repr(expires), hint)


def add_is_duplicate(app: Any) -> None:
    """Let each result of an app have `is_duplicate`: whether its send was a duplicate."""
    results = app.AsyncResult  # Source: celery.app.base: a class of this app alone
    if hasattr(results, "is_duplicate"):
        return
    reduce = results.__reduce__

    def reduce_result(result: Any) -> Any:
        return (_unpickle_duplicate, reduce(result)) if result.is_duplicate else reduce(result)

    results.is_duplicate = False
    results.__reduce__ = reduce_result


def _unpickle_duplicate(make: Callable[..., T], args: tuple[Any, ...]) -> T:
    return _mark_duplicate(make(*args))


def _mark_duplicate(result: T) -> T:
    marked: Any = result
    marked.is_duplicate = True
    return result


def seconds_until(app: Any, moment: float | str | datetime) -> float:
    """Return the seconds until a moment: a datetime, ISO 8601, or a number of seconds."""
    if isinstance(moment, (str, datetime)):
        return (moment_of(moment) - utc_now()).total_seconds()
    return float(moment)


def is_awaited(options: Mapping[str, Any]) -> bool:
    """Return whether something waits for this very message, so that it must be sent.

    options: of the send. A caller that chose its id may wait for it: a canvas for its members and
    their body, a task for what it has replaced itself by. A retry or a deferral is no new send.
    Source: celery.canvas freezes ids; celery.app.trace passes `chain`, empty with the last step.
    """
    if not options:
        return False
    return options.get("chain") is not None or any(map(options.get, AWAITED_OPTIONS))


def unique_name(task_name: str, resources: tuple[str, ...]) -> str:
    """Return the name of a unique key: tasks that share a lock are not each other's duplicates."""
    task = task_name.replace("%", "%25").replace(":", "%3A")  # so that the first ":" parts the two
    return f"{task}:{name_of_all(resources)}"


def add_to_header(options: dict[str, Any], **parts: Mapping[str, Any]) -> None:
    """Add parts to our header of a send. options: Celery's, with its task id."""
    headers = options.get("headers") or {}
    header = {**header_of_send(headers, options["task_id"]), **parts}
    options["headers"] = {**headers, HEADER: header}


def header_of_send(headers: Mapping[str, Any] | None, task_id: object) -> Mapping[str, Any]:
    """Return our header of a send; a new one if the caller passed on the headers of its own run."""
    header = headers.get(HEADER) if headers else None
    if not isinstance(header, Mapping) or header.get("id") != task_id:
        return new_header({}, task_id)
    return header


def options_to_message(call_options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a call as values that any serializer takes."""
    return {
        name: value.to_message() if isinstance(value, Backoff) else value
        for name, value in call_options.items()
    }


def carry_options(
    sender: Any = None, body: Any = None, headers: Any = None, properties: Any = None, **_: Any
) -> None:
    """Put the `lock=` of a send by name into its headers, and prepare that of embedded signatures.

    Source: celery.app.amqp sends this before the message is serialized. An option of `send_task`
    that Celery does not know is a property by then, which AMQP brokers drop in silence. Celery
    swallows what is raised here, so a wrong option is refused by the run.
    """
    if sender not in _checked_task_names:
        _checked_task_names.add(sender)
        _warn_if_not_adopted(sender)
    published = _published.get()
    if published is not None:
        published.append(headers.get("id") if isinstance(body, tuple) else body.get("id"))
    if properties and "lock" in properties:
        _put_options(sender, properties.pop("lock"), headers)
    args, embedded = (body[0], body[2]) if isinstance(body, tuple) else (body.get("args"), body)
    for name in ("callbacks", "errbacks", "chain", "chord"):
        signatures = embedded.get(name)
        if signatures:
            _prepare_signatures(signatures)
    for value in args or ():
        if isinstance(value, (list, tuple, Mapping)):
            _prepare_signatures(value)


def _put_options(name: str, call_options: Any, headers: dict[str, Any]) -> None:
    if not isinstance(call_options, Mapping):  # no option has the name "lock": the run refuses it
        call_options = {"lock": repr(call_options)}
    if any(call_options.get(option) is not None for option in UNIQUE_BY):
        logger.warning(
            "sending %s without deduplication: a call by name has no key; use send_unique",
            name, extra={"event": "sent_without_check", "task": name},
        )  # fmt: skip
    header = header_of_send(headers, headers.get("id"))
    headers[HEADER] = {**header, "options": options_to_message(call_options)}


def _prepare_signatures(value: Any) -> None:
    """Make the lock options of a signature, or of those in a list, ready for their message."""
    if isinstance(value, (list, tuple)):
        if value and isinstance(value[0], (list, tuple, Mapping)):  # else it may be long: one look
            for item in value:
                _prepare_signatures(item)
        return
    if not isinstance(value, Mapping) or not isinstance(value.get("options"), Mapping):
        return
    options = value["options"]
    call_options = value["options"].get("lock")
    if isinstance(call_options, Mapping):
        options["lock"] = options_to_message(call_options)
    members = value.get("kwargs") if value.get("subtask_type") else None
    for part in (*options.values(), *(members or {}).values(), *(value.get("args") or ())):
        _prepare_signatures(part)
