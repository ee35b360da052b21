"""The messages of a worker that has died, or was taken for dead, on real workers and brokers."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from kombu import Connection, Exchange
from redis import BusyLoadingError, Redis

from celery_redlock.lock.model.keys import waiting_key
from celery_redlock.tasks.delivery.republish import MOVES
from celery_redlock.tasks.recovery.observer import DETECTION_TIME
from celery_redlock.tasks.recovery.step import can_tag
from celery_redlock.tasks.recovery.tags import MAX_MOVES, DeliveryTag, new_lease
from celery_redlock.testing import EmbeddedNode
from tests.conftest import Nodes, eventually
from tests.integration.conftest import MakeStage, Stage, overlaps, pools
from tests.workers import ForkedWorker

WAITING = 5
LONG = 1000.0  # s: a message with this countdown stays with the worker that takes it
NEWS, FAN = Exchange("classic-news", "topic"), Exchange("everybody", "fanout")
WAITS_FOR_K = waiting_key("redlock", "k:k")
LEASES, DEAD = "{redlock}:worker_leases:unacked", "{redlock}:worker_leases_dead:unacked"


@pytest.fixture
def broker() -> Iterator[EmbeddedNode]:
    """Give a broker of the test's own, which keeps all that it has said yes to."""
    with EmbeddedNode(appendonly="yes", appendfsync="always") as server:
        yield server


@pytest.fixture
def stage(make_stage: MakeStage, nodes: Nodes, broker: EmbeddedNode) -> Stage:
    return make_stage(nodes, broker, worker_prefetch_multiplier=8)


def unacked(broker: EmbeddedNode, key: str = "unacked") -> dict[str, dict[str, Any]]:
    """Return what workers have, by delivery tag: each message as it was sent."""
    found = broker.client().hgetall(key)
    return {tag: json.loads(text)[0] for tag, text in found.items()}


def tags_by_id(broker: EmbeddedNode, key: str = "unacked") -> dict[str, str]:
    return {raw["headers"]["id"]: tag for tag, raw in unacked(broker, key).items()}


def queued(client: Redis, name: str) -> list[str]:
    """Return the ids of the messages of a list, in the order in which workers take them."""
    return [json.loads(text)["headers"]["id"] for text in reversed(client.lrange(name, 0, -1))]


def leases(broker: EmbeddedNode) -> dict[str, str]:
    """Return the worker leases by the names of their workers."""
    client = broker.client()
    found = client.zrange(LEASES, 0, -1)
    names = client.hgetall("{redlock}:worker_names:unacked")  # last: one may have joined meanwhile
    return {names[lease].partition("@")[0]: lease for lease in found if lease in names}


def see_loaded(broker: EmbeddedNode) -> None:
    """Return when a broker that was started again has read what it had kept."""

    def answers() -> bool:
        with suppress(BusyLoadingError):  # redis-py 5.0 does not try again
            return bool(broker.client().ping())
        return False

    eventually(answers)


def see_moved(worker: ForkedWorker, count: int, whose: str = "w1") -> None:
    """Return when a worker says that it has moved so many messages of another one."""

    said = re.compile(rf"moved (\d+) messages? of {whose}@")
    eventually(lambda: said.search(worker.output()))
    assert sum(map(int, said.findall(worker.output()))) == count


def see_all_over(stage: Stage) -> None:
    """Return when no message is left, neither queued nor with a worker."""
    client = stage.broker.client()
    eventually(lambda: not client.exists("unacked", "celery"))


def see_each_once(stage: Stage, ids: set[str], pid: int | None = None) -> None:
    """Fail if one of these has run more than once, or elsewhere than in a process."""
    begun = [line for line in stage.lines("begin") if line.more.get("id") in ids]
    assert sorted(line.more["id"] for line in begun) == sorted(ids)
    assert pid is None or {line.pid for line in begun} == {pid}


def see_none_beside(stage: Stage) -> None:
    assert not [pair for spans in stage.intervals().values() for pair in overlaps(spans)]


def see_waiting(stage: Stage, results: list[Any]) -> None:
    """Return when these have been deferred, and are with workers again; nothing else is."""
    for result in results:
        stage.see_deferred(result)

    def is_so() -> bool:
        with stage.broker.client().pipeline() as pipe:
            found: list[int] = pipe.hlen("unacked").llen("celery").execute()
        return found == [len(results), 0]

    eventually(is_so)


def freeze(worker: ForkedWorker) -> None:
    os.killpg(worker.pid, signal.SIGSTOP)


def wake(worker: ForkedWorker) -> None:
    os.killpg(worker.pid, signal.SIGCONT)


# killed


@pytest.mark.parametrize("pool", pools("prefork"))
def test_all_that_a_killed_worker_had_is_back_and_ends(stage: Stage, pool: str) -> None:
    """Its running and its waiting messages, each in its turn, and none beside another."""
    first = stage.worker("w1", pool=pool, concurrency=1 if pool == "solo" else 2)
    with stage.tasks.late.lock_for("k", wait=60):
        waiting = [stage.tasks.late.delay("k") for _ in range(WAITING)]
        see_waiting(stage, waiting)
        running = stage.tasks.until.delay("running", "go")
        stage.wait_for("begin")
        second = stage.worker("w2", concurrency=2)
        assert len(unacked(stage.broker)) == WAITING + 1
        first.kill()
        see_moved(second, WAITING + 1)
        assert leases(stage.broker).keys() == {"w2"}
    stage.log.with_name("go").touch()
    assert running.get(timeout=120).startswith("w2@")
    assert [result.get(timeout=120) for result in waiting] == [0] * WAITING
    see_each_once(stage, {result.id for result in waiting})
    assert stage.runs_of("running") == 2
    see_none_beside(stage)
    see_all_over(stage)
    eventually(lambda: not stage.broker.client().exists(DEAD))


def test_a_fleet_of_one_that_is_started_again_has_all_back(stage: Stage) -> None:
    worker = stage.worker("w1", pool="threads", concurrency=2)
    with stage.tasks.late.lock_for("k", wait=60):
        waiting = [stage.tasks.late.delay("k") for _ in range(WAITING)]
        see_waiting(stage, waiting)
        worker.kill()
        again = stage.worker("w1", pool="threads", concurrency=2)
        see_moved(again, WAITING)
    assert [result.get(timeout=120) for result in waiting] == [0] * WAITING
    see_each_once(stage, {result.id for result in waiting}, again.pid)


def test_what_a_stopped_worker_has_not_given_back_is_moved_at_once(stage: Stage) -> None:
    """Of a worker that ends by itself there is no proof to wait for."""
    worker = stage.worker("w1", pool="threads")
    stage.worker("w2", pool="threads")
    lease = leases(stage.broker)["w1"]
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    client = stage.broker.client()
    eventually(lambda: leases(stage.broker).keys() == {"w2"} and not client.exists(DEAD))
    assert not client.hexists("{redlock}:worker_names:unacked", lease)


@pytest.mark.slow
def test_a_pool_that_grows_and_restarts_has_the_worker_lease_of_before(
    make_stage: MakeStage, nodes: Nodes, broker: EmbeddedNode
) -> None:
    stage = make_stage(nodes, broker, worker_pool_restarts=True)
    first = stage.worker("w1", options=["--autoscale", "2,1"])
    before = leases(broker)
    running = [stage.tasks.until.delay(key, "go") for key in ("a", "b")]
    stage.wait_for("begin", 2)
    stage.log.with_name("go").touch()
    assert {result.get(timeout=120).partition("@")[0] for result in running} == {"w1"}
    to = stage.see_listening("w1")
    [reply] = stage.app.control.pool_restart(destination=to, reply=True, timeout=60)
    assert "ok" in reply[to[0]]
    with stage.tasks.late.lock_for("k", wait=60):
        waiting = [stage.tasks.late.delay("k") for _ in range(WAITING)]
        see_waiting(stage, waiting)
        assert leases(broker) == before
        second = stage.worker("w2", concurrency=2)
        first.kill()
        see_moved(second, WAITING)
    assert [result.get(timeout=120) for result in waiting] == [0] * WAITING


@pytest.mark.parametrize(
    "conf",
    [{}, {"redlock_recovery": False}, {"worker_disable_prefetch": True}],
    ids=["leased", "unleased", "no-prefetch"],
)
def test_a_worker_notes_what_comes_as_its_only_slot_was_just_taken(
    make_stage: MakeStage, nodes: Nodes, broker: EmbeddedNode, conf: dict[str, Any]
) -> None:
    """Its BRPOP was open as it lowered its prefetch, and is answered after that."""
    open_long = {"polling_interval": 600}  # s: for which the BRPOP stays open
    stage = make_stage(
        nodes, broker, worker_prefetch_multiplier=1, broker_transport_options=open_long, **conf
    )
    first = stage.worker("w1", pool="threads", concurrency=1)
    client, to = broker.client(), stage.see_listening("w1")

    def prefetch() -> int:
        [stats] = stage.app.control.inspect(to, timeout=60).stats().values()
        return int(stats["prefetch_count"])

    with stage.tasks.until.lock_for("k", "go", wait=60):
        stage.tasks.until.delay("k", "go")
        eventually(lambda: client.hlen("unacked") == 1)
        eventually(lambda: any("b" in one["flags"] for one in client.client_list()))
        before = prefetch()
    stage.wait_for("begin")
    eventually(lambda: prefetch() == before - 1)
    coming = stage.tasks.late.delay("l")
    eventually(lambda: coming.id in tags_by_id(broker))
    if not conf:
        first.kill()
        see_moved(stage.worker("w2", pool="threads", concurrency=2), 2)
        assert coming.get(timeout=120) == 0
    stage.log.with_name("go").touch()


# frozen


@pytest.mark.parametrize("pool", pools("threads", every=("threads", "gevent", "prefork")))
def test_a_woken_worker_begins_nothing_that_was_moved(stage: Stage, pool: str) -> None:
    """Neither what waits for its lock, nor what waits for its only slot."""
    first = stage.worker("w1", pool=pool, concurrency=1)
    with stage.tasks.late.lock_for("k", wait=60):
        waiting = [stage.tasks.late.delay("k") for _ in range(WAITING)]
        see_waiting(stage, waiting)
        stage.tasks.waits.delay("running")
        stage.wait_for("begin")
        slotless = [stage.tasks.late.delay(f"s{number}") for number in range(3)]
        slotless += [stage.tasks.work.delay(f"e{number}") for number in range(3)]
        # a pool of greenlets waits for a slot with the first one, and takes no other
        taken = 1 if pool == "gevent" else len(slotless)
        eventually(lambda: len(unacked(stage.broker)) >= WAITING + taken)
        second = stage.worker("w2", pool="threads", concurrency=2)
        lease = leases(stage.broker)["w1"]
        had = sum(tag.startswith(lease) for tag in unacked(stage.broker))
        freeze(first)
        see_moved(second, had)
    results = [*waiting, *slotless[:taken]]
    for result in results:
        assert result.get(timeout=120) == 0
    ids = {result.id for result in results}
    see_each_once(stage, ids, second.pid)
    wake(first)
    eventually(lambda: "took it for dead" in first.output())
    stage.log.with_name("go on").touch()  # its slot is free then
    # not what runs: Celery 5.6 acknowledges it late under gevent, so it may be moved, too
    said = re.compile(r"\[([0-9a-f-]+)\] is with another worker")
    eventually(lambda: sorted(said.findall(first.output())) == sorted(ids))
    first.signal(signal.SIGTERM)
    assert first.wait() == 0
    see_all_over(stage)
    see_each_once(stage, ids, second.pid)


@pytest.mark.parametrize("pool", pools("threads", every=("threads", "gevent")))
def test_a_worker_whose_interpreter_was_blocked_begins_nothing_that_was_moved(
    stage: Stage, pool: str
) -> None:
    """By a body in C that keeps the interpreter's lock: no thread of the worker beats."""
    pipe = stage.log.with_name("pipe")
    os.mkfifo(pipe)
    first = stage.worker("w1", pool=pool, concurrency=2)
    with stage.tasks.late.lock_for("k", wait=60):
        waiting = [stage.tasks.late.delay("k") for _ in range(WAITING)]
        see_waiting(stage, waiting)
        stage.tasks.keeps_the_interpreter.delay("blocked", str(pipe))
        stage.wait_for("begin")
        with stage.broker.client() as client:
            eventually(lambda: client.hlen("unacked") == WAITING)
        pipe.with_name("pipe may").touch()
        second = stage.worker("w2", pool="threads", concurrency=2)
        see_moved(second, WAITING)
    assert [result.get(timeout=120) for result in waiting] == [0] * WAITING
    pipe.open("w").close()
    see_woken_drop(stage, first, WAITING)
    see_each_once(stage, {result.id for result in waiting}, second.pid)
    assert stage.runs_of("blocked") == 1


def test_a_woken_worker_begins_nothing_that_may_hold_one_of_two_permits(stage: Stage) -> None:
    """With early acknowledgement: what waits for a permit is not acknowledged yet."""
    visit = stage.tasks.visit
    second = stage.worker("w2", pool="threads", concurrency=4, queues=["held"])
    holders = [visit.apply_async(("c", name, "go"), queue="held") for name in ("h1", "h2")]
    stage.wait_for("begin", 4)  # each of them writes two lines
    first = stage.worker("w1", pool="threads", concurrency=2, queues=["celery"])
    waiting = [visit.delay("c", f"v{number}") for number in range(WAITING)]
    see_waiting(stage, waiting)
    freeze(first)
    see_moved(second, WAITING)
    with stage.consumed("celery", "w2"):
        stage.log.with_name("go").touch()
        for result in (*holders, *waiting):
            result.get(timeout=120)
    wake(first)
    see_woken_drop(stage, first, WAITING)
    begun = {line.key: line.pid for line in stage.lines("begin") if line.key.startswith("v")}
    assert begun == {f"v{number}": second.pid for number in range(WAITING)}
    assert [stage.runs_of(name) for name in begun] == [1] * WAITING


def see_woken_drop(stage: Stage, worker: ForkedWorker, count: int) -> None:
    """Return when a woken worker has dropped so many messages, and has ended."""
    eventually(lambda: "took it for dead" in worker.output())
    eventually(lambda: worker.output().count("is with another worker") == count)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    see_all_over(stage)


def test_a_woken_worker_gives_nothing_back_that_was_moved(stage: Stage) -> None:
    """Also if it is told to stop while it is frozen, which it hears before anything else."""
    first = stage.worker("w1", pool="threads", concurrency=2)
    with stage.tasks.late.lock_for("k", wait=60):
        waiting = [stage.tasks.late.delay("k") for _ in range(WAITING)]
        see_waiting(stage, waiting)
        second = stage.worker("w2", pool="threads", concurrency=2)
        freeze(first)
        see_moved(second, WAITING)
        first.signal(signal.SIGTERM)
        wake(first)
        assert first.wait() == 0
        moved = tags_by_id(stage.broker)
        assert moved.keys() == {result.id for result in waiting}
        assert stage.broker.client().llen("celery") == 0
        own = leases(stage.broker)["w2"]
        assert {tag.partition(":")[0] for tag in moved.values()} == {own}
    assert [result.get(timeout=120) for result in waiting] == [0] * WAITING
    see_each_once(stage, {result.id for result in waiting}, second.pid)


@pytest.mark.parametrize("pool", pools("threads", every=("threads", "gevent")))
def test_a_woken_run_that_waits_in_its_slot_gives_nothing_back_that_was_moved(
    make_stage: MakeStage, nodes: Nodes, broker: EmbeddedNode, pool: str
) -> None:
    """It has been here for so long that it would go back to its queue, and not stay."""
    stage = make_stage(nodes, broker, broker_transport_options={"visibility_timeout": 40})
    first = stage.worker("w1", pool=pool, concurrency=1)
    with stage.tasks.late.lock_for("k", wait=60):
        result = stage.tasks.late.apply_async(("k",), lock={"wait": 2 * DETECTION_TIME})
        eventually(lambda: len(unacked(broker)) == 1)
        eventually(lambda: all(node.client().zcard(WAITS_FOR_K) for node in nodes))
        stage.app.control.cancel_consumer("celery", destination=stage.see_listening("w1"))
        eventually(lambda: "Canceling queue celery" in first.output())
        freeze(first)
        second = stage.worker("w2", pool="threads", concurrency=2)
        see_moved(second, 1)
        wake(first)
        eventually(lambda: "is with another worker" in first.output())
        assert "deferred" not in first.output()
    assert result.get(timeout=120) == 0
    see_all_over(stage)
    see_each_once(stage, {result.id}, second.pid)


def test_a_worker_that_is_frozen_for_less_than_the_proof_keeps_what_it_has(stage: Stage) -> None:
    client = stage.broker.client()
    first = stage.worker("w1", pool="threads", concurrency=2)
    with stage.tasks.late.lock_for("k", wait=60):
        result = stage.tasks.late.delay("k")
        see_waiting(stage, [result])
        second = stage.worker("w2", pool="threads", concurrency=2)
        lease, tags = leases(stage.broker)["w1"], tags_by_id(stage.broker)

        def is_quiet() -> bool:
            seconds, more = client.time()
            return bool(seconds + more / 1e6 - client.zscore(LEASES, lease) / 1000 > 2.0)

        freeze(first)
        eventually(is_quiet)
        last = client.zscore(LEASES, lease)
        wake(first)
        eventually(lambda: (client.zscore(LEASES, lease) or 0) > last)
        assert leases(stage.broker)["w1"] == lease
        assert tags_by_id(stage.broker) == tags
    assert result.get(timeout=120) == 0
    assert {line.pid for line in stage.lines("begin")} == {first.pid}
    assert "moved" not in second.output()


@pytest.mark.slow
@pytest.mark.parametrize(
    "pool", ["solo", pytest.param("gevent", marks=pytest.mark.xdist_group("gevent"))]
)
def test_a_body_that_stops_the_event_loop_is_not_taken_for_a_dead_worker(
    stage: Stage, pool: str
) -> None:
    first = stage.worker("w1", pool=pool, concurrency=2)
    with stage.tasks.late.lock_for("k", wait=60):
        waiting = stage.tasks.late.delay("k")
        see_waiting(stage, [waiting])
        second = stage.worker("w2", pool="threads", concurrency=2)
        lease, tags = leases(stage.broker)["w1"], tags_by_id(stage.broker)
        # nobody else takes it, for w2 is told of it first
        stage.app.control.cancel_consumer("celery", destination=stage.see_listening("w2"))
        eventually(lambda: "Canceling queue celery" in second.output())
        busy = stage.tasks.gives_nobody_way.delay("busy", 2 * DETECTION_TIME - 3, in_c=False)
        assert busy.get(timeout=120) is True
        assert leases(stage.broker)["w1"] == lease
        assert tags_by_id(stage.broker).items() >= tags.items()
        assert "moved" not in second.output()
    assert waiting.get(timeout=120) == 0
    assert "took it for dead" not in first.output()


@pytest.mark.slow
def test_a_worker_that_waits_for_its_bodies_to_end_is_not_taken_for_dead(stage: Stage) -> None:
    first = stage.worker("w1", pool="threads", concurrency=2)
    running = stage.tasks.until.delay("running", "go")
    stage.wait_for("begin")
    second = stage.worker("w2", pool="threads", concurrency=2)
    client, lease = stage.broker.client(), leases(stage.broker)["w1"]
    told = client.time()[0]
    first.signal(signal.SIGTERM)
    eventually(lambda: (client.zscore(LEASES, lease) or 0) / 1000 - told > DETECTION_TIME + 1)
    stage.log.with_name("go").touch()
    assert first.wait() == 0
    assert running.get(timeout=120).startswith("w1@")
    eventually(lambda: leases(stage.broker).keys() == {"w2"})
    assert "moved" not in second.output()
    assert stage.runs_of("running") == 1


# a broker that was away


@pytest.mark.parametrize("pool", pools("prefork", every=("prefork", "threads", "gevent")))
def test_what_waits_is_back_after_a_restart_of_the_broker(stage: Stage, pool: str) -> None:
    worker = stage.worker("w1", pool=pool, concurrency=2)
    with stage.tasks.late.lock_for("k", wait=60):
        waiting = [stage.tasks.late.delay("k") for _ in range(WAITING)]
        see_waiting(stage, waiting)
        before = leases(stage.broker)["w1"]
        stage.broker.kill()
        stage.broker.start()
        see_loaded(stage.broker)
        eventually(lambda: leases(stage.broker).get("w1", before) != before)
        see_moved(worker, WAITING)
    ids = {result.id for result in waiting}
    eventually(
        lambda: (
            {line.more["id"] for line in stage.lines("end", "begin") if "id" in line.more} == ids
        )
    )
    see_all_over(stage)
    see_each_once(stage, ids)
    assert worker.runs


def test_what_runs_as_the_broker_restarts_is_not_begun_again(stage: Stage) -> None:
    """Its second delivery waits for its end, also if the first worker ends by its late end.

    Celery 5.7.0 ends a worker whose late acknowledgement is of a connection that was lost.
    """
    stage.worker("w1", pool="threads", concurrency=2)
    running = stage.tasks.until.delay("running", "go")
    stage.wait_for("begin")
    stage.worker("w2", pool="threads", concurrency=2)
    before = leases(stage.broker)["w1"]
    stage.broker.kill()
    stage.broker.start()
    client = stage.broker.client()
    eventually(lambda: client.zscore(LEASES, before) is None)

    def is_with_another_lease() -> bool:
        lease = tags_by_id(stage.broker).get(running.id, "").partition(":")[0]
        return lease not in ("", before)

    eventually(is_with_another_lease)
    stage.log.with_name("go").touch()
    see_all_over(stage)
    assert stage.runs_of("running") == 1


# what is tagged


def client_of_bytes(broker: EmbeddedNode) -> Redis:
    return Redis(port=broker.port)


def test_only_what_holds_a_lock_for_sure_is_tagged(
    make_stage: MakeStage, nodes: Nodes, broker: EmbeddedNode
) -> None:
    queues = {"held": {"on_unreachable": "run"}, "other": {"key": False}}
    adopted = {"tests.unlocked_*": {"key": False}, "tests.plain": {"ttl": 30.0}}
    stage = make_stage(nodes, broker, redlock_queues=queues, redlock_tasks=adopted)
    tasks, later = stage.tasks, {"countdown": LONG}
    locked = [
        tasks.late.apply_async(("k",), **later),
        tasks.work.apply_async(("k",), **later),
        tasks.late.apply_async(("k",), queue="waiting", **later),
        tasks.late.apply_async(("k",), lock={"wait": 5.0}, **later),
        tasks.keyed.apply_async(("k",), lock={"key": "k:{key}"}, **later),
        tasks.late.apply_async(("k",), queue="other", **later),  # the task's own key is nearer
        tasks.plain.apply_async(("k",), **later),
    ]
    others = [
        tasks.plain.apply_async(("k",), queue="other", **later),
        tasks.unlocked_late.apply_async(("k",), **later),
        tasks.keyed.apply_async(("k",), **later),
        tasks.late.apply_async(("k",), lock={"key": False}, **later),
        tasks.late.apply_async(("k",), lock={"on_unreachable": "run"}, **later),
        tasks.late.apply_async(("k",), queue="held", **later),
    ]
    stage.worker(pool="solo", concurrency=1)
    eventually(lambda: len(unacked(broker)) == len(locked) + len(others))
    found = tags_by_id(broker)
    tagged = {uid for uid, tag in found.items() if DeliveryTag.of(tag)}
    assert [at for at, result in enumerate(locked) if result.id not in tagged] == []
    assert [at for at, result in enumerate(others) if result.id in tagged] == []


def test_what_goes_to_each_worker_is_not_tagged(
    make_stage: MakeStage, nodes: Nodes, broker: EmbeddedNode
) -> None:
    stage = make_stage(nodes, broker, queues="classic")
    stage.worker(pool="solo", concurrency=1)
    stage.see_listening()
    one = stage.tasks.late.apply_async(("k",), countdown=LONG)
    fan = stage.app.amqp.as_task_v2("fan", stage.tasks.late.name, ("k",), {}, countdown=LONG)
    with stage.app.producer_or_acquire() as producer:
        how = {"serializer": "json", "headers": fan.headers, **fan.properties}
        key = stage.app.amqp.queues["everybody"].routing_key
        producer.publish(fan.body, exchange=FAN, routing_key=key, declare=[FAN], **how)
    eventually(lambda: len(unacked(broker)) == 2)
    tags = tags_by_id(broker)
    assert DeliveryTag.of(tags[one.id])
    assert not DeliveryTag.of(tags["fan"])


@pytest.mark.parametrize("recovery", [True, False])
def test_a_tag_that_a_message_brings_is_replaced(stage: Stage, recovery: bool) -> None:
    """Of a sender, or of a worker that had it before: that one may die yet."""
    client = stage.broker.client()
    sent = [
        stage.tasks.plain.apply_async(("k",), countdown=LONG),
        stage.tasks.late.apply_async(("k",), countdown=LONG),
    ]
    theirs = new_lease()
    texts = [json.loads(text) for text in client.lrange("celery", 0, -1)]
    for number, raw in enumerate(texts):
        raw["properties"]["delivery_tag"] = f"{theirs}:{number}:celery"
        client.lset("celery", number, json.dumps(raw))
    with_setting(stage, redlock_recovery=recovery).worker(pool="solo", concurrency=1)
    eventually(lambda: len(unacked(stage.broker)) == len(sent))
    tags = tags_by_id(stage.broker)
    assert not [tag for tag in tags.values() if tag.startswith(theirs)]
    assert not DeliveryTag.of(tags[sent[0].id])
    assert bool(DeliveryTag.of(tags[sent[1].id])) is recovery
    assert set(leases(stage.broker)) == ({"w1"} if recovery else set())


def with_setting(stage: Stage, **conf: Any) -> Stage:
    """Return a stage for workers with other settings."""
    env = {**stage.env, "TEST_CONF": json.dumps({**json.loads(stage.env["TEST_CONF"]), **conf})}
    return replace(stage, env=env)


# what is moved, and where to


def test_messages_go_back_to_their_own_lists_and_nothing_else_changes(
    make_stage: MakeStage, nodes: Nodes, broker: EmbeddedNode
) -> None:
    """By a worker that takes from none of these queues, beside a worker without recovery."""
    options = {
        "global_keyprefix": "shop:", "unacked_key": "mine", "unacked_index_key": "mine_index",
        "priority_steps": [0, 5, 9], "sep": ":", "queue_order_strategy": "priority",
    }  # fmt: skip
    stage = make_stage(nodes, broker, queues="classic", broker_transport_options=options)
    client, late, later = broker.client(), stage.tasks.late, {"countdown": LONG}
    watcher = stage.worker("w0", pool="solo", concurrency=1, queues=["idle"])
    off = with_setting(stage, redlock_recovery=False)
    off.worker("w2", pool="solo", concurrency=1, queues=["beside"])
    first = stage.worker("w1", pool="solo", concurrency=1, queues=[
        "classic", "classic-left", "classic-right",
    ])  # fmt: skip
    by_priority = {
        number: [late.apply_async(("k",), priority=number, **later).id for _ in range(2)]
        for number in (0, 5, 9)
    }
    news = late.apply_async(
        ("k",), exchange="classic-news", routing_key="news.x", declare=[NEWS], **later
    ).id
    plain = stage.tasks.plain.apply_async(("k",), **later).id
    beside = late.apply_async(("k",), queue="beside", **later).id
    spent = late.apply_async(("spent",), **{MOVES: MAX_MOVES}, **later).id
    eventually(lambda: broker.client().hlen("shop:mine") == 6 + 2 + 3)
    tags = tags_by_id(broker, "shop:mine")
    assert not DeliveryTag.of(tags[beside])
    foreign = {"unacked": "hash", "celery": "list", "shop:other": "list", "mine": "hash"}
    client.hset("unacked", f"{new_lease()}:0:celery", "theirs")
    client.hset("mine", tags[spent], "theirs")
    client.rpush("celery", "theirs")
    client.rpush("shop:other", "theirs")
    dumped = {name: client_of_bytes(broker).dump(name) for name in foreign}
    first.kill()
    see_moved(watcher, 6 + 2)
    lists = {
        "shop:classic": by_priority[0],
        "shop:classic:5": by_priority[5],
        "shop:classic:9": by_priority[9],
        "shop:classic-left": [news],
        "shop:classic-right": [news],
    }
    assert {name: queued(client, name) for name in lists} == lists
    kept = unacked(broker, "shop:mine")
    assert {raw["headers"]["id"] for raw in kept.values()} == {plain, beside, spent}
    assert {tags[uid] for uid in (plain, beside, spent)} == kept.keys()
    assert {name: client_of_bytes(broker).dump(name) for name in foreign} == dumped
    said = "left 1 message of w1@"
    eventually(lambda: said in watcher.output())
    eventually(lambda: not client.exists("shop:{redlock}:worker_leases_dead:mine"))
    assert watcher.output().count(said) == 1


# what it costs, and where it cannot be


def test_a_message_costs_the_commands_that_it_costs_without(
    make_stage: MakeStage, nodes: Nodes, broker: EmbeddedNode
) -> None:
    """One each of the join and of the beats is the only difference."""
    stage = make_stage(nodes, broker)
    tasks = [stage.tasks.work, stage.tasks.late, stage.tasks.plain]
    counted = []
    for recovery in (False, True):
        client = broker.client()
        client.flushall()
        worker = with_setting(stage, redlock_recovery=recovery).worker(pool="solo", concurrency=1)
        if recovery:  # it has done what each worker does once after its start
            eventually(lambda client=client: calls(client).get("zscan"))
        before = calls(client)
        for number in range(20):
            for task in tasks:
                task.delay(f"k{number}").get(timeout=120)
        see_all_over(stage)
        after = calls(client)
        worker.kill()
        counted.append({name: after[name] - before.get(name, 0) for name in after})
    without, with_leases = counted
    beats = with_leases.pop("eval")
    with_leases["zadd"] -= beats
    with_leases["zrem"] -= beats
    names = ("hset", "zadd", "hdel", "zrem", "lpush", "rpush", "hget", "watch", "setex")
    for name in names:
        assert with_leases.get(name, 0) == without.get(name, 0), (name, beats)


def calls(client: Redis) -> dict[str, int]:
    """Return how often each command was called so far."""
    found = client.info("commandstats")
    return {name.removeprefix("cmdstat_"): stats["calls"] for name, stats in found.items()}


def test_a_broker_that_refuses_scripts_is_told_of_once_and_the_worker_serves(
    make_stage: MakeStage, nodes: Nodes
) -> None:
    with EmbeddedNode(user="worker on >secret ~* &* +@all -eval") as strict:
        stage = make_stage(nodes, strict)
        stage.env["TEST_BROKER"] = strict.url.replace("//", "//worker:secret@")
        worker = stage.worker(pool="threads", concurrency=2)
        results = [stage.tasks.late.delay(f"k{number}") for number in range(5)]
        assert [result.get(timeout=120) for result in results] == [0] * 5
        see_all_over(stage)  # Celery 5.7.0 ends a worker whose acknowledgement finds no broker
        strict.kill()
        strict.start()
        eventually(lambda: worker.output().count("Connected to redis") >= 2)
        assert stage.tasks.late.delay("again").get(timeout=120) == 0
        assert worker.runs, worker.output()
        assert worker.output().count("come back after the visibility timeout alone") == 1
        assert not leases(strict)
        worker.kill()


def test_other_brokers_have_no_worker_leases(rabbitmq: str) -> None:
    for url in (rabbitmq, "memory://"):
        with Connection(url) as connection:
            assert not can_tag(connection.default_channel)


def test_beside_a_worker_with_recovery_one_without_leaves_its_messages_to_the_timeout(
    make_stage: MakeStage, nodes: Nodes, broker: EmbeddedNode
) -> None:
    """Both are killed: nothing of the latter is moved, and kombu's own restore brings it back."""
    stage = make_stage(nodes, broker)
    off = with_setting(stage, redlock_recovery=False).worker("w0", pool="threads", queues=["held"])
    on = stage.worker("w1", pool="threads", queues=["celery"])
    later = {"countdown": LONG}
    without = [stage.tasks.late.apply_async(("k",), queue="held", **later).id for _ in range(2)]
    having = [stage.tasks.late.apply_async(("k",), **later).id for _ in range(2)]
    eventually(lambda: len(unacked(broker)) == 4)
    watcher = stage.worker("w2", pool="threads", queues=["idle"])
    off.kill()
    on.kill()
    see_moved(watcher, 2)
    client = broker.client()
    assert queued(client, "celery") == having
    assert tags_by_id(broker).keys() == set(without)
    with Connection(broker.url, transport_options={"visibility_timeout": 0}) as connection:
        channel = connection.channel()
        channel.queue_declare("held")
        channel.qos.restore_visible()
    assert set(queued(client, "held")) == set(without)
    assert watcher.output().count("moved ") == 1


@pytest.mark.slow
def test_what_lies_tagged_as_recovery_is_switched_off_comes_back_by_kombus_own_restore(
    stage: Stage,
) -> None:
    """The only worker is killed, and one without recovery is started in its place."""
    first = stage.worker("w1", pool="threads", concurrency=2)
    with stage.tasks.late.lock_for("k", wait=60):
        waiting = [stage.tasks.late.delay("k") for _ in range(WAITING)]
        see_waiting(stage, waiting)
        lease, before = leases(stage.broker)["w1"], tags_by_id(stage.broker)
        assert {tag.partition(":")[0] for tag in before.values()} == {lease}
        first.kill()
    off = with_setting(
        stage, redlock_recovery=False, broker_transport_options={"visibility_timeout": 5}
    )
    second = off.worker("w2", pool="threads", concurrency=2)
    assert [result.get(timeout=180) for result in waiting] == [0] * WAITING
    see_all_over(stage)
    see_each_once(stage, {result.id for result in waiting}, second.pid)
    assert "moved" not in second.output()
    assert stage.broker.client().zrange(LEASES, 0, -1) == [lease]
