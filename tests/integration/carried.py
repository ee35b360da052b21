"""Everything that a message can carry, to compare what comes before and after its deferrals."""

from __future__ import annotations

import datetime as dt
import re
from typing import Any

from celery import signature

from tests.integration.conftest import Stage

BITS = re.compile(r"^(?:[01]\.){28}")  # before the routing key of what RabbitMQ kept back


def send(stage: Stage, task_id: str, **options: Any) -> Any:
    """Send a message that carries everything, by name. options: more, or others."""
    app, add = stage.app, stage.tasks.add
    return app.send_task(
        stage.tasks.shows_its_message.name,
        ({1, 2}, "x" * 3000),
        {"k": {1}},
        **{
            "task_id": task_id,
            "root_id": "root", "parent_id": "parent", "reply_to": "reply", "shadow": "shadowed",
            "origin": "somewhere", "group_id": "group", "group_index": 3,
            "chord": signature("nobody", app=app, options={"chord_size": 100}),
            "chain": [add.si(1).set(task_id="next")],
            "link": [add.si(2)], "link_error": [add.si(3)],
            "retries": 2, "replaced_task_nesting": 1,
            "time_limit": 500, "soft_time_limit": 400,
            "expires": dt.datetime.now(dt.UTC) + dt.timedelta(seconds=900),
            "headers": {"x-custom": "v"}, "stamped_headers": ["tenant"], "tenant": "t1",
            "argsrepr": "(secret)", "kwargsrepr": "{secret}", "ignore_result": True,
            "serializer": "pickle", "compression": "gzip", "delivery_mode": 1, "priority": 7,
            **options,
        },
    )  # fmt: skip


def seen(stage: Stage, task_id: str) -> tuple[dict[str, Any], int]:
    """Return what the body saw of a message, and how often it was put back."""
    lines = [line for line in stage.lines("message") if line.key == task_id]
    assert len(lines) <= 1, f"{len(lines)} bodies of one message"
    return (lines[0].more["seen"], lines[0].more["deferrals"]) if lines else ({}, 0)


def received(stage: Stage, task_id: str) -> list[dict[str, Any]]:
    return [line.more for line in stage.lines("received") if line.key == task_id]


def own_words(message: dict[str, Any]) -> dict[str, Any]:
    """Return what must be equal in two messages sent alike."""
    apart = ("id", "correlation_id", "expires", "exchange", "routing_key")
    return {name: value for name, value in message.items() if name not in apart}


def see_properties_kept(stage: Stage, **more: Any) -> None:
    """Return once a body saw what its send gave to the publisher, after some deferrals.

    more: properties, beside those that any broker takes.
    """
    task = stage.tasks.shows_its_properties
    given = {name: f"own {name}" for name in ("app_id", "type", "message_id", "correlation_id")}
    given |= more
    fresh = task.apply_async(("fresh properties",), **given).get(timeout=60)
    assert {name: fresh.get(name) for name in given} == given
    with task.lock_for("properties", wait=60):
        result = task.apply_async(("properties",), **given, lock={"max_wait": 3600})
        stage.see_deferred(result)
    deferred = result.get(timeout=60)
    assert deferred == fresh, (deferred, fresh)


def see_urgent_first(stage: Stage, key: str, *priorities: int) -> None:
    """Return once messages of one lock ran in the order of their priorities, sent the other way.

    priorities: the most urgent first. Each message is sent once the one before it waits.
    """
    results: list[Any] = []
    with stage.tasks.patient.lock_for(key, wait=60):
        for priority in reversed(priorities):
            for name in (f"{priority} first", f"{priority} then"):
                results.append(stage.tasks.patient.apply_async((key, name), priority=priority))
                stage.see_deferred(results[-1])
    for result in results:
        result.get(timeout=60)
    begun = [line.more["name"] for line in stage.lines("begin") if line.key == key]
    assert begun == [f"{each} {which}" for each in priorities for which in ("first", "then")]
