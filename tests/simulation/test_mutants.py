"""Every shortcut that looks right is caught; those that only look wrong are not."""

from __future__ import annotations

import contextlib

import pytest

from tests.simulation import interleavings
from tests.simulation.clients import simulated_system
from tests.simulation.conftest import Told
from tests.simulation.faults import PROFILES
from tests.simulation.invariants import Violation
from tests.simulation.mutants import MUTANTS, Mutant
from tests.simulation.runner import garbage_collected_by_hand
from tests.simulation.schedules import Schedule
from tests.simulation.stage import Stage

MOST = 3000  # schedules within which a shortcut must be caught
HARMLESS = 100  # in which what only looks wrong breaks nothing
WRONG = [mutant for mutant in MUTANTS.values() if not mutant.safe]
SAFE = [mutant for mutant in MUTANTS.values() if mutant.safe]


def caught_by_chance(mutant: Mutant, schedules: int) -> Violation | None:
    """Return how random schedules catch a shortcut, None where they do not."""
    profile = PROFILES[mutant.profile]
    with simulated_system(), mutant.patch(), garbage_collected_by_hand() as collect:
        for seed in range(schedules):
            try:
                Schedule(profile, seed).run()
            except Violation as violation:
                return violation
            if seed % 20 == 0:
                collect()
    return None


def caught_in_steps(mutant: Mutant | None, steps: str) -> Violation | None:
    """Return how an exact interleaving catches a shortcut, None where it does not."""
    patch = mutant.patch() if mutant else contextlib.nullcontext()
    with simulated_system(), patch:
        stage = Stage()
        try:
            getattr(interleavings, steps)(stage)
        except Violation as violation:
            return violation
        finally:
            stage.world.close()
    return None


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [m for m in WRONG if not m.steps], ids=lambda m: m.name)
def test_random_schedules_catch_a_shortcut(mutant: Mutant, simulated: Told) -> None:
    violation = caught_by_chance(mutant, MOST)
    assert violation is not None
    assert violation.name in mutant.breaks
    simulated({"mutants caught": 1})


@pytest.mark.parametrize("mutant", [m for m in WRONG if m.steps], ids=lambda m: m.name)
def test_an_exact_interleaving_catches_a_shortcut(mutant: Mutant, simulated: Told) -> None:
    violation = caught_in_steps(mutant, mutant.steps)
    assert violation is not None
    assert violation.name in mutant.breaks
    simulated({"mutants caught": 1})


@pytest.mark.parametrize("steps", sorted({m.steps for m in WRONG if m.steps}))
def test_the_shipped_code_stands_the_same_interleaving(steps: str) -> None:
    assert caught_in_steps(None, steps) is None


@pytest.mark.parametrize("mutant", SAFE, ids=lambda m: m.name)
def test_what_only_looks_wrong_breaks_nothing(mutant: Mutant) -> None:
    assert caught_by_chance(mutant, HARMLESS) is None
    assert caught_in_steps(mutant, "three_restarts") is None
