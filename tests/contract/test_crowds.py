"""Many callers of one process that wait: they cost little, and each ends as it was told.

`crowds` says what is measured, and how.
"""

from __future__ import annotations

import select
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from celery_redlock import Redlock
from celery_redlock.testing import EmbeddedNode
from tests.clocks import HOUR, WallClock
from tests.conftest import NODE_TIMEOUT, Nodes, eventually
from tests.contract.conftest import REDIS_SERVER
from tests.contract.crowds import (
    FLOODED,
    GREENLETS,
    RESOURCES,
    THREADS,
    WAIT,
    Caller,
    calling,
    measure,
    see_waiting,
)

TOO_MANY = pytest.mark.redis_only("a PostgreSQL answers so many calls at once too late")


def figures(case: str, nodes: Sequence[EmbeddedNode]) -> Any:
    return measure(case, [node.url for node in nodes])


@pytest.mark.slow
@TOO_MANY
def test_threads_that_wait_for_one_lock_cost_next_to_nothing(nodes: Nodes) -> None:
    found = figures("threads", nodes)
    assert found["cpu"] <= 0.05 + found["control"], found
    assert found["unrelated"], found
    assert found["ends"] == {"LockTaken": THREADS}, found


@REDIS_SERVER  # it counts commands
def test_coroutines_that_wait_for_one_lock_leave_the_nodes_in_peace(nodes: Nodes) -> None:
    found = figures("coroutines", nodes)
    assert found["commands"] <= 600, found


@pytest.mark.slow
@TOO_MANY
def test_coroutines_that_wait_for_a_resource_each_let_the_event_loop_run(nodes: Nodes) -> None:
    found = figures("resources", nodes)
    assert found["busy"] < 1.0, found
    assert found["ends"] == {"LockTaken": RESOURCES}, found


@pytest.mark.slow
def test_greenlets_that_wait_need_no_descriptors(nodes: Nodes) -> None:
    found = figures("gevent", nodes)
    assert found["ends"] == {"LockTaken": GREENLETS}, found
    # spare pollers, and the subscriber connections, which are kept for a while
    assert found["after"] <= found["before"] + 8 + 3 * len(nodes), found
    assert found["later"] == ["acquired", True], found


@pytest.mark.slow
def test_a_process_that_had_no_descriptors_renews_and_releases_again(nodes: Nodes) -> None:
    assert figures("shortage", nodes) == {"later": ["acquired", True]}


@pytest.mark.slow
def test_permits_above_the_hundredth_are_used(nodes: Nodes) -> None:
    for how, (taken, seconds) in figures("permits", nodes).items():
        assert taken == 50, (how, taken, seconds)


def test_who_began_to_wait_first_is_named_first_whatever_its_wall_clock_says(
    nodes: Nodes, wall_clock: WallClock
) -> None:
    urls = [node.url for node in nodes]
    with (
        calling(urls) as right,
        calling(urls, wall_clock.environment) as wrong,
        Redlock(urls, node_timeout=NODE_TIMEOUT) as redlock,
    ):
        # one whose clock is behind would come first by its own time, one that is ahead last
        for ahead, first, second in ((-HOUR, right, wrong), (HOUR, wrong, right)):
            wall_clock.set(ahead)
            name = f"r{ahead}"
            with redlock.lock(name, wait=WAIT):
                for count, caller in enumerate((first, second), start=1):
                    caller.wait(name)
                    see_waiting(urls, name, count)
                # each registers again and again: a first estimate of the nodes' time may be late
                expected = [first.process.pid, second.process.pid]
                eventually(partial(are_ranked, redlock, name, expected))
            # after a stall of 100 ms it is also the second one's turn
            winner = next_of(first, second)
            for caller in (winner, second if winner is first else first):
                caller.got()
                caller.release()


def are_ranked(redlock: Redlock, name: str, pids: list[int]) -> bool:
    """Return whether the nodes rank the processes that wait for a resource in this order."""
    found = [one for one in redlock.waiters().processes if one.resource == name]
    return [one.pid for one in sorted(found, key=lambda one: one.rank)] == pids


def next_of(*callers: Caller) -> Caller:
    """Return the caller that gets the lock next."""
    by_output = {caller.output: caller for caller in callers}
    (output, *_), _, _ = select.select(list(by_output), [], [], WAIT)
    return by_output[output]


@REDIS_SERVER  # it counts commands
def test_forged_release_messages_make_no_caller_busy_and_hide_no_real_one(nodes: Nodes) -> None:
    found = figures("flood", nodes)
    assert max(found.values()) <= FLOODED / 10, found
