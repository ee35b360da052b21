"""All that the package connects to Celery, in one list: receivers, bootsteps, commands, observer.

Read this to learn when Celery calls which part. Elsewhere only these connect anything, on demand:
- `operate/metrics/counters.py`: receivers of the public signals, if `redlock_metrics` is set.
- `operate/tracing.py`: receivers of the public signals, if the process has imported OpenTelemetry.
- `lock/client.py`, `tasks/children/forks.py`: fork hooks of the operating system's, not Celery's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from celery import signals as celery_signals
from celery._state import connect_on_app_finalize
from celery.worker.control import inspect_command

from celery_redlock.lock.client import Redlock
from celery_redlock.operate import control, tracing
from celery_redlock.operate.lints import startup as lints
from celery_redlock.operate.metrics import exporter
from celery_redlock.tasks import per_app, startup, task, wrapping
from celery_redlock.tasks.children import forks, reaper
from celery_redlock.tasks.delivery.queue_names import RecordQueueNames
from celery_redlock.tasks.execution import completion, untried
from celery_redlock.tasks.unique import receivers
from celery_redlock.tasks.waiting import room


@dataclass(frozen=True)
class Connection:
    """One receiver of one of Celery's signals. first: it is called before all other receivers."""

    signal: Any
    receiver: Callable[..., object]
    first: bool = False


@dataclass(frozen=True)
class Step:
    """One bootstep. blueprint: "worker" or "consumer". Source: celery.bootsteps, `app.steps`."""

    blueprint: str
    step: type[Any]


STEPS = (
    Step("worker", startup.RefuseEventlet),
    Step("consumer", RecordQueueNames),
    Step("consumer", room.WaitingRoom),
)


def add_steps(sender: Any, **_: Any) -> None:
    """Add the bootsteps to the app of a worker; an app that runs no worker gets none."""
    for one in STEPS:
        sender.app.steps[one.blueprint].add(one.step)


CONNECTIONS = (
    # any process
    Connection(celery_signals.before_task_publish, receivers.carry_options),
    # a worker's main process, before its pool is made
    Connection(celery_signals.worker_init, per_app.note_worker),
    Connection(celery_signals.worker_init, forks.expect_children),
    Connection(celery_signals.worker_init, add_steps),
    Connection(celery_signals.worker_init, startup.adopt_in_worker),
    Connection(celery_signals.worker_init, exporter.prepare_metrics),
    Connection(celery_signals.worker_init, wrapping.keep_tracebacks),  # not of prefork alone
    # the same, once it consumes, and when it ends
    Connection(celery_signals.worker_ready, startup.report_nodes),
    Connection(celery_signals.worker_ready, lints.report_lints),
    Connection(celery_signals.worker_ready, exporter.serve_metrics),
    Connection(celery_signals.worker_shutdown, reaper.stop_watching),
    Connection(celery_signals.worker_shutdown, exporter.close_metrics),
    # the same, for each message
    Connection(celery_signals.task_received, untried.defer_untried),  # before `admit_received`
    Connection(celery_signals.task_received, room.admit_received),
    Connection(celery_signals.task_received, completion.note_claim),
    Connection(celery_signals.task_received, startup.warn_if_unlocked),
    Connection(celery_signals.task_revoked, completion.end_claim_of_revoked),
    Connection(celery_signals.task_unknown, completion.end_claim_of_unread),
    Connection(celery_signals.task_rejected, completion.end_claim_of_unread),
    Connection(celery_signals.task_failure, completion.end_claim_of_killed),
    # a process that runs bodies
    Connection(celery_signals.worker_process_init, per_app.note_worker),
    Connection(celery_signals.worker_process_init, startup.connect_child),
    Connection(celery_signals.worker_process_init, tracing.look_again),
    Connection(celery_signals.worker_process_init, wrapping.keep_tracebacks),
    Connection(celery_signals.task_prerun, tracing.connect_at_first_run),
    # first: another receiver may change the arguments that it is given
    Connection(celery_signals.task_prerun, task.keep_arguments, first=True),
    # first: what another receiver raises past Exception would keep the lock for ever
    Connection(celery_signals.task_postrun, completion.release_after_run, first=True),
)
# when an app finalizes; Celery calls these in any order
ON_FINALIZE = (startup.check_app, lints.refuse_errors, tracing.connect_if_recording)
INSPECT_COMMANDS = (control.redlock_held, control.redlock_waiting)

_connected = False


def connect() -> None:
    """Connect all of it, when the package is imported. A second call changes nothing.

    By then a worker may have replaced the observer, and disconnected what only its first run needs.
    """
    global _connected
    if _connected:
        return
    _connected = True
    for connection in CONNECTIONS:
        connection.signal.connect(connection.receiver, weak=False)
        if connection.first:
            in_order = connection.signal.receivers
            in_order.insert(0, in_order.pop())
    for receiver in ON_FINALIZE:
        connect_on_app_finalize(receiver)
    for command in INSPECT_COMMANDS:
        inspect_command()(command)
    Redlock.observer = tracing.TracingObserver()
