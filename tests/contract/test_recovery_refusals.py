"""What a broker refuses of worker leases for a while, and messages that cannot be moved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from redis import Redis, ResponseError

from celery_redlock.signals import MessagesRecoveredEvent, messages_recovered
from celery_redlock.tasks.recovery.keeper import Keeper, still_owned
from celery_redlock.tasks.recovery.ledger import Ledger
from celery_redlock.tasks.recovery.tags import MAX_MOVES, MOVES, DeliveryTag, new_lease
from celery_redlock.testing import EmbeddedNode
from tests.conftest import eventually, receiving
from tests.contract.worker_leases import declare_dead, lose, note, see_another, see_beats


@contextmanager
def refusing(client: Redis, command: str) -> Iterator[None]:
    """Let a broker refuse a command for a while."""
    client.acl_setuser("default", enabled=True, nopass=True, commands=[f"-{command}"])
    try:
        yield
    finally:
        client.acl_setuser("default", enabled=True, nopass=True, commands=["+@all"])


def entry(moves: int) -> str:
    return json.dumps([{"body": "", "headers": {}, "properties": {MOVES: moves}}, "", "celery"])


def moves_in(client: Redis, name: str = "celery") -> list[int]:
    return [json.loads(text)["properties"][MOVES] for text in client.lrange(name, 0, -1)]


def test_a_join_that_is_refused_gives_up_the_lease_of_the_connection_before(
    keeper: Keeper, ledger: Ledger, client: Redis
) -> None:
    """What lies under it is moved, and the worker has a lease again once the broker takes one."""
    keeper.join()
    before, tag = keeper.lease, keeper.tag("celery")
    note(ledger, tag)
    with refusing(client, "eval"):
        with pytest.raises(ResponseError):
            keeper.join()
        assert keeper.lease == ""
        assert not still_owned(tag)
    eventually(lambda: client.llen("celery"))
    after = see_another(keeper, "")
    assert after != before
    assert still_owned(keeper.tag("celery"))
    eventually(lambda: client.zrange(ledger.leases, 0, -1) == [after])
    see_beats(client, ledger, after)


def test_a_first_join_that_is_refused_is_tried_again(
    keeper: Keeper, ledger: Ledger, client: Redis
) -> None:
    """And what each worker does once is done after it."""
    lost = new_lease()
    note(ledger, tag := str(DeliveryTag(lost, 0, "celery")))
    client.zadd(ledger.index, {tag: 1})
    with refusing(client, "eval"), pytest.raises(ResponseError):
        keeper.join()
    see_beats(client, ledger, see_another(keeper, ""))
    eventually(lambda: client.llen("celery"))


def test_a_worker_that_may_not_begin_anew_has_no_lease(
    keeper: Keeper, broker: EmbeddedNode, ledger: Ledger, client: Redis
) -> None:
    """Its new messages are not tagged with the one that is dead."""
    keeper.join()
    before = keeper.lease
    client.set(f"{ledger.names}:kept", "x")
    client.rename(ledger.names, "names")
    client.rename(f"{ledger.names}:kept", ledger.names)  # a join writes there
    ledger.declare_dead(before, claims=False)
    eventually(lambda: keeper.lease == "")
    client.rename("names", ledger.names)
    see_beats(client, ledger, see_another(keeper, ""))


def test_a_refused_join_leaves_no_connection_open(
    keeper: Keeper, ledger: Ledger, client: Redis
) -> None:
    def connections() -> int:
        return len([one for one in client.client_list() if one["cmd"] == "eval"])

    keeper.join()
    see_beats(client, ledger, keeper.lease, 1)
    for _ in range(5):
        with refusing(client, "eval"), pytest.raises(ResponseError):
            keeper.join()
    see_beats(client, ledger, see_another(keeper, ""))
    eventually(lambda: connections() <= 3)  # of who asks, of the thread, and of this test


def test_only_what_a_death_moves_is_counted(keeper: Keeper, ledger: Ledger, client: Redis) -> None:
    """Not what waits in a worker that lives on over a new connection."""
    for moves in (0, MAX_MOVES):
        keeper.join()
        client.hset(ledger.unacked, keeper.tag("celery"), entry(moves))
        keeper.join()
        eventually(lambda: client.llen("celery"))
        assert moves_in(client) == [moves]
        client.delete("celery")
    lose(ledger)
    eventually(lambda: client.llen("celery"))
    assert moves_in(client) == [1]


def test_what_a_worker_that_ends_has_noted_late_is_not_counted(
    keeper: Keeper, ledger: Ledger, client: Redis
) -> None:
    keeper.join()
    before, tag = keeper.lease, keeper.tag("celery")
    declare_dead(ledger, before)
    ledger.move_all(before)
    see_another(keeper, before)
    eventually(lambda: not client.exists(ledger.dead))
    client.hset(ledger.unacked, tag, entry(3))
    assert not still_owned(tag)
    keeper.end()
    eventually(lambda: client.llen("celery"))
    assert moves_in(client) == [3]


def test_a_move_that_is_refused_stops_no_proof(
    keeper: Keeper, ledger: Ledger, client: Redis
) -> None:
    """The moves of two dead worker leases fail again and again; another worker is silent."""
    silent, heard = new_lease(), []
    with receiving(messages_recovered, lambda _, event: heard.append(event)):
        client.set(ledger.unacked, "by another program")
        for number in range(2):
            declare_dead(ledger, new_lease(), f"w{number}@other", claims=False)
        ledger.beat(silent, joins_as="w3@host")
        keeper.join()
        eventually(lambda: client.zscore(ledger.dead, silent))
        client.delete(ledger.unacked)
        note(ledger, str(DeliveryTag(silent, 0, "celery")))
        eventually(lambda: not client.exists(ledger.dead))
    assert heard == [MessagesRecoveredEvent("w3@host", 1)]


def test_the_name_of_a_list_may_be_no_utf8(
    keeper: Keeper, broker: EmbeddedNode, ledger: Ledger
) -> None:
    """It is moved there, byte by byte, and so is that of a lease that is recalled."""
    raw = Redis(port=broker.port)
    for is_forgotten in (False, True):
        lost = new_lease()
        tag = f"{lost}:0:caf".encode() + b"\xe9"
        raw.hset(ledger.unacked, tag, entry(0))
        raw.zadd(ledger.index, {tag: 1})
        if is_forgotten:
            ledger.recall()
        else:
            declare_dead(ledger, lost, claims=False)
        assert ledger.move_all(lost).messages == 1
        assert raw.llen(b"caf\xe9") == 1
        assert not raw.exists(ledger.dead, ledger.unacked, ledger.index)
        raw.delete(b"caf\xe9")


def test_messages_that_are_kept_are_told_of_once(
    keeper: Keeper, ledger: Ledger, client: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """Though others of the same worker are tried again and again; and again if there are more."""
    heard: list[MessagesRecoveredEvent] = []
    client.set("odd", "by another program")
    lost = new_lease()
    client.hset(ledger.unacked, str(DeliveryTag(lost, 0, "celery")), entry(MAX_MOVES))
    client.hset(ledger.unacked, str(DeliveryTag(lost, 1, "odd")), entry(0))
    declare_dead(ledger, lost, "w2@host", claims=False)
    with receiving(messages_recovered, lambda _, event: heard.append(event)):
        keeper.join()
        eventually(lambda: heard)
        see_claims(client, ledger, lost)
        client.hset(ledger.unacked, str(DeliveryTag(lost, 2, "celery")), entry(MAX_MOVES))
        eventually(lambda: len(heard) > 1)
        client.delete("odd")
        eventually(lambda: not client.exists(ledger.dead))
        eventually(lambda: len(heard) > 2)
    kept = [MessagesRecoveredEvent("w2@host", 0, 1)] * 2
    assert heard == [*kept, MessagesRecoveredEvent("w2@host", 1)]
    told = [one for one in caplog.records if one.__dict__.get("event") == "messages_kept"]
    assert [one.__dict__["messages"] for one in told] == [1, 2]


def see_claims(client: Redis, ledger: Ledger, lease: str, count: int = 4) -> None:
    """See that a dead worker lease is claimed again and again."""
    for _ in range(count):
        last = client.zscore(ledger.dead, lease)
        eventually(lambda last=last: client.zscore(ledger.dead, lease) > last)
