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
from celery_redlock.tasks.recovery.ledger import MoveResult

logger = logging.getLogger(__name__)

RIGHTS = "rights"  # the kind of each refusal for a missing right, so that the log has one


class Notices:
    """The log and the signal of one worker. sender: of the signal."""

    def __init__(self, platform: Platform, sender: Any) -> None:
        self._platform = platform
        self._sender = sender
        self._mutex = platform.new_mutex()  # of the next two
        self._is_sending = False
        self._is_ended = False
        self._records: deque[signals.MessagesRecoveredEvent] = deque()  # to be sent by the signal
        self._logged: set[tuple[str, str]] = set()  # by worker lease: each refusal in the log
        self._kept_counts: dict[str, int] = {}  # by worker lease: kept messages in the log

    def end(self) -> None:
        """Start no more threads, because the worker ends."""
        with self._mutex:
            self._is_ended = True

    def log_error(self, lease: str, error: BaseException) -> None:
        """Log an error of the broker, each refusal once. lease: the worker's own."""
        if isinstance(error, ResponseError) and self.is_first(error):
            self._log_refusal(lease, str(error))
        else:
            extra = {"event": "worker_lease_unsure", "lease": lease}
            logger.debug("no beat of %s: %r", lease, error, extra=extra)

    def log_missing_rights(self, lease: str, missing: str) -> None:
        """Log once which rights the broker's user lacks."""
        if self._is_new("", RIGHTS):
            self._log_refusal(lease, f"its user lacks {missing}")

    def is_first(self, refusal: ResponseError) -> bool:
        """Return whether a refusal is the first of its kind; from now on it is not."""
        is_of_rights = isinstance(refusal, NoPermissionError)
        return self._is_new("", RIGHTS if is_of_rights else str(refusal))

    def _is_new(self, lease: str, kind: str) -> bool:
        count = len(self._logged)
        self._logged.add((lease, kind))
        return len(self._logged) > count

    def _log_refusal(self, lease: str, reason: str) -> None:
        extra = {"event": "worker_lease_refused", "lease": lease}
        logger.warning(
            "the broker refuses what a worker lease needs, so the messages of dead workers may "
            "stay: %s", reason, extra=extra,
        )  # fmt: skip

    def report_moves(self, name: str, lease: str, reason: str, result: MoveResult) -> None:
        """Log what became of the messages of a dead worker lease, and send the signal.

        name: of its worker. reason: of the move.
        """
        extra = {"event": "messages_recovered", "lease": lease, "worker": name}
        if result.messages:
            logger.warning(
                "moved %s of %s back to their queues: its worker lease %s",
                in_words(result.messages), name, reason,
                extra={**extra, "messages": result.messages},
            )  # fmt: skip
        newly_kept = max(0, result.kept - self._kept_counts.get(lease, 0))
        if result.kept:  # a lease with refused messages as well is tried again and again
            self._kept_counts[lease] = result.kept
        if newly_kept:
            logger.error(
                "left %s of %s unacknowledged: they were moved too often in a row, so "
                "their bodies may be what ends workers. They come back after the visibility "
                "timeout. See %s",
                in_words(result.kept), name, anchors.MESSAGES_STAY,
                extra={**extra, "event": "messages_kept", "messages": result.kept},
            )  # fmt: skip
        if result.messages or newly_kept:
            self._records.append(signals.MessagesRecoveredEvent(name, result.messages, newly_kept))
            self._send_soon()
        if result.refusal and self._is_new(lease, result.refusal):
            logger.error(
                "the broker does not take back all messages of %s: %s. See %s",
                name, result.refusal.rstrip("."), anchors.MESSAGES_STAY,
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
