"""Messages whose lock header has a format that this release does not know.

Their fields may mean anything, so the worker neither runs nor acknowledges them, and Celery never
sees them. Each waits outside the prefetch, and goes back to the broker as it came: a worker of
another release may take it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from celery_redlock import anchors
from celery_redlock.tasks.delivery.header import HEADER, HEADER_FORMAT, unknown_format
from celery_redlock.tasks.settings.app import CELERY_PREFIX
from celery_redlock.tasks.waiting.loop import EventLoop
from celery_redlock.tasks.waiting.prefetch import Prefetch
from celery_redlock.tasks.waiting.queues import WaitingTimes

logger = logging.getLogger(__name__)


class HeldMessages:
    """The messages of one consumer that this release cannot read.

    mutex: of the queues. All methods run in the event loop.
    Source: celery.worker.loops asks `create_task_handler` for what gets each message.
    """

    def __init__(
        self,
        consumer: Any,
        loop: EventLoop,
        mutex: AbstractContextManager[Any],
        prefetch: Prefetch,
        times: WaitingTimes,
    ) -> None:
        self._consumer = consumer
        self._loop = loop
        self._mutex = mutex
        self._prefetch = prefetch
        self._seconds = times.hold_unknown
        self._entries: dict[Any, Any] = {}  # by message: the timer's entry
        self._logged: set[int] = set()  # numbers of formats
        create = consumer.create_task_handler
        consumer.create_task_handler = lambda **options: self._before(create(**options))

    def forget(self) -> None:
        """Forget all messages: the broker delivers them again. Called with the mutex."""
        for entry in self._entries.values():
            self._loop.cancel(entry)
        self._entries.clear()

    def _before(self, receive: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return what Celery is to call for each message. receive: its own function for that."""

        def hold_or_receive(message: Any) -> Any:
            headers = message.headers
            if isinstance(headers, Mapping) and HEADER in headers:  # few messages
                number = unknown_format(headers[HEADER])
                if number is not None and self._is_locked(headers):
                    return self._hold(message, number)
            return receive(message)

        return hold_or_receive

    def _is_locked(self, headers: Mapping[str, Any]) -> bool:
        """Return whether the header means something here. A message of protocol 1 may be any's."""
        name = headers.get("task")
        if not isinstance(name, str):
            return True
        is_locked_task = hasattr(self._consumer.app.tasks.get(name), "lock_for")
        return is_locked_task and not name.startswith(CELERY_PREFIX)

    def _hold(self, message: Any, number: int) -> None:
        self._log(message.headers, number)
        with self._mutex:
            self._entries[message] = self._loop.call_after(self._seconds, self._put_back, message)
            self._count(1)

    def _put_back(self, message: Any) -> None:
        """Give a message back to the broker, unless the connection was lost meanwhile."""
        with self._mutex:
            entry = self._entries.pop(message, None)
        if entry is None:
            return
        consumer = self._consumer
        # before 5.7 there is no function for acknowledgements alone
        call = getattr(consumer, "call_soon_ack", consumer.call_soon)
        call(message.reject_log_error, logger, consumer.connection_errors, requeue=True)
        with self._mutex:
            self._count(-1)

    def _count(self, change: int) -> None:
        """Change the prefetch by one, as Celery does for a message with a countdown."""
        qos = self._consumer.qos
        if change > 0:
            qos.increment_eventually()
        else:
            qos.decrement_eventually()
        self._prefetch.held += change
        self._prefetch.update()

    def _log(self, headers: Mapping[str, Any], number: int) -> None:
        if number in self._logged:
            return
        self._logged.add(number)
        name = headers.get("task")
        id_ = headers.get("id")
        logger.error(
            "%s[%s] has format %d of the lock header, and this release reads format %d: the worker "
            "holds such messages unrun, and gives them back to the broker after %d s. See %s",
            name, id_, number, HEADER_FORMAT, self._seconds, anchors.OTHER_FORMAT,
            extra={"event": "format_unknown", "task": name, "task_id": id_},
        )  # fmt: skip
