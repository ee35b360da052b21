"""Many calls of a PostgreSQL node at once: whatever comes, is possible. What waits, ends."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from redis import ResponseError

from celery_redlock.lock.model.keys import (
    lock_key,
    tenure_key,
)
from celery_redlock.lock.postgres.address import address_of
from celery_redlock.lock.server.requests import (
    CANCEL,
    FENCE,
    GRANT,
    GUARD,
    RECORD,
    RENEW,
    TAKE,
    TRUST,
)
from tests.conftest import eventually
from tests.contract.conftest import at_once
from tests.contract.postgres_calls import (
    BREAK_ONE,
    BROKEN,
    CLIENTS,
    COUNTER,
    INBOX,
    LOCK,
    ONE,
    OTHER,
    QUIET,
    RATE,
    ROUNDS,
    RUN,
    TAKEN,
    TOKENS,
    TTL,
    TWO,
    WAITING,
    Call,
    Session,
    done,
    grant,
    permit,
    postgres,
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


def crowd(sessions: list[Session], call: Callable[[int], Call]) -> list[Any]:
    """Let each session make its call at the same moment; return the replies."""
    start = threading.Barrier(len(sessions))

    def one(number: int) -> Any:
        start.wait(60)
        return done(sessions[number], call(number))

    return at_once(*[lambda number=number: one(number) for number in range(len(sessions))])


def test_a_crowd_never_gets_more_than_the_permits(
    sessions: list[Session], command: Command
) -> None:
    for turn in range(ROUNDS):
        replies = crowd(sessions, lambda number: permit(f"{number}:x", 3, first=number % 3))
        granted = [reply for reply in replies if reply[0] == 1]
        assert sorted(reply[1] for reply in granted) == [0, 1, 2], turn
        assert sorted(3 - reply[2].count("0") for reply in granted) == [0, 1, 2], turn
        assert not [reply for reply in replies if reply[0] == 0 and "0" in reply[4]], turn
        for number in range(CLIENTS):
            done(sessions[0], release(f"{number}:x", 3))


def test_a_crowd_never_gets_more_than_the_starts(
    node: PostgresNode, sessions: list[Session]
) -> None:
    for turn in range(ROUNDS):
        node.empty()
        replies = crowd(sessions, lambda number: take(f"t{number}"))
        assert Counter(reply[0] for reply in replies) == {1: 3, 0: CLIENTS - 3}, turn
        assert sorted(reply[1] for reply in replies if reply[0] == 1) == [0, 1, 2], turn


def test_of_a_crowd_one_unique_send_wins(node: PostgresNode, sessions: list[Session]) -> None:
    for turn in range(ROUNDS):
        node.empty()
        replies = crowd(sessions, lambda number: unique(f"t{number}:x"))
        won = [number for number, reply in enumerate(replies) if reply == 1]
        assert len(won) == 1, turn
        assert {reply[1] for reply in replies if reply != 1} == {f"t{won[0]}:x"}, turn


def test_a_crowd_never_gets_a_fencing_token_twice(
    node: PostgresNode, sessions: list[Session]
) -> None:
    for turn in range(ROUNDS):
        node.empty()
        replies = crowd(sessions, lambda number: grant(ONE, f"lock {number}", least="0"))
        assert sorted(token for _, token in replies) == list(range(1, CLIENTS + 1)), turn


def test_set_nx_lets_one_of_a_crowd_win(node: PostgresNode, sessions: list[Session]) -> None:
    sql = b"SELECT redlock.command(%s::bytea[])"

    def one(session: Session, value: int) -> Any:
        words = [b"SET", b"claim", b"%d" % value, b"PX", b"60000", b"NX"]
        with session.connection.transaction():
            return session.connection.execute(sql, [words]).fetchone()

    for turn in range(ROUNDS):
        node.empty()
        works = [lambda n=n: one(sessions[n], n) for n in range(CLIENTS)]
        assert sorted(at_once(*works)) == [(b"$-1\r\n",)] * (CLIENTS - 1) + [(b"+OK\r\n",)], turn


def test_two_renewals_in_opposite_order_wait_for_nobody(
    node: PostgresNode, sessions: list[Session], pool: ThreadPoolExecutor
) -> None:
    keys = [lock_key("redlock", f"r{number}") for number in range(50)]
    for key in keys:
        done(sessions[0], grant(ONE, key))
    holder, *both = sessions[:3]
    for session in both:  # as in a large table: rows are found in the order of the keys
        session.connection.execute("SET enable_hashjoin = off; SET enable_mergejoin = off")
        session.connection.execute("SET enable_seqscan = off")
        session.commit()
    where = "SELECT FROM redlock.key WHERE name = %s FOR UPDATE"
    holder.connection.execute(where.encode(), [keys[25].encode()])
    orders = keys, keys[::-1]
    running = [
        pool.submit(done, session, (RENEW, (*order, COUNTER), (ONE, TTL, "") * len(keys)))
        for session, order in zip(both, orders, strict=True)
    ]
    first, second = (future.result() for future in running)
    holder.commit()
    replies = list(zip(first, second[::-1], strict=True))
    assert replies.pop(25) == (None, None)
    assert all(1 in words for words in replies)


def test_a_grant_and_a_reclaim_do_not_wait_for_each_other(
    sessions: list[Session], pool: ThreadPoolExecutor
) -> None:
    turn, one, other = sessions[:3]
    done(one, grant(ONE, OTHER, least="5"))
    turn.connection.execute("SELECT redlock.turn(%s)", [LOCK.encode()])
    first = pool.submit(done, one, grant(TWO, least="0"))
    eventually(one.waits)
    second = pool.submit(done, other, (RENEW, (LOCK, COUNTER, BROKEN), (ONE, TTL, "9")))
    eventually(other.waits)
    turn.commit()
    assert (first.result(), second.result()) == ([1, 6], [-1])


def test_a_call_that_waits_for_too_long_leaves_nothing(
    node: PostgresNode, sessions: list[Session], command: Command
) -> None:
    impatient = postgres(address_of(node.url), node_timeout=1.0)
    (run,) = node.query("SELECT redlock.run_id()")[0]
    _, keys, arguments = grant(TWO, least="7", run=run)
    sessions[0].call(grant(ONE))
    refused = impatient("EVAL", GRANT.source, str(len(keys)), *keys, *arguments)
    assert isinstance(refused, ResponseError)
    assert str(refused).startswith("TRYAGAIN")
    sessions[0].connection.rollback()
    assert [command("GET", key) for key in keys] == [None] * len(keys)
    assert impatient("EVAL", GRANT.source, str(len(keys)), *keys, *arguments)[0] == -1


CHANGING: list[Call] = [
    grant(ONE), permit(ONE), release(ONE), register("w1"), register("w1", LOCK), reclaim(ONE),
    unique(ONE), take("t1"), BREAK_ONE, (FENCE, (COUNTER,), ()),
    (RENEW, (LOCK, COUNTER), (ONE, TTL, "")),
    (RECORD, (TAKEN, TOKENS), ("t1", "0", "60000", "0")),
    (CANCEL, (TAKEN, TOKENS, WAITING), ("t1", "0", INBOX, "60000")),
    (TRUST, (RUN, QUIET, tenure_key("redlock")), ("x",)),
    (GUARD, (RUN, QUIET, tenure_key("redlock")), ("x", TTL, "", TTL)),
]  # fmt: skip


@pytest.mark.parametrize("call", CHANGING, ids=[str(call[0].name) for call in CHANGING])
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_direct_call_in_another_isolation_level_is_refused(
    sessions: list[Session], level: str, call: Call
) -> None:
    sessions[0].connection.execute(f"SET TRANSACTION ISOLATION LEVEL {level}".encode())
    with pytest.raises(psycopg.errors.ActiveSqlTransaction, match="must be read committed"):
        sessions[0].call(call)


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_a_client_begins_its_calls_in_read_committed(node: PostgresNode, level: str) -> None:
    node.empty()
    node.query(f"ALTER ROLE postgres SET default_transaction_isolation = '{level}'")
    try:
        clients = [postgres(address_of(node.url)) for _ in range(CLIENTS)]
        with closing(node.connect()) as asked:
            assert asked.execute("SHOW transaction_isolation").fetchall() == [(level,)]
    finally:
        node.query("ALTER ROLE postgres RESET default_transaction_isolation")
    for turn in range(ROUNDS):
        words = [
            (*RATE, f"{turn}:{n}", "3/m", "60000", "0", "", "0", "", "0") for n in range(CLIENTS)
        ]
        works = [
            lambda client=client, words=words: client("EVAL", TAKE.source, "5", *words)
            for client, words in zip(clients, words, strict=True)
        ]
        assert sorted(reply[0] for reply in at_once(*works)) == [0] * (CLIENTS - 3) + [1] * 3
        node.empty()
