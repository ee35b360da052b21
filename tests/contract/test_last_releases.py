"""A release whose reply has not come: what `close` and the end of a process do for it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from celery_redlock import Lock, Redlock
from celery_redlock.lock.platform.clock import Platform, SystemClock, installed
from celery_redlock.lock.platform.threads import start_thread
from celery_redlock.lock.transport import node as node_module
from celery_redlock.lock.transport.address import parse_address
from tests.conftest import PATIENCE, Nodes, eventually, see_freed, settle

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
    monkeypatch.setattr(node_module, "LINGER", 0.1)
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
