"""What Prometheus scrapes from a worker is what its run came to."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.parser import text_string_to_metric_families

from celery_redlock import LockedTask, LockLost, SettingsError, signals
from celery_redlock.lock.model.keys import lock_key, waiting_key
from celery_redlock.operate.metrics import Metrics
from celery_redlock.signals import SendDeduplicatedEvent, run_unlocked, send_deduplicated
from celery_redlock.tasks.delivery.delivery import SEEN
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.tasks.settings.levels import read_app
from celery_redlock.testing import WorkerProcess
from tests import fork_server
from tests.conftest import PATIENCE, Nodes, eventually, receiving
from tests.integration.conftest import (
    ROOT,
    MakeStage,
    Stage,
    Standing,
    StandingStages,
    slow_but,
)
from tests.integration.deliveries import heard, run_here

ANY_PORT = "127.0.0.1:0"
CONF = {"redlock_metrics": ANY_PORT}
WORKER = {"pool": "prefork", "concurrency": 3, "options": ["-E"]}
Samples = dict[tuple[str, str], float]


def families(worker: WorkerProcess) -> list[Metric]:
    url = eventually(lambda: re.search(r"metrics are served on (\S+)", worker.output()))[1]
    with urllib.request.urlopen(url, timeout=60) as answer:
        return list(text_string_to_metric_families(answer.read().decode()))


def scrape(worker: WorkerProcess) -> Samples:
    """Return each sample's value, by its name and its task or node; of other labels the sum."""
    found: Samples = {}
    for sample in (sample for family in families(worker) for sample in family.samples):
        if not sample.name.endswith("_created"):
            of = (sample.name, sample.labels.get("task") or sample.labels.get("node", ""))
            found[of] = found.get(of, 0.0) + sample.value
    return found


def of_kind(events: list[dict[str, Any]], kind: str) -> int:
    return len([event for event in events if event["type"] == kind])


@pytest.fixture
def counting(
    request: pytest.FixtureRequest, standing_stages: StandingStages, pool: str
) -> Iterator[Standing]:
    """Give a stage with a worker of a pool; no other test here runs the same tasks in it."""
    with standing_stages.lend(request.node, **{**WORKER, "conf": CONF, "pool": pool}) as lent:
        yield lent


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_the_metrics_of_a_run_are_its_own_counts(counting: Standing, key: str) -> None:
    stage, (worker,) = counting.stage, counting.workers
    task, task_name = stage.tasks.work, stage.tasks.work.name
    with heard(stage) as heard_of:
        held = stage.tasks.until.delay(key, "go")
        stage.wait_for("begin")
        waiting = [task.delay(key) for _ in range(2)]
        for result in waiting:
            stage.see_deferred(result)
        skipped = task.apply_async((key,), lock={"on_conflict": "skip"})
        eventually(lambda: stage.info(skipped)["status"] == "REVOKED")
        now = scrape(worker)
        stage.log.with_name("go").touch()
        for result in (held, *waiting):
            result.get(timeout=120)
        free = [task.delay(f"{key} {number}") for number in range(5)]
        for result in free:
            result.get(timeout=120)
        stage.see_freed(f"k:{key}", *(f"k:{key} {number}" for number in range(5)))
        found = eventually(
            lambda: (got := scrape(worker))["redlock_released_total", task_name] == 7.0 and got
        )
        own = {result.id for result in (held, skipped, *waiting, *free)}

        def told(kind: str) -> int:
            return of_kind([event for event in heard_of if event.get("uuid") in own], kind)

        eventually(lambda: told("task-succeeded") == 8)
        deferred = told("task-deferred")
    assert now["redlock_held", stage.tasks.until.name] == 1.0
    bodies = [line for line in stage.lines("begin") if line.key != key]
    assert len(bodies) == 5
    assert found["redlock_acquired_total", task_name] == 7.0
    assert found["redlock_acquired_total", stage.tasks.until.name] == 1.0
    assert found["redlock_deferred_total", task_name] == deferred >= 2
    assert found["redlock_skipped_total", task_name] == 1.0
    assert found["redlock_hold_seconds_count", task_name] == 7.0
    assert found["redlock_wait_seconds_count", task_name] == 7.0
    assert found["redlock_wait_seconds_sum", task_name] > 0
    assert ("redlock_held", task_name) not in found
    names = [f"127.0.0.1:{node.port}" for node in stage.nodes]
    assert {found["redlock_node_votes", name] for name in names} == {1.0}
    assert {found["redlock_node_evicts", name] for name in names} == {0.0}


def test_what_a_rate_refuses_is_counted(stage: Stage, worker: WorkerProcess, key: str) -> None:
    task, rate = stage.tasks.rated, {"rate": "1/h"}
    task.apply_async((key,), lock=rate).get(timeout=120)
    assert scrape(worker)["redlock_rate_refused_total", task.name] == 0.0
    skipped = task.apply_async((key,), lock={**rate, "on_conflict": "skip"})
    eventually(lambda: stage.info(skipped)["status"] == "REVOKED")
    waiting = task.apply_async((key,), lock=rate)
    stage.see_deferred(waiting)
    found = eventually(
        lambda: (got := scrape(worker))["redlock_rate_refused_total", task.name] == 2.0 and got
    )
    of = ("redlock_skipped_total", "redlock_deferred_total", "redlock_acquired_total")
    assert [found[name, task.name] for name in of] == [1.0, 1.0, 1.0]
    waiting.revoke()


OPTIONS: dict[str, dict[str, Any]] = {
    "dropped": {},
    "replaced": {"lock_unique_until": "started", "lock_on_duplicate": "newest"},
    "debounced": {"lock_unique_for": None, "lock_debounce": 60},
}


def test_deduplicated_sends_and_runs_without_a_lock_are_counted(nodes: Nodes) -> None:
    """In the process that sends, which may be a web server with a registry of its own."""
    app = Celery("told", broker="memory://", set_as_current=False)
    app.conf.update(redlock_nodes=[node.url for node in nodes], redlock_node_timeout=PATIENCE)
    registry = CollectorRegistry()
    told: list[Any] = []

    def body(sku: str) -> str:
        return sku

    with (
        contextlib.closing(Metrics(registry)),
        receiving(send_deduplicated, lambda sender, event: told.append((sender, event))),
    ):
        for how, options in OPTIONS.items():
            options = {"lock_unique_for": 500, **options}
            task = app.task(base=LockedTask, name=how, shared=False, **options)(body)
            first = task.delay("sku")
            task.delay("another")
            assert not told
            task.delay("sku")
            resource = task.lock_for("sku").resource
            assert told.pop() == (task, SendDeduplicatedEvent(resource, how, first.id, how))
            words = {"task": how, "how": how}
            assert registry.get_sample_value("redlock_deduplicated_total", words) == 1.0
        redlock_of(app).close()
        app.conf.update(redlock_nodes=["redis://127.0.0.1:1"])
        unlocked = {"name": "unlocked", "lock_on_unreachable": "run"}
        task = app.task(base=LockedTask, shared=False, **unlocked)(body)
        with receiving(run_unlocked, lambda sender, event: told.append((sender, event.reason))):
            assert task.apply(("sku",)).get() == "sku"
        (sender, reason), *more = told
        assert (sender, more) == (task, [])
        assert "127.0.0.1:1" in reason
        assert registry.get_sample_value("redlock_unlocked_total", {"task": "unlocked"}) == 1.0
    redlock_of(app).close()


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_renewals_and_losses_are_counted(make_stage: MakeStage, nodes: Nodes, pool: str) -> None:
    stage = make_stage(nodes, redlock_metrics=ANY_PORT)
    stage.log.with_name("renewals").touch()
    worker = stage.worker(pool=pool, concurrency=2, options=["-E"])
    task_name = stage.tasks.loses.name
    with heard(stage) as events:
        losers = [stage.tasks.loses.delay(f"k{number}") for number in range(2)]
        stage.wait_for("extended", 3)
        for number in range(2):
            for node in nodes:
                node.client().set(lock_key("redlock", f"k:k{number}"), "theirs", px=1000)
        for loser in losers:
            with pytest.raises(LockLost):
                loser.get(timeout=120)
        eventually(lambda: of_kind(events, "task-lock-lost") == 2)
    found = eventually(
        lambda: (got := scrape(worker)).get(("redlock_lost_total", task_name)) == 2.0 and got
    )
    assert found["redlock_extended_total", task_name] == len(stage.lines("extended")) >= 3
    eventually(lambda: ("redlock_held", task_name) not in scrape(worker))


def test_a_lock_that_the_parent_released_is_counted_as_such(
    stage: Stage, worker: WorkerProcess, key: str
) -> None:
    stage.tasks.stays.delay(key)
    (line,) = stage.wait_for("stays")
    os.kill(line.pid, signal.SIGKILL)
    stage.wait_for("parent's release")

    def released() -> dict[str, float]:
        samples = (sample for family in families(worker) for sample in family.samples)
        total = (sample for sample in samples if sample.name == "redlock_released_total")
        return {sample.labels["by"]: sample.value for sample in total if sample.value}

    eventually(lambda: released().get("parent") == 1.0)


def test_a_node_that_is_away_is_seen_in_the_metrics(
    make_stage: MakeStage, mortal_nodes: Nodes
) -> None:
    stage = make_stage(mortal_nodes, redlock_metrics=ANY_PORT)
    worker = stage.worker(concurrency=1)
    assert stage.tasks.work.delay("k").get(timeout=120) == 0
    evicting = mortal_nodes[1].client()  # set on a server that its clients are connected to
    evicting.config_set("maxmemory-policy", "allkeys-lru")
    evicting.config_set("maxmemory", "1gb")
    assert scrape(worker)["redlock_node_evicts", f"127.0.0.1:{mortal_nodes[1].port}"] == 1.0
    mortal_nodes[0].kill()
    assert stage.tasks.work.delay("k").get(timeout=120) == 0
    away = f"127.0.0.1:{mortal_nodes[0].port}"
    found = eventually(
        lambda: (got := scrape(worker)).get(("redlock_node_failed_total", away)) and got
    )
    assert found["redlock_node_votes", away] == 0.0
    assert ("redlock_node_latency_seconds", away) not in found
    assert ("redlock_node_evicts", away) not in found


@pytest.mark.slow
def test_a_child_goes_on_with_the_counts_of_the_one_before_it(
    make_stage: MakeStage, nodes: Nodes, tmp_path: Path
) -> None:
    """Or a worker whose children end after so many tasks would fill its disk."""
    stage = make_stage(nodes, redlock_metrics=ANY_PORT)
    (folder := tmp_path / "counts").mkdir()
    stage.env["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    worker = stage.worker(concurrency=1, options=["--max-tasks-per-child=1"])
    files, released = [], ("redlock_released_total", stage.tasks.work.name)
    for number in (1, 2, 3):
        stage.tasks.work.delay(f"k{number}").get(timeout=120)
        stage.see_freed(f"k:k{number}")
        eventually(lambda number=number: scrape(worker).get(released) == number)
        files.append({path.name for path in folder.glob("*.db")})
    assert len({line.pid for line in stage.lines("begin")}) == 3
    assert files[0] == files[1] == files[2]


COUNTS = """
import logging, os, signal, threading, time
from celery import Celery
from celery.signals import worker_init
from celery_redlock import LockedTask, NodeError, Redlock
from celery_redlock.operate import metrics
from celery_redlock.signals import node_failed

app = Celery("counts", broker="memory://")
app.conf.update(redlock_nodes=["redis://127.0.0.1:1"], redlock_metrics="127.0.0.1:0")
@app.task(base=LockedTask)
def order(): ...

class Worker:
    pool_cls, blueprint = "prefork", None
Worker.app = app
worker_init.send(sender=Worker)
app.finalize()
assert metrics._exporter is not None

logging.disable()
redlock = Redlock(["redis://127.0.0.1:1"])
(node,) = redlock.session.nodes.all
counted, mutex = threading.Event(), threading.Lock()

@node_failed.connect  # after the counter's own receiver
def on_failed(**_):
    with mutex:
        time.sleep(0.001)
    counted.set()

def count():
    redlock.session.events.node_changed(node, NodeError("a", "away"))

def count_on():
    while True:
        count()
        time.sleep(0.002)

threading.Thread(target=count_on, daemon=True).start()
for _ in range(30):  # at a third of the moments the other thread has the lock
    pid = os.fork()
    if not pid:
        signal.alarm(120)
        counted = threading.Event()
        count()
        counted.wait()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, "it waits for ever"
"""


def test_a_child_can_count_that_was_forked_while_another_thread_did(tmp_path: Path) -> None:
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COUNTS]
    made = fork_server.run(command, env=env, timeout=300)
    assert made.returncode == 0, made.stderr


def test_what_is_rare_is_0_before_it_comes(stage: Stage, worker: WorkerProcess) -> None:
    """An alert on `increase(...)` sees no first loss where the count begins with 1."""
    task, found = stage.tasks.transfer.name, scrape(worker)  # of which nothing is run here
    for count in ("acquired", "deferred", "skipped", "lost", "extended"):
        assert found[f"redlock_{count}_total", task] == 0.0
    assert found["redlock_handoffs_total", task] == 0.0
    assert found["redlock_node_failed_total", f"127.0.0.1:{stage.nodes[0].port}"] == 0.0
    released = [s for family in families(worker) for s in family.samples]
    by = [s.labels["by"] for s in released if s.name == "redlock_released_total" and not s.value]
    assert {"holder", "parent"} <= set(by)
    steps = {s.labels["step"] for s in released if s.name == "redlock_handoffs_total"}
    assert steps == {"named", "acted", "ladder", "fallback"}
    assert not [name for name, of in found if of.startswith("celery.")]


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    made = CollectorRegistry()
    with contextlib.closing(Metrics(made)):
        yield made


def test_each_step_of_a_hand_off_is_counted(stage: Stage, registry: CollectorRegistry) -> None:
    task = stage.tasks.work
    for step in ("named", "acted", "named", "ladder"):
        signals.lock_handed_off.send(task, event=signals.LockHandedOffEvent("k:k", step))
    counted = {
        sample.labels["step"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "redlock_handoffs_total" and sample.labels["task"] == task.name
    }
    assert counted == {"named": 2.0, "acted": 1.0, "ladder": 1.0}


@pytest.mark.parametrize(("ago", "least"), [(5.0, 5.0), (-5.0, 0.0)])
def test_a_hand_off_lasts_from_the_releases_message_to_the_runs_lock(
    stage: Stage, registry: CollectorRegistry, ago: float, least: float
) -> None:
    """A clock that is set back during a hand-off makes none shorter than 0 s."""
    task, labels = stage.tasks.takes_another, {"task": stage.tasks.takes_another.name}
    run_here(task, "k", properties={SEEN: {"named_at": time.time() - ago}})
    assert registry.get_sample_value("redlock_acquired_total", labels) == 2.0
    assert registry.get_sample_value("redlock_handoff_seconds_count", labels) == 1.0
    lasted = registry.get_sample_value("redlock_handoff_seconds_sum", labels)
    assert lasted is not None
    assert least <= lasted < least + 60


def steps_of_hand_offs(worker: WorkerProcess, task: str) -> dict[str, float]:
    """Return how often a worker has counted each step of a task's hand-offs, but for none."""
    samples = [sample for family in families(worker) for sample in family.samples]
    total = [one for one in samples if one.name == "redlock_handoffs_total" and one.value]
    return {one.labels["step"]: one.value for one in total if one.labels["task"] == task}


@pytest.mark.parametrize("pool", slow_but(("prefork",), ("prefork", "threads", "solo", "gevent")))
def test_a_worker_counts_its_hand_offs_and_how_long_each_took(counting: Standing, key: str) -> None:
    stage, (worker,) = counting.stage, counting.workers
    task = stage.tasks.patient
    counted = ("redlock_handoff_seconds_count", task.name)

    def is_handed_off() -> bool:
        with task.lock_for(key, wait=60):
            result = task.delay(key)
            stage.see_deferred(result)
            for node in stage.nodes:
                client, waiting = node.client(), waiting_key("redlock", f"k:{key}")
                eventually(lambda client=client: client.pubsub_channels("*:handoff:*"))
                eventually(lambda client=client, waiting=waiting: client.zcard(waiting))
        result.get(timeout=120)
        stage.see_freed(f"k:{key}")
        return "named" in steps_of_hand_offs(worker, task.name)

    # a worker that asks by itself, as its first message begins to wait, may be before the release
    eventually(is_handed_off)
    found = scrape(worker)
    assert 0.0 <= found["redlock_handoff_seconds_sum", task.name] < 60.0
    steps = steps_of_hand_offs(worker, task.name)
    # a loop that was late for its turn acts as if another worker had been named before it, and one
    # that hears of two nodes at different times asks by itself
    surely = steps.get("acted", 0.0) + steps.get("ladder", 0.0)
    assert surely <= found[counted] <= surely + steps.get("fallback", 0.0)


def test_a_run_that_no_release_dispatched_was_not_handed_its_lock(
    stage: Stage, registry: CollectorRegistry
) -> None:
    run_here(stage.tasks.work, "k", properties={})
    labels = {"task": stage.tasks.work.name}
    assert registry.get_sample_value("redlock_acquired_total", labels) == 1.0
    assert not registry.get_sample_value("redlock_handoff_seconds_count", labels)


@pytest.mark.parametrize("value", ["http", -1, True, "host:", 70000, "9808/metrics"])
def test_a_wrong_address_is_refused_by_name_and_value(value: Any) -> None:
    conf = {"redlock_nodes": ["redis://a"], "redlock_metrics": value}
    with pytest.raises(SettingsError, match=r"redlock_metrics.*port"):
        read_app(conf)


@pytest.mark.parametrize(
    ("value", "address"),
    [
        (9808, ("127.0.0.1", 9808)), ("0.0.0.0:9808", ("0.0.0.0", 9808)),
        ("[::1]:9808", ("::1", 9808)), (None, None),
    ],
)  # fmt: skip
def test_an_address_is_a_port_of_this_machine_or_a_host_and_its_port(
    value: Any, address: Any
) -> None:
    conf = {"redlock_nodes": ["redis://a"], "redlock_metrics": value}
    assert read_app(conf).metrics == address


def test_the_dashboard_asks_for_metrics_that_there_are(worker: WorkerProcess) -> None:
    registry = CollectorRegistry()
    with contextlib.closing(Metrics(registry)):
        known = {family.name for family in (*registry.collect(), *families(worker))}
    board = json.loads((ROOT / "docs" / "grafana-dashboard.json").read_text())
    asked = {
        re.sub(r"_(bucket|count|sum|total)$", "", name)
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"\bredlock_\w+", target["expr"])
    }
    assert len(asked) > 10
    assert asked == {name for name in known if name.startswith("redlock_")}
