"""Refuse tasks whose lock is held: `python -m benchmarks.refused [--quick]`.

One process calls Celery's own tracer on messages as a worker's child gets them, so that what is
counted is the processor time of one try, with the log lines and the message that goes back. All
kinds take turns in short batches within one run.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import logging
import os
import random
import uuid
from collections.abc import Callable, Sequence
from time import process_time

from celery import Celery, Task
from celery.app.trace import build_tracer
from celery.signals import worker_process_init
from redis import Redis

from benchmarks.figures import Aim, Times, against, rotations, table
from celery_redlock import LockedTask, Redlock
from celery_redlock.testing import EmbeddedNode, embedded_nodes

NODES = 3
BATCH = 40  # tries of one kind in a row
FULL_ROTATIONS = 150  # rotations
QUICK_ROTATIONS = 15
TTL = 60.0  # s
PLAIN = "plain"
LOCKED = "locked"
DEFERRED = "deferred"
BY_HAND = "by hand, redis-py"
AIM_LOCKED = 1.5
AIM_BY_HAND = 1.3

Try = Callable[[int], object]  # one message, of this number


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.refused", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds, for a look")
    quick = parser.parse_args().quick
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(open(os.devnull, "w"))  # noqa: PTH123 - no file
        logging.basicConfig(stream=log, level=logging.INFO)  # as a worker's
        worker_process_init.send(None)
        broker = stack.enter_context(EmbeddedNode())
        urls = [node.url for node in stack.enter_context(embedded_nodes(NODES))]
        redlock = stack.enter_context(Redlock(urls))
        redlock.trust()
        stack.enter_context(redlock.lock("held", ttl=TTL))
        client = stack.enter_context(Redis.from_url(urls[0]))
        stack.enter_context(client.lock("by hand", timeout=None))
        times = run(
            tries_of(broker, urls, client), broker, QUICK_ROTATIONS if quick else FULL_ROTATIONS
        )
    print(report(times))


def tries_of(broker: EmbeddedNode, urls: Sequence[str], client: Redis) -> dict[str, Try]:
    """Return what is tried, by kind."""
    app = Celery("refused", broker=broker.url, set_as_current=False)
    app.conf.update(redlock_nodes=list(urls), task_ignore_result=True)

    def body(number: int) -> None: ...

    def by_hand(self: Task, number: int) -> None:
        with contextlib.ExitStack() as stack:
            lock = client.lock("by hand", timeout=TTL)
            if not lock.acquire(blocking=False):
                raise self.retry(countdown=random.uniform(0, TTL), max_retries=None)
            stack.callback(lock.release)

    kinds = {
        PLAIN: app.task(name=PLAIN, shared=False)(body),
        LOCKED: app.task(name=LOCKED, shared=False, base=LockedTask, lock_key="{number}")(body),
        DEFERRED: app.task(name=DEFERRED, shared=False, base=LockedTask, lock_key="held")(body),
        BY_HAND: app.task(name=BY_HAND, shared=False, bind=True)(by_hand),
    }
    app.finalize()
    return {kind: tried(task) for kind, task in kinds.items()}


def tried(task: Task) -> Try:
    """Return a function that runs a task as a worker's child does."""
    trace = build_tracer(task.name, task, app=task.app)
    fields = {
        "lang": "py", "task": task.name, "delivery_info": {"exchange": "", "routing_key": "celery"},
        "retries": 0, "timelimit": [None, None], "origin": "here", "hostname": "here", "eta": None,
        "expires": None, "group": None, "parent_id": None, "kwargsrepr": "{}", "headers": {},
        "properties": {"content_type": "application/json"},
    }  # fmt: skip

    def run(number: int) -> None:
        task_id = str(uuid.uuid4())
        ids = {"id": task_id, "root_id": task_id, "argsrepr": f"({number},)"}
        trace(task_id, (number,), {}, {**fields, **ids})

    return run


def run(tries: dict[str, Try], broker: EmbeddedNode, count: int) -> Times[str]:
    """Return the s of processor time of one try, for each kind in each of so many rotations."""
    times: Times[str] = Times()
    numbers = itertools.count()
    for attempt in tries.values():
        attempt(next(numbers))  # connections
    gc.disable()
    for order in rotations(tries, count):
        rotation = {}
        for kind in order:
            gc.collect()
            rotation[kind] = batch(tries[kind], numbers)
            broker.client().flushall()
        times.add(rotation)
    gc.enable()
    return times


def batch(attempt: Try, numbers: itertools.count[int]) -> float:
    """Return the mean s of processor time of one try, each of other arguments."""
    batch_numbers = list(itertools.islice(numbers, BATCH))
    started = process_time()
    for number in batch_numbers:
        attempt(number)
    return (process_time() - started) / BATCH


def report(times: Times[str]) -> str:
    """Return the table and the aims."""
    rows = [
        [kind, f"{times.p50(kind) * 1e6:.0f}", f"{times.ratio(kind, LOCKED):.2f}"]
        for kind in (PLAIN, LOCKED, DEFERRED, BY_HAND)
    ]
    aims = [
        Aim(f"{DEFERRED} / {LOCKED}", times.ratio(DEFERRED, LOCKED), AIM_LOCKED),
        Aim(f"{DEFERRED} / {BY_HAND}", times.ratio(DEFERRED, BY_HAND), AIM_BY_HAND),
    ]
    head = ["a try", "CPU us", "to locked"]
    return f"{table(head, rows, left=1)}\n\n{against(aims)}"


if __name__ == "__main__":
    main()
