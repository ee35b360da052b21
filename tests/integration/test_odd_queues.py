"""On RabbitMQ, with queues that refuse, pass on or forget messages, or go themselves.

Each message ends as without a lock: it runs. None is lost, and none keeps its worker from its end.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
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
from tests.integration.conftest import Stage, set_stage, virtual_host


@pytest.fixture
def rabbitmq() -> Iterator[str]:
    """Give a virtual host of the test's own: the same queues have other arguments in the next."""
    with virtual_host() as url:
        yield url


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


def names_of_queues(stage: Stage) -> set[str]:
    """Return the names of all queues; to ask RabbitMQ for one would put off its expiry."""
    vhost = urlsplit(stage.env["TEST_BROKER"]).path.lstrip("/")
    command = [str(shutil.which("rabbitmqctl")), "-q", "list_queues", "-p", vhost, "name"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True)
    return {*listed.stdout.split()}


def control(stage: Stage, worker: WorkerProcess, command: str, *queues: str, **more: Any) -> None:
    """Let a worker begin or end to consume queues."""
    for queue in queues:
        where = stage.see_listening(worker.name)
        call = getattr(stage.app.control, command)
        assert call(queue, destination=where, reply=True, timeout=60, limit=1, **more)


def see_runs(stage: Stage, *results: Any) -> None:
    for result in results:
        eventually(lambda result=result: stage.info(result)["status"] == "SUCCESS")


def test_a_message_that_is_dead_lettered_and_comes_back_begins_anew(stage: Stage) -> None:
    parked = {"x-message-ttl": 3000, "x-dead-letter-exchange": "",
              "x-dead-letter-routing-key": "odd-retried"}  # fmt: skip
    with stage.app.connection_for_write() as connection:
        Queue("odd-parked", queue_arguments=parked)(connection.default_channel).declare()
    stage.worker(concurrency=2, queues=["odd-retried"])
    task, plain = stage.tasks.late_end, stage.tasks.plain_end
    with stage.tasks.work.lock_for("retried", wait=60):
        result = task.apply_async(("retried", "reject"), queue="odd-retried")
        stage.see_deferred(result)
    beside = plain.apply_async(("plain", "reject"), queue="odd-retried")
    for key in ("retried", "plain"):
        eventually(lambda key=key: stage.runs_of(key))
    with stage.tasks.work.lock_for("retried", wait=60):
        eventually(lambda: stage.info(result)["status"] == "DEFERRED")
        assert stage.info(result)["result"]["deferrals"] == 1  # not one more than in its first life
    see_runs(stage, result, beside)
    assert [stage.runs_of(key) for key in ("retried", "plain")] == [2, 2]


@pytest.mark.parametrize("ttl", [100, 700])
def test_a_message_that_comes_back_at_once_runs_though_it_is_refused_a_lock(
    stage: Stage, ttl: int
) -> None:
    parked = {"x-message-ttl": ttl, "x-dead-letter-exchange": "",
              "x-dead-letter-routing-key": "odd-retried"}  # fmt: skip
    with stage.app.connection_for_write() as connection:
        Queue("odd-parked", queue_arguments=parked)(connection.default_channel).declare()
    stage.worker(concurrency=4, queues=["odd-retried"])
    task, keys = stage.tasks.late_end, [f"soon{number}" for number in range(4)]
    refused = 0
    for key in keys:
        result = task.apply_async((key, "reject"), queue="odd-retried")
        eventually(lambda key=key: stage.runs_of(key))
        with stage.tasks.work.lock_for(key, wait=60):
            eventually(lambda result=result: stage.info(result)["status"] != "FAILURE")
            refused += stage.info(result)["status"] == "DEFERRED"
        see_runs(stage, result)
    assert refused > 0  # the others came back before the test had the lock
    assert [stage.runs_of(key) for key in keys] == [2] * len(keys)


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
        slots = {"queue": queue, "lock": {"wait": 8}}
        held = [stage.tasks.work.apply_async(("full",), **slots) for _ in range(2)]
        eventually(lambda: worker.output().count("received") == 2)
        others = [stage.tasks.work.apply_async((f"next{n}",), queue=queue) for n in range(2)]
        eventually(lambda: worker.output().count("received") == 4)
        others += fill(stage, queue)
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
        slots = {"lock": {"wait": 8}}
        results = [stage.tasks.work.apply_async(("gone",), queue=q, **slots) for q in queues]
        eventually(lambda: worker.output().count("received") == 3)
        control(stage, worker, "cancel_consumer", *queues)
        with stage.app.connection_for_write() as connection:
            connection.default_channel.queue_delete("odd-deleted")
        eventually(lambda: not names_of_queues(stage) & {*queues})
        eventually(lambda: worker.output().count("] deferred: ") == 3)
        eventually(lambda: {count_ready(stage, queue) for queue in queues[:2]} == {1})
        control(stage, worker, "add_consumer", *queues)
    see_runs(stage, *results)
    assert stage.runs_of("gone") == 3


@pytest.mark.slow
def test_a_message_whose_queue_is_gone_for_good_runs_in_its_slot_or_fails(stage: Stage) -> None:
    queue = f"odd-{uuid.uuid4().hex[:8]}"  # that no child knows, for it is added after the fork
    tasks = (stage.tasks.work,)
    worker = stage.worker(concurrency=4, queues=["odd"])
    control(stage, worker, "add_consumer", queue)
    with stage.tasks.work.lock_for("kept", wait=60):
        with stage.tasks.work.lock_for("freed", wait=60):
            slots = {"queue": queue, "lock": {"wait": 5}}
            runs, fails = (
                [task.apply_async((key,), **slots) for task in tasks] for key in ("freed", "kept")
            )
            eventually(lambda: worker.output().count("received") == 2)
            control(stage, worker, "cancel_consumer", queue)
            with stage.app.connection_for_write() as connection:
                connection.default_channel.queue_delete(queue)
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
