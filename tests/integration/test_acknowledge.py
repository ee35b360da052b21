"""Runs that end together in a gevent worker: the broker keeps the message of none."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Nodes, eventually
from tests.integration.conftest import MakeStage, slow_but


@pytest.mark.xdist_group("gevent")
@pytest.mark.parametrize("most", slow_but([None], [None, 3]))
def test_runs_that_end_together_are_all_acknowledged(
    make_stage: MakeStage, nodes: Nodes, most: int | None
) -> None:
    """Locked ones and plain ones share the connections of kombu's channel: 10, or as is set."""
    options: dict[str, Any] = {} if most is None else {"max_connections": most}
    stage = make_stage(nodes, broker_transport_options=options)
    worker = stage.worker(pool="gevent", concurrency=stage.tasks.CROWD)
    for number in range(stage.tasks.CROWD // 2):
        stage.tasks.meets.delay(f"locked{number}")
        stage.tasks.meets_unlocked.delay(f"plain{number}")
    eventually(lambda: worker.output().count("] succeeded in ") == stage.tasks.CROWD)
    assert not stage.broker.client().exists("celery")
    eventually(lambda: not stage.broker.client().exists("unacked"))
    assert "Couldn't ack" not in worker.output()
    assert len(stage.lines("begin")) == stage.tasks.CROWD
