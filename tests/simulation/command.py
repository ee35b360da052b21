"""What `python3 -m tests.simulation` does."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence

from tests.simulation.clients import simulated_system
from tests.simulation.invariants import Violation
from tests.simulation.runner import NAMES, SEEDS, run_many, schedule_of, summary


def main() -> int:
    """Return the exit status: 0 where no invariant was broken."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.simulation")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long; 60")
    parser.add_argument("--schedules", type=int, default=0, help="how many, instead of how long")
    parser.add_argument("--profile", choices=NAMES, help="of schedules; all in turn")
    parser.add_argument("--seed", type=int, help="run this schedule alone, and say what happens")
    words = parser.parse_args()
    if words.seed is not None:
        return replay(words.profile or "everything", words.seed)
    profiles = [words.profile] if words.profile else []
    return run_new(0.0 if words.schedules else words.seconds, words.schedules, profiles)


def replay(profile: str, seed: int) -> int:
    """Run one schedule and print what happens in it."""
    with simulated_system():
        schedule = schedule_of(profile, seed, trace=True)
        try:
            schedule.run()
        except Violation as violation:
            schedule.world.note("%s", violation)
            return 1
        finally:
            print("\n".join(schedule.world.lines or ()))
    return 0


def run_new(seconds: float, schedules: int, profiles: Sequence[str]) -> int:
    """Run schedules for so many s, or so many, from a base seed that is new each time."""
    base = random.SystemRandom().randrange(SEEDS)
    print(f"base seed {base}", flush=True)
    outcome = run_many(schedules, seconds=seconds, base=base, profiles=profiles)
    for failure in outcome.failures:
        print(failure)
    print(summary(outcome.counts))
    return 1 if outcome.failures else 0
