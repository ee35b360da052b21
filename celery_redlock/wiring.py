"""All that the package connects to Celery, in one list: receivers, bootsteps, commands.

Read this to learn when Celery calls which part. An import of the package connects the two hooks of
`celery_redlock_entry`, and what carries the options of a send by name: a worker that locks nothing
drops the latter. It also has Celery's `Task.apply` finalize an app that `redlock_tasks` is for. A
process gets `RECEIVERS` when a locked task is bound to an app, and a worker gets `PREPARATIONS` and
`STEPS` if its app locks tasks. Elsewhere only these connect anything, on demand:
- `operate/metrics.py`: receivers of the public signals, if `redlock_metrics` is set.
- `operate/tracing.py`: receivers of the public signals, if the process has imported OpenTelemetry.
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
    """One receiver of one of Celery's signals. first: it is called before all other receivers."""

    signal: Any
    function: Callable[..., object]
    first: bool = False


# by the blueprint that they join. Source: celery.bootsteps, `app.steps`
STEPS: tuple[tuple[str, type[Any]], ...] = (
    ("worker", startup.RefuseToStart),
    ("consumer", AcknowledgeInTurn),
    ("consumer", RecordQueueNames),
    ("consumer", room.WaitingRoom),
    ("consumer", RecoverMessages),
)
# a worker's main process, before its pool is made; in this order
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
    # the same, for each message
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
# when an app has finalized; the first one that raises SettingsError ends `finalize`
CHECKS = (startup.check_app, lints.refuse_errors)
INSPECT_COMMANDS = (control.redlock_held, control.redlock_waiting, control.redlock_settings)

_connected = False
_connecting = threading.RLock()  # a signal handler may bind a task in the thread that has it
_own_tasks: weakref.WeakKeyDictionary[Any, list[Any] | None] = weakref.WeakKeyDictionary()


def begin() -> None:
    """Look at each app that finalizes from now on, and at those that have finalized before.

    An import of the package calls it; a second call connects nothing anew. Raises SettingsError.
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
    finalized = [app for app in list(_get_active_apps()) if app.finalized]
    for app in finalized:
        watch(app)
    for app in finalized:
        # not if this thread is just finalizing it: its settings may import the package
        # Source: celery.app.base: `finalize` keeps this mutex; `threading` itself asks `_is_owned`
        mutex = getattr(app, "_finalize_mutex", None)
        if not getattr(mutex, "_is_owned", bool)():  # unknown: what is wrong is raised early
            finish(app)


def watch(app: Any) -> None:
    """Adopt the tasks of an app that `redlock_tasks` names, and finish when it has finalized."""
    # Source: celery.app.base: `_pending` has the app's own tasks, which no other app has shared
    if app not in _own_tasks:
        pending = getattr(app, "_pending", None)
        _own_tasks[app] = None if pending is None else list(pending)
        startup.AdoptingRegistry.of(app)
        celery_redlock_entry.at_end_of_finalize(app, finish)


def finish(app: Any) -> None:
    """Connect and check what an app needs that has finalized; a second call only checks.

    Raises SettingsError. A worker of the app is prepared before that: its step raises it again.
    """
    per_app.checked.add(app)
    own = _own_tasks.get(app, ())
    if own is None:  # not known: then all count, and a worker without nodes is refused
        own = startup.locked_tasks(app)
    if any(isinstance(one, task.LockedTask) for one in own):  # which evaluates a proxy
        per_app.owners.add(app)
    _own_tasks[app] = []
    tracing.connect_if_recording()
    prepare_workers(app)
    for check in CHECKS:
        check(app)


def on_locked_task(app: Any) -> None:
    """Connect what a process needs for locked tasks; one is bound to this app."""
    connect()
    if app in per_app.checked:  # it was declared late, as by a receiver of `worker_init`
        prepare_workers(app)


def add_steps(worker: Any) -> None:
    """Add the bootsteps to the app of a worker; an app that runs no worker gets none."""
    for blueprint, step in STEPS:
        worker.app.steps[blueprint].add(step)


def prepare_workers(app: Any) -> None:
    """Prepare the workers of this process that run an app, if it locks tasks or has a wrong one."""
    # Source: celery.worker.worker sends worker_init before it makes the blueprint out of the steps
    workers = [one for one in celery_redlock_entry.workers if one.app is app and not one.blueprint]
    if not workers:
        return
    if not _concerns(app):
        return
    connect()
    for worker in workers:
        celery_redlock_entry.workers.discard(worker)
        add_steps(worker)
        for prepare in PREPARATIONS:
            prepare(sender=worker)


def _concerns(app: Any) -> bool:
    """Return whether a worker of an app locks tasks, or is to be refused.

    An app that only has shared locked tasks, and no nodes, can run everything else.
    """
    try:
        startup.check_app(app)
        return startup.must_lock(app) or bool(
            startup.locked_tasks(app) and per_app.settings_of(app).nodes
        )
    except SettingsError:
        return True


def connect() -> None:
    """Connect all of it to this process, when it has a locked task. A second call changes nothing.

    By then a worker may have disconnected what only its first run needs.
    """
    global _connected
    with _connecting:  # another thread may send at once, and would find only some receivers
        if _connected:
            return
        _connected = True
        for one in RECEIVERS:
            one.signal.connect(one.function, weak=False)
            if one.first:
                in_order = one.signal.receivers
                in_order.insert(0, in_order.pop())
        for command in INSPECT_COMMANDS:
            inspect_command()(command)
