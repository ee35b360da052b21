"""Calls of a PostgreSQL node at the same time end as if one had come after the other.

On Redis scripts run one at a time. Most tests here keep a call's transaction open, begin the second
call, and then commit the first. The second one must see what the first one did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from celery_redlock.lock.model.keys import (
    tenure_key,
    waiting_key,
)
from celery_redlock.lock.postgres.address import address_of
from celery_redlock.lock.server.requests import (
    CANCEL,
    GUARD,
    RECORD,
    REGISTER,
    RELEASE,
    RENEW,
    TRUST,
)
from tests.conftest import eventually
from tests.contract.postgres_calls import (
    BREAK_ONE,
    BROKEN,
    COUNTER,
    INBOX,
    LOCK,
    ONE,
    OTHER,
    QUIET,
    RUN,
    TAKEN,
    TOKENS,
    TTL,
    TWO,
    WAITING,
    Call,
    PostgresEar,
    Session,
    done,
    grant,
    permit,
    reclaim,
    register,
    release,
    take,
    unique,
)
from tests.contract.servers import Command
from tests.postgres import PostgresNode, standing_node

pytestmark = pytest.mark.postgresql


@pytest.fixture(scope="module")
def postgres_node(postgres_template: Path) -> Iterator[PostgresNode]:
    """Give a node that keeps what the test before has left."""
    with standing_node(postgres_template) as made:
        yield made


@pytest.fixture
def meet(
    sessions: list[Session], pool: ThreadPoolExecutor
) -> Callable[[Call, Call], tuple[Any, Any]]:
    """Give a function that begins a call, begins another one, and commits the first one then."""

    def both(first: Call, second: Call) -> tuple[Any, Any]:
        one, other = sessions[:2]
        reply = one.call(first)
        running = pool.submit(other.call, second)
        try:
            eventually(lambda: running.done() or other.waits())
        finally:
            one.commit()
        later = running.result()
        other.commit()
        return reply, later

    return both


Meet = Callable[[Call, Call], tuple[Any, Any]]


def test_the_second_of_two_grants_learns_the_first_ones_ttl(meet: Meet) -> None:
    first, (refused, left, holder, _) = meet(grant(ONE), grant(TWO))
    assert (first, refused, holder) == (1, 0, ONE)
    assert left > int(TTL) / 2


def test_a_release_deletes_what_a_grant_is_about_to_commit(meet: Meet, command: Command) -> None:
    assert meet(grant(ONE), release(ONE)) == (1, 1)
    assert command("GET", LOCK) is None


def test_a_lock_that_is_being_released_is_granted(meet: Meet, sessions: list[Session]) -> None:
    done(sessions[2], grant(ONE))
    assert meet(release(ONE), grant(TWO)) == (1, 1)


def test_a_renewal_in_time_keeps_its_lock_from_a_grant(
    sessions: list[Session], command: Command
) -> None:
    """The row is expired for who cannot see the renewal yet."""

    def is_in_time() -> bool:
        sessions[0].connection.rollback()
        command("SET", LOCK, ONE, "PX", "300")
        return bool(sessions[0].call((RENEW, (LOCK, COUNTER), (ONE, TTL, ""))) == [1])

    eventually(is_in_time)
    eventually(lambda: command("GET", LOCK) is None)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(sessions[1].call, grant(TWO))
        eventually(lambda: running.done() or sessions[1].waits())
        sessions[0].commit()
        refused, _, holder, _ = running.result()
    assert (refused, holder) == (0, ONE)
    sessions[1].commit()
    assert command("GET", LOCK) == ONE


@pytest.mark.parametrize("note", [(), (BROKEN,)])
def test_a_grant_of_an_expired_lock_ends_its_holders_renewals(
    meet: Meet, command: Command, note: tuple[str, ...]
) -> None:
    command("SET", LOCK, ONE, "PX", "1")
    eventually(lambda: command("GET", LOCK) is None)
    granted, (renewed,) = meet(grant(TWO), (RENEW, (LOCK, COUNTER, *note), (ONE, TTL, "")))
    assert (granted, renewed) in [(1, -1)] + [(1, 0)] * (not note)
    assert command("GET", LOCK) == TWO


@pytest.fixture
def ear(node: PostgresNode, command: Command) -> Iterator[PostgresEar]:
    with closing(PostgresEar(address_of(node.url), (f"{INBOX}w1",), command)) as made:
        yield made


def test_a_waiter_that_asks_during_a_release_sees_the_lock_free(
    meet: Meet, sessions: list[Session], ear: PostgresEar
) -> None:
    done(sessions[2], grant(ONE))
    _, (rank, free, _) = meet(release(ONE), register("w1", LOCK))
    assert (rank, free) == (0, 1)


def test_a_release_during_a_registration_names_the_waiter(
    meet: Meet, sessions: list[Session], ear: PostgresEar
) -> None:
    done(sessions[2], grant(ONE))
    (_, free, _), released = meet(register("w1", LOCK), release(ONE))
    assert (free, released) == (0, 1)
    assert ear.heard() == [(f"{INBOX}w1", f"0 t1 {WAITING}")]


def test_a_set_keeps_who_registers_while_its_last_member_leaves(
    meet: Meet, sessions: list[Session], command: Command
) -> None:
    done(sessions[2], grant(ONE))
    done(sessions[2], register("dead"))
    assert meet(register("w1"), release(ONE)) == (0, 1)
    assert command("ZRANGE", WAITING, "0", "-1") == ["w1"]


def test_a_set_keeps_who_registers_after_its_last_member_left(
    meet: Meet, sessions: list[Session], command: Command
) -> None:
    done(sessions[2], grant(ONE))
    done(sessions[2], register("dead"))
    assert meet(release(ONE), register("w1")) == (1, 0)
    assert command("ZRANGE", WAITING, "0", "-1") == ["w1"]


def test_two_releases_at_once_know_that_the_same_waiter_is_dead(
    meet: Meet, sessions: list[Session], ear: PostgresEar
) -> None:
    others = waiting_key("redlock", "other")
    for value, key in ((ONE, LOCK), (TWO, OTHER)):
        done(sessions[2], grant(value, key))
    for waiting, waiter, since in (
        (WAITING, "dead", "1"),
        (others, "dead", "1"),
        (others, "w1", "2"),
    ):
        done(sessions[2], (REGISTER, (waiting,), (waiter, since, TTL, "0", INBOX, "1", "")))
    meet(release(ONE), (RELEASE, (OTHER, others), (TWO, INBOX, "1")))
    assert ear.heard() == [(f"{INBOX}w1", f"0 t2 {others}")]


def test_a_reclaim_sees_the_break_before_it(meet: Meet, command: Command) -> None:
    assert meet(BREAK_ONE, reclaim(ONE)) == (0, [-1])
    assert command("GET", LOCK) is None


def test_a_break_sees_the_reclaim_before_it(meet: Meet, command: Command) -> None:
    assert meet(reclaim(ONE), BREAK_ONE) == ([1], 1)
    assert command("GET", LOCK) is None


def test_the_same_request_twice_gets_one_permit(meet: Meet) -> None:
    first, second = meet(permit(ONE), permit(ONE, first=1))
    assert first == second == [1, 0, "000"]


def test_a_hold_refuses_the_others_at_once(meet: Meet) -> None:
    held, (refused, _, holder, _, view) = meet(permit("!h:hold"), permit(ONE))
    assert (held, refused, holder, view) == ([1, 0, "000"], 0, "!h:hold", "111")


def test_the_second_start_gets_another_permit(meet: Meet) -> None:
    assert meet(take("t1"), take("t2")) == ([1, 0, "000", 0], [1, 1, "100", 0])


def test_a_cancelled_start_is_free_for_the_next(meet: Meet, sessions: list[Session]) -> None:
    done(sessions[2], take("t1", 1))
    cancel: Call = (CANCEL, (TAKEN, TOKENS, WAITING), ("t1", "0", INBOX, "60000"))
    assert meet(cancel, take("t2", 1)) == (1, [1, 0, "0", 0])


def test_a_start_that_is_being_recorded_counts(meet: Meet) -> None:
    record: Call = (RECORD, (TAKEN, TOKENS), ("t1", "0", "60000", "0"))
    recorded, (refused, *_) = meet(record, take("t2", 1))
    assert (recorded, refused) == (1, 0)


def test_one_of_two_unique_sends_wins(meet: Meet) -> None:
    won, (left, value, _) = meet(unique("t1:one"), unique("t2:two"))
    assert (won, value) == (1, "t1:one")
    assert left > int(TTL) / 2


def test_a_grant_begins_no_grace_period_after_an_operators_trust(
    meet: Meet, node: PostgresNode, command: Command
) -> None:
    (run,) = node.query("SELECT redlock.run_id()")[0]
    trust: Call = (TRUST, (RUN, QUIET, tenure_key("redlock")), (run,))
    assert meet(trust, grant(ONE, run=run)) == (0, 1)
    assert command("EXISTS", QUIET) == 0


def test_a_guard_sees_what_a_grant_has_noted(meet: Meet, node: PostgresNode) -> None:
    (run,) = node.query("SELECT redlock.run_id()")[0]
    guard: Call = (GUARD, (RUN, QUIET, tenure_key("redlock")), (run, "90000", "", TTL))
    abstains, (left, _) = meet(grant(ONE, run=run), guard)
    assert abstains[0] == -1
    assert 40_000 < left <= 50_000  # the grace period that the grant began, and no second one


def test_fencing_tokens_never_come_twice(sessions: list[Session], meet: Meet) -> None:
    first, second = meet(grant(ONE, least="7"), grant(TWO, OTHER, least="0"))
    assert (first, second) == ([1, 7], [1, 8])


def test_a_counter_is_raised_by_a_renewal_and_a_grant_at_once(meet: Meet) -> None:
    renewal: Call = (RENEW, (OTHER, COUNTER, BROKEN), (TWO, TTL, "5"))
    assert meet(grant(ONE, least="9"), renewal) == ([1, 9], [[1, 5]])
    assert meet(renewal, grant(ONE, "third", least="0"))[1] == [1, 10]


def test_a_confirmed_lock_is_refused_for_a_while_after_its_end(
    sessions: list[Session], command: Command
) -> None:
    command("SET", LOCK, TWO, "PX", "1")
    eventually(lambda: command("GET", LOCK) is None)
    confirmed, other = sessions[:2]
    confirmed.connection.execute("SELECT FROM redlock.key FOR KEY SHARE")
    for call in (grant(ONE), permit(ONE, 1)):
        assert done(other, call)[:3] == [0, 100, TWO]
    assert done(other, permit(ONE, 2)) == [1, 1, "10"]
    assert done(other, reclaim(ONE)) == [0]
    confirmed.commit()
    assert done(other, reclaim(ONE)) == [1]
