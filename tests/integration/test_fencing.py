"""Tokens that grow from one holder to the next, over workers, tasks and plain locks."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from celery_redlock import LockedTask, RedlockError
from tests.integration.conftest import Standing


@pytest.mark.xdist_group("two workers")
def test_each_run_has_a_greater_token_than_every_one_before_it(of_two: Standing, key: str) -> None:
    stage = of_two.stage
    results = [stage.tasks.fenced.delay(key) for _ in range(12)]
    for result in results:
        result.get(timeout=120)
    tokens = [line.more["token"] for line in sorted(stage.lines("token"), key=lambda li: li.at)]
    assert len(tokens) == 12
    assert tokens == sorted(set(tokens))
    with stage.tasks.fenced.lock_for(key, wait=60) as lock:
        assert lock.fencing_token > tokens[-1]


def test_a_call_can_ask_for_a_token(app: Celery) -> None:
    @app.task(bind=True, base=LockedTask, lock_key="k", shared=False)
    def token(self: Any) -> int:
        return int(self.lock.fencing_token)

    assert token.apply(lock={"fencing": True}, throw=True).get() > 0
    with pytest.raises(RedlockError, match="fencing=True"):
        token.apply(throw=True)
