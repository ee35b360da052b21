"""When an action that the broker refused is tried again: after a pause that grows each time.

Each action has a name. Times are monotonic seconds, which the caller reads.
"""

from __future__ import annotations

SHORTEST_PAUSE = 1.0  # s: the pause after a first refusal
LONGEST_PAUSE = 8.0  # s: a refusal may last for a moment only
FORGET_AFTER = (
    60.0  # s after its pause: an action that was not tried again is another worker's by now
)


class Tries:
    """The actions that the broker refused, and the pause of each before its next try."""

    def __init__(self) -> None:
        self._pauses: dict[str, tuple[float, float]] = {}  # by name: pause and end

    def may_try(self, name: str, now: float) -> bool:
        """Return whether an action may be tried now. now: monotonic seconds."""
        _, until = self._pauses.get(name, (0.0, now))
        return now >= until

    def record_refusal(self, name: str, now: float) -> None:
        """Record a refusal: the next try is after a pause, twice as long as the last one."""
        self._pauses = {
            other: entry for other, entry in self._pauses.items() if now < entry[1] + FORGET_AFTER
        }
        pause = min(LONGEST_PAUSE, 2 * self._pauses.get(name, (SHORTEST_PAUSE / 2, 0.0))[0])
        self._pauses[name] = pause, now + pause

    def clear(self) -> None:
        """Allow all actions now."""
        self._pauses = {}

    def record_success(self, name: str) -> None:
        """Record that an action succeeded, or needs no more tries."""
        self._pauses.pop(name, None)
