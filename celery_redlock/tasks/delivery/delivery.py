"""One delivery of a message: facts and questions."""

from __future__ import annotations

import math
from datetime import datetime, timezone
from typing import Any

from celery.app.task import Context
from celery.utils.time import maybe_iso8601, maybe_make_aware

from celery_redlock.tasks.delivery.header import LockHeader
from celery_redlock.tasks.delivery.route import CAME_BACK, QUEUE, Route

ARGUMENTS = "_redlock_arguments"  # the name on the request under which they stand as they came
NESTED = "redlock_nested"  # the property of a delivery that has a header called "headers"
RECEIVED = "redlock_received"  # the property of a delivery, never of a message, that says when
_ON_REQUEST = "_redlock_"  # what names of ours on a request begin with
_DEATHS = ("x-death", "x-first-death-", "x-last-death-")  # headers; Source: RabbitMQ, "DLX"


def expires_in(task: Any, request: Any) -> float:
    """Return the s until a message's `expires`, below 0 after it; inf where it has none.

    Source: celery.worker.request.Request.
    """
    if not request.expires:
        return math.inf
    at: datetime = maybe_make_aware(maybe_iso8601(request.expires), task.app.conf.timezone)
    return (at - utc_now()).total_seconds()


def utc_now() -> datetime:
    """Return the wall clock's time in UTC."""
    return datetime.now(timezone.utc)


def route_of(request: Any, slip: LockHeader) -> Route:
    """Return where a run's message came from."""
    queue = (request.get("properties") or {}).get(QUEUE)
    return Route.of(request.delivery_info, slip.exchange, queue)


def is_for_another_queue(request: Any, slip: LockHeader) -> bool:
    """Tell whether RabbitMQ brought a copy of a deferral to another queue than it was meant for.

    It goes by the topic, for whatever is bound to it; each queue that has a run of this message
    puts its own copy back.
    """
    if (request.delivery_info or {}).get("exchange") != CAME_BACK or slip.queue is None:
        return False
    return bool((request.get("properties") or {}).get(QUEUE, slip.queue) != slip.queue)


def own_headers(request: Any) -> dict[str, Any]:
    """Return the headers of a user's own that a message came with.

    Source: celery.app.task.Context takes a header called "headers" for all of them.
    """
    headers = request.headers or {}
    if (request.get("properties") or {}).get(NESTED):
        rest = {name: value for name, value in request.__dict__.items() if name != "headers"}
        headers = {**(Context(rest).headers or {}), "headers": headers}
    return {
        name: value
        for name, value in headers.items()
        if not name.startswith((*_DEATHS, _ON_REQUEST))
    }


def note_receipt(request: Any = None, **_: Any) -> None:
    """Hand on to the run what only the main process knows: when it came, and its content type.

    Most brokers' properties leave that out.
    Source: celery.worker.strategy sends this in the worker's main process, before the pool has it.
    """
    came = {RECEIVED: max(utc_now(), request.eta or utc_now()).timestamp()}
    if request.content_type is not None:
        came["content_type"] = request.content_type
    properties = request.request_dict["properties"]
    request.request_dict["properties"] = {**properties, **came}


def keep_arguments(task: Any = None, args: Any = None, kwargs: Any = None, **_: Any) -> None:
    """Keep a run's arguments as they came, for a deferral.

    Source: celery.app.trace hands the very same mapping to receivers, to `before_start` and to the
    body, and the usual idiom is to take from it what is not the body's.
    """
    task.request.__dict__[ARGUMENTS] = tuple(args), dict(kwargs)


def received_at(request: Any) -> float | None:
    """Return the s since 1970 at which a run's message could have begun here; None: nobody knows.

    That is when the worker got it, or its countdown was over.
    """
    at = (request.get("properties") or {}).get(RECEIVED)
    return at if isinstance(at, float) else None
