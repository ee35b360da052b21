"""A message that was put back is woken by the release; by itself only the first in line asks."""

from __future__ import annotations

import os
import socket
import uuid
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from celery_redlock import LockTaken, Redlock
from celery_redlock.lock.model.acquisition import Acquisition
from celery_redlock.lock.model.lease import Lease
from celery_redlock.lock.server.requests import RELEASE
from celery_redlock.testing import EmbeddedNode, WorkerProcess
from tests.clocks import HOUR, WallClock
from tests.conftest import NODE_TIMEOUT, Journal, Nodes, eventually
from tests.integration import carried
from tests.integration.conftest import MakeStage, Stage, slow_but

POOLS = ["prefork", "threads", "solo", "gevent"]
SEVERAL = {"key": ["k:{key}", "k:{name}"]}
LONG = {"first": 1e7, "cap": 1e7}
WOKEN = 60.0  # s: well before the end of `patient`'s countdown of 100 s


CONF = {"redlock_max_ttl": 200}  # leases are longer than any test: what runs was woken
WORKER = {"concurrency": 2}


@pytest.fixture
def calm_stage(make_stage: MakeStage, nodes: Nodes) -> Stage:
    """Give such a stage to a test whose worker is its own."""
    return make_stage(nodes, **CONF)


def defer(stage: Stage, key: str, *names: str) -> list[Any]:
    """Send tasks one after another, each once the one before it waits."""
    results = []
    for name in names:
        result = stage.tasks.patient.delay(key, name)
        stage.see_deferred(result)
        results.append(result)
    return results


def see_registered(stage: Stage, key: str) -> None:
    waiting = f"{{redlock}}:waiting:k:{key}"
    for node in stage.nodes:
        eventually(lambda node=node: node.client().zcard(waiting) == 1)
        inbox = f"{{redlock}}:handoff:{node.client().zrange(waiting, 0, 0)[0]}"
        eventually(lambda node=node, inbox=inbox: node.client().pubsub_numsub(inbox)[0][1] == 1)


def registrations(node: EmbeddedNode) -> int:
    return int(node.client().info("commandstats").get("cmdstat_zadd", {"calls": 0})["calls"])


def republish(worker: WorkerProcess) -> int:
    """Return how often a worker put a message back.

    One more than messages, as it begins to listen: a release may have come just before. And one
    more for each release that none follows within a second.
    """
    return worker.output().count("] deferred: ")


@pytest.mark.parametrize("pool", slow_but(("prefork", "gevent"), POOLS))
def test_a_release_wakes_a_message_long_before_its_countdown_ends(
    calm_stage: Stage, pool: str
) -> None:
    worker = calm_stage.worker(pool=pool, concurrency=1 if pool == "solo" else 2)
    with calm_stage.tasks.patient.lock_for("k", wait=60):
        results = defer(calm_stage, "k", "a", "b", "c")
    assert [result.get(timeout=WOKEN) for result in results] == ["a", "b", "c"]
    assert republish(worker) <= 2 * len(results) + 1


@pytest.mark.parametrize("pool", slow_but(("prefork", "solo"), POOLS))
def test_the_main_process_learns_which_lock_refused_a_run_and_until_when(
    calm_stage: Stage, pool: str
) -> None:
    worker, ttl = calm_stage.worker(pool=pool, concurrency=1 if pool == "solo" else 2), 90
    urls = [node.url for node in calm_stage.nodes]
    with ExitStack() as stack:
        one, other = (
            stack.enter_context(Redlock(urls, node_timeout=NODE_TIMEOUT, max_ttl=200))
            for _ in range(2)
        )
        stack.enter_context(one.lock("k:k", ttl=ttl, wait=60))
        for client in (one, other):
            stack.enter_context(client.lock("p:k", ttl=ttl, limit=2, wait=60))
        tasks = calm_stage.tasks
        results = [task.delay("k") for task in (tasks.tells, tasks.tells_of_permits)]
        for result in results:
            calm_stage.see_deferred(result)
        eventually(lambda: {line.key for line in calm_stage.lines("told")} == {"k:k", "p:k"})
    for result in results:
        result.get(timeout=60)
    for line in calm_stage.lines("told"):
        assert line.pid == worker.pid
        assert line.more["limit"] == (1 if line.key == "k:k" else 2)
        assert 0 < line.more["expires_in"] <= ttl
        assert line.more["holder"] == f"pid {os.getpid()} on {socket.gethostname()}"
        holder = line.more["holder"] if line.key == "k:k" else "2 holders, its limit"
        assert line.more["text"] == f"deferred: held by {holder}"
    assert len(calm_stage.lines("told")) == republish(worker)


def test_the_most_urgent_message_that_came_last_runs_next(stage: Stage, key: str) -> None:
    """As Redis has it, where 0 goes before 9."""
    carried.see_urgent_first(stage, key, 0, 3, 6)


def say_free(stage: Stage, key: str, resource: str) -> None:
    """Release a key that stands for another's lock."""
    keys = f"{{redlock}}:lock:{key}", f"{{redlock}}:waiting:{resource}"
    for node in stage.nodes:
        client = node.client()
        client.eval(
            RELEASE.source.decode(), 2, *keys, client.get(keys[0]), "{redlock}:handoff:", "1"
        )


def hold(stage: Stage, key: str) -> None:
    """Let a key stand for another's lock."""
    value = f"{uuid.uuid4()}:0:holder"
    for node in stage.nodes:
        node.client().set(f"{{redlock}}:lock:{key}", value, px=200_000)


def test_a_rate_limit_of_celery_holds_for_plain_tasks_with_a_countdown(stage: Stage) -> None:
    """Also under another name, by which monitors show them."""
    stage.worker(concurrency=2)
    plain, where = stage.tasks.add, stage.see_listening()
    stage.app.control.rate_limit(plain.name, "1/h", destination=where, reply=True)
    results = [plain.apply_async(countdown=1, shadow="nightly") for _ in range(3)]
    eventually(lambda: any(result.ready() for result in results))
    assert stage.tasks.work.delay("k").get(timeout=60) == 0
    assert not all(result.ready() for result in results)  # Celery lets the first two run


def test_a_release_wakes_nothing_past_its_rate_limit(calm_stage: Stage) -> None:
    calm_stage.worker(concurrency=2)
    task = calm_stage.tasks.step
    where = calm_stage.see_listening()
    calm_stage.app.control.rate_limit(task.name, "1/h", destination=where, reply=True)
    hold(calm_stage, "k:k")
    limited = task.apply_async(("k",), lock={"backoff": LONG})
    calm_stage.see_deferred(limited)
    (one,) = defer(calm_stage, "k", "one")
    say_free(calm_stage, "k:k", "k:k")
    assert one.get(timeout=WOKEN) == "one"
    assert calm_stage.deferrals(limited) == 1
    assert calm_stage.lines("step") == []


def test_those_that_were_revoked_by_a_stamp_are_seen_to_be_while_they_wait(
    stage: Stage, key: str
) -> None:
    hold(stage, f"k:{key}")
    stamped = [
        task.apply_async(
            (key,), lock={"backoff": LONG}, stamped_headers=["of"], of="x", headers={"of": "x"}
        )
        for task in (stage.tasks.patient, stage.tasks.late, stage.tasks.patient)
    ]
    for result in stamped:
        stage.see_deferred(result)
    (one,) = defer(stage, key, "one")
    stage.app.control.revoke_by_stamped_headers({"of": "x"})
    for result in stamped:
        eventually(lambda result=result: result.status == "REVOKED", within=WOKEN)
    say_free(stage, f"k:{key}", f"k:{key}")
    assert one.get(timeout=WOKEN) == "one"


def test_a_restart_of_the_broker_ends_no_worker_in_which_messages_wait(
    make_stage: MakeStage, nodes: Nodes
) -> None:
    with EmbeddedNode() as broker:
        stage = make_stage(nodes, broker, result_backend=nodes[0].url)
        worker = stage.worker(concurrency=2)
        with stage.tasks.patient.lock_for("k", wait=60):
            defer(stage, "k", "a")
            see_registered(stage, "k")
            connected = worker.output().count("Connected to ")
            broker.kill()
            eventually(lambda: "Cannot connect to " in worker.output())
            broker.start()
            eventually(lambda: worker.output().count("Connected to ") > connected)
            assert stage.tasks.patient.delay("other", "b").get(timeout=WOKEN) == "b"


def test_those_that_find_it_free_and_go_back_all_the_same_hold_up_nobody(
    stage: Stage, key: str
) -> None:
    hold(stage, f"k:{key}")
    hold(stage, f"k:z-{key}")
    both = [stage.tasks.patient.apply_async((key, f"z-{key}"), lock=SEVERAL) for _ in range(4)]
    for result in both:
        stage.see_deferred(result)
    (one,) = defer(stage, key, "one")
    say_free(stage, f"k:{key}", f"k:{key}")
    assert one.get(timeout=WOKEN) == "one"
    assert {result.status for result in both} == {"DEFERRED"}
    for result in both:
        result.revoke()


def test_one_that_was_refused_by_a_try_for_several_runs_once_that_has_failed(
    stage: Stage, key: str
) -> None:
    hold(stage, f"k:z-{key}")
    waits: list[Any] = []

    class Slow(Journal):
        """Tells of its second key only once somebody was refused its first."""

        def claiming(self, session: bytes, at: float, holding: Acquisition, claim: Lease) -> None:
            if claim.key.resource == f"k:z-{key}":
                waits.extend(defer(stage, key, "one"))
                see_registered(stage, key)

    with Redlock([node.url for node in stage.nodes], max_ttl=200) as rival:
        rival.session.events.journal = Slow()
        assert not rival.lock([f"k:{key}", f"k:z-{key}"], ttl=200).try_acquire()
        assert waits[0].get(timeout=WOKEN) == "one"


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [HOUR, -HOUR], ids=["ahead", "behind"])
def test_a_wait_that_began_at_a_worker_with_another_clock_goes_on_in_time(
    own_stage: Stage, wall_clock: WallClock, ahead: int
) -> None:
    stage = own_stage
    wall_clock.set(ahead)
    clocked = replace(stage, env={**stage.env, **wall_clock.environment}).worker("w1")
    for node in stage.nodes:
        node.client().set("{redlock}:lock:k:left", "of a dead holder", px=15_000)
    budget = {"max_wait": 10}
    with stage.tasks.work.lock_for("held", wait=60):
        timed = stage.tasks.work.apply_async(("held",), lock=budget)
        freed = stage.tasks.work.delay("left")
        freed_in_time = stage.tasks.work.apply_async(("left",), lock={"max_wait": 600})
        for one in (timed, freed, freed_in_time):
            stage.see_deferred(one)
        clocked.stop()
        stage.worker("w2")
        assert [freed.get(timeout=60), freed_in_time.get(timeout=60)] == [0, 0]
        with pytest.raises(LockTaken) as caught:
            timed.get(timeout=60)
    assert 10 <= caught.value.waited < HOUR / 2
