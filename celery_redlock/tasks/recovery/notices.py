"""What a worker says of the messages that it moves: its log and the signal, each fact once.

Not here: what it does about them (`keeper.py`).
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

from redis import ResponseError
from redis.exceptions import NoPermissionError

from celery_redlock import anchors, signals
from celery_redlock.lock.platform.clock import Platform
from celery_redlock.tasks.recovery.ledger import Moved

logger = logging.getLogger(__name__)

RIGHTS = "rights"  # what the log says is missing: once, however it is found


class Notices:
    """The log and the signal of one worker. sender: of the signal."""

    def __init__(self, platform: Platform, sender: Any) -> None:
        self._platform = platform
        self._sender = sender
        self._mutex = platform.new_mutex()  # of the next two
        self._is_sending = False
        self._is_ended = False
        self._records: deque[signals.MessagesRecoveredEvent] = deque()  # to be sent
        self._told: set[tuple[str, str]] = set()  # what the log has said of messages that stay
        self._kept: dict[str, int] = {}  # how many it has said stay, by worker lease

    def end(self) -> None:
        """Start no thread any more: the worker ends."""
        with self._mutex:
            self._is_ended = True

    def tell_of_error(self, lease: str, error: BaseException) -> None:
        """Tell of an error of the broker. lease: the worker's own."""
        if isinstance(error, ResponseError) and self.is_news(error):
            self._tell_of_refusal(lease, str(error))
        else:
            extra = {"event": "worker_lease_unsure", "lease": lease}
            logger.debug("no beat of %s: %r", lease, error, extra=extra)

    def tell_of_rights(self, lease: str, missing: str) -> None:
        """Tell of the rights that the broker's user lacks."""
        if self._is_new("", RIGHTS):
            self._tell_of_refusal(lease, f"its user lacks {missing}")

    def is_news(self, refusal: ResponseError) -> bool:
        """Return whether this is the first refusal of its kind. It is told of by now."""
        is_of_rights = isinstance(refusal, NoPermissionError)
        return self._is_new("", RIGHTS if is_of_rights else str(refusal))

    def _is_new(self, lease: str, kind: str) -> bool:
        before = len(self._told)
        self._told.add((lease, kind))
        return len(self._told) > before

    def _tell_of_refusal(self, lease: str, why: str) -> None:
        extra = {"event": "worker_lease_refused", "lease": lease}
        logger.warning(
            "the broker refuses what a worker lease needs, so the messages of dead workers may "
            "stay: %s", why, extra=extra,
        )  # fmt: skip

    def tell_of_moves(self, name: str, lease: str, why: str, done: Moved) -> None:
        """Tell what became of the messages of a dead worker lease. name: of its worker."""
        extra = {"event": "messages_recovered", "lease": lease, "worker": name}
        if done.messages:
            logger.warning(
                "moved %s of %s back to their queues: its worker lease %s",
                in_words(done.messages), name, why, extra={**extra, "messages": done.messages},
            )  # fmt: skip
        more_kept = max(0, done.kept - self._kept.get(lease, 0))
        if done.kept:  # a worker lease that has refused messages as well is tried again and again
            self._kept[lease] = done.kept
        if more_kept:
            logger.error(
                "left %s of %s unacknowledged: they were moved too often in a row, so "
                "their bodies may be what ends workers. They come back after the visibility "
                "timeout. See %s",
                in_words(done.kept), name, anchors.MESSAGES_STAY,
                extra={**extra, "event": "messages_kept", "messages": done.kept},
            )  # fmt: skip
        if done.messages or more_kept:
            self._records.append(signals.MessagesRecoveredEvent(name, done.messages, more_kept))
            self._send_soon()
        if done.refused and self._is_new(lease, done.refused):
            logger.error(
                "the broker does not take back all messages of %s: %s. See %s",
                name, done.refused.rstrip("."), anchors.MESSAGES_STAY,
                extra={**extra, "event": "messages_not_taken"},
            )  # fmt: skip

    def _send_soon(self) -> None:
        """Send the records, in a thread that ends with them: no beat waits for a receiver."""
        with self._mutex:
            if not (self._is_sending or self._is_ended):
                self._platform.start_thread(self._send)
                self._is_sending = True
        if self._is_ended:  # no beat is left to be kept waiting, and the process ends soon
            self._send()

    def _send(self) -> None:
        while self._has_records():
            try:
                event = self._records.popleft()
                signals.messages_recovered.send(self._sender, event=event)
            except BaseException as error:  # SystemExit of a receiver; another thread has sent it
                extra = {"event": "messages_untold"}
                logger.debug("the signal of moved messages ended: %r", error, extra=extra)

    def _has_records(self) -> bool:
        with self._mutex:
            self._is_sending = bool(self._records)
            return self._is_sending


def in_words(messages: int) -> str:
    """Return how many messages there are, as a line of the log says it."""
    return f"{messages} message" if messages == 1 else f"{messages} messages"
