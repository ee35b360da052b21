"""How long a lock stays unused while others wait for it: `python -m benchmarks.handoff [--quick]`.

From the end of one body to the beginning of the next, with delays of up to 5 s between tries: woken
by the release, by the delay alone, and by hand with redis-py's lock and `self.retry`. One way after
another, each in two prefork workers of its own, or more; small waves of tasks, so that most of the
time three wait.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import signal
from collections.abc import Sequence
from statistics import median
from typing import cast

from celery import Celery

from benchmarks import relay
from benchmarks.figures import Aim, against, table
from celery_redlock import Redlock
from celery_redlock.testing import EmbeddedNode, WorkerProcess, embedded_nodes

WAVE = 4  # tasks that are sent at once
# waves of what is woken
FULL_WAVES = 24
QUICK_WAVES = 4
SLOW_WAVES = 4  # of each that goes by its delay
PATIENCE = 120  # s
MAX_PREFORK = 8  # workers; more of them are solo, so that they fit into a machine's memory
LAUNCHED_AT_ONCE = 4  # workers that start at a time
AIM_P50 = 20.0  # ms
AIM_P99 = 250.0  # ms


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.handoff", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="half a minute, for a look")
    parser.add_argument("--broker", help="a RabbitMQ's URL; else an embedded Valkey")
    parser.add_argument("--workers", type=int, default=2, help="of each way; solo if more than 8")
    options = parser.parse_args()
    woken, slow = (QUICK_WAVES, 1) if options.quick else (FULL_WAVES, SLOW_WAVES)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(EmbeddedNode())
        nodes = stack.enter_context(embedded_nodes(3))
        site = (options.broker or store.url, store, nodes, options.workers)
        lanes = [
            Lane("woken", "locked", woken, *site),
            Lane("by the delay alone", "locked", slow, *site, wakes=False),
            Lane("by hand, redis-py", "by hand", slow, *site),
        ]
        for lane in lanes:
            lane.measure()
    print(report(lanes))


class Lane:
    """Workers with a queue of their own, and the ms between bodies that they were measured at.

    waves: how many are timed. wakes: whether a release wakes who waits.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        waves: int,
        broker: str,
        store: EmbeddedNode,
        nodes: Sequence[EmbeddedNode],
        workers: int,
        *,
        wakes: bool = True,
    ) -> None:
        self.name = name
        self.waves = waves
        self._kind = kind
        self.gaps: list[float] = []
        self._queue = "handoff-" + name.replace(" ", "-").replace(",", "")
        self._client = store.client()
        self._sender = Celery("sender", broker=broker, set_as_current=False)
        urls = [node.url for node in nodes]
        with Redlock(urls, prefix=self._queue) as redlock:
            redlock.trust()
        env = {
            relay.BROKER: broker,
            relay.STORE: store.url,
            relay.NODES: " ".join(urls),
            relay.QUEUE: self._queue,
            relay.WAKES: "yes" if wakes else "no",
        }
        pool, slots = ("prefork", 2) if workers <= MAX_PREFORK else ("solo", 1)
        self.workers = [
            WorkerProcess(
                "benchmarks.relay", name=f"{self._queue}-{number}", env=env, queues=[self._queue],
                pool=pool, concurrency=slots,
            )
            for number in range(workers)
        ]  # fmt: skip

    def measure(self) -> None:
        """Start the workers, run all waves, and end the workers."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.delete_queue)  # after the workers, which would declare it anew
            for worker in self.workers:
                stack.push(worker)
            stack.callback(self._end)  # before each is waited for: they end side by side
            for first in range(0, len(self.workers), LAUNCHED_AT_ONCE):
                starting = self.workers[first : first + LAUNCHED_AT_ONCE]
                for worker in starting:
                    worker.launch()
                for worker in starting:
                    worker.wait_ready()
            self.run_wave()  # connections, caches
            self.gaps.clear()
            for _ in range(self.waves):
                self.run_wave()

    def _end(self) -> None:
        for worker in self.workers:
            if worker.runs:
                worker.signal(signal.SIGTERM)

    def run_wave(self) -> None:
        """Send some tasks at once, and note what lay between their bodies."""
        for _ in range(WAVE):
            self._sender.send_task(self._kind, queue=self._queue, ignore_result=True)
        spans = sorted(json.loads(self._await()) for _ in range(WAVE))
        ends = [end for _, end in spans[:-1]]
        begins = [begin for begin, _ in spans[1:]]
        self.gaps += [(begin - end) * 1000 for begin, end in zip(begins, ends, strict=True)]

    def delete_queue(self) -> None:
        """Leave nothing on a broker that others use, too."""
        queue = self._sender.amqp.queues[self._queue]
        with self._sender.connection_for_write() as connection:
            queue(connection).delete()
            queue.exchange(connection).delete()

    def _await(self) -> str:
        reply = cast(
            "tuple[str, str] | None",
            self._client.blpop([f"{self._queue}:ran"], timeout=PATIENCE),
        )
        if reply is None:
            logs = "\n".join(worker.output() for worker in self.workers)
            raise RuntimeError(f"{self._queue} does not answer:\n{logs}")
        return reply[1]

    def percentile(self, share: float) -> float:
        """Return the ms below which this share of the hand-offs lies."""
        gaps = sorted(self.gaps)
        return gaps[min(len(gaps) - 1, math.ceil(share * len(gaps)) - 1)]


def report(lanes: Sequence[Lane]) -> str:
    """Return the table and the aims."""
    rows = [
        [lane.name, str(len(lane.gaps)), *(f"{ms:.1f}" for ms in (
            median(lane.gaps), lane.percentile(0.99), max(lane.gaps)))]
        for lane in lanes
    ]  # fmt: skip
    woken = lanes[0]
    aims = [
        Aim("woken, p50 ms", median(woken.gaps), AIM_P50),
        Aim("woken, p99 ms", woken.percentile(0.99), AIM_P99),
    ]
    head = ["hand-off", "count", "p50 ms", "p99 ms", "max ms"]
    return f"{table(head, rows, left=1)}\n\n{against(aims)}"


if __name__ == "__main__":
    main()
