"""The configuration of one task's lock: compiled once, then asked at each send and run."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from celery_redlock.errors import SettingsError
from celery_redlock.tasks.settings.app import (
    AppSettings,
    OptionSource,
    SourceOf,
    pattern_for,
)
from celery_redlock.tasks.settings.keys import TaskKeys
from celery_redlock.tasks.settings.levels import (
    KEY_OPTIONS,
    check_built_in,
    check_options,
    check_together,
    decides_key,
    merged,
    option_meant,
)
from celery_redlock.tasks.settings.options import (
    OPTION,
    EffectiveOptions,
    OptionValue,
    TaskLockOptions,
    built_in,
)
from celery_redlock.tasks.settings.templates import names_queue

_CALL: SourceOf = partial(OptionSource.at, "call")
_FIELDS = tuple(one.name for one in fields(TaskLockOptions))


@dataclass(frozen=True)
class TaskLockConfig:
    """The configuration of one task's lock. `compile_config` makes it and checks it.

    options: of the task itself, checked. keys: how its keys are made. queues: a cache for callers,
    from exchange and routing key to the queue's name.
    """

    task_name: str
    app: AppSettings
    options: Mapping[str, Any]
    keys: TaskKeys
    queues: dict[tuple[str | None, str], str] = field(
        default_factory=dict, compare=False, repr=False
    )
    _by_queue: dict[str, TaskLockOptions] = field(default_factory=dict, compare=False, repr=False)
    _inherited: dict[str, Mapping[str, Any]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def signature(self) -> inspect.Signature:
        """The signature of the task's function, without self."""
        return self.keys.signature

    @functools.cached_property
    def may_be_unique(self) -> bool:
        """Whether any send is deduplicated, apart from sends whose own options ask for it."""
        levels = (self.app.options, *self.app.queues.values(), self.options)
        return any(level.get("unique_for") is not None for level in levels)

    @functools.cached_property
    def may_lock(self) -> bool:
        """Whether a run takes a lock, unless its queue or its call says otherwise."""
        return self._of_task.get("key") is not False

    def may_name_queue(self, call: Mapping[str, Any]) -> bool:
        """Return whether a key depends on the queue. call: the options of a call, unchecked yet."""
        return self._names_queue or names_queue(call.get("key"))

    @functools.cached_property
    def _names_queue(self) -> bool:
        return any(names_queue(level.get("key")) for level in (self.app.options, self.options))

    @functools.cached_property
    def _of_task(self) -> Mapping[str, Any]:
        """The options of app and task, which hold in every queue."""
        return merged(self.app.options, self.options)

    def options_for(self, queue: str, call: Mapping[str, Any] | None = None) -> TaskLockOptions:
        """Return the options in force in a queue.

        call: the options of a call or its message, unchecked yet. Raises SettingsError.
        """
        if call:
            return self._merge(queue, self.check_call(call))
        options = self._by_queue.get(queue)
        if options is None:
            options = self._by_queue[queue] = self._merge(queue, {})
        return options

    def heeded(self, carried: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the options of a message without those that no message may carry."""
        if not carried or self.app.call_options is None:
            return carried
        return {n: v for n, v in carried.items() if n not in OPTION or self.app.may_carry(n)}

    def overridden(self, queue: str, options: TaskLockOptions) -> dict[str, Any]:
        """Return what a call has changed of what is excluded: its `key`, `args` or `limit`.

        options: those in force for the call.
        """
        usual = self.options_for(queue)
        changed = {name: getattr(options, name) for name in (*KEY_OPTIONS, "limit")}
        return {name: value for name, value in changed.items() if value != getattr(usual, name)}

    def _levels(
        self, queue: str, call: Mapping[str, Any]
    ) -> Iterator[tuple[Mapping[str, Any], SourceOf]]:
        """Give the options of each level with their sources; the nearest level comes last."""
        yield built_in(self.app), partial(OptionSource.at, "built-in")
        yield self.app.options, partial(OptionSource.at, "app")
        pattern = pattern_for(queue, self.app.queues)
        if pattern is not None:
            yield self.app.queues[pattern], partial(OptionSource.at, "queues", of=pattern)
        yield self.options, self.keys.source
        yield call, _CALL

    def _merge(self, queue: str, call: Mapping[str, Any]) -> TaskLockOptions:
        """Return the options of all levels as one. call: checked."""
        inherited = self._inherited.get(queue)
        if inherited is None:
            levels = [options for options, _ in self._levels(queue, {})]
            inherited = self._inherited[queue] = merged(*levels)
        whole = merged(inherited, call)
        check_together(f"task {self.task_name!r} in queue {queue!r}", whole)
        check_built_in(self.app, whole)
        return TaskLockOptions(**whole)

    def effective_options(
        self, queue: str, call: Mapping[str, Any] | None = None
    ) -> EffectiveOptions:
        """Return the options in force in a queue, each with its source; as `options_for`."""
        checked_call = self.check_call(call or {})
        sources: dict[str, OptionSource] = {}
        for options, source_of in self._levels(queue, checked_call):
            for name in filter(options.__contains__, KEY_OPTIONS):
                sources.update(dict.fromkeys(KEY_OPTIONS, source_of(name)))
            sources.update((name, source_of(name)) for name in options)
        merged_options = self._merge(queue, checked_call)
        values = [OptionValue(n, getattr(merged_options, n), sources[n]) for n in _FIELDS]
        return EffectiveOptions(self.task_name, queue, tuple(values))

    def check_call(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a call, checked, also beside those of task and app.

        Raises SettingsError.
        """
        valid = check_options(options, self.app, _CALL, travels=True)
        for name in valid:
            if not self.app.may_carry(name):
                hint = "is not in redlock_call_options, so no call may set it: set it at the task"
                raise _CALL(name).wrong(options[name], hint)
        self.keys.check(valid, _CALL)
        check_together("call", merged(self._of_task, valid))
        return valid


def compile_config(
    app: AppSettings,
    task_name: str,
    attributes: Mapping[str, Any],
    signature: inspect.Signature,
    others: Sequence[str] = (),
) -> TaskLockConfig:
    """Return the configuration of a task; raises SettingsError.

    attributes: its lock_* attributes by their full names, functions unbound.
    others: names of lock_* attributes that are methods or properties, and so no options.
    """
    options = {}
    for written, value in attributes.items():
        name = written.removeprefix("lock_")
        if name in OPTION:
            options[name] = value
        elif not callable(value) and written not in others:
            hint = f"is not an option{option_meant(written, 'lock_')}"
            raise SettingsError(f"task {task_name!r}", written, repr(value), hint)
    source = partial(OptionSource.at, "task", of=task_name)
    options = check_options(options, app, source, travels=False)
    keys = TaskKeys(task_name, app, signature, source)
    return _check_config(TaskLockConfig(task_name, app, options, keys))


def compile_adopted_config(
    app: AppSettings, task_name: str, pattern: str, signature: inspect.Signature
) -> TaskLockConfig:
    """Return the configuration of a task that `redlock_tasks` locks; raises SettingsError.

    pattern: the entry that applies. The task's own `lock_*` attributes are not about locks.
    """
    if pattern not in app.tasks:
        hint = "came after the settings had been read: set it before the app finalizes"
        raise OptionSource.at("app", f"tasks[{pattern!r}]").wrong("...", hint)
    source = partial(OptionSource.at, "tasks", of=pattern)
    keys = TaskKeys(task_name, app, signature, source)
    return _check_config(TaskLockConfig(task_name, app, app.tasks[pattern], keys))


def _check_config(config: TaskLockConfig) -> TaskLockConfig:
    """Return a configuration if its function can fill its key and its options go together.

    Raises SettingsError.
    """
    app, options, keys = config.app, config.options, config.keys
    if decides_key(options):
        keys.check(options, keys.source)
    elif decides_key(app.options) or not any(map(decides_key, app.queues.values())):
        keys.check({"key": None, **app.options}, partial(OptionSource.at, "app"))
    check_together(f"task {config.task_name!r}", merged(app.options, options))
    of_all_queues = app.for_queue("")  # the options of a glob that matches every name
    check_built_in(app, merged(built_in(app), app.options, of_all_queues, options))
    unique_for = options.get("unique_for")
    if options.get("key") is False and unique_for is not None:
        hint = "deduplicates by the lock's key, and key=False makes none: name a key"
        raise keys.source("unique_for").wrong(unique_for, hint)
    return config
