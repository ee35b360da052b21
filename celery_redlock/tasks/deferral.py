"""The same message put back, whole: it keeps its id and everything else that it carries.

Source: Celery's own `Task.retry`, which makes its message the same way; what that leaves out
(`argsrepr`, `kwargsrepr`, `compression`, and on 5.5 and 5.6 `ignore_result`) is passed on here,
and the message does not become its own parent.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any

from celery.exceptions import Ignore, Reject
from celery.utils.quorum_queues import detect_quorum_queues
from kombu.exceptions import OperationalError

from celery_redlock.lock.clock import SystemClock
from celery_redlock.tasks.contention import Past
from celery_redlock.tasks.states import ignores_result

logger = logging.getLogger(__name__)

HEADER = "redlock"
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0  # s: between tries to put a message back, broker away
BEFORE_REQUEUE = 1.0  # s: else a broker that takes acknowledgements only would spin the message


class Requeue(Reject, Ignore):
    """Hand the message back to the broker.

    A Reject for Celery's tracer; being an Ignore too, it passes through autoretry, which would
    take a Reject for an error to be retried.
    """


@dataclass(frozen=True)
class Slip:
    """What the message header `redlock` carries.

    options: those of the call. deferrals: so far. since: of the first try, ISO 8601 in UTC.
    delay: s, the last one. retries: the message's own count when it was put back.
    serializer: the call's own. id: the task that this belongs to.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    deferrals: int = 0
    since: str | None = None
    delay: float | None = None
    retries: int = 0
    serializer: str | None = None
    id: str | None = None

    @classmethod
    def of(cls, request: Any) -> Slip:
        """Read it from a run's request; what a stranger wrote there counts as nothing."""
        carried = request.get(HEADER) or (request.headers or {}).get(HEADER)
        if not isinstance(carried, Mapping):
            return _BLANK
        known = {name: carried[name] for name in cls.__dataclass_fields__ if name in carried}
        slip = cls(**known)
        if slip.id not in (None, request.id):
            return _BLANK  # of a parent, whose headers were passed on
        if slip.since is None or slip.retries == request.retries:
            return slip
        # a real retry takes the lock anew: what it waited before is not its own
        return cls(slip.options, serializer=slip.serializer, id=slip.id)

    def past(self, now: datetime) -> Past:
        """Return what the message has been through by now."""
        if self.since is None:
            return Past()
        waited = (now - datetime.fromisoformat(self.since)).total_seconds()
        return Past(self.deferrals, max(0.0, waited), self.delay)

    def next(self, now: datetime, delay: float, retries: int, task_id: str | None = None) -> Slip:
        """Return the slip for one more deferral."""
        since = self.since or now.isoformat()
        count = self.deferrals + 1
        return Slip(self.options, count, since, delay, retries, self.serializer, task_id)

    def to_message(self) -> dict[str, Any]:
        """Return it as a mapping that any serializer takes."""
        return {**asdict(self), "options": dict(self.options)}


_BLANK = Slip()


def utc_now() -> datetime:
    """Return the wall clock's time in UTC."""
    return datetime.now(timezone.utc)


def bearable(app: Any, countdown: float) -> float:
    """Return a countdown, s, as the broker can keep it.

    RabbitMQ's quorum queues keep delayed messages themselves, in whole seconds from 1 upwards.
    Source: celery.app.base.Celery.send_task, kombu.transport.native_delayed_delivery.
    """
    driver = app.producer_pool.connections.connection.transport.driver_type
    if driver == "amqp" and detect_quorum_queues(app, driver)[0]:
        return float(max(1, math.ceil(countdown)))
    return countdown


def put_back(task: Any, request: Any, slip: Slip, countdown: float) -> None:
    """Publish the message again, to run after so many s; returns once the broker has it.

    With late acknowledgement an unreachable broker raises Requeue: the message was never let go.
    With early acknowledgement nobody but this slot still knows of it, so the slot tries again
    until the broker is back; what is not a matter of the connection is raised.
    """
    pause = FIRST_PAUSE
    clock = SystemClock()
    while True:
        try:
            _publish(task, request, slip, countdown)
        except OperationalError as error:  # what kombu makes of every error of the connection
            next_step = "it stays with the broker" if task.acks_late else f"again in {pause:g} s"
            logger.warning("cannot put back %s: %s; %s", request.id, error, next_step)
            if task.acks_late:
                clock.sleep(BEFORE_REQUEUE)
                raise Requeue(error, requeue=True) from error
            clock.sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)
        else:
            return


def _publish(task: Any, request: Any, slip: Slip, countdown: float) -> None:
    headers = {**(request.headers or {}), HEADER: slip.to_message()}
    signature = task.signature_from_request(
        request,
        countdown=countdown,
        retries=request.retries,
        headers=headers,
        ignore_result=ignores_result(task, request),
        argsrepr=request.get("argsrepr"),
        kwargsrepr=request.get("kwargsrepr"),
        compression=request.get("compression"),
        **({"serializer": slip.serializer} if slip.serializer else {}),
    )
    # a request that looks called directly: else the publisher makes the task its own parent
    task.push_request(called_directly=True)
    try:
        signature.apply_async(add_to_parent=False)
    finally:
        task.pop_request()
