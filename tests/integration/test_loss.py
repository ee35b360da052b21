"""A lock lost in mid-run: its body is told where its pool can, and never ends as SUCCESS."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_redlock import LockLost
from celery_redlock.testing import WorkerProcess
from tests.clocks import HOUR, WallClock
from tests.conftest import TTL, eventually
from tests.integration.conftest import (
    ROOT,
    Stage,
    Standing,
    StandingStages,
    overlaps,
    slow_but,
)
from tests.integration.deliveries import heard

INTERRUPTING = ("prefork", "solo", "gevent")
POOLS = (*INTERRUPTING, "threads")
FAST = ("prefork",)
WAYS = ("sleeps", "works in steps", "logs", "takes others")
# one that is to be lost may be short: if a stall ends it before it is taken away, it is lost, too
CONF = {"redlock_node_timeout": 1.0}
BRIEF = {"ttl": 4.0}


@pytest.fixture
def struck(
    request: pytest.FixtureRequest, standing_stages: StandingStages, pool: str
) -> Iterator[Standing]:
    """Give a stage with a worker of a pool, for all tests here; each has keys of its own."""
    slots = 1 if pool == "solo" else 5
    how = {"conf": CONF, "pool": pool, "concurrency": slots, "options": ["-E"]}
    with standing_stages.lend(request.node, **how) as lent:
        yield lent


def take_away(stage: Stage, key: str) -> None:
    """Let the lock of a key be another's on all nodes; the holder finds out when it renews."""
    for node in stage.nodes:
        node.client().set(f"{{redlock}}:lock:k:{key}", "theirs", px=300_000)


def outcome(stage: Stage, result: Any) -> Any:
    eventually(lambda: stage.info(result)["status"] in ("SUCCESS", "FAILURE"), within=120)
    return stage.info(result)["result"]


def see_lost(stage: Stage, result: Any, body: str = "its body had not ended") -> None:
    lost = outcome(stage, result)
    assert isinstance(lost, LockLost), lost
    assert body in str(lost)


def begin(stage: Stage, task: Any, key: str, *args: Any, **options: Any) -> Any:
    """Run a body under a brief lock; return its result once it runs."""
    result = task.apply_async((key, *args), lock={**BRIEF, **options})
    eventually(lambda: stage.runs_of(key))
    return result


@pytest.mark.parametrize("pool", slow_but(FAST, INTERRUPTING))
def test_a_body_is_interrupted_whatever_it_does(struck: Standing, pool: str, key: str) -> None:
    stage = struck.stage
    early, late = stage.tasks.holds_on, stage.tasks.holds_on_late
    ways = (*WAYS, "computes") if pool in ("prefork", "solo") else WAYS
    for together in [(way,) for way in ways] if pool == "solo" else [ways]:
        results = {
            how: begin(stage, late if how == "sleeps" else early, f"{key}-{how}", how)
            for how in together
        }
        for how in together:
            take_away(stage, f"{key}-{how}")
        for how, result in results.items():
            own = f"{key}-{how}"
            see_lost(stage, result)
            assert not stage.is_free(f"k:{own}"), "its release touched another's key"
            told = [line for line in stage.lines("told") if line.key == own]
            assert [line.more for line in told] == [{"ended": False}]
    pids = {line.pid for line in stage.lines("begin")}
    assert outcome(stage, stage.tasks.work.delay(key)) == 0
    assert all(Path(f"/proc/{pid}").exists() for pid in pids), "its child lives on"
    stage.see_freed(*(f"k:{key}-takes others-{number}" for number in (0, 4)))


@pytest.mark.parametrize("ahead", slow_but([HOUR], [HOUR, -HOUR]), ids=["forward", "back"])
def test_a_workers_wall_clock_that_is_set_changes_nothing_under_a_held_lock(
    own_stage: Stage, wall_clock: WallClock, ahead: int
) -> None:
    stage = own_stage
    stage.worker("rival", queues=["waiting"], concurrency=1)
    start_clocked(stage, wall_clock, "clocked")
    result = stage.tasks.waits.apply_async(("k",), queue="held")
    stage.wait_for("begin")
    wall_clock.set(ahead)
    rival = stage.tasks.work.apply_async(("k",), queue="waiting")
    for _ in range(2):  # what believed that clock would renew at once too late, or never again
        see_renewed(stage, "k")
    stage.see_deferred(rival)
    assert len(stage.lines("begin")) == 1
    stage.log.with_name("go on").touch()
    assert result.get(timeout=120) is None
    assert [line.more["held"] for line in stage.lines("waited")] == [True]
    assert rival.get(timeout=120) == 0
    assert not overlaps(stage.intervals()["k"])
    stage.see_freed("k:k")
    its_time = stage.tasks.clock.apply_async(queue="held").get(timeout=120)
    assert abs(its_time - time.time() - ahead) < HOUR / 2, "its clock was not set"


def start_clocked(stage: Stage, wall_clock: WallClock, name: str) -> None:
    """Start a worker of "held" with that clock.

    It is a process of its own, for that is when its library is preloaded.
    """
    worker = WorkerProcess(
        "tests.integration.app", name=name, queues=["held"], concurrency=1,
        env={**stage.env, **wall_clock.environment}, cwd=ROOT,
    )  # fmt: skip
    stage.stack.push(worker)
    stage.stack.callback(worker.kill)
    worker.start()


def see_renewed(stage: Stage, *keys: str) -> None:
    """Return when each key's lock has been renewed once more."""
    client = stage.nodes[0].client()

    def ends() -> list[float]:
        now = time.monotonic()
        return [now + client.pttl(f"{{redlock}}:lock:k:{key}") / 1000 for key in keys]

    before = ends()
    eventually(lambda: all(b > a + TTL / 10 for a, b in zip(before, ends(), strict=True)))


@pytest.mark.parametrize("pool", ["threads"])
def test_a_thread_is_told_when_it_asks(struck: Standing, pool: str, key: str) -> None:
    stage = struck.stage
    result = begin(stage, stage.tasks.holds_on, key, "asks")
    take_away(stage, key)
    see_lost(stage, result)


@pytest.mark.parametrize("pool", slow_but(FAST, POOLS))
def test_a_body_that_ends_without_its_lock_is_no_success(
    struck: Standing, pool: str, key: str
) -> None:
    stage = struck.stage
    ends = ("return", "raise", "ignore", "retry")
    results = {}
    for together in [(how,) for how in ends] if pool == "solo" else [ends]:
        for how in together:
            results[how] = begin(stage, stage.tasks.swallows, f"{key}-{how}", how)
        for how in together:
            if how == "retry":  # for a while only: the retry takes it anew
                for node in stage.nodes:
                    node.client().delete(f"{{redlock}}:lock:k:{key}-{how}")
            else:
                take_away(stage, f"{key}-{how}")
    see_lost(stage, results["return"], "its body had ended")
    assert isinstance(outcome(stage, results["raise"]), ValueError)
    eventually(lambda: stage.lines("swallowed:ignore"))
    assert outcome(stage, results["retry"]) == "again"
    assert stage.info(results["ignore"])["status"] != "SUCCESS"


@pytest.mark.slow
def test_a_greenlet_that_never_gives_way_is_renewed(own_stage: Stage) -> None:
    stage = own_stage
    stage.worker(pool="gevent", concurrency=2)
    result = stage.tasks.gives_nobody_way.delay("k", TTL + 2, in_c=False)
    assert outcome(stage, result) is True


@pytest.mark.slow
def test_a_body_that_keeps_the_interpreter_for_itself_is_no_success(own_stage: Stage) -> None:
    stage = own_stage
    stage.worker(concurrency=1)
    result = stage.tasks.gives_nobody_way.delay("k", TTL + 2, in_c=True)
    see_lost(stage, result, "its body had")
    stage.see_freed("k:k")


@pytest.mark.parametrize("pool", FAST)
def test_autoretry_covers_a_loss_where_the_task_says_so(
    struck: Standing, pool: str, key: str
) -> None:
    stage = struck.stage
    assert outcome(stage, stage.tasks.autoretried_loss.delay(key)) == 1
    assert stage.runs_of(key) == 2
    stage.see_freed(f"k:{key}")


@pytest.mark.parametrize("pool", slow_but(FAST, INTERRUPTING))
@pytest.mark.parametrize(
    "nested", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "nested locks"]
)
def test_a_loss_about_the_end_of_a_body_strikes_nothing_else(
    struck: Standing, pool: str, nested: bool, key: str
) -> None:
    stage, (worker,) = struck.stage, struck.workers
    # it acknowledges late, so that its lock is there to be lost while Celery stores its result
    task, outcomes = stage.tasks.ends_about_then, Counter[str]()
    keys: list[str] = []
    for scale in (2e-5, 8e-5, 3e-4):  # s: how soon a body is told depends on the machine
        names = [f"{key}-{scale}-{n}" for n in range(40)]
        results = [task.delay(name, n**2 * scale, nested) for n, name in enumerate(names)]
        keys += names
        for result in results:
            ended = outcome(stage, result)
            outcomes[ended[0] if isinstance(ended, list) else type(ended).__name__] += 1
            raised = stage.info(result)["traceback"] or "in ends_about_then"
            assert "in ends_about_then" in raised or "its body had ended" in raised, raised
        if outcomes["LockLost"]:
            break
    assert set(outcomes) <= {"ended", "LockLost"}, outcomes
    assert outcomes["LockLost"], "none was struck, so nothing was tested"
    begun = Counter(line.key for line in stage.lines("begin") if line.key != f"{key}-another")
    assert set(begun.values()) == {1}
    assert outcome(stage, stage.tasks.work.delay(f"{key}-another")) == 0
    assert "exited" not in worker.lately()
    stage.see_freed(*(f"k:{each}" for each in keys), *(f"k:nested-{each}" for each in keys))


@pytest.mark.parametrize(
    ("pool", "lost"),
    slow_but(
        [("prefork", "abort"), ("threads", "abort"), ("prefork", "warn")],
        [*((pool, "abort") for pool in POOLS), ("prefork", "warn"), ("gevent", "warn")],
    ),
)
def test_a_loss_is_told_as_an_event(struck: Standing, pool: str, lost: str, key: str) -> None:
    stage, (worker,) = struck.stage, struck.workers
    with heard(stage, "task-lock-lost") as events:
        result = begin(stage, stage.tasks.goes_on, key, on_lost=lost)
        if lost == "warn":
            for node in stage.nodes:
                node.client().delete(f"{{redlock}}:lock:k:{key}")
        else:
            take_away(stage, key)
        eventually(lambda: events)
        stage.log.with_name("go on").touch()
        if lost == "warn":
            assert outcome(stage, result) == "went on"
        else:
            see_lost(stage, result, "its body had")
    assert [(e["uuid"], e["resource"]) for e in events] == [(result.id, f"k:{key}")]
    why = "its key is gone from the nodes" if lost == "warn" else "another token took its key"
    assert why in events[0]["reason"]
    eventually(lambda: f"lost 'k:{key}': {why}" in worker.output())
    assert events[0]["result"] == f"k:{key}: lost, {events[0]['reason']}"  # which monitors show
