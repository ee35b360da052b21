"""What `Redlock` says of real nodes to Python code, and what it changes there."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery import Celery, current_app

from celery_redlock import (
    LockedTask,
    LockLost,
    QuorumUnreachable,
    Redlock,
    SettingsError,
    install,
    send_unique,
)
from celery_redlock.lock.claims import delete_claim
from celery_redlock.lock.lock import Lock
from celery_redlock.lock.model.keys import lock_key
from celery_redlock.lock.transport.command import text_of
from celery_redlock.operate.cli.group import as_data
from celery_redlock.tasks.per_app import redlock_of
from tests.conftest import PATIENCE, Nodes, eventually, is_free, settle, settled
from tests.contract.conftest import MAJORITY, REDIS_SERVER
from tests.contract.renewals import hurry


@pytest.fixture
def app(nodes: Nodes) -> Iterator[Celery]:
    """Give an app whose messages nobody consumes."""
    made = Celery("claims", broker="memory://", set_as_default=False)
    made.conf.update(redlock_nodes=[node.url for node in nodes], redlock_node_timeout=PATIENCE)
    yield made
    redlock_of(made).close()
    made.close()


class TestHolder:
    def test_it_is_the_lock_that_a_quorum_has(self, redlock: Redlock) -> None:
        assert redlock.holder("r") is None
        with redlock.lock("r", wait=60):
            settle(redlock)
            found = redlock.holder("r")
        assert found is not None
        assert (found.resource, found.held, found.holder.task_id) == ("r", True, "")
        assert found.holder.label.startswith("pid ")

    @MAJORITY
    def test_a_lock_that_one_node_alone_has_is_none(self, redlock: Redlock, nodes: Nodes) -> None:
        nodes[0].client().set(lock_key("redlock", "r"), "00:1:somebody", px=20_000)
        assert redlock.holder("r") is None

    @pytest.mark.parametrize("resource", ["a#3", "rate/x", "späť:\\"])
    def test_a_permit_is_held_too(self, redlock: Redlock, nodes: Nodes, resource: str) -> None:
        with settled(nodes) as other:
            first = other.lock(resource, limit=2, wait=60).acquire()
            with redlock.lock(resource, limit=2, wait=60):
                first.release()
                settle(other)
                settle(redlock)
                found = redlock.holder(resource)
        assert found is not None
        assert (found.resource, found.used, found.limit) == (resource, 1, 2)

    def test_too_few_nodes_cannot_say_that_it_is_free(self, mortal_nodes: Nodes) -> None:
        with Redlock([node.url for node in mortal_nodes]) as redlock:
            mortal_nodes[0].kill()
            assert redlock.holder("r") is None
            mortal_nodes[1].kill()
            with pytest.raises(QuorumUnreachable, match="refused") as unknown:
                redlock.holder("r")
        assert (len(unknown.value.causes), unknown.value.quorum) == (2, 2)

    @REDIS_SERVER  # it counts its commands
    def test_to_ask_for_one_resource_searches_no_database(
        self, redlock: Redlock, nodes: Nodes
    ) -> None:
        nodes[0].client().config_resetstat()
        redlock.holder("r")
        redlock.locks("r")
        redlock.waiters("r")
        commands = nodes[0].client().info("commandstats")
        assert "cmdstat_mget" in commands
        assert "cmdstat_scan" not in commands
        redlock.locks()
        assert "cmdstat_scan" in nodes[0].client().info("commandstats")


def test_the_nodes_say_whether_they_vote(redlock: Redlock, nodes: Nodes) -> None:
    status = redlock.status()
    assert (status.voting, status.needed) == (len(nodes), len(nodes) // 2 + 1)
    assert status.has_quorum
    assert [node.votes for node in status.nodes] == [True] * len(nodes)


def test_waiters_of_one_resource_are_those_for_its_lock_and_its_rate(
    redlock: Redlock, nodes: Nodes
) -> None:
    with redlock.lock("r", rate="1/h", wait=60), redlock.lock("other", wait=60):
        settle(redlock)
        with settled(nodes) as one, settled(nodes) as two, ThreadPoolExecutor() as pool:
            waits = [
                pool.submit(one.lock("other", wait=60).try_acquire),
                pool.submit(two.lock("r", limit=9, rate="1/h", wait=60).try_acquire),
            ]
            eventually(lambda: len(redlock.waiters().processes) == 2)
            (waiter,) = redlock.waiters("r").processes
            assert (waiter.resource, waiter.waits_for) == ("r", "rate")
            assert waiter.next_start is not None
            (waiter,) = redlock.waiters("other").processes
            assert (waiter.resource, waiter.waits_for) == ("other", "lock")
            redlock.break_lock("r")
            redlock.break_lock("other")
            assert all(wait.result(60) for wait in waits)


def test_reports_become_the_json_of_the_commands(redlock: Redlock, app: Celery) -> None:
    send_unique(app, "shop.take", resource="r", unique_for=600.0)
    settle(redlock_of(app))
    with redlock.lock("r", rate="1/h", wait=60):
        settle(redlock)
        assert [rate.used for rate in redlock.rates()] == [1]
        (claim,) = (claims := redlock.claims()).claims
        (lock,) = (locks := redlock.locks("r")).locks
        given = claims, locks, redlock.waiters(), redlock.status(), redlock.break_lock("r")
    for report in (*given, *redlock.end_claim("r")):
        text = json.dumps(as_data(report)) + repr(report)
        assert text_of(lock.value) not in text
        assert claim.token not in text
        assert pickle.loads(pickle.dumps(report)) == report
    assert locks.of(["r"]) == locks
    assert (locks.of([]).locks, locks.of([]).is_known) == ((), True)


class TestBreak:
    def test_what_was_broken_is_told_and_free(self, redlock: Redlock, nodes: Nodes) -> None:
        lock = redlock.lock("r", rate="1/h", wait=60).acquire()
        settle(redlock)
        found = redlock.break_lock("r")
        assert (found.resource, found.is_complete) == ("r", True)
        (broken,), (freed,) = found.locks, found.rates
        assert len(broken.gone_from) == len(freed.starts_from) == len(nodes)
        assert broken.lock.holder.label.startswith("pid ")
        assert is_free(nodes, "r")
        assert redlock.rates("r") == ()
        hurry(redlock)
        eventually(lambda: not lock.held)

    def test_of_a_free_resource_nothing_is(self, redlock: Redlock) -> None:
        found = redlock.break_lock("r")
        assert (found.locks, found.rates, found.is_complete) == ((), (), True)


@pytest.mark.parametrize("method", ["rates", "break_lock", "end_claim"])
def test_too_few_nodes_cannot_say_that_there_is_nothing(mortal_nodes: Nodes, method: str) -> None:
    with Redlock([node.url for node in mortal_nodes]) as redlock:
        mortal_nodes[0].kill()
        found = getattr(redlock, method)("r")
        assert (
            (found.locks, found.is_complete) == ((), True) if method == "break_lock" else not found
        )
        mortal_nodes[1].kill()
        with pytest.raises(QuorumUnreachable, match="refused") as unknown:
            getattr(redlock, method)("r")
    assert (unknown.value.resource, len(unknown.value.causes)) == ("r", 2)


ASKS_FOR_ALL = "locks", "rates", "waiters"  # if it gets no name


@pytest.mark.parametrize("method", [*ASKS_FOR_ALL, "holder", "break_lock", "claims", "end_claim"])
def test_what_is_no_single_name_is_refused_and_changes_nothing(
    redlock: Redlock, method: str
) -> None:
    with redlock.lock("r", rate="1/h", wait=60) as lock:
        settle(redlock)
        for given in ("", 7, b"r", ["r"], ("r", "s"), *([None] * (method not in ASKS_FOR_ALL))):
            with pytest.raises(SettingsError, match="must be one text, not empty") as refused:
                getattr(redlock, method)(given)
            name = "pattern" if method == "claims" else "resource"
            assert refused.value.name == name
        lock.extend()
        assert redlock.rates("r")[0].used == 1


class TestOnLost:
    @staticmethod
    def held(redlock: Redlock, on_lost: Any) -> Lock:
        lock = redlock.lock("r", wait=60, on_lost=on_lost).acquire()
        settle(redlock)
        return lock

    def test_it_is_called_once_with_the_error(self, redlock: Redlock) -> None:
        told: list[LockLost] = []
        lock = self.held(redlock, told.append)
        redlock.break_lock("r")
        hurry(redlock)
        eventually(lambda: told)
        lock.release()  # which reports a loss, too
        settle(redlock)
        (error,) = told
        assert (type(error), error.resource) == (LockLost, "r")
        assert "broke" in error.reason

    def test_what_cannot_be_called_is_refused_like_a_flag_that_is_none(
        self, redlock: Redlock
    ) -> None:
        async def told(error: LockLost) -> None: ...

        wrong: list[dict[str, Any]] = [{"on_lost": one} for one in ("warn", 3, told)]
        wrong += [{"renew": "no"}, {"renew": None}, {"reentrant": "no"}, {"fencing": "x"}]
        for options in wrong:
            with pytest.raises(SettingsError) as refused:
                redlock.lock("r", **options)
            assert refused.value.name in options

    def test_it_is_not_called_for_a_release(self, redlock: Redlock) -> None:
        told: list[LockLost] = []
        for _ in range(3):
            self.held(redlock, told.append).release()
        settle(redlock)
        assert told == []

    def test_what_it_raises_is_logged_and_stops_nothing(
        self, redlock: Redlock, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fails(error: LockLost) -> None:
            raise ZeroDivisionError

        neighbour, lost = redlock.lock("r2", wait=60).acquire(), threading.Event()
        lock = self.held(redlock, fails)
        redlock.break_lock("r")
        hurry(redlock)
        eventually(lambda: [one for one in caplog.records if event_of(one) == "on_lost_failed"])
        lock.release()
        lock = self.held(redlock, lambda error: lost.set())
        redlock.break_lock("r")
        hurry(redlock)
        assert lost.wait(60)
        assert neighbour.held


def event_of(record: Any) -> str:
    return getattr(record, "event", "")


class TestAnApps:
    def test_it_is_the_one_that_its_tasks_use(self, app: Celery) -> None:
        assert Redlock.of(app) is redlock_of(app)
        assert Redlock.of(app).status().has_quorum

    def test_after_its_user_closed_it_the_app_makes_another_one(self, app: Celery) -> None:
        with Redlock.of(app) as first:
            settle(first)
        second = Redlock.of(app)
        settle(second)
        assert second is not first
        assert Redlock.of(app) is second
        with second.lock("r", wait=60):
            assert second.status().has_quorum
        sends = [send_unique(app, "shop.take", resource="r", unique_for=600.0) for _ in range(2)]
        assert [sent.is_duplicate for sent in sends] == [False, True]

    def test_the_current_app_is_an_app(self, app: Celery) -> None:
        app.set_current()
        assert Redlock.of(current_app) is redlock_of(app)
        app.finalize()
        install(current_app)
        how: Any = {"resource": "r", "unique_for": 600.0}
        sends = [send_unique(one, "shop.take", **how) for one in (app, current_app)]
        assert [sent.is_duplicate for sent in sends] == [False, True]

    @pytest.mark.parametrize("given", [None, "shop", 7])
    def test_nothing_else_is_one(self, given: Any) -> None:
        with pytest.raises(SettingsError, match="must be a Celery app"):
            Redlock.of(given)

    def test_without_nodes_it_says_so(self) -> None:
        app = Celery("bare", broker="memory://", set_as_default=False)
        with pytest.raises(SettingsError, match="redlock_nodes"):
            Redlock.of(app)


class TestClaims:
    def send(self, app: Celery, resource: str, task: str = "shop.take") -> Any:
        return send_unique(app, task, resource=resource, unique_for=600.0)

    def test_a_claim_is_shown_and_ended_so_that_the_next_send_is_no_duplicate(
        self, app: Celery
    ) -> None:
        first, redlock = self.send(app, "stock:1"), Redlock.of(app)
        self.send(app, "stock:2", "a:b%c")
        settle(redlock)
        assert self.send(app, "stock:1").is_duplicate
        claim, other = redlock.claims().claims
        assert (claim.resource, claim.task, claim.task_id) == ("stock:1", "shop.take", first.id)
        assert (claim.is_sent, claim.counts) == (True, True)
        assert len(claim.votes) >= claim.needed  # a node that is late is told to forget it
        assert 500 < claim.expires_in <= 600
        assert (other.resource, other.task) == ("stock:2", "a:b%c")
        (ended,) = redlock.end_claim("stock:1")
        assert (ended.claim.task_id, sorted(ended.gone_from)) == (first.id, sorted(claim.votes))
        assert [one.resource for one in redlock.claims().claims] == ["stock:2"]
        assert not self.send(app, "stock:1").is_duplicate
        assert self.send(app, "stock:2", "a:b%c").is_duplicate

    def test_a_pattern_is_of_the_resource(self, app: Celery) -> None:
        redlock = Redlock.of(app)
        for name in ("stock:1", "stock:2", "order:1", "späť"):
            self.send(app, name)
        settle(redlock)
        shown = [one.resource for one in redlock.claims("stock:*").claims]
        assert shown == ["stock:1", "stock:2"]
        assert redlock.end_claim("stock:*") == ()  # it names one resource
        assert [one.resource for one in redlock.claims("späť").claims] == ["späť"]

    @pytest.mark.parametrize("name", ["acc:1", "acc:2", "acc:1, acc:2", "acc:2, acc:1"])
    def test_one_of_several_resources_is_found_by_each_name_of_it(
        self, app: Celery, name: str
    ) -> None:
        keys = ["acc:{x}", "acc:{y}"]

        @app.task(base=LockedTask, lock_key=keys, lock_unique_for=600.0, shared=False)
        def move(x: int, y: int) -> None: ...

        redlock = Redlock.of(app)
        move.delay(2, 1)
        settle(redlock)
        assert not move.delay(1, 2).is_duplicate  # its list is another one
        settle(redlock)
        shown = [one.resource for one in redlock.claims("acc:*").claims]
        assert shown == ["acc:1, acc:2", "acc:2, acc:1"]
        ended = [one.claim.resource for one in redlock.end_claim(name)]
        assert ended == (shown if name != "acc:2, acc:1" else [name])

    def test_a_later_claim_is_not_ended_in_place_of_the_one_that_was_shown(
        self, app: Celery
    ) -> None:
        redlock = Redlock.of(app)
        self.send(app, "stock:1")
        settle(redlock)
        (shown,) = redlock.claims().claims
        redlock.end_claim("stock:1")
        assert not self.send(app, "stock:1").is_duplicate
        settle(redlock)
        assert delete_claim(redlock.session, shown).gone_from == ()
        assert self.send(app, "stock:1").is_duplicate

    def test_a_token_is_not_in_what_a_person_may_print(self, app: Celery) -> None:
        self.send(app, "stock:1")
        settle(Redlock.of(app))
        (claim,) = Redlock.of(app).claims().claims
        assert len(claim.token) == 32
        assert claim.token not in repr(claim)
