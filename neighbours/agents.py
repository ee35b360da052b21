"""The agents: each watches the story, and reports to a collector on loopback."""

from __future__ import annotations

from functools import partial
from typing import Any

from neighbours.row import DOES_NOT, NOT_RUN, WITH_SETTING, Neighbour, Seen
from neighbours.run import Run


def watched(run: Run, agent: str, wrapper: tuple[str, ...] = (), **more: Any) -> Seen:
    """Run the story beside an agent. more: for the agent."""
    return run.beside_servers(
        "neighbours.watched_story", app="neighbours.watched_app", wrapper=wrapper, options=("-E",),
        more={"agent": agent, **more},
    )  # fmt: skip


def new_relic(run: Run, lines: tuple[str, ...] = ()) -> Seen:
    """Run the story beside its agent. lines: of newrelic.ini."""
    return watched(run, "new relic", ("newrelic-admin", "run-program"), lines=lines)


def crons(run: Run, *, excluded: bool) -> Seen:
    """Run periodic tasks beside Sentry Crons. excluded: from the check-ins of beat."""
    return run.story(
        module="neighbours.crons_story", app="neighbours.crons_app", concurrency=4, patience=120.0,
        more={"excluded": excluded},
    )  # fmt: skip


SENTRY = ("sentry-sdk==2.75.0",)
NEW_RELIC = ("newrelic==14.1.0",)
IGNORE = "error_collector.ignore_classes = celery.exceptions:Ignore celery_redlock.errors:Deferred"

NEIGHBOURS: tuple[Neighbour, ...] = (
    Neighbour(
        "Sentry",
        "agents",
        "A deferred or skipped try is a transaction with the status aborted, and no error.",
        partial(watched, agent="sentry"),
        SENTRY,
    ),
    Neighbour(
        "Sentry Crons",
        "agents",
        "A skipped run has no check-in, and a deferred one has it as it runs; without the setting, "
        "the check-in that beat opens for a skipped run is never closed.",
        partial(crons, excluded=True),
        SENTRY,
        verdict=WITH_SETTING,
        setting="`exclude_beat_tasks=[ENTRY]`, and `sentry_sdk.monitor` around the body",
    ),
    Neighbour(
        "OpenTelemetry",
        "agents",
        "A deferred or skipped try is a span without an error; redlock.outcome says what it is.",
        partial(watched, agent="opentelemetry"),
        (
            "opentelemetry-instrumentation-celery==0.66b2",
            "opentelemetry-sdk==1.45.2",
            "opentelemetry-exporter-otlp-proto-http==1.45.2",
        ),
    ),
    Neighbour(
        "Datadog",
        "agents",
        "A deferred or skipped try is a span with the state IGNORED, and no error.",
        partial(watched, agent="datadog", wrapper=("ddtrace-run",)),
        ("ddtrace==4.16.0", "msgpack==1.2.4"),
        distributions=("ddtrace",),
    ),
    Neighbour(
        "New Relic",
        "agents",
        "A deferred or skipped try is a transaction, and without this setting an error, too.",
        partial(new_relic, lines=(IGNORE,)),
        NEW_RELIC,
        verdict=WITH_SETTING,
        setting=IGNORE,
    ),
    Neighbour(
        "Elastic APM",
        "agents",
        "A deferred or skipped try has the outcome unknown, and no error; a Retry has failure.",
        partial(watched, agent="elastic"),
        ("elastic-apm==6.26.2",),
    ),
    Neighbour(
        "Scout",
        "agents",
        "A deferred or skipped try is a job without an error.",
        partial(watched, agent="scout"),
        ("scout-apm==4.0.0",),
    ),
    Neighbour(
        "Flower",
        "agents",
        "A skipped run has the state SKIPPED; neither it nor a deferral counts as failed.",
        partial(watched, agent="flower"),
        ("flower==2.2.0",),
    ),
    Neighbour(
        "celery-prometheus-exporter",
        "agents",
        "An event of a type that Celery does not have, as task-deferred, is a KeyError in it: it "
        "counts anew, after 5 s in which it hears no event.",
        partial(watched, agent="celery-prometheus-exporter"),
        ("celery-prometheus-exporter==1.7.0",),
        verdict=DOES_NOT,
        faults=frozenset(("no try is reported", "no error of a body is reported")),
    ),
    Neighbour(
        "celery-exporter",
        "agents",
        "It counts the events of workers.",
        verdict=NOT_RUN,
        reason="version 1.5.1 of PyPI has no wheel for Python 3.11, and does not build; the "
        "other project of this name is a container image, and not on PyPI",
        by_hand="run `danihodovic/celery-exporter` with CE_BROKER_URL, start the workers with -E, "
        "and read /metrics",
    ),
)
