"""The table that says what Celery does by default, and what a locked task does: each row is run.

A cell begins with how many bodies ran for the row, and says if two of them ran at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult
from redis.exceptions import ConnectionError as RedisConnectionError

from celery_redlock.testing import EmbeddedNode
from tests.conftest import Nodes, eventually
from tests.integration.conftest import ROOT, MakeStage, Stage, forget_results, overlaps
from tests.integration.deliveries import see_drained
from tests.integration.test_recovery import see_loaded, see_moved, tags_by_id
from tests.integration.test_second_deliveries import DROPPED, WAITS
from tests.integration.test_twins import give_back
from tests.pages import RunTable
from tests.workers import ForkedWorker

TABLE = RunTable(ROOT / "docs" / "explanation" / "celerys-default-and-here.md")
RUNS = ("no run", "1 run", "2 runs")
pytestmark = [pytest.mark.slow, pytest.mark.every_celery]


@dataclass(frozen=True)
class Kind:
    """One column of the table. prefix: of the names of its tasks."""

    key: str
    prefix: str

    def task(self, stage: Stage, name: str) -> Any:
        return getattr(stage.tasks, self.prefix + name)


EARLY, LATE, LOCKED = Kind("early", "plain_early_"), Kind("late", "plain_"), Kind("locked", "")
KINDS = (EARLY, LATE, LOCKED)


@pytest.fixture
def stage(make_stage: MakeStage, nodes: Nodes) -> Iterator[Stage]:
    """Give a stage with a broker of the test's own, which keeps all that it has said yes to."""
    with EmbeddedNode(appendonly="yes", appendfsync="always") as broker:
        yield make_stage(nodes, broker)
        forget_results()


def send(stage: Stage, name: str = "until", *args: str) -> dict[Kind, AsyncResult]:
    """Send one message of each kind, whose body lasts until there is a file "go"."""
    return {kind: kind.task(stage, name).delay(kind.key, *(args or ("go",))) for kind in KINDS}


def go(stage: Stage) -> None:
    stage.log.with_name("go").touch()


def counted(stage: Stage, kind: Kind) -> str:
    """Return how many bodies began, and whether two ran at once, as a cell says it."""
    spans = stage.intervals().get(kind.key, [])
    return RUNS[stage.runs_of(kind.key)] + (" at once" if overlaps(spans) else "")


def see_row(stage: Stage, event: str) -> None:
    """Fail if a cell of a row says something else than what was counted."""
    TABLE.see(event, *(counted(stage, kind) for kind in KINDS))


KILLED = "`kill -9` of the worker, as the body runs"
AGAIN = "a second delivery, as the body runs"
RESTARTED = "a restart of the broker, as the body runs"
RETRIED = "a retry, as another message of its key runs"
REVOKED = "`revoke` before the body"
TERMINATED = "`revoke(terminate=True)`, as the body runs"
RATED = "two messages, two workers, a rate of `1/h`"
TWICE = "a duplicate: one call, sent twice"


@TABLE.row(KILLED)
def test_a_worker_is_killed(stage: Stage) -> None:
    first = stage.worker("w1", concurrency=4)
    calls = send(stage)
    stage.tasks.early_until.delay("locked, early", "go")
    stage.wait_for("begin", 4)
    first.kill()
    second = stage.worker("w2", concurrency=3)
    see_moved(second, 1)
    stage.wait_for("begin", 5)
    go(stage)
    assert calls[LOCKED].get(timeout=120).startswith("w2@")
    eventually(lambda: [*tags_by_id(stage.broker)] == [calls[LATE].id])
    assert stage.runs_of(LATE.key) == 1
    give_back(stage)
    stage.worker("w3", concurrency=1)
    calls[LATE].get(timeout=120)
    see_drained(stage)
    see_row(stage, KILLED)
    assert stage.runs_of("locked, early") == 1
    assert stage.info(calls[EARLY])["status"] == "PENDING"


@TABLE.row(AGAIN)
def test_a_message_is_delivered_again(stage: Stage) -> None:
    workers = [stage.worker("w1", concurrency=6)]
    send(stage)
    stage.wait_for("begin", 3)
    give_back(stage)
    workers.append(stage.worker("w2", concurrency=6))
    eventually(lambda: says(workers, WAITS))
    eventually(lambda: stage.runs_of(LATE.key) == 2)
    go(stage)
    see_drained(stage)
    eventually(lambda: says(workers, DROPPED))
    see_row(stage, AGAIN)


def says(workers: list[ForkedWorker], words: str) -> bool:
    return any(words in worker.output() for worker in workers)


@TABLE.row(RESTARTED)
def test_the_broker_restarts(stage: Stage) -> None:
    """Celery 5.7.0 ends a worker as a run ends that it began before and acknowledges late."""
    workers = {kind: stage.worker(kind.key, concurrency=3, queues=[kind.key]) for kind in KINDS}
    calls = {
        kind: kind.task(stage, "until").apply_async((kind.key, "go"), queue=kind.key)
        for kind in KINDS
    }
    stage.wait_for("begin", 3)
    stage.broker.kill()
    for worker in workers.values():
        eventually(lambda worker=worker: "Connection to broker lost" in worker.output())
    stage.broker.start()
    see_loaded(stage.broker)
    for kind in KINDS:
        stage.see_listening(kind.key)
    go(stage)
    for call in calls.values():
        eventually(lambda call=call: is_success(stage, call))
    assert calls[LATE].id in tags_by_id(stage.broker)
    assert stage.runs_of(LATE.key) == 1
    give_back(stage)
    stage.worker("again", concurrency=3, queues=[kind.key for kind in KINDS])
    see_drained(stage)
    see_row(stage, RESTARTED)


def is_success(stage: Stage, call: AsyncResult) -> bool:
    with suppress(RedisConnectionError):  # of a pooled connection from before the restart
        return bool(stage.info(call)["status"] == "SUCCESS")
    return False


@TABLE.row(RETRIED)
def test_a_retry_comes_back_beside_another_message(stage: Stage) -> None:
    stage.worker("w1", concurrency=6)
    calls = send(stage, "retries_once")
    for call in calls.values():
        eventually(lambda call=call: stage.info(call)["status"] == "RETRY")
    others = send(stage)
    for kind in (EARLY, LATE):
        eventually(lambda kind=kind: stage.runs_of(kind.key) == 2)
    waiting = calls[LOCKED], others[LOCKED]
    eventually(lambda: "DEFERRED" in [stage.info(call)["status"] for call in waiting])
    go(stage)
    assert [call.get(timeout=120) for call in calls.values()] == [1, 1, 1]
    for call in others.values():
        call.get(timeout=120)
    see_row(stage, RETRIED)


@TABLE.row(REVOKED)
def test_a_message_is_revoked_before_its_body(stage: Stage) -> None:
    stage.worker("w1", concurrency=3, queues=["celery"])
    to = {"destination": stage.see_listening("w1"), "reply": True, "timeout": 60}
    with stage.tasks.until.lock_for(LOCKED.key, wait=60):
        calls = [kind.task(stage, "until").apply_async((kind.key,), queue="held")
                 for kind in (EARLY, LATE)]  # fmt: skip
        calls.append(stage.tasks.until.delay(LOCKED.key))
        stage.see_deferred(calls[-1])
        for call in calls:
            stage.app.control.revoke(call.id, **to)
        with stage.consumed("held"):
            for call in calls:
                with pytest.raises(TaskRevokedError):
                    call.get(timeout=60)
    see_drained(stage)
    see_row(stage, REVOKED)


@TABLE.row(TERMINATED)
def test_a_running_body_is_terminated(stage: Stage) -> None:
    stage.worker("w1", concurrency=3)
    calls = send(stage)
    stage.wait_for("begin", 3)
    for call in calls.values():
        call.revoke(terminate=True)
    for call in calls.values():
        with pytest.raises(TaskRevokedError):
            call.get(timeout=60)
    stage.see_freed(f"k:{LOCKED.key}")
    go(stage)
    stage.worker("w2", concurrency=3)
    see_drained(stage)
    see_row(stage, TERMINATED)


@TABLE.row(RATED)
def test_a_rate_limit_of_two_workers(stage: Stage) -> None:
    queues = ("held", "other")
    for name in queues:
        stage.worker(name, concurrency=3, queues=[name])
    go(stage)
    hourly = {"rate": "1/h"}
    for name in queues:
        for kind in (EARLY, LATE):
            kind.task(stage, "hourly").apply_async((kind.key, "go"), queue=name).get(timeout=120)
    of = LOCKED.task(stage, "until").apply_async
    first, second = queues
    of((LOCKED.key, "go"), queue=first, lock=hourly).get(timeout=120)
    waiting = of((LOCKED.key, "go"), queue=second, lock=hourly)
    eventually(lambda: rate_of(stage, waiting) == "1/h")
    see_row(stage, RATED)


def rate_of(stage: Stage, call: AsyncResult) -> str:
    """Return the rate for which a deferred message waits; "" if it does not."""
    info = stage.info(call)
    return str(info["result"].get("rate", "")) if info["status"] == "DEFERRED" else ""


@TABLE.row(TWICE)
def test_a_call_is_sent_twice(stage: Stage) -> None:
    stage.worker("w1", concurrency=6)
    calls = [*send(stage).values(), *send(stage).values()]
    stage.wait_for("begin", 5)
    eventually(lambda: "DEFERRED" in [stage.info(call)["status"] for call in calls])
    once = {"unique_for": 600}
    first, second = (stage.tasks.until.apply_async(("unique", "go"), lock=once) for _ in range(2))
    assert second.id == first.id
    go(stage)
    for call in (*calls, first):
        call.get(timeout=120)
    see_row(stage, TWICE)
    assert stage.runs_of("unique") == 1
