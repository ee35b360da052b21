"""Threads, handlers and names that meet at the worst moment."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
import math
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from celery_redlock import Lock, LockLost, LockTaken, Redlock, RedlockError, SettingsError
from celery_redlock.lock.engine.releaser import Releaser
from celery_redlock.lock.model.fencing import Fence
from celery_redlock.lock.model.lease import Lease, LockKey
from celery_redlock.lock.transport.command import PING, Command, encode_text
from celery_redlock.signals import LockLostEvent, lock_lost
from tests.conftest import (
    NODE_TIMEOUT,
    PATIENCE,
    TTL,
    Nodes,
    eventually,
    is_free,
    receiving,
    see_quorum,
    settle,
    trust_nodes,
)
from tests.contract.conftest import MAJORITY
from tests.contract.renewals import hurry

MOST_OPEN = 2000  # commands without a reply or an error


class Echo:
    """Expects to be answered with its own number."""

    wanted = True

    def __init__(
        self, number: int, seen: list[tuple[int, Any]], lost: list[int] | None = None
    ) -> None:
        self.number, self._seen, self._lost = number, seen, [] if lost is None else lost

    def on_reply(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        self._seen.append((self.number, reply))

    def on_error(self, node: int, command: Command, error: Exception) -> None:
        """Note it: a connection broke."""
        self._lost.append(self.number)


@pytest.fixture
def restless_threads() -> Iterator[None]:
    """Let threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def echoes(count: int, seen: list[tuple[int, Any]]) -> Iterator[list[Command]]:
    """Give batches of commands, each with a number of its own, and none while too many are open.

    Without that bound a writer that is faster than its server would fill the memory.
    """
    lost = list[int]()
    for first in itertools.count(0, count):
        while first - len(seen) - len(lost) > MOST_OPEN:
            yield []
        numbers = range(first, first + count)
        yield [
            Command(b"*2\r\n$4\r\nECHO\r\n" + encode_text(str(n)), Echo(n, seen, lost))
            for n in numbers
        ]


def for_seconds(
    seconds: float, *works: Callable[[], object], enough: Callable[[], bool] = lambda: True
) -> None:
    """Do each work again and again for so long, each in a thread of its own.

    enough: where it is not by then, they go on, for three minutes at the most.
    """
    end = time.monotonic() + seconds

    def repeat(work: Callable[[], object]) -> None:
        while time.monotonic() < end or (not enough() and time.monotonic() < end + 180):
            work()

    threads = [threading.Thread(target=repeat, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.slow
@pytest.mark.usefixtures("restless_threads")
def test_answers_stay_with_their_commands_while_connections_break(nodes: Nodes) -> None:
    seen: list[tuple[int, Any]] = []
    batches = echoes(50, seen)
    with Redlock([nodes[0].url], node_timeout=5.0) as redlock:
        settle(redlock)
        session = redlock.session
        node = session.nodes.all[0]
        # PostgreSQL starts a process for each connection, which takes a busy machine a second
        most, between = (1000, 0) if len(nodes) > 1 else (100, 10)

        def write() -> None:
            now = session.clock.now()
            if batch := next(batches):
                node.send([(command, now, command.request) for command in batch])
            time.sleep(0.0005)

        def break_off() -> None:
            time.sleep(0.003)
            connection, answered = node.connection, len(seen)
            if connection is None or not connection.in_flight:
                return
            # replies between two: a busy machine may take longer for a new connection
            if answered > broken_at[-1] + between:
                broken_at.append(answered)
                node.drop(connection, "no answer within 5 s")

        broken_at = [0]

        drain = session.nodes.drain
        for_seconds(3, write, drain, drain, break_off, enough=lambda: len(seen) > most)
    assert len(seen) > most
    assert len(broken_at) > 2
    assert [pair for pair in seen if pair[1] != str(pair[0]).encode()] == []


@pytest.mark.slow
def test_an_inner_lock_whose_outer_one_ran_out_meanwhile_is_not_acquired(
    brisk_redlock: Redlock, nodes: Nodes
) -> None:
    urls, redlock = [node.url for node in nodes], brisk_redlock
    with Redlock(urls, node_timeout=NODE_TIMEOUT) as other:
        settle(other)
        outer = redlock.lock("a", ttl=TTL, renew=False).acquire(wait=60)
        theirs = other.lock("b", ttl=TTL, max_hold=TTL).acquire(wait=60)
        inner = redlock.lock(["a", "b"], ttl=TTL, wait=60)
        with pytest.raises(LockLost):
            inner.acquire()
        assert not inner.held
        theirs.release()
        outer.release()


def test_a_lock_that_nobody_keeps_is_released_instead_of_renewed(
    redlock: Redlock, nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    lock = redlock.lock("r", ttl=60, renew=False).acquire()  # no renewal looks at it
    keep_for_ever(nodes, redlock)
    del lock
    gc.collect()
    eventually(lambda: is_free(nodes, "r"))
    eventually(lambda: "released 'r': its Lock was garbage collected" in caplog.text)


def keep_for_ever(nodes: Nodes, redlock: Redlock) -> None:
    """Let the key of a lock that was just acquired stay on the nodes until it is deleted."""
    settle(redlock)
    for node in nodes:
        assert node.client().persist("{redlock}:lock:r")


def test_a_lock_whose_finalizer_runs_in_another_thread_is_released(
    redlock: Redlock, nodes: Nodes
) -> None:
    def in_a_block() -> Iterator[None]:
        with redlock.lock("r", ttl=60, renew=False):
            yield

    blocks = [in_a_block()]
    next(blocks[0])
    keep_for_ever(nodes, redlock)
    errors = list[str]()

    def close() -> None:
        with pytest.raises(RedlockError, match="belongs to another thread") as caught:
            blocks[0].close()
        errors.append(str(caught.value))
        caught.value.__traceback__ = None

    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    assert errors
    blocks.clear()
    gc.collect()
    eventually(lambda: is_free(nodes, "r"))


def test_a_prefix_may_have_any_letters(nodes: Nodes) -> None:
    prefix = "50%off a%%b ü\n\udcff"
    trust_nodes(nodes, prefix)
    urls = [node.url for node in nodes]
    one, other = (Redlock(urls, prefix=prefix, node_timeout=PATIENCE) for _ in range(2))
    with one, other, one.lock("r", wait=60) as lock:
        assert lock.held
        see_quorum(other)
        assert not other.lock("r").try_acquire()


@pytest.mark.slow
@MAJORITY
def test_a_name_that_led_to_another_nodes_server_for_a_while_is_a_node_again(
    redlock: Redlock, nodes: Nodes
) -> None:
    first, _, last = redlock.session.nodes.all
    own = last.address

    def lead_to(address: Any) -> None:
        last.address = address
        connection = last.connection
        if connection is not None:
            last.drop(connection, "the name leads elsewhere")

    lead_to(dataclasses.replace(first.address, name=own.name))
    with pytest.raises(SettingsError, match="one server"):
        eventually(lambda: not redlock.lock("r").try_acquire())
    lead_to(own)

    def acquired() -> bool:
        try:
            with redlock.lock("r", wait=1):
                return True
        except RedlockError:  # or the lock of a moment ago, which nobody keeps, stands still
            return False

    eventually(acquired)


class TestHandlers:
    """What users' code does when it is told of a loss."""

    def lose(self, redlock: Redlock, name: str, nodes: Nodes) -> None:
        lock = redlock.lock(name).acquire(wait=60)
        settle(redlock)
        for node in nodes:
            node.client().delete(f"{{redlock}}:lock:{name}")
        hurry(redlock)
        eventually(lambda: not lock.held)
        lock.release()

    def test_bodies_hear_of_a_loss_before_receivers_do(
        self, redlock: Redlock, nodes: Nodes
    ) -> None:
        told: list[str] = []
        redlock.session.events.on_loss = lambda: told.append("bodies")
        with receiving(lock_lost, lambda sender, event: told.append("receivers")):
            self.lose(redlock, "a", nodes)
            eventually(lambda: told == ["bodies", "receivers"])

    def test_one_that_exits_does_not_end_the_telling(
        self, redlock: Redlock, nodes: Nodes, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.CRITICAL)  # its traceback is no news here
        told: list[str] = []

        def leave(sender: object, event: LockLostEvent) -> None:
            told.append(event.resource)
            raise SystemExit("the worker shall stop")

        with receiving(lock_lost, leave):
            for name in ("a", "b"):
                self.lose(redlock, name, nodes)
            eventually(lambda: told == ["a", "b"])

    @pytest.mark.slow
    def test_a_flood_of_news_does_not_keep_a_loss_from_being_told(
        self, brisk_redlock: Redlock, nodes: Nodes
    ) -> None:
        redlock = brisk_redlock
        told = threading.Event()

        watchdog = redlock.session.watchdog

        def flood() -> None:
            while not told.is_set():
                for _ in range(3):
                    watchdog.call_soon(time.sleep, 0.005)
                time.sleep(0.005)

        thread = threading.Thread(target=flood)
        thread.start()
        with receiving(lock_lost, lambda sender, event: told.set()):
            lock = redlock.lock("r", ttl=TTL, renew=False).acquire(wait=60)
            assert told.wait(60)
        thread.join()
        lock.release()


def take(lock: Lock, gate: threading.Barrier) -> None:
    gate.wait()
    with lock:
        pass


@pytest.mark.usefixtures("restless_threads")
def test_of_threads_that_share_a_lock_object_one_gets_it_and_none_leaks_it(
    redlock: Redlock, nodes: Nodes
) -> None:
    for turn in range(60):
        lock = redlock.lock(f"r{turn}")
        gate = threading.Barrier(4)
        with ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(take, lock, gate) for _ in range(4)]
        errors = {type(future.exception()) for future in futures}
        assert errors <= {type(None), RedlockError}
    eventually(lambda: not redlock.session.watchdog.watched)


def test_a_nested_lock_that_nobody_keeps_renews_no_outer_one(redlock: Redlock) -> None:
    how: dict[str, Any] = {"ttl": 60, "renew": False}
    outer = redlock.lock("r", **how).acquire()
    (acquisition,) = outer.ownership.acquisitions
    redlock.session.watchdog.unwatch(acquisition)  # it would renew it, and plan no further renewal
    redlock.lock("r", **how).acquire()
    gc.collect()
    assert acquisition.renew_at == math.inf
    outer.release()


def test_after_a_lock_that_nobody_keeps_its_resource_is_taken_and_given_back_as_ever(
    redlock: Redlock, nodes: Nodes
) -> None:
    """The watchdog may release it before the next acquire, beside it, or after it."""
    for _ in range(20):
        redlock.lock("r").acquire(wait=60)
        gc.collect()
        with redlock.lock("r", wait=60) as lock:
            assert lock.held
            settle(redlock)
            assert not is_free(nodes, "r")
        eventually(lambda: is_free(nodes, "r"))


@MAJORITY
def test_a_connection_that_each_renewal_breaks_does_not_make_them_oftener(
    redlock: Redlock, nodes: Nodes
) -> None:
    broken = redlock.session.nodes.all[0]

    def break_off() -> None:
        time.sleep(0.01)
        connection = broken.connection
        if connection is not None:
            broken.drop(connection, "broken by a test")

    def scripts() -> int:
        settle(redlock)  # an acquire returns before the last node has run its script
        stats = nodes[1].client().info("commandstats")
        return int(stats["cmdstat_evalsha"]["calls"])

    with redlock.lock("r") as lock:
        before, began = scripts(), time.monotonic()
        for_seconds(1.5, break_off)
        more = scripts() - before
        assert more <= 3 * (time.monotonic() - began)  # a stall makes it longer
        assert lock.held


@MAJORITY
def test_a_refusal_that_another_thread_brings_in_does_not_disturb_who_reads_the_others(
    redlock: Redlock, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Redlock([node.url for node in nodes], node_timeout=PATIENCE) as other:

        def late_one_comes(releaser: Releaser, node: int, value: str) -> None:
            nodes[2].resume()
            elsewhere.submit(settle, other).result()

        with redlock.lock("stock"), ThreadPoolExecutor(1) as elsewhere:
            settle(redlock)
            settle(other)
            monkeypatch.setattr(Releaser, "release_late_grant", late_one_comes)
            nodes[2].pause()
            with pytest.raises(LockTaken):
                other.lock("stock").acquire()


@pytest.mark.usefixtures("restless_threads")
def test_what_is_known_of_a_hold_can_be_read_while_another_thread_brings_in_answers() -> None:
    nodes = range(9)
    key = LockKey("redlock", "r", TTL)
    fence, hold = Fence(5), Lease(key, "value", len(nodes), 5, 0.0, guarded=True)
    for node in nodes:
        hold.confirm(node, 0.0, "before")
    hold.begin(0.0)

    def answers() -> None:
        for node in nodes:
            fence.counted(node, 1)
            hold.missing(node, 0.0, "after")
        fence._counters.clear()
        hold.reclaims.clear()

    for_seconds(0.1, answers, lambda: hold.to_reclaim(1.0), lambda: fence.usable)


class Writing(Echo):
    """Keeps whoever writes it to a node in its turn until `go` is set; nothing is written."""

    def __init__(self) -> None:
        self.began, self.go = threading.Event(), threading.Event()

    @property
    def wanted(self) -> bool:  # type: ignore[override]
        self.began.set()
        self.go.wait(60)
        return False


def test_no_answer_counts_of_a_server_that_was_found_to_be_replaced(redlock: Redlock) -> None:
    nodes, seen = redlock.session.nodes, list[tuple[int, Any]]()
    node, now, writing = nodes.all[0], redlock.session.clock.now(), Writing()
    settle(redlock)
    assert node.connection is not None
    descriptor = node.connection.socket.fileno()
    node.send([(Command(PING, Echo(1, seen)), now, PING)])
    other = threading.Thread(
        target=node.send, args=([(Command(PING, writing), now, PING)],), daemon=True
    )
    other.start()
    assert writing.began.wait(60)
    assert select.select([descriptor], [], [], 60)[0], "the answer has come"
    # which has to wait for the turn of the other thread
    redlock.session.guard._give_up(node, node.connection)
    nodes.read(nodes.all[:1])
    writing.go.set()
    other.join(60)
    settle(redlock)  # over a new connection
    assert seen == []
