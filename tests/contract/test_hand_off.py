"""Who waits is known on the nodes, and a release names the first of them: on real servers."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import pytest
from redis import Redis
from redis.client import PubSub

from celery_redlock import Redlock
from celery_redlock.lock.engine.callers import Caller
from celery_redlock.lock.engine.inbox import Inbox
from celery_redlock.lock.inspection import break_lock
from celery_redlock.lock.model.handoff import Place
from celery_redlock.lock.model.keys import inbox_channel, lock_key, waiting_key
from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.lock.server.requests import BREAK, REGISTER, RELEASE
from celery_redlock.lock.transport.command import Command, Round, Script, text_of
from celery_redlock.lock.transport.poller import Poller
from tests.conftest import NODE_TIMEOUT, Nodes, eventually, hearing, paused, settle
from tests.contract.conftest import REDIS_SERVER
from tests.contract.points import interrupt
from tests.pages import ROOT

KEY, WAITING = lock_key("redlock", "r"), waiting_key("redlock", "r")
PERMIT = lock_key("redlock", "r", 1)
INBOX = inbox_channel("redlock", "")
VALUE = "token:1700000000000:some holder"
WAIT = 60.0  # s
MINUTE = "60000"  # ms

now = SystemClock().now


@pytest.fixture
def client(nodes: Nodes) -> Redis:
    return nodes[0].client()


def run(client: Redis, script: Script, keys: list[str], *args: str) -> Any:
    return client.eval(script.source.decode(), len(keys), *keys, *args)


def register(client: Redis, waiter: str, since: float, *, limit: int = 0, passed: int = 0) -> Any:
    words = [waiter, str(since), MINUTE, str(passed), INBOX, str(limit)]
    return run(client, REGISTER, [WAITING, *[KEY] * bool(limit)], *words)


def release(client: Redis) -> None:
    client.set(KEY, VALUE)
    assert run(client, RELEASE, [KEY, WAITING], VALUE, INBOX, "1") == 1
    assert not client.exists(KEY)


def waiting(client: Redis) -> list[str]:
    found: list[str] = client.zrange(WAITING, 0, -1)
    return found


@contextlib.contextmanager
def allowed_on(client: Redis, *rights: str) -> Iterator[Redis]:
    """Give a client of the same node that may do no more than that."""
    client.execute_command("ACL", "SETUSER", "few", "reset", "on", "nopass", "~*", *rights)
    port = client.connection_pool.connection_kwargs["port"]
    try:
        with Redis(port=port, username="few", decode_responses=True) as few:
            yield few
    finally:
        client.execute_command("ACL", "DELUSER", "few")


class Ears:
    """Raw clients, each with its channels. heard: what came by now, in order."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._stack = contextlib.ExitStack()
        self._subscriptions: list[PubSub] = []

    def listen(self, *channels: str) -> None:
        subscription = self._stack.enter_context(self._client.pubsub())
        subscription.subscribe(*channels)
        for _ in channels:
            assert eventually(subscription.get_message)["type"] == "subscribe"
        self._subscriptions.append(subscription)

    def heard(self) -> list[tuple[str, str]]:
        """Return the channels and messages of all of them since the last call."""
        found = []
        for subscription in self._subscriptions:
            subscription.subscribe(":end")  # its confirmation comes after all other messages
            while (message := eventually(subscription.get_message))["channel"] != ":end":
                found.append((message["channel"].removeprefix(INBOX), message["data"]))
            subscription.unsubscribe(":end")
            while eventually(subscription.get_message)["type"] != "unsubscribe":
                pass
        return found

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def ears(client: Redis) -> Iterator[Ears]:
    made = Ears(client)
    with contextlib.closing(made):
        yield made


class TestRegistration:
    def test_says_how_many_are_before_and_when_a_key_is_free(
        self, client: Redis, ears: Ears
    ) -> None:
        ears.listen(*(f"{INBOX}w{number}" for number in (1, 2, 3)))
        assert register(client, "w1", 1.0, limit=1) == [0, 1, 0]
        assert register(client, "w2", 2.5, limit=2) == [1, 2, 0]
        client.set(KEY, VALUE)
        assert register(client, "w3", 2.4, limit=1) == [1, 0, -1]
        client.set(PERMIT, VALUE, px=30_000)
        rank, free, ms = register(client, "w3", 3.0, limit=2)
        assert (rank, free, ms) == (2, 0, -1)  # those before it take what ends
        rank, free, ms = register(client, "w1", 1.0, limit=2)
        assert (rank, free, 0 < ms <= 30_000) == (0, 0, True)

    def test_replaces_the_earlier_one_of_its_waiter_and_lasts_a_minute(self, client: Redis) -> None:
        assert register(client, "w1", 2.0) == 0  # it does not ask
        register(client, "w2", 1.5)
        client.pexpire(WAITING, 5_000)
        register(client, "w1", 1.0)
        assert waiting(client) == ["w1", "w2"]
        assert 30_000 < client.pttl(WAITING) <= int(MINUTE)

    def test_strikes_those_that_had_their_turn_only_if_a_key_is_free(
        self, client: Redis, ears: Ears
    ) -> None:
        for number in range(4):
            ears.listen(f"{INBOX}w{number}")
            register(client, f"w{number}", float(number))
        client.set(KEY, VALUE)
        assert register(client, "w3", 3.0, limit=1, passed=2) == [3, 0, -1]
        assert waiting(client) == ["w0", "w1", "w2", "w3"]
        assert register(client, "w3", 3.0, limit=2, passed=2) == [1, 1, -1]
        assert waiting(client) == ["w2", "w3"]
        assert register(client, "w2", 2.0, limit=2, passed=9) == [0, 1, 0]
        assert waiting(client) == ["w2", "w3"]  # never those behind

    def test_strikes_the_dead_before_it_if_a_key_is_free(self, client: Redis, ears: Ears) -> None:
        ears.listen(f"{INBOX}w1")
        for number in range(4):
            register(client, f"w{number}", float(number))
        assert register(client, "w3", 3.0, limit=1) == [1, 1, 0]
        assert waiting(client) == ["w1", "w3"]

    @REDIS_SERVER
    def test_that_a_server_refuses_to_keep_is_told_when_a_key_is_free(self, client: Redis) -> None:
        with allowed_on(client, "+@all", "-zadd") as unkept:
            client.set(KEY, VALUE)
            assert register(unkept, "w1", 1.0, limit=1) == [-1, 0, -1]
            client.delete(KEY)
            assert register(unkept, "w1", 1.0, limit=1) == [-1, 1, 0]
        assert not waiting(client)


@pytest.mark.parametrize("script", [RELEASE, BREAK])
class TestNaming:
    def free(self, client: Redis, script: Script) -> None:
        """Free the lock, by its holder or by an operator."""
        if script is RELEASE:
            release(client)
            return
        client.set(KEY, VALUE)
        keys = [KEY, "{redlock}:broken:r:token", WAITING]
        assert run(client, BREAK, keys, VALUE, "9000", INBOX) == 1

    def test_three_are_named_in_order_and_no_other_is_woken(
        self, client: Redis, ears: Ears, script: Script
    ) -> None:
        for number in (3, 1, 0, 2):
            ears.listen(f"{INBOX}w{number}")
            register(client, f"w{number}", float(number))
        self.free(client, script)
        assert sorted(ears.heard()) == [
            (f"w{rank}", f"{rank} token {WAITING}") for rank in range(3)
        ]
        assert len(waiting(client)) == 4

    def test_one_without_a_listener_is_dead_and_the_next_is_named(
        self, client: Redis, ears: Ears, script: Script
    ) -> None:
        for number in range(6):
            register(client, f"w{number}", float(number))
        for number in (1, 4, 5):
            ears.listen(f"{INBOX}w{number}")
        self.free(client, script)
        assert sorted(ears.heard()) == [
            ("w1", f"0 token {WAITING}"),
            ("w4", f"1 token {WAITING}"),
            ("w5", f"2 token {WAITING}"),
        ]
        assert waiting(client) == ["w1", "w4", "w5"]

    def test_many_that_are_dead_leave_the_set_and_nobody_is_named(
        self, client: Redis, ears: Ears, script: Script
    ) -> None:
        for number in range(150):
            register(client, f"w{number}", float(number))
        ears.listen(f"{INBOX}w200")  # waits for something else
        self.free(client, script)
        assert ears.heard() == []
        assert len(waiting(client)) < 150 - 100

    @REDIS_SERVER
    def test_a_key_of_another_program_costs_the_names_alone(
        self, client: Redis, ears: Ears, script: Script
    ) -> None:
        ears.listen(f"{INBOX}w1")
        client.set(WAITING, "of another program")
        register(client, "w1", 1.0)
        self.free(client, script)
        assert ears.heard() == []
        assert client.get(WAITING) == "of another program"

    @pytest.mark.parametrize(
        "rights",
        [
            pytest.param(["resetchannels"], id="no channels"),
            pytest.param(["&*", "-zrange"], id="no ZRANGE"),
            pytest.param(["&*", "-zrem"], id="no ZREM"),
            pytest.param(["&*", "-publish"], id="no PUBLISH"),
        ],
    )
    @REDIS_SERVER
    def test_a_right_that_is_missing_costs_the_names_alone(
        self, client: Redis, script: Script, rights: list[str]
    ) -> None:
        register(client, "dead", 1.0)
        with allowed_on(client, "+@all", *rights) as few:
            self.free(few, script)


def test_a_value_without_a_token_names_its_successor(client: Redis, ears: Ears) -> None:
    """Another program's value, which an operator breaks."""
    ears.listen(f"{INBOX}w1")
    register(client, "w1", 1.0)
    client.set(KEY, "hello, this is mine")
    keys = [KEY, "{redlock}:broken:r:hello", WAITING]
    assert run(client, BREAK, keys, "hello, this is mine", "9000", INBOX) == 1
    assert ears.heard() == [("w1", f"0 hello, {WAITING}")]


def test_an_operator_that_breaks_a_lock_names_the_first(
    redlock: Redlock, client: Redis, ears: Ears
) -> None:
    ears.listen(f"{INBOX}w1")
    register(client, "w1", 1.0)
    lock = redlock.lock("r").acquire()
    (standing,) = redlock.locks("r").locks
    break_lock(redlock.session, standing)
    token = text_of(standing.value).partition(":")[0]
    assert ears.heard() == [("w1", f"0 {token} {WAITING}")]
    lock.release()


# processes that wait


def take(redlock: Redlock) -> float:
    """Wait for the lock, and return the monotonic s at which it was got."""
    with redlock.lock("r", wait=WAIT):
        return now()


class TestRegistered:
    def test_a_thread_that_begins_to_wait_as_another_one_ends_is_registered(
        self, redlock: Redlock, client: Redis, nodes: Nodes
    ) -> None:
        """At each point of the end of the other one's wait."""
        callers = redlock.session.callers
        keeps_the_inbox_open = Caller("another", 1, 1.0)
        callers.join(keeps_the_inbox_open)
        eventually(lambda: hearing(redlock) == len(nodes))
        eventually(lambda: client.exists(waiting_key("redlock", "another")))
        settle(redlock)  # now the nodes know the script, and each request is executed in order
        for point in itertools.count(1):
            one, other = Caller("r", 1, 1.0), Caller("r", 1, 2.0)
            callers.join(one)
            leave = functools.partial(callers.leave, one)

            def begin(other: Caller = other) -> None:
                callers.join(other)
                if other.take_step(math.inf) is not None:  # it is the first one, and looks at once
                    callers.inbox.place("r", 1, 0)

            if not interrupt(leave, point, begin, ("callers.py", "inbox.py"), "leave"):
                break
            settle(redlock)  # also before it looks again
            assert callers.line("r") == [other], point
            assert client.zrange(WAITING, 0, -1, withscores=True) == [(callers.inbox.name, 2.0)]
            callers.leave(other)
            settle(redlock)
            assert not waiting(client), point
        callers.leave(keeps_the_inbox_open)
        assert point > 10


class TestQuestion:
    """What the tasks ask with: it does not wait, and the answer comes in another thread."""

    @pytest.fixture
    def inbox(self, redlock: Redlock, client: Redis, nodes: Nodes) -> Iterator[Inbox]:
        """Give the inbox of a process in which one waits."""
        callers, caller = redlock.session.callers, Caller("r", 1, 1.0)
        callers.join(caller)
        eventually(lambda: hearing(redlock) == len(nodes))
        settle(redlock)
        yield callers.inbox
        callers.leave(caller)
        eventually(lambda: not client.exists(WAITING))

    def test_is_answered_in_another_thread_and_at_once_if_nobody_waits(self, inbox: Inbox) -> None:
        answers: Queue[tuple[int, Place | None]] = Queue()
        inbox.ask("r", 1, 0, lambda place: answers.put((threading.get_ident(), place)))
        thread, place = answers.get(timeout=WAIT)
        assert place == Place(0, 1, 0.0)
        assert thread != threading.get_ident()
        inbox.ask("nobody waits", 1, 0, lambda place: answers.put((threading.get_ident(), place)))
        assert answers.get_nowait() == (threading.get_ident(), None)

    def test_in_a_flood_the_others_follow_the_one_in_flight_as_one(
        self, inbox: Inbox, nodes: Nodes, redlock: Redlock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answers: Queue[int] = Queue()
        asked: list[Script | None] = []
        broadcast = redlock.session.nodes.broadcast

        def ask(command: Command, now: float) -> None:
            asked.append(command.script)
            broadcast(command, now)

        monkeypatch.setattr(redlock.session.nodes, "broadcast", ask)
        with paused(*nodes):
            for number in range(100):
                inbox.ask("r", 1, 0, lambda _, number=number: answers.put(number))
        assert sorted(answers.get(timeout=WAIT) for _ in range(100)) == list(range(100))
        settle(redlock)
        assert answers.empty()
        assert asked.count(REGISTER) == 2

    def test_of_another_lock_waits_for_none(self, inbox: Inbox, nodes: Nodes) -> None:
        answers: Queue[int] = Queue()
        with paused(*nodes):
            for limit in (1, 2, 3):
                inbox.ask("r", limit, 0, lambda _, limit=limit: answers.put(limit))
        assert sorted(answers.get(timeout=WAIT) for _ in range(3)) == [1, 2, 3]


@REDIS_SERVER
class TestRights:
    """A user that may do what a page says, on all nodes."""

    @contextlib.contextmanager
    def allowed(self, nodes: Nodes, rights: str) -> Iterator[list[Redlock]]:
        for node in nodes:
            words = ["reset", "resetchannels", "on", ">secret", *rights.split()]
            node.client().execute_command("ACL", "SETUSER", "locks", *words)
        urls = [f"redis://locks:secret@127.0.0.1:{node.port}" for node in nodes]
        try:
            with contextlib.ExitStack() as stack:
                yield [
                    stack.enter_context(Redlock(urls, node_timeout=NODE_TIMEOUT)) for _ in range(2)
                ]
        finally:
            for node in nodes:
                node.client().execute_command("ACL", "DELUSER", "locks")

    def test_of_the_page_a_release_names_its_successor(
        self, nodes: Nodes, client: Redis, ears: Ears
    ) -> None:
        page = (ROOT / "docs" / "operations" / "security.md").read_text(encoding="utf-8")
        [rights] = re.findall(r"^ACL SETUSER locks on >secret (.+)$", page, re.MULTILINE)
        with self.allowed(nodes, rights) as (one, other), ThreadPoolExecutor() as pool:
            lock = one.lock("r").acquire()
            taking = pool.submit(take, other)
            for node in nodes:
                eventually(lambda node=node: waiting(node.client()))
            settle(one)
            settle(other)
            value, (name,) = client.get(KEY), waiting(client)
            ears.listen(f"{INBOX}{name}")
            lock.release()
            assert taking.result(WAIT)
            settle(one)
            assert (name, f"0 {value.partition(':')[0]} {WAITING}") in ears.heard()


class OneWaiter:
    """One that waits. look: says since when; None if it has left."""

    def __init__(self, look: Callable[[], float | None] = lambda: 1.0) -> None:
        self.look, self.opened = look, 0

    def since(self, resource: str) -> float | None:
        return self.look()

    def resources(self) -> set[str]:
        return {"r"}

    def on_step(self, *_: object) -> None: ...

    def on_listening(self) -> None:
        self.opened += 1


def test_a_question_that_is_cut_off_keeps_no_later_one_from_being_asked(nodes: Nodes) -> None:
    cuts: list[BaseException] = [KeyboardInterrupt()]

    def look() -> float:
        if cuts:
            raise cuts.pop()
        return 1.0

    with Redlock([node.url for node in nodes]) as redlock:
        settle(redlock)
        inbox = Inbox(redlock.session, OneWaiter(look))
        places: Queue[Place | None] = Queue()
        with pytest.raises(KeyboardInterrupt):
            inbox.ask("r", 1, 0, places.put)
        for _ in range(3):
            inbox.ask("r", 1, 0, places.put)
            assert places.get(timeout=WAIT) is not None
        inbox.close()


@pytest.mark.parametrize("register", ["changed", "asked", "moved", "opened anew"])
def test_a_wait_that_ends_as_another_thread_registers_it_leaves_no_waiter(
    nodes: Nodes, register: str
) -> None:
    with Redlock([node.url for node in nodes]) as redlock:
        settle(redlock)
        line, client = OneWaiter(), nodes[0].client()
        inbox = Inbox(redlock.session, line)
        inbox.listen()
        eventually(lambda: line.opened == len(nodes))
        inbox.changed("another")  # a node that has no script yet executes the request later
        settle(redlock)
        if register in ("moved", "opened anew"):
            inbox.changed("r")
            settle(redlock)
            assert waiting(client)
        looks = [] if register == "opened anew" else [2.0]
        line.look = lambda: looks.pop() if looks else None  # it leaves in another thread
        if register == "asked":
            places: Queue[Place | None] = Queue()
            inbox.ask("r", 1, 0, places.put)
            places.get(timeout=WAIT)
        elif register == "opened anew":
            inbox.on_message(inbox.channel, "", 0)
        else:
            inbox.changed("r")
        settle(redlock)
        assert waiting(client) == []
        inbox.close()


class ForkedMeanwhile(Round):
    """A round whose waiter goes on in a child: the process was forked inside the wait."""

    waiter: Any = None

    def __init__(self, forget: Callable[[], object]) -> None:
        super().__init__()
        self._forget = forget

    def __getattribute__(self, name: str) -> Any:
        if name == "decided" and self.waiter is None:
            self.waiter = self.wake.__self__  # type: ignore[union-attr]
            self._forget()
            return True
        return super().__getattribute__(name)


def test_a_wait_that_goes_on_in_a_forked_child_leaves_it_no_poller_of_the_parent(
    nodes: Nodes,
) -> None:
    with Redlock([node.url for node in nodes]) as redlock:
        settle(redlock)
        with redlock.lock("r"):
            pass
        own = redlock.session.nodes
        round_ = ForkedMeanwhile(own.pollers.forget)
        own.wait(round_, now() + WAIT)
        assert isinstance(round_.waiter, Poller)
        assert own.pollers.take(native=False) is not round_.waiter
