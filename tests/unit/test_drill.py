"""What a drill decides: its faults by a seed, and what a history proves."""

from __future__ import annotations

import itertools

import pytest

from celery_redlock import SettingsError
from celery_redlock.operate.drill.audit import (
    BEGUN,
    DONE,
    KEPT,
    LOCK_GONE,
    READY,
    DrillRun,
    JournalLine,
    Overlap,
    RunsSoFar,
    SentMessage,
    audit,
)
from celery_redlock.operate.drill.schedule import (
    BACK_AFTER,
    FREEZE,
    KILL,
    KILL_CHILD,
    KINDS,
    Fault,
    plan_faults,
    ttl_for,
)

POOLS = ("prefork", "prefork", "threads")
SEEDS = range(200)


def down_for(fault: Fault) -> float:
    return fault.lasts or (BACK_AFTER if fault.kind == KILL else 0.0)


def test_a_seed_decides_the_faults() -> None:
    assert plan_faults(7, 60.0, 2.0, POOLS) == plan_faults(7, 60.0, 2.0, POOLS)
    assert len({plan_faults(seed, 60.0, 2.0, POOLS) for seed in SEEDS}) == len(SEEDS)


@pytest.mark.parametrize("seconds", [10.0, 30.0, 300.0])
def test_one_worker_at_most_is_down_and_each_fault_has_ended_with_the_drill(seconds: float) -> None:
    for seed in SEEDS:
        faults = plan_faults(seed, seconds, 2.0, POOLS)
        downs = [fault for fault in faults if down_for(fault)]
        for before, after in itertools.pairwise(downs):
            assert after.at >= before.at + down_for(before)
        for down in downs:
            struck = [x for x in faults if down.at < x.at < down.at + down_for(down)]
            assert down.worker not in {fault.worker for fault in struck}
        assert all(fault.at + fault.lasts <= seconds for fault in faults)
        assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)
        assert all(POOLS[fault.worker] == "prefork" for fault in faults if fault.kind == KILL_CHILD)
        assert all(fault.lasts > 2.0 for fault in faults if fault.kind == FREEZE)


def test_the_shortest_drill_has_each_kind_with_most_seeds_and_a_longer_one_with_all() -> None:
    short = [{x.kind for x in plan_faults(seed, 10.0, 2.0, POOLS)} for seed in SEEDS]
    assert all(KILL in kinds for kinds in short)
    assert sum(kinds == {*KINDS} for kinds in short) > len(SEEDS) / 2
    for seed in SEEDS:
        assert {x.kind for x in plan_faults(seed, 20.0, 2.0, POOLS)} == {*KINDS}


def test_a_ttl_fits_the_settings_and_the_time() -> None:
    assert ttl_for(0.2, 60.0, 10.0) == 2.0
    assert ttl_for(1.0, 60.0, 30.0) == 5.0
    assert ttl_for(1.0, 4.0, 30.0) == 4.0
    with pytest.raises(SettingsError, match="give 25s or more"):
        ttl_for(1.0, 60.0, 10.0)


def run(
    began: float, until: float, message: str = "m", end: str = DONE, worker: str = "0.1"
) -> DrillRun:
    return DrillRun(message, "drill:x:a", worker, 1, began, until, end)


def sent(*messages: str, at: float = 0.0) -> list[SentMessage]:
    return [SentMessage(message, "drill:x:a", at) for message in messages]


def test_bodies_one_after_the_other_overlap_not() -> None:
    seen = audit(sent("m", "n"), [run(2.0, 3.0, "n"), run(1.0, 2.0)], {}, [])
    assert (seen.grants, seen.overlaps, seen.lost, seen.is_bad) == (2, (), (), False)


def test_bodies_of_two_locks_overlap_not() -> None:
    other = DrillRun("n", "drill:x:b", "0.1", 1, 1.5, 2.5, DONE)
    assert audit(sent("m", "n"), [run(1.0, 2.0), other], {}, []).overlaps == ()


def test_an_overlap_is_found_also_with_a_body_that_is_not_the_one_before() -> None:
    long, short, late = run(1.0, 9.0, "m"), run(2.0, 3.0, "n"), run(4.0, 5.0, "o")
    seen = audit(sent("m", "n", "o"), [long, short, late], {}, [])
    assert seen.overlaps == (
        Overlap("drill:x:a", ("m", "n"), 1.0),
        Overlap("drill:x:a", ("m", "o"), 1.0),
    )
    assert seen.is_bad


def test_a_message_that_has_not_ended_is_lost_unless_the_broker_has_it() -> None:
    killed = run(1.0, 2.0, "m", end="")
    assert audit(sent("m"), [killed], {}, ["m"]).unfinished == 1
    assert not audit(sent("m"), [killed], {}, ["m"]).is_bad
    assert audit(sent("m", "n"), [killed], {}, ["m"]).lost == ("n",)
    assert audit(sent("m", "n"), [killed], {}, ["m"]).is_bad


def test_a_message_whose_body_had_lost_its_lock_before_it_looked_is_not_lost() -> None:
    told = RunsSoFar()
    told.add(JournalLine(LOCK_GONE, "0.1", 7, 5.0, "r", "m", "a"))
    assert (told.by_run, told.ended) == ({}, {"m"})
    assert audit(sent("m"), [], {}, [], told.unheld).lost == ()


def test_without_a_grant_a_drill_has_shown_nothing() -> None:
    assert audit(sent("m"), [], {}, ["m"]).is_bad


def test_a_lock_is_idle_from_its_holder_or_from_the_first_message_that_waits() -> None:
    runs = [run(1.0, 2.0, "m"), run(2.5, 3.0, "n"), run(7.0, 8.0, "o")]
    late = sent("m", "n") + sent("o", at=6.0)
    assert audit(late, runs, {}, []).longest_idle == 1.0
    early = sent("m", "n", "o")
    assert audit(early, runs, {}, []).longest_idle == 4.0
    assert audit(early, runs, {}, []).slowest_takeover is None


def test_a_takeover_begins_where_the_struck_holder_was_last_seen_with_its_lock() -> None:
    for end in ("", LOCK_GONE):
        runs = [run(1.0, 2.0, "m", end=end), run(4.5, 5.0, "n"), run(5.0, 6.0, "m")]
        seen = audit(sent("m", "n"), runs, {}, [])
        assert (seen.slowest_takeover, seen.longest_idle) == (2.5, 0.0)


def test_a_message_is_recovered_when_it_begins_again_after_the_death_of_its_worker() -> None:
    runs = [
        run(1.0, 2.0, "m", end="", worker="0.1"),
        run(1.0, 1.5, "n", worker="0.1"),
        run(9.0, 9.5, "m", worker="1.1"),
        run(11.0, 11.5, "m", worker="1.1"),
    ]
    assert audit(sent("m", "n"), runs, {"0.1": 2.5}, []).recovery == 6.5
    assert audit(sent("m", "n"), runs, {"1.1": 2.5}, []).recovery is None


def test_the_journal_gives_bodies_whatever_a_killed_process_left() -> None:
    told = RunsSoFar()
    lines = [
        JournalLine(READY, "0.1", 7, 0.5),
        JournalLine(BEGUN, "0.1", 7, 1.0, "r", "m", "a"),
        JournalLine(KEPT, "0.1", 7, 1.2, "r", "m", "a"),
        JournalLine(BEGUN, "1.1", 8, 2.0, "s", "n", "b"),
        JournalLine(LOCK_GONE, "0.1", 7, 5.0, "r", "m", "a"),
    ]
    texts = [*map(str, lines), '["kept", "1.1", 8, 2.', "", "[]", '["done", "1.1", 8, 3, "t"]']
    for line in filter(None, map(JournalLine.of, texts)):
        told.add(line)
    assert told.ready == {"0.1"}
    assert told.by_run == {
        "r": DrillRun("m", "a", "0.1", 7, 1.0, 1.2, LOCK_GONE),
        "s": DrillRun("n", "b", "1.1", 8, 2.0, 2.0, ""),
    }
    assert told.ended == {"m"}
    assert [one.message for one in told.running_in("1.1", since=1.5)] == ["n"]
    assert told.running_in("1.1", since=2.5) == told.running_in("0.1", since=0.0) == []
