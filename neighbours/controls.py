"""Runs that have to find a fault, so that a row without one says something. They have no row."""

from __future__ import annotations

from neighbours import schedulers
from neighbours.agents import NEW_RELIC, new_relic
from neighbours.row import CONTROLS, DOES_NOT, Neighbour, Seen
from neighbours.run import Run


def unlocked(run: Run) -> Seen:
    return run.story(app="neighbours.unlocked_app", patience=15)


def beats(run: Run) -> Seen:
    return schedulers.beats(run, more={"scheduler": "celery.beat:Scheduler"})


NEIGHBOURS = (
    Neighbour(
        "Two beats without LockedScheduler",
        CONTROLS,
        "Both send, so that each entry is sent twice.",
        beats,
        verdict=DOES_NOT,
        faults=frozenset(("a beat that waits", "one beat at a time", "no entry sent twice")),
    ),
    Neighbour(
        "Tasks without the base class",
        CONTROLS,
        "Bodies of one key overlap, and a killed one comes back after the visibility timeout.",
        unlocked,
        verdict=DOES_NOT,
        faults=frozenset(
            ("overlaps", "waiting", "revoke", "unique", "redelivery", "lost"),
        ),
    ),
    Neighbour(
        "New Relic without its setting",
        CONTROLS,
        "It counts each exception as an error, Celery's own, too.",
        new_relic,
        NEW_RELIC,
        verdict=DOES_NOT,
        faults=frozenset(("a deferral is an error", "a skip is an error")),
    ),
)
