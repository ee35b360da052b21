"""What a person sees in Flower: what a task waits for, that it runs, and how it ended."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery.utils.nodenames import worker_direct

from celery_redlock.testing import EmbeddedNode
from tests.conftest import Nodes
from tests.integration.flower.stage import WORKERS, Stage, stage

pytestmark = pytest.mark.slow

HOLDER = "4c8f3226-0d5e-4a8e-9b55-2b1f0a6c7d11"  # the ids of the documentation
WAITER = "a63e1c39-7a52-4f0d-8c1e-5e9d3b2f6a22"
# of a page, what is worth a picture: from where to where, and how wide the window is
TASK = "//dl[dt or div/dt]", "//dl/div[dt='Result']", 560
LIST = "//*[@id='tasks-table_wrapper']", "//table[@id='tasks-table']", 1280


@pytest.fixture
def flower(standing_broker: EmbeddedNode, nodes: Nodes, tmp_path: Path) -> Iterator[Stage]:
    """Give workers, Flower and a browser; pictures go to the folder CELERY_REDLOCK_PICTURES."""
    standing_broker.client().flushall()
    pictures = os.environ.get("CELERY_REDLOCK_PICTURES")
    with stage(standing_broker, nodes, tmp_path, Path(pictures) if pictures else None) as made:
        yield made


def test_a_person_sees_in_flower_what_a_task_waits_for_and_how_it_ends(flower: Stage) -> None:
    take = flower.app.tasks["shop.take"]
    first = take.apply_async(("sku-7", 3), task_id=HOLDER, queue=worker_direct(WORKERS[0]))
    flower.see_begun(3)
    flower.see_task(first.id, "STARTED")

    second = take.apply_async(("sku-7", 2), task_id=WAITER, queue=worker_direct(WORKERS[1]))
    flower.see_task(second.id, "DEFERRED")
    reason = flower.field("Result")
    assert reason.startswith(f"stock:sku-7: held by shop.take[{first.id}] on {WORKERS[0]};"), reason
    for word in ("deferrals: ", "waited: ", "next try: 20"):
        assert word in reason, reason
    flower.picture("flower-deferred", *TASK)

    third = take.apply_async(("sku-7", 1), lock={"on_conflict": "skip"})
    flower.see_task(third.id, "SKIPPED")
    assert flower.field("Result").startswith("'stock:sku-7' is held by")
    rows = flower.see_list(**{first.id: "STARTED", second.id: "DEFERRED", third.id: "SKIPPED"})
    assert "stock:sku-7: held by" in rows[second.id]
    flower.picture("flower-tasks", *LIST)
    flower.see_found("state:DEFERRED", second.id)
    flower.see_found("result:stock:sku-7", second.id, third.id)
    flower.see_found("result:stock:sku-8")

    flower.let_end(3)
    flower.see_task(second.id, "STARTED")
    assert flower.field("Result") == "None"
    assert flower.field("Exception") == ""
    flower.see_task(first.id, "SUCCESS")

    flower.let_end(2)
    flower.see_task(second.id, "SUCCESS")
    assert flower.field("Result") == "'took 2 of sku-7'"
    assert flower.field("Exception") == ""
    flower.picture("flower-success", *TASK)
