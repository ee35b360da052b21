"""The API: one endpoint sends a locked task, another takes the lock."""

import asyncio

from celery_redlock import (
    DuplicateTask,
    LockLost,
    LockTaken,
    QuorumUnreachable,
)
from fastapi import FastAPI, HTTPException

import warehouse
from tasks import recount

app = FastAPI()


# A plain def, which FastAPI runs in a thread: a send waits for the broker.
@app.post("/stock/{sku}/recount", status_code=202)
def ask_for_recount(sku: str) -> dict[str, str]:
    """Send the task, or return the id of the one that is sent already."""
    return {"task": recount.delay(sku).id}


@app.post("/stock/{sku}/count", status_code=202)
def count_once(sku: str) -> dict[str, str]:
    """Send the task; a second click is answered by 409."""
    options = {"on_duplicate": "fail"}
    try:
        return {"task": recount.apply_async((sku,), lock=options).id}
    except DuplicateTask as error:
        raise HTTPException(409, f"{sku} is being counted") from error


@app.post("/stock/{sku}/pick")
async def pick(sku: str, pieces: int = 1) -> dict[str, int]:
    """Pick pieces of a sku while no task and no other request does."""
    try:
        async with recount.lock_for(sku, wait=2) as lock:
            await warehouse.pick(sku, pieces)
            # Raises LockLost if the lock has expired; asks no node.
            lock.ensure()
    except LockTaken as error:
        raise HTTPException(409, f"{sku} is in use, try again") from error
    except QuorumUnreachable as error:
        raise HTTPException(503, "too few lock nodes answer") from error
    except LockLost as error:
        # The pieces are picked, but another run may have been at work.
        raise HTTPException(500, f"count {sku} again") from error
    return {"picked": pieces}


# A send blocks, so in an async def it runs in a thread.
@app.post("/stock/{sku}/return", status_code=202)
async def take_back(sku: str) -> dict[str, str]:
    """Take pieces back into the stock, then send the task."""
    await warehouse.put_back(sku)
    result = await asyncio.to_thread(recount.delay, sku)
    return {"task": result.id}
