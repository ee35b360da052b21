"""On RabbitMQ, with queues that refuse, pass on or forget messages, or go themselves.

Each message ends as without a lock: it runs. None is lost, and none keeps its worker from its end.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import pytest
from amqp.exceptions import NotFound
from kombu import Queue

from celery_redlock.testing import EmbeddedNode, WorkerProcess
from tests.conftest import Nodes, eventually, trust_nodes
from tests.integration.conftest import Stage, set_stage

EXPIRY = 5.0  # s: of the queue that expires, in `tests.integration.app`


@pytest.fixture(params=["odd"])
def stage(
    request: pytest.FixtureRequest,
    rabbitmq: str,
    standing_broker: EmbeddedNode,
    standing_nodes: Nodes,
    tmp_path: Any,
) -> Iterator[Stage]:
    """Give a stage with these queues; its tests start the workers."""
    for node in standing_nodes:
        node.client().flushall()
    trust_nodes(standing_nodes)
    with ExitStack() as stack:
        yield set_stage(stack, tmp_path, standing_nodes, standing_broker, rabbitmq, request.param)


def count_ready(stage: Stage, queue: str) -> int:
    with stage.app.connection_for_read() as connection, connection.channel() as channel:
        try:
            return int(channel.queue_declare(queue, passive=True).message_count)
        except NotFound:
            return -1


def see_gone(stage: Stage, queue: str) -> None:
    """Return when a queue is gone; it is asked rarely, for that puts its expiry off."""
    while count_ready(stage, queue) >= 0:
        time.sleep(1.5 * EXPIRY)


def control(stage: Stage, worker: WorkerProcess, command: str, *queues: str, **more: Any) -> None:
    """Let a worker begin or end to consume queues."""
    for queue in queues:
        where = stage.see_listening(worker.name)
        call = getattr(stage.app.control, command)
        assert call(queue, destination=where, reply=True, timeout=60, limit=1, **more)


def see_runs(stage: Stage, *results: Any) -> None:
    for result in results:
        eventually(lambda result=result: stage.info(result)["status"] == "SUCCESS")


@pytest.fixture
def parked(stage: Stage) -> str:
    """Give the queue of what is dead-lettered, from which the test lets it come back."""
    back = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "odd-retried"}
    with stage.app.connection_for_write() as connection:
        Queue("odd-parked", queue_arguments=back)(connection.default_channel).declare()
    return "odd-parked"


def let_come_back(stage: Stage, parked: str, count: int) -> None:
    """Have RabbitMQ dead-letter so many back, as a time to live would."""
    with stage.app.connection_for_write() as connection, connection.channel() as channel:
        for _ in range(count):
            message = eventually(lambda: channel.basic_get(parked))
            channel.basic_reject(message.delivery_tag, requeue=False)


def test_a_message_that_is_dead_lettered_and_comes_back_begins_anew(
    stage: Stage, parked: str
) -> None:
    """It comes back at once, where it may look like a second delivery of its first life."""
    stage.worker(concurrency=2, queues=["odd-retried"])
    task, plain, lock_for = stage.tasks.late_end, stage.tasks.plain_end, stage.tasks.work.lock_for
    with lock_for("deferred", wait=60):
        deferred = task.apply_async(("deferred", "reject"), queue="odd-retried")
        stage.see_deferred(deferred)
    fresh = task.apply_async(("fresh", "reject"), queue="odd-retried")
    beside = plain.apply_async(("plain", "reject"), queue="odd-retried")
    keys = ("deferred", "fresh", "plain")
    for key in keys:
        eventually(lambda key=key: stage.runs_of(key))
    with lock_for("deferred", wait=60), lock_for("fresh", wait=60):
        let_come_back(stage, parked, len(keys))
        for result in (deferred, fresh):
            eventually(lambda result=result: stage.info(result)["status"] == "DEFERRED")
        # not one more than in its first life
        assert stage.info(deferred)["result"]["deferrals"] == 1
    see_runs(stage, deferred, fresh, beside)
    assert [stage.runs_of(key) for key in keys] == [2, 2, 2]


def refused(stage: Stage, key: str, queues: list[str]) -> list[Any]:
    """Send a message to each queue that is refused its lock, and decides once it is let."""
    word = "at last defer"
    results = [stage.tasks.decided.apply_async((key, word), queue=queue) for queue in queues]

    def asked() -> int:
        return sum(line.key == key for line in stage.lines("asked"))

    eventually(lambda: asked() == len(queues))
    return results


def let_defer(stage: Stage, key: str) -> None:
    stage.log.with_name(f"{key} decides").touch()


def fill(stage: Stage, queue: str) -> list[Any]:
    """Send until a bounded queue is full; return the results of what it took."""
    sent = []
    while count_ready(stage, queue) < 2:
        before = count_ready(stage, queue)
        sent.append(stage.tasks.work.apply_async((f"more{len(sent)}",), queue=queue))
        eventually(lambda before=before: count_ready(stage, queue) > before)
    return sent


@pytest.mark.slow
def test_early_acknowledged_what_a_full_queue_refuses_runs_in_its_slot_and_the_worker_ends(
    stage: Stage,
) -> None:
    queue = "odd-bounded"
    worker = stage.worker(concurrency=2, queues=[queue])
    with stage.tasks.work.lock_for("full", wait=60):
        held = refused(stage, "full", [queue] * 2)
        others = [stage.tasks.work.apply_async((f"next{n}",), queue=queue) for n in range(2)]
        eventually(lambda: worker.output().count("received") == 4)
        others += fill(stage, queue)
        let_defer(stage, "full")
        eventually(lambda: worker.output().count("cannot republish") >= 2)
        worker.signal(signal.SIGTERM)
        eventually(lambda: "Warm shutdown" in worker.output())
    worker.wait(timeout=60)
    see_runs(stage, *held)
    assert stage.runs_of("full") == 2
    assert "MessageNacked" in worker.output()
    stage.worker("next", concurrency=2, queues=[queue])
    see_runs(stage, *others)


def test_a_queue_that_has_gone_is_declared_again_for_a_deferral(stage: Stage) -> None:
    queues = [f"odd-{name}" for name in ("deleted", "passing", "expiring")]
    worker = stage.worker(pool="threads", concurrency=6, queues=["odd", *queues])
    with stage.tasks.work.lock_for("gone", wait=60):
        results = refused(stage, "gone", queues)
        control(stage, worker, "cancel_consumer", *queues)
        with stage.app.connection_for_write() as connection:
            connection.default_channel.queue_delete("odd-deleted")
        for queue in queues:
            see_gone(stage, queue)
        let_defer(stage, "gone")
        eventually(lambda: worker.output().count("] deferred: ") == 3)
        eventually(lambda: {count_ready(stage, queue) for queue in queues[:2]} == {1})
        control(stage, worker, "add_consumer", *queues)
    see_runs(stage, *results)
    assert stage.runs_of("gone") == 3


@pytest.mark.slow
def test_a_message_whose_queue_is_gone_for_good_runs_in_its_slot_or_fails(stage: Stage) -> None:
    queue = f"odd-{uuid.uuid4().hex[:8]}"  # that no child knows, for it is added after the fork
    worker = stage.worker(concurrency=2, queues=["odd"])
    control(stage, worker, "add_consumer", queue)
    with stage.tasks.work.lock_for("kept", wait=60):
        with stage.tasks.work.lock_for("freed", wait=60):
            runs, fails = (refused(stage, key, [queue]) for key in ("freed", "kept"))
            control(stage, worker, "cancel_consumer", queue)
            with stage.app.connection_for_write() as connection:
                connection.default_channel.queue_delete(queue)
            for key in ("freed", "kept"):
                let_defer(stage, key)
            eventually(lambda: worker.output().count("cannot republish") >= 2)
        see_runs(stage, *runs)
        for result in fails:
            eventually(lambda result=result: stage.info(result)["status"] == "FAILURE")
            assert f"queue {queue!r} is gone" in str(stage.info(result)["result"])
    assert [stage.runs_of(key) for key in ("freed", "kept")] == [1, 0]


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["quorum"], indirect=True)
def test_a_queue_that_is_added_beside_quorum_queues_loses_no_deferral(stage: Stage) -> None:
    queue = "quorum-added"
    worker = stage.worker(concurrency=2, options=["--max-tasks-per-child=1"])
    how = {"exchange": queue, "exchange_type": "topic", "routing_key": queue}
    control(stage, worker, "add_consumer", queue, **how)
    for key in "abcd":  # so that each child is one that was forked after that
        see_runs(stage, stage.tasks.work.delay(key))
    with stage.tasks.work.lock_for("added", wait=60):
        send = {"exchange": queue, "routing_key": queue}
        tasks = [stage.tasks.work, stage.tasks.late] * 3
        results = [task.apply_async(("added",), **send) for task in tasks]
        for result in results:
            stage.see_deferred(result)
    see_runs(stage, *results)
    assert stage.runs_of("added") == 6


@pytest.fixture
def restricted(stage: Stage, rabbitmq: str) -> Iterator[Stage]:
    """Give the stage with a user that may not declare what keeps delayed messages."""
    name, rabbitmqctl = f"celery_redlock_{uuid.uuid4().hex[:12]}", shutil.which("rabbitmqctl")
    where = urlsplit(rabbitmq)
    vhost = where.path.lstrip("/")

    def run(*words: str) -> None:
        subprocess.run([str(rabbitmqctl), "-q", *words], check=True)

    run("add_user", name, name)
    try:
        run("set_permissions", "-p", vhost, name, "^(?!celery_delayed).*", ".*", ".*")
        netloc = f"{name}:{name}@{where.hostname}:{where.port or 5672}"
        stage.env["TEST_BROKER"] = where._replace(netloc=netloc).geturl()
        yield stage
    finally:
        run("delete_user", name)


@pytest.mark.parametrize("stage", ["quorum"], indirect=True)
def test_a_worker_that_may_not_declare_the_delay_defers_without_it(restricted: Stage) -> None:
    worker = restricted.worker(concurrency=2)
    assert "Failed to setup delayed delivery" in worker.output()
    with restricted.tasks.work.lock_for("refused", wait=60):
        tasks = [restricted.tasks.work, restricted.tasks.late] * 2
        results = [task.delay("refused") for task in tasks]
        for result in results:
            restricted.see_deferred(result)
    see_runs(restricted, *results)
    assert restricted.runs_of("refused") == 4
