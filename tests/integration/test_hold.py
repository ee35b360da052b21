"""`celery redlock hold` as a person runs it, beside workers: it drains, keeps, and gives back."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from celery_redlock import LockedTask
from celery_redlock.lock.model.keys import lock_key
from celery_redlock.operate.cli.hold import warnings_of
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.testing import WorkerProcess
from tests.conftest import NODE_TIMEOUT, TTL, eventually
from tests.integration.conftest import ROOT, STANDING, Stage
from tests.integration.test_command import command, schema_of
from tests.workers import ForkedWorker

WORKER = STANDING
CELERY = (sys.executable, "-m", "celery", "-A", "tests.integration.app", "redlock", "hold")
OFTEN = {"max_wait": 3600}  # so that it does not wait for a release alone
Hold = Callable[..., WorkerProcess]


@pytest.fixture
def hold(stage: Stage) -> Hold:
    """Give what starts the command. brief: whether it renews its lock often, for `TTL`."""

    def start(*words: str, name: str = "hold", brief: bool = False) -> WorkerProcess:
        often = {"redlock_ttl": TTL, "redlock_node_timeout": NODE_TIMEOUT}
        conf = json.loads(stage.env["TEST_CONF"]) | (often if brief else {})
        env = {**stage.env, "TEST_CONF": json.dumps(conf)}
        made = ForkedWorker(name, name=name, command=(*CELERY, *words), env=env, cwd=ROOT)
        stage.stack.push(made)  # removes its log
        stage.stack.callback(made.kill)
        made.launch()
        return made

    return start


def see(process: WorkerProcess, text: str) -> None:
    eventually(lambda: text in process.output())


def go(stage: Stage, name: str) -> None:
    stage.log.with_name(name).touch()


def test_it_comes_before_who_waits_says_why_and_ctrl_c_lets_the_first_one_run_at_once(
    stage: Stage, hold: Hold, key: str
) -> None:
    running = stage.tasks.until.delay(key, f"{key}-go")
    eventually(lambda: stage.runs_of(key) == 1)
    waiting = stage.tasks.late.delay(key)
    stage.see_deferred(waiting)
    operator = hold(f"k:{key}", "--reason", "stock-taking")
    see(operator, f"waits for {stage.tasks.until.name}[{running.id}]")
    go(stage, f"{key}-go")
    see(operator, f"HELD k:{key}")
    before = stage.runs_of(key)  # 1 in most cases: the first place is a hint
    assert running.get(timeout=120)
    (held,) = redlock_of(stage.app).locks(f"k:{key}").locks
    assert re.fullmatch(r"operator \S+@\S+: stock-taking", str(held.holder))
    assert str(held.holder) in command("locks").output
    another = stage.tasks.late.delay(key)
    stage.see_deferred(another)
    assert stage.info(another)["result"]["holder"] == str(held.holder)
    assert stage.runs_of(key) == before
    operator.signal(signal.SIGINT)
    for result in (waiting, another):
        result.get(timeout=60)
    assert operator.wait() == 0
    assert f"k:{key} is given back" in operator.output()


def test_it_drains_a_semaphore_and_nothing_starts_meanwhile(
    stage: Stage, hold: Hold, key: str
) -> None:
    ends = [f"{key}-go{number}" for number in range(3)]
    results = [stage.tasks.permitted.delay(key, until=end) for end in ends]
    eventually(lambda: stage.runs_of(key) == 3)
    results += [stage.tasks.permitted.delay(key) for _ in range(3)]
    for result in results[3:]:
        stage.see_deferred(result)
    operator = hold(f"p:{key}")
    see(operator, f"waits for {stage.tasks.permitted.name}[")
    go(stage, ends[0])
    eventually(lambda: any(permit < 3 for permit in permits_of_a_hold(stage, f"p:{key}")))
    before = stage.runs_of(key)  # 3 in most cases: the first place is a hint
    for end in ends[1:]:
        go(stage, end)
    see(operator, "HELD")
    for result in results[:3]:
        result.get(timeout=120)
    late = stage.tasks.permitted.apply_async((key,), lock={"limit": 8})
    stage.see_deferred(late)
    assert stage.info(late)["result"]["holder"].startswith("operator ")
    assert stage.runs_of(key) == before
    operator.signal(signal.SIGTERM)
    for result in (*results, late):
        result.get(timeout=60)
    assert operator.wait() == 0


def permits_of_a_hold(stage: Stage, resource: str) -> list[int]:
    """Return the permits that an operator has of a resource, 0 the first."""
    held = redlock_of(stage.app).locks(resource).locks
    return [lock.permit for lock in held if str(lock.holder).startswith("operator ")]


def test_a_hold_spends_no_start_of_a_rate(stage: Stage, hold: Hold, key: str) -> None:
    operator = hold(f"rated-late:{key}")
    see(operator, "HELD")
    results = [stage.tasks.rated_late.delay(key, dies=False) for _ in range(2)]
    for result in results:
        stage.see_deferred(result)
    assert stage.runs_of(key) == 0
    operator.signal(signal.SIGHUP)
    for result in results:  # two an hour
        result.get(timeout=60)
    assert operator.wait() == 0


def end_lease(stage: Stage, resource: str) -> None:
    """Let a lock expire on all nodes; nobody is told."""
    name = lock_key("redlock", resource)
    for node in stage.nodes:
        assert node.client().pttl(name) > 0
        node.client().pexpire(name, 1)


def test_if_the_command_dies_tasks_go_on_after_its_ttl(stage: Stage, hold: Hold, key: str) -> None:
    operator = hold(f"k:{key}")
    see(operator, "HELD")
    waiting = stage.tasks.late.apply_async((key,), lock=OFTEN)
    stage.see_deferred(waiting)
    operator.kill()
    end_lease(stage, f"k:{key}")
    assert waiting.get(timeout=60) == 0


def test_a_command_that_was_stopped_for_too_long_says_that_it_has_lost_it(
    stage: Stage, hold: Hold, key: str
) -> None:
    operator = hold(f"k:{key}", brief=True)
    see(operator, "HELD")
    operator.signal(signal.SIGSTOP)
    waiting = stage.tasks.late.apply_async((key,), lock=OFTEN)
    stage.see_deferred(waiting)
    end_lease(stage, f"k:{key}")
    assert waiting.get(timeout=60) == 0
    operator.signal(signal.SIGCONT)
    assert operator.wait() == 1
    assert f"LOST k:{key}: " in operator.output()
    assert "Tasks may run now.\n" in operator.output()


def test_a_break_ends_it(stage: Stage, hold: Hold, key: str) -> None:
    operator = hold(f"k:{key}", brief=True)
    see(operator, "HELD")
    assert command("break", f"k:{key}", "--yes").exit_code == 0
    assert operator.wait() == 1
    (line,) = [line for line in operator.output().splitlines() if line.startswith("LOST")]
    told = f"LOST k:{key}: its key is gone from the nodes: an operator broke it, or it was deleted "
    assert line == f"{told}or evicted. Tasks may run now."


def test_a_second_hold_waits_for_the_first_one(stage: Stage, hold: Hold, key: str) -> None:
    first = hold(f"p:{key}", "--reason", "first")
    see(first, "HELD")
    second = hold(f"p:{key}", "--reason", "second", name="second")
    see(second, ": first")
    assert "HELD" not in second.output()
    first.signal(signal.SIGINT)
    see(second, "HELD")
    second.signal(signal.SIGINT)
    assert (first.wait(), second.wait()) == (0, 0)


def test_it_gives_up_after_its_wait_and_leaves_nothing(stage: Stage, hold: Hold, key: str) -> None:
    running = stage.tasks.permitted.delay(key, until=f"{key}-go")
    eventually(lambda: stage.runs_of(key) == 1)
    operator = hold(f"p:{key}", "--wait", "1")
    assert operator.wait() == 1
    assert f"p:{key} was not acquired within 1 s" in operator.output()
    assert stage.tasks.permitted.delay(key).get(timeout=60) is None
    go(stage, f"{key}-go")
    running.get(timeout=120)


def test_ctrl_c_before_it_is_had_leaves_nothing(stage: Stage, hold: Hold, key: str) -> None:
    running = stage.tasks.permitted.delay(key, until=f"{key}-go")
    eventually(lambda: stage.runs_of(key) == 1)
    operator = hold(f"p:{key}")
    see(operator, f"waits for {stage.tasks.permitted.name}[")
    operator.signal(signal.SIGINT)
    assert operator.wait() == 1
    assert stage.tasks.permitted.delay(key).get(timeout=60) is None
    go(stage, f"{key}-go")
    running.get(timeout=120)


def stocktake(sku: str) -> None:
    """Do nothing."""


@pytest.fixture
def warned_app(app: Celery) -> Celery:
    """Give an app whose tasks do not all just wait."""
    app.conf.redlock_queues = {"fast": {"on_conflict": "fail"}}

    def declare(name: str, **options: Any) -> None:
        app.task(base=LockedTask, name=name, shared=False, **options)(stocktake)

    declare("waits", lock_key="stock:{sku}", lock_on_conflict="defer")
    declare("skips", lock_key=["a", "stock:{sku}"], lock_on_conflict="skip")
    declare("asks", lock_key="asked:{sku}", lock_on_conflict=lambda contention: "defer")
    declare("gives_up", lock_key="patient:{sku}", lock_max_wait=5, lock_on_give_up="skip")
    declare("once", lock_key="once:{sku}", lock_unique_for=60, expires=100)
    declare("unnamed", lock_on_conflict="fail")
    return app


@pytest.mark.parametrize(
    ("resource", "words"),
    [
        ("stock:7", ["skips is skipped meanwhile: on_conflict='skip'"]),
        ("stock", []),
        ("asked:7", ["asks may be skipped or fail meanwhile: its on_conflict is a callable"]),
        ("patient:7", ["gives_up is skipped if it waits for 5 s: max_wait",
                       "gives_up fails meanwhile: on_conflict='fail'"]),
        ("once:7", ["once is sent twice after unique_for=60 s of waiting",
                    "once is revoked if it waits until it expires: expires=100",
                    "once fails meanwhile: on_conflict='fail'"]),
        ("unnamed:0123", ["unnamed fails meanwhile: on_conflict='fail'"]),
    ],
)  # fmt: skip
def test_it_warns_of_tasks_whose_messages_do_more_than_wait(
    warned_app: Celery, resource: str, words: list[str]
) -> None:
    assert sorted(set(warnings_of(warned_app, resource))) == sorted(words)


def test_a_queue_with_wrong_options_keeps_nobody_from_a_hold(app: Celery) -> None:
    app.conf.redlock_queues = {"fast": {"limit": 3, "fencing": True}}
    app.task(base=LockedTask, name="stocktake_of_hold", shared=False, lock_key="k:{sku}")(stocktake)
    assert not [*warnings_of(app, "k:7")]


def test_each_step_is_one_line_for_programs(stage: Stage, hold: Hold, key: str) -> None:
    running = stage.tasks.permitted.delay(key, until=f"{key}-go")
    eventually(lambda: stage.runs_of(key) == 1)
    operator = hold(f"p:{key}", "--json")
    see(operator, '"waits"')  # a warning of what a task does while it waits comes before
    go(stage, f"{key}-go")
    see(operator, "HELD")
    running.get(timeout=120)
    operator.signal(signal.SIGINT)
    assert operator.wait() == 0
    # what is for people goes to stderr, and may share a line of the log
    steps = [json.loads(found) for found in re.findall(r"\{.*\}", operator.output())]
    for step in steps:
        schema_of("hold").validate(step)
    # a run's end may reach one node after the other, and is awaited in between
    assert list(dict.fromkeys(step["state"] for step in steps)) == ["waits", "held", "given back"]
