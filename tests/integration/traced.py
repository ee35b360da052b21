"""The test app in a worker whose runs OpenTelemetry records; each span is a line of a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from opentelemetry import trace
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

from celery_redlock import LockedTask
from tests.integration.app import app as app
from tests.integration.app import task, work

FILE = Path(f"{os.environ['TEST_LOG']}.spans")


class LineExporter(SpanExporter):
    """Adds a line for each span."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with FILE.open("a") as lines:
            lines.writelines(f"{span.to_json(indent=None)}\n" for span in spans)
        return SpanExportResult.SUCCESS


provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(LineExporter()))
trace.set_tracer_provider(provider)
CeleryInstrumentor().instrument()


@task(base=LockedTask, lock_key="outer:{key}")
def takes_another(key: str) -> None:
    with work.lock_for(key, wait=60), takes_another.lock_for(f"{key} beside", wait=60):
        pass
