"""A worker that is told to stop: what it cuts is freed, what it finishes is renewed until then."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import celery
import pytest

from tests.conftest import Nodes, eventually
from tests.integration.conftest import Line, MakeStage, Stage, overlaps, slow_but
from tests.integration.test_loss import see_renewed

POOLS = ("prefork", "threads", "solo", "gevent")
FAST = ("prefork",)
CUTS = ("prefork", "gevent")  # whose bodies a cold shutdown ends
LONG = 100.0  # s: a body that nobody waits for
SOON = 8.0  # s: one that threads finish, though the worker is told to stop at once

# before, an error in Celery's handler keeps the worker from noting that it is to end: in solo, and
# where gevent's hub is asked to wait for a soft shutdown
ALWAYS_ENDS = celery.VERSION >= (5, 7)


def waiting_messages(stage: Stage) -> set[str]:
    raw = stage.broker.client().lrange("celery", 0, -1)
    return {json.loads(message)["headers"]["id"] for message in raw}


def begin(stage: Stage, pool: str, seconds: float, ttl: float) -> dict[str, str]:
    """Have bodies run and a message wait in the worker's memory; returns their ids by key."""
    ids = {"later": stage.tasks.work.apply_async(("later",), countdown=LONG).id}
    tasks = {"early": stage.tasks.cut_early, "late": stage.tasks.cut_late}
    for key, task in tasks.items():
        ids[key] = task.apply_async((key, seconds), lock={"ttl": ttl}).id
    stage.wait_for("begin", 1 if pool == "solo" else 2)
    return ids


def ends_of(stage: Stage) -> dict[str, Line]:
    return {line.key: line for line in stage.lines("cut", "finished")}


def begin_until_told(stage: Stage, pool: str) -> dict[str, str]:
    """Have bodies run until `see_renewed_to_the_end`, as `begin` otherwise."""
    ids = {"later": stage.tasks.work.apply_async(("later",), countdown=LONG).id}
    ids["early"] = stage.tasks.waits.delay("early").id
    ids["late"] = stage.tasks.until.delay("late", "go on").id
    stage.wait_for("begin", 1 if pool == "solo" else 2)
    return ids


def see_renewed_to_the_end(stage: Stage) -> set[str]:
    """Let bodies end once their locks were renewed twice more, and see them released.

    Returns their keys.
    """
    begun = {line.key for line in stage.lines("begin")}
    for _ in range(2):
        see_renewed(stage, *begun)
    for node in stage.nodes:  # so that none just expires
        for key in begun:
            node.client().pexpire(f"{{redlock}}:lock:k:{key}", 300_000)
    stage.log.with_name("go on").touch()
    eventually(lambda: {line.key for line in stage.lines("end")} >= begun)
    return begun


@pytest.mark.parametrize("pool", slow_but(FAST, POOLS))
def test_a_warm_shutdown_renews_until_the_bodies_end(stage: Stage, pool: str) -> None:
    worker = stage.worker(pool=pool, concurrency=3)
    ids = begin_until_told(stage, pool)
    worker.signal(signal.SIGTERM)
    eventually(lambda: "Warm shutdown" in worker.output())
    begun = see_renewed_to_the_end(stage)
    worker.wait(120)
    assert {line.key for line in stage.lines("end")} == begun
    assert all(line.more["held"] for line in stage.lines("waited"))
    # the last node may execute a release later than the worker ends
    eventually(lambda: stage.is_free("k:early") and stage.is_free("k:late"))
    back = {ids[key] for key in ("later", "early", "late") if key not in begun}
    assert waiting_messages(stage) == back


@pytest.mark.parametrize("pool", slow_but(["prefork"], ["prefork", "solo", "gevent"]))
def test_a_worker_that_restarts_keeps_its_locks_to_the_bodies_end_and_its_messages(
    stage: Stage, pool: str
) -> None:
    # of `python -m celery` Celery starts a file that cannot run by itself
    command = [str(Path(sys.executable).with_name("celery")), "-A", "tests.integration.app"]
    options = ["worker", "-P", pool, "-c", "3", "-l", "INFO", "--without-mingle"]
    worker = stage.worker(command=command + options)
    begin_until_told(stage, pool)
    waiting = stage.tasks.work.delay("late")
    if pool != "solo":
        stage.see_deferred(waiting)
    worker.signal(signal.SIGHUP)
    if pool != "solo":  # which hears a signal between two bodies
        eventually(lambda: "Restarting celery worker" in worker.output())
    see_renewed_to_the_end(stage)
    assert waiting.get(timeout=120) == 0
    assert worker.output().count(" ready.") == 2, "the process was not started anew"
    assert " ERROR/" not in worker.output(), worker.output()
    eventually(lambda: len(stage.lines("waited")) == 1)
    assert stage.lines("waited")[0].more["held"]
    assert not overlaps(stage.intervals()["late"])
    stage.see_freed("k:early", "k:late")


def quit_amid_bodies(stage: Stage, pool: str, *, ends: bool) -> dict[str, str]:
    """Tell a worker to quit while bodies run, see their locks freed; returns ids as `begin`.

    ends: whether the worker itself ends.
    """
    worker = stage.worker(pool=pool, concurrency=3)
    ids = begin(stage, pool, LONG if pool == "prefork" else SOON, 30)
    worker.signal(signal.SIGQUIT)
    begun = {line.key for line in stage.lines("begin")}
    eventually(lambda: set(ends_of(stage)) >= begun)
    stage.see_freed("k:early", "k:late")
    if ends:
        worker.wait(120)
        assert ids["later"] in waiting_messages(stage)
    return ids


@pytest.mark.parametrize("pool", slow_but(FAST, POOLS))
def test_a_cold_shutdown_frees_what_it_cuts_and_keeps_its_late_message(
    stage: Stage, pool: str
) -> None:
    ids = quit_amid_bodies(stage, pool, ends=ALWAYS_ENDS or pool != "solo")
    ends = {key: line.what for key, line in ends_of(stage).items()}
    if pool in CUTS:
        assert set(ends.values()) == {"cut"}
    if pool != "solo":  # there the error of Celery's own that cuts a body ends the run
        back = {ids["later"], ids["late"]} if ends["late"] == "cut" else {ids["later"]}
        assert waiting_messages(stage) == back


@pytest.mark.parametrize("pool", slow_but(["prefork"], ["prefork", "solo", "gevent"]))
def test_a_soft_shutdown_frees_what_it_cuts_in_the_end(
    make_stage: MakeStage, nodes: Nodes, pool: str
) -> None:
    stage = make_stage(nodes, worker_soft_shutdown_timeout=2.0)
    ids = quit_amid_bodies(stage, pool, ends=ALWAYS_ENDS or pool == "prefork")
    if pool == "prefork":
        assert ids["late"] in waiting_messages(stage)


@pytest.mark.slow
def test_a_hard_limit_that_passes_in_a_cold_shutdown_leaves_the_message_to_the_next_worker(
    stage: Stage,
) -> None:
    for limit in (4, 16, 64):  # s: on a slow machine one passes before the worker is told to quit
        worker, key = stage.worker(f"w{limit}"), f"k{limit}"
        result = stage.tasks.stays_late.apply_async((key, "deaf"), time_limit=limit)
        eventually(
            lambda key=key, result=result: (
                any(line.key == key for line in stage.lines("still"))  # and hears no TERM
                or stage.info(result)["status"] == "FAILURE"
            )
        )
        worker.signal(signal.SIGQUIT)
        worker.wait(120)
        if "Hard time limit" not in worker.output():
            break
    assert waiting_messages(stage) == {result.id}
    stage.worker("w2")
    assert result.get(timeout=120) == "again"
