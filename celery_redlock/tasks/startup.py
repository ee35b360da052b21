"""What an app does when it finalizes, and what its worker checks at the start.

An app adopts the tasks of others that `redlock_tasks` names, and is checked. Its worker logs which
nodes answer. Not here: when Celery calls which part (the module `wiring`), and the checks of a
declaration (`declaration.py`).
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import sys
import traceback
import types
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import PurePath
from typing import Any

from celery import Task, bootsteps, current_app
from celery.app.registry import TaskRegistry

from celery_redlock import anchors, compatibility
from celery_redlock.compatibility import find
from celery_redlock.errors import SettingsError
from celery_redlock.lock.node_status import (
    ask_nodes,
    compare_shared_settings,
    shared_settings_of,
)
from celery_redlock.lock.reports import NodeList
from celery_redlock.lock.server.error_hints import passage_of
from celery_redlock.tasks import per_app
from celery_redlock.tasks.children.reaper import watch_children
from celery_redlock.tasks.declaration import ENTRY_ATTRIBUTE, config_of, to_leave_out
from celery_redlock.tasks.delivery.header import HEADER, LockHeader
from celery_redlock.tasks.per_app import redlock_of, settings_of
from celery_redlock.tasks.settings.app import CELERY_PREFIX, OptionSource, pattern_for
from celery_redlock.tasks.settings.levels import find_nodes
from celery_redlock.tasks.settings.options import OPTION
from celery_redlock.tasks.task import LockedTask, check_declaration, prepare_apply
from celery_redlock_entry import lock_names, without_proxy

logger = logging.getLogger(__name__)

# options of celery-once and celery-singleton that change what counts as the same call
# without it, what is an option in vain is not told from an annotation, and both pass
_resolve_all = find(
    "celery.app.annotations:resolve_all", lambda said, task: [vars(type(task))] if said else []
)
_add_autoretry_behaviour = find("celery.app.autoretry:add_autoretry_behaviour", None)

FOREIGN_OPTIONS = {
    "once": "set lock_args to its keys, and lock_unique_for to its timeout",
    "raise_on_duplicate": 'set lock_on_duplicate="fail"',
    "unique_on": "set lock_args",
}
_warned_of: set[str] = set()  # names of tasks


def install(app: Any) -> None:
    """Lock the tasks of an app that `redlock_tasks` names, in this process; once is enough.

    Importing the package does the same for every app, and Celery's command line imports it if the
    setting is there. Raises SettingsError at once if the app has finalized, else when it finalizes.
    """
    app = without_proxy(app)
    if app.finalized:
        check_app(app)


def load_app(app: Any) -> Any:
    """Load all tasks of an app, lock those that `redlock_tasks` names, and return it unproxied."""
    app = without_proxy(app)
    app.loader.import_default_modules()
    app.finalize()
    install(app)
    return app


def check_app(app: Any) -> None:
    """Raise SettingsError for the first wrong task or setting of an app that has finalized.

    The settings of an app that locks no task are not looked at: another library may have them.
    """
    registry = AdoptingRegistry.of(app)
    for name, task in registry.items():
        registry.check(name, task)
    if locks_tasks(app):
        settings_of(app)
        for task in locked_tasks(app):
            check_declaration(task)


def locks_tasks(app: Any) -> bool:
    """Return whether an app has locked tasks, or names some of others in `redlock_tasks`."""
    return bool(app.conf.get("redlock_tasks") or locked_tasks(app))


def must_lock(app: Any) -> bool:
    """Return whether an app that locks tasks does so by its own declaration.

    The others have locked tasks that all apps share, and need no nodes until they use one.
    """
    return app in per_app.owners or bool(app.conf.get("redlock_tasks"))


def locked_tasks(app: Any) -> list[LockedTask]:
    tasks = (task for name, task in app.tasks.items() if not name.startswith(CELERY_PREFIX))
    return [task for task in tasks if isinstance(task, LockedTask)]


def takes_lock(task: LockedTask, queue: str) -> bool:
    """Return whether a run in a queue takes a lock; True for wrong options, which runs report."""
    try:
        return config_of(task).options_for(queue).key is not False
    except SettingsError:
        return True


def entry_for(app: Any, name: str) -> str | None:
    """Return the entry of `redlock_tasks` for a task's name, None if there is none."""
    if name.startswith(CELERY_PREFIX):
        return None
    entries = app.conf.get("redlock_tasks")
    # a wrong type raises at each use of a task that it names: such a task never runs unlocked
    patterns = entries if isinstance(entries, (Mapping, list, tuple, set)) else ()
    return pattern_for(name, map(str, patterns))


class AdoptingRegistry(TaskRegistry):
    """An app's tasks; those that `redlock_tasks` names become LockedTasks as they are added.

    Celery adds a task here before it binds it: with the app, as a shared task, or late. What is
    wrong with a task is raised then, but not while the app finalizes: see `check_app`.
    """

    @classmethod
    def of(cls, app: Any) -> Any:
        """Adopt the tasks of an app, and all that are added later; return its registry."""
        registry = app._tasks
        if not isinstance(registry, AdoptingRegistry):
            registry_class = type(registry)
            registry.__class__ = type(registry_class.__name__, (cls, registry_class), {})
        registry.app = app
        adopted = [task for name, task in registry.items() if registry.adopt(name, task)]
        for task in adopted:  # all of them are adopted by now, even if one of them is wrong
            if task.__bound__:
                task.bind(app)
        return registry

    def __setitem__(self, name: str, task: Any) -> None:
        """Add a task; adopt it if it has an entry. Raises SettingsError."""
        self.adopt(name, task)
        if self.app in per_app.checked:
            self.check(name, task)
        super().__setitem__(name, task)

    def pattern_for(self, name: str) -> str | None:
        """Return the entry of `redlock_tasks` for a task's name, None if there is none."""
        return entry_for(self.app, name)

    def adopt(self, name: str, task: Any) -> bool:
        """Adopt a task that has an entry; return whether it was adopted now."""
        pattern = self.pattern_for(name)
        if pattern is None or isinstance(task, LockedTask):
            return False
        adopt_task(task, pattern)
        return True

    def check(self, name: str, task: Any) -> None:
        """Raise SettingsError if a task has options of a lock and takes none, or has them twice."""
        if isinstance(task, LockedTask):
            if self.pattern_for(name) == name and ENTRY_ATTRIBUTE not in type(task).__dict__:
                hint = (
                    f"{name} is a LockedTask already: set lock_* on it, or from outside by "
                    f'Celery\'s task_annotations = {{{name!r}: {{"lock_ttl": 30}}}}'
                )
                entry = self.app.conf.redlock_tasks[name]
                raise OptionSource.at("app", f"tasks[{name!r}]").wrong(entry, hint)
            return
        # other names, and those that another base declares, are not ours
        ineffective = {
            attribute for attribute in lock_names(task) if attribute.removeprefix("lock_") in OPTION
        }
        if not ineffective or name.startswith(CELERY_PREFIX):
            return
        # annotations are set on all tasks that they match
        ineffective.difference_update(*_resolve_all(self.app.annotations, type(task)))
        for attribute in sorted(ineffective):
            value = vars(type(task))[attribute]
            hint = "has no effect without base=LockedTask: the task would run without a lock"
            option = attribute.removeprefix("lock_")
            raise OptionSource.at("task", option, name).wrong(value, hint)


def adopt_task(task: Any, pattern: str) -> None:
    """Make a task of others a LockedTask, which goes by an entry of `redlock_tasks`.

    The task keeps its identity, for others may hold it, and gets a new class. LockedTask comes
    first, for the task's own `apply_async` need not know `lock`. An attribute `lock` of its own
    stays.
    """
    cls = type(task)
    run = task.__dict__.pop("run", None)  # autoretry's, or one that its __init__ has set
    has_autoretry = _add_autoretry_behaviour is not None and "_orig_run" in task.__dict__
    autoretry = run if has_autoretry else None  # else the lock is taken around all that it does
    if autoretry is not None:
        run = task.__dict__.pop("_orig_run")
    excluded = getattr(task, "dont_autoretry_for", None) or LockedTask.dont_autoretry_for
    namespace = {
        ENTRY_ATTRIBUTE: pattern,
        "dont_autoretry_for": excluded,
        "__module__": cls.__module__,
    }
    if cls.Request != Task.Request:
        namespace["Request"] = cls.Request
    for name in ("lock", "lock_for", "lock_options"):
        if inspect.getattr_static(task, name, None) is not None:
            namespace[name] = inspect.getattr_static(cls, name, None)
    if run is not None and run != task.run:
        namespace["run"] = staticmethod(run)
    adopted = types.new_class(
        cls.__name__, (LockedTask, cls), {}, lambda adopted: adopted.update(namespace)
    )
    adopted.__qualname__ = cls.__qualname__
    task.__class__ = adopted
    if autoretry is not None:  # around the wrapper, as for a task that is made a LockedTask
        settings = dict(inspect.getclosurevars(autoretry).nonlocals)
        settings["dont_autoretry_for"] = settings["dont_autoretry_for"] or excluded
        del settings["task"]
        _add_autoretry_behaviour(task, **settings)


def end_without_traceback() -> None:
    """Have Celery's command line end with the line of a SettingsError alone.

    Its frames are those of click, Celery and this package, and the line names the setting. Another
    program, and one with a hook of its own, keeps its traceback.
    """
    if not is_command_line(sys.argv[0]) or sys.excepthook is not sys.__excepthook__:
        return

    def show(kind: type[BaseException], error: BaseException, frames: Any) -> None:
        if issubclass(kind, SettingsError) and error.__cause__ is None:
            sys.stderr.write("".join(traceback.format_exception_only(error)))
        else:
            sys.__excepthook__(kind, error, frames)

    sys.excepthook = show


def is_command_line(program: str) -> bool:
    """Return whether a program is the command `celery`, or `python -m celery`."""
    path = PurePath(program)
    return path.name == "celery" or path.parts[-2:] == ("celery", "__main__.py")


def finalize_before_apply() -> None:
    """Have Celery's `apply` finalize the app first if `redlock_tasks` names the task.

    Until then the task is what its author declared, and would run without its lock.
    Source: celery.app.task: `apply` takes the task out of `app._tasks`, which finalizes nothing.
    """
    celery_apply = Task.apply

    @functools.wraps(celery_apply)
    def apply(self: Any, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        app = self.app
        if app.finalized or isinstance(self, LockedTask) or entry_for(app, self.name) is None:
            return celery_apply(self, args, kwargs, *more, **options)
        app.finalize(auto=True)
        # a class of the task's own may have called this: it is not to be called again
        prepare_apply(self, options)
        result = celery_apply(self, args, kwargs, *more, **options)
        result.is_duplicate = False
        return result

    Task.apply = apply


class RefuseToStart(bootsteps.Step):
    """Ends a worker at its start if it could not lock its tasks, or serve its metrics.

    Raises SettingsError; again what `finalize` has raised, for a caller may have swallowed that.
    Source: celery.bootsteps; receivers of `worker_init` cannot end a worker.
    """

    name = "celery_redlock settings"

    def __init__(self, worker: Any, **options: Any) -> None:
        super().__init__(worker, **options)
        compatibility.check(compatibility.IN_WORKERS)
        check_app(worker.app)
        if must_lock(worker.app):
            find_nodes(worker.app.conf)
        if any(cls.__module__ == "celery.concurrency.eventlet" for cls in worker.pool_cls.__mro__):
            # a body that does not yield blocks every thread there, so renewals would be late
            locked = [task for task in locked_tasks(worker.app) if config_of(task).may_lock]
            if locked:
                names = ", ".join(sorted(task.name for task in locked))
                hint = (
                    f"eventlet cannot run locked tasks ({names}): start the "
                    "worker with -P gevent, or with prefork, threads or solo. "
                    f"{to_leave_out(locked[0])}"
                )
                raise SettingsError("worker", "worker_pool", "eventlet", hint)
        if settings_of(worker.app).metrics is not None and find_spec("prometheus_client") is None:
            hint = (
                "needs the package prometheus_client: run pip install "
                "'prometheus-client>=0.21', or set None"
            )
            raise OptionSource.at("app", "metrics").wrong(worker.app.conf.redlock_metrics, hint)


def connect_child(**_: Any) -> None:
    """Begin to connect to the nodes in a new child of a pool, so that its first task need not.

    Waits for nothing: celery.concurrency.asynpool kills a child that is not up within 4 s. An app
    that has not finalized is not the one of this child.
    """
    app = without_proxy(current_app)
    if app.finalized and locked_tasks(app):
        with suppress(SettingsError):  # logged by the main process, and raised by each run
            redlock_of(app).session.connect_soon()


def report_nodes(sender: Any = None, **_: Any) -> None:
    """Check the nodes at a worker's start and log the result; the worker starts in any case."""
    app = sender.app
    watch_children(app, sender.pool)
    if not locked_tasks(app):
        return
    try:
        session = redlock_of(app).session
        report = ask_nodes(session)
        answering = [node.node for node in report.nodes if not node.error]
        differing = compare_shared_settings(session, answering, writes=app not in per_app.guests)
    except SettingsError as error:  # of shared tasks alone; `RefuseToStart` has seen all others
        level = logging.ERROR if must_lock(app) else logging.WARNING
        logger.log(level, "no lock can be acquired: %s", error, extra={"event": "settings_wrong"})
        return
    _log_report(report)
    for settings, nodes in differing.items():
        logger.error(
            "other clients use %s (according to %s), and this worker uses %s: until all clients "
            "use the same, two tasks may hold one lock. See %s",
            settings, ", ".join(nodes), shared_settings_of(session), anchors.SETTINGS_DIFFER,
            extra={"event": "settings_differ"},
        )  # fmt: skip


def _log_report(report: NodeList) -> None:
    """Log in one line which nodes answer, and which wait before they grant a lock."""
    nodes = len(report.nodes)
    silent = report.silent
    of_nodes = f"of {nodes} lock nodes"
    needed_text = f", {report.needed} needed"
    causes = [f"{node}: {cause}" for node, cause in report.failing.items()]
    failing_text = f"; failing: {'; '.join(causes)}" if causes else ""
    left = math.ceil(max(silent.values(), default=0.0))
    if not silent:
        text = f"{report.voting} {of_nodes} answer{needed_text}{failing_text}"
    elif failing_text or report.has_quorum:
        waiting = f"new or restarted nodes wait {left} s: {', '.join(silent)}"
        text = f"{report.voting} {of_nodes} may grant locks{needed_text} ({waiting}){failing_text}"
    else:
        text = (
            f"{report.voting} {of_nodes} may grant locks yet (new or restarted nodes wait {left} "
            "s). To skip the wait on a new cluster: celery -A APP redlock trust --all"
        )
    level = logging.WARNING
    if report.voting == nodes:
        level = logging.INFO
    elif failing_text and not report.has_quorum:
        # without a failing node the wait ends by itself
        level = logging.ERROR
        text = anchors.see(text, anchors.NO_QUORUM)
    elif failing_text:
        passages = dict.fromkeys(map(passage_of, report.failing.values()))
        text = anchors.see(text, " and ".join(passages))
    fields = {
        "event": "nodes_answer", "answering": nodes - len(causes), "voting": report.voting,
        "nodes": nodes, "quorum": report.needed,
    }  # fmt: skip
    logger.log(level, "%s", text, extra=fields)


def warn_if_unlocked(request: Any = None, **_: Any) -> None:
    """Warn once for each task that takes no lock although a message brings options of a lock."""
    if HEADER not in request.request_dict or isinstance(request.task, LockedTask):
        return
    if request.name not in _warned_of and LockHeader.of(request._context).options:
        _warned_of.add(request.name)
        text = (
            "%s takes no lock, because it is not a LockedTask: lock=... in its calls has no effect"
        )
        logger.warning(text, request.name, extra={"event": "not_locked", "task": request.name})
