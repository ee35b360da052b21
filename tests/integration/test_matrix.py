"""However a run ends: the lock is free on all nodes, the state is right, no body runs twice."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from pathlib import Path

import celery
import pytest

from celery_redlock.testing import EmbeddedNode
from tests.integration.conftest import virtual_host
from tests.integration.matrix.ends import BROKERS, POOLS
from tests.integration.matrix.stage import Stage, live

NEWEST = celery.__version__.startswith("5.7.")


@pytest.mark.long
@pytest.mark.skipif(not NEWEST, reason="the table's states are those of Celery 5.7")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("broker", BROKERS)
@pytest.mark.parametrize("pool", POOLS)
def test_every_end_leaves_the_lock_free_and_the_state_right(
    pool: str,
    broker: str,
    nodes: list[EmbeddedNode],
    standing_broker: EmbeddedNode,
    tmp_path: Path,
) -> None:
    standing_broker.client().flushall()
    with ExitStack() as stack:
        host = virtual_host() if broker == "rabbitmq" else nullcontext(standing_broker.url)
        stage = Stage(stack, tmp_path, pool, stack.enter_context(host), standing_broker, nodes)
        live(stage)
        assert not [cell for cell in stage.cells if cell.wrong], stage.report()
