"""On RabbitMQ: deferrals, what a message carries, a lost connection; classic and quorum queues."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from celery.exceptions import TaskRevokedError

from celery_redlock.testing import EmbeddedNode, WorkerProcess
from tests.conftest import Nodes, eventually, see_listening, trust_nodes
from tests.contract.proxy import FAIR, Link, Proxy, Stream, Way, Weather
from tests.integration import carried
from tests.integration.conftest import Line, Stage, set_stage, slow_but


@pytest.fixture(scope="module", params=slow_but(["quorum"], ["classic", "quorum"]))
def placed(
    request: pytest.FixtureRequest,
    rabbitmq: str,
    standing_broker: EmbeddedNode,
    standing_nodes: Nodes,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Stage, WorkerProcess]]:
    """Give a stage with a worker that stays for all tests here; each has keys of its own."""
    for node in standing_nodes:
        node.client().flushall()
    trust_nodes(standing_nodes)
    folder: Path = tmp_path_factory.mktemp(request.param)
    conf: dict[str, Any] = {"accept_content": ["json", "pickle"]}
    with ExitStack() as stack:
        made = set_stage(
            stack, folder, standing_nodes, standing_broker, rabbitmq, request.param, **conf
        )
        yield made, made.worker(concurrency=2)


@pytest.fixture
def stage(placed: tuple[Stage, WorkerProcess]) -> Stage:
    return placed[0]


@pytest.mark.slow
def test_everything_stays_with_a_message_over_many_deferrals(
    placed: tuple[Stage, WorkerProcess],
) -> None:
    stage, worker = placed
    kind = stage.tasks.KIND
    wide = {"exchange": f"{kind}-wide", "routing_key": "wide.a.b"}
    for name, where in (("other", {"queue": f"{kind}-other"}), ("wide", wide)):
        carried.send(stage, f"{name}-fresh", **where)
        # a worker holds back the next message of a key until the run before has ended there
        eventually(lambda name=name: f"[{name}-fresh] succeeded" in worker.output())
    with stage.tasks.shows_its_message.lock_for(wait=60):
        carried.send(stage, "other-back", queue=f"{kind}-other")
        carried.send(stage, "wide-back", **wide)
        for name in ("other-back", "wide-back"):
            eventually(lambda name=name: len(carried.received(stage, name)) >= 2)
    for name in ("other", "wide"):
        fresh, none = carried.seen(stage, f"{name}-fresh")
        eventually(lambda name=name: carried.seen(stage, f"{name}-back")[0])
        back, deferrals = carried.seen(stage, f"{name}-back")
        assert none == 0
        assert deferrals >= 1
        deaths = [header for header in back["headers"] if "-death" in header]
        for header in deaths:  # of the last deferral alone: RabbitMQ drops what runs in a circle
            value = back["headers"].pop(header)
            assert header != "x-death" or [death["count"] for death in value] == [1]
        assert carried.own_words(back) == carried.own_words(fresh)
        assert (fresh["argsrepr"], fresh["priority"]) == ("(secret)", 7)
        assert carried.BITS.sub("", back["routing_key"]) == fresh["routing_key"]
        kept_back = kind == "quorum"
        assert (back["exchange"] == fresh["exchange"]) is not kept_back
        for each in carried.received(stage, f"{name}-back"):
            assert each == {"content_type": "application/x-python-serialize", "delivery_mode": 1}


def known_state(stage: Stage, result: Any) -> str:
    """Return the state of a message once a worker has stored one."""
    state = str(stage.info(result)["status"])
    return "" if state == "PENDING" else state


def test_a_deferral_does_not_extend_expires(stage: Stage) -> None:
    with stage.tasks.work.lock_for("expiring", wait=60):
        for seconds in (1.5, 6, 24, 96):  # on a slow machine it expires before it is deferred
            expires = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=seconds)
            result = stage.tasks.work.apply_async(("expiring",), expires=expires)
            if eventually(lambda result=result: known_state(stage, result)) == "DEFERRED":
                break
        with pytest.raises(TaskRevokedError):
            result.get(timeout=120)
    assert stage.runs_of("expiring") == 0


@pytest.mark.slow
def test_what_expires_in_its_slot_ends_as_revoked(stage: Stage) -> None:
    queue = f"{stage.tasks.KIND}-slow"
    worker = stage.worker("slow", concurrency=1, queues=[queue])  # which takes one at a time
    with stage.tasks.late.lock_for("slow", wait=60):
        for seconds in (2, 8, 32):  # on a slow machine one expires before it is in its slot
            send, slot = (
                stage.tasks.late.apply_async,
                {"wait": 2 * seconds},
            )  # at whose end it is seen
            result = send(("slow",), queue=queue, expires=seconds, lock=slot)
            eventually(lambda result=result: stage.info(result)["status"] == "REVOKED")
            if f"{result.id}] is not run: expired" in worker.output():
                break
        eventually(lambda: f"{result.id}] is not run: expired" in worker.output())
    assert f"{result.id}] deferred" not in worker.output()
    assert not [line for line in stage.lines("begin") if line.key == "slow"]


def test_a_release_wakes_a_message_that_waits_in_a_worker(stage: Stage) -> None:
    if stage.tasks.KIND == "quorum":
        pytest.skip("there RabbitMQ keeps what is put back, and brings it when its time has come")
    with stage.tasks.patient.lock_for("woken", wait=60):
        for node in stage.nodes:  # their countdowns end with the lease, in minutes
            assert node.client().pexpire("{redlock}:lock:k:woken", 300_000)
        results = [stage.tasks.patient.delay("woken") for _ in range(3)]
        for result in results:
            stage.see_deferred(result)
    eventually(lambda: [line.key for line in stage.lines("end")].count("woken") == 3)


def test_the_most_urgent_message_that_came_last_runs_next(stage: Stage) -> None:
    if stage.tasks.KIND == "quorum":
        pytest.skip("there RabbitMQ keeps what is put back, and brings it when its time has come")
    carried.see_urgent_first(stage, "urgent", 9, 5, 0)


def test_properties_of_a_send_stay_with_its_message(stage: Stage) -> None:
    carried.see_properties_kept(stage, user_id="guest")


def test_each_worker_runs_its_copy_of_a_broadcast_once(
    stage: Stage, placed: tuple[Stage, WorkerProcess]
) -> None:
    if stage.tasks.KIND == "quorum":
        pytest.skip("Celery gives a fan-out's queues no type")
    workers = placed[1], stage.worker("second", concurrency=1)
    stage.see_listening("second")
    task = stage.tasks.copied_late
    often = {"max_wait": 3600}  # so that none waits for a release alone

    def times() -> tuple[int, int]:
        """Return how many deliveries were received, and run to their end."""
        text = "".join(worker.output() for worker in workers)
        named = f"{task.name}[{result.id}]"
        return text.count(f"{named} received"), text.count(f"{named} succeeded")

    with task.lock_for("fan", wait=60):
        result = task.apply_async(("fan",), queue="everybody", lock=often)
        deferred = f"{task.name}[{result.id}] deferred"
        eventually(lambda: all(worker.output().count(deferred) >= 3 for worker in workers))

    eventually(lambda: times()[1] >= 2)
    assert times() == (2, 2)  # each copy stayed in its worker


class Chasm(Proxy):
    """Swallows, once it is open, the first large piece to the server and all that follows.

    way: of what it swallows; from the server, the large piece arrives, and no reply comes back.
    """

    is_open = False
    way = Way.TO_NODE

    def _receive(self, link: Link, stream: Stream) -> None:
        before = self.received[Way.TO_NODE]
        super()._receive(link, stream)
        if self.is_open and self.received[Way.TO_NODE] > before + 3000:
            self.is_open = False
            self._weather = Weather(swallows=frozenset({self.way}))


@contextmanager
def far_worker(
    stage: Stage, rabbitmq: str, queue: str, made: list[WorkerProcess] | None = None
) -> Iterator[Chasm]:
    """Start a worker that consumes one queue; give its way to RabbitMQ, which can break.

    made: a list that it is added to.
    """
    server = urlsplit(rabbitmq)
    chasm = Chasm(SimpleNamespace(port=server.port or 5672))
    through = server._replace(netloc=f"{server.username}:{server.password}@127.0.0.1:{chasm.port}")
    far = replace(stage, env={**stage.env, "TEST_BROKER": through.geturl()})
    try:
        with ExitStack() as far.stack:
            worker = far.worker("far", concurrency=1, queues=[queue])
            if made is not None:
                made.append(worker)
            yield chasm
            chasm.weather = FAIR  # so that it can say farewell
    finally:
        chasm.close()


def test_what_is_put_back_into_a_dead_connection_is_not_lost(stage: Stage, rabbitmq: str) -> None:
    queue = f"{stage.tasks.KIND}-far"
    with far_worker(stage, rabbitmq, queue) as chasm:
        with stage.tasks.work.lock_for("far", wait=60):
            ballast = {"ballast": "x" * 3000}
            result = stage.tasks.work.apply_async(
                ("far",), queue=queue, headers=ballast,
                lock={"max_wait": 3600},  # so that it is put back again and again
            )  # fmt: skip
            stage.see_deferred(result)
            chasm.is_open = True
            eventually(lambda: chasm.weather.swallows)
            chasm.cut()
            chasm.weather = FAIR
        assert result.get(timeout=120) == 0


def test_early_acknowledged_what_runs_in_its_slot_does_not_run_again_as_a_copy(
    stage: Stage, rabbitmq: str
) -> None:
    """The copy arrived, and RabbitMQ's word on it is lost."""
    task, queue = stage.tasks.decided, f"{stage.tasks.KIND}-copied"
    far: list[WorkerProcess] = []
    with far_worker(stage, rabbitmq, queue, far) as chasm:
        chasm.way = Way.TO_CLIENT
        with stage.tasks.work.lock_for(queue, wait=60):
            ballast = {"ballast": "x" * 3000}
            word = "at last defer"
            result = task.apply_async((queue, word), queue=queue, headers=ballast)
            eventually(lambda: [line for line in stage.lines("asked") if line.key == queue])
            chasm.is_open = True
            stage.log.with_name(f"{queue} decides").touch()
            eventually(lambda: chasm.weather.swallows)
            chasm.weather = replace(chasm.weather, refuses=True)
            chasm.cut()
            eventually(lambda: "it waits in its slot" in far[0].output())
        assert result.get(timeout=120) == queue
        chasm.weather = FAIR
        dropped = f"discarded {task.name}[{result.id}]"
        eventually(lambda: dropped in far[0].output() or stage.runs_of(queue) > 1)
    assert stage.runs_of(queue) == 1
    assert stage.info(result)["status"] == "SUCCESS"


def test_what_is_redelivered_after_a_lost_connection_waits_and_is_dropped(
    placed: tuple[Stage, WorkerProcess], rabbitmq: str
) -> None:
    stage, near = placed
    key = queue = f"{stage.tasks.KIND}-lasting-{uuid.uuid4().hex[:8]}"

    def begun() -> list[Line]:
        return [line for line in stage.lines("begin") if line.key == key]

    with far_worker(stage, rabbitmq, queue) as chasm:
        result = stage.tasks.lasts.apply_async((key,), queue=queue)
        eventually(begun)
        chasm.weather = Weather(refuses=True)
        chasm.cut()
        # else the workers of earlier tests would share the queue, and one of them might drop it
        here = see_listening(stage.app, near.name)
        stage.app.control.add_consumer(queue, destination=here, reply=True, timeout=60, limit=1)
        eventually(lambda: f"[{result.id}] waits: another delivery" in near.output())
        assert stage.info(result)["status"] == "PENDING"  # the twin writes no state
        stage.log.with_name(key).touch()
        assert result.get(timeout=120) == "lasted"
        dropped = f"discarded tests.lasts[{result.id}]"
        eventually(lambda: dropped in near.output() or len(begun()) > 1)
    assert len(begun()) == 1
    assert stage.info(result)["status"] == "SUCCESS"


@pytest.mark.slow
def test_a_twin_whose_time_is_over_is_there_when_the_first_delivery_dies(
    stage: Stage, rabbitmq: str
) -> None:
    key = queue = f"{stage.tasks.KIND}-mortal"
    far: list[WorkerProcess] = []
    with far_worker(stage, rabbitmq, queue, far) as chasm:
        expires = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=20)
        send = stage.tasks.until.apply_async
        result = send((key, f"{key} end"), queue=queue, expires=expires)
        eventually(lambda: [line for line in stage.lines("begin") if line.key == key])
        chasm.weather = Weather(refuses=True)
        chasm.cut()
        near = stage.worker("near", concurrency=1, queues=[queue])  # which takes one at a time
        waits = f"[{result.id}] waits: another delivery"
        eventually(lambda: waits in near.output())
        eventually(lambda: dt.datetime.now(dt.UTC) > expires)
        before = near.output().count(waits)
        eventually(lambda: near.output().count(waits) > before + 1)
        assert stage.info(result)["status"] == "PENDING"
        far[0].kill()
        eventually(lambda: stage.info(result)["status"] == "REVOKED")
    assert len([line for line in stage.lines("begin") if line.key == key]) == 1


def test_a_send_is_a_new_one_once_rabbitmq_has_dropped_the_earlier_message(stage: Stage) -> None:
    task, queue = stage.tasks.once_late, f"{stage.tasks.KIND}-nobody"
    first = task.apply_async((queue,), queue=queue, expires=1)
    with stage.app.connection_for_read() as connection:
        count = connection.default_channel.queue_declare
        pattern = f"{{redlock}}:unique:*:{queue}"
        eventually(lambda: not any(node.client().keys(pattern) for node in stage.nodes))
        eventually(lambda: count(queue, passive=True).message_count == 0)
    assert task.apply_async((queue,), queue=queue, expires=1).id != first.id


@pytest.mark.slow
def test_a_message_that_outlives_its_worker_keeps_its_window_until_it_has_run(stage: Stage) -> None:
    task, queue = stage.tasks.once_late, f"{stage.tasks.KIND}-outlived"
    doomed = stage.worker("doomed", concurrency=1, queues=[queue])
    brief = {"ttl": stage.tasks.TTL}
    first = task.apply_async((queue, "wait", "first"), queue=queue, lock=brief)

    def ran() -> list[str]:
        return [line.more["value"] for line in stage.lines("once") if line.key == queue]

    eventually(ran)
    doomed.kill()
    assert task.delay(queue, value="dropped").id == first.id
    stage.log.with_name(queue).touch()
    stage.worker("heir", concurrency=1, queues=[queue])
    assert first.get(timeout=120) == "first"
    pattern = f"{{redlock}}:unique:*:{queue}"
    eventually(lambda: not any(node.client().keys(pattern) for node in stage.nodes))
    assert task.delay(queue, value="second").get(timeout=120) == "second"
    assert ran() == ["first", "first", "second"]


def test_the_latest_of_some_sends_takes_the_others_place(stage: Stage) -> None:
    sent = [stage.tasks.latest.delay("latest", value=value) for value in "abc"]
    assert sent[-1].get(timeout=120) == "c"
    for dropped in sent[:-1]:
        with pytest.raises(TaskRevokedError):
            dropped.get(timeout=120)
    assert [x.more["value"] for x in stage.lines("once") if x.key == "latest"] == ["c"]
