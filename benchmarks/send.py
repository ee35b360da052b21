"""Send a task with and without deduplication: `python -m benchmarks.send [--quick]`.

One process sends to one Valkey that no worker empties but this one between the batches. All senders
take turns in short batches within one run. Told are the time of a send, and the processor time of
the process.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import itertools
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter, process_time
from typing import Any

from celery import Celery, Task

from benchmarks.figures import Aim, Times, against, rotations, table
from celery_redlock import LockedTask, Redlock
from celery_redlock.testing import EmbeddedNode, embedded_nodes

SIZES = (1, 3, 5)
BATCH = 40  # sends of one kind in a row
FULL_ROTATIONS = 150  # rotations
QUICK_ROTATIONS = 15
WINDOW = 3600  # s
PLAIN = "plain"
LOCKED = "locked"
AIM_LOCKED = 1.05
AIM_THEIRS = 1.0
AIMS_CPU = {1: 1.15, 3: 1.4}  # by the number of nodes, to the processor time of celery-singleton

Send = Callable[[int], object]  # one message, of this number


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.send", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds, for a look")
    quick = parser.parse_args().quick
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(EmbeddedNode())
        nodes = stack.enter_context(embedded_nodes(max(SIZES)))
        senders = senders_of(broker, [node.url for node in nodes])
        costs = run(senders, broker, nodes, QUICK_ROTATIONS if quick else FULL_ROTATIONS)
    print(report(*costs, senders))


def senders_of(broker: EmbeddedNode, urls: Sequence[str]) -> dict[str, Send]:
    """Return who sends, by name; those that are not installed are left out."""
    senders: dict[str, Send] = {}
    locked_app = app_over(broker, urls[:1])
    senders[PLAIN] = locked_app.task(name="plain", shared=False)(body).delay
    senders[LOCKED] = locked_app.task(name="locked", shared=False, base=LockedTask)(body).delay
    for size in SIZES:
        with Redlock(urls[:size]) as redlock:
            redlock.trust()
        decorate = app_over(broker, urls[:size]).task(
            name="once", shared=False, base=LockedTask, lock_unique_for=WINDOW
        )
        senders[ours(size)] = decorate(body).delay
    for name, task in (("celery-once", celery_once), ("celery-singleton", celery_singleton)):
        with contextlib.suppress(PackageNotFoundError):
            label = f"{name} {version(name)}"  # raises before anything of it is imported
            senders[label] = task(broker, urls[0]).delay
    return senders


def ours(size: int) -> str:
    """Return the name of ours with deduplication over so many nodes."""
    return f"unique_for, nodes: {size}"


def body(number: int) -> None:
    """Do nothing, and nobody runs it."""


def app_over(broker: EmbeddedNode, urls: Sequence[str], **conf: Any) -> Celery:
    """Return an app of its own."""
    app = Celery("sender", broker=broker.url, set_as_current=False)
    app.conf.update(redlock_nodes=list(urls), task_ignore_result=True, **conf)
    return app


def celery_once(broker: EmbeddedNode, url: str) -> Task:
    """Return celery-once's task, which keeps its keys on one node."""
    base = importlib.import_module("celery_once").QueueOnce
    backend = {"backend": "celery_once.backends.Redis", "settings": {"url": url}}
    app = app_over(broker, [url], ONCE=backend)
    return app.task(name="theirs", shared=False, base=base)(body)


def celery_singleton(broker: EmbeddedNode, url: str) -> Task:
    """Return celery-singleton's task, which keeps its keys on one node."""
    base = importlib.import_module("celery_singleton").Singleton
    app = app_over(broker, [url], singleton_backend_url=url, singleton_lock_expiry=WINDOW)
    return app.task(name="theirs", shared=False, base=base)(body)


def run(
    senders: dict[str, Send], broker: EmbeddedNode, nodes: Sequence[EmbeddedNode], count: int
) -> tuple[Times[str], Times[str]]:
    """Return the seconds of one send, for each sender in each of so many rotations.

    The second result has the processor time.
    """
    times: Times[str] = Times()
    cpu_times: Times[str] = Times()
    numbers = itertools.count()
    for sender in senders.values():
        sender(next(numbers))  # connections
    gc.disable()
    for order in rotations(senders, count):
        rotation = {}
        cpu_rotation = {}
        for name in order:
            gc.collect()
            rotation[name], cpu_rotation[name] = batch(senders[name], numbers)
            broker.client().flushall()
        times.add(rotation)
        cpu_times.add(cpu_rotation)
        for node in nodes:
            node.client().flushall()
    gc.enable()
    return times, cpu_times


def batch(send: Send, numbers: itertools.count[int]) -> tuple[float, float]:
    """Return the mean seconds of one send, each of other arguments, and those of the processor."""
    batch_numbers = list(itertools.islice(numbers, BATCH))
    started = perf_counter()
    cpu_started = process_time()
    for number in batch_numbers:
        send(number)
    cpu_seconds = process_time() - cpu_started
    return (perf_counter() - started) / BATCH, cpu_seconds / BATCH


def report(
    times: Times[str], cpu_times: Times[str], senders: Sequence[str] | dict[str, Send]
) -> str:
    """Return the table and the aims."""
    rows = [
        [name, *(f"{of.p50(name) * 1e6:.0f}" for of in (times, cpu_times)),
         *(f"{of.ratio(name, PLAIN):.2f}" for of in (times, cpu_times))]
        for name in senders
    ]  # fmt: skip
    other_names = [name for name in senders if name.startswith("celery-")]
    aims = [Aim("locked, not deduplicated / plain", times.ratio(LOCKED, PLAIN), AIM_LOCKED)]
    aims += [
        Aim(f"ours, nodes: {size} / {name}", times.ratio(ours(size), name), AIM_THEIRS)
        for name in other_names
        for size in SIZES[:2]
    ]
    aims += [
        Aim(f"CPU, nodes: {size} / {name}", cpu_times.ratio(ours(size), name), bound)
        for name in other_names
        if name.startswith("celery-singleton")
        for size, bound in AIMS_CPU.items()
    ]
    head = ["a send", "us", "CPU us", "to plain", "CPU to plain"]
    return f"{table(head, rows, left=1)}\n\n{against(aims)}"


if __name__ == "__main__":
    main()
