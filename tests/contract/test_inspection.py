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
from celery_redlock.lock.inspection import break_lock
from celery_redlock.lock.model.keys import broken_key, fence_key, lock_key, rate_keys
from celery_redlock.lock.model.rate import Rate
from celery_redlock.lock.node_status import missing_rights
from celery_redlock.lock.reports import LockReport, RateReport
from celery_redlock.lock.server.admin import trust_nodes
from celery_redlock.lock.server.requests import RENEW
from celery_redlock.lock.transport.command import text_of
from celery_redlock.operate.cli.group import as_data
from celery_redlock.testing import EmbeddedNode
from tests.conftest import TTL, Nodes, eventually, is_free, settle, settled
from tests.contract.conftest import MAJORITY, REDIS_SERVER, names


def only(redlock: Redlock, resource: str | None = None) -> LockReport:
    (found,) = redlock.locks(resource).locks
    return found


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
    assert not redlock.locks().locks


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
        assert len(redlock.locks().locks) == 3
        (broken,) = redlock.break_lock(resource).locks
        assert (len(broken.gone_from), broken.failing) == (len(redlock.session.nodes.all), {})


def test_each_permit_is_shown(redlock: Redlock, nodes: Nodes) -> None:
    urls = [node.url for node in nodes]
    with Redlock(urls) as second, Redlock(urls) as third:  # what one holds it takes again, nested
        holders = (redlock, second, third)
        held = [holder.lock("r", limit=3, wait=60).acquire() for holder in holders]
        for holder in holders:
            settle(holder)
        assert all(lock.held for lock in held)
        locks = redlock.locks("r").locks
        assert [lock.permit for lock in locks] == [0, 1, 2]
        assert {(lock.used, lock.limit) for lock in locks} == {(3, 3)}
        held[1].release()
        settle(second)
        assert [(lock.used, lock.limit) for lock in redlock.locks("r").locks] == [(2, 3)] * 2


def test_a_plain_lock_has_one_permit(redlock: Redlock) -> None:
    with redlock.lock("r"):
        settle(redlock)
        assert (only(redlock).used, only(redlock).limit) == (1, 1)


RATE, KEPT = "3/h", Rate(3, 3600.0).kept_ms(0.01) / 1000


def use(redlock: Redlock, times: int, resource: str = "r") -> None:
    """Use starts, and return once every node knows them."""
    for _ in range(times):
        with redlock.lock(resource, rate=RATE, wait=60):
            pass
    settle(redlock)


def only_rate(redlock: Redlock, resource: str | None = None) -> RateReport:
    (found,) = redlock.locks(resource).rates
    return found


def test_a_rate_is_shown_with_what_is_used_and_when_the_next_start_is(redlock: Redlock) -> None:
    use(redlock, 2)
    found = only_rate(redlock)
    assert (found.resource, found.rate, found.used, found.starts) == ("r", RATE, 2, 3)
    assert found.next_start_in == 0.0
    use(redlock, 1)
    before = time.time()
    found = only_rate(redlock)
    assert (found.used, found.starts) == (3, 3)
    assert KEPT - 600 < found.next_start_in <= KEPT
    assert found.next_start is not None
    moment = datetime.fromisoformat(found.next_start).timestamp()
    assert moment == pytest.approx(before + found.next_start_in, abs=60)
    assert as_data(found).keys() == RateReport.__dataclass_fields__.keys() - {"kept_ms"}


@pytest.mark.parametrize("resource", ["a*", "späť:\\", "a#1\n", "rate/x", "file:\udcff"])
def test_a_rate_is_found_by_its_name_and_no_other(redlock: Redlock, resource: str) -> None:
    use(redlock, 1, resource)
    use(redlock, 1, "abc")
    assert only_rate(redlock, resource).resource == resource
    assert sorted(rate.resource for rate in redlock.locks().rates) == sorted(["abc", resource])


@MAJORITY
def test_a_start_on_fewer_nodes_than_a_quorum_is_free_to_others(
    redlock: Redlock, nodes: Nodes
) -> None:
    use(redlock, 3)
    for key in rate_keys("redlock", "r"):
        nodes[0].client().delete(key)
    assert only_rate(redlock).used == 3  # as a refused client sees it
    assert not redlock.lock("r", rate=RATE).try_acquire()
    for key in rate_keys("redlock", "r"):
        nodes[1].client().delete(key)
    eventually(lambda: redlock.locks().rates == ())  # also what the refused one took on a node


def test_without_a_quorum_no_start_is_called_free(mortal_nodes: Nodes) -> None:
    with Redlock([node.url for node in mortal_nodes], node_timeout=7.0) as redlock:
        use(redlock, 3)
        for node in mortal_nodes[:2]:
            node.kill()
        sight = redlock.locks()
    assert not sight.is_known
    (found,) = sight.rates
    assert (found.used, found.next_start_in, found.next_start) == (3, math.inf, None)
    assert as_data(found)["next_start_in"] is None


def test_a_strangers_key_is_no_rate_and_hides_none(redlock: Redlock, nodes: Nodes) -> None:
    use(redlock, 1)
    for node in nodes:
        client = node.client()
        client.set(rate_keys("redlock", "text")[0], "by hand")
        client.zadd(rate_keys("redlock", "set")[0], {"0": time.time() * 1000})
        client.zadd(rate_keys("redlock", "odd")[0], {"x": 1.0, "0": 2.0})
        client.hset(rate_keys("redlock", "odd")[1], "rate", "many an hour")
    assert [rate.resource for rate in redlock.locks().rates] == ["r"]


def test_starts_that_are_given_back_are_free_at_once_and_wake_who_waits(
    redlock: Redlock, nodes: Nodes
) -> None:
    def wait(client: Redlock) -> bool:
        with client.lock("r", rate=RATE, wait=60):
            return True

    use(redlock, 3)
    with settled(nodes) as other, ThreadPoolExecutor() as pool:
        for _ in range(2):  # the second announcement is told from the first
            waits = pool.submit(wait, other)
            eventually(lambda: len(redlock.waiters().processes) == 1)
            (freed,) = redlock.break_lock("r").rates
            assert (sorted(freed.starts_from), freed.failing) == (sorted(names(nodes)), {})
            assert set(freed.starts_from.values()) == {3}
            assert waits.result(60)
            settle(other)
            assert only_rate(redlock).used == 1
            use(redlock, 2)


def test_who_waits_for_a_start_is_told_from_who_waits_for_the_lock(
    redlock: Redlock, nodes: Nodes
) -> None:
    use(redlock, 3)
    with settled(nodes) as one, settled(nodes) as other, ThreadPoolExecutor() as pool:
        holder = redlock.lock("r").acquire()
        for_lock = pool.submit(lambda: one.lock("r", wait=60).acquire().release())
        eventually(lambda: len(redlock.waiters().processes) == 1)
        (lock,) = redlock.waiters().processes
        assert (lock.resource, lock.waits_for, lock.next_start) == ("r", "lock", None)
        holder.release()
        for_lock.result(60)
        pool.submit(lambda: other.lock("r", rate=RATE, wait=60).try_acquire())
        eventually(lambda: [p.waits_for for p in redlock.waiters().processes] == ["rate"])
        (start,) = redlock.waiters().processes
        assert start.resource == "r"
        assert start.next_start is not None
        left = datetime.fromisoformat(start.next_start).timestamp() - time.time()
        assert KEPT - 600 < left <= KEPT
        redlock.break_lock("r")


@MAJORITY
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
        sight = redlock.locks()
        assert list(sight.failing) == names(mortal_nodes)[1:2]
        assert "refused" in sight.failing[names(mortal_nodes)[1]]
        assert [node.votes for node in redlock.status().nodes] == [True, False, True]


@REDIS_SERVER
def test_a_node_says_what_it_is(redlock: Redlock, nodes: Nodes) -> None:
    nodes[2].client().replicaof("127.0.0.1", nodes[0].port)
    try:
        first, _, last = redlock.status().nodes
    finally:
        nodes[2].client().replicaof("NO", "ONE")
    assert (first.role, last.role) == ("master", "slave")
    assert not last.votes
    assert first.node == names(nodes)[0]
    assert first.policy == "noeviction"
    assert first.uptime >= 0 < first.latency
    assert abs(first.clock) < 60  # it is this machine's own


def test_a_new_node_is_shown_as_one_that_will_not_vote_until_it_is_trusted(
    mortal_nodes: Nodes,
) -> None:
    mortal_nodes[0].client().flushall()
    with Redlock([node.url for node in mortal_nodes]) as redlock:
        assert [node.votes for node in redlock.status().nodes] == [False, True, True]
        with Redlock([node.url for node in mortal_nodes], restart_guard="off") as unguarded:
            assert unguarded.status().nodes[0].votes
        told, failing = trust_nodes(redlock.session.nodes, names(mortal_nodes)[:1], "redlock")
        assert (dict(told), dict(failing)) == ({names(mortal_nodes)[0]: ""}, {})
        assert all(node.votes for node in redlock.status().nodes)


def see_lost(lock: Lock) -> None:
    eventually(lambda: not lock.held)


def test_a_broken_lock_is_lost_at_its_holders_next_renewal_and_free_at_once(
    brisk_redlock: Redlock, nodes: Nodes
) -> None:
    lock, neighbour = brisk_redlock.lock("r", ttl=TTL), brisk_redlock.lock("r2", ttl=TTL)
    lock.acquire()
    neighbour.acquire()
    settle(brisk_redlock)
    broken = break_lock(brisk_redlock.session, only(brisk_redlock, "r"))
    assert (sorted(broken.gone_from), broken.failing) == (sorted(names(nodes)), {})
    with Redlock([node.url for node in nodes], node_timeout=2.0) as other:
        with other.lock("r", ttl=TTL, wait=60):
            brisk_redlock.session.watchdog.renew_by(brisk_redlock.session.clock.now())
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
    break_lock(redlock.session, seen[0])
    with Redlock([node.url for node in nodes], node_timeout=2.0) as other:
        second = other.lock("r", wait=60).acquire()
        settle(other)
        seen.append(only(other))
        break_lock(other.session, seen[1])
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
        assert break_lock(redlock.session, seen).gone_from == ()
        assert not is_free(nodes, "r")
        taken.extend()


def test_the_rights_that_the_page_names_are_enough_for_locks_and_for_looking_at_them() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "operations", "security.md").read_text()
    [words] = re.findall(r"^ACL SETUSER locks on >secret (.+)$", page, re.MULTILINE)
    with EmbeddedNode() as node:
        node.client().execute_command("ACL", "SETUSER", "locks", "on", ">secret", *words.split())
        url = f"redis://locks:secret@127.0.0.1:{node.port}/0"
        with Redlock([url], restart_guard="off", node_timeout=7.0) as redlock:
            (status,) = redlock.status().nodes
            assert status.error == ""
            trust_nodes(redlock.session.nodes, [status.node], "redlock")
            with redlock.lock("rated", rate="1/h"):
                pass
            both = {"another": "1/h", "rated": "1/h"}
            assert not redlock.lock(list(both), rate=both).try_acquire()  # gives one back
            with redlock.lock("r", wait=60, fencing=True):
                sight = redlock.locks()
                assert [lock.resource for lock in sight.locks] == ["r"]
                broken = break_lock(redlock.session, sight.locks[0])
                assert (len(broken.gone_from), broken.failing) == (1, {})
            assert is_handed_on(url)
            assert redlock.waiters().failing == {}
            assert missing_rights(redlock.session) == {}
        assert node.client().execute_command("ACL", "LOG") == []  # also of what a script was denied


def test_each_right_of_the_page_is_missed_by_its_name() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "operations", "security.md").read_text()
    [words] = re.findall(r"^ACL SETUSER locks on >secret (.+)$", page, re.MULTILINE)
    rights = [word for word in words.split() if word[0] in "+&~"]
    assert len(rights) == 31
    with EmbeddedNode() as node:
        url = f"redis://locks:secret@127.0.0.1:{node.port}/0"
        with Redlock([url], restart_guard="off", node_timeout=7.0) as redlock:
            for right in rights:
                others = [word for word in words.split() if word != right]
                fresh = ["reset", "on", ">secret", *others]
                node.client().execute_command("ACL", "SETUSER", "locks", *fresh)
                (missing,) = missing_rights(redlock.session).values()
                assert missing == [right]
            node.client().execute_command("ACL", "SETUSER", "locks", "reset", "on", ">secret")
            (missing,) = missing_rights(redlock.session).values()
            assert set(missing) == {right for right in rights if right[0] == "+"}
        assert node.client().keys("*") == []


def test_no_lock_needs_a_right_that_the_page_calls_one_of_the_commands_alone() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "operations", "security.md").read_text()
    [words] = re.findall(r"^ACL SETUSER locks on >secret (.+)$", page, re.MULTILINE)
    [named] = re.findall(r"^- `(.+)` (?:is|are) for \[the commands\]", page, re.MULTILINE)
    others = [word for word in words.split() if word not in named.split()]
    with EmbeddedNode() as node:
        node.client().execute_command("ACL", "SETUSER", "locks", "on", ">secret", *others)
        url = f"redis://locks:secret@127.0.0.1:{node.port}/0"
        with Redlock([url], restart_guard="off", node_timeout=7.0) as redlock:
            for lock in (
                redlock.lock("plain"),
                redlock.lock("fenced", fencing=True),
                redlock.lock("limited", limit=2),
                redlock.lock("rated", rate="9/h"),
            ):
                with lock:
                    lock.extend()
        assert node.client().execute_command("ACL", "LOG") == []


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
        eventually(lambda: other.waiters().processes)
        lock.release()
        return waits.result(60)
