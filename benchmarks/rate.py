"""What a start of a rate costs: `python -m benchmarks.rate [--quick]`.

A granted start is an acquire and a release of a lock with a `rate`, a refused one is a try that
finds no start free. Both are ratios to an acquire and a release of the same client without a rate,
and to a bare `INCRBY` of redis-py, with which people count by hand, on one node. All take turns in
short batches within one run.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

from redis import Redis

from benchmarks import costs
from benchmarks.figures import Aim, Times, against, rotations, table
from celery_redlock import Redlock
from celery_redlock.testing import embedded_nodes

SIZES = (1, 3)  # nodes
STARTS = 100
RATE = f"{STARTS}/h"
BATCH = 50  # starts between two readings of the clock, of one key
# rotations
FULL_ROTATIONS = 300
QUICK_ROTATIONS = 30
CONNECT_WAIT = 10.0  # s
LOCK = "lock"
GRANTED = "granted"
REFUSED = "refused"
INCRBY = "INCRBY"
AIM_GRANTED = 2.0  # locks
AIM_REFUSED = 1.5  # locks

Kind = tuple[str, int]  # what, on how many nodes
Batch = Callable[[], object]
BARE: Kind = (INCRBY, 1)


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rate", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds, for a look")
    costs.add_option(parser)
    options = parser.parse_args()
    entry = costs.Entry.of(options, "rate")
    with contextlib.ExitStack() as stack:
        urls = [node.url for node in stack.enter_context(embedded_nodes(max(SIZES)))]
        batches = {BARE: counted(stack, urls[0])}
        for size in SIZES:
            batches |= batches_of(stack, urls[:size])
        times = run(batches, QUICK_ROTATIONS if options.quick else FULL_ROTATIONS)
    print(report(times))
    if entry is not None:
        entry.write(figures(times), {GRANTED: AIM_GRANTED, REFUSED: AIM_REFUSED})


def counted(stack: contextlib.ExitStack, url: str) -> Batch:
    """Return a batch of bare counts."""
    client = stack.enter_context(Redis.from_url(url))

    def batch() -> None:
        for _ in range(BATCH):
            client.incrby("starts", 1)

    return batch


def batches_of(stack: contextlib.ExitStack, urls: Sequence[str]) -> dict[Kind, Batch]:
    """Return the batches of one client over these nodes, connected; the stack closes it."""
    size = len(urls)
    redlock = Redlock(urls, prefix=f"rate-{size}")
    stack.enter_context(redlock)
    redlock.trust()
    plain = redlock.lock("plain")
    used_up = redlock.lock("used up", rate=RATE)
    numbers = itertools.count()

    def lock() -> None:
        for _ in range(BATCH):
            plain.acquire()
            plain.release()

    def granted() -> None:
        limited = redlock.lock(f"granted-{next(numbers)}", rate=RATE)
        for _ in range(BATCH):
            limited.acquire()
            limited.release()

    def refused() -> None:
        for _ in range(BATCH):
            if used_up.try_acquire():
                raise RuntimeError(f"more than {RATE} starts")

    for _ in range(STARTS):
        used_up.acquire(CONNECT_WAIT)
        used_up.release()
    return {(LOCK, size): lock, (GRANTED, size): granted, (REFUSED, size): refused}


def run(batches: Mapping[Kind, Batch], count: int) -> Times[Kind]:
    """Return the mean seconds of one step of each kind, in each of so many rotations."""
    times: Times[Kind] = Times()
    for batch in batches.values():
        batch()  # connections, caches
    for order in rotations(batches, count):
        times.add({kind: timed(batches[kind]) for kind in order})
    return times


def timed(batch: Batch) -> float:
    """Return the mean seconds of one step of a batch."""
    started = perf_counter()
    batch()
    return (perf_counter() - started) / BATCH


def report(times: Times[Kind]) -> str:
    """Return the table and the aims."""
    rows = [
        [kind, str(size), f"{times.p50((kind, size)) * 1e6:.0f}",
         f"{times.ratio((kind, size), (LOCK, size)):.2f}",
         f"{times.ratio((kind, size), BARE):.2f}"]
        for size in SIZES
        for kind in (LOCK, GRANTED, REFUSED)
    ]  # fmt: skip
    rows.append([INCRBY, "1", f"{times.p50(BARE) * 1e6:.0f}", "", "1.00"])
    head = ["a start", "nodes", "us", "to a lock", f"to {INCRBY}"]
    return f"{table(head, rows, left=1)}\n\n{against(aims(times))}"


def aims(times: Times[Kind]) -> list[Aim]:
    """Return the aims: a granted start is a lock and a script more, a refused one is less."""
    return [
        Aim(f"{kind} / {LOCK}, nodes: {size}", times.ratio((kind, size), (LOCK, size)), bound)
        for size in SIZES
        for kind, bound in ((GRANTED, AIM_GRANTED), (REFUSED, AIM_REFUSED))
    ]


def figures(times: Times[Kind]) -> dict[str, dict[str, dict[str, float]]]:
    """Return what the page shows, by number of nodes."""
    return {
        str(size): {
            kind: {
                "to a lock": round(times.ratio((kind, size), (LOCK, size)), 3),
                f"to {INCRBY}": round(times.ratio((kind, size), BARE), 3),
            }
            for kind in (GRANTED, REFUSED)
        }
        for size in SIZES
    }


if __name__ == "__main__":
    main()
