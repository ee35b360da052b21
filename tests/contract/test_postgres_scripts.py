"""The functions of a PostgreSQL node do what the Lua scripts do on Redis: same replies, same keys.

Hypothesis makes the commands. What is left of a ttl is compared within what a busy machine needs.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hiredis
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis, ResponseError

from celery_redlock.lock.model.keys import lock_key
from celery_redlock.lock.postgres.address import address_of
from celery_redlock.lock.server.error_hints import hint_of
from celery_redlock.lock.server.requests import (
    FENCE,
    GRANT,
    GUARD,
    PERMIT,
    RECORD,
    REGISTER,
    RELEASE,
    RENEW,
    TAKE,
    TRUST,
)
from celery_redlock.testing import EmbeddedNode
from tests.contract import test_simulated_scripts as simulated
from tests.contract.postgres_calls import PostgresEar, postgres
from tests.contract.servers import RealEar, real
from tests.contract.test_simulated_scripts import (
    BROKEN,
    DONE,
    ELSEWHERE,
    EXAMPLES,
    INBOX,
    KEYS,
    LOCK,
    OTHER,
    QUIET,
    RATE_WAITING,
    RUN,
    SLACK,
    TAKEN,
    TENURE,
    TOKENS,
    WAITING,
    good_ttls,
    listeners,
    pairs_of,
    passes,
    runs,
    same,
    scores,
    silences,
    tokens,
    values,
    waiters,
    words_of,
)
from tests.postgres import PostgresNode, standing_node

pytestmark = pytest.mark.postgresql


@pytest.fixture(scope="module")
def postgres_node(postgres_template: Path) -> Iterator[PostgresNode]:
    """Give a node that keeps what the test before has left."""
    with standing_node(postgres_template) as made:
        yield made


STRINGS = (*KEYS, TENURE, ELSEWHERE, *(lock_key("redlock", "r", permit) for permit in (3, 4)))
TIMELINE = "SELECT substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8)"
SETS = (WAITING, RATE_WAITING, TAKEN)
# what is looked at after each step, with one request to each server
LOOK = (
    *(("GET", key) for key in STRINGS),
    *(("ZRANGE", key, "0", "-1", "WITHSCORES") for key in SETS),
    ("HGETALL", TOKENS),
    *(("PTTL", key) for key in (*STRINGS, *SETS, TOKENS)),
)
Step = tuple[Any, Any, Any]

any_values = st.sampled_from(["t1:one", "t2:two", "t3", "!4:hold", "!5:hold"])
any_limits = st.sampled_from("12345")
held_permits = st.sampled_from([lock_key("redlock", "r", permit) for permit in range(5)])
permit_calls = st.one_of(
    st.tuples(
        st.just(PERMIT),
        st.sampled_from([(LOCK, RUN, QUIET), (LOCK, RUN, QUIET, DONE)]),
        st.tuples(
            any_values, good_ttls, any_limits, st.sampled_from("01234"),
            st.sampled_from(["", "", "0", "1", "4"]), runs, silences,
        ),
    ),
    st.tuples(
        st.just(RELEASE),
        st.sampled_from([(LOCK, WAITING), (LOCK, WAITING, DONE)]),
        st.tuples(
            any_values, st.sampled_from(["", INBOX]), any_limits, st.just("900000"), good_ttls
        ),
    ),
    st.tuples(
        st.just(REGISTER),
        st.just((WAITING, LOCK)),
        st.tuples(
            waiters, st.one_of(scores, st.just("0")), good_ttls, passes, st.just(INBOX),
            any_limits, st.just(""),
        ),
    ),
    st.tuples(st.just("DEL"), st.sampled_from([QUIET, DONE]), st.just("")),
    st.tuples(st.sampled_from(["SET", "DEL"]), held_permits, any_values),
    st.tuples(st.just("SET"), st.just(DONE), st.sampled_from(["600000", "-600000"])),
)  # fmt: skip
held = st.sampled_from(
    ["", "0 run1", "7 run1", "4000 run2", "5000000000000 run1", "5000000000000 run2", "x", "7 run3"]
)
guard_calls = st.one_of(
    st.tuples(
        st.just(GUARD),
        st.sampled_from([(RUN, QUIET, TENURE), (RUN, QUIET, TENURE, ELSEWHERE)]),
        st.tuples(st.sampled_from(["run1", "run2"]), silences, held, good_ttls, held),
    ),
    st.tuples(
        st.just(TRUST),
        st.sampled_from([(RUN, QUIET, TENURE), (RUN, QUIET, TENURE, ELSEWHERE)]),
        st.tuples(st.sampled_from(["run1", "run2"])),
    ),
    st.tuples(
        st.just(GRANT),
        st.just((LOCK, RUN, QUIET, simulated.FENCE)),
        st.tuples(values, good_ttls, st.just(""), runs, silences),
    ),
    st.tuples(st.just("SET"), st.sampled_from([TENURE, ELSEWHERE]), held),
    st.tuples(st.just("DEL"), st.sampled_from([RUN, QUIET, TENURE, ELSEWHERE]), st.just("")),
)
counters = st.sampled_from(["5", "x", "", "9007199254740990", "9007199254740991"])
fence_calls = st.one_of(
    st.tuples(
        st.just(FENCE), st.just((simulated.FENCE,)), st.sampled_from([(), ("9", "7"), ("3", "90")])
    ),
    st.tuples(
        st.just(GRANT),
        st.sampled_from(
            [(LOCK, RUN, QUIET, simulated.FENCE), (OTHER, RUN, QUIET, simulated.FENCE)]
        ),
        st.tuples(values, good_ttls, tokens, st.just(""), silences),
    ),
    st.tuples(
        st.just(RENEW),
        st.sampled_from([(LOCK, simulated.FENCE), (LOCK, simulated.FENCE, BROKEN)]),
        st.tuples(values, good_ttls, tokens),
    ),
    st.tuples(
        st.just(RENEW),
        st.just((LOCK, OTHER, simulated.FENCE)),
        st.tuples(values, good_ttls, tokens, values, good_ttls, tokens),
    ),
    st.tuples(st.just("SET"), st.just(simulated.FENCE), counters),
    st.tuples(st.just("DEL"), st.sampled_from([LOCK, OTHER, simulated.FENCE]), st.just("")),
)


@pytest.fixture(scope="module")
def redis_server() -> Iterator[EmbeddedNode]:
    with EmbeddedNode() as made:
        yield made


class Both:
    """A Redis server and a PostgreSQL node that take the same steps."""

    def __init__(self, client: Redis, node: PostgresNode) -> None:
        self._client, self._node = client, node
        self._address = address_of(node.url)
        self._redis, self._postgres = real(client), postgres(self._address)
        (self._run_id,) = node.query("SELECT redlock.run_id()")[0]
        self._tokens: dict[str, str] = {}
        words = [", ".join(f"'\\x{word.encode().hex()}'" for word in words) for words in LOOK]
        looks = [f"redlock.command(array[{each}]::bytea[])" for each in words]
        self._look = f"SELECT {', '.join(looks)}".encode()
        self._looker = node.connect()

    def close(self) -> None:
        self._looker.close()

    def compare(self, steps: list[Step], channels: list[tuple[str, ...]]) -> None:
        """Take the steps on both, and compare replies, keys and messages after each."""
        self._client.flushall()
        self._node.empty()
        with contextlib.ExitStack() as ends:
            ears = []
            for names in channels:
                port = self._client.connection_pool.connection_kwargs["port"]
                pair = RealEar(port, names), PostgresEar(self._address, names, self._postgres)
                ears.append(pair)
                ends.callback(pair[0].close)
                ends.callback(pair[1].close)
            for step in fair(steps):
                self._take(step)
                for one, other in ears:
                    assert one.heard() == other.heard(), step
                if self._has_twice():
                    break

    def _take(self, step: Step) -> None:
        # the node knows its own run id behind other words
        words = [re.sub(r"\brun\d\b", rf"\g<0>-{self._run_id}", word) for word in words_of(step)]
        expected, found = self._redis(*words), self._postgres(*words)
        assert same_reply(expected, found) or words[0] in ("SET", "DEL"), (step, expected, found)
        for (name, key, *_), expected, found in zip(LOOK, *self._seen(), strict=True):
            assert ALIKE[name](key, expected, found), (name, key, step, expected, found)
            if name == "HGETALL":
                self._tokens = tokens_of(expected)

    def _seen(self) -> tuple[list[Any], list[Any]]:
        """Return the replies of both servers to `LOOK`."""
        pipeline = self._client.pipeline(transaction=False)
        for words in LOOK:
            pipeline.execute_command(*words)
        row = self._looker.execute(self._look, prepare=True).fetchone()
        assert row is not None
        reader = hiredis.Reader(encoding="utf-8")
        reader.feed(b"".join(row))
        return pipeline.execute(raise_on_error=False), [reader.gets() for _ in LOOK]

    def _has_twice(self) -> bool:
        """Return whether a token has two permits: which of them Redis finds, is chance."""
        found = [text for field, text in self._tokens.items() if field.isdecimal()]
        return len(found) > len(set(found))


def same_members(key: str, expected: Any, found: Any) -> bool:
    """Tell whether two sets have the same members in the same order, with the same scores."""
    pairs = [(member, float(score)) for member, score in expected]
    other = list(zip(found[::2], map(float, found[1::2]), strict=True))
    near = SLACK if key == TAKEN else 1e-6
    return [member for member, _ in pairs] == [member for member, _ in other] and all(
        abs(score - another) < near for (_, score), (_, another) in zip(pairs, other, strict=True)
    )


def tokens_of(reply: Any) -> dict[str, str]:
    """Return the fields of the hash of tokens, without the server's own times."""
    then = r"\d{13}(\.\d+)?"
    return {field: re.sub(then, "then", str(text)) for field, text in pairs_of(reply)}


ALIKE: dict[str, Callable[[str, Any, Any], bool]] = {
    "GET": lambda _, expected, found: same(expected, found),
    "ZRANGE": same_members,
    "HGETALL": lambda _, expected, found: tokens_of(expected) == tokens_of(found),
    "PTTL": lambda _, expected, found: abs(expected - found) < SLACK,
}


def same_reply(expected: Any, found: Any) -> bool:
    if isinstance(expected, ResponseError):  # the words differ, and mean the same
        return isinstance(found, ResponseError) and hint_of(str(expected)) == hint_of(str(found))
    return not isinstance(found, ResponseError) and same(expected, found)


LONGEST_TTL = "300000"  # ms, of those that the steps have


def fair(steps: list[Step]) -> Iterator[Step]:
    """Yield the steps that mean something on PostgreSQL; each is left out for both servers."""
    known = set[str]()
    for first, second, third in steps:
        if first in (GRANT, PERMIT) and third[1] in ("100000.0", "0"):
            continue  # no client of ours writes such a ttl
        if first in (GRANT, PERMIT):  # PostgreSQL shortens no lease, as a renewal may come between
            third = (third[0], LONGEST_TTL, *third[2:])
        if first == PERMIT and third[4] and third[4] >= third[2]:
            continue  # no client of ours asks for a permit above its limit
        if first == "SET" and third in ("of another program", "garbage"):
            continue  # no other program writes to these tables
        if first in (TAKE, RECORD):
            again = "1" if third[0] in known else "0"  # as a client does
            known.add(third[0])
            third = (*third[:5], again, *third[6:]) if first == TAKE else third
        yield first, second, third


@pytest.fixture
def both(redis_server: EmbeddedNode, postgres_node: PostgresNode) -> Iterator[Both]:
    with contextlib.closing(Both(redis_server.client(), postgres_node)) as made:
        yield made


def differential(steps: st.SearchStrategy[Step], most: int, times: int = 2) -> Any:
    """Return what makes a test of steps. The test is given them, and the subscribers."""

    def decorate(test: Any) -> Any:
        made = given(steps=st.lists(steps, min_size=1, max_size=most), channels=listeners)(test)
        quiet = [HealthCheck.function_scoped_fixture]
        return settings(max_examples=times * EXAMPLES, suppress_health_check=quiet)(made)

    return decorate


Channels = list[tuple[str, ...]]


@differential(st.one_of(simulated.calls, simulated.changes), 12)
def test_postgresql_answers_and_remembers(
    both: Both, steps: list[Step], channels: Channels
) -> None:
    both.compare(steps, channels)


@differential(st.one_of(simulated.rate_calls, simulated.rate_calls, simulated.rate_changes), 16)
def test_postgresql_counts_the_starts(both: Both, steps: list[Step], channels: Channels) -> None:
    both.compare(steps, channels)


@differential(simulated.newest_calls, 16, times=4)
def test_postgresql_keeps_the_order_of_sends(
    both: Both, steps: list[Step], channels: Channels
) -> None:
    both.compare(steps, channels)


@differential(permit_calls, 16)
def test_postgresql_grants_permits(both: Both, steps: list[Step], channels: Channels) -> None:
    both.compare(steps, channels)


@differential(guard_calls, 12)
def test_postgresql_abstains(both: Both, steps: list[Step], channels: Channels) -> None:
    both.compare(steps, channels)


@differential(fence_calls, 12)
def test_postgresql_counts_fencing_tokens(
    both: Both, steps: list[Step], channels: Channels
) -> None:
    both.compare(steps, channels)


registrations = st.one_of(simulated.registrations, simulated.taken, simulated.given_back)


@differential(registrations, 16)
def test_postgresql_names_the_waiters(both: Both, steps: list[Step], channels: Channels) -> None:
    both.compare(steps, channels)
