"""A soft time limit that strikes while a late-acknowledging run lets go, at any line of that."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from celery import Celery
from celery.app.trace import build_tracer
from celery.exceptions import SoftTimeLimitExceeded

from celery_redlock import LockedTask
from celery_redlock.lock import lock as lock_module
from celery_redlock.lock.engine import releaser
from celery_redlock.lock.model import acquisition
from celery_redlock.tasks.execution import run as run_module
from celery_redlock.tasks.execution.run import release_after_run
from celery_redlock.tasks.per_app import redlock_of
from tests.conftest import PATIENCE, Nodes, eventually, see_freed, settle

# what lies below takes mutexes, which no exception from outside strikes between `with` and its end
CUT = {module.__file__ for module in (run_module, lock_module, acquisition, releaser)}


UNCOVERED = 2  # lines of `release_after_run`: one before its `try`, and the `try`


def cut(run: Callable[[], object], at: int, seen: set[str]) -> bool:
    """Run, and raise at a line of `release_after_run`; return whether it has that many lines.

    at: counted from the first line that is covered. seen: the files of which lines are counted are
    added to it.
    """
    at += UNCOVERED
    lines = 0

    def strike(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        if lines == at:
            sys.settrace(None)
            raise SoftTimeLimitExceeded
        if event == "return" and frame.f_code is release_after_run.__code__:
            sys.settrace(None)
        return strike

    def watch(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal inside
        inside = inside or frame.f_code is release_after_run.__code__
        file = frame.f_code.co_filename
        if not inside or file not in CUT:
            return None
        seen.add(file)
        return strike

    inside, before = False, sys.gettrace()
    sys.settrace(watch)
    try:
        run()
    finally:
        sys.settrace(before)
    return lines >= at


@pytest.mark.slow
def test_it_is_released_and_marked_as_done_all_the_same(nodes: Nodes) -> None:
    app = Celery("cut", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(redlock_nodes=[node.url for node in nodes], redlock_node_timeout=PATIENCE)

    # not renewed, so that nothing but its release or its ttl ends it
    @app.task(base=LockedTask, lock_key="k:{key}", lock_renew=False, acks_late=True, name="t")
    def work(key: str) -> None: ...

    app.finalize()
    tracer = build_tracer("t", work, app=app)

    def run(name: str) -> None:
        request = {"id": name, "task": "t", "hostname": "w1", "retries": 0, "delivery_info": {}}
        tracer(name, (name,), {}, request)

    def is_marked(name: str) -> bool:
        return all(node.client().exists(f"{{redlock}}:done:{name}:t:0:0") for node in nodes)

    with redlock_of(app) as redlock:
        settle(redlock)
        names = (f"cut-{number}" for number in itertools.count(1))
        struck, seen = [], set[str]()
        for at, name in enumerate(names, 1):
            if not cut(lambda name=name: run(name), at, seen):
                break
            struck.append(name)
        assert len(struck) > 50
        assert seen == CUT  # else a module was renamed, and nothing of it is cut
        for name in struck:
            see_freed(nodes, f"k:{name}")
            eventually(lambda name=name: is_marked(name))
