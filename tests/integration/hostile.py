"""Raw messages of which one field is what no sender of Celery's writes, for a broker in Redis."""

from __future__ import annotations

import base64
import copy
import json
import uuid
from collections.abc import Iterator
from typing import Any

Path = tuple[str | int, ...]  # the place of a field within a message

# each JSON type, and of each the values that break most
STRANGE: tuple[Any, ...] = (
    None, True, False, 0, -1, 7, 3_000_000_000, 10**400, 0.5, -1e308, float("nan"), float("inf"),
    "", "x", "1", "2026-01-01T00:00:00+00:00", "0001-01-01T00:00:00+23:59", "\ud800\0\n\x1b[31m",
    "x" * 5000, [], ["x"], [[], {}], {}, {"x": 1}, {"": None},
)  # fmt: skip


def header_of(task_id: str, key: str) -> dict[str, Any]:
    """Return a lock header that has each part and each field."""
    return {
        "options": {"ttl": 30, "backoff": {"first": 0.05, "cap": 0.5, "factor": 2}},
        "id": task_id,
        "retries": 0,
        "is_revoked": False,
        "life": 1,
        "deferral": {
            "count": 1, "since": 1.8e9, "at": 1.8e9, "countdown": 0.1, "resource": f"k:{key}",
            "resources": [f"k:{key}"], "limit": 1, "is_taken": True, "why": "held by it",
            "waits_for_release": True,
        },
        "is_flagged": True,
        "waits": 1,
        "origin": {"exchange": "", "routing_key": "celery", "queue": "celery"},
        "unique": {
            "name": f"tests.work:{key}", "token": "0" * 32, "until": "finished", "replaces": "",
            "kept_for": 60.0, "ends_at": 1.8e9,
        },
    }  # fmt: skip


def message(app: Any, task: str, key: str, *, with_header: bool) -> dict[str, Any]:
    """Return a message as Celery makes it. Its body is not encoded yet."""
    task_id = str(uuid.uuid4())
    made = app.amqp.create_task_message(task_id, task, (key,), {})
    headers = json.loads(json.dumps(made.headers))
    if with_header:
        headers["redlock"] = header_of(task_id, key)
        headers["eta"] = "2026-01-01T00:00:00+00:00"
    return {
        "body": json.loads(json.dumps(made.body)),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": headers,
        "properties": {
            "correlation_id": task_id, "reply_to": str(uuid.uuid4()), "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": "celery"}, "priority": 0,
            "body_encoding": "base64", "delivery_tag": str(uuid.uuid4()),
        },
    }  # fmt: skip


def paths(value: Any, before: Path = ()) -> Iterator[Path]:
    """Give the place of each field of a message, and of each of its parts."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for name, item in pairs:
        yield (*before, name)
        if isinstance(item, (dict, list)):
            yield from paths(item, (*before, name))


def changed(whole: dict[str, Any], path: Path, value: Any) -> dict[str, Any]:
    """Return a copy of a message with another value in one place."""
    result: Any = copy.deepcopy(whole)
    part = result
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    return dict(result)


def encoded(whole: dict[str, Any]) -> str:
    """Return a message as it stands in a queue of Redis."""
    body = json.dumps(whole["body"]).encode()
    return json.dumps({**whole, "body": base64.b64encode(body).decode()})
