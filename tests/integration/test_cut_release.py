"""A soft time limit that strikes while a run lets go, at any point of that."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from celery import Celery
from celery.app.trace import build_tracer
from celery.exceptions import SoftTimeLimitExceeded

from celery_redlock import LockedTask
from celery_redlock.lock import lock as lock_module
from celery_redlock.lock.engine import releaser
from celery_redlock.lock.model import acquisition
from celery_redlock.tasks.execution import end
from celery_redlock.tasks.execution import run as run_module
from celery_redlock.tasks.per_app import redlock_of
from tests.conftest import FREED, PATIENCE, Nodes, eventually, keys_on, settle
from tests.contract.points import interrupt

# what lies below is cut by `contract/test_cut_anywhere.py`
CUT = tuple(
    Path(module.__file__).name for module in (end, run_module, lock_module, acquisition, releaser)
)
UNCOVERED = 2  # points of `release_after_run` before its `try`


def strike() -> None:
    raise SoftTimeLimitExceeded


def cut(run: Callable[[], object], at: int) -> bool:
    """Run, and raise at a point of `release_after_run`; return whether it has that many."""
    try:
        return interrupt(run, at, strike, CUT, "release_after_run")
    except SoftTimeLimitExceeded:
        return True


@pytest.mark.parametrize("late", [True, False])
def test_it_is_released_and_marked_as_done_all_the_same(nodes: Nodes, late: bool) -> None:
    app = Celery("cut", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(redlock_nodes=[node.url for node in nodes], redlock_node_timeout=PATIENCE)

    # not renewed, so that nothing but its release or its ttl ends it
    @app.task(base=LockedTask, lock_key="k:{key}", lock_renew=False, acks_late=late, name="t")
    def work(key: str) -> None: ...

    app.finalize()
    tracer = build_tracer("t", work, app=app)

    def run(name: str) -> None:
        request = {"id": name, "task": "t", "hostname": "w1", "retries": 0, "delivery_info": {}}
        tracer(name, (name,), {}, request)

    with redlock_of(app) as redlock:
        settle(redlock)
        for at in itertools.count(UNCOVERED + 1):
            if not cut(lambda at=at: run(f"cut-{at}"), at):
                break
    assert at > (50 if late else 30)
    runs = at - UNCOVERED if late else 0  # only a redelivery or a copy asks for a mark

    def are_marked() -> bool:
        marks = [node.client().keys("{redlock}:done:cut-*:t:0:0") for node in nodes]
        return [len(found) for found in marks] == [runs] * len(nodes)

    eventually(lambda: keys_on(nodes) == [[]] * len(nodes), within=FREED)
    eventually(are_marked)
