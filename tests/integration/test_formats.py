"""A message with a header of another format waits for a worker that knows it, and is not lost."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from celery_redlock.testing import EmbeddedNode
from tests.conftest import Nodes, eventually, trust_nodes
from tests.integration.conftest import Stage, pools, set_stage

NEXT = "tests.integration.next_format"
SAID = "has format 2 of the lock header, and this release reads format 1"
BROKERS = ("redis", "rabbitmq")


@pytest.fixture(params=[BROKERS[0], pytest.param(BROKERS[1], marks=pytest.mark.slow)])
def stage(
    request: pytest.FixtureRequest, standing_broker: EmbeddedNode, standing_nodes: Nodes,
    tmp_path: Path,
) -> Iterator[Stage]:  # fmt: skip
    amqp = request.getfixturevalue("rabbitmq") if request.param == "rabbitmq" else None
    for node in (*standing_nodes, standing_broker):
        node.client().flushall()
    trust_nodes(standing_nodes)
    queues = "classic" if amqp else "celery"
    with ExitStack() as stack:
        yield set_stage(stack, tmp_path, standing_nodes, standing_broker, amqp, queues)


def send_newer(task: Any, key: str) -> Any:
    """Send a message of a release whose format is 2."""
    return task.apply_async((key,), headers={"redlock": {"options": {}, "format": 2}})


def held(stage: Stage) -> int:
    """Return how many messages the broker has given to workers that have not acknowledged them."""
    url = urlsplit(stage.app.conf.broker_url)
    if url.scheme == "redis":
        return int(stage.broker.client().hlen("unacked"))
    command = [
        str(shutil.which("rabbitmqctl")), "-q", "-p", url.path.strip("/"), "list_queues",
        "name", "messages_unacknowledged", "--no-table-headers",
    ]  # fmt: skip
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    counts = dict(line.split("\t") for line in listed.splitlines())
    return int(counts[stage.tasks.KIND])


@pytest.mark.parametrize("pool", pools("prefork", "threads", every=("prefork", "threads")))
def test_a_worker_holds_it_beside_its_prefetch_until_it_stops(stage: Stage, pool: str) -> None:
    older = stage.worker(pool=pool, concurrency=1)
    stage.see_listening()
    for task in (stage.tasks.work, stage.tasks.late) * 2:
        send_newer(task, "newer")
    eventually(lambda: held(stage) == 4)
    beside = [stage.tasks.work.delay("beside") for _ in range(2)]  # the prefetch is 1
    assert [result.get(timeout=120) for result in beside]
    assert held(stage) == 4
    assert stage.runs_of("newer") == 0
    (line,) = [line for line in older.output().splitlines() if SAID in line]
    assert " ERROR" in line or "ERROR/" in line
    older.stop()
    newer = stage.worker("w2", NEXT, pool=pool, concurrency=1)
    eventually(lambda: sum(line.key == "newer" for line in stage.lines("end")) == 4)
    assert stage.runs_of("newer") == 4
    assert "has format" not in newer.output()
    eventually(lambda: held(stage) == 0)


@pytest.mark.slow
@pytest.mark.parametrize("pool", pools("prefork", "threads", every=("prefork", "threads")))
def test_after_30_s_it_goes_back_for_a_worker_that_knows_it(stage: Stage, pool: str) -> None:
    older = stage.worker(pool=pool, concurrency=1)
    stage.see_listening()
    results = [send_newer(task, "newer") for task in (stage.tasks.work, stage.tasks.late)]
    eventually(lambda: held(stage) == 2)
    newer = stage.worker("w2", NEXT, pool=pool, concurrency=1)
    for result in results:
        result.get(timeout=180)
    assert stage.runs_of("newer") == 2
    assert older.output().count(SAID) == 1
    assert "has format" not in newer.output()
    eventually(lambda: held(stage) == 0)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["redis"], indirect=True)
def test_it_goes_back_unchanged(stage: Stage) -> None:
    stage.worker(pool="threads", concurrency=1)
    stage.see_listening()
    send_newer(stage.tasks.late, "newer")
    client = stage.broker.client()

    def noted(other_than: str = "") -> Any:
        """Return the one unacknowledged message, and its tag."""
        for tag, text in client.hgetall("unacked").items():
            if tag != other_than:
                return tag, json.loads(text)
        return None

    tag, (message, *route) = eventually(noted)
    _, (again, *route_again) = eventually(lambda: noted(tag), within=120)
    # what kombu itself writes into a message that is given back
    assert again["headers"].pop("redelivered") is True
    assert again["properties"]["delivery_info"].pop("redelivered") is True
    for one in (message, again):
        one["properties"].pop("delivery_tag")
    assert (again, route_again) == (message, route)
