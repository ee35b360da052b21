"""A release whose reply has not come: what `close` and the end of a process do for it."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from celery_redlock import Lock, Redlock
from celery_redlock.lock.platform.clock import Platform, SystemClock, installed
from celery_redlock.lock.platform.threads import start_thread
from celery_redlock.lock.transport import node as node_module
from celery_redlock.lock.transport.address import parse_address
from tests.conftest import PATIENCE, Nodes, eventually, is_free, see_freed, settle
from tests.contract.conftest import REDIS_SERVER
from tests.contract.points import interrupt

FILES = ("releaser.py",)  # a thread that stands in `node.py` has the turn of that node
FILES_OF_HANDLERS = ("nodes.py", "releaser.py")
SCRIPT = """
import multiprocessing
import os
import sys
from celery_redlock import Redlock

redlock = Redlock(sys.argv[2:], node_timeout=7)

def hold():
    with redlock.lock("r"):
        print("held", flush=True)
        os.read(0, 1)

if sys.argv[1] == "child":
    with redlock.lock("of the parent"):
        pass
    child = multiprocessing.get_context("fork").Process(target=hold)
    child.start()
    child.join()
else:
    hold()
"""


def end_connections(nodes: Nodes) -> None:
    for node in nodes:
        node.client().client_kill_filter(_type="normal", skipme=True)


def release(redlock: Redlock, lock: Lock) -> None:
    lock.release()


def release_once_it_is_noticed(redlock: Redlock, lock: Lock) -> None:
    """Release when the end of an idle young connection rests: it is not connected to again soon."""

    def is_noticed() -> bool:
        redlock.session.nodes.drain()
        return all(node.connection is None for node in redlock.session.nodes.all)

    redlock.session.watchdog.stop()  # which would connect anew
    eventually(is_noticed)
    lock.release()


@pytest.mark.parametrize("end", [release, release_once_it_is_noticed])
def test_close_sends_again_what_a_dead_connection_took_along(
    nodes: Nodes, end: Callable[[Redlock, Lock], None]
) -> None:
    redlock = Redlock([node.url for node in nodes], node_timeout=PATIENCE)
    settle(redlock)
    lock = redlock.lock("r").acquire()
    end_connections(nodes)
    end(redlock, lock)
    redlock.close()
    see_freed(nodes, "r")


def test_close_connects_where_no_thread_can_be_started_any_more(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while an interpreter of Python 3.12 or later ends."""
    is_ending = threading.Event()

    def start(run: Callable[[], None]) -> None:
        if is_ending.is_set():
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start_thread(run)

    platform = Platform(SystemClock(), start_thread=start)
    for node in nodes:
        server = parse_address(node.url, "test", "nodes").server
        monkeypatch.setitem(installed, server, platform)
    monkeypatch.setattr(node_module, "CONNECTOR_IDLE_LIMIT", 0.1)
    redlock = Redlock([node.url for node in nodes], node_timeout=PATIENCE)
    settle(redlock)
    lock = redlock.lock("r").acquire()
    is_ending.set()

    def is_without_threads() -> bool:
        end_connections(nodes)  # again: a thread that has not ended yet may have connected
        redlock.session.nodes.drain()
        return not any(node.is_used for node in redlock.session.nodes.all)

    eventually(is_without_threads)
    lock.release()
    redlock.close()
    see_freed(nodes, "r")


@pytest.mark.parametrize("who", ["script", "child"])
def test_a_process_that_ends_sends_again_what_a_dead_connection_took_along(
    nodes: Nodes, who: str
) -> None:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, who, *(node.url for node in nodes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        end_connections(nodes)
        process.stdin.close()
    see_freed(nodes, "r")


def test_close_sends_what_another_thread_is_about_to_send(nodes: Nodes) -> None:
    """At each point of that thread, which does not go on if the process ends."""

    def is_sent(point: int) -> bool:
        """Return whether the thread has ended before that point."""
        redlock = Redlock([node.url for node in nodes], node_timeout=PATIENCE)
        settle(redlock)
        let_a_release_wait(redlock, nodes)
        outbox, now = redlock.session.releaser.outbox, redlock.session.clock.now()
        stands, closed = threading.Event(), threading.Event()

        def stand_still() -> None:
            stands.set()
            assert closed.wait(60)

        def flush() -> bool:
            try:
                return interrupt(lambda: outbox.flush(now), point, stand_still, FILES, "flush")
            finally:
                stands.set()

        with ThreadPoolExecutor(1) as pool:
            flushed = pool.submit(flush)
            assert stands.wait(60)
            redlock.close()
            is_freed = is_free(nodes, "r")
            closed.set()
        assert is_freed, point
        return not flushed.result()

    assert next(filter(is_sent, itertools.count(1))) > 10


@pytest.mark.parametrize(
    "why", ["a broken connection", pytest.param("a script that is gone", marks=REDIS_SERVER)]
)
def test_close_waits_for_a_thread_that_has_just_read_why_it_is_to_be_sent_again(
    nodes: Nodes, why: str
) -> None:
    nodes = nodes[:1]  # else close may wait for another one, and the thread goes on by then
    redlock = Redlock([node.url for node in nodes], node_timeout=PATIENCE)
    session, taken = redlock.session, redlock.session.nodes.pollers.taken
    settle(redlock)
    lock = redlock.lock("r").acquire()
    settle(redlock)
    session.watchdog.stop()
    if why == "a broken connection":
        end_connections(nodes)
    else:
        nodes[0].client().script_flush()
    with ThreadPoolExecutor(1) as pool:
        closes: list[Future[None]] = []

        def close() -> None:
            """Go on once it has ended, or waits for this thread."""
            closes.append(pool.submit(redlock.close))
            eventually(lambda: closes[0].done() or taken)

        lock.release()
        handler = "on_error" if why == "a broken connection" else "_send_source"
        eventually(lambda: interrupt(session.nodes.drain, 1, close, FILES_OF_HANDLERS, handler))
    see_freed(nodes, "r")


def let_a_release_wait(redlock: Redlock, nodes: Nodes) -> None:
    """Leave a release in the outbox, with new connections to send it."""
    session = redlock.session
    lock = redlock.lock("r").acquire()
    settle(redlock)  # each node has granted it
    session.watchdog.stop()  # which would send it
    end_connections(nodes)
    lock.release()

    def waits() -> bool:
        session.nodes.drain()
        session.nodes.reconnect()
        is_connected = all(node.connection is not None for node in session.nodes.all)
        return is_connected and len(session.releaser.outbox.nodes) == len(nodes)

    eventually(waits)
