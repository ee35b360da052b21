from __future__ import annotations

import copy
import math
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
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

from celery_redlock.errors import Deferred, RedlockError
from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.lock.validation import MAX_PERMITS
from celery_redlock.signals import LockDeferredEvent
from celery_redlock.tasks.delivery.delivery import (
    SEEN,
    Delivery,
    own_headers,
    received_at,
    utc_now,
)
from celery_redlock.tasks.delivery.header import (
    CLOCK_TOLERANCE,
    NEVER_DEFERRED,
    Deferral,
    LockHeader,
)
from celery_redlock.tasks.delivery.republish import NotRepublishedError, QueueGoneError, Requeue
from celery_redlock.tasks.delivery.route import (
    Route,
    delay_options,
    is_kept_by_broker,
    send_options,
    whole_seconds,
)
from celery_redlock.tasks.execution.completion_markers import ran_since
from celery_redlock.tasks.execution.outcomes import LONGEST_PAUSE_IN_SLOT, pause_in_slot
from celery_redlock.tasks.per_app import redlock_of

STRANGE: dict[str, dict[str, Any]] = {
    "deferral": {
        "count": "3", "since": "yesterday", "at": "now", "countdown": "soon", "resource": 8,
        "had_waited": "long",
        "resources": None, "limit": "3", "rate": 10, "is_taken": 1, "why": 5,
        "waits_for_release": None,
    },
    "origin": {"exchange": 5, "routing_key": None, "queue": 6},
}  # fmt: skip
STRANGE_FIELDS = {"options": [], "retries": None, "id": 7, "is_revoked": "no", "unique": "u",
                  "is_flagged": 1, "waits": [],
                  "life": -1, "eta": 5}  # fmt: skip
PARTS: dict[str, type] = {"deferral": Deferral, "origin": Route}
OF_ITS_WORKER = {"holder", "expires_in"}  # fields of a deferral that no message carries
NOW = 1_700_000_000.0  # s since 1970


def request(header: Any, **fields: Any) -> Context:
    return Context({"redlock": header, "retries": 0, "id": "1", **fields}, called_directly=False)


MESSAGE = request(None)


def deferred(header: LockHeader, now: float = NOW, message: Context = MESSAGE) -> LockHeader:
    before = header.deferral
    deferral = Deferral(before.count + 1, before.since or now, now, countdown=1.0)
    return header.deferred(message, deferral)


def waiting(header: LockHeader, message: Context = MESSAGE) -> LockHeader:
    return header.waiting_for_first_delivery(message, Deferral(at=NOW, countdown=2.0))


def test_a_wait_is_never_negative() -> None:
    """Neither of a first delivery, nor as a clock was set back."""
    assert LockHeader.of(Context({"id": "1"})).deferral == NEVER_DEFERRED
    assert NEVER_DEFERRED.waited(NOW) == 0.0
    assert Deferral(1, NOW, NOW).waited(NOW - 3600) == 0.0


@pytest.mark.parametrize("set_by", [0.0, -3600.0])
def test_waited_time_is_a_sum_and_what_is_left_no_more_than_the_countdown(set_by: float) -> None:
    """Whatever a node's clock was set by between two tries."""
    before = Deferral(2, NOW, NOW + 3.0, 2.0, had_waited=3.0)
    assert before.waited(NOW + 3.0 + set_by) == 3.0
    assert before.remaining(NOW + 3.0 + set_by) == 2.0
    after = Deferral(3, NOW, NOW + 3.0 + set_by, 2.0, had_waited=3.0)
    carried = LockHeader.of(request(LockHeader(id="1", deferral=after).to_message())).deferral
    assert carried.waited(NOW + 5.0 + set_by) == 5.0
    assert carried.remaining(NOW + 4.0 + set_by) == 1.0
    assert carried.remaining(NOW + 6.0 + set_by) == -1.0


def test_each_field_of_the_header_has_a_strange_value() -> None:
    assert {*STRANGE, *STRANGE_FIELDS} == set(LockHeader.__dataclass_fields__)
    for name, part in PARTS.items():
        assert set(STRANGE[name]) == set(part.__dataclass_fields__) - OF_ITS_WORKER


@pytest.mark.parametrize(("name", "value"), [*STRANGE_FIELDS.items(), *((n, 7) for n in STRANGE)])
def test_a_field_that_a_stranger_wrote_counts_as_absent(name: str, value: Any) -> None:
    for written in (value, None):
        assert LockHeader.of(request({name: written})) == LockHeader()


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [(part, name, value) for part, fields in STRANGE.items() for name, value in fields.items()]
    + [("deferral", "resources", "k")],
)
def test_a_field_of_a_part_that_a_stranger_wrote_counts_as_absent(
    part: str, name: str, value: Any
) -> None:
    for written in (value, None):
        header = LockHeader.of(request({part: {name: written}}))
        assert getattr(header, part) in (getattr(LockHeader(), part), PARTS[part]())


@pytest.mark.parametrize(
    "value",
    [-1, 1e11, 10**400, math.nan, math.inf, True],
    ids=["-1", "1e11", "10^400", "nan", "inf", "true"],
)
@pytest.mark.parametrize(
    "field",
    [
        "retries", "deferral.count", "deferral.since", "deferral.at", "deferral.countdown",
        "deferral.limit", "waits",
    ],
)  # fmt: skip
def test_a_number_that_no_worker_writes_counts_as_absent(field: str, value: Any) -> None:
    part, _, name = field.rpartition(".")
    plain: dict[str, Any] = {"deferral": {}}
    strange = {**plain, name: value}
    if part:
        strange = {**plain, part: {**plain[part], name: value}}
    assert LockHeader.of(request(strange)) == LockHeader.of(request(plain))


@pytest.mark.parametrize("limit", [-1, 0, MAX_PERMITS + 1])
def test_a_message_waits_for_no_lock_with_a_limit_that_no_lock_has(limit: int) -> None:
    header = LockHeader.of(request({"deferral": {"limit": limit}}))
    assert header.deferral.limit == 1


@pytest.mark.parametrize(
    ("header", "headers"),
    [*((None, headers) for headers in (["x"], "redlock", 7, {"redlock": None})),
     *((header, None) for header in ("text", 7, ["x"]))],
)  # fmt: skip
def test_headers_that_no_celery_writes_hold_no_lock_header(header: Any, headers: Any) -> None:
    odd = request(header, headers=headers)
    assert LockHeader.of(odd) == LockHeader()
    assert set(own_headers(odd)) <= {"redlock"}


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_the_header_comes_through_a_message(serializer: str) -> None:
    deferral = Deferral(
        3, 17.5, 18.5, 2.0, resource="a", resources=("a", "b"), limit=2, is_taken=False, why="?",
        waits_for_release=True,
    )  # fmt: skip
    full = LockHeader(
        {"ttl": 9},
        "1",
        0,
        True,
        deferral,
        True,
        2,
        Route("x", "k", "q"),
        {"name": "n"},
        3,
        "2026-01-01T00:00:00+00:00",
    )
    for header in (deferred(LockHeader({"ttl": 9})), full, LockHeader()):
        content_type, encoding, body = dumps(header.to_message(), serializer)
        back = loads(body, content_type, encoding, accept=[content_type])
        assert LockHeader.of(request(back)) == header


def test_what_is_told_of_a_deferral_counts_from_the_first_try() -> None:
    deferral = Deferral(2, NOW, NOW + 5.5, 1.5, "k", holder="h", expires_in=9.0)
    now = datetime(2026, 1, 1, 12, tzinfo=UTC)
    assert deferral.info(now) == {
        "resource": "k", "holder": "h", "deferrals": 2, "waited": 5.5,
        "next_try": "2026-01-01T12:00:01.500000+00:00",
    }  # fmt: skip
    assert deferral.event() == LockDeferredEvent("k", "h", 2, 5.5, 1.5)


def test_a_rate_is_told_also_if_its_next_start_is_unknown() -> None:
    now = datetime(2026, 1, 1, 12, tzinfo=UTC)
    known = Deferral(1, NOW, NOW, 1.5, "k", expires_in=9.0, rate="2/h").info(now)
    unknown = Deferral(1, NOW, NOW, 1.5, "k", rate="2/h").info(now)
    assert known.pop("next_start") == "2026-01-01T12:00:09+00:00"
    assert known == unknown
    assert unknown["rate"] == "2/h"


@pytest.mark.parametrize(
    "before",
    [
        pytest.param(lambda: deferred(LockHeader({"ttl": 9})), id="deferred"),
        pytest.param(lambda: waiting(LockHeader({"ttl": 9})), id="redelivered"),
        pytest.param(lambda: waiting(LockHeader({"ttl": 9}, is_revoked=True)), id="revoked"),
    ],
)
def test_a_real_retry_starts_anew_and_keeps_the_calls_options(
    before: Callable[[], LockHeader],
) -> None:
    header = before()
    assert LockHeader.of(request(header.to_message())) == header
    assert LockHeader.of(request(header.to_message(), retries=1)) == LockHeader({"ttl": 9}, id="1")


DELAY = {"queue": "celery_delayed_2", "reason": "expired", "count": 1}
PARKED = {"queue": "parked", "reason": "expired", "count": 1}


@pytest.mark.parametrize(
    ("deaths", "begins_anew"),
    [([PARKED], True), ([DELAY, PARKED], True), ([DELAY], False), ("text", False), ([7], False)],
)
def test_a_message_that_was_dead_lettered_begins_anew(deaths: Any, begins_anew: bool) -> None:
    header = deferred(LockHeader({"ttl": 9}))
    header = replace(header, waits=2)
    message = request(header.to_message())
    message.update({"x-death": deaths})
    assert LockHeader.of(message) == (
        LockHeader({"ttl": 9}, "1", life=1) if begins_anew else header
    )


def test_the_claim_of_a_send_goes_on_through_deferrals_redeliveries_and_retries() -> None:
    carried = {"name": "t:k", "token": "T", "until": "finished"}
    header = LockHeader(id="1", unique=carried)
    for republished in (deferred(header), waiting(header)):
        assert republished.unique == carried
        message = republished.to_message()
        assert LockHeader.of(request(message, retries=1)).unique == carried


def test_a_retry_waits_for_its_own_countdown_and_not_for_that_of_its_debounced_send() -> None:
    sent = LockHeader(id="1", deferral=Deferral(at=NOW, countdown=30.0)).to_message()
    assert LockHeader.of(request(sent)).deferral == Deferral(at=NOW, countdown=30.0)
    assert LockHeader.of(request(sent, retries=1)).deferral == Deferral()


@pytest.mark.parametrize("again", [deferred, waiting])
@pytest.mark.parametrize("eta", [None, "2026-01-01T00:00:00+00:00"])
def test_the_eta_of_a_send_goes_on_through_deferrals_but_not_through_a_retry(
    again: Callable[..., LockHeader], eta: str | None
) -> None:
    header = again(LockHeader(), message=request(None, eta=eta))
    for own in ("2026-01-02T00:00:00+00:00", "2026-01-03T00:00:00+00:00"):
        header = LockHeader.of(request(header.to_message(), eta=own))
        header = again(header, message=request(None, eta=own))
    assert header.eta == (eta or "")
    retried = request(header.to_message(), eta="2026-01-04T00:00:00+00:00", retries=1)
    assert again(LockHeader.of(retried), message=retried).eta == retried.eta


def test_a_child_that_inherits_its_parents_headers_does_not_inherit_the_lock_header() -> None:
    parents = deferred(LockHeader({"key": False})).to_message()
    assert LockHeader.of(request(parents, id="child")) == LockHeader()
    assert LockHeader.of(request(parents, id="1")).deferral.count == 1


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
    deferral = Deferral(1, NOW, NOW, 1.0, "stock:7", holder=holder, expires_in=expires_in, why="?")
    header = LockHeader({"ttl": 9}, deferral=deferral, unique={"name": "t:k"})
    error = Deferred(header)
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
        assert (one.header, one.stays) == (header, False)
        assert str(one) == "deferred: ?"


def test_a_broker_without_delays_of_its_own_takes_any_countdown() -> None:
    app = Celery("t", broker="memory://", set_as_default=False)
    assert not is_kept_by_broker(app, Route("celery", "celery"))
    home = send_options(app, Route("celery", "celery", queue="celery"))
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
    assert is_kept_by_broker(quorum_app, Route("tasks", "celery"))
    assert [whole_seconds(s) for s in (0.05, 1.0, 1.2)] == [1.0, 1.0, 2.0]


def test_what_rabbitmq_would_not_bring_back_waits_in_the_worker(quorum_app: Celery) -> None:
    for where in (Route("direct", "direct"), Route("", "celery"), Route("tasks", "nobody")):
        assert not is_kept_by_broker(quorum_app, where)
        options = send_options(quorum_app, where)
        assert (options["exchange"], options["routing_key"]) == (where.exchange, where.routing_key)
        assert send_options(quorum_app, replace(where, queue="celery"))["routing_key"] == "celery"


def test_what_rabbitmq_keeps_goes_by_its_own_routing_key_again() -> None:
    options = delay_options(Route("wide", "wide.a.b"), 2.0)
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
    home = send_options(app, Route("x", "key", queue))
    assert (home["exchange"], home["routing_key"], home["queue"].name) == ("", queue, queue)
    assert [one.name for one in home["declare"]] == declared


@pytest.mark.parametrize(
    ("binding", "key", "fits"),
    [
        ("a.b", "a.b", True), ("a.b", "a.c", False), ("a.b", "axb", False),
        ("a.*", "a.b", True), ("a.*", "a", False), ("a.*", "a.b.c", False),
        ("a.#", "a", True), ("a.#", "a.b.c", True), ("a.#", "ab", False), ("#", "a.b", True),
        ("#", "", True), ("*", "", False), ("a.*.b", "a..b", True), ("#.b.#.d", "a.b.c.d", True),
        ("#.#.d.*", "a.b.c.d", False),
    ],
)  # fmt: skip
def test_a_topic_fits_as_rabbitmq_says(binding: str, key: str, fits: bool) -> None:
    queue = Queue("q", Exchange("x", "topic"), routing_key=binding)
    assert Route("x", key).reaches(queue, {}) is fits
    assert Route(None, key).reaches(queue, {}) is fits
    assert not Route("y", key).reaches(queue, {})


def test_a_long_routing_key_takes_no_time_against_many_wildcards() -> None:
    route, rounds = Route("x", ".".join("a" * 200)), range(3)
    began = time.process_time()
    assert not any(route.has_topic("#.a." * 5 + "#.b") for _ in rounds)
    assert time.process_time() - began < 1.0  # a pattern with backtracking takes minutes


def test_a_message_that_rabbitmq_kept_back_still_knows_where_it_was_sent() -> None:
    bits = "0." * 27 + "1."
    kept = {"exchange": "celery_delayed_delivery", "routing_key": f"{bits}{bits}wide.a"}
    assert Route.of(kept) == Route(None, "wide.a")
    assert Route.of(kept, "wide") == Route("wide", "wide.a")
    own = {"exchange": "", "routing_key": "0.1.slow"}
    assert Route.of(own, "wide") == Route("", "0.1.slow")


def delivery_of(header: LockHeader) -> Delivery:
    """Return a delivery of a message with a header, in an app whose nodes are never asked."""
    app = Celery("t", broker="memory://", set_as_default=False)
    app.conf.redlock_nodes = ["redis://nowhere"]
    return Delivery(app.tasks["celery.backend_cleanup"], request(header.to_message()))


def test_a_message_that_the_broker_redelivers_asks_for_any_marker_from_then_on() -> None:
    header = LockHeader(is_flagged=True)
    for known in (header, deferred(header), waiting(LockHeader())):
        assert ran_since(delivery_of(known)) == -math.inf


def test_a_deferred_message_asks_for_markers_since_its_first_try() -> None:
    now = utc_now().timestamp()
    delivery = delivery_of(deferred(deferred(LockHeader(), now - 65), now - 5))
    clock = redlock_of(delivery.task.app).session.clock
    age = clock.now() - ran_since(delivery) - CLOCK_TOLERANCE
    assert 65 <= age <= 65.01 + utc_now().timestamp() - now


@pytest.mark.parametrize(("countdown", "at"), [(None, 0), (60, 60), (-60, 0)])
def test_a_message_could_have_begun_when_it_came_or_its_countdown_was_over(
    countdown: int | None, at: int
) -> None:
    before = SystemClock().now()
    with freeze_time("2026-01-01 12:00:00"):
        eta = None if countdown is None else utc_now() + timedelta(seconds=countdown)
        assert before <= received_at(eta) - at <= SystemClock().now()


def test_of_a_message_that_no_worker_told_of_nobody_knows_when_it_came() -> None:
    assert received({"properties": {SEEN: {"received": "today"}}}) is None
    assert received({}) is None


def received(request_dict: dict[str, Any]) -> float | None:
    task = SimpleNamespace(acks_late=True, name="t")
    return Delivery(task, Context(request_dict)).received_at


def test_a_redelivery_that_waits_has_deferrals_of_its_own() -> None:
    header = deferred(LockHeader({"ttl": 9}))
    for _ in range(2):
        header = waiting(header)
    looks_again = Deferral(at=NOW, countdown=2.0)
    assert header == LockHeader({"ttl": 9}, id="1", waits=2, deferral=looks_again)


def test_a_revoked_message_that_was_only_deferred_is_no_redelivery() -> None:
    header = deferred(LockHeader()).revoked()
    assert LockHeader.of(request(header.to_message())) == header
    assert not delivery_of(header).is_redelivered


def test_a_broker_that_is_away_is_asked_now_and_then_and_a_queue_that_is_gone_for_a_while() -> None:
    """Neither in a busy loop, nor ever less often: an hour's pause would outlast the outage."""
    app = Celery("t", broker="memory://", set_as_default=False)
    delivery = Delivery(app.tasks["celery.backend_cleanup"], request({}))
    away = NotRepublishedError(LockHeader(), OperationalError("away"))
    pauses = [pause_in_slot(delivery, away, 0.0)]
    for _ in range(12):
        pauses.append(pause_in_slot(delivery, away, pauses[-1]))
    assert min(pauses) > 0
    assert max(pauses) == LONGEST_PAUSE_IN_SLOT
    gone = NotRepublishedError(LockHeader(), QueueGoneError("queue 'q' is gone"))
    pause = waited = 0.0
    while waited < 10.0:  # a worker that lost a queue declares it again within seconds
        pause = pause_in_slot(delivery, gone, pause)
        waited += pause
    with pytest.raises(RedlockError, match="queue 'q' is gone"):
        pause_in_slot(delivery, gone, pause)


@pytest.mark.parametrize("retries", [None, "x", -1, 10**400, 1e308, [], {}, True, 3])
def test_a_header_is_that_of_its_message_whatever_the_sender_wrote_as_its_retries(
    retries: Any,
) -> None:
    before = Context({"id": "1", "retries": retries})
    written = LockHeader().deferred(before, Deferral(count=1, at=1.8e9)).to_message()
    again = Context({"id": "1", "retries": retries, "headers": {"redlock": written}})
    assert LockHeader.of(again).was_republished
