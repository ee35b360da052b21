"""Every signal is sent with its record, by the task or the Redlock that it is of."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from celery_redlock import Redlock, signals
from celery_redlock.lock.model.keys import lock_key
from tests.conftest import NODE_TIMEOUT, TTL, Nodes, eventually
from tests.integration.conftest import STANDING, Line, Stage

WORKER = STANDING
NAMES = [name for name in signals.__all__ if name.islower()]


@contextmanager
def told() -> Iterator[list[tuple[str, Any, Any]]]:
    """Give a list in which each signal of this process stands: its name, sender and record."""
    news: list[tuple[str, Any, Any]] = []
    with ExitStack() as stack:
        for name in NAMES:

            def note(sender: Any, event: Any, name: str = name, **_: Any) -> None:
                news.append((name, sender, event))

            signal = getattr(signals, name)
            signal.connect(note)
            stack.callback(signal.disconnect, note)
        yield news


def test_each_signal_has_a_record_that_cannot_be_changed() -> None:
    records = {name for name in signals.__all__ if not name.islower()}
    assert records == {name.title().replace("_", "") + "Event" for name in NAMES}
    for name in records:
        assert getattr(signals, name).__dataclass_params__.frozen, name


@pytest.mark.slow
def test_what_befalls_a_lock_and_its_nodes_is_told_in_the_redlocks_name(
    mortal_nodes: Nodes,
) -> None:
    urls = [node.url for node in mortal_nodes]
    first = f"127.0.0.1:{mortal_nodes[0].port}"
    with Redlock(urls, node_timeout=NODE_TIMEOUT) as redlock, told() as news:

        def of(name: str) -> Any:
            return next((event for kind, _, event in news if kind == name), None)

        lock = redlock.lock("s", ttl=TTL)
        lock.acquire()
        extended = eventually(lambda: of("lock_extended"))
        mortal_nodes[0].kill()
        failed = eventually(lambda: of("node_failed"))
        mortal_nodes[0].start()
        recovered = eventually(lambda: of("node_recovered"))
        for node in mortal_nodes:
            node.client().set(lock_key("redlock", "s"), "theirs", px=60_000)
        lost = eventually(lambda: of("lock_lost"))
        lock.release()
    assert {sender for _, sender, _ in news} == {redlock}
    assert of("lock_acquired") == signals.LockAcquiredEvent("s", TTL)
    assert (extended.resource, 0 < extended.remaining <= TTL) == ("s", True)
    assert (failed.node, bool(failed.cause)) == (first, True)
    assert recovered == signals.NodeRecoveredEvent(first)
    assert (lost.resource, bool(lost.reason)) == ("s", True)


def test_what_befalls_a_run_is_told_in_its_tasks_name(stage: Stage, key: str) -> None:
    stage.log.with_name("signals").touch()
    task = stage.tasks.work
    with task.lock_for(key, wait=60):
        skipped = task.apply_async((key,), lock={"on_conflict": "skip"})
        eventually(lambda: stage.info(skipped)["status"] == "REVOKED")
        deferred = task.delay(key)
        stage.see_deferred(deferred)
    deferred.get(timeout=120)
    stage.see_freed(f"k:{key}")

    def of(name: str) -> list[Line]:
        return [line for line in stage.lines(name) if line.pid != os.getpid()]

    (of_skip,) = of("lock_skipped")
    assert (of_skip.key, of_skip.more["sender"]) == (f"k:{key}", task.name)
    assert "lock_for" in of_skip.more["reason"]
    of_deferrals = [line.more for line in of("lock_deferred")]
    assert {one["sender"] for one in of_deferrals} == {task.name}
    numbers = list(range(1, len(of_deferrals) + 1))
    assert [one["deferrals"] for one in of_deferrals] == numbers
    for one in of_deferrals:
        assert "lock_for" in one["holder"]
        assert one["countdown"] > 0
    waits = [one["waited"] for one in of_deferrals]
    assert waits == sorted(waits)
    (released,) = eventually(lambda: of("lock_released"))
    (acquired,) = of("lock_acquired")
    assert acquired.more == {"sender": task.name, "ttl": 30.0, "fencing_token": 0}
    assert (released.more["sender"], released.more["by"]) == (task.name, "holder")
