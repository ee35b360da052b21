"""What a worker makes of the nodes' announcements: when to act on a release, or on a quorum."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from celery_redlock.tasks.waiting.releases import (
    MESSAGE_IDS,
    Announcements,
    QuorumHistory,
    Release,
)

QUORUM_CHANNEL = "quorum"
BEGIN = Release("a")


def announcements(majority: int = 2) -> Announcements:
    return Announcements(majority, QUORUM_CHANNEL)


nodes_and_orders = st.integers(1, 7).flatmap(
    lambda nodes: st.tuples(
        st.just(nodes),
        st.permutations([f"release {n}" for n in range(3)] * nodes),
    )
)


@given(nodes_and_orders)
def test_a_release_that_a_majority_announces_is_acted_on_exactly_once(
    case: tuple[int, list[str]],
) -> None:
    """Just then: not before, and not when the others announce it too."""
    nodes, order = case
    majority, made = nodes // 2 + 1, announcements(nodes // 2 + 1)
    seen: Counter[str] = Counter()
    for message_id in order:
        seen[message_id] += 1
        is_decided = made.is_decided(Release("a", message_id), seen[message_id], nodes)
        assert is_decided == (seen[message_id] == majority)


@given(
    st.integers(1, 7).flatmap(
        lambda nodes: st.tuples(
            st.just(nodes), st.lists(st.tuples(st.integers(1, 3), st.integers(0, nodes)))
        )
    )
)
@example((3, [(1, 1), (1, 2)]))  # the second node is subscribed to after the first one's message
@example((3, [(1, 2), (1, 1)]))  # the first node is lost after its message
def test_while_subscriptions_come_and_go_a_release_is_never_acted_on_twice(
    case: tuple[int, list[tuple[int, int]]],
) -> None:
    nodes, messages = case
    majority, made = nodes // 2 + 1, announcements(nodes // 2 + 1)
    counts: Counter[int] = Counter()
    acted: Counter[int] = Counter()
    for number, subscriptions in messages:
        counts[number] += 1
        if made.is_decided(Release("a", f"release {number}"), counts[number], subscriptions):
            acted[number] += 1
            assert counts[number] >= min(majority, max(1, subscriptions))
        assert acted[number] <= 1
        assert acted[number] or counts[number] < min(majority, max(1, subscriptions))


@given(st.integers(2, 7), st.data())
def test_a_minority_is_never_acted_on(nodes: int, data: st.DataObject) -> None:
    majority = nodes // 2 + 1
    made = announcements(majority)
    for number in range(data.draw(st.integers(1, 20))):
        release = Release("a", f"release {number}")
        for node in data.draw(st.lists(st.integers(1, majority - 1), max_size=9)):
            assert not made.is_decided(release, node, nodes)


def test_of_fewer_subscriptions_than_a_majority_all_must_announce_a_release() -> None:
    made = announcements(majority=3)
    assert not made.is_decided(Release("a", "x"), 0, 2)
    assert made.is_decided(Release("a", "x"), 1, 2)
    assert made.is_decided(Release("a", "y"), 0, 0)


def test_an_operators_trust_is_acted_on_at_the_first_announcement() -> None:
    made = announcements(majority=3)
    trust = Release(QUORUM_CHANNEL, "x")
    assert [made.is_decided(trust, node, 5) for node in range(5)] == [
        True,
        False,
        False,
        False,
        False,
    ]


def test_only_the_first_subscription_to_a_channel_is_acted_on() -> None:
    made = announcements()
    assert [made.is_decided(BEGIN, 0, subscriptions) for subscriptions in (1, 2, 3)] == [
        True,
        False,
        False,
    ]
    assert made.is_decided(Release("b"), 0, 3)


def test_a_subscription_after_all_were_lost_is_acted_on_again() -> None:
    made = announcements()
    assert made.is_decided(BEGIN, 0, 3)
    assert not made.is_decided(BEGIN, 0, 2)
    assert made.is_decided(BEGIN, 0, 1)


@pytest.mark.parametrize("forget", ["keep", "clear"])
def test_a_channel_that_was_forgotten_begins_anew(forget: str) -> None:
    made = announcements()
    assert made.is_decided(BEGIN, 0, 2)
    if forget == "keep":
        made.keep({"a"})
        assert not made.is_decided(BEGIN, 0, 2)
        made.keep({"b"})
    else:
        made.clear()
    assert made.is_decided(BEGIN, 0, 2)


def test_waiters_for_a_quorum_try_at_each_subscription_that_makes_one() -> None:
    made, begin = announcements(majority=2), Release(QUORUM_CHANNEL)
    assert [made.is_decided(begin, 0, subscriptions) for subscriptions in (1, 2, 3, 2)] == [
        False,
        True,
        True,
        True,
    ]


def test_after_a_stall_a_node_may_announce_many_releases_before_the_others_do() -> None:
    made = announcements()
    ids = [f"release {number}" for number in range(MESSAGE_IDS)]
    assert not any(made.is_decided(Release("a", message_id), 0, 3) for message_id in ids)
    assert all(made.is_decided(Release("a", message_id), 1, 3) for message_id in ids)
    assert not any(made.is_decided(Release("a", message_id), 2, 3) for message_id in ids)


def test_the_release_that_was_announced_longest_ago_is_forgotten_first() -> None:
    made = announcements()
    for message_id in ("first", "second", *map(str, range(MESSAGE_IDS - 1))):
        made.is_decided(Release("a", message_id), 0, 3)
    assert made.is_decided(Release("a", "second"), 1, 3)
    assert not made.is_decided(Release("a", "first"), 1, 3)


def test_an_announcement_keeps_the_earlier_ones_of_its_release_from_being_forgotten() -> None:
    made = announcements(majority=3)
    others = map(str, range(MESSAGE_IDS))
    for message_id in ("first", *(next(others) for _ in range(MESSAGE_IDS - 1))):
        made.is_decided(Release("a", message_id), 0, 3)
    for message_id in ("first", *others):
        made.is_decided(Release("a", message_id), 1, 3)
    assert made.is_decided(Release("a", "first"), 2, 3)


def test_of_a_quorum_nothing_is_missed_before_the_subscription() -> None:
    history = QuorumHistory()
    assert not history.claim("task", 0.0)
    history.record(100.0, {"task"})
    assert not history.claim("task", 50.0)
    assert history.claim("another task", 50.0)


def test_a_message_misses_the_return_of_a_quorum_once() -> None:
    history = QuorumHistory()
    history.record(100.0, set())
    assert not history.claim("task", 100.1)
    assert history.claim("task", 100.0)
    assert not history.claim("task", 100.0)
