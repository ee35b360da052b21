"""The app of two builds of the package that run beside each other, and what sends to it.

A test copies this file, and each process imports another build: nothing else of the tests is here.
All that bodies do is noted on one Redis, which also sees whether two of them overlap.
"""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

from celery import Celery
from redis import Redis

from celery_redlock import Backoff, LockedTask

BUILD = os.environ["ROLLING_BUILD"]
KEYS = 3
app = Celery("rolling", broker=os.environ["ROLLING_BROKER"], backend=os.environ["ROLLING_BROKER"])
app.conf.update(
    redlock_nodes=os.environ["ROLLING_NODES"].split(","), redlock_node_timeout=2.0,
    broker_connection_retry_on_startup=True, result_expires=600, task_ignore_result=True,
)  # fmt: skip
notes = Redis.from_url(os.environ["ROLLING_NOTES"], decode_responses=True)
options: dict[str, Any] = {"base": LockedTask, "lock_backoff": Backoff(first=0.05, cap=0.5)}


def note(name: str, *words: object) -> None:
    notes.rpush(name, " ".join(map(str, words)))


def work(kind: str, resource: str, number: str, most: int = 1) -> None:
    """Be a body that notes its run. most: how many may be in here at once."""
    if notes.incr(f"in {resource}") > most:
        note("overlaps", kind, resource, number)
    note("begun", kind, resource, number, BUILD)
    time.sleep(0.02)
    notes.decr(f"in {resource}")
    note("ended", kind, resource, number, BUILD)


@app.task(name="rolling.late", lock_key="stock:{key}", acks_late=True, **options)
def late(key: str, number: str) -> None:
    work("late", f"stock:{key}", number)


@app.task(name="rolling.early", lock_key="stock:{key}", **options)
def early(key: str, number: str) -> None:
    work("early", f"stock:{key}", number)


@app.task(name="rolling.permitted", lock_key="api:{key}", lock_limit=2, acks_late=True, **options)
def permitted(key: str, number: str) -> None:
    work("permitted", f"api:{key}", number, most=2)


@app.task(
    name="rolling.once", lock_key="mail:{key}", lock_unique_for=60, lock_unique_until="started",
    acks_late=True, **options,
)  # fmt: skip
def once(key: str, number: str) -> None:
    work("once", f"mail:{key}", number)


@app.task(
    name="rolling.newest", lock_key="page:{key}", lock_unique_for=60, lock_unique_until="started",
    lock_on_duplicate="newest", acks_late=True, **options,
)  # fmt: skip
def newest(key: str, number: str) -> None:
    work("newest", f"page:{key}", number)


def send_until_stopped() -> None:
    """Send each kind of task in turn; note what is sent, and is no duplicate."""
    for count in itertools.count():
        if notes.exists("stop"):
            return
        key, number = str(count % KEYS), f"{BUILD}-{count}"
        for task in (late, early, permitted):
            note("sent", task.name.removeprefix("rolling."), number)
            # every other one with a header of its own
            task.apply_async((key, number), **({"lock": {"ttl": 20}} if count % 2 else {}))
        if not once.delay(key, number).is_duplicate:  # type: ignore[attr-defined]
            note("sent", "once", number)
        newest.delay(BUILD, number)
        note("last", number)
        time.sleep(0.1)


if __name__ == "__main__":
    send_until_stopped()
