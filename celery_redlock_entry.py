"""The module that each `celery` process imports: a command group and two hooks.

It is outside the package, because Celery imports it in every process, also for an app that locks
nothing. It imports the package only if that is needed: `celery redlock` is called, `redlock_tasks`
is set, or a task has a `lock_*` option. The package imports this module, too, so the hooks are
connected once.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import click
from celery import bootsteps
from celery.exceptions import ImproperlyConfigured
from celery.signals import worker_init

INSPECT_COMMANDS = ("redlock_held", "redlock_waiting", "redlock_settings")

workers: weakref.WeakSet[Any] = weakref.WeakSet()  # workers of this process, not prepared yet


class LateGroup(click.Command):
    """Stands for the command group `redlock`, which is imported when it is called."""

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        """Return a context of the group; click then runs the command of the context."""
        try:
            from celery_redlock.operate.cli import redlock as group
        except ImproperlyConfigured as error:  # of an app that has finalized before the import
            raise click.ClickException(str(error)) from None
        return group.make_context(*args, **options)


redlock = LateGroup("redlock", help="Show the locks of tasks, and repair what is wrong with them.")


def without_proxy(app: Any) -> Any:
    """Return the app behind a proxy such as `celery.current_app`, which cannot be a dict key."""
    return app._get_current_object() if hasattr(type(app), "_get_current_object") else app


def lock_names(task: Any) -> set[str]:
    """Return the `lock_*` attributes that a task sets and none of its bases declares."""
    task_class, *bases = type(task).__mro__
    names = {name for name in vars(task_class) if name.startswith("lock_")}
    return {name for name in names if not any(name in vars(base) for base in bases)}


def at_end_of_finalize(app: Any, finish: Callable[[Any], object]) -> None:
    """Call `finish` at the end of an app's `finalize`, so that its errors come out of `finalize`.

    Source: celery.app.base: `finalize` calls this `send` last, and only logs what a receiver
    raises. An error that is raised earlier would leave the app with only some of its tasks.
    """
    signal = app.on_after_finalize
    send = signal.send

    def send_and_finish(*args: Any, **options: Any) -> Any:
        signal.send = send
        responses = send(*args, **options)
        finish(app)
        return responses

    signal.send = send_and_finish


def look_at_app(app: Any) -> None:
    """Watch an app that finalizes, or check its tasks at the end of `finalize`."""
    if _is_needed(app):
        from celery_redlock import wiring

        wiring.watch(app)
    else:
        at_end_of_finalize(app, _look_at_tasks)


def _look_at_tasks(app: Any) -> None:
    if _is_needed(app) or any(map(lock_names, app.tasks.values())):
        from celery_redlock import wiring

        wiring.finish(app)


def look_at_worker(sender: Any, **_: Any) -> None:
    """Register a worker, and check its tasks now unless its app has yet to finalize."""
    sender.app = without_proxy(sender.app)
    workers.add(sender)
    if sender.app.finalized or not _hears_finalize:
        try:
            _look_at_tasks(sender.app)
        except (ImproperlyConfigured, ImportError) as error:  # Celery would only log it
            _end_at_start(sender, error)


def _end_at_start(worker: Any, error: Exception) -> None:
    """Add a bootstep that raises the error. If the package is imported, its own bootstep does."""
    if "celery_redlock.wiring" in sys.modules:
        return

    class RefuseToStart(bootsteps.Step):
        def __init__(self, *_: Any, **__: Any) -> None:
            raise error

    worker.app.steps["worker"].add(RefuseToStart)


def _is_needed(app: Any) -> bool:
    return "celery_redlock.wiring" in sys.modules or bool(app.conf.get("redlock_tasks"))


try:
    from celery._state import connect_on_app_finalize
except ImportError:  # `celery_redlock.compatibility` reports it when the package is imported
    _hears_finalize = False
else:
    _hears_finalize = True
    connect_on_app_finalize(look_at_app)
worker_init.connect(look_at_worker, weak=False)
if not set(INSPECT_COMMANDS).isdisjoint(sys.argv):
    # `celery inspect` knows only registered commands, and loads no tasks
    from celery_redlock.wiring import connect

    connect()
