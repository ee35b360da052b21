"""Tasks of others that `redlock_tasks` locks."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from typing import Any

from celery import Task
from celery.app.autoretry import add_autoretry_behaviour
from celery.app.registry import TaskRegistry

from celery_redlock.tasks.declaration import ENTRY
from celery_redlock.tasks.settings.app import CELERY_PREFIX, pattern_for
from celery_redlock.tasks.settings.sources import tasks_source


class AdoptingRegistry(TaskRegistry):
    """An app's tasks, of which those that `redlock_tasks` names get their gate as they come in.

    Celery adds a task here before it binds it, whenever that is: with the app, as a shared task,
    or by a module that is imported late. From then on it is a LockedTask like any other; that class
    is handed in, for it stands above this module.
    """

    @classmethod
    def watch(cls, app: Any, locked_task: Any) -> None:
        """Lock what an app's registry holds, and what is added to it; refuse what cannot be."""
        registry = cls.put_gates(app, locked_task)
        for name, task in registry.items():
            registry.check(name, task)

    @classmethod
    def put_gates(cls, app: Any, locked_task: Any) -> Any:
        """Have an app's registry lock what it holds, and what is added to it; returns that."""
        registry = app._tasks
        if not isinstance(registry, AdoptingRegistry):
            kind = type(registry)
            registry.__class__ = type(kind.__name__, (cls, kind), {})
        registry.app, registry.locked_task = app, locked_task
        found = [task for name, task in registry.items() if registry.put_gate(name, task)]
        for task in found:  # all of them are locked by now, whatever is wrong with one
            if task.__bound__:
                task.bind(app)
        return registry

    def __setitem__(self, name: str, task: Any) -> None:
        """Add a task, behind its gate."""
        super().__setitem__(name, task)
        self.put_gate(name, task)
        self.check(name, task)

    def pattern_for(self, name: str) -> str | None:
        """Return the entry that a task's name goes by, None where there is none."""
        if name.startswith(CELERY_PREFIX):
            return None
        entries = self.app.conf.get("redlock_tasks")
        # what is no mapping raises at each use of what it names, rather than have that run unlocked
        known = entries if isinstance(entries, (Mapping, list, tuple, set)) else ()
        return pattern_for(name, map(str, known))

    def put_gate(self, name: str, task: Any) -> bool:
        """Lock a task of others that has an entry; False where nothing was to be done."""
        pattern = self.pattern_for(name)
        if pattern is None or isinstance(task, self.locked_task):
            return False
        adopt_task(task, pattern, self.locked_task)
        return True

    def check(self, name: str, task: Any) -> None:
        """Raise SettingsError where an entry is of a task that has options of its own."""
        pattern = self.pattern_for(name)
        if pattern == name and ENTRY not in type(task).__dict__:
            hint = (
                f"{name} is a LockedTask already: set lock_* on it, or from outside by Celery's "
                f'task_annotations = {{{name!r}: {{"lock_ttl": 30}}}}'
            )
            raise tasks_source(name).wrong(self.app.conf.redlock_tasks[name], hint)


def adopt_task(task: Any, pattern: str, locked_task: Any) -> None:
    """Make a task of others a LockedTask, which goes by an entry of `redlock_tasks`.

    locked_task: the class `LockedTask`.
    It gets a class of its own below its own one, so that the instance is the one that others may
    hold, and their class stays as it is. LockedTask comes first, for their `apply_async` need not
    know `lock`; what they call `lock` themselves stays theirs.
    """
    cls = type(task)
    own = task.__dict__.pop("run", None)  # of the instance: autoretry, or what its __init__ set
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
    if autoretry is not None:  # around the gate, as where a LockedTask is made
        said = dict(inspect.getclosurevars(autoretry).nonlocals)
        said["dont_autoretry_for"] = said["dont_autoretry_for"] or spared
        del said["task"]
        add_autoretry_behaviour(task, **said)
