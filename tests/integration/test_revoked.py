"""A message that is revoked while it waits for its lock stays so, whoever takes it next."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from celery_redlock import Backoff
from tests.conftest import eventually
from tests.integration.conftest import Stage

LATER = Backoff(first=1e7, cap=1e7)  # s: by itself it does not try again


def test_a_copy_stays_revoked_in_the_worker_that_comes_after(stage: Stage, tmp_path: Path) -> None:
    tasks, known = (stage.tasks.work, stage.tasks.late), [f"--statedb={tmp_path / 'state'}"]
    first = stage.worker("w1", concurrency=1, options=known)
    with ExitStack() as held:
        revoked = []
        for task in tasks:
            held.enter_context(task.lock_for(task.name, wait=60))
            revoked.append(task.apply_async((task.name,), lock={"backoff": LATER, "ttl": 60}))
            stage.see_deferred(revoked[-1])
        for result in revoked:
            result.revoke()
        for result in revoked:
            said = f"Tasks flagged as revoked: {result.id}"
            eventually(lambda said=said: said in first.output())
        first.stop(60)  # which mostly gives them back before it could look at them again
        second = stage.worker("w1", concurrency=1, options=known)
        for result in revoked:
            eventually(lambda result=result: stage.info(result)["status"] == "REVOKED")
    for task in tasks:
        assert task.delay(task.name).get(timeout=120) == 0
        stage.see_freed(f"k:{task.name}")
    assert len(stage.lines("begin")) == 2, second.output()


@pytest.mark.slow
def test_a_copy_stays_revoked_in_another_worker(stage: Stage) -> None:
    first, second = (stage.worker(name, concurrency=1) for name in ("w1", "w2"))
    workers = (first, second)
    for worker in workers:  # else one of them may not hear of the revocation
        stage.see_listening(worker.name)
    with stage.tasks.late.lock_for("k", wait=60):
        result = stage.tasks.late.apply_async(("k",), lock={"backoff": LATER, "ttl": 60})
        stage.see_deferred(result)
        result.revoke()
        for worker in workers:
            eventually(lambda w=worker: f"flagged as revoked: {result.id}" in w.output())
        holder = eventually(lambda: [w for w in workers if deferrals(w.output(), result.id)])[0]
        holder.stop(60)
        eventually(lambda: stage.info(result)["status"] == "REVOKED")
    assert stage.tasks.late.delay("k").get(timeout=120) == 0
    assert len(stage.lines("begin")) == 1
    stage.see_freed("k:k")


def deferrals(output: str, task_id: str) -> int:
    return sum("deferred" in line and task_id in line for line in output.splitlines())
