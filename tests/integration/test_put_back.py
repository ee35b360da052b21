"""A message is put back, or stays where it is: whatever dies or refuses there, none is lost."""

from __future__ import annotations

import datetime as dt
import json
import logging
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from billiard.pool import soft_timeout_sighandler
from celery.app.task import Context
from celery.exceptions import SoftTimeLimitExceeded

from celery_redlock.tasks.delivery.delivery import Delivery, utc_now
from celery_redlock.tasks.delivery.header import Deferral, LockHeader
from celery_redlock.tasks.delivery.republish import republish
from celery_redlock.testing import EmbeddedNode, hold
from tests.conftest import Nodes, eventually
from tests.integration.conftest import MakeStage, Stage
from tests.integration.deliveries import QUEUE, deliver, messages_of, run_here, see_drained

VISIBILITY = 2  # s
DROPPED = "another delivery of its message has finished"


@pytest.mark.slow
@pytest.mark.every_celery
@pytest.mark.parametrize("late", [True, False], ids=["acks late", "acks early"])
def test_a_worker_that_dies_between_putting_back_and_acknowledging_makes_no_second_run(
    make_stage: MakeStage, nodes: Nodes, late: bool
) -> None:
    options = {"visibility_timeout": VISIBILITY}
    stage = make_stage(nodes, broker_transport_options=options)
    task = stage.tasks.late if late else stage.tasks.work
    client = stage.broker.client()
    first = stage.worker("w1", concurrency=1)
    with task.lock_for("k", wait=60):
        result = task.apply_async(("k",), lock={"wait": 8.0})
        eventually(lambda: "received" in first.output())
        if not late:
            # its hands are to be full: kombu loses a message of which it dies in the act of taking
            stage.tasks.add.delay()
        eventually(lambda: client.hlen("unacked") == 1 and not client.exists(QUEUE))
        stage.log.with_name("die").touch()
        eventually(lambda: not stage.log.with_name("die").exists())
        first.kill()
        assert client.llen(QUEUE) == 1  # the copy
        [(_, taken_at)] = client.zrange("unacked_index", 0, -1, withscores=True)
        eventually(lambda: client.time()[0] > taken_at + VISIBILITY + 1)
        second = stage.worker("w2", concurrency=2)  # whose consumer gives back what is not acked
        eventually(lambda: second.output().count("] deferred: ") >= 2)
    assert result.get(timeout=120) == 0
    if late:
        eventually(lambda: DROPPED in second.output())
    see_drained(stage)
    assert len(stage.lines("begin")) == 1
    assert stage.info(result)["status"] == "SUCCESS"


def test_what_stayed_with_the_broker_is_not_shown_as_deferred_while_it_runs(stage: Stage) -> None:
    """As where it could not be put back: the slip that would tell of the deferral is not there."""
    task = stage.tasks.until
    result = task.delay("k", "go")
    message = messages_of(stage)[result.id]
    stage.broker.client().delete(QUEUE)
    task.backend.store_result(result.id, {"deferrals": 1}, "DEFERRED")
    deliver(stage, message)
    stage.worker(concurrency=1)
    stage.wait_for("begin")
    assert stage.info(result)["status"] == "STARTED"
    stage.log.with_name("go").touch()
    assert result.get(timeout=120)


def request_of(task: Any) -> Context:
    delivery = {"exchange": "", "routing_key": QUEUE}
    fields = {"id": str(uuid.uuid4()), "args": ("k",), "kwargs": {}, "retries": 0}
    return Context({**fields, "delivery_info": delivery}, called_directly=False)


def test_what_is_put_back_comes_after_its_countdown(stage: Stage) -> None:
    task, before, hour = stage.tasks.work, utc_now(), dt.timedelta(hours=1)
    request = request_of(task)
    header = LockHeader(
        id=request.id, deferral=Deferral(1, before.timestamp(), before.timestamp(), 3600.0)
    )
    republish(Delivery(task, request), header, 3600.0)
    comes = json.loads(messages_of(stage)[request.id])["headers"]["eta"]
    assert before + hour <= dt.datetime.fromisoformat(comes) <= utc_now() + hour


def test_early_acknowledged_what_is_published_twice_runs_once(stage: Stage) -> None:
    """As where a connection breaks that had carried it, and the broker's word on it is lost."""
    task = stage.tasks.work
    request = request_of(task)
    delivery, now = Delivery(task, request), utc_now().timestamp()
    header = LockHeader(id=request.id, deferral=Deferral(1, now, now, 0.1))
    with task.lock_for("k", wait=60):
        republish(delivery, header, 0.1)
        republish(delivery, header, 0.1)
        worker = stage.worker(concurrency=2)
        eventually(lambda: worker.output().count("] deferred: ") >= 2)
    eventually(lambda: DROPPED in worker.output())
    see_drained(stage)
    assert len(stage.lines("begin")) == 1
    assert task.AsyncResult(request.id).get(timeout=120) == 0  # stored after the release


@contextmanager
def raising(error: BaseException, also: Callable[[], object]) -> Iterator[list[str]]:
    """Let a signal raise an error as the first failure to republish is logged; gives the texts."""
    said: list[str] = []

    class Strike(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            if len(said) == 1:
                also()
                os.kill(os.getpid(), signal.SIGUSR1)

    def strike(number: int, frame: object) -> None:
        raise error

    logger = logging.getLogger("celery_redlock.tasks")
    before, handler = signal.signal(signal.SIGUSR1, strike), Strike()
    handler.addFilter(lambda record: record.__dict__.get("event") == "republish_failed")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def away(make_stage: MakeStage, nodes: Nodes) -> Iterator[tuple[Stage, EmbeddedNode]]:
    with EmbeddedNode() as broker:
        # else Celery's events, which nobody hears, try for seconds to connect
        soon = {"max_retries": 1, "interval_start": 0.0, "interval_max": 0.0}
        conf = {"result_backend": nodes[0].url, "broker_transport_options": soon}
        stage = make_stage(nodes, broker, **conf)
        broker.kill()
        yield stage, broker


def run_refused(task: Any, **fields: Any) -> tuple[str, Any, dict[str, Any]]:
    """Run a message here while another one has its lock.

    fields: of the message. Returns the state and the error that the worker hears of, and what is
    stored in the end.
    """
    task_id = fields.setdefault("id", str(uuid.uuid4()))
    with hold("k:k", on=task.app):
        ended = run_here(task, "k", **fields)
    stored = task.backend.get_task_meta(task_id, cache=False)
    return ended.info.state, ended.info.retval, stored


@pytest.mark.slow
def test_early_acknowledged_it_is_tried_until_the_broker_is_back_soft_limit_or_not(
    away: tuple[Stage, EmbeddedNode],
) -> None:
    stage, broker = away
    with raising(SoftTimeLimitExceeded(), also=broker.start) as said:
        state, _, stored = run_refused(stage.tasks.work)
    assert said
    assert (state, stored["status"]) == ("IGNORED", "DEFERRED")
    assert broker.client().llen(QUEUE) == 1


def test_early_acknowledged_a_soft_limit_in_the_middle_of_it_makes_no_second_message(
    make_stage: MakeStage, nodes: Nodes
) -> None:
    here = threading.get_ident()

    def waits_for_the_broker() -> bool:
        frame = sys._current_frames()[here]
        return frame.f_code.co_name.endswith("read_from_socket")  # redis-py's, by either parser

    def interrupt() -> None:
        try:
            eventually(waits_for_the_broker)
            signal.pthread_kill(here, signal.SIGUSR1)
        finally:
            broker.resume()

    with EmbeddedNode() as broker:
        stage = make_stage(nodes, broker, result_backend=nodes[0].url)
        task = stage.tasks.work
        republish(Delivery(task, request_of(task)), LockHeader(), 0.1)  # so that it is connected
        broker.pause()
        handler, thread = soft_timeout_sighandler, threading.Thread(target=interrupt)
        before = signal.signal(signal.SIGUSR1, handler)
        thread.start()
        try:
            republish(Delivery(task, request_of(task)), LockHeader(), 0.1)
        finally:
            thread.join()
            assert signal.signal(signal.SIGUSR1, before) is handler
        assert broker.client().llen(QUEUE) == 2


@pytest.mark.filterwarnings("ignore:Call to deprecated:DeprecationWarning")  # of Celery's backend
def test_early_acknowledged_a_connection_that_is_only_half_closed_is_left_for_a_new_one(
    stage: Stage,
) -> None:
    """As kombu's Redis transport leaves one that breaks while it is made anew."""
    task = stage.tasks.work
    with stage.app.producer_or_acquire() as producer:
        producer.channel.connection = producer.channel._pool = None
    republish(Delivery(task, request_of(task)), LockHeader(), 0.1)
    assert stage.broker.client().llen(QUEUE) == 1


@pytest.mark.slow
def test_early_acknowledged_it_ends_as_failure_where_the_worker_stops(
    away: tuple[Stage, EmbeddedNode],
) -> None:
    stage, _ = away
    task, task_id = stage.tasks.work, str(uuid.uuid4())
    with raising(SystemExit(), also=lambda: None), pytest.raises(SystemExit):
        run_refused(task, id=task_id)
    meta = task.backend.get_task_meta(task_id, cache=False)
    assert meta["status"] == "FAILURE"
    assert "not republished" in str(meta["result"])


NOT_TO_BE_SENT = {"headers": {"tenant": object()}}


def test_early_acknowledged_what_is_refused_for_good_is_its_end(stage: Stage) -> None:
    state, error, stored = run_refused(stage.tasks.work, **NOT_TO_BE_SENT)
    assert "not JSON serializable" in str(error)
    assert (state, stored["status"]) == ("FAILURE", "FAILURE")
    assert not stage.broker.client().exists(QUEUE)


def test_what_is_refused_for_good_is_the_end_of_its_sends_window(stage: Stage) -> None:
    task = stage.tasks.work

    def windows() -> list[str]:
        return [key for node in stage.nodes for key in node.client().keys("*:unique:*")]

    task.apply_async(("k",), queue="held", lock={"unique_for": 600})
    sent = json.loads(str(stage.broker.client().rpop("held")))["headers"]
    assert windows()
    fields = {"id": sent["id"], "redlock": sent["redlock"], **NOT_TO_BE_SENT}
    assert run_refused(task, **fields)[0] == "FAILURE"
    eventually(lambda: not windows())


def test_late_acknowledged_it_stays_with_the_broker_that_is_away(
    away: tuple[Stage, EmbeddedNode],
) -> None:
    stage, _ = away
    state, error, stored = run_refused(stage.tasks.late)
    assert (state, stored["status"]) == ("REJECTED", "DEFERRED")
    assert error.requeue


def test_late_acknowledged_it_stays_with_the_broker_that_refuses_or_at_a_soft_limit(
    stage: Stage,
) -> None:
    task = stage.tasks.late
    assert [run_refused(task, **NOT_TO_BE_SENT)[1].requeue] == [True]
    with raising(SoftTimeLimitExceeded(), also=lambda: None) as said:
        state, error, _ = run_refused(task, **NOT_TO_BE_SENT)
    assert (state, error.requeue) == ("REJECTED", True)
    assert said
