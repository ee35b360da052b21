"""A worker's own lease: its keeper on a real broker, and the workers of one process."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
from celery import Celery, bootsteps
from celery.app.task import Context
from celery.contrib.testing.worker import start_worker
from celery.exceptions import Ignore, SoftTimeLimitExceeded
from redis import Redis, ResponseError

from celery_redlock import LockedTask
from celery_redlock.lock.platform.clock import Platform, SystemClock
from celery_redlock.signals import MessagesRecoveredEvent, messages_recovered
from celery_redlock.tasks.delivery.delivery import Delivery
from celery_redlock.tasks.delivery.header import HEADER, Deferral, LockHeader
from celery_redlock.tasks.execution.outcomes import put_back_if_early, wait_for_first_delivery
from celery_redlock.tasks.per_app import redlock_of, time_of_nodes
from celery_redlock.tasks.recovery.keeper import Keeper, MovedAwayError, keepers, still_owned
from celery_redlock.tasks.recovery.ledger import Ledger, decoded
from celery_redlock.tasks.recovery.observer import (
    BEAT_INTERVAL,
    DETECTION_TIME,
    PROOF,
    QUIET,
    TRUST,
)
from celery_redlock.tasks.recovery.step import RecoverMessages
from celery_redlock.tasks.recovery.tags import DeliveryTag, new_lease
from celery_redlock.testing import EmbeddedNode
from tests.conftest import PATIENCE, Nodes, eventually, paused, receiving
from tests.contract.worker_leases import keeper_of, lose, note, open_ledger, see_another, see_beats


def take_for_dead(ledger: Ledger, lease: str) -> None:
    """Do what other workers do with a lease that is dead, to its end."""
    assert ledger.declare_dead(lease)
    ledger.move_all(lease)


def test_a_worker_that_was_taken_for_dead_joins_anew_and_owns_nothing_of_before(
    keeper: Keeper, ledger: Ledger, client: Redis
) -> None:
    keeper.join()
    before, tag = keeper.lease, keeper.tag("celery")
    note(ledger, tag)
    assert still_owned(tag)
    take_for_dead(ledger, before)
    after = see_another(keeper, before)
    assert not still_owned(tag)
    assert still_owned(keeper.tag("celery"))
    assert client.zrange(ledger.leases, 0, -1) == [after]


def test_what_is_noted_after_its_lease_was_moved_is_moved_once_it_is_dropped(
    keeper: Keeper, ledger: Ledger, client: Redis
) -> None:
    """Its consumer took it before it learned of that, and was slow to note it."""
    keeper.join()
    before, tag = keeper.lease, keeper.tag("celery")
    take_for_dead(ledger, before)
    see_another(keeper, before)
    eventually(lambda: not client.exists(ledger.dead))
    beats = client.zscore(ledger.leases, keeper.lease)
    eventually(lambda: client.zscore(ledger.leases, keeper.lease) > beats + 1000)
    note(ledger, tag)
    assert not still_owned(tag)
    eventually(lambda: client.llen("celery"))
    assert client.exists(ledger.unacked) == 0


def test_it_is_moved_as_well_if_the_worker_ends_with_that(
    keeper: Keeper, ledger: Ledger, client: Redis
) -> None:
    keeper.join()
    before, tag = keeper.lease, keeper.tag("celery")
    take_for_dead(ledger, before)
    see_another(keeper, before)
    note(ledger, tag)
    assert not still_owned(tag)
    keeper.end()
    eventually(lambda: client.llen("celery"))
    assert client.exists(ledger.unacked) == 0


def test_a_lease_without_an_answer_of_the_broker_is_given_up(
    keeper: Keeper, broker: EmbeddedNode, ledger: Ledger, client: Redis
) -> None:
    keeper.join()
    before, tag = keeper.lease, keeper.tag("celery")
    note(ledger, tag)
    with paused(broker):
        eventually(lambda: not still_owned(tag))
    assert not still_owned(tag)  # for good
    see_another(keeper, before)
    eventually(lambda: client.llen("celery"))
    assert client.exists(ledger.unacked) == 0


def test_a_new_connection_of_the_consumer_resigns_the_lease_of_the_one_before(
    keeper: Keeper, ledger: Ledger, client: Redis
) -> None:
    keeper.join()
    before, tag = keeper.lease, keeper.tag("celery")
    note(ledger, tag)
    keeper.join()
    assert keeper.lease != before
    eventually(lambda: client.llen("celery"))
    eventually(lambda: client.zrange(ledger.leases, 0, -1) == [keeper.lease])
    assert not still_owned(tag)


def test_a_child_asks_for_no_worker_lease(keeper: Keeper) -> None:
    """It would do so over a connection of its parent's, and has no beat."""
    keeper.join()
    pid = os.fork()
    if not pid:
        os._exit(len(keepers))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert keeper.lease in keepers


@pytest.mark.parametrize("acks_late", [True, False])
def test_a_run_whose_message_was_moved_publishes_no_second_copy(
    keeper: Keeper, ledger: Ledger, nodes: Nodes, acks_late: bool
) -> None:
    """With early acknowledgement nobody has moved what a run has: it is the run's alone."""
    app = Celery("shop", broker="memory://", set_as_default=False)
    app.conf.redlock_nodes = [node.url for node in nodes]

    @app.task(base=LockedTask, lock_key="k", name="late", acks_late=acks_late)
    def late() -> None: ...

    keeper.join()
    lost, tag = keeper.lease, keeper.tag("celery")
    take_for_dead(ledger, lost)
    see_another(keeper, lost)
    header = LockHeader(id="1", deferral=Deferral(at=time_of_nodes(app), countdown=3600.0))
    own = f"moved {uuid.uuid4()}"  # the queues of memory:// are those of the process
    sent = {
        "id": "1", "task": "late", "args": (), "kwargs": {}, "retries": 0,
        "properties": {"delivery_tag": tag}, HEADER: header.to_message(),
        "delivery_info": {"exchange": "", "routing_key": own},
    }  # fmt: skip
    for put_back in (
        lambda: put_back_if_early(Delivery(late, Context(sent)), 0.0),
        lambda: wait_for_first_delivery(Delivery(late, Context(sent)), SoftTimeLimitExceeded()),
    ):
        with pytest.raises(Ignore) as ended:
            put_back()
        assert isinstance(ended.value, MovedAwayError) == acks_late
    with app.connection_for_read() as connection, connection.SimpleQueue(own) as queue:
        assert queue.qsize() == (0 if acks_late else 2)
    redlock_of(app).close()
    app.close()


def test_a_worker_whose_moves_fail_begins_anew_all_the_same(
    keeper: Keeper, ledger: Ledger, client: Redis
) -> None:
    keeper.join()
    tag = keeper.tag("celery")
    client.set(ledger.unacked, "by another program")
    keeper.join()
    before = keeper.lease
    ledger.declare_dead(before)
    see_another(keeper, before)
    client.delete(ledger.unacked)
    note(ledger, tag)
    eventually(lambda: client.llen("celery"))
    eventually(lambda: client.zrange(ledger.dead, 0, -1) == [])


def test_a_worker_that_ends_leaves_no_lease_behind(
    keeper: Keeper, ledger: Ledger, client: Redis
) -> None:
    """Also if it ends just as it learns that it was taken for dead."""
    for _ in range(20):
        keeper.join()
        ledger.declare_dead(keeper.lease)
        keeper.join()
    keeper.end()
    assert not [one for one in keepers.values() if one is keeper]
    assert keeper.lease == ""
    eventually(lambda: not client.exists(ledger.leases))


def test_any_number_of_threads_may_ask_at_once(
    keeper: Keeper, broker: EmbeddedNode, ledger: Ledger
) -> None:
    keeper.join()
    count = 40
    asking = threading.Barrier(count + 1)

    def ask() -> bool:
        asking.wait()
        return ledger.beat(keeper.lease).is_alive

    with ThreadPoolExecutor(count) as threads:
        with paused(broker):  # so that none has its answer before all have asked
            asked = [threads.submit(ask) for _ in range(count)]
            asking.wait()
        assert all(one.result() for one in asked)


def test_a_broker_that_refuses_a_move_is_told_of_once_and_the_worker_lives_on(
    keeper: Keeper, broker: EmbeddedNode, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    client = broker.client()
    keeper.join()
    client.acl_setuser("default", enabled=True, nopass=True, commands=["-hscan"])
    try:
        keeper.join()
        before = keeper.lease
        see_beats(client, ledger, before)
        told = [one for one in caplog.records if one.message.startswith("the broker refuses what")]
        assert len(told) == 1
    finally:
        client.acl_setuser("default", enabled=True, nopass=True, commands=["+@all"])
    eventually(lambda: client.zrange(ledger.leases, 0, -1) == [keeper.lease])
    assert keeper.lease == before


def test_a_receiver_that_exits_ends_no_keeper(
    keeper: Keeper, ledger: Ledger, client: Redis
) -> None:
    heard = []

    def leave(_: Any, event: MessagesRecoveredEvent) -> None:
        heard.append(event)
        raise SystemExit("of a receiver")

    with receiving(messages_recovered, leave):
        for number in range(2):
            lose(ledger)
            keeper.join()
            eventually(lambda number=number: len(heard) > number)
    assert heard == [MessagesRecoveredEvent("w2@host", 1)] * 2


def test_no_beat_waits_for_a_receiver(keeper: Keeper, ledger: Ledger, client: Redis) -> None:
    """Nor does a move; what was moved meanwhile is told as it goes on, in its order."""
    heard, threads, goes_on = [], set(), threading.Event()

    def stays(_: Any, event: MessagesRecoveredEvent) -> None:
        heard.append(event)
        threads.add(threading.get_ident())
        goes_on.wait()

    try:
        with receiving(messages_recovered, stays):
            keeper.join()
            lose(ledger)
            eventually(lambda: heard)
            for number in range(3):
                lose(ledger, number=number)
            eventually(lambda: client.llen("celery") == 4)
            see_beats(client, ledger, keeper.lease)
            assert len(heard) == 1
            goes_on.set()
            eventually(lambda: len(heard) == 4)
    finally:
        goes_on.set()
    assert heard == [MessagesRecoveredEvent("w2@host", 1)] * 4
    assert len(threads) == 1


def test_a_worker_that_starts_moves_what_a_killed_one_has_noted_late(
    keeper: Keeper, ledger: Ledger, client: Redis
) -> None:
    """Under a worker lease that was moved and forgotten, and by whom nobody knows."""
    lost = lose(ledger)
    ledger.move_all(lost)
    client.delete("celery")
    tag = str(DeliveryTag(lost, 1, "celery"))
    note(ledger, tag)
    client.zadd(ledger.index, {tag: 1})
    keeper.join()
    eventually(lambda: client.llen("celery"))
    eventually(lambda: not client.exists(ledger.dead))
    assert client.exists(ledger.unacked, ledger.index) == 0


@pytest.mark.parametrize("right", ["-rpush", "-zscan"])
def test_a_right_that_a_move_needs_is_told_of_at_the_join(
    right: str, broker: EmbeddedNode, client: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, and the worker lives on."""
    rights = ("reset", "on", ">secret", "~*", "&*", "+@all", right)
    client.execute_command("ACL", "SETUSER", "shop", *rights)
    url = broker.url.replace("//", "//shop:secret@")
    kept, connect = open_ledger(url), partial(open_ledger, url)
    keeper = Keeper(Platform(SystemClock()), connect, "w1@host", object(), lambda _: None)
    try:
        keeper.join()
        see_beats(client, kept, keeper.lease)
        keeper.join()
        see_beats(client, kept, keeper.lease)
    finally:
        keeper.end()
        kept.close()
        client.execute_command("ACL", "DELUSER", "shop")
    told = [one.message for one in caplog.records if one.message.startswith("the broker refuses")]
    assert len(told) == 1
    assert told[0].endswith(f"may stay: its user lacks +{right[1:]}")


@contextmanager
def three_workers(server: EmbeddedNode) -> Iterator[tuple[Ledger, list[Keeper]]]:
    """Give the worker leases on a broker, and the keepers of three workers that have joined."""
    with ExitStack() as stack:
        ledger = open_ledger(server.url)
        stack.callback(ledger.close)
        made = [keeper_of(name, server) for name in ("w1@host", "w2@host", "w3@host")]
        for one in made:
            stack.callback(one.end)
            one.join()
        yield ledger, made


def beats_of(ledger: Ledger) -> dict[str, float]:
    return {
        decoded(lease): score
        for lease, score in ledger.client.zrange(ledger.leases, 0, -1, withscores=True)
    }


def test_a_broker_that_refuses_the_beats_of_all_makes_no_worker_dead() -> None:
    """And none can be declared dead meanwhile; then everybody has the time of the proof anew.

    Also one that observers had seen quiet before.
    """
    clock, heard = SystemClock(), []
    with EmbeddedNode() as server, three_workers(server) as (ledger, workers):
        client, lost = server.client(), new_lease()
        before = {one.lease for one in workers}
        note(ledger, str(DeliveryTag(lost, 0, "celery")))
        ledger.beat(lost, joins_as="w4@host")
        at = beats_of(ledger)[lost] / 1000
        eventually(lambda: client.time()[0] - at > QUIET + BEAT_INTERVAL)
        client.config_set("min-replicas-to-write", 1)
        refused = beats_of(ledger)
        assert refused.keys() == before | {lost}
        eventually(lambda: client.time()[0] - max(refused.values()) / 1000 > DETECTION_TIME + 1)
        with pytest.raises(ResponseError):
            ledger.declare_dead(lost)
        assert beats_of(ledger) == refused
        with receiving(messages_recovered, lambda *_: heard.append(clock.now())):
            begun = clock.now()
            client.config_set("min-replicas-to-write", 0)
            eventually(lambda: heard)
        assert heard[0] - begun >= PROOF
        assert beats_of(ledger).keys() == before == {one.lease for one in workers}


def test_workers_stay_alive_on_a_broker_without_memory() -> None:
    """And go on with what they have, so that acknowledged messages free some."""
    with EmbeddedNode(maxmemory_policy="noeviction") as server, three_workers(server) as made:
        ledger, workers = made
        client, lost = server.client(), new_lease()
        before, tag = {one.lease for one in workers}, workers[0].tag("celery")
        ledger.beat(lost, joins_as="w4@host")
        note(ledger, str(DeliveryTag(lost, 0, "celery")))
        client.config_set("maxmemory", 1)
        begun = client.time()[0]
        for one in workers:
            eventually(
                lambda one=one: beats_of(ledger)[one.lease] / 1000 - begun > DETECTION_TIME + TRUST
            )
        assert still_owned(tag)
        assert client.llen("celery") == 0
        client.config_set("maxmemory", 0)
        eventually(lambda: client.llen("celery"))
        assert beats_of(ledger).keys() == before == {one.lease for one in workers}


# workers of one process


@contextmanager
def worker_app(broker: EmbeddedNode, nodes: Nodes, name: str) -> Iterator[Celery]:
    app = Celery(name, broker=broker.url, backend=broker.url, set_as_current=False)
    app.conf.update(
        redlock_nodes=[node.url for node in nodes], redlock_node_timeout=PATIENCE,
        worker_hijack_root_logger=False, task_default_queue=name,
    )  # fmt: skip

    @app.task(base=LockedTask, name=name, lock_key="k:{key}", shared=False)
    def own(key: str) -> str:
        return key

    yield app
    redlock_of(app).close()
    app.close()


def joined(client: Redis) -> set[str]:
    names = client.hgetall("{redlock}:worker_names:unacked")
    return {names[lease] for lease in client.zrange("{redlock}:worker_leases:unacked", 0, -1)}


def see_no_connection_of_a_keeper(client: Redis) -> None:
    eventually(lambda: not [one for one in client.client_list() if one["cmd"] == "eval"])


@pytest.mark.usefixtures("process_as_before")
def test_a_worker_in_a_thread_has_a_lease_until_it_ends(
    broker: EmbeddedNode, client: Redis, nodes: Nodes
) -> None:
    with worker_app(broker, nodes, "one") as app:
        with start_worker(
            app, pool="solo", perform_ping_check=False, loglevel="ERROR", hostname="w1@host"
        ):
            assert joined(client) == {"w1@host"}
            assert app.tasks["one"].delay("a").get(timeout=60) == "a"
        assert joined(client) == set()
        assert not keepers
        see_no_connection_of_a_keeper(client)


def test_of_two_workers_of_a_process_each_keeps_its_own(
    keeper: Keeper, broker: EmbeddedNode, ledger: Ledger
) -> None:
    other = keeper_of("w2@host", broker)
    keeper.join()
    other.join()
    tag, theirs, before = keeper.tag("celery"), other.tag("celery"), keeper.lease
    take_for_dead(ledger, before)
    see_another(keeper, before)
    assert not still_owned(tag)
    assert still_owned(theirs)
    other.end()
    assert still_owned(keeper.tag("celery"))


class Fails(bootsteps.StartStopStep):
    """Ends the start of a worker that has joined."""

    requires = (RecoverMessages,)

    def start(self, parent: Any) -> None:
        raise RuntimeError("no start")


@pytest.mark.usefixtures("process_as_before")
def test_a_worker_whose_start_fails_later_leaves_no_lease(
    broker: EmbeddedNode, client: Redis, nodes: Nodes
) -> None:
    with worker_app(broker, nodes, "failing") as app:
        app.steps["consumer"].add(Fails)
        worker = app.WorkController(pool="solo", hostname="w1@host", loglevel="CRITICAL")
        worker.start()
        assert client.exists("{redlock}:worker_names:unacked")  # it had joined
        assert joined(client) == set()
        assert not keepers
        see_no_connection_of_a_keeper(client)
