"""What the headers of a rate's scripts promise, on a real server and on a simulated one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis

from celery_redlock.lock.model.keys import (
    guard_keys,
    inbox_channel,
    name_of_rate,
    rate_keys,
    tenure_key,
    waiting_key,
)
from celery_redlock.lock.server.requests import CANCEL, RECORD, REGISTER, TAKE
from celery_redlock.testing import EmbeddedNode
from tests.contract.servers import Command, RealEar, real, simulated
from tests.simulation.nodes import Node, library
from tests.simulation.world import World

TAKEN, TOKENS = rate_keys("redlock", "r")
RUN, QUIET = guard_keys("redlock")
TENURE = tenure_key("redlock")
WAITING = waiting_key("redlock", name_of_rate("r"))
INBOX = inbox_channel("redlock", "")
KEPT = 300_000  # ms for which a start counts: far above what a test takes
ALMOST, OVER = KEPT - 60_000, KEPT + 60_000  # ms of age: a start counts, and counts no more
STALL = 20_000  # ms that a busy machine may take for a test
GUARD = ("run-2", "61000")  # the run id, and ms of the grace period


@pytest.fixture(scope="module")
def node() -> Iterator[EmbeddedNode]:
    with EmbeddedNode() as server:
        yield server


@pytest.fixture
def client(node: EmbeddedNode) -> Redis:
    client = node.client()
    client.flushall()
    return client


class Rate:
    """One rate on a server, and what its scripts reply. A request is sent by hand."""

    def __init__(self, server: Command) -> None:
        self.server = server

    def _run(self, script: Any, keys: list[str], *args: object) -> Any:
        words = map(str, args)
        return self.server("EVAL", script.source.decode(), str(len(keys)), *keys, *words)

    @property
    def now(self) -> int:
        """The ms since 1970 by the server's clock."""
        seconds, microseconds = self.server("TIME")
        return int(seconds) * 1000 + int(microseconds) // 1000

    def has(self, **ages: int) -> None:
        """Store starts: the permit `p0` of the token `t0`, ms old."""
        for name, age in ages.items():
            self.server("ZADD", TAKEN, str(self.now - age), name[1:])
            self.server("HSET", TOKENS, name[1:], "t" + name[1:])
        for key in (TAKEN, TOKENS):
            self.server("PEXPIRE", key, "3600000")

    def take(
        self,
        token: str = "mine",
        permits: int | str = 3,
        first: int = 0,
        asked: str = "",
        again: bool = False,
        guard: tuple[str, str] = ("", ""),
        kept: int = KEPT,
    ) -> Any:
        keys = [TAKEN, TOKENS, RUN, QUIET, TENURE]
        return self._run(TAKE, keys, token, permits, kept, first, asked, int(again), *guard)

    def cancel(self, token: str = "mine", permit: str = "") -> Any:
        return self._run(CANCEL, [TAKEN, TOKENS, WAITING], token, permit, INBOX, KEPT)

    def record(self, permit: int, age: int, token: str = "mine") -> Any:
        return self._run(RECORD, [TAKEN, TOKENS], token, permit, KEPT, age)

    def register(self, waiter: str, since: int, permits: int) -> Any:
        keys, since_text = [WAITING, TAKEN], f"{since}.000"
        return self._run(REGISTER, keys, waiter, since_text, 60_000, 0, INBOX, permits, KEPT)

    @property
    def tokens(self) -> dict[str, str]:
        """The token of each permit."""
        reply = self.server("HGETALL", TOKENS)
        pairs = reply if isinstance(reply, dict) else dict(zip(*[iter(reply)] * 2, strict=True))
        return {permit: token for permit, token in sorted(pairs.items()) if permit.isdecimal()}

    def age(self, permit: int) -> float:
        """The ms since a permit was taken; inf if it has no time."""
        score = self.server("ZSCORE", TAKEN, str(permit))
        return float("inf") if score is None else self.now - float(score)


@pytest.fixture(params=["real", "simulated"])
def server(request: pytest.FixtureRequest) -> Command:
    """Give an empty server, to which a test gives commands."""
    if request.param == "real":
        return real(request.getfixturevalue("client"))
    return simulated(Node(World(0), 0, rate=1.0, offset=time.time(), scripts=library()))


@pytest.fixture
def rate(server: Command) -> Rate:
    return Rate(server)


def fresh(rate: Rate, *permits: int) -> bool:
    """Return whether permits were taken just now, and all others long ago or never."""
    return all((rate.age(permit) < STALL) == (permit in permits) for permit in range(3))


@pytest.mark.parametrize(
    ("least", "most", "found"),
    [("7", "8", "ab"), ("(7", "8", "b"), ("7", "(8", "a"), ("(8", "9", "")],
)
def test_a_bound_of_times_may_leave_itself_out(
    server: Command, least: str, most: str, found: str
) -> None:
    server("ZADD", TAKEN, "7", "a", "8", "b")
    assert server("ZRANGEBYSCORE", TAKEN, least, most) == list(found)


class TestTake:
    def test_the_first_free_one_from_a_given_one_on(self, rate: Rate) -> None:
        assert rate.take(first=1) == [1, 1, "000", 0]
        assert fresh(rate, 1)
        assert rate.tokens == {"1": "mine"}
        assert rate.take("other", first=1) == [1, 2, "010", 0]
        assert rate.take("third", first=1) == [1, 0, "011", 0]

    def test_the_rate_is_stored_for_people(self, rate: Rate) -> None:
        assert rate.take(permits="3/h") == [1, 0, "000", 0]
        assert rate.server("HGET", TOKENS, "rate") == f"{KEPT} 3/h"
        assert rate.take("other", permits="2/10 s") == [1, 1, "10", 0]
        assert rate.server("HGET", TOKENS, "rate") == f"{KEPT} 2/10 s"

    def test_one_that_is_old_enough_is_free_and_gets_the_new_token(self, rate: Rate) -> None:
        rate.has(p0=ALMOST, p1=OVER, p2=0)
        assert rate.take() == [1, 1, "101", 0]
        assert fresh(rate, 1, 2)
        assert rate.tokens == {"0": "t0", "1": "mine", "2": "t2"}

    def test_a_refusal_says_when_the_first_is_free_and_changes_nothing(self, rate: Rate) -> None:
        rate.has(p0=0, p1=ALMOST, p2=100_000)
        refused, ms, view, young = rate.take()
        assert (refused, view, young) == (0, "111", 0)
        assert KEPT - ALMOST - STALL < ms <= KEPT - ALMOST
        assert rate.tokens == {"0": "t0", "1": "t1", "2": "t2"}

    def test_a_refusal_of_a_given_one_says_when_that_is_free(self, rate: Rate) -> None:
        rate.has(p1=ALMOST, p2=100_000)
        refused, ms, view, _ = rate.take(asked="2")
        assert (refused, view) == (0, "011")
        assert KEPT - 100_000 - STALL < ms <= KEPT - 100_000

    @pytest.mark.parametrize("first", [0, 2])
    def test_a_request_sent_twice_takes_one(self, rate: Rate, first: int) -> None:
        rate.take(first=first)
        rate.has(p1=OVER)
        rate.server("ZADD", TAKEN, str(rate.now - ALMOST), str(first))
        assert rate.take(first=1, again=True) == [1, first, "000", 0]
        assert fresh(rate, first)  # it counts from now

    def test_one_that_is_taken_again_counts_from_now(self, rate: Rate) -> None:
        rate.has(p0=0, p1=ALMOST, p2=0)
        assert rate.take("t1", asked="1", again=True) == [1, 1, "101", 0]
        assert fresh(rate, 0, 1, 2)

    def test_one_that_was_taken_again_after_its_time_is_ours_if_nobody_took_it(
        self, rate: Rate
    ) -> None:
        rate.has(p1=OVER)
        assert rate.take("t1", asked="1", again=True) == [1, 1, "000", 0]
        rate.has(p1=0)
        assert rate.take("before", asked="1", again=True)[0] == 0

    def test_the_one_that_is_asked_for_is_moved_to(self, rate: Rate) -> None:
        rate.take(first=0)
        assert rate.take(asked="2") == [1, 2, "000", 0]
        assert rate.tokens == {"2": "mine"}
        assert rate.age(0) == float("inf")

    def test_one_that_asks_for_another_ones_has_none(self, rate: Rate) -> None:
        rate.take(first=0)
        rate.has(p2=0)
        assert rate.take(asked="2")[0] == 0
        assert rate.tokens == {"2": "t2"}

    def test_a_clock_that_was_set_back_frees_none_early(self, rate: Rate) -> None:
        rate.has(p0=-3_600_000, p1=OVER)
        assert rate.take(permits=1)[0] == 0
        assert 0 <= rate.age(0) < STALL
        assert rate.age(1) > KEPT

    def test_fewer_permits_are_the_first_ones(self, rate: Rate) -> None:
        rate.has(p0=OVER, p2=0)
        assert rate.take(permits=1) == [1, 0, "0", 0]
        assert rate.take("other", permits=1)[::2] == [0, "1"]

    def test_more_permits_are_free_at_once(self, rate: Rate) -> None:
        rate.has(p0=0)
        assert rate.take(permits=1)[0] == 0
        assert rate.take(permits=2) == [1, 1, "10", 0]

    def test_another_period_counts_at_once(self, rate: Rate) -> None:
        rate.has(p0=100_000)
        assert rate.take(permits=1, kept=200_000)[0] == 0
        assert rate.take(permits=1, kept=50_000) == [1, 0, "0", 0]

    def test_the_keys_last_as_long_as_a_start_counts_and_are_never_shortened(
        self, rate: Rate
    ) -> None:
        rate.take()
        for key in (TAKEN, TOKENS):
            assert KEPT - STALL < rate.server("PTTL", key) <= KEPT
        rate.take("other", kept=50_000)
        for key in (TAKEN, TOKENS):
            assert KEPT - STALL < rate.server("PTTL", key) <= KEPT


class TestTakeUnderTheGuard:
    def knows(self, rate: Rate, since: int) -> None:
        """Let the node serve for so many ms."""
        rate.server("SET", RUN, GUARD[0])
        rate.server("SET", TENURE, f"{rate.now - since} {GUARD[0]}")

    @pytest.mark.parametrize(("since", "young"), [(ALMOST, 1), (OVER, 0)])
    def test_a_node_is_young_while_it_may_have_forgotten_starts(
        self, rate: Rate, since: int, young: int
    ) -> None:
        self.knows(rate, since)
        assert rate.take(permits=1, guard=GUARD) == [1, 0, "0", young]
        assert rate.take("other", permits=1, guard=GUARD)[2:] == ["1", young]

    def test_a_node_without_a_tenure_is_young(self, rate: Rate) -> None:
        rate.server("SET", RUN, GUARD[0])
        assert rate.take(guard=GUARD) == [1, 0, "000", 1]

    def test_a_node_in_its_grace_period_stores_the_start_and_abstains(self, rate: Rate) -> None:
        abstained, ms = rate.take(permits=1, guard=GUARD)
        assert abstained == -1
        assert 61_000 - STALL < ms <= 61_000
        assert rate.tokens == {"0": "mine"}
        assert fresh(rate, 0)
        assert rate.take("other", permits=1, guard=GUARD)[::2] == [0, "1"]
        assert rate.take(permits=1, guard=GUARD, again=True)[0] == -1


@pytest.fixture
def ear(client: Redis) -> Iterator[RealEar]:
    """Give a waiter of a real server."""
    ear = RealEar(client.connection_pool.connection_kwargs["port"], (INBOX + "w1",))
    yield ear
    ear.close()


class TestCancel:
    def test_the_permit_of_the_token_is_free(self, rate: Rate) -> None:
        rate.has(p0=0, p1=0)
        assert rate.cancel("t1", "1") == 1
        assert rate.tokens == {"0": "t0"}
        assert rate.age(1) == float("inf")

    def test_another_ones_stays(self, rate: Rate) -> None:
        rate.has(p1=0)
        assert rate.cancel("mine", "1") == 0
        assert fresh(rate, 1)

    def test_one_that_has_another_permit_here_is_found(self, rate: Rate) -> None:
        rate.has(p0=0, p1=0)
        assert rate.cancel("t1", "0") == 1
        assert rate.tokens == {"0": "t0"}

    def test_without_a_permit_it_is_searched(self, rate: Rate) -> None:
        rate.has(p0=0, p2=0)
        assert rate.cancel("t2") == 1
        assert rate.tokens == {"0": "t0"}
        assert rate.cancel("t2") == 0

    def test_all_of_an_operator(self, rate: Rate) -> None:
        rate.has(p0=0, p1=OVER, p2=ALMOST)
        rate.server("HSET", TOKENS, "rate", f"{KEPT} 3/h")
        assert rate.cancel("", "any text") == 2
        assert rate.tokens == {}
        assert rate.server("EXISTS", TAKEN) == 0
        assert rate.server("HGET", TOKENS, "rate") == f"{KEPT} 3/h"  # it is no permit

    def test_only_one_that_counted_is_announced(self, client: Redis, ear: RealEar) -> None:
        rate = Rate(real(client))
        rate.register("w1", 7, 3)
        rate.has(p0=OVER, p1=0)
        assert rate.cancel("t0") == 0
        assert rate.cancel("t2", "2") == 0
        assert ear.heard() == []
        assert rate.cancel("t1") == 1
        assert ear.heard() == [(INBOX + "w1", f"0 t1 {WAITING}")]

    def test_an_announcement_of_all_has_the_text_that_it_was_given(
        self, client: Redis, ear: RealEar
    ) -> None:
        rate = Rate(real(client))
        rate.register("w1", 7, 3)
        rate.has(p0=0, p1=0)
        assert rate.cancel("", "break-5") == 2
        assert ear.heard() == [(INBOX + "w1", f"0 break-5 {WAITING}")]


class TestRecord:
    def test_it_is_as_old_as_its_body(self, rate: Rate) -> None:
        assert rate.record(1, 100_000) == 1
        assert 100_000 <= rate.age(1) < 100_000 + STALL
        assert rate.tokens == {"1": "mine"}
        assert KEPT - STALL < rate.server("PTTL", TAKEN) <= KEPT

    def test_it_moves_no_time_back(self, rate: Rate) -> None:
        rate.has(p1=0)
        rate.record(1, 100_000)
        assert fresh(rate, 1)
        assert rate.tokens == {"1": "mine"}

    def test_it_stands_whoever_else_is_there(self, rate: Rate) -> None:
        rate.has(p1=ALMOST)
        rate.record(1, 10_000)
        assert rate.age(1) < 10_000 + STALL
        assert rate.cancel("t1", "1") == 0
        assert rate.take(permits=2, asked="1")[0] == 1

    def test_ours_elsewhere_goes(self, rate: Rate) -> None:
        rate.take(first=0)
        rate.record(2, 0)
        assert rate.tokens == {"2": "mine"}
        assert fresh(rate, 2)

    def test_sent_twice_it_is_the_same(self, rate: Rate) -> None:
        rate.record(2, 10_000)
        rate.record(2, 10_000)
        assert rate.tokens == {"2": "mine"}
        assert 10_000 <= rate.age(2) < 10_000 + STALL


class TestRegister:
    def test_a_free_permit_is_free_now(self, rate: Rate) -> None:
        rate.has(p0=0, p1=OVER)
        assert rate.register("w1", 7, 3) == [0, 2, 0]

    def test_the_next_permit_is_for_the_first_waiter_and_so_on(self, rate: Rate) -> None:
        rate.has(p0=0, p1=ALMOST, p2=100_000)
        ends = [KEPT - ALMOST, KEPT - 100_000, KEPT]
        ends += [KEPT + end for end in ends]  # each of them is taken again
        for number, end in enumerate(ends):
            rank, free, ms = rate.register(f"w{number}", number, 3)
            assert (rank, free) == (number, 0)
            assert end - STALL < ms <= end

    def test_permits_above_the_number_do_not_count(self, rate: Rate) -> None:
        rate.has(p0=OVER, p2=0)
        assert rate.register("w1", 7, 2) == [0, 2, 0]

    def test_a_clock_that_was_set_back_makes_none_wait_longer_than_a_start_counts(
        self, rate: Rate
    ) -> None:
        rate.has(p0=-3_600_000)
        assert rate.register("w1", 7, 1) == [0, 0, KEPT]
