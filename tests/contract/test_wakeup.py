"""Waiting for a lock on real nodes: woken by its release, not left behind without that word."""

from __future__ import annotations

import contextlib
import math
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from redis import Redis
from redis.client import PubSub

from celery_redlock import LockTaken, QuorumUnreachable, Redlock
from celery_redlock.lock import retry
from celery_redlock.lock.engine.callers import Caller
from celery_redlock.lock.model.acquisition import Acquisition
from celery_redlock.lock.model.handoff import LOOK
from celery_redlock.lock.model.keys import inbox_channel, lock_key, waiting_key
from celery_redlock.lock.model.lease import Lease
from celery_redlock.lock.platform.clock import Platform, SystemClock, installed
from celery_redlock.lock.platform.threads import DeadlineTimer, start_thread
from celery_redlock.lock.transport import subscriber
from celery_redlock.lock.transport.address import parse_address
from celery_redlock.lock.transport.subscriber import Subscriber
from celery_redlock.testing import EmbeddedNode
from tests.conftest import NODE_TIMEOUT, Journal, Nodes, eventually, hearing, settle
from tests.contract.conftest import MAJORITY, REDIS_SERVER, over
from tests.contract.points import interrupt

WAIT = 60.0  # s
SOON = 30.0  # s: well before a wait that nothing wakes ends, as it tries once more then
POINTS = 80  # at which the first pass of a wait may be interrupted, and some more

now = SystemClock().now


def take(redlock: Redlock) -> float:
    """Wait for the lock, and return the monotonic s at which it was got."""
    with redlock.lock("r", wait=WAIT):
        return now()


@pytest.fixture
def patient_waiters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nobody who waits try again by himself as long as a test lasts."""
    for name in ("MAX_SPIN", "MAX_LISTENING_PAUSE", "REGISTRATION_TTL"):
        monkeypatch.setattr(retry, name, 100 * WAIT)


def keep_for_ever(nodes: Nodes, resource: str) -> None:
    """Let a lock that is not renewed stay until its release: no end of it is waited for."""
    for node in nodes:
        eventually(lambda node=node: node.client().persist(lock_key("redlock", resource)))


@contextlib.contextmanager
def joined(redlock: Redlock, caller: Caller) -> Iterator[None]:
    """Let a caller wait meanwhile."""
    redlock.session.callers.join(caller)
    try:
        yield
    finally:
        redlock.session.callers.leave(caller)


@contextlib.contextmanager
def first_in_line(client: Redis) -> Iterator[PubSub]:
    """Give an ear that each release of the lock on one node names first."""
    with client.pubsub(ignore_subscribe_messages=True) as heard:
        heard.subscribe(inbox_channel("redlock", "ear"))
        heard.get_message(timeout=WAIT)
        client.zadd(waiting_key("redlock", "r"), {"ear": 0})
        yield heard


def see_listening(redlock: Redlock, nodes: int | None = None) -> None:
    """Return when a waiter hears of releases from so many nodes, or from all."""
    eventually(lambda: hearing(redlock) >= (nodes or len(redlock.session.nodes.all)))


def see_waiting(redlock: Redlock, count: int = 1, resource: str = "r") -> None:
    """Return when so many wait for the lock."""
    eventually(lambda: len(redlock.session.callers.line(resource)) == count)


class TestWoken:
    def test_by_a_release_long_before_it_would_try_by_itself(
        self, redlock: Redlock, rival: Redlock, nodes: Nodes, pool: ThreadPoolExecutor,
        patient_waiters: None,
    ) -> None:  # fmt: skip
        for _ in range(2):  # as it waits for the first time, it may still look by itself
            lock = redlock.lock("r", wait=WAIT, renew=False).acquire()
            settle(redlock)
            keep_for_ever(nodes, "r")
            waiting = pool.submit(take, rival)
            see_waiting(rival)
            see_listening(rival)
            settle(rival)  # it has tried once more, since it is heard
            lock.release()
            assert waiting.result(SOON)

    def test_whatever_text_it_waits_for_and_others_beside_it(
        self, redlock: Redlock, rival: Redlock
    ) -> None:
        names = ["file:\udcff", "r", "\n", "späť"]  # the first as os.fsdecode gives it
        callers = [Caller(name, 1, 1.0) for name in names]
        with contextlib.ExitStack() as stack:
            for caller in callers:
                stack.enter_context(joined(rival, caller))
            see_listening(rival)
            settle(rival)  # each is registered
            for caller in callers:
                lock = redlock.lock(caller.name).acquire()
                caller.take_step(now())  # what came as the inbox opened
                lock.release()
                eventually(lambda caller=caller: caller.take_step(now()))

    def test_while_one_node_is_frozen(self, mortal_nodes: Nodes, pool: ThreadPoolExecutor) -> None:
        with over(mortal_nodes) as redlock, over(mortal_nodes) as rival:
            mortal_nodes[0].pause()
            lock = redlock.lock("r", wait=WAIT).acquire()
            waiting = pool.submit(take, rival)
            see_listening(rival, nodes=2)
            lock.release()
            assert waiting.result(SOON)

    @REDIS_SERVER
    def test_none_of_those_behind_the_first_one_tries_as_its_wait_ends(
        self, redlock: Redlock, rival: Redlock, nodes: Nodes
    ) -> None:
        count = 24
        with redlock.lock("r"), ThreadPoolExecutor(count) as threads:
            first = Caller("r", 1, 1.0)
            with joined(rival, first):
                see_listening(rival)
                first.take_step(math.inf)  # what came as the inbox opened
                first.looked_at = now()
                tries = [
                    threads.submit(rival.lock("r").try_acquire, wait=1.0) for _ in range(count)
                ]
                see_waiting(rival, count + 1)
                settle(rival)
                nodes[0].client().config_resetstat()
                assert not any(one.result(WAIT) for one in tries)
            settle(rival)
            counts = nodes[0].client().info("commandstats")
        assert counts.get("cmdstat_evalsha", {}).get("calls", 0) < count


def test_a_close_at_any_point_of_a_wait_ends_it(
    redlock: Redlock, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[bool] = []

    class Rest(DeadlineTimer):
        """What the caller sleeps on. After the close it does not sleep."""

        def sleep(self, seconds: float) -> bool:
            is_closed = made.session.is_closed
            ended.append(super().sleep(0.0 if is_closed else seconds) or not is_closed)
            return ended[-1]

    platform = Platform(SystemClock(), new_sleeper=Rest)
    with redlock.lock("r", wait=WAIT):
        for node in nodes:
            monkeypatch.setitem(
                installed, parse_address(node.url, "test", "nodes").server, platform
            )
        for point in range(1, POINTS):
            with over(nodes) as made:

                def wait(made: Redlock = made) -> None:
                    with pytest.raises(QuorumUnreachable, match="is closed"):
                        made.lock("r", wait=WAIT).acquire()

                assert interrupt(wait, point, made.close, ("retry.py",), "_wait")
            assert all(ended), point


class TestNotWoken:
    @pytest.mark.parametrize(
        "rights",
        [
            pytest.param(["+@all", "resetchannels"], id="no channel"),
            pytest.param(["+@all", "-subscribe", "allchannels"], id="no SUBSCRIBE"),
        ],
    )
    @REDIS_SERVER
    def test_without_the_right_it_gets_the_lock_all_the_same(
        self, nodes: Nodes, pool: ThreadPoolExecutor, rights: list[str]
    ) -> None:
        for node in nodes:
            setting = ["ACL", "SETUSER", "app", "reset", "on", ">right-one", "~*", *rights]
            node.client().execute_command(*setting)
        urls = [f"redis://app:right-one@127.0.0.1:{node.port}" for node in nodes]
        try:
            with Redlock(urls, node_timeout=NODE_TIMEOUT) as redlock, Redlock(urls) as rival:
                lock = redlock.lock("r", wait=WAIT).acquire()
                waiting = pool.submit(take, rival)
                see_waiting(rival)
                lock.release()
                assert waiting.result(SOON)
        finally:
            for node in nodes:
                node.client().execute_command("ACL", "DELUSER", "app")

    @MAJORITY
    def test_a_try_that_failed_tells_nobody(self, rival: Redlock, nodes: Nodes) -> None:
        with over(nodes[1:]) as two, two.lock("r"):
            settle(two)
            client = nodes[0].client()
            with first_in_line(client) as heard:
                for _ in range(3):
                    assert not rival.lock("r").try_acquire()
                settle(rival)
                assert not client.exists("{redlock}:lock:r")  # it had been granted, and taken back
                client.publish(inbox_channel("redlock", "ear"), "the first word")
                assert eventually(heard.get_message)["data"] == "the first word"


class TestSeveral:
    def test_what_a_try_won_and_gave_back_is_told_to_who_waits_for_it(
        self, redlock: Redlock, rival: Redlock, nodes: Nodes, pool: ThreadPoolExecutor,
        patient_waiters: None,
    ) -> None:  # fmt: skip
        waiting: list[Future[float]] = []

        class Slow(Journal):
            """Tells of its second key only once somebody waits for the first."""

            def claiming(
                self, session: bytes, at: float, holding: Acquisition, claim: Lease
            ) -> None:
                if claim.key.resource == "s":
                    keep_for_ever(nodes, "r")
                    waiting.append(pool.submit(take, rival))
                    see_waiting(rival)
                    see_listening(rival)
                    settle(rival)

        for _ in range(2):  # as it waits for the first time, it may still look by itself
            with rival.lock("s", wait=WAIT):
                redlock.session.events.journal = Slow()
                assert not redlock.lock(["r", "s"], renew=False).try_acquire()
                assert waiting.pop().result(SOON)


class Slow(Subscriber):
    """An ear whose thread, once it has said that it ends, sees another one begin."""

    after: Callable[[], None] | None = None
    ended: threading.Event

    def _ends(self) -> bool:
        ends, after = super()._ends(), self.after
        if ends and after is not None:
            self.after = None
            after()
        return ends

    def _run(self) -> None:
        super()._run()
        self.ended.set()


def test_who_comes_to_a_subscription_that_stands_looks_at_once_whether_it_missed_a_word(
    redlock: Redlock,
) -> None:
    first, early, late, alone = (Caller(name, 1, 1.0) for name in ("r", "r", "r", "s"))
    with joined(redlock, first), joined(redlock, early):
        see_listening(redlock)
        eventually(lambda: first.step)  # planned just after
        with joined(redlock, late), joined(redlock, alone):
            steps = [one.take_step(now()) for one in (first, early, late, alone)]
    assert [step is not None and step.why == LOOK for step in steps] == [True, False, False, True]


def test_an_ear_that_ends_leaves_the_next_one_its_connection(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber, "IDLE_LIMIT", 0.1)
    wanted, heard = {"a"}, Counter[str]()
    address = parse_address(nodes[0].url, "test", "nodes")

    def hear(channel: str, word: str) -> None:
        heard[channel] += not word  # a subscription begins

    ear = Slow(address, NODE_TIMEOUT, Platform(SystemClock()), lambda: set(wanted), hear)
    ear.ended = threading.Event()

    def wait_anew() -> None:
        wanted.add("b")
        monkeypatch.setattr(subscriber, "IDLE_LIMIT", WAIT)
        ear.resubscribe()
        eventually(lambda: heard["b"])

    ear.after = wait_anew
    with contextlib.closing(ear):
        ear.resubscribe()
        eventually(lambda: heard["a"])
        wanted.clear()
        assert ear.ended.wait(WAIT)
        assert nodes[0].client().pubsub_numsub("b") == [("b", 1)]
        assert (ear.confirmed, heard["b"]) == ({"b"}, 1)


@contextlib.contextmanager
def listening(
    node: EmbeddedNode, *channels: str, user: str = "", timeout: float = NODE_TIMEOUT
) -> Iterator[Subscriber]:
    """Give an ear that was told to hear these channels. user: "name:password@"."""
    address = parse_address(node.url.replace("://", f"://{user}"), "test", "nodes")
    wanted = set(channels)
    ear = Subscriber(
        address, timeout, Platform(SystemClock()), lambda: set(wanted), lambda *_: None
    )
    with contextlib.closing(ear):
        ear.resubscribe()
        yield ear


def test_an_ear_keeps_nothing_of_the_calls_that_could_start_no_thread(nodes: Nodes) -> None:
    may_start = threading.Event()

    def start(run: Callable[[], None]) -> None:
        if not may_start.is_set():
            raise RuntimeError("can't start new thread")
        start_thread(run)

    platform = Platform(SystemClock(), start_thread=start)
    address = parse_address(nodes[0].url, "test", "nodes")
    ear = Subscriber(address, NODE_TIMEOUT, platform, lambda: {"a"}, lambda *_: None)
    before = sys.getrefcount(ear)
    with contextlib.closing(ear):
        for _ in range(100):
            with pytest.raises(RuntimeError, match="new thread"):
                ear.resubscribe()
        assert sys.getrefcount(ear) - before < 10
        may_start.set()
        ear.resubscribe()
        eventually(lambda: ear.confirmed == {"a"})


@REDIS_SERVER
def test_a_channel_that_a_user_may_not_hear_keeps_an_ear_from_no_other(nodes: Nodes) -> None:
    client = nodes[0].client()
    words = ["on", ">secret", "~*", "+@all", "resetchannels", "&a", "&c"]
    client.execute_command("ACL", "SETUSER", "few", *words)
    try:
        with listening(nodes[0], "a", "b", "c", user="few:secret@") as ear:
            eventually(lambda: ear.confirmed == {"a", "c"})
            client.execute_command("ACL", "SETUSER", "few", "&b")
            eventually(lambda: ear.confirmed == {"a", "b", "c"})  # it asks again by itself
    finally:
        client.execute_command("ACL", "DELUSER", "few")


@REDIS_SERVER
def test_a_server_that_is_busy_with_a_script_hands_on_once_it_is_not(mortal_nodes: Nodes) -> None:
    client = mortal_nodes[0].client()
    wanted: set[str] = set()
    refused = threading.Event()
    ear = Subscriber(
        parse_address(mortal_nodes[0].url, "test", "nodes"), NODE_TIMEOUT, Platform(SystemClock()),
        lambda: {"a", *wanted}, lambda *_: None, lambda _: refused.set(),
    )  # fmt: skip
    client.config_set("lua-time-limit", 1)
    with (
        contextlib.closing(ear),
        socket.create_connection(("127.0.0.1", mortal_nodes[0].port)) as wire,
    ):
        ear.resubscribe()
        eventually(lambda: ear.confirmed)
        wire.sendall(b'EVAL "while true do end" 0\r\n')
        try:
            wanted.add("b")
            ear.resubscribe()
            assert refused.wait(WAIT)
        finally:
            client.script_kill()
        eventually(lambda: ear.confirmed == {"a", "b"})


@REDIS_SERVER
def test_a_refused_subscription_is_told_of_once_if_it_does_not_end_by_itself(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    client, rights = nodes[0].client(), ["on", ">secret", "~*", "+@all", "-subscribe", "&*"]
    client.execute_command("ACL", "SETUSER", "deaf", *rights)
    try:
        urls = [nodes[0].url.replace("://", "://deaf:secret@")]
        with (
            Redlock(urls, restart_guard="off", node_timeout=NODE_TIMEOUT) as holder,
            Redlock(urls, restart_guard="off", node_timeout=NODE_TIMEOUT) as other,
            holder.lock("r", wait=WAIT),
        ):
            for _ in range(2):
                with pytest.raises(LockTaken):
                    other.lock("r", wait=1).acquire()
                eventually(lambda: "sends no message, so waiters poll: NOPERM" in caplog.text)
    finally:
        client.execute_command("ACL", "DELUSER", "deaf")
    assert caplog.text.count("sends no message, so waiters poll") == 1


def test_an_ear_that_is_told_of_channels_all_the_time_finds_out_that_its_node_is_gone(
    mortal_nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that is gone ends no connection, and whoever comes to wait rings."""
    monkeypatch.setattr(subscriber, "IDLE_LIMIT", 0.1)
    with listening(mortal_nodes[0], "a", timeout=0.5) as ear:
        eventually(lambda: ear.confirmed)
        mortal_nodes[0].pause()

        def is_dropped_though_it_is_rung() -> bool:
            ear.resubscribe()
            return not ear.confirmed

        eventually(is_dropped_though_it_is_rung)


@REDIS_SERVER
def test_an_ear_hears_more_channels_than_a_connection_takes_at_once(nodes: Nodes) -> None:
    channels = [f"{number}".rjust(250, "c") for number in range(25_000)]
    with listening(nodes[0], *channels) as ear:
        eventually(lambda: len(ear.confirmed) == len(channels))
