"""One send of what is sent once, over real nodes: who is dropped, and that nobody is for nothing.

A message is a line in a list here; the list is the broker.
"""

from __future__ import annotations

import itertools
import logging
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from celery import Celery, chain, group
from celery._state import get_current_app
from celery.app.task import Context
from celery.exceptions import Ignore
from redis import Redis

from celery_redlock import (
    DuplicateTask,
    LockedTask,
    QuorumUnreachable,
    Redlock,
    RedlockError,
    SettingsError,
    current_lock,
    send_unique,
)
from celery_redlock.label import RunId
from celery_redlock.lock.server.requests import UNIQUE
from celery_redlock.tasks.delivery.delivery import Delivery
from celery_redlock.tasks.delivery.header import HEADER, Deferral, LockHeader
from celery_redlock.tasks.execution.outcomes import put_back_if_early
from celery_redlock.tasks.per_app import redlock_of, time_of_nodes
from celery_redlock.tasks.settings.options import BUILT_IN, TaskLockOptions
from celery_redlock.tasks.unique import rounds
from celery_redlock.tasks.unique.claim import DEBOUNCE_PATIENCE, SENDING_TTL, Claim, ClaimToken
from celery_redlock.tasks.unique.rounds import EarlierSend
from celery_redlock.tasks.unique.send import add_to_header, unique_name
from celery_redlock.testing import EmbeddedNode
from tests.conftest import NODE_TIMEOUT, PATIENCE, Nodes, eventually, paused, settle
from tests.contract.conftest import MAJORITY, REDIS_SERVER, at_once, in_child, quorum_of
from tests.contract.proxy import FAIR, Way, Weather, proxies

NAME = "shop.settle:7"
KEY = "{redlock}:unique:" + NAME
LONG, SHORT = 500.0, 1.0  # s: windows that outlive a test, and that do not
LATE = 3600.0  # s: for which a debounced message may come after it is due
MakeSender = Callable[..., "Sender"]
_ids = map(str, itertools.count(1))


def a_claim(redlock: Redlock, name: str = NAME, unique_for: float = LONG, **options: Any) -> Claim:
    run_id = RunId(next(_ids), "shop.settle")
    lock_options = TaskLockOptions(**{**BUILT_IN, "ttl": 30.0, **options})
    return Claim(redlock.session, name, run_id, lock_options, unique_for, LATE)


def id_of(claim: Claim) -> str:
    return claim.run_id.task_id


class Sender:
    """A process that sends. published: what each message carries of its window, by task id."""

    def __init__(self, redlock: Redlock, published: dict[str, Any]) -> None:
        self.redlock, self.published = redlock, published

    def send(self, **options: Any) -> str:
        """Return the id of the message that is good now."""
        claim = a_claim(self.redlock, **options)

        def publish(ticket: ClaimToken | None) -> str:
            settle_voters(self.redlock)  # a broker takes its time, in which the last node answers
            self.published[id_of(claim)] = None if ticket is None else ticket.to_message()
            return id_of(claim)

        found = claim.send(publish)
        settle_voters(self.redlock)
        return found.task_id if isinstance(found, EarlierSend) else found

    def ticket(self, task_id: str) -> ClaimToken:
        ticket = ClaimToken.of(self.published[task_id])
        assert ticket is not None
        return ticket

    def end(self, task_id: str) -> None:
        self.ticket(task_id).release_at_end(self.redlock.session)
        settle_voters(self.redlock)


def settle_voters(redlock: Redlock) -> None:
    """Return when every node that is connected has executed what was written to it."""
    quorum = redlock.session.nodes
    eventually(lambda: quorum.drain() or not quorum.outstanding)


@pytest.fixture
def sender(redlock: Redlock) -> Sender:
    return Sender(redlock, {})


@pytest.fixture
def make_sender() -> Iterator[MakeSender]:
    """Give a function that makes one more sending process over some nodes."""
    made, published = [], {}

    def make(nodes: Sequence[Any], node_timeout: float = PATIENCE) -> Sender:
        redlock = Redlock([n.url for n in nodes], node_timeout=node_timeout, restart_guard="off")
        made.append(redlock)
        return Sender(redlock, published)

    yield make
    for redlock in made:
        redlock.close()


def values(nodes: Nodes) -> list[str | None]:
    return [node.client().get(KEY) for node in nodes]


def scripts_run(node: EmbeddedNode) -> int:
    return int(node.client().info("commandstats")["cmdstat_evalsha"]["calls"])


def is_sent(value: str | None, task_id: str) -> bool:
    return value is not None and EarlierSend.of(value, 1).is_sent and f":{task_id}:" in value


class TestScript:
    @pytest.fixture
    def client(self, nodes: Nodes) -> Redis:
        return nodes[0].client()

    def swap(self, client: Redis, believed: str, new: str, *terms: str) -> Any:
        given = terms or ("30000", "20000")
        return client.eval(UNIQUE.source.decode(), 1, KEY, believed, new, *given)

    def test_what_nobody_sent_is_set_for_as_long_as_it_is_unconfirmed(self, client: Redis) -> None:
        assert self.swap(client, "", "mine:1") == 1
        value, first, ends = str(client.get(KEY)).split(" ")
        assert (value, int(ends) - int(first)) == ("mine:1", 30_000)
        assert now_ms(client) - PATIENCE * 1000 < int(first) <= now_ms(client)
        assert 10_000 < client.pttl(KEY) <= 20_000

    def test_the_same_again_changes_nothing(self, client: Redis) -> None:
        self.swap(client, "", "mine:1")
        client.pexpire(KEY, 10_000)
        assert self.swap(client, "", "mine:1") == 1
        assert client.pttl(KEY) <= 10_000

    @pytest.mark.parametrize("stored", ["theirs:1", "theirs:1 7 8"])
    def test_another_value_stays_and_is_told(self, client: Redis, stored: str) -> None:
        client.set(KEY, stored, px=20_000)
        for believed in ("", "mine", "theirs:12"):
            left, value, age = self.swap(client, believed, "mine:1")
            assert value == "theirs:1"
            assert 0 < left <= 20_000
            assert age == 0 or stored != "theirs:1"
        assert client.get(KEY) == stored

    def test_it_ends_when_its_send_said_however_late_it_is_confirmed(self, client: Redis) -> None:
        self.swap(client, "", "mine:1", "30000", "20000")
        ends = str(client.get(KEY)).split(" ")[2]
        assert self.swap(client, "mine", "mine:2", "", "") == 1
        assert str(client.get(KEY)).split(" ")[::2] == ["mine:2", ends]
        assert 20_000 < client.pttl(KEY) <= 30_000
        client.set(KEY, "mine:2 7 8")
        assert self.swap(client, "mine", "mine:3", "", "") == 1
        assert not client.exists(KEY)

    def test_what_replaces_another_is_of_the_same_burst(self, client: Redis) -> None:
        client.set(KEY, f"mine:1 {now_ms(client) - 9000} 8")
        assert self.swap(client, "mine", "next:1") == 1
        assert 9000 <= self.swap(client, "", "other:1")[2] < 9000 + PATIENCE * 1000
        assert self.swap(client, "next", "next:2", "", "") == 1
        assert 9000 <= self.swap(client, "", "other:1")[2] < 9000 + PATIENCE * 1000

    def test_what_is_replaced_in_vain_is_put_back_until_its_end(self, client: Redis) -> None:
        replaced = f"mine:1 {now_ms(client) - 9000} {now_ms(client) + 40_000}"
        for stored in (replaced, f"{replaced}\nold:1 7 8"):
            client.set(KEY, stored)
            self.swap(client, "mine", "next:1")
            assert self.swap(client, "next", "", "back", "") == 1
            assert client.get(KEY) == replaced
            assert 10_000 < client.pttl(KEY) <= 40_000
        client.set(KEY, "mine:1 7 8")
        self.swap(client, "mine", "next:1")
        assert self.swap(client, "next", "", "back", "") == 1
        assert not client.exists(KEY)

    def test_it_is_deleted_where_nothing_is_to_stand(self, client: Redis) -> None:
        for how in ("", "back"):
            client.set(KEY, "mine:1")
            assert self.swap(client, "mine", "", how, "") == 1
            assert not client.exists(KEY)

    def test_what_is_gone_is_not_set_again(self, client: Redis) -> None:
        assert self.swap(client, "mine", "mine:2") == 0
        assert not client.exists(KEY)


def now_ms(client: Redis) -> int:
    seconds, us = client.time()
    return int(seconds) * 1000 + int(us) // 1000


class TestOneSend:
    def test_a_second_send_in_the_window_is_not_published(
        self, sender: Sender, nodes: Nodes
    ) -> None:
        first = sender.send()
        assert sender.send() == first
        assert list(sender.published) == [first]
        assert all(is_sent(value, first) for value in values(nodes))
        for node in nodes:
            assert LONG - 100 < node.client().pttl(KEY) / 1000 <= LONG

    def test_another_resource_is_sent(self, sender: Sender) -> None:
        first = sender.send()
        assert sender.send(name="shop.settle:8") != first

    def test_the_end_of_the_run_ends_the_window(self, sender: Sender, nodes: Nodes) -> None:
        first = sender.send()
        sender.end(first)
        assert values(nodes) == [None] * len(nodes)
        assert sender.send() != first

    def test_the_end_of_an_earlier_run_leaves_a_later_window(
        self, sender: Sender, nodes: Nodes
    ) -> None:
        first = sender.send()
        sender.end(first)
        second = sender.send()
        sender.end(first)
        assert all(is_sent(value, second) for value in values(nodes))

    def test_a_window_that_is_to_last_outlives_the_run(self, sender: Sender) -> None:
        first = sender.send(unique_until="expired")
        sender.end(first)
        assert sender.send() == first

    def test_a_run_that_ends_before_its_sender_says_that_it_was_sent_leaves_nothing(
        self, sender: Sender, nodes: Nodes
    ) -> None:
        def publish(ticket: Any) -> str:
            ticket.release_at_end(sender.redlock.session)
            return "sent and done"

        assert a_claim(sender.redlock).send(publish) == "sent and done"
        settle(sender.redlock)
        assert values(nodes) == [None] * len(nodes)

    def test_a_publish_that_fails_ends_the_window(self, sender: Sender, nodes: Nodes) -> None:
        def publish(ticket: Any) -> str:
            raise OSError("no broker")

        with pytest.raises(OSError, match="no broker"):
            a_claim(sender.redlock).send(publish)
        settle(sender.redlock)
        assert values(nodes) == [None] * len(nodes)

    def test_nothing_is_kept_beyond_the_window(self, sender: Sender, nodes: Nodes) -> None:
        first = sender.send(unique_for=LONG)
        for node in nodes:
            assert 0 < node.client().pttl(KEY) <= 1000 * LONG
            node.client().delete(KEY)  # as at its end
        assert sender.send() != first

    def test_it_ends_in_time_however_long_its_publish_takes(
        self, redlock: Redlock, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock, claim = redlock.session.clock, a_claim(redlock)
        now = clock.now

        def publish(ticket: Mapping[str, Any] | None) -> str:
            settle_voters(redlock)
            monkeypatch.setattr(clock, "now", lambda: now() + 60)
            return id_of(claim)

        claim.send(publish)
        settle_voters(redlock)
        assert all(is_sent(value, id_of(claim)) for value in values(nodes))
        for node in nodes:
            assert node.client().pttl(KEY) / 1000 <= LONG


class TestSendersThatDie:
    def test_a_send_that_was_never_published_holds_nobody_for_longer_than_its_lease(
        self, redlock: Redlock, sender: Sender, nodes: Nodes
    ) -> None:
        dead = a_claim(redlock)
        assert dead.open() is None
        assert dead.message_token is not None
        settle(redlock)
        for node in nodes:
            assert 0 < node.client().pttl(KEY) <= 4000 * PATIENCE
            node.client().delete(KEY)  # as at its end
        sent = sender.send()
        assert list(sender.published) == [sent]

    def test_a_process_that_ends_right_after_its_send_has_confirmed_it(
        self, redlock: Redlock, sender: Sender
    ) -> None:
        """Its message is there, and no code of its process runs any more."""

        def publish(token: ClaimToken | None) -> bool:
            settle_voters(redlock)
            return token is not None

        in_child(lambda: a_claim(redlock).send(publish))
        sender.send()
        assert not sender.published

    @REDIS_SERVER
    def test_it_is_not_taken_for_an_earlier_send(
        self, redlock: Redlock, sender: Sender, nodes: Nodes, pool: ThreadPoolExecutor
    ) -> None:
        dead = a_claim(redlock)
        dead.open()
        before = scripts_run(nodes[0])
        waiting = pool.submit(sender.send)
        eventually(lambda: scripts_run(nodes[0]) > before + 3)  # it has met the key, and waits
        assert not sender.published
        dead.give_up()
        waiting.result(60)
        assert len(sender.published) == 1

    @MAJORITY
    def test_no_try_asks_for_a_window_by_a_token_that_was_released(
        self, redlock: Redlock, sender: Sender, nodes: Nodes, pool: ThreadPoolExecutor
    ) -> None:
        """A node that was away hears of a release late: then it would end the next try's window."""
        dead = a_claim(redlock)
        dead.open()
        nodes[2].client().delete(KEY)  # so that each try takes this one, and releases it
        with nodes[2].client().monitor() as monitor:
            waiting = pool.submit(sender.send)
            taken, released = list[str](), list[str]()
            while len(released) < 3:
                words = monitor.next_command()["command"].split(" ")
                if words[0] == "EVALSHA":
                    believed, value = words[words.index(KEY) + 1 :][:2]
                    if value:
                        taken.append(value)
                    else:
                        released.append(believed)
        dead.give_up()
        waiting.result(60)
        assert [value.partition(":")[0] for value in taken[:3]] == released
        assert len(set(released)) == 3

    def test_who_waits_for_a_sender_gets_its_message_once_it_is_sent(
        self, redlock: Redlock, sender: Sender, pool: ThreadPoolExecutor
    ) -> None:
        slow = a_claim(redlock)
        slow.open()
        waiting = pool.submit(sender.send)
        slow.confirm()
        assert waiting.result(60) == id_of(slow)
        assert not sender.published

    def test_a_send_whose_claim_expires_before_it_is_published_says_so(
        self, make_sender: MakeSender, nodes: Nodes, caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        redlock = make_sender(nodes).redlock
        clock = redlock.session.clock
        now = clock.now

        def publish(ticket: Any) -> None:
            settle(redlock)
            monkeypatch.setattr(clock, "now", lambda: now() + 5 * PATIENCE)
            for node in nodes:
                node.client().delete(KEY)  # as at its end

        with caplog.at_level(logging.WARNING):
            a_claim(redlock).send(publish)
            assert "took too long to publish" in caplog.text
            caplog.clear()
            a_claim(redlock, unique_for=0.5).send(publish)  # by then no send is a duplicate
        assert not caplog.text


class TestManySenders:
    def test_of_many_at_once_one_is_sent_and_the_others_learn_its_id(
        self, nodes: Nodes, make_sender: MakeSender
    ) -> None:
        senders = [make_sender(nodes) for _ in range(8)]
        for each in senders:
            settle(each.redlock)
        for _ in range(5):
            published = senders[0].published
            published.clear()
            found = at_once(*(each.send for each in senders))
            assert len(published) == 1
            assert set(found) == set(published)
            senders[0].end(found[0])

    def test_of_many_that_replace_each_other_one_at_least_is_not_superseded(
        self, nodes: Nodes, make_sender: MakeSender
    ) -> None:
        senders = [make_sender(nodes) for _ in range(6)]
        for each in senders:
            settle(each.redlock)
        published = senders[0].published
        for _ in range(5):
            published.clear()
            first = senders[0].send(debounce=LONG)
            found = at_once(*(partial(each.send, debounce=LONG) for each in senders))
            assert set(found) == set(published) - {first}  # each was sent
            left = [task_id for task_id in published if not superseded(nodes, task_id)]
            assert left  # mostly one: who finds the nodes at odds for too long is sent beside it
            assert first not in left
            for node in nodes:
                node.client().delete(KEY)


def superseded(nodes: Nodes, task_id: str) -> bool:
    mark = f"{{redlock}}:done:{task_id}:shop.settle:0:0"
    marks = [node.client().get(mark) for node in nodes]
    found = [mark for mark in marks if mark is not None]
    assert all(int(mark.split()[0]) < 0 for mark in found)
    return len(found) > len(nodes) / 2


def lasts(nodes: Nodes) -> list[float]:
    return [node.client().pttl(KEY) / 1000 for node in nodes]


def make_older(nodes: Nodes, *seconds: float) -> None:
    """Let the first send of the burst be so much longer ago, by each node's clock."""
    for node, longer in zip(nodes, seconds, strict=False):
        client = node.client()
        value, first, ends = str(client.get(KEY)).split(" ")
        moved = f"{value} {int(first) - int(longer * 1000)} {ends}"
        client.set(KEY, moved, px=client.pttl(KEY))


class TestDebounce:
    def test_the_later_one_is_sent_and_the_earlier_one_marked(
        self, sender: Sender, nodes: Nodes
    ) -> None:
        first = sender.send(debounce=LONG)
        second = sender.send(debounce=LONG)
        assert list(sender.published) == [first, second]
        assert superseded(nodes, first)
        assert not superseded(nodes, second)
        assert all(is_sent(value, second) for value in values(nodes))

    def test_a_send_lasts_until_its_run_is_due_whatever_becomes_of_the_run(
        self, sender: Sender, nodes: Nodes
    ) -> None:
        first = sender.send(debounce=LONG)
        sender.ticket(first).release_at_start(sender.redlock.session)
        sender.end(first)
        assert all(is_sent(value, first) for value in values(nodes))
        assert max(lasts(nodes)) <= LONG
        for node in nodes:
            node.client().delete(KEY)  # as at its end
        second = sender.send(debounce=LONG)
        assert not superseded(nodes, first)  # what is due is never dropped
        assert not sender.ticket(second).replaces

    @pytest.mark.parametrize("ages", [(450,) * 3, (450, 450, 0), (450, 450, 10**6)])
    def test_no_send_postpones_a_run_beyond_the_longest_time_of_its_burst(
        self, sender: Sender, nodes: Nodes, ages: tuple[float, ...]
    ) -> None:
        """Not by one node's clock either, which was set."""
        bounded = {"debounce": LONG, "debounce_max": LONG}
        sender.send(**bounded)
        make_older(nodes, *ages)
        for _ in range(2):
            last = sender.send(**bounded)
            assert all(is_sent(value, last) for value in values(nodes))
            assert max(lasts(nodes)) <= LONG - 450
        sender.send(debounce=LONG)
        assert min(lasts(nodes)) > LONG - 450

    @MAJORITY
    def test_nodes_that_missed_calls_one_after_the_other_learn_when_the_burst_began(
        self, sender: Sender, nodes: Nodes
    ) -> None:
        bounded = {"debounce": LONG, "debounce_max": LONG}
        sender.send(**bounded)
        make_older(nodes, 450, 450, 450)
        for node in nodes:
            node.client().delete(KEY)  # as if it had been away
            last = sender.send(**bounded)
            assert all(is_sent(value, last) for value in values(nodes))
            assert max(lasts(nodes)) <= LONG - 450

    def test_it_waits_a_second_for_a_sender_that_is_not_done_and_goes_beside_it(
        self, redlock: Redlock, sender: Sender, nodes: Nodes
    ) -> None:
        bounded = {"debounce": LONG, "debounce_max": LONG}
        slow = a_claim(redlock, **bounded)
        slow.open()
        make_older(nodes, 450, 450, 450)
        beside = a_claim(redlock, **bounded)
        clock = redlock.session.clock
        began = clock.now()
        assert beside.send(lambda ticket: ticket) is None
        assert DEBOUNCE_PATIENCE <= clock.now() - began < SENDING_TTL
        assert beside.duration <= LONG - 450
        slow.confirm()
        settle_voters(redlock)
        assert all(is_sent(value, id_of(slow)) for value in values(nodes))

    def test_a_clock_that_was_set_back_delays_a_run_by_its_countdown_at_most(
        self, nodes: Nodes
    ) -> None:
        app = Celery("shop", broker="memory://", set_as_default=False)
        app.conf.redlock_nodes = [node.url for node in nodes]

        @app.task(base=LockedTask, lock_key="k", name="late")
        def late() -> None: ...

        at = time_of_nodes(app) + 3600.0  # of a node that is an hour behind by now
        header = LockHeader(id="1", deferral=Deferral(at=at, countdown=9.0)).to_message()
        sent = {"id": "1", "task": "late", "args": (), "kwargs": {}, "retries": 0, HEADER: header}
        own = "set back"  # the queues of memory:// are those of the process
        sent["delivery_info"] = {"exchange": "", "routing_key": own}
        with pytest.raises(Ignore):
            put_back_if_early(Delivery(late, Context(sent)), 0.0)
        with app.connection_for_read() as connection, connection.SimpleQueue(own) as queue:
            deferral = LockHeader.of(Context(queue.get(timeout=60).headers)).deferral
        assert deferral.countdown == 9.0
        assert 0.0 < deferral.remaining(time_of_nodes(app)) <= 9.0
        redlock_of(app).close()
        app.close()

    def test_what_is_put_back_ends_when_its_run_is_due(self, sender: Sender, nodes: Nodes) -> None:
        first = sender.send(debounce=SHORT)

        def publish(ticket: Any) -> str:
            eventually(lambda: sender.redlock.session.clock.now() > late)
            raise OSError("no broker")

        late = sender.redlock.session.clock.now() + SHORT
        with pytest.raises(OSError, match="no broker"):
            a_claim(sender.redlock, debounce=LONG).send(publish)
        settle(sender.redlock)
        assert values(nodes) == [None] * len(nodes)
        assert not superseded(nodes, first)

    def test_what_is_published_says_whose_place_it_takes(
        self, sender: Sender, nodes: Nodes
    ) -> None:
        first = sender.send(debounce=LONG)
        second = sender.send(debounce=LONG)
        for node in nodes:
            node.client().flushall()
        sender.ticket(second).mark_superseded(sender.redlock.session, "shop.settle")
        settle(sender.redlock)
        assert superseded(nodes, first)

    @pytest.mark.parametrize("other", ["1:shop.other:0:0", "1:shop.settle:1:0", "1", "x" * 9999])
    def test_a_message_takes_the_place_of_no_run_but_a_first_one_of_its_own_task(
        self, sender: Sender, nodes: Nodes, other: str
    ) -> None:
        forged = replace(sender.ticket(sender.send()), replaces=other)
        forged.mark_superseded(sender.redlock.session, "shop.settle")
        settle(sender.redlock)
        assert not nodes[0].client().keys("*:done:*")

    def test_a_message_takes_the_place_of_another_for_a_year_at_most(
        self, sender: Sender, nodes: Nodes
    ) -> None:
        first, year = sender.send(), 366 * 86_400
        forged = replace(sender.ticket(first), replaces="1:shop.settle:0:0", kept_for=1e10)
        forged.mark_superseded(sender.redlock.session, "shop.settle")
        settle(sender.redlock)
        assert 0 < nodes[0].client().pttl("{redlock}:done:1:shop.settle:0:0") / 1000 <= year

    def test_where_it_cannot_be_published_the_earlier_one_stays(
        self, sender: Sender, nodes: Nodes
    ) -> None:
        def publish(ticket: Any) -> str:
            raise OSError("no broker")

        first = sender.send(debounce=LONG)
        with pytest.raises(OSError, match="no broker"):
            a_claim(sender.redlock, debounce=LONG).send(publish)
        settle(sender.redlock)
        assert not superseded(nodes, first)
        assert all(is_sent(value, first) for value in values(nodes))

    def test_a_run_that_is_done_is_not_marked_otherwise(self, sender: Sender, nodes: Nodes) -> None:
        first = sender.send(debounce=LONG)
        for node in nodes:
            node.client().set(f"{{redlock}}:done:{first}:shop.settle:0:0", "1")
        sender.send(debounce=LONG)
        for node in nodes:
            assert node.client().get(f"{{redlock}}:done:{first}:shop.settle:0:0") == "1"

    def test_the_mark_stays_for_as_long_as_the_message_may_still_come(
        self, sender: Sender, nodes: Nodes
    ) -> None:
        first = sender.send(debounce=5000.0)
        sender.send(debounce=LONG)
        for node in nodes:
            left = node.client().pttl(f"{{redlock}}:done:{first}:shop.settle:0:0") / 1000
            assert 5000.0 + LATE - 100 < left <= 5000.0 + LATE


class TestFaults:
    def test_with_a_node_down_it_is_as_with_all(
        self, mortal_nodes: Nodes, make_sender: MakeSender
    ) -> None:
        sender = make_sender(mortal_nodes)
        mortal_nodes[2].kill()
        first = sender.send()
        assert sender.send() == first
        sender.end(first)
        assert sender.send() != first

    @pytest.mark.slow
    @MAJORITY
    def test_a_node_that_was_away_at_the_end_of_a_window_is_told_once_it_is_back(
        self, nodes: Nodes, make_sender: MakeSender
    ) -> None:
        with proxies(nodes) as made:
            sender = make_sender(made, NODE_TIMEOUT)
            settle(sender.redlock)
            first = sender.send()
            made[2].weather = Weather(refuses=True)
            made[2].cut()
            sender.ticket(first).release_at_end(sender.redlock.session)
            eventually(lambda: values(nodes[:2]) == [None, None])
            eventually(lambda: sender.redlock.session.nodes.all[2].error is not None)
            assert is_sent(values(nodes)[2], first)
            made[2].weather = FAIR
            eventually(lambda: values(nodes) == [None] * len(nodes))
            sender.redlock.close()

    @pytest.mark.slow
    def test_a_quorum_that_was_away_at_the_end_of_a_window_is_told_however_late(
        self, nodes: Nodes, make_sender: MakeSender,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        monkeypatch.setattr(rounds, "RELEASE_RETRY_TIME", 0.1)
        with proxies(nodes) as made:
            sender = make_sender(made, NODE_TIMEOUT)
            settle(sender.redlock)
            first = sender.send()
            away = quorum_of(made)
            for proxy in away:
                proxy.weather = Weather(refuses=True)
                proxy.cut()
            sender.ticket(first).release_at_end(sender.redlock.session)
            late = time.monotonic() + 2 * rounds.RELEASE_RETRY_TIME
            eventually(lambda: not any(values(nodes)[len(away) :]) and time.monotonic() > late)
            assert all(is_sent(value, first) for value in values(nodes)[: len(away)])
            for proxy in away:
                proxy.weather = FAIR
            eventually(lambda: values(nodes) == [None] * len(nodes))
            sender.redlock.close()

    def test_a_body_begins_once_a_quorum_has_heard_that_its_window_is_over(
        self, nodes: Nodes, make_sender: MakeSender
    ) -> None:
        with proxies(nodes) as made:
            sender = make_sender(made)
            settle(sender.redlock)
            first = sender.send(unique_until="started")
            for proxy in quorum_of(made):
                proxy.weather = Weather(delay=(0.2, 0.2))
            sender.ticket(first).release_at_start(sender.redlock.session)
            assert values(nodes).count(None) > len(nodes) / 2
            sender.redlock.close()

    def test_a_node_that_refuses_to_end_a_window_is_told_again(
        self, mortal_nodes: Nodes, make_sender: MakeSender,
        caplog: pytest.LogCaptureFixture,
    ) -> None:  # fmt: skip
        sender = make_sender(mortal_nodes, 0.5)
        settle(sender.redlock)
        first = sender.send(unique_until="started")
        for node in mortal_nodes[1:]:
            node.client().config_set("min-replicas-to-write", 1)
        with caplog.at_level(logging.WARNING):
            sender.ticket(first).release_at_start(sender.redlock.session)
        assert f"no quorum of nodes released unique key '{NAME}'" in caplog.text
        assert all(is_sent(value, first) for value in values(mortal_nodes)[1:])
        for node in mortal_nodes[1:]:
            node.client().config_set("min-replicas-to-write", 0)

        def is_released() -> bool:
            settle(sender.redlock)
            return values(mortal_nodes) == [None] * len(mortal_nodes)

        eventually(is_released)

    @MAJORITY
    def test_what_a_node_hears_of_a_send_after_the_end_of_its_run_leaves_nothing(
        self, nodes: Nodes, make_sender: MakeSender
    ) -> None:
        with proxies(nodes) as made:
            sender, worker = make_sender(made), make_sender(nodes)
            for each in (sender, worker):
                settle(each.redlock)
            made[2].weather = Weather(swallows=frozenset({Way.TO_NODE}))
            a_claim(sender.redlock).send(
                lambda ticket: worker.published.update(it=ticket.to_message())
            )
            worker.end("it")
            assert values(nodes) == [None] * len(nodes)
            made[2].weather = FAIR
            settle(sender.redlock)
            assert values(nodes) == [None] * len(nodes)
            sender.redlock.close()

    def test_without_a_quorum_it_is_sent_with_a_warning_and_leaves_nothing(
        self, mortal_nodes: Nodes, make_sender: MakeSender,
        caplog: pytest.LogCaptureFixture,
    ) -> None:  # fmt: skip
        sender = make_sender(mortal_nodes, NODE_TIMEOUT)
        first = sender.send()
        for node in mortal_nodes[1:]:
            node.kill()
        with caplog.at_level(logging.WARNING):
            second, third = sender.send(), sender.send()
        assert list(sender.published) == [first, second, third]
        assert sender.published[second] is None
        assert "without deduplication" in caplog.text
        assert is_sent(values(mortal_nodes[:1])[0], first)  # the window of the first one stays

    def test_without_a_quorum_it_is_refused_where_that_is_asked_for(
        self, mortal_nodes: Nodes, make_sender: MakeSender
    ) -> None:
        sender = make_sender(mortal_nodes, NODE_TIMEOUT)
        for node in mortal_nodes[1:]:
            node.kill()
        with pytest.raises(QuorumUnreachable) as caught:
            sender.send(on_unreachable="fail")
        assert not sender.published
        error = caught.value
        assert (error.resource, error.waited > 0) == (NAME.partition(":")[2], True)
        dead = [f"127.0.0.1:{node.port}" for node in mortal_nodes[1:]]
        assert [cause.partition(": ")[0] for cause in error.causes] == dead
        eventually(lambda: values(mortal_nodes[:1]) == [None])

    @MAJORITY
    def test_without_a_quorum_the_silent_nodes_are_named(
        self, nodes: Nodes, make_sender: MakeSender
    ) -> None:
        sender = make_sender(nodes, 0.3)
        settle(sender.redlock)
        with paused(*nodes[1:]), pytest.raises(QuorumUnreachable) as caught:
            sender.send(name=unique_name("shop.settle", ("a", "b")), on_unreachable="fail")
        assert caught.value.resource == "a, b"
        silent = {f"127.0.0.1:{node.port}: no answer in time" for node in nodes[1:]}
        assert silent <= {*caught.value.causes}  # on a busy machine the first may be late, too
        assert caught.value.waited >= 0.3

    @MAJORITY
    def test_a_minority_that_still_knows_an_earlier_send_drops_nothing(
        self, sender: Sender, nodes: Nodes
    ) -> None:
        first = sender.send()
        for node in nodes[:2]:
            node.client().delete(KEY)
        second = sender.send()
        assert list(sender.published) == [first, second]
        assert is_sent(values(nodes)[0], second)
        assert is_sent(values(nodes)[2], first)

    @MAJORITY
    def test_a_minority_that_knows_that_an_earlier_one_was_sent_drops_nothing(
        self, sender: Sender, nodes: Nodes
    ) -> None:
        first = sender.send()
        value = values(nodes)[0]
        assert value is not None
        # its run has ended here, and there what its sender wrote came late
        nodes[0].client().delete(KEY)
        nodes[1].client().set(KEY, value.replace(":sent:", ":sending:"), px=60_000)
        second = sender.send(unique_for=SHORT)
        assert list(sender.published) == [first, second]

    def test_nodes_that_name_different_sends_drop_nothing(
        self, mortal_nodes: Nodes, make_sender: MakeSender,
        caplog: pytest.LogCaptureFixture,
    ) -> None:  # fmt: skip
        sender = make_sender(mortal_nodes, NODE_TIMEOUT)
        first = sender.send()
        for node in mortal_nodes[:2]:
            node.client().delete(KEY)
        second = sender.send()
        mortal_nodes[0].kill()
        with caplog.at_level(logging.WARNING):
            third = sender.send()
        assert list(sender.published) == [first, second, third]
        assert "no quorum of nodes agrees" in caplog.text

    def test_what_a_stranger_wrote_drops_nothing(self, sender: Sender, nodes: Nodes) -> None:
        for node in nodes:
            node.client().set(KEY, "theirs", px=300)
        sent = sender.send(unique_for=SHORT)
        assert list(sender.published) == [sent]


@pytest.mark.parametrize(
    "conf",
    [
        {"redlock_unique_for": LONG},
        {"redlock_queues": {"rare": {"unique_for": LONG}}, "task_default_queue": "rare"},
    ],
    ids=["app", "queue"],
)
def test_a_window_that_the_app_or_the_queue_asks_for_is_a_window(
    nodes: Nodes, conf: dict[str, Any]
) -> None:
    app = Celery("levels", broker="memory://", set_as_default=False)
    app.conf.update(redlock_nodes=[node.url for node in nodes], redlock_node_timeout=PATIENCE)
    app.conf.update(conf)

    @app.task(base=LockedTask, shared=False, lock_key="levels")
    def settle() -> None: ...

    first = settle.delay()
    assert settle.delay().id == first.id
    redlock_of(app).close()
    app.close()


class TestItsResult:
    def test_says_whether_the_send_was_a_duplicate(self, sending_app: Celery) -> None:
        @sending_app.task(base=LockedTask, shared=False, lock_unique_for=LONG)
        def settle(order: int) -> None: ...

        first, again = settle.delay(1), settle.delay(1)
        assert (first.is_duplicate, again.is_duplicate) == (False, True)
        assert type(again) is type(first)
        assert again == first
        with_id = settle.apply_async((1,), task_id="own")
        assert not with_id.is_duplicate
        canvas = [
            chain(settle.s(1), settle.si(1)).apply_async(),
            *group(settle.s(1), settle.s(1)).apply_async().results,
            settle.AsyncResult(first.id),
        ]
        assert not any(one.is_duplicate for one in [*canvas, canvas[0].parent])
        sending_app.conf.task_always_eager = True
        assert not settle.delay(1).is_duplicate
        assert not settle.apply((1,)).is_duplicate

    def test_says_so_after_pickle_too(self, sending_app: Celery) -> None:
        @sending_app.task(base=LockedTask, shared=False, lock_unique_for=LONG)
        def settle() -> None: ...

        before = get_current_app()
        sending_app.set_current()
        try:
            for result in (settle.delay(), settle.delay()):
                back = pickle.loads(pickle.dumps(result))
                assert (type(back), back.id) == (type(result), result.id)
                assert back.is_duplicate is result.is_duplicate
        finally:
            before.set_current()

    def test_says_so_of_a_task_that_is_not_deduplicated(self, sending_app: Celery) -> None:
        @sending_app.task(base=LockedTask, shared=False)
        def settle() -> None: ...

        assert not settle.delay().is_duplicate

    def test_says_so_of_a_send_by_name(self, sending_app: Celery) -> None:
        how: Any = {"resource": "r", "unique_for": LONG}
        sent = [send_unique(sending_app, "elsewhere", (), **how) for _ in range(2)]
        assert [one.is_duplicate for one in sent] == [False, True]
        assert not send_unique(sending_app, "elsewhere", (), **how, task_id="own").is_duplicate

    def test_is_refused_by_name_if_nothing_says_how_long(self, sending_app: Celery) -> None:
        with pytest.raises(SettingsError, match="set unique_for or debounce"):
            send_unique(sending_app, "elsewhere", (), resource="r")


class TestItsError:
    def test_says_when_the_claim_of_the_earlier_send_ends(self, sending_app: Celery) -> None:
        how: Any = {"resource": "r", "unique_for": LONG, "on_duplicate": "fail"}
        send_unique(sending_app, "elsewhere", (), **how)
        with pytest.raises(DuplicateTask, match=rf"at the latest in {LONG:.0f} s") as caught:
            send_unique(sending_app, "elsewhere", (), **how)
        assert LONG - 60 < (caught.value.expires_in or 0) <= LONG

    def test_says_nothing_of_it_if_the_claim_has_no_end(
        self, sending_app: Celery, nodes: Nodes
    ) -> None:
        how: Any = {"resource": "r", "unique_for": LONG, "on_duplicate": "fail"}
        send_unique(sending_app, "elsewhere", (), **how)
        settle_voters(redlock_of(sending_app))
        for node in nodes:
            for name in node.client().keys("*:unique:*"):  # a slow node has deleted it
                node.client().persist(name)
        with pytest.raises(DuplicateTask) as caught:
            send_unique(sending_app, "elsewhere", (), **how)
        assert caught.value.expires_in is None

    @MAJORITY
    def test_does_not_believe_one_node_about_it(self, sender: Sender, nodes: Nodes) -> None:
        sender.send()
        for node, seconds in zip(nodes, (LONG * 1000, 300, 300), strict=True):
            node.client().pexpire(KEY, int(seconds * 1000))
        found = a_claim(sender.redlock).send(lambda token: None)
        assert isinstance(found, EarlierSend)
        assert found.expires_in <= 300


def test_a_callable_key_that_gives_none_deduplicates_nothing(sending_app: Celery) -> None:
    def key(task: Any, args: Any, kwargs: Any) -> str | None:
        return f"order:{args[0]}" if args[0] else None

    @sending_app.task(base=LockedTask, shared=False, lock_key=key, lock_unique_for=LONG)
    def settle(order: int) -> bool:
        return current_lock() is None

    assert [settle.apply((order,)).get() for order in (0, 1)] == [True, False]
    assert [settle.delay(order).is_duplicate for order in (0, 0, 1, 1)] == [False] * 3 + [True]
    with pytest.raises(RedlockError, match="takes no lock for these arguments"):
        settle.lock_for(0)


def test_a_send_with_its_parents_headers_has_a_window_of_its_own() -> None:
    parents = {HEADER: {"options": {"ttl": 9}, "id": "parent", "unique": {"token": "theirs"}}}
    options = {"headers": {**parents, "tenant": "a"}, "task_id": "child"}
    add_to_header(options, unique=ClaimToken(token="ours").to_message())
    carried = {"options": {}, "id": "child", "unique": {"token": "ours"}}
    assert options["headers"] == {"tenant": "a", HEADER: carried}
