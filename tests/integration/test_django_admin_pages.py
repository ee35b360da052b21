"""What a person sees in Chromium of the page *Locks*: as staff, without a right, with nodes down.

A project with a real server, two workers and three nodes. All that is asked by Django's client
alone is in `test_django_admin.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from celery.utils.nodenames import worker_direct
from selenium.common.exceptions import TimeoutException, WebDriverException
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from celery_redlock import Redlock
from celery_redlock.testing import EmbeddedNode, WorkerProcess, embedded_nodes
from celery_redlock.testing.servers import claim_port
from tests.browser import browser, take_picture
from tests.conftest import Nodes, eventually, trust_nodes
from tests.integration import admin_shop
from tests.integration.conftest import ROOT
from tests.workers import ForkedWorker

pytestmark = [pytest.mark.pages, pytest.mark.slow]

WORKERS = ("celery@web1", "celery@web2")
HOLDER = "4c8f3226-0d5e-4a8e-9b55-2b1f0a6c7d11"  # the ids of the documentation
WAITER = "a63e1c39-7a52-4f0d-8c1e-5e9d3b2f6a22"
YES = "Yes, I\N{RIGHT SINGLE QUOTATION MARK}m sure"
PATIENCE = 60.0  # s that a page may take to show what it is to show
PAGE = "//div[@id='toolbar']", "//div[h2='Waiting tasks']", 1500
PEOPLE = """
import django
django.setup()
from django.contrib.auth.models import Permission, User
rights = {"ann": ["view_locks", "break_lock", "end_claim"], "bob": ["view_locks"]}
for name, codes in rights.items():
    person = User.objects.create_user(name, password="x", is_staff=True)
    person.user_permissions.set(Permission.objects.filter(codename__in=codes))
"""


class Site:
    """The admin of a project in a browser. log: what its server has said."""

    def __init__(
        self, chrome: Chrome, address: str, log: Callable[[], str], workers: list[WorkerProcess],
        nodes: Nodes,
    ) -> None:  # fmt: skip
        self.chrome, self.address, self._log = chrome, address, log
        self.workers, self.nodes = workers, nodes

    def log_in(self, name: str) -> None:
        """Log in as one of `PEOPLE`, and end on the page."""
        self.chrome.delete_all_cookies()
        self.chrome.get(f"{self.address}/admin/login/?next=/admin/celery_redlock/locks/")
        self.chrome.find_element(By.ID, "id_username").send_keys(name)
        self.chrome.find_element(By.ID, "id_password").send_keys("x")
        self.chrome.find_element(By.CSS_SELECTOR, "input[type=submit]").click()
        self.see("Locks")

    def text(self) -> str:
        return self.chrome.find_element(By.TAG_NAME, "body").text

    def see(self, *words: str, again: bool = False) -> str:
        """Return the text of the page once it has all these. again: load it at each look."""

        def look(_: Chrome) -> str:
            if again:
                self.chrome.get(f"{self.address}/admin/celery_redlock/locks/")
            text = self.text()
            return text if all(word in text for word in words) else ""

        wait = WebDriverWait(self.chrome, PATIENCE, ignored_exceptions=[WebDriverException])
        try:
            return wait.until(look)
        except TimeoutException:
            raise AssertionError(f"{words}\n{self.text()}\n\nServer:\n{self._log()}") from None

    def click(self, name: str) -> None:
        """Click a link or a button."""
        path = f"//a[normalize-space()='{name}']|//input[@value='{name}']"
        self.chrome.find_element(By.XPATH, path).click()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("admin")
    with ExitStack() as stack:
        chrome = stack.enter_context(browser(folder / "chromium"))
        broker = stack.enter_context(EmbeddedNode())
        nodes = stack.enter_context(embedded_nodes(3))
        trust_nodes(nodes)
        urls = ",".join(node.url for node in nodes)
        shared = {"TEST_BROKER": broker.url, "TEST_NODES": urls}
        project = {
            **shared,
            "DJANGO_SETTINGS_MODULE": "tests.integration.admin_site",
            "TEST_DB": str(folder / "db.sqlite3"),
            "PYTHONUNBUFFERED": "1",  # else its first lines stay in its buffer
        }
        for words in (["-m", "django", "migrate", "-v", "0"], ["-c", PEOPLE]):
            command = [sys.executable, *words]
            subprocess.run(command, env={**os.environ, **project}, cwd=ROOT, check=True)
        conf = admin_shop.app.conf
        conf.update(broker_url=broker.url, redlock_nodes=urls.split(","))

        module = "tests.integration.admin_shop"
        claim = stack.enter_context(claim_port())
        port = claim.getsockname()[1]
        words = ["-m", "django", "runserver", "--noreload", f"127.0.0.1:{port}"]
        server = WorkerProcess(
            module, name="web", env=project, cwd=ROOT, command=[sys.executable, *words]
        )
        stack.push(server.__exit__)
        server.launch()

        def launch(name: str) -> WorkerProcess:
            words = ["worker", "-n", name, "-c", "2", "-l", "INFO"]
            command = [sys.executable, "-m", "celery", "-A", module, *words]
            made = ForkedWorker(module, name=name, env=shared, cwd=ROOT, command=command)
            stack.push(made.__exit__)
            made.launch()
            return made

        workers = [launch(name) for name in WORKERS]
        for worker in workers:
            worker.wait_ready()
        eventually(lambda: "Starting development server" in server.output() or not server.runs)
        yield Site(chrome, f"http://127.0.0.1:{port}", server.output, workers, nodes)
        Redlock.of(admin_shop.app).close()
        admin_shop.app.close()


def test_as_staff(site: Site) -> None:
    take = admin_shop.take
    take.apply_async(("sku-7",), task_id=HOLDER, queue=worker_direct(WORKERS[0]))
    admin_shop.see_begun()
    take.apply_async(("sku-7",), task_id=WAITER, queue=worker_direct(WORKERS[1]))
    admin_shop.ask.delay(7)
    claim = admin_shop.remind.apply_async((3,), countdown=300)

    site.log_in("ann")
    text = site.see("partner:7", "the lock was taken", "mail:3", again=True)
    for word in (HOLDER, WAITER, *WORKERS, claim.id, "1 of 1", "waits", "1/h"):
        assert word in text, text
    take_picture(site.chrome, "django-admin", *PAGE)

    box = site.chrome.find_element(By.ID, "searchbar")
    box.send_keys("partner:*")
    box.submit()
    site.see("No locks are held.", "partner:7")
    assert "stock:sku-7" not in site.text()

    site.see("stock:sku-7", again=True)
    site.click("Break")
    site.see(f"shop.take[{HOLDER}] on celery@web1 loses stock:sku-7")
    site.click("No, take me back")
    site.see(HOLDER, "Break")
    site.click("Break")
    site.see("Break the lock?")
    site.click(YES)
    site.see("Result: stock:sku-7 is broken on")
    admin_shop.see_begun()  # the one that waited
    site.see(f"stock:sku-7 shop.take {WAITER} celery@web2", again=True)
    site.click("End")
    site.see(f"shop.remind[{claim.id}] loses its claim on mail:3")
    site.click(YES)
    site.see("There are no claims.", "is ended on")

    for worker in site.workers:
        worker.kill()
    site.see("Stranded messages", "celery@web2", "once a worker runs", again=True)


def test_without_the_right(site: Site) -> None:
    with Redlock.of(admin_shop.app).lock("stock:sku-8"):
        site.log_in("ann")
        path = "//tr[td='stock:sku-8']//a"
        link = str(site.chrome.find_element(By.XPATH, path).get_attribute("href"))
        site.log_in("bob")
        assert "stock:sku-8" in site.text()
        assert "Break" not in site.text()
        site.chrome.get(link)
        site.see("403 Forbidden")
        assert Redlock.of(admin_shop.app).holder("stock:sku-8")


def test_with_a_node_down(site: Site) -> None:
    names = [f"127.0.0.1:{node.port}" for node in site.nodes]
    with Redlock.of(admin_shop.app).lock("stock:sku-9"):
        site.log_in("ann")
        site.nodes[2].pause()
        text = site.see(f"{names[2]} cannot be queried: ", again=True)
        assert "stock:sku-9" in text
        site.nodes[1].kill()
        text = site.see("1 of 3 nodes answered, 2 needed", again=True)
        assert f"{names[1]} cannot be queried: " in text
    site.nodes[2].resume()
    site.nodes[1].start()
    trust_nodes(site.nodes)
