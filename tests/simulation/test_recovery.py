"""Each message of a dead worker is back, and each shortcut in that is caught."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simulation import recovery_steps
from tests.simulation.conftest import Told
from tests.simulation.invariants import Violation
from tests.simulation.recovery import PROFILE, Recovery
from tests.simulation.recovery_invariants import LEASES
from tests.simulation.recovery_mutants import SHORTCUTS
from tests.simulation.runner import run_chunk, summary

SEED, SCHEDULES = 20_260_101, 200
MOST = 2000  # schedules within which a shortcut must be caught


def caught(seed: int) -> Violation | None:
    """Return what a drawn schedule breaks."""
    try:
        Recovery.drawn(seed).run()
    except Violation as violation:
        return violation
    return None


def caught_in_steps(steps: Callable[[Recovery], object]) -> Violation | None:
    """Return what an exact schedule breaks."""
    try:
        Recovery(0).run(steps)
    except Violation as violation:
        return violation
    return None


def test_no_schedule_breaks_an_invariant(simulated: Told) -> None:
    outcome = run_chunk((PROFILE, SEED, SCHEDULES))
    simulated(outcome.counts)
    assert not outcome.failures, "\n".join(map(str, outcome.failures))
    for what in ("kills", "stops", "proofs", "moved", "left", "noted late"):
        assert outcome.counts[what] > 0, summary(outcome.counts)


def test_the_same_seed_gives_the_same_schedule() -> None:
    def lines() -> list[str]:
        schedule = Recovery.drawn(7, trace=True)
        schedule.run()
        return schedule.world.lines or []

    assert lines() == lines() != []


@pytest.mark.parametrize("name", [name for name, one in SHORTCUTS.items() if not one.steps])
def test_a_schedule_catches_a_shortcut(name: str, simulated: Told) -> None:
    shortcut = SHORTCUTS[name]
    with shortcut.patch():
        violation = caught(shortcut.seed)
    assert violation is not None
    assert violation.name in shortcut.breaks
    assert caught(shortcut.seed) is None
    simulated({"mutants caught": 1})


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, one in SHORTCUTS.items() if not one.steps])
def test_the_schedule_that_is_noted_is_the_first_that_catches_its_shortcut(name: str) -> None:
    with SHORTCUTS[name].patch():
        assert SHORTCUTS[name].seed == next((s for s in range(MOST) if caught(s)), None)


@pytest.mark.parametrize("name", [name for name, one in SHORTCUTS.items() if one.steps])
def test_an_exact_schedule_catches_a_shortcut(name: str, simulated: Told) -> None:
    shortcut = SHORTCUTS[name]
    steps = getattr(recovery_steps, shortcut.steps)
    with shortcut.patch():
        violation = caught_in_steps(steps)
    assert violation is not None
    assert violation.name in shortcut.breaks
    assert caught_in_steps(steps) is None
    simulated({"mutants caught": 1})


@pytest.mark.parametrize("befalls", ["kill", "stop"])
def test_a_mover_may_end_or_stop_at_each_step(befalls: str) -> None:
    moved_by_another = False
    for number in range(18, 54):
        schedule = Recovery(number)
        schedule.run(recovery_steps.a_mover_after(number, befalls))
        assert schedule.world.counts["moved"] >= 6
        moved_by_another |= schedule.world.counts["proofs"] > 1
    assert moved_by_another


def test_a_new_worker_moves_at_once_what_nobody_has_claimed() -> None:
    moved: list[int] = []

    def steps(schedule: Recovery) -> None:
        recovery_steps.a_worker_after_a_warm_shutdown(schedule)
        moved.append(schedule.world.counts["moved"])

    Recovery(0).run(steps)
    assert moved == [3]


def test_two_threads_that_join_at_once_leave_one_worker_lease() -> None:
    found: list[tuple[set[str], set[str]]] = []

    def steps(schedule: Recovery) -> None:
        recovery_steps.a_reconnect_as_it_begins_anew(schedule)
        of_workers = {worker.keeper.lease for worker in schedule.workers}
        found.append((of_workers, {*schedule.broker.sets[LEASES]}))

    for seed in range(10):
        Recovery(seed).run(steps)
    assert all(of_workers == known for of_workers, known in found)
