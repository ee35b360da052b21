"""A node whose keys have another format gives no vote, and says so: no two formats lock there."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest

from celery_redlock import QuorumUnreachable, Redlock
from celery_redlock.lock.model import keys
from celery_redlock.lock.model.keys import format_key
from celery_redlock.lock.node_status import compare_shared_settings
from tests.conftest import PATIENCE, Nodes, eventually, settle
from tests.contract.conftest import MAJORITY

NUMBER = format_key("redlock")
SAID = "OTHERFORMAT 2, and this release has 1"


def give_away(nodes: Nodes, number: str = "2") -> None:
    """Let nodes be those of a release whose format has this number."""
    for node in nodes:
        node.client().set(NUMBER, number)


def over(nodes: Nodes) -> Redlock:
    """Return a client that has not connected yet."""
    return Redlock([node.url for node in nodes], node_timeout=PATIENCE)


@pytest.fixture
def client(nodes: Nodes) -> Iterator[Redlock]:
    with over(nodes) as made:
        yield made


def is_refused(redlock: Redlock, resource: str = "r") -> str:
    """Return the error of a lock that gets no quorum."""
    with pytest.raises(QuorumUnreachable) as caught:
        redlock.lock(resource).acquire()
    return str(caught.value)


class TestANewConnection:
    @pytest.mark.parametrize("number", ["2", "0", "10", "one", ""])
    def test_gets_no_vote_from_nodes_of_another_format(
        self, nodes: Nodes, client: Redlock, number: str
    ) -> None:
        give_away(nodes, number)
        text = is_refused(client)
        assert f"OTHERFORMAT {number}, and this release has 1" in text
        assert "clients of another release lock there" in text
        assert not any(node.client().exists("{redlock}:lock:r") for node in nodes)

    @pytest.mark.parametrize("number", ["1", None])
    def test_takes_a_missing_number_for_1(
        self, nodes: Nodes, client: Redlock, number: str | None
    ) -> None:
        if number is not None:
            give_away(nodes, number)
        with client.lock("r") as lock:
            assert lock.held

    def test_of_a_newer_release_gets_none_from_nodes_of_this_one(
        self, nodes: Nodes, client: Redlock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with client.lock("r"):
            monkeypatch.setattr(keys, "NODE_FORMAT", 2)
            with over(nodes) as newer:
                assert "OTHERFORMAT 1, and this release has 2" in is_refused(newer, "s")
        give_away(nodes)
        with over(nodes) as newer, newer.lock("s") as lock:
            assert lock.held

    @MAJORITY
    def test_has_the_other_nodes_votes(self, nodes: Nodes, client: Redlock) -> None:
        give_away(nodes[:1])
        with client.lock("r") as lock:
            assert lock.held
        assert not nodes[0].client().exists("{redlock}:lock:r")

    def test_says_so_in_the_log(
        self, nodes: Nodes, client: Redlock, caplog: pytest.LogCaptureFixture
    ) -> None:
        give_away(nodes)
        is_refused(client)

        def lines() -> list[logging.LogRecord]:
            said = f"gives no vote: {SAID}"
            return [line for line in caplog.records if said in line.getMessage()]

        eventually(lambda: len(lines()) == len(nodes))
        assert {line.levelname for line in lines()} == {"ERROR"}

    def test_gets_none_where_another_program_has_the_key(
        self, nodes: Nodes, client: Redlock
    ) -> None:
        for node in nodes:
            node.client().zadd(NUMBER, {"x": 1})
        assert re.search("another program uses the key|OTHERFORMAT", is_refused(client))


class TestAnOpenConnection:
    def test_is_given_up_with_its_votes(self, nodes: Nodes, client: Redlock) -> None:
        lost: list[object] = []
        with client.lock("r", ttl=30, on_lost=lost.append) as lock:
            settle(client)
            give_away(nodes)
            client.session.guard.keep_alive(0.0)
            eventually(lambda: not lock.held)
            assert SAID in is_refused(client, "s")
        assert lost

    def test_finds_its_own_number(self, nodes: Nodes, client: Redlock) -> None:
        give_away(nodes, "1")
        with client.lock("r") as lock:
            client.session.guard.keep_alive(0.0)
            settle(client)
            assert lock.held


class TestOperators:
    def test_status_says_so(self, nodes: Nodes, client: Redlock) -> None:
        give_away(nodes)
        for status in client.status().nodes:
            assert SAID in status.error
            assert "install that release here" in status.error
            assert not status.votes

    def test_trust_changes_nothing_there(self, nodes: Nodes, client: Redlock) -> None:
        give_away(nodes)
        for node in nodes:
            node.client().delete("{redlock}:run")
        with pytest.raises(QuorumUnreachable, match="OTHERFORMAT"):
            client.trust()
        assert not any(node.client().exists("{redlock}:run") for node in nodes)

    @pytest.mark.parametrize("kind", ["text", "set"])
    def test_trust_mends_what_is_no_number(self, nodes: Nodes, client: Redlock, kind: str) -> None:
        for node in nodes:
            write = node.client()
            write.set(NUMBER, "\x1b7") if kind == "text" else write.zadd(NUMBER, {"x": 1})
        is_refused(client)
        client.trust()
        with client.lock("r", wait=60) as lock:
            assert lock.held

    def test_a_worker_writes_the_number_beside_its_settings_and_keeps_another(
        self, nodes: Nodes, client: Redlock
    ) -> None:
        compare_shared_settings(client.session)
        assert [node.client().get(NUMBER) for node in nodes] == [None] * len(nodes)
        compare_shared_settings(client.session, writes=True)
        assert [node.client().get(NUMBER) for node in nodes] == ["1"] * len(nodes)
        give_away(nodes)
        compare_shared_settings(client.session, writes=True)
        assert [node.client().get(NUMBER) for node in nodes] == ["2"] * len(nodes)
