"""How long a lock stays unused while others wait for it: `python -m benchmarks.handoff [--quick]`.

From the end of one body to the beginning of the next, with delays of up to 5 s between tries: woken
by the release, by the delay alone, and by hand with redis-py's lock and `self.retry`. One way after
another, each in two prefork workers of its own, or more; small waves of tasks, so that most of the
time three wait. With `--busy` 200 short tasks wait, while all cores are idle, and while other tasks
keep them busy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
from collections.abc import Iterator, Sequence
from statistics import median
from typing import cast

from celery import Celery

from benchmarks import costs, relay
from benchmarks.figures import Aim, against, percentile, table
from benchmarks.usage import await_workers, log_lines
from celery_redlock import Redlock
from celery_redlock.testing import EmbeddedNode, WorkerProcess, embedded_nodes

WAVE = 4  # tasks that are sent at once
# waves of what is woken
FULL_WAVES = 24
QUICK_WAVES = 4
SLOW_WAVES = 4  # of each that goes by its delay
CROWD = 200  # messages that wait with `--busy`
QUICK_CROWD = 50
CROWD_WAVES = 3
PATIENCE = 120  # s
SPIN_SECONDS = 3600.0  # s: until the worker is killed
MAX_PREFORK = 8  # workers; more of them are solo, so that they fit into a machine's memory
LAUNCHED_AT_ONCE = 4  # workers that start at a time
AIM_P50 = 20.0  # ms
AIM_P99 = 250.0  # ms


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.handoff", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="half a minute, for a look")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--broker", help="a RabbitMQ's URL; else an embedded Valkey")
    what.add_argument("--busy", action="store_true", help="200 wait, with all cores busy as well")
    what.add_argument("--workers", type=int, default=2, help="of each way; solo if more than 8")
    costs.add_option(parser)
    options = parser.parse_args()
    entry = costs.Entry.of(options, command(options))
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(EmbeddedNode())
        nodes = stack.enter_context(embedded_nodes(3))
        site = (options.broker or store.url, store, nodes, options.workers)
        lanes = crowded(site, quick=options.quick) if options.busy else small(site, options.quick)
        for lane in lanes:
            lane.measure()
    print(report(lanes))
    if entry is not None:
        figures = {lane.name: [median(lane.gaps), lane.percentile(0.99)] for lane in lanes}
        figures_ms = {name: [round(ms, 1) for ms in pair] for name, pair in figures.items()}
        entry.write(figures_ms, {"p50": AIM_P50, "p99": AIM_P99})


def command(options: argparse.Namespace) -> str:
    """Return what stands for this run on the page."""
    if options.broker:
        return f"handoff {costs.RABBITMQ}"
    if options.busy:
        return costs.CROWD
    return "handoff" if options.workers == 2 else f"handoff --workers {options.workers}"


Site = tuple[str, EmbeddedNode, Sequence[EmbeddedNode], int]  # broker, store, nodes, workers


def small(site: Site, quick: bool) -> list[Lane]:
    """Return the ways with small waves."""
    woken, slow = (QUICK_WAVES, 1) if quick else (FULL_WAVES, SLOW_WAVES)
    return [
        Lane("woken", "locked", woken, *site),
        Lane("by the delay alone", "locked", slow, *site, wakes=False),
        Lane(costs.BY_HAND, "by hand", slow, *site),
    ]


def crowded(site: Site, *, quick: bool) -> list[Lane]:
    """Return the ways in which a crowd waits: with idle cores, with busy ones, and by hand."""
    crowd, waves = (QUICK_CROWD, 1) if quick else (CROWD, CROWD_WAVES)
    cores = os.cpu_count() or 1
    return [
        Lane("calm", "hot", waves, *site, crowd=crowd),
        Lane("busy", "hot", waves, *site, crowd=crowd, spinners=cores),
        Lane(f"busy, {costs.BY_HAND}", "hot by hand", 1, *site, crowd=crowd, spinners=cores),
    ]


class Lane:
    """Workers with a queue of their own, and the ms between bodies that they were measured at.

    waves: how many are timed. wakes: whether a release wakes who waits. crowd: messages of a wave
    that wait for a key before the first of them may run; 0 sends a small wave to a free lock.
    spinners: cores that other tasks keep busy meanwhile.
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
        crowd: int = 0,
        spinners: int = 0,
    ) -> None:
        self.name = name
        self._crowd = crowd
        self._spinners = spinners
        self._waves_run = 0
        self.waves = waves
        self._kind = kind
        self.gaps: list[float] = []
        self._queue = "handoff-" + name.replace(" ", "-").replace(",", "")
        self._client = store.client()
        self._naive_client = nodes[0].client()
        self._sender = Celery("sender", broker=broker, set_as_current=False)
        self._urls = [node.url for node in nodes]
        with Redlock(self._urls, prefix=self._queue) as redlock:
            redlock.trust()
        env = {
            relay.BROKER: broker,
            relay.STORE: store.url,
            relay.NODES: " ".join(self._urls),
            relay.NAIVE_NODE: nodes[0].url,
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
        self._env = env

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
            run = self.run_crowd if self._crowd else self.run_wave
            run()  # connections, caches
            self.gaps.clear()
            if self._spinners:
                self._spin(stack)
            for _ in range(self.waves):
                run()

    def _end(self) -> None:
        for worker in self.workers:
            if worker.runs:
                worker.signal(signal.SIGTERM)

    def _spin(self, stack: contextlib.ExitStack) -> None:
        """Return once other tasks keep so many cores busy; the stack kills their worker."""
        queue = f"{self._queue}-spin"
        worker = WorkerProcess(
            "benchmarks.relay", name=queue, env=self._env, queues=[queue],
            concurrency=self._spinners,
        )  # fmt: skip
        stack.push(worker)
        stack.callback(worker.kill)  # its tasks do not end
        worker.start()
        for _ in range(self._spinners):
            self._sender.send_task("spin", (SPIN_SECONDS,), queue=queue, ignore_result=True)
        for _ in range(self._spinners):
            self._await("spins")

    def run_crowd(self) -> None:
        """Have a crowd wait for one key, then let it run, and note what lay between the bodies."""
        self._waves_run += 1
        key = f"{self._queue}-{self._waves_run}"
        ended = self._refused()
        with self._held(key):
            for _ in range(self._crowd):
                self._sender.send_task(self._kind, (key,), queue=self._queue, ignore_result=True)
            await_workers(self.workers, lambda: self._refused() - ended >= self._crowd, PATIENCE)
        spans = sorted(json.loads(self._await("ran"))[1:3] for _ in range(self._crowd))
        self._note(spans)

    @contextlib.contextmanager
    def _held(self, key: str) -> Iterator[None]:
        """Hold the key that the tasks of this lane take."""
        if self._kind == "hot":
            with Redlock(self._urls, prefix=self._queue) as redlock, redlock.lock(key):
                yield
        else:
            with self._naive_client.lock(key, timeout=PATIENCE):
                yield

    def _refused(self) -> int:
        """Return how many messages wait, or have tried and will try again."""
        end = "deferred" if self._kind == "hot" else "retry"
        return log_lines(self.workers, self._kind, end)

    def run_wave(self) -> None:
        """Send some tasks at once, and note what lay between their bodies."""
        for _ in range(WAVE):
            self._sender.send_task(self._kind, queue=self._queue, ignore_result=True)
        self._note(sorted(json.loads(self._await("ran")) for _ in range(WAVE)))

    def _note(self, spans: Sequence[tuple[float, float]]) -> None:
        ends = [end for _, end in spans[:-1]]
        begins = [begin for begin, _ in spans[1:]]
        self.gaps += [(begin - end) * 1000 for begin, end in zip(begins, ends, strict=True)]

    def delete_queue(self) -> None:
        """Leave nothing on a broker that others use, too."""
        queue = self._sender.amqp.queues[self._queue]
        with self._sender.connection_for_write() as connection:
            queue(connection).delete()
            queue.exchange(connection).delete()

    def _await(self, what: str) -> str:
        reply = cast(
            "tuple[str, str] | None",
            self._client.blpop([f"{self._queue}:{what}"], timeout=PATIENCE),
        )
        if reply is None:
            logs = "\n".join(worker.output() for worker in self.workers)
            raise RuntimeError(f"{self._queue} does not answer:\n{logs}")
        return reply[1]

    def percentile(self, share: float) -> float:
        """Return the ms below which this share of the hand-offs lies."""
        return percentile(sorted(self.gaps), share)


def report(lanes: Sequence[Lane]) -> str:
    """Return the table and the aims."""
    rows = [
        [lane.name, str(len(lane.gaps)), *(f"{ms:.1f}" for ms in (
            median(lane.gaps), lane.percentile(0.99), max(lane.gaps)))]
        for lane in lanes
    ]  # fmt: skip
    head = ["hand-off", "count", "p50 ms", "p99 ms", "max ms"]
    return f"{table(head, rows, left=1)}\n\n{against(aims(lanes))}"


def aims(lanes: Sequence[Lane]) -> list[Aim]:
    """Return the aims: of the lanes in which a release wakes who waits."""
    return [
        aim
        for lane in lanes
        if lane.name in ("woken", "calm", "busy")
        for aim in (
            Aim(f"{lane.name}, p50 ms", median(lane.gaps), AIM_P50),
            Aim(f"{lane.name}, p99 ms", lane.percentile(0.99), AIM_P99),
        )
    ]


if __name__ == "__main__":
    main()
