"""Workers and callers of two builds on one key: they exclude each other, and wake each other."""

from __future__ import annotations

import itertools
import json
import statistics
import tarfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from celery_redlock.testing import EmbeddedNode
from tests.conftest import eventually, see_listening, unpack
from tests.integration.builds import ARCHIVE, THIS, Build, Caller, see_subscribed, start_worker
from tests.integration.conftest import Stage, overlaps

KEY = "k"
RESOURCE = "k:k"
WAITERS = "{redlock}:waiting:k:k"
WOKEN = 60.0  # s: well before the end of `patient`'s countdown of 100 s
SPIN = 1.0  # s: a caller that nobody wakes does not try earlier than that, on average 3 s
ROUNDS = 9
# of docs/operations/security.md, as it was in the earlier build
EARLIER_RIGHTS = (
    "~{redlock}:* &{redlock}:wake:* +get +set +del +time +pexpire +pttl +exists +publish "
    "+subscribe +unsubscribe +eval +evalsha +script +info +ping +scan +mget"
)
BOTH_WAYS = pytest.mark.parametrize("is_upgrade", [True, False], ids=["upgrade", "way back"])


@pytest.fixture(scope="session")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Build:
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(ARCHIVE) as archive:
        unpack(archive, folder)
    return Build("earlier", folder, hands_off=False)


@pytest.fixture
def builds(earlier: Build, is_upgrade: bool) -> tuple[Build, Build]:
    """Give the build that acts first, and the other."""
    return (earlier, THIS) if is_upgrade else (THIS, earlier)


@pytest.fixture
def stage(make_stage: Callable[..., Stage], nodes: list[EmbeddedNode]) -> Stage:
    """Give a stage whose leases are longer than any test."""
    return make_stage(nodes, redlock_max_ttl=200)


@pytest.fixture
def limited_urls(nodes: list[EmbeddedNode]) -> Iterator[list[str]]:
    """Give the URLs of the nodes, with a user that may do what clients of the earlier build do."""
    for node in nodes:
        rights = ["reset", "resetchannels", "on", ">secret", *EARLIER_RIGHTS.split()]
        node.client().execute_command("ACL", "SETUSER", "limited", *rights)
    yield [f"redis://limited:secret@127.0.0.1:{node.port}/0" for node in nodes]
    for node in nodes:
        node.client().execute_command("ACL", "DELUSER", "limited")


def send(stage: Stage, name: str, queue: str = "celery", task: str = "patient") -> Any:
    return stage.app.send_task(task, (KEY, name), queue=queue)


def see_waiting(stage: Stage, result: Any, worker: str) -> dict[str, Any]:
    """Return what a worker tells of a message that waits in it, once it does."""
    (where,) = see_listening(stage.app, worker)

    def found() -> dict[str, Any] | None:
        replies = stage.app.control.broadcast("redlock_waiting", destination=[where], reply=True)
        rows = [row for reply in replies for row in reply[where]]
        return next((row for row in rows if row["task_id"] == result.id), None)

    return eventually(found)


def see_ready(stage: Stage, build: Build, result: Any, worker: str) -> None:
    """Return when a message waits in a worker that every node can wake.

    One of the earlier build tries once more as it begins to listen; one of this build asks the
    nodes, and is registered then.
    """
    stage.see_deferred(result, times=1 if build.hands_off else 2)
    see_waiting(stage, result, worker)
    see_subscribed(stage, KEY)
    if build.hands_off:
        for node in stage.nodes:
            eventually(lambda node=node: node.client().zcard(WAITERS))


def begun(stage: Stage) -> list[tuple[str, bool]]:
    """Return the names of the runs in order, and whether each ran in a build that hands off."""
    return [(line.more["name"], line.more["hands_off"]) for line in stage.lines("begin")]


@BOTH_WAYS
def test_a_message_is_woken_by_a_release_in_a_worker_of_the_other_build(
    stage: Stage, builds: tuple[Build, Build]
) -> None:
    holding, waiting = builds
    start_worker(stage, holding, "holds", queue="held")
    start_worker(stage, waiting, "waits", queue="waiting")
    send(stage, "until", queue="held")
    stage.wait_for("begin")
    result = send(stage, "woken", queue="waiting")
    see_ready(stage, waiting, result, "waits")
    stage.log.with_name("until").touch()
    assert result.get(timeout=WOKEN) == "woken"
    assert begun(stage) == [("until", holding.hands_off), ("woken", waiting.hands_off)]
    assert not overlaps(stage.intervals()[KEY])


def median_hand_off(stage: Stage, holder: Caller, waiter: Caller) -> float:
    """Return the median of the seconds from a release to the other's grant."""
    hand_offs = []
    for _ in range(ROUNDS):
        holder.do("take").result(WOKEN)
        taken = waiter.do("take")
        see_subscribed(stage, KEY)
        assert not taken.done()
        released = holder.do("release").result(WOKEN)
        hand_offs.append(taken.result(WOKEN) - released)
        waiter.do("release").result(WOKEN)
    assert min(hand_offs) > 0
    return statistics.median(hand_offs)


@BOTH_WAYS
def test_a_caller_is_woken_by_a_release_of_the_other_build(
    stage: Stage, builds: tuple[Build, Build]
) -> None:
    holder, waiter = (Caller(stage, build, KEY) for build in builds)
    assert median_hand_off(stage, holder, waiter) < SPIN / 2


def race(stage: Stage, holder: Caller, workers: Sequence[str]) -> None:
    """Let a release wake a message in each worker, often: who is refused waits for the other.

    workers: each with a queue of its name.
    """
    for _ in range(ROUNDS):
        holder.do("take").result(WOKEN)
        results = {name: send(stage, name, queue=name) for name in workers}
        for name, result in results.items():
            stage.see_deferred(result)
            see_waiting(stage, result, name)
        see_subscribed(stage, KEY, count=len(workers))
        holder.do("release").result(WOKEN)
        for result in results.values():
            result.get(timeout=WOKEN)
    assert not overlaps(stage.intervals()[KEY])


@BOTH_WAYS
def test_one_release_wakes_the_messages_in_workers_of_both_builds(
    stage: Stage, builds: tuple[Build, Build]
) -> None:
    for build in builds:
        start_worker(stage, build, build.name, queue=build.name)
    race(stage, Caller(stage, builds[0], KEY), [build.name for build in builds])


def test_a_release_that_names_a_worker_of_this_build_wakes_one_of_the_earlier_at_once(
    stage: Stage, earlier: Build
) -> None:
    holder = Caller(stage, THIS, KEY)
    holder.do("take").result(WOKEN)
    results = {}
    for build, name in ((THIS, "until"), (earlier, "short")):
        start_worker(stage, build, build.name, queue=build.name)
        results[build.name] = send(stage, name, queue=build.name)
        see_ready(stage, build, results[build.name], build.name)
    woken, tries = results[earlier.name], stage.deferrals(results[earlier.name])
    holder.do("release").result(WOKEN)
    stage.wait_for("begin")

    def has_tried() -> bool:
        """Tell whether it ran before the other one, or was refused while that holds the lock."""
        meta = stage.info(woken)
        again = meta["status"] == "DEFERRED" and meta["result"]["deferrals"] > tries
        return again or meta["status"] == "SUCCESS"

    eventually(has_tried, within=WOKEN)
    stage.log.with_name("until").touch()
    for result in results.values():
        result.get(timeout=WOKEN)
    assert not overlaps(stage.intervals()[KEY])


def carried(stage: Stage) -> dict[str, Any]:
    """Return the header `redlock` of the one message that the broker has and no worker."""
    (raw,) = stage.broker.client().lrange("celery", 0, -1)
    header = json.loads(raw)["headers"]["redlock"]
    assert isinstance(header, dict)
    return header


@BOTH_WAYS
def test_a_message_that_one_build_deferred_waits_on_in_a_worker_of_the_other(
    stage: Stage, builds: tuple[Build, Build]
) -> None:
    first, second = builds
    holder = Caller(stage, first, KEY)
    holder.do("take").result(WOKEN)
    worker = start_worker(stage, first, "first")
    result = send(stage, "carried")
    see_ready(stage, first, result, "first")
    worker.stop()
    header = carried(stage)
    assert ("countdown" in header["wait"]) == first.hands_off
    start_worker(stage, second, "second")
    waiting = see_waiting(stage, result, "second")
    assert waiting["since"] == header["deferral"]["since"]
    assert waiting["deferrals"] >= header["deferral"]["count"]
    assert waiting["resources"] == [RESOURCE]
    see_subscribed(stage, KEY)
    holder.do("release").result(WOKEN)
    assert result.get(timeout=WOKEN) == "carried"
    assert begun(stage) == [("carried", second.hands_off)]


def see_all_done(stage: Stage, expected: Counter[str]) -> None:
    """Fail unless each has run once, by itself, and some in workers of each build."""
    stage.wait_for("end", expected.total())
    assert Counter(name for name, _ in begun(stage)) == expected
    assert {hands_off for _, hands_off in begun(stage)} == {False, True}
    assert not overlaps(stage.intervals()[KEY])


def test_workers_and_callers_of_both_builds_exclude_each_other(
    stage: Stage, earlier: Build
) -> None:
    callers = []
    for build in (earlier, THIS):
        start_worker(stage, build, build.name)
        callers.append(Caller(stage, build, KEY))
    messages = [f"message {number}" for number in range(60)]
    turns = [f"turn {number}" for number in range(20)]
    for name in messages:
        send(stage, name, task="short")
    for done in [caller.do(turn) for turn in turns for caller in callers]:
        done.result(120)
    see_all_done(stage, Counter(messages + 2 * turns))


@pytest.mark.slow
@BOTH_WAYS
def test_workers_are_replaced_one_by_one_under_a_steady_stream(
    stage: Stage, builds: tuple[Build, Build]
) -> None:
    old, new = builds
    workers = [start_worker(stage, old, f"old{number}") for number in range(3)]
    sent: list[str] = []
    is_over = threading.Event()

    def stream() -> None:
        for number in itertools.count():
            send(stage, f"message {number}", task="short")
            sent.append(f"message {number}")
            if is_over.wait(0.03):
                return

    streaming = threading.Thread(target=stream)
    streaming.start()
    try:
        for number, worker in enumerate(workers):
            stage.wait_for("end", len(stage.lines("end")) + 30)
            start_worker(stage, new, f"new{number}")
            worker.stop(60)
        stage.wait_for("end", len(stage.lines("end")) + 30)
    finally:
        is_over.set()
        streaming.join()
    see_all_done(stage, Counter(sent))


class TestTheRightsOfTheEarlierBuild:
    def test_let_callers_of_this_build_take_locks_and_be_woken(
        self, stage: Stage, limited_urls: list[str]
    ) -> None:
        holder, waiter = (Caller(stage, THIS, KEY, limited_urls) for _ in range(2))
        assert median_hand_off(stage, holder, waiter) < SPIN / 2

    def test_let_messages_in_workers_of_this_build_be_woken(
        self, stage: Stage, limited_urls: list[str]
    ) -> None:
        limited = replace(stage, env={**stage.env, "TEST_NODES": ",".join(limited_urls)})
        for name in ("w1", "w2"):
            start_worker(limited, THIS, name, queue=name)
        race(stage, Caller(stage, THIS, KEY, limited_urls), ["w1", "w2"])
        assert not any(node.client().exists(WAITERS) for node in stage.nodes)

    def test_let_a_message_be_woken_by_a_release_that_names_another_worker(
        self, stage: Stage, limited_urls: list[str]
    ) -> None:
        limited = replace(stage, env={**stage.env, "TEST_NODES": ",".join(limited_urls)})
        start_worker(limited, THIS, "limited")
        held, channel = f"{{redlock}}:lock:{RESOURCE}", f"{{redlock}}:wake:{RESOURCE}"
        for node in stage.nodes:
            node.client().set(held, "other:0:holder", px=200_000)
        result = send(stage, "woken")
        stage.see_deferred(result)
        see_waiting(stage, result, "limited")
        see_subscribed(stage, KEY)
        for node in stage.nodes:
            node.client().delete(held)
        for node in stage.nodes:  # as a release says it that named a waiter, which died of it
            assert node.client().publish(channel, "other:0:holder named") == 1
        assert result.get(timeout=WOKEN) == "woken"
