"""The pages for beginners and the how-tos, run on real workers as they stand there."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest
from celery import _state
from celery.exceptions import TaskRevokedError

from celery_redlock.testing import EmbeddedNode, WorkerProcess
from tests.conftest import NODE_TIMEOUT, eventually, trust_nodes
from tests.integration.conftest import ROOT, close_connections, no_shared_task_left
from tests.pages import blocks, on_servers

pytestmark = pytest.mark.slow

HOW_TO = ROOT / "docs" / "how-to" / "examples.md"
START = ROOT / "docs" / "getting-started" / "first-locked-task.md"
SENDS = "for because in"  # the one example that is no part of an app
PATIENT = f"\napp.conf.redlock_node_timeout = {NODE_TIMEOUT}\n"  # as the machine needs it
LOCK_BYTES = 320 - 100  # of the page about sizing, without the tables in which a server finds a key


@pytest.fixture(scope="module")
def page(
    standing_broker: EmbeddedNode,
    standing_nodes: list[EmbeddedNode],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    """Give the how-tos as a module, which a worker runs, too."""
    for node in (*standing_nodes, standing_broker):
        node.client().flushall()
    trust_nodes(standing_nodes)
    folder = tmp_path_factory.mktemp("how_to")
    codes = [block.code for block in blocks(HOW_TO, "python") if not block.code.startswith(SENDS)]
    program = "\n".join(["from tests.integration.readers import search, shop", *codes, PATIENT])
    urls = [node.url for node in standing_nodes]
    (folder / "how_to.py").write_text(on_servers(program, standing_broker.url, urls))
    env = {"TEST_FOLDER": str(folder), "PYTHONPATH": str(ROOT)}
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("TEST_FOLDER", str(folder))
        patch.syspath_prepend(str(folder))
        patch.setattr(_state, "default_app", _state.default_app)
        patch.setattr(_state._tls, "current_app", None)
        stack.enter_context(no_shared_task_left())
        stack.callback(sys.modules.pop, "tests.integration.readers", None)
        stack.callback(sys.modules.pop, "how_to", None)
        module = importlib.import_module("how_to")
        stack.callback(module.app.close)
        stack.callback(close_connections, module.app)
        worker = WorkerProcess("how_to", name="how_to", concurrency=4, env=env, cwd=folder)
        stack.enter_context(worker)
        yield module


def told(first: str) -> list[Any]:
    return list(sys.modules["tests.integration.readers"].told(first))


def ends(results: list[Any]) -> list[Any]:
    return [result.get(timeout=120) for result in results]


def test_no_piece_of_a_stock_is_lost(page: Any) -> None:
    page.shop.write_stock("sku", 20)
    orders = ends([page.order.delay("sku", 3) for _ in range(8)])
    assert sorted(orders) == ["sold out"] * 2 + ["taken"] * 6
    assert page.shop.read_stock("sku") == 2


def test_no_more_coupons_are_issued_than_there_are(page: Any) -> None:
    page.shop.write_stock("of others", 0)
    (Path(sys.modules["tests.integration.readers"].FOLDER) / "coupons-may").write_text("2")
    customers = ["ann", "ann", "bob", "cid", "ann"]
    said = ends([page.issue.delay("may", customer) for customer in customers])
    assert said.count("issued") == 2
    assert page.shop.coupons_left("may") == 0


def test_points_that_cross_are_all_there_in_the_end(page: Any) -> None:
    page.shop.add_points("ann", 50)
    page.shop.add_points("bob", 50)
    crossing = [("ann", "bob", 5), ("bob", "ann", 3)] * 4
    assert ends([page.move.delay(*one) for one in crossing]) == ["moved"] * 8
    assert (page.shop.read_points("ann"), page.shop.read_points("bob")) == (42, 58)


def test_a_run_of_beat_that_finds_the_one_before_is_not_run(page: Any) -> None:
    (entry,) = page.app.conf.beat_schedule.values()
    task = page.app.tasks[entry["task"]]
    first = task.apply_async(**{**entry["options"], "expires": None})
    eventually(lambda: told("report"))
    with pytest.raises(TaskRevokedError):
        task.delay().get(timeout=120)
    (Path(sys.modules["tests.integration.readers"].FOLDER) / "report-done").touch()
    assert first.get(timeout=120) is None
    assert len(told("report")) == 1


def test_ten_sends_during_a_run_are_one_more_run(page: Any) -> None:
    running = page.write_feed.delay(7)
    eventually(lambda: told("feed"))
    (queued,) = {page.write_feed.delay(7).id for _ in range(10)}
    assert queued != running.id
    (Path(sys.modules["tests.integration.readers"].FOLDER) / "feed-7-done").touch()
    assert ends([running, page.app.AsyncResult(queued)]) == [7, 7]
    assert told("feed") == [[7], [7]]


def test_one_file_of_a_customer_goes_in_at_a_time(page: Any) -> None:
    results = [page.import_file.delay(who, f"{n}") for n in range(3) for who in ("ann", "bob")]
    assert ends(results) == ["0", "0", "1", "1", "2", "2"]
    for who in ("ann", "bob"):
        steps = [step for customer, step, _ in told("import") if customer == who]
        assert steps == ["begin", "end"] * 3


def test_a_burst_is_one_run_with_the_last_arguments(page: Any) -> None:
    (sends,) = (b.code for b in blocks(HOW_TO, "python") if b.code.startswith(SENDS))
    assert "countdown=30" in sends
    exec(sends.replace("countdown=30", "countdown=10"), {"rebuild_index": page.rebuild_index})
    eventually(lambda: told("rebuild"))
    with page.rebuild_index.lock_for(7, "none", wait=60):  # nobody else is about to begin
        assert told("rebuild") == [[7, "text"]]


def test_a_long_run_asks_between_its_steps(page: Any) -> None:
    assert page.export.delay(2031).get(timeout=120) is None
    assert told("export") == [[2031, month] for month in range(1, 13)]
    assert page.still_ours()


def test_frameworks_have_their_context_under_the_lock(page: Any) -> None:
    assert page.settle.delay(7).get(timeout=120) == "7 is settled"
    assert page.greet.delay("ann").get(timeout=120) == "shop greets ann"
    assert page.app.conf.redlock_nodes == page.CELERY_REDLOCK_NODES


def test_an_endpoint_sends(page: Any) -> None:
    answer = page.ask_for_index(9)
    assert page.app.AsyncResult(answer["task"]).get(timeout=120) == "asked"


def test_an_async_endpoint_takes_a_lock(page: Any) -> None:
    async def ask() -> None:
        async with page.lifespan(page.desk):
            assert await page.reserve("sku-7") == {"left": 2}
            async with page.desk.state.redlock.lock("desk:sku-7"):
                asked = asyncio.create_task(page.reserve("sku-7"))
                with pytest.raises(page.fastapi.HTTPException, match="409"):
                    await asked

    asyncio.run(ask())


def test_the_first_five_minutes(tmp_path: Path) -> None:
    tasks, send, *_ = (block.code for block in blocks(START, "python"))
    with EmbeddedNode() as server:
        program = on_servers(tasks, server.url, ["", "", ""])
        (tmp_path / "tasks.py").write_text(program + PATIENT)
        (tmp_path / "send.py").write_text(send)
        with WorkerProcess("tasks", name="start", concurrency=4, cwd=tmp_path) as worker:
            client = server.client()
            command = [sys.executable, "send.py"]
            with Popen(command, cwd=tmp_path, stdout=PIPE, text=True) as sends:
                taken = eventually(lambda: client.memory_usage("{redlock}:lock:stock:sku-7"))
                said, _ = sends.communicate(timeout=240)
            other, three = said.split(" and ")
            assert other == "1 of sku-8"
            assert sorted(three.split()[::3]) == ["1", "2", "3"]
            eventually(lambda: "] deferred for " in worker.output())
            assert taken <= LOCK_BYTES
