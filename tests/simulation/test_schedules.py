"""No schedule breaks an invariant, and a seed says all of what happens in it."""

from __future__ import annotations

import os

import pytest

from tests.simulation.clients import simulated_system
from tests.simulation.conftest import Told
from tests.simulation.faults import PROFILES
from tests.simulation.runner import CHUNK, run_chunk, run_many, summary
from tests.simulation.schedules import Schedule

# each profile has one chunk at least
SCHEDULES = max(CHUNK * len(PROFILES), int(os.environ.get("CELERY_REDLOCK_SCHEDULES", "5000")))
SEED = 20_260_101
# a window came back after its end (one of 200,000); two threads gave back the same start
BROKEN_ONCE = (("sends", 20_415_314), ("rates-and-limits", 576_934_353))


@pytest.mark.timeout(1800)
def test_no_schedule_breaks_an_invariant(simulated: Told) -> None:
    outcome = run_many(SCHEDULES, base=SEED)
    simulated(outcome.counts)
    assert not outcome.failures, "\n".join(map(str, outcome.failures))
    assert outcome.counts["schedules"] >= SCHEDULES
    for what in (
        "holds",
        "losses",
        "repairs",
        "promotions",
        "silences",
        "zombies",
        "cuts",
        "dropped",
        "windows",
        "duplicates",
        "superseded",
    ):
        assert outcome.counts[what] > 0, summary(outcome.counts)


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_the_same_seed_gives_the_same_schedule(profile: str) -> None:
    def lines() -> list[str]:
        with simulated_system():
            schedule = Schedule(PROFILES[profile], 7, trace=True)
            schedule.run()
        return schedule.world.lines or []

    assert lines() == lines() != []


@pytest.mark.parametrize(("profile", "seed"), BROKEN_ONCE)
def test_a_schedule_that_broke_an_invariant_once_breaks_none(profile: str, seed: int) -> None:
    assert not run_chunk((profile, seed, 1)).failures
