"""Who waits in this worker, in order: pure bookkeeping."""

from __future__ import annotations

import bisect
import math
from typing import Any

RETRY_NEXT_AFTER = (
    1.0  # s after which the next one tries, where the first was woken and nothing was heard
)


QueueKey = tuple[str, int]  # the channel of what refused, and the limit by which it was asked


class Waiter:
    """One message that waits in a worker's memory.

    order: it stands in its line by. patient: it may wait for a word for longer than its countdown.
    eta: monotonic s, the end of the countdown. until: monotonic s, when it goes back at the latest.
    entry: in the worker's timer, once its countdown is over.
    """

    __slots__ = ("entry", "eta", "line", "order", "patient", "request", "until")

    def __init__(
        self, request: Any, order: tuple[str, int], line: QueueKey, eta: float, *, patient: bool
    ) -> None:
        self.request, self.order, self.line = request, order, line
        self.eta, self.patient, self.until = eta, patient, eta
        self.entry: Any = None

    def __lt__(self, other: Waiter) -> bool:
        return self.order < other.order


_NOBODY = (-math.inf, "")


class WaitQueues:
    """Who waits in this worker, in order. A channel without a line is listened for for a while."""

    def __init__(self) -> None:
        self._lines: dict[str, dict[int, list[Waiter]]] = {}  # by channel, then by limit
        self._emptied: dict[str, float] = {}  # monotonic s
        # where the first one has gone to try: monotonic s, and since when it waits
        self._left: dict[QueueKey, tuple[float, str]] = {}
        self._by_request: dict[Any, Waiter] = {}
        self.patient = 0  # how many may wait for a word alone

    def channels(self) -> set[str]:
        """Return what is listened for; asked by any thread."""
        return set(self._lines)

    def of(self, request: Any) -> Waiter | None:
        """Return the one that waits by a request."""
        return self._by_request.get(request)

    def all(self) -> list[Waiter]:
        """Return all that wait."""
        return list(self._by_request.values())

    def firsts(self, channel: str) -> list[Waiter]:
        """Return the first of each line on a channel."""
        return [line[0] for line in self._lines.get(channel, {}).values()]

    def on(self, channel: str) -> list[Waiter]:
        """Return all that wait on a channel."""
        return [one for line in self._lines.get(channel, {}).values() for one in line]

    def may_try(self, waiting: Waiter, now: float) -> float:
        """Return the s after which it may try by itself: inf where others stand before it.

        At once where it is the first; but where one before it has just gone to try, only if that
        one is not back soon.
        """
        channel, limit = waiting.line
        if self._lines[channel][limit][0] is not waiting:
            return math.inf
        return max(0.0, self._left.get(waiting.line, _NOBODY)[0] + RETRY_NEXT_AFTER - now)

    def add(self, waiting: Waiter) -> Waiter | None:
        """Put one in its line; returns the one that was first before it came, if it is now."""
        self._by_request[waiting.request] = waiting
        self.patient += waiting.patient
        channel, limit = waiting.line
        line = self._lines.setdefault(channel, {}).setdefault(limit, [])
        bisect.insort(line, waiting)
        self._emptied.pop(channel, None)
        if line[0] is not waiting:
            return None
        if waiting.order[0] <= self._left.get(waiting.line, _NOBODY)[1]:
            del self._left[waiting.line]  # it is back
        return line[1] if len(line) > 1 else None

    def remove(self, waiting: Waiter, now: float) -> Waiter | None:
        """Take one out of its line; returns the one that is first now, if it was."""
        del self._by_request[waiting.request]
        self.patient -= waiting.patient
        channel, limit = waiting.line
        line = self._lines[channel][limit]
        place = bisect.bisect_left(line, waiting)
        del line[place]
        if place == 0:
            self._left[waiting.line] = now, waiting.order[0]
        if not line:
            del self._lines[channel][limit]
            if not self._lines[channel]:
                self._emptied[channel] = now
        return line[0] if line and place == 0 else None

    def last_of_longest(self) -> Waiter | None:
        """Return who can best be spared: the last patient one of the longest line."""
        lines = [line for by_limit in self._lines.values() for line in by_limit.values()]
        for line in sorted(lines, key=len, reverse=True):
            for waiting in reversed(line):
                if waiting.patient:
                    return waiting
        return None

    def forget_empty(self, before: float) -> None:
        """Listen no more where nobody has waited since then, monotonic s."""
        for channel in [c for c, at in self._emptied.items() if at < before]:
            del self._emptied[channel]
            del self._lines[channel]
        self._left = {line: gone for line, gone in self._left.items() if line[0] in self._lines}
