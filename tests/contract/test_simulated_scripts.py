"""The simulated server runs the shipped scripts as a real one does: same replies, same keys.

Hypothesis makes the commands. What is left of a ttl is compared within what a busy machine needs.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import hiredis
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis, ResponseError

from celery_redlock.lock.model.keys import (
    broken_key,
    completion_key,
    fence_key,
    guard_keys,
    lock_key,
    tenure_key,
    waiting_key,
)
from celery_redlock.lock.server.requests import (
    BREAK,
    GRANT,
    GUARD,
    MARKER,
    PERMIT,
    REGISTER,
    RELEASE,
    RENEW,
    TRUST,
)
from celery_redlock.lock.transport.command import Script, encode_command
from celery_redlock.tasks.unique.rounds import UNIQUE
from celery_redlock.testing import EmbeddedNode
from tests.contract.servers import Command, real, simulated
from tests.simulation.nodes import Node, library
from tests.simulation.world import World

EXAMPLES = 100 if "CELERY_REDLOCK_SCHEDULES" in os.environ else 20  # as of schedules: more in CI
EPOCH_MS = 10**12  # below the ms since 1970, and no other number of a reply is about as large
SLACK = 20_000  # ms of a ttl; those below are far apart, and far longer
LOCK = lock_key("redlock", "r")
RUN, QUIET = guard_keys("redlock")
FENCE, BROKEN = fence_key("redlock"), broken_key(LOCK, "t1:one")
DONE = completion_key("redlock", "1:t:0:0")
OTHER = lock_key("redlock", "other")
PERMITS = [LOCK, *(lock_key("redlock", "r", permit) for permit in (1, 2))]
TENURE, ELSEWHERE = tenure_key("redlock"), tenure_key("redlock", "other:6379")
KEYS = (*PERMITS, OTHER, RUN, QUIET, FENCE, BROKEN, DONE)
WAITING, INBOX = waiting_key("redlock", "r"), "inbox:"

values = st.sampled_from(["t1:one", "t2:two", "t3"])
# a renewal tells its ttl from what is left, within a ms: so it is given none that is an error
good_ttls = st.sampled_from(["100000", "300000"])
ttls = st.one_of(good_ttls, st.sampled_from(["100000.0", "0"]))
runs = st.sampled_from(["", "run1", "run2"])
tenures = st.sampled_from(["", "0 run1", "5000000000000 run1", "5000000000000 run2"])
silences = st.sampled_from(["200000", "500000"])
tokens = st.sampled_from(["", "0", "7", "1700000000000000", "4503599627370496"])
marks = st.sampled_from(["600000", "900000"])  # ms of a marker: far above what is left of it
waiters = st.sampled_from(["w1", "w2", "w3", "w4"])
limits, passes = st.sampled_from(["1", "3"]), st.sampled_from(["0", "1", "2"])
scores = st.sampled_from(["1700000000.123", "1700000000.124", "7", "-0.5"])
Call = tuple[Script, tuple[str, ...], tuple[str, ...]]

calls: st.SearchStrategy[Call] = st.one_of(
    st.tuples(
        st.just(GRANT),
        st.sampled_from([(LOCK, RUN, QUIET, FENCE), (LOCK, RUN, QUIET, FENCE, DONE)]),
        st.tuples(values, ttls, tokens, runs, silences),
    ),
    st.tuples(
        st.just(PERMIT),
        st.sampled_from([(LOCK, RUN, QUIET), (LOCK, RUN, QUIET, DONE)]),
        st.tuples(
            values,
            ttls,
            st.just("3"),
            st.sampled_from("012"),
            st.sampled_from(["", "0", "2"]),
            runs,
            silences,
        ),
    ),
    st.tuples(
        st.just(RENEW),
        st.sampled_from([(LOCK, FENCE), (LOCK, FENCE, BROKEN)]),
        st.tuples(values, good_ttls, tokens),
    ),
    st.tuples(
        st.just(RENEW),
        st.just((LOCK, OTHER, FENCE)),
        st.tuples(values, good_ttls, tokens, values, good_ttls, tokens),
    ),
    st.tuples(
        st.just(RELEASE),
        st.just((LOCK, WAITING)),
        st.tuples(values, st.sampled_from(["", INBOX]), limits),
    ),
    st.tuples(
        st.just(RELEASE),
        st.just((LOCK, WAITING, DONE)),
        st.tuples(values, st.sampled_from(["", INBOX]), limits, marks, good_ttls),
    ),
    st.tuples(
        st.just(REGISTER),
        st.sampled_from([(WAITING,), (WAITING, LOCK)]),
        st.tuples(waiters, scores, good_ttls, passes, st.just(INBOX), limits),
    ),
    st.tuples(
        st.just(GUARD),
        st.just((RUN, QUIET, TENURE, ELSEWHERE)),
        st.tuples(st.sampled_from(["run1", "run2"]), silences, tenures, good_ttls, tenures),
    ),
    st.tuples(
        st.just(TRUST), st.just((RUN, QUIET, TENURE)), st.tuples(st.sampled_from(["run1", "run2"]))
    ),
    st.tuples(
        st.just(BREAK),
        st.just((LOCK, BROKEN, WAITING)),
        st.tuples(values, good_ttls, st.just(INBOX)),
    ),
    st.tuples(st.just(MARKER), st.just((DONE,)), st.just(())),
    st.tuples(
        st.just(UNIQUE),
        st.just((OTHER,)),
        st.tuples(st.sampled_from(["", "t1", "t2:"]), st.sampled_from(["", "t1:one"]), good_ttls),
    ),
)
# what befalls keys from outside: they end, or another program writes them
changes = st.one_of(
    st.tuples(st.just("DEL"), st.sampled_from(KEYS), st.just("")),
    st.tuples(st.just("DEL"), st.sampled_from([TENURE, ELSEWHERE]), st.just("")),
    st.tuples(st.just("SET"), st.sampled_from([TENURE, ELSEWHERE]), st.sampled_from(["7 run3"])),
    st.tuples(st.just("DEL"), st.just(WAITING), st.just("")),
    st.tuples(st.just("SET"), st.just(WAITING), st.just("of another program")),
    st.tuples(st.just("SET"), st.sampled_from([*PERMITS, OTHER]), values),
    st.tuples(st.just("SET"), st.just(BROKEN), values),
    st.tuples(st.just("SET"), st.just(DONE), st.sampled_from(["600000", "-600000", "garbage"])),
    st.tuples(st.just("SET"), st.just(FENCE), st.sampled_from(["9007199254740990", "5"])),
)


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedNode]:
    """Give a server that no other client knows: each key and message on it is of these tests."""
    with EmbeddedNode() as made:
        yield made


@pytest.fixture
def client(server: EmbeddedNode) -> Redis:
    return server.client()


# the clients of a node that subscribe to something
listeners = st.lists(waiters.map(lambda waiter: (INBOX + waiter,)), max_size=4)


class RealEar:
    """A subscriber of a real server."""

    def __init__(self, port: int, channels: tuple[str, ...]) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._reader = hiredis.Reader(encoding="utf-8")
        self._socket.sendall(encode_command("SUBSCRIBE", *channels))
        self.heard()

    def heard(self) -> list[tuple[str, str]]:
        """Return the channels and messages since the last call."""
        self._socket.sendall(encode_command("PING"))
        heard = []
        while (reply := self._next()) != ["pong", ""]:
            if reply[0] == "message":
                heard.append((reply[1], reply[2]))
        return heard

    def _next(self) -> Any:
        while (reply := self._reader.gets()) is False:
            self._reader.feed(self._socket.recv(65536))
        return reply

    def close(self) -> None:
        self._socket.close()


class Ears:
    """Subscribers of a real server and of a simulated one, and what both have heard."""

    def __init__(self, port: int, node: Node, channels: list[tuple[str, ...]]) -> None:
        self._real = [RealEar(port, names) for names in channels]
        self._by_simulated: list[tuple[str, str]] = []
        for names in channels:
            node.ears[SimulatedEar(self._by_simulated)] = {name.encode() for name in names}

    def assert_same(self) -> None:
        by_real = [message for ear in self._real for message in ear.heard()]
        assert sorted(by_real) == sorted(self._by_simulated)
        self._by_simulated.clear()

    def close(self) -> None:
        for ear in self._real:
            ear.close()


class SimulatedEar:
    """A subscriber of a simulated server."""

    def __init__(self, heard: list[tuple[str, str]]) -> None:
        self._heard = heard

    def published(self, channel: bytes, message: bytes) -> None:
        self._heard.append((channel.decode(), message.decode()))


@contextlib.contextmanager
def ears_of(real: Redis, node: Node, channels: list[tuple[str, ...]]) -> Iterator[Ears]:
    made = Ears(real.connection_pool.connection_kwargs["port"], node, channels)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.slow
@settings(max_examples=5 * EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(calls, changes), min_size=1, max_size=12), listeners)
def test_a_simulated_server_answers_and_remembers_as_a_real_one(
    client: Redis, steps: list[Any], channels: list[tuple[str, ...]]
) -> None:
    compare(client, steps, channels)


registrations = st.tuples(
    st.just(REGISTER),
    st.sampled_from([(WAITING,), (WAITING, LOCK)]),
    st.tuples(waiters, scores, good_ttls, passes, st.just(INBOX), st.just("1")),
)
taken = st.just(("SET", LOCK, "t1:one"))
given_back = st.tuples(
    st.just(RELEASE),
    st.just((LOCK, WAITING)),
    st.tuples(st.just("t1:one"), st.just(INBOX), st.just("1")),
)
handed_on = st.lists(st.one_of(registrations, registrations, taken, given_back), max_size=16)


@settings(max_examples=3 * EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(handed_on, listeners)
def test_a_simulated_server_names_the_same_waiters_as_a_real_one(
    client: Redis, steps: list[Any], channels: list[tuple[str, ...]]
) -> None:
    compare(client, steps, channels)


def compare(client: Redis, steps: list[Any], channels: list[tuple[str, ...]]) -> None:
    """Take the same steps on both servers, and compare replies, keys and messages after each."""
    client.flushall()
    node = Node(World(0), 0, rate=1.0, offset=2 * EPOCH_MS / 1000, scripts=library())
    both = real(client), simulated(node)
    with ears_of(client, node, channels) as ears:
        for step in steps:
            words = words_of(step)
            expected, found = [server(*words) for server in both]
            assert same(expected, found), (words[2:], expected, found)
            assert_same_keys(*both)
            ears.assert_same()


def words_of(step: Any) -> tuple[str, ...]:
    """Return the command of a call, or of a change from outside."""
    first, second, third = step
    if isinstance(first, Script):
        return "EVAL", first.source.decode(), str(len(second)), *second, *third
    return (first, second) if first == "DEL" else (first, second, third, "PX", "300000")


def same(expected: Any, found: Any) -> bool:
    """Tell whether two replies say the same, but for some ms of what is left or has passed."""
    if isinstance(expected, ResponseError):
        first = str(expected).partition(" script: ")[0]
        return isinstance(found, hiredis.ReplyError) and str(found).endswith(first)
    if isinstance(expected, float):  # RESP3 has a type for it, which the model does not speak
        return isinstance(found, str) and expected == float(found)
    if isinstance(expected, list):
        return len(expected) == len(found) and all(map(same, expected, found))
    if isinstance(expected, str) and isinstance(found, str) and expected != found:
        return without_now(expected) == without_now(found)
    if isinstance(expected, int) and 1000 < expected < 1_000_000:
        return abs(expected - int(found)) < SLACK
    if isinstance(expected, int) and EPOCH_MS < expected < 5 * EPOCH_MS:  # a server's own time
        return EPOCH_MS < int(found) < 5 * EPOCH_MS
    return bool(expected == found)


def without_now(text: str) -> str:
    """Return a tenure without when it began, if that is a server's own time."""
    since, _, run_id = text.partition(" ")
    is_now = since.isdecimal() and 1000 < int(since) < 5_000_000_000_000
    return run_id if run_id and is_now else text


def assert_same_keys(real: Command, simulated: Command) -> None:
    for key in (*KEYS, TENURE, ELSEWHERE):
        assert same(real("GET", key), simulated("GET", key)), key
    members = ("ZRANGE", WAITING, "0", "-1", "WITHSCORES")
    assert same_set(real(*members), simulated(*members))
    for key in (*KEYS, TENURE, ELSEWHERE, WAITING):
        assert abs(real("PTTL", key) - simulated("PTTL", key)) < SLACK, key


def same_set(expected: Any, found: Any) -> bool:
    """Tell whether two replies to ZRANGE with scores say the same, or the same error."""
    if isinstance(expected, ResponseError):
        return same(expected, found)
    pairs = list(zip(found[::2], map(float, found[1::2]), strict=True))
    return pairs == [tuple(pair) for pair in expected]


places = st.sampled_from(["0", "1", "-1", "-2", "-9", "9", "x"])
withscores = st.sampled_from(["WITHSCORES", "withscores", "LIMIT"])
commands = st.one_of(
    st.tuples(st.just("ZADD"), st.sampled_from(["scores", LOCK]), scores, waiters),
    st.tuples(st.just("ZADD"), st.just("scores"), scores, waiters, scores, waiters),
    st.tuples(st.just("ZADD"), st.just("scores"), st.sampled_from(["nan", "1x", "inf"]), waiters),
    st.tuples(st.just("ZADD"), st.just("scores"), scores, waiters, scores),
    st.tuples(st.just("ZADD"), st.just("scores"), st.just("XX"), scores, waiters),
    st.tuples(st.just("ZREM"), st.sampled_from(["scores", LOCK]), waiters),
    st.tuples(st.just("ZREM"), st.just("scores"), waiters, waiters),
    st.tuples(st.just("ZRANGE"), st.sampled_from(["scores", LOCK]), places, places),
    st.tuples(st.just("ZRANGE"), st.just("scores"), places, places, withscores),
    st.tuples(st.sampled_from(["ZRANK", "ZSCORE"]), st.sampled_from(["scores", LOCK]), waiters),
    st.tuples(st.sampled_from(["ZCARD", "GET", "PTTL", "DEL", "EXISTS"]), st.just("scores")),
    st.tuples(st.just("ZCARD"), st.just(LOCK)),
    st.tuples(st.just("SET"), st.just("scores"), values),
    st.tuples(st.just("SET"), st.just("scores"), values, st.just("GET")),
    st.tuples(st.just("MGET"), st.just(LOCK), st.just("scores")),
    st.tuples(st.just("PEXPIRE"), st.just("scores"), st.sampled_from(["100000", "0"])),
    st.tuples(st.just("PUBSUB"), st.sampled_from(["NUMSUB", "numsub"]), st.just("nobody")),
    st.tuples(st.just("SET"), st.sampled_from([*PERMITS, OTHER]), values),
    st.tuples(st.just("SET"), st.just(LOCK), values, st.just("PX"), good_ttls),
    st.tuples(st.just("SET"), st.just(LOCK), values, st.just("NX")),
    st.tuples(st.just("SET"), st.just(LOCK), values, st.just("XX"), st.just("PX"), good_ttls),
    st.tuples(st.just("SET"), st.just(LOCK), values, st.just("GET")),
    st.tuples(st.just("SET"), st.just(LOCK), values, st.just("HOW")),
    st.tuples(st.sampled_from(["GET", "DEL", "PTTL", "EXISTS"]), st.sampled_from([LOCK, OTHER])),
    st.tuples(st.sampled_from(["DEL", "EXISTS", "MGET"]), st.just(LOCK), st.just(OTHER)),
    st.tuples(st.just("PEXPIRE"), st.just(LOCK), st.sampled_from(["100000", "0"])),
    st.tuples(
        st.just("KEYS"), st.sampled_from(["*", "*lock:r", "{redlock}:[lr]*", "\\{red*", "?"])
    ),
)


@settings(max_examples=3 * EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(commands, min_size=1, max_size=12))
def test_a_simulated_server_takes_plain_commands_as_a_real_one(
    client: Redis, steps: list[tuple[str, ...]]
) -> None:
    client.flushall()
    node = Node(World(0), 0, rate=1.0, offset=1000.0, scripts=library())
    for step in steps:
        expected, found = real(client)(*step), simulated(node)(*step)
        if step[0] == "KEYS":
            expected, found = sorted(expected), sorted(found)
        alike = same_set if len(step) == 5 and step[0] == "ZRANGE" else same
        assert alike(expected, found), (step, expected, found)
