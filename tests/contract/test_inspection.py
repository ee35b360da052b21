"""What people are shown of real nodes is what stands there."""

from __future__ import annotations

import math
import re
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest

from celery_redlock import Lock, Redlock
from celery_redlock.lock.inspection import LockReport, break_lock, list_locks, list_waiting
from celery_redlock.lock.model.keys import broken_key, fence_key, lock_key
from celery_redlock.lock.node_status import missing_rights, read_nodes
from celery_redlock.lock.server.admin import trust_nodes
from celery_redlock.lock.server.requests import RENEW
from celery_redlock.lock.transport.command import text_of
from celery_redlock.operate.cli.group import as_data
from celery_redlock.testing import EmbeddedNode
from tests.conftest import TTL, Nodes, eventually, is_free, settle


def only(redlock: Redlock, resource: str | None = None) -> LockReport:
    (found,) = list_locks(redlock, resource).locks
    return found


def names(nodes: Nodes) -> list[str]:
    return [f"127.0.0.1:{node.port}" for node in nodes]


def test_a_lock_is_shown_with_holder_time_and_votes(redlock: Redlock, nodes: Nodes) -> None:
    before = time.time()
    with redlock.lock("r"):
        settle(redlock)
        found = only(redlock)
    assert (found.resource, found.permit, found.held) == ("r", 0, True)
    assert found.holder.label.startswith("pid ")
    assert found.since is not None
    assert before - 0.01 <= datetime.fromisoformat(found.since).timestamp() <= time.time()
    assert sorted(found.votes) == sorted(names(nodes))
    assert 10 < found.valid_for <= 30
    assert not list_locks(redlock).locks


def test_neither_token_nor_key_is_in_what_a_person_may_print(redlock: Redlock) -> None:
    with redlock.lock("r"):
        settle(redlock)
        found = only(redlock)
        token = bytes(found.value).partition(b":")[0].decode()
        assert len(token) == 32
        assert token not in repr(found) + repr(as_data(found))


@pytest.mark.parametrize("resource", ["a*", "a#3", "[x]", "späť:\\", "a#1\n", "file:\udcff"])
def test_any_resource_is_found_by_its_name_and_no_other(redlock: Redlock, resource: str) -> None:
    with redlock.lock(resource), redlock.lock("abc"), redlock.lock("a"):
        settle(redlock)
        assert only(redlock, resource).resource == resource
        assert len(list_locks(redlock).locks) == 3
        done, failing = break_lock(redlock, only(redlock, resource))
        assert (list(done.values()), failing) == ([True] * 3, {})


def test_each_permit_is_shown(redlock: Redlock, nodes: Nodes) -> None:
    urls = [node.url for node in nodes]
    with Redlock(urls) as second, Redlock(urls) as third:  # what one holds it takes again, nested
        holders = (redlock, second, third)
        held = [holder.lock("r", limit=3, wait=60).acquire() for holder in holders]
        for holder in holders:
            settle(holder)
        assert all(lock.held for lock in held)
        assert [lock.permit for lock in list_locks(redlock, "r").locks] == [0, 1, 2]


def test_a_rest_on_fewer_nodes_than_a_quorum_is_not_shown_as_held(
    redlock: Redlock, nodes: Nodes
) -> None:
    nodes[0].client().set(lock_key("redlock", "r"), "00:1:somebody", px=20_000)
    found = only(redlock)
    assert (found.held, found.valid_for) == (False, 0.0)
    assert list(found.votes) == names(nodes)[:1]


def test_a_strangers_key_is_shown_as_what_it_is(redlock: Redlock, nodes: Nodes) -> None:
    for node in nodes:
        node.client().set(lock_key("redlock", "text"), "by hand")
        node.client().hset(lock_key("redlock", "wrong"), "a", "b")
    assert as_data(only(redlock, "text"))["valid_for"] is None  # JSON has no infinity
    wrong, text = (only(redlock, name) for name in ("wrong", "text"))
    assert (text.holder.label, text.since, text.valid_for) == ("by hand", None, math.inf)
    assert "another type" in wrong.holder.label


def test_a_node_that_is_away_is_named_with_its_cause(mortal_nodes: Nodes) -> None:
    with Redlock([node.url for node in mortal_nodes]) as redlock, redlock.lock("r", wait=60):
        mortal_nodes[1].kill()
        sight = list_locks(redlock)
        assert list(sight.failing) == names(mortal_nodes)[1:2]
        assert "refused" in sight.failing[names(mortal_nodes)[1]]
        assert [node.votes for node in read_nodes(redlock)] == [True, False, True]


def test_a_node_says_what_it_is(redlock: Redlock, nodes: Nodes) -> None:
    nodes[2].client().replicaof("127.0.0.1", nodes[0].port)
    try:
        first, _, last = read_nodes(redlock)
    finally:
        nodes[2].client().replicaof("NO", "ONE")
    assert (first.role, last.role) == ("master", "slave")
    assert not last.votes
    assert first.node == names(nodes)[0]
    assert first.policy == "noeviction"
    assert first.uptime >= 0 < first.latency
    assert abs(first.clock) < 10  # it is this machine's own


def test_a_new_node_is_shown_as_one_that_will_not_vote_until_it_is_trusted(
    mortal_nodes: Nodes,
) -> None:
    mortal_nodes[0].client().flushall()
    with Redlock([node.url for node in mortal_nodes]) as redlock:
        assert [node.votes for node in read_nodes(redlock)] == [False, True, True]
        with Redlock([node.url for node in mortal_nodes], restart_guard="off") as unguarded:
            assert read_nodes(unguarded)[0].votes
        told, failing = trust_nodes(redlock.session.nodes, names(mortal_nodes)[:1], "redlock")
        assert (dict(told), dict(failing)) == ({names(mortal_nodes)[0]: ""}, {})
        assert all(node.votes for node in read_nodes(redlock))


def see_lost(lock: Lock) -> None:
    eventually(lambda: not lock.held)


def test_a_broken_lock_is_lost_at_its_holders_next_renewal_and_free_at_once(
    brisk_redlock: Redlock, nodes: Nodes
) -> None:
    lock, neighbour = brisk_redlock.lock("r", ttl=TTL), brisk_redlock.lock("r2", ttl=TTL)
    lock.acquire()
    neighbour.acquire()
    settle(brisk_redlock)
    gone, failing = break_lock(brisk_redlock, only(brisk_redlock, "r"))
    assert (set(gone.values()), len(gone), dict(failing)) == ({True}, 3, {})
    with Redlock([node.url for node in nodes], node_timeout=2.0) as other:
        with other.lock("r", ttl=TTL, wait=60):
            see_lost(lock)
            settle(brisk_redlock)
            lock.release()
            settle(brisk_redlock)
            assert only(other, "r").held
        assert neighbour.held
    neighbour.release()


def test_a_second_break_does_not_make_the_first_one_forgotten(
    redlock: Redlock, nodes: Nodes
) -> None:
    """The first holder may have a node to repair still: one that was restarted, for instance."""
    first, seen = redlock.lock("r").acquire(), []
    settle(redlock)
    seen.append(only(redlock))
    break_lock(redlock, seen[0])
    with Redlock([node.url for node in nodes], node_timeout=2.0) as other:
        second = other.lock("r", wait=60).acquire()
        settle(other)
        seen.append(only(other))
        break_lock(other, seen[1])
        second.release()
    first.release()
    for node in nodes:
        for lock in seen:
            key, value = text_of(lock.key), text_of(lock.value)
            [word] = node.client().eval(
                RENEW.source, 3, key, fence_key("redlock"), broken_key(key, value),
                value, "60000", "",
            )  # fmt: skip
            assert word == -1


def test_breaking_touches_nobody_who_took_it_meanwhile(redlock: Redlock, nodes: Nodes) -> None:
    with redlock.lock("r"):
        settle(redlock)
        seen = only(redlock)
    settle(redlock)
    with redlock.lock("r") as taken:
        settle(redlock)
        gone, _ = break_lock(redlock, seen)
        assert not any(gone.values())
        assert not is_free(nodes, "r")
        taken.extend()


def test_the_rights_that_the_page_names_are_enough_for_locks_and_for_looking_at_them() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "operations", "security.md").read_text()
    [words] = re.findall(r"^ACL SETUSER locks on >secret (.+)$", page, re.MULTILINE)
    with EmbeddedNode() as node:
        node.client().execute_command("ACL", "SETUSER", "locks", "on", ">secret", *words.split())
        url = f"redis://locks:secret@127.0.0.1:{node.port}/0"
        with Redlock([url], restart_guard="off", node_timeout=7.0) as redlock:
            (status,) = read_nodes(redlock)
            assert status.error == ""
            trust_nodes(redlock.session.nodes, [status.node], "redlock")
            with redlock.lock("r", wait=60, fencing=True):
                sight = list_locks(redlock)
                assert [lock.resource for lock in sight.locks] == ["r"]
                gone, failing = break_lock(redlock, sight.locks[0])
                assert (list(gone.values()), failing) == ([True], {})
            assert is_handed_on(url)
            assert list_waiting(redlock).failing == {}
            assert missing_rights(redlock) == {}
        assert node.client().execute_command("ACL", "LOG") == []  # also of what a script was denied


def test_each_right_of_the_page_is_missed_by_its_name() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "operations", "security.md").read_text()
    [words] = re.findall(r"^ACL SETUSER locks on >secret (.+)$", page, re.MULTILINE)
    rights = [word for word in words.split() if word[0] in "+&~"]
    assert len(rights) == 25
    with EmbeddedNode() as node:
        url = f"redis://locks:secret@127.0.0.1:{node.port}/0"
        with Redlock([url], restart_guard="off", node_timeout=7.0) as redlock:
            for right in rights:
                others = [word for word in words.split() if word != right]
                fresh = ["reset", "on", ">secret", *others]
                node.client().execute_command("ACL", "SETUSER", "locks", *fresh)
                (missing,) = missing_rights(redlock).values()
                assert missing == [right]
            node.client().execute_command("ACL", "SETUSER", "locks", "reset", "on", ">secret")
            (missing,) = missing_rights(redlock).values()
            assert set(missing) == {right for right in rights if right[0] == "+"}
        assert node.client().keys("*") == []


@pytest.mark.parametrize("right", ["+zrem", "+zrank"])
def test_a_right_of_a_hand_off_costs_no_vote(right: str, caplog: pytest.LogCaptureFixture) -> None:
    page = Path(__file__).parents[2].joinpath("docs", "operations", "security.md").read_text()
    [words] = re.findall(r"^ACL SETUSER locks on >secret (.+)$", page, re.MULTILINE)
    others = [word for word in words.split() if word != right]
    with EmbeddedNode() as node:
        node.client().execute_command("ACL", "SETUSER", "locks", "on", ">secret", *others)
        assert is_handed_on(f"redis://locks:secret@127.0.0.1:{node.port}/0")
    assert "gives no vote" not in caplog.text


def is_handed_on(url: str) -> bool:
    """Return whether a release on the only node wakes a waiter of another client."""
    with (
        Redlock([url], restart_guard="off", node_timeout=7.0) as holder,
        Redlock([url], restart_guard="off", node_timeout=7.0) as other,
        ThreadPoolExecutor() as pool,
    ):
        lock = holder.lock("handed", wait=60).acquire()
        waits = pool.submit(lambda: other.lock("handed", wait=60).try_acquire())
        eventually(lambda: list_waiting(other).processes)
        lock.release()
        return waits.result(60)
