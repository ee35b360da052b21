"""Whatever is killed or frozen, no two bodies of a key overlap and no late message is lost."""

from __future__ import annotations

import dataclasses
import json
import os
import random
from pathlib import Path

import pytest
from celery import Celery

from celery_redlock.testing import embedded_nodes
from tests.integration.storm.ledger import KINDS, Blow, Ledger, Line, Message, Outage, Run, Wait
from tests.integration.storm.queue import Transit, deliver_again
from tests.integration.storm.show import SEED, storm

SECONDS = float(os.environ.get("CELERY_REDLOCK_STORM", "60"))


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 1200)
def test_no_two_bodies_overlap_and_every_message_is_accounted_for(tmp_path: Path) -> None:
    print(f"seed {SEED}", flush=True)
    with storm(SEED, tmp_path) as it:
        it.run(SECONDS)
        ledger = it.ledger()
        assert not ledger.faults(), it.report(ledger)
        assert not it.hollow(ledger, SECONDS), it.summary(ledger)
        print(it.summary(ledger))


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
    assert told.startswith("2 bodies of 'a' at once")


def test_a_third_body_of_two_permits_is_a_fault() -> None:
    message = Message("m", KINDS["permitted"], ("p",), at=0.0)
    first = dataclasses.replace(FIRST, kind="permitted", keys=("p",), token=None)
    runs = [dataclasses.replace(first, run=f"r{n}", id=f"m{n}", first=1.0 + n / 10) for n in (1, 2)]
    messages = tuple(dataclasses.replace(message, id=f"m{n}") for n in (1, 2, 3))
    assert faults(*runs, messages=messages[:2]) == []
    runs.append(dataclasses.replace(first, run="r3", id="m3", first=1.9))
    (told,) = faults(*runs, messages=messages)
    assert told.startswith("3 bodies of 'p' at once")


def test_a_message_that_is_skipped_though_its_callable_did_not_say_so_is_a_fault() -> None:
    asked = dataclasses.replace(LATE, kind=KINDS["deciding"])
    lines = {"m": [Line(1.0, "m", "w/1", 7, "skips")]}
    assert faults(messages=(asked,), states={"m": "REVOKED"}, lines=lines) == []
    (told,) = faults(messages=(asked,), states={"m": "REVOKED"})
    assert "its callable did not say so" in told


def test_a_send_that_is_dropped_for_one_that_does_not_come_is_a_fault() -> None:
    earlier = dataclasses.replace(LATE, kind=KINDS["deduplicated"])
    run = dataclasses.replace(FIRST, kind="deduplicated")

    def told(*runs: Run, **changes: object) -> int:
        dropped = dataclasses.replace(earlier, at=0.5, **changes)  # type: ignore[arg-type]
        found = Ledger((earlier,), runs, {"m": "SUCCESS"}, dropped=[dropped]).faults()
        return sum("another send was dropped" in fault for fault in found)

    assert told(run) == 0
    assert told() == told(dataclasses.replace(run, ended=False)) == 1
    assert told(run, id="n") == told(run, keys=("b",)) == 1
    states = {"m": "DEFERRED"}
    dropped = [dataclasses.replace(earlier, at=0.5)]
    assert faults(messages=(earlier,), states=states, dropped=dropped, lost=frozenset("m")) == []


def test_a_callers_body_counts_with_those_of_tasks() -> None:
    called = dataclasses.replace(SECOND, kind="called", id="x")
    assert faults(FIRST, called, messages=(LATE,)) == []
    (told,) = faults(FIRST, dataclasses.replace(called, first=1.9), messages=(LATE,))
    assert told.startswith("2 bodies of 'a' at once")


def test_a_wait_that_goes_on_for_too_long_is_a_fault_unless_its_process_was_stopped() -> None:
    wait = Wait(9.0, "LockTaken", wait=2.0, waited=8.0)
    (told,) = faults(FIRST, SECOND, waits=[wait])
    assert told.startswith("a caller's wait")
    assert faults(FIRST, SECOND, waits=[dataclasses.replace(wait, stalled=4.0)]) == []
    assert faults(FIRST, SECOND, waits=[dataclasses.replace(wait, waited=2.5)]) == []
    assert len(faults(FIRST, SECOND, waits=[Wait(9.0, "OSError(24)")])) == 1


def test_a_body_of_another_key_may_run_at_the_same_time() -> None:
    assert faults(FIRST, dataclasses.replace(SECOND, first=1.9, keys=("b",))) == []


def test_a_token_that_does_not_grow_is_a_fault() -> None:
    (told,) = faults(FIRST, dataclasses.replace(SECOND, token=5))
    assert told.startswith("tokens of 'a' do not grow")


def test_a_late_message_that_never_came_to_its_end_is_a_fault() -> None:
    (told,) = faults(FIRST, dataclasses.replace(SECOND, ended=False))
    assert "no run of it came to its end" in told


def test_only_a_message_that_was_lost_on_its_way_to_a_worker_may_never_end() -> None:
    states = {"m": "DEFERRED", "n": "PENDING"}
    assert len(faults(states=states, blows=[Blow(2.0, "w/1", 0, "kill", 3)])) == 2
    (told,) = faults(states=states, lost=frozenset("n"))
    assert told.startswith("late m: its state is DEFERRED")
    assert len(faults(states={"m": "FAILURE", "n": "REVOKED"}, lost=frozenset("mn"))) == 2


def test_the_body_of_a_chord_may_be_lost_with_one_of_its_header() -> None:
    body = Message("c", KINDS["joining"], ("a",), at=0.0, after=("m",))
    states = {"m": "DEFERRED", "c": "PENDING"}
    assert faults(messages=(LATE, body), states=states, lost=frozenset("m")) == []
    states["m"] = "SUCCESS"
    assert len(faults(FIRST, messages=(LATE, body), states=states)) == 1


def test_the_body_of_a_chord_may_be_lost_with_a_child_that_was_killed_before_it_counted() -> None:
    body = Message("c", KINDS["joining"], ("a",), at=0.0, after=("m",))
    states = {"m": "SUCCESS", "c": "PENDING"}

    def count(at: float = 2.1, freed: float | None = None, pid: int = 7) -> int:
        run, blow = dataclasses.replace(FIRST, freed=freed), Blow(at, "w/1", pid, "kill")
        return len(faults(run, messages=(LATE, body), states=states, blows=[blow]))

    assert count() == 0
    assert count(at=9.0) == count(at=1.5) == count(freed=2.05) == count(pid=8) == 1
    assert count(pid=0) == 1  # with its worker goes nothing: the message comes back


def test_a_late_message_that_ran_again_is_a_fault_unless_its_worker_was_killed() -> None:
    again = dataclasses.replace(SECOND, id="m")

    def told(*blows: Blow, **more: object) -> list[str]:
        return faults(FIRST, again, messages=(LATE,), blows=blows, **more)

    (fault,) = told()
    assert "again, though nothing explains it" in fault
    kill = Blow(2.0, "w/1", 7, "kill")
    assert told(kill) == []
    assert told(dataclasses.replace(kill, pid=0)) == []
    assert told(dataclasses.replace(kill, worker="v/1")) != []
    assert told(dataclasses.replace(kill, pid=8)) != []
    assert told(dataclasses.replace(kill, at=4.5)) != []


def test_a_run_that_was_stopped_before_its_last_line_alone_is_no_reason_to_run_again() -> None:
    again = dataclasses.replace(SECOND, id="m", first=9.0, last=9.5)
    run = dataclasses.replace(FIRST, last=5.0)
    for until, count in ((1.9, 1), (5.1, 0)):
        freeze = Blow(1.1, "w/1", 7, "freeze", until=until)
        assert len(faults(run, again, messages=(LATE,), blows=[freeze])) == count


def test_a_revoke_strikes_only_workers_that_had_what_was_revoked() -> None:
    again = dataclasses.replace(SECOND, id="m")
    revoke = Blow(2.0, "", 0, "revoke", message="x")
    for worker, count in (("v/1", 1), ("w/1", 0)):
        lines = {"x": [Line(1.5, "x", worker, 7, "received")]}
        assert len(faults(FIRST, again, messages=(LATE,), blows=[revoke], lines=lines)) == count


def test_a_retry_runs_a_stage_again_only_after_a_lost_lock() -> None:
    again = dataclasses.replace(SECOND, id="m", retries=1)
    for cause, count in (("ValueError", 1), ("LockLost", 0)):
        lines = {"m": [Line(2.5, "m", "w/1", 7, "retried", cause=cause)]}
        assert len(faults(FIRST, again, messages=(LATE,), lines=lines)) == count


def test_a_retry_runs_twice_only_where_the_run_before_it_sent_it_twice() -> None:
    message = dataclasses.replace(LATE, kind=KINDS["retrying"])
    runs = [
        dataclasses.replace(
            FIRST, stage=stage, retries=n, first=n + 1.0, last=n + 1.5, pid=n + 10, token=n
        )
        for n, stage in enumerate(KINDS["retrying"].stages)
    ]
    again = dataclasses.replace(runs[-1], first=9.0, last=9.5, token=6)

    def told(retries: int, freed: float | None = None, pid: int = 11) -> int:
        struck = dataclasses.replace(runs[retries], freed=freed)
        others = [run for run in runs if run.retries != retries]
        kill = Blow(2.6, "w/1", pid, "kill", until=2.6)
        return len(faults(struck, *others, again, messages=(message,), blows=[kill]))

    assert told(1) == 0
    assert told(1, freed=2.5) == 1
    assert told(1, pid=9) == 1


def test_a_late_message_that_left_its_mark_runs_again_only_where_the_nodes_have_lost_it() -> None:
    marked, again = dataclasses.replace(FIRST, freed=2.0), dataclasses.replace(SECOND, id="m")
    runs = marked, again
    assert faults(*runs, messages=(LATE,), blows=[Blow(2.0, "w/1", 7, "kill")]) != []
    one, other = Outage(0, 1.5, 1.7), Outage(1, 2.5)
    assert faults(*runs, messages=(LATE,), outages=[one]) != []
    assert faults(*runs, messages=(LATE,), outages=[one, dataclasses.replace(one, until=9)]) != []
    assert faults(*runs, messages=(LATE,), outages=[one, other]) == []
    assert faults(*runs, messages=(LATE,), outages=[one, Outage(1, 3.5)]) != []


def test_a_frozen_node_keeps_what_it_knows() -> None:
    marked = dataclasses.replace(FIRST, freed=2.0)
    again = dataclasses.replace(SECOND, id="m", first=30.0, last=31.0)
    killed = Outage(0, 10.0, 12.0)

    def told(since: float, until: float) -> list[str]:
        frozen = Outage(1, since, until, killed=False)
        return faults(marked, again, messages=(LATE,), outages=[killed, frozen])

    assert told(10.0, 12.0) != []
    assert told(1.0, 1.5) == told(28.0, 29.0) == []


def test_what_is_left_is_a_fault() -> None:
    assert faults(leftovers=["locked: a"], messages=()) == ["locked: a"]


def test_a_state_that_says_that_the_body_was_cut_needs_no_end_of_it() -> None:
    cut = dataclasses.replace(FIRST, ended=False)
    for kind, state in (("limited", "FAILURE"), ("revoked", "REVOKED")):
        message = dataclasses.replace(LATE, kind=KINDS[kind])
        assert faults(cut, messages=(message,), states={"m": state}) == []
        assert len(faults(cut, messages=(message,), states={"m": "SUCCESS"})) == 1
    assert len(faults(cut, messages=(LATE,), states={"m": "FAILURE"})) == 1


EARLY = Message("m", KINDS["early"], ("a",), at=0.0)


def test_a_worker_takes_no_more_early_messages_with_it_than_it_had_in_its_slots() -> None:
    others = [dataclasses.replace(EARLY, id=name) for name in "no"]
    states = {"m": "STARTED", "n": "DEFERRED", "o": "PENDING"}

    def told(what: str, worker: str, at: float = 2.0, pid: int = 0, of: str = "received") -> int:
        blow = Blow(at, worker, pid, what, slots=2, until=at)
        lines = {name: [Line(1.5, name, "w/1", 7, of)] for name in "mno"}
        messages = (EARLY, *others)
        return len(faults(messages=messages, states=states, lines=lines, blows=[blow]))

    assert told("freeze", "w/1") == 3
    assert told("kill", "w/2") == 3
    assert told("kill", "w/1", at=0.1) == 3
    assert told("kill", "w/1", at=99.0) == 3
    assert told("kill", "w/1", pid=8, of="step") == 3
    assert told("kill", "w/1", pid=7, of="step") == 1
    assert told("kill", "w/1", pid=8) == 1
    assert told("kill", "w/1") == 1


def test_an_early_message_runs_again_only_where_a_delivery_of_it_was_given_back() -> None:
    run = dataclasses.replace(FIRST, kind="early")
    again = dataclasses.replace(SECOND, id="m", kind="early")

    def told(**given_back: list[float]) -> int:
        blows = [Blow(0.7, "w/1", 0, "kill"), Blow(0.7, "", 0, "revoke", message="m")]
        return len(faults(run, again, messages=(EARLY,), blows=blows, given_back=given_back))

    assert told() == 1
    assert told(n=[2.5]) == 1
    assert told(m=[9.5]) == 1
    assert told(m=[2.5]) == 0


def test_a_message_that_is_taken_and_not_noted_is_lost_on_its_way() -> None:
    with embedded_nodes(1) as (broker,), broker.client() as client:
        transit = Transit(client, broker.port)
        app = Celery("storm", broker=broker.url, set_as_default=False)
        for name in "mno":
            app.send_task("storm.late", [["a"], 0.0], task_id=name)
        assert transit.lost() == frozenset()
        m, n, o = (client.rpop("celery") for _ in range(3))
        assert transit.lost() == {*"mno"}
        for text in (n, o):
            tag = json.loads(str(text))["properties"]["delivery_tag"]
            client.hset("unacked", tag, json.dumps([json.loads(str(text)), "", "celery"]))
        assert transit.lost() == {"m"}
        assert transit.given_back() == {}
        client.lpush("celery", str(m))
        assert transit.lost() == frozenset()
        assert [*transit.given_back()] == ["m"]
        assert deliver_again(client, random.Random(1))
        assert transit.lost() == frozenset()
        client.lpop("celery")
        (again,) = transit.lost()
        assert again in "no"
        app.close()
        transit.close()


@pytest.mark.parametrize(("kind", "revoked"), [("expiring", {}), ("revoked", {"m": 5.0})])
def test_retry_may_stay_where_what_was_published_was_over(
    kind: str, revoked: dict[str, float]
) -> None:
    over = dataclasses.replace(LATE, kind=KINDS[kind])
    cut = dataclasses.replace(FIRST, ended=False)

    def told(of: Message = over, state: str = "RETRY", at: float = 5.1) -> int:
        lines = {"m": [Line(at, "m", "w/1", 7, "retried", cause="LockLost")]}
        of_revoked = {} if of is LATE else revoked
        return len(
            faults(cut, messages=(of,), states={"m": state}, lines=lines, revoked=of_revoked)
        )

    assert told() == 0
    assert told(at=4.9) == 1
    assert told(of=LATE) == 1
    assert told(state="DEFERRED") == 1
    assert told(state="SUCCESS") == 1


@pytest.mark.parametrize(("state", "what"), [("RETRY", "retried"), ("DEFERRED", "deferred")])
def test_a_state_may_stay_that_was_stored_by_who_was_stopped_before_it(
    state: str, what: str
) -> None:
    last = dataclasses.replace(SECOND, id="m", retries=1, worker="v/1")
    cut = dataclasses.replace(FIRST, ended=False)
    freeze = Blow(2.1, "w/1", 7, "freeze", until=5.0)

    def told(blow: Blow, at: float = 5.1, of: Run = last) -> int:
        lines = {"m": [Line(at, "m", "w/1", 7, what, cause="LockLost")]}
        states = {"m": state}
        return len(faults(cut, of, messages=(LATE,), states=states, lines=lines, blows=[blow]))

    assert told(freeze) == 0
    assert told(dataclasses.replace(freeze, what="kill")) == 1
    assert told(dataclasses.replace(freeze, pid=8)) == 1
    assert told(dataclasses.replace(freeze, until=3.5)) == 1
    assert told(dataclasses.replace(freeze, at=4.5)) == 1
    assert told(freeze, at=3.9) == 1
    assert told(freeze, of=dataclasses.replace(last, retries=0)) == (state == "RETRY")
    assert told(freeze, of=dataclasses.replace(last, ended=False)) == 1
