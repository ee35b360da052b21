"""Messages as a Redis broker keeps them, to be delivered once more; and what monitors hear."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.conftest import eventually
from tests.integration.conftest import Stage

QUEUE = "celery"


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


def see_drained(stage: Stage) -> None:
    """Return when no message is left, neither in the queue nor in a worker."""
    client = stage.broker.client()
    eventually(lambda: not client.exists(QUEUE) and not client.exists("unacked"), within=120)


@contextmanager
def heard(stage: Stage) -> Iterator[list[dict[str, Any]]]:
    """Give the events that are sent meanwhile, in order."""
    events: list[dict[str, Any]] = []
    ready = threading.Event()

    class Monitor(stage.app.events.Receiver):  # type: ignore[misc]
        def on_consume_ready(self, *args: Any, **kwargs: Any) -> None:
            super().on_consume_ready(*args, **kwargs)
            ready.set()

    connection = stage.app.connection_for_read()
    monitor = Monitor(connection, handlers={"*": events.append})
    thread = threading.Thread(target=monitor.capture, kwargs={"wakeup": False})
    thread.start()
    try:
        assert ready.wait(60)
        yield events
    finally:
        monitor.should_stop = True
        thread.join()
        connection.close()
