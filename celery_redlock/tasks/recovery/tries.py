"""When what the broker has refused is tried again: after a pause that grows with each refusal.

What is tried has a name. Times are monotonic seconds, which the caller reads.
"""

from __future__ import annotations

SHORTEST_PAUSE = 1.0  # s: the pause after a first refusal
LONGEST_PAUSE = 8.0  # s: what was refused for a moment is done soon after
FORGOTTEN = 60.0  # s after its pause: what was not tried again is another worker's by now


class Tries:
    """What was refused, and how long each of it rests."""

    def __init__(self) -> None:
        self._rests: dict[str, tuple[float, float]] = {}  # by name: its pause, and until when

    def may_try(self, name: str, now: float) -> bool:
        """Return whether something may be tried now."""
        _, until = self._rests.get(name, (0.0, now))
        return now >= until

    def refused(self, name: str, now: float) -> None:
        """Let something rest, for twice as long as the last time."""
        self._rests = {
            other: rest for other, rest in self._rests.items() if now < rest[1] + FORGOTTEN
        }
        pause = min(LONGEST_PAUSE, 2 * self._rests.get(name, (SHORTEST_PAUSE / 2, 0.0))[0])
        self._rests[name] = pause, now + pause

    def clear(self) -> None:
        """Let all be tried now."""
        self._rests = {}

    def done(self, name: str) -> None:
        """Take note that something was done, or needs no try any more."""
        self._rests.pop(name, None)
