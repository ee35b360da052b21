"""The consumer's step: a worker lease for each of its channels, and a tag for what comes.

What kombu has popped from a list is read at once, with and without a worker lease.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from celery import bootsteps
from redis import ResponseError

from celery_redlock import anchors
from celery_redlock.lock.platform.clock import Platform, SystemClock
from celery_redlock.tasks.delivery.header import HEADER
from celery_redlock.tasks.per_app import settings_of
from celery_redlock.tasks.recovery.keeper import Keeper
from celery_redlock.tasks.recovery.ledger import Ledger, is_kombus, ledger_beside
from celery_redlock.tasks.recovery.tags import DeliveryTag, lease_of, may_be_moved
from celery_redlock.tasks.waiting.room import rooms

logger = logging.getLogger(__name__)

# names in kombu's channel, its connection and its QoS; without one of them no message is tagged
_CHANNEL_NAMES = ("_q_for_pri", "_get_message_priority", "_fanout_queues", "pool")
_CALLBACKS = "_callbacks"
QUICK_ACK = "_quick_ack"
_IN_POLL = "_in_poll"  # the connection of an open BRPOP; without that name its reply may wait


class RecoverMessages(bootsteps.StartStopStep):
    """Joins with a worker lease before the consumer consumes, and tags what it gets.

    Source: kombu.transport.virtual: Channel.basic_consume keeps a callback for each queue, which
    gets the raw message before it is noted as unacknowledged.
    """

    name = "celery_redlock recovery"
    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, parent: Any, platform: Platform | None = None, **options: Any) -> None:
        super().__init__(parent, **options)
        self._app = parent.app
        self._consumer = parent
        self._platform = platform or Platform(SystemClock())
        self._keeper: Keeper | None = None
        self._has_warned = False
        # the result of `_list_of` for messages without lock header and priority
        self._list_by_task_and_queue: dict[tuple[object, str], str] = {}

    def start(self, parent: Any) -> None:
        """Join, again after a lost connection; raises the errors of a connection that is away.

        Without a worker lease, messages are given tags as well: those of other workers' leases.
        """
        channel = parent.task_consumer.channel
        self._list_by_task_and_queue.clear()  # of another connection
        if is_kombus(channel) and hasattr(channel, _IN_POLL):
            read_each_reply(channel)
        if not can_tag(channel):
            return
        if settings_of(self._app).recovery:
            self._join(parent)
        channel.basic_consume = self._with_tags(channel, channel.basic_consume)

    def _join(self, parent: Any) -> None:
        self._keeper = self._keeper or Keeper(
            self._platform, self._connect, str(parent.hostname), parent, self._forget_waiting
        )
        try:
            self._keeper.join()
        except ResponseError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "the messages of a worker that dies come back after the visibility timeout "
                    "alone: the broker refuses what a worker lease needs (%s)",
                    error, extra={"event": "worker_lease_refused"},
                )  # fmt: skip

    def _connect(self) -> Ledger:
        connection = self._consumer.connection or self._app.connection_for_read()
        return ledger_beside(connection, settings_of(self._app).prefix)

    def shutdown(self, parent: Any) -> None:
        """Resign: the worker has ended, and its bodies with it."""
        if self._keeper is not None:
            self._keeper.end()

    def _with_tags(self, channel: Any, consume: Callable[..., Any]) -> Callable[..., Any]:
        def basic_consume(queue: str, *args: Any, no_ack: bool = False, **options: Any) -> Any:
            consumer_tag = consume(queue, *args, no_ack=no_ack, **options)
            if not no_ack and queue not in channel._fanout_queues:
                callbacks = getattr(channel.connection, _CALLBACKS)
                deliver = functools.partial(self._deliver, channel, queue, callbacks[queue])
                callbacks[queue] = deliver
            return consumer_tag

        return functools.wraps(consume)(basic_consume)

    def _deliver(
        self, channel: Any, queue: str, callback: Callable[..., Any], raw: dict[str, Any]
    ) -> Any:
        """Give a message on, under a delivery tag that names its worker lease and its list."""
        try:
            self._tag(channel, queue, raw)
        except Exception:  # the message goes on under its own tag
            logger.exception(
                "cannot tag a message, which goes on without. See %s",
                anchors.UNEXPECTED, extra={"event": "message_untagged"},
            )  # fmt: skip
        return callback(raw)

    def _tag(self, channel: Any, queue: str, raw: dict[str, Any]) -> None:
        properties = raw["properties"]
        headers = raw.get("headers") or {}
        keeper = self._keeper
        task = headers.get("task")
        is_special = HEADER in headers or properties.get("priority")
        list_name = None if is_special else self._list_by_task_and_queue.get((task, queue))
        if list_name is None:
            list_name = self._list_of(channel, queue, raw)
            if not is_special and task in self._app.tasks:
                self._list_by_task_and_queue[task, queue] = list_name
        tag = keeper.tag(list_name) if list_name and keeper is not None else ""
        if tag:
            properties["delivery_tag"] = tag
        elif DeliveryTag.of(properties.get("delivery_tag")) is not None:
            # the tag of a worker that had it before, and that may be declared dead later
            properties["delivery_tag"] = str(uuid4())

    def _list_of(self, channel: Any, queue: str, raw: dict[str, Any]) -> str:
        """Return the list that a message was taken from; "" if it is not to be moved."""
        headers = raw.get("headers") or {}
        if not may_be_moved(self._app.tasks.get(headers.get("task")), headers, queue):
            return ""
        return str(channel._q_for_pri(queue, channel._get_message_priority(raw, reverse=False)))

    def _forget_waiting(self, lease: str) -> None:
        """Drop the waiting messages of a lease that were moved; called by the keeper's thread."""
        room = rooms.get(self._consumer)
        if room is not None:
            room.dispatch_soon(lambda request: lease_of(request.message.delivery_tag) == lease)


def read_each_reply(channel: Any) -> None:
    """Have a channel read the reply to its open BRPOP, even if its prefetch is used up by then.

    The prefetch is lowered as a waiting message goes to the pool. A message that comes after that
    answers the BRPOP: unread, it would be in no list and not noted until a body ends, and a kill
    would lose it. So the channel may have one message more than its prefetch.
    Source: kombu.transport.redis: MultiChannelPoller.on_readable asks `can_consume`, of which
    celery.worker.consumer.tasks makes one of its own for `worker_disable_prefetch`.
    """
    qos = channel.qos
    can_consume = qos.can_consume
    qos.can_consume = lambda: bool(getattr(channel, _IN_POLL)) or can_consume()


def can_tag(channel: Any) -> bool:
    """Return whether messages of a channel can be tagged, so that a move finds them."""
    return (
        is_kombus(channel)
        and all(hasattr(channel, name) for name in _CHANNEL_NAMES)
        and hasattr(channel.connection, _CALLBACKS)
        and hasattr(channel.qos, QUICK_ACK)
    )
