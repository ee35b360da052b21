"""An observer's proof, by its own clock, that a worker lease is dead."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from celery_redlock.tasks.recovery.observer import (
    BEAT_INTERVAL,
    DETECTION_TIME,
    LOOK_GAP,
    PROOF,
    QUIET,
    TRUST,
    Observer,
)

A, B = {"a": "1"}, {"b": "1"}


def looks(observer: Observer, *moments: float, quiet: Mapping[str, str] = A) -> list[list[str]]:
    """Look at some moments, each answered at once; return who is dead after each."""
    return [sorted(observer.look(moment, moment, quiet)) for moment in moments]


def test_a_worker_begins_nothing_for_as_long_as_a_proof_takes() -> None:
    assert BEAT_INTERVAL < QUIET < TRUST < PROOF < DETECTION_TIME
    assert DETECTION_TIME == QUIET + PROOF
    assert LOOK_GAP < PROOF


def test_the_same_beat_for_as_long_as_the_proof_is_one_of_a_dead_worker() -> None:
    assert looks(Observer(), 10.0, 11.5, 13.0, 14.7, 14.9) == [[], [], [], [], ["a"]]


def test_the_beat_that_was_seen_is_told_with_it() -> None:
    observer = Observer()
    looks(observer, 0.0, 1.5, 3.0, 4.5)
    assert observer.look(6.0, 6.0, A) == {"a": "1"}


def test_another_beat_begins_the_proof_anew() -> None:
    observer = Observer()
    looks(observer, 0.0, 1.5, 3.0, 4.5)
    assert looks(observer, 6.0, quiet={"a": "2"}) == [[]]
    assert looks(observer, 7.5, 9.0, 10.5, 12.0, quiet={"a": "2"})[-1] == ["a"]


def test_a_worker_that_was_not_quiet_in_between_is_looked_at_anew() -> None:
    observer = Observer()
    looks(observer, 0.0, 1.5)
    looks(observer, 3.0, quiet={})
    assert looks(observer, 4.5, 6.0, 7.5, 9.0) == [[], [], [], []]


def test_each_worker_lease_has_a_proof_of_its_own() -> None:
    observer = Observer()
    looks(observer, 0.0, 1.5)
    assert looks(observer, 3.0, 4.5, 6.0, 7.0, 8.0, quiet=A | B) == [
        [],
        [],
        ["a"],
        ["a"],
        ["a", "b"],
    ]


def test_a_look_that_was_late_begins_all_proofs_anew() -> None:
    observer = Observer()
    looks(observer, 0.0, 1.5, 3.0)
    assert looks(observer, 3.0 + LOOK_GAP + 0.01) == [[]]
    assert looks(observer, 6.5, 8.0, 9.0) == [[], [], []]
    assert looks(observer, 10.0) == [["a"]]


def test_a_look_that_was_just_not_late_goes_on() -> None:
    assert looks(Observer(), 0.0, 2.0, 4.0, 6.0)[-1] == ["a"]


def test_a_look_without_an_answer_begins_all_proofs_anew() -> None:
    observer = Observer()
    looks(observer, 0.0, 1.5, 3.0)
    observer.forget()
    assert looks(observer, 4.5, 6.0, 7.5, 9.0, 9.4) == [[], [], [], [], ["a"]]


def test_the_time_on_the_way_does_not_count() -> None:
    observer = Observer()
    assert not observer.look(0.0, 1.9, A)  # asked at 0.0, and read at 1.9 at the latest
    assert not observer.look(2.0, 3.8, A)
    assert not observer.look(4.0, 5.7, A)
    assert not observer.look(6.6, 7.5, A)
    assert observer.look(6.8, 8.0, A)


@given(st.lists(st.tuples(st.floats(0.05, 4.0), st.floats(0.0, 1.0), st.booleans()), max_size=40))
def test_nobody_is_dead_who_has_beaten_within_the_proof(
    steps: list[tuple[float, float, bool]],
) -> None:
    """steps: of each look the pause before it, the time to its answer, and whether a beat came."""
    observer, now, beats = Observer(), 0.0, 0
    beaten_at = 0.0  # before the question was sent, so that each look shows it
    since = answered_before = float("-inf")
    for pause, way, has_beaten in steps:
        now += pause
        if has_beaten:
            beats, beaten_at = beats + 1, now
        sent, answered = now, now + way
        if answered - answered_before > LOOK_GAP:
            since = answered
        answered_before = now = answered
        dead = observer.look(sent, answered, {"a": str(beats)})
        assert not dead or sent - max(beaten_at, since) >= PROOF
