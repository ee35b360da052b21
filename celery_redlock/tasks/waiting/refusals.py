"""What a worker knows of refusals, so that new messages need not be refused as well. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from celery_redlock.lock.platform.clock import Clock
from celery_redlock.tasks.waiting.queues import QueueKey


@dataclass(frozen=True)
class KnownRefusal:
    """What a worker knows of a lock that refuses. at: monotonic seconds, when it did.

    holder: its label, "" if unknown. expires_in: seconds from then to the lease's end, None if
    unknown.
    """

    at: float
    holder: str = ""
    expires_in: float | None = None


class Refusals:
    """The last refusal of each lock that was refused to a run of this worker.

    remembered: seconds for which a new message takes it for its own.
    """

    def __init__(self, clock: Clock, remembered: float) -> None:
        self._clock, self._remembered = clock, remembered
        self._known: dict[QueueKey, KnownRefusal] = {}

    @property
    def is_known(self) -> bool:
        """Whether any refusal is remembered."""
        return bool(self._known)

    def note(self, queue: QueueKey, holder: str, expires_in: float | None) -> None:
        """Remember a refusal. expires_in: seconds to the lease's end, None if unknown."""
        self._known[queue] = KnownRefusal(self._clock.now(), holder, expires_in)

    def of(self, queue: QueueKey, *, waits: bool) -> KnownRefusal | None:
        """Return the refusal that a new message would get; None if that is not known.

        waits: whether another message waits for the same lock.
        """
        now = self._clock.now()
        known = self._known.get(queue)
        if known is not None and now < known.at + self._remembered:
            if known.expires_in is None:
                return known
            return replace(known, at=now, expires_in=max(0.0, known.at + known.expires_in - now))
        return KnownRefusal(now, "" if known is None else known.holder) if waits else None

    def keep(self, waits: Callable[[QueueKey], bool]) -> None:
        """Forget the refusals that are old, of locks for which no message waits."""
        before = self._clock.now() - self._remembered
        self._known = {
            queue: known
            for queue, known in self._known.items()
            if known.at >= before or waits(queue)
        }
