"""Whatever is killed or frozen, no two bodies of a key overlap and no late message is lost."""

from __future__ import annotations

import dataclasses
import os
import random
from pathlib import Path

import pytest

from tests.integration.storm.ledger import KINDS, Blow, Ledger, Message, Run
from tests.integration.storm.show import storm

SECONDS = float(os.environ.get("CELERY_REDLOCK_STORM", "60"))
SEED = int(os.environ.get("CELERY_REDLOCK_STORM_SEED", random.SystemRandom().randrange(1 << 32)))


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 1200)
def test_no_two_bodies_overlap_and_every_message_is_accounted_for(tmp_path: Path) -> None:
    with storm(SEED, tmp_path) as it:
        it.run(SECONDS)
        ledger = it.ledger()
        assert not ledger.faults(), it.report(ledger)
        assert len(ledger.runs) > SECONDS / 2, it.summary(ledger)
        assert {run.kind for run in ledger.runs} > {"late", "early"}, it.summary(ledger)


LATE = Message("m", KINDS["late"], ("a",), at=0.0)
FIRST = Run(
    "m", "late", "r1", "w/1", 7, "last", 0, ("a",), token=5, first=1.0, last=2.0, ended=True
)
SECOND = dataclasses.replace(FIRST, id="n", run="r2", token=6, first=3.0, last=4.0)
OTHER = dataclasses.replace(LATE, id="n")


def faults(*runs: Run, messages: tuple[Message, ...] = (LATE, OTHER), **more: object) -> list[str]:
    states = {message.id: "SUCCESS" for message in messages}
    return Ledger(messages, runs, **{"states": states, **more}).faults()  # type: ignore[arg-type]


def test_two_bodies_one_after_the_other_are_no_fault() -> None:
    assert faults(FIRST, SECOND) == []


def test_a_body_that_began_in_another_ones_time_is_a_fault() -> None:
    (told,) = faults(FIRST, dataclasses.replace(SECOND, first=1.9))
    assert told.startswith("two bodies of 'a' at once")


def test_a_body_of_another_key_may_run_at_the_same_time() -> None:
    assert faults(FIRST, dataclasses.replace(SECOND, first=1.9, keys=("b",))) == []


def test_a_token_that_does_not_grow_is_a_fault() -> None:
    (told,) = faults(FIRST, dataclasses.replace(SECOND, token=5))
    assert told.startswith("tokens of 'a' do not grow")


def test_a_late_message_that_never_came_to_its_end_is_a_fault() -> None:
    (told,) = faults(FIRST, dataclasses.replace(SECOND, ended=False))
    assert "no run of it came to its end" in told


def test_each_killed_worker_may_have_taken_one_message_from_the_queue_and_no_more() -> None:
    states = {"m": "DEFERRED", "n": "PENDING"}
    death = Blow(2.0, "w/1", 0, "kill")
    assert len(faults(states=states)) == 2
    assert len(faults(states=states, blows=[death])) == 1
    assert faults(states=states, blows=[death, death]) == []
    assert len(faults(states=states, blows=[death, death], seen={"m": 9.0})) == 1


def test_a_late_message_that_ran_again_is_a_fault_unless_its_worker_was_killed() -> None:
    again = dataclasses.replace(SECOND, id="m")
    (told,) = faults(FIRST, again, messages=(LATE,))
    assert "again, though nothing befell its workers" in told
    assert faults(FIRST, again, messages=(LATE,), blows=[Blow(2.0, "w/1", 7, "kill")]) == []
    assert faults(FIRST, again, messages=(LATE,), blows=[Blow(2.0, "v/1", 7, "kill")]) != []
    assert faults(FIRST, again, messages=(LATE,), blows=[Blow(2.0, "w/1", 7, "freeze")]) != []


def test_an_early_message_may_be_lost_for_each_death_and_no_more() -> None:
    early = Message("m", KINDS["early"], ("a",), at=0.0)
    death = Blow(2.0, "w/1", 7, "kill")
    assert faults(messages=(early,), blows=[death]) == []
    assert faults(messages=(early,)) != []
