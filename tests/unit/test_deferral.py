from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from billiard.einfo import ExceptionInfo
from celery import Celery
from celery.app.task import Context
from celery.exceptions import Ignore, Reject
from celery.utils.serialization import get_pickleable_exception
from freezegun import freeze_time
from kombu import Exchange, Queue
from kombu.exceptions import OperationalError
from kombu.serialization import dumps, loads

from celery_redlock.tasks.delivery import republish as republish_module
from celery_redlock.tasks.delivery.delivery import RECEIVED, Delivery, received_at, utc_now
from celery_redlock.tasks.delivery.header import (
    CLOCKS_DIFFER,
    NEVER_DEFERRED,
    Deferral,
    LockHeader,
    Origin,
    Redelivery,
    Wait,
)
from celery_redlock.tasks.delivery.republish import (
    LONGEST_PAUSE,
    Requeue,
    own_serializer,
    republish,
)
from celery_redlock.tasks.delivery.route import Route, send_options, supported_countdown
from celery_redlock.tasks.execution.outcomes import Deferred

STRANGE: dict[str, dict[str, Any]] = {
    "deferral": {"count": "3", "since": "yesterday", "delay": "1"},
    "redelivery": {"by_broker": 1, "waits": []},
    "wait": {
        "resources": None, "refused_by": 8, "refused_at": "now", "limit": "3",
        "waits_for_release": None, "reason": 5, "countdown": "soon",
    },
    "origin": {"exchange": 5, "routing_key": None, "queue": 6},
}  # fmt: skip
STRANGE_FIELDS = {"options": [], "retries": None, "id": 7, "is_revoked": "no", "unique": "u"}
PARTS: dict[str, type] = {
    "deferral": Deferral, "redelivery": Redelivery, "wait": Wait, "origin": Origin,
}  # fmt: skip


def request(header: Any, **fields: Any) -> Context:
    return Context({"redlock": header, "retries": 0, "id": "1", **fields}, called_directly=False)


def deferred(
    header: LockHeader, now: datetime, delay: float = 1.0, task_id: str | None = None
) -> LockHeader:
    """Return the header after one more deferral."""
    return replace(header, deferral=header.deferral.next(now, delay), id=task_id)


def test_a_first_delivery_was_never_deferred() -> None:
    assert LockHeader.of(Context({"id": "1"})).deferral == NEVER_DEFERRED
    assert NEVER_DEFERRED.waited(utc_now()) == 0.0


def test_each_field_of_the_header_has_a_strange_value() -> None:
    assert {*STRANGE, *STRANGE_FIELDS} == set(LockHeader.__dataclass_fields__)
    for name, part in PARTS.items():
        assert set(STRANGE[name]) == set(part.__dataclass_fields__)


@pytest.mark.parametrize(("name", "value"), [*STRANGE_FIELDS.items(), *((n, 7) for n in STRANGE)])
def test_a_field_that_a_stranger_wrote_counts_as_absent(name: str, value: Any) -> None:
    for written in (value, None):
        assert LockHeader.of(request({name: written})) == LockHeader()


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [(part, name, value) for part, fields in STRANGE.items() for name, value in fields.items()]
    + [("deferral", "since", "2026-01-01"), ("wait", "resources", "k")],
)
def test_a_field_of_a_part_that_a_stranger_wrote_counts_as_absent(
    part: str, name: str, value: Any
) -> None:
    for written in (value, None):
        header = LockHeader.of(request({part: {name: written}}))
        assert getattr(header, part) in (getattr(LockHeader(), part), PARTS[part]())
        assert header.ran_after() is None


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_no_lock_can_have_counts_as_absent(limit: int) -> None:
    wait = LockHeader.of(request({"wait": {"resources": ["a"], "limit": limit}})).wait
    assert wait == Wait(("a",))


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_the_header_comes_through_a_message(serializer: str) -> None:
    wait = Wait(("a", "b"), "a", 17.5, 2, True)
    full = LockHeader(
        {"ttl": 9}, "1", 0, True, redelivery=Redelivery(True, 2), wait=wait,
        origin=Origin("x", "k", "q"), unique={"name": "n"},
    )  # fmt: skip
    for header in (deferred(LockHeader({"ttl": 9}), utc_now(), 1.5), full, LockHeader()):
        content_type, encoding, body = dumps(header.to_message(), serializer)
        back = loads(body, content_type, encoding, accept=[content_type])
        assert LockHeader.of(request(back)) == header


def test_the_wait_counts_from_the_first_try_by_the_wall_clock() -> None:
    with freeze_time("2026-01-01 12:00:00") as clock:
        deferral = NEVER_DEFERRED.next(utc_now(), 1.0)
        clock.tick(5)
        deferral = deferral.next(utc_now(), 2.0)
        clock.tick(5)
        assert (deferral.count, deferral.waited(utc_now()), deferral.delay) == (2, 10.0, 2.0)


def test_a_clock_that_was_set_back_never_makes_the_wait_negative() -> None:
    with freeze_time("2026-01-01 12:00:00") as clock:
        deferral = NEVER_DEFERRED.next(utc_now(), 1.0)
        clock.move_to("2026-01-01 11:00:00")
        assert deferral.waited(utc_now()) == 0.0


def test_a_real_retry_starts_counting_anew_and_keeps_the_calls_options() -> None:
    header = deferred(LockHeader({"ttl": 9}), utc_now())
    again = LockHeader.of(request(header.to_message(), retries=1))
    assert again == LockHeader({"ttl": 9})


def test_the_claim_of_a_send_goes_on_through_deferrals_redeliveries_and_retries() -> None:
    carried = {"name": "t:k", "token": "T", "until": "finished"}
    header = LockHeader(id="1", unique=carried)
    assert header.waiting_for_first_delivery(0, "1").unique == carried
    for republished in (
        deferred(header, utc_now(), task_id="1"),
        header.waiting_for_first_delivery(0, "1"),
    ):
        message = republished.to_message()
        assert LockHeader.of(request(message, retries=1)).unique == carried


def test_a_child_that_inherits_its_parents_headers_does_not_inherit_the_lock_header() -> None:
    parents = deferred(LockHeader({"key": False}), utc_now(), task_id="parent").to_message()
    assert LockHeader.of(request(parents, id="child")) == LockHeader()
    assert LockHeader.of(request(parents, id="parent")).deferral.count == 1


@pytest.mark.parametrize("header", ["text", 7, ["x"], None])
def test_a_strangers_header_counts_as_nothing(header: Any) -> None:
    assert LockHeader.of(request(header)) == LockHeader()


def test_an_eager_call_carries_its_header_among_the_others() -> None:
    eager = Context({"id": "1", "headers": {"redlock": {"options": {"ttl": 9}}}, "retries": 0})
    assert LockHeader.of(eager).options == {"ttl": 9}


def test_a_requeue_is_a_reject_that_autoretry_lets_pass() -> None:
    error = Requeue(OSError("broker away"), requeue=True)
    assert isinstance(error, Reject)
    assert isinstance(error, Ignore)
    assert error.requeue


@pytest.mark.parametrize("expires_in", [2.5, None])
@pytest.mark.parametrize("holder", ["pid 7 on host", ""])
def test_what_ends_a_deferred_run_comes_through_to_the_main_process_as_it_was(
    holder: str, expires_in: float | None
) -> None:
    error = Deferred("stock:7", holder, expires_in, 3)
    try:
        raise error
    except Ignore:
        info = ExceptionInfo(internal=True)
    protocols = range(pickle.HIGHEST_PROTOCOL + 1)
    back = [pickle.loads(pickle.dumps(error, protocol)) for protocol in protocols]
    back += [copy.copy(error), pickle.loads(pickle.dumps(info)).exception]
    assert get_pickleable_exception(error) is error
    for one in back:
        assert type(one) is Deferred
        assert (one.resource, one.holder, one.expires_in, one.limit) == (
            "stock:7", holder, expires_in, 3,
        )  # fmt: skip
        assert str(one) == f"deferred: held by {holder or 'an unnamed holder'}"


def test_a_broker_without_delays_of_its_own_takes_any_countdown() -> None:
    app = Celery("t", broker="memory://", set_as_default=False)
    assert supported_countdown(app, 0.05, Route("celery", "celery")) == 0.05
    home = send_options(app, Route("celery", "celery", queue="celery"), 0.05)
    assert (home["exchange"], home["routing_key"]) == ("", "celery")
    assert home["declare"] == [app.amqp.queues["celery"]]


@pytest.fixture
def quorum_app() -> Celery:
    app = Celery("t", broker="pyamqp://", set_as_default=False)
    options = {"queue_arguments": {"x-queue-type": "quorum"}}
    app.conf.task_queues = [
        Queue("celery", Exchange("tasks", "topic"), routing_key="celery", **options),
        Queue("wide", Exchange("wide", "topic"), routing_key="wide.#", **options),
        Queue("direct", Exchange("direct", "direct"), routing_key="direct", **options),
    ]
    return app


def test_a_quorum_queue_takes_whole_seconds_from_one_upwards(quorum_app: Celery) -> None:
    here = Route("tasks", "celery")
    assert [supported_countdown(quorum_app, s, here) for s in (0.05, 1.0, 1.2)] == [1.0, 1.0, 2.0]


def test_what_rabbitmq_would_not_bring_back_waits_in_the_worker(quorum_app: Celery) -> None:
    for where in (Route("direct", "direct"), Route("", "celery"), Route("tasks", "nobody")):
        assert supported_countdown(quorum_app, 0.05, where) == 0.05
        options = send_options(quorum_app, where, 0.05)
        assert (options["exchange"], options["routing_key"]) == (where.exchange, where.routing_key)
        assert (
            send_options(quorum_app, replace(where, queue="celery"), 1)["routing_key"] == "celery"
        )


def test_what_rabbitmq_keeps_goes_by_its_own_routing_key_again(quorum_app: Celery) -> None:
    options = send_options(quorum_app, Route("wide", "wide.a.b"), 2.0)
    assert options["exchange"].name == "celery_delayed_27"
    assert options["routing_key"] == f"{'0.' * 26}1.0.wide.a.b"


@pytest.mark.parametrize(
    ("queue", "declared"), [("lasting", ["lasting"]), ("passing", []), ("unknown", [])]
)
def test_a_queue_that_goes_with_its_consumer_or_that_nobody_declared_is_not_declared_anew(
    queue: str, declared: list[str]
) -> None:
    app = Celery("t", broker="memory://", set_as_default=False)
    app.conf.task_queues = [Queue("lasting"), Queue("passing", auto_delete=True)]
    home = send_options(app, Route("x", "key", queue), 1.0)
    assert (home["exchange"], home["routing_key"], home["queue"].name) == ("", queue, queue)
    assert [one.name for one in home["declare"]] == declared


@pytest.mark.parametrize(
    ("binding", "key", "fits"),
    [
        ("a.b", "a.b", True), ("a.b", "a.c", False), ("a.b", "axb", False),
        ("a.*", "a.b", True), ("a.*", "a", False), ("a.*", "a.b.c", False),
        ("a.#", "a", True), ("a.#", "a.b.c", True), ("a.#", "ab", False), ("#", "a.b", True),
    ],
)  # fmt: skip
def test_a_topic_fits_as_rabbitmq_says(binding: str, key: str, fits: bool) -> None:
    queue = Queue("q", Exchange("x", "topic"), routing_key=binding)
    assert Route("x", key).reaches(queue) is fits
    assert Route(None, key).reaches(queue) is fits
    assert not Route("y", key).reaches(queue)


def test_a_message_that_rabbitmq_kept_back_still_knows_where_it_was_sent() -> None:
    bits = "0." * 27 + "1."
    kept = {"exchange": "celery_delayed_delivery", "routing_key": f"{bits}{bits}wide.a"}
    assert Route.of(kept) == Route(None, "wide.a")
    assert Route.of(kept, "wide") == Route("wide", "wide.a")
    own = {"exchange": "", "routing_key": "0.1.slow"}
    assert Route.of(own, "wide") == Route("", "0.1.slow")


def test_a_first_delivery_asks_for_no_completion_marker() -> None:
    assert LockHeader().ran_after() is None


def test_a_message_that_the_broker_redelivers_asks_for_any_marker_from_then_on() -> None:
    header = LockHeader().redelivered()
    assert header.ran_after() == -math.inf
    assert deferred(header, utc_now(), task_id="1").ran_after() == -math.inf


def test_a_deferred_message_asks_for_markers_since_its_first_try() -> None:
    with freeze_time("2026-01-01 12:00:00") as clock:
        header = deferred(LockHeader(), utc_now(), task_id="1")
        clock.tick(60)
        header = deferred(header, utc_now(), task_id="1")
        first_try = utc_now().timestamp() - 60
    assert header.ran_after() == first_try - CLOCKS_DIFFER


@pytest.mark.parametrize(("countdown", "at"), [(None, 0), (60, 60), (-60, 0)])
def test_a_message_could_have_begun_when_it_came_or_its_countdown_was_over(
    countdown: int | None, at: int
) -> None:
    with freeze_time("2026-01-01 12:00:00"):
        now = utc_now()
        eta = None if countdown is None else now + timedelta(seconds=countdown)
        assert received_at(eta) == now.timestamp() + at


def test_of_a_message_that_no_worker_told_of_nobody_knows_when_it_came() -> None:
    assert received({"properties": {RECEIVED: "today"}}) is None
    assert received({}) is None


def received(request_dict: dict[str, Any]) -> float | None:
    """Return when a delivery was received."""
    task = SimpleNamespace(acks_late=True, name="t")
    return Delivery(task, Context(request_dict)).received_at


def test_a_redelivery_that_waits_asks_for_any_marker_and_has_deferrals_of_its_own() -> None:
    header = deferred(LockHeader({"ttl": 9}), utc_now(), task_id="1")
    for _ in range(2):
        header = header.waiting_for_first_delivery(0, "1")
    assert header == LockHeader({"ttl": 9}, id="1", redelivery=Redelivery(waits=2))
    assert header.ran_after() == -math.inf
    assert header.deferral == NEVER_DEFERRED
    assert LockHeader.of(request(header.to_message())) == header


def test_a_revoked_message_stays_so_in_every_worker_but_for_a_retry() -> None:
    header = LockHeader().redelivered().revoked().waiting_for_first_delivery(0, "1")
    assert LockHeader.of(request(header.to_message())).is_revoked
    assert not LockHeader.of(request(header.to_message(), retries=1)).is_revoked


def test_a_revoked_message_that_was_only_deferred_is_no_redelivery() -> None:
    header = deferred(LockHeader(), utc_now(), task_id="1").revoked()
    assert LockHeader.of(request(header.to_message())) == header
    assert not header.is_redelivered


def test_the_retry_of_a_redelivered_run_is_no_redelivery() -> None:
    header = LockHeader({"ttl": 9}).waiting_for_first_delivery(0, "1")
    again = LockHeader.of(request(header.to_message(), retries=1))
    assert again == LockHeader({"ttl": 9}, id="1")


def test_a_body_is_made_again_as_it_was_made() -> None:
    assert own_serializer({"content_type": "application/x-python-serialize"}) == {
        "serializer": "pickle"
    }
    assert own_serializer({"content_type": "application/x-strange"}) == {}
    assert own_serializer({}) == {}


def test_a_broker_that_is_away_for_long_is_asked_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither in a busy loop, nor ever less often: an hour's pause would outlast the outage."""
    pauses: list[float] = []
    clock = SimpleNamespace(sleep=pauses.append)
    monkeypatch.setattr(republish_module, "SystemClock", lambda: clock)
    app = Celery("t", broker="memory://", set_as_default=False)

    @app.task(name="unit.early", shared=False)
    def early() -> None: ...

    tries: list[str] = []

    def send(producer: Any, name: str, *_: Any, **__: Any) -> None:
        tries.append(name)
        if len(tries) <= 12:
            raise OperationalError("broker away")

    monkeypatch.setattr(app.amqp, "send_task_message", send)
    where = {"exchange": "", "routing_key": "away for long"}
    delivery = Delivery(early, request({}, args=(), kwargs={}, delivery_info=where))
    republish(delivery, LockHeader(), 0.1)
    assert len(tries) == 13
    assert len(pauses) == 12
    assert min(pauses) > 0
    assert max(pauses) == LONGEST_PAUSE
