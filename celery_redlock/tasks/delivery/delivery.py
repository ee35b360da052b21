"""One delivery of a message, in any process: what is known of it, and the questions it answers."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any, NamedTuple
from urllib.parse import quote

from celery.app.task import Context
from celery.utils.time import maybe_iso8601, maybe_make_aware

from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.tasks.delivery.header import DEATHS, LockHeader
from celery_redlock.tasks.delivery.route import (
    CAME_BACK,
    QUEUE,
    Route,
    has_way_back,
    queue_of,
)
from celery_redlock.tasks.reporting import StateReporter

ARGUMENTS = "_redlock_arguments"  # the name on the request of the arguments as they came
NESTED = "redlock_nested"  # the property of a delivery that has a header called "headers"
RECEIVED = "redlock_received"  # the property of a delivery, never of a message, that says when
# the property of a delivery, never of a message: when a release was announced that dispatched it
NAMED_AT = "redlock_named_at"
# the property of a delivery, never of a message: its worker has a waiting room for it
HAS_ROOM = "redlock_has_room"

clock = SystemClock()  # of `Delivery.received_at`
_ON_REQUEST = "_redlock_"  # what our names on a request begin with
_OF_DEATHS = (DEATHS, "x-first-death-", "x-last-death-")  # headers; Source: RabbitMQ, "DLX"


class Delivery:
    """One delivery of a message: facts and questions; immutable, and without I/O.

    task, request: Celery's, the request as `Context`. header: what the message carries, with what
    the broker says of this delivery. acks_late: the message is acknowledged after the run.
    In a worker's main process make a new one each time: Celery rewrites the request there.
    """

    __slots__ = ("acks_late", "header", "request", "task")

    def __init__(self, task: Any, request: Any) -> None:
        self.task, self.request = task, request
        self.acks_late = bool(task.acks_late) and not request.is_eager
        self.header = LockHeader.of(request)
        if self.acks_late and (request.delivery_info or {}).get("redelivered"):
            self.header = self.header.redelivered()

    def going_on(self, header: LockHeader) -> Delivery:
        """Return a delivery that goes on in its slot as if the message had come back."""
        copied = copy.copy(self)
        copied.header = header
        return copied

    @property
    def run_id(self) -> RunId:
        """What tells the run of this delivery from all others, but from redeliveries."""
        return RunId.of(self.task.name, self.request, self.header.life)

    @property
    def reporter(self) -> StateReporter:
        """What stores the run's states and sends its events."""
        return StateReporter(self.task, self.request)

    @property
    def route(self) -> Route:
        """Where the message came from."""
        origin = self.header.origin
        exchange = None if origin is None else origin.exchange
        return Route.of(self.request.delivery_info, exchange, self._noted_queue)

    @property
    def _noted_queue(self) -> str | None:
        return (self.request.properties or {}).get(QUEUE)

    def queue(self, known: dict[tuple[str | None, str], str]) -> str:
        """Return the name of the queue that the message came through; known: as of `queue_of`."""
        return self._noted_queue or queue_of(self.task.app, self.route, known)

    @property
    def is_redelivered(self) -> bool:
        """Whether this is not the first delivery of its message, as far as anybody has said."""
        return self.header.is_flagged or self.header.waits > 0

    @property
    def may_have_run_elsewhere(self) -> bool:
        """Whether another delivery of this message may be running, or have run."""
        return self.is_redelivered or self.header.deferral.since > 0

    @property
    def is_for_another_queue(self) -> bool:
        """Whether RabbitMQ brought a copy of a deferral to a queue that it was not meant for.

        RabbitMQ goes by the topic, for each queue that is bound to it; each queue that has a run of
        this message republishes its own copy.
        """
        origin = self.header.origin
        if origin is None or origin.queue is None:
            return False
        if (self.request.delivery_info or {}).get("exchange") != CAME_BACK:
            return False
        return (self._noted_queue or origin.queue) != origin.queue

    @property
    def cancelled(self) -> str | None:
        """Why a message that may have run elsewhere is not to run: "expired" or "revoked".

        None: it is to run; or it acknowledges early, so the main process has ended it already.
        """
        if not self.acks_late:
            return None
        if self.header.is_revoked:
            return "revoked"
        return "expired" if self.may_have_run_elsewhere and self.expires_in < 0 else None

    @property
    def expires_in(self) -> float:
        """Seconds until the message's `expires`, below 0 after it; inf if it has none.

        Source: celery.worker.request.Request.
        """
        expires = self.request.expires
        if not expires:
            return math.inf
        at: datetime = maybe_make_aware(maybe_iso8601(expires), self.task.app.conf.timezone)
        return (at - utc_now()).total_seconds()

    @property
    def can_republish(self) -> bool:
        """Whether the message can be republished.

        An eager run has none: it has waited up to `wait`, and gives up. And if a copy could only go
        to every queue of its exchange again, one message would become many.
        """
        request = self.request
        if request.is_eager:
            return False
        if not (request.delivery_info or {}).get("exchange"):
            return True  # of the default exchange, which has one queue for each routing key
        return has_way_back(self.task.app, self.route)

    @property
    def received_at(self) -> float | None:
        """Monotonic seconds at which the run could have begun here; None if nobody noted it.

        That is when the worker received the message, or when its countdown was over.
        """
        at = (self.request.properties or {}).get(RECEIVED)
        return at if isinstance(at, float) else None

    @property
    def named_at(self) -> float | None:
        """Seconds since 1970 at which a release was announced that let this message be dispatched.

        None if it was dispatched without a release.
        """
        at = (self.request.properties or {}).get(NAMED_AT)
        return at if isinstance(at, float) else None

    @property
    def has_room(self) -> bool:
        """Whether the message may wait in its worker's memory if its run is refused the lock.

        Not if it is to leave: it was evicted, as more messages wait than the worker has space for.
        """
        return (self.request.properties or {}).get(HAS_ROOM) is True

    def log_extra(self, event: str, **more: Any) -> dict[str, Any]:
        """Return the fields of a log line of this run, for handlers that write them."""
        return {"event": event, "task": self.task.name, "task_id": self.request.id, **more}

    def __str__(self) -> str:
        return f"{self.task.name}[{self.request.id}]"

    __repr__ = __str__  # for log handlers that show the arguments of a record


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


def utc_now() -> datetime:
    """Return the wall clock's time in UTC."""
    return datetime.now(timezone.utc)


def own_headers(request: Any) -> dict[str, Any]:
    """Return the headers of a user's own that a message came with.

    Source: celery.app.task.Context takes a header called "headers" for all of them.
    """
    headers = request.headers
    if not isinstance(headers, Mapping):  # a sender may write any type
        headers = {}
    if (request.get("properties") or {}).get(NESTED):
        rest = {name: value for name, value in request.__dict__.items() if name != "headers"}
        headers = {**(Context(rest).headers or {}), "headers": headers}
    return {
        name: value
        for name, value in headers.items()
        if not name.startswith((*_OF_DEATHS, _ON_REQUEST))
    }


def received_at(eta: datetime | None) -> float:
    """Return when a run could begin of a message that is received now, in monotonic seconds.

    eta: when its countdown is over. All processes of a worker share the clock.
    """
    left = 0.0 if eta is None else max(0.0, (eta - utc_now()).total_seconds())
    return clock.now() + left
