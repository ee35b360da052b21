"""Acquire and release one uncontended lock: `python -m benchmarks.pair [--quick]`.

Ours beside the floor (bare sockets, as many nodes), the floor with our grant script, ours with one
of three nodes stopped, and other people's locks. All take turns in short batches within one run.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, perf_counter

from benchmarks.figures import Aim, Times, against, rotations, table
from benchmarks.floor import Floor
from benchmarks.others import OTHERS, Pair
from celery_redlock import Redlock
from celery_redlock.testing import EmbeddedNode, embedded_nodes

SIZES = (1, 3, 5)
# pairs between two readings of the clock
BATCH = 50
BATCH_OF_OTHERS = 10
# rotations
FULL_ROTATIONS = 300
QUICK_ROTATIONS = 30
CONNECT_WAIT = 10.0  # s
NODE_TIMEOUT = 0.2  # s
SETTLE_TIME = 5 * NODE_TIMEOUT  # s after which a stopped node has been given up
AIM_FLOOR = 1.2
AIM_ONE = 0.8
AIM_THREE = 1.4
AIM_STALLED = 1.2

Kind = tuple[str, int]  # who, on how many nodes
OURS_STALLED: Kind = ("ours, one stalled", 3)


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pair", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds, for a look")
    quick = parser.parse_args().quick
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(embedded_nodes(max(SIZES)))
        runners = contestants(stack, [node.url for node in nodes])
        runners[OURS_STALLED] = stalled(stack, stack.enter_context(embedded_nodes(3)))
        times = run(runners, QUICK_ROTATIONS if quick else FULL_ROTATIONS)
    print(report(times))


@dataclass(frozen=True)
class Runner:
    """A contestant's acquire and release, and how many pairs of them make a batch."""

    pair: Pair
    batch: int = BATCH

    def run(self) -> float:
        """Acquire and release many times; returns the mean seconds of one pair."""
        acquire, release = self.pair
        started = perf_counter()
        for _ in range(self.batch):
            acquire()
            release()
        return (perf_counter() - started) / self.batch


def contestants(stack: contextlib.ExitStack, urls: Sequence[str]) -> dict[Kind, Runner]:
    """Return those that run over healthy nodes, connected; the stack closes them."""
    runners: dict[Kind, Runner] = {}
    for size in SIZES:
        runners["ours", size] = Runner(ours(stack, urls[:size], f"ours-{size}"))
        for name in ("floor", "script floor"):
            floor = Floor(urls[:size], f"{name}-{size}", script=name == "script floor")
            stack.callback(floor.close)
            runners[name, size] = Runner((floor.acquire, floor.release))
    for other in OTHERS:
        if other.installed:
            for size in other.sizes:
                runners[other.package, size] = Runner(
                    other.pair(stack, urls[:size]), BATCH_OF_OTHERS
                )
    return runners


def ours(stack: contextlib.ExitStack, urls: Sequence[str], prefix: str) -> Pair:
    """Return the acquire and release of our lock, connected to all nodes."""
    redlock = Redlock(urls, prefix=prefix, node_timeout=NODE_TIMEOUT)
    stack.enter_context(redlock)
    redlock.trust()
    lock = redlock.lock("x")
    lock.acquire(CONNECT_WAIT)
    lock.release()
    return lock.acquire, lock.release


def stalled(stack: contextlib.ExitStack, nodes: Sequence[EmbeddedNode]) -> Runner:
    """Return ours over nodes of which one was stopped, and has been given up by now."""
    runner = Runner(ours(stack, [node.url for node in nodes], "stalled"))
    runner.run()
    nodes[-1].pause()
    end = monotonic() + SETTLE_TIME
    while monotonic() < end:
        runner.run()
    return runner


def run(runners: Mapping[Kind, Runner], count: int) -> Times[Kind]:
    """Return the seconds of one pair, for each contestant in each of so many rotations."""
    times: Times[Kind] = Times()
    for runner in runners.values():
        runner.run()  # connections, caches
    for order in rotations(runners, count):
        times.add({kind: runners[kind].run() for kind in order})
    return times


def report(times: Times[Kind]) -> str:
    """Return the tables and the aims."""
    return "\n\n".join([floors(times), others(times), against(aims(times))])


def floors(times: Times[Kind]) -> str:
    """Return ours beside the floors."""
    rows = []
    for size in SIZES:
        kinds = [(name, size) for name in ("ours", "floor", "script floor")]
        ratios = [f"{times.ratio(('ours', size), kind):.2f}" for kind in kinds[1:]]
        rows.append([str(size), *(microseconds(times, kind) for kind in kinds), *ratios])
    head = ["nodes", "ours us", "floor us", "script us", "ours/floor", "ours/script"]
    return table(head, rows)


def others(times: Times[Kind]) -> str:
    """Return other people's locks beside ours on as many nodes; names those not installed."""
    rows = [
        [
            f"{other.package} {other.installed}",
            str(size),
            microseconds(times, (other.package, size)),
            f"{times.ratio(('ours', size), (other.package, size)):.2f}",
        ]
        for other in OTHERS
        if other.installed
        for size in other.sizes
    ]
    text = table(["lock of", "nodes", "its us", "ours/its"], rows, left=1)
    missing = [other.package for other in OTHERS if not other.installed]
    return f"{text}\nnot installed: {', '.join(missing)}" if missing else text


def aims(times: Times[Kind]) -> list[Aim]:
    """Return what the run is to show."""
    results = [
        Aim(f"ours / floor, nodes: {size}", times.ratio(("ours", size), ("floor", size)), AIM_FLOOR)
        for size in SIZES
    ]
    for size, bound in ((1, AIM_ONE), (3, AIM_THREE)):
        figure = times.ratio(("ours", size), ("redis", 1))
        results.append(Aim(f"ours, nodes: {size} / redis-py's, nodes: 1", figure, bound))
    figure = times.ratio(OURS_STALLED, ("ours", 3))
    results.append(Aim("ours, one of 3 nodes stopped / none", figure, AIM_STALLED))
    return results


def microseconds(times: Times[Kind], kind: Kind) -> str:
    """Return a kind's median as text."""
    return f"{times.p50(kind) * 1e6:.0f}"


if __name__ == "__main__":
    main()
