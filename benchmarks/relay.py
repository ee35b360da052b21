"""The app that the workers of the hand-off, the crowd, the many workers, the tens and others run.

Tasks of a pair do the same, and store when. One is a `LockedTask`; the other is what people write
by hand: redis-py's lock, and `self.retry` if that is taken, after a random or a fixed countdown.
"""

from __future__ import annotations

import functools
import json
import os
import random
import time
from typing import Any

from celery import Celery
from celery.signals import worker_init
from redis import Redis

from celery_redlock import Backoff, LockedTask
from celery_redlock.tasks.waiting.room import WaitingRoom

BROKER = "BENCHMARK_BROKER"
STORE = "BENCHMARK_STORE"
NODES = "BENCHMARK_NODES"
QUEUE = "BENCHMARK_QUEUE"
WAKES = "BENCHMARK_WAKES"
LATE = "BENCHMARK_LATE"  # "yes": all tasks acknowledge late
NAIVE_NODE = "BENCHMARK_NAIVE_NODE"
PREFETCH = "BENCHMARK_PREFETCH"  # messages for each slot
MAX_DELAY = 5.0  # s: of a delay between two tries
COUNTDOWN = 0.25  # s: of a retry of `hot by hand`
BODY_SECONDS = 0.25  # s
SHORT_BODY_SECONDS = 0.01  # s

store = os.environ.get(STORE, "redis://localhost")
nodes = os.environ.get(NODES, "redis://localhost").split()
queue = os.environ.get(QUEUE, "celery")

app = Celery("relay", broker=os.environ.get(BROKER, store), set_as_current=False)
app.conf.update(
    task_default_queue=queue,
    task_ignore_result=True,
    task_acks_late=os.environ.get(LATE) == "yes",
    worker_prefetch_multiplier=int(os.environ.get(PREFETCH, "1")),
    redlock_nodes=nodes,
    redlock_prefix=queue,
)


@worker_init.connect
def _remove_waiting_room(sender: Any = None, **_: Any) -> None:
    """For comparison, let a deferred message run at the end of its delay alone."""
    if os.environ.get(WAKES) == "no":
        sender.app.steps["consumer"].discard(WaitingRoom)


@app.task(
    name="locked", base=LockedTask, lock_key="relay", lock_backoff=Backoff(MAX_DELAY, MAX_DELAY)
)
def locked() -> None:
    """Run, and store when."""
    _run()


@app.task(name="by hand", bind=True, max_retries=None)
def by_hand(self: Any) -> None:
    """Run under redis-py's lock, or retry after a random countdown."""
    lock = _client().lock(f"{queue}:by-hand", timeout=30, blocking=False)
    if not lock.acquire():
        raise self.retry(countdown=random.uniform(0, MAX_DELAY))
    try:
        _run()
    finally:
        lock.release()


@app.task(name="crowded", base=LockedTask, lock_key="{key}")
def crowded(key: str) -> None:
    """Run for a moment, with the default backoff."""
    time.sleep(SHORT_BODY_SECONDS)
    _client().rpush(f"{queue}:ran", key)


def _run() -> None:
    began_at = time.monotonic()
    time.sleep(BODY_SECONDS)
    _client().rpush(f"{queue}:ran", json.dumps([began_at, time.monotonic()]))


@app.task(name="hot", base=LockedTask, lock_key="{key}")
def hot(key: str) -> None:
    """Run for a moment under the key's lock, and store when."""
    _run_for(key)


@app.task(name="hot by hand", bind=True, max_retries=None)
def hot_by_hand(self: Any, key: str) -> None:
    """Do the same under redis-py's lock on one node, or retry after a fixed countdown."""
    lock = _naive_client().lock(key, timeout=30, blocking=False)
    if not lock.acquire():
        raise self.retry(countdown=COUNTDOWN)
    try:
        _run_for(key)
    finally:
        lock.release()


@app.task(name="unlocked")
def unlocked(key: str) -> None:
    """Do the same without a lock."""
    _run_for(key)


@app.task(name="spin", acks_late=False)
def spin(seconds: float) -> None:
    """Keep a core busy."""
    _client().rpush(f"{queue}:spins", "yes")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@app.task(name="stay", acks_late=False)
def stay(seconds: float) -> None:
    """Keep a slot of a worker without any work."""
    _client().rpush(f"{queue}:stays", "yes")
    time.sleep(seconds)


def _run_for(key: str) -> None:
    began_at = time.monotonic()
    time.sleep(SHORT_BODY_SECONDS)
    _client().rpush(f"{queue}:ran", json.dumps([key, began_at, time.monotonic(), os.getpid()]))


@functools.cache
def _naive_client() -> Redis:
    return Redis.from_url(os.environ.get(NAIVE_NODE, store))


@functools.cache
def _client() -> Redis:
    return Redis.from_url(store)
