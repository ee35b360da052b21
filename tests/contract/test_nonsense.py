"""A server that answers with what no script of ours replies gives no vote, and breaks nothing."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from celery_redlock import LockTaken, QuorumUnreachable, Redlock
from celery_redlock.lock.model.keys import completion_key
from celery_redlock.lock.node_status import ask_nodes, compare_shared_settings
from celery_redlock.lock.server.requests import GRANT, MARKER, RELEASE, RENEW, UNIQUE
from celery_redlock.tasks.execution.completion_markers import read_markers
from celery_redlock.tasks.unique.claim import ClaimToken
from tests.conftest import (
    NODE_TIMEOUT,
    PATIENCE,
    TTL,
    Nodes,
    eventually,
    is_free,
    see_freed,
    settle,
)
from tests.contract.conftest import REDIS_SERVER
from tests.contract.liar import DRIPS, Liar
from tests.contract.test_done_marks import lock_of
from tests.contract.test_unique import Sender

WORDS = "not a reply of its script"
NONSENSE = {
    "nothing": b"*0\r\n",
    "nil": b"$-1\r\n",
    "no list": b"*-1\r\n",
    "text": b"+OK\r\n",
    "true": b"#t\r\n",
    "float": b",1.0\r\n",
    "7": b":7\r\n",
    "-2": b":-2\r\n",
    "list of nothing": b"*1\r\n*0\r\n",
    "refusal by nobody": b"*3\r\n:0\r\n$-1\r\n$1\r\nx\r\n",
    "refusal without a value": b"*2\r\n:0\r\n:5\r\n",
    "refusal by a number": b"*3\r\n:0\r\n:5\r\n:5\r\n",
    "silent for a text": b"*2\r\n:-1\r\n$1\r\nx\r\n",
    "more of it": b"*4\r\n:1\r\n:1\r\n:1\r\n:1\r\n",
    "true in a list": b"*1\r\n#t\r\n",
    "error in a list": b"*2\r\n:1\r\n-ERR x\r\n",
}
# what another script replies, or the same one to another request
FEW = {name: NONSENSE[name] for name in ("nil", "7", "list of nothing", "error in a list")}
NO_GRANT = NONSENSE | {"0": b":0\r\n", "a token": b"*2\r\n:1\r\n:5\r\n"}
NO_ANSWER = {"1": b":1\r\n", "no mark": b"*2\r\n:0\r\n:0\r\n", "a text": b"*2\r\n:1\r\n$1\r\nx\r\n"}
NO_MARK = {name: reply for name, reply in NONSENSE.items() if not reply.startswith(b":")}
NO_TOKEN = {
    "1": b":1\r\n",
    "a text": b"*2\r\n:1\r\n$1\r\nx\r\n",
    "huge": b"*2\r\n:1\r\n:%d\r\n" % 2**60,
}
NO_RENEWAL = NONSENSE | {"2 of one": b"*2\r\n:1\r\n:1\r\n", "nil in it": b"*1\r\n$-1\r\n"}

ASK: dict[bytes, Callable[[Redlock], Any]] = {  # what is asked by each command
    b"MGET": lambda redlock: redlock.locks("r"),
    b"SCAN": Redlock.locks,
    b"INFO": Redlock.status,
}


def each(replies: dict[str, bytes]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("reply", replies.values(), ids=replies.keys())


@pytest.fixture(scope="module")
def one(standing_nodes: Nodes) -> Iterator[Liar]:
    with contextlib.closing(Liar(standing_nodes[0])) as made:
        yield made


@pytest.fixture
def lies(one: Liar, nodes: Nodes) -> Liar:
    one.answers.clear()
    return one


@pytest.fixture
def alone(lies: Liar) -> Iterator[Redlock]:
    """Give a Redlock whose one node is the liar."""
    with Redlock([lies.url], node_timeout=NODE_TIMEOUT) as made:
        settle(made)
        yield made


@pytest.fixture
def three(lies: Liar, nodes: Nodes) -> Iterator[Redlock]:
    """Give a Redlock over the liar and two nodes."""
    urls = [lies.url, nodes[1].url, nodes[2].url]
    with Redlock(urls, node_timeout=PATIENCE) as made:
        settle(made)
        yield made


@pytest.fixture
def no_inner_error(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert "renewal failed" not in caplog.text
    assert "Traceback" not in caplog.text


pytestmark = [REDIS_SERVER, pytest.mark.usefixtures("no_inner_error")]


class TestGrant:
    @each(NO_GRANT)
    def test_is_no_vote_and_the_cause_names_the_reply(
        self, alone: Redlock, lies: Liar, reply: bytes
    ) -> None:
        lies.lie(GRANT, reply)
        with pytest.raises(QuorumUnreachable, match=f"127.0.0.1:{lies.port}: {WORDS}"):
            alone.lock("r").acquire()

    @each(NO_ANSWER)
    def test_is_none_where_a_run_asks_whether_it_is_done(
        self, alone: Redlock, lies: Liar, reply: bytes
    ) -> None:
        lies.lie(GRANT, reply)
        with pytest.raises(QuorumUnreachable, match=WORDS):
            lock_of(alone, since=-math.inf).acquire()

    @each(NO_TOKEN)
    def test_is_none_where_a_fencing_token_is_wanted(
        self, alone: Redlock, lies: Liar, reply: bytes
    ) -> None:
        lies.lie(GRANT, reply)
        with pytest.raises(QuorumUnreachable, match=WORDS):
            alone.lock("r", fencing=True).acquire()

    @each(FEW)
    def test_leaves_the_decision_to_the_others_in_each_thread(
        self, three: Redlock, lies: Liar, reply: bytes
    ) -> None:
        lies.lie(GRANT, reply)

        def take(number: int) -> bool:
            with three.lock(f"r{number % 2}", wait=60) as lock:
                return lock.held

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(take, range(4)))

    def test_a_reply_of_more_than_was_asked_for_is_not_awaited(
        self, three: Redlock, lies: Liar, caplog: pytest.LogCaptureFixture
    ) -> None:
        """hiredis would reserve memory for a billion items, and keep the GIL meanwhile."""
        with three.lock("held", renew=False) as held:
            lies.lie(GRANT, b"*1000000000\r\n")
            with three.lock("r", wait=60) as lock:
                assert lock.held
            text = f"127.0.0.1:{lies.port} gives no vote: a reply of 1000000000 items"
            eventually(lambda: text in caplog.text)
            assert held.held

    def test_an_error_of_a_mb_is_told_in_one_short_line(
        self, three: Redlock, lies: Liar, caplog: pytest.LogCaptureFixture
    ) -> None:
        lies.lie(GRANT, b"-ERR \x1b[31m\n%b\r\n" % (b"Connection x " * 80_000))
        with three.lock("r", wait=60) as lock:
            assert lock.held

        def said() -> list[str]:
            settle(three)  # which reads what came after the lock was held
            return [m for m in caplog.messages if f":{lies.port} gives no" in m]

        told = eventually(said)
        assert all(message.isprintable() and len(message) < 1000 for message in told)

    def test_whoever_stopped_to_talk_nonsense_votes_again(self, alone: Redlock, lies: Liar) -> None:
        lies.lie(GRANT, b"*0\r\n")
        with pytest.raises(QuorumUnreachable):
            alone.lock("r").acquire()
        lies.answers.clear()
        with alone.lock("r", wait=60) as lock:
            assert lock.held

    def test_no_reply_behind_it_counts(self, alone: Redlock, lies: Liar) -> None:
        """One that nobody asked for shifts all others: 1 to a release is 1 to the next grant."""
        lies.lie(RENEW, b"*0\r\n*1\r\n:1\r\n")
        lock = alone.lock("r", ttl=TTL, renew=False).acquire()
        with pytest.raises(QuorumUnreachable):
            lock.extend()
        with pytest.raises(QuorumUnreachable):
            lock.extend()
        lock.release()


class TestRenewal:
    @each(NO_RENEWAL)
    def test_prolongs_nothing(self, alone: Redlock, lies: Liar, reply: bytes) -> None:
        with alone.lock("r", ttl=TTL, renew=False) as lock:
            before = lock.remaining
            lies.lie(RENEW, reply)
            with pytest.raises(QuorumUnreachable):
                lock.extend()
            assert lock.remaining < before

    def test_of_several_prolongs_none_where_one_word_makes_no_sense(
        self, alone: Redlock, lies: Liar
    ) -> None:
        with alone.lock(["a", "b"], ttl=TTL, renew=False) as lock:
            before = lock.remaining
            lies.lie(RENEW, b"*2\r\n:1\r\n$1\r\nx\r\n")
            with pytest.raises(QuorumUnreachable):
                lock.extend()
            (claim, _) = lock.ownership.acquisitions[0].leases
            assert max(lock.remaining, claim.remaining(alone.session.clock.now())) < before

    @each(FEW)
    def test_leaves_it_to_the_others(self, three: Redlock, lies: Liar, reply: bytes) -> None:
        with three.lock("r", renew=False) as lock:
            lies.lie(RENEW, reply)
            lock.extend()
            assert lock.held

    def test_of_a_token_names_who_did_not_confirm_it(self, lies: Liar, nodes: Nodes) -> None:
        with Redlock([lies.url, nodes[1].url], node_timeout=PATIENCE) as made:
            settle(made)
            ahead = time.time_ns() // 1000 + 1_000_000
            nodes[1].client().set("{redlock}:fence", ahead)
            lies.lie(RENEW, b"-ERR odd\r\n")
            with pytest.raises(QuorumUnreachable) as caught:
                made.lock("r", fencing=True).acquire()
        assert caught.value.causes == [f"127.0.0.1:{lies.port}: ERR odd"]

    def test_of_no_quorum_says_what_each_node_answered(
        self, three: Redlock, lies: Liar, nodes: Nodes
    ) -> None:
        with three.lock("r", ttl=60, renew=False) as lock:
            settle(three)
            lies.lie(RENEW, b"-ERR odd\r\n")
            nodes[1].client().delete("{redlock}:lock:r")
            with pytest.raises(QuorumUnreachable) as caught:
                lock.extend()
        odd, gone = (f"127.0.0.1:{port}: " for port in (lies.port, nodes[1].port))
        assert caught.value.causes == [
            f"{odd}ERR odd",
            f"{gone}its key is gone or another client's",
        ]


class TestRelease:
    @pytest.mark.slow
    @each(FEW)
    def test_is_sent_again_until_it_is_understood(
        self, three: Redlock, lies: Liar, nodes: Nodes, reply: bytes
    ) -> None:
        lock = three.lock("r").acquire()
        settle(three)
        lies.lie(RELEASE, reply)
        lock.release()
        eventually(lambda: is_free(nodes[1:], "r"))
        lies.answers.clear()
        see_freed(nodes, "r")


class TestUnique:
    @each(NONSENSE)
    def test_drops_no_send(
        self, alone: Redlock, lies: Liar, reply: bytes, caplog: pytest.LogCaptureFixture
    ) -> None:
        lies.lie(UNIQUE, reply)
        sender = Sender(alone, {})
        assert sender.send(unique_for=60.0) in sender.published
        assert "without deduplication" in caplog.text

    def test_ends_no_window_before_it_is_understood(
        self, alone: Redlock, lies: Liar, nodes: Nodes
    ) -> None:
        sender = Sender(alone, {})
        ticket: ClaimToken = sender.ticket(sender.send())
        lies.lie(UNIQUE, b"*1\r\n:1\r\n")
        ticket.release_at_end(alone.session)
        lies.answers.clear()
        eventually(lambda: not nodes[0].client().keys("*:unique:*"))


class TestQuestions:
    @each(NO_MARK)
    def test_a_node_that_answers_so_does_not_say_that_a_run_is_done(
        self, three: Redlock, lies: Liar, nodes: Nodes, reply: bytes
    ) -> None:
        settle(three)
        lies.lie(MARKER, reply)
        assert set(read_markers(three.session, "1:t:0:0")) == {0.0}
        nodes[1].client().set(completion_key("redlock", "1:t:0:0"), "-5000")
        assert {*read_markers(three.session, "1:t:0:0")} == {0.0, -5.0}

    @each(FEW | {name: NONSENSE[name] for name in ("text", "float", "refusal by a number")})
    def test_people_are_told_which_node_answers_what(
        self, three: Redlock, lies: Liar, reply: bytes
    ) -> None:
        with three.lock("r", wait=60):
            for command in (b"SCAN", b"MGET", b"PTTL", b"TIME", b"GET"):
                lies.lie(command, reply)
                sight, status = three.locks(), three.status().nodes
                lies.answers.clear()
                if command in (b"SCAN", b"MGET"):
                    (cause,) = sight.failing.values()
                    assert WORDS in cause
                assert [lock.resource for lock in sight.locks] == ["r"]
                assert [one.error for one in status[1:]] == ["", ""]
            lies.lie(b"PTTL", reply)
            lies.lie(b"GET", reply)
            assert ask_nodes(three.session).needed == 2
            compare_shared_settings(three.session)

    @pytest.mark.parametrize("command", ASK)
    def test_a_list_without_end_is_not_awaited(
        self, three: Redlock, lies: Liar, command: bytes
    ) -> None:
        """hiredis would reserve memory for a billion items, and keep the GIL meanwhile."""
        lies.lie(command, b"*1000000000\r\n")
        assert "a reply of 1000000000 items: no Redis server" in repr(ASK[command](three))

    @pytest.mark.parametrize("command", ASK)
    def test_a_reply_that_comes_byte_by_byte_is_not_awaited(
        self, lies: Liar, nodes: Nodes, command: bytes
    ) -> None:
        urls = [lies.url, nodes[1].url, nodes[2].url]
        with Redlock(urls, node_timeout=0.5) as hasty, ThreadPoolExecutor(1) as pool:
            settle(hasty)
            lies.lie(command, DRIPS)
            asked = pool.submit(ASK[command], hasty)
            try:
                told = asked.result(60)
            finally:
                lies.answers.clear()
        assert "Timeout reading from socket" in repr(told)


def test_a_handshake_without_end_costs_its_node_alone(
    lies: Liar, nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    lies.lie(b"INFO", b"*1000000000\r\n")
    with Redlock([lies.url, nodes[1].url, nodes[2].url], node_timeout=0.5) as made:
        with made.lock("r", wait=60) as lock:
            assert lock.held
        text = f"127.0.0.1:{lies.port} gives no vote: a reply of 1000000000 items"
        eventually(lambda: text in caplog.text)


def test_a_lock_that_others_hold_is_taken_whatever_the_third_says(
    three: Redlock, lies: Liar, nodes: Nodes
) -> None:
    for node in nodes[1:]:
        node.client().set("{redlock}:lock:r", "theirs", px=60_000)
    lies.lie(GRANT, b"*0\r\n")
    with pytest.raises(LockTaken):
        three.lock("r").acquire()
