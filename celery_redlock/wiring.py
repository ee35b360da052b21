"""All that the package connects to Celery, in one list: receivers, commands and the observer.

Read this to learn when Celery calls which part. Nothing else in the package connects a receiver,
but what is connected on demand: metrics, spans, and the consumer steps that these receivers add.
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
from celery_redlock.tasks import per_app, startup, task
from celery_redlock.tasks.children import forks, reaper
from celery_redlock.tasks.delivery import delivery, queue_names
from celery_redlock.tasks.execution import completion
from celery_redlock.tasks.signals import SignalObserver
from celery_redlock.tasks.unique import receivers
from celery_redlock.tasks.waiting import room


@dataclass(frozen=True)
class Connection:
    """One receiver of one of Celery's signals. first: it is called before all other receivers."""

    signal: Any
    receiver: Callable[..., object]
    first: bool = False


CONNECTIONS = (
    # any process
    Connection(celery_signals.before_task_publish, receivers.carry_options),
    # a worker's main process, before its pool is made
    Connection(celery_signals.worker_init, per_app.note_worker),
    Connection(celery_signals.worker_init, forks.expect_children),
    Connection(celery_signals.worker_init, room.add_waiting_room),
    Connection(celery_signals.worker_init, queue_names.add_queue_names),
    Connection(celery_signals.worker_init, startup.adopt_in_worker),
    Connection(celery_signals.worker_init, startup.add_eventlet_check),
    Connection(celery_signals.worker_init, exporter.prepare_metrics),
    # the same, once it consumes, and when it ends
    Connection(celery_signals.worker_ready, startup.report_nodes),
    Connection(celery_signals.worker_ready, lints.report_lints),
    Connection(celery_signals.worker_ready, exporter.serve_metrics),
    Connection(celery_signals.worker_shutdown, reaper.stop_watching),
    Connection(celery_signals.worker_shutdown, exporter.close_metrics),
    # the same, for each message
    Connection(celery_signals.task_received, delivery.note_receipt),
    Connection(celery_signals.task_received, room.admit_received),
    Connection(celery_signals.task_received, completion.note_claim),
    Connection(celery_signals.task_received, startup.warn_if_unlocked),
    Connection(celery_signals.task_revoked, completion.end_claim_of_revoked),
    Connection(celery_signals.task_unknown, completion.end_claim_of_unread),
    Connection(celery_signals.task_rejected, completion.end_claim_of_unread),
    Connection(celery_signals.task_failure, completion.end_claim_of_killed),
    # a process that runs bodies
    Connection(celery_signals.worker_process_init, per_app.note_worker),
    Connection(celery_signals.task_prerun, tracing.connect_at_first_run),
    # first: another receiver may change the arguments that it is given
    Connection(celery_signals.task_prerun, task.keep_arguments, first=True),
    # first: what another receiver raises past Exception would keep the lock for ever
    Connection(celery_signals.task_postrun, completion.release_after_run, first=True),
)
# Celery calls these in any order
ON_FINALIZE = (startup.check_app, lints.refuse_errors, tracing.connect_if_imported)
INSPECT_COMMANDS = (control.redlock_held, control.redlock_waiting)


def connect() -> None:
    """Connect all of it; called once, when the package is imported."""
    for connection in CONNECTIONS:
        connection.signal.connect(connection.receiver, weak=False)
        if connection.first:
            known = connection.signal.receivers
            known.insert(0, known.pop())
    for receiver in ON_FINALIZE:
        connect_on_app_finalize(receiver)
    for command in INSPECT_COMMANDS:
        inspect_command()(command)
    Redlock.observer = SignalObserver()
