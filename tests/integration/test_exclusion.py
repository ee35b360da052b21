"""No two bodies of one key at once, and nothing else held up."""

from __future__ import annotations

import json

import pytest

from celery_redlock import QuorumUnreachable
from celery_redlock.testing import embedded_nodes
from tests.conftest import (
    NODE_TIMEOUT,
    PATIENCE,
    TTL,
    Nodes,
    eventually,
    is_free,
    keys_on,
    trust_nodes,
)
from tests.integration.conftest import MakeStage, Stage, Standing, overlaps


@pytest.mark.slow
@pytest.mark.xdist_group("two workers")
def test_100_runs_over_5_keys_on_two_workers_never_overlap_and_all_succeed(
    of_two: Standing, key: str
) -> None:
    stage = of_two.stage
    results = [stage.tasks.work.delay(f"{key}-{n % 5}", 0.1) for n in range(100)]
    assert [result.get(timeout=120) for result in results] == [0] * 100
    intervals = stage.intervals()
    runs = {name: len(spans) for name, spans in intervals.items()}
    assert runs == {f"{key}-{n}": 20 for n in range(5)}
    assert {name: overlaps(spans) for name, spans in intervals.items()} == {k: [] for k in runs}
    everything = sorted(span for spans in intervals.values() for span in spans)
    assert overlaps(everything), "different keys ran one after another"


@pytest.mark.xdist_group("two workers")
def test_two_tasks_that_share_a_key_never_overlap_over_many_rounds(
    of_two: Standing, key: str
) -> None:
    stage, rounds = of_two.stage, 0
    for _ in range(10):
        waves = [(stage.tasks.work.si(key, 0), stage.tasks.crowded.si(key)) for _ in range(10)]
        rounds += len([call.delay() for wave in waves for call in wave])
        stage.wait_for("end", rounds)
    spans = stage.intervals()[key]
    assert len(spans) == rounds == 200
    assert not overlaps(spans)


@pytest.mark.slow
def test_a_body_of_two_ttls_keeps_its_lock_and_a_rival_follows(stage: Stage) -> None:
    stage.worker(concurrency=2)
    stage.tasks.long_work.delay("k", 2 * TTL)
    stage.wait_for("begin")
    stage.tasks.long_work.delay("k", 0.0)
    stage.wait_for("end", 2)
    first, second = stage.intervals()["k"]
    assert first[1] - first[0] >= 2 * TTL
    assert second[0] >= first[1]


def test_one_dead_node_of_three_stops_nothing(make_stage: MakeStage, mortal_nodes: Nodes) -> None:
    stage = make_stage(mortal_nodes)
    stage.worker(concurrency=4)
    first = [stage.tasks.work.delay(f"key{n % 3}") for n in range(15)]
    stage.wait_for("end", 3)
    mortal_nodes[0].kill()
    second = [stage.tasks.work.delay(f"key{n % 3}") for n in range(15)]
    assert [result.get(timeout=120) for result in first + second] == [0] * 30
    assert not any(overlaps(spans) for spans in stage.intervals().values())


@pytest.mark.slow
def test_without_a_quorum_no_body_starts_and_no_message_is_lost(
    make_stage: MakeStage, mortal_nodes: Nodes
) -> None:
    stage = make_stage(mortal_nodes)
    stage.worker(concurrency=4)
    for node in mortal_nodes[:2]:
        node.kill()
    results = [stage.tasks.work.delay(f"key{n % 3}") for n in range(12)]
    eventually(lambda: all(stage.info(r)["status"] == "DEFERRED" for r in results))
    eventually(lambda: all(stage.info(r)["result"]["deferrals"] >= 1 for r in results))
    assert stage.lines("begin") == []
    trust_nodes([mortal_nodes[0].start()])
    assert [result.get(timeout=120) for result in results] == [0] * 12
    assert len(stage.lines("begin")) == 12
    assert not any(overlaps(spans) for spans in stage.intervals().values())


@pytest.mark.slow
def test_two_dead_nodes_of_five_stop_nothing_and_a_third_one_lets_nobody_run(
    make_stage: MakeStage,
) -> None:
    with embedded_nodes(5) as nodes:
        trust_nodes(nodes)
        stage = make_stage(nodes)
        stage.worker(concurrency=4)
        stage.app.conf.redlock_node_timeout = PATIENCE  # here alone: each cause is to be known
        work = stage.tasks.work
        first = [work.delay(f"key{n % 3}") for n in range(9)]
        stage.wait_for("end", 3)
        nodes[0].kill()
        nodes[1].pause()  # nobody refuses what is sent to it: it just never answers
        second = [work.delay(f"key{n % 3}") for n in range(9)]
        assert [result.get(timeout=120) for result in first + second] == [0] * 18
        nodes[2].kill()
        third = [work.delay(f"key{n % 3}") for n in range(6)]
        for result in third:
            stage.see_deferred(result)
        assert len(stage.lines("begin")) == 18
        with pytest.raises(QuorumUnreachable) as caught:
            work.lock_for("alone").acquire()
        assert caught.value.quorum == 3
        down = [node.url.removeprefix("redis://").removesuffix("/0") for node in nodes[:3]]
        assert [cause.partition(": ")[0] for cause in caught.value.causes] == down
        eventually(lambda: is_free(nodes[3:], "k:alone"))  # what the two live ones granted
        nodes[1].resume()
        assert [result.get(timeout=120) for result in third] == [0] * 6
        assert not any(overlaps(spans) for spans in stage.intervals().values())
        eventually(lambda: not any(keys_on([nodes[1], *nodes[3:]])))


def test_without_nodes_set_the_broker_is_the_node(make_stage: MakeStage, nodes: Nodes) -> None:
    stage = make_stage(nodes)
    conf = {"redlock_prefix": "alone", "redlock_node_timeout": NODE_TIMEOUT}
    stage.env["TEST_CONF"] = json.dumps(conf)
    stage.app.conf.redlock_nodes = None
    stage.env["TEST_NODES"] = "unset"
    stage.worker(concurrency=2)
    results = [stage.tasks.work.delay("k") for _ in range(4)]
    assert [result.get(timeout=120) for result in results] == [0] * 4
    assert not overlaps(stage.intervals()["k"])
    assert [node.client().keys("{alone}*") for node in nodes] == [[], [], []]
