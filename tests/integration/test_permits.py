"""`limit` bodies of one key at once, on however many workers, and never one more."""

from __future__ import annotations

from tests.conftest import eventually
from tests.integration.conftest import Stage, overlaps

LIMIT = 3  # of `permitted`
PLAIN = {"limit": 1}


def most_at_once(spans: list[tuple[float, float]]) -> int:
    """Return how many of these intervals were open at the same time."""
    moments = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    most = now = 0
    for _, step in moments:
        now += step
        most = max(most, now)
    return most


def two_workers(stage: Stage) -> None:
    for name in ("w1", "w2"):
        stage.worker(name, concurrency=4)


def go(stage: Stage, name: str) -> None:
    """Let the bodies go on that wait for this name."""
    stage.log.with_name(name).touch()


def begun(stage: Stage, key: str) -> int:
    return sum(line.key == key for line in stage.lines("begin"))


def test_three_permits_let_three_bodies_run_at_once_and_put_the_others_back(stage: Stage) -> None:
    two_workers(stage)
    results = [stage.tasks.permitted.delay("k", until="go") for _ in range(8)]
    eventually(lambda: begun(stage, "k") == LIMIT)
    eventually(lambda: sum(stage.deferrals(result) >= 2 for result in results) == 8 - LIMIT)
    assert begun(stage, "k") == LIMIT
    go(stage, "go")
    for result in results:
        result.get(timeout=120)
    assert most_at_once(stage.intervals()["k"]) == LIMIT
    stage.see_freed("p:k", "p:k#1", "p:k#2")


def test_the_plain_lock_is_one_of_the_permits(stage: Stage) -> None:
    two_workers(stage)
    plain = stage.tasks.permitted.apply_async(("k", "plain", "go"), lock=PLAIN)
    eventually(lambda: begun(stage, "plain") == 1)
    others = [stage.tasks.permitted.delay("k", until="go") for _ in range(5)]
    eventually(lambda: begun(stage, "anybody") == LIMIT - 1)
    eventually(lambda: sum(stage.deferrals(result) >= 2 for result in others) == 3)
    assert begun(stage, "anybody") == LIMIT - 1
    go(stage, "go")
    for result in (plain, *others):
        result.get(timeout=120)


def test_a_plain_lock_waits_for_its_own_permit_alone(stage: Stage) -> None:
    two_workers(stage)
    holders = [stage.tasks.permitted.delay("k", until="go") for _ in range(LIMIT)]
    eventually(lambda: begun(stage, "k") == LIMIT)
    plain = stage.tasks.permitted.apply_async(("k", "plain"), lock=PLAIN)
    eventually(lambda: stage.deferrals(plain) >= 2)
    assert begun(stage, "plain") == 0
    go(stage, "go")
    for result in (plain, *holders):
        result.get(timeout=120)


def test_old_and_new_limits_together_are_never_more_than_the_larger_one(stage: Stage) -> None:
    two_workers(stage)
    results = []
    for _ in range(15):
        results.append(stage.tasks.permitted.delay("k"))
        results.append(stage.tasks.permitted.apply_async(("k", "plain"), lock=PLAIN))
    for result in results:
        result.get(timeout=120)
    intervals = stage.intervals()
    assert len(intervals["k"]) == 30
    assert most_at_once(intervals["k"]) <= LIMIT
    assert not overlaps(intervals["plain"])
