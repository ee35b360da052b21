"""How an observer proves that a worker lease is dead: by its own monotonic clock, without I/O.

The server's clock only says whom to look at. No wall clock is evidence.
"""

from __future__ import annotations

from collections.abc import Mapping

BEAT_INTERVAL = 1.0  # s: between two beats of a worker lease
QUIET = 1.5  # s of the server's clock without a beat, after which observers look at a worker lease
PROOF = 4.8  # s of an observer's clock without a beat, after which a worker lease is dead
TRUST = 4.5  # s after the sending of an answered beat for which its worker begins messages
DETECTION_TIME = QUIET + PROOF  # s from the last beat of a worker to the proof that it is dead
LOOK_GAP = 2 * BEAT_INTERVAL  # s between two looks of an observer after which it begins anew


class Observer:
    """What one worker has seen of the quiet worker leases of others.

    A score is the last beat of a worker lease. If it stays the same for `PROOF` seconds, the worker
    is dead, unless the observer was late in between: while the observer is paused, or the server
    slow or away, no worker may reach the server.
    """

    def __init__(self) -> None:
        self._unchanged: dict[str, tuple[str, float]] = {}  # by lease: its score, and since when
        self._last_look = float("-inf")

    def look(self, sent_at: float, answered_at: float, quiet: Mapping[str, str]) -> dict[str, str]:
        """Record the scores of quiet leases; return the scores of those that are proved dead.

        sent_at, answered_at: monotonic seconds of request and reply. quiet: scores by lease.
        """
        if answered_at - self._last_look > LOOK_GAP:
            self._unchanged.clear()
        self._last_look = answered_at
        # since the reply: a lease counts as unchanged for too short a time rather than too long
        self._unchanged = {
            lease: self._since(lease, score, answered_at) for lease, score in quiet.items()
        }
        return {
            lease: score
            for lease, (score, since) in self._unchanged.items()
            if sent_at - since >= PROOF
        }

    def _since(self, lease: str, score: str, now: float) -> tuple[str, float]:
        previous = self._unchanged.get(lease)
        return previous if previous is not None and previous[0] == score else (score, now)

    def forget(self) -> None:
        """Begin anew, because a request was not answered."""
        self._unchanged.clear()
