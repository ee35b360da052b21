"""Clients of one prefix must agree on the shared settings; a worker warns at its start if not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise

import pytest
from celery.bin.celery import celery
from click.testing import CliRunner, Result

from celery_redlock import Redlock
from celery_redlock.lock.node_status import compare_shared_settings, shared_settings_of
from celery_redlock.testing import embedded_nodes
from tests.conftest import PATIENCE, Nodes, eventually, trust_nodes
from tests.integration.conftest import MakeStage


@pytest.fixture
def client(nodes: Nodes) -> Iterator[Callable[..., Redlock]]:
    """Give a function that makes a Redlock over the nodes; each is closed in the end."""
    made: list[Redlock] = []

    def make(count: int = 3, **settings: float | str) -> Redlock:
        urls = [node.url for node in nodes[:count]]
        made.append(Redlock(urls, node_timeout=PATIENCE, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for redlock in made:
        redlock.close()


def test_clients_that_agree_have_nothing_to_say(client: Callable[..., Redlock]) -> None:
    assert compare_shared_settings(client().session, writes=True) == {}
    assert compare_shared_settings(client().session, writes=True) == {}


@pytest.mark.parametrize(
    "other",
    [{"max_ttl": 90.0}, {"restart_guard": "off"}, {"count": 2}],
    ids=lambda o: next(iter(o)),
)
def test_each_node_shows_the_settings_of_others(
    client: Callable[..., Redlock], nodes: Nodes, other: dict[str, float | str]
) -> None:
    first, second = client(), client(**other)
    compare_shared_settings(first.session, writes=True)
    names = [node.url[len("redis://") : -len("/0")] for node in nodes[: int(other.get("count", 3))]]
    said = compare_shared_settings(second.session, writes=True)
    assert {found: sorted(by) for found, by in said.items()} == {
        shared_settings_of(first.session): sorted(names)
    }
    assert compare_shared_settings(second.session, writes=True) == {}, "what was noted last stays"
    assert shared_settings_of(second.session) in compare_shared_settings(first.session, writes=True)


def test_lists_one_node_apart_exclude_each_other_from_one_node_on_and_a_jump_does_not() -> None:
    """As the page of changes says; `trust` with the second list spares the first step's wait."""
    with embedded_nodes(4) as servers, ExitStack() as stack:
        broker, *new = [server.url for server in servers]
        lists = [[broker], [broker, *new[:1]], [broker, *new[:2]], [broker, *new], new]
        made = (Redlock(urls, node_timeout=PATIENCE) for urls in lists)
        clients = [stack.enter_context(client) for client in made]
        clients[1].trust()
        for old, newer in pairwise(clients):
            for holder, other in ((old, newer), (newer, old)):
                with holder.lock("k", wait=60) as lock:
                    assert not other.lock("k").try_acquire()
                    assert lock.held
            trust_nodes(servers)
        with clients[0].lock("k", wait=60) as lock, clients[2].lock("k") as beside:
            assert lock.held
            assert beside.held


@pytest.mark.slow
def test_a_worker_says_that_others_go_by_another_longest_ttl(
    make_stage: MakeStage, nodes: Nodes
) -> None:
    patient = {"redlock_node_timeout": PATIENCE}  # what a worker says at its start it says once
    first = make_stage(nodes, **patient).worker("w1", concurrency=1)
    eventually(lambda: "lock nodes answer" in first.output())
    second = make_stage(nodes, redlock_max_ttl=120, **patient).worker("w2", concurrency=1)
    eventually(lambda: "other clients use max_ttl=60 " in second.output())
    (line,) = [line for line in second.output().splitlines() if "other clients" in line]
    assert "ERROR" in line
    assert "this worker uses max_ttl=120 restart_guard=strict nodes=3" in line
    assert "other clients" not in first.output()


def test_the_doctor_fails_where_others_go_by_another_longest_ttl_and_changes_nothing(
    make_stage: MakeStage, nodes: Nodes, client: Callable[..., Redlock]
) -> None:
    def doctor() -> Result:
        return CliRunner().invoke(celery, ["-A", "tests.integration.app", "redlock", "doctor"])

    make_stage(nodes)
    told = doctor()
    assert told.exit_code == 0
    assert "max_ttl" not in told.output
    others = client(max_ttl=120)
    compare_shared_settings(others.session, writes=True)
    for _ in range(2):
        told = doctor()
        assert told.exit_code == 1
        (line,) = [line for line in told.output.splitlines() if "max_ttl=120 " in line]
        assert line.startswith("error ")
        assert "max_ttl=60 " in line
    assert compare_shared_settings(others.session, writes=True) == {}
