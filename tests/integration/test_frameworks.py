"""The apps below `examples/`, started as a user starts them, on real servers and real workers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sqlite3
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from celery_redlock.testing import EmbeddedNode, WorkerProcess
from tests import fork_server
from tests.conftest import NODE_TIMEOUT, TTL, Nodes, eventually, paused
from tests.integration.conftest import ROOT, overlaps
from tests.integration.zookeeper import Server, zookeeper_server
from tests.pages import on_servers
from tests.workers import ForkedWorker

httpx = pytest.importorskip("httpx", reason="needs httpx")
pytestmark = [pytest.mark.pages, pytest.mark.slow]

EXAMPLES = ROOT / "examples"
FLASK_PAGE = ROOT / "docs" / "how-to" / "flask.md"
PYTHON = (sys.executable, "-m")
CELERY = (sys.executable, "-m", "celery")
WORKER = ("worker", "--concurrency", "4", "--loglevel", "INFO")
PATIENT = f"\napp.conf.redlock_node_timeout = {NODE_TIMEOUT}\n"  # as the machine needs it

# Takes the place of what stands for the reader's own slow code. A body waits for the test's word.
OWN_CODE = """
import json, pathlib, time

FOLDER = pathlib.Path(__file__).resolve().parent

def write(what, key):
    line = json.dumps([what, key, time.monotonic()])
    with (FOLDER / "lines").open("a") as file:
        file.write(line + "\\n")

def work(key):
    write("begin", key)
    while not (FOLDER / f"go-{key}").exists():
        time.sleep(0.02)
    time.sleep(0.02)
    write("end", key)
"""


def needs(*modules: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test if modules are missing; CI does not allow that skip."""
    missing = [name for name in modules if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


@dataclass
class Example:
    """A copy of one example, with servers that are there. folder: where it is."""

    folder: Path
    broker: EmbeddedNode
    nodes: Nodes
    stack: ExitStack
    env: dict[str, str] = field(default_factory=dict)
    web: list[WorkerProcess] = field(default_factory=list)

    def append(self, file: str, text: str) -> None:
        path = self.folder / file
        path.write_text((path.read_text() if path.exists() else "") + text)

    def replace(self, file: str, code: str) -> None:
        """Put this in place of a file that stands for the reader's own slow code."""
        assert '"""Stands for ' in (self.folder / file).read_text()
        (self.folder / "own_code.py").write_text(OWN_CODE)
        (self.folder / file).write_text(f"from own_code import work, write\n{code}")

    def start(self, *command: str, name: str) -> WorkerProcess:
        """Start a command of the reader; it is killed with its children when the test ends."""
        made = ForkedWorker(name, name=name, command=command, cwd=self.folder, env=self.env)
        self.stack.push(made)  # removes its log
        self.stack.callback(made.kill)
        made.launch()
        return made

    def worker(self, app: str, *options: str) -> WorkerProcess:
        """Start a worker; return it when it is ready."""
        return self.start(*CELERY, "-A", app, *WORKER, *options, name="worker").wait_ready()

    def run(self, *command: str) -> str:
        """Run a command of the reader to its end; return what it prints."""
        ran = fork_server.run(
            command, cwd=self.folder, env={**os.environ, **self.env},
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    def serve(self, *command: str) -> httpx.Client:
        """Start a web server that logs its address; return a client of it."""
        server = self.start(*command, name="web")
        self.web.append(server)
        address = re.compile(r"http://127\.0\.0\.1:\d+")
        (url,) = eventually(lambda: address.findall(server.output()))[:1]
        client = self.stack.enter_context(httpx.Client(base_url=url, timeout=60))
        eventually(lambda: answers(client))
        return client

    def lines(self, what: str, key: str) -> list[float]:
        file = self.folder / "lines"
        text = file.read_text() if file.exists() else ""
        lines = [json.loads(line) for line in text.split("\n")[:-1]]
        return [at for said, of, at in lines if (said, of) == (what, key)]

    def see_begin(self, key: str, count: int = 1) -> None:
        eventually(lambda: len(self.lines("begin", key)) >= count)

    def let_go(self, key: str) -> None:
        (self.folder / f"go-{key}").touch()

    def see_no_overlap(self, key: str, count: int) -> None:
        """Fail if two bodies of a key ran at once; so many must have ended."""
        eventually(lambda: len(self.lines("end", key)) >= count)
        begun, ended = self.lines("begin", key), self.lines("end", key)
        assert not overlaps(list(zip(begun, ended, strict=False)))

    def metas(self) -> dict[str, Any]:
        client = self.broker.client()
        texts = [client.get(name) for name in client.keys("celery-task-meta-*")]
        metas = [json.loads(str(text)) for text in texts if text]
        return {meta["task_id"]: meta for meta in metas}

    def states(self) -> list[str]:
        return [meta["status"] for meta in self.metas().values()]

    def state(self, task: str) -> str | None:
        return self.metas().get(task, {}).get("status")

    def see_result(self, task: str) -> Any:
        eventually(lambda: self.state(task) == "SUCCESS")
        return self.metas()[task]["result"]


def answers(client: httpx.Client) -> bool:
    try:
        client.get("/")
    except httpx.TransportError:
        return False
    return True


@pytest.fixture
def example(
    standing_broker: EmbeddedNode, nodes: Nodes, tmp_path: Path
) -> Iterator[Callable[..., Example]]:
    standing_broker.client().flushall()
    urls = [node.url for node in nodes]
    with ExitStack() as stack:

        def copy(name: str) -> Example:
            folder = tmp_path / name
            shutil.copytree(EXAMPLES / name, folder, ignore=shutil.ignore_patterns("__pycache__"))
            for file in folder.rglob("*.py"):
                file.write_text(on_servers(file.read_text(), standing_broker.url, urls))
            path = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            env = {"PYTHONPATH": os.pathsep.join(path)}
            return Example(folder, standing_broker, nodes, stack, env)

        yield copy


@needs("redbeat")
@pytest.mark.parametrize("scheduler", [(), ("--scheduler", "redbeat.RedBeatScheduler")])
def test_a_periodic_run_is_skipped_while_the_last_one_is_at_work(
    example: Callable[..., Example], scheduler: tuple[str, ...]
) -> None:
    shop = example("beat")
    shop.replace("reports.py", "def make_report():\n    work('report')\n")
    shop.append("shop.py", PATIENT + 'app.conf.beat_schedule["report"]["schedule"] = 0.5\n')
    shop.worker("shop")
    shop.start(*CELERY, "-A", "shop", "beat", *scheduler, name="beat")
    shop.see_begin("report")
    eventually(lambda: shop.states().count("REVOKED") >= 3)
    assert len(shop.lines("begin", "report")) == 1
    shop.let_go("report")
    shop.see_no_overlap("report", 3)
    assert "SUCCESS" in shop.states()
    assert bool(shop.broker.client().keys("redbeat:*")) == bool(scheduler)


def rows(database: Path, query: str) -> list[Any]:
    connection = sqlite3.connect(database, timeout=60)
    try:
        with connection:
            return [row[0] for row in connection.execute(query)]
    finally:
        connection.close()


# with ATOMIC_REQUESTS a commit would come after the release of a lock that a view takes
AT_THE_RELEASE = """
import django
from django.conf import settings
settings.DATABASES["default"]["ATOMIC_REQUESTS"] = True
django.setup()
from celery_redlock.signals import lock_released
from django.db import connection
from django.test import Client
def show(**_):
    print("in a transaction:", connection.in_atomic_block)
lock_released.connect(show)
print(Client(SERVER_NAME="localhost").post("/orders/999/cancel/").json())
"""
ROLLED_BACK = """
import django
django.setup()
from django.db import transaction
from django.test import RequestFactory
from orders.views import place_order
try:
    with transaction.atomic():
        print(place_order(RequestFactory().post("/orders/sku-7/"), "sku-7").status_code)
        raise ZeroDivisionError
except ZeroDivisionError:
    print("rolled back")
"""


@needs("django", "django_celery_results")
def test_django(example: Callable[..., Example]) -> None:
    """Two orders for one sku never overlap, and the database has the states of their tasks."""
    shop = example("django_shop")
    shop.env["DJANGO_SETTINGS_MODULE"] = "proj.settings"
    code = "def {}(order_id):\n    work(f'{}{{order_id}}')\n"
    codes = (code.format(*one) for one in (("pick", ""), ("ship", "ship-"), ("take_back", "back-")))
    shop.replace("orders/warehouse.py", "".join(codes))
    shop.append("proj/settings.py", f"\nCELERY_REDLOCK_NODE_TIMEOUT = {NODE_TIMEOUT}\n")
    manage = (sys.executable, "manage.py")
    shop.run(*manage, "migrate")
    assert "No changes detected" in shop.run(*manage, "makemigrations", "--check", "--dry-run")
    data = shop.folder / "db.sqlite3"
    rows(data, "INSERT INTO orders_stock VALUES ('sku-7', 5), ('sku-8', 5)")

    assert shop.run(sys.executable, "-c", ROLLED_BACK) == "202\nrolled back\n"
    assert shop.broker.client().llen("celery") == 0
    released = shop.run(sys.executable, "-c", AT_THE_RELEASE)
    assert released == "in a transaction: False\n{'cancelled': 0}\n"

    web = shop.serve(*manage, "runserver", "--noreload", "127.0.0.1:0")

    def order(sku: str, pieces: int) -> str:
        answer = web.post(f"/orders/{sku}/", data={"pieces": pieces})
        assert answer.status_code == 202
        return str(answer.json()["order"])

    def states() -> list[Any]:
        return rows(data, "SELECT status FROM django_celery_results_taskresult")

    first = order("sku-7", 2)
    assert shop.broker.client().llen("celery") == 1
    shop.worker("proj")
    shop.see_begin(first)
    second, other = order("sku-7", 3), order("sku-8", 1)
    shop.see_begin(other)
    eventually(lambda: "DEFERRED" in states())
    assert shop.lines("begin", second) == []
    for one in (first, second, other):
        shop.let_go(one)
    eventually(lambda: states() == ["SUCCESS"] * 3)
    assert shop.lines("begin", second) > shop.lines("end", first)
    assert rows(data, "SELECT pieces FROM orders_stock ORDER BY sku") == [0, 4]
    assert rows(data, "SELECT state FROM orders_order") == ["taken"] * 3

    def ship(order: str, verb: str = "ship") -> int:
        return web.post(f"/orders/{order}/{verb}/").status_code

    assert [ship(first), ship(first), ship(second)] == [202, 409, 202]
    for one in (first, second):
        shop.see_begin(f"ship-{one}")
        assert [ship(one), ship(one, "cancel")] == [409, 409]
        shop.let_go(f"ship-{one}")
    eventually(lambda: states() == ["SUCCESS"] * 5)
    assert eventually(lambda: ship(first) == 202)  # it has run; the body reads the state
    eventually(lambda: states() == ["SUCCESS"] * 6)
    assert len(shop.lines("begin", f"ship-{first}")) == 1
    assert sorted(rows(data, "SELECT state FROM orders_order")) == ["shipped"] * 2 + ["taken"]

    # the view that writes: one message a click that changes the row, and 409 for the others
    assert [ship(one, "return") for one in (first, first, other)] == [202, 409, 409]
    shop.see_begin(f"back-{first}")
    assert ship(first, "return") == 409
    shop.let_go(f"back-{first}")
    eventually(lambda: states() == ["SUCCESS"] * 7)
    assert ship(first, "return") == 409
    assert rows(data, f"SELECT state FROM orders_order WHERE id = {first}") == ["returned"]

    # the view with the task's lock
    with paused(*shop.nodes[:2]):
        assert ship(other, "cancel") == 503
    assert ship(other, "cancel") == 200
    assert rows(data, f"SELECT state FROM orders_order WHERE id = {other}") == ["cancelled"]


@needs("flask")
@pytest.mark.parametrize("change", ["the base class", "a setting alone"])
def test_flask(example: Callable[..., Example], change: str) -> None:
    """A body has the app context with and without a lock, and two runs of a sku never overlap.

    As on the page: either FlaskTask is a LockedTask, or `redlock_tasks` names the tasks.
    """
    shop = example("flask_shop")
    quick = "def put_back(sku, pieces):\n    write('back', sku)\ndef count(sku):\n    pass\n"
    shop.replace("task_app/warehouse.py", "def pick(sku, pieces):\n    work(sku)\n" + quick)
    shop.env["FLASK_CELERY__redlock_node_timeout"] = f"{NODE_TIMEOUT}"
    shop.env["FLASK_GREETING"] = "Thanks"
    if change == "a setting alone":
        as_flask_has_it = (shop.folder / "task_app" / "__init__.py").read_text()
        for ours, flasks in (
            ("class FlaskTask(LockedTask):", "class FlaskTask(Task):"),
            ("from celery import Celery\n", "from celery import Celery, Task\n"),
            ("from celery_redlock import LockedTask\n", ""),
            ('            "redlock_key": False,\n', ""),
        ):
            assert ours in as_flask_has_it
            as_flask_has_it = as_flask_has_it.replace(ours, flasks)
        (shop.folder / "task_app" / "__init__.py").write_text(as_flask_has_it)
        tasks = shop.folder / "task_app" / "tasks.py"
        as_it_was = tasks.read_text().replace('lock_key="stock:{sku}", ', "")
        tasks.write_text(re.sub(r"@shared_task\(\n(?: .+\n)+\)", "@shared_task", as_it_was))
        (setting,) = re.findall(
            r"^(FLASK_CELERY__\w+)='(.+)'$", FLASK_PAGE.read_text(), re.MULTILINE
        )
        shop.env.update([setting])
    flask = (*PYTHON, "flask", "--app", "task_app")
    web = shop.serve(*flask, "run", "--port", "0")
    shop.worker("make_celery")

    def order(sku: str, pieces: int) -> str:
        answer = web.post(f"/orders/{sku}/{pieces}")
        assert answer.status_code == 202
        return str(answer.json()["task"])

    def state(task: str) -> str:
        return str(web.get(f"/tasks/{task}").json()["state"])

    first = order("sku-7", 2)
    shop.see_begin("sku-7")
    second = order("sku-7", 3)
    eventually(lambda: state(second) == "DEFERRED")
    refused = web.post("/stock/sku-7/4")
    assert (refused.status_code, refused.json()) == (409, {"error": "sku-7 is in use, try again"})
    assert web.post("/stock/sku-8/4").status_code == 200
    sent, duplicate = (web.post("/recounts/sku-7") for _ in range(2))
    assert sent.status_code == 202
    if change == "the base class":  # the setting on the page names the other task alone
        assert duplicate.status_code == 409
        assert duplicate.json() == {"error": "sku-7 is being counted"}
    said = shop.run(*PYTHON, "celery", "-A", "make_celery", "call", "task_app.tasks.thank",
                    "--args", '["ann"]')  # fmt: skip
    assert shop.see_result(said.strip()) == "Thanks, ann"
    assert len(shop.lines("begin", "sku-7")) == 1
    shop.let_go("sku-7")
    assert shop.see_result(first) == "Thanks: 2 of sku-7"
    assert shop.see_result(second) == "Thanks: 3 of sku-7"
    shop.see_no_overlap("sku-7", 2)
    assert len(shop.lines("back", "sku-7")) == 0
    with paused(*shop.nodes[:2]):
        assert web.post("/stock/sku-7/4").status_code == 503


SLOW_WAREHOUSE = """
import asyncio

def count(sku):
    work(sku)
    return 3

async def pick(sku, pieces):
    await asyncio.to_thread(work, sku)

async def put_back(sku):
    pass
"""


@needs("fastapi", "uvicorn")
def test_fastapi(example: Callable[..., Example]) -> None:
    """Two sends are one task; a request that finds the lock taken ends as 409."""
    shop = example("fastapi_shop")
    shop.replace("warehouse.py", SLOW_WAREHOUSE)
    shop.append("tasks.py", f"{PATIENT}app.conf.redlock_ttl = {TTL}\n".replace("app", "celery_app"))
    web = shop.serve(*PYTHON, "uvicorn", "main:app", "--port", "0")
    shop.worker("tasks")

    async def ask(*paths: str) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=web.base_url, timeout=120) as client:
            return list(await asyncio.gather(*(client.post(path) for path in paths)))

    recounts = asyncio.run(ask(*["/stock/sku-7/recount"] * 5))
    assert {answer.status_code for answer in recounts} == {202}
    (task,) = {answer.json()["task"] for answer in recounts}
    shop.see_begin("sku-7")
    (refused,) = asyncio.run(ask("/stock/sku-7/pick"))
    assert (refused.status_code, refused.json()) == (409, {"detail": "sku-7 is in use, try again"})
    (duplicate,) = asyncio.run(ask("/stock/sku-7/count"))
    assert duplicate.status_code == 409
    assert duplicate.json() == {"detail": "sku-7 is being counted"}
    shop.let_go("sku-7")
    assert shop.see_result(task) == 3
    picked = asyncio.run(ask(*["/stock/sku-7/pick?pieces=2"] * 10))
    assert {answer.status_code for answer in picked} <= {200, 409}
    done = [answer.json() for answer in picked if answer.status_code == 200]
    assert done
    assert all(answer == {"picked": 2} for answer in done)
    shop.see_no_overlap("sku-7", 1 + len(done))
    (returned,) = asyncio.run(ask("/stock/sku-7/return"))
    assert shop.see_result(returned.json()["task"]) == 3
    with paused(*shop.nodes[:2]):
        (refused,) = asyncio.run(ask("/stock/sku-8/pick"))
        assert refused.status_code == 503
        assert refused.json() == {"detail": "too few lock nodes answer"}
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(asyncio.run, ask("/stock/sku-9/pick"))
        shop.see_begin("sku-9")
        shop.run(*CELERY, "-A", "tasks", "redlock", "break", "stock:sku-9", "--yes")
        (server,) = shop.web
        eventually(lambda: "lost 'stock:sku-9'" in server.output())
        shop.let_go("sku-9")
        (lost,) = asked.result()
    assert (lost.status_code, lost.json()) == (500, {"detail": "count sku-9 again"})


SLOW_DATABASE = """
from contextlib import contextmanager
from contextvars import ContextVar

transaction = ContextVar("transaction")

@contextmanager
def open_transaction():
    write("open", "transaction")
    token = transaction.set("a transaction")
    yield
    transaction.reset(token)
    write("commit", "transaction")

def write_order(sku, pieces):
    work(sku)
    return f"{pieces} of {sku} in {transaction.get()}"
"""


def test_an_app_with_a_task_class_of_its_own(example: Callable[..., Example]) -> None:
    """Each body has its transaction, committed before the release; a deferral opens none."""
    shop = example("own_base_class")
    shop.replace("database.py", SLOW_DATABASE)
    shop.append("own_base.py", PATIENT)
    shop.worker("own_base")

    def call(name: str, *args: object) -> str:
        return shop.run(*CELERY, "-A", "own_base", "call", name, "--args", json.dumps(args)).strip()

    take, sync = ("shop.take", "sku-7", 1), ("vendor.sync", "account-7")
    first = [call(*take), call(*sync)]
    shop.see_begin("sku-7")
    shop.see_begin("account-7")
    second = [call(*take), call(*sync)]
    eventually(lambda: [shop.state(task) for task in second] == ["DEFERRED"] * 2)
    assert shop.see_result(call("shop.thank", "ann")) == "Thank you, ann, from a transaction"

    keys = (("sku-7", 1), ("account-7", 0))
    for (key, pieces), *tasks in zip(keys, first, second, strict=True):
        before = len(shop.lines("commit", "transaction"))
        shop.let_go(key)
        for task in tasks:
            assert shop.see_result(task) == f"{pieces} of {key} in a transaction"
        shop.see_no_overlap(key, 2)
        assert shop.lines("commit", "transaction")[before] < shop.lines("begin", key)[1]
    assert len(shop.lines("open", "transaction")) == len(shop.lines("commit", "transaction")) == 5


def test_a_glob_locks_all_other_tasks_but_those_of_celery(example: Callable[..., Example]) -> None:
    shop = example("own_base_class")
    shop.append("own_base.py", PATIENT)
    shop.worker("all_locked")

    def options(task: str) -> str:
        return shop.run(*CELERY, "-A", "all_locked", "redlock", "options", task)

    assert "locked by the entry 'vendor.sync'" in options("vendor.sync")
    assert "locked by the entry '*'" in options("shop.thank")
    with pytest.raises(AssertionError, match=r"celery\.backend_cleanup"):
        options("celery.backend_cleanup")


# Says which process works, and what its session hears.
SLOW_BOOKINGS = """
import os

def add_up(account):
    from accounts import session
    session().add_listener(lambda state: write(state, str(os.getpid())))
    write("pid", f"{account} {os.getpid()}")
    work(account)
    return os.getpid()
"""


@pytest.fixture
def zookeeper_process(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "zookeeper"
    folder.mkdir()
    with zookeeper_server(folder) as server:
        yield server


@pytest.fixture
def zookeeper(zookeeper_process: Server) -> Iterator[Any]:
    """Give a client of a ZooKeeper server."""
    client = pytest.importorskip("kazoo.client", reason="needs kazoo").KazooClient
    zk = client(zookeeper_process.address, timeout=TTL)
    zk.start(timeout=60)
    yield zk
    zk.stop()
    zk.close()


@dataclass
class Accounts:
    """The shop whose lock is ZooKeeper's. zookeeper: a client of that server."""

    shop: Example
    zookeeper: Any

    def close_month(self, account: str) -> str:
        command = ("-A", "accounts", "call", "shop.close_month", "--args", json.dumps([account]))
        return self.shop.run(*CELERY, *command).strip()

    def tokens(self, account: str, count: int) -> list[int]:
        """Return the tokens of holder and waiters in the order of their turns, once so many."""
        path = f"/locks/account-{account}"

        def found() -> list[str]:
            names = self.zookeeper.get_children(path) if self.zookeeper.exists(path) else []
            return sorted(names, key=lambda name: name[-10:]) if len(names) == count else []

        return [self.zookeeper.exists(f"{path}/{name}").czxid for name in eventually(found)]

    def written(self, account: str) -> tuple[int, int]:
        """Return the total of a statement, and the token that it was written with."""
        with closing(sqlite3.connect(self.shop.folder / "shop.db")) as db:
            query = "SELECT total, fence FROM statement WHERE account = ?"
            total, fence = db.execute(query, [account]).fetchone()
        return total, fence

    def pids(self, account: str) -> list[int]:
        """Return the processes that began to work on an account, in order."""
        lines = (self.shop.folder / "lines").read_text().split("\n")[:-1]
        said = [key.split() for what, key, _ in map(json.loads, lines) if what == "pid"]
        return [int(pid) for of, pid in said if of == account]


@pytest.fixture
def accounts(
    example: Callable[..., Example], zookeeper: Any, zookeeper_process: Server
) -> Accounts:
    shop = example("zookeeper_lock")
    shop.replace("bookings.py", SLOW_BOOKINGS)
    ensemble = f"\nENSEMBLE = {zookeeper_process.address!r}\nSESSION_TIMEOUT = {TTL}\n"
    shop.append("accounts.py", ensemble)
    shop.worker("accounts")
    return Accounts(shop, zookeeper)


def test_a_lock_of_zookeeper_is_held_by_one_run_whose_token_is_greater_than_the_last(
    accounts: Accounts,
) -> None:
    shop = accounts.shop
    tasks = [accounts.close_month("7")]
    shop.see_begin("7")
    tasks.append(accounts.close_month("7"))
    first, second = accounts.tokens("7", 2)
    assert second > first
    other = accounts.close_month("8")
    shop.let_go("8")
    shop.see_result(other)
    assert len(shop.lines("begin", "7")) == 1
    shop.let_go("7")
    assert [shop.see_result(task) for task in tasks] == accounts.pids("7")
    shop.see_no_overlap("7", 2)
    assert accounts.written("7") == (accounts.pids("7")[1], second)


def test_the_late_write_of_a_stopped_holder_is_refused_by_the_token_of_zookeeper(
    accounts: Accounts,
) -> None:
    shop = accounts.shop
    late = accounts.close_month("7")
    shop.see_begin("7")
    (stopped,) = accounts.pids("7")
    (old,) = accounts.tokens("7", 1)
    os.kill(stopped, signal.SIGSTOP)
    in_time = accounts.close_month("7")
    shop.see_begin("7", 2)
    (new,) = accounts.tokens("7", 1)
    assert new > old
    shop.let_go("7")
    taker = shop.see_result(in_time)
    assert accounts.written("7") == (taker, new)
    os.kill(stopped, signal.SIGCONT)
    eventually(lambda: shop.state(late) == "FAILURE")
    assert shop.metas()[late]["result"]["exc_message"] == [f"token {old} is too old"]
    assert accounts.written("7") == (taker, new)
    eventually(lambda: shop.lines("LOST", str(stopped)))
    assert shop.lines("LOST", str(taker)) == []


def test_a_release_reaches_a_zookeeper_that_did_not_answer(
    accounts: Accounts, zookeeper_process: Server
) -> None:
    """A release that fails would leave the lock to the session, which the next run keeps alive."""
    shop = accounts.shop
    task = accounts.close_month("7")
    shop.see_begin("7")
    (holder,) = accounts.pids("7")
    zookeeper_process.process.signal(signal.SIGSTOP)
    shop.let_go("7")
    eventually(lambda: shop.lines("SUSPENDED", str(holder)))
    zookeeper_process.process.signal(signal.SIGCONT)
    assert shop.see_result(task) == holder
    assert accounts.zookeeper.retry(accounts.zookeeper.get_children, "/locks/account-7") == []


def test_all_locks_of_a_session_of_zookeeper_end_with_it_and_say_that_they_are_held(
    zookeeper: Any, zookeeper_process: Server
) -> None:
    locks = [zookeeper.Lock(f"/locks/{name}") for name in "ab"]
    for lock in locks:
        assert lock.acquire(timeout=60)
    nodes = [f"{lock.path}/{lock.node}" for lock in locks]
    assert all(map(zookeeper.exists, nodes))
    states: list[str] = []
    zookeeper.add_listener(states.append)
    ender = type(zookeeper)(zookeeper_process.address, client_id=zookeeper.client_id)
    ender.start(timeout=60)
    ender.stop()
    ender.close()
    eventually(lambda: states[-1:] == ["CONNECTED"] and "LOST" in states)
    assert not any(map(zookeeper.retry, [zookeeper.exists] * 2, nodes))
    assert [lock.is_acquired for lock in locks] == [True, True]
