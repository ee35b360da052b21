"""The simulated server runs the shipped scripts as a real one does: same replies, same keys.

Hypothesis makes the commands. What is left of a ttl is compared within what a busy machine needs.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
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
    name_of_rate,
    order_key,
    rate_keys,
    tenure_key,
    unique_key,
    waiting_key,
)
from celery_redlock.lock.server.requests import (
    BREAK,
    CANCEL,
    GRANT,
    GUARD,
    MARKER,
    NEWEST,
    PERMIT,
    RECORD,
    REGISTER,
    RELEASE,
    RENEW,
    TAKE,
    TRUST,
    UNIQUE,
)
from celery_redlock.lock.transport.command import Script
from celery_redlock.testing import EmbeddedNode
from tests.contract.servers import RealEar, real, simulated
from tests.simulation.nodes import Node, library
from tests.simulation.world import World

EXAMPLES = 100 if "CELERY_REDLOCK_SCHEDULES" in os.environ else 20  # as of schedules: more in CI
EPOCH_MS = 10**12  # below the ms since 1970, and no other number of a reply is about as large
BEFORE = "before:"  # of the fields that keep an earlier start, with its time: lua/starts.lua
SLACK = 20_000  # ms of a ttl; those below are far apart, and far longer
LOCK = lock_key("redlock", "r")
RUN, QUIET = guard_keys("redlock")
FENCE, BROKEN = fence_key("redlock"), broken_key(LOCK, "t1:one")
DONE = completion_key("redlock", "1:t:0:0")
OTHER = lock_key("redlock", "other")
CLAIM, ORDER = unique_key("redlock", "t:r"), order_key("redlock", "t:r")
PERMITS = [LOCK, *(lock_key("redlock", "r", permit) for permit in (1, 2))]
TENURE, ELSEWHERE = tenure_key("redlock"), tenure_key("redlock", "other:6379")
KEYS = (*PERMITS, OTHER, RUN, QUIET, FENCE, BROKEN, DONE, CLAIM, ORDER)
WAITING, INBOX = waiting_key("redlock", "r"), "inbox:"
TAKEN, TOKENS = rate_keys("redlock", "r")
RATE_WAITING = waiting_key("redlock", name_of_rate("r"))

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
expected_values = st.sampled_from(["", "t1", "t2:"])
new_values = st.sampled_from(["", "t1:one", "t2:two"])
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
        st.tuples(waiters, scores, good_ttls, passes, st.just(INBOX), limits, st.just("")),
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
        st.one_of(
            st.tuples(
                expected_values, new_values, st.sampled_from(["200000", "400000"]), good_ttls
            ),
            st.tuples(expected_values, new_values, st.just(""), st.just("")),
            st.tuples(expected_values, st.just(""), st.just("back"), st.just("")),
        ),
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
    st.tuples(
        st.just("SET"), st.just(DONE), st.sampled_from(["600000", "-600000 7f3a", "garbage"])
    ),
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


class Ears:
    """Subscribers of a real server and of a simulated one, and what both have heard."""

    def __init__(self, port: int, node: Node, channels: list[tuple[str, ...]]) -> None:
        self._real = [RealEar(port, names) for names in channels]
        self._by_simulated: list[tuple[str, str]] = []
        for names in channels:
            node.subscriptions[SimulatedEar(self._by_simulated)] = {name.encode() for name in names}

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


# ms for which a start counts, and of its age: a busy machine passes none of the steps between them
kept, ages = st.sampled_from(["100000", "300000"]), st.sampled_from(["0", "50000", "200000"])
permits, asked = st.sampled_from(["1", "3"]), st.sampled_from(["", "0", "2"])
rate_calls: st.SearchStrategy[Call] = st.one_of(
    st.tuples(
        st.just(TAKE),
        st.just((TAKEN, TOKENS, RUN, QUIET, TENURE)),
        st.tuples(
            waiters,
            permits,
            kept,
            st.sampled_from("02"),
            asked,
            st.sampled_from("01"),
            runs,
            silences,
        ),
    ),
    st.tuples(
        st.just(CANCEL),
        st.just((TAKEN, TOKENS, RATE_WAITING)),
        st.tuples(st.one_of(waiters, st.just("")), asked, st.just(INBOX), kept),
    ),
    st.tuples(
        st.just(RECORD),
        st.just((TAKEN, TOKENS)),
        st.tuples(waiters, st.sampled_from(["0", "2"]), kept, ages),
    ),
    st.tuples(
        st.just(REGISTER),
        st.just((RATE_WAITING, TAKEN)),
        st.tuples(waiters, scores, good_ttls, passes, st.just(INBOX), permits, kept),
    ),
)
rate_changes = st.one_of(
    st.tuples(st.just("DEL"), st.sampled_from([TAKEN, TOKENS, RATE_WAITING, QUIET]), st.just("")),
    st.tuples(st.just("SET"), st.sampled_from([TAKEN, TOKENS]), st.just("of another program")),
    st.tuples(st.just("SET"), st.just(TENURE), st.sampled_from(["7 run1", "5000000000000 run1"])),
    st.tuples(st.just("SET"), st.just(RUN), st.just("run1")),
)


@settings(max_examples=5 * EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(rate_calls, rate_calls, rate_changes), max_size=16), listeners)
def test_a_simulated_server_counts_the_starts_of_a_rate_as_a_real_one(
    client: Redis, steps: list[Any], channels: list[tuple[str, ...]]
) -> None:
    compare(client, steps, channels)


# sends in an order: their tokens and numbers, and ms that are far apart, too
queued, numbers = st.sampled_from(["t1", "t2", "t3"]), st.sampled_from("12345")
ONGOING = "8000000000000 8000000000000"  # of a burst that begins, and a line that ends, later
lines = st.sampled_from(
    [
        "other",
        "t1:sent:r1 7 8",
        f"t1:sent:r1 {ONGOING}\nt2:sent:r2 {ONGOING}",
        f"t3:sent:r3 4 {ONGOING}\nt2:sent:r2 {ONGOING}\nt1:sent:r1 1 {ONGOING}",
    ]
)
newest_words = st.one_of(
    st.tuples(
        st.just("send"),
        st.sampled_from(["", "", "t1", "t2", "t3"]),
        st.sampled_from(["", "t1:sending:r1", "t2:sending:r2", "t3:sending:r3"]),
        numbers,
        st.just("100000"),
        good_ttls,
        st.sampled_from(["0", "1", "3", "5"]),
    ),
    queued.flatmap(
        lambda token: st.tuples(
            st.just("sent"),
            st.just(token),
            st.just(f"{token}:sent:r{token[1]}"),
            st.sampled_from(["200000", "400000"]),
            st.sampled_from(["0", "90000"]),
            st.one_of(st.just(""), queued),
            st.sampled_from(["0", "1", "3"]),
            st.one_of(st.just(""), queued),
            st.sampled_from(["0", "1", "2"]),
            st.sampled_from(["300000", "900000"]),
        )
    ),
    st.tuples(st.just("end"), queued),
    st.tuples(st.just("start"), queued, numbers, st.sampled_from(["an id", ""]), good_ttls),
)
newest_calls = st.one_of(
    *[st.tuples(st.just(NEWEST), st.just((CLAIM, ORDER)), newest_words)] * 6,
    st.tuples(st.just("DEL"), st.sampled_from([CLAIM, ORDER]), st.just("")),
    st.tuples(st.just("SET"), st.just(CLAIM), lines),
)


@settings(max_examples=5 * EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(newest_calls, max_size=16))
def test_a_simulated_server_keeps_the_order_of_sends_as_a_real_one(
    client: Redis, steps: list[Any]
) -> None:
    compare(client, steps, [])


registrations = st.tuples(
    st.just(REGISTER),
    st.sampled_from([(WAITING,), (WAITING, LOCK)]),
    st.tuples(waiters, scores, good_ttls, passes, st.just(INBOX), st.just("1"), st.just("")),
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
            assert_same_keys(client, node)
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
    if isinstance(expected, list) and [type(one) for one in expected[:3]] == [int, str, int]:
        # of lua/unique.lua, lua/newest.lua: ms that have passed since the first send
        is_near = abs(expected.pop(2) - int(found.pop(2))) < SLACK
        return is_near and same(expected, found)
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
    """Return a tenure or a claim without the server's own times that it names."""
    text = re.sub(r" \d{13}\b", "", text)
    since, _, run_id = text.partition(" ")
    is_now = since.isdecimal() and 1000 < int(since) < 5_000_000_000_000
    return run_id if run_id and is_now else text


def looks_of(name: str, keys: tuple[str, ...], *more: str) -> tuple[tuple[str, ...], ...]:
    return tuple((name, key, *more) for key in keys)


MEMBERS = "0", "-1", "WITHSCORES"
TEXTS, WAITERS = (*KEYS, TENURE, ELSEWHERE), (WAITING, RATE_WAITING)
ALL_KEYS = (*TEXTS, *WAITERS, TAKEN, TOKENS)
SETS_OF_WAITERS, TIMES, STARTS = (
    looks_of("ZRANGE", WAITERS, *MEMBERS),
    ("ZRANGE", TAKEN, *MEMBERS),
    ("HGETALL", TOKENS),
)
# what is looked at after each step, with one request to the real server
LOOK = (
    *looks_of("GET", TEXTS), *SETS_OF_WAITERS, TIMES, STARTS, ("TIME",),
    *looks_of("PTTL", ALL_KEYS),
)  # fmt: skip
Seen = dict[tuple[str, ...], Any]


def assert_same_keys(client: Redis, node: Node) -> None:
    pipeline = client.pipeline(transaction=False)
    for words in LOOK:
        pipeline.execute_command(*words)
    expected: Seen = dict(zip(LOOK, pipeline.execute(raise_on_error=False), strict=True))
    server = simulated(node)
    found: Seen = {words: server(*words) for words in LOOK}
    for words in looks_of("GET", TEXTS):
        assert same(expected[words], found[words]), words
    for words in SETS_OF_WAITERS:
        assert same_set(expected[words], found[words]), words
    assert same_starts(expected, found)
    for words in looks_of("PTTL", ALL_KEYS):
        assert abs(expected[words] - found[words]) < SLACK, words


def same_starts(expected: Seen, found: Seen) -> bool:
    """Tell whether both servers have the same permits, of the same tokens, and as old."""
    for words in (STARTS, TIMES):
        if isinstance(expected[words], ResponseError):
            return same(expected[words], found[words])
    ages, of_simulated = ages_of(expected), ages_of(found)
    alike = all(abs(age - of_simulated.get(name, math.inf)) < SLACK for name, age in ages.items())
    tokens = owners_of(expected) == owners_of(found)
    return tokens and ages.keys() == of_simulated.keys() and alike


def ages_of(seen: Seen) -> dict[str, float]:
    """Return the age of each permit in ms, by the server's own time."""
    seconds, microseconds = seen["TIME",]
    now = int(seconds) * 1000 + int(microseconds) / 1000
    earlier = [(name, text) for name, text in pairs_of(seen[STARTS]) if name.startswith(BEFORE)]
    began = [(name, float(text.partition(" ")[0])) for name, text in earlier]
    return {name: now - at for name, at in (*pairs_of(seen[TIMES]), *began)}


def owners_of(seen: Seen) -> list[tuple[str, Any]]:
    """Return whose each permit is, and was before, without the times at which it was taken."""
    pairs = pairs_of(seen[STARTS])
    return [
        (name, text.partition(" ")[2] if name.startswith(BEFORE) else text) for name, text in pairs
    ]


def pairs_of(reply: Any) -> list[tuple[str, Any]]:
    """Return the pairs of a reply to HGETALL, or to ZRANGE with scores, in either protocol."""
    if isinstance(reply, dict):
        return list(reply.items())
    if reply and isinstance(reply[0], list):
        return [(name, float(score)) for name, score in reply]
    pairs = list(zip(reply[::2], reply[1::2], strict=True))
    return [(name, float(text) if text.isdecimal() else text) for name, text in pairs]


def same_set(expected: Any, found: Any) -> bool:
    """Tell whether two replies to ZRANGE with scores say the same, or the same error."""
    if isinstance(expected, ResponseError):
        return same(expected, found)
    pairs = list(zip(found[::2], map(float, found[1::2]), strict=True))
    return pairs == [tuple(pair) for pair in expected]


places = st.sampled_from(["0", "1", "-1", "-2", "-9", "9", "x"])
withscores = st.sampled_from(["WITHSCORES", "withscores", "LIMIT"])
bounds = st.sampled_from(["7", "(7", "-inf", "+inf", "1700000000.123", "(1700000000.124", "x", "("])
field_names = st.sampled_from(["0", "1", "a b"])
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
    st.tuples(st.just("ZRANGEBYSCORE"), st.sampled_from(["scores", LOCK]), bounds, bounds),
    st.tuples(st.just("ZRANGEBYSCORE"), st.just("scores"), bounds, bounds, withscores),
    st.tuples(st.just("HSET"), st.sampled_from(["fields", LOCK, "scores"]), field_names, values),
    st.tuples(st.just("HSET"), st.just("fields"), field_names, values, field_names, values),
    st.tuples(st.just("HSET"), st.just("fields"), field_names, values, field_names),
    st.tuples(st.just("HDEL"), st.sampled_from(["fields", LOCK]), field_names),
    st.tuples(st.just("HDEL"), st.just("fields"), field_names, field_names),
    st.tuples(st.just("HGET"), st.sampled_from(["fields", "scores"]), field_names),
    st.tuples(st.sampled_from(["HGETALL", "ZCARD", "GET", "PTTL", "DEL"]), st.just("fields")),
    st.tuples(st.just("ZADD"), st.just("fields"), scores, waiters),
    st.tuples(st.just("PEXPIRE"), st.just("fields"), st.sampled_from(["100000", "0"])),
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
        if step[0] == "HGETALL" and isinstance(expected, dict):
            expected = [word for pair in expected.items() for word in pair]
        alike = same_set if len(step) == 5 and step[0].startswith("ZRANGE") else same
        assert alike(expected, found), (step, expected, found)
