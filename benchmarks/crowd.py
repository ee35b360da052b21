"""What one task costs while many wait for its key: `python -m benchmarks.crowd [--quick]`.

Two prefork workers, three nodes, one key. So many messages wait for it; then it is freed, and they
run one after another. Counted from the first send to the last body's end: messages published,
commands on the nodes, and the workers' processor time, of each finished task, as ratios to the
smallest crowd of the same run. The processor time is also a ratio to an uncontended locked task:
as many messages as in a small crowd, each with a key of its own, in the same workers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import runpy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from celery import Celery

from benchmarks import relay
from benchmarks.figures import Aim, against, table
from benchmarks.usage import await_workers, calls, log_lines, processor_time
from celery_redlock import Redlock
from celery_redlock.testing import EmbeddedNode, WorkerProcess, embedded_nodes

# messages that wait for one key
SIZES = (50, 200, 2000)
QUICK_SIZES = (20, 50, 100)
# messages with a key for each
UNCONTENDED = 500
QUICK_UNCONTENDED = 100
WARM_UP = 20
QUEUE = "crowd"
TASK = "crowded"
PATIENCE = 600  # s
AIM = 1.5
AIM_PUT_AGAIN = 0.2
AIM_CPU = 3.0
PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "crowd.py"


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.crowd", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="half a minute, for a look")
    parser.add_argument(
        "--picture", action="store_true", help="write docs/pictures/crowd.svg from this run"
    )
    options = parser.parse_args()
    sizes, apart = (QUICK_SIZES, QUICK_UNCONTENDED) if options.quick else (SIZES, UNCONTENDED)
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(EmbeddedNode())
        crowd = Crowd(broker, stack.enter_context(embedded_nodes(3)))
        for worker in crowd.workers:
            stack.push(worker)
            worker.launch()
        for worker in crowd.workers:
            worker.wait_ready()
        crowd.run(WARM_UP)  # connections, caches
        crowd.run_apart(WARM_UP)
        alone = crowd.run_apart(apart)
        smallest, *larger = (crowd.run(size) for size in sizes)
        baseline = smallest.mean(crowd.run(sizes[0]))  # before and after the others
        alone = alone.mean(crowd.run_apart(apart))
    costs = dict(zip(sizes, (baseline, *larger), strict=True))
    print(report(costs, alone))
    if options.picture:
        figures = {str(size): asdict(cost.over(baseline)) for size, cost in costs.items()}
        PICTURE.with_suffix(".json").write_text(json.dumps(figures, indent=2) + "\n")
        runpy.run_path(str(PICTURE), run_name="__main__")


@dataclass(frozen=True)
class Cost:
    """What one finished task cost, or a ratio of that: messages, commands on all nodes, CPU s."""

    published: float
    commands: float
    seconds: float

    def mean(self, other: Cost) -> Cost:
        """Return what lies in the middle between two."""
        return self._with(other, lambda first, second: (first + second) / 2)

    def over(self, other: Cost) -> Cost:
        """Return the ratios to another."""
        return self._with(other, lambda value, reference: round(value / reference, 3))

    def _with(self, other: Cost, combine: Callable[[float, float], float]) -> Cost:
        names = [field.name for field in fields(self)]
        return Cost(*(combine(getattr(self, name), getattr(other, name)) for name in names))


class Crowd:
    """Workers, and what so many messages that wait for one key cost them."""

    def __init__(self, broker: EmbeddedNode, nodes: Sequence[EmbeddedNode]) -> None:
        self._broker = broker
        self._nodes = nodes
        self._sender = Celery("sender", broker=broker.url, set_as_current=False)
        self._urls = [node.url for node in nodes]
        with Redlock(self._urls, prefix=QUEUE) as redlock:
            redlock.trust()
        env = {
            relay.BROKER: broker.url,
            relay.STORE: broker.url,
            relay.NODES: " ".join(self._urls),
            relay.QUEUE: QUEUE,
        }
        self.workers = [
            WorkerProcess("benchmarks.relay", name=f"{QUEUE}-{number}", env=env, queues=[QUEUE])
            for number in range(2)
        ]
        self._crowds = 0

    def run(self, count: int) -> Cost:
        """Have so many wait for one key, let them run, and return what each of them cost."""
        self._crowds += 1
        key = f"crowd-{self._crowds}"
        before = self._used()
        deferred = self._deferred()
        with Redlock(self._urls, prefix=QUEUE) as redlock, redlock.lock(key, wait=PATIENCE):
            for _ in range(count):
                self._send(key)
            await_workers(self.workers, lambda: self._deferred() - deferred >= count, PATIENCE)
        return self._cost(count, before)

    def run_apart(self, count: int) -> Cost:
        """Run as many messages with a key for each, and return what each of them cost."""
        self._crowds += 1
        before = self._used()
        for number in range(count):
            self._send(f"apart-{self._crowds}-{number}")
        return self._cost(count, before)

    def _send(self, key: str) -> None:
        self._sender.send_task(TASK, (key,), queue=QUEUE, ignore_result=True)

    def _cost(self, count: int, before: Sequence[float]) -> Cost:
        """Return what each of so many messages has cost, once all have run."""
        with self._broker.client() as client:
            await_workers(self.workers, lambda: client.llen(f"{QUEUE}:ran") == count, PATIENCE)
            client.delete(f"{QUEUE}:ran")
        return Cost(
            *(
                (after - earlier) / count
                for after, earlier in zip(self._used(), before, strict=True)
            )
        )

    def _used(self) -> list[float]:
        return [
            calls(self._broker, "lpush"),  # by which Celery publishes
            sum(calls(node) for node in self._nodes),
            processor_time(self.workers),
        ]

    def _deferred(self) -> int:
        return log_lines(self.workers, TASK, "deferred")


def report(costs: dict[int, Cost], alone: Cost) -> str:
    """Return the table and the aims.

    costs: by the size of the crowd, the smallest first. alone: of an uncontended task.
    """
    sizes = list(costs)
    smallest = costs[sizes[0]]
    largest = costs[sizes[-1]]
    rows = []
    for size, cost in costs.items():
        ratio = cost.over(smallest)
        rows.append([
            str(size), f"{cost.published:.2f}", f"{ratio.published:.2f}", f"{cost.commands:.1f}",
            f"{ratio.commands:.2f}", f"{cost.seconds * 1000:.1f}", f"{ratio.seconds:.2f}",
            f"{cost.seconds / alone.seconds:.2f}",
        ])  # fmt: skip
    rows.append([
        "a key for each", f"{alone.published:.2f}", "", f"{alone.commands:.1f}", "",
        f"{alone.seconds * 1000:.1f}", "", "1.00",
    ])  # fmt: skip
    head = [
        "wait",
        "messages",
        "ratio",
        "commands",
        "ratio",
        "CPU ms",
        "ratio",
        "to a key for each",
    ]
    ratios = largest.over(smallest)
    names = {"published": "messages", "commands": "commands on the nodes", "seconds": "CPU"}
    aims = [
        Aim(f"{name} a task, {sizes[-1]} waiting / {sizes[0]}", getattr(ratios, field), AIM)
        for field, name in names.items()
    ]
    aims += [
        Aim(f"put again a task, {sizes[-1]} waiting", largest.published - 1, AIM_PUT_AGAIN),
        Aim(
            f"CPU a task, {sizes[-1]} waiting / uncontended",
            largest.seconds / alone.seconds,
            AIM_CPU,
        ),
    ]
    return f"{table(head, rows)}\n\n{against(aims)}"


if __name__ == "__main__":
    main()
