"""The configuration of one task's lock: compiled and checked once, then asked for each call.

`options_for` merges the levels of options, and `resources` makes the keys of a call. Not here: the
checks of one level (`levels.py`), the text of a key (`templates.py`), and how a declaration is read
(`tasks/declaration.py`).
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from celery_redlock.errors import SettingsError
from celery_redlock.lock.model.keys import in_order
from celery_redlock.lock.model.rate import Rate
from celery_redlock.lock.validation import MAX_NAME_BYTES, check_permits, check_rates, is_too_long
from celery_redlock.tasks.arguments import Arrivals, Parameters, misfit
from celery_redlock.tasks.settings import templates
from celery_redlock.tasks.settings.app import (
    AppSettings,
    OptionSource,
    SourceOf,
    did_you_mean,
    leave_out,
    pattern_for,
)
from celery_redlock.tasks.settings.call import CallKeys, TaskCall
from celery_redlock.tasks.settings.levels import (
    KEY_LIMIT_OPTIONS,
    KEY_OPTIONS,
    check_built_in,
    check_options,
    check_together,
    decides_key,
    merge_levels,
    option_meant,
)
from celery_redlock.tasks.settings.options import (
    BUILT_IN,
    OPTION,
    UNIQUE_BY,
    EffectiveOptions,
    OptionValue,
    TaskLockOptions,
)
from celery_redlock.tasks.settings.templates import fields_of_key, reads_arguments, templates_of

ANY_ARGUMENTS = "any-arguments"  # instead of a digest, if no argument is part of the key
_TOO_LONG = f"a resource has at most {MAX_NAME_BYTES} bytes"
_NAMES_QUEUE = re.compile(r"\{queue[}:\[]")
_CALL: SourceOf = partial(OptionSource.at, "call")
_USES_OF_KEY = (
    ("unique_for", "deduplicates by"), ("debounce", "counts sends by"),
    ("rate", "limits the starts of"),
)  # fmt: skip


@dataclass(frozen=True)
class TaskLockConfig:
    """The configuration of one task's lock, checked when it is made.

    options: of the task itself, checked. parameters: of its function. source: from an
    option's name to its source at the task's own level. queues: a cache for callers, from exchange
    and routing key to the queue's name.
    """

    task_name: str
    app: AppSettings
    options: Mapping[str, Any]
    parameters: Parameters
    source: SourceOf
    queues: dict[tuple[str | None, str], str] = field(
        default_factory=dict, compare=False, repr=False
    )
    _by_queue: dict[str, TaskLockOptions] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Raise SettingsError if the key cannot be filled, or options exclude each other."""
        app = self.app
        options = self.options
        if decides_key(options):
            self.check_level(options, self.source)
        elif decides_key(app.options) or not any(map(decides_key, app.queues.values())):
            self.check_level({"key": None, **app.options}, partial(OptionSource.at, "app"))
        check_together(f"task {self.task_name!r}", self.task_options)
        # in the queue without a name hold the options of a glob that matches every name
        check_built_in(app, merge_levels(*(level for level, _ in self.levels("", {}))))
        for name, use in _USES_OF_KEY:
            value = options.get(name)
            if options.get("key") is False and value is not None:
                hint = f"{use} the lock's key, and key=False makes none: name a key"
                raise self.source(name).wrong(value, hint)

    @property
    def signature(self) -> inspect.Signature:
        """What a call must have, without `self` and what decorators take out."""
        return self.parameters.signature

    @functools.cached_property
    def arrivals(self) -> Arrivals | None:
        """Compares where arguments arrive; None if nothing stands before the function."""
        return Arrivals.of(self.task_name, self.parameters)

    def arrivals_for(self, options: TaskLockOptions) -> Arrivals | None:
        """As `arrivals`; None also if the key of a call is not made of arguments by their names."""
        if self.arrivals is None or not reads_arguments(options.key, options.args, self.signature):
            return None
        return self.arrivals

    @functools.cached_property
    def may_be_unique(self) -> bool:
        """Whether any send is claimed, apart from sends whose own options ask for it."""
        levels = (self.app.options, *self.app.queues.values(), self.options)
        return any(level.get(name) is not None for level in levels for name in UNIQUE_BY)

    @functools.cached_property
    def may_lock(self) -> bool:
        """Whether a run takes a lock, unless its queue or its call says otherwise."""
        return self.task_options.get("key") is not False

    def may_name_queue(self, call: Mapping[str, Any]) -> bool:
        """Return whether a key depends on the queue. call: unchecked."""
        return self._names_queue or ("key" in call and _names_queue(call["key"]))

    @functools.cached_property
    def _names_queue(self) -> bool:
        """As `may_name_queue`, whatever a call says."""
        return any(_names_queue(level.get("key")) for level in (self.app.options, self.options))

    @functools.cached_property
    def task_options(self) -> Mapping[str, Any]:
        """The options of app and task, which hold in every queue."""
        return merge_levels(self.app.options, self.options)

    def options_for(self, queue: str, call: Mapping[str, Any] | None = None) -> TaskLockOptions:
        """Return the options in force in a queue. call: options of a call or message, unchecked."""
        if call:
            return self._merge(queue, self.check_call(call))
        if queue not in self._by_queue:
            self._by_queue[queue] = self._merge(queue, {})
        return self._by_queue[queue]

    def allowed_options(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the options of a message without those that no message may carry."""
        if not options or self.app.call_options is None:
            return options
        return {
            name: value
            for name, value in options.items()
            if name not in OPTION or self.app.may_carry(name)
        }

    def overridden_options(self, queue: str, options: TaskLockOptions) -> dict[str, Any]:
        """Return the options that decide what is locked, as far as a call changes them.

        options: in force for the call.
        """
        defaults = vars(self.options_for(queue))
        compared = (*KEY_OPTIONS, "limit", "rate")
        return {
            name: value
            for name, value in vars(options).items()
            if name in compared and value != defaults[name]
        }

    def levels(
        self, queue: str, call: Mapping[str, Any]
    ) -> Iterator[tuple[Mapping[str, Any], SourceOf]]:
        """Give the options of each level with their sources; the nearest level comes last.

        A limit or rate set beside a key of app or queue is of that key: it is left out if a nearer
        level sets another key.
        """
        yield {**BUILT_IN, "ttl": self.app.built_in_ttl}, partial(OptionSource.at, "built-in")
        outer = [(self.app.options, partial(OptionSource.at, "app"))]
        pattern = pattern_for(queue, self.app.queues)
        if pattern is not None:
            outer.append((self.app.queues[pattern], partial(OptionSource.at, "queues", of=pattern)))
        for position, (options, source) in enumerate(outer, 1):
            nearer = *(level for level, _ in outer[position:]), self.options, call
            if decides_key(options) and any(map(decides_key, nearer)):
                options = {
                    name: value for name, value in options.items() if name not in KEY_LIMIT_OPTIONS
                }
            yield options, source
        yield self.options, self.source
        yield call, _CALL

    def _merge(self, queue: str, call: Mapping[str, Any]) -> TaskLockOptions:
        """Return the options of all levels as one. call: checked."""
        merged = merge_levels(*(options for options, _ in self.levels(queue, call)))
        check_together(f"task {self.task_name!r} in queue {queue!r}", merged)
        check_built_in(self.app, merged)
        return TaskLockOptions(**merged)

    def effective_options(
        self, queue: str, call: Mapping[str, Any] | None = None
    ) -> EffectiveOptions:
        """Return the options in force in a queue, each with its source; as `options_for`."""
        checked_call = self.check_call(call or {})
        sources: dict[str, OptionSource] = {}
        for level, source_of in self.levels(queue, checked_call):
            for name in filter(level.__contains__, KEY_OPTIONS):
                sources.update(dict.fromkeys(KEY_OPTIONS, source_of(name)))
            sources.update((name, source_of(name)) for name in level)
        merged = vars(self._merge(queue, checked_call)).items()
        values = tuple(OptionValue(name, value, sources[name]) for name, value in merged)
        return EffectiveOptions(self.task_name, queue, values)

    def check_call(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a call, checked alone and with those of task and app."""
        checked = check_options(options, self.app, _CALL, travels=True)
        for name in checked:
            if not self.app.may_carry(name):
                hint = "is not in redlock_call_options, so no call may set it: set it at the task"
                raise _CALL(name).wrong(options[name], hint)
        self.check_level(checked, _CALL)
        check_together("call", merge_levels(self.task_options, checked))
        return checked

    def check_level(self, options: Mapping[str, Any], source_of: SourceOf) -> None:
        """Raise SettingsError if a level's `key` or `args` names an argument that is not there."""
        if not decides_key(options):
            return
        key = options.get("key")
        args = options.get("args")
        parameters = self.signature.parameters
        if args is not None:
            self._check_names(args, parameters, source_of("args"), args)
            self._check_defaults(None, args)
            return
        names = [entry.name for entry in fields_of_key(key)]
        self._check_names(names, (*parameters, *templates.TEMPLATE_NAMES), source_of("key"), key)
        if not callable(key) and key is not False:
            self._check_defaults(key, tuple(parameters))

    def _check_names(
        self, names: Iterable[str], known: Collection[str], source: OptionSource, value: Any
    ) -> None:
        for name in names:
            if name not in known:
                missing = f"has no argument {name!r}{did_you_mean(name, known)}"
                hint = f"{self.task_name} {missing if known else 'takes no arguments'}"
                hint += f". {leave_out(self.task_name)}" if "*" in source.name else ""  # a glob
                raise source.wrong(list(value) if isinstance(value, tuple) else value, hint)

    def _check_defaults(self, key: Any, names: tuple[str, ...]) -> None:
        """Raise SettingsError if an argument's default would make another key each time.

        names: the arguments of the digest. The default None is no error, nor is a default without
        the item that a template names: a call may give another value.
        """
        parameters = self.signature.parameters
        template_fields = fields_of_key(key)
        defaults = self.parameters.defaults
        reads_digest = any(entry.name == "digest" for entry in template_fields)
        candidates: list[tuple[str, Any, Callable[[Any], Any]]] = []
        if not templates_of(key) or (reads_digest and "digest" not in parameters):
            canonical = templates.canonical
            candidates = [(name, defaults[name], canonical) for name in names if name in defaults]
        for entry in template_fields:
            with suppress(LookupError, TypeError):
                candidates.append((entry.written, entry.find(defaults), templates.formattable))
        for name, value, check in candidates:
            try:
                check(value)
            except TypeError as error:
                what = f"default of {name!r}"
                raise templates.unstable(self.task_name, what, value, error) from None

    def resources(self, options: TaskLockOptions, call: TaskCall) -> tuple[str, ...]:
        """Return the resources that a call locks, all or none; () if it takes no lock.

        Raises SettingsError if the key cannot be made, ArgumentsError if the arguments do not fit
        the function.
        """
        key = options.key
        if key is False:
            return ()
        if callable(key):
            return self._from_callable(options, call)
        parameters = self.parameters
        args = call.args
        kwargs = call.kwargs
        binder = parameters.binder
        if parameters.wrappers and not reads_arguments(key, options.args, self.signature):
            # whatever a decorator adds
            binder = dict
            args = ()
            kwargs = {}
        elif parameters.consumed:
            args, kwargs = parameters.without_consumed(args, kwargs)
        try:
            arguments = binder(*args, **kwargs)
        except TypeError as error:  # not retried: Celery publishes no retry that does not fit
            reason = str(error).removeprefix(f"{binder.__qualname__}() ")
            raise misfit(self.task_name, parameters, reason, call) from None
        if key is not None:
            queue = call.queue
            if type(key) is str:  # most keys
                return (self._fill(key, arguments, queue),)
            return tuple(self._fill(entry, arguments, queue) for entry in templates_of(key))
        return (f"{self.task_name}:{self._digest_of(options.args, arguments, call.queue)}",)

    def _digest_of(
        self, names: tuple[str, ...] | None, arguments: Mapping[str, Any], queue: str
    ) -> str:
        """Return the digest of all arguments, or of those in the option `args`."""
        if names is None:
            return templates.digest(arguments, self.task_name)
        if not names:
            return ANY_ARGUMENTS
        selected = {name: value for name, value in arguments.items() if name in names}
        if len(selected) < len(names):
            # a queue's names cannot be checked against every task when the app finalizes
            pattern = pattern_for(queue, self.app.queues) or queue
            self._check_names(names, arguments, OptionSource.at("queues", "args", pattern), names)
        return templates.digest(selected, self.task_name)

    def shapes(self, options: TaskLockOptions, queue: str) -> tuple[str, ...]:
        """Return the resources of any call, with {} for each argument; () without a template."""
        placeholders = dict.fromkeys(self.signature.parameters, "{}")
        values = {"task": self.task_name, "queue": queue, "digest": "{digest}", **placeholders}
        return tuple(
            "".join(part if isinstance(part, str) else values.get(part.name, "") for part in parts)
            for parts in map(templates.compiled, templates_of(options.key))
        )

    def _from_callable(self, options: TaskLockOptions, call: TaskCall) -> tuple[str, ...]:
        source = self.source("key")
        key = options.key
        returned = call.ask(key, source)
        if returned is None:
            return ()
        resources = returned if isinstance(returned, (list, tuple)) else [returned]
        if not resources or not all(isinstance(entry, str) and entry for entry in resources):
            hint = "must return a text or a list of texts, not empty, or None; got "
            raise source.wrong(key, f"{hint}{type(returned).__name__}")
        if any(map(is_too_long, resources)):
            raise source.wrong(key, f"{_TOO_LONG}; a callable returned more")
        resources = in_order(resources)
        if not callable(options.limit):
            fencing = options.fencing
            check_permits(source.level, limit=options.limit, fencing=fencing, names=resources)
        check_rates(source.level, rate=options.rate, names=resources)
        return resources

    def keys(self, options: TaskLockOptions, call: TaskCall, resources: Sequence[str]) -> CallKeys:
        """Return what a call locks, with limits and rates; resources: as `resources` gave them.

        Raises SettingsError for what a callable limit raises, and for limits or rates that are none
        for these resources.
        """
        # most tasks have neither
        limits = None if options.limit == 1 else self.limits(options, call, resources)
        rates = None if options.rate is None else self.rates(options, resources)
        return CallKeys(in_order(resources, limits), limits, rates)

    def limits(
        self, options: TaskLockOptions, call: TaskCall, resources: Sequence[str]
    ) -> dict[str, int] | None:
        """Return the limits above 1, by resource; None without one.

        Raises SettingsError for what a callable raises, or if it returns no limit.
        resources: as `resources` returned them for the call.
        """
        limit = options.limit
        source = self.source("limit")
        if not resources:
            return None
        if callable(limit):
            limit = call.ask(limit, source)
        names = templates_of(options.key) or resources
        by_name = check_permits(source.level, limit=limit, fencing=options.fencing, names=names)
        if by_name is None:
            return None
        by_resource: dict[str, int] = {}
        for name, resource in zip(names, resources, strict=True):
            # two templates may give one resource: the smaller limit
            permits = by_name.get(name, 1)
            by_resource[resource] = min(permits, by_resource.get(resource, permits))
        above_one = {resource: permits for resource, permits in by_resource.items() if permits > 1}
        return above_one or None

    def rates(self, options: TaskLockOptions, resources: Sequence[str]) -> dict[str, Rate] | None:
        """Return the rates by resource; None without one. resources: of a call, as `resources`."""
        if options.rate is None or not resources:
            return None
        names = templates_of(options.key) or resources
        by_name = check_rates(self.source("rate").level, rate=options.rate, names=names) or {}
        by_resource: dict[str, Rate] = {}
        for name, resource in zip(names, resources, strict=True):
            rate = by_name.get(name)
            if rate is None:
                continue
            earlier = by_resource.setdefault(resource, rate)
            if earlier != rate:
                hint = f"{resource!r} has two rates for these arguments: {rate}, {earlier}"
                raise self.source("rate").wrong(options.rate, hint)
        return by_resource or None

    def _fill(self, template: str, arguments: Mapping[str, Any], queue: str) -> str:
        try:
            text = templates.fill(template, arguments, self.task_name, queue)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            hint = f"cannot be filled ({type(error).__name__}: {error}); is an argument missing?"
            raise self.source("key").wrong(template, hint) from error
        if not text:
            raise self.source("key").wrong(template, "gives an empty text for these arguments")
        if len(text) > MAX_NAME_BYTES // 4 and is_too_long(text):  # else it need not be encoded
            raise self.source("key").wrong(template, f"{_TOO_LONG}; these arguments give more")
        return text


def _names_queue(key: Any) -> bool:
    return not callable(key) and _NAMES_QUEUE.search(repr(key)) is not None


def compile_config(
    app: AppSettings, task_name: str, attributes: Mapping[str, Any], parameters: Parameters
) -> TaskLockConfig:
    """Return the configuration of a task. attributes: its `lock_*`, functions unbound."""
    options = {}
    for written, value in attributes.items():
        name = written.removeprefix("lock_")
        if name in OPTION:
            options[name] = value
        elif not callable(value) and not isinstance(value, (property, classmethod)):
            hint = f"is not an option{option_meant(written, 'lock_')}"
            raise SettingsError(f"task {task_name!r}", written, repr(value), hint)
    source = partial(OptionSource.at, "task", of=task_name)
    options = check_options(options, app, source, travels=False)
    return TaskLockConfig(task_name, app, options, parameters, source)


def compile_adopted_config(
    app: AppSettings, task_name: str, pattern: str, parameters: Parameters
) -> TaskLockConfig:
    """Return the configuration of a task that `redlock_tasks` locks, by the entry that applies."""
    if pattern not in app.tasks:
        hint = "came after the settings had been read: set it before the app finalizes"
        raise OptionSource.at("app", f"tasks[{pattern!r}]").wrong("...", hint)
    source = partial(OptionSource.at, "tasks", of=pattern)
    return TaskLockConfig(task_name, app, app.tasks[pattern], parameters, source)
