"""What becomes of a run's lock stands on the run's span, where OpenTelemetry records one."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from celery_redlock import Backoff, Redlock
from tests.conftest import Nodes, eventually
from tests.integration.conftest import STANDING, MakeStage, Stage, StandingStages, slow_but
from tests.pages import ROOT

PAGE = (ROOT / "docs" / "operations" / "monitoring.md").read_text(encoding="utf-8")
SLOW = Backoff(first=1e7, cap=1e7)
Span = dict[str, Any]
pytestmark = pytest.mark.xdist_group("spans")


def spans_of(stage: Stage, result: Any) -> list[Span]:
    file = Path(f"{stage.log}.spans")
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    spans = [json.loads(line) for line in lines]
    return [
        span
        for span in spans
        if span["name"].startswith("run/") and result.id in span["attributes"].values()
    ]


def see_span(stage: Stage, result: Any, outcome: str) -> Span:
    """Return a message's first span with this outcome, once it is written."""

    def found() -> Span | None:
        of_result = spans_of(stage, result)
        return next(
            (s for s in of_result if s["attributes"].get("redlock.outcome") == outcome), None
        )

    return eventually(found) or {}


def of_ours(attributes: dict[str, Any]) -> set[str]:
    return {name for name in attributes if name.startswith("redlock.")}


def on_the_page(*outcomes: str) -> set[str]:
    """Return the attributes that the page's table has for these outcomes of a delivery."""
    rows = re.findall(r"^\| (`redlock\..+?) \| (.+) \|$", PAGE, re.MULTILINE)
    found = [
        re.findall(r"`(redlock\.\w+)`", names)
        for names, when in rows
        if any(word in when for word in (*outcomes, "any of these outcomes"))
    ]
    return {name for names in found for name in names}


@pytest.fixture
def traced(
    request: pytest.FixtureRequest, standing_stages: StandingStages, pool: str
) -> Iterator[Stage]:
    """Give a standing stage whose worker records spans, in a pool that is the test's parameter."""
    how = {**STANDING, "module": "tests.integration.traced", "pool": pool}
    with standing_stages.lend(request.node, **how) as lent:
        yield lent.stage


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_each_delivery_has_what_became_of_its_lock_on_its_span(traced: Stage, key: str) -> None:
    stage, resource = traced, f"k:{key}"
    held = stage.tasks.until.delay(key, f"{key}-go")
    stage.wait_for("begin")
    trace = uuid.uuid4().hex
    waiting = stage.tasks.fenced.apply_async(
        (key,), lock={"backoff": SLOW, "wait": 0.1},
        headers={"traceparent": f"00-{trace}-{'1' * 16}-01"},
    )  # fmt: skip
    # the instrumentation keeps one span for each task id: the next delivery comes after this one
    try_span = see_span(stage, waiting, "deferred")
    republish = try_span["attributes"]
    skipped = stage.tasks.work.apply_async((key,), lock={"on_conflict": "skip"})
    with pytest.raises(TaskRevokedError):
        skipped.get(timeout=120)
    stage.log.with_name(f"{key}-go").touch()
    token = waiting.get(timeout=120)

    assert republish["redlock.resource"] == resource
    assert held.id in republish["redlock.holder"]
    assert republish["redlock.deferrals"] >= 1
    assert republish["redlock.countdown"] >= 0
    run_span = see_span(stage, waiting, "released")
    assert [one["context"]["trace_id"] for one in (try_span, run_span)] == [f"0x{trace}"] * 2
    ran = run_span["attributes"]
    assert ran["redlock.fencing_token"] == token
    assert ran["redlock.deferrals"] >= 1
    assert ran["redlock.waited"] > 0
    assert ran["redlock.held_for"] > 0
    refused = see_span(stage, skipped, "skipped")["attributes"]
    assert "is held by" in refused["redlock.reason"]
    assert of_ours(republish) == on_the_page("deferred")
    assert of_ours(ran) == on_the_page("acquired", "released")
    assert of_ours(refused) == on_the_page("skipped")
    first = see_span(stage, held, "released")["attributes"]
    assert (first["redlock.resource"], first["redlock.deferrals"]) == (resource, 0)


@pytest.mark.parametrize("pool", slow_but(["prefork"], ["prefork", "threads"]))
def test_a_worker_may_import_opentelemetry_after_its_app_has_finalized(
    make_stage: MakeStage, nodes: Nodes, pool: str
) -> None:
    stage = make_stage(nodes)
    worker = stage.worker(module="tests.integration.traced_late", pool=pool, concurrency=2)
    result = stage.tasks.work.delay("k")
    result.get(timeout=120)
    assert see_span(stage, result, "released")["attributes"]["redlock.resource"] == "k:k"
    assert "receivers before the import: 0" in worker.output()


@pytest.mark.parametrize("pool", ["threads"])
def test_a_lock_that_is_not_the_runs_own_is_an_event_on_its_span(traced: Stage, key: str) -> None:
    result = traced.app.send_task("tests.integration.traced.takes_another", (key,))
    span = see_span(traced, result, "released")
    assert span["attributes"]["redlock.resource"] == f"outer:{key}"
    told = [(event["name"], event["attributes"]["redlock.resource"]) for event in span["events"]]
    assert told == [
        ("redlock.acquired", f"k:{key}"),
        ("redlock.acquired", f"outer:{key} beside"),
        ("redlock.released", f"outer:{key} beside"),
        ("redlock.released", f"k:{key}"),
    ]


def test_outside_of_runs_a_lock_is_two_events_on_the_span_that_is_recorded(
    redlock: Redlock,
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with provider.get_tracer("tests").start_as_current_span("web"), redlock.lock("stock:1"):
        pass
    with redlock.lock("stock:2"):  # nothing is recorded
        pass
    (span,) = exporter.get_finished_spans()
    told = [(event.name, (event.attributes or {})["redlock.resource"]) for event in span.events]
    assert told == [("redlock.acquired", "stock:1"), ("redlock.released", "stock:1")]
