"""A FastAPI app whose requests take locks, and count in its event loop what comes of that.

`python -m tests.integration.counted_api DESCRIPTOR URL...`: of a listening socket, and of nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator

import fastapi
import uvicorn

from celery_redlock import Redlock
from tests.conftest import PATIENCE

BEAT = 0.01  # s
BODY = 0.005  # s

urls: list[str] = []
redlocks: list[Redlock] = []
inside: Counter[str] = Counter()
figures: Counter[str] = Counter()


async def beat() -> None:
    """Count the beats of the loop, and the most CPU seconds that it takes from one to the next."""
    while True:
        worked = time.thread_time()
        await asyncio.sleep(BEAT)
        figures["worked"] = max(figures["worked"], time.thread_time() - worked)
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
