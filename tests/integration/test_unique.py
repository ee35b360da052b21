"""A task with `unique_for` is sent once: until its run is over, a second send is the first one."""

from __future__ import annotations

import datetime as dt
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.beat import ScheduleEntry, Scheduler
from celery.exceptions import NotRegistered, TaskRevokedError
from celery.result import AsyncResult, EagerResult
from celery.schedules import schedule
from kombu import Connection
from kombu.exceptions import OperationalError

from celery_redlock import DuplicateTask, LockedTask, QuorumUnreachable, SettingsError, send_unique
from celery_redlock.lock.engine.session import Session
from celery_redlock.tasks.delivery.header import CLOCK_TOLERANCE
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.tasks.unique.claim import ClaimToken
from tests import fork_server
from tests.conftest import FREED, Nodes, eventually, is_free
from tests.integration.conftest import ROOT, STANDING, Stage, Standing, pools
from tests.integration.deliveries import run_here, see_drained

FORKS = """
import os, sys
from tests.integration.app import once_early
print(once_early.delay(sys.argv[1]).id, flush=True)
pid = os.fork()
if not pid:
    print(once_early.delay(sys.argv[1]).id, flush=True)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
"""


# time for a stall: a send that hears no quorum in time goes out unchecked
WORKER = STANDING


client_of = functools.cache(lambda node: node.client())  # it is asked again and again


def windows(stage: Stage, key: str) -> list[str]:
    return [
        name
        for node in stage.nodes
        for name in client_of(node).keys("{redlock}:unique:*")
        if name.endswith(f":{key}")
    ]


def lasts(stage: Stage, key: str) -> list[int]:
    return [
        int(client_of(node).pttl(name))
        for node in stage.nodes
        for name in client_of(node).keys("{redlock}:unique:*")
        if name.endswith(f":{key}")
    ]


def see_window_end(stage: Stage, key: str) -> None:
    eventually(lambda: not windows(stage, key))


def ran(stage: Stage, key: str) -> list[Any]:
    return [line.more["value"] for line in stage.lines("once") if line.key == key]


def status(stage: Stage, result: Any) -> str:
    return str(stage.info(result)["status"])


def burst(
    key: str, debounce: float, send: Callable[[str], list[AsyncResult]]
) -> tuple[str, list[AsyncResult]]:
    """Send some within a debounce; return their key, and what was sent.

    Where a stall drew it out, it was no burst, and another one is sent.
    """
    for number in itertools.count():
        own, began = f"{key}-{number}", time.monotonic()
        sent = send(own)
        if time.monotonic() - began < debounce:
            return own, sent
    raise AssertionError("unreachable")


class TestASecondSend:
    def test_returns_the_result_of_the_first_one_while_that_waits(
        self, stage: Stage, key: str
    ) -> None:
        task = stage.tasks.once_early
        with task.lock_for(key, wait=60):
            often = {"max_wait": 3600}  # so that it does not wait for a release alone
            first = task.apply_async((key,), {"value": "first"}, lock=often)
            stage.see_deferred(first, times=2)
            second = task.delay(key, value="second")
            assert second.id == first.id
        assert second.get(timeout=60) == "first"
        see_window_end(stage, key)
        assert ran(stage, key) == ["first"]

    def test_is_the_first_one_until_its_body_has_ended(self, stage: Stage, key: str) -> None:
        task = stage.tasks.once_early
        first = task.delay(key, "wait")
        eventually(lambda: ran(stage, key))
        assert task.delay(key).id == first.id
        stage.log.with_name(key).touch()
        first.get(timeout=60)
        see_window_end(stage, key)
        assert task.delay(key).id != first.id

    def test_is_a_new_one_from_the_start_of_the_body_where_that_is_asked_for(
        self, stage: Stage, key: str
    ) -> None:
        task = stage.tasks.once_to_start
        with task.lock_for(key, wait=60):
            first = task.delay(key, "wait", "first")
            stage.see_deferred(first)
            assert task.delay(key).id == first.id
        eventually(lambda: ran(stage, key))
        second = task.delay(key, "", "second")
        assert second.id != first.id
        assert task.delay(key).id == second.id
        stage.log.with_name(key).touch()
        assert second.get(timeout=60) == "second"
        assert ran(stage, key) == ["first", "second"]

    def test_raises_where_that_is_asked_for(self, stage: Stage, key: str) -> None:
        task = stage.tasks.once_early
        with task.lock_for(key, wait=60):
            first = task.delay(key)
            with pytest.raises(DuplicateTask) as caught:
                task.apply_async((key,), lock={"on_duplicate": "fail"})
        assert (caught.value.resource, caught.value.task_id) == (f"u:{key}", first.id)
        first.get(timeout=60)

    def test_is_the_first_one_through_a_retry(self, stage: Stage, key: str) -> None:
        task = stage.tasks.once_early
        first = task.delay(key, "retry")
        stage.log.with_name(key).touch()
        eventually(lambda: len(ran(stage, key)) == 2)  # the retry's body goes on until it is told
        eventually(lambda: status(stage, first) == "RETRY")
        assert task.delay(key).id == first.id
        stage.log.with_name(f"{key} again").touch()
        first.get(timeout=60)
        see_window_end(stage, key)
        assert len(ran(stage, key)) == 2

    @pytest.mark.parametrize("name", ["once_unstored", "once_unstored_late"])
    def test_is_the_first_one_through_a_retry_that_is_not_stored(
        self, stage: Stage, key: str, name: str
    ) -> None:
        task = getattr(stage.tasks, name)
        first = task.delay(key, "retry", "stored")
        stage.log.with_name(key).touch()
        eventually(lambda: len(ran(stage, key)) == 2)
        eventually(lambda: status(stage, first) == "FAILURE")
        assert task.delay(key).id == first.id
        stage.log.with_name(f"{key} again").touch()
        see_window_end(stage, key)
        assert len(ran(stage, key)) == 2

    def test_of_another_task_with_the_same_lock_is_sent(self, stage: Stage, key: str) -> None:
        with stage.tasks.once_early.lock_for(key, wait=60):
            first = stage.tasks.once_early.delay(key, value="first")
            other = stage.tasks.once_late.delay(key, value="other")
            assert other.id != first.id
        assert {first.get(timeout=60), other.get(timeout=60)} == {"first", "other"}

    def test_is_deduplicated_by_the_call_alone_where_the_task_is_not(
        self, stage: Stage, key: str
    ) -> None:
        work, once = stage.tasks.work, {"unique_for": 600}
        with work.lock_for(key, wait=60):
            first = work.apply_async((key,), lock=once)
            assert work.apply_async((key,), lock=once).id == first.id
            other = work.delay(key)
            assert other.id != first.id
        first.get(timeout=60)
        other.get(timeout=60)


ENDS = {
    "returns": ("once_early", "", {}),
    "returns, acknowledged late": ("once_late", "", {}),
    "raises": ("once_early", "raise", {}),
    "raises, acknowledged late": ("once_late", "raise", {}),
    "ignores": ("once_early", "ignore", {}),
    "rejects": ("once_late", "reject", {}),
    "asks in vain to be requeued": ("once_early", "requeue", {}),
    "has an on_success that raises": ("once_careless", "", {}),  # past the tracer before 5.7
    "has a result that is not stored": ("once_unstored", "", {}),
    "has a result that is not stored, acknowledged late": ("once_unstored_late", "", {}),
    "replaces itself": ("once_early", "replace", {}),
    "is killed": ("once_early", "die", {}),
    "has its hard limit": ("once_early", "stay", {"time_limit": 8}),  # s: the body begins by then
}


class TestAWindowEnds:
    @pytest.mark.parametrize("end", ENDS)
    def test_where_the_run(self, stage: Stage, key: str, end: str) -> None:
        name, how, options = ENDS[end]
        task = getattr(stage.tasks, name)
        first = task.apply_async((key, how), **options)
        eventually(lambda: ran(stage, key))
        see_window_end(stage, key)
        second = task.delay(key, value="second")
        assert second.id != first.id
        assert second.get(timeout=60) == "second"

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["once_early", "once_late"])
    def test_where_a_greenlet_has_its_hard_limit(self, stage: Stage, key: str, name: str) -> None:
        worker = stage.worker(key, pool="gevent", queues=[key], concurrency=2)
        getattr(stage.tasks, name).apply_async((key, "stay"), queue=key, time_limit=8)
        eventually(lambda: ran(stage, key))
        see_window_end(stage, key)
        worker.kill()

    @pytest.mark.parametrize("name", ["once_skips", "once_fails"])
    def test_where_the_run_is_refused_its_lock(self, stage: Stage, key: str, name: str) -> None:
        task = getattr(stage.tasks, name)
        with task.lock_for(key, wait=60):
            task.delay(key)
            see_window_end(stage, key)
        assert not ran(stage, key)

    def test_where_the_message_is_revoked_before_its_start(self, stage: Stage, key: str) -> None:
        task = stage.tasks.once_early
        with task.lock_for(key, wait=60):
            first = task.delay(key)
            stage.see_deferred(first)
            first.revoke()
            with pytest.raises(TaskRevokedError):
                first.get(timeout=60)
            see_window_end(stage, key)

    def test_where_the_message_expires(self, stage: Stage, key: str) -> None:
        task = stage.tasks.once_early
        with task.lock_for(key, wait=60):
            first = task.apply_async((key,), expires=3)  # s: the window lasts no longer, either
            assert max(lasts(stage, key), default=0) <= 3000
            eventually(lambda: status(stage, first) == "REVOKED")
            see_window_end(stage, key)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["once_early", "once_late"])
    def test_where_it_expired_or_was_revoked_before_any_worker_had_it(
        self, stage: Stage, key: str, name: str
    ) -> None:
        task = getattr(stage.tasks, name)
        expired = task.apply_async((f"{key}-expired",), queue=key, expires=0.1)
        revoked = task.apply_async((f"{key}-revoked",), queue=key)
        kept = task.apply_async((f"{key}-kept", "", "kept"), queue=key)
        worker = stage.worker(key, queues=["nothing"], concurrency=1)
        control, here = stage.app.control, stage.see_listening(key)
        control.revoke(revoked.id, destination=here, reply=True, timeout=60, limit=1)
        control.add_consumer(key, destination=here, reply=True, timeout=60, limit=1)
        assert kept.get(timeout=60) == "kept"
        for result, end in ((expired, "expired"), (revoked, "revoked")):
            with pytest.raises(TaskRevokedError, match=end):
                result.get(timeout=60)
            see_window_end(stage, f"{key}-{end}")
            assert not ran(stage, f"{key}-{end}")
        worker.kill()

    @pytest.mark.parametrize("written", ["seconds", "moment", "text", "by the task"])
    def test_with_the_message_that_nobody_took_before_it_expired(
        self, stage: Stage, key: str, written: str
    ) -> None:
        moment = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=100)
        expires = {"seconds": 100, "moment": moment, "text": moment.isoformat()}
        if written == "by the task":
            task, options = stage.tasks.once_expires, {}
        else:
            task, options = stage.tasks.once_early, {"expires": expires[written]}
        task.apply_async((key,), queue="nobody", **options)
        left = eventually(lambda: [ms for ms in lasts(stage, key) if ms > 50_000])  # once it is out
        assert max(left) <= 100_000

    def test_where_no_worker_knows_the_task(self, stage: Stage, key: str) -> None:
        @stage.app.task(bind=True, base=LockedTask, shared=False, name=f"tests.new_{key}",
                        lock_key="u:{key}", lock_unique_for=600)  # fmt: skip
        def new(self: Any, key: str) -> None: ...

        first = new.delay(key)
        with pytest.raises(NotRegistered):
            first.get(timeout=60)
        see_window_end(stage, key)
        assert new.delay(key).id != first.id

    def test_where_a_worker_cannot_read_the_message(self, stage: Stage, key: str) -> None:
        task = stage.tasks.once_early
        first = task.apply_async((key,), headers={"eta": "yesterday"})
        see_window_end(stage, key)
        assert task.delay(key).id != first.id

    def test_where_a_running_task_is_terminated(self, stage: Stage, key: str) -> None:
        first = stage.tasks.once_early.delay(key, "stay")
        eventually(lambda: ran(stage, key))
        first.revoke(terminate=True, signal="SIGKILL")
        see_window_end(stage, key)

    def test_where_the_message_cannot_be_published(self, stage: Stage, key: str) -> None:
        task = stage.tasks.once_early
        with Connection("redis://127.0.0.1:1") as nowhere, pytest.raises(OperationalError):
            task.apply_async((key,), connection=nowhere, retry=False)
        see_window_end(stage, key)
        task.delay(key, value="sent").get(timeout=60)

    @pytest.mark.slow
    def test_by_itself_where_the_worker_is_killed_with_the_message(
        self, stage: Stage, key: str
    ) -> None:
        doomed = stage.worker("doomed", queues=["doomed"], concurrency=1)
        task = stage.tasks.once_early
        brief = {"unique_for": 20, "ttl": stage.tasks.TTL}
        first = task.apply_async((key, "stay"), queue="doomed", lock=brief)
        eventually(lambda: ran(stage, key))
        assert task.delay(key).id == first.id
        doomed.kill()
        see_window_end(stage, key)
        second = task.delay(key, value="second")
        assert second.id != first.id
        second.get(timeout=120)


class TestDebounce:
    @pytest.mark.parametrize("name", ["latest", "latest_late"])
    def test_a_burst_is_one_run_with_the_latest_arguments_once_it_is_due(
        self, stage: Stage, key: str, name: str
    ) -> None:
        task, debounce, began = getattr(stage.tasks, name), stage.tasks.DEBOUNCE, time.monotonic()
        key, sent = burst(key, debounce, lambda own: [task.delay(own, value=v) for v in "abcd"])
        *dropped, last = sent
        assert last.get(timeout=60) == "d"
        (line,) = [line for line in stage.lines("once") if line.key == key]
        assert (line.more["value"], line.at >= began + debounce) == ("d", True)
        for one in dropped:
            with pytest.raises(TaskRevokedError):
                one.get(timeout=60)
        assert ran(stage, key) == ["d"]
        assert not windows(stage, key)

    def test_a_steady_stream_of_sends_postpones_no_run_beyond_its_longest_time(
        self, stage: Stage, key: str
    ) -> None:
        task, bounded, began = (
            stage.tasks.latest,
            {"debounce": 1, "debounce_max": 2},
            time.monotonic(),
        )
        sent = []

        def send() -> bool:
            sent.append(task.apply_async((key,), {"value": str(len(sent))}, lock=bounded))
            time.sleep(0.2)
            return len(ran(stage, key)) >= 2  # the first one's end does not end the stream

        eventually(send)
        sent[-1].get(timeout=60)
        took = time.monotonic() - began
        eventually(lambda: all(one.ready() for one in sent))
        states = [status(stage, one) for one in sent]
        assert states.count("SUCCESS") == len(ran(stage, key)) <= took / bounded["debounce"] + 1
        assert states[-1] == "SUCCESS"

    @pytest.mark.parametrize("name", ["latest", "latest_late"])
    def test_a_run_that_is_due_is_not_dropped_by_a_later_send(
        self, stage: Stage, key: str, name: str
    ) -> None:
        """It waits for its lock, or in its queue, for as long as that takes."""
        task, soon = getattr(stage.tasks, name), {"debounce": 0.5}
        with task.lock_for(key, wait=60):
            first = task.apply_async((key,), {"value": "first"}, lock=soon)
            stage.see_deferred(first)
            second = task.apply_async((key,), {"value": "second"}, lock=soon)
            stage.see_deferred(second)
        assert [one.get(timeout=60) for one in (first, second)] == ["first", "second"]

    def test_it_is_not_dropped_however_full_its_queue_is(self, stage: Stage, key: str) -> None:
        task, soon = stage.tasks.latest, {"debounce": 0.5}
        sent = []
        for value in "abc":
            sent.append(task.apply_async((key, "", value), queue=key, lock=soon))
            see_window_end(stage, key)
        with stage.consumed(key):
            assert [one.get(timeout=60) for one in sent] == list("abc")
        assert sorted(ran(stage, key)) == list("abc")

    def test_one_that_runs_is_left_alone_and_so_is_its_retry(self, stage: Stage, key: str) -> None:
        task, soon = stage.tasks.latest, {"debounce": 0.5}
        first = task.apply_async((key, "retry", "first"), lock=soon)
        eventually(lambda: ran(stage, key))
        second = task.delay(key, "", "second")
        stage.log.with_name(key).touch()
        eventually(lambda: status(stage, first) == "RETRY")
        stage.log.with_name(f"{key} again").touch()
        assert {first.get(timeout=60), second.get(timeout=60)} == {"first", "second"}

    def test_members_of_a_canvas_are_sent_and_take_no_place(self, stage: Stage, key: str) -> None:
        task = stage.tasks.latest
        waiting = task.delay(key, value="waiting")
        assert group(task.si(key, value="a"), task.si(key, value="b"))().get(timeout=60) == [
            "a",
            "b",
        ]
        assert waiting.get(timeout=60) == "waiting"

    def test_a_send_by_name_is_of_the_same_burst(self, stage: Stage, key: str) -> None:
        task, debounce = stage.tasks.latest, stage.tasks.DEBOUNCE

        def send(own: str) -> list[AsyncResult]:
            how = {"resource": f"u:{own}", "debounce": debounce}
            by_name = functools.partial(send_unique, stage.app, task.name, (own,), **how)
            return [task.delay(own, value="first"), by_name({"value": "second"})]

        key, (first, second) = burst(key, debounce, send)
        assert second.get(timeout=60) == "second"
        with pytest.raises(TaskRevokedError):
            first.get(timeout=60)

    def test_one_that_is_longer_than_the_broker_waits_goes_in_hops(
        self, own_stage: Stage, key: str
    ) -> None:
        stage, tasks = own_stage, (own_stage.tasks.latest, own_stage.tasks.latest_late)
        hops = {"broker_transport_options": {"visibility_timeout": 4}}  # s: each takes a quarter
        conf = json.loads(stage.env["TEST_CONF"])
        stage.env["TEST_CONF"] = json.dumps({**conf, **hops})
        worker = stage.worker("hops", loglevel="DEBUG")
        long, began = {"debounce": 8}, time.monotonic()

        def send(own: str) -> list[AsyncResult]:
            keys = [f"{own} {task.name}" for task in tasks]
            how = [
                (task, (each,), value)
                for task, each in zip(tasks, keys, strict=True)
                for value in "ab"
            ]
            return [
                task.apply_async(args, {"value": value}, lock=long) for task, args, value in how
            ]

        key, sent = burst(key, long["debounce"], send)
        for task, first, last in zip(tasks, sent[::2], sent[1::2], strict=True):
            assert last.get(timeout=120) == "b"
            lines = [line for line in stage.lines("once") if line.key == f"{key} {task.name}"]
            assert [line.more["value"] for line in lines] == ["b"]
            assert lines[0].at >= began + long["debounce"] - CLOCK_TOLERANCE
            assert status(stage, first) == "REVOKED"  # long before it was due
            assert worker.output().count(f"{last.id}] is due in") > 2
            assert worker.output().count(f"{first.id}] is due in") < 2
        see_drained(stage)
        assert len([line for line in stage.lines("once") if line.key.startswith(key)]) == len(tasks)


WRONG_SENDS: dict[str, tuple[dict[str, Any], str]] = {
    "a countdown": ({"countdown": 5}, r'call: countdown=5.*lock=\{"debounce": \.\.\.\}'),
    "an eta": ({"eta": dt.datetime(2030, 1, 1)}, r'call: eta=.*lock=\{"debounce": \.\.\.\}'),
    "unique_for": ({"lock": {"unique_for": 9}}, r'unique_for=9.*lock=\{"debounce": None\}'),
    "its end": ({"expires": 1}, "call: expires=1.*later than debounce=2 s"),
    "a bound": ({"lock": {"debounce_max": 1}}, "debounce_max=1.*at least debounce=2"),
    "replace": ({"lock": {"on_duplicate": "replace"}}, "replace.*taken out.*the option debounce"),
}


@pytest.mark.parametrize("wrong", WRONG_SENDS)
def test_what_contradicts_a_debounce_is_an_error_of_the_send(stage: Stage, wrong: str) -> None:
    options, message = WRONG_SENDS[wrong]
    with pytest.raises(SettingsError, match=message):
        stage.tasks.latest.apply_async(("contradicts",), **options)
    assert not windows(stage, "contradicts")


def test_ten_sends_and_a_restart_of_their_worker_are_one_run(own_stage: Stage, key: str) -> None:
    """Each message comes back redelivered; plain Celery runs ten bodies."""
    stage, task, once = own_stage, own_stage.tasks.latest_late, {"debounce": 6}
    first = stage.worker("w1", concurrency=1)

    def send(own: str) -> list[AsyncResult]:
        return [task.apply_async((own,), {"value": v}, lock=once) for v in "abcdefghij"]

    key, sent = burst(key, once["debounce"], send)
    eventually(lambda: all(f"{one.id}] received" in first.output() for one in sent))
    first.stop()
    stage.worker("w2", concurrency=1)
    assert sent[-1].get(timeout=120) == "j"
    see_drained(stage)
    assert ran(stage, key) == ["j"]
    assert [status(stage, one) for one in sent[:-1]] == ["REVOKED"] * 9


class TestByArgs:
    """`lock_args` says which arguments two sends have in common."""

    def test_sends_with_equal_named_arguments_are_one_whatever_the_others_are(
        self, stage: Stage, key: str
    ) -> None:
        task = stage.tasks.once_by_args
        lock = task.lock_for(key)
        digest = lock.resource.rpartition(":")[2]
        with lock:
            first = task.delay(key, value="first")
            assert task.delay(key, value="second").id == first.id
            assert task.delay(value="third", how="raise", key=key).id == first.id
            assert len({*windows(stage, digest)}) == 1
            other = task.delay(f"{key}-other", value="first")
            assert other.id != first.id
        assert [first.get(timeout=60), other.get(timeout=60)] == ["first", "first"]
        see_window_end(stage, digest)
        assert ran(stage, key) == ["first"]
        assert task.delay(key).id != first.id

    def test_a_call_that_names_none_is_one_send_for_all_arguments(
        self, stage: Stage, key: str
    ) -> None:
        task, whatever = stage.tasks.once_early, {"lock": {"args": []}}
        with redlock_of(stage.app).lock(f"{task.name}:any-arguments", wait=60):
            first = task.apply_async((key,), {"value": "first"}, **whatever)
            assert task.apply_async((f"{key}-other",), **whatever).id == first.id
            assert len({*windows(stage, "any-arguments")}) == 1
            by_its_key = task.delay(key, value="by its key")
            assert by_its_key.id != first.id
            assert by_its_key.get(timeout=60) == "by its key"
        assert first.get(timeout=60) == "first"
        see_window_end(stage, "any-arguments")
        assert ran(stage, f"{key}-other") == []


@pytest.mark.parametrize("pool", pools("gevent", every=["threads", "solo", "gevent"]))
def test_it_is_the_same_in_every_pool(of_pool: Standing, key: str) -> None:
    stage = of_pool.stage
    early, late, to_start, latest = (
        getattr(stage.tasks, name)
        for name in ("once_early", "once_late", "once_to_start", "latest")
    )
    for task in (early, late):
        with task.lock_for(key, wait=60):
            first = task.delay(key, "", task.name)
            stage.see_deferred(first)
            assert task.delay(key, "", "dropped").id == first.id
        assert first.get(timeout=60) == task.name
        see_window_end(stage, key)
    running = to_start.delay(key, "wait", "running")
    eventually(lambda: "running" in ran(stage, key))
    following = to_start.delay(key, "", "following")
    assert following.id != running.id
    stage.log.with_name(key).touch()
    assert following.get(timeout=60) == "following"
    see_window_end(stage, key)
    assert ran(stage, key) == [early.name, late.name, "running", "following"]
    key, (dropped, last) = burst(
        key, stage.tasks.DEBOUNCE, lambda own: [latest.delay(own, "", value) for value in "ab"]
    )
    assert last.get(timeout=60) == "b"
    with pytest.raises(TaskRevokedError):
        dropped.get(timeout=60)
    see_window_end(stage, key)
    assert ran(stage, key) == ["b"]


class TestAlwaysSent:
    """Something waits for the end of these."""

    def test_members_of_a_chord_and_its_body(self, stage: Stage, key: str) -> None:
        once = stage.tasks.once_returns
        with once.lock_for(key, wait=60):
            waiting = once.delay(key)
            stage.see_deferred(waiting)
            result = chord([once.si(key), once.si(key)])(once.si(key))
        assert [result.get(timeout=120), waiting.get(timeout=120)] == [key, key]
        assert len(ran(stage, key)) == 4

    def test_members_of_a_group(self, stage: Stage, key: str) -> None:
        once = stage.tasks.once_returns
        assert group(once.si(key), once.si(key))().get(timeout=120) == [key, key]

    def test_steps_of_a_chain(self, stage: Stage, key: str) -> None:
        once = stage.tasks.once_returns
        with once.lock_for(key, wait=60):
            waiting = once.delay(key)
            stage.see_deferred(waiting)
            result = chain(once.si(key), stage.tasks.step.si(f"{key}-b"), once.si(key))()
        assert [result.get(timeout=120), waiting.get(timeout=120)] == [key, key]
        assert len(ran(stage, key)) == 3

    def test_sends_with_links(self, stage: Stage, key: str) -> None:
        once = stage.tasks.once_returns
        with once.lock_for(key, wait=60):
            once.delay(key)
            once.apply_async((key,), link=stage.tasks.note.si(key))
            once.apply_async((key,), link_error=stage.tasks.note.si(key))
        eventually(lambda: len(ran(stage, key)) == 3)
        eventually(lambda: [line for line in stage.lines("noted") if line.key == key])

    def test_what_has_an_id_that_its_sender_chose(self, stage: Stage, key: str) -> None:
        once = stage.tasks.once_returns
        with once.lock_for(key, wait=60):
            once.delay(key)
            chosen = once.apply_async((key,), task_id=f"mine-{key}")
        assert chosen.get(timeout=60) == key
        eventually(lambda: len(ran(stage, key)) == 2)


class TestWhoeverSends:
    def test_by_name_is_one_with_sends_by_class(self, stage: Stage, key: str) -> None:
        task = stage.tasks.once_early
        how = {"resource": f"u:{key}", "unique_for": 600}
        with task.lock_for(key, wait=60):
            first = send_unique(stage.app, task.name, (key,), {"value": "first"}, **how)
            assert send_unique(stage.app, task.name, (key,), **how).id == first.id
            assert task.delay(key).id == first.id
            with pytest.raises(DuplicateTask):
                send_unique(stage.app, task.name, (key,), **how, on_duplicate="fail")
        assert first.get(timeout=60) == "first"
        see_window_end(stage, key)
        second = task.delay(key)
        assert second.id != first.id
        second.get(timeout=60)

    def test_by_name_with_wrong_options_is_refused(self, stage: Stage) -> None:
        for wrong in ({"resource": ""}, {"unique_for": -1}, {"on_duplicate": "drop"}):
            options = {"resource": "r", "unique_for": 60, **wrong}
            with pytest.raises(SettingsError, match=f"send_unique: {next(iter(wrong))}="):
                send_unique(stage.app, "tests.once_early", (), **options)

    def test_beat_sends_once_what_is_still_waiting(self, stage: Stage, key: str) -> None:
        task = stage.tasks.once_early
        entry = ScheduleEntry("tick", task.name, args=(key,), schedule=schedule(1.0), app=stage.app)
        scheduler = Scheduler(stage.app, lazy=True)
        with task.lock_for(key, wait=60):
            producer = scheduler.producer  # beat's and redbeat's services send by it
            ticks = [scheduler.apply_async(entry, producer, advance=False) for _ in range(3)]
            assert len({tick.id for tick in ticks}) == 1
        ticks[0].get(timeout=60)
        assert len(ran(stage, key)) == 1

    def test_a_process_that_was_forked_after_a_send_sends_by_itself(
        self, stage: Stage, key: str
    ) -> None:
        task = stage.tasks.once_early
        with task.lock_for(key, wait=60):
            command = [sys.executable, "-c", FORKS, key]
            done = fork_server.run(
                command, env={**os.environ, **stage.env}, cwd=ROOT,
                check=True, timeout=120,
            )  # fmt: skip
            in_parent, in_child = done.stdout.split()
            assert in_parent == in_child == task.delay(key).id
        eventually(lambda: ran(stage, key))
        see_window_end(stage, key)

    def test_eager_sends_run_each(self, stage: Stage, key: str) -> None:
        task = stage.tasks.once_early
        stage.app.conf.task_always_eager = True
        try:
            results = [task.delay(key, value=str(n)) for n in range(2)]
        finally:
            stage.app.conf.task_always_eager = False
        assert all(isinstance(result, EagerResult) for result in results)
        assert ran(stage, key) == ["0", "1"]
        assert not windows(stage, key)

    def test_a_key_that_cannot_be_made_is_an_error_of_the_send(self, stage: Stage) -> None:
        with pytest.raises(SettingsError, match="None"):
            stage.tasks.once_early.delay(None)


def test_a_run_that_fails_between_its_grant_and_its_body_runs_beside_a_free_lock(
    stage: Stage, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where its window cannot be ended: `on_unreachable` decides, and that lock goes back."""
    app, begins = stage.app, ClaimToken.release_at_start

    @app.task(base=LockedTask, shared=False, name="tests.beside", lock_key=key,
              lock_on_unreachable="run")  # fmt: skip
    def beside() -> str:
        eventually(lambda: is_free(stage.nodes, key), within=FREED)
        return "free"

    def fail(ticket: ClaimToken, session: Session) -> None:
        assert not is_free(stage.nodes, key)
        monkeypatch.setattr(ClaimToken, "release_at_start", begins)
        raise QuorumUnreachable(key, [], 2)

    monkeypatch.setattr(ClaimToken, "release_at_start", fail)
    unique = {"name": f"beside:{key}", "token": "7" * 32, "until": "started"}
    ended = run_here(beside, id=key, redlock={"id": key, "unique": unique})
    assert ended.retval == "free", ended


EARLY, LATE = {"acks_late": False}, {"acks_late": True}
RETRIED = {"retry_on_worker_lost": True}  # by the main process, from Celery 5.7 on


@pytest.mark.parametrize(
    ("options", "error", "ends"),
    [
        (EARLY, SystemExit, True), (EARLY, MemoryError, True), (RETRIED, SystemExit, False),
        (LATE, SystemExit, False), (LATE, MemoryError, False),
    ],
)  # fmt: skip
def test_an_error_ends_a_window_unless_its_message_may_come_back(
    stage: Stage, key: str, options: dict[str, bool], error: type[BaseException], ends: bool
) -> None:
    @stage.app.task(base=LockedTask, shared=False, name=f"tests.fails_{key}", lock_key=key,
                    lock_unique_for=600, **options)  # fmt: skip
    def fails() -> None:
        raise error

    fails.apply_async(queue=key)
    sent = json.loads(stage.broker.client().lindex(key, 0))["headers"]
    with suppress(error):
        run_here(fails, id=sent["id"], redlock=sent["redlock"])
    stage.see_freed(key)
    assert bool(windows(stage, key)) != ends


def test_without_a_quorum_unreachable_decides(mortal_nodes: Nodes) -> None:
    app = Celery("unreachable", broker="memory://", set_as_default=False)
    app.conf.task_default_queue = "unreachable"  # one memory serves all tests of a process
    app.conf.redlock_nodes = [node.url for node in mortal_nodes]

    @app.task(base=LockedTask, shared=False, lock_key="k", lock_unique_for=60)
    def once() -> None: ...

    first = once.delay()
    for node in mortal_nodes[1:]:
        node.kill()
    second = once.delay()
    assert second.id != first.id
    with pytest.raises(QuorumUnreachable):
        once.apply_async(lock={"on_unreachable": "fail"})
    with app.connection_for_write() as connection:
        assert connection.SimpleQueue("unreachable").qsize() == 2
    redlock_of(app).close()
