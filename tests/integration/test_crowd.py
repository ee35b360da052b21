"""Many messages wait for one key: what each costs does not depend on how many they are."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from celery_redlock.testing import EmbeddedNode, WorkerProcess
from tests.conftest import Nodes, eventually
from tests.integration.conftest import MakeStage, Stage, overlaps

FEW, MANY = 50, 800
MOST = 1.5  # times what each costs among few
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Cost:
    """What one finished task cost: messages, commands on all nodes, s of processor time."""

    published: float
    commands: float
    seconds: float


def calls(node: EmbeddedNode, *names: str) -> int:
    """Return how many commands a server has run; of these names, or all."""
    stats = node.client().info("commandstats")
    asked = [f"cmdstat_{name}" for name in names] or list(stats)
    return sum(stats[name]["calls"] for name in asked if name in stats)


def processor_time(worker: WorkerProcess) -> float:
    """Return the s that a worker's main process and its children have used."""
    own = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == worker.pid:  # its process group
            own += int(fields[11]) + int(fields[12])
    return own / TICKS


def run_crowd(stage: Stage, workers: list[WorkerProcess], key: str, count: int) -> Cost:
    """Have so many wait for one key, while another's task gets through, and then let them run."""

    def used() -> list[float]:
        commands = sum(calls(node) for node in stage.nodes)
        seconds = sum(processor_time(worker) for worker in workers)
        return [calls(stage.broker, "lpush"), commands, seconds]

    def deferred() -> int:
        return sum(worker.output().count("] deferred: ") for worker in workers)

    before, republish = used(), deferred()
    with stage.tasks.crowded.lock_for(key, wait=60):
        for _ in range(count):
            stage.tasks.crowded.delay(key)
        eventually(lambda: deferred() - republish >= count, within=600)
        assert stage.tasks.work.delay(f"{key}-other").get(timeout=60) == 0
    ended = len(stage.lines("end")) + count
    stage.wait_for("end", ended, within=600)
    used_up = [(now - then) / count for now, then in zip(used(), before, strict=True)]
    return Cost(*used_up)


@pytest.mark.long
def test_what_a_task_costs_does_not_grow_with_the_number_that_wait(
    make_stage: MakeStage, nodes: Nodes
) -> None:
    stage = make_stage(nodes)
    workers = [stage.worker(name, concurrency=2) for name in ("w1", "w2")]
    run_crowd(stage, workers, "warm", 20)
    few = run_crowd(stage, workers, "few", FEW)
    many = run_crowd(stage, workers, "many", MANY)
    print(f"\n{FEW}: {few}\n{MANY}: {many}")
    assert many.published <= MOST * few.published
    assert many.commands <= MOST * few.commands
    assert many.seconds <= MOST * few.seconds
    for spans in stage.intervals().values():
        assert not overlaps(spans)
