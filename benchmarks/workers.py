"""What a task of one hot key costs as workers are added: `python -m benchmarks.workers [--quick]`.

Solo workers, three nodes, one key, three messages for each worker. Counted from the first send
until all have finished: messages that were published again, commands a node, the workers' processor
time, and tasks a second on the key, of 100 that are possible: one body after another with no gap.
Beside it, by the same workers, what people write by hand: redis-py's lock on one node, and a retry
after a fixed countdown if that is taken.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import runpy
import signal
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import cast

from celery import Celery

from benchmarks import costs as page_costs
from benchmarks import relay
from benchmarks.figures import Aim, against, table
from benchmarks.usage import await_workers, calls, log_lines, processor_time
from celery_redlock import Redlock
from celery_redlock.testing import EmbeddedNode, WorkerProcess, embedded_nodes

SIZES = (2, 10, 30, 60)  # workers
QUICK_SIZES = (2, 10, 30)  # workers
MESSAGES_PER_WORKER = 3  # messages for each worker
LAUNCHED_AT_ONCE = 4  # workers that start at a time
# of the two ways, over the number of workers
RUNS = 30
QUICK_RUNS = 10
MIN_RUNS = 2
QUEUE = "workers"
OURS = "hot"
BY_HAND = "hot by hand"
WAYS = {OURS: "ours", BY_HAND: "by hand"}
PATIENCE = 300  # s
# most workers / fewest
AIM_MESSAGES = 1.2
AIM_COMMANDS = 1.2
AIM_RATE = 0.9
AIM_CPU = 1.3  # CPU_SIZE workers / fewest
CPU_SIZE = int(page_costs.SIZES_OF_CPU[1])
AIM_TO_BY_HAND = 1.0  # tasks/s
POSSIBLE = 1 / relay.SHORT_BODY_SECONDS  # tasks/s
PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "workers.py"


def main() -> None:
    """Run the benchmark and print its tables and the aims."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.workers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a minute, for a look")
    page_costs.add_option(parser)
    options = parser.parse_args()
    entry = page_costs.Entry.of(options, "workers")
    quick = options.quick
    costs: Costs = {}
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(EmbeddedNode())
        naive_node = stack.enter_context(EmbeddedNode())
        nodes = stack.enter_context(embedded_nodes(3))
        fleet = Fleet(broker, {OURS: nodes, BY_HAND: [naive_node]})
        stack.enter_context(fleet.ended())
        for size in QUICK_SIZES if quick else SIZES:
            fleet.grow(size)
            runs = max(1, QUICK_RUNS // size) if quick else max(MIN_RUNS, RUNS // size)
            for way, cost in fleet.compare(runs).items():
                costs[way, size] = cost
    print(f"{report(costs)}\n\n{against(aims(costs))}")
    if entry is not None:
        entry.write(drawn(costs), {f"CPU {CPU_SIZE}": AIM_CPU})
        runpy.run_path(str(PICTURE), run_name="__main__")


FIGURES = ("published again", "commands a node", "CPU ms", "tasks/s")  # as `Cost.figures`


@dataclass(frozen=True)
class Cost:
    """What one finished task cost: messages after its first, commands a node, CPU s, s of the key.

    `key_time`: the time from the first body's start to the last body's end, over the tasks.
    """

    republished: float
    commands: float
    cpu: float
    key_time: float

    def figures(self) -> tuple[float, ...]:
        """Return what the table shows: as above, but CPU ms, and tasks a second."""
        return self.republished, self.commands, self.cpu * 1000, 1 / self.key_time


Costs = dict[tuple[str, int], Cost]  # by way and number of workers


class Fleet:
    """Solo workers of one queue, and what tasks of one key cost them; nodes: by way."""

    def __init__(self, broker: EmbeddedNode, nodes: dict[str, Sequence[EmbeddedNode]]) -> None:
        self._broker = broker
        self._nodes = nodes
        self._sender = Celery("sender", broker=broker.url, set_as_current=False)
        urls = [node.url for node in nodes[OURS]]
        with Redlock(urls, prefix=QUEUE) as redlock:
            redlock.trust()
        self._env = {
            relay.BROKER: broker.url,
            relay.STORE: broker.url,
            relay.NODES: " ".join(urls),
            relay.NAIVE_NODE: nodes[BY_HAND][0].url,
            relay.QUEUE: QUEUE,
        }
        self._workers: list[WorkerProcess] = []
        self._ends = contextlib.ExitStack()
        self._keys = 0

    @contextlib.contextmanager
    def ended(self) -> Iterator[None]:
        """End all workers at exit: all get the signal first, so that they end side by side."""
        with self._ends:
            try:
                yield
            finally:
                for worker in self._workers:
                    if worker.runs:
                        worker.signal(signal.SIGTERM)

    def grow(self, size: int) -> None:
        """Start workers until there are this many, and warm them up."""
        while len(self._workers) < size:
            missing = min(LAUNCHED_AT_ONCE, size - len(self._workers))
            added = [self._add() for _ in range(missing)]
            for worker in added:
                worker.wait_ready()
        for way in WAYS:
            self._run(way)  # connections, caches

    def _add(self) -> WorkerProcess:
        worker = WorkerProcess(
            "benchmarks.relay", pool="solo", concurrency=1, env=self._env, queues=[QUEUE],
            name=f"{QUEUE}-{len(self._workers)}",
        )  # fmt: skip
        self._workers.append(worker)
        self._ends.push(worker)  # before its start: an interrupt ends it as well
        worker.launch()
        return worker

    def compare(self, runs: int) -> dict[str, Cost]:
        """Run both ways in turns, so many times, and return the mean cost of a task of each."""
        costs_of: dict[str, list[Cost]] = {way: [] for way in WAYS}
        for _ in range(runs):
            for way, costs in costs_of.items():
                costs.append(self._run(way))
        return {way: mean(costs) for way, costs in costs_of.items()}

    def _run(self, way: str) -> Cost:
        """Send the messages of one key, and return what one of them cost."""
        self._keys += 1
        count = MESSAGES_PER_WORKER * len(self._workers)
        before = self._used(way)
        finished = self._finished(way)
        for _ in range(count):
            args = (f"hot-{self._keys}",)
            self._sender.send_task(way, args, queue=QUEUE, ignore_result=True)
        with self._broker.client() as client:
            list_name = f"{QUEUE}:ran"
            await_workers(self._workers, lambda: client.llen(list_name) == count, PATIENCE)
            spans = [
                json.loads(text)[1:3] for text in cast("list[str]", client.lrange(list_name, 0, -1))
            ]
            client.delete(list_name)
        # a log line follows the release, which belongs to the task
        await_workers(self._workers, lambda: self._finished(way) - finished >= count, PATIENCE)
        costs = [
            (after - earlier) / count
            for after, earlier in zip(self._used(way), before, strict=True)
        ]
        began_at = min(begin for begin, _ in spans)
        ended_at = max(end for _, end in spans)
        published, commands, cpu = costs
        return Cost(published - 1, commands, cpu, (ended_at - began_at) / count)

    def _used(self, way: str) -> list[float]:
        nodes = self._nodes[way]
        return [
            calls(self._broker, "lpush"),  # by which Celery publishes
            sum(calls(node) for node in nodes) / len(nodes),
            processor_time(self._workers),
        ]

    def _finished(self, way: str) -> int:
        return log_lines(self._workers, way, "succeeded in")


def mean(costs: Sequence[Cost]) -> Cost:
    """Return the mean of each figure."""
    columns = zip(*map(astuple, costs), strict=True)
    return Cost(*(sum(column) / len(costs) for column in columns))


def report(costs: Costs) -> str:
    """Return the tables: each figure with its ratio to the fewest workers, and ours / by hand."""
    sizes = sorted({size for _, size in costs})
    rows = []
    for way, name in WAYS.items():
        baseline = costs[way, sizes[0]].figures()
        for size in sizes:
            figures = costs[way, size].figures()
            cells = [
                cell
                for figure, base in zip(figures, baseline, strict=True)
                for cell in (f"{figure:.2f}", ratio(figure, base))
            ]
            rows.append([name, str(size), *cells, f"{100 * figures[-1] / POSSIBLE:.0f}"])
    columns = [word for name in FIGURES for word in (name, f"to {sizes[0]}")]
    head = ["a task", "workers", *columns, "of 100 possible"]
    ratio_rows = []
    for size in sizes:
        pairs = zip(costs[OURS, size].figures(), costs[BY_HAND, size].figures(), strict=True)
        ratio_rows.append([str(size), *(ratio(own, other) for own, other in pairs)])
    figures_table = table(head, rows, left=1)
    return f"{figures_table}\n\n{table(['ours / by hand, workers', *FIGURES], ratio_rows)}"


def aims(costs: Costs) -> list[Aim]:
    """Return the aims. A task's messages are its first one and those published again."""
    sizes = sorted({size for _, size in costs})
    fewest = costs[OURS, sizes[0]]
    most = costs[OURS, sizes[-1]]
    sizes_text = f"{sizes[-1]} workers / {sizes[0]}"
    results = [
        Aim(
            f"messages, {sizes_text}",
            (1 + most.republished) / (1 + fewest.republished),
            AIM_MESSAGES,
        ),
        Aim(f"commands a node, {sizes_text}", most.commands / fewest.commands, AIM_COMMANDS),
        Aim(f"tasks/s, {sizes_text}", fewest.key_time / most.key_time, AIM_RATE, is_least=True),
    ]
    if CPU_SIZE in sizes:
        ratio_of_cpu = costs[OURS, CPU_SIZE].cpu / fewest.cpu
        results.append(Aim(f"CPU, {CPU_SIZE} workers / {sizes[0]}", ratio_of_cpu, AIM_CPU))
    for size in sizes:
        speedup = costs[BY_HAND, size].key_time / costs[OURS, size].key_time
        name = f"tasks/s, ours / by hand, {size} workers"
        results.append(Aim(name, speedup, AIM_TO_BY_HAND, is_least=True))
    return results


def drawn(costs: Costs) -> dict[str, dict[str, dict[str, float]]]:
    """Return what the picture and the page show: the figures by way and number of workers."""
    return {
        name: {
            str(size): dict(
                zip(FIGURES, (round(figure, 3) for figure in cost.figures()), strict=True)
            )
            for (cost_way, size), cost in sorted(costs.items())
            if cost_way == way
        }
        for way, name in WAYS.items()
    }


def ratio(figure: float, reference: float) -> str:
    """Return a ratio as text; a dash if there is none, as nothing was counted."""
    return f"{figure / reference:.2f}" if reference > 0 else "-"


if __name__ == "__main__":
    main()
