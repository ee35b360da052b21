"""The room in which a worker keeps the messages that wait: who is handed on, and in which order.

Each test admits messages, lets locks on real nodes be released, and looks at what Celery is given.
"""

from __future__ import annotations

import threading
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from kombu.asynchronous import Hub
from kombu.common import QoS

from celery_redlock import Redlock
from celery_redlock.lock.model.keys import wake_channel
from celery_redlock.lock.platform.clock import Platform, SystemClock
from celery_redlock.tasks.delivery.delivery import utc_now
from celery_redlock.tasks.delivery.header import CLOCKS_DIFFER, Wait
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.tasks.waiting.room import WaitingRoom
from celery_redlock.tasks.waiting.times import WaitingTimes
from celery_redlock.testing import EmbeddedNode
from tests.conftest import PATIENCE, eventually

NEVER = 600.0  # s: longer than a test
NOBODYS = 98  # a limit that no message of a test has
STILL = WaitingTimes(retry_next_after=NEVER, sweep_interval=NEVER)  # nothing happens by the clock


class ClockAhead(SystemClock):
    """The machine's clock, which can be set ahead."""

    def __init__(self) -> None:
        super().__init__()
        machines, self.ahead = self.now, 0.0
        self.now = lambda: machines() + self.ahead


class Consumer(SimpleNamespace):
    """What a room needs of Celery's consumer, or of a message."""

    __hash__ = object.__hash__


class Stage:
    """A worker's room over some nodes; nothing happens in its event loop but while a test turns it.

    handed_on: ids of messages. apply: what Celery does with one of them first.
    """

    def __init__(self, nodes: list[EmbeddedNode], times: WaitingTimes, **conf: Any) -> None:
        self.app = Celery(set_as_current=False, broker="memory://")
        urls = [node.url for node in nodes]
        self.app.conf.update(redlock_nodes=urls, redlock_node_timeout=PATIENCE, **conf)
        self.hub, self.revoked = Hub(), set[str]()
        self.hub.timer.call_repeatedly(0.02, int)  # so that each turn of the loop is short
        self.handed_on: list[str] = []
        self.apply: Callable[[Any], object] = str
        self.consumer = Consumer(
            app=self.app,
            hub=self.hub,
            timer=self.hub.timer,
            pool=None,
            qos=QoS(lambda prefetch_count: None, 1),
            initial_prefetch_count=1,
            task_buckets=defaultdict(lambda: None),
            controller=SimpleNamespace(state=SimpleNamespace(revoked=self.revoked)),
            apply_eta_task=self._hand_on,
        )
        clock = ClockAhead()
        self.room = WaitingRoom(self.consumer, times, Platform(clock))
        self.nodes, self._count = len(nodes), 0
        self.room.start(self.consumer)
        clock.ahead = 3 * CLOCKS_DIFFER  # so what is refused from now on was refused since then

    def _hand_on(self, request: Any) -> None:
        self.apply(request)
        self.handed_on.append(request.id)

    def admit(
        self, id_: str, resource: str = "a", *, since: int | None = None, limit: int = 1,
        refused_at: datetime | None = None, expires: datetime | None = None,
        countdown: float = NEVER, **request: Any,
    ) -> None:  # fmt: skip
        """Let a message come in, behind those before it; refused_at: a minute ago if not given."""
        self._count += 1
        now = utc_now()
        message = Consumer(
            id=id_, name="task", eta=now + timedelta(seconds=countdown), expires=expires,
            **{"stamped_headers": None, **request},
        )  # fmt: skip
        refused = (refused_at or now - timedelta(minutes=1)).timestamp()
        wait = Wait((resource,), resource, refused, limit, waits_for_release=True)
        self.room.admit(message, wait, f"{self._count if since is None else since:09}")

    def turn_until(self, condition: Callable[[], object]) -> None:
        def turned() -> object:
            self.hub.run_once()
            return condition()

        eventually(turned)

    def listen(self, resource: str = "a", limits: tuple[int, ...] = (1,)) -> None:
        """Return once all nodes' releases of a resource are heard, and nobody waits for it.

        One message is handed on as that begins. And so is one of each limit that was refused
        before the room was opened: what was released since then was heard by nobody.
        """
        later = utc_now() + timedelta(minutes=1)
        self.admit("as it begins", resource, limit=NOBODYS, refused_at=later)
        self.turn_until(lambda: self.handed_on and self.hears(resource) == self.nodes)
        for limit in limits:
            self.admit(f"before it was open, {limit}", resource, limit=limit)
        self.turn_until(lambda: len(self.handed_on) == 1 + len(limits))
        self.handed_on.clear()

    def hears(self, resource: str) -> int:
        return self.room.subscriptions(wake_channel("redlock", resource))

    def waiting(self) -> list[str]:
        return [waiting.request.id for waiting in self.room.waiting()]

    def see_served(self) -> None:
        """Return when everything has been done that the room was told so far."""
        self.admit("served", f"served {self._count}")  # refused before the room was open
        self.turn_until(lambda: "served" in self.handed_on)
        self.handed_on.remove("served")

    def see_heard(self) -> None:
        """Return when everything has been done that the nodes have said so far.

        What a node says of a new subscription comes after that.
        """
        self.admit("heard", resource := f"heard {self._count}")
        self.turn_until(lambda: self.hears(resource) == self.nodes)
        self.see_served()
        self.handed_on.remove("heard")

    def close(self) -> None:
        self.room.stop(self.consumer)
        self.room.shutdown(self.consumer)
        redlock_of(self.app).close()
        self.hub.close()


def release(redlock: Redlock, resource: str = "a") -> None:
    """Take a lock and give it back, as its holder elsewhere does."""
    with redlock.lock(resource, wait=PATIENCE):
        pass


@pytest.fixture
def make_stage() -> Iterator[Callable[..., Stage]]:
    """Give rooms; unless a test gives other times, nothing is swept or tried by the clock."""
    made: list[Stage] = []

    def make(nodes: list[EmbeddedNode], times: WaitingTimes = STILL, **conf: Any) -> Stage:
        made.append(Stage(nodes, times, **conf))
        return made[-1]

    yield make
    for stage in made:
        stage.close()


@pytest.fixture
def stage(make_stage: Callable[..., Stage], nodes: list[EmbeddedNode]) -> Stage:
    """Give a room that hears of releases on three nodes."""
    made = make_stage(nodes)
    made.listen()
    return made


def test_while_a_body_runs_in_the_main_process_one_can_look_who_waits(
    make_stage: Callable[..., Stage], nodes: list[EmbeddedNode]
) -> None:
    """A solo pool runs it where its message is handed on."""
    seen: list[list[str]] = []

    def run(request: Any) -> None:
        other = threading.Thread(target=lambda: seen.append(stage.waiting()), daemon=True)
        other.start()
        other.join(20)
        assert seen, "who waits cannot be looked at"

    stage = make_stage(nodes, worker_eta_task_limit=2)  # one seat, beside one that is prefetched
    stage.listen()
    stage.apply = run
    stage.admit("stays")
    stage.admit("makes way")
    stage.turn_until(lambda: stage.handed_on)
    assert (stage.handed_on, seen) == (["makes way"], [["stays"]])


def test_a_release_wakes_the_first_to_be_deferred_and_each_limit_by_itself(
    make_stage: Callable[..., Stage], nodes: list[EmbeddedNode], redlock: Redlock
) -> None:
    stage = make_stage(nodes)
    stage.listen(limits=(1, 2))
    for id_, since, limit in [("2nd", 2, 1), ("1st", 1, 1), ("5th", 5, 2), ("4th", 4, 2)]:
        stage.admit(id_, since=since, limit=limit)
    stage.admit("of another resource", "b")
    stage.turn_until(lambda: stage.handed_on)  # a release of that may have been missed
    release(redlock)
    stage.turn_until(lambda: len(stage.handed_on) > 1)
    assert stage.handed_on == ["of another resource", "1st", "4th"]
    assert stage.waiting() == ["2nd", "5th"]


def test_a_word_passes_those_that_are_not_to_run_any_more(stage: Stage, redlock: Redlock) -> None:
    past = utc_now() - timedelta(seconds=1)
    stage.revoked.add("revoked")
    stage.admit("expired", expires=past)
    stage.admit("revoked")
    stage.admit("stamped", stamped_headers=["of"], revoked=lambda: True)
    stage.admit("other", stamped_headers=["of"], revoked=lambda: False)
    stage.admit("behind", expires=past + timedelta(days=1))
    release(redlock)
    stage.turn_until(lambda: stage.handed_on)
    assert stage.handed_on == ["expired", "revoked", "stamped", "other"]


def test_one_that_cannot_be_handed_on_ends_neither_the_event_loop_nor_the_wait_of_others(
    stage: Stage, redlock: Redlock
) -> None:
    """The result backend may be away as one is handed on whose end is to be stored."""

    def apply(request: Any) -> None:
        if request.id == "revoked":
            fail()

    stage.apply = apply
    stage.revoked.add("revoked")
    for id_ in ("revoked", "stamped", "behind"):
        stage.admit(id_, stamped_headers=id_ == "stamped", revoked=fail)
    release(redlock)
    stage.turn_until(lambda: stage.handed_on)
    assert (stage.handed_on, stage.waiting()) == (["stamped", "behind"], [])


@pytest.mark.parametrize(
    ("refused_before", "tries"), [(60.0, True), (CLOCKS_DIFFER / 2, False), (0.0, False)]
)
def test_after_a_refusal_in_its_own_line_nobody_tries_each_second(
    make_stage: Callable[..., Stage],
    nodes: list[EmbeddedNode],
    redlock: Redlock,
    refused_before: float,
    tries: bool,
) -> None:
    """The second one tries a second after the release, is refused, and is the first again.

    refused_before: s before it tried, by the calendar of who was refused.
    """
    stage = make_stage(nodes, replace(STILL, retry_next_after=0.2))
    stage.listen()
    stage.listen("b")

    def apply(request: Any) -> None:
        if request.id == "second":
            refused_at = utc_now() - timedelta(seconds=refused_before)
            stage.admit("second again", since=0, refused_at=refused_at)

    stage.apply = apply
    others = [f"other {number}" for number in range(6)]
    for id_ in ("first", "second", "third"):
        stage.admit(id_)
    for id_ in others:
        stage.admit(id_, "b")
    release(redlock)
    stage.turn_until(lambda: stage.handed_on)
    release(redlock, "b")
    # of those that nobody refuses, one each second: when the fifth has gone, two seconds are over
    stage.turn_until(lambda: others[4] in stage.handed_on)
    handed_on = [id_ for id_ in stage.handed_on if id_ not in others]
    assert handed_on[:3] == ["first", "second", "second again"][: 2 + tries]


def test_a_head_that_is_refused_after_a_release_tries_once_more(
    make_stage: Callable[..., Stage], nodes: list[EmbeddedNode], redlock: Redlock
) -> None:
    """Those that a release wakes in three workers may each get one node."""
    stage = make_stage(nodes, replace(STILL, retry_next_after=0.2))
    stage.listen()

    def apply(request: Any) -> None:
        if request.id == "head":
            stage.admit("head again", since=0, refused_at=utc_now() + timedelta(minutes=1))

    stage.apply = apply
    stage.admit("head")
    release(redlock)
    stage.turn_until(lambda: stage.handed_on == ["head", "head again"])


def test_one_that_tries_soon_by_itself_does_not_try_because_a_subscription_begins(
    make_stage: Callable[..., Stage], nodes: list[EmbeddedNode]
) -> None:
    stage = make_stage(nodes)
    stage.admit("soon", countdown=0.5, refused_at=utc_now() + timedelta(minutes=1))
    stage.turn_until(lambda: stage.hears("a") == stage.nodes)
    stage.see_heard()
    assert (stage.handed_on, stage.waiting()) == ([], ["soon"])


def test_a_sweep_ends_what_was_revoked_and_forgets_no_release(
    make_stage: Callable[..., Stage], nodes: list[EmbeddedNode]
) -> None:
    stage = make_stage(nodes, replace(STILL, sweep_interval=0.02))
    stage.listen()
    for id_ in ("waits", "revoked"):
        stage.admit(id_)
    stage.revoked.add("revoked")
    stage.turn_until(lambda: stage.handed_on == ["revoked"])
    stage.admit("behind")
    stage.see_served()
    assert (stage.handed_on, stage.waiting()) == (["revoked"], ["waits", "behind"])


@pytest.mark.parametrize(("limit", "heard"), [(1, 1), (2, 2), (3, 2)])
def test_of_permits_each_release_is_for_one_that_was_on_its_way(
    make_stage: Callable[..., Stage],
    nodes: list[EmbeddedNode],
    redlock: Redlock,
    limit: int,
    heard: int,
) -> None:
    stage, ids = make_stage(nodes), [f"message {number}" for number in range(4)]
    stage.listen(limits=(limit, 99))
    for _ in range(2):
        stage.admit("tells that the release was heard", limit=99)
        release(redlock)
        stage.turn_until(lambda: stage.handed_on)
        stage.handed_on.clear()
    for id_ in ids:
        stage.admit(id_, limit=limit)
    stage.see_served()
    assert (stage.handed_on, stage.waiting()) == (ids[:heard], ids[heard:])


def test_a_word_counts_once_where_one_node_says_many_before_another_says_any(
    stage: Stage, nodes: list[EmbeddedNode]
) -> None:
    """After a stall each connection hands on all that one read of it gives."""
    ids = [f"message {number}" for number in range(900)]
    for id_ in [*ids, "behind"]:
        stage.admit(id_)
    for node, woken in zip(nodes, ([], ids, ids), strict=True):
        with node.client().pipeline(transaction=False) as pipe:
            for id_ in ids:
                pipe.publish(wake_channel("redlock", "a"), f"release for {id_}")
            assert pipe.execute() == [1] * len(ids)
        stage.see_heard()
        assert stage.handed_on == woken
    assert stage.waiting() == ["behind"]


def test_a_worker_does_not_listen_for_ever_for_what_nobody_waits_for(
    make_stage: Callable[..., Stage], nodes: list[EmbeddedNode], redlock: Redlock
) -> None:
    """The next subscription, which a message for another resource begins, ends this one."""
    times = replace(STILL, sweep_interval=0.02, unsubscribe_after=0.0)
    stage, channel = make_stage(nodes, times), wake_channel("redlock", "a")

    def listening() -> list[int]:
        return [node.client().pubsub_numsub(channel)[0][1] for node in nodes]

    stage.admit("one", refused_at=utc_now() + timedelta(minutes=1))
    stage.turn_until(lambda: listening() == [1, 1, 1])
    release(redlock)
    stage.turn_until(lambda: stage.handed_on == ["one"])

    def is_unsubscribed_by_the_next() -> bool:
        stage.admit("next", "b")
        return listening() == [0, 0, 0]

    stage.turn_until(is_unsubscribed_by_the_next)


def test_a_worker_does_not_remember_every_release_that_it_heard(
    stage: Stage, nodes: list[EmbeddedNode]
) -> None:
    parts, words, size = 20, 1000, 1000
    tracemalloc.start()
    try:
        for part in range(parts):
            with nodes[0].client() as client, client.pipeline(transaction=False) as pipe:
                for number in range(words):
                    pipe.publish(wake_channel("redlock", "a"), f"{part}.{number:{size}}")
                pipe.execute()
            stage.see_heard()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < parts * words * size / 2


def test_what_was_refused_before_the_broker_was_lost_may_have_missed_a_release(
    make_stage: Callable[..., Stage],
    mortal_nodes: list[EmbeddedNode],
) -> None:
    """No node answers, so nothing else than that wakes anybody."""
    for node in mortal_nodes:
        node.kill()
    stage = make_stage(mortal_nodes, replace(STILL, clocks_differ=0.0))
    stage.see_served()
    before = utc_now()
    stage.admit("delivered anew")
    stage.room.stop(stage.consumer)
    assert stage.waiting() == []
    stage.room.start(stage.consumer)
    stage.admit("refused before", refused_at=before)
    stage.admit("refused before, too", refused_at=before)
    stage.admit("refused since", "b", refused_at=utc_now() + timedelta(minutes=1))
    stage.see_served()
    assert stage.handed_on == ["refused before"]


@pytest.fixture
def gevent_hub() -> Iterator[Any]:
    """Give gevent, and end its hub: waits of later tests in this thread would go through it."""
    gevent = pytest.importorskip("gevent")
    yield gevent
    gevent.get_hub().destroy(destroy_loop=True)


def test_of_a_room_that_opens_anew_no_sweep_is_left_over(gevent_hub: Any) -> None:
    """A greenlets' timer can cancel the next call of a repeated one only where that is known."""
    timers = pytest.importorskip("celery.concurrency.gevent")
    timer, app = timers.Timer(), SimpleNamespace(conf={})
    parent = {"initial_prefetch_count": 1, "hub": None, "pool": None}
    consumer = Consumer(apply_eta_task=fail, app=app, timer=timer, **parent)
    room = WaitingRoom(consumer, WaitingTimes(sweep_interval=0.01))

    def calls() -> set[Any]:
        gevent_hub.sleep(0.01)
        return {greenlet for greenlet in timer.queue if not greenlet.dead}

    for _ in range(3):
        room.start(consumer)
        (first,) = calls()
        eventually(lambda first=first: first not in calls())
        assert len(calls()) == 1
        room.stop(consumer)
        assert not calls()


def fail() -> None:
    raise ConnectionError("backend")
