"""With `on_duplicate="newest"` one message runs and one is queued: that of the last send."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import os
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from celery import chain, group
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from celery_redlock import SettingsError, send_unique
from celery_redlock.label import RunId
from celery_redlock.lock.model.keys import completion_key, order_key
from celery_redlock.tasks.delivery.delivery import utc_now
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.tasks.unique.send import unique_name
from tests.conftest import eventually, settle
from tests.integration.conftest import STANDING, Stage, Standing, overlaps, pools
from tests.integration.deliveries import deliver, see_drained
from tests.integration.test_second_deliveries import hold_back
from tests.integration.test_unique import ran, see_window_end, status, windows

WORKER = STANDING
TASKS = ("newest", "newest_late")


class Revoked(NamedTuple):
    """A message that is not to run, and the id of the one that its error is to name."""

    result: AsyncResult
    by: str


def see_revoked(*messages: Revoked) -> None:
    for one in messages:
        with pytest.raises(TaskRevokedError, match=f"a later call replaced it: {one.by}"):
            one.result.get(timeout=120)


@pytest.mark.parametrize("pool", pools("threads", every=["prefork", "threads", "gevent"]))
@pytest.mark.parametrize("name", TASKS)
def test_one_runs_and_one_is_queued_with_the_last_arguments(
    of_pool: Standing, key: str, name: str
) -> None:
    stage = of_pool.stage
    task = getattr(stage.tasks, name)
    first = task.delay(key, "wait", "first")
    eventually(lambda: ran(stage, key))
    second, third, last = (task.delay(key, "", value) for value in ("second", "third", "last"))
    assert not any(one.is_duplicate for one in (first, second, third, last))
    stage.log.with_name(key).touch()
    assert [one.get(timeout=60) for one in (first, last)] == ["first", "last"]
    see_revoked(Revoked(second, third.id), Revoked(third, last.id))
    see_window_end(stage, key)
    assert ran(stage, key) == ["first", "last"]
    text = of_pool.workers[0].output()
    assert f"skipped {task.name}[{second.id}]: a later call replaced it: {third.id}" in text


@pytest.mark.parametrize("are_old", [False, True], ids=["at once", "after the marks are over"])
@pytest.mark.parametrize("name", TASKS)
def test_sends_before_any_worker_is_there_are_one_run(
    stage: Stage, key: str, name: str, are_old: bool
) -> None:
    task = getattr(stage.tasks, name)
    sent = [task.apply_async((key, "", value), queue=key) for value in "abcd"]
    settle(redlock_of(stage.app))
    for node in stage.nodes if are_old else ():
        for one in sent:
            node.client().delete(completion_key("redlock", str(RunId(one.id, task.name))))
    with stage.consumed(key):
        assert sent[-1].get(timeout=60) == "d"
        for number, one in enumerate(sent[:-1], 1):
            later = "|".join(other.id for other in sent[number:][: None if are_old else 1])
            with pytest.raises(TaskRevokedError, match=f"a later call replaced it: ({later})"):
                one.get(timeout=120)
    assert ran(stage, key) == ["d"]


@pytest.mark.parametrize("name", TASKS)
def test_a_message_that_comes_late_does_not_run_after_a_later_one(
    stage: Stage, key: str, name: str
) -> None:
    """As one that a dead worker had, or that was moved from it."""
    first, message = hold_back(stage, name, key, "", "first")
    for node in stage.nodes:
        for claim in windows(stage, key):
            node.client().delete(claim)  # a claim that is over, so that none replaces it
    last = getattr(stage.tasks, name).delay(key, "", "last")
    assert last.get(timeout=60) == "last"
    deliver(stage, message)
    see_revoked(Revoked(first, last.id))
    see_drained(stage)
    assert ran(stage, key) == ["last"]


class TestRetry:
    def test_it_goes_on_if_no_later_one_has_started(self, stage: Stage, key: str) -> None:
        task = stage.tasks.newest
        first = task.delay(key, "retry", "first")
        eventually(lambda: ran(stage, key))
        stage.log.with_name(key).touch()
        stage.log.with_name(f"{key} again").touch()
        assert first.get(timeout=60) == "first"
        assert ran(stage, key) == ["first", "first"]

    @pytest.mark.parametrize("name", TASKS)
    def test_it_ends_if_a_later_one_has_started(self, stage: Stage, key: str, name: str) -> None:
        task = getattr(stage.tasks, name)
        first = task.delay(key, "retry", "first")
        eventually(lambda: ran(stage, key))
        last = task.delay(key, "wait", "last")
        stage.see_deferred(last)
        stage.log.with_name(key).touch()
        see_revoked(Revoked(first, last.id))
        assert last.get(timeout=60) == "last"
        assert ran(stage, key) == ["first", "last"]

    def test_its_countdown_is_no_new_send(self, stage: Stage, key: str) -> None:
        task = stage.tasks.newest
        for wrong in ({"countdown": 5}, {"eta": dt.datetime(2040, 1, 1)}):
            with pytest.raises(SettingsError, match=r'(countdown|eta)=.*on_duplicate="newest"'):
                task.apply_async((key,), **wrong)
        assert not windows(stage, key)
        plain: Any = {"unique_for": None, "on_duplicate": "existing"}
        one = task.apply_async((key, "", "plain"), countdown=0.1, lock=plain)
        assert one.get(timeout=60) == "plain"


def test_what_a_canvas_waits_for_is_outside_of_the_order(stage: Stage, key: str) -> None:
    task = stage.tasks.newest
    with task.lock_for(key, wait=60):
        queued = task.delay(key, "", "queued")
        members = group(task.si(key, "", "a"), task.si(key, "", "b"))()
        steps = chain(task.si(key, "", "c"), task.si(key, "", "d"))()
        own = task.apply_async((key, "", "own"), task_id=f"{key}-own")
        stage.see_deferred(queued)
    assert members.get(timeout=60) == ["a", "b"]
    assert [one.get(timeout=60) for one in (steps, own, queued)] == ["d", "own", "queued"]
    assert sorted(ran(stage, key)) == ["a", "b", "c", "d", "own", "queued"]


def test_a_send_by_name_takes_the_place_of_the_queued_one(stage: Stage, key: str) -> None:
    task = stage.tasks.newest
    how: Any = {"unique_for": 600, "unique_until": "started", "on_duplicate": "newest"}
    with task.lock_for(key, wait=60):
        first = task.delay(key, "", "first")
        last = send_unique(stage.app, task.name, (key, "", "last"), resource=f"u:{key}", **how)
    assert last.get(timeout=60) == "last"
    see_revoked(Revoked(first, last.id))
    assert ran(stage, key) == ["last"]


def test_what_expires_or_is_revoked_leaves_its_place(stage: Stage, key: str) -> None:
    task = stage.tasks.newest_late
    with task.lock_for(key, wait=60):
        first = task.delay(key, "", "first")
        stage.see_deferred(first)
        first.revoke()
        with pytest.raises(TaskRevokedError):
            first.get(timeout=60)
        see_window_end(stage, key)
        soon = task.apply_async((key, "", "soon"), expires=1)
        with pytest.raises(TaskRevokedError):
            soon.get(timeout=60)
        last = task.delay(key, "", "last")
    assert last.get(timeout=60) == "last"
    assert ran(stage, key) == ["last"]


def test_what_is_revoked_under_its_lock_ends_no_earlier_message(stage: Stage, key: str) -> None:
    """As a redelivery, of which only the lock shows that no other delivery runs."""
    first, early = hold_back(stage, "newest_late", key, "", "first")
    for node in stage.nodes:
        for claim in windows(stage, key):
            node.client().delete(claim)
    second, late = hold_back(stage, "newest_late", key, "", "second")
    payload = json.loads(late)
    payload["headers"]["expires"] = (utc_now() - dt.timedelta(seconds=1)).isoformat()
    deliver(stage, json.dumps(payload))
    with pytest.raises(TaskRevokedError, match="expired"):
        second.get(timeout=60)
    deliver(stage, early, flagged=False)
    assert first.get(timeout=60) == "first"
    assert ran(stage, key) == ["first"]


class Pace(NamedTuple):
    """Of a steady stream, in s. lasts: its length. pause: between sends. run: of a body."""

    lasts: float
    pause: float
    run: float
    unique_for: float


PACES = {
    "short": Pace(lasts=24.0, pause=0.25, run=3.0, unique_for=2.0),
    "full": Pace(lasts=300.0, pause=1.0, run=20.0, unique_for=600.0),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("pool", pools("threads", every=["prefork", "threads"]))
def test_a_steady_stream_neither_starves_nor_piles_up(of_pool: Standing, key: str) -> None:
    """`CELERY_REDLOCK_STREAM=full`: for five minutes, with bursts of 60 s."""
    stage, pace = of_pool.stage, PACES[os.environ.get("CELERY_REDLOCK_STREAM", "short")]
    task, sent, most = stage.tasks.newest_paced, dict[str, int](), 0
    for value in ticks(pace):
        options = {"unique_for": pace.unique_for}
        result = task.apply_async((key, pace.run, value), lock=options)
        sent[result.id] = value
        settle(redlock_of(stage.app))
        most = max(most, len(waiting(stage, task.name, key, sent)))
    assert AsyncResult(max(sent, key=sent.__getitem__), app=stage.app).get(timeout=120) == value
    see_drained(stage)
    began, ended = (
        [line for line in stage.lines(what) if line.key == key] for what in ("paced", "paced end")
    )
    values = [line.more["value"] for line in began]
    assert values == sorted(values)
    assert values[-1] == value
    spans = [(one.at, other.at) for one, other in zip(began, ended, strict=True)]
    assert not overlaps(spans)
    assert most <= 2
    idle = [other[0] - one[1] for one, other in itertools.pairwise(spans)]
    assert max(idle) < pace.run
    assert len(values) >= pace.lasts / pace.run / 2
    states = [status(stage, AsyncResult(one, app=stage.app)) for one in sent]
    assert states.count("SUCCESS") == len(values)
    assert states.count("REVOKED") == len(sent) - len(values)


@pytest.fixture(
    params=["prefork", pytest.param("threads", marks=pytest.mark.xdist_group("threads"))]
)
def pool(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ticks(pace: Pace) -> Iterator[int]:
    ends = time.monotonic() + pace.lasts
    for value in range(10**6):
        if time.monotonic() > ends:
            return
        yield value
        time.sleep(pace.pause)


def waiting(stage: Stage, name: str, key: str, sent: dict[str, int]) -> list[str]:
    """Return the messages that may still run: neither replaced, nor before a run that has started.

    They are dropped once they are dispatched.
    """
    keys = [completion_key("redlock", str(RunId(task_id, name))) for task_id in sent]
    marks = stage.nodes[0].client().mget(keys)
    left = [one for one, mark in zip(sent, marks, strict=True) if mark is None]
    order = order_key("redlock", unique_name(name, (f"u:{key}",)))
    orders = [str(node.client().get(order)) for node in stage.nodes]
    started = max(sent.get(one.split("\n")[0].split(" ")[2], -1) for one in orders)
    return [one for one in left if sent[one] > started]
