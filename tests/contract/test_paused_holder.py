"""A holder that is stopped past its validity: it knows at once, says nothing, touches nothing."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from celery_redlock import LockLost, Redlock
from celery_redlock.lock.model.options import grace_period
from celery_redlock.lock.platform.clock import SystemClock
from tests.conftest import Nodes, eventually, settle
from tests.contract.contention import NODE_TIMEOUT, PROCESSES, TTL
from tests.contract.proxy import BOTH_WAYS, FAIR, Proxy, Weather

KEY = "{redlock}:lock:r"
PATIENT = 1.0  # s: a node timeout that healthy nodes keep on a busy machine
LONGEST_TTL = 4 * PATIENT  # s

now = SystemClock().now


@dataclass(frozen=True)
class Awake:
    """What the holder found first when it went on. remaining: s. refusal: what `ensure` raised.

    asked: what its own thread called of sockets meanwhile; the watchdog may ping its nodes.
    """

    held: bool
    remaining: float
    refusal: str
    asked: list[str]


@contextlib.contextmanager
def of_sockets() -> Iterator[list[str]]:
    """Give the methods of sockets that this thread calls meanwhile; no other thread's."""
    called: list[str] = []

    def note(_: object, event: str, what: Any) -> None:
        if event == "c_call" and isinstance(getattr(what, "__self__", None), socket.socket):
            called.append(what.__name__)

    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(None)


def hold(line: Connection, urls: list[str], *, renew: bool = True) -> None:
    """Hold the lock in a process of its own, and report; each word on the line leads one step on.

    Says first until which monotonic s the lock is valid unless it is renewed.
    """
    with Redlock(urls, node_timeout=NODE_TIMEOUT) as redlock:
        lock = redlock.lock("r", ttl=TTL, renew=renew).acquire(wait=60)
        settle(redlock)
        line.send(now() + lock.remaining)
        line.recv()
        with of_sockets() as asked:
            held, remaining, refusal = lock.held, lock.remaining, ""
            try:
                lock.ensure()
            except LockLost as error:
                refusal = error.reason
        line.send(Awake(held, remaining, refusal, asked))
        line.recv()
        lock.release()
        settle(redlock)
        line.send("released")


hold_once = functools.partial(hold, renew=False)


class Holder:
    """The process that holds the lock, at the other end of a line."""

    def __init__(self, act: Callable[..., None], urls: list[str]) -> None:
        self.line, other_end = PROCESSES.Pipe()
        self.process = PROCESSES.Process(target=act, args=(other_end, urls), daemon=True)
        self.process.start()
        other_end.close()

    def says(self) -> object:
        """Return its next word."""
        assert self.line.poll(60), "the holder says nothing"
        return self.line.recv()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@contextlib.contextmanager
def holder(urls: list[str], act: Callable[..., None] = hold) -> Iterator[Holder]:
    made = Holder(act, urls)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.join()
        made.line.close()


def state_of(nodes: Nodes) -> list[tuple[object, float]]:
    """Return what stands on each node, and until which monotonic s it surely does."""
    found: list[tuple[object, float]] = []
    for node in nodes:
        at, client = now(), node.client()
        found.append((client.get(KEY), at + int(client.pttl(KEY)) / 1000))
    return found


def test_it_knows_before_any_byte_passes_and_its_release_touches_nobodys_key(
    nodes: Nodes, network: list[Proxy]
) -> None:
    urls = [node.url for node in nodes]
    with (
        holder([proxy.url for proxy in network]) as first,
        Redlock(urls, node_timeout=NODE_TIMEOUT) as redlock,
    ):
        first.says()
        first.signal(signal.SIGSTOP)
        with redlock.lock("r", ttl=60, wait=60, renew=False) as second:
            settle(redlock)
            taken = state_of(nodes)
            for proxy in network:
                proxy.weather = Weather(swallows=BOTH_WAYS)
            first.line.send("go on")
            first.signal(signal.SIGCONT)
            assert first.says() == Awake(False, 0.0, "no quorum of nodes renewed it in time", [])
            for proxy in network:
                proxy.weather = FAIR
            first.line.send("release it")
            assert first.says() == "released"
            # a node that the first one reached last may have refused the second one
            ((own, count),) = Counter(value for value, _ in taken).most_common(1)
            assert count > len(taken) / 2
            for (value, end), node in zip(taken, nodes, strict=True):
                if value == own:
                    client = node.client()
                    assert client.get(KEY) == value
                    assert int(client.pttl(KEY)) / 1000 + now() > end - 0.01
            assert second.held


def test_a_waiter_gets_the_lock_when_its_validity_is_over_and_not_before(
    nodes: Nodes, network: list[Proxy]
) -> None:
    urls = [node.url for node in nodes]
    with (
        holder([proxy.url for proxy in network], hold_once) as first,
        Redlock(urls, node_timeout=NODE_TIMEOUT) as redlock,
    ):
        valid_until = first.says()
        first.signal(signal.SIGSTOP)
        assert isinstance(valid_until, float)
        with redlock.lock("r", ttl=TTL, wait=60):
            assert valid_until < now()


def log_of_a_pause(line: Connection, urls: list[str]) -> None:
    """Take a lock before and after a pause; send what was logged of nodes meanwhile."""
    events: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        events.append(record.__dict__["event"])
        return True

    logger = logging.getLogger("celery_redlock.lock.engine.events")
    logger.setLevel(logging.INFO)
    logger.addFilter(keep)
    longest = LONGEST_TTL
    with Redlock(urls, node_timeout=PATIENT, max_ttl=longest) as redlock:
        redlock.trust()
        redlock.lock("r", ttl=longest).acquire(wait=60).release()
        settle(redlock)
        for _ in range(2):
            line.send(now())
            line.recv()
            redlock.lock("r", ttl=longest).acquire(wait=60).release()
            settle(redlock)
        line.send([event for event in events if event in ("node_failed", "node_recovered")])


def test_healthy_nodes_do_not_fail_by_a_pause_of_the_process(nodes: Nodes) -> None:
    with holder([node.url for node in nodes], log_of_a_pause) as made:
        made.says()
        made.signal(signal.SIGSTOP)
        stopped = now()
        eventually(lambda: now() - stopped > 1.2 * grace_period(LONGEST_TTL))
        made.signal(signal.SIGCONT)
        made.line.send("go on")
        made.says()
        made.line.send("go on")
        assert made.says() == []
