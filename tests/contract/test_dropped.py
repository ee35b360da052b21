"""What a `Redlock` that nobody closes, or a peak of waiters, leaves behind: nothing for long."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import re
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Event, Thread
from weakref import ref

import pytest

from celery_redlock import LockTaken, Redlock
from celery_redlock.lock.model.acquisition import Acquisition
from celery_redlock.signals import node_recovered
from tests.conftest import (
    NODE_TIMEOUT,
    TTL,
    Nodes,
    eventually,
    is_free,
    receiving,
    see_freed,
    settle,
)
from tests.contract.points import files_of_the_engine, interrupt
from tests.contract.test_interleavings import restless_threads

__all__ = ["restless_threads"]  # a fixture
pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts in /proc")
UNCLOSED = pytest.mark.filterwarnings("ignore:unclosed <Redlock:ResourceWarning")
WAITERS = 150


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def threads() -> int:
    """Return how many threads the system knows of, also those that Python does not."""
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.fixture
def nothing_is_left(nodes: Nodes) -> Iterator[None]:
    """See that a test ends with as many threads and descriptors as it began with, or fewer."""
    for node in nodes:
        assert node.client().ping()  # a PostgreSQL's gateway begins with its first client
    gc.collect()
    before = threads(), descriptors()

    def is_left() -> bool:
        gc.collect()  # what is closed and gone refers to itself
        return threads() <= before[0] and descriptors() <= before[1]

    yield
    eventually(is_left)


def over(nodes: Nodes) -> Redlock:
    return Redlock([node.url for node in nodes], node_timeout=NODE_TIMEOUT)


def test_what_becomes_known_after_its_end_has_no_sender() -> None:
    redlock = Redlock(["redis://127.0.0.1:1"])  # never connected to
    session, senders = redlock.session, []
    (node,) = session.nodes.all
    del redlock
    gc.collect()
    with receiving(node_recovered, lambda sender, event: senders.append(sender)):
        session.events.node_changed(node, None)
        eventually(lambda: senders == [None])
    session.close()


@UNCLOSED
@pytest.mark.usefixtures("nothing_is_left")
class TestDropped:
    def test_after_a_lock_and_a_look_at_its_nodes_and_a_wait_and_in_a_cycle(
        self, nodes: Nodes
    ) -> None:
        with over(nodes).lock("r", wait=60):
            pass
        see_freed(nodes, "r")
        settle(over(nodes))
        with over(nodes) as holder, holder.lock("r", wait=60), pytest.raises(LockTaken):
            over(nodes).lock("r", wait=0.1).acquire()
        in_a_cycle = over(nodes)
        in_a_cycle.itself = in_a_cycle  # type: ignore[attr-defined]
        settle(in_a_cycle)

    def test_after_a_lock_that_its_watchdog_saw_and_whose_options_refer_to_it(
        self, nodes: Nodes
    ) -> None:
        redlock, seen = over(nodes), Event()
        with redlock.lock("r", wait=60, on_lost=lambda _: redlock.close()):
            redlock.session.watchdog.call_soon(seen.set)  # done after a look at each lock
            assert seen.wait(60)
        see_freed(nodes, "r")

    def test_with_a_lock_that_goes_with_it_and_is_released(
        self, nodes: Nodes, caplog: pytest.LogCaptureFixture
    ) -> None:
        lock = over(nodes).lock("r", wait=60).acquire()
        assert lock.held
        del lock
        see_freed(nodes, "r")
        eventually(lambda: "released 'r': its Lock was garbage collected" in caplog.text)

    @pytest.mark.slow
    def test_with_a_node_that_is_away_and_hears_of_the_release_when_it_is_back(
        self, mortal_nodes: Nodes
    ) -> None:
        lock = over(mortal_nodes).lock("r", wait=60).acquire()
        eventually(lambda: mortal_nodes[0].client().exists("{redlock}:lock:r"))
        mortal_nodes[0].pause()
        lock.release()
        del lock
        gc.collect()
        eventually(lambda: is_free(mortal_nodes[1:], "r"))
        mortal_nodes[0].resume()
        see_freed(mortal_nodes, "r")

    def test_in_a_forked_child_its_parents_goes_on(self, nodes: Nodes) -> None:
        redlock = over(nodes)
        with redlock.lock("r", ttl=TTL, wait=60) as lock:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a fork beside threads
                child = os.fork()
            if not child:
                with contextlib.suppress(BaseException):
                    del redlock, lock
                    gc.collect()
                os._exit(0)
            os.waitpid(child, 0)
            lock.extend()
            assert lock.held


def test_a_lock_that_nobody_keeps_any_more_as_it_is_renewed_is_released_after_that(
    mortal_nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    with over(mortal_nodes) as redlock:
        lock = redlock.lock("r", ttl=TTL, renew=False).acquire(wait=60)
        settle(redlock)
        for node in mortal_nodes:
            node.pause()
        lock.ownership.renew_for(0)  # once: no later renewal would see that nobody keeps it
        eventually(lambda: redlock.session.nodes.outstanding)
        del lock
        gc.collect()
        for node in mortal_nodes:
            node.resume()
        eventually(lambda: "'r'" in caplog.text)
        assert "released 'r': its Lock was garbage collected" in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("restless_threads")
@UNCLOSED
def test_a_lock_that_nobody_keeps_nor_its_redlock_is_released_once(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"r{number}" for number in range(60)]
    for name in names:
        # its own finalizer and that of its `Redlock` run at once
        over(nodes).lock(name).acquire(wait=60)
    texts = [f"released {name!r}: its Lock was garbage collected" for name in names]
    eventually(lambda: all(text in caplog.text for text in texts))
    assert [caplog.text.count(text) for text in texts] == [1] * len(texts)
    assert "lost" not in caplog.text


def test_a_lock_that_is_just_released_is_not_taken_for_one_that_nobody_keeps(
    redlock: Redlock, caplog: pytest.LogCaptureFixture
) -> None:
    """Else two threads release it, and each finds that the other one's key is gone."""
    session, told = redlock.session, Event()

    def renew(due: list[Acquisition]) -> None:
        thread = Thread(target=session.renewer.renew, args=(due,))
        thread.start()
        thread.join()

    for at in itertools.count(1):
        lock = redlock.lock(f"r{at}").acquire(wait=60)
        renew_due = partial(renew, session.watchdog.watched)  # read before the release
        if not interrupt(lock.release, at, renew_due, files_of_the_engine(), "release"):
            break
    assert at > 30
    settle(redlock)
    session.watchdog.call_soon(told.set)
    assert told.wait(60)
    assert not re.search("garbage collected|lost '", caplog.text)


def test_a_lock_keeps_its_redlock(nodes: Nodes) -> None:
    redlock = over(nodes)
    lock, kept = redlock.lock("r", wait=60), ref(redlock)
    del redlock
    for _ in range(3):
        with lock:
            gc.collect()
            assert lock.held
    found = kept()
    assert found is not None
    found.close()


def test_one_that_is_dropped_is_told_of_as_a_socket_is(nodes: Nodes) -> None:
    used = [over(nodes)]
    settle(used[0])
    with pytest.warns(ResourceWarning, match=f"unclosed <Redlock 127.0.0.1:{nodes[0].port}"):
        used.clear()


def test_one_that_was_closed_or_never_used_is_not(nodes: Nodes) -> None:
    gc.collect()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        used = over(nodes)
        settle(used)
        used.close()
        gone = ref(used)
        del used
        over(nodes)
        gc.collect()
        assert gone() is None
    assert [str(one.message) for one in seen if "Redlock" in str(one.message)] == []
