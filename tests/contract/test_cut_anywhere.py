"""An exception from outside, as a soft time limit's, at every point where one can strike."""

from __future__ import annotations

import ast
import itertools
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from celery_redlock import Lock, LockTaken, Redlock
from celery_redlock.lock.engine.callers import MAX_SPIN, Caller
from celery_redlock.lock.model.keys import waiting_key
from celery_redlock.lock.platform.clock import SystemClock
from tests.conftest import (
    FREED,
    NODE_TIMEOUT,
    PATIENCE,
    Nodes,
    eventually,
    hearing,
    keys_on,
    see_freed,
    settle,
)
from tests.contract.conftest import REDIS_SERVER
from tests.contract.points import LOCK, files_below_the_engine, files_of_the_engine, interrupt

LASTING = 600.0  # s
BELOW, ABOVE = files_below_the_engine(), files_of_the_engine()


class Struck(Exception):  # noqa: N818 - as billiard names it
    """What a signal handler raises."""


@pytest.fixture
def lasting_redlock(nodes: Nodes) -> Iterator[Redlock]:
    """Give a Redlock over one node, whose locks may stand for longer than a test takes."""
    with Redlock([nodes[0].url], node_timeout=NODE_TIMEOUT, max_ttl=LASTING) as made:
        settle(made)
        yield made


def strike() -> None:
    raise Struck


def cut(run: Callable[[], object], at: int, files: tuple[str, ...], begin: str) -> bool:
    """Run something, and raise at one of its points; False where it has no so many."""
    try:
        return interrupt(run, at, strike, files, begin)
    except Struck:
        return True


def see_all_freed(nodes: Nodes) -> None:
    """Return when the node has no lock any more, as none ends by itself."""
    eventually(lambda: keys_on(nodes[:1]) == [[]], within=FREED)


@REDIS_SERVER
def test_a_release_that_is_cut_as_it_is_sent_again_arrives(
    lasting_redlock: Redlock, nodes: Nodes
) -> None:
    redlock, client = lasting_redlock, nodes[0].client()
    for at in itertools.count(1):
        lock = redlock.lock(f"r{at}", ttl=LASTING, renew=False).acquire()
        other = redlock.lock(f"other{at}", ttl=LASTING)
        client.script_flush()
        lock.release()  # the node has forgotten the script: it is to be sent again
        if not cut(lambda other=other: other.acquire().release(), at, BELOW, "wait"):
            break
    assert at > 50
    see_all_freed(nodes)


def leave_block(lock: Lock) -> None:
    lock.__exit__(None, None, None)


def end_run(lock: Lock) -> None:
    lock.ownership.release_all()


@pytest.mark.parametrize("leave", [Lock.release, leave_block, end_run])
def test_a_lock_whose_object_is_kept_is_given_back_though_its_release_is_cut(
    lasting_redlock: Redlock, nodes: Nodes, leave: Callable[[Lock], None]
) -> None:
    """But at the first point: nothing of ours has begun by then, and who is cut has to know."""
    redlock = lasting_redlock
    kept: list[Lock] = []
    begin = "__exit__" if leave is leave_block else "release"
    for at in itertools.count(2):
        kept.append(redlock.lock(f"r{at}", ttl=LASTING).acquire())
        if not cut(lambda: leave(kept[-1]), at, ABOVE, begin):
            break
    assert len(kept) > 30
    see_all_freed(nodes)


def test_a_nested_lock_is_given_back_though_the_outer_one_is_dropped_as_it_is_released(
    lasting_redlock: Redlock, nodes: Nodes
) -> None:
    redlock = lasting_redlock
    for at in itertools.count(1):
        outer = [redlock.lock(f"r{at}", ttl=LASTING, renew=False).acquire()]
        inner = redlock.lock(f"r{at}", ttl=LASTING, renew=False).acquire()
        if not interrupt(inner.release, at, outer.clear, ABOVE, "release"):
            break
    assert at > 30
    outer.clear()
    see_all_freed(nodes)


OF_A_WAIT = ("acquirer.py", "acquisition.py", "releaser.py", "retry.py", "callers.py", "inbox.py")

now = SystemClock().now


def take(redlock: Redlock) -> float:
    """Wait for the lock, and return the monotonic s at which it was got."""
    with redlock.lock("r", wait=PATIENCE):
        return now()


def test_a_wait_that_is_cut_leaves_nothing_and_the_next_one_is_handed_the_lock(
    lasting_redlock: Redlock, nodes: Nodes
) -> None:
    callers, client = lasting_redlock.session.callers, nodes[0].client()
    keeps_the_inbox_open, hand_offs = Caller("another", 1, 1.0), []
    with Redlock([nodes[0].url], node_timeout=NODE_TIMEOUT) as other, ThreadPoolExecutor() as pool:
        callers.join(keeps_the_inbox_open)
        eventually(lambda: hearing(lasting_redlock) == 1)
        for at in itertools.count(1):
            holder = other.lock("r", wait=PATIENCE).acquire()
            waits = lasting_redlock.lock("r", wait=0.02).acquire
            try:
                was_cut = cut(waits, at, OF_A_WAIT, "_wait")
            except LockTaken:
                was_cut = False
            assert callers.resources() == ["another"], at
            settle(lasting_redlock)
            # a cut may have cost a connection, whose last words another one does not wait for
            eventually(lambda: not client.zcard(waiting_key("redlock", "r")))
            if at % 10 == 0 or not was_cut:
                taking = pool.submit(take, lasting_redlock)
                eventually(lambda: client.zcard(waiting_key("redlock", "r")))
                settle(lasting_redlock)
                released = now()
                holder.release()
                hand_offs.append(taking.result(PATIENCE) - released)
            else:
                holder.release()
            if not was_cut:
                break
        callers.leave(keeps_the_inbox_open)
    assert at > 50  # more, where it has the time to look again
    assert statistics.median(hand_offs) < MAX_SPIN / 2  # long before a look
    see_freed(nodes[:1], "r")


def cleans_up(node: ast.AST) -> bool:
    """Return whether a `try` does something after an exception of whatever kind."""
    if not isinstance(node, ast.Try):
        return False
    kinds = [ast.unparse(each.type) if each.type else "" for each in node.handlers]
    return bool(node.finalbody) or "" in kinds or "BaseException" in kinds


def skips(loop: ast.AST) -> bool:
    """Return whether a loop goes on from several lines, or asks a condition."""
    kinds = (ast.If, ast.Continue, ast.Try)
    if isinstance(loop, ast.While):
        return ast.unparse(loop.test) != "True"  # such a jump has its handlers
    return isinstance(loop, ast.For) and any(isinstance(each, kinds) for each in ast.walk(loop))


MAY_PASS_BY = {
    "nodes: _dispatch_replies",  # at the jump no handler has been called that would be called again
    "pipeline: finish", "pipeline: cancel",  # libpq's connection is closed with its last reference
}  # fmt: skip


@pytest.mark.parametrize("folder", ["engine", "platform", "postgres", "transport", "."])
def test_no_loop_stands_in_a_try_that_cleans_up(folder: str) -> None:
    """CPython 3.12 and 3.13 compile jumps of such a loop without the handlers around it."""
    found = set()
    for path in (LOCK / folder).glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            for node in filter(cleans_up, ast.walk(function)):
                loops = [each for part in node.body for each in ast.walk(part)]
                if any(map(skips, loops)):
                    found.add(f"{path.stem}: {function.name}")
    assert sorted(found - MAY_PASS_BY) == []
