"""The app that the task benchmark's workers run: one process for each number of nodes.

All kinds of task do the same nothing; they differ in what stands around it. A body notes when it
began, so that a batch is timed inside the worker, from its first body to its last.
"""

from __future__ import annotations

import functools
import json
import os
from time import perf_counter

from celery import Celery
from redis import Redis

from benchmarks.floor import Floor
from celery_redlock import LockedTask

BROKER = "BENCHMARK_BROKER"
NODES = "BENCHMARK_NODES"
QUEUE = "BENCHMARK_QUEUE"
PATIENCE = 120  # s

broker = os.environ.get(BROKER, "redis://localhost")
nodes = os.environ.get(NODES, "redis://localhost").split()
queue = os.environ.get(QUEUE, "celery")

app = Celery("benchmark", broker=broker, set_as_current=False)
app.conf.update(task_default_queue=queue, task_ignore_result=True, redlock_nodes=nodes)
_began: dict[str, list[float]] = {}  # monotonic s of each body, by kind


def note(kind: str) -> None:
    """Note that a body of this kind begins now."""
    _began.setdefault(kind, []).append(perf_counter())


@app.task(name="plain")
def plain(number: int) -> None:
    """Do nothing."""
    note("plain")


@app.task(name="locked", base=LockedTask)
def locked(number: int) -> None:
    """Do nothing under a lock of this number's own."""
    note("locked")


@app.task(name="raw")
def raw(number: int) -> None:
    """Do the lock's I/O and nothing else."""
    floor = _floor(False)
    floor.acquire()
    note("raw")
    floor.release()


@app.task(name="raw script")
def raw_script(number: int) -> None:
    """Do the lock's I/O with the library's own script and nothing else."""
    floor = _floor(True)
    floor.acquire()
    note("raw script")
    floor.release()


@app.task(name="redis-py")
def redis_py(number: int) -> None:
    """Do nothing under redis-py's lock, on the first node alone."""
    with _client().lock(f"benchmark:{number}", timeout=30):
        note("redis-py")


@app.task(name="hold")
def hold() -> None:
    """Wait until all that is to be timed lies in the queue."""
    with Redis.from_url(broker) as client:
        client.rpush(f"{queue}:holds", "yes")
        client.blpop([f"{queue}:go"], timeout=PATIENCE)


@app.task(name="tell")
def tell() -> None:
    """Send the seconds a task, by kind, of what ran since `hold`."""
    seconds = {kind: (times[-1] - times[0]) / (len(times) - 1) for kind, times in _began.items()}
    _began.clear()
    with Redis.from_url(broker) as client:
        client.rpush(f"{queue}:told", json.dumps(seconds))


@functools.cache
def _floor(script: bool) -> Floor:
    return Floor(nodes, f"{queue}-floor-{script}", script=script)


@functools.cache
def _client() -> Redis:
    return Redis.from_url(nodes[0])
