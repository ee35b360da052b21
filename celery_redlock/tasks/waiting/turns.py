"""The turn of a worker's head: by which way of a hand-off it may act."""

from __future__ import annotations

from dataclasses import dataclass

from celery_redlock.tasks.signals import HANDOFF_STEPS

NAMED_AT_MOST = 3  # workers, by one release: as in lua/announce.lua
MOST_TURNS = 10  # that a head waits for workers before it, which may be stopped
NAMED, ACTED, LADDER, FALLBACK = HANDOFF_STEPS


@dataclass(frozen=True)
class Turn:
    """Why a head may act.

    step: of `LockHandedOffEvent`, "" as its worker begins to wait or to listen. passed: how many
    workers before it have had their turn. released_at: monotonic seconds of the release's message,
    None without one. unless: id of a message; if its run succeeds, the turn is not needed.
    """

    step: str
    passed: int = 0
    released_at: float | None = None
    unless: str = ""
