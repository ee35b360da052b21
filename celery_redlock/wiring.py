"""All that the package connects to Celery, in one list: receivers, bootsteps, commands.

Read this to learn when Celery calls which part. An import of the package connects the two hooks of
`celery_redlock_entry`, and what carries the options of a send by name: a worker that locks nothing
drops the latter. It also has Celery's `Task.apply` finalize an app that `redlock_tasks` is for. A
process gets `RECEIVERS` when a locked task is bound to an app, and a worker gets `PREPARATIONS` and
`STEPS` if its app locks tasks. Elsewhere only these connect anything, on demand:
- `operate/metrics.py`: receivers of the public signals, if `redlock_metrics` is set.
- `operate/tracing.py`: receivers of the public signals, if the process has imported OpenTelemetry.
- `operate/drill/worker.py`: a receiver and a step of the workers that the command `drill` starts.
- `lock/platform/forks.py`, `tasks/children/reaper.py`: hooks of the operating system's forks, not
  Celery's.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from celery import signals as celery_signals
from celery._state import _get_active_apps
from celery.worker.control import inspect_command

import celery_redlock_entry
from celery_redlock import compatibility, signals
from celery_redlock.errors import SettingsError
from celery_redlock.lock import client
from celery_redlock.lock.engine.events import Events
from celery_redlock.operate import control, lints, metrics, start_report, tracing
from celery_redlock.tasks import per_app, startup, task, untried, wrapping
from celery_redlock.tasks.body import notify_bodies
from celery_redlock.tasks.children import reaper
from celery_redlock.tasks.delivery.acknowledge import AcknowledgeInTurn
from celery_redlock.tasks.delivery.route import RecordQueueNames
from celery_redlock.tasks.execution import end
from celery_redlock.tasks.recovery.step import RecoverMessages
from celery_redlock.tasks.unique import claim, send
from celery_redlock.tasks.waiting import room


@dataclass(frozen=True)
class Receiver:
    """A receiver of one of Celery's signals. first: called before all other receivers of it."""

    signal: Any
    function: Callable[..., object]
    first: bool = False


# each with the name of its blueprint. Source: celery.bootsteps, `app.steps`
STEPS: tuple[tuple[str, type[Any]], ...] = (
    ("worker", startup.RefuseToStart),
    ("consumer", AcknowledgeInTurn),
    ("consumer", RecordQueueNames),
    ("consumer", room.WaitingRoom),
    ("consumer", RecoverMessages),
)
# called in this order in a worker's main process, before it makes its pool
PREPARATIONS: tuple[Callable[..., object], ...] = (
    per_app.note_worker,
    reaper.expect_children,
    metrics.prepare_metrics,
    wrapping.keep_tracebacks,  # not of prefork alone
)
RECEIVERS = (
    # any process
    Receiver(celery_signals.before_task_publish, send.carry_options),
    # a worker's main process, once it consumes, and when it ends
    Receiver(celery_signals.worker_ready, compatibility.warn_if_newer),
    Receiver(celery_signals.worker_ready, startup.report_nodes),
    Receiver(celery_signals.worker_ready, start_report.report_lints),
    Receiver(celery_signals.worker_ready, metrics.serve_metrics),
    Receiver(celery_signals.worker_shutdown, reaper.stop_watching),
    Receiver(celery_signals.worker_shutdown, metrics.close_metrics),
    # a worker's main process, for each message
    Receiver(celery_signals.task_received, untried.defer_untried),  # before `admit_received`
    Receiver(celery_signals.task_received, room.admit_received),
    Receiver(celery_signals.task_received, claim.note_claim),
    Receiver(celery_signals.task_received, startup.warn_if_unlocked),
    Receiver(celery_signals.task_revoked, claim.end_claim_of_revoked),
    Receiver(celery_signals.task_unknown, claim.end_claim_of_unread),
    Receiver(celery_signals.task_rejected, claim.end_claim_of_unread),
    Receiver(celery_signals.task_failure, claim.end_claim_of_killed),
    # a process that runs bodies
    Receiver(celery_signals.worker_process_init, per_app.note_worker),
    Receiver(celery_signals.worker_process_init, startup.connect_child),
    Receiver(celery_signals.worker_process_init, tracing.look_again),
    Receiver(celery_signals.task_prerun, tracing.connect_at_first_run),
    # first: another receiver may change the arguments that it is given
    Receiver(celery_signals.task_prerun, task.keep_arguments, first=True),
    # first: what another receiver raises past Exception would keep the lock for ever
    Receiver(celery_signals.task_postrun, end.release_after_run, first=True),
)
# called when an app has finalized; a SettingsError comes out of `finalize`
CHECKS = (startup.check_app, lints.refuse_errors)
INSPECT_COMMANDS = (control.redlock_held, control.redlock_waiting, control.redlock_settings)

_connected = False
_connecting = threading.RLock()  # a signal handler may bind a task in the thread that has it
_own_tasks: weakref.WeakKeyDictionary[Any, list[Any] | None] = weakref.WeakKeyDictionary()


def begin() -> None:
    """Connect the hooks of every app, and finish the apps that have finalized already.

    An import of the package calls it. A second call connects nothing again. Raises SettingsError
    for a wrong setting of a finalized app.
    """
    if per_app.on_locked_task is not on_locked_task:
        per_app.on_locked_task = on_locked_task
        client.own_of_app = per_app.redlock_of_given
        Events.wants = staticmethod(signals.wants)
        Events.send = staticmethod(signals.send)
        Events.on_loss = staticmethod(notify_bodies)
        tracing.connect_at_import_of_sdk()
        celery_signals.before_task_publish.connect(send.carry_options, weak=False)
        startup.finalize_before_apply()
        startup.end_without_traceback()
    finalized = [app for app in list(_get_active_apps()) if app.finalized]
    for app in finalized:
        watch(app)
    for app in finalized:
        # not while this thread finalizes the app: its settings may import the package
        # Source: celery.app.base: `finalize` keeps this mutex; `threading` itself asks `_is_owned`
        mutex = getattr(app, "_finalize_mutex", None)
        if not getattr(mutex, "_is_owned", bool)():  # unknown: what is wrong is raised early
            finish(app)


def watch(app: Any) -> None:
    """Let an app adopt the tasks that `redlock_tasks` names, and `finish` it once it finalizes."""
    # Source: celery.app.base: `_pending` has the app's own tasks, which no other app has shared
    if app not in _own_tasks:
        pending = getattr(app, "_pending", None)
        _own_tasks[app] = None if pending is None else list(pending)
        startup.AdoptingRegistry.of(app)
        celery_redlock_entry.at_end_of_finalize(app, finish)


def finish(app: Any) -> None:
    """Connect and check what a finalized app needs; a second call only checks.

    Raises SettingsError for a wrong setting. The workers of the app are prepared before the check,
    so a bootstep raises the error again and ends the worker.
    """
    per_app.checked.add(app)
    own_tasks = _own_tasks.get(app, ())
    if own_tasks is None:  # not known: then all count, and a worker without nodes is refused
        own_tasks = startup.locked_tasks(app)
    if any(
        isinstance(candidate, task.LockedTask) for candidate in own_tasks
    ):  # which evaluates a proxy
        per_app.owners.add(app)
    _own_tasks[app] = []
    tracing.connect_if_recording()
    prepare_workers(app)
    for check in CHECKS:
        check(app)


def on_locked_task(app: Any) -> None:
    """Connect the receivers; called when a locked task is bound to an app."""
    connect()
    if app in per_app.checked:  # the task was declared late, as by a receiver of `worker_init`
        prepare_workers(app)


def add_steps(worker: Any) -> None:
    """Add the bootsteps to the app of a worker."""
    for blueprint, step in STEPS:
        worker.app.steps[blueprint].add(step)


def prepare_workers(app: Any) -> None:
    """Prepare the workers of an app in this process, if the app needs it."""
    # Source: celery.worker.worker sends worker_init before it makes the blueprint out of the steps
    workers = [
        worker
        for worker in celery_redlock_entry.workers
        if worker.app is app and not worker.blueprint
    ]
    if not workers:
        return
    if not _needs_preparation(app):
        return
    connect()
    for worker in workers:
        celery_redlock_entry.workers.discard(worker)
        add_steps(worker)
        for prepare in PREPARATIONS:
            prepare(sender=worker)


def _needs_preparation(app: Any) -> bool:
    """Return whether a worker of an app locks tasks, or must be refused for a wrong setting.

    An app that has only shared locked tasks, and no nodes, still runs its other tasks.
    """
    try:
        startup.check_app(app)
        return startup.must_lock(app) or bool(
            startup.locked_tasks(app) and per_app.settings_of(app).nodes
        )
    except SettingsError:
        return True


def connect() -> None:
    """Connect all receivers and commands in this process. A second call changes nothing.

    A second call must not connect again a receiver that disconnected itself after the first run.
    """
    global _connected
    with _connecting:  # another thread waits here, and then has all receivers
        if _connected:
            return
        _connected = True
        for receiver in RECEIVERS:
            receiver.signal.connect(receiver.function, weak=False)
            if receiver.first:
                receivers = receiver.signal.receivers
                receivers.insert(0, receivers.pop())
        for command in INSPECT_COMMANDS:
            inspect_command()(command)
