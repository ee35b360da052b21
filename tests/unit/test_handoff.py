from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_redlock.errors import NodeError
from celery_redlock.lock.engine.rounds import PlaceRound
from celery_redlock.lock.model.handoff import (
    LADDER,
    MAX_RELEASES,
    MAX_TURNS,
    TURN,
    AskAgain,
    Named,
    Namings,
    Place,
    Step,
    WaitFree,
    free_in,
    next_move,
    place_of_quorum,
)
from celery_redlock.lock.model.keys import waiting_key
from celery_redlock.lock.model.votes import quorum_of
from celery_redlock.lock.transport.command import IGNORE_REPLY, Command, UnexpectedReplyError

NAMED = 3  # of lua/announce.lua

clusters = st.integers(1, 5).flatmap(
    lambda nodes: st.lists(
        st.permutations("ABCDE").flatmap(
            lambda order: st.integers(0, 5).map(lambda known: order[:known][:NAMED])
        ),
        min_size=nodes,
        max_size=nodes,
    )
)


def turns_of(waiter: str, lists: list[list[str]]) -> list[int | None]:
    """Return what each message of a release to a waiter means. lists: whom each node names."""
    namings = Namings(quorum_of(len(lists)))
    ranks = [(names.index(waiter), node) for node, names in enumerate(lists) if waiter in names]
    return [namings.turns(Named(rank, "r1", "r"), node) for rank, node in ranks]


@given(clusters)
def test_no_release_lets_two_waiters_act_at_once(lists: list[list[str]]) -> None:
    assert sum(0 in turns_of(waiter, lists) for waiter in "ABCDE") <= 1


@given(clusters)
def test_a_release_changes_when_a_waiter_acts_twice_at_the_most(lists: list[list[str]]) -> None:
    for waiter in "ABCDE":
        assert sum(turns is not None for turns in turns_of(waiter, lists)) <= 2


@given(clusters)
def test_a_waiter_that_a_majority_names_waits_for_no_more_than_those_before_it(
    lists: list[list[str]],
) -> None:
    for waiter in "ABCDE":
        ranks = [names.index(waiter) for names in lists if waiter in names]
        if len(ranks) >= quorum_of(len(lists)):
            told = [turns for turns in turns_of(waiter, lists) if turns is not None]
            assert min(ranks) <= told[-1] <= max(ranks) + 1


@given(clusters)
def test_some_waiter_acts_if_a_node_names_one(lists: list[list[str]]) -> None:
    named = {waiter for names in lists for waiter in names}
    acting = {w for w in named if any(turns is not None for turns in turns_of(w, lists))}
    assert bool(named) == bool(acting)


def test_nodes_that_differ_cost_a_turn() -> None:
    assert turns_of("A", [["A", "B"], ["B", "A"], ["B", "A"]]) == [1, 1, None]


def test_another_release_is_counted_by_itself() -> None:
    namings = Namings(2)
    assert namings.turns(Named(0, "r1", "r"), 0) == 1
    assert namings.turns(Named(0, "r2", "r"), 0) == 1
    assert namings.turns(Named(0, "r1", "r"), 1) == 0


@given(st.lists(st.tuples(st.integers(0, 99), st.sampled_from(["r1", "r2"])), max_size=9))
def test_one_node_alone_lets_no_waiter_act_at_once(told: list[tuple[int, str]]) -> None:
    namings = Namings(2)
    turns = [namings.turns(Named(rank, release, "r"), 0) for rank, release in told]
    assert set(turns) <= {None, 1}


def test_old_releases_are_forgotten() -> None:
    namings = Namings(2)
    for number in range(MAX_RELEASES + 1):
        namings.turns(Named(0, f"r{number}", "r"), 0)
    assert namings.turns(Named(0, "r0", "r"), 1) == 1
    assert namings.turns(Named(0, f"r{MAX_RELEASES}", "r"), 1) == 0


@given(st.integers(0, 99), st.text(max_size=100).filter(lambda text: " " not in text), st.text())
def test_a_message_is_read_as_it_is_written(rank: int, release: str, resource: str) -> None:
    text = f"{rank} {release} {waiting_key('p', resource)}"
    assert Named.parse(text, "p") == Named(rank, release, resource)


@pytest.mark.parametrize(
    "text",
    [
        "", "hello", "0", "0 r1", "0 r1 c", "0 r1 {q}:waiting:c", "x r1 {p}:waiting:c",
        "-1 r1 {p}:waiting:c", "1.5 r1 {p}:waiting:c", f"{'9' * 401} r1 {{p}}:waiting:c",
        f"0 {'r' * 1000} {{p}}:waiting:c",
    ],
)  # fmt: skip
def test_another_text_names_nobody(text: str) -> None:
    assert Named.parse(text, "p") is None


ranks = st.integers(-1, 9)
free_ins = st.sampled_from([0.0, 0.5, 2.0, math.inf])
places = st.builds(Place, ranks, st.integers(0, 3), free_ins)


@given(st.lists(places, min_size=1, max_size=5))
def test_nodes_together_say_free_only_if_a_quorum_says_so(told: list[Place]) -> None:
    quorum = quorum_of(len(told))
    found = place_of_quorum(told, quorum)
    assert found is not None
    for permits in range(1, 4):
        says_so = sum(one.free >= permits for one in told) >= quorum
        assert (found.free >= permits) == says_so
    for moment in (0.0, 0.5, 2.0):
        says_so = sum(one.free_in <= moment for one in told) >= quorum
        assert (found.free_in <= moment) == says_so


@given(st.lists(places, min_size=1, max_size=5))
def test_nodes_together_put_one_more_before_a_waiter_if_they_differ(told: list[Place]) -> None:
    found = place_of_quorum(told, quorum_of(len(told)))
    assert found is not None
    kept = {one.rank for one in told if one.rank >= 0} or {0}  # a full node keeps no rank
    assert found.rank == (kept.pop() if len(kept) == 1 else min(kept) + 1)


def test_fewer_nodes_than_a_quorum_say_nothing() -> None:
    assert place_of_quorum([Place(0, 1, 0.0)], 2) is None


def test_a_key_without_an_end_is_never_free() -> None:
    assert (free_in(-1), free_in(0), free_in(1500)) == (math.inf, 0.0, 1.5)


asking = st.builds(Place, st.integers(0, 2000), st.integers(0, 1000), free_ins)
steps = st.builds(Step, st.just(LADDER), st.integers(0, 2000))


class TestNextMove:
    @given(asking, steps)
    def test_one_tries_iff_a_permit_is_left_over_for_it(self, place: Place, step: Step) -> None:
        """Those before it take one permit each, unless they have had their turn."""
        before = max(0, place.rank - step.passed)
        assert (next_move(place, step) is None) == (before < place.free)

    @given(asking, steps)
    def test_one_waits_for_a_release_iff_nothing_is_free(self, place: Place, step: Step) -> None:
        move = next_move(place, step)
        assert isinstance(move, WaitFree) == (place.free <= 0)
        if isinstance(move, WaitFree):
            assert move.seconds == place.free_in

    @given(asking, steps)
    def test_one_asks_again_after_a_turn_for_each_that_goes_first(
        self, place: Place, step: Step
    ) -> None:
        move = next_move(place, step)
        if not isinstance(move, AskAgain):
            return
        turns = move.step.passed - step.passed
        assert 1 <= turns <= MAX_TURNS
        assert move.seconds == pytest.approx(turns * TURN)
        assert move.step == step._replace(passed=step.passed + turns)
        # not one turn more than it takes for those before it, and no more questions
        assert place.rank - move.step.passed >= place.free - 1
        assert turns == MAX_TURNS or next_move(place, move.step) is None

    @given(st.integers(0, 100), st.lists(st.integers(0, 100)), st.integers(1, 5))
    def test_a_waiter_goes_after_so_many_turns_whatever_rank_it_is_told(
        self, worst: int, told: list[int], free: int
    ) -> None:
        """No order of replies, and so no arrival of others, makes it ask for ever."""
        step, turns = Step(LADDER), 0
        for rank in (*(min(one, worst) for one in told), *[worst] * (worst + 1)):
            move = next_move(Place(rank, free, 0.0), step)
            if move is None:
                break
            assert isinstance(move, AskAgain)
            turns += move.step.passed - step.passed
            step = move.step
        else:
            pytest.fail("it asks again and again")
        assert turns <= worst


class TestQuestion:
    def test_it_is_decided_as_soon_as_the_answer_is_certain(self) -> None:
        round_ = PlaceRound(3)
        round_.on_reply(0, 0.0, [2, 1, 0], "")
        assert not round_.decided
        round_.on_reply(1, 0.0, [2, 1, 0], "")
        assert (round_.decided, round_.place) == (True, Place(2, 1, 0.0))

    def test_it_waits_for_the_third_node_while_two_differ(self) -> None:
        round_ = PlaceRound(3)
        round_.on_reply(0, 0.0, [0, 1, 0], "")
        round_.on_reply(1, 0.0, [0, 0, 1500], "")
        assert not round_.decided
        round_.on_reply(2, 0.0, [0, 0, 500], "")
        assert (round_.decided, round_.place) == (True, Place(0, 0, 0.5))

    def test_errors_count_as_no_answer(self) -> None:
        round_ = PlaceRound(3)
        for node in range(3):
            round_.on_error(node, Command(b"", IGNORE_REPLY), NodeError("n", "gone"))
        assert (round_.decided, round_.place) == (True, None)

    @pytest.mark.parametrize("reply", [None, 1, [1], [1, 0], [1, 0, b"x"], [1, 2, 3, 4]])
    def test_another_reply_is_refused(self, reply: object) -> None:
        with pytest.raises(UnexpectedReplyError):
            PlaceRound(1).on_reply(0, 0.0, reply, "")
