"""However a run ends: the lock is free on all nodes, the state is right, no body runs twice."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest

from celery_redlock.testing import EmbeddedNode
from tests.conftest import Nodes
from tests.integration.conftest import virtual_host
from tests.integration.matrix.ends import PLACES
from tests.integration.matrix.stage import Stage, live


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("pool", "broker"), PLACES)
def test_every_end_leaves_the_lock_free_and_the_state_right(
    pool: str, broker: str, nodes: Nodes, standing_broker: EmbeddedNode, tmp_path: Path
) -> None:
    standing_broker.client().flushall()
    with ExitStack() as stack:
        host = nullcontext(standing_broker.url) if broker == "redis" else virtual_host()
        url = stack.enter_context(host)
        stage = Stage(stack, tmp_path, pool, broker, url, standing_broker, nodes)
        live(stage)
        assert not [cell for cell in stage.cells if cell.wrong], stage.report()
