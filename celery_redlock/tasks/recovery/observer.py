"""How an observer proves that a worker lease is dead: by its own monotonic clock, without I/O.

The server's clock only says whom to look at. No wall clock is evidence.
"""

from __future__ import annotations

from collections.abc import Mapping

BEAT_INTERVAL = 1.0  # s: between two beats of a worker lease
QUIET = 1.5  # s of the server's clock without a beat, after which observers look at a worker lease
PROOF = 4.8  # s of an observer's clock without a beat, after which a worker lease is dead
TRUST = 4.5  # s after the sending of an answered beat for which its worker begins messages
LENGTH = QUIET + PROOF  # s from the last beat of a worker to the proof that it is dead
LOOK_GAP = 2 * BEAT_INTERVAL  # s between two looks of an observer after which it begins anew


class Observer:
    """What one worker has seen of the quiet worker leases of others.

    A score is what a worker lease last wrote. One that stays the same for `PROOF` seconds between
    two looks is one of a dead worker, if the observer has never been late in between: if it was
    paused, or the server was slow or away, no worker may have reached the server.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, float]] = {}  # by lease: its score, and since when
        self._looked_at = float("-inf")

    def look(self, sent: float, answered: float, quiet: Mapping[str, str]) -> dict[str, str]:
        """Take note of an answered look; return the scores of the leases that are dead by now.

        sent, answered: monotonic seconds of the question and its answer. quiet: scores by lease.
        """
        if answered - self._looked_at > LOOK_GAP:
            self._seen.clear()
        self._looked_at = answered
        # since the answer, for the question may have been read earlier: never too early
        self._seen = {lease: self._since(lease, score, answered) for lease, score in quiet.items()}
        return {
            lease: score for lease, (score, since) in self._seen.items() if sent - since >= PROOF
        }

    def _since(self, lease: str, score: str, now: float) -> tuple[str, float]:
        before = self._seen.get(lease)
        return before if before is not None and before[0] == score else (score, now)

    def forget(self) -> None:
        """Begin anew: a look was not answered."""
        self._seen.clear()
