"""What a person sees in Flower: what a task waits for, that it runs, and how it ended."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import pytest
from celery.utils.nodenames import worker_direct
from selenium.common.exceptions import TimeoutException, WebDriverException
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from celery_redlock.testing import EmbeddedNode, WorkerProcess
from celery_redlock.testing.servers import claim_port
from tests.browser import browser, take_picture
from tests.conftest import Nodes
from tests.integration import flower_shop
from tests.integration.conftest import ROOT
from tests.workers import ForkedWorker

pytestmark = [pytest.mark.pages, pytest.mark.slow]

WORKERS = ("celery@web1", "celery@web2")
HOLDER = "4c8f3226-0d5e-4a8e-9b55-2b1f0a6c7d11"  # the ids of the documentation
WAITER = "a63e1c39-7a52-4f0d-8c1e-5e9d3b2f6a22"
# of a page, what is worth a picture: from where to where, and how wide the window is
TASK = "//dl[dt or div/dt]", "//dl/div[dt='Result']", 560
LIST = "//*[@id='tasks-table_wrapper']", "//table[@id='tasks-table']", 1280
PATIENCE = 60.0  # s that a page may take to show what it is to show

T = TypeVar("T")


class Flower:
    """Flower in a browser. log: what Flower has said."""

    def __init__(self, chrome: Chrome, address: str, log: Callable[[], str]) -> None:
        self.chrome, self._address, self._log = chrome, address, log

    def see(self, path: str, seen: Callable[[], T], *, again: bool = True) -> T:
        """Open a page, and return what is seen there once it is. again: load it at each look."""

        def look(_: Chrome) -> T:
            if again:
                self.chrome.get(self._address + path)
            return seen()

        self.chrome.get(self._address + path)
        wait = WebDriverWait(self.chrome, PATIENCE, ignored_exceptions=[WebDriverException])
        try:
            return wait.until(look)
        except TimeoutException:
            raise AssertionError(f"{self.text('body')}\n\nFlower:\n{self._log()}") from None

    def text(self, css: str) -> str:
        return "\n".join(found.text for found in self.chrome.find_elements(By.CSS_SELECTOR, css))

    def field(self, name: str) -> str:
        """Return what stands beside a name on the page of a task; "" where the name does not."""
        path = f"//dt[normalize-space()='{name}']/following-sibling::dd[1]"
        return "\n".join(found.text for found in self.chrome.find_elements(By.XPATH, path))

    def see_workers(self) -> None:
        """Return when Flower has heard of every worker, so that it misses no event from here on."""
        wait = WebDriverWait(self.chrome, 5.0)  # the page fills its table after it was loaded

        def has_all() -> bool:
            rows = "#workers-table tbody"
            return wait.until(lambda _: all(word in self.text(rows) for word in WORKERS))

        self.see("/", has_all)

    def see_task(self, task_id: str, state: str) -> None:
        """Return when the page of a task shows it in a state; the page stays open."""
        self.see(f"/task/{task_id}", lambda: self.field("Status") == state)

    def see_list(self, **states: str) -> dict[str, str]:
        """Return the row of each task by its id, once all are in their states, by their ids."""

        def shown() -> dict[str, str]:
            rows = {one: self.text(f'#tasks-table tr[id="{one}"]') for one in states}
            return rows if all(state in rows[one] for one, state in states.items()) else {}

        return self.see("/tasks", shown, again=False)

    def see_found(self, words: str, *task_ids: str) -> None:
        """Return when the list shows these tasks and no other for what is typed as a search."""

        def found() -> bool:
            rows = self.chrome.find_elements(By.CSS_SELECTOR, "#tasks-table tbody tr[id]")
            return {row.get_attribute("id") for row in rows} == set(task_ids)

        css = "#tasks-table_filter input"
        box = self.see("/tasks", lambda: self.chrome.find_element(By.CSS_SELECTOR, css))
        box.clear()
        box.send_keys(words)
        WebDriverWait(self.chrome, PATIENCE, ignored_exceptions=[WebDriverException]).until(
            lambda _: found(), words
        )


@pytest.fixture
def flower(
    standing_broker: EmbeddedNode, nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Flower]:
    """Give Flower in a browser, with two workers that it watches."""
    standing_broker.client().flushall()
    urls = ",".join(node.url for node in nodes)
    env = {"TEST_BROKER": standing_broker.url, "TEST_NODES": urls}
    monkeypatch.setattr(flower_shop.app.conf, "broker_url", standing_broker.url)
    flower_shop.app.conf.redlock_nodes = urls.split(",")
    with ExitStack() as stack:
        chrome = stack.enter_context(browser(tmp_path / "chromium"))
        module = "tests.integration.flower_shop"

        def launch(name: str, *words: str) -> WorkerProcess:
            command = [sys.executable, "-m", "celery", "-A", module, *words]
            process = ForkedWorker(module, name=name, env=env, cwd=ROOT, command=command)
            stack.push(process.__exit__)
            process.launch()
            return process

        port = stack.enter_context(claim_port()).getsockname()[1]
        words = [f"--port={port}", "--tasks_columns=name,uuid,state,result,worker"]
        server = launch("flower", "flower", "--address=127.0.0.1", *words)
        workers = [launch(n, "worker", "-n", n, "-c", "2", "-E", "-l", "INFO") for n in WORKERS]
        for worker in workers:
            worker.wait_ready()
        made = Flower(chrome, f"http://127.0.0.1:{port}", server.output)
        made.see_workers()
        yield made
        flower_shop.app.close()


def test_a_person_sees_in_flower_what_a_task_waits_for_and_how_it_ends(flower: Flower) -> None:
    take = flower_shop.take
    first = take.apply_async(("sku-7", 3), task_id=HOLDER, queue=worker_direct(WORKERS[0]))
    flower_shop.see_begun(3)
    flower.see_task(first.id, "STARTED")

    second = take.apply_async(("sku-7", 2), task_id=WAITER, queue=worker_direct(WORKERS[1]))
    flower.see_task(second.id, "DEFERRED")
    reason = flower.field("Result")
    assert reason.startswith(f"stock:sku-7: held by shop.take[{first.id}] on {WORKERS[0]};"), reason
    for word in ("deferrals: ", "waited: ", "next try: 20"):
        assert word in reason, reason
    take_picture(flower.chrome, "flower-deferred", *TASK)

    third = take.apply_async(("sku-7", 1), lock={"on_conflict": "skip"})
    flower.see_task(third.id, "SKIPPED")
    assert flower.field("Result").startswith("'stock:sku-7' is held by")
    rows = flower.see_list(**{first.id: "STARTED", second.id: "DEFERRED", third.id: "SKIPPED"})
    assert "stock:sku-7: held by" in rows[second.id]
    take_picture(flower.chrome, "flower-tasks", *LIST)
    flower.see_found("state:DEFERRED", second.id)
    flower.see_found("result:stock:sku-7", second.id, third.id)
    flower.see_found("result:stock:sku-8")

    flower_shop.let_end(3)
    flower.see_task(second.id, "STARTED")
    assert flower.field("Result") == "None"
    assert flower.field("Exception") == ""
    flower.see_task(first.id, "SUCCESS")

    flower_shop.let_end(2)
    flower.see_task(second.id, "SUCCESS")
    assert flower.field("Result") == "'took 2 of sku-7'"
    assert flower.field("Exception") == ""


def test_a_person_sees_in_flower_which_rate_is_used_up_and_when_the_next_start_is(
    flower: Flower,
) -> None:
    first = flower_shop.ask.delay(7)
    flower.see_task(first.id, "SUCCESS")
    second = flower_shop.ask.delay(7)
    flower.see_task(second.id, "DEFERRED")
    reason = flower.field("Result")
    assert re.match(r"rate of partner:7: 1/h, next start in 36\d\d s; deferrals: ", reason), reason
    flower.see_found("result:partner:7", second.id)
