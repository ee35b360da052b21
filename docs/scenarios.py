"""The scenarios in which the commands of the pages run: real lock nodes, a broker and a worker.

All pages have one cast: the app `shop`, its task `shop.take`, the worker `celery@web1`, the lock
nodes a, b and c, and the two task ids below. `docs/console.py` runs the commands.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from celery_redlock import Redlock
from celery_redlock.lock.model.keys import lock_key, unique_key
from celery_redlock.testing import EmbeddedNode, WorkerProcess, embedded_nodes

ROOT = Path(__file__).resolve().parent.parent
FIRST_TASK = ROOT / "docs" / "getting-started" / "first-locked-task.md"
HOLDER = "4c8f3226-0d5e-4a8e-9b55-2b1f0a6c7d11"
WAITER = "a63e1c39-7a52-4f0d-8c1e-5e9d3b2f6a22"
PATIENCE = 120.0  # seconds in which a scenario is set, on a busy machine
SHOP = """
import time

from celery import Celery
from celery_redlock import LockedTask

app = Celery("shop", broker="redis://localhost", backend="redis://localhost")
app.conf.redlock_nodes = ["redis://a", "redis://b", "redis://c"]
app.conf.task_queues = {"celery": {}, "imports": {}}
app.conf.redlock_queues = {"imports": {"ttl": 50}}
app.conf.task_reject_on_worker_lost = True


@app.task(base=LockedTask, lock_key="stock:{sku}", acks_late=True)
def take(sku, pieces):
    time.sleep(3600)
"""
RATED = """

@app.task(base=LockedTask, lock_key="partner:{tenant}", lock_rate="2/h")
def ask(tenant):
    return f"{tenant} is asked"
"""
UNIQUE = """

@app.task(base=LockedTask, lock_key="mail:{customer}", lock_unique_for=600)
def remind(customer):
    time.sleep(3600)
"""
# a node that has not replied when its message is published keeps no claim
REMIND = """
import time

from celery.signals import after_task_publish
from celery_redlock.lock.node_status import ask_nodes
from celery_redlock.tasks.per_app import redlock_of
from shop import app, remind


@after_task_publish.connect
def hear_every_node(**_):
    while ask_nodes(redlock_of(app).session).failing:
        time.sleep(0.05)


app.conf.redlock_node_timeout = 5.0
hear_every_node()
remind.delay(7)
"""
ASK = """
import sys, time
from shop import ask

for _ in range(2):
    ask.delay(7).get(timeout=60)
sent = ask.apply_async((7,), task_id=sys.argv[1])
while sent.state != "DEFERRED":
    time.sleep(0.05)
"""
SEND = """
import sys, time
from shop import take

sent = take.apply_async(("sku-7", int(sys.argv[2])), task_id=sys.argv[1])
while sys.argv[3:] and sent.state != sys.argv[3]:
    time.sleep(0.05)
"""
_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class World:
    """One scenario that is set. folder: where its commands run.

    nodes: the lock nodes. shown: what a page shows for a text of an output, such as an address.
    """

    folder: Path
    nodes: Sequence[EmbeddedNode]
    shown: dict[str, str]

    @property
    def env(self) -> dict[str, str]:
        """The environment of a command: `celery` and `python` are those of this process."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}

    def run(self, command: str) -> str:
        """Return the output of a command of a page; a question is answered with yes."""
        done = subprocess.run(
            shlex.split(command), cwd=self.folder, env=self.env, input="y\n", text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=PATIENCE,
        )  # fmt: skip
        return done.stdout.replace("[y/N]: ", "[y/N]: y\n")  # a terminal shows the answer

    def send(self, task_id: str, pieces: int, state: str = "") -> None:
        """Send `shop.take`, and return once it has this state."""
        command = [sys.executable, "-c", SEND, task_id, str(pieces), *([state] if state else [])]
        subprocess.run(command, cwd=self.folder, env=self.env, check=True, timeout=PATIENCE)

    def see_lock(self, resource: str) -> None:
        """Return once every lock node has the lock of a resource."""
        self.see_key(lock_key("redlock", resource))

    def see_key(self, key: str) -> None:
        """Return once every lock node has a key."""
        for node in self.nodes:
            with node.client() as client:
                _wait_for(lambda: client.exists(key))


def _wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the scenario is not set")
        time.sleep(0.05)


@contextmanager
def _world(count: int, modules: dict[str, str]) -> Iterator[World]:
    """Give a broker, some lock nodes and a folder with modules, as the pages show them.

    count: the number of lock nodes; without any the broker is the one node.
    """
    with (
        EmbeddedNode() as broker,
        embedded_nodes(count) as nodes,
        tempfile.TemporaryDirectory() as folder,
    ):
        servers = {"localhost": broker, **dict(zip("abc", nodes, strict=False))}
        for name, code in modules.items():
            text = re.sub(r"redis://(\w+)", lambda url: servers[url[1]].url, code)
            (Path(folder) / name).write_text(text, encoding="utf-8")
        shown = {f"127.0.0.1:{node.port}": f"{name}:6379" for name, node in servers.items()}
        yield World(Path(folder), nodes or [broker], {**shown, socket.gethostname(): "web1"})


@contextmanager
def _shop(code: str = SHOP, *, trust: bool = True) -> Iterator[World]:
    """Give the shop with its worker."""
    with _world(3, {"shop.py": code}) as world:
        if trust:
            _trust(world)
        with _worker(world, "shop", "celery@web1"):
            yield world


def _trust(world: World) -> None:
    with Redlock([node.url for node in world.nodes], node_timeout=5.0) as redlock:
        redlock.trust()


@contextmanager
def _worker(world: World, app: str, name: str) -> Iterator[WorkerProcess]:
    worker = WorkerProcess(app, cwd=world.folder, env=world.env, options=["-E", "-n", name])
    with ExitStack() as stack:
        stack.callback(worker.log.unlink)
        stack.callback(worker.kill)  # the holder never ends
        worker.start()
        yield worker


@contextmanager
def _held() -> Iterator[World]:
    with _shop() as world:
        world.send(HOLDER, 1)
        world.see_lock("stock:sku-7")
        world.send(WAITER, 2, "DEFERRED")
        yield world


@contextmanager
def _rate() -> Iterator[World]:
    """Give a shop in which the starts of a rate are used up."""
    with _shop(SHOP + RATED) as world:
        command = [sys.executable, "-c", ASK, WAITER]
        subprocess.run(command, cwd=world.folder, env=world.env, check=True, timeout=PATIENCE)
        yield world


@contextmanager
def _claim() -> Iterator[World]:
    """Give a shop with a deduplicated send."""
    with _shop(SHOP + UNIQUE) as world:
        command = [sys.executable, "-c", REMIND]
        subprocess.run(command, cwd=world.folder, env=world.env, check=True, timeout=PATIENCE)
        world.see_lock("mail:7")
        world.see_key(unique_key("redlock", "shop.remind:mail:7"))
        yield world


@contextmanager
def _left() -> Iterator[World]:
    """Give the shop after its last worker has ended."""
    with _world(3, {"shop.py": SHOP}) as world:
        _trust(world)
        with _worker(world, "shop", "celery@web1") as worker:
            worker.stop(PATIENCE)
        yield world


@contextmanager
def _one_node_down() -> Iterator[World]:
    with _held() as world:
        world.nodes[2].kill()
        yield world


@contextmanager
def _new_nodes() -> Iterator[World]:
    with _shop(trust=False) as world:
        world.send(WAITER, 2, "DEFERRED")
        yield world


@contextmanager
def _postgresql() -> Iterator[World]:
    """Give the shop over a PostgreSQL server without the schema, without a worker."""
    from tests.postgres import PostgresNode, make_template  # it needs PostgreSQL's programs

    with tempfile.TemporaryDirectory() as folder:
        make_template(Path(folder) / "template")
        with PostgresNode(Path(folder) / "template", fsync=False) as server:
            shop = re.sub("(redlock_nodes =).*", rf"\1 [{server.url!r}]", SHOP)
            with _world(0, {"shop.py": shop}) as world:
                world.shown[f"127.0.0.1:{server.port}/postgres"] = "db1:5432/app"
                yield world


@contextmanager
def _first_task() -> Iterator[World]:
    """Give the page's own modules, with its tasks under way."""
    tasks, send, *_ = _PYTHON.findall(FIRST_TASK.read_text(encoding="utf-8"))
    # a command that starts slowly still finds both locks
    tasks = re.sub(r"time\.sleep\(\d+\)", "time.sleep(3600)", tasks)
    with (
        _world(0, {"tasks.py": tasks, "send.py": send}) as world,
        _worker(world, "tasks", "celery@web1"),
    ):
        command = [sys.executable, "send.py"]
        with subprocess.Popen(
            command, cwd=world.folder, env=world.env, stdout=subprocess.DEVNULL
        ) as sends:
            try:
                world.see_lock("stock:sku-7")
                world.see_lock("stock:sku-8")
                yield world
            finally:
                sends.kill()


@contextmanager
def _this_page(page: Path) -> Iterator[World]:
    """Give the app of a page, its first block of Python, without a worker."""
    first, *_ = _PYTHON.findall(page.read_text(encoding="utf-8"))
    with _world(3, {"shop.py": first}) as world:
        yield world


def set_scenario(name: str, page: Path) -> AbstractContextManager[World]:
    """Return what sets a scenario for a block of a page."""
    return _this_page(page) if name == THIS_PAGE else _SCENARIOS[name]()


THIS_PAGE = "this page"
_SCENARIOS = {
    "idle": _shop,
    "held": _held,
    "rate": _rate,
    "claim": _claim,
    "left": _left,
    "one node down": _one_node_down,
    "new nodes": _new_nodes,
    "break": _held,
    "rate break": _rate,
    "end claim": _claim,
    "first task": _first_task,
    "postgresql": _postgresql,
}
SCENARIOS = (*_SCENARIOS, THIS_PAGE)
NOT_SHARED = {
    "new nodes",
    "left",
    "break",
    "rate break",
    "end claim",
    "first task",
    "postgresql",
    THIS_PAGE,
}  # each block has a fresh world
