"""What a message finds that is delivered a second time: whether its first run is at its end."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import celery
import pytest
from celery.exceptions import TaskRevokedError

from celery_redlock.label import RunId
from celery_redlock.lock.model.keys import waiting_key
from celery_redlock.tasks.delivery.delivery import SEEN, utc_now
from celery_redlock.tasks.delivery.header import HEADER, Deferral, LockHeader
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.tasks.unique.claim import ClaimToken
from celery_redlock.testing import WorkerProcess
from tests import fork_server
from tests.conftest import PATIENCE, Nodes, eventually
from tests.integration.conftest import ROOT, Line, MakeStage, Stage
from tests.integration.deliveries import QUEUE, deliver, heard, run_here, see_drained
from tests.integration.test_loss import take_away

DROPPED = "another delivery of its message has finished"
WAITS = "waits: another delivery of its message holds its lock"
MAY_RUN = "cannot check whether another delivery"
REVOKE_LEAVES_STATES = pytest.mark.skipif(
    celery.VERSION < (5, 7), reason="there revoke itself writes REVOKED at once"
)
HELD_BACK = "back"  # a queue that no worker has
LIMIT = 8  # s: a hard limit by which a body has begun, also where a stall of 5 s came before
SOON = 2  # s: one that may also pass before the body begins


# time for a stall: a run that hears no quorum in time is put back
CONF = {"task_track_started": True, "redlock_node_timeout": PATIENCE}
WORKER = {"concurrency": 3, "queues": ["celery"], "options": ["-E"]}


def hold_back(stage: Stage, name: str, *args: Any, **options: Any) -> tuple[Any, str]:
    """Make a message; returns its result, and itself, which nobody has yet."""
    result = getattr(stage.tasks, name).apply_async(args, queue=HELD_BACK, **options)
    payload = json.loads(str(stage.broker.client().rpop(HELD_BACK)))
    payload["properties"]["delivery_info"]["routing_key"] = QUEUE
    return result, json.dumps(payload)


def send(stage: Stage, name: str, *args: Any, **options: Any) -> tuple[Any, str]:
    """Send a message; returns its result, and itself for a second delivery."""
    result, message = hold_back(stage, name, *args, **options)
    deliver(stage, message, flagged=False)
    return result, message


def begin(stage: Stage, key: str, **options: Any) -> tuple[Any, str]:
    """Send a message whose body goes on until `see_first_end`; returns it once that has begun."""
    result, message = send(stage, "until", key, f"{key} end", **options)
    eventually(lambda: begun(stage, key))
    return result, message


def limited(message: str, seconds: float) -> str:
    """Return a message with a soft time limit, as a worker's own one would give it."""
    payload = json.loads(message)
    payload["headers"]["timelimit"] = [None, seconds]
    return json.dumps(payload)


def expired(message: str) -> str:
    """Return a message whose time is over, whenever its first delivery has begun."""
    payload = json.loads(message)
    payload["headers"]["expires"] = (utc_now() - timedelta(seconds=1)).isoformat()
    return json.dumps(payload)


def begun(stage: Stage, key: str) -> list[Line]:
    return [line for line in stage.lines("begin", "stays", "stays again") if line.key == key]


def says(worker: WorkerProcess, what: str, result: Any) -> int:
    lines = worker.output().splitlines()
    return sum(what in line and result.id in line for line in lines)


@pytest.mark.parametrize(
    ("name", "how", "bodies"),
    [
        ("careless_late", "return", 1), ("careless_late", "raise", 1),
        ("careless_late", "retry", 2), ("late_end", "receiver exits", 1),
    ],
)  # fmt: skip
def test_a_run_is_done_though_what_comes_after_its_end_fails(
    stage: Stage, worker: WorkerProcess, key: str, name: str, how: str, bodies: int
) -> None:
    result, message = send(stage, name, key, how)
    eventually(lambda: len(begun(stage, key)) == bodies)
    see_drained(stage)
    stage.see_freed(f"k:{key}")
    deliver(stage, message)
    eventually(lambda: says(worker, DROPPED, result))
    see_drained(stage)
    assert len(begun(stage, key)) == bodies


def marks(stage: Stage, result: Any) -> int:
    pattern = f"*:done:{result.id}:*"
    return sum(bool(node.client().keys(pattern)) for node in stage.nodes)


def test_a_message_that_its_body_hands_back_is_not_done(
    stage: Stage, worker: WorkerProcess, key: str
) -> None:
    result, _ = send(stage, "late_end", key, "requeue")
    eventually(lambda: len(begun(stage, key)) == 2)
    see_drained(stage)
    assert not says(worker, DROPPED, result)


def test_where_the_message_acknowledges_early_no_mark_is_made(stage: Stage, key: str) -> None:
    result, message = send(stage, "work", key)
    eventually(lambda: ended(stage, key) == 1)
    deliver(stage, message)
    eventually(lambda: ended(stage, key) == 2)
    assert not marks(stage, result)


def ended(stage: Stage, key: str) -> int:
    return sum(line.key == key for line in stage.lines("end"))


def test_a_task_id_may_be_used_again(stage: Stage, worker: WorkerProcess, key: str) -> None:
    task = stage.tasks.late
    for count in (1, 2):
        task.apply_async((key,), task_id=key)
        eventually(lambda count=count: ended(stage, key) == count)
        see_drained(stage)
    marked = time.monotonic()  # at the latest: a line of the body says nothing of that
    # the calendars of two workers may differ by a second
    eventually(lambda: time.monotonic() - marked > 2.0)
    with task.lock_for(key, wait=60):
        task.apply_async((key,), task_id=key)
        eventually(lambda: f"Task tests.late[{key}] deferred" in worker.output())
    eventually(lambda: ended(stage, key) == 3)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hears TERM", "deaf"])
def test_a_run_that_its_hard_limit_ended_is_done(
    stage: Stage, worker: WorkerProcess, key: str, how: str
) -> None:
    result, message = send(stage, "stays_late", key, how, time_limit=LIMIT)
    eventually(lambda: begun(stage, key))
    deliver(stage, message)  # it waits, or where this machine was slow finds the run over
    eventually(lambda: says(worker, DROPPED, result))
    see_drained(stage)
    assert [line.what for line in begun(stage, key)] == ["stays"]
    assert stage.info(result)["status"] == "FAILURE"


def test_a_task_with_a_request_class_of_its_own_has_ours_as_well(
    stage: Stage, worker: WorkerProcess, key: str
) -> None:
    result, _ = send(stage, "stays_with_own_request", key)
    eventually(lambda: begun(stage, key))
    result.revoke(terminate=True, signal="KILL")
    stage.see_freed(f"k:{key}")
    eventually(lambda: marks(stage, result) == len(stage.nodes))
    assert f"their own request ends {result.id}" in worker.output()


@pytest.mark.parametrize("name", ["TERM", "KILL"])
def test_a_run_that_was_revoked_with_a_signal_is_done(stage: Stage, key: str, name: str) -> None:
    result, _ = send(stage, "stays_late", key)
    eventually(lambda: begun(stage, key))
    result.revoke(terminate=True, signal=name)
    stage.see_freed(f"k:{key}")
    eventually(lambda: marks(stage, result) == len(stage.nodes))


def test_a_run_whose_hard_limit_hands_its_message_back_runs_again(stage: Stage, key: str) -> None:
    result, _ = send(stage, "stays_not_acked", key, time_limit=SOON)
    eventually(lambda: len(begun(stage, key)) >= 2)
    eventually(lambda: stage.info(result)["status"] == "SUCCESS")  # FAILURE was stored first


def run_with_a_second_delivery(stage: Stage, worker: WorkerProcess, key: str) -> tuple[Any, Line]:
    """Return a run that stays and the line with which it began, once a second delivery waits."""
    result, message = send(stage, "stays_late", key)
    [line] = eventually(lambda: begun(stage, key))
    deliver(stage, message)
    eventually(lambda: says(worker, WAITS, result))
    return result, line


def test_a_run_whose_child_was_killed_runs_again_though_one_before_it_was_ended(
    stage: Stage, worker: WorkerProcess, key: str
) -> None:
    result, line = run_with_a_second_delivery(stage, worker, key)
    os.kill(line.pid, signal.SIGKILL)
    assert result.get(timeout=120) == "again"
    see_drained(stage)


def see_expired(message: str) -> None:
    expires = datetime.fromisoformat(json.loads(message)["headers"]["expires"])
    eventually(lambda: datetime.now(UTC) > expires)


def see_first_end(stage: Stage, worker: WorkerProcess, key: str, result: Any) -> None:
    """Let the first delivery come to its end, and see the second one dropped, without a body."""
    stage.log.with_name(f"{key} end").touch()
    eventually(lambda: says(worker, DROPPED, result))
    assert result.get(timeout=120)
    assert len(begun(stage, key)) == 1


def see_over_unrun(stage: Stage, key: str) -> None:
    """See that nothing is left of a message, neither queued nor locked, and that no body began."""
    see_drained(stage)
    stage.see_freed(f"k:{key}")
    assert not begun(stage, key)


def see_it_end_nothing(
    stage: Stage, worker: WorkerProcess, key: str, result: Any, message: str
) -> None:
    """Deliver a message again whose first one runs, and see nothing of it but that one's end."""
    with heard(stage) as events:
        deliver(stage, message)
        eventually(lambda: says(worker, WAITS, result))
        assert stage.info(result)["status"] == "STARTED"
        see_first_end(stage, worker, key, result)
    assert "task-revoked" not in {event["type"] for event in events}


@pytest.mark.slow
def test_a_second_delivery_that_expires_ends_nothing_while_the_first_one_runs(
    stage: Stage, worker: WorkerProcess, key: str
) -> None:
    for seconds in (3, 12, 48):  # on a slow machine one expires before its body begins
        result, message = send(stage, "until", key, f"{key} end", expires=seconds)
        eventually(lambda result=result: begun(stage, key) or is_revoked(stage, result))
        if begun(stage, key):
            break
    see_expired(message)
    see_it_end_nothing(stage, worker, key, result, message)


@pytest.mark.parametrize("options", [{}, {"key": False}], ids=["locked", "without a lock"])
def test_a_second_delivery_that_expired_before_anybody_ran_it_is_revoked(
    stage: Stage, key: str, options: Any
) -> None:
    result = stage.tasks.late.apply_async((key,), queue=HELD_BACK, expires=0.1, lock=options)
    message = str(stage.broker.client().rpop(HELD_BACK))
    see_expired(message)
    deliver(stage, message)
    with pytest.raises(TaskRevokedError, match="expired"):
        result.get(timeout=120)
    see_over_unrun(stage, key)


def test_a_second_delivery_does_not_wait_in_its_slot_for_the_first_one(
    stage: Stage, worker: WorkerProcess, key: str
) -> None:
    """Where a time limit would end it as FAILURE, over the first one's state."""
    result, message = begin(stage, key, lock={"wait": 60})
    deliver(stage, limited(message, 10))
    eventually(lambda: says(worker, WAITS, result) > 1)
    assert stage.info(result)["status"] == "STARTED"
    see_first_end(stage, worker, key, result)


def test_a_second_delivery_that_a_soft_limit_cuts_as_it_waits_in_its_slot_tells_nothing(
    stage: Stage, worker: WorkerProcess, key: str
) -> None:
    where, waiting = stage.see_listening(worker.name), waiting_key("redlock", f"k:{key}")
    with stage.tasks.late.lock_for(key, wait=60):
        result, message = hold_back(stage, "late", key, lock={"wait": 600})
        deliver(stage, limited(message, 600))
        for count in (1, 2):
            for node in stage.nodes:
                eventually(lambda node=node: node.client().zcard(waiting))
            cut_softly(stage, where, result)
            eventually(lambda count=count: says(worker, "whether another", result) >= count)
        assert stage.info(result)["status"] == "PENDING"
    assert result.get(timeout=120) == 0
    assert len(begun(stage, key)) == 1


def cut_softly(stage: Stage, where: list[str], result: Any) -> None:
    """Signal the child that runs a message, as its pool does at the end of its soft limit."""

    def child() -> int | None:
        told = stage.app.control.inspect(where, timeout=60, limit=1).active() or {}
        active = [one for each in told.values() for one in each if one["id"] == result.id]
        return active[0]["worker_pid"] if active else None

    os.kill(eventually(child) or 0, signal.SIGUSR1)


def revoke(worker: WorkerProcess, result: Any) -> None:
    """Revoke a task; returns when the worker knows."""
    result.revoke()
    eventually(lambda: says(worker, "flagged as revoked", result))


@REVOKE_LEAVES_STATES
def test_a_second_delivery_that_is_revoked_ends_nothing_while_the_first_one_runs(
    stage: Stage, worker: WorkerProcess, key: str
) -> None:
    result, message = begin(stage, key)
    revoke(worker, result)
    see_it_end_nothing(stage, worker, key, result, message)


@REVOKE_LEAVES_STATES
def test_a_copy_that_is_revoked_ends_nothing_while_the_message_that_it_was_made_of_runs(
    stage: Stage, worker: WorkerProcess, key: str
) -> None:
    """As of a worker that dies between putting it back and acknowledging: no flag tells of it."""
    result, message = begin(stage, key)
    deliver(stage, put_back(result, message), flagged=False)
    revoke(worker, result)
    eventually(lambda: says(worker, WAITS, result) or stage.info(result)["status"] == "REVOKED")
    assert stage.info(result)["status"] == "STARTED"
    see_first_end(stage, worker, key, result)


@REVOKE_LEAVES_STATES
def test_a_revoked_copy_ends_nothing_while_no_node_says_whether_the_message_runs(
    make_stage: MakeStage, mortal_nodes: Nodes
) -> None:
    stage = make_stage(mortal_nodes, task_track_started=True)
    worker = stage.worker(**WORKER)
    result, message = begin(stage, "k")
    deliver(stage, put_back(result, message), flagged=False)
    revoke(worker, result)
    for node in mortal_nodes:
        node.pause()
    eventually(lambda: says(worker, MAY_RUN, result) or stage.info(result)["status"] == "REVOKED")
    for node in mortal_nodes:
        node.resume()
    assert stage.info(result)["status"] == "STARTED"
    see_first_end(stage, worker, "k", result)


def put_back(result: Any, message: str) -> str:
    """Return a message as a worker published it that had deferred it, and then died."""
    copy = json.loads(message)
    ago = utc_now().timestamp() - 1.0
    header = LockHeader(id=result.id, deferral=Deferral(1, ago, ago, 2.0))
    later = utc_now() + timedelta(seconds=2)
    copy["headers"] |= {"redlock": header.to_message(), "eta": later.isoformat()}
    return json.dumps(copy)


@pytest.mark.parametrize(("first", "second"), [(1, 3), (3, 1), (3, 5)])
def test_a_second_delivery_waits_where_its_worker_has_another_limit(
    stage: Stage, worker: WorkerProcess, key: str, first: int, second: int
) -> None:
    """As of a newer deployment: what each of them locks is not the same."""
    result, message = begin(stage, key, lock={"limit": first})
    copy = json.loads(message)
    copy["headers"][HEADER]["options"] = {"limit": second}
    deliver(stage, json.dumps(copy))
    eventually(lambda: says(worker, WAITS, result) or len(begun(stage, key)) > 1)
    assert len(begun(stage, key)) == 1
    see_first_end(stage, worker, key, result)


def test_a_second_delivery_is_not_deferred_over_the_end_that_another_one_came_to_meanwhile(
    stage: Stage, worker: WorkerProcess, key: str
) -> None:
    """A callable of the user's decides about it for as long as it likes."""
    task = stage.tasks.decided_late
    with task.lock_for(key, "", wait=60):
        result, message = hold_back(stage, "decided_late", key, "at last defer")
        deliver(stage, message)
        eventually(lambda: [line for line in stage.lines("asked") if line.key == key])
    deliver(stage, message)
    with pytest.raises(ValueError, match="body"):
        result.get(timeout=120)
    stage.log.with_name(f"{key} decides").touch()
    eventually(lambda: says(worker, DROPPED, result))
    assert stage.info(result)["status"] == "FAILURE"
    assert len(begun(stage, key)) == 1


def stored(stage: Stage, result: Any) -> str:
    """Return all that the result backend has of a task, as text: errors are never equal."""
    return repr(stage.info(result))


@pytest.mark.parametrize("word", ["", "defer", "skip", "fail", "revoke", "expire"])
def test_a_second_delivery_stores_nothing_over_an_end_whose_hooks_still_run(
    stage: Stage, worker: WorkerProcess, key: str, word: str
) -> None:
    """The first one's state is stored, its lock is lost, and no mark says yet that it is done."""
    over = word in ("revoke", "expire")
    of_call = {"on_conflict": "defer" if over else word} if word else {}  # else a callable decides
    result, message = send(stage, "slow_to_end", key, "defer", lock=of_call)
    eventually(lambda: [line for line in stage.lines("hook") if line.key == key])
    try:
        assert stage.info(result)["status"] == "FAILURE"
        take_away(stage, key)
        if word == "revoke":
            revoke(worker, result)
        end, said = stored(stage, result), DROPPED if over else "has already ended"
        deliver(stage, expired(message) if word == "expire" else message)
        eventually(lambda: says(worker, said, result) or stored(stage, result) != end)
        assert stored(stage, result) == end
    finally:
        stage.log.with_name(f"{key} hook ends").touch()
    see_drained(stage)
    assert stored(stage, result) == end
    assert len(begun(stage, key)) == 1


def test_a_second_delivery_that_is_revoked_is_not_run_where_the_first_one_died(
    stage: Stage, worker: WorkerProcess, key: str
) -> None:
    result, line = run_with_a_second_delivery(stage, worker, key)
    revoke(worker, result)
    os.kill(line.pid, signal.SIGKILL)
    with pytest.raises(TaskRevokedError, match="revoked"):
        result.get(timeout=120)
    see_drained(stage)
    assert [line.what for line in begun(stage, key)] == ["stays"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["work", "late"])
def test_a_message_that_expires_in_its_slot_is_revoked_there(
    stage: Stage, key: str, name: str
) -> None:
    worker = stage.worker(key, queues=[key], concurrency=1)
    task = getattr(stage.tasks, name)
    with task.lock_for(key, wait=60):
        for seconds in (2, 8, 32):  # on a slow machine one expires before it is in its slot
            slot = {"wait": 2 * seconds}  # at whose end it is seen
            result = task.apply_async((key,), queue=key, expires=seconds, lock=slot)
            eventually(lambda result=result: stage.info(result)["status"] == "REVOKED")
            if f"{result.id}] is not run: expired" in worker.output():
                break
        eventually(lambda: f"{result.id}] is not run: expired" in worker.output())
    assert f"{result.id}] deferred" not in worker.output()
    see_over_unrun(stage, key)  # before its worker ends, which is not to keep the message


@pytest.mark.parametrize("name", ["work", "late"])
def test_a_message_that_expires_while_it_waits_is_revoked(
    stage: Stage, key: str, name: str
) -> None:
    with stage.tasks.late.lock_for(key, wait=60):
        for expires in (1, 4, 16, 64):  # s: on a slow machine one is over before it is deferred
            result, _ = send(stage, name, key, expires=expires)
            state = eventually(lambda result=result: known_state(stage, result))
            if state == "DEFERRED":
                break
        assert state == "DEFERRED"
        eventually(lambda: stage.info(result)["status"] == "REVOKED")
    see_over_unrun(stage, key)


def is_revoked(stage: Stage, result: Any) -> bool:
    return bool(stage.info(result)["status"] == "REVOKED")


def known_state(stage: Stage, result: Any) -> str:
    """Return the state of a message once a worker has stored one."""
    state = str(stage.info(result)["status"])
    return "" if state == "PENDING" else state


def test_an_unflagged_delivery_of_what_runs_is_dropped_like_a_flagged_one(
    stage: Stage, worker: WorkerProcess, key: str
) -> None:
    """The broker flags the copy that it makes of a message which waits in a busy worker."""
    result, _ = begin(stage, key, task_id=key)
    send(stage, "until", key, f"{key} end", task_id=key)
    eventually(lambda: says(worker, WAITS, result))
    assert stage.info(result)["status"] == "STARTED"
    see_first_end(stage, worker, key, result)
    see_drained(stage)
    assert len(begun(stage, key)) == 1
    assert stage.info(result)["status"] == "SUCCESS"


def ran(stage: Stage, key: str) -> list[str]:
    return [line.more["value"] for line in stage.lines("once") if line.key == key]


def test_a_second_delivery_of_a_run_that_a_later_send_replaces_ends_nothing(
    stage: Stage, worker: WorkerProcess, key: str
) -> None:
    first, message = send(stage, "latest_late", key, "wait", "first", lock={"debounce": 0.5})
    eventually(lambda: ran(stage, key))
    # as by a sender that replaced it just before it was due
    replaces = str(RunId(first.id, "tests.latest_late"))
    late = ClaimToken("n", "0" * 32, "expired", replaces=replaces)
    late.mark_superseded(redlock_of(stage.app).session, "tests.latest_late")
    eventually(lambda: marks(stage, first) == len(stage.nodes))
    deliver(stage, message)
    eventually(lambda: says(worker, WAITS, first) or stage.info(first)["status"] != "STARTED")
    assert stage.info(first)["status"] == "STARTED"
    stage.log.with_name(key).touch()
    assert first.get(timeout=120) == "first"
    see_drained(stage)
    assert ran(stage, key) == ["first"]


def hold_back_until_due(stage: Stage, key: str) -> tuple[Any, str]:
    """Debounce a message for longer than the next send takes; returns it as one that is due."""
    lock = {"debounce": 60}
    first, message = hold_back(stage, "latest_late", key, "", "first", lock=lock)
    payload = json.loads(message)
    payload["headers"][HEADER]["deferral"]["countdown"] = 0.0
    return first, json.dumps(payload)


@pytest.mark.parametrize("again", [False, True], ids=["first", "second"])
def test_a_delivery_of_a_copy_does_not_run_if_a_later_send_replaces_it(
    stage: Stage, key: str, again: bool
) -> None:
    task = stage.tasks.latest_late
    first, message = hold_back_until_due(stage, key)
    task.apply_async((key, "", "second"), lock={"debounce": 0.5}).get(timeout=120)
    stage.see_freed(f"u:{key}")  # late: its state is stored before
    eventually(lambda: marks(stage, first) == len(stage.nodes))
    headers = json.loads(message)["headers"]
    delivery = {"exchange": "news", "routing_key": "news.b", "redelivered": again}
    run_here(
        task, key, "", "first", id=first.id, delivery_info=delivery,
        properties={SEEN: {"queue": QUEUE}}, **{HEADER: headers[HEADER]},
    )  # fmt: skip
    assert stage.info(first)["status"] == "REVOKED"
    assert ran(stage, key) == ["second"]


@pytest.mark.parametrize("stored", ["", "SUCCESS"], ids=["no state", "an end"])
def test_a_second_delivery_that_a_later_send_replaces_does_not_run(
    stage: Stage, key: str, stored: str
) -> None:
    """Its lock shows that the first delivery died, perhaps after it had stored its end."""
    task = stage.tasks.latest_late
    first, message = hold_back_until_due(stage, key)
    task.apply_async((key, "", "second"), lock={"debounce": 0.5}).get(timeout=120)
    if stored:
        task.backend.store_result(first.id, "first", stored)
    deliver(stage, message)
    see_drained(stage)
    assert stage.info(first)["status"] == (stored or "REVOKED")
    assert ran(stage, key) == ["second"]


REPLACES_AND_DIES = """
import os, sys
from celery.signals import after_task_publish
from tests.integration.app import latest_late
after_task_publish.connect(lambda **_: os._exit(9), weak=False)
latest_late.delay(sys.argv[1], "", "second")
"""


@pytest.mark.slow
def test_what_a_sender_replaces_that_dies_once_its_message_is_out_does_not_run(
    stage: Stage, key: str
) -> None:
    first, message = hold_back_until_due(stage, key)
    command = [sys.executable, "-c", REPLACES_AND_DIES, key]
    died = fork_server.run(command, env={**os.environ, **stage.env}, cwd=ROOT)
    assert died.returncode == 9
    eventually(lambda: ran(stage, key))
    deliver(stage, message, flagged=False)
    with pytest.raises(TaskRevokedError, match="a later call replaced it"):
        first.get(timeout=120)
    see_drained(stage)
    assert ran(stage, key) == ["second"]
