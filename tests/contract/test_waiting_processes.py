"""Who waits for a lock, as people are shown it, is who is registered on the real nodes."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from datetime import datetime

import pytest

from celery_redlock import Redlock
from celery_redlock.lock.model.keys import inbox_channel, waiting_key
from tests import conftest
from tests.conftest import Nodes, eventually, settle
from tests.contract.conftest import MAJORITY, REDIS_SERVER, names


def register(redlock: Redlock, *waiters: tuple[str, float], resource: str = "r") -> None:
    """Register waiters as their processes do, and return once every node knows them."""
    for waiter, since in waiters:
        conftest.register(redlock, waiter, resource, since)
    settle(redlock)


def moment(since: str | None) -> float:
    """Return a moment that is shown, in seconds since 1970."""
    assert since is not None
    return datetime.fromisoformat(since).timestamp()


def test_processes_are_shown_in_the_order_in_which_they_began_to_wait(
    redlock: Redlock, nodes: Nodes
) -> None:
    began = time.time()
    register(redlock, ("celery@web2:7:aa", began), ("celery@web1:7:bb", began - 60))
    register(redlock, ("cron:8:cc", began - 30))
    register(redlock, ("cron:8:cc", began - 90), resource="other")
    sight = redlock.waiters()
    shown = [(one.resource, one.rank, one.name, one.pid) for one in sight.processes]
    assert shown == [
        ("other", 0, "cron", 8),
        ("r", 0, "celery@web1", 7),
        ("r", 1, "cron", 8),
        ("r", 2, "celery@web2", 7),
    ]
    assert moment(sight.processes[1].since) == pytest.approx(began - 60, abs=0.01)
    assert {one.nodes for one in sight.processes} == {tuple(names(nodes))}
    assert (sight.asked, dict(sight.failing), dict(sight.wrong_type)) == (len(nodes), {}, {})


def test_without_waiters_nobody_is_shown(redlock: Redlock) -> None:
    with redlock.lock("r"):
        assert redlock.waiters().processes == ()


@pytest.mark.parametrize("resource", ["a*", "a#3", "[x]", "späť:\\", "a#1\n", "file:\udcff"])
def test_a_resource_of_any_name_is_shown_by_its_name(redlock: Redlock, resource: str) -> None:
    register(redlock, ("celery@web1:7:aa", 1.0), resource=resource)
    assert [one.resource for one in redlock.waiters().processes] == [resource]


def test_more_resources_than_are_asked_for_at_once_are_all_shown(redlock: Redlock) -> None:
    resources = [f"r{number:04}" for number in range(1100)]
    for resource in resources:
        conftest.register(redlock, "celery@web1:7:aa", resource, 1.0)
    settle(redlock)
    assert [one.resource for one in redlock.waiters().processes] == resources


@MAJORITY
def test_nodes_that_differ_are_shown_as_most_of_them_say(redlock: Redlock, nodes: Nodes) -> None:
    key = waiting_key("redlock", "r")
    register(redlock, ("celery@web1:7:aa", 20.0), ("celery@web2:7:bb", 30.0))
    nodes[0].client().zadd(key, {"celery@web2:7:bb": 10.0})  # it lacks the last write
    nodes[2].client().zrem(key, "celery@web1:7:aa")
    first, second = redlock.waiters().processes
    assert (first.name, first.nodes) == ("celery@web1", tuple(names(nodes)[:2]))
    assert (second.name, moment(second.since), len(second.nodes)) == ("celery@web2", 30.0, 3)


def test_one_that_does_not_listen_is_shown_until_a_release_passes_it_over(
    redlock: Redlock, nodes: Nodes
) -> None:
    register(redlock, ("dead@web1:7:aa", 1.0), ("celery@web2:7:bb", 2.0))
    with contextlib.ExitStack() as stack:
        for node in nodes:
            ear = stack.enter_context(node.client().pubsub())
            ear.subscribe(inbox_channel("redlock", "celery@web2:7:bb"))
            assert eventually(ear.get_message)
        with redlock.lock("r"):
            dead, alive = redlock.waiters().processes
            assert (dead.listens, alive.listens) == (False, True)
        settle(redlock)
        assert redlock.waiters().processes == (replace(alive, rank=0),)


@REDIS_SERVER
def test_a_strangers_key_hides_no_other_waiters(redlock: Redlock, nodes: Nodes) -> None:
    register(redlock, ("celery@web1:7:aa", 1.0))
    register(redlock, ("celery@web1:7:aa", 1.0), resource="wrong")
    for node in nodes[:2]:
        node.client().delete(waiting_key("redlock", "wrong"))
        node.client().hset(waiting_key("redlock", "wrong"), "a", "b")
    sight = redlock.waiters()
    assert [(one.resource, len(one.nodes)) for one in sight.processes] == [("r", 3), ("wrong", 1)]
    assert dict(sight.wrong_type) == {"wrong": tuple(names(nodes)[:2])}
    assert dict(sight.failing) == {}


def test_what_a_stranger_wrote_into_the_set_is_shown_as_it_stands(
    redlock: Redlock, nodes: Nodes
) -> None:
    strange = {"by hand": float("inf"), b"a:b:\xff": float("-inf"), "a:-1:b": 0.0}
    for member, score in strange.items():
        nodes[0].client().zadd(waiting_key("redlock", "r"), {member: score})
    shown = [(one.name, one.pid) for one in redlock.waiters().processes]
    assert shown == [("a:b:\ufffd", None), ("a:-1:b", None), ("by hand", None)]
