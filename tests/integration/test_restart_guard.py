"""Nodes that may have forgotten a lock do not vote, and a worker says so and for how long."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from celery_redlock.testing import embedded_nodes
from tests import fork_server
from tests.conftest import PATIENCE, Nodes, eventually, trust_nodes
from tests.integration.conftest import ROOT, MakeStage, Stage, slow_but
from tests.integration.deliveries import QUEUE, deliver
from tests.integration.test_twins import MAY_RUN as UNKNOWN

MAX_TTL = 16.0  # s: of silence, too, in which a worker must have begun and met it
SILENCE = MAX_TTL + 1  # s
FIRST_START = re.compile(
    r"(\d) of 3 lock nodes may grant locks yet \(new or restarted nodes wait (\d+) s\)\. "
    r"To skip the wait on a new cluster: celery (.+)"
)
LONG = {"first": 1e7, "cap": 1e7}  # s: what starts sooner was told to


@pytest.fixture
def new_nodes() -> Iterator[Nodes]:
    with embedded_nodes(3) as servers:
        yield servers


def trust(command: str) -> None:
    """Run the arguments of a `celery` command; the environment names broker and nodes."""
    line = [sys.executable, "-m", "celery", *command.split(), "--yes"]
    told = fork_server.run(line, cwd=ROOT)
    assert told.returncode == 0, told.stderr


def next_try(stage: Stage, result: Any) -> datetime:
    return datetime.fromisoformat(stage.info(result)["result"]["next_try"])


def is_long_before(at: datetime) -> bool:
    return datetime.now(UTC) < at - timedelta(seconds=10)


@pytest.mark.slow
def test_on_new_nodes_runs_wait_for_the_silence_to_end_and_are_told_of_it(
    make_stage: MakeStage, new_nodes: Nodes
) -> None:
    stage = make_stage(new_nodes, redlock_max_ttl=MAX_TTL, redlock_node_timeout=MAX_TTL / 4)
    worker = stage.worker(concurrency=1)
    found = eventually(lambda: FIRST_START.search(worker.output()))
    assert found[1] == "0"
    assert 0 < int(found[2]) <= SILENCE
    result = stage.tasks.work.delay("k")
    reason = re.compile(
        r"Task \S+\[\S+\] deferred: lock 'k:k' has no quorum of 2 nodes "
        r"\((127.0.0.1:\d+(, )?){2,3}: grants no lock for \d+ s more \(restart guard\)\); "
        r"it tries again within \d+\.\d\d s\n"
    )
    eventually(lambda: reason.search(worker.output()))
    assert "Bring these nodes back" not in worker.output()
    assert result.get(timeout=120) == 0  # by itself, once the silence is over


def test_the_first_start_says_one_plain_line_and_its_command_starts_what_waits(
    make_stage: MakeStage, new_nodes: Nodes
) -> None:
    stage = make_stage(new_nodes, redlock_max_ttl=600)
    worker = stage.worker(concurrency=2)
    results = [
        stage.tasks.work.apply_async((key,), lock={"backoff": LONG}) for key in ("a", "b", "b")
    ]
    for result in results:
        stage.see_deferred(result)
    loud = re.compile(r": (?:WARNING|ERROR)/.*\bnodes?\b.*")
    (line,) = [line for line in worker.output().splitlines() if loud.search(line)]
    found = FIRST_START.search(line)
    assert found is not None, line
    assert int(found[2]) > 60
    tries = [next_try(stage, result) for result in results]
    assert stage.lines("begin") == []
    trust(found[3].replace("APP", "tests.integration.app"))
    for result in results:
        assert result.get(timeout=120) == 0
    assert is_long_before(min(tries))


@pytest.mark.parametrize("pool", slow_but(["threads"], ["threads", "gevent"]))
def test_an_operators_word_for_enough_nodes_starts_what_waits(
    make_stage: MakeStage, new_nodes: Nodes, pool: str
) -> None:
    """Also a redelivery that cannot ask for its first delivery."""
    stage = make_stage(new_nodes, redlock_max_ttl=600)
    worker = stage.worker(concurrency=2, pool=pool)
    again = stage.tasks.late.apply_async(("again",), queue="held-back")
    payload = json.loads(str(stage.broker.client().rpop("held-back")))
    payload["properties"]["delivery_info"]["routing_key"] = QUEUE
    deliver(stage, json.dumps(payload))
    waits = re.compile(rf"{again.id}\] .*{UNKNOWN}.*; it checks again in (\d+)")
    found = eventually(lambda: waits.search(worker.output()))
    assert int(found[1]) > 20
    # it is in the room, and subscribed: `trust` reaches it
    ask = stage.app.control.broadcast
    eventually(lambda: any(map(any, map(dict.values, ask("redlock_waiting", reply=True)))))

    result = stage.tasks.work.apply_async(("k",), lock={"backoff": LONG})
    stage.see_deferred(result)
    trust_nodes(new_nodes[:1])
    stage.see_deferred(result, times=2)  # it tried, and one node is no quorum
    at = next_try(stage, result)
    checks = [int(seconds) for seconds in waits.findall(worker.output())]
    due = time.monotonic() + min(checks)
    assert stage.lines("begin") == []
    trust_nodes(new_nodes[1:2])
    assert [one.get(timeout=120) for one in (result, again)] == [0, 0]
    assert is_long_before(at)
    (begun,) = [line for line in stage.lines("begin") if line.key == "again"]
    assert begun.at < due - 10, "it ran because its time had come"


def test_nodes_that_are_back_start_what_waits_for_them(
    make_stage: MakeStage, mortal_nodes: Nodes
) -> None:
    stage = make_stage(mortal_nodes, redlock_restart_guard="off")
    stage.worker(concurrency=1)
    for node in mortal_nodes[1:]:
        node.kill()
    result = stage.tasks.work.apply_async(("k",), lock={"backoff": LONG})
    stage.see_deferred(result)
    at = next_try(stage, result)
    mortal_nodes[1].start()
    assert result.get(timeout=120) == 0
    assert is_long_before(at)


def test_a_node_that_came_back_empty_is_told_of_and_the_others_decide(
    make_stage: MakeStage, mortal_nodes: Nodes
) -> None:
    stage = make_stage(mortal_nodes, redlock_node_timeout=PATIENCE)
    mortal_nodes[0].kill()
    mortal_nodes[0].start()
    worker = stage.worker(concurrency=1)
    said = (
        r"2 of 3 lock nodes may grant locks, 2 needed \(new or restarted nodes wait \d+ s: (\S+)\)"
    )
    found = eventually(lambda: re.search(said, worker.output()))
    assert found[1] == f"127.0.0.1:{mortal_nodes[0].port}"
    assert "redlock trust" not in worker.output()  # it may have forgotten a lock
    assert stage.tasks.work.delay("k").get(timeout=120) == 0


def test_a_worker_whose_nodes_all_vote_says_nothing_of_silence(
    make_stage: MakeStage, nodes: Nodes
) -> None:
    stage = make_stage(nodes, redlock_node_timeout=PATIENCE)
    worker = stage.worker(concurrency=1)
    eventually(lambda: "3 of 3 lock nodes answer, 2 needed" in worker.output())
    assert stage.tasks.work.delay("k").get(timeout=120) == 0
    assert "restarted" not in worker.output()
    assert "ERROR" not in worker.output()
