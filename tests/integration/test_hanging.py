"""A result backend and a lock node hang: a worker's main process goes on, as plain Celery's."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
from collections.abc import Iterator

import pytest

from celery_redlock.testing import EmbeddedNode
from tests.conftest import Nodes, eventually, trust_nodes
from tests.integration.conftest import MakeStage, Stage, slow_but
from tests.integration.test_untried import LONG, see_each_run_once, wait_behind

PINGS = 10
COUNT = 6  # messages that wait for one lock


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with EmbeddedNode() as first, EmbeddedNode() as second, EmbeddedNode() as third:
        trust_nodes([first, second, third])
        yield [first, second, third]


@pytest.fixture
def backend() -> Iterator[EmbeddedNode]:
    with EmbeddedNode() as server:
        yield server
        gc.collect()  # a result unsubscribes when it is forgotten, and its server must be there


def answered(stage: Stage, where: list[str]) -> int:
    """Return how many pings a worker answers; a worker that does not answer one gets no other."""
    for number in range(PINGS):
        if not stage.app.control.ping(where, timeout=60.0, limit=1):
            return number
    return PINGS


@pytest.mark.parametrize("pool", slow_but(("prefork",), ("prefork", "threads", "gevent")))
def test_a_frozen_backend_and_a_frozen_node_keep_no_worker_from_its_commands(
    nodes: Nodes, backend: EmbeddedNode, make_stage: MakeStage, pool: str
) -> None:
    """And no state lands over a later one, once the result backend goes on."""
    stage = make_stage(nodes, result_backend=backend.url)
    worker, where = stage.worker(pool=pool, concurrency=2), stage.see_listening()
    work, plain = stage.tasks.work, stage.tasks.add
    with work.lock_for("k", wait=60):
        waiting = wait_behind(stage, worker, work, "k", 2)
        backend.pause()
        nodes[2].pause()
        plain.delay()
        assert answered(stage, where) == PINGS  # plain Celery's, with a child that stores

        ids = [work.delay("k").id for _ in range(COUNT - 1)]
        for seconds in (1, 4, 16, 64):  # on a slow machine one expires before it is deferred
            expires = work.apply_async(("k",), expires=seconds, lock=LONG).id
            over = f"Discarding revoked task: {work.name}[{expires}]"
            said = [f"{expires}] deferred: ", over]
            eventually(lambda said=said: any(words in worker.output() for words in said))
            if said[0] in worker.output():
                break
        assert answered(stage, where) == PINGS
        ids.append(expires)
        eventually(lambda: all(f"{id_}] deferred: " in worker.output() for id_ in ids))
        eventually(lambda: over in worker.output())
        assert answered(stage, where) == PINGS
    results = [work.AsyncResult(id_) for id_ in ids]
    assert answered(stage, where) == PINGS  # while they begin to run
    backend.resume()
    nodes[2].resume()
    eventually(lambda: stage.info(results[-1])["status"] == "REVOKED")
    see_each_run_once(stage, "k", [*waiting, *results[:-1]])
    assert {stage.info(one)["status"] for one in results[:-1]} == {"SUCCESS"}


@pytest.mark.parametrize("pool", slow_but(("prefork",), ("prefork", "threads", "gevent")))
@pytest.mark.parametrize("stops", [False, True], ids=["goes on", "stops"])
def test_an_expired_message_stays_with_the_broker_until_its_end_is_stored(
    nodes: Nodes, backend: EmbeddedNode, make_stage: MakeStage, pool: str, stops: bool
) -> None:
    """Else a worker that is killed meanwhile loses the end, and its caller waits for ever.

    And if it stayed as the worker stops, the next one, which knows no revocation, would run it.
    """
    stage = make_stage(nodes, result_backend=backend.url)
    results = [stage.tasks.work.apply_async(("k",), expires=0.001) for _ in range(2)]
    backend.pause()
    worker, client = stage.worker(pool=pool, concurrency=2), stage.broker.client()
    for result in results:
        eventually(lambda id_=result.id: f"[{id_}]" in worker.output().partition("Discarding")[2])
    stage.see_listening()
    assert client.hlen("unacked") == len(results)
    if stops:
        worker.signal(signal.SIGTERM)
        eventually(lambda: "Warm shutdown" in worker.output())
    backend.resume()
    if stops:
        worker.wait()
        assert not client.exists("unacked")
    eventually(lambda: not client.exists("unacked"))
    assert not client.llen("celery")
    assert {stage.info(one)["status"] for one in results} == {"REVOKED"}


def test_the_message_of_a_run_that_is_terminated_is_acknowledged_at_once(
    nodes: Nodes, backend: EmbeddedNode, make_stage: MakeStage
) -> None:
    """Else the end of its child could have it requeued, and it would run again."""
    stage = make_stage(nodes, result_backend=backend.url)
    stage.worker(concurrency=2)
    result, client = stage.tasks.stays_late.delay("k", "deaf"), stage.broker.client()
    eventually(lambda: stage.lines("still"))  # it hears no TERM from now on
    backend.pause()
    try:
        assert client.hlen("unacked") == 1
        result.revoke(terminate=True, signal="TERM")
        eventually(lambda: not client.exists("unacked"))
    finally:
        backend.resume()
        os.kill(stage.lines("stays")[0].pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_backend_that_never_answers_keeps_no_message_from_its_lock(stage: Stage) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        backend = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        conf = json.loads(stage.env["TEST_CONF"])  # of the worker; the sender waits for its backend
        stage.env["TEST_CONF"] = json.dumps({**conf, "result_backend": backend})
        stage.log.with_name("signals").touch()
        worker, where = stage.worker(concurrency=2), stage.see_listening()
        with stage.tasks.work.lock_for("k", wait=60):
            refused = stage.tasks.crowded.delay("k")  # it stores no state
            eventually(lambda: worker.output().count(f"{refused.id}] received") == 2)
            untried = stage.tasks.work.delay("k")
            eventually(lambda: f"{untried.id}] deferred: " in worker.output())
            assert answered(stage, where) == PINGS
        # its state was being stored when its lock became free
        stage.wait_for("lock_acquired", 3, within=60)  # that of this process first
        assert answered(stage, where) == PINGS
