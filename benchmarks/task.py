"""Run tasks with and without a lock on real workers: `python -m benchmarks.task [--quick]`.

One worker (solo pool) for each number of nodes, and one that has one of three nodes stopped, over
one broker; all but one are idle. A worker is held until a whole rotation lies in its queue, so that
nobody sends while its tasks are timed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Sequence
from typing import cast

from celery import Celery

from benchmarks import worker
from benchmarks.figures import Aim, Times, against, rotations, table
from celery_redlock import Redlock
from celery_redlock.testing import EmbeddedNode, WorkerProcess, embedded_nodes

SIZES = (1, 3, 5)
STALLED = "3-one-stopped"  # the lane whose third node is stopped
KINDS = ("plain", "locked", "raw", "raw script", "redis-py")  # tasks of benchmarks.worker
SURVIVING_KINDS = ("plain", "locked", "redis-py")  # a floor has no answer to a stopped node
# tasks of one kind in a row
BATCH = 60
QUICK_BATCH = 30
# rotations
FULL_ROTATIONS = 60
QUICK_ROTATIONS = 6
SETTLING_ROTATIONS = 3  # rotations in which a stopped node is given up
AIM_RAW = 1.12
AIM_STALLED = 1.1

Kind = tuple[str, str]  # what stands around the body, in which lane


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.task", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds, for a look")
    quick = parser.parse_args().quick
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(EmbeddedNode())
        nodes = stack.enter_context(embedded_nodes(max(SIZES)))
        others = stack.enter_context(embedded_nodes(3))
        lanes = [Lane(str(size), broker, nodes[:size], KINDS) for size in SIZES]
        lane_stalled = Lane(STALLED, broker, others, SURVIVING_KINDS)
        lanes.insert(SIZES.index(3) + 1, lane_stalled)  # next in time to what it is compared with
        for lane in lanes:
            stack.push(lane.worker)
            lane.worker.launch()
        batch = QUICK_BATCH if quick else BATCH
        for lane in lanes:
            lane.rotate(lane.kinds, batch)  # connections, caches
        others[-1].pause()
        for _ in range(SETTLING_ROTATIONS):
            lane_stalled.rotate(lane_stalled.kinds, batch)
        times = run(lanes, QUICK_ROTATIONS if quick else FULL_ROTATIONS, batch)
    print(report(times))


class Lane:
    """One worker with a queue of its own, whose locks are on these nodes.

    kinds: of task that it runs, a subset of KINDS.
    """

    def __init__(
        self,
        name: str,
        broker: EmbeddedNode,
        nodes: Sequence[EmbeddedNode],
        kinds: Sequence[str],
    ) -> None:
        self.name = name
        self.kinds = kinds
        self._queue = f"lane-{name}"
        self._client = broker.client()
        self._sender = Celery("sender", broker=broker.url, set_as_current=False)
        self._sent = 0
        urls = [node.url for node in nodes]
        with Redlock(urls) as redlock:
            redlock.trust()
        env = {
            worker.BROKER: broker.url,
            worker.NODES: " ".join(urls),
            worker.QUEUE: self._queue,
        }
        self.worker = WorkerProcess(
            "benchmarks.worker", pool="solo", concurrency=1, name=self._queue, env=env,
            queues=[self._queue], loglevel="WARNING",
        )  # fmt: skip

    def rotate(self, order: Sequence[str], batch: int) -> dict[Kind, float]:
        """Run a batch of each of its kinds in this order; returns the seconds of one task."""
        order = [kind for kind in order if kind in self.kinds]
        self._send("hold")
        self._await("holds")
        for kind in order:
            for _ in range(batch):
                self._sent += 1
                self._send(kind, self._sent)
        self._send("tell")
        self._client.rpush(f"{self._queue}:go", "yes")
        seconds: dict[str, float] = json.loads(self._await("told"))
        return {(kind, self.name): seconds[kind] for kind in order}

    def _send(self, kind: str, *args: int) -> None:
        self._sender.send_task(kind, args, queue=self._queue, ignore_result=True)

    def _await(self, suffix: str) -> str:
        reply = cast(
            "tuple[str, str] | None",
            self._client.blpop([f"{self._queue}:{suffix}"], timeout=worker.PATIENCE),
        )
        if reply is None:
            raise RuntimeError(f"{self._queue} does not answer:\n{self.worker.output()}")
        return reply[1]


def run(lanes: Sequence[Lane], count: int, batch: int) -> Times[Kind]:
    """Return the seconds of one task, for each kind in each of so many rotations."""
    times: Times[Kind] = Times()
    for order in rotations(KINDS, count):
        rotation: dict[Kind, float] = {}
        for lane in lanes:
            rotation |= lane.rotate(order, batch)
        times.add(rotation)
    return times


def report(times: Times[Kind]) -> str:
    """Return the table and the aims."""
    rows = []
    for size in map(str, SIZES):
        rates = [f"{1 / times.p50((kind, size)):.0f}" for kind in KINDS]
        ratios = [
            f"{times.ratio(('locked', size), (kind, size)):.2f}"
            for kind in ("plain", "raw", "raw script")
        ]
        rows.append([size, *rates, *ratios])
    head = ["nodes", *(f"{kind}/s" for kind in KINDS), "locked/plain", "/raw", "/raw script"]
    redis_ratio = times.ratio(("redis-py", "1"), ("plain", "1"))
    own_ratio = times.ratio(("locked", "3"), ("redis-py", "3"))
    return (
        f"{table(head, rows)}\n\n"
        f"ratios are of the time a task takes\n"
        f"redis-py's lock, 1 node, to a plain task: {redis_ratio:.2f}; "
        f"ours, 3 nodes, to redis-py's, 1 node: {own_ratio:.2f}\n\n"
        f"{against(aims(times))}"
    )


def aims(times: Times[Kind]) -> list[Aim]:
    """Return what the run is to show."""
    results = [
        Aim(f"locked / raw, nodes: {size}", times.ratio(("locked", size), ("raw", size)), AIM_RAW)
        for size in map(str, SIZES)
    ]
    figure = times.ratio(("locked", STALLED), ("locked", "3"))
    results.append(Aim("locked, one of 3 nodes stopped / none", figure, AIM_STALLED))
    return results


if __name__ == "__main__":
    main()
