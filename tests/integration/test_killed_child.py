"""A pool's child that dies with a lock in its hands: its parent releases it, and never earlier."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import celery
import pytest

from celery_redlock.testing import EmbeddedNode, WorkerProcess
from tests.conftest import TTL, eventually
from tests.contract.proxy import FAIR, Proxy, Way, Weather, proxies
from tests.integration.conftest import Line, Stage

THEIRS = "theirs"  # a value that another's lock has

only_5_7 = pytest.mark.skipif(
    celery.__version__ < "5.7", reason="Celery has retry_on_worker_lost from 5.7 on"
)


def staying(stage: Stage, *keys: str) -> list[Line]:
    """Return the first line of the bodies that stay with these keys, in this order."""
    stage.wait_for("stays", len(keys))
    lines = {line.key: line for line in stage.lines("stays")}
    return [lines[key] for key in keys]


def key_of(resource: str) -> str:
    return f"{{redlock}}:lock:{resource}"


def holds_everywhere(stage: Stage, resource: str) -> bool:
    return all(node.client().exists(key_of(resource)) for node in stage.nodes)


def is_gone(pid: int) -> bool:
    """Tell whether a process runs no more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def see_released_by_the_parent(stage: Stage, worker: WorkerProcess, line: Line) -> None:
    """Return when a dead body's lock is free, the log says why, and a signal has told of it."""
    stage.see_freed(f"k:{line.key}")
    says = f"process {line.pid} is gone: released 'k:{line.key}' for it"
    eventually(lambda: says in worker.output())
    told = eventually(lambda: [t for t in stage.lines("parent's release") if line.key in t.key])
    assert [(t.pid, t.key) for t in told] == [(worker.pid, f"k:{line.key}")]
    assert told[0].more["sender"].startswith("tests.stays")


@pytest.mark.parametrize("late", [False, True], ids=["acks early", "acks late"])
def test_the_lock_of_a_killed_child_is_released(stage: Stage, late: bool) -> None:
    worker = stage.worker(concurrency=1)
    (stage.tasks.stays_late if late else stage.tasks.stays).delay("k")
    [line] = staying(stage, "k")
    os.kill(line.pid, signal.SIGKILL)
    if late:  # it comes back, and takes the lock anew
        stage.wait_for("stays again")
    see_released_by_the_parent(stage, worker, line)


def test_a_killed_childs_lock_is_released_before_celery_reports_the_child(stage: Stage) -> None:
    worker = stage.worker(concurrency=1)
    stage.tasks.stays.delay("k")
    [line] = staying(stage, "k")
    os.kill(line.pid, signal.SIGKILL)
    see_released_by_the_parent(stage, worker, line)
    said = eventually(lambda: "WorkerLostError" in (text := worker.output()) and text)
    assert said.index(f"process {line.pid} is gone: released") < said.index("WorkerLostError")


@pytest.mark.parametrize("how", ["segfault", "_exit"])
def test_the_lock_of_a_child_that_ends_by_itself_is_released(stage: Stage, how: str) -> None:
    worker = stage.worker(concurrency=1)
    stage.tasks.stays.delay("k", how)
    [line] = staying(stage, "k")
    see_released_by_the_parent(stage, worker, line)


def test_a_message_that_waits_runs_after_the_killed_holder(stage: Stage) -> None:
    stage.worker(concurrency=2)
    stage.tasks.stays.delay("k")
    [line] = staying(stage, "k")
    waiting = stage.tasks.work.delay("k")
    eventually(lambda: stage.deferrals(waiting) > 0)
    os.kill(line.pid, signal.SIGKILL)
    assert waiting.get(timeout=120) == 0
    assert stage.lines("begin")[0].at > stage.lines("still")[-1].at


def test_a_message_that_is_rejected_on_a_lost_worker_waits_and_runs_again(stage: Stage) -> None:
    stage.worker(concurrency=1)
    result = stage.tasks.stays_late.delay("k")
    [line] = staying(stage, "k")
    os.kill(line.pid, signal.SIGKILL)
    stage.see_freed("k:k")
    assert result.get(timeout=120) == "again"
    assert len(stage.lines("stays again")) == 1


@only_5_7
def test_a_message_that_is_retried_on_a_lost_worker_runs_again(stage: Stage) -> None:
    stage.worker(concurrency=1)
    result = stage.tasks.stays_retried.delay("k")
    [line] = staying(stage, "k")
    os.kill(line.pid, signal.SIGKILL)
    stage.see_freed("k:k")
    assert result.get(timeout=120) == "again"
    assert len(stage.lines("stays again")) == 1


@pytest.mark.parametrize("name", ["KILL", "TERM"])
def test_a_run_that_is_revoked_with_a_signal_leaves_no_lock(stage: Stage, name: str) -> None:
    stage.worker(concurrency=1)
    result = stage.tasks.stays.delay("k")
    staying(stage, "k")
    result.revoke(terminate=True, signal=name)
    stage.see_freed("k:k")
    assert stage.tasks.work.delay("k").get(timeout=120) == 0
    eventually(lambda: stage.info(result)["status"] == "REVOKED")


def test_a_body_past_its_hard_limit_that_ignores_term_is_never_overlapped(stage: Stage) -> None:
    stage.worker(concurrency=2)
    stage.tasks.stays.apply_async(("k", "deaf"), time_limit=3)
    staying(stage, "k")
    assert stage.tasks.work.apply_async(("k",), lock={"wait": 60}).get(timeout=25) == 0
    [begun] = stage.lines("begin")
    assert begun.at > stage.lines("still")[-1].at


def test_nothing_is_released_while_a_revoked_child_still_runs(stage: Stage) -> None:
    worker = stage.worker(concurrency=2)
    revoked = stage.tasks.stays.delay("deaf", "deaf")
    stage.tasks.stays.delay("other")
    deaf, other = staying(stage, "deaf", "other")
    revoked.revoke(terminate=True, signal="TERM")
    eventually(lambda: stage.info(revoked)["status"] == "REVOKED")  # so Celery's hooks have run
    os.kill(other.pid, signal.SIGKILL)
    see_released_by_the_parent(stage, worker, other)  # so the parent looks after its children
    assert holds_everywhere(stage, "k:deaf")
    assert not is_gone(deaf.pid)
    os.kill(deaf.pid, signal.SIGKILL)
    see_released_by_the_parent(stage, worker, deaf)


def test_nothing_is_released_while_a_child_is_stopped(stage: Stage) -> None:
    worker = stage.worker(concurrency=2)
    stage.tasks.stays.delay("stopped")
    stage.tasks.stays.delay("other")
    stopped, other = staying(stage, "stopped", "other")
    eventually(lambda: holds_everywhere(stage, "k:stopped"))  # its body has but a quorum
    os.kill(stopped.pid, signal.SIGSTOP)
    os.kill(other.pid, signal.SIGKILL)
    see_released_by_the_parent(stage, worker, other)
    assert holds_everywhere(stage, "k:stopped")
    os.kill(stopped.pid, signal.SIGKILL)
    see_released_by_the_parent(stage, worker, stopped)


def test_a_successors_lock_is_left_alone(stage: Stage) -> None:
    worker = stage.worker(concurrency=2)
    stage.tasks.stays.apply_async(("k",), lock={"lost": "warn"})
    stage.tasks.stays.delay("other")
    line, other = staying(stage, "k", "other")
    for node in stage.nodes:
        node.client().set(key_of("k:k"), THEIRS, px=300_000)
    os.kill(line.pid, signal.SIGKILL)
    eventually(lambda: f"process {line.pid} is gone: released 'k:k'" in worker.output())
    os.kill(other.pid, signal.SIGKILL)
    stage.see_freed("k:other")  # on the same connections, behind the release of the first
    assert [node.client().get(key_of("k:k")) for node in stage.nodes] == [THEIRS] * 3


def test_all_locks_of_a_killed_child_are_released(stage: Stage) -> None:
    stage.worker(concurrency=1)
    stage.tasks.stays_with_several.delay("one", "other", "nested")
    [line] = staying(stage, "one")
    held = ["k:one", "k:other", "k:nested"]
    assert all(holds_everywhere(stage, resource) for resource in held)
    permits = [key_of("p:nested"), *(key_of(f"p:nested#{number}") for number in (1, 2))]
    assert stage.nodes[0].client().exists(*permits) == 1
    os.kill(line.pid, signal.SIGKILL)
    stage.see_freed(*held)
    eventually(lambda: not any(node.client().exists(*permits) for node in stage.nodes))
    released = {told.key for told in stage.wait_for("parent's release", 3)}
    assert released == {"k:one, k:other", "k:nested", "p:nested"}


def test_each_child_in_the_same_place_of_the_pool_is_looked_after(stage: Stage) -> None:
    worker = stage.worker(concurrency=1)
    for key in ("first", "second", "third"):
        stage.tasks.stays.delay(key)
        eventually(lambda key=key: [line for line in stage.lines("stays") if line.key == key])
        line = stage.lines("stays")[-1]
        os.kill(line.pid, signal.SIGKILL)
        see_released_by_the_parent(stage, worker, line)


def test_a_child_that_joined_the_pool_later_is_looked_after(stage: Stage) -> None:
    worker = stage.worker(concurrency=1)
    stage.see_listening()
    stage.app.control.pool_grow(1)
    for key in ("one", "two"):
        stage.tasks.stays.delay(key)
    for line in staying(stage, "one", "two"):
        os.kill(line.pid, signal.SIGKILL)
        see_released_by_the_parent(stage, worker, line)


def test_a_child_of_a_pool_that_began_empty_is_looked_after(stage: Stage) -> None:
    worker = stage.worker(options=["--autoscale", "1,0"])
    stage.tasks.stays.delay("k")
    [line] = staying(stage, "k")
    os.kill(line.pid, signal.SIGKILL)
    see_released_by_the_parent(stage, worker, line)


def test_a_child_that_ends_after_it_was_refused_is_no_news(stage: Stage) -> None:
    worker = stage.worker(concurrency=1, options=["--max-tasks-per-child", "1"])
    with stage.tasks.work.lock_for("k", wait=60):
        result = stage.tasks.work.delay("k")
        stage.see_deferred(result, 3)
    assert result.get(timeout=120) == 0
    assert "is gone: released" not in worker.output()


def test_a_child_killed_between_its_request_and_the_answer_leaves_no_lock(
    make_stage: Callable[..., Stage], nodes: list[EmbeddedNode]
) -> None:
    with proxies(nodes) as before:
        stage = make_stage(before)
        stage.nodes = nodes
        worker = stage.worker(concurrency=1)
        assert any(kills_in_between(stage, before, f"k{turn}") for turn in range(10))
        assert not stage.lines("stays"), "a body ran, so a request was answered"
        worker.stop()


def kills_in_between(stage: Stage, before: list[Proxy], key: str) -> bool:
    """Kill the only child while no answer comes through; False where it had given up by then."""
    stage.tasks.work.delay(f"first-{key}").get(timeout=120)  # so that it is connected
    child = stage.lines("begin")[-1].pid
    for proxy in before:
        proxy.weather = Weather(swallows=frozenset({Way.TO_CLIENT}))
    result = stage.tasks.stays.delay(key)
    eventually(lambda: holds_everywhere(stage, f"k:{key}"))
    os.kill(child, signal.SIGKILL)
    eventually(lambda: is_gone(child))
    in_between = stage.info(result)["status"] == "PENDING"  # else it would be DEFERRED
    for proxy in before:
        proxy.weather = FAIR
    stage.see_freed(f"k:{key}")
    return in_between


def test_a_node_that_was_away_is_told_when_it_is_back(
    make_stage: Callable[..., Stage], mortal_nodes: list[EmbeddedNode]
) -> None:
    stage = make_stage(mortal_nodes)
    worker = stage.worker(concurrency=1)
    stage.tasks.stays.delay("k")
    [line] = staying(stage, "k")
    eventually(lambda: holds_everywhere(stage, "k:k"))
    mortal_nodes[0].pause()
    os.kill(line.pid, signal.SIGKILL)
    eventually(lambda: f"process {line.pid} is gone: released 'k:k'" in worker.output())
    eventually(lambda: not any(n.client().exists(key_of("k:k")) for n in mortal_nodes[1:]))
    mortal_nodes[0].resume()
    stage.see_freed("k:k")


def test_children_end_with_their_main_process_and_the_ttl_frees_their_locks(stage: Stage) -> None:
    killed = stage.worker("w1", concurrency=1, queues=["held"])
    other = stage.worker("w2", concurrency=1, queues=["celery"])
    stage.tasks.stays.apply_async(("k",), queue="held", lock={"ttl": TTL})
    [line] = staying(stage, "k")
    waiting = stage.tasks.work.delay("k")
    eventually(lambda: stage.deferrals(waiting) > 0)
    killed.signal(signal.SIGKILL)
    eventually(lambda: is_gone(line.pid))
    assert waiting.get(timeout=120) == 0
    assert stage.lines("begin")[0].at > stage.lines("still")[-1].at
    assert "is gone" not in other.output()
