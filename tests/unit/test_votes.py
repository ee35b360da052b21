from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_redlock.lock.model.votes import Tally, Vote, is_split, quorum_of

rounds = st.integers(1, 9).flatmap(
    lambda nodes: st.tuples(st.just(nodes), st.lists(st.sampled_from(Vote), max_size=nodes))
)


def tally(nodes: int, *votes: Vote) -> Tally:
    counted = Tally(nodes, quorum_of(nodes))
    for vote in votes:
        counted.add(vote)
    return counted


@pytest.mark.parametrize(("nodes", "quorum"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3), (6, 4)])
def test_a_quorum_is_a_majority(nodes: int, quorum: int) -> None:
    assert quorum_of(nodes) == quorum


@given(st.integers(1, 99))
def test_any_two_quorums_share_a_node(nodes: int) -> None:
    assert 2 * quorum_of(nodes) > nodes


@given(rounds)
def test_a_round_is_never_reached_and_impossible(round_: tuple[int, list[Vote]]) -> None:
    nodes, votes = round_
    counted = tally(nodes, *votes)
    assert not (counted.reached and counted.impossible)


@given(rounds)
def test_a_full_round_is_decided(round_: tuple[int, list[Vote]]) -> None:
    nodes, votes = round_
    counted = tally(nodes, *votes, *[Vote.FAILED] * (nodes - len(votes)))
    assert counted.reached or counted.impossible


@given(rounds)
def test_impossible_means_that_no_further_votes_could_help(round_: tuple[int, list[Vote]]) -> None:
    nodes, votes = round_
    counted = tally(nodes, *votes)
    best = tally(nodes, *votes, *[Vote.GRANTED] * (nodes - len(votes)))
    assert counted.impossible == (not best.reached)


def test_two_refusals_of_three_are_taken_before_the_third_has_spoken() -> None:
    counted = tally(3, Vote.REFUSED, Vote.REFUSED)
    assert counted.impossible
    assert counted.taken(time_is_up=False)


def test_one_refusal_and_two_failures_of_three_are_unreachable() -> None:
    assert not tally(3, Vote.REFUSED, Vote.FAILED, Vote.FAILED).taken(time_is_up=False)


def test_a_split_vote_is_taken() -> None:
    assert tally(3, Vote.GRANTED, Vote.REFUSED, Vote.REFUSED).taken(time_is_up=False)


def test_a_node_that_used_up_its_time_does_not_count_as_able_to_vote() -> None:
    counted = tally(3, Vote.REFUSED)
    assert counted.taken(time_is_up=False)
    assert not counted.taken(time_is_up=True)


def test_silent_nodes_alone_are_not_taken() -> None:
    assert not tally(3, Vote.ABSTAINED, Vote.ABSTAINED, Vote.GRANTED).taken(time_is_up=False)


@given(rounds)
def test_each_vote_tells_whether_the_outcome_is_certain(round_: tuple[int, list[Vote]]) -> None:
    nodes, votes = round_
    counted = Tally(nodes, quorum_of(nodes))
    for vote in votes:
        assert counted.add(vote) == (counted.reached or counted.impossible)


@pytest.mark.parametrize(
    ("holders", "unheard", "quorum", "split"),
    [
        ("", 3, 2, False),  # nobody refused
        ("x", 0, 1, False),  # the one node
        ("x", 1, 2, False),  # of two nodes, the other not heard: it may be x's, too
        ("x", 0, 2, True),  # of two nodes, the other ours
        ("xx", 0, 2, False),
        ("xx", 1, 2, False),
        ("xy", 0, 2, True),
        ("xy", 1, 2, True),  # as a rule; one of them may have the third
        ("x", 1, 3, True),  # of four nodes two are ours
        ("xx", 1, 3, False),
        ("xxy", 2, 3, True),
        ("xxxyy", 0, 3, False),
        ("xxyyz", 0, 3, True),
    ],
)
def test_votes_are_split_where_no_rival_is_seen_to_have_a_quorum(
    holders: str, unheard: int, quorum: int, split: bool
) -> None:
    assert is_split(list(holders), unheard, quorum) is split
