"""A move from Redis nodes to PostgreSQL and back, as the page says it: never two holders."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_redlock import Redlock
from celery_redlock.testing import EmbeddedNode
from tests.conftest import Nodes, eventually
from tests.postgres import PostgresNode
from tests.workers import ForkedWorker

pytestmark = pytest.mark.postgresql

MESSAGES = 10
PATIENCE = 5.0  # seconds for a node of a busy machine
SHOP = f"""
import json, os, time
from celery import Celery
from celery_redlock import LockedTask

app = Celery("shop", broker=os.environ["BROKER"], backend=os.environ["BROKER"])
app.conf.redlock_nodes = os.environ["NODES"].split()
app.conf.redlock_node_timeout = {PATIENCE}

def write(*words):
    with open("log", "a") as log:
        log.write(json.dumps([time.monotonic(), os.environ["KIND"], *words]) + chr(10))

@app.task(bind=True, base=LockedTask, lock_key="stock:{{sku}}", lock_fencing=True, acks_late=True)
def take(self, sku, number):
    write("begin", number, self.lock.fencing_token)
    time.sleep(0.2)
    write("end", number, self.lock.fencing_token)
"""


@dataclass
class Shop:
    """A folder with the app, and its broker."""

    folder: Path
    broker: EmbeddedNode
    sends: Celery

    def send(self, *numbers: int) -> None:
        for number in numbers:
            self.sends.send_task("shop.take", ("sku-7", number))

    @contextmanager
    def workers(self, kind: str, urls: Sequence[str]) -> Iterator[None]:
        """Give two workers with these nodes; stop them by TERM at the end."""
        env = {"BROKER": self.broker.url, "NODES": " ".join(urls), "KIND": kind}
        made = [
            ForkedWorker("shop", name=f"{kind}{number}", concurrency=1, env=env, cwd=self.folder)
            for number in range(2)
        ]
        with made[0], made[1]:
            yield
            for worker in made:
                worker.signal(signal.SIGTERM)
            for worker in made:  # one that is killed would keep its messages unacknowledged
                worker.wait(120)

    def log(self, *what: str) -> list[Any]:
        file = self.folder / "log"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in map(json.loads, lines) if line[2] in what]

    def see_ended(self, count: int) -> None:
        eventually(lambda: len(self.log("end")) >= count)


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    (tmp_path / "shop.py").write_text(SHOP)
    with EmbeddedNode() as broker:
        sends = Celery("sends", broker=broker.url, set_as_current=False)
        yield Shop(tmp_path, broker, sends)
        sends.close()


def see_no_lock(urls: Sequence[str]) -> None:
    """Fail if a lock stands on nodes, as `redlock locks` shows it."""
    with Redlock(urls, node_timeout=PATIENCE, max_ttl=60) as made:
        found = made.locks()
    assert found.is_known
    assert found.locks == ()


def test_a_move_and_the_way_back_have_one_holder_at_a_time_and_lose_no_message(
    shop: Shop, nodes: Nodes, postgres_template: Path
) -> None:
    with PostgresNode(postgres_template, fsync=False) as server:
        server.setup()
        kinds = {"redis": [node.url for node in nodes], "postgresql": [server.url]}
        shop.send(*range(MESSAGES - 1))
        for kind in ("redis", "postgresql"):
            before = len(shop.log("end"))
            with shop.workers(kind, kinds[kind]):
                shop.see_ended(before + 1)  # then stop them while a body runs and messages wait
            see_no_lock(kinds[kind])
        shop.send(MESSAGES - 1)  # while no worker runs
        with shop.workers("redis", kinds["redis"]):
            shop.see_ended(MESSAGES)
    begun, ended = shop.log("begin"), shop.log("end")
    # a worker may stop after a body and before its acknowledgement: then the message comes once
    # more, to nodes that know nothing of its run
    assert {line[3] for line in ended} == set(range(MESSAGES))
    assert len(begun) == len(ended)
    spans = zip([line[0] for line in begun], [line[0] for line in ended], strict=True)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    kinds_of_runs = [kind for kind, _ in itertools.groupby(line[1] for line in begun)]
    assert kinds_of_runs == ["redis", "postgresql", "redis"]
    tokens = [line[4] for line in begun]
    assert tokens == sorted(set(tokens))
