"""A test file as a user writes one: locked tasks, and nothing but the kit; no server, no Docker."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import time_machine
from celery import Celery
from freezegun import freeze_time

from celery_redlock import LockedTask, LockLost, LockTaken, Redlock, current_lock
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.testing import FakeNode, assert_released, hold, lose, use_nodes
from tests.conftest import eventually

app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_default=False)
app.conf.redlock_nodes = ["redis://lock1.example", "redis://lock2.example", "redis://lock3.example"]
stock: dict[str, int] = {}


@app.task(base=LockedTask, lock_key="stock:{sku}", shared=False)
def take_from_stock(sku: str, times: int = 1) -> int:
    lock = current_lock()
    for _ in range(times):
        if lock is not None:
            lock.ensure()
        stock[sku] = stock.get(sku, 10) - 1
        if stock[sku] == 5:
            lose(f"stock:{sku}")
    return stock[sku]


@pytest.fixture(autouse=True)
def _shop(redlock_nodes: list[FakeNode]) -> Iterator[None]:
    stock.clear()
    with use_nodes(app, redlock_nodes):
        yield


def test_a_run_takes_its_lock_and_lets_it_go() -> None:
    assert take_from_stock.apply(("42",)).get() == 9
    assert_released("stock:42")


def test_a_run_that_fails_lets_it_go() -> None:
    assert take_from_stock.apply((["not hashable"],)).failed()
    assert_released()


def test_a_run_is_refused_while_another_owner_holds_it() -> None:
    with hold("stock:42", by="the nightly import"):
        result = take_from_stock.apply(("42",))
        with pytest.raises(LockTaken, match="the nightly import"):
            result.get()
        assert take_from_stock.apply(("7",)).get() == 9
    assert take_from_stock.apply(("42",)).get() == 9


def test_a_run_that_may_wait_gets_it_from_who_lets_it_go() -> None:
    results: list[Any] = []

    def run() -> None:
        call = {"wait": 60}
        results.append(take_from_stock.apply(("42",), lock=call).get())

    inbox = redlock_of(app).session.callers.inbox
    with hold("stock:42"):
        waiting = threading.Thread(target=run)
        waiting.start()
        eventually(lambda: inbox.is_listening or not waiting.is_alive())
        assert waiting.is_alive()
    waiting.join()
    assert results == [9]


def test_a_run_whose_lock_is_lost_stops() -> None:
    result = take_from_stock.apply(("42", 10))
    assert isinstance(result.result, LockLost)
    assert stock["42"] == 5
    assert_released("stock:42")


def test_a_release_that_was_forgotten_is_told_with_its_holder() -> None:
    lock = take_from_stock.lock_for("42").acquire()
    with pytest.raises(AssertionError, match=r"'stock:42' is held by 'lock_for .*' since 20.* UTC"):
        assert_released("stock:42", within=0)
    lock.release()
    assert_released("stock:42")


def test_a_lease_expires_by_freezegun() -> None:
    with freeze_time("2030-01-31 12:00:00") as freezer, take_from_stock.lock_for("42") as lock:
        with pytest.raises(LockTaken, match="lock_for"), hold("stock:42"):
            pass
        freezer.tick(31)
        assert not lock.held
        with hold("stock:42"), pytest.raises(LockLost):
            lock.ensure()


def test_a_lease_expires_by_time_machine() -> None:
    with (
        time_machine.travel("2030-01-31 12:00:00", tick=False) as traveller,
        take_from_stock.lock_for("42") as lock,
    ):
        traveller.shift(timedelta(seconds=31))
        assert not lock.held
        with hold("stock:42"):
            pass


def test_a_dead_holder_is_in_the_way_until_its_lease_ends(redlock_nodes: list[FakeNode]) -> None:
    with hold("stock:42", ttl=10, renew=False):
        redlock_nodes[0].advance(9)
        assert isinstance(take_from_stock.apply(("42",)).result, LockTaken)
        redlock_nodes[0].advance(2)
        assert take_from_stock.apply(("42",)).get() == 9


def test_one_node_of_three_may_be_down(redlock_nodes: list[FakeNode]) -> None:
    redlock_nodes[1].kill()
    assert take_from_stock.apply(("42",)).get() == 9
    assert_released("stock:42", on=[redlock_nodes[0], redlock_nodes[2]])


def test_the_lock_without_celery(redlock: Redlock) -> None:
    with redlock.lock("stock:42", ttl=10) as lock:
        assert lock.held
        assert not take_from_stock.lock_for("42").try_acquire()
    assert_released("stock:42", on=redlock)


@pytest.mark.usefixtures("redlock_off")
def test_locking_may_be_off() -> None:
    with hold("stock:42"):
        assert take_from_stock.apply(("42",)).get() == 9
