"""What a prefix has on real nodes, and what of it is removed."""

from __future__ import annotations

from contextlib import closing

import pytest
from redis import Redis

from celery_redlock import Redlock
from celery_redlock.lock.model.keys import inbox_channel, unique_key, waiting_key
from celery_redlock.lock.removal import EXPIRES, list_keys, remove_from_nodes
from celery_redlock.lock.server.rights import ACL_RULES
from tests.conftest import PATIENCE, Nodes, settle
from tests.contract.conftest import REDIS_SERVER, names

PROCESS = "web1:7:0123abcd"


def test_locks_claims_and_a_counter_are_listed(redlock: Redlock, nodes: Nodes) -> None:
    for node in nodes:
        node.client().set(unique_key("redlock", "task:a"), "x", px=60_000)
        node.client().set("other", "x")
    with redlock.lock("a b", ttl=60, fencing=True), redlock.lock("c", ttl=60, limit=2):
        settle(redlock)
        by_node, failures = list_keys(redlock.session)
    assert failures == {}
    assert sorted(by_node) == sorted(names(nodes))
    for found in by_node.values():
        kinds = {(group.what, group.fate): group for group in found.groups}
        assert kinds["locks", EXPIRES].count == 2
        assert kinds["claims", EXPIRES].count == 1
        assert kinds["fencing counter", "stays"].until is None
        assert kinds["restart guard", "goes"].count >= 1
        assert set(found.locked) == {"a b", "c"}
        assert "keys of another program" not in {group.what for group in found.groups}


@REDIS_SERVER
def test_what_expires_and_the_counter_are_not_removed(mortal_nodes: Nodes) -> None:
    """Nodes of its own: clients of other tests would write there what is removed."""
    nodes, urls = mortal_nodes, [node.url for node in mortal_nodes]
    with (
        Redlock(urls, node_timeout=PATIENCE) as redlock,
        redlock.lock("a", ttl=60, wait=60, fencing=True) as lock,
    ):
        settle(redlock)
        before = [set(node.client().scan_iter("*")) for node in nodes]
        assert remove_from_nodes(redlock.session) == ([], {})
        lock.ensure()
        gone = [
            names - set(node.client().scan_iter("*"))
            for names, node in zip(before, nodes, strict=True)
        ]
    of_worker = {"{redlock}:terms", "{redlock}:format"}
    assert {frozenset(each - of_worker) for each in gone} <= {
        frozenset({"{redlock}:run", "{redlock}:tenure"}),
    }


@REDIS_SERVER
@pytest.mark.parametrize("rights", [ACL_RULES, f"{ACL_RULES} +pubsub|channels"])
@pytest.mark.parametrize("is_registered", [True, False])
def test_who_listens_is_seen_by_its_registration_or_by_its_channel(
    nodes: Nodes, rights: str, is_registered: bool
) -> None:
    node = nodes[0]
    client = node.client()
    rules = rights.replace("{prefix}", "{redlock}").split()
    client.execute_command("ACL", "SETUSER", "asks", "on", ">secret", *rules)
    try:
        with (
            closing(Redis(port=node.port)) as other,
            closing(other.pubsub()) as hears,
            Redlock([node.url.replace("//", "//asks:secret@")], node_timeout=PATIENCE) as asks,
        ):
            hears.subscribe(inbox_channel("redlock", PROCESS), "of others")
            assert hears.get_message(timeout=PATIENCE)
            assert hears.get_message(timeout=PATIENCE)
            if is_registered:
                client.zadd(waiting_key("redlock", "a"), {PROCESS: 1.0, "web2:8:gone": 2.0})
            by_node, failures = list_keys(asks.session)
        assert failures == {}
        (found,) = by_node.values()
        is_seen = is_registered or "pubsub|channels" in rights
        assert found.listening == ((PROCESS,) if is_seen else ())
    finally:
        client.execute_command("ACL", "DELUSER", "asks")
