"""OpenTelemetry: what became of a run's lock, as attributes and events of its span."""

from __future__ import annotations

import sys
from typing import Any

from celery.signals import task_prerun

from celery_redlock.tasks import signals
from celery_redlock.tasks.delivery.delivery import utc_now
from celery_redlock.tasks.delivery.header import LockHeader
from celery_redlock.tasks.execution.run import run_of


def _on_span(sender: Any, event: Any, outcome: str) -> None:
    """Write what became of a run's own lock as attributes of its span, of others as events."""
    trace = sys.modules.get("opentelemetry.trace")
    span = None if trace is None else trace.get_current_span()
    if span is None or not span.is_recording():
        return
    attributes = {f"redlock.{name}": value for name, value in vars(event).items()}
    if not _is_own(sender, event.resource):
        span.add_event(f"redlock.{outcome}", attributes)
        return
    if outcome == "acquired":
        deferral = LockHeader.of(sender.request).deferral
        waited = {"redlock.waited": deferral.waited(utc_now()), "redlock.deferrals": deferral.count}
        attributes |= waited
    span.set_attributes({**attributes, "redlock.outcome": outcome})


def _is_own(sender: Any, resource: str) -> bool:
    """Tell whether a resource is what the running task's gate asks for, or was refused."""
    request = getattr(sender, "request", None)
    if request is None or request.called_directly:
        return False
    passage = run_of(request)
    return passage is None or bool(passage.lock.resource == resource)


def _on_acquired(sender: Any = None, event: Any = None, **_: Any) -> None:
    _on_span(sender, event, "acquired")


def _on_released(sender: Any = None, event: Any = None, **_: Any) -> None:
    if event.by == "holder":  # the span of a parent process is not the one of that run
        _on_span(sender, event, "released")


def _on_deferred(sender: Any = None, event: Any = None, **_: Any) -> None:
    _on_span(sender, event, "deferred")


def _on_skipped(sender: Any = None, event: Any = None, **_: Any) -> None:
    _on_span(sender, event, "skipped")


RECEIVERS = (
    (signals.lock_acquired, _on_acquired),
    (signals.lock_released, _on_released),
    (signals.lock_deferred, _on_deferred),
    (signals.lock_skipped, _on_skipped),
)


def connect_if_imported(app: Any = None) -> None:
    """Write to spans from now on if this process has imported OpenTelemetry.

    A signal without receivers costs a run nothing, so nothing is connected for a library that is
    installed and not used. app: the one that finalizes; it is not needed.
    Connecting twice does no harm: Celery keeps one of each receiver.
    """
    if "opentelemetry.trace" in sys.modules:
        for signal, receiver in RECEIVERS:
            signal.connect(receiver, weak=False)


def connect_at_first_run(**_: Any) -> None:
    """Look once more at the first run of a process, when all that start with it have started.

    Source: OpenTelemetry's instrumentation of Celery begins in a receiver of worker_process_init.
    """
    task_prerun.disconnect(connect_at_first_run)
    connect_if_imported()
