"""The agents: how each begins, where it reports to, and what its reports say of the tries of tasks.

It runs in the environment of one agent, so each is imported where it is used.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neighbours.collector import Report

TASK = "story."  # how the names of the tasks begin
CLOUDS = ("aws", "azure", "azurefunction", "azureappservice", "docker", "gcp", "kubernetes", "pcf")


@dataclass
class Recorded:
    """What an agent recorded. tries: by task and status. errors: by task and class of exception.

    Words of the agent.
    """

    tries: Counter[tuple[str, str]] = field(default_factory=Counter)
    errors: Counter[tuple[str, str]] = field(default_factory=Counter)

    def statuses(self, task: str) -> list[str]:
        """Return the statuses of a task's tries, each once."""
        return sorted({status for name, status in self.tries if name == task})

    def classes(self, task: str) -> list[str]:
        """Return the classes of the errors of a task, each once."""
        return sorted({kind for name, kind in self.errors if name == task})


@dataclass(frozen=True)
class Where:
    """Where an agent is to report to. port: by HTTP. frames: of Scout's messages. folder: its own.

    certificate: of the server, if the agent wants TLS. more: as in the setup.
    """

    port: int
    frames: int
    folder: Path
    certificate: Path | None
    more: Mapping[str, Any]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class Agent:
    """One agent. has_tls: whether it reports by TLS alone. pages: to read, if it has a command."""

    has_tls = False
    pages: tuple[str, ...] = ()

    def env(self, where: Where) -> dict[str, str]:
        """Return the variables with which it reports there."""
        raise NotImplementedError

    def begin(self) -> None:
        """Do what its pages put into the module of the app."""

    def answer(self, path: str) -> Any:
        """Return what it expects of its server."""
        return {}

    def command(self, broker: str, port: int) -> list[str]:
        """Return the command line of an agent that watches the events of workers, else nothing.

        It answers on a port; `pages` are the paths to read there.
        """
        return []

    def read(self, reports: Iterable[Report]) -> Recorded:
        """Return what its reports say."""
        raise NotImplementedError


def lines_of(report: Report) -> Iterator[dict[str, Any]]:
    for line in report.body.splitlines():
        if line.strip().startswith(b"{"):
            yield json.loads(line)


class Sentry(Agent):
    """sentry-sdk, whose init enables its integration of Celery."""

    def env(self, where: Where) -> dict[str, str]:
        return {"SENTRY_DSN": f"http://key@127.0.0.1:{where.port}/1"}

    def begin(self) -> None:
        import sentry_sdk

        sentry_sdk.init(traces_sample_rate=1.0)

    def read(self, reports: Iterable[Report]) -> Recorded:
        recorded = Recorded()
        for report in reports:
            for item in lines_of(report):
                name = item.get("transaction", "")
                if not name.startswith(TASK):
                    continue
                if item.get("type") == "transaction":
                    trace = item["contexts"]["trace"]
                    if trace["op"] == "queue.task.celery":
                        recorded.tries[name, trace["status"]] += 1
                elif "exception" in item:
                    recorded.errors[name, item["exception"]["values"][-1]["type"]] += 1
        return recorded


class OpenTelemetry(Agent):
    """The instrumentation of Celery, over the exporter by HTTP."""

    def env(self, where: Where) -> dict[str, str]:
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": where.url, "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_METRICS_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "none",
            "OTEL_BSP_SCHEDULE_DELAY": "500",
        }  # fmt: skip

    def begin(self) -> None:
        from celery.signals import worker_process_init
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.instrumentation.celery import CeleryInstrumentor
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        @worker_process_init.connect(weak=False)
        def init(**_: Any) -> None:
            provider = TracerProvider()
            provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
            trace.set_tracer_provider(provider)
            CeleryInstrumentor().instrument()  # type: ignore[no-untyped-call]

    def read(self, reports: Iterable[Report]) -> Recorded:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        recorded = Recorded()
        for report in reports:
            request = ExportTraceServiceRequest.FromString(report.body)
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        self._add(span, recorded)
        return recorded

    def _add(self, span: Any, recorded: Recorded) -> None:
        action, _, name = span.name.partition("/")
        if action != "run" or not name.startswith(TASK):
            return
        attributes = {each.key: each.value.string_value for each in span.attributes}
        outcome = attributes.get("redlock.outcome", "")
        status = ("unset", "ok", "error")[span.status.code]
        recorded.tries[name, f"{status}, {outcome}"] += 1
        if status == "error":
            kinds = [
                value.value.string_value
                for event in span.events for value in event.attributes
                if value.key == "exception.type"
            ]  # fmt: skip
            recorded.errors[name, ", ".join(kinds)] += 1


class Datadog(Agent):
    """ddtrace-run, which needs nothing in the app."""

    def env(self, where: Where) -> dict[str, str]:
        return {
            "DD_TRACE_AGENT_URL": where.url, "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
            "DD_REMOTE_CONFIGURATION_ENABLED": "false", "DD_TRACE_API_VERSION": "v0.4",
        }  # fmt: skip

    def answer(self, path: str) -> Any:
        return {"endpoints": ["/v0.4/traces"]} if path == "/info" else {"rate_by_service": {}}

    def read(self, reports: Iterable[Report]) -> Recorded:
        import msgpack

        recorded = Recorded()
        for report in reports:
            if not report.path.endswith("/traces"):
                continue
            for trace in msgpack.unpackb(report.body):
                for span in trace:
                    if span["name"] == "celery.run" and span["resource"].startswith(TASK):
                        self._add(span, recorded)
        return recorded

    def _add(self, span: Mapping[str, Any], recorded: Recorded) -> None:
        name, meta = span["resource"], span["meta"]
        status = "error" if span.get("error") else "ok"
        recorded.tries[name, f"{status}, {meta.get('celery.state', 'no state')}"] += 1
        if status == "error":
            recorded.errors[name, meta.get("error.type", "")] += 1


class NewRelic(Agent):
    """newrelic-admin run-program, which needs nothing in the app."""

    has_tls = True

    def env(self, where: Where) -> dict[str, str]:
        lines = [
            *("[newrelic]", "app_name = story", f"license_key = {'0' * 40}", "host = 127.0.0.1"),
            *(f"port = {where.port}", f"ca_bundle_path = {where.certificate}"),
            *(f"utilization.detect_{cloud} = false" for cloud in CLOUDS),
            "startup_timeout = 10.0", *where.more.get("lines", ()),
        ]  # fmt: skip
        file = where.folder / "newrelic.ini"
        file.write_text("\n".join(lines) + "\n")
        return {"NEW_RELIC_CONFIG_FILE": str(file)}

    def answer(self, path: str) -> Any:
        method = re.findall(r"[?&]method=(\w+)", path)
        replies = {
            "preconnect": {"redirect_host": "127.0.0.1"},
            "connect": {
                "agent_run_id": "1", "collect_errors": True, "collect_traces": True,
                "collect_analytics_events": True, "collect_error_events": True,
                "data_report_period": 60,
            },
        }  # fmt: skip
        return {"return_value": replies.get(method[0] if method else "", [])}

    def read(self, reports: Iterable[Report]) -> Recorded:
        recorded = Recorded()
        for report in reports:
            if "method=metric_data" in report.path:
                for spec, values in json.loads(report.body)[3]:
                    kind, _, name = spec["name"].partition("OtherTransaction/Celery/")
                    if name.startswith(TASK) and not spec["scope"] and kind in ("", "Errors/"):
                        recorded.tries[name, kind.lower().strip("/") or "all"] += values[0]
            elif "method=error_event_data" in report.path:
                for intrinsic, *_ in json.loads(report.body)[2]:
                    name = intrinsic["transactionName"].rpartition("/")[2]
                    recorded.errors[name, intrinsic["error.class"]] += 1
        return recorded


class Elastic(Agent):
    """elastic-apm, by the two calls of its page on Celery."""

    def env(self, where: Where) -> dict[str, str]:
        return {
            "ELASTIC_APM_SERVER_URL": where.url, "ELASTIC_APM_SERVICE_NAME": "story",
            "ELASTIC_APM_API_REQUEST_TIME": "500ms", "ELASTIC_APM_CENTRAL_CONFIG": "false",
            "ELASTIC_APM_CLOUD_PROVIDER": "none", "ELASTIC_APM_METRICS_INTERVAL": "0s",
        }  # fmt: skip

    def begin(self) -> None:
        from elasticapm import Client, instrument
        from elasticapm.contrib.celery import register_exception_tracking, register_instrumentation

        client = Client()
        instrument()
        register_exception_tracking(client)
        register_instrumentation(client)

    def read(self, reports: Iterable[Report]) -> Recorded:
        recorded = Recorded()
        names: dict[str, str] = {}  # by transaction id
        errors = []
        for report in reports:
            for line in lines_of(report):
                if transaction := line.get("transaction"):
                    # the agent reports the name of the function
                    name = TASK + (transaction["name"] or "").rpartition(".")[2]
                    names[transaction["id"]] = name
                    recorded.tries[name, f"{transaction['outcome']}, {transaction['result']}"] += 1
                elif error := line.get("error"):
                    errors.append(error)
        for error in errors:  # its transaction, which has no name yet, comes after it
            name = names.get(error.get("transaction_id"), "")
            recorded.errors[name, error["exception"]["type"]] += 1
        return recorded


class Scout(Agent):
    """scout-apm; the collector stands for its core agent, which it would download."""

    def env(self, where: Where) -> dict[str, str]:
        return {
            "SCOUT_MONITOR": "true", "SCOUT_KEY": "0" * 20, "SCOUT_NAME": "story",
            "SCOUT_CORE_AGENT_LAUNCH": "false", "SCOUT_CORE_AGENT_DOWNLOAD": "false",
            "SCOUT_CORE_AGENT_SOCKET_PATH": f"tcp://127.0.0.1:{where.frames}",
            "SCOUT_ERRORS_HOST": where.url,
        }  # fmt: skip

    def begin(self) -> None:
        import scout_apm.celery

        scout_apm.celery.install()

    def read(self, reports: Iterable[Report]) -> Recorded:
        recorded = Recorded()
        names: dict[str, str] = {}
        failed: set[str] = set()
        for report in reports:
            if report.path:
                for problem in json.loads(report.body)["problems"]:
                    recorded.errors[self._controller(problem), problem["exception_class"]] += 1
                continue
            for command in self._commands(json.loads(report.body)):
                [(kind, facts)] = command.items()
                if kind == "StartSpan" and facts["operation"].startswith(f"Job/{TASK}"):
                    names[facts["request_id"]] = facts["operation"].removeprefix("Job/")
                elif kind == "TagRequest" and facts["tag"] == "error":
                    failed.add(facts["request_id"])
        for request, name in names.items():
            recorded.tries[name, "error" if request in failed else "no error"] += 1
        return recorded

    def _controller(self, problem: Mapping[str, Any]) -> str:
        return str(problem["request_components"]["controller"])

    def _commands(self, message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        batch = message.get("BatchCommand")
        return [message] if batch is None else list(batch["commands"])


class Flower(Agent):
    """Flower, of which the API tells the state of each task, and /metrics the events."""

    pages = ("/api/tasks", "/metrics")

    def env(self, where: Where) -> dict[str, str]:
        return {"FLOWER_UNAUTHENTICATED_API": "true"}

    def command(self, broker: str, port: int) -> list[str]:
        app = "neighbours.watched_app"
        return [
            *("celery", "-A", app, "flower", "--address=127.0.0.1", f"--port={port}"),
            "--max-tasks=1000",
        ]

    def read(self, reports: Iterable[Report]) -> Recorded:
        recorded = Recorded()
        for report in reports:
            if report.path == "/api/tasks":
                for task in json.loads(report.body).values():
                    recorded.tries[task["name"], task["state"]] += 1
            else:
                for labels, number in samples(report, "flower_events_total"):
                    if labels["type"] == "task-failed":
                        recorded.errors[labels["task"], labels["type"]] += int(number)
        return recorded


class PrometheusExporter(Agent):
    """celery-prometheus-exporter, which counts the states of tasks by their names."""

    pages = ("/metrics",)

    def env(self, where: Where) -> dict[str, str]:
        return {}

    def command(self, broker: str, port: int) -> list[str]:
        return [*("celery-prometheus-exporter", "--broker", broker), f"--addr=127.0.0.1:{port}"]

    def read(self, reports: Iterable[Report]) -> Recorded:
        recorded = Recorded()
        for report in reports:
            for labels, number in samples(report, "celery_tasks_by_name"):
                if number and labels["name"].startswith(TASK):
                    recorded.tries[labels["name"], labels["state"]] += int(number)
                    if labels["state"] == "FAILURE":
                        recorded.errors[labels["name"], "FAILURE"] += int(number)
        return recorded


def samples(report: Report, metric: str) -> Iterator[tuple[dict[str, str], float]]:
    """Yield the labels and the value of each sample of a metric, in Prometheus's text."""
    for line in report.body.decode().splitlines():
        name, _, rest = line.partition("{")
        if name == metric:
            labels, _, value = rest.rpartition("} ")
            yield dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value)


AGENTS: Mapping[str, Agent] = {
    "sentry": Sentry(), "opentelemetry": OpenTelemetry(), "datadog": Datadog(),
    "new relic": NewRelic(), "elastic": Elastic(), "scout": Scout(),
    "flower": Flower(), "celery-prometheus-exporter": PrometheusExporter(),
}  # fmt: skip
