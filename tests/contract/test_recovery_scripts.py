"""The worker leases on a broker: each value that a script's header promises, and each move."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from kombu import Connection
from redis import Redis

from celery_redlock.tasks.delivery.republish import MOVES
from celery_redlock.tasks.recovery.ledger import CHUNK_BYTES, CLAIM_TIMEOUT, Beat, Ledger
from celery_redlock.tasks.recovery.observer import QUIET
from celery_redlock.tasks.recovery.tags import MAX_MOVES, DeliveryTag, lease_start, new_lease
from celery_redlock.testing import EmbeddedNode
from tests.conftest import eventually
from tests.contract.worker_leases import declare_dead, open_ledger

HOUR = 3_600_000  # ms
OWN, OTHER = (f"{lease_start('redlock')}{digit * 24}" for digit in "ab")
LISTS = ("celery", "celery\x06\x163", "other")


class MoverEndedError(Exception):
    """Ends a mover."""


def now(client: Redis) -> int:
    """Return ms of the server's clock."""
    seconds, more = client.time()
    return int(seconds * 1000 + more // 1000)


def entry(uid: str, **properties: Any) -> str:
    """Return what kombu notes of a message."""
    own = {"delivery_tag": "of its sender", "delivery_info": {"exchange": "", "routing_key": "x"}}
    raw = {"body": "W10=", "headers": {"id": uid}, "properties": {**own, **properties}}
    return json.dumps([raw, "", "x"])


def note(ledger: Ledger, lease: str, *lists: str, start: int = 0, **properties: Any) -> None:
    """Note a message of each list as unacknowledged, in their order; the ids are their numbers."""
    with ledger.client.pipeline() as pipe:
        for number, name in enumerate(lists, start):
            tag = str(DeliveryTag(lease, number, name))
            pipe.hset(ledger.unacked, tag, entry(str(number), **properties))
            pipe.zadd(ledger.index, {tag: time.time()})
        pipe.execute()


def taken(client: Redis, name: str) -> list[str]:
    """Return the ids of the messages of a list, as workers take them."""
    return [json.loads(text)["headers"]["id"] for text in reversed(client.lrange(name, 0, -1))]


def left(ledger: Ledger) -> set[str]:
    """Return the tags of what is unacknowledged; the index has the same ones."""
    tags = {tag for tag, _ in ledger.entries()}
    assert tags == {tag.decode() for tag in ledger.client.zrange(ledger.index, 0, -1)}
    return tags


# each script


def test_a_beat_needs_a_lease_that_has_joined(ledger: Ledger, client: Redis) -> None:
    assert ledger.beat(OWN) == Beat(False)
    assert client.keys() == []
    before = now(client)
    assert ledger.beat(OWN, joins_as="w1@host") == Beat(True)
    assert ledger.name_of(OWN) == "w1@host"
    first = client.zscore(ledger.leases, OWN)
    assert before <= first <= now(client)
    eventually(lambda: now(client) > first)
    assert ledger.beat(OWN) == Beat(True)
    assert first < client.zscore(ledger.leases, OWN) <= now(client)


@pytest.mark.parametrize("away", [-1, 1], ids=["quiet", "ahead"])
def test_a_beat_returns_what_is_quiet_or_ahead(ledger: Ledger, client: Redis, away: int) -> None:
    ledger.beat(OWN, joins_as="w1@host")
    ledger.beat(OTHER, joins_as="w2@host")
    score = now(client) + away * HOUR
    client.zadd(ledger.leases, {OTHER: score})
    assert ledger.beat(OWN) == Beat(True, "", {OTHER: str(score)})
    client.zadd(ledger.leases, {OTHER: now(client)})
    assert ledger.beat(OWN) == Beat(True)
    assert QUIET * 1000 < HOUR


def test_a_dead_lease_is_claimed_by_one_worker_at_a_time(ledger: Ledger, client: Redis) -> None:
    ledger.beat(OWN, joins_as="w1@host")
    ledger.beat(OTHER, joins_as="w2@host")
    assert ledger.declare_dead(OTHER)  # which claims it
    assert ledger.beat(OWN, claims=True).claimed == ""
    client.zadd(ledger.dead, {OTHER: now(client) - CLAIM_TIMEOUT * 1000 - 1})
    assert ledger.beat(OWN, claims=True).claimed == OTHER
    assert ledger.beat(OWN, claims=True).claimed == ""
    client.zadd(ledger.dead, {OTHER: now(client) + HOUR})  # its clock was set back
    assert ledger.beat(OWN, claims=True).claimed == OTHER


def test_of_several_dead_leases_each_beat_claims_one(ledger: Ledger) -> None:
    ledger.beat(OWN, joins_as="w1@host")
    others = {new_lease() for _ in range(5)}
    for other in others:
        ledger.beat(other, joins_as="w2@host")
        assert ledger.declare_dead(other, claims=False)
    assert ledger.beat(OWN) == Beat(True)
    assert {ledger.beat(OWN, claims=True).claimed for _ in others} == others
    assert ledger.beat(OWN, claims=True).claimed == ""


def test_a_lease_is_declared_dead_once_and_not_if_it_has_beaten(
    ledger: Ledger, client: Redis
) -> None:
    assert not ledger.declare_dead(OWN)  # unknown
    ledger.beat(OWN, joins_as="w1@host")
    client.zadd(ledger.leases, {OWN: 1})
    assert not ledger.declare_dead(OWN, "2")
    assert client.zscore(ledger.leases, OWN) == 1
    assert ledger.declare_dead(OWN, "1")
    assert not ledger.declare_dead(OWN, "1")
    assert not ledger.declare_dead(OWN)
    assert ledger.beat(OWN) == Beat(False)
    assert client.exists(ledger.leases) == 0
    assert abs(now(client) - client.zscore(ledger.dead, OWN)) < 60_000


def test_the_score_of_a_beat_is_the_one_that_is_compared(ledger: Ledger, client: Redis) -> None:
    ledger.beat(OWN, joins_as="w1@host")
    ledger.beat(OTHER, joins_as="w2@host")
    eventually(lambda: OTHER in ledger.beat(OWN).quiet)
    seen = ledger.beat(OWN).quiet[OTHER]
    ledger.beat(OTHER)
    assert not ledger.declare_dead(OTHER, seen)
    eventually(lambda: OTHER in ledger.beat(OWN).quiet)
    assert ledger.declare_dead(OTHER, ledger.beat(OWN).quiet[OTHER])


def test_a_forgotten_lease_with_messages_to_move_is_recalled_and_no_other_one(
    ledger: Ledger, client: Redis
) -> None:
    """Neither one that lives, nor one that is being moved, nor one with none but spent messages."""
    spent, forgotten = new_lease(), new_lease()
    for lease in (OWN, OTHER, forgotten):
        note(ledger, lease, *LISTS)
    note(ledger, spent, "celery", **{MOVES: MAX_MOVES})
    note(ledger, forgotten, "celery", start=7, **{MOVES: MAX_MOVES})
    client.zadd(ledger.index, {"redlock-of-a-sender": 1, "redlock-of:3:a-sender": 1})
    ledger.beat(OWN, joins_as="w1@host")
    declare_dead(ledger, OTHER)
    before = client.zscore(ledger.leases, OWN), client.zscore(ledger.dead, OTHER)
    calls = []
    ledger.recall(lambda: calls.append(1))
    assert (client.zscore(ledger.leases, OWN), client.zscore(ledger.dead, OTHER)) == before
    assert client.zcard(ledger.leases) == 1
    assert set(client.zrange(ledger.dead, 0, -1)) == {OTHER, forgotten}
    assert calls
    assert ledger.beat(OWN, claims=True).claimed == forgotten  # at once
    assert ledger.move_all(forgotten).messages == len(LISTS)
    ledger.recall()
    assert client.zrange(ledger.dead, 0, -1) == [OTHER]


def test_a_lease_of_workers_with_another_prefix_is_not_recalled(
    ledger: Ledger, client: Redis
) -> None:
    """It may live: its beats are under keys that no worker of this prefix reads."""
    theirs = new_lease(lease_start("another"))
    assert DeliveryTag.of(f"{theirs}:0:celery")
    note(ledger, theirs, "celery")
    ledger.beat(OWN, joins_as="w1@host")
    ledger.recall()
    assert client.exists(ledger.dead) == 0


def test_a_lease_that_another_worker_has_recalled_meanwhile_keeps_its_claim(
    ledger: Ledger, client: Redis
) -> None:
    note(ledger, OTHER, "celery")
    ledger.beat(OWN, joins_as="w1@host")
    claimed, calls = [], iter(range(100))

    def between() -> None:
        if next(calls) == 1:  # it was found to be forgotten
            client.zadd(ledger.dead, {OTHER: 0})
            assert ledger.beat(OWN, claims=True).claimed == OTHER
            claimed.append(client.zscore(ledger.dead, OTHER))

    ledger.recall(between)
    assert claimed == [client.zscore(ledger.dead, OTHER)]


def test_messages_go_to_the_heads_of_their_lists_in_their_order(
    ledger: Ledger, client: Redis
) -> None:
    for name in LISTS:
        client.lpush(name, json.dumps({"headers": {"id": "waits"}}))
    note(ledger, OTHER, "celery", start=50)
    note(ledger, OWN, *LISTS, *LISTS, start=7)
    declare_dead(ledger, OWN)
    done = ledger.move_all(OWN)
    assert (done.messages, done.kept, done.refusal) == (6, 0, "")
    assert [taken(client, name) for name in LISTS] == [
        ["7", "10", "waits"],
        ["8", "11", "waits"],
        ["9", "12", "waits"],
    ]
    assert left(ledger) == {f"{OTHER}:50:celery"}
    assert client.exists(ledger.dead, ledger.names) == 0
    assert ledger.move_all(OWN).messages == 0


def test_a_moved_message_is_another_delivery_and_nothing_else_of_it_changes(
    ledger: Ledger, client: Redis
) -> None:
    odd = {"big": 2**80, "none": None, "empty": [], "text": "\ud83d\ude00 \u00e4", "part": 0.1}
    before = json.loads(entry("0", **odd))[0]
    note(ledger, OWN, "celery", **odd)
    declare_dead(ledger, OWN)
    ledger.move_all(OWN)
    [after] = [json.loads(text) for text in client.lrange("celery", 0, -1)]
    properties = after["properties"]
    assert after["headers"].pop("redelivered") is True
    assert properties["delivery_info"].pop("redelivered") is True
    assert properties.pop(MOVES) == 1
    assert properties.pop("delivery_tag") != before["properties"].pop("delivery_tag")
    assert DeliveryTag.of(properties.get("delivery_tag")) is None
    assert after == before


def test_a_message_that_is_moved_again_and_again_stays_at_last(
    ledger: Ledger, client: Redis
) -> None:
    note(ledger, OWN, "celery", **{MOVES: MAX_MOVES - 1})
    declare_dead(ledger, OWN)
    assert ledger.move_all(OWN).messages == 1
    [moved] = client.lrange("celery", 0, -1)
    tag = f"{OTHER}:0:celery"
    client.hset(ledger.unacked, tag, json.dumps([json.loads(moved), "", "celery"]))
    client.zadd(ledger.index, {tag: 1})
    client.delete("celery")
    declare_dead(ledger, OTHER)
    done = ledger.move_all(OTHER)
    assert (done.messages, done.kept) == (0, 1)
    assert left(ledger) == {tag}
    assert client.exists("celery", ledger.dead, ledger.names) == 0  # nobody looks for it again


@pytest.mark.parametrize("keys", [{}, {"global_keyprefix": "shop:", "unacked_key": "mine"}])
def test_keys_have_the_prefix_of_the_broker_and_its_unacked_key(
    broker: EmbeddedNode, client: Redis, keys: dict[str, str]
) -> None:
    ledger = open_ledger(broker.url, unacked_index_key="index", **keys)
    at, name = keys.get("global_keyprefix", ""), keys.get("unacked_key", "unacked")
    note(ledger, OWN, "celery")
    declare_dead(ledger, OTHER)
    assert set(client.keys()) == {
        f"{at}{name}",
        f"{at}index",
        f"{at}{{redlock}}:worker_leases_dead:{name}",
        f"{at}{{redlock}}:worker_names:{name}",
    }
    declare_dead(ledger, OWN)
    ledger.move_all(OWN)
    assert taken(client, f"{at}celery") == ["0"]


# movers


def test_two_movers_at_once_move_each_message_once(broker: EmbeddedNode, client: Redis) -> None:
    movers = [open_ledger(broker.url) for _ in range(4)]
    count = 2000
    note(movers[0], OWN, *["celery"] * count)
    declare_dead(movers[0], OWN)
    with ThreadPoolExecutor(len(movers)) as threads:
        done = list(threads.map(lambda mover: mover.move_all(OWN), movers))
    assert sum(one.messages for one in done) == count
    assert sorted(map(int, taken(client, "celery"))) == list(range(count))
    assert left(movers[0]) == set()


def after_calls(number: int) -> Callable[[], None]:
    """Return what ends a mover after so many round trips of its move."""
    calls = iter(range(number))

    def between() -> None:
        if next(calls, None) is None:
            raise MoverEndedError

    return between


def test_a_mover_that_ends_after_any_call_leaves_the_rest_to_another_one(
    ledger: Ledger, client: Redis
) -> None:
    big = "x" * (CHUNK_BYTES // 4)
    count, calls = 20, 0
    for calls in range(100):
        client.flushall()
        note(ledger, OWN, *["celery"] * count, body_encoding=big)
        ledger.beat(OTHER, joins_as="w2@host")
        declare_dead(ledger, OWN)
        try:
            ledger.move_all(OWN, after_calls(calls))
        except MoverEndedError:
            pass
        else:
            break
        client.zadd(ledger.dead, {OWN: 0})  # its claim is over
        assert ledger.beat(OTHER, claims=True).claimed == OWN
        ledger.move_all(OWN)
        assert taken(client, "celery") == [str(number) for number in range(count)]
        assert left(ledger) == set()
        assert client.exists(ledger.dead) == 0
    assert calls > 4  # a scan, and several chunks


def test_a_move_goes_on_with_its_claim(ledger: Ledger, client: Redis) -> None:
    note(ledger, OWN, "celery", "celery")
    declare_dead(ledger, OWN)
    client.zadd(ledger.dead, {OWN: 0})
    claims = []

    def between() -> None:
        claims.append(client.zscore(ledger.dead, OWN))

    ledger.move_all(OWN, between)
    first, last = claims[0], claims[-1]
    assert first == 0 < last <= now(client)


def test_what_the_broker_has_no_memory_for_stays_and_is_moved_later() -> None:
    with EmbeddedNode(maxmemory_policy="noeviction") as small:
        ledger, client = open_ledger(small.url), small.client()
        note(ledger, OWN, *["celery"] * 100, body_encoding="x" * 20_000)
        ledger.beat(OTHER, joins_as="w2@host")
        declare_dead(ledger, OWN)
        tags = left(ledger)
        client.config_set("maxmemory", client.info("memory")["used_memory"] // 2)
        done = ledger.move_all(OWN)
        assert "OOM" in done.refusal
        assert done.messages == 0
        assert left(ledger) == tags
        assert client.exists("celery") == 0
        client.config_set("maxmemory", 0)
        client.zadd(ledger.dead, {OWN: 0})
        assert ledger.beat(OTHER, claims=True).claimed == OWN
        assert ledger.move_all(OWN).messages == 100
        assert len(taken(client, "celery")) == 100


def test_a_list_that_is_none_stops_no_other_message_and_its_own_are_moved_later(
    ledger: Ledger, client: Redis
) -> None:
    note(ledger, OWN, "celery", "taken", "other")
    client.set("taken", "by another program")
    declare_dead(ledger, OWN)
    done = ledger.move_all(OWN)
    assert (done.messages, done.kept) == (2, 0)
    assert "WRONGTYPE" in done.refusal
    assert left(ledger) == {f"{OWN}:1:taken"}
    assert client.get("taken") == "by another program"
    assert client.zscore(ledger.dead, OWN) is not None
    assert ledger.name_of(OWN) == "w1@host"
    client.delete("taken")
    assert ledger.move_all(OWN).messages == 1
    assert taken(client, "taken") == ["1"]


def test_what_is_refused_of_a_lease_that_was_forgotten_is_claimed(
    ledger: Ledger, client: Redis
) -> None:
    """Its worker noted it late, and may end before it tries again."""
    note(ledger, OWN, "taken")
    client.set("taken", "by another program")
    assert "WRONGTYPE" in ledger.move_all(OWN).refusal
    client.delete("taken")
    client.zadd(ledger.dead, {OWN: 0}, xx=True)  # its claim is over
    ledger.beat(OTHER, joins_as="w2@host")
    assert ledger.beat(OTHER, claims=True).claimed == OWN


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "[1]", '["x"]', "[[]]", '[{"properties": 3}]', "[{}]", "\xff"]
)
def test_an_entry_that_kombu_did_not_write_stays_and_stops_no_other_one(
    ledger: Ledger, client: Redis, text: str
) -> None:
    note(ledger, OWN, "celery", "celery")
    tag = f"{OWN}:0:celery"
    client.hset(ledger.unacked, tag, text)
    client.hset(ledger.unacked, f"{OWN}:odd", text)
    declare_dead(ledger, OWN)
    done = ledger.move_all(OWN)
    assert (done.messages, done.kept, done.refusal) == (1, 2, "")
    assert client.hgetall(ledger.unacked) == {tag: text, f"{OWN}:odd": text}
    assert taken(client, "celery") == ["1"]
    assert client.exists(ledger.dead) == 0


# an earlier owner that knows nothing of it


def test_what_an_earlier_owner_does_late_hits_nothing_of_a_later_one(
    broker: EmbeddedNode, client: Redis
) -> None:
    ledger = open_ledger(broker.url)
    with Connection(broker.url) as connection:
        earlier, later = connection.channel(), connection.channel()
        note(ledger, OWN, *["celery"] * 4)
        tags = [f"{OWN}:{number}:celery" for number in range(4)]
        declare_dead(ledger, OWN)
        ledger.move_all(OWN)
        assert taken(client, "celery") == ["0", "1", "2", "3"]
        texts = client.lrange("celery", 0, -1)
        client.delete("celery")
        for number, text in enumerate(texts):  # a later owner has them
            tag = f"{OTHER}:{number}:celery"
            client.hset(ledger.unacked, tag, json.dumps([json.loads(text), "", "celery"]))
            client.zadd(ledger.index, {tag: time.time()})
        before = client.hgetall(ledger.unacked)
        earlier.qos.ack(tags[0])
        earlier.qos.reject(tags[1])
        earlier.qos.reject(tags[2], requeue=True)
        earlier.qos.restore_by_tag(tags[3])
        earlier.qos.restore_unacked()
        earlier.qos.restore_visible()
        assert client.hgetall(ledger.unacked) == before
        assert client.exists("celery") == 0
        later.qos.ack(f"{OTHER}:0:celery")
        assert left(ledger) == {f"{OTHER}:{number}:celery" for number in (1, 2, 3)}


def test_kombus_own_restore_and_a_move_at_once_give_each_message_back_once(
    broker: EmbeddedNode, client: Redis
) -> None:
    ledger, count = open_ledger(broker.url), 500
    with Connection(broker.url) as connection:
        channel = connection.channel()
        note(ledger, OWN, *["x"] * count)
        channel.queue_declare("x")
        declare_dead(ledger, OWN)
        with ThreadPoolExecutor(2) as threads:
            moves = threads.submit(ledger.move_all, OWN)
            for number in reversed(range(count)):
                channel.qos.restore_by_tag(f"{OWN}:{number}:x")
            moved = moves.result().messages
        assert 0 <= moved <= count
        assert sorted(map(int, taken(client, "x"))) == list(range(count))
        assert left(ledger) == set()
