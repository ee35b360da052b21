from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_redlock.lock.model.acquisition import Acquisition, Flow
from celery_redlock.lock.model.fencing import Fence, proposal
from celery_redlock.lock.model.lease import MARGIN, Lease, LockKey, State, expires_in, validity
from celery_redlock.lock.model.options import LockOptions

seconds = st.floats(0, 1e6)
SPAN = 29.7 - 0.002  # s of a lease of `lease`: its ttl less drift and margin


def lease(nodes: int, ttl: float = 30.0, guarded: bool = False) -> Lease:
    key = LockKey("redlock", "r", ttl)
    return Lease(key, "value", nodes, nodes // 2 + 1, 0.01, guarded=guarded)


def held(nodes: int = 3, sent: float = 100.0, ttl: float = 30.0) -> Lease:
    hold = lease(nodes, ttl)
    for node in range(nodes):
        hold.confirm(node, sent)
    assert hold.begin(sent + 0.001)
    return hold


def guarded() -> Lease:
    hold = lease(3, guarded=True)
    for node in range(3):
        hold.confirm(node, 100.0, "first run")
    assert hold.begin(100.1)
    return hold


def test_several_locks_are_held_while_each_of_them_is() -> None:
    options = LockOptions(("a", "b"), ttl=30.0, wait=0.0, renew=True, max_hold=None, label="l")
    both = Acquisition(
        options, [LockKey("redlock", name, 30.0) for name in "ab"], (1, Flow(), None)
    )
    both.leases = [held(sent=100.0), held(sent=110.0)]
    assert both.held(100.0 + SPAN - 0.1)
    assert not both.held(100.0 + SPAN + 0.1)
    assert not both.held(110.0 + SPAN + 0.1)


def test_a_lease_counts_from_the_sending_less_drift_and_margin() -> None:
    assert held(sent=100.0, ttl=30.0).valid_until == pytest.approx(100 + 29.7 - 0.002)


@given(st.lists(seconds, min_size=1, max_size=9))
def test_at_the_validity_a_quorum_still_holds_and_just_after_it_none_does(
    ends: list[float],
) -> None:
    quorum = len(ends) // 2 + 1
    until = validity(ends, quorum)
    assert sum(end >= until for end in ends) >= quorum
    assert sum(end > until for end in ends) < quorum


def test_the_newest_node_alone_does_not_prolong_the_lock() -> None:
    hold = held()
    before = hold.valid_until
    hold.confirm(0, 110.0)
    assert hold.valid_until == before
    hold.confirm(1, 110.0)
    assert hold.valid_until == pytest.approx(before + 10)


def test_an_old_answer_never_shortens_a_lease() -> None:
    hold = held()
    before = list(hold.ends)
    hold.confirm(0, 50.0)
    assert hold.ends == before


def test_held_turns_false_by_arithmetic() -> None:
    hold = held()
    edge = hold.valid_until - MARGIN
    assert hold.held(edge - 1e-6)
    assert not hold.held(edge)
    assert hold.remaining(edge) == 0.0


def test_a_quorum_that_came_too_late_does_not_begin_a_hold() -> None:
    hold = lease(1)
    hold.confirm(0, 100.0)
    assert not hold.begin(hold.valid_until)
    assert not hold.held(100.0)


def test_lost_is_said_once_and_is_for_ever() -> None:
    hold = held()
    late = hold.valid_until
    assert hold.expire(late)
    assert not hold.expire(late)
    for node in range(3):
        hold.confirm(node, late)
    assert hold.state is State.LOST
    assert not hold.held(late)


def test_a_hold_is_not_lost_before_its_time() -> None:
    hold = held()
    assert not hold.expire(hold.valid_until - MARGIN - 1e-6)


def test_a_quorum_of_denials_ends_the_validity() -> None:
    hold = held()
    hold.denied(0, 101.0)
    assert hold.held(101.0)
    hold.denied(1, 101.0)
    assert hold.state is State.LOST
    assert hold.reason == "another token took its key"


class TestRenewal:
    def test_a_renewed_quorum_prolongs_the_lock(self) -> None:
        hold = held()
        before = hold.valid_until
        for node in (0, 1):
            hold.renewed(node, 110.0, 110.1)
        assert hold.valid_until == pytest.approx(before + 10)

    def test_an_answer_is_judged_before_it_counts(self) -> None:
        hold = held()
        late = hold.valid_until
        for node in range(3):
            hold.renewed(node, late - 1, late)
        assert hold.state is State.LOST
        assert not hold.held(late)

    def test_an_answer_that_comes_after_the_end_renews_nothing(self) -> None:
        lost, released = held(), held()
        late = lost.valid_until
        assert not lost.renewed(0, late - 1, late)
        assert not lost.renewed(1, late - 1, late)
        released.end()
        assert not released.renewed(0, 110.0, 110.1)

    def test_no_answer_leaves_the_old_deadline(self) -> None:
        hold = held()
        hold.renewed(0, 110.0, 110.1)
        assert hold.valid_until == pytest.approx(100.0 + SPAN)


class TestMissingKeys:
    """A node says that no key of ours stands there."""

    def test_one_that_restarted_keeps_its_promise_and_may_be_repaired_at_once(self) -> None:
        hold = guarded()
        before = list(hold.ends)
        hold.missing(0, 105.0, "second run")
        assert hold.ends == before
        assert hold.to_reclaim(105.0) == [0]

    @pytest.mark.parametrize("run", ["first run", ""])
    def test_one_that_did_not_restart_is_not_counted_nor_repaired_while_its_key_would_have_stood(
        self, run: str
    ) -> None:
        hold = guarded()
        end = hold.ends[0]
        hold.missing(0, 105.0, run)
        assert hold.ends[0] == -math.inf
        assert not hold.to_reclaim(end - 0.001)
        assert hold.to_reclaim(end) == [0]

    def test_without_a_guard_a_restart_keeps_nothing(self) -> None:
        hold = held()
        hold.missing(0, 105.0, "second run")
        assert hold.ends[0] == -math.inf
        assert not hold.to_reclaim(105.0)

    def test_one_that_never_granted_may_be_set_at_once(self) -> None:
        hold = lease(3, guarded=True)
        for node in (0, 1):
            hold.confirm(node, 100.0, "first run")
        hold.begin(100.1)
        hold.missing(2, 105.0, "first run")
        assert hold.to_reclaim(105.0) == [2]

    def test_a_repair_before_the_old_deadline_counts(self) -> None:
        hold = guarded()
        hold.missing(0, 105.0, "second run")
        hold.renewed(0, 105.3, 105.4, "second run")
        assert not hold.probation
        assert hold.ends[0] == pytest.approx(100.0 + SPAN + 5.3)
        assert not hold.to_reclaim(1e9)

    def test_another_token_there_ends_the_repair(self) -> None:
        hold = guarded()
        hold.missing(0, 105.0, "second run")
        hold.denied(0, 105.3)
        assert not hold.to_reclaim(1e9)
        assert hold.ends[0] == -math.inf


class TestProbation:
    """A node that came back by a repair is not counted until a quorum of others confirmed us."""

    def on_probation(self) -> Lease:
        hold = lease(3, guarded=True)
        for node in (0, 1):
            hold.confirm(node, 100.0, "first run")
        hold.begin(100.1)
        hold.renewed(2, 110.0, 110.1, "second run")
        assert set(hold.probation) == {2}
        return hold

    def test_it_does_not_prolong_the_lock(self) -> None:
        hold = self.on_probation()
        before = hold.valid_until
        hold.renewed(0, 112.0, 112.1)
        assert hold.valid_until == before

    def test_a_quorum_of_others_ends_it(self) -> None:
        hold = self.on_probation()
        for node in (0, 1):
            hold.renewed(node, 112.0, 112.1)
        assert not hold.probation

    def test_its_own_answers_do_not_end_it(self) -> None:
        hold = self.on_probation()
        hold.renewed(0, 112.0, 112.1)
        for sent in (113.0, 114.0, 115.0):
            hold.renewed(2, sent, sent + 0.1)
        assert set(hold.probation) == {2}

    def test_answers_to_requests_sent_before_it_began_do_not_end_it(self) -> None:
        hold = self.on_probation()
        for node in (0, 1):
            hold.renewed(node, 110.05, 112.1)
        assert set(hold.probation) == {2}

    def test_others_on_probation_do_not_end_it(self) -> None:
        hold = lease(5, guarded=True)
        for node in (0, 1, 2):
            hold.confirm(node, 100.0, "first run")
        hold.begin(100.1)
        for node in (3, 4):
            hold.renewed(node, 110.0, 110.1)
        for sent in (112.0, 113.0):
            for node in (0, 1, 3, 4):
                hold.renewed(node, sent, sent + 0.1)
        assert set(hold.probation) == {3, 4}
        hold.renewed(2, 114.0, 114.1)
        assert not hold.probation

    def test_one_that_runs_out_again_begins_anew(self) -> None:
        hold = self.on_probation()
        hold.renewed(0, 112.0, 112.1)
        hold.missing(2, 113.0, "second run")
        for sent in (115.0, 125.0, 135.0, 140.5):
            for node in (0, 1):
                hold.renewed(node, sent, sent + 0.1)
        hold.renewed(2, 141.0, 141.1)
        hold.renewed(1, 142.0, 142.1)
        assert set(hold.probation) == {2}

    def test_a_hold_of_repaired_nodes_alone_is_lost_in_time(self) -> None:
        hold = held()
        for node in range(3):
            hold.missing(node, 101.0)
        assert hold.state is State.LOST


class TestFence:
    def test_the_token_is_the_greatest_counter_and_usable_once_a_quorum_reached_it(self) -> None:
        fence = Fence(2)
        fence.counted(0, 51)
        fence.counted(1, 50)
        fence.choose(fence.greatest)
        assert (fence.token, fence.usable) == (51, False)
        fence.counted(1, 51)
        assert fence.usable

    def test_counters_that_agree_need_no_further_round(self) -> None:
        fence = Fence(2)
        for node in (0, 1):
            fence.counted(node, 50)
        fence.choose(fence.greatest)
        assert fence.usable

    def test_an_older_word_of_a_node_takes_nothing_back(self) -> None:
        fence = Fence(1)
        fence.counted(0, 51)
        fence.counted(0, 7)
        fence.choose(fence.greatest)
        assert fence.usable

    def test_a_token_that_another_resource_gave_is_usable_once_it_is_confirmed_here_too(
        self,
    ) -> None:
        fence = Fence(2)
        for node in (0, 1):
            fence.counted(node, 50)
        fence.choose(90)
        assert (fence.token, fence.usable) == (90, False)
        for node in (0, 1):
            fence.counted(node, 90)
        assert fence.usable

    def test_nothing_is_usable_before_a_token_is_chosen(self) -> None:
        fence = Fence(1)
        fence.counted(0, 51)
        assert not fence.usable

    def test_no_proposal_is_beyond_what_a_node_counts_exactly(self) -> None:
        assert proposal(1_700_000_000_000_000) == 1_700_000_000_000_000
        assert proposal(10**18) == 2**52


def test_after_its_end_nothing_counts_any_more() -> None:
    hold = held()
    assert hold.end()
    hold.confirm(0, 200.0)
    hold.confirm(1, 200.0)
    assert (hold.state, hold.valid_until) == (State.RELEASED, -math.inf)


def test_a_release_does_not_hide_a_loss() -> None:
    hold = held()
    hold.expire(hold.valid_until)
    assert not hold.end()
    assert hold.state is State.LOST


def test_a_hold_is_at_risk_for_the_last_third_of_its_ttl() -> None:
    hold = held()
    edge = hold.valid_until - 10.0
    assert not hold.at_risk(edge - 0.001)
    assert hold.at_risk(edge)


@given(st.integers(1, 9), st.data())
def test_no_order_of_answers_makes_the_validity_longer_than_a_quorum_granted(
    nodes: int, data: st.DataObject
) -> None:
    hold = lease(nodes)
    answers = data.draw(st.lists(st.tuples(st.integers(0, nodes - 1), seconds), max_size=20))
    for node, sent in answers:
        hold.confirm(node, sent)
    newest = [max((s for n, s in answers if n == node), default=-math.inf) for node in range(nodes)]
    granted = sorted(newest, reverse=True)[nodes // 2]
    assert hold.valid_until <= granted + SPAN + 1e-6


def test_a_quorum_is_free_when_the_last_of_it_is() -> None:
    assert expires_in([0.0, 2.0, 5.0], 2) == 2.0
    assert expires_in([math.inf, 2.0, 5.0], 2) == 5.0
    assert expires_in([math.inf, math.inf, 5.0], 2) is None
