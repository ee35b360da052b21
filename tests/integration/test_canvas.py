"""Chains, groups and chords of locked tasks end, with the right results, by any `on_conflict`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import chain, chord, group, xmap
from celery.canvas import StampingVisitor
from celery.exceptions import ChordError, TaskRevokedError

from celery_redlock import Backoff, LockTaken, RedlockError
from tests.conftest import eventually
from tests.integration.conftest import STANDING, Stage

WORKER = STANDING
WAITING = ("step", "asks")  # on_conflict="defer", and a callable that says so
NOT_RUN = {"skip": TaskRevokedError, "fail": LockTaken}


def ran(stage: Stage, key: str) -> int:
    return len([line for line in stage.lines("step") if line.key == key])


def noted(stage: Stage, what: str) -> int:
    return len([line for line in stage.lines("noted") if line.key == what])


@pytest.mark.parametrize("name", WAITING)
def test_a_chain_goes_on_once_with_the_real_result_of_a_contended_step(
    stage: Stage, key: str, name: str
) -> None:
    contended = getattr(stage.tasks, name).si(key)
    with stage.tasks.step.lock_for(key, wait=60):
        result = chain(stage.tasks.step.si(f"{key}-a"), contended, stage.tasks.join.s())()
        stage.see_deferred(result.parent)
    assert result.get(timeout=120) == f"<{key}>"
    assert ran(stage, key) == 1


@pytest.mark.parametrize("on_conflict", NOT_RUN)
def test_a_chain_ends_where_a_step_does_not_run(stage: Stage, key: str, on_conflict: str) -> None:
    contended = stage.tasks.step.si(key).set(lock={"on_conflict": on_conflict})
    with stage.tasks.step.lock_for(key, wait=60):
        result = chain(contended, stage.tasks.join.s(), stage.tasks.join.s())()
        with pytest.raises(NOT_RUN[on_conflict]):
            result.get(timeout=120)
    state = "FAILURE" if on_conflict == "fail" else "REVOKED"
    for step in (result, result.parent, result.parent.parent):  # each by itself, not by its parent
        eventually(lambda step=step: stage.info(step)["status"] == state)
    assert f"<{key}>" not in [line.key for line in stage.lines("joined")]


PLACES: dict[str, Callable[[Any, Any], Any]] = {
    "a chain's second step": lambda first, last: chain(first, last),
    "a chain's third step": lambda first, last: chain(first, first, last),
    "a chain in a chain": lambda first, last: chain(first, chain(first, last)),
    "a group behind a step": lambda first, last: chain(first, group(last, first)),
    "a chord's body": lambda first, last: chord([first, first], last),
    "the second step in a chord's header": lambda first, last: chord([chain(first, last)], first),
    "a link": lambda first, last: first.set(link=[last]),
    "a link's link": lambda first, last: first.set(link=[first.clone().set(link=[last])]),
}


@pytest.mark.parametrize("begins", ["step", "note"])
@pytest.mark.parametrize("place", PLACES)
def test_options_of_a_call_stand_at_every_place_of_a_canvas(
    stage: Stage, key: str, place: str, begins: str
) -> None:
    first = getattr(stage.tasks, begins).si(f"{key}-a")
    with stage.tasks.step.lock_for(key, wait=60):
        sent = PLACES[place](first, with_a_lock_of_its_own(stage, key)).apply_async()
        eventually(lambda: ran(stage, key))
    sent.get(timeout=60)


def test_options_of_a_call_stand_in_an_errback(stage: Stage, key: str) -> None:
    last = with_a_lock_of_its_own(stage, key)
    with stage.tasks.step.lock_for(key, wait=60):
        sent = stage.tasks.early_end.si(f"{key}-a", "raise").on_error(last).apply_async()
        eventually(lambda: ran(stage, key))
    sent.get(timeout=60, propagate=False)


def with_a_lock_of_its_own(stage: Stage, key: str) -> Any:
    """Return a step whose call names another lock than its task does."""
    return stage.tasks.step.si(key).set(lock={"backoff": Backoff(), "key": "own:{key}"})


def test_options_of_a_call_stand_in_a_signature_that_is_an_argument(stage: Stage, key: str) -> None:
    step = with_a_lock_of_its_own(stage, key)
    with stage.tasks.step.lock_for(key, wait=60):
        sent = [stage.tasks.sends.delay(steps) for steps in ([step, step.clone()], step)]
        eventually(lambda: ran(stage, key) == 3)
    for each in sent:
        each.get(timeout=60)


@pytest.mark.parametrize("name", WAITING)
def test_a_group_of_equal_members_runs_each_of_them(stage: Stage, key: str, name: str) -> None:
    with stage.tasks.step.lock_for(key, wait=60):
        result = group(getattr(stage.tasks, name).si(key) for _ in range(3))()
        for member in result:
            stage.see_deferred(member)
    assert result.get(timeout=120) == [key] * 3
    assert ran(stage, key) == 3


@pytest.mark.parametrize("on_conflict", NOT_RUN)
def test_a_group_ends_with_members_that_do_not_run(
    stage: Stage, key: str, on_conflict: str
) -> None:
    contended = stage.tasks.step.si(key).set(lock={"on_conflict": on_conflict})
    with stage.tasks.step.lock_for(key, wait=60):
        result = group(contended, stage.tasks.step.si(f"{key}-a"))()
        with pytest.raises(NOT_RUN[on_conflict]):
            result.get(timeout=120)
    assert result[1].get(timeout=120) == f"{key}-a"


@pytest.mark.parametrize("name", WAITING)
def test_a_chord_of_equal_headers_runs_its_body_once_with_all_results(
    stage: Stage, key: str, name: str
) -> None:
    task = getattr(stage.tasks, name)
    with stage.tasks.step.lock_for(key, wait=60):
        header = [task.si(key), task.si(key), chain(task.si(key), stage.tasks.join.s())]
        result = chord(header)(stage.tasks.join.s())
        stage.see_deferred(result.parent[0])
    assert result.get(timeout=120) == f"{key}+{key}+<{key}>"
    assert ran(stage, key) == 3
    assert [line.key for line in stage.lines("joined")].count(str([key, key, f"<{key}>"])) == 1


@pytest.mark.parametrize("on_conflict", NOT_RUN)
@pytest.mark.parametrize("place", ["a header", "the first of a header's chain"])
def test_a_chord_ends_as_an_error_where_a_header_does_not_run(
    stage: Stage, key: str, on_conflict: str, place: str
) -> None:
    contended = stage.tasks.step.si(key).set(lock={"on_conflict": on_conflict})
    if place != "a header":
        contended = chain(contended, stage.tasks.join.s())
    body = stage.tasks.join.s().on_error(stage.tasks.note.si(f"{key} failed"))
    with stage.tasks.step.lock_for(key, wait=60):
        result = chord([stage.tasks.step.si(f"{key}-a"), contended])(body)
        with pytest.raises(ChordError):
            result.get(timeout=120, follow_parents=False)  # the body's own end
    eventually(lambda: noted(stage, f"{key} failed") == 1)
    assert ran(stage, key) == 0


@pytest.mark.parametrize("name", WAITING)
def test_callbacks_are_called_once_by_the_run_and_not_by_a_deferral(
    stage: Stage, key: str, name: str
) -> None:
    call = getattr(stage.tasks, name).si(key)
    call.link(stage.tasks.note.s(f"{key} done"))
    call.link_error(stage.tasks.note.s(f"{key} failed"))
    with stage.tasks.step.lock_for(key, wait=60):
        result = call.apply_async()
        stage.see_deferred(result)
        assert noted(stage, f"{key} done") == 0
    eventually(lambda: noted(stage, f"{key} done"))
    assert result.get(timeout=120) == key
    assert (noted(stage, f"{key} done"), noted(stage, f"{key} failed")) == (1, 0)


def test_a_failed_run_calls_its_errback_and_a_skipped_one_nobody(stage: Stage, key: str) -> None:
    with stage.tasks.step.lock_for(key, wait=60):
        for on_conflict in ("skip", "fail"):  # in this order: what skip calls would come first
            call = stage.tasks.step.si(key).set(lock={"on_conflict": on_conflict})
            call.link(stage.tasks.note.si(f"{key} done"))
            call.link_error(stage.tasks.note.si(f"{key} {on_conflict}"))
            with pytest.raises(NOT_RUN[on_conflict]):
                call.apply_async().get(timeout=120)
    eventually(lambda: noted(stage, f"{key} fail"))
    assert (noted(stage, f"{key} skip"), noted(stage, f"{key} done")) == (0, 0)


class Stamps(StampingVisitor):
    """Stamp every signature of a canvas."""

    def on_signature(self, sig: Any, **_: Any) -> dict[str, Any]:
        return {"tenant": "t1", "stamped_headers": ["tenant"]}


def test_stamps_of_a_canvas_come_through_deferrals(stage: Stage, key: str) -> None:
    canvas = chain(stage.tasks.step.si(key), stage.tasks.step.si(key))
    canvas.stamp(Stamps())
    with stage.tasks.step.lock_for(key, wait=60):
        result = canvas()
        stage.see_deferred(result.parent)
    assert result.get(timeout=120) == key
    stamps = [line.more["stamps"] for line in stage.lines("step") if line.key == key]
    assert stamps == [{"tenant": "t1"}] * 2 or stamps == [{"tenant": ["t1"]}] * 2


@pytest.mark.parametrize("many", [0, 2], ids=["a step", "a chord"])
@pytest.mark.parametrize("same", [False, True], ids=["another key", "the same key"])
def test_a_step_that_replaces_itself_inside_a_chord_keeps_its_place(
    stage: Stage, key: str, many: int, same: bool
) -> None:
    other = key if same else f"{key}-other"
    first = stage.app.AsyncResult(f"{key}-first")
    call = stage.tasks.becomes.si(key, other, many).set(task_id=first.id)
    header = [call, stage.tasks.step.si(key)]
    with stage.tasks.step.lock_for(key, wait=60):
        result = chain(chord(header, stage.tasks.join.s()), stage.tasks.join.s())()
        stage.see_deferred(first)
    became = "+".join([other] * many) if many else other
    assert result.get(timeout=120) == f"<{became}+{key}>"
    # itself, what it sent beside, and what it became
    eventually(lambda: ran(stage, key) == 2 + same * (many or 1))
    assert len([line for line in stage.lines("became") if line.key == key]) == 1
    stage.see_freed(f"k:{key}", f"k:{other}")


def test_a_map_is_refused_by_the_worker_and_takes_no_lock(stage: Stage, key: str) -> None:
    call = xmap(stage.tasks.step.s(), [key], app=stage.app)
    with pytest.raises(RedlockError, match="group"):
        call.apply_async().get(timeout=120)
    assert ran(stage, key) == 0
    assert stage.is_free(f"k:{key}")
