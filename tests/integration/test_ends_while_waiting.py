"""How a message ends that waits: for its lock, or for a free slot of its worker.

Each row of the table in docs/reference/states-and-events.md, with the state that is stored and what
monitors show: Celery's own `events`, and Flower.
"""

from __future__ import annotations

import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import pytest
from celery.contrib.migrate import move
from celery.events.state import State
from flower.events import EventsState

from tests.conftest import eventually
from tests.integration.conftest import ROOT, Stage, Standing, pools
from tests.integration.deliveries import messages_of, see_drained, watched
from tests.workers import ForkedWorker

PAGE = ROOT / "docs" / "reference" / "states-and-events.md"
ACKS = {"early": "work", "late": "late"}  # the tasks that acknowledge so
MEASURED = ("prefork", "threads", "gevent")
WAYS = ("id", "terminate", "stamp", "expires")
SOON = timedelta(seconds=1.5)
SLOTS = 6  # of a standing worker
HIDDEN = {"task-sent", "task-received", "task-started", "task-deferred"}  # not of the end


class Ended(NamedTuple):
    """What stays of a message: its state, the events of its end, and what monitors show."""

    state: str
    events: str
    monitor: str


CANCELLED = "revoked, also with `terminate` or by a stamp, or expired"
FOR_LOCK, FOR_SLOT = f"{CANCELLED}, while it waits for its lock", "the same, for a free slot"
GAVE_UP, SKIPPED = "it gives up", 'it gives up, with `on_give_up="skip"`'
GIVEN_BACK = "its worker stops, or it is moved to another queue"
PURGED = "purged in its queue"
LEFT = "its worker stops or is killed while it waits for a free slot"
RUNS = "purged while it waits for a free slot: it runs"
ROWS = {
    FOR_LOCK: Ended("REVOKED", "task-retried, task-revoked", "REVOKED"),
    FOR_SLOT: Ended("REVOKED", "task-revoked", "REVOKED"),
    GAVE_UP: Ended("FAILURE", "task-failed", "FAILURE"),
    SKIPPED: Ended("REVOKED", "task-skipped", "SKIPPED"),
    GIVEN_BACK: Ended("DEFERRED", "none", "DEFERRED"),
    PURGED: Ended("DEFERRED", "none", "DEFERRED"),
    LEFT: Ended("PENDING", "none", "RECEIVED"),
    RUNS: Ended("SUCCESS", "task-succeeded", "SUCCESS"),
}


def test_the_page_has_what_is_measured_here() -> None:
    section = PAGE.read_text().split("## Ends of a waiting message")[1].split("\n## ")[0]
    for row, ended in ROWS.items():
        events = ", ".join(f"`{kind}`" for kind in ended.events.split(", ") if kind != "none")
        cells = row, ended.state, events or "none", ended.monitor
        assert f"| {' | '.join(cells)} |" in section
    assert section.count("\n| ") == 1 + len(ROWS)


class Monitor:
    """Celery's events and Flower's, beside each other."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.events = stage, list[dict[str, Any]]()
        self.celery, self.flower = State(), EventsState()
        self.mutex = threading.Lock()

    def note(self, event: dict[str, Any]) -> None:
        with self.mutex:
            self.events.append(event)
            for state in (self.celery, self.flower):
                state.event(dict(event))

    def ended(self, result: Any) -> Ended:
        """Return what is stored and shown of a message now."""
        own = [one["type"] for one in self.events if one.get("uuid") == result.id]
        with self.mutex:
            tasks = [state.tasks.get(result.id) for state in (self.celery, self.flower)]
            shown = {task.state for task in tasks if task is not None}
        of_end = ", ".join(kind for kind in own if kind not in HIDDEN) or "none"
        return Ended(self.stage.info(result)["status"], of_end, " or ".join(sorted(shown)))

    def see(self, row: str, *results: Any) -> None:
        """Return when each message has ended as its row says."""
        for result in results:
            try:
                eventually(lambda r=result: self.ended(r) == ROWS[row])
            except AssertionError:
                assert self.ended(result) == ROWS[row]  # which shows the difference
                raise

    def texts(self, result: Any) -> list[Any]:
        """Return the reasons that monitors show of a message."""
        task = self.celery.tasks[result.id]
        return [task.result, task.exception, task.traceback]


@contextmanager
def monitored(stage: Stage) -> Iterator[Monitor]:
    monitor = Monitor(stage)
    with watched(stage, monitor.note):
        yield monitor


def cancel(
    stage: Stage, send: Callable[..., Any], see_waiting: Callable[[Any], object],
    ways: Sequence[str] = WAYS,
) -> list[Any]:  # fmt: skip
    """Have messages wait, and cancel each in another way; return their results."""
    control, stamp, expires = stage.app.control, str(uuid.uuid4()), datetime.now(UTC) + SOON
    how = {"stamp": {"stamped_headers": ["of"], "of": stamp}, "expires": {"expires": expires}}
    sent = {way: send(**how.get(way, {})) for way in ways}
    for way, result in sent.items():
        if way != "expires":  # that one may have ended before anybody looks
            see_waiting(result)
    heard = {"destination": stage.see_listening(), "reply": True, "timeout": 60}
    for way, result in sent.items():
        if way == "stamp":
            assert control.revoke_by_stamped_headers({"of": [stamp]}, **heard)
        elif way != "expires":
            assert control.revoke(result.id, terminate=way == "terminate", **heard)
    eventually(lambda: datetime.now(UTC) > expires or "expires" not in sent)
    return list(sent.values())


@pytest.mark.parametrize("ack", ACKS)
@pytest.mark.parametrize("pool", pools("prefork", every=MEASURED))
def test_a_message_that_waits_for_its_lock_ends_as_the_table_says(
    of_pool: Standing, key: str, ack: str
) -> None:
    stage, task = of_pool.stage, getattr(of_pool.stage.tasks, ACKS[ack])
    with monitored(stage) as monitor, task.lock_for(key, wait=60):
        kept = task.delay(key)
        stage.see_deferred(kept)
        eventually(lambda: is_in_memory(stage, kept))
        stage.app.control.purge()  # what waits in a worker is not there
        cancelled = cancel(stage, lambda **how: task.apply_async((key,), **how), stage.see_deferred)
        options = {"max_wait": 0.2}
        gives_up = task.apply_async((key,), lock=options)
        skipped = task.apply_async((key,), lock={"on_give_up": "skip", **options})
        monitor.see(FOR_LOCK, *cancelled)
        monitor.see(GAVE_UP, gives_up)
        monitor.see(SKIPPED, skipped)
        for result in cancelled:
            assert monitor.texts(result) == [None] * 3
        see_drained(stage, [one.id for one in (*cancelled, gives_up, skipped)])
        assert stage.deferrals(kept)
    assert kept.get(timeout=120) == 0
    assert [line.more["id"] for line in stage.lines("begin")] == [kept.id]


def is_in_memory(stage: Stage, result: Any) -> bool:
    client = stage.broker.client()
    return not client.llen("celery") and any(result.id in one for one in client.hvals("unacked"))


@pytest.mark.parametrize("ack", ACKS)
@pytest.mark.parametrize("pool", pools("threads", every=MEASURED))
def test_a_message_that_waits_for_a_free_slot_ends_as_the_table_says(
    of_pool: Standing, key: str, pool: str, ack: str
) -> None:
    stage, (worker,) = of_pool.stage, of_pool.workers
    task = getattr(stage.tasks, ACKS[ack])
    keys = iter(f"{key}-{n}" for n in range(SLOTS))

    def send(**how: Any) -> Any:
        return task.apply_async((next(keys),), **how)

    def see_received(result: Any) -> None:
        eventually(lambda: f"{result.id}] received" in worker.output())

    # a full pool of greenlets takes one message, and its worker receives no other
    groups = [[way] for way in WAYS] if pool == "gevent" else [WAYS]
    with monitored(stage) as monitor:
        for number, ways in enumerate(groups):
            go = f"{key}-go{number}"
            busy = [f"{key}-{number}-busy{n}" for n in range(SLOTS)]
            running = [stage.tasks.rebuild.delay(each, go) for each in busy]
            eventually(lambda busy=busy: all(stage.runs_of(each) for each in busy))
            cancelled = cancel(stage, send, see_received, ways)
            stage.log.with_name(go).touch()
            monitor.see(FOR_SLOT, *cancelled)
            see_drained(stage, [result.id for result in cancelled])
            assert [result.get(timeout=120) for result in running] == busy
    assert len(stage.lines("begin")) == SLOTS * len(groups)


@pytest.mark.slow
@pytest.mark.parametrize("ack", ACKS)
@pytest.mark.parametrize("pool", MEASURED)
def test_a_message_that_its_worker_gives_back_ends_as_the_table_says(
    own_stage: Stage, pool: str, ack: str
) -> None:
    stage, task = own_stage, getattr(own_stage.tasks, ACKS[ack])
    first = stage.worker("w1", pool=pool, concurrency=2, options=["-E"])
    with monitored(stage) as monitor:
        with task.lock_for("k", wait=60):
            stays, purged, moved = (
                task.apply_async(("k",), queue=queue) for queue in ("celery", "other", "held")
            )
            for result in (stays, purged, moved):
                stage.see_deferred(result)
            first.stop(120)
            with stage.app.connection_for_write() as connection, connection.channel() as channel:
                assert channel.queue_purge("other") == 1
            to = stage.app.amqp.queues["waiting"]
            move(lambda body, message: to, app=stage.app, source=["held"], limit=1)
            monitor.see(GIVEN_BACK, stays, moved)
            stage.worker("w2", pool=pool, concurrency=2, options=["-E"])
        for result in (stays, moved):
            assert result.get(timeout=120) == 0
        eventually(lambda: {monitor.ended(one).monitor for one in (stays, moved)} == {"SUCCESS"})
        monitor.see(PURGED, purged)


def reserve(stage: Stage, worker: ForkedWorker, ack: str, key: str, slots: int = 2) -> Any:
    """Fill a worker's slots until there is a file `go`; return a message that waits for one."""
    running = [f"{key}-busy{number}" for number in range(slots)]
    for one in running:
        stage.tasks.rebuild.delay(one, "go")
    eventually(lambda: all(stage.runs_of(one) for one in running))
    result = getattr(stage.tasks, ACKS[ack]).delay(key)
    eventually(lambda: f"{result.id}] received" in worker.output())
    return result


def stop(stage: Stage, worker: ForkedWorker, pool: str) -> None:
    """Stop a worker, and let its bodies end once it begins no more."""
    names = stage.see_listening(worker.name)
    worker.signal(signal.SIGTERM)
    eventually(lambda: "Warm shutdown" in worker.output())
    if pool != "gevent":  # that one's commands have a greenlet of their own, to the end
        eventually(lambda: not stage.app.control.ping(names, timeout=1.0))
    stage.log.with_name("go").touch()
    worker.wait(120)


def see_queued(stage: Stage, result: Any) -> None:
    """Return when a message waits in its queue, and no worker has any."""
    client = stage.broker.client()
    eventually(lambda: result.id in messages_of(stage) and not client.exists("unacked"))


@pytest.mark.parametrize("ack", ACKS)
@pytest.mark.parametrize("pool", pools("threads", every=MEASURED))
def test_a_message_that_waits_for_a_free_slot_is_not_purged(
    of_pool: Standing, key: str, ack: str
) -> None:
    stage, (worker,) = of_pool.stage, of_pool.workers
    with monitored(stage) as monitor:
        result = reserve(stage, worker, ack, key, SLOTS)
        assert stage.app.control.purge() == 0
        assert not stage.runs_of(key)
        stage.log.with_name("go").touch()
        monitor.see(RUNS, result)
    assert stage.runs_of(key) == 1


@pytest.mark.slow
@pytest.mark.parametrize("ack", ACKS)
@pytest.mark.parametrize("pool", MEASURED)
def test_a_message_that_waits_for_a_free_slot_is_back_as_its_worker_stops(
    own_stage: Stage, pool: str, ack: str
) -> None:
    stage = own_stage
    worker = stage.worker("w1", pool=pool, concurrency=2, options=["-E"])
    with monitored(stage) as monitor:
        result = reserve(stage, worker, ack, "k")
        stop(stage, worker, pool)
        if pool == "gevent":  # a full pool has taken it from its worker, and runs it first
            monitor.see(RUNS, result)
        else:
            see_queued(stage, result)
            monitor.see(LEFT, result)
            assert not stage.runs_of("k")
            stage.worker("w2", pool=pool, concurrency=2)
        assert result.get(timeout=120) == 0
    assert stage.runs_of("k") == 1


@pytest.mark.slow
@pytest.mark.parametrize("ack", ACKS)
@pytest.mark.parametrize("pool", MEASURED)
def test_a_message_that_waits_for_a_free_slot_is_moved_as_its_worker_is_killed(
    own_stage: Stage, pool: str, ack: str
) -> None:
    stage = own_stage
    killed = stage.worker("w1", pool=pool, concurrency=2, options=["-E"])
    stage.worker("w2", pool=pool, queues=["other"], options=["-E"])
    with monitored(stage) as monitor:
        result = reserve(stage, killed, ack, "k")
        # a worker with an event loop sends its events in groups, so a kill may come before one
        eventually(lambda: monitor.ended(result).monitor == "RECEIVED")
        killed.kill()
        see_queued(stage, result)
        monitor.see(LEFT, result)
        assert not stage.runs_of("k")
        with stage.consumed("celery", "w2"):
            assert result.get(timeout=120) == 0
    assert stage.runs_of("k") == 1
