"""The simulated broker runs the scripts of worker leases as a real server does.

Hypothesis makes the commands. Times that a script writes are compared as "now".
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis, ResponseError

from celery_redlock.tasks.recovery.ledger import BEAT_SCRIPT, DECLARE_DEAD, MOVE
from celery_redlock.testing import EmbeddedNode
from tests.simulation.broker import Broker, engine, text_of
from tests.simulation.world import World

EXAMPLES = 200 if "CELERY_REDLOCK_SCHEDULES" in os.environ else 40  # more in CI
EPOCH_MS = 10**12  # below the ms since 1970
AHEAD = "9000000000000000"  # ms of no clock
LEASES, DEAD, NAMES, UNACKED, INDEX = "leases", "dead", "names", "unacked", "index"
FIRST = [
    *(("HSET", UNACKED, (tag, "m")) for tag in ("t1", "t2", "t3")),
    *(("ZADD", INDEX, ("7", tag)) for tag in ("t1", "t2")),
    ("LPUSH", "shop", ("m3",)), ("ZADD", "leases", ("7", "a")), ("ZADD", "dead", ("0", "c")),
]  # fmt: skip
LISTS = ("shop", "shop3", "wrong")  # of the last another program has made a text

leases = st.sampled_from(["a", "b", "c"])
lists = st.sampled_from(LISTS)
tags = st.sampled_from(["t1", "t2", "t3"])
scores = st.sampled_from(["0", "7", "8.5", AHEAD])
beats = st.tuples(
    st.just(BEAT_SCRIPT),
    st.just((LEASES, DEAD, NAMES)),
    st.tuples(
        leases,
        st.sampled_from(["", "w1"]),
        st.sampled_from(["1500", "600000000"]),
        st.sampled_from(["", "3000", "600000000", str(2**53)]),
    ),
)
declarations = st.tuples(
    st.just(DECLARE_DEAD),
    st.just((LEASES, DEAD)),
    st.tuples(leases, st.sampled_from(["", "7", "8.5", AHEAD]), st.sampled_from("01")),
)
moved = st.lists(st.tuples(lists, tags, st.sampled_from(["m1", "m2"])), max_size=3)
moves = st.tuples(moved, st.sampled_from(["", "a", "b"])).map(
    lambda drawn: (
        MOVE,
        (UNACKED, INDEX, DEAD, *(name for name, _, _ in drawn[0])),
        (drawn[1], *(word for _, *words in drawn[0] for word in words)),
    )
)
changes = st.one_of(
    st.tuples(st.just("ZADD"), st.sampled_from([LEASES, DEAD]), st.tuples(scores, leases)),
    st.tuples(st.just("ZREM"), st.sampled_from([LEASES, DEAD]), st.tuples(leases)),
    st.tuples(st.just("HSET"), st.just(UNACKED), st.tuples(tags, st.just("m"))),
    st.tuples(st.just("HDEL"), st.just(UNACKED), st.tuples(tags)),
    st.tuples(st.just("ZADD"), st.just(INDEX), st.tuples(scores, tags)),
    st.tuples(st.just("LPUSH"), st.sampled_from(LISTS[:2]), st.tuples(st.just("m3"))),
)


@pytest.fixture(scope="module")
def client() -> Iterator[Redis]:
    with EmbeddedNode() as made:
        yield made.client()


def comparable(reply: Any) -> Any:
    """Return a reply without what differs by the clock."""
    if isinstance(reply, (list, tuple)):
        return [comparable(one) for one in reply]
    if isinstance(reply, ResponseError):
        return "an error"
    text = text_of(reply)
    is_now = text.isascii() and text.isdecimal() and text != AHEAD and int(text) > EPOCH_MS
    return "now" if is_now else text


def kept(client: Redis) -> dict[str, Any]:
    """Return what a real server keeps."""
    sets = {
        name: sorted((text_of(member), comparable(f"{score:.17g}")) for member, score in found)
        for name in (LEASES, DEAD, INDEX)
        if (found := client.zrange(name, 0, -1, withscores=True))
    }
    hashes = {
        name: {text_of(field): text_of(value) for field, value in found.items()}
        for name in (NAMES, UNACKED)
        if (found := client.hgetall(name))
    }
    queued = {name: [text_of(one) for one in client.lrange(name, 0, -1)] for name in LISTS[:2]}
    return {**sets, **hashes, **queued}


def simulated(broker: Broker) -> dict[str, Any]:
    """Return what a simulated one keeps."""
    sets = {
        name: sorted((member, comparable(f"{score:.17g}")) for member, score in found.items())
        for name in (LEASES, DEAD, INDEX)
        if (found := broker.sets.get(name))
    }
    hashes = {name: found for name in (NAMES, UNACKED) if (found := broker.hashes.get(name))}
    return {**sets, **hashes, **{name: broker.lists.get(name, []) for name in LISTS[:2]}}


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.one_of(beats, declarations, moves, changes), max_size=20))
def test_a_simulated_broker_answers_and_keeps_what_a_real_server_does(
    client: Redis, calls: list[Any]
) -> None:
    client.flushall()
    client.set(LISTS[2], "of another program")
    broker = Broker(World(0))
    broker.refusing.add(LISTS[2])
    for what, keys, words in [*FIRST, *calls]:
        if isinstance(what, bytes):
            real = client.eval(what, len(keys), *keys, *words)
            made = engine().run(broker, what, list(keys), list(words))
        else:
            real, made = client.execute_command(what, keys, *words), broker.call(what, keys, *words)
        if what == MOVE:  # the text of an error is the server's
            real[1], made[1] = bool(real[1]), bool(made[1])
        assert comparable(real) == comparable(made)
        assert kept(client) == simulated(broker)
