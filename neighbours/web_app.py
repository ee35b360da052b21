"""What a web server imports: one app as WSGI and as ASGI.

It uses lock nodes and broker as it is imported: so a worker that is forked later has connections of
its parent, which it must not use, and a lock of its parent, which it must not hold.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any
from urllib.parse import parse_qsl

from celery import Celery

from celery_redlock import Redlock
from neighbours.bodies import note
from neighbours.story_setup import read_setup, run_folder
from neighbours.story_tasks import add_tasks, settings

WAIT, LONGEST = 300.0, 600.0  # seconds
NOTES = run_folder() / "notes"
GATE = str(run_folder() / "gate")  # unique messages run once it exists
KEY = "a"  # which the requests and the tasks need

app = Celery("neighbours.web_app")
app.conf.update(settings())
work, once = add_tasks(app)
redlock = Redlock(list(read_setup().nodes), max_ttl=LONGEST)
imported_in = os.getpid()
of_import = redlock.lock("import", ttl=LONGEST)
of_import.try_acquire()  # of several processes that import this, one holds it
sent_at_import = once.delay("import", GATE)


def told(**more: Any) -> bytes:
    """Return the answer of a request, with what this process has of the import."""
    was_forked = os.getpid() != imported_in
    said = {
        "pid": os.getpid(), "was_forked": was_forked, "sent_at_import": sent_at_import.id,
        "keeps_lock": was_forked and of_import.held,
        "frees_lock": was_forked and redlock.lock("import").try_acquire(), **more,
    }  # fmt: skip
    return json.dumps(said).encode()


def hold(task: str, seconds: float) -> None:
    """Hold the lock of a task; note it as the body of the task does."""
    with work.lock_for(KEY, wait=WAIT) as lock:
        note(NOTES, "begin", task, KEY)
        time.sleep(seconds)
        note(NOTES, "end", task, KEY)
        lock.ensure()


def send() -> dict[str, Any]:
    result = once.delay("b", GATE)
    return {"id": result.id}


def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """Answer `/hold` and `/send` as WSGI."""
    query = dict(parse_qsl(environ["QUERY_STRING"]))
    more: dict[str, Any] = {}
    if environ["PATH_INFO"] == "/hold":
        hold(query["task"], float(query["seconds"]))
    else:
        more = send()
    start_response("200 OK", [("Content-Type", "application/json")])
    return [told(**more)]


async def asgi(
    scope: dict[str, Any],
    receive: Callable[[], Awaitable[Any]],
    reply: Callable[[Any], Awaitable[None]],
) -> None:
    """Answer `/hold` and `/send` as ASGI."""
    if scope["type"] == "lifespan":
        await lifespan(receive, reply)
        return
    query = dict(parse_qsl(scope["query_string"].decode()))
    more: dict[str, Any] = {}
    if scope["path"] == "/hold":
        async with work.lock_for(KEY, wait=WAIT) as lock:
            note(NOTES, "begin", query["task"], KEY)
            await asyncio.sleep(float(query["seconds"]))
            note(NOTES, "end", query["task"], KEY)
            lock.ensure()
    else:
        more = await asyncio.to_thread(send)
    body = await asyncio.to_thread(told, **more)
    headers = [(b"content-type", b"application/json")]
    await reply({"type": "http.response.start", "status": 200, "headers": headers})
    await reply({"type": "http.response.body", "body": body})


async def lifespan(
    receive: Callable[[], Awaitable[Any]], reply: Callable[[Any], Awaitable[None]]
) -> None:
    for event in ("startup", "shutdown"):
        await receive()
        await reply({"type": f"lifespan.{event}.complete"})
