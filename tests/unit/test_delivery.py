"""What a delivery answers: facts of its request, and nothing that needs a server."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from celery.utils.imports import symbol_by_name
from freezegun import freeze_time
from hypothesis import given
from hypothesis import strategies as st

from celery_redlock.tasks.delivery.delivery import (
    RUN_STATE,
    SEEN,
    Delivery,
    RunState,
    header_of,
    own_headers,
    seen_of,
)
from celery_redlock.tasks.delivery.header import (
    CLOCK_TOLERANCE,
    NO_HEADER,
    Deferral,
    LockHeader,
    hop_of,
)
from celery_redlock.tasks.delivery.republish import own_properties, publish
from celery_redlock.tasks.delivery.route import Route, whole_seconds
from celery_redlock.tasks.execution.completion_markers import completion_marker
from celery_redlock.tasks.execution.run import lock_of_run, run_of
from celery_redlock.tasks.task import REQUEST, LockedTask, keep_arguments
from celery_redlock.tasks.worker_request import Request

PAST = "2026-01-01T00:00:00+00:00"
DEFERRED = LockHeader(deferral=Deferral(1, 1.7e9, 1.7e9))


def delivery_of(
    header: LockHeader | None = None, *, acks_late: bool = False, **request: Any
) -> Delivery:
    app = Celery("unit", broker="memory://", set_as_current=False)
    task = SimpleNamespace(name="t", acks_late=acks_late, app=app)
    fields = {"id": "1", "delivery_info": {"exchange": "", "routing_key": "celery"}, **request}
    if header is not None:
        fields["redlock"] = header.to_message()
    return Delivery(task, Context(fields))


def test_a_first_delivery_without_a_header_that_acknowledges_early_has_no_other() -> None:
    plain = delivery_of()
    assert plain.header is NO_HEADER
    assert not plain.is_for_another_queue
    assert plain.cancelled is None
    assert not plain.may_have_run_elsewhere
    assert not plain.is_redelivered
    assert completion_marker(plain, 60.0, is_unique=False) is None
    assert completion_marker(delivery_of(acks_late=True), 60.0, is_unique=False) is not None


def test_a_header_of_an_eager_call_is_among_the_others() -> None:
    eager = delivery_of(headers={"redlock": {"options": {"ttl": 9}}}, is_eager=True)
    assert eager.header.options == {"ttl": 9}


@pytest.mark.parametrize("acks_late", [True, False])
def test_only_a_task_that_acknowledges_late_heeds_the_brokers_redelivered_flag(
    acks_late: bool,
) -> None:
    info = {"exchange": "", "redelivered": True}
    assert delivery_of(acks_late=acks_late, delivery_info=info).is_redelivered == acks_late
    eager = delivery_of(acks_late=True, delivery_info=info, is_eager=True)
    assert not eager.is_redelivered


@pytest.mark.parametrize(
    ("header", "expires", "acks_late", "cancelled"),
    [
        (None, PAST, True, "expired"),  # since the main process gave it to its pool
        (None, PAST, False, "expired"),
        (DEFERRED, PAST, True, "expired"),
        (DEFERRED, None, True, None),
        (DEFERRED, PAST, False, "expired"),
        (DEFERRED.revoked(), None, True, "revoked"),
        (DEFERRED.revoked(), PAST, True, "revoked"),
        (LockHeader(is_flagged=True), PAST, True, "expired"),
    ],
)
def test_a_message_says_why_it_is_not_to_run(
    header: LockHeader | None, expires: str | None, acks_late: bool, cancelled: str | None
) -> None:
    assert delivery_of(header, acks_late=acks_late, expires=expires).cancelled == cancelled


STAMPED = {"stamped_headers": ["of", "by"], "stamps": {"of": ["shop"], "by": "ann"}}


@pytest.mark.parametrize("acks_late", [True, False])
@pytest.mark.parametrize(
    ("stamps", "cancelled"),
    [
        ({"of": ["shop", "other"]}, "revoked"), ({"by": ["ann"]}, "revoked"),
        ({"of": ["other"]}, None), ({"tenant": ["shop"]}, None),
    ],
)  # fmt: skip
def test_a_run_in_the_workers_own_process_asks_whether_its_message_was_revoked_meanwhile(
    monkeypatch: pytest.MonkeyPatch, stamps: dict[str, Any], cancelled: str | None, acks_late: bool
) -> None:
    by_id, by_stamp = (delivery_of(acks_late=acks_late, **fields) for fields in ({}, STAMPED))
    eager = delivery_of(is_eager=True, **STAMPED)
    monkeypatch.setattr("celery.worker.state.revoked_stamps", stamps)
    assert (by_id.cancelled, by_stamp.cancelled, eager.cancelled) == (None, cancelled, None)
    monkeypatch.setattr("celery.worker.state.revoked", {"1"})
    assert (by_id.cancelled, by_stamp.cancelled, eager.cancelled) == ("revoked", "revoked", None)


@pytest.mark.parametrize("acks_late", [True, False])
def test_a_message_that_comes_back_may_be_shown_as_deferred(acks_late: bool) -> None:
    """It may have been deferred without a try, in the memory of a worker that has died since."""
    info = {"exchange": "", "redelivered": True}
    assert delivery_of(acks_late=acks_late, delivery_info=info).was_deferred
    assert delivery_of(LockHeader(waits=1)).was_deferred
    assert delivery_of(DEFERRED).was_deferred
    assert not delivery_of(acks_late=acks_late).was_deferred


class Pool:
    """A pool that is asked to end a run; uses_semaphore: as prefork's, its slots are processes."""

    def __init__(self, *, uses_semaphore: bool) -> None:
        self.uses_semaphore, self.ended = uses_semaphore, list[int]()

    def terminate_job(self, pid: int, signal: object = None) -> None:
        self.ended.append(pid)


def test_only_a_run_that_has_begun_or_will_in_a_child_is_ended_by_a_signal() -> None:
    job = SimpleNamespace(terminate=lambda signal: None)
    for uses_semaphore in (True, False):
        pool, request = Pool(uses_semaphore=uses_semaphore), request_of({})
        request.terminate(pool)  # it waits here: it is asked for before it goes to the pool
        assert request._terminate_on_ack is None
        request._apply_result = lambda: job
        request.terminate(pool)
        assert (request._terminate_on_ack is not None) == uses_semaphore
        assert pool.ended == []


def test_expires_is_counted_from_now_and_is_endless_without_one() -> None:
    assert delivery_of().expires_in == math.inf
    with freeze_time("2026-01-01 00:01:00"):
        assert delivery_of(expires=PAST).expires_in == -60.0


@pytest.mark.parametrize(
    ("kept_for", "came_by", "is_astray"),
    [("a", "a", False), ("a", "b", True), ("a", None, False), (None, "b", False)],
)
def test_a_copy_that_rabbitmq_brings_to_another_queue_is_told_by_its_header(
    kept_for: str | None, came_by: str | None, is_astray: bool
) -> None:
    origin = Route("x", "k", kept_for)
    properties = {} if came_by is None else {SEEN: {"queue": came_by}}
    info = {"exchange": "celery_delayed_delivery", "routing_key": "k"}
    header = replace(DEFERRED, origin=origin)
    found = delivery_of(header, delivery_info=info, properties=properties)
    assert found.is_for_another_queue == is_astray
    by_other_exchange = delivery_of(header, properties=properties)
    assert not by_other_exchange.is_for_another_queue


def test_an_eager_run_has_no_message_to_republish() -> None:
    assert delivery_of().can_republish
    assert not delivery_of(is_eager=True).can_republish


def test_the_name_by_which_workers_import_the_request_is_that_of_our_class() -> None:
    assert symbol_by_name(REQUEST) is Request


class Broken(dict[str, Any]):
    """A header that an error of ours could not read."""

    def get(self, name: str, default: Any = None) -> Any:
        raise RuntimeError(name)


def test_a_message_whose_header_cannot_be_read_goes_on_without_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    request = request_of({"redlock": Broken(options={"key": False})})
    assert "cannot read the lock header of t[1]" in caplog.text
    assert "redlock" not in request.request_dict
    assert request.delivery.header is NO_HEADER
    assert not request.revoked()


class Counted(dict[str, Any]):
    """A header that counts how often it is read."""

    reads = 0

    def get(self, name: str, default: Any = None) -> Any:
        self.reads += name == "id"
        return super().get(name, default)


def test_a_workers_main_process_reads_a_header_once_until_it_writes_another() -> None:
    carried = Counted(replace(DEFERRED, id="1").to_message())
    request = request_of({"redlock": carried})
    for _ in range(3):
        came = request.delivery
        assert came.header == header_of(came.request) == replace(DEFERRED, id="1")
    assert carried.reads == 1
    request.carry(came.header.deferred(came.request, Deferral(2, 1.7e9, 1.7e9 + 9)))
    assert request.delivery.header.deferral.count == 2


def test_a_run_reads_the_header_of_its_message_once() -> None:
    app = Celery("unit", broker="memory://", set_as_current=False)
    app.conf.redlock_nodes = ["redis://nowhere"]

    @app.task(base=LockedTask, name="t", shared=False)
    def body(key: str) -> None: ...

    task = app.tasks["t"]
    carried = Counted(replace(DEFERRED, id="1").to_message())
    task.request_stack.push(Context({"id": "1", "redlock": carried}, called_directly=False))
    keep_arguments(task, ("k",), {})
    assert Delivery(task, task.request).header.deferral.count == 1
    assert header_of(task.request).deferral.count == 1
    assert carried.reads == 1


@pytest.mark.parametrize("name", ["queue", "received", "nested", "named_at", "has_room"])
@pytest.mark.parametrize("value", [["x"], "elsewhere", 5.0, True])
def test_what_a_worker_notes_of_a_delivery_comes_from_no_message(name: str, value: Any) -> None:
    properties = request_of({}, {SEEN: {name: value}}).request_dict["properties"]
    seen: Any = seen_of(properties)
    assert seen[name] != value


@pytest.mark.parametrize("written", [None, 5.0, "x", ["x"]])
def test_what_no_worker_has_noted_counts_as_nothing(written: Any) -> None:
    assert seen_of({SEEN: written}) == seen_of({}) == seen_of(None) == {}


def test_what_a_worker_notes_is_not_in_the_properties_that_the_broker_may_get_back() -> None:
    own = {"tenant": "a"}
    request = request_of({}, own)
    assert own == {"tenant": "a"}
    assert own_properties(request.request_dict["properties"]) == own


def test_the_copies_of_a_runs_request_share_its_state_and_send_nothing_of_it() -> None:
    request = Context({"id": "1"})
    state = RunState.of(request)
    copy = Context(**request.__dict__)  # as Celery's `push_request` makes one
    assert RunState.of(copy) is RunState.of(request) is state
    assert own_headers(copy) == {}


def test_a_retry_of_a_copied_request_sends_nothing_of_its_runs_state() -> None:
    app = Celery("unit", broker="memory://", set_as_current=False)

    @app.task(base=LockedTask, lock_key=False, name="t")
    def work() -> None: ...

    request = Context({"id": "1", "task": "t", "retries": 0})
    RunState.of(request)
    copy = Context(**request.__dict__)  # as a body's own `push_request` makes one
    assert RUN_STATE in copy.headers
    assert not work.signature_from_request(copy, (), {}).options["headers"]


def test_a_header_with_the_name_of_a_runs_state_is_none() -> None:
    request = Context({"id": "1", RUN_STATE: "x", "own": "y"})
    assert run_of(request) is lock_of_run(request) is None
    assert own_headers(request) == {"own": "y"}
    assert RunState.of(request).locked_run is None
    assert RunState.of(request) is RunState.of(request)


def request_of(
    headers: dict[str, Any], properties: dict[str, Any] | None = None, *,
    info: dict[str, Any] | None = None, acks_late: bool = False,
) -> Request:  # fmt: skip
    app = Celery("unit", broker="memory://", set_as_default=False)
    task = SimpleNamespace(name="t", acks_late=acks_late, ignore_result=False, app=app)
    message = SimpleNamespace(
        headers={"id": "1", "task": "t", "eta": PAST, **headers}, properties=properties or {},
        delivery_info=info or {}, body=b"", payload=((), {}, {}),
        content_type="", content_encoding="", delivery_tag="1",
    )  # fmt: skip
    return Request(message, app=app, task=task)


def test_a_revocation_that_is_left_to_the_run_survives_in_a_retry_that_is_redelivered() -> None:
    info = {"exchange": "", "routing_key": "celery", "redelivered": True}
    in_main = delivery_of(acks_late=True, retries=2, delivery_info=info)
    header = in_main.header.revoked()
    in_child = delivery_of(header, acks_late=True, retries=2, delivery_info=info)
    assert in_child.cancelled == "revoked"


DEAD_LETTERED = {"x-death": [{"queue": "parked", "reason": "expired", "count": 1}]}


def test_a_dead_lettered_message_that_waits_in_its_worker_keeps_its_deferrals_and_its_run() -> None:
    request = request_of(DEAD_LETTERED)
    came = request.delivery
    for count in (1, 2):
        deferral = Deferral(count, 1.7e9, 1.7e9 + count, 5.0, "a", ("a",))
        delivery = request.delivery
        header = delivery.header.deferred(delivery.request, deferral)
        request.carry(header)
        assert request.delivery.header == header
    assert request.delivery.run_id == came.run_id


def test_a_dead_lettered_message_that_is_revoked_stays_the_run_that_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("celery.worker.request.revoked_tasks", {"1"})
    request = request_of(DEAD_LETTERED, info={"redelivered": True}, acks_late=True)
    came = request.delivery
    assert not request.revoked()
    in_child = Delivery(request.task, Context(request.request_dict))
    assert in_child.header.is_revoked
    assert in_child.run_id == came.run_id


def test_a_delivery_is_shown_as_celery_shows_a_task() -> None:
    assert f"{delivery_of()} {delivery_of()!r}" == "t[1] t[1]"


@given(st.floats(0.1, 5_000.0), st.floats(4.0, 900.0))
def test_a_message_that_goes_in_hops_is_never_early(left: float, longest: float) -> None:
    """It runs if no more is left than two processes differ in the time of the nodes."""
    left -= hop_of(left, longest)  # of the send, to the second or not
    while left > CLOCK_TOLERANCE:
        hop = whole_seconds(hop_of(left, longest))
        assert hop <= longest + 1
        left -= hop
    assert left <= 1e-6


@pytest.mark.parametrize(
    "name",
    [
        *("delivery_tag", "delivery_info", "body_encoding", "content_type", "priority"),
        *("expiration", "MessageDeduplicationId", SEEN, "routing_key", "queue"),
    ],
)
def test_a_message_is_put_back_without_what_its_transport_or_its_worker_noted(name: str) -> None:
    assert own_properties({name: "x", "tenant": "a", "type": None}) == {"tenant": "a"}


@pytest.mark.parametrize("protocol", [1, 2])
def test_expires_goes_out_again_as_each_protocol_takes_it(protocol: int) -> None:
    """Before 5.7 Celery makes a text of it for protocol 1, and passes one on for protocol 2."""
    app = Celery("unit", broker="memory://", set_as_current=False)
    app.conf.task_protocol, taken = protocol, list[Any]()
    own = f"protocol {protocol}"  # the queues of memory:// are those of the process

    @app.task(name="t", shared=False)
    def task() -> None: ...

    fields = {
        "id": "1",
        "delivery_info": {"exchange": "", "routing_key": own},
        "expires": PAST,
    }
    make = app.amqp.task_protocols[protocol]

    def note(*args: Any, **options: Any) -> Any:
        taken.append(options["expires"])
        return make(*args, **options)

    app.amqp.create_task_message = note
    publish(Delivery(task, Context(fields, args=(), kwargs={})), DEFERRED, 1.0)
    with app.connection() as broker, broker.SimpleQueue(own) as queue:
        message = queue.get(timeout=10)
        message.ack()
    embedded = message.payload if protocol == 1 else message.headers
    assert embedded["expires"] == PAST
    assert taken == [datetime.fromisoformat(PAST) if protocol == 1 else PAST]
