"""Many schedules, on all cores, each from a seed of its own."""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tests.simulation.clients import simulated_system
from tests.simulation.faults import PROFILES
from tests.simulation.invariants import Violation
from tests.simulation.recovery import PROFILE as RECOVERY
from tests.simulation.recovery import Recovery
from tests.simulation.schedules import Schedule

# of the tests, 20 of each profile; CI and the nights run many more by `python3 -m tests.simulation`
SCHEDULES = int(os.environ.get("CELERY_REDLOCK_SCHEDULES", "600"))
CHUNK = 200  # schedules that a process is given at a time, at the most
COLLECT = 20  # schedules after which garbage is collected
BATCH = 1000  # chunks
FEW = 1000  # schedules that are over before other processes have imported Celery
MOST_FAILURES = 10  # after which it ends early
NAMES = [*sorted(PROFILES), RECOVERY]  # of all profiles: of locks, and that of worker leases
SEEDS = 1_000_000_000  # what a seed is below


@dataclass(frozen=True)
class Failure:
    """A schedule that went wrong, and how to see it again."""

    profile: str
    seed: int
    text: str

    def __str__(self) -> str:
        again = f"python3 -m tests.simulation --profile {self.profile} --seed {self.seed}"
        return f"{self.text}\n  again: {again}"


@dataclass
class Outcome:
    """What some schedules came to."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """Take another's counts and failures."""
        self.counts.update(other.counts)
        self.failures += other.failures


Chunk = tuple[str, int, int]  # profile, first seed, how many


def run_chunk(chunk: Chunk) -> Outcome:
    """Run the schedules of one profile with consecutive seeds."""
    profile, first, count = chunk
    outcome = Outcome()
    with simulated_system(), garbage_collected_by_hand() as collect:
        for seed in range(first, first + count):
            outcome.add(run_one(profile, seed))
            if seed % COLLECT == 0:
                collect()
    return outcome


@contextlib.contextmanager
def garbage_collected_by_hand() -> Iterator[Callable[[], int]]:
    """Give what collects garbage: a schedule leaves a knot.

    What was there before is looked at neither then nor now: in a process of many tests that would
    take longer than the schedules.
    """
    if not gc.isenabled():
        yield gc.collect  # by hand already
        return
    gc.freeze()
    gc.disable()
    try:
        yield gc.collect
    finally:
        gc.enable()
        gc.unfreeze()


def schedule_of(profile: str, seed: int, *, trace: bool = False) -> Schedule | Recovery:
    """Return the schedule of a profile and a seed."""
    if profile == RECOVERY:
        return Recovery.drawn(seed, trace=trace)
    return Schedule(PROFILES[profile], seed, trace=trace)


def run_one(profile: str, seed: int) -> Outcome:
    """Run one schedule in a simulated system."""
    outcome = Outcome()
    schedule = schedule_of(profile, seed)
    try:
        schedule.run()
    except Violation as violation:
        outcome.failures.append(Failure(profile, seed, str(violation)))
    except Exception as error:
        outcome.failures.append(Failure(profile, seed, f"{type(error).__name__}: {error}"))
    outcome.counts = schedule.world.counts
    outcome.counts["schedules"] = 1
    return outcome


def chunks(base: int, profiles: Sequence[str], size: int = CHUNK) -> Iterator[Chunk]:
    """Yield chunks for ever, each with seeds of its own, the profiles in turn."""
    for number in itertools.count():
        profile = profiles[number % len(profiles)]
        yield profile, (base + number * size) % SEEDS, size


def shares(schedules: int, base: int, profiles: Sequence[str]) -> Iterator[Chunk]:
    """Return chunks of so many schedules or a few more: each profile has as many of them."""
    rounds = -(-schedules // (CHUNK * len(profiles)))
    chunks_in_all = rounds * len(profiles)
    return itertools.islice(chunks(base, profiles, -(-schedules // chunks_in_all)), chunks_in_all)


def run_many(
    schedules: int = 0, *, seconds: float = 0.0, base: int = 0, profiles: Sequence[str] = ()
) -> Outcome:
    """Run so many schedules, or for so many s, on all cores; ends early where some go wrong.

    A few run in this process.
    """
    outcome, began = Outcome(), time.monotonic()
    profiles = profiles or NAMES
    work = shares(schedules, base, profiles) if schedules else chunks(base, profiles)
    if 0 < schedules <= FEW:
        with garbage_collected_by_hand():
            for found in map(run_chunk, work):
                outcome.add(found)
                if len(outcome.failures) >= MOST_FAILURES:
                    break
        return outcome
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        # in batches, for a pool takes on at once all that there is to do
        while batch := list(itertools.islice(work, BATCH)):
            for found in pool.imap_unordered(run_chunk, batch):
                outcome.add(found)
                late = seconds and time.monotonic() - began > seconds
                if late or len(outcome.failures) >= MOST_FAILURES:
                    return outcome
    return outcome


def summary(counts: Counter[str]) -> str:
    """Return what was done, in one line."""
    names = (
        "schedules", "events", "holds", "starts", "losses", "repairs", "promotions", "silences",
        "restarts", "fail-backs", "stops", "cuts", "zombies", "dropped", "windows", "duplicates",
        "superseded", "runs in order", "kills", "proofs", "moved", "mutants caught",
    )  # fmt: skip
    return ", ".join(f"{counts[name]} {name}" for name in names if name in counts)
