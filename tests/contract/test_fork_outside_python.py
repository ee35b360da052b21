"""A child that C code forks, as uWSGI does, uses nothing of its parent's, like any other child.

No hook of `os.register_at_fork` runs in it. libc's fork is called here while the GIL is kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from celery import Celery

from celery_redlock import LockedTask, Redlock
from celery_redlock.tasks.per_app import redlock_of
from tests.conftest import PATIENCE, TTL, Nodes, eventually, is_free, see_renewal, settle
from tests.contract.conftest import in_child

FORKS = {"os.fork": os.fork, "libc's fork": ctypes.PyDLL(None).fork}
BY_EACH = pytest.mark.parametrize("fork", FORKS.values(), ids=FORKS)
Fork = Callable[[], int]
QUIET = 0.05  # s: a thread that waits for the GIL wakes up each 5 ms


def sleeps_of_others() -> dict[str, tuple[str, str]]:
    """Return the state of each other thread of this process, and how often it went to sleep."""
    own = str(threading.get_native_id())
    seen = {}
    for task in Path("/proc/self/task").iterdir():
        if task.name == own:
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            lines = (task / "status").read_text().splitlines()
            fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            seen[task.name] = (fields["State"][0], fields["voluntary_ctxt_switches"])
    return seen


def is_quiet() -> bool:
    """Return whether every other thread slept for a while; one that waits for a CPU does not."""
    before = sleeps_of_others()
    time.sleep(QUIET)
    return before == sleeps_of_others() and all(state == "S" for state, _ in before.values())


def in_quiet_child(fork: Fork, work: Callable[[], object]) -> None:
    """Do a work in a forked child, as `in_child` does.

    A thread that waited for the GIL as C code forked would leave it broken in the child: nobody
    tells the interpreter of such a fork.
    """
    eventually(is_quiet)
    in_child(work, fork)


def renew_one(redlock: Redlock, name: str) -> None:
    with redlock.lock(name, ttl=TTL) as lock:
        see_renewal(lock)


@BY_EACH
def test_a_child_acquires_renews_and_releases_beside_its_parent(
    brisk_redlock: Redlock, nodes: Nodes, fork: Fork
) -> None:
    with brisk_redlock.lock("parent's", ttl=TTL) as lock:
        in_quiet_child(fork, lambda: renew_one(brisk_redlock, "child's"))
        assert is_free(nodes, "child's")
        see_renewal(lock)


@BY_EACH
def test_a_childs_child_does_so_as_well(brisk_redlock: Redlock, fork: Fork) -> None:
    settle(brisk_redlock)
    in_quiet_child(
        fork, lambda: in_quiet_child(fork, lambda: renew_one(brisk_redlock, "grandchild's"))
    )


@BY_EACH
def test_threads_of_a_child_that_come_at_once_share_what_is_new(
    brisk_redlock: Redlock, fork: Fork
) -> None:
    settle(brisk_redlock)

    def work() -> bool:
        done: list[int] = []
        begin = threading.Barrier(4)

        def acquire(number: int) -> None:
            begin.wait()
            renew_one(brisk_redlock, f"thread {number}")
            done.append(number)

        threads = [threading.Thread(target=acquire, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(done) == len(threads)

    in_quiet_child(fork, work)


@BY_EACH
def test_a_lock_of_the_parent_is_not_the_childs(brisk_redlock: Redlock, fork: Fork) -> None:
    with brisk_redlock.lock("r", ttl=TTL):
        in_quiet_child(fork, lambda: not brisk_redlock.lock("r", ttl=TTL).try_acquire())


@BY_EACH
def test_a_unique_send_of_a_child_is_a_duplicate_of_its_parents(nodes: Nodes, fork: Fork) -> None:
    app = Celery("sends", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(redlock_nodes=[node.url for node in nodes], redlock_node_timeout=PATIENCE)

    @app.task(base=LockedTask, shared=False, lock_key="u:{key}", lock_unique_for=600.0)
    def unique(key: str) -> None: ...

    first = unique.delay("k")
    assert not first.is_duplicate

    def send() -> bool:
        mine, again = unique.delay("own"), unique.delay("own")
        return unique.delay("k").id == first.id and again.id == mine.id

    in_quiet_child(fork, send)
    redlock_of(app).close()
    app.close()
