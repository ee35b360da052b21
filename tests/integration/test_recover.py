"""What operators are told of messages whose worker is gone, and how they bring them back."""

from __future__ import annotations

import itertools
import json
import re
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from click.testing import Result
from kombu.transport.redis import Channel
from prometheus_client import CollectorRegistry

from celery_redlock import Redlock
from celery_redlock.operate.cli import recover as of_recover
from celery_redlock.operate.cli import views
from celery_redlock.operate.cli.taken import SETTLED
from celery_redlock.operate.metrics import Metrics
from celery_redlock.signals import MessagesRecoveredEvent, messages_recovered
from celery_redlock.tasks.delivery.republish import MOVES
from celery_redlock.tasks.recovery.observer import BEAT_INTERVAL, DETECTION_TIME, PROOF
from celery_redlock.tasks.recovery.survey import Survey, open_survey
from celery_redlock.tasks.recovery.tags import MAX_MOVES, DeliveryTag, new_lease
from tests.conftest import PATIENCE, Nodes, eventually, register, settle
from tests.integration.conftest import MakeStage, Stage, slow_but
from tests.integration.test_command import command, in_json, run_of, schema_of, seconds_until
from tests.integration.test_metrics import scrape

__all__ = ["run_of"]  # a fixture
NOBODY = "No message of a dead worker is left.\n"


class Stepping:
    """A clock whose sleeps are steps: a proof takes no time."""

    resolution = 1e-9

    def __init__(self) -> None:
        self.at = 0.0
        self.sleeps: list[float] = []

    def now(self) -> float:
        return self.at

    def wall_us(self) -> int:
        return int(self.at * 1e6)

    def sleep(self, seconds: float) -> None:
        self.at += seconds
        self.sleeps.append(seconds)


@dataclass
class Broker:
    """A stage's broker, on which messages are taken, and worker leases put, without a worker."""

    stage: Stage
    survey: Survey

    def __post_init__(self) -> None:
        self.client, self.ledger = self.stage.broker.client(), self.survey.ledger
        self._numbers = itertools.count()

    def lease(self, worker: str, silent_for: float = 0.0, *, dead: bool = False) -> str:
        """Put the worker lease of a worker that last beat so long ago, or is dead."""
        lease = new_lease()
        assert self.ledger.beat(lease, joins_as=worker).is_alive
        if dead:
            assert self.ledger.declare_dead(lease)
        elif silent_for:
            beat = (self.survey.now() - silent_for) * 1000
            self.client.zadd(self.ledger.leases, {lease: round(beat)})
        return lease

    def take(
        self,
        result: Any,
        lease: str = "",
        ago: float = 0.0,
        moves: int = 0,
        queue: str = "celery",
        to: tuple[str, str] | None = None,
    ) -> str:
        """Take the one message of a queue as a worker does, and do not acknowledge it.

        to: the exchange and the routing key that it is to have come by.
        """
        raw = json.loads(str(self.client.rpop(queue)))
        assert raw["headers"]["id"] == result.id
        properties = raw["properties"]
        if lease:
            tag = DeliveryTag(lease, next(self._numbers), queue)
            properties["delivery_tag"] = str(tag)
        if moves:
            properties[MOVES] = moves
        of = properties["delivery_info"]
        noted = json.dumps([raw, *(to or (of["exchange"], of["routing_key"]))])
        self.client.hset("unacked", properties["delivery_tag"], noted)
        self.client.zadd("unacked_index", {properties["delivery_tag"]: self.survey.now() - ago})
        return str(properties["delivery_tag"])

    def unacked(self) -> set[str]:
        tags = {str(tag) for tag in self.client.hkeys("unacked")}
        assert tags == {str(tag) for tag in self.client.zrange("unacked_index", 0, -1)}
        return tags

    def queued(self, queue: str = "celery") -> list[Any]:
        """Return the messages of a list, the next one first."""
        return [json.loads(str(one)) for one in reversed(self.client.lrange(queue, 0, -1))]


def ids_of(messages: list[Any]) -> list[str]:
    return [one["headers"]["id"] for one in messages]


@pytest.fixture
def broker(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    """Give the broker of a stage without a worker."""
    monkeypatch.setattr(views, "REPLY_TIMEOUT", 0.05)
    monkeypatch.setattr(of_recover, "SystemClock", Stepping)
    with open_survey(stage.app) as survey:
        assert survey is not None
        yield Broker(stage, survey)


@dataclass
class Lost:
    """What lies unacknowledged: one message each, by the state of its worker lease."""

    results: dict[str, Any]
    tags: dict[str, str]
    leases: dict[str, str]


@pytest.fixture
def lost(broker: Broker) -> Iterator[Lost]:
    tasks = broker.stage.tasks
    leases = {
        "silent": broker.lease("celery@web1", 3.0),
        "alive": broker.lease("celery@web2"),
        "dead": broker.lease("celery@web3", dead=True),
        "left": new_lease(),
    }
    results, tags = {}, {}
    for state, lease in leases.items():
        results[state] = tasks.late.delay(state)
        moves = MAX_MOVES if state == "left" else 0
        tags[state] = broker.take(results[state], lease, ago=600.0, moves=moves)
    results["plain"] = tasks.unlocked_late.delay("plain")
    tags["plain"] = broker.take(results["plain"], ago=600.0)
    ends = threading.Event()

    def live() -> None:
        while not ends.wait(BEAT_INTERVAL / 4):
            broker.ledger.beat(leases["alive"])

    thread = threading.Thread(target=live)
    thread.start()
    yield Lost(results, tags, leases)
    ends.set()
    thread.join()


def test_what_lies_stranded_is_shown_with_its_worker_and_when_it_is_back(lost: Lost) -> None:
    for words in (["waiters"], ["top", "--count", "1"], ["show", "k:k"]):
        shown = in_json(*words)
        shown = shown.get("waiters", shown)["stranded"]
        states = [(one["worker"], one["state"], one["messages"]) for one in shown]
        assert states == [
            ("celery@web1", "silent", 1), ("celery@web3", "dead", 1), ("", "left", 1)
        ], words  # fmt: skip
        silent, dead, left = shown
        assert silent["silent_for"] >= 3.0
        assert silent["back_in"] == pytest.approx(max(0.0, DETECTION_TIME - silent["silent_for"]))
        assert (dead["back_in"], left["back_in"]) == (0.0, None)
    for words in (["waiters"], ["top", "--count", "1"]):
        told = command(*words).output
        assert re.search(r"^STRANDED WITH +MESSAGES +NO BEAT FOR +BACK$", told, re.MULTILINE)
        assert re.search(r"\ncelery@web1 +1 +\d+\.\d s +(in \d+\.\d s|now)\n", told), told
        assert re.search(r"\ncelery@web3 +1 +proved +now\n", told)
        assert re.search(r"\n\? +1 +within 1 h 0 min\n", told)
        assert "celery@web2" not in told


def test_the_doctor_warns_of_what_nobody_moves_within_seconds(lost: Lost) -> None:
    lints = in_json("doctor")["lints"]
    found = {one["setting"]: (one["level"], one["value"]) for one in lints}
    assert found["stranded: celery@web1"] == ("advice", "1 message")
    assert found["stranded: celery@web3"] == ("advice", "1 message")
    assert found["stranded: ?"] == ("warning", "1 message")
    assert "stranded: celery@web2" not in found
    told = command("doctor").output
    assert re.search(r"web1=1 message: no beat for \d+\.\d s: back (in \d+\.\d s|now)\n", told), (
        told
    )
    assert "stranded: celery@web3=1 message: it is dead: back now\n" in told
    assert " found. See `celery redlock explain messages-that-stay-unacked`" in told


WITHOUT_LEASE = "messages without a worker lease"


def test_the_doctor_warns_of_messages_without_a_lease_that_no_worker_has(lost: Lost) -> None:
    """Of a killed worker they are back after the visibility timeout alone."""
    (found,) = [one for one in in_json("doctor")["lints"] if one["setting"] == WITHOUT_LEASE]
    # celery@web2 is alive and does not answer, so they may be its messages
    assert (found["level"], found["value"]) == ("advice", "1")
    assert re.match(
        r"taken up to 10 min \d+ s ago, and no worker that answers has them: if theirs is gone, "
        r"they are back within (49|50) min \d+ s, or `celery redlock recover --older-than` moves "
        r"them$",
        found["hint"],
    ), found


def test_only_a_message_without_a_lease_that_was_taken_long_ago_is_a_warning(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = broker.stage.tasks
    tag = broker.take(tasks.unlocked_late.delay("k"), ago=30.0)
    assert WITHOUT_LEASE not in command("doctor").output
    broker.client.zincrby("unacked_index", -90.0, tag)
    told = command("doctor")
    assert f"\nwarning  {WITHOUT_LEASE}=1: taken up to 2 min" in told.output
    assert told.exit_code == 0
    assert "See `celery redlock explain messages-that-stay-unacked`" in told.output
    # a living worker may keep it for its rate, and does not tell of it
    monkeypatch.setattr(tasks.unlocked_late, "rate_limit", "1/m")
    assert WITHOUT_LEASE not in command("doctor").output


def test_a_message_that_a_plain_worker_has_is_none_that_nobody_has(
    make_stage: MakeStage, nodes: Nodes
) -> None:
    stage = make_stage(nodes)
    worker = stage.worker("w1", concurrency=1)
    stage.see_listening()
    stage.tasks.unlocked_late.apply_async(("k",), countdown=600)
    client = stage.broker.client()
    eventually(lambda: client.hlen("unacked") == 1)
    (tag,) = client.hkeys("unacked")
    client.zincrby("unacked_index", -600.0, tag)
    with open_survey(stage.app) as survey:
        assert survey is not None
        assert [one.tag for one in survey.older_than(SETTLED)] == [tag]
    # a busy worker may not answer in time
    eventually(lambda: WITHOUT_LEASE not in command("doctor").output)
    worker.kill()
    eventually(lambda: WITHOUT_LEASE in command("doctor").output)


def test_where_no_worker_is_left_to_move_it_that_is_said(broker: Broker) -> None:
    lease = broker.lease("celery@web1", 100.0)
    result = broker.stage.tasks.late.delay("k")
    broker.take(result, lease)
    (row,) = in_json("waiters")["stranded"]
    assert (row["state"], row["back_in"]) == ("silent", None)
    assert re.search(
        r"\ncelery@web1 +1 +1 min \d+ s +once a worker runs\n", command("waiters").output
    )


@pytest.mark.usefixtures("no_worker")
def test_with_recovery_switched_off_what_lies_tagged_is_back_by_the_visibility_timeout(
    make_stage: MakeStage, nodes: Nodes
) -> None:
    """Of workers that had it switched on, as long as no such worker lives."""
    stage = make_stage(nodes, redlock_recovery=False)
    with open_survey(stage.app) as survey:
        assert survey is not None
        broker = Broker(stage, survey)
        silent, dead = broker.lease("celery@web1", 100.0), broker.lease("celery@web2", dead=True)
        results = [stage.tasks.late.delay("k"), stage.tasks.late.delay("k")]
        for lease, result in zip((silent, dead), results, strict=True):
            broker.take(result, lease)
        within, later = "within 1 h 0 min", r"(within 1 h 0 min|within 59 min \d+ s)"
        for words in (["waiters"], ["top", "--count", "1"]):
            told = command(*words).output
            assert re.search(rf"\ncelery@web1 +1 +1 min \d+ s +{within}\n", told), told
            assert re.search(rf"\ncelery@web2 +1 +proved +{within}\n", told), told
        shown = {one["setting"]: one for one in in_json("doctor")["lints"]}
        for worker in ("celery@web1", "celery@web2"):
            assert shown[f"stranded: {worker}"]["level"] == "warning"
            assert f"back {within}" in shown[f"stranded: {worker}"]["hint"]
        for result, worker in zip(results, ("web1 is gone for", "web2 is dead"), strict=True):
            reason = in_json("show", result.id)["task"]["reason"]
            assert re.fullmatch(rf"celery@{worker}.*: its message is back {later}", reason), reason
        broker.lease("celery@web3")
        states = {one["worker"]: one["back_in"] for one in in_json("waiters")["stranded"]}
        assert states == {"celery@web1": 0.0, "celery@web2": 0.0}


def test_a_task_is_shown_with_the_worker_that_has_its_message(lost: Lost) -> None:
    often = "it was moved too often in a row, so its body may be what ends workers: it is back "
    within = "within 49 min [0-9]+ s"
    for state, why in (
        ("silent", r"celery@web1 is gone for \d+\.\d s: its message is back (in \d+\.\d s|now)"),
        ("alive", "celery@web2 has its message"),
        ("dead", "celery@web3 is dead: its message is back now"),
        ("left", f"{often}{within}, or `celery redlock recover --older-than` moves it"),
        ("plain", "it was taken 10 min [0-9]+ s ago, without a worker lease: if its worker is "
         f"gone, it is back {within}"),
    ):  # fmt: skip
        task = in_json("show", lost.results[state].id)["task"]
        name = "tests.integration.app.unlocked_late" if state == "plain" else "tests.late"
        assert (task["task"], task["state"]) == (name, "PENDING")
        assert re.fullmatch(why, task["reason"]), task["reason"]
        assert re.search(f"WHY +{why}\n", command("show", lost.results[state].id).output)
        for start in (lost.results[state].id[:8], f"{lost.results[state].id[:8]}-..."):
            shown = in_json("show", start)["task"]
            assert (shown["task_id"], shown["task"]) == (lost.results[state].id, name)


def test_a_short_id_of_several_messages_that_workers_have_names_them(broker: Broker) -> None:
    ids = [f"4c8f3226-{uuid.uuid4()}" for _ in range(2)]
    lease = broker.lease("celery@web1")
    for task_id in ids:
        broker.take(broker.stage.tasks.late.apply_async(("k",), task_id=task_id), lease)
    several = f"Error: 4c8f3226 begins several task ids: {', '.join(sorted(ids))}\n"
    assert command("show", "4c8f3226").output == several


def test_a_kept_message_of_a_dead_worker_is_not_said_to_be_back_now(broker: Broker) -> None:
    """Its worker lease stays among the dead while the broker refuses another message of it."""
    kept = broker.stage.tasks.late.delay("kept")
    broker.take(kept, broker.lease("celery@web1", dead=True), ago=600.0, moves=MAX_MOVES)
    why = in_json("show", kept.id)["task"]["reason"]
    assert re.fullmatch(
        "it was moved too often in a row, so its body may be what ends workers: it is back within "
        "49 min [0-9]+ s",  # no recover --older-than: it moves what has no worker lease
        why,
    ), why


def recover(*words: str, says: str | None = None) -> Result:
    return command("recover", *words, says=says)


def test_recover_moves_what_has_a_dead_worker_lease_alone(broker: Broker, lost: Lost) -> None:
    told = recover("--dry-run")
    assert told.exit_code == 0, told.output
    waits = "waits until it is sure that no beat comes from celery@web1\n"
    rows = r"WORKER +TASK +MESSAGES\ncelery@web1 +tests.late +1\ncelery@web3 +tests.late +1\n"
    assert re.fullmatch(waits + rows, told.output), told.output
    assert broker.unacked() == {*lost.tags.values()}
    assert not broker.queued()
    told = recover()
    for worker in ("celery@web1", "celery@web3"):
        assert f"moved 1 message of {worker} back to their queues\n" in told.output
    moved = broker.queued()
    assert {*ids_of(moved)} == {lost.results[state].id for state in ("silent", "dead")}
    tags = {one["properties"]["delivery_tag"] for one in moved}
    assert len(tags) == 2
    assert not tags & {*lost.tags.values()}
    assert broker.unacked() == {lost.tags[state] for state in ("alive", "left", "plain")}
    assert broker.ledger.beat(lost.leases["alive"]).is_alive
    told = recover()
    assert (told.exit_code, told.output) == (0, NOBODY)


def test_a_deferred_message_that_is_back_in_its_queue_is_said_to_be_there(broker: Broker) -> None:
    stage, app = broker.stage, broker.stage.app
    result = stage.tasks.late.delay("k")
    info = {"resource": "k:k", "next_try": "2026-01-01T00:00:00+00:00"}
    app.backend.store_result(result.id, info, "DEFERRED")
    broker.take(result, broker.lease("celery@web1", dead=True))
    with Redlock([node.url for node in stage.nodes], node_timeout=PATIENCE) as redlock:
        settle(redlock)
        register(redlock, "celery@web1:7:aa", "k:k", 30.0)
        settle(redlock)
        why = "celery@web1 is dead: its message is back "
        assert in_json("show", result.id)["task"]["reason"].startswith(why)
        gone = "celery@web1 is gone: "
        assert f"{gone}1 of its messages with a worker lease are back " in shown_of("k:k")
        recover()
        task = in_json("show", result.id)["task"]
        why = "no worker has its message: it is in its queue, unless it was lost or purged"
        assert (task["state"], task["reason"], task["next_try"]) == ("DEFERRED", why, None)
        assert f"{gone}its messages are back in their queues\n" in shown_of("k:k")
        assert "visibility" not in shown_of("k:k")
        plain = stage.tasks.unlocked_late.apply_async(("plain",), queue="other")
        broker.take(plain, queue="other")  # whose worker nothing names
        assert f"{gone}its messages with a worker lease are back in their " in shown_of("k:k")


def shown_of(resource: str) -> str:
    return command("show", resource).output


def test_a_message_that_a_worker_keeps_is_shown_with_the_time_of_its_run(broker: Broker) -> None:
    later = broker.stage.tasks.late.apply_async(("k",), countdown=600)
    broker.take(later, broker.lease("celery@web1"))
    task = in_json("show", later.id)["task"]
    assert (task["state"], task["reason"]) == ("PENDING", "celery@web1 has its message")
    assert 500 < seconds_until(task["next_try"]) < 700
    assert re.search(r"NEXT TRY +in 9 min \d+ s ", command("show", later.id).output)


def test_recover_finds_what_a_killed_worker_has_noted_late(broker: Broker) -> None:
    """Under a worker lease that had been moved and forgotten, as the next worker's start does."""
    result = broker.stage.tasks.late.delay("k")
    broker.take(result, new_lease(), ago=60.0)
    assert "moved 1 message of a worker back to their queues\n" in recover().output
    assert ids_of(broker.queued()) == [result.id]


def test_what_was_moved_too_often_stays_until_an_operator_moves_it(broker: Broker) -> None:
    result = broker.stage.tasks.late.delay("k")
    tag = broker.take(result, broker.lease("celery@web1", dead=True), ago=60.0, moves=MAX_MOVES)
    told = recover()
    assert told.exit_code == 0
    assert "left 1 message of celery@web1: it was moved too often in a row" in told.output
    assert broker.unacked() == {tag}
    assert recover().output == NOBODY  # nobody scans for it again
    shown = json.loads(recover("--older-than", "30", "--yes", "--json").stdout)
    schema_of("recover").validate(shown)
    assert shown["without_lease"]["messages"] == 1
    (message,) = broker.queued()
    assert (message["headers"]["id"], message["properties"][MOVES]) == (result.id, 0)


def test_the_broker_that_takes_nothing_back_keeps_all_and_that_is_an_error(broker: Broker) -> None:
    tasks = broker.stage.tasks
    lease = broker.lease("celery@web1", dead=True)
    tags = {broker.take(tasks.late.delay("k"), lease)}
    tags.add(broker.take(tasks.unlocked_late.delay("k"), ago=9.0))
    broker.client.hset("celery", "of another", "type")
    told = recover("--older-than", "5", "--yes")
    assert told.exit_code == 1
    assert "the broker does not take back all messages of celery@web1: WRONGTYPE" in told.output
    assert "the broker does not take back all messages: WRONGTYPE" in told.output
    assert broker.unacked() == tags


def test_older_messages_are_moved_once_that_is_confirmed(broker: Broker, lost: Lost) -> None:
    tasks = broker.stage.tasks
    later = tasks.unlocked_late.delay("later")
    broker.take(later, ago=10.0)
    words = ("--older-than", "300")
    rows = (
        r"TASK +MESSAGES +FIRST TAKEN\n"
        r"tests.integration.app.unlocked_late +1 +10 min \d+ s ago\n"
        r"tests.late +1 +10 min \d+ s ago\n"
    )
    told = recover(*words, "--dry-run")
    assert told.exit_code == 0
    assert re.search(rows, told.output), told.output
    assert not broker.queued()
    told = recover(*words, says="n\n")
    question = (
        "Each of them may run twice if its worker lives.\nMove 2 messages back to their queues?"
    )
    assert question in told.output
    assert told.exit_code == 1
    old = {lost.results[state].id for state in ("left", "plain")}
    assert not old & {*ids_of(broker.queued())}
    told = recover(*words, says="y\n")
    assert told.exit_code == 0
    assert told.output.endswith("moved 2 messages back to their queues\n")
    queued = broker.queued()
    assert old < {*ids_of(queued)}
    tags = {one["properties"]["delivery_tag"] for one in queued}
    assert not tags & {*lost.tags.values()}
    assert len(tags) == len(queued) == 4
    assert all(one["headers"]["redelivered"] for one in queued)
    assert later.id not in ids_of(queued)
    assert lost.tags["alive"] in broker.unacked()


def test_older_messages_go_to_the_list_that_they_came_from(broker: Broker) -> None:
    tasks = broker.stage.tasks
    urgent = tasks.unlocked_late.apply_async(("k",), priority=6)
    raised = "celery\x06\x166"
    broker.take(urgent, ago=9.0, queue=raised)
    other = tasks.unlocked_late.apply_async(("k",), queue="other")
    broker.take(other, ago=9.0, queue="other")
    left = {
        "of tasks that this app does not know": 1,
        "of no queue, or of several, that this app knows": 1,
    }
    strange = broker.take(broker.stage.app.send_task("of.another.app", queue="celery"), ago=9.0)
    unknown = broker.take(tasks.unlocked_late.delay("k"), ago=9.0, to=("", "theirs"))
    shown = json.loads(recover("--older-than", "5", "--yes", "--json").stdout)
    schema_of("recover").validate(shown)
    assert shown["left"] == left
    assert (shown["dry_run"], shown["workers"]) == (False, [])
    assert ids_of(broker.queued(raised)) == [urgent.id]
    assert ids_of(broker.queued("other")) == [other.id]
    assert broker.unacked() == {strange, unknown}


def test_a_message_that_goes_to_several_queues_or_past_them_is_left(
    make_stage: MakeStage, nodes: Nodes
) -> None:
    stage = make_stage(nodes, queues="classic")
    with open_survey(stage.app) as survey:
        assert survey is not None
        broker = Broker(stage, survey)
        expected = {
            ("classic-wide", "wide.x"): "classic-wide",
            ("classic-news", "news.x"): "",  # of two queues
            ("everybody", ""): "",
            ("another", "wide.x"): "",
        }
        found = {}
        for route, name in expected.items():
            result = stage.tasks.unlocked_late.apply_async(("k",), queue="classic-other")
            found[broker.take(result, ago=9.0, queue="classic-other", to=route)] = name
        assert {one.tag: survey.list_of(one) for one in survey.older_than(5.0)} == found


def test_a_message_that_was_taken_anew_since_it_was_shown_is_left(broker: Broker) -> None:
    result = broker.stage.tasks.unlocked_late.delay("k")
    tag = broker.take(result, ago=9.0)
    found = of_recover.Older.find(broker.survey, 5.0)
    broker.client.zadd("unacked_index", {tag: broker.survey.now()})
    done = found.move(broker.survey)
    assert (done.messages, done.changed) == (0, 1)
    assert broker.unacked() == {tag}


def test_a_worker_lease_that_beats_within_the_proof_is_not_dead(broker: Broker) -> None:
    gone, late = broker.lease("celery@web1", 60.0), broker.lease("celery@web2", 60.0)

    class Beating(Stepping):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if len(self.sleeps) == 3:
                broker.ledger.beat(late)

    clock = Beating()
    assert broker.survey.proved_dead(clock, {gone, late}).keys() == {gone}
    assert clock.at == pytest.approx(PROOF, abs=BEAT_INTERVAL)


def test_a_worker_that_beats_after_the_proof_keeps_its_messages(broker: Broker) -> None:
    lease = broker.lease("celery@web1", 60.0)
    tag = broker.take(broker.stage.tasks.late.delay("k"), lease)

    class Late(Survey):
        def proved_dead(self, *of: Any) -> dict[str, str]:
            dead = super().proved_dead(*of)
            assert broker.ledger.beat(lease).is_alive
            return dead

    late = Late(broker.survey.app, broker.survey.channel, broker.ledger)
    (found,) = of_recover.recover_dead(late, moves=True, err=False)
    assert found.messages == 0
    assert broker.unacked() == {tag}
    assert broker.ledger.beat(lease).is_alive


@pytest.mark.parametrize("state", slow_but(["scheduled"], ["scheduled", "reserved", "active"]))
def test_nothing_is_moved_while_a_worker_that_answers_has_it(
    make_stage: MakeStage, nodes: Nodes, state: str
) -> None:
    """Of a plain task: one that is to run later, one that was prefetched, or one that runs."""
    stage = make_stage(nodes)
    worker = stage.worker("w1", concurrency=1)
    (to,) = stage.see_listening()
    if state == "reserved":  # behind one that is acknowledged already
        stage.tasks.rebuild.delay("r", "go")
        stage.wait_for("begin")
    task = stage.tasks.plain_until if state == "active" else stage.tasks.unlocked_late
    words = ("k", "go") if state == "active" else ("k",)
    result = task.apply_async(words, countdown=600 if state == "scheduled" else None)
    client = stage.broker.client()
    eventually(lambda: client.hlen("unacked") == 1)
    if state == "active":
        stage.wait_for("begin")
    (tag,) = client.hkeys("unacked")
    for more in ([], ["--dry-run"]):
        error = ""
        while not error:  # a busy worker may not answer in time
            told = recover("--older-than", "0", *more, says="n\n")
            assert client.hkeys("unacked") == [tag]
            error = told.output if told.exit_code == 1 and "lives" in told.output else ""
        assert f"{to} lives and has some of these messages (1 of {task.name}), so none" in error
    assert client.hkeys("unacked") == [tag]
    assert recover("--older-than", "3600").output.endswith(
        "No message without a worker lease was taken that long ago.\n"
    )
    worker.kill()
    told = recover("--older-than", "0", "--yes")
    assert told.exit_code == 0, told.output
    assert not client.exists("unacked")
    (message,) = map(json.loads, client.lrange("celery", 0, -1))
    assert message["headers"]["id"] == result.id


@pytest.mark.slow
def test_after_a_kill_of_the_whole_fleet_an_operator_brings_all_back(
    make_stage: MakeStage, nodes: Nodes
) -> None:
    stage = make_stage(nodes)
    tasks, client = stage.tasks, stage.broker.client()
    worker = stage.worker("w1", pool="threads", concurrency=2)
    (name,) = stage.see_listening()
    waiting = [tasks.late.apply_async((str(n),), countdown=600) for n in range(3)]
    plain = tasks.unlocked_late.apply_async(("p",), countdown=600)
    eventually(lambda: client.hlen("unacked") == 4)
    worker.kill()
    (row,) = eventually(lambda: in_json("waiters")["stranded"])
    assert (row["worker"], row["state"], row["messages"]) == (name, "silent", 3)
    told = recover()
    assert f"moved 3 messages of {name} back to their queues" in told.output
    assert {*ids_of([json.loads(one) for one in client.lrange("celery", 0, -1)])} >= {
        one.id for one in waiting
    }
    told = recover("--older-than", "0", "--yes")
    assert told.output.endswith("moved 1 message back to their queues\n")
    assert not client.exists("unacked")
    assert plain.id in ids_of([json.loads(one) for one in client.lrange("celery", 0, -1)])


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_worker_counts_what_it_moves(make_stage: MakeStage, nodes: Nodes, pool: str) -> None:
    stage = make_stage(nodes, redlock_metrics="127.0.0.1:0")
    client = stage.broker.client()
    first = stage.worker("w1", pool="threads", concurrency=1)
    stage.see_listening("w1")
    for number in range(3):
        stage.tasks.late.apply_async((str(number),), countdown=600)
    eventually(lambda: client.hlen("unacked") == 3)
    second = stage.worker("w2", pool=pool, concurrency=1)
    stage.see_listening("w2")
    assert scrape(second)["redlock_recovered_total", ""] == 0
    first.kill()
    eventually(lambda: scrape(second)["redlock_recovered_total", ""] == 3)
    assert scrape(second)["redlock_stranded_total", ""] == 0


MOST_LIVES = 5  # of a worker under a supervisor in a test: more than any of them needs


@pytest.mark.slow
@pytest.mark.parametrize("waits", [True, False])
def test_a_body_that_kills_its_worker_each_time_stays_until_an_operator_moves_it(
    make_stage: MakeStage, nodes: Nodes, waits: bool
) -> None:
    """Under a supervisor that starts the worker again, beside a message that never began.

    waits: its next delivery finds the lock of the run before, and is put back.
    """
    stage = make_stage(nodes, redlock_metrics="127.0.0.1:0", worker_prefetch_multiplier=8)
    client, (living, dead) = stage.broker.client(), of_leases(stage)
    lives = [stage.worker("w1", pool="threads", concurrency=1)]
    with stage.tasks.late.lock_for("k", wait=60):
        neighbour = stage.tasks.late.delay("k")
        stage.see_deferred(neighbour)
        poison = stage.tasks.kills_its_worker.apply_async(("p",), **{MOVES: MAX_MOVES - 1})
        said = re.compile(r"left 1 message of w1@\S+ unacknowledged: they were moved too often")
        while not said.search(lives[-1].output()):
            if not lives[-1].runs:
                assert len(lives) < MOST_LIVES
                if not waits:
                    stage.see_freed("k:p")
                lives.append(stage.worker("w1", pool="threads", concurrency=1))
            time.sleep(0.05)
        eventually(lambda: client.zcard(living) == 1 and not client.exists(dead))
    # the last move that is allowed, and the run after it
    assert [life.wait() for life in lives[:-1]] == [-signal.SIGKILL] * 2
    assert stage.runs_of("p") == 2
    assert neighbour.get(timeout=120) == 0
    assert stage.runs_of("k") == 1
    assert lives[-1].output().count(" unacknowledged: ") == 1
    eventually(lambda: scrape(lives[-1])["redlock_stranded_total", ""] == 1)
    (entry,) = client.hvals("unacked")
    assert ids_of([json.loads(entry)[0]]) == [poison.id]
    assert "it was moved too often in a row" in in_json("show", poison.id)["task"]["reason"]
    lives[-1].kill()
    told = recover("--older-than", "0", "--yes")
    assert told.output.endswith("moved 1 message back to their queues\n"), told.output
    assert not client.exists("unacked")
    (message,) = map(json.loads, client.lrange("celery", 0, -1))
    assert (message["headers"]["id"], message["properties"][MOVES]) == (poison.id, 0)


def of_leases(stage: Stage) -> tuple[str, str]:
    """Return the keys of the living and of the dead worker leases of a stage's broker."""
    with open_survey(stage.app) as survey:
        assert survey is not None
        return survey.ledger.leases, survey.ledger.dead


def app_code(broker: str, *more: str) -> str:
    return "\n".join([
        "from celery import Celery",
        "from celery_redlock import LockedTask",
        f"app = Celery('shop', broker={broker!r})",
        *more,
        "@app.task(base=LockedTask, lock_key='k', acks_late=True)",
        "def take(): ...",
    ])  # fmt: skip


def test_another_broker_has_no_worker_leases_and_stays_as_it_was(run_of: Any, nodes: Nodes) -> None:
    code = app_code("memory://", f"app.conf.redlock_nodes = {[node.url for node in nodes]}")
    told = run_of(code, "recover", "--yes")
    assert told.exit_code == 1
    assert "Error: this broker has no worker leases: only kombu's own transport" in told.output
    told = run_of(code, "doctor")
    line = "ok       recovery: the broker delivers again as it notices that a worker is gone\n"
    assert line in told.output
    assert json.loads(run_of(code, "doctor", "--json").stdout)["recovery"] == {
        "state": "none", "locked": None, "others": None, "missing": []
    }  # fmt: skip
    assert json.loads(run_of(code, "waiters", "--json").stdout)["stranded"] == []


@pytest.mark.slow
def test_a_broker_that_is_away_or_silent_ends_the_command_with_one_line(run_of: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        told = run_of(app_code(url), "recover")
        assert told.exit_code == 1
        assert re.fullmatch("Error: the broker does not answer: .*\n", told.output), told.output
    told = run_of(app_code(url), "recover")
    assert told.exit_code == 1
    assert re.fullmatch("Error: the broker does not answer: .*\n", told.output), told.output


@pytest.mark.usefixtures("no_worker")
def test_the_doctor_says_after_how_many_seconds_messages_are_back(
    run_of: Any, nodes: Nodes
) -> None:
    sweep, shorter = "visibility_timeout", "after 60 to 160 s (visibility_timeout)\n"
    if hasattr(Channel, "unacked_restore_interval"):  # since kombu 5.7
        sweep += ", unacked_restore_interval=10, unacked_restore_throttle=10"
        shorter = (
            "after 60 to 62 s "
            "(visibility_timeout, unacked_restore_interval=1, unacked_restore_throttle=2)\n"
        )
    after = f"after 3600 to 3700 s ({sweep})\n"
    short = (
        "app.conf.broker_transport_options = {'visibility_timeout': 60, "
        "'unacked_restore_interval': 1, 'unacked_restore_throttle': 2}"
    )
    off = "app.conf.redlock_recovery = False"
    both = "a dead worker's messages are back"
    alone = "those whose run may hold no lock"
    for more, line in (
        ([], f"ok       recovery: {both} 6.3 s after its last beat, {alone} {after}"),
        ([off], f"ok       recovery: off (redlock_recovery=False): {both} {after}"),
        ([short], f"{both} 6.3 s after its last beat, {alone} {shorter}"),
    ):
        told = run_of(app_code(nodes[0].url, *more), "doctor")
        assert line in told.output, told.output


@pytest.mark.usefixtures("no_worker")
def test_before_kombu_5_7_the_doctor_names_no_settings_of_its_sweep(
    run_of: Any, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("unacked_restore_interval", "unacked_restore_throttle"):
        monkeypatch.delattr(Channel, name, raising=False)
    told = run_of(app_code(nodes[0].url), "doctor")
    assert "no lock after 3600 to 3700 s (visibility_timeout)\n" in told.output


@pytest.fixture
def no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "REPLY_TIMEOUT", 0.05)


@pytest.mark.usefixtures("no_worker")
def test_the_doctor_names_the_rights_that_worker_leases_lack(
    run_of: Any, nodes: Nodes, standing_broker: Any
) -> None:
    client = standing_broker.client()
    rules = ["on", ">word", "~celery", "~_kombu*", "~unacked*", "&*", "+@all", "-eval", "-hscan"]
    client.execute_command("ACL", "SETUSER", "shop", *rules)
    try:
        url = standing_broker.url.replace("redis://", "redis://shop:word@")
        set_nodes = f"app.conf.redlock_nodes = {[node.url for node in nodes]}"
        told = run_of(app_code(url, set_nodes), "doctor")
    finally:
        client.execute_command("ACL", "DELUSER", "shop")
    assert "ok       recovery: refused by the broker: a dead worker's messages" in told.output
    assert "warning  broker: rights=+eval ~{redlock}:* +hscan: without them" in told.output


def test_recovered_and_stranded_messages_are_counted() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    try:
        messages_recovered.send(None, event=MessagesRecoveredEvent("celery@web1", 7, 2))
        messages_recovered.send(None, event=MessagesRecoveredEvent("celery@web1", 1))
    finally:
        metrics.close()
    assert registry.get_sample_value("redlock_recovered_total") == 8
    assert registry.get_sample_value("redlock_stranded_total") == 2
