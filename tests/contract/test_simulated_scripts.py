"""The simulated server runs the shipped scripts as a real one does: same replies, same keys.

Hypothesis makes the commands. What is left of a ttl is compared within what a busy machine needs.
"""

from __future__ import annotations

import os
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
)
from celery_redlock.lock.server.scripts import BREAK, GRANT, GUARD, RELEASE, RENEW, TRUST
from celery_redlock.lock.transport.script import Script
from celery_redlock.tasks.unique.rounds import UNIQUE
from celery_redlock.testing import EmbeddedNode
from tests.simulation.nodes import Node, library
from tests.simulation.world import World

EXAMPLES = 100 if "CELERY_REDLOCK_SCHEDULES" in os.environ else 20  # as of schedules: more in CI
SLACK = 20_000  # ms of a ttl; those below are far apart, and far longer
LOCK = lock_key("redlock", "r")
RUN, QUIET = guard_keys("redlock")
FENCE, BROKEN = fence_key("redlock"), broken_key(LOCK, "t1:one")
DONE = completion_key("redlock", "1:t:0:0")
OTHER = lock_key("redlock", "other")
TENURE, ELSEWHERE = tenure_key("redlock"), tenure_key("redlock", "other:6379")
KEYS = (LOCK, OTHER, RUN, QUIET, FENCE, BROKEN, DONE)

values = st.sampled_from(["t1:one", "t2:two", "t3"])
# a renewal tells its ttl from what is left, within a ms: so it is given none that is an error
good_ttls = st.sampled_from(["100000", "300000"])
ttls = st.one_of(good_ttls, st.sampled_from(["100000.0", "0"]))
runs = st.sampled_from(["", "run1", "run2"])
tenures = st.sampled_from(["", "0 run1", "5000000000000 run1", "5000000000000 run2"])
silences = st.sampled_from(["0", "200000", "500000"])
tokens = st.sampled_from(["", "0", "7", "1700000000000000", "4503599627370496"])
marks = st.sampled_from(["1700000000000", "1700000000001"])
Call = tuple[Script, tuple[str, ...], tuple[str, ...]]

calls: st.SearchStrategy[Call] = st.one_of(
    st.tuples(
        st.just(GRANT),
        st.sampled_from([(LOCK, RUN, QUIET, FENCE), (LOCK, RUN, QUIET, FENCE, DONE)]),
        st.tuples(values, ttls, tokens, runs, silences, silences),
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
        st.just((LOCK,)),
        st.tuples(values, st.sampled_from(["", "ch"])),
    ),
    st.tuples(
        st.just(RELEASE),
        st.just((LOCK, DONE)),
        st.tuples(values, st.just(""), marks, good_ttls),
    ),
    st.tuples(
        st.just(GUARD),
        st.just((RUN, QUIET, TENURE, ELSEWHERE)),
        st.tuples(
            st.sampled_from(["run1", "run2"]), silences, silences, tenures, good_ttls, tenures
        ),
    ),
    st.tuples(
        st.just(TRUST),
        st.just((RUN, QUIET, TENURE)),
        st.tuples(st.sampled_from(["run1", "run2"])),
    ),
    st.tuples(st.just(BREAK), st.just((LOCK, BROKEN)), st.tuples(values, good_ttls, st.just("ch"))),
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
    st.tuples(st.just("SET"), st.sampled_from([LOCK, OTHER]), values),
    st.tuples(st.just("SET"), st.just(BROKEN), values),
    st.tuples(st.just("SET"), st.just(DONE), st.sampled_from(["1700000000002", "garbage"])),
    st.tuples(st.just("SET"), st.just(FENCE), st.sampled_from(["9007199254740990", "5"])),
)


@pytest.fixture
def real(nodes: list[EmbeddedNode]) -> Redis:
    return nodes[0].client()


@pytest.mark.slow
@settings(max_examples=5 * EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(calls, changes), min_size=1, max_size=12))
def test_a_simulated_server_answers_and_remembers_as_a_real_one(
    real: Redis, steps: list[Any]
) -> None:
    real.flushall()
    node = Node(World(0), 0, rate=1.0, offset=1000.0, scripts=library())
    for step in steps:
        if isinstance(step[0], Script):
            expected, found = by_real(real, step), by_simulated(node, step)
            assert same(expected, found), (step[1:], expected, found)
        else:
            change(real, node, step)
        assert_same_keys(real, node)


def by_real(real: Redis, call: Call) -> Any:
    script, keys, arguments = call
    try:
        return real.eval(script.source.decode(), len(keys), *keys, *arguments)
    except ResponseError as error:
        return error


def by_simulated(node: Node, call: Call) -> Any:
    script, keys, arguments = call
    words = ["EVAL", script.source.decode(), str(len(keys)), *keys, *arguments]
    _, reply = node.execute([word.encode() for word in words])
    return parsed(reply)


def parsed(reply: bytes) -> Any:
    reader = hiredis.Reader(encoding="utf-8")
    reader.feed(reply)
    return reader.gets()


def same(expected: Any, found: Any) -> bool:
    """Tell whether two replies say the same, but for some ms of what is left."""
    if isinstance(expected, ResponseError):
        first = str(expected).partition(" script: ")[0]
        return isinstance(found, hiredis.ReplyError) and str(found).endswith(first)
    if isinstance(expected, list):
        return len(expected) == len(found) and all(map(same, expected, found))
    if isinstance(expected, str) and isinstance(found, str) and expected != found:
        return without_now(expected) == without_now(found)
    if isinstance(expected, int) and 1000 < expected < 1_000_000:
        return abs(expected - int(found)) < SLACK
    return bool(expected == found)


def without_now(text: str) -> str:
    """Return a tenure without when it began, if that is a server's own time."""
    since, _, run_id = text.partition(" ")
    is_now = since.isdecimal() and 1000 < int(since) < 5_000_000_000_000
    return run_id if run_id and is_now else text


def change(real: Redis, node: Node, step: tuple[str, str, str]) -> None:
    command, key, value = step
    if command == "DEL":
        real.delete(key)
        node.drop(key.encode())
    else:
        real.set(key, value, px=300_000)
        node.put(key.encode(), value.encode(), 300.0)


def assert_same_keys(real: Redis, node: Node) -> None:
    for key in KEYS:
        value, left = node.look(key.encode())
        assert real.get(key) == (None if value is None else value.decode()), key
        assert abs(int(real.pttl(key)) - left) < SLACK, key
    for key in (TENURE, ELSEWHERE):
        value, left = node.look(key.encode())
        assert same(real.get(key), None if value is None else value.decode()), key
        assert abs(int(real.pttl(key)) - left) < SLACK, key


def by_command(real: Redis, *words: str) -> Any:
    try:
        return real.execute_command(*words)
    except ResponseError as error:
        return error


commands = st.one_of(
    st.tuples(st.just("SET"), st.sampled_from([LOCK, OTHER]), values),
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
    real: Redis, steps: list[tuple[str, ...]]
) -> None:
    real.flushall()
    # as they come, without what redis-py makes of them
    real.response_callbacks.clear()
    node = Node(World(0), 0, rate=1.0, offset=1000.0, scripts=library())
    for step in steps:
        expected = by_command(real, *step)
        found = parsed(node.execute([word.encode() for word in step])[1])
        if step[0] == "KEYS":
            expected, found = sorted(expected), sorted(found)
        expected = "OK" if expected is True else expected
        assert same(expected, found), (step, expected, found)
