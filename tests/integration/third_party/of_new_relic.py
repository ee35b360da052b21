"""New Relic's agent beside locked tasks: what it counts as errors.

It was initialized before this is imported, in its developer mode, which sends nothing.
"""

from __future__ import annotations

import contextlib
from typing import Any

import newrelic.agent
from celery import Celery
from celery.exceptions import TaskRevokedError
from newrelic.core.stats_engine import StatsEngine

from celery_redlock import LockedTask
from tests.conftest import eventually
from tests.integration.third_party.stage import over_nodes, tell, working

errors: list[list[str]] = []  # of each transaction
record = StatsEngine.record_transaction


def noting(engine: Any, transaction: Any) -> Any:
    if transaction.type == "OtherTransaction" and transaction.group == "Celery":
        errors.append([error.type for error in transaction.errors])
    return record(engine, transaction)


StatsEngine.record_transaction = noting
app = over_nodes(Celery("of_new_relic"))


@app.task(base=LockedTask, lock_key="k:{key}")
def take(key: str) -> None: ...


newrelic.agent.register_application(timeout=60)
with working(app):
    with take.lock_for("deferred"):
        result = take.delay("deferred")
        eventually(lambda: errors)
        deferred = errors[0]
    result.get(timeout=60)
    eventually(lambda: [] in errors)
    ran = errors[-1]
    tries = len(errors)
    with take.lock_for("skipped"), contextlib.suppress(TaskRevokedError):
        take.apply_async(("skipped",), lock={"on_conflict": "skip"}).get(timeout=60)
    eventually(lambda: len(errors) > tries)
    tell(deferred=deferred, ran=ran, skipped=errors[-1])
