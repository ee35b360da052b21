"""Messages as a Redis broker keeps them, to be delivered once more; and what monitors hear."""

from __future__ import annotations

import json
import socket
import threading
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from celery.app.trace import build_tracer, trace_ok_t

from tests.conftest import eventually
from tests.integration.conftest import Stage

QUEUE = "celery"
BEGAN = "monitor-began"


def messages_of(stage: Stage) -> dict[str, str]:
    """Return what waits in the queue, by task id; before a worker takes it."""
    raw = stage.broker.client().lrange(QUEUE, 0, -1)
    return {json.loads(text)["headers"]["id"]: text for text in raw}


def deliver(stage: Stage, message: str, *, flagged: bool = True) -> None:
    """Put a message into the queue once more, as kombu does where nobody acknowledged it.

    flagged: as one that was delivered before. Source: kombu.transport.redis, _do_restore_message.
    """
    payload = json.loads(message)
    payload["properties"]["delivery_tag"] = str(uuid.uuid4())
    if flagged:
        payload["headers"]["redelivered"] = True
        payload["properties"]["delivery_info"]["redelivered"] = True
    stage.broker.client().lpush(QUEUE, json.dumps(payload))


def run_here(task: Any, *args: Any, **fields: Any) -> trace_ok_t:
    """Run a message in this process as a worker's child does; fields: of the message.

    Returns what the worker would hear of it.
    """
    delivery = {"exchange": "", "routing_key": QUEUE}
    message = {"id": str(uuid.uuid4()), "retries": 0, "delivery_info": delivery, **fields}
    return build_tracer(task.name, task, app=task.app)(message["id"], args, {}, message)


def see_drained(stage: Stage, ids: Collection[str] = ()) -> None:
    """Return when no message is left, neither in the queue nor in a worker. ids: none of these.

    All is asked at once: what a worker puts back goes from the second to the first. A message that
    a worker has taken from the queue and not noted yet is nowhere; but then its connection does not
    wait in BRPOP. Source: kombu.transport.redis, Channel._brpop_read.
    """
    client, own = stage.broker.client(), own_addresses()

    def is_drained() -> bool:
        with client.pipeline(transaction=True) as asked:
            queue, taken, clients = (
                asked.lrange(QUEUE, 0, -1).hvals("unacked").client_list().execute()
            )
        left = [text for text in (*queue, *taken) if not ids or any(id_ in text for id_ in ids)]
        took = [one for one in clients if one["cmd"] == "brpop" and "b" not in one["flags"]]
        return not left and all(one["addr"] in own for one in took)

    eventually(is_drained, within=120)


def own_addresses() -> set[str]:
    """Return the addresses of this process's connections, which may have waited for a reply."""
    found: set[str] = set()
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed a moment ago
            if str(fd.readlink()).startswith("socket:"):
                with socket.fromfd(int(fd.name), socket.AF_INET, socket.SOCK_STREAM) as end:
                    found.add(":".join(map(str, end.getsockname())))
    return found


@contextmanager
def watched(stage: Stage, note: Callable[[dict[str, Any]], object]) -> Iterator[None]:
    """Have a monitor that is told of every event that is sent meanwhile, in order.

    It hears by the time that the block begins: Redis subscribes in its first poll, after a consumer
    says that it is ready, so only an event of its own that came back shows it.
    """
    began, over = threading.Event(), threading.Event()

    def hear(event: dict[str, Any]) -> None:
        if event["type"] == BEGAN:
            began.set()
        else:
            note(event)

    def receive() -> None:
        with stage.app.connection_for_read() as connection:
            receiver = stage.app.events.Receiver(connection, {"*": hear})
            with receiver.consumer_context() as (own_connection, _, _):
                while not over.is_set():
                    with suppress(TimeoutError):
                        own_connection.drain_events(timeout=0.5)

    thread = threading.Thread(target=receive)
    thread.start()
    try:
        with (
            stage.app.connection_for_write() as connection,
            stage.app.events.Dispatcher(connection) as dispatcher,
        ):
            eventually(lambda: (dispatcher.send(BEGAN), began.wait(0.1))[1])
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def heard(stage: Stage, kind: str = "") -> Iterator[list[dict[str, Any]]]:
    """Give the events that are sent meanwhile, in order. kind: of these; "": of all."""
    events: list[dict[str, Any]] = []

    def note(event: dict[str, Any]) -> None:
        if event["type"] == (kind or event["type"]):
            events.append(event)

    with watched(stage, note):
        yield events
