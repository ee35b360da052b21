"""Sends that take the place of the queued one, over real nodes: who runs, and in which order.

A message is a line in a list here; the list is the broker.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from celery_redlock import QuorumUnreachable, Redlock
from celery_redlock.lock.engine.acquirer import SupersededError
from celery_redlock.lock.server.requests import NEWEST
from celery_redlock.lock.transport.command import Command
from celery_redlock.tasks.unique.claim import (
    DEBOUNCE_PATIENCE,
    LARGEST_NUMBER,
    REPLACED_FOR,
    ClaimToken,
)
from celery_redlock.tasks.unique.newest import OrderRequests
from celery_redlock.tasks.unique.start import start_run
from tests.conftest import NODE_TIMEOUT, Nodes, eventually, settle
from tests.contract.conftest import MAJORITY, at_once
from tests.contract.proxy import Weather, proxies
from tests.contract.test_unique import (
    KEY,
    LATE,
    LONG,
    NAME,
    MakeSender,
    Sender,
    a_claim,
    id_of,
    make_sender,
    now_ms,
    sender,
    settle_voters,
    superseded,
    values,
)

__all__ = ["make_sender", "sender"]  # fixtures
ORDER = KEY.replace(":unique:", ":order:")
HOW: dict[str, Any] = {"on_duplicate": "newest", "unique_until": "started"}
OLD = REPLACED_FOR + 60.0  # s


def send(sender: Sender, **options: Any) -> str:
    return sender.send(**{**HOW, **options})


def start(sender: Sender, task_id: str) -> None:
    """Begin the run of a message, as under its lock."""
    start_run(sender.redlock.session, sender.ticket(task_id), task_id)
    settle_voters(sender.redlock)


def starts(sender: Sender, *task_ids: str) -> list[str]:
    """Begin runs one after the other; return of each who has replaced it, "" if it began."""
    return [who_replaced(sender, task_id) for task_id in task_ids]


def who_replaced(sender: Sender, task_id: str) -> str:
    try:
        start(sender, task_id)
    except SupersededError as error:
        return error.later
    return ""


def lines(value: str | None) -> list[tuple[str, int, int]]:
    """Return the messages of a claim, the newest first: state and id; began, ends."""
    found = [line.rsplit(" ", 3) for line in (value or "").split("\n") if line]
    return [
        (":".join(text.split(":")[1:3]), int(began), int(ends)) for text, _, began, ends in found
    ]


def queued(nodes: Nodes) -> list[str]:
    """Return what each node has queued, which is the same on all of them."""
    settled = [[message for message, _, _ in lines(value)] for value in values(nodes)]
    assert settled == [settled[0]] * len(nodes)
    return settled[0]


def sent(*task_ids: str) -> list[str]:
    return [f"sent:{task_id}" for task_id in task_ids]


def shift(nodes: Nodes, *seconds: float, line: int = 0, ends: bool = False) -> None:
    """Let a message's burst begin, or its line end, so much earlier, by each node's clock."""
    for node, earlier in zip(nodes, seconds, strict=False):
        client = node.client()
        rows = [row.rsplit(" ", 2) for row in str(client.get(KEY)).split("\n")]
        rows[line][2 if ends else 1] = str(int(rows[line][2 if ends else 1]) - int(earlier * 1000))
        client.set(KEY, "\n".join(map(" ".join, rows)), px=client.pttl(KEY))


class TestOneQueued:
    def test_a_later_send_takes_the_place_of_the_queued_one(
        self, sender: Sender, nodes: Nodes
    ) -> None:
        first, second, third = (send(sender) for _ in range(3))
        assert list(sender.published) == [first, second, third]
        assert [superseded(nodes, one) for one in (first, second, third)] == [True, True, False]
        assert queued(nodes) == sent(third)
        for node in nodes:
            name = f"{{redlock}}:done:{first}:shop.settle:0:0"
            assert str(node.client().get(name)).endswith(f" {second}")
            assert node.client().pttl(name) / 1000 > LATE

    def test_a_send_while_one_runs_is_queued(self, sender: Sender, nodes: Nodes) -> None:
        first = send(sender)
        start(sender, first)
        assert queued(nodes) == []
        second = send(sender)
        assert not sender.ticket(second).replaces
        assert not superseded(nodes, first)
        assert starts(sender, second) == [""]

    def test_its_claim_lasts_from_the_last_send(self, sender: Sender, nodes: Nodes) -> None:
        send(sender)
        shift(nodes, *[LONG - 9] * len(nodes), ends=True)
        for node in nodes:
            node.client().pexpire(KEY, 9000)
        last = send(sender)
        assert queued(nodes) == sent(last)
        assert min(node.client().pttl(KEY) for node in nodes) / 1000 > LONG - 60
        for node in nodes:
            node.client().delete(KEY)  # as at its end
        assert not sender.ticket(send(sender)).replaces
        assert not superseded(nodes, last)

    def test_people_are_shown_the_newest_and_can_end_it(
        self, sender: Sender, redlock: Redlock
    ) -> None:
        send(sender)
        last = send(sender)
        (claim,) = redlock.claims().claims
        assert (claim.task_id, claim.is_sent, claim.counts) == (last, True, True)
        redlock.end_claim(claim.resource)
        assert not sender.ticket(send(sender)).replaces

    def test_what_an_older_rule_has_queued_is_replaced(self, sender: Sender, nodes: Nodes) -> None:
        first = sender.send(unique_until="started")
        second = send(sender)
        assert superseded(nodes, first)
        sender.end(first)
        assert queued(nodes) == sent(second)
        assert sender.send(unique_until="started") == second
        sender.send(debounce=LONG)
        assert superseded(nodes, second)


class TestOrder:
    def test_what_was_sent_earlier_does_not_start_after_it(self, sender: Sender) -> None:
        first = send(sender)
        start(sender, first)
        second = send(sender)
        assert starts(sender, second, first) == ["", second]

    def test_a_redelivery_and_a_retry_start_if_no_later_one_has(self, sender: Sender) -> None:
        first = send(sender)
        assert starts(sender, first, first) == ["", ""]
        second = send(sender)
        assert starts(sender, first, second, second, first) == ["", "", "", second]

    def test_it_goes_on_when_a_claim_has_ended(self, sender: Sender, nodes: Nodes) -> None:
        first = send(sender)
        for node in nodes:
            node.client().delete(KEY)
        second = send(sender)
        assert starts(sender, second, first) == ["", second]
        assert starts(sender, send(sender)) == [""]

    def test_a_start_counts_for_as_long_as_an_earlier_message_may_come(
        self, sender: Sender, nodes: Nodes
    ) -> None:
        first = send(sender)
        for node in nodes:
            assert LATE + LONG - 60 < node.client().pttl(ORDER) / 1000 <= LATE + LONG
            node.client().pexpire(ORDER, 5000)
        start(sender, first)
        assert all(node.client().pttl(ORDER) / 1000 > LATE + LONG - 60 for node in nodes)

    @pytest.mark.parametrize("has_begun", [False, True], ids=["one is queued", "none is queued"])
    def test_a_sender_whose_clock_is_behind_is_not_before_the_others(
        self, sender: Sender, nodes: Nodes, has_begun: bool
    ) -> None:
        first = send(sender)
        far = 2 * sender.ticket(first).number
        if has_begun:
            start(sender, first)
        for node in nodes:
            node.client().set(ORDER, f"{far} 0 ")
        second = send(sender)
        assert sender.ticket(second).number == far + 1
        assert queued(nodes) == sent(second)
        assert superseded(nodes, first) is not has_begun
        assert starts(sender, second) == [""]

    @MAJORITY
    def test_one_node_that_has_taken_more_is_heard(self, sender: Sender, nodes: Nodes) -> None:
        send(sender)
        far = 2**45
        nodes[0].client().set(ORDER, f"{far} 0 ")
        nodes[1].client().set(ORDER, f"{far - 7} 0 ")
        assert sender.ticket(send(sender)).number == far + 1

    @MAJORITY
    def test_one_node_that_knows_of_a_later_start_is_enough(
        self, sender: Sender, nodes: Nodes
    ) -> None:
        first = send(sender)
        start(sender, first)
        second = send(sender)
        start(sender, second)
        for node in nodes[1:]:
            node.client().delete(ORDER)
        assert who_replaced(sender, first) in ("", second)  # by who replies first
        for node in nodes[1:]:
            node.client().delete(ORDER)
        reply = says_of_start(nodes[0], sender, first)
        assert reply == [sender.ticket(second).number, second]

    def test_of_many_at_once_the_last_in_order_is_not_superseded(
        self, nodes: Nodes, make_sender: MakeSender
    ) -> None:
        senders = [make_sender(nodes) for _ in range(6)]
        for each in senders:
            settle(each.redlock)
        one = senders[0]
        for _ in range(4):
            one.published.clear()
            first = send(one)
            found = at_once(*(partial(send, each) for each in senders))
            assert set(found) == set(one.published) - {first}
            by_number = sorted(one.published, key=lambda task_id: one.ticket(task_id).number)
            assert len({one.ticket(task_id).number for task_id in found}) == len(found)
            left = [task_id for task_id in by_number if not superseded(nodes, task_id)]
            assert left[-1] == by_number[-1]
            assert first not in left
            replaced = starts(one, *left, *by_number)
            assert replaced[: len(left)] == [""] * len(left)
            assert [who for who in replaced[len(left) : -1] if who] == [by_number[-1]] * 6
            assert not replaced[-1]
            for node in nodes:
                node.client().delete(KEY, ORDER)


def forget_marks(nodes: Nodes, *task_ids: str) -> None:
    """Let nodes have no mark of replaced messages, as of long ago."""
    for node in nodes:
        for task_id in task_ids:
            node.client().delete(f"{{redlock}}:done:{task_id}:shop.settle:0:0")


class TestReplacedLongAgo:
    """What nobody reads for longer than the marks last holds every message that was sent."""

    def test_what_was_replaced_does_not_start(self, sender: Sender, nodes: Nodes) -> None:
        first, second, third = (send(sender) for _ in range(3))
        forget_marks(nodes, first, second)
        assert starts(sender, first, second, third) == [third, third, ""]

    def test_nor_if_the_claim_is_over(self, sender: Sender, nodes: Nodes) -> None:
        first, second = send(sender), send(sender)
        forget_marks(nodes, first)
        for node in nodes:
            node.client().delete(KEY)
        third = send(sender)
        assert starts(sender, first, second, third) == [second, "", ""]

    def test_what_keeps_its_place_starts(self, sender: Sender, nodes: Nodes) -> None:
        kept = send(sender)
        shift(nodes, *[OLD] * len(nodes))
        second, third, fourth = (send(sender) for _ in range(3))
        forget_marks(nodes, second, third)
        assert starts(sender, second, kept, kept) == [fourth, "", ""]
        fifth = send(sender)
        assert starts(sender, kept, third, fourth, fifth) == ["", fifth, fifth, ""]

    def test_the_last_one_starts_though_its_claim_has_ended_before_later_sends(
        self, sender: Sender, nodes: Nodes
    ) -> None:
        """Else a stream whose pauses are longer than unique_for would starve a slow queue."""
        _, second = send(sender), send(sender)
        for node in nodes:
            node.client().delete(KEY)
        third, fourth = send(sender), send(sender)
        assert starts(sender, second, third, fourth) == ["", fourth, ""]

    def test_so_does_one_that_was_sent_alone(self, sender: Sender, nodes: Nodes) -> None:
        first, second = send(sender), send(sender)
        forget_marks(nodes, first)
        alone = []
        for _ in range(2):
            for node in nodes:
                node.client().delete(KEY)
            alone.append(send(sender))
        assert who_replaced(sender, first) == second
        for node in nodes:
            node.client().delete(KEY)
        third, fourth = send(sender), send(sender)
        assert starts(sender, second, *alone, third, fourth) == ["", "", "", fourth, ""]

    @MAJORITY
    def test_so_does_one_before_a_burst_whose_beginning_a_node_has_missed(
        self, sender: Sender, nodes: Nodes
    ) -> None:
        _, second = send(sender), send(sender)
        for node in nodes:
            node.client().delete(KEY)
        client = nodes[0].client()
        order, left = client.get(ORDER), client.pttl(ORDER)
        third = send(sender)
        client.set(ORDER, str(order), px=left)
        client.delete(KEY)
        fourth = send(sender)
        assert superseded(nodes, third)
        assert [says_of_start(node, sender, second) for node in nodes] == [1] * len(nodes)
        assert says_of_start(nodes[0], sender, third) == [-sender.ticket(third).number, fourth]

    def test_what_kept_its_place_starts_though_that_has_ended(
        self, sender: Sender, nodes: Nodes
    ) -> None:
        kept = send(sender)
        shift(nodes, *[OLD] * len(nodes))
        second = send(sender)
        shift(nodes, *[LONG] * len(nodes), line=1, ends=True)
        shift(nodes, *[OLD] * len(nodes))
        third, fourth = send(sender), send(sender)
        assert queued(nodes) == sent(fourth, second)
        assert starts(sender, kept, second, third, fourth) == ["", "", fourth, ""]

    @MAJORITY
    def test_what_keeps_its_place_starts_though_a_node_has_missed_it(
        self, sender: Sender, nodes: Nodes
    ) -> None:
        send(sender)
        kept = miss(nodes, 0, partial(send, sender), has_heard=False)
        shift(nodes, *[OLD] * len(nodes))
        second = send(sender)
        send(sender)
        assert says_of_start(nodes[0], sender, kept) == 1
        assert says_of_start(nodes[0], sender, second) != 1

    def test_each_node_names_what_replaced_it(self, sender: Sender, nodes: Nodes) -> None:
        first, second = send(sender), send(sender)
        for node in nodes:
            number = -sender.ticket(first).number
            assert says_of_start(node, sender, first) == [number, second]

    @MAJORITY
    def test_a_quorum_that_says_so_is_enough(self, sender: Sender, nodes: Nodes) -> None:
        first, second = send(sender), send(sender)
        forget_marks(nodes, first)
        nodes[0].client().delete(ORDER)
        assert starts(sender, first, second) == [second, ""]

    @MAJORITY
    def test_one_node_that_says_so_is_not_enough(self, sender: Sender, nodes: Nodes) -> None:
        alone = sent_before_a_burst(sender, nodes)
        assert says_of_start(nodes[0], sender, alone)[1] == list(sender.published)[-1]
        assert starts(sender, alone) == [""]

    @MAJORITY
    def test_it_starts_on_the_node_that_says_so_where_another_is_away(
        self, mortal_nodes: Nodes, make_sender: MakeSender
    ) -> None:
        sender = make_sender(mortal_nodes, NODE_TIMEOUT)
        alone = sent_before_a_burst(sender, mortal_nodes)
        mortal_nodes[2].kill()
        assert says_of_start(mortal_nodes[0], sender, alone)[1] == list(sender.published)[-1]
        assert starts(sender, alone) == [""]
        first = next(iter(sender.published))
        for node in mortal_nodes[:2]:
            assert says_of_start(node, sender, first) == [sender.ticket(alone).number, alone]


def sent_before_a_burst(sender: Sender, nodes: Nodes) -> str:
    """Send one whose claim ends, and a burst after it; return the one, which a node has missed."""
    send(sender)
    alone = miss(nodes, 0, partial(send, sender), has_heard=False)
    for node in nodes:
        node.client().delete(KEY)
    for _ in range(2):
        send(sender)
    forget_marks(nodes, alone)
    return alone


def says_of_start(node: Any, sender: Sender, task_id: str) -> Any:
    """Return what a node says of the start of a message, which it notes."""
    run = sender.ticket(task_id)
    words = "start", run.token, run.number, task_id, 600_000, ""
    return node.client().eval(NEWEST.source.decode(), 2, KEY, ORDER, *words)


class TestRace:
    @pytest.mark.parametrize("count", [1, 2, 3])
    def test_a_send_just_as_the_queued_one_starts_runs_after_it(
        self, sender: Sender, nodes: Nodes, count: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The start is on so many nodes before the send asks for the place of the queued one."""
        first = send(sender)
        claim = OrderRequests.claim

        def claim_late(requests: OrderRequests, earlier: Any, *rest: Any) -> Command:
            if earlier is not None:
                for node in nodes[:count]:
                    says_of_start(node, sender, first)
            return claim(requests, earlier, *rest)

        monkeypatch.setattr(OrderRequests, "claim", claim_late)
        second = send(sender)
        has_begun = 2 * count > len(nodes)
        assert starts(sender, first, second, first) == ["" if has_begun else second, "", second]

    def test_a_redelivery_of_a_run_that_was_replaced_as_it_started_goes_on(
        self, sender: Sender, redlock: Redlock, nodes: Nodes
    ) -> None:
        """The place that the send has taken is its own."""
        first, second = send(sender), a_claim(redlock, **HOW)
        second.open()
        settle(redlock)
        start(sender, first)
        second.confirm()
        settle_voters(redlock)
        assert queued(nodes) == sent(id_of(second))
        assert second.message_token is not None
        sender.published[id_of(second)] = second.message_token.to_message()
        assert starts(sender, first, id_of(second), first) == ["", "", id_of(second)]


class TestSteadyStream:
    def test_an_old_burst_keeps_its_place_and_one_is_queued_beside_it(
        self, sender: Sender, nodes: Nodes
    ) -> None:
        kept = send(sender)
        shift(nodes, *[OLD] * len(nodes))
        second = send(sender)
        assert queued(nodes) == sent(second, kept)
        shift(nodes, *[10 * OLD] * len(nodes))  # it has not begun while one keeps its place
        third = send(sender)
        assert queued(nodes) == sent(third, kept)
        marked = [superseded(nodes, one) for one in (kept, second, third)]
        assert marked == [False, True, False]
        start(sender, kept)
        assert queued(nodes) == sent(third)
        (_, began, _), now = lines(values(nodes)[0])[0], now_ms(nodes[0].client())
        assert now - 60_000 < began <= now
        fourth = send(sender)
        assert superseded(nodes, third)
        shift(nodes, *[OLD] * len(nodes))
        fifth = send(sender)
        assert not superseded(nodes, fourth)
        assert starts(sender, fourth, fifth) == ["", ""]

    def test_what_keeps_its_place_counts_for_as_long_as_there_are_sends(
        self, sender: Sender, nodes: Nodes
    ) -> None:
        kept = send(sender)
        shift(nodes, *[OLD] * len(nodes))
        second = send(sender)
        shift(nodes, *[LONG - 9] * len(nodes), line=1, ends=True)
        third = send(sender)
        assert queued(nodes) == sent(third, kept)
        assert superseded(nodes, second)
        assert min(ends for _, _, ends in lines(values(nodes)[0])) > (
            now_ms(nodes[0].client()) + (LONG - 60) * 1000
        )

    def test_a_short_unique_for_is_a_short_burst(self, sender: Sender, nodes: Nodes) -> None:
        kept = send(sender, unique_for=30.0)
        shift(nodes, *[29.0] * len(nodes))
        eventually(lambda: now_ms(nodes[0].client()) - lines(values(nodes)[0])[0][1] > 30_000)
        second = send(sender, unique_for=30.0)
        assert queued(nodes) == sent(second, kept)

    @MAJORITY
    @pytest.mark.parametrize("ages", [(OLD, OLD, -3600.0), (0.0, 0.0, 1e6)])
    def test_a_node_whose_clock_was_set_decides_nothing(
        self, make_sender: MakeSender, nodes: Nodes, ages: tuple[float, ...]
    ) -> None:
        with proxies(nodes) as made:
            sender = make_sender(made)
            settle(sender.redlock)
            first = send(sender)
            shift(nodes, *ages)
            made[1].weather = Weather(delay=(0.1, 0.1))  # its reply comes last
            second = send(sender)
            keeps = ages[0] == OLD
            assert superseded(nodes, first) is not keeps
            assert bool(sender.ticket(second).replaces) is not keeps
            sender.redlock.close()

    @MAJORITY
    def test_nodes_that_missed_sends_one_after_the_other_learn_when_the_burst_began(
        self, sender: Sender, nodes: Nodes
    ) -> None:
        send(sender)
        shift(nodes, *[REPLACED_FOR - 20] * 3)
        for node in nodes:
            node.client().delete(KEY)  # as if it had been away
            last = send(sender)
            assert queued(nodes) == sent(last)
            began = [lines(value)[0][1] for value in values(nodes)]
            assert max(began) <= now_ms(node.client()) - (REPLACED_FOR - 21) * 1000

    def test_a_later_message_that_starts_first_ends_the_place_of_what_was_kept(
        self, sender: Sender, nodes: Nodes
    ) -> None:
        kept = send(sender)
        shift(nodes, *[OLD] * len(nodes))
        second = send(sender)
        assert starts(sender, second, kept) == ["", second]
        assert queued(nodes) == []

    def test_what_ends_without_a_start_leaves_its_place(self, sender: Sender, nodes: Nodes) -> None:
        kept = send(sender)
        shift(nodes, *[OLD] * len(nodes))
        second = send(sender)
        sender.end(second)
        assert queued(nodes) == sent(kept)
        third = send(sender)
        assert queued(nodes) == sent(third, kept)
        sender.end(kept)
        assert queued(nodes) == sent(third)
        fourth = send(sender)
        assert queued(nodes) == sent(fourth)
        assert superseded(nodes, third)
        assert not superseded(nodes, kept)


def miss(nodes: Nodes, number: int, sends: Callable[[], str], *, has_heard: bool) -> str:
    """Send, and let one node have no claim of it: it was away, or replied after its publish."""
    client = nodes[number].client()
    before = [(key, client.get(key), client.pttl(key)) for key in (KEY, ORDER)]
    task_id = sends()
    for key, value, left in before[:1] if has_heard else before:
        client.set(key, str(value), px=left)
    return task_id


class TestNodesThatMissedSends:
    @MAJORITY
    @pytest.mark.parametrize("has_heard", [False, True], ids=["away", "too slow"])
    @pytest.mark.parametrize("is_kept", [False, True], ids=["one queued", "two queued"])
    def test_each_has_the_next_one_again(
        self, sender: Sender, nodes: Nodes, has_heard: bool, is_kept: bool
    ) -> None:
        kept = [send(sender)] if is_kept else []
        if is_kept:
            shift(nodes, *[OLD] * len(nodes))
        last = send(sender)
        for number in (*range(len(nodes)), 0):
            missed = miss(nodes, number, partial(send, sender), has_heard=has_heard)
            assert superseded(nodes, last)
            last = send(sender)
            assert superseded(nodes, missed)
            assert queued(nodes) == sent(last, *kept)
        assert not any(superseded(nodes, one) for one in kept)

    @MAJORITY
    @pytest.mark.parametrize("has_heard", [False, True], ids=["away", "too slow"])
    def test_two_that_missed_different_ones_are_no_reason_not_to_replace(
        self, sender: Sender, nodes: Nodes, has_heard: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        send(sender)
        miss(nodes, 0, partial(send, sender), has_heard=has_heard)
        before = miss(nodes, 1, partial(send, sender), has_heard=has_heard)
        last = send(sender)
        assert superseded(nodes, before)
        assert queued(nodes) == sent(last)
        assert "without deduplication" not in caplog.text

    @MAJORITY
    def test_what_keeps_its_place_is_taken_over_by_a_node_that_missed_it(
        self, sender: Sender, nodes: Nodes
    ) -> None:
        first = send(sender)
        kept = miss(nodes, 0, partial(send, sender), has_heard=False)
        assert superseded(nodes, first)
        shift(nodes, *[OLD] * len(nodes))
        last = send(sender)
        assert [queued([node]) for node in nodes] == [sent(last), *[sent(last, kept)] * 2]
        assert not superseded(nodes, kept)
        last = send(sender)
        assert [queued([node]) for node in nodes] == [sent(last), *[sent(last, kept)] * 2]
        assert not superseded(nodes, kept)

    @MAJORITY
    def test_one_that_has_no_confirmation_does_not_say_what_keeps_its_place(
        self, make_sender: MakeSender, nodes: Nodes
    ) -> None:
        with proxies(nodes) as made:
            sender = make_sender(made)
            settle(sender.redlock)
            kept = send(sender)
            shift(nodes, *[OLD] * len(nodes))
            send(sender)
            client = nodes[0].client()
            replaced, _ = str(client.get(KEY)).split("\n")
            third = send(sender)
            newest, below = str(client.get(KEY)).split("\n")
            newest = newest.replace(":sent:", ":sending:")
            client.set(KEY, f"{newest}\n{replaced}\n{below}", px=client.pttl(KEY))
            for proxy in made[1:]:
                proxy.weather = Weather(delay=(0.1, 0.1))  # its reply comes first
            last = send(sender)
            assert queued(nodes[1:]) == sent(last, kept)
            assert superseded(nodes, third)
            sender.redlock.close()

    @MAJORITY
    @pytest.mark.parametrize("has_heard", [False, True], ids=["away", "too slow"])
    def test_a_later_start_ends_the_place_of_what_it_has_instead(
        self, sender: Sender, nodes: Nodes, has_heard: bool
    ) -> None:
        send(sender)
        last = miss(nodes, 0, partial(send, sender), has_heard=has_heard)
        start(sender, last)
        assert queued(nodes) == []


class TestNothingIsLost:
    def test_a_node_that_lost_the_order_has_it_again_for_as_long_as_the_claim(
        self, sender: Sender, redlock: Redlock, nodes: Nodes
    ) -> None:
        first = send(sender)
        last = a_claim(redlock, **HOW)
        assert last.open() is None
        settle(redlock)
        for node in nodes:
            node.client().delete(ORDER)
        last.confirm()
        settle_voters(redlock)
        assert min(node.client().pttl(ORDER) for node in nodes) > 1000 * LONG / 2
        assert last.message_token is not None
        sender.published[id_of(last)] = last.message_token.to_message()
        assert starts(sender, first, id_of(last)) == [id_of(last), ""]

    def test_what_was_kept_and_never_starts_is_not_waited_for_as_long_as_there_are_sends(
        self, sender: Sender, nodes: Nodes
    ) -> None:
        lost = send(sender)
        shift(nodes, *[OLD] * len(nodes))
        send(sender)
        shift(nodes, *[LONG + LATE] * len(nodes), line=1)
        shift(nodes, *[LONG - 9] * len(nodes), line=1, ends=True)
        second = send(sender)
        assert queued(nodes) == sent(second, lost)
        ends = lines(values(nodes)[0])[1][2]
        assert ends < now_ms(nodes[0].client()) + 9000
        shift(nodes, *[9.0] * len(nodes), line=1, ends=True)  # its place is over
        shift(nodes, *[OLD] * len(nodes))
        third = send(sender)
        assert not superseded(nodes, second)
        assert queued(nodes) == sent(third, second)

    @pytest.mark.parametrize("is_kept", [False, True], ids=["one queued", "two queued"])
    def test_where_it_cannot_be_published_the_earlier_one_stays(
        self, sender: Sender, nodes: Nodes, is_kept: bool
    ) -> None:
        def publish(ticket: Any) -> str:
            raise OSError("no broker")

        waiting = [send(sender)]
        if is_kept:
            shift(nodes, *[OLD] * len(nodes))
            waiting.insert(0, send(sender))
        before = values(nodes)
        for _ in range(2):
            with pytest.raises(OSError, match="no broker"):
                a_claim(sender.redlock, **HOW).send(publish)
            settle(sender.redlock)
            assert values(nodes) == before
        assert not any(superseded(nodes, one) for one in waiting)
        last = send(sender)
        assert queued(nodes) == sent(last, *waiting[1:])

    def test_a_sender_that_dies_leaves_what_is_queued(
        self, sender: Sender, redlock: Redlock, nodes: Nodes
    ) -> None:
        kept = send(sender)
        shift(nodes, *[OLD] * len(nodes))
        second = send(sender)
        dead = a_claim(redlock, **HOW)
        assert dead.open() is None
        settle(redlock)
        assert queued(nodes) == [f"sending:{id_of(dead)}", *sent(second, kept)]
        for value in values(nodes):
            (_, began, ends), *_ = lines(value)
            assert 0 < ends - began <= 1000 * LONG / 2
        shift(nodes, *[LONG] * len(nodes), ends=True)
        last = send(sender)
        assert queued(nodes) == sent(last, kept)
        assert superseded(nodes, second)

    def test_what_a_dead_sender_has_published_comes_before_later_sends(
        self, sender: Sender, redlock: Redlock, nodes: Nodes
    ) -> None:
        first, dead = send(sender), a_claim(redlock, **HOW)
        dead.open()
        assert dead.message_token is not None
        settle(redlock)
        shift(nodes, *[LONG] * len(nodes), ends=True)  # its time is over
        last = send(sender)
        sender.published[id_of(dead)] = dead.message_token.to_message()
        assert superseded(nodes, first)
        assert starts(sender, id_of(dead), last, id_of(dead)) == ["", "", last]

    def test_a_send_that_waited_in_vain_is_sent_beside_and_keeps_the_order(
        self, sender: Sender, redlock: Redlock, caplog: pytest.LogCaptureFixture
    ) -> None:
        slow = a_claim(redlock, **HOW)
        slow.open()
        clock = redlock.session.clock
        began = clock.now()
        with caplog.at_level(logging.WARNING):
            beside = send(sender)
        assert clock.now() - began >= DEBOUNCE_PATIENCE
        assert "without deduplication" in caplog.text
        slow.confirm()
        settle_voters(redlock)
        assert slow.message_token is not None
        sender.published[id_of(slow)] = slow.message_token.to_message()
        last = send(sender)
        assert starts(sender, beside, id_of(slow), last, beside) == ["", beside, "", last]

    def test_without_a_quorum_it_is_sent_and_no_start_is_sure(
        self, mortal_nodes: Nodes, make_sender: MakeSender, caplog: pytest.LogCaptureFixture
    ) -> None:
        sender = make_sender(mortal_nodes, NODE_TIMEOUT)
        first = send(sender)
        for node in mortal_nodes[1:]:
            node.kill()
        with caplog.at_level(logging.WARNING):
            second = send(sender)
        assert "without deduplication" in caplog.text
        assert sender.published[second] is None
        with pytest.raises(QuorumUnreachable, match=NAME.partition(":")[2]):
            start(sender, first)


@pytest.mark.parametrize("number", [-1, LARGEST_NUMBER + 1, 7.0, "7", True])
def test_a_number_that_no_send_has_is_refused(number: Any) -> None:
    token = ClaimToken(NAME, "0" * 32, "started", number=7)
    assert ClaimToken.of(token.to_message()) == token
    assert ClaimToken.of({**token.to_message(), "number": number}) is None


def test_sends_of_threads_have_numbers_of_their_own(sender: Sender) -> None:
    threads = [threading.Thread(target=send, args=(sender,)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = [sender.ticket(task_id).number for task_id in sender.published]
    assert len(set(numbers)) == 5
