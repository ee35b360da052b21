"""`limit` bodies of one key at once, on however many workers, and never one more."""

from __future__ import annotations

from typing import Any

import pytest

from celery_redlock import SettingsError
from tests.conftest import eventually
from tests.integration.conftest import Stage, Standing, overlaps

LIMIT = 3  # of `permitted`
HIGHER = 5
PLAIN = {"limit": 1}
pytestmark = pytest.mark.xdist_group("two workers")


def most_at_once(spans: list[tuple[float, float]]) -> int:
    moments = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    most = now = 0
    for _, step in moments:
        now += step
        most = max(most, now)
    return most


@pytest.fixture
def stage(of_two: Standing) -> Stage:
    """Give a stage with two workers; each has a slot left if all that may run are in it."""
    return of_two.stage


def go(stage: Stage, name: str) -> None:
    stage.log.with_name(name).touch()


def begun(stage: Stage, key: str) -> int:
    return sum(line.key == key for line in stage.lines("begin"))


def test_three_permits_let_three_bodies_run_at_once_and_put_the_others_back(
    stage: Stage, key: str
) -> None:
    results = [stage.tasks.permitted.delay(key, until=f"{key}-go") for _ in range(8)]
    eventually(lambda: begun(stage, key) == LIMIT)
    eventually(lambda: sum(stage.deferrals(result) >= 1 for result in results) == 8 - LIMIT)
    assert begun(stage, key) == LIMIT
    go(stage, f"{key}-go")
    for result in results:
        result.get(timeout=120)
    assert most_at_once(stage.intervals()[key]) == LIMIT
    stage.see_freed(f"p:{key}", f"p:{key}#1", f"p:{key}#2")


def test_the_plain_lock_is_one_of_the_permits(stage: Stage, key: str) -> None:
    plain = stage.tasks.permitted.apply_async((key, "plain", f"{key}-go"), lock=PLAIN)
    eventually(lambda: begun(stage, "plain") == 1)
    others = [stage.tasks.permitted.delay(key, until=f"{key}-go") for _ in range(5)]
    eventually(lambda: begun(stage, "anybody") == LIMIT - 1)
    eventually(lambda: sum(stage.deferrals(result) >= 1 for result in others) == 3)
    assert begun(stage, "anybody") == LIMIT - 1
    go(stage, f"{key}-go")
    for result in (plain, *others):
        result.get(timeout=120)


def test_a_plain_lock_waits_for_its_own_permit_alone(stage: Stage, key: str) -> None:
    holders = [stage.tasks.permitted.delay(key, until=f"{key}-go") for _ in range(LIMIT)]
    eventually(lambda: begun(stage, key) == LIMIT)
    plain = stage.tasks.permitted.apply_async((key, "plain"), lock=PLAIN)
    eventually(lambda: stage.deferrals(plain) >= 1)
    assert begun(stage, "plain") == 0
    go(stage, f"{key}-go")
    for result in (plain, *holders):
        result.get(timeout=120)


def test_workers_with_old_and_new_settings_together_are_never_more_than_the_larger_limit(
    stage: Stage, key: str
) -> None:
    """A worker's settings are those of the queue that it alone takes from."""
    together = {f"old-{key}": 1, f"new-{key}": 2}  # however fast they are, two of the new meet
    old, new = together
    with stage.consumed(old), stage.consumed(new, "w2"):
        results = [
            stage.tasks.shares.apply_async((key, queue, together[queue]), queue=queue)
            for _ in range(15)
            for queue in together
        ]
        for result in results:
            result.get(timeout=120)
    intervals = stage.intervals()
    assert len(intervals[key]) == 30
    assert most_at_once(intervals[key]) <= LIMIT
    assert not overlaps(intervals[old]), "the old worker's limit is 1"
    assert overlaps(intervals[new]), "the new worker's limit is larger"
    stage.see_freed(f"p:{key}", f"p:{key}#1", f"p:{key}#2")


def test_each_doctor_sees_one_at_a_time_and_the_clinic_two(stage: Stage, key: str) -> None:
    """Of seven visits two of other doctors run; who waits names the key that refused it."""
    until = f"{key}-go"
    first = stage.tasks.visit.delay(key, f"{key}-1", until)
    eventually(lambda: begun(stage, f"{key}-1") == 1)
    of_same = [stage.tasks.visit.delay(key, f"{key}-1") for _ in range(3)]
    for result in of_same:
        stage.see_deferred(result)
    others = [stage.tasks.visit.delay(key, f"{key}-{n}", until) for n in (2, 3, 4)]
    eventually(lambda: begun(stage, key) == 2)
    eventually(lambda: sum(stage.deferrals(result) >= 1 for result in others) == 2)
    assert {stage.info(one)["result"]["resource"] for one in of_same} == {f"doctor:{key}-1"}
    deferred = [one for one in map(stage.info, others) if one["status"] == "DEFERRED"]
    assert [one["result"]["resource"] for one in deferred] == [f"clinic:{key}"] * 2
    assert begun(stage, key) == 2
    go(stage, until)
    for result in (first, *of_same, *others):
        result.get(timeout=120)
    intervals = stage.intervals()
    assert (len(intervals[key]), most_at_once(intervals[key])) == (7, 2)
    assert not overlaps(intervals[f"{key}-1"])
    stage.see_freed(f"clinic:{key}", f"clinic:{key}#1", *(f"doctor:{key}-{n}" for n in "1234"))


def test_a_callable_is_asked_at_each_try_where_the_run_is(
    of_two: Standing, stage: Stage, key: str
) -> None:
    said, until = stage.log.with_name(f"limit-{key}"), f"{key}-go"
    said.write_text("1")
    results = [stage.tasks.adapts.delay(key, f"{key}-1", until) for _ in range(3)]
    eventually(lambda: begun(stage, key) == 1)
    eventually(lambda: sum(stage.deferrals(result) >= 1 for result in results) == 2)
    said.write_text(repr({"adapts:{first}": 2}))
    results.append(stage.tasks.adapts.delay(key, f"{key}-2", until))
    eventually(lambda: begun(stage, key) == 2)
    go(stage, until)
    for result in results:
        result.get(timeout=120)
    assert most_at_once(stage.intervals()[key]) == 2
    asked = [line.pid for line in stage.lines("asked") if line.key == key]
    assert len(asked) >= 4
    assert not {worker.pid for worker in of_two.workers} & {*asked}
    for wrong in ("0", "'2'", "{'adapts': 2}"):
        said.write_text(wrong)
        with pytest.raises(SettingsError, match=r"task 'tests.adapts': limit="):
            stage.tasks.adapts.delay(key, "nobody").get(timeout=120)
    assert not begun(stage, "nobody")


@pytest.mark.parametrize("limit", [1, 2])
def test_a_redelivery_whose_callable_raises_leaves_the_state_to_its_first_delivery(
    stage: Stage, key: str, limit: int
) -> None:
    said, until = stage.log.with_name(f"limit-{key}"), f"{key}-go"
    said.write_text(str(limit))
    args, task_id = (key, f"{key}-1", until), f"{key}-once"
    first = stage.tasks.adapts_late.apply_async(args, task_id=task_id)
    eventually(lambda: begun(stage, key) == 1)
    said.write_text("no limit")
    again = {"redlock": {"id": task_id, "waits": 1}}
    stage.tasks.adapts_late.apply_async(args, task_id=task_id, headers=again)
    eventually(lambda: len([line for line in stage.lines("asked") if line.key == key]) >= 3)
    assert first.state not in ("FAILURE", "DEFERRED")
    go(stage, until)
    assert first.get(timeout=120) is None
    alone = stage.tasks.adapts_late.apply_async(
        args, task_id=f"{key}-2", headers={"redlock": {"id": f"{key}-2", "waits": 1}}
    )
    with pytest.raises(SettingsError, match="the callable raised"):
        alone.get(timeout=120)
    assert first.state == "SUCCESS"


def test_two_at_once_in_a_queue_over_all_workers_and_tasks_without_a_key(
    stage: Stage, key: str
) -> None:
    """As the settings say of queues whose names begin with "two-at-once"."""
    queue, until = f"two-at-once-{key}", f"{key}-go"
    tasks = (stage.tasks.of_queue, stage.tasks.also_of_queue)
    with stage.consumed(queue), stage.consumed(queue, "w2"):
        results = [
            task.apply_async((key, f"{task.name} {n}", until), queue=queue)
            for task in tasks
            for n in range(2)
        ]
        own = stage.tasks.visit.apply_async((f"{key}-x", "y"), queue=queue, lock={"limit": {}})
        assert own.get(timeout=120) is None  # a task with a key of its own
        eventually(lambda: begun(stage, key) == 2)
        eventually(lambda: sum(stage.deferrals(result) >= 1 for result in results) == 2)
        assert begun(stage, key) == 2
        go(stage, until)
        for result in results:
            result.get(timeout=120)
    assert most_at_once(stage.intervals()[key]) == 2
    stage.see_freed(queue, f"{queue}#1")


@pytest.mark.slow
def test_a_dead_holders_permit_comes_back_by_its_own_lease(own_stage: Stage) -> None:
    stage = own_stage
    dying = stage.worker("dying", queues=["held"], concurrency=1)
    stage.worker("living", queues=["waiting"], concurrency=4)
    stage.tasks.permitted.apply_async(("k", "dies", "never"), queue="held")
    eventually(lambda: begun(stage, "dies") == 1)
    holders = [
        stage.tasks.permitted.apply_async(("k", "lives", "go"), queue="waiting")
        for _ in range(LIMIT - 1)
    ]
    eventually(lambda: begun(stage, "lives") == LIMIT - 1)
    third = stage.tasks.permitted.apply_async(("k", "comes"), queue="waiting")
    stage.see_deferred(third)
    dying.kill()
    third.get(timeout=120)  # with QUICK it tries all the time: the lease has ended
    ended = {line.key for line in stage.lines("end")}
    assert ended == {"k", "comes"}, "the others hold their permits still"
    go(stage, "go")
    for result in holders:
        result.get(timeout=120)


def test_a_limit_that_is_raised_and_lowered_while_they_run_is_reached_and_never_passed(
    stage: Stage, key: str
) -> None:

    def send(limit: int, count: int, until: str = "") -> list[Any]:
        lock, args = {"limit": limit}, (key, f"limit {limit}", until)
        return [stage.tasks.permitted.apply_async(args, lock=lock) for _ in range(count)]

    results = send(LIMIT, 6, f"{key}-go")
    eventually(lambda: begun(stage, f"limit {LIMIT}") == LIMIT)
    results += send(HIGHER, 6, f"{key}-go")
    eventually(lambda: begun(stage, key) == HIGHER)
    results += send(1, 4)
    eventually(lambda: all(stage.deferrals(result) for result in results[-4:]))
    assert begun(stage, key) == HIGHER
    go(stage, f"{key}-go")
    for result in results:
        result.get(timeout=120)
    intervals = stage.intervals()
    assert most_at_once(intervals[key]) == HIGHER
    assert most_at_once(intervals[f"limit {LIMIT}"]) == LIMIT
    assert not overlaps(intervals["limit 1"])
