"""The registry of an app's tasks: tasks of others become locked ones, and mistakes are refused."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from typing import Any

from celery import Task
from celery.app.annotations import resolve_all
from celery.app.autoretry import add_autoretry_behaviour
from celery.app.registry import TaskRegistry

from celery_redlock.tasks.declaration import ENTRY
from celery_redlock.tasks.per_app import is_checked
from celery_redlock.tasks.settings.app import CELERY_PREFIX, OptionSource, pattern_for
from celery_redlock.tasks.settings.options import OPTION
from celery_redlock_entry import lock_names


class AdoptingRegistry(TaskRegistry):
    """An app's tasks; those that `redlock_tasks` names become LockedTasks as they are added.

    Celery adds a task here before it binds it: with the app, as a shared task, or when a module is
    imported late. What is wrong with a task is raised when it is added, but not while the app
    finalizes: see `check_all`. locked_task: the class `LockedTask`, handed in, for it is above this
    module.
    """

    @classmethod
    def of(cls, app: Any, locked_task: Any) -> Any:
        """Adopt the tasks of an app, and all that are added later; return its registry."""
        registry = app._tasks
        if not isinstance(registry, AdoptingRegistry):
            kind = type(registry)
            registry.__class__ = type(kind.__name__, (cls, kind), {})
        registry.app, registry.locked_task = app, locked_task
        found = [task for name, task in registry.items() if registry.adopt(name, task)]
        for task in found:  # all of them are adopted by now, even if one of them is wrong
            if task.__bound__:
                task.bind(app)
        return registry

    def __setitem__(self, name: str, task: Any) -> None:
        """Add a task; adopt it if it has an entry. Raises SettingsError."""
        self.adopt(name, task)
        if is_checked(self.app):
            self.check(name, task)
        super().__setitem__(name, task)

    def check_all(self) -> None:
        """Raise SettingsError for the first task that is wrong."""
        for name, task in self.items():
            self.check(name, task)

    def pattern_for(self, name: str) -> str | None:
        """Return the entry of `redlock_tasks` for a task's name, None if there is none."""
        if name.startswith(CELERY_PREFIX):
            return None
        entries = self.app.conf.get("redlock_tasks")
        # a wrong type raises at each use of a task that it names: such a task never runs unlocked
        known = entries if isinstance(entries, (Mapping, list, tuple, set)) else ()
        return pattern_for(name, map(str, known))

    def adopt(self, name: str, task: Any) -> bool:
        """Adopt a task that has an entry; return whether it was adopted now."""
        pattern = self.pattern_for(name)
        if pattern is None or isinstance(task, self.locked_task):
            return False
        adopt_task(task, pattern, self.locked_task)
        return True

    def check(self, name: str, task: Any) -> None:
        """Raise SettingsError if a task has options of a lock and takes none, or has them twice."""
        if not isinstance(task, self.locked_task):
            self._check_unlocked(name, task)
            return
        pattern = self.pattern_for(name)
        if pattern == name and ENTRY not in type(task).__dict__:
            hint = (
                f"{name} is a LockedTask already: set lock_* on it, or from outside by Celery's "
                f'task_annotations = {{{name!r}: {{"lock_ttl": 30}}}}'
            )
            entry = self.app.conf.redlock_tasks[name]
            raise OptionSource.at("app", f"tasks[{name!r}]").wrong(entry, hint)

    def _check_unlocked(self, name: str, task: Any) -> None:
        """Raise SettingsError if a task without a lock has an option of one.

        Other names, and those that another base declares, are not ours. Annotations are set on all
        tasks that they match.
        """
        found = {one for one in lock_names(task) if one.removeprefix("lock_") in OPTION}
        if not found or name.startswith(CELERY_PREFIX):
            return
        found.difference_update(*resolve_all(self.app.annotations, type(task)))
        for written in sorted(found):
            value = vars(type(task))[written]
            hint = "has no effect without base=LockedTask: the task would run without a lock"
            option = written.removeprefix("lock_")
            raise OptionSource.at("task", option, name).wrong(value, hint)


def adopt_task(task: Any, pattern: str, locked_task: Any) -> None:
    """Make a task of others a LockedTask, which goes by an entry of `redlock_tasks`.

    locked_task: the class `LockedTask`. The task keeps its identity, for others may hold it. It
    gets a new class that derives from LockedTask and from its own class, which stays as it is.
    LockedTask comes first, for the task's own `apply_async` need not know `lock`. An attribute
    `lock` of the task's own stays.
    """
    cls = type(task)
    own = task.__dict__.pop("run", None)  # autoretry's, or one that its __init__ has set
    autoretry = own if "_orig_run" in task.__dict__ else None
    if autoretry is not None:
        own = task.__dict__.pop("_orig_run")
    spared = getattr(task, "dont_autoretry_for", None) or locked_task.dont_autoretry_for
    body = {ENTRY: pattern, "dont_autoretry_for": spared, "__module__": cls.__module__}
    if cls.Request != Task.Request:
        body["Request"] = cls.Request
    for name in ("lock", "lock_for", "lock_options"):
        if inspect.getattr_static(task, name, None) is not None:
            body[name] = inspect.getattr_static(cls, name, None)
    if own is not None and own != task.run:
        body["run"] = staticmethod(own)
    made = types.new_class(cls.__name__, (locked_task, cls), {}, lambda made: made.update(body))
    made.__qualname__ = cls.__qualname__
    task.__class__ = made
    if autoretry is not None:  # around the wrapper, as for a task that is made a LockedTask
        said = dict(inspect.getclosurevars(autoretry).nonlocals)
        said["dont_autoretry_for"] = said["dont_autoretry_for"] or spared
        del said["task"]
        add_autoretry_behaviour(task, **said)
