"""What a sender may write into a message: no field of it ends a worker, or takes it for itself.

Plain Celery gets the same messages. Its own fields, on which it ends a worker itself, are left out.
"""

from __future__ import annotations

import base64
import copy
import functools
import json
import random
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_redlock import SettingsError
from celery_redlock.tasks.settings.options import OPTION
from celery_redlock.testing import WorkerProcess
from tests.conftest import eventually
from tests.integration.conftest import MakeStage, Stage
from tests.workers import ForkedWorker

SEED = 5
MOST_MEMORY = 200_000_000  # bytes that a process of a worker has for itself, at any time
# kombu or Celery raises an error for some value of these, which ends the worker of any task
ENDS_CELERY = {
    *(("body",), ("body", 2), ("body", 2, "chain"), ("headers",), ("properties",)),
    *(("content-encoding",), ("content-type",)),
    *(("headers", name) for name in ("task", "id", "shadow", "eta", "expires", "timelimit")),
    *(("headers", "timelimit", place) for place in (0, 1)),
    ("headers", "stamped_headers"),
    *(("properties", name) for name in ("delivery_info", "body_encoding", "delivery_tag")),
}
EARLY, LATE, PLAIN = "tests.integration.app.work", "tests.late", "tests.plain"
POOLS = {"celery": "prefork", "other": "threads", "waiting": "prefork"}  # by queue; the last: plain

Place = tuple[str | int, ...]  # the place of a field within a message

# each JSON type, and of each the values that break most
STRANGE: tuple[Any, ...] = (
    None, True, False, 0, -1, 7, 3_000_000_000, 10**400, 0.5, -1e308, float("nan"), float("inf"),
    "", "x", "1", "2026-01-01T00:00:00+00:00", "0001-01-01T00:00:00+23:59", "\ud800\0\n\x1b[31m",
    "x" * 5000, [], ["x"], [[], {}], {}, {"x": 1}, {"": None},
)  # fmt: skip


def header_of(task_id: str, key: str) -> dict[str, Any]:
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


def paths(value: Any, before: Place = ()) -> Iterator[Place]:
    """Give the place of each field of a message, and of each of its parts."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for name, item in pairs:
        yield (*before, name)
        if isinstance(item, (dict, list)):
            yield from paths(item, (*before, name))


def changed(whole: dict[str, Any], path: Place, value: Any) -> dict[str, Any]:
    result: Any = copy.deepcopy(whole)
    part = result
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    return dict(result)


def encoded(whole: dict[str, Any]) -> str:
    body = json.dumps(whole["body"]).encode()
    return json.dumps({**whole, "body": base64.b64encode(body).decode()})


Workers = dict[str, WorkerProcess]


@pytest.fixture(scope="module")
def stage(set_standing_stage: MakeStage) -> Stage:
    return set_standing_stage(redlock_call_options=sorted(set(OPTION) - {"args"}))


@pytest.fixture(scope="module")
def workers(stage: Stage) -> Iterator[Workers]:
    found: Workers = {}
    for queue, pool in POOLS.items():
        made = ForkedWorker(
            "tests.integration.app", name=queue, pool=pool, queues=[queue], env=stage.env,
            cwd=Path(__file__).resolve().parents[2],
        )  # fmt: skip
        found[queue] = made
        stage.stack.push(made)
        stage.stack.callback(made.kill)
        made.launch()
    for made in found.values():
        made.wait_ready()
    return found


def strange_values(rng: random.Random) -> list[Any]:
    by_type: dict[type, list[Any]] = {}
    for value in STRANGE:
        by_type.setdefault(type(value), []).append(value)
    return [rng.choice(values) for values in by_type.values()]


def fields(whole: dict[str, Any], header: str) -> list[tuple[str | int, ...]]:
    """Return the places of a message's fields; header: of those in this header alone."""
    found = set(paths(whole)) - ENDS_CELERY
    return sorted((p for p in found if not header or p[:2] == ("headers", header)), key=repr)


def test_a_message_that_was_due_before_the_machine_started_is_given_to_the_pool_once(
    stage: Stage, workers: Workers, key: str
) -> None:
    """By Celery alone, which sets no timer for it: twice, each would lower the prefetch by one.

    It comes first here: while other messages wait, the prefetch changes.
    """
    where = stage.see_listening("celery")

    def prefetch() -> int:
        (stats,) = stage.app.control.inspect(where).stats().values()
        return int(stats["prefetch_count"])

    before = prefetch()
    for number in range(5):
        own = f"{key} {number}"
        whole = message(stage.app, EARLY, own, with_header=True)
        whole["headers"]["eta"] = "1990-01-01T00:00:00+00:00"
        whole["headers"]["redlock"]["deferral"]["waits_for_release"] = False
        send(stage, whole, ("celery",))
        eventually(functools.partial(stage.runs_of, own))
    see_a_good_message_run(stage, workers, f"after {key}")
    assert prefetch() == before


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_field_of_a_message_ends_a_worker(stage: Stage, workers: Workers) -> None:
    rng = random.Random(SEED)
    added = [("headers", n) for n in ("headers", "redlock", "stamps", "replaced_task_nesting")]
    added += [("properties", "redlock_seen"), ("headers", "_redlock_state")]
    with stage.tasks.work.lock_for("held", wait=60):
        for task, header in ((EARLY, ""), (EARLY, "redlock"), (LATE, "redlock")):
            usual = message(stage.app, task, "held", with_header=bool(header))
            for path in [*fields(usual, header), *(() if header else added)]:
                for value in strange_values(rng):
                    key = rng.choice(["held", "free"])
                    whole = message(stage.app, task, key, with_header=bool(header))
                    send(stage, changed(whole, path, value))
        see_a_good_message_run(stage, workers, "while the lock is held")
    see_a_good_message_run(stage, workers, "held")
    for worker in workers.values():
        assert most_memory(worker) < MOST_MEMORY


def test_a_message_without_a_lock_header_and_with_headers_that_are_a_list_runs(
    stage: Stage, workers: Workers, key: str
) -> None:
    whole = message(stage.app, EARLY, key, with_header=False)
    whole["headers"] |= {"redlock": None, "headers": ["x"]}
    send(stage, whole)
    eventually(lambda: stage.runs_of(key) == len(POOLS))
    assert all(worker.runs for worker in workers.values())


BOMBS: tuple[dict[str, Any], ...] = (
    {"options": {"key": "{key:>300000000}"}},
    {"options": {"key": ["{key:.300000000}"]}},
    {"options": {"limit": 20_000_000}},
    {
        "options": {"backoff": {"first": 1, "cap": 30, "factor": 3}},
        "deferral": {"count": 3_000_000_000, "since": 1.7e9, "at": 1.7e9},
    },
)


def test_a_short_message_takes_no_memory(stage: Stage, workers: Workers, key: str) -> None:
    with stage.tasks.work.lock_for(key, wait=60):
        for bomb in BOMBS:
            whole = message(stage.app, EARLY, key, with_header=False)
            whole["headers"]["redlock"] = {"id": whole["headers"]["id"], **bomb}
            send(stage, whole)
        see_a_good_message_run(stage, workers, f"after {key}")
    for worker in workers.values():
        assert most_memory(worker) < MOST_MEMORY


def test_an_option_that_no_message_may_carry_is_ignored_and_another_is_logged(
    stage: Stage, workers: Workers, key: str
) -> None:
    with pytest.raises(SettingsError, match="redlock_call_options"):
        stage.tasks.work.apply_async((key,), lock={"args": []})
    with stage.tasks.work.lock_for(key, wait=60):
        held = stage.app.send_task(EARLY, (key,), queue="celery", lock={"args": []})
        stage.see_deferred(held)
        other = stage.app.send_task(EARLY, (key,), queue="celery", lock={"key": f"other {key}"})
        assert other.get(timeout=60) == 0
        assert stage.deferrals(held)
    assert held.get(timeout=60) == 0
    log = workers["celery"].output()
    told = "[{}]: options of its message that redlock_call_options does not name are ignored: args"
    assert told.format(held.id) in log
    changes = f"[{other.id}]: its message changes the lock: key='other {key}'"
    assert changes in log


def send(stage: Stage, whole: dict[str, Any], queues: tuple[str, ...] = tuple(POOLS)) -> None:
    """Send a message to each worker; the plain one gets it for a plain task."""
    for queue in queues:
        own = whole
        if queue == "waiting" and isinstance(whole["headers"], dict):
            own = changed(whole, ("headers", "task"), PLAIN)
        stage.broker.client().lpush(queue, encoded(own))


def see_a_good_message_run(stage: Stage, workers: Workers, key: str) -> None:
    """Return when a message that came after all others has run in each worker."""
    for queue in workers:
        task = PLAIN if queue == "waiting" else EARLY
        stage.app.send_task(task, (f"{key} {queue}",), queue=queue)
    for queue, worker in workers.items():
        has_run = functools.partial(stage.runs_of, f"{key} {queue}")
        try:  # thousands of messages are before it
            eventually(lambda worker=worker, has_run=has_run: has_run() or not worker.runs, 280)
        except AssertionError:
            left = stage.broker.client().llen(queue)
            raise AssertionError(f"{queue}: {left} before it; {worker.output()[-3000:]}") from None
        assert worker.runs, worker.output()[-3000:]


def most_memory(worker: WorkerProcess) -> int:
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            group = int(status.with_name("stat").read_text().rpartition(")")[2].split()[2])
            if group == worker.pid:
                found.append(int(re.findall(r"VmHWM:\s*(\d+)", status.read_text())[0]) * 1024)
        except (OSError, IndexError):  # it has ended
            continue
    return max(found)
