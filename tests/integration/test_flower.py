"""What a person sees in Flower: what a task waits for, that it runs, and how it ended."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_redlock.testing import EmbeddedNode
from tests.integration.flower.stage import Stage, stage

# of a page, what is worth a picture: from where to where
pytestmark = pytest.mark.slow

TASK = "//dl[dt or div/dt]", "//dl/div[dt='Result']"
LIST = "//*[@id='tasks-table_wrapper']", "//table[@id='tasks-table']"


@pytest.fixture
def flower(
    standing_broker: EmbeddedNode, nodes: list[EmbeddedNode], tmp_path: Path
) -> Iterator[Stage]:
    """Give workers, Flower and a browser; pictures go to the folder CELERY_REDLOCK_PICTURES."""
    standing_broker.client().flushall()
    pictures = os.environ.get("CELERY_REDLOCK_PICTURES")
    with stage(standing_broker, nodes, tmp_path, Path(pictures) if pictures else None) as made:
        yield made


def test_a_person_sees_in_flower_what_a_task_waits_for_and_how_it_ends(flower: Stage) -> None:
    take = flower.app.tasks["shop.take"]
    first = take.delay("sku-7", "order-1")
    flower.see_begun("order-1")
    flower.see_task(first.id, "STARTED")

    second = take.delay("sku-7", "order-2")
    flower.see_task(second.id, "DEFERRED")
    reason = flower.field("Result")
    assert reason.startswith(f"stock:sku-7: held by shop.take[{first.id}] on "), reason
    for word in ("@shop", "deferrals: ", "waited: ", "next try: 20"):
        assert word in reason, reason
    flower.picture("flower-deferred", *TASK)

    third = take.apply_async(("sku-7", "order-3"), lock={"on_conflict": "skip"})
    flower.see_task(third.id, "SKIPPED")
    assert flower.field("Result").startswith("'stock:sku-7' is held by")
    rows = flower.see_list(**{first.id: "STARTED", second.id: "DEFERRED", third.id: "SKIPPED"})
    assert "stock:sku-7: held by" in rows[second.id]
    flower.picture("flower-tasks", *LIST)
    flower.see_found("state:DEFERRED", second.id)
    flower.see_found("result:stock:sku-7", second.id, third.id)
    flower.see_found("result:stock:sku-8")

    flower.let_end("order-1")
    flower.see_task(second.id, "STARTED")
    assert flower.field("Result") == "None"
    assert flower.field("Exception") == ""
    flower.see_task(first.id, "SUCCESS")

    flower.let_end("order-2")
    flower.see_task(second.id, "SUCCESS")
    assert flower.field("Result") == "'one sku-7 for order-2'"
    assert flower.field("Exception") == ""
    flower.picture("flower-success", *TASK)
