"""A FastAPI app whose requests take locks, and count in its event loop what comes of that.

`python -m tests.integration.counted_api DESCRIPTOR URL...`: of a listening socket, and of nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import fastapi
import uvicorn

from celery_redlock import Redlock
from tests.conftest import PATIENCE

BEAT = 0.01  # s
BODY = 0.005  # s
TASKS = Path("/proc/self/task")

urls: list[str] = []
redlocks: list[Redlock] = []
inside: Counter[str] = Counter()
figures: Counter[str] = Counter()


def kept_waiting() -> dict[str, float]:
    """Return the s for which the machine has let each thread wait for a processor, by its id.

    Source: Documentation/scheduler/sched-stats.rst, `run_delay`. Empty where Linux does not tell.
    """
    found = {}
    for task in TASKS.iterdir() if TASKS.exists() else ():
        with contextlib.suppress(OSError):  # it has ended
            found[task.name] = int((task / "schedstat").read_bytes().split()[1]) / 1e9
    return found


def of_the_machine(before: dict[str, float]) -> float:
    """Return the s since then by which it has delayed this thread, and at most one that it awaits.

    That one has the GIL.
    """
    since = {task: at - before.get(task, 0.0) for task, at in kept_waiting().items()}
    own = since.pop(str(threading.get_native_id()), 0.0)
    return own + max(since.values(), default=0.0)


async def beat() -> None:
    """Count by how much the loop is late, at the worst, and without what the machine is late by."""
    while True:
        began, waited, worked = time.monotonic(), kept_waiting(), time.thread_time()
        await asyncio.sleep(BEAT)
        late = time.monotonic() - began - BEAT
        own = {
            "wall": late,
            "late": late - of_the_machine(waited),
            "worked": time.thread_time() - worked,
        }
        for name, seconds in own.items():
            figures[name] = max(figures[name], seconds)
        figures["beats"] += 1


@contextlib.asynccontextmanager
async def lifespan(app: fastapi.FastAPI) -> AsyncIterator[None]:
    with Redlock(urls, node_timeout=PATIENCE) as made:
        redlocks.append(made)
        beating = asyncio.create_task(beat())
        yield
        beating.cancel()


api = fastapi.FastAPI(lifespan=lifespan)


async def work(name: str) -> None:
    inside[name] += 1
    figures["together"] = max(figures["together"], inside[name])
    await asyncio.sleep(BODY)
    inside[name] -= 1
    figures["served"] += 1


@api.post("/locked/{name}")
async def locked(name: str) -> None:
    async with redlocks[0].lock(name, wait=60):
        await work(name)


@api.post("/plain/{name}")
async def plain(name: str) -> None:
    await asyncio.sleep(BODY)
    figures["served"] += 1


@api.post("/figures")
async def tell() -> dict[str, float]:
    told = dict(figures)
    figures.clear()
    return told


if __name__ == "__main__":
    urls += sys.argv[2:]
    uvicorn.run(api, fd=int(sys.argv[1]), log_level="warning", timeout_keep_alive=600)
