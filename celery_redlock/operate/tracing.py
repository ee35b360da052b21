"""OpenTelemetry: the outcome of a run's lock, as attributes and events of the run's span.

A public signal without receivers costs nothing, so a process that records no spans has none. It may
begin to record at any time. So it checks for a tracer provider when an app finalizes, before its
first run, and at its first lock after the import of the SDK.
"""

from __future__ import annotations

import sys
from typing import Any

from celery.signals import task_prerun

from celery_redlock import signals
from celery_redlock.tasks.delivery.delivery import header_of
from celery_redlock.tasks.execution.run import run_of
from celery_redlock.tasks.per_app import time_of_nodes

TRACE_MODULE = "opentelemetry.trace"
SDK_MODULE = "opentelemetry.sdk.trace"
OUTCOMES = {  # by signal
    signals.lock_acquired: "acquired",
    signals.lock_released: "released",
    signals.lock_deferred: "deferred",
    signals.lock_skipped: "skipped",
}


def may_record() -> bool:
    """Return whether this process may record spans: by the SDK, or by another tracer provider."""
    trace = sys.modules.get(TRACE_MODULE)  # not sufficient: redis-py imports it, too
    if trace is None or SDK_MODULE in sys.modules:
        return trace is not None
    provider = trace.get_tracer_provider()
    return not isinstance(provider, (trace.ProxyTracerProvider, trace.NoOpTracerProvider))


def connect_if_recording() -> None:
    """Write to spans from now on if this process records spans; a second call changes nothing."""
    if may_record():
        for signal in OUTCOMES:
            signal.connect(_write_to_span, weak=False)


def connect_at_import_of_sdk() -> None:
    """Check again at the first acquired lock after the import of the SDK."""
    signals.connect_on_import(SDK_MODULE, connect_if_recording)


def connect_at_first_run(**_: Any) -> None:
    """Check before the first run of a process, after the receivers of worker_process_init."""
    # Source: OpenTelemetry's instrumentation of Celery begins in one of these
    task_prerun.disconnect(connect_at_first_run)
    connect_if_recording()


def look_again(**_: Any) -> None:
    """Check at the first run of a child, too: its parent may have had an eager run before."""
    task_prerun.connect(connect_at_first_run, weak=False)


def _write_to_span(signal: Any = None, sender: Any = None, event: Any = None, **_: Any) -> None:
    """Write an event to the current span.

    The event of the run's own lock becomes attributes of the span, that of another lock an event.
    """
    outcome = OUTCOMES[signal]
    span = sys.modules[TRACE_MODULE].get_current_span()
    if not span.is_recording():
        return
    if outcome == "released" and event.by != "holder":
        return  # the span of a parent process is not the one of that run
    attributes = {f"redlock.{name}": value for name, value in vars(event).items()}
    if not _is_own(sender, event.resource):
        span.add_event(f"redlock.{outcome}", attributes)
        return
    if outcome == "acquired":
        deferral = header_of(sender.request).deferral
        waited = deferral.waited(time_of_nodes(sender.app))
        attributes |= {"redlock.waited": waited, "redlock.deferrals": deferral.count}
    span.set_attributes({**attributes, "redlock.outcome": outcome})


def _is_own(sender: Any, resource: str) -> bool:
    """Return whether a resource is the lock that the running task needs for its own run."""
    request = getattr(sender, "request", None)
    if request is None or request.called_directly:
        return False
    run = run_of(request)
    return run is None or bool(run.lock.resource == resource)
