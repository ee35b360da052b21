"""A pool's child that dies with a lock in its hands: its parent releases it, and never earlier."""

from __future__ import annotations

import mmap
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import celery
import pytest

from celery_redlock.tasks.children.journal import SIZE
from celery_redlock.testing import WorkerProcess
from tests.conftest import TTL, Nodes, eventually
from tests.contract.proxy import FAIR, Proxy, Way, Weather, proxies
from tests.integration.conftest import ROOT, Line, MakeStage, Stage, slow_but

WORKER = {"concurrency": 4}
THEIRS = "theirs"  # a value that another's lock has
PIDFD = "anon_inode:[pidfd]"  # what /proc calls a descriptor of a process

only_5_7 = pytest.mark.skipif(
    celery.__version__ < "5.7", reason="Celery has retry_on_worker_lost from 5.7 on"
)


def staying(stage: Stage, *keys: str) -> list[Line]:
    def lines() -> dict[str, Line]:
        return {line.key: line for line in stage.lines("stays")}

    eventually(lambda: lines().keys() >= set(keys))
    return [lines()[key] for key in keys]


def key_of(resource: str) -> str:
    return f"{{redlock}}:lock:{resource}"


def holds_everywhere(stage: Stage, resource: str) -> bool:
    return all(node.client().exists(key_of(resource)) for node in stage.nodes)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def see_released_by_the_parent(stage: Stage, worker: WorkerProcess, line: Line) -> None:
    """Return when a dead body's lock is free, the log says why, and a signal has told of it."""
    stage.see_freed(f"k:{line.key}")
    says = f"process {line.pid} exited: released its lock 'k:{line.key}'"
    eventually(lambda: says in worker.output())
    resource, what = f"k:{line.key}", "parent's release"
    told = eventually(lambda: [t for t in stage.lines(what) if t.key == resource])
    assert [t.pid for t in told] == [worker.pid]
    assert told[0].more["sender"].startswith("tests.stays")


@pytest.mark.parametrize("late", [False, True], ids=["acks early", "acks late"])
def test_the_lock_of_a_killed_child_is_released(
    stage: Stage, key: str, worker: WorkerProcess, late: bool
) -> None:
    result = (stage.tasks.stays_late if late else stage.tasks.stays).delay(key)
    [line] = staying(stage, key)
    os.kill(line.pid, signal.SIGKILL)
    if late:  # it comes back, and takes the lock anew
        assert result.get(timeout=120) == "again"
        assert len(stage.lines("stays again")) == 1
    see_released_by_the_parent(stage, worker, line)


def test_a_killed_childs_lock_is_released_before_celery_reports_the_child(
    stage: Stage, key: str, worker: WorkerProcess
) -> None:
    stage.tasks.stays.delay(key)
    [line] = staying(stage, key)
    before = len(worker.output())
    os.kill(line.pid, signal.SIGKILL)
    see_released_by_the_parent(stage, worker, line)
    said = eventually(lambda: "WorkerLostError" in (text := worker.output()[before:]) and text)
    assert said.index(f"process {line.pid} exited: released its lock") < said.index(
        "WorkerLostError"
    )


def test_a_receiver_that_exits_does_not_end_the_watch_over_children(
    stage: Stage, key: str, worker: WorkerProcess
) -> None:
    """Each child that dies after that would leave its locks to their ttl."""
    stage.log.with_name("receiver exits once").touch()
    for own in (f"{key}-first", f"{key}-second"):
        stage.tasks.stays.delay(own)
        [line] = staying(stage, own)
        os.kill(line.pid, signal.SIGKILL)
        see_released_by_the_parent(stage, worker, line)
    assert "watching the pool's processes failed" in worker.output()


def shared_with_children(pid: int) -> int:
    """Return how many slots of children a process has in its memory; 0 if it has gone."""
    pages = -(-SIZE // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    spans = [line.split()[0].split("-") for line in maps if "/dev/zero" in line]
    return len([span for span in spans if int(span[1], 16) - int(span[0], 16) == pages])


def descriptors_of(pid: int) -> list[str]:
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found.append(str(link.readlink()))
    return found


def children_of(pid: int) -> list[int]:
    every = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [child for child in map(int, every) if shared_with_children(child)]


def test_children_that_come_and_go_leave_nothing_behind(
    make_stage: MakeStage, nodes: Nodes, tmp_path: Path
) -> None:
    stage = make_stage(nodes, redlock_metrics="127.0.0.1:0")
    (folder := tmp_path / "temporary").mkdir()
    stage.env["TMPDIR"] = str(folder)
    children = 3
    worker = stage.worker(concurrency=children, options=["--max-tasks-per-child", "1"])
    stage.tasks.until.delay("stays", "go")  # its child lives while the others come and go
    (staying,) = stage.wait_for("begin")

    def run(count: int) -> None:
        for result in [stage.tasks.work.delay(f"k{number}") for number in range(count)]:
            result.get(timeout=120)
        eventually(lambda: shared_with_children(worker.pid) == children)
        eventually(lambda: descriptors_of(worker.pid).count(PIDFD) == children)

    run(2)
    before, files = len(descriptors_of(worker.pid)), len([*folder.rglob("*")])
    assert files
    more = 12
    run(more)
    assert len({line.pid for line in stage.lines("begin")}) == 1 + 2 + more
    # what one child leaves behind is 12 by now; a child that is being started has a pipe or two,
    # and the worker may connect to each node meanwhile, to write and to hear
    eventually(lambda: len(descriptors_of(worker.pid)) < before + more)
    assert len([*folder.rglob("*")]) == files

    def each_has_its_own() -> bool:
        """Return whether no child has what its parent had as it forked; one may be leaving."""
        others = set(children_of(worker.pid)) - {staying.pid}
        with suppress(FileNotFoundError):  # it left meanwhile
            inherited = [child for child in others if PIDFD in descriptors_of(child)]
            return bool(others) and not inherited and {*map(shared_with_children, others)} == {1}
        return False

    eventually(each_has_its_own)  # each was forked while its parent watched the one that stays
    stage.log.with_name("go").touch()
    worker.signal(signal.SIGTERM)
    worker.wait()
    assert not [*folder.rglob("*")]


def test_the_lock_of_a_killed_child_of_a_custom_pool_is_released(
    own_stage: Stage,
) -> None:
    stage = own_stage
    # a process of its own: Celery reads the name as it is imported
    env = {**stage.env, "CELERY_CUSTOM_WORKER_POOL": "tests.integration.pools:ForkingPool"}
    worker = WorkerProcess("tests.integration.app", pool="custom", concurrency=1, env=env, cwd=ROOT)
    stage.stack.push(worker)
    stage.stack.callback(worker.kill)
    worker.start()
    stage.tasks.stays.delay("k")
    [line] = staying(stage, "k")
    assert line.pid != worker.pid
    os.kill(line.pid, signal.SIGKILL)
    see_released_by_the_parent(stage, worker, line)


@pytest.mark.parametrize("how", slow_but(["segfault"], ["segfault", "_exit"]))
def test_the_lock_of_a_child_that_ends_by_itself_is_released(
    stage: Stage, key: str, worker: WorkerProcess, how: str
) -> None:
    stage.tasks.stays.delay(key, how)
    [line] = staying(stage, key)
    see_released_by_the_parent(stage, worker, line)


def test_a_message_that_waits_runs_after_the_killed_holder(stage: Stage, key: str) -> None:
    stage.tasks.stays.delay(key)
    [line] = staying(stage, key)
    waiting = stage.tasks.work.delay(key)
    eventually(lambda: stage.deferrals(waiting) > 0)
    os.kill(line.pid, signal.SIGKILL)
    assert waiting.get(timeout=120) == 0
    assert stage.lines("begin")[0].at > stage.lines("still")[-1].at


@only_5_7
def test_a_message_that_is_retried_on_a_lost_worker_runs_again(stage: Stage, key: str) -> None:
    result = stage.tasks.stays_retried.delay(key)
    [line] = staying(stage, key)
    os.kill(line.pid, signal.SIGKILL)
    stage.see_freed(f"k:{key}")
    assert result.get(timeout=120) == "again"
    assert len(stage.lines("stays again")) == 1


@pytest.mark.parametrize("name", ["KILL", "TERM"])
def test_a_run_that_is_revoked_with_a_signal_leaves_no_lock(
    stage: Stage, key: str, name: str
) -> None:
    result = stage.tasks.stays.delay(key)
    staying(stage, key)
    result.revoke(terminate=True, signal=name)
    stage.see_freed(f"k:{key}")
    assert stage.tasks.work.delay(key).get(timeout=120) == 0
    eventually(lambda: stage.info(result)["status"] == "REVOKED")


def test_a_body_past_its_hard_limit_that_ignores_term_is_never_overlapped(
    stage: Stage, key: str
) -> None:
    for limit in (2, 8, 32):  # s: a body that begins late is cut before it ignores anything
        result = stage.tasks.stays.apply_async((key, "deaf"), time_limit=limit)
        eventually(lambda result=result: is_past_its_start(stage, key, result))
        if stage.lines("still"):
            break
    staying(stage, key)
    assert stage.tasks.work.apply_async((key,), lock={"wait": 60}).get(timeout=120) == 0
    [begun] = stage.lines("begin")
    assert begun.at > stage.lines("still")[-1].at


def is_past_its_start(stage: Stage, key: str, result: Any) -> bool:
    begun = any(line.key == key for line in stage.lines("still"))
    return begun or bool(stage.info(result)["status"] == "FAILURE")


def test_nothing_is_released_while_a_revoked_child_still_runs(
    stage: Stage, key: str, worker: WorkerProcess
) -> None:
    revoked = stage.tasks.stays.delay(f"{key}-deaf", "deaf")
    stage.tasks.stays.delay(f"{key}-other")
    deaf, other = staying(stage, f"{key}-deaf", f"{key}-other")
    eventually(lambda: holds_everywhere(stage, f"k:{key}-deaf"))  # its body has but a quorum
    eventually(lambda: any(line.key == deaf.key for line in stage.lines("still")))  # hears no TERM
    revoked.revoke(terminate=True, signal="TERM")
    eventually(lambda: stage.info(revoked)["status"] == "REVOKED")  # so Celery's hooks have run
    os.kill(other.pid, signal.SIGKILL)
    see_released_by_the_parent(stage, worker, other)  # so the parent looks after its children
    assert holds_everywhere(stage, f"k:{key}-deaf")
    assert not is_gone(deaf.pid)
    os.kill(deaf.pid, signal.SIGKILL)
    see_released_by_the_parent(stage, worker, deaf)


def test_nothing_is_released_while_a_child_is_stopped(
    stage: Stage, key: str, worker: WorkerProcess
) -> None:
    stage.tasks.stays.delay(f"{key}-stopped")
    stage.tasks.stays.delay(f"{key}-other")
    stopped, other = staying(stage, f"{key}-stopped", f"{key}-other")
    eventually(lambda: holds_everywhere(stage, f"k:{key}-stopped"))  # its body has but a quorum
    os.kill(stopped.pid, signal.SIGSTOP)
    os.kill(other.pid, signal.SIGKILL)
    see_released_by_the_parent(stage, worker, other)
    assert holds_everywhere(stage, f"k:{key}-stopped")
    os.kill(stopped.pid, signal.SIGKILL)
    see_released_by_the_parent(stage, worker, stopped)


def test_a_successors_lock_is_left_alone(stage: Stage, key: str, worker: WorkerProcess) -> None:
    stage.tasks.stays.apply_async((key,), lock={"on_lost": "warn"})
    stage.tasks.stays.delay(f"{key}-other")
    line, other = staying(stage, key, f"{key}-other")
    for node in stage.nodes:
        node.client().set(key_of(f"k:{key}"), THEIRS, px=300_000)
    os.kill(line.pid, signal.SIGKILL)
    eventually(lambda: f"process {line.pid} exited: released its lock 'k:{key}'" in worker.output())
    os.kill(other.pid, signal.SIGKILL)
    stage.see_freed(f"k:{key}-other")  # on the same connections, behind the release of the first
    assert [node.client().get(key_of(f"k:{key}")) for node in stage.nodes] == [THEIRS] * 3


def test_all_locks_of_a_killed_child_are_released(stage: Stage, key: str) -> None:
    stage.tasks.stays_with_several.delay(f"{key}-one", f"{key}-other", f"{key}-nested")
    [line] = staying(stage, f"{key}-one")
    held = [f"k:{key}-one", f"k:{key}-other", f"k:{key}-nested"]
    # its body has but a quorum
    eventually(lambda: all(holds_everywhere(stage, resource) for resource in held))
    permits = [
        key_of(f"p:{key}-nested"),
        *(key_of(f"p:{key}-nested#{number}") for number in (1, 2)),
    ]
    eventually(lambda: stage.nodes[0].client().exists(*permits) == 1)
    os.kill(line.pid, signal.SIGKILL)
    stage.see_freed(*held)
    eventually(lambda: not any(node.client().exists(*permits) for node in stage.nodes))

    def released() -> set[str]:  # an earlier test's child may be released as late as now
        return {told.key for told in stage.lines("parent's release") if f"{key}-" in told.key}

    eventually(lambda: len(released()) >= 3)
    assert released() == {f"k:{key}-one, k:{key}-other", f"k:{key}-nested", f"p:{key}-nested"}


@pytest.mark.slow
def test_each_child_in_the_same_place_of_the_pool_is_looked_after(own_stage: Stage) -> None:
    stage = own_stage
    worker = stage.worker(concurrency=1)
    for key in ("first", "second", "third"):
        stage.tasks.stays.delay(key)
        eventually(lambda key=key: [line for line in stage.lines("stays") if line.key == key])
        line = stage.lines("stays")[-1]
        os.kill(line.pid, signal.SIGKILL)
        see_released_by_the_parent(stage, worker, line)


@pytest.mark.slow
def test_a_child_that_joined_the_pool_later_is_looked_after(own_stage: Stage) -> None:
    stage = own_stage
    worker = stage.worker(concurrency=1)
    stage.see_listening()
    stage.app.control.pool_grow(1)
    for key in ("one", "two"):
        stage.tasks.stays.delay(key)
    for line in staying(stage, "one", "two"):
        os.kill(line.pid, signal.SIGKILL)
        see_released_by_the_parent(stage, worker, line)


@pytest.mark.slow  # as the one above, by the pool's other way to grow
def test_a_child_of_a_pool_that_began_empty_is_looked_after(own_stage: Stage) -> None:
    stage = own_stage
    worker = stage.worker(options=["--autoscale", "1,0"])
    stage.tasks.stays.delay("k")
    [line] = staying(stage, "k")
    os.kill(line.pid, signal.SIGKILL)
    see_released_by_the_parent(stage, worker, line)


@pytest.mark.slow
def test_a_child_that_ends_after_it_was_refused_is_no_news(own_stage: Stage) -> None:
    stage = own_stage
    worker = stage.worker(concurrency=1, options=["--max-tasks-per-child", "1"])
    with stage.tasks.work.lock_for("k", wait=60):
        result = stage.tasks.work.delay("k")
        stage.see_deferred(result)
    assert result.get(timeout=120) == 0
    assert "exited: released" not in worker.output()


def test_a_child_killed_between_its_request_and_the_answer_leaves_no_lock(
    make_stage: MakeStage, nodes: Nodes
) -> None:
    with proxies(nodes) as before:
        stage = make_stage(before)
        stage.nodes = nodes
        worker = stage.worker(concurrency=1)
        assert any(kills_in_between(stage, before, f"k{turn}") for turn in range(10))
        assert not stage.lines("stays"), "a body ran, so a request was answered"
        worker.kill()


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
    make_stage: MakeStage, mortal_nodes: Nodes
) -> None:
    stage = make_stage(mortal_nodes)
    worker = stage.worker(concurrency=1)
    stage.tasks.stays.delay("k")
    [line] = staying(stage, "k")
    eventually(lambda: holds_everywhere(stage, "k:k"))
    mortal_nodes[0].pause()
    os.kill(line.pid, signal.SIGKILL)
    eventually(lambda: f"process {line.pid} exited: released its lock 'k:k'" in worker.output())
    eventually(lambda: not any(n.client().exists(key_of("k:k")) for n in mortal_nodes[1:]))
    mortal_nodes[0].resume()
    stage.see_freed("k:k")


@pytest.mark.slow
def test_children_end_with_their_main_process_and_the_ttl_frees_their_locks(
    own_stage: Stage,
) -> None:
    stage = own_stage
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
