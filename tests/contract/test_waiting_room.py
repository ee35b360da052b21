"""The room in which a worker keeps the messages that wait: who is handed on, and in which order.

Each test takes a lock on real nodes, admits messages that were refused it, lets it be released, and
looks at what Celery is given.
"""

from __future__ import annotations

import gc
import select
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.bootsteps import CLOSE
from celery.utils.imports import symbol_by_name
from celery.worker import state
from kombu.asynchronous import Hub
from kombu.common import QoS

from celery_redlock import LockedTask, Redlock, send_unique
from celery_redlock.lock.lock import Lock
from celery_redlock.lock.model.handoff import TURN
from celery_redlock.lock.model.keys import lock_key, name_of_rate, votes_channel, waiting_key
from celery_redlock.lock.platform.clock import Platform, SystemClock
from celery_redlock.lock.transport import subscriber
from celery_redlock.tasks.delivery.delivery import utc_now
from celery_redlock.tasks.delivery.header import CLOCK_TOLERANCE, HEADER, Deferral, LockHeader
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.tasks.waiting.queues import QueueKey, WaitingTimes
from celery_redlock.tasks.waiting.room import WaitingRoom, admit_received
from tests.clocks import HOUR
from tests.conftest import PATIENCE, Nodes, eventually, settle
from tests.contract.conftest import MAJORITY

WAITING, VOTES = waiting_key("redlock", "a"), votes_channel("redlock")
TASK = SimpleNamespace(name="task")
NEVER = 600.0  # s: longer than a test
LONG = 240.0  # s, less than the longest countdown
STILL = WaitingTimes(retry_next_after=NEVER, sweep_interval=NEVER)  # nothing happens by the clock
MakeStage = Callable[..., "Stage"]


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

    def __init__(self, nodes: Nodes, times: WaitingTimes, **conf: Any) -> None:
        self.app = Celery(set_as_current=False, broker="memory://")
        urls = [node.url for node in nodes]
        self.app.conf.update(redlock_nodes=urls, redlock_node_timeout=PATIENCE, **conf)
        self.hub, self.revoked, self.succeeded = Hub(), set[str](), set[str]()
        self.hub.timer.call_repeatedly(0.02, int)  # so that each turn of the loop is short
        self.handed_on: list[str] = []
        self.apply: Callable[[Any], object] = str
        self.consumer = Consumer(
            app=self.app,
            hub=self.hub,
            timer=self.hub.timer,
            pool=None,
            hostname=f"worker {id(self)}",
            qos=QoS(lambda prefetch_count: None, 1),
            initial_prefetch_count=1,
            task_buckets=defaultdict(lambda: None),
            controller=SimpleNamespace(
                state=SimpleNamespace(revoked=self.revoked, successful_requests=self.succeeded)
            ),
            apply_eta_task=self._hand_on,
            create_task_handler=str,
            disable_rate_limits=False,
            _limit_move_to_pool=self._hand_on,
            connection_for_read=str,
        )
        self.clock = ClockAhead()
        self.room = WaitingRoom(self.consumer, times, Platform(self.clock))
        self.nodes, self._count = nodes, 0
        self.room.start(self.consumer)

    def _hand_on(self, request: Any) -> None:
        self.apply(request)
        self.handed_on.append(request.id)

    def admit(
        self, id_: str, resource: str = "a", *, since: float | None = None, limit: int = 1,
        expires: datetime | None = None, countdown: float = NEVER, has_budget: bool = False,
        reason: str = "", rate: str = "",
        **request: Any,
    ) -> None:  # fmt: skip
        """Let a message come in, behind those before it.

        since: seconds since 1970. reason: why no quorum voted, "" if the lock was taken.
        """
        self._count += 1
        now = utc_now()
        message = Consumer(
            id=id_, name="task", task=TASK, eta=now + timedelta(seconds=countdown), expires=expires,
            **{"stamped_headers": None, "request_dict": {"properties": {}}, **request},
        )  # fmt: skip
        deferral = Deferral(
            since=self._count if since is None else since, at=now.timestamp(), resource=resource,
            resources=(resource,), limit=limit, is_taken=not reason, why=reason,
            waits_for_release=not (has_budget or reason), rate=rate,
        )  # fmt: skip
        self.room.admit(message, deferral)
        # as Celery's strategy does
        self.hub.timer.call_after(countdown, self.consumer.apply_eta_task, (message,))

    def turn_until(self, condition: Callable[[], object]) -> None:
        def turned() -> object:
            self.hub.run_once()
            return condition()

        eventually(turned)

    def turn_for(self, seconds: float) -> None:
        """Turn the loop until its timer says so."""
        over: list[bool] = []
        self.hub.timer.call_after(seconds, over.append, (True,))
        self.turn_until(lambda: over)

    def see_registered(self, resource: str = "a", count: int = 1) -> None:
        """Return when each node can name so many workers for a resource, this one among them."""
        self.turn_until(lambda: self.hears() == len(self.nodes))
        settle(redlock_of(self.app))  # a node that has no script yet executes the request later
        self.turn_until(lambda: registered(self.nodes, resource) == [count] * len(self.nodes))

    def receive(self, deferral: Deferral, ago: float, ahead: float = 0.0) -> float:
        """Let a message of a task come in; return the seconds to its ETA.

        ago: seconds since it was refused. ahead: those by which its sender's clock is ahead.
        """

        name = uuid.uuid4().hex  # of a queue, too: the memory of all tests is one broker

        @self.app.task(base=LockedTask, lock_key="a", shared=False, name=name)
        def body() -> None: ...

        body.apply_async(countdown=deferral.countdown - ago + ahead, queue=name)
        with self.app.connection_for_read() as connection:
            queue = connection.SimpleQueue(name)
            message = queue.get(timeout=PATIENCE)
            message.ack()
            queue.close()
        header = LockHeader(
            id=message.headers["id"], deferral=replace(deferral, at=utc_now().timestamp() - ago)
        )
        message.headers[HEADER] = header.to_message()
        request = symbol_by_name(body.Request)(
            message, app=self.app, task=self.app.tasks[body.name], hostname="host"
        )
        admit_received(self.consumer, request)
        return float((request.eta - utc_now()).total_seconds())

    def hears(self) -> int:
        """Return how many nodes can name this worker."""
        inbox = self.room.inbox
        return 0 if inbox is None else inbox.subscriptions(inbox.channel)

    def hears_votes(self) -> bool:
        """Return whether each node can tell this worker that nodes vote again."""
        inbox = self.room.inbox
        return inbox is not None and inbox.subscriptions(VOTES) == len(self.nodes)

    def waiting(self) -> list[str]:
        return [waiting.request.id for waiting in self.room.waiting()]

    def close(self) -> None:
        self.room.stop(self.consumer)
        self.room.shutdown(self.consumer)
        redlock_of(self.app).close()
        self.hub.close()


def registered(nodes: Nodes, resource: str = "a") -> list[int]:
    """Return how many workers each node can name."""
    key = waiting_key("redlock", resource)
    return [int(node.client().zcard(key)) for node in nodes]


def keep_registrations(nodes: Nodes) -> None:
    """Let the sets of waiters not expire by themselves."""
    for node in nodes:
        assert node.client().persist(waiting_key("redlock", "a"))


def lock_of(redlock: Redlock, resource: str = "a", limit: int = 1) -> Lock:
    """Return a lock to be taken, as its holder elsewhere does."""
    return redlock.lock(resource, wait=PATIENCE, limit=limit)


def hold(redlock: Redlock, resource: str = "a", limit: int = 1) -> Lock:
    """Take a lock until its release; in a `with` it would be taken twice and released once."""
    return lock_of(redlock, resource, limit).acquire()


@pytest.fixture
def make_stage() -> Iterator[MakeStage]:
    """Give rooms; unless a test gives other times, nothing is swept or tried by the clock."""
    made: list[Stage] = []

    def make(nodes: Nodes, times: WaitingTimes = STILL, **conf: Any) -> Stage:
        made.append(Stage(nodes, times, **conf))
        return made[-1]

    yield make
    for stage in made:
        stage.close()


@pytest.fixture
def stage(make_stage: MakeStage, nodes: Nodes) -> Stage:
    """Give a room over three nodes."""
    return make_stage(nodes)


def test_while_a_body_runs_in_the_main_process_one_can_look_who_waits(
    make_stage: MakeStage, nodes: Nodes, redlock: Redlock
) -> None:
    """A solo pool runs it where its message is handed on."""
    seen: list[list[str]] = []

    def run(request: Any) -> None:
        other = threading.Thread(target=lambda: seen.append(stage.waiting()), daemon=True)
        other.start()
        other.join(60)
        assert seen, "who waits cannot be looked at"

    stage = make_stage(nodes, worker_eta_task_limit=2)  # one seat, beside one that is prefetched
    stage.apply = run
    with lock_of(redlock):
        stage.admit("stays")
        stage.admit("makes way")
        stage.turn_until(lambda: stage.handed_on)
    assert (stage.handed_on, seen) == (["makes way"], [["stays"]])


def test_a_release_hands_on_the_first_to_be_deferred_and_each_limit_by_itself(
    stage: Stage, redlock: Redlock
) -> None:
    for node in stage.nodes:
        node.client().set(lock_key("redlock", "a", 1), "of another holder")
    permit, other = hold(redlock, limit=2), hold(redlock, "b")
    for id_, since, limit in [("2nd", 2, 1), ("1st", 1, 1), ("5th", 5, 2), ("4th", 4, 2)]:
        stage.admit(id_, since=since, limit=limit)
    stage.admit("of another resource", "b")
    stage.see_registered()
    assert stage.handed_on == []
    permit.release()
    stage.turn_until(lambda: len(stage.handed_on) >= 2)
    assert sorted(stage.handed_on) == ["1st", "4th"]
    assert "of another resource" in stage.waiting()
    other.release()


def test_a_release_still_names_a_worker_whose_redlock_was_closed_by_its_user(
    make_stage: MakeStage, nodes: Nodes, redlock: Redlock
) -> None:
    stage = make_stage(nodes, replace(STILL, sweep_interval=0.1))
    lock = hold(redlock)
    stage.admit("waits")
    stage.see_registered()
    before = stage.room.inbox
    redlock_of(stage.app).close()
    stage.turn_until(lambda: stage.room.inbox is not before and stage.hears() == len(nodes))
    assert stage.handed_on == []
    lock.release()
    stage.turn_until(lambda: stage.handed_on == ["waits"])


def test_who_waits_is_in_the_order_that_the_broker_gives_to_priorities(
    make_stage: MakeStage, nodes: Nodes
) -> None:
    stage = make_stage(nodes, broker_url="pyamqp://")
    for priority in (9, 0, 3):
        stage.admit(str(priority), request_dict={"properties": {"priority": priority}})
    assert stage.waiting() == ["9", "3", "0"]


def test_a_sweep_ends_what_was_revoked_and_forgets_nobody_else(
    make_stage: MakeStage, nodes: Nodes, redlock: Redlock
) -> None:
    stage = make_stage(nodes, replace(STILL, sweep_interval=0.02))
    with lock_of(redlock):
        for id_ in ("waits", "revoked"):
            stage.admit(id_)
        stage.revoked.add("revoked")
        stage.turn_until(lambda: stage.handed_on)
        assert (stage.handed_on, stage.waiting()) == (["revoked"], ["waits"])


class TestHandOff:
    def test_the_release_may_have_come_while_the_worker_waited_for_nothing(
        self, stage: Stage
    ) -> None:
        """The first time as well: the release came while the message was on its way."""
        stage.admit("first")
        stage.turn_until(lambda: stage.hears() == len(stage.nodes))
        stage.turn_until(lambda: stage.handed_on == ["first"])
        stage.admit("late")
        stage.turn_until(lambda: stage.handed_on == ["first", "late"])

    def test_the_first_deferred_is_next_and_the_second_does_not_act_if_it_has_the_lock_by_then(
        self, make_stage: MakeStage, nodes: Nodes, redlock: Redlock
    ) -> None:
        first, second = make_stage(nodes), make_stage(nodes)
        lock = hold(redlock)
        second.admit("second", since=2)
        second.see_registered()
        first.admit("first", since=1)
        first.see_registered(count=2)
        lock.release()
        first.turn_until(lambda: first.handed_on == ["first"])
        with lock_of(redlock):  # by the run of the first
            second.turn_for(3 * TURN)
            assert (second.handed_on, second.waiting()) == ([], ["second"])
        second.turn_until(lambda: second.handed_on == ["second"])

    def test_who_finds_the_lock_free_lets_the_worker_before_it_have_its_turn(
        self, make_stage: MakeStage, nodes: Nodes
    ) -> None:
        stopped, next_one = make_stage(nodes), make_stage(nodes)
        for node in nodes:
            node.client().set(lock_key("redlock", "a"), "of a holder")
        stopped.admit("stopped", since=1)
        stopped.see_registered()
        for node in nodes:
            node.client().delete(lock_key("redlock", "a"))  # nobody announces that
        next_one.admit("next", since=2)
        next_one.turn_until(lambda: next_one.handed_on == ["next"])
        assert sum(registered(nodes)) <= 1  # a majority has passed the other one by

    def test_a_message_that_comes_before_the_one_that_asks_gets_its_answer(
        self, stage: Stage
    ) -> None:
        """Messages that a worker has given back come in any order, while their lock is free."""
        stage.admit("of before")
        stage.turn_until(lambda: stage.handed_on == ["of before"])
        stage.admit("later", since=20)
        stage.admit("earlier", since=10)
        stage.turn_until(lambda: stage.handed_on == ["of before", "earlier"])

    def test_a_loop_that_stood_still_asks_before_it_acts_on_an_old_name(
        self, make_stage: MakeStage, nodes: Nodes
    ) -> None:
        stage = make_stage(nodes[:1])
        with Redlock([nodes[0].url], node_timeout=PATIENCE) as redlock:
            lock = hold(redlock)
            stage.admit("waits")
            stage.see_registered()
            lock.release()
            other = hold(redlock)  # taken over meanwhile
            # it is named, by the one message of the one node
            eventually(lambda: select.select(list(stage.hub.readers), [], [], 0)[0])
            stage.clock.ahead += 10 * TURN
            stage.turn_for(3 * TURN)
            assert (stage.handed_on, stage.waiting()) == ([], ["waits"])
            other.release()
            stage.turn_until(lambda: stage.handed_on == ["waits"])

    def test_a_head_looks_at_its_eta_and_then_less_often_while_the_lock_is_held(
        self, make_stage: MakeStage, nodes: Nodes
    ) -> None:
        longest = 0.2
        stage = make_stage(nodes, replace(STILL, longest_pause=longest))
        for node in nodes:
            node.client().set(lock_key("redlock", "a"), "of a holder")
        stage.admit("waits", countdown=0.05)
        (waiter,) = stage.room.waiting()
        waiter.pause = 0.05
        stage.turn_until(lambda: waiter.pause == longest)
        assert (stage.handed_on, stage.waiting()) == ([], ["waits"])
        for node in nodes:
            node.client().delete(lock_key("redlock", "a"))  # nobody announces that
        stage.turn_until(lambda: stage.handed_on == ["waits"])

    def test_a_head_with_a_budget_tries_at_its_eta_though_the_lock_is_held(
        self, stage: Stage, redlock: Redlock
    ) -> None:
        with lock_of(redlock):
            stage.admit("waits", countdown=0.2, has_budget=True)
            stage.clock.ahead += (
                10.0  # the nodes' reply is read after its ETA, or the timer is first
            )
            stage.turn_until(lambda: stage.handed_on == ["waits"])

    def test_a_head_that_waits_on_looks_as_the_lease_of_a_dead_holder_ends(
        self, make_stage: MakeStage, nodes: Nodes
    ) -> None:
        stage = make_stage(nodes, replace(STILL, longest_pause=NEVER))
        for node in nodes:
            node.client().set(lock_key("redlock", "a"), "of a dead holder", px=300)
        stage.admit("waits", countdown=0.05)
        stage.room.waiting()[0].pause = NEVER
        stage.turn_until(lambda: stage.handed_on == ["waits"])

    def test_without_an_answer_of_a_quorum_a_head_tries_at_its_eta(
        self, make_stage: MakeStage, mortal_nodes: Nodes
    ) -> None:
        stage = make_stage(mortal_nodes)
        for node in mortal_nodes[1:]:
            node.kill()
        stage.admit("waits", countdown=0.05)
        stage.turn_until(lambda: stage.handed_on == ["waits"])


class TestRegistration:
    def test_it_ends_with_the_last_message(
        self, stage: Stage, nodes: Nodes, redlock: Redlock
    ) -> None:
        lock = hold(redlock)
        for id_ in ("first", "second"):
            stage.admit(id_)
        stage.see_registered()
        lock.release()
        stage.turn_until(lambda: stage.handed_on == ["first"])
        with lock_of(redlock):
            eventually(lambda: registered(nodes) == [1] * len(nodes))
            keep_registrations(nodes)
        stage.turn_until(lambda: stage.handed_on == ["first", "second"])
        eventually(lambda: registered(nodes) == [0] * len(nodes))

    def test_it_ends_when_the_room_is_closed(
        self, stage: Stage, nodes: Nodes, redlock: Redlock
    ) -> None:
        with lock_of(redlock):
            stage.admit("waits")
            stage.see_registered()
            keep_registrations(nodes)
            stage.room.stop(stage.consumer)
            eventually(lambda: registered(nodes) == [0] * len(nodes))
            stage.room.start(stage.consumer)
            assert stage.waiting() == []

    def test_a_release_that_named_nobody_while_the_loop_stood_still_is_not_missed(
        self, make_stage: MakeStage, nodes: Nodes, redlock: Redlock
    ) -> None:
        stage = make_stage(nodes, replace(STILL, sweep_interval=0.02, refresh_after=NEVER))
        lock = hold(redlock)
        stage.admit("waits")
        stage.see_registered()
        stage.turn_for(TURN)  # all that comes with the subscriptions is done
        for node in nodes:
            node.client().delete(WAITING)
        lock.release()
        settle(redlock)
        stage.clock.ahead += 10.0
        stage.turn_until(lambda: stage.handed_on == ["waits"])

    def test_a_release_before_the_inbox_opened_again_is_not_missed(
        self, stage: Stage, nodes: Nodes, redlock: Redlock
    ) -> None:
        def listeners() -> list[set[str]]:
            clients = [node.client().client_list(_type="pubsub") for node in nodes]
            return [{one["id"] for one in found if one["sub"] != "0"} for found in clients]

        lock = hold(redlock)
        stage.admit("waits")
        stage.see_registered()
        before = listeners()
        for node in nodes:
            node.client().delete(WAITING)
            node.client().client_kill_filter(_type="pubsub")
        eventually(lambda: all(new - old for new, old in zip(listeners(), before, strict=True)))
        lock.release()
        settle(redlock)
        stage.turn_until(lambda: stage.handed_on == ["waits"])

    def test_it_is_made_anew_from_time_to_time(
        self, make_stage: MakeStage, nodes: Nodes, redlock: Redlock
    ) -> None:
        stage = make_stage(nodes, replace(STILL, sweep_interval=1.0, refresh_after=0.1))
        with lock_of(redlock):
            stage.admit("waits")
            stage.see_registered()
            for node in nodes:
                node.client().delete(waiting_key("redlock", "a"))
            stage.turn_until(lambda: registered(nodes) == [1] * len(nodes))

    def test_an_earlier_message_moves_the_worker_forward(
        self, stage: Stage, nodes: Nodes, redlock: Redlock
    ) -> None:
        def scores() -> list[list[float]]:
            key = waiting_key("redlock", "a")
            found = [node.client().zrange(key, 0, -1, withscores=True) for node in nodes]
            return [[score for _, score in one] for one in found]

        with lock_of(redlock):
            stage.admit("later", since=20)
            stage.see_registered()
            eventually(lambda: scores() == [[20.0]] * len(nodes))
            stage.admit("earlier", since=10)
            eventually(lambda: scores() == [[10.0]] * len(nodes))


class TestNoQuorum:
    def test_a_message_that_was_on_its_way_as_a_quorum_came_back_is_handed_on(
        self, stage: Stage
    ) -> None:
        stage.admit("first", reason="no quorum")
        stage.turn_until(lambda: stage.handed_on == ["first"])
        stage.turn_until(stage.hears_votes)
        stage.turn_for(TURN)  # what comes with the last subscription
        stage.admit("late", reason="no quorum")
        stage.turn_until(lambda: stage.handed_on == ["first", "late"])

    @MAJORITY
    def test_messages_of_one_node_alone_hand_on_once(self, stage: Stage) -> None:
        stage.admit("opens the channel", reason="no quorum")
        stage.turn_until(lambda: stage.handed_on)
        stage.turn_until(stage.hears_votes)
        stage.turn_for(TURN)  # what comes with the last subscription
        stage.clock.ahead += HOUR  # that quorum came long before the next message was refused
        stage.admit("one", reason="no quorum")
        alone, other = stage.nodes[0].client(), stage.nodes[1].client()
        alone.publish(VOTES, "message")
        stage.turn_until(lambda: stage.handed_on == ["opens the channel", "one"])
        stage.clock.ahead += (
            5 * CLOCK_TOLERANCE
        )  # that message came before the next one was refused
        stage.admit("two", reason="no quorum")
        for number in range(20):
            alone.publish(VOTES, f"message {number}")
        stage.turn_for(2 * TURN)
        assert stage.handed_on == ["opens the channel", "one"]
        other.publish(VOTES, "message 19")
        stage.turn_until(lambda: stage.handed_on == ["opens the channel", "one", "two"])


class TestCountdown:
    WAIT = Deferral(resource="a", resources=("a",), waits_for_release=True, countdown=LONG)
    WITH_BUDGET = replace(WAIT, waits_for_release=False)

    @pytest.mark.parametrize("ahead", [0, HOUR, -HOUR])
    def test_it_goes_on_or_begins_anew_whatever_the_clock_of_the_sender(
        self, stage: Stage, ahead: int
    ) -> None:
        assert LONG / 2 < stage.receive(self.WAIT, LONG + 60, ahead) <= LONG  # it came later
        assert stage.receive(self.WAIT, LONG - 60, ahead) <= 60.0
        assert stage.receive(self.WITH_BUDGET, LONG + 60, ahead) <= 0.0
        of_redelivery = Deferral(countdown=LONG)
        for wait in (self.WAIT, self.WITH_BUDGET, of_redelivery):
            assert LONG / 2 < stage.receive(wait, 60, ahead) < LONG - 30


def test_a_worker_does_not_listen_for_ever_if_nobody_waits(
    make_stage: MakeStage, nodes: Nodes, redlock: Redlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber, "IDLE_LIMIT", 0.1)
    stage = make_stage(nodes, replace(STILL, sweep_interval=0.02, unsubscribe_after=0.0))
    with lock_of(redlock):
        stage.admit("one")
        stage.turn_until(lambda: stage.hears() == len(nodes))
    stage.turn_until(lambda: stage.handed_on == ["one"])
    stage.turn_until(lambda: stage.hears() == 0)


def test_a_worker_that_stops_publishes_a_message_after_the_store_of_its_state(
    make_stage: MakeStage, nodes: Nodes, redlock: Redlock
) -> None:
    """Else DEFERRED is stored over the final state of the copy, and stays."""
    stage, order, published = make_stage(nodes, STILL), list[str](), threading.Event()

    def store() -> None:
        began.set()
        order.append("published" if published.wait(0.2) else "stored")

    began = threading.Event()
    with lock_of(redlock):
        stage.admit("waits", is_deferred_here=True, publish_again=published.set)
        stage.room.states.put("waits", store, order.append)
        assert began.wait(60)
        stage.consumer.blueprint = SimpleNamespace(state=CLOSE)
        stage.room.stop(stage.consumer)
    assert published.is_set()
    assert order == ["stored"]


def test_a_worker_remembers_a_refusal_while_a_message_waits_for_that_lock(
    make_stage: MakeStage, nodes: Nodes, redlock: Redlock
) -> None:
    """So that a message that does not try can say who holds its lock."""
    stage, request = (
        make_stage(nodes, replace(STILL, sweep_interval=0.02)),
        Consumer(name="task", task=TASK),
    )
    with lock_of(redlock):
        for resource in "ab":
            stage.room.note_refusal(Deferral(resource=resource, holder="holder", expires_in=9.0))
        stage.admit("waits", "a")
        stage.clock.ahead += 60.0
        stage.turn_for(TURN)
        refusal = stage.room.refusal_of(request, [QueueKey("a", 1)])
        assert refusal is not None
        assert (refusal.holder, refusal.expires_in) == ("holder", None)
        assert stage.room.refusal_of(request, [QueueKey("b", 1)]) is None


def test_a_worker_does_not_remember_every_refusal(make_stage: MakeStage, nodes: Nodes) -> None:
    stage = make_stage(nodes, replace(STILL, sweep_interval=0.02))
    stage.room.note_refusal(Deferral(resource="a"))
    assert stage.room.may_refuse("task")
    stage.clock.ahead += HOUR
    stage.turn_until(lambda: not stage.room.may_refuse("task"))


class TestTheEndOfAWorker:
    """Its app lets go of its `Redlock`, if the process goes on and nothing else needs it."""

    def end(self, stage: Stage, *, in_main_thread: bool = False) -> bool:
        """End a worker; return whether its app still has the same `Redlock`."""
        before = redlock_of(stage.app)
        if in_main_thread:
            stage.room.shutdown(stage.consumer)
        else:
            thread = threading.Thread(target=stage.room.shutdown, args=(stage.consumer,))
            thread.start()
            thread.join()
        return redlock_of(stage.app) is before

    def test_in_a_thread(self, stage: Stage) -> None:
        assert not self.end(stage)

    def test_in_the_main_thread_whose_process_ends_as_well(self, stage: Stage) -> None:
        assert self.end(stage, in_main_thread=True)

    def test_while_another_worker_of_the_app_runs(self, stage: Stage) -> None:
        other = Consumer(**vars(stage.consumer))
        room = WaitingRoom(other, STILL)
        assert self.end(stage)
        stage.consumer, stage.room = other, room
        assert not self.end(stage)

    def test_while_a_send_publishes_its_message(
        self, stage: Stage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The nodes remember the send all the same."""
        send = stage.app.send_task
        settle(redlock_of(stage.app))

        def publish(*args: Any, **options: Any) -> Any:
            assert not self.end(stage)
            gc.collect()
            return send(*args, **options)

        monkeypatch.setattr(stage.app, "send_task", publish)
        send_unique(stage.app, "task", resource="a", unique_for=HOUR)

        def windows() -> list[str]:
            clients = [node.client() for node in stage.nodes]
            return [client.get(key) for client in clients for key in client.keys("*:unique:*")]

        eventually(
            lambda: (
                len(windows()) > len(stage.nodes) / 2
                and all(":sent:" in value for value in windows())
            )
        )

    def test_while_a_lock_is_held(self, stage: Stage) -> None:
        with lock_of(redlock_of(stage.app)):
            assert self.end(stage)
        assert not self.end(stage)


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
    names = (
        "apply_eta_task", "create_task_handler", "_limit_move_to_pool", "connection_for_read",
    )  # fmt: skip
    consumer = Consumer(app=app, timer=timer, **parent, **dict.fromkeys(names, fail))
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


class TestWaitsForAStart:
    def test_a_busy_pool_gets_no_more_messages_than_starts_are_free(
        self, make_stage: MakeStage, nodes: Nodes
    ) -> None:
        stage, in_pool = make_stage(nodes, STILL), list[Any]()

        def queue_in_pool(request: Any) -> None:
            request.time_start = None
            state.reserved_requests.add(request)
            in_pool.append(request)

        stage.apply = queue_in_pool
        for id_ in ("one", "two"):
            stage.admit(id_, rate="1/h")
        stage.turn_until(lambda: stage.handed_on == ["one"])
        stage.turn_for(3 * TURN)
        assert stage.handed_on == ["one"]
        in_pool[0].time_start = utc_now().timestamp()  # it asks now; here no start is taken
        stage.turn_until(lambda: stage.handed_on == ["one", "two"])

    def test_a_message_with_a_budget_stays_registered(
        self, make_stage: MakeStage, nodes: Nodes, redlock: Redlock
    ) -> None:
        times, name = replace(STILL, refresh_after=0.5, sweep_interval=0.4), name_of_rate("a")
        stage = make_stage(nodes, times)
        with redlock.lock("a", rate="1/h"):
            pass
        stage.admit("one", rate="1/h", has_budget=True)
        stage.see_registered(name)
        for node in nodes:
            node.client().delete(waiting_key("redlock", name))
        stage.turn_until(lambda: registered(nodes, name) == [1] * len(nodes))
        assert stage.handed_on == []

    def test_after_a_refusal_by_nodes_that_share_no_permit_the_next_one_waits_a_while(
        self, make_stage: MakeStage, nodes: Nodes
    ) -> None:
        stage = make_stage(nodes, STILL)
        refused_at = stage.clock.now()
        stage.room.note_refusal(Deferral(resource="a", rate="1/h", expires_in=None))
        stage.admit("one", rate="1/h")
        stage.turn_until(lambda: stage.handed_on == ["one"])
        assert stage.clock.now() - refused_at >= TURN
