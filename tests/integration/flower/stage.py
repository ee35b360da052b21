"""Workers, Flower that watches them, and a browser that looks at Flower."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from celery import Celery
from selenium.common.exceptions import TimeoutException, WebDriverException
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from celery_redlock.testing import EmbeddedNode, WorkerProcess
from celery_redlock.testing.servers import claim_port
from tests.integration.flower import tasks
from tests.integration.flower.browser import browser

ROOT = Path(__file__).resolve().parents[3]
APP = "tests.integration.flower.tasks"
WORKERS = ("celery@web1", "celery@web2")
COLUMNS = "name,uuid,state,result,worker"
SEARCH = "#tasks-table_filter input"
PATIENCE = 60.0  # s that a page may take to show what it is to show

T = TypeVar("T")


@dataclass
class Stage:
    """What a story has: `app` sends, `let_end` ends a body, and a person looks at Flower.

    pictures: the folder that pictures go to; none are made where it is None.
    """

    app: Celery
    broker: str
    chrome: Chrome
    address: str
    log: Callable[[], str]
    pictures: Path | None

    def see_begun(self, pieces: int) -> None:
        """Return when the body that takes so many pieces has begun."""
        tasks.see_begun(self.broker, pieces)

    def let_end(self, pieces: int) -> None:
        """Let the body that takes so many pieces end."""
        tasks.let_end(self.broker, pieces)

    def wait(self, seen: Callable[[], T], what: str) -> T:
        """Return what is seen once it is; fails with the page and with what Flower has said."""
        wait = WebDriverWait(self.chrome, PATIENCE, ignored_exceptions=[WebDriverException])
        try:
            return wait.until(lambda _: seen())
        except TimeoutException:
            page = self.text("body")
        raise AssertionError(f"{what} is not seen; the page:\n{page}\n\nFlower:\n{self.log()}")

    def text(self, css: str) -> str:
        """Return the text of what a selector finds on the page, line by line."""
        return "\n".join(found.text for found in self.chrome.find_elements(By.CSS_SELECTOR, css))

    def open(self, path: str) -> None:
        self.chrome.get(f"{self.address}{path}")

    def field(self, name: str) -> str:
        """Return what stands beside a name on the page of a task; "" where the name does not."""
        path = f"//dt[normalize-space()='{name}']/following-sibling::dd[1]"
        return "\n".join(found.text for found in self.chrome.find_elements(By.XPATH, path))

    def see_workers(self) -> None:
        """Return when Flower has heard of every worker, so that it misses no event from here on."""

        def all_there() -> bool:
            self.open("/")
            return self.wait_for_rows("#workers-table", *WORKERS)

        self.wait(all_there, "each worker")

    def wait_for_rows(self, table: str, *words: str) -> bool:
        """Tell whether a table has these words; the page fills it after it was loaded."""
        wait = WebDriverWait(self.chrome, 5.0)
        try:
            return wait.until(lambda _: all(word in self.text(f"{table} tbody") for word in words))
        except TimeoutException:
            return False

    def see_task(self, task_id: str, state: str) -> None:
        """Return when the page of a task shows it in a state; the page stays open."""

        def shows() -> bool:
            self.open(f"/task/{task_id}")
            return self.field("Status") == state

        self.wait(shows, f"{task_id} as {state}")

    def see_list(self, **states: str) -> dict[str, str]:
        """Return the row of each task by its id, once the list shows all of them in their states.

        states: by the task's id.
        """

        def row(task_id: str) -> str:
            return self.text(f'#tasks-table tr[id="{task_id}"]')

        def shown() -> dict[str, str]:
            rows = {task_id: row(task_id) for task_id in states}
            right = all(state in rows[task_id] for task_id, state in states.items())
            return rows if right else {}

        self.open("/tasks")
        return self.wait(shown, f"a list of {states}")

    def see_found(self, words: str, *task_ids: str) -> None:
        """Return when the list shows these tasks and no other for what is typed as a search."""

        def found() -> bool:
            rows = self.chrome.find_elements(By.CSS_SELECTOR, "#tasks-table tbody tr[id]")
            return {row.get_attribute("id") for row in rows} == set(task_ids)

        self.open("/tasks")
        box = self.wait(lambda: self.chrome.find_element(By.CSS_SELECTOR, SEARCH), "a search box")
        box.clear()
        box.send_keys(words)
        self.wait(found, f"what {words} finds")

    def picture(self, name: str, first: str, last: str, width: int) -> None:
        """Make a picture from one element down to another, where pictures are wanted.

        first, last: XPaths; the wider one gives the width. width: of the window, in pixels.
        """
        if self.pictures is None:
            return
        size = self.chrome.get_window_size()
        self.chrome.set_window_size(width, size["height"])
        start, end = (self.chrome.find_element(By.XPATH, path).rect for path in (first, last))
        clip = {
            **start,
            "width": max(start["width"], end["width"]),
            "height": end["y"] + end["height"] - start["y"],
            "scale": 2,  # sharp on a fine screen
        }
        wanted = {"clip": clip, "captureBeyondViewport": True}
        taken = self.chrome.execute_cdp_cmd("Page.captureScreenshot", wanted)
        self.chrome.set_window_size(**size)
        self.pictures.mkdir(parents=True, exist_ok=True)
        (self.pictures / f"{name}.png").write_bytes(base64.b64decode(taken["data"]))


@contextmanager
def stage(
    broker: EmbeddedNode, nodes: list[EmbeddedNode], folder: Path, pictures: Path | None
) -> Iterator[Stage]:
    """Set the stage, and end all of its processes. folder: for what the browser keeps."""
    with ExitStack() as stack:
        chrome = stack.enter_context(browser(folder / "chromium"))
        urls = [node.url for node in nodes]
        env = {"TEST_BROKER": broker.url, "TEST_NODES": ",".join(urls)}
        celery = [sys.executable, "-m", "celery", "-A", APP]
        claim = stack.enter_context(claim_port())
        port = claim.getsockname()[1]
        where = ["--address=127.0.0.1", f"--port={port}"]

        def launch(name: str, *words: str) -> WorkerProcess:
            process = WorkerProcess(APP, name=name, env=env, cwd=ROOT, command=[*celery, *words])
            stack.push(process.__exit__)
            process.launch()
            return process

        flower = launch("flower", "flower", *where, f"--tasks_columns={COLUMNS}")
        workers = [launch(n, "worker", "-n", n, "-c", "2", "-E", "-l", "INFO") for n in WORKERS]
        for worker in workers:
            worker.wait_ready()
        app = tasks.shop(broker.url, urls)
        stack.callback(app.close)
        address = f"http://127.0.0.1:{port}"
        made = Stage(app, broker.url, chrome, address, flower.output, pictures)
        made.see_workers()
        yield made
