"""What one task's declaration means: its options in each queue, and the resources it locks."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from celery_redlock.errors import ArgumentsError, SettingsError
from celery_redlock.lock.model.keys import in_order
from celery_redlock.lock.validation import check_permits
from celery_redlock.tasks.settings.app import AppSettings, pattern_for
from celery_redlock.tasks.settings.digest import canonical, digest, unstable
from celery_redlock.tasks.settings.effective import EffectiveOptions, OptionValue
from celery_redlock.tasks.settings.keys import (
    _FORMATTER,
    TEMPLATE_NAMES,
    _Arguments,
    _fields,
    _for_template,
    _names_queue,
    template_names,
)
from celery_redlock.tasks.settings.options import (
    BUILT_IN,
    KEY_OPTIONS,
    OPTIONS,
    TaskLockOptions,
    _option_meant,
    check_built_in,
    check_options,
    check_together,
    decides_key,
    did_you_mean,
    merged,
    templates_of,
)
from celery_redlock.tasks.settings.sources import (
    OptionSource,
    app_source,
    call_source,
    pattern_source,
    tasks_source,
)

ANY_ARGUMENTS = "any-arguments"  # instead of a digest, where no argument makes the key


@dataclass(frozen=True)
class TaskLockConfig:
    """What one task's declaration means: its options, and how its key is made.

    Raises SettingsError when it is compiled. `signature` is the body's, without self.
    """

    task_name: str
    app: AppSettings
    options: Mapping[str, Any]
    signature: inspect.Signature
    source: Callable[[str], OptionSource]  # where an option of the task stands
    queues: dict[tuple[str | None, str], str] = field(
        default_factory=dict, compare=False, repr=False
    )
    _by_queue: dict[str, TaskLockOptions] = field(default_factory=dict, compare=False, repr=False)

    @functools.cached_property
    def may_be_unique(self) -> bool:
        """Whether any send is deduplicated, but for what a call says."""
        levels = (self.app.options, *self.app.queues.values(), self.options)
        return any(level.get("unique_for") is not None for level in levels)

    @property
    def may_lock(self) -> bool:
        """Whether a run takes a lock, but for what its queue or call says."""
        return merged(self.app.options, self.options).get("key") is not False

    def may_name_queue(self, call: Mapping[str, Any]) -> bool:
        """Tell whether a key depends on the queue; call: the options of one, unchecked yet."""
        return self._names_queue or _names_queue(call.get("key"))

    @functools.cached_property
    def _names_queue(self) -> bool:
        return any(_names_queue(level.get("key")) for level in (self.app.options, self.options))

    def options_for(self, queue: str, call: Mapping[str, Any] | None = None) -> TaskLockOptions:
        """Return the options in force in a queue; call: those of the message, unchecked yet."""
        if call:
            return self._merge(queue, self.check_call(call))
        rules = self._by_queue.get(queue)
        if rules is None:
            rules = self._by_queue[queue] = self._merge(queue, {})
        return rules

    def _levels(
        self, queue: str, call: Mapping[str, Any]
    ) -> Iterator[tuple[Mapping[str, Any], Callable[[str], OptionSource]]]:
        """Give the options of each level, the nearest last, and where they stand there."""
        yield (
            {"ttl": self.app.built_in_ttl, **BUILT_IN},
            lambda name: OptionSource("built-in", name),
        )
        yield self.app.options, app_source
        pattern = pattern_for(queue, self.app.queues)
        if pattern is not None:
            yield self.app.queues[pattern], pattern_source("queue", pattern)
        yield self.options, self.source
        yield call, call_source

    def _merge(self, queue: str, call: Mapping[str, Any]) -> TaskLockOptions:
        whole = merged(*(options for options, _ in self._levels(queue, call)))
        check_together(f"task {self.task_name!r} in queue {queue!r}", whole)
        check_built_in(self.app, whole)
        return TaskLockOptions(
            **{name: whole[name] for name in TaskLockOptions.__dataclass_fields__}
        )

    def effective_options(
        self, queue: str, call: Mapping[str, Any] | None = None
    ) -> EffectiveOptions:
        """Return the options in force in a queue with where each stands; call: unchecked yet."""
        checked_call = self.check_call(call or {})
        sources: dict[str, OptionSource] = {}
        for options, source in self._levels(queue, checked_call):
            for name in filter(options.__contains__, KEY_OPTIONS):
                sources.update(dict.fromkeys(KEY_OPTIONS, source(name)))
            sources.update((name, source(name)) for name in options)
        rules = self._merge(queue, checked_call)
        told = [
            OptionValue(name, getattr(rules, name), sources[name])
            for name in TaskLockOptions.__dataclass_fields__
        ]
        return EffectiveOptions(self.task_name, queue, tuple(told))

    def check_call(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a call, checked, also beside those of task and app."""
        valid = check_options(options, self.app, call_source, travels=True)
        self.check_key(valid, call_source)
        check_together("call", merged(self.app.options, self.options, valid))
        return valid

    def check_key(self, options: Mapping[str, Any], source: Callable[[str], OptionSource]) -> None:
        """Raise SettingsError where a level's `key` or `args` names what the function has not.

        source: from an option's name to where it stands at that level.
        """
        if not decides_key(options):
            return
        key, args = options.get("key"), options.get("args")
        if args is not None:
            self._check_names(args, source("args"))
            self._check_defaults(None, args, source("args"))
            return
        templates = templates_of(key)
        names = [name for text in templates for name in template_names(text, source("key"))]
        known = (*self.signature.parameters, *TEMPLATE_NAMES)
        unknown = [name for name in names if name not in known]
        if unknown:
            written = list(key) if isinstance(key, tuple) else key
            raise source("key").wrong(written, self._no_such(unknown[0], known))
        if not callable(key) and key is not False:
            self._check_defaults(key, tuple(self.signature.parameters), source("key"))

    def _check_names(self, args: tuple[str, ...], source: OptionSource) -> None:
        """Raise SettingsError where one of these is no argument of the function."""
        parameters = self.signature.parameters
        unknown = [name for name in args if name not in parameters]
        if unknown:
            raise source.wrong(list(args), self._no_such(unknown[0], parameters))

    def _check_defaults(self, key: Any, names: tuple[str, ...], source: OptionSource) -> None:
        """Raise SettingsError where an argument's default would make another key each time.

        names: the arguments that make the digest where there is no template.
        None is not wrong, nor is a default without the item that a template names: a call may give
        another value.
        """
        parameters, templates = self.signature.parameters, templates_of(key)
        fields = [name for template in templates for name in _fields(template, source)]
        defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
        whole = () if templates else names
        if "digest" in fields and "digest" not in parameters:
            whole = names
        checks: list[tuple[str, Any, Callable[[Any], Any]]]
        checks = [(name, defaults[name], canonical) for name in whole if name in defaults]
        for name in fields:
            with contextlib.suppress(LookupError, TypeError):
                item = _FORMATTER.find(name, defaults)
                checks.append((name, item.value, _for_template))
        for name, value, check in checks:
            try:
                check(value)
            except TypeError as error:
                raise unstable(self.task_name, f"default of {name!r}", value, error) from None

    def _no_such(self, name: str, known: Iterable[str]) -> str:
        return f"{self.task_name} has no argument {name!r}{did_you_mean(name, known)}"

    def resources(
        self,
        rules: TaskLockOptions,
        task: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        queue: str,
    ) -> tuple[str, ...]:
        """Return what a run with these arguments locks: all or none; () where it takes no lock.

        Raises SettingsError where the key cannot be made, and where the arguments do not fit the
        function.
        """
        key = rules.key
        if key is False:
            return ()
        if callable(key):
            return self._called(rules, task, tuple(args), dict(kwargs))
        arguments = self._arguments(args, kwargs)
        if key is not None:
            return tuple(self._filled(text, arguments, queue) for text in templates_of(key))
        if rules.args is None:
            return (f"{self.task_name}:{digest(arguments, self.task_name)}",)
        if not rules.args:
            return (f"{self.task_name}:{ANY_ARGUMENTS}",)
        chosen = {name: value for name, value in arguments.items() if name in rules.args}
        if len(chosen) < len(rules.args):
            # those of a queue cannot be checked against every task when the app finalizes
            source = pattern_source("queue", pattern_for(queue, self.app.queues) or queue)
            self._check_names(rules.args, source("args"))
        return (f"{self.task_name}:{digest(chosen, self.task_name)}",)

    def shapes(self, rules: TaskLockOptions, queue: str) -> tuple[str, ...]:
        """Return what a run's resources look like, {} for each argument; () where none is known.

        Tasks with the same shape may lock the same resource. Without a template it names the task.
        """
        if rules.key is None or rules.key is False or callable(rules.key):
            return ()
        blank = dict.fromkeys(self.signature.parameters, "{}")
        known = {"task": self.task_name, "queue": queue, "digest": "{digest}", **blank}
        shapes = []
        for template in templates_of(rules.key):
            parts = _FORMATTER.parse(template)
            fields = [(text, (name or "").partition("[")[0]) for text, name, _, _ in parts]
            shapes.append("".join(text + known.get(name, "") for text, name in fields))
        return tuple(shapes)

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return every argument by its name, defaults included."""
        names = self._plain
        if names is not None and not kwargs and len(args) == len(names):
            return dict(zip(names, args, strict=True))  # as below, at a third of its cost
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:  # no retry of it: Celery publishes none that does not fit
            raise self._misfit(error, args, kwargs) from None
        bound.apply_defaults()
        return bound.arguments

    def _misfit(
        self, error: TypeError, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> ArgumentsError:
        """Return the error for arguments that do not fit the function; it shows none of them."""
        bare = [p.replace(annotation=p.empty) for p in self.signature.parameters.values()]
        named = f", {', '.join(sorted(kwargs))} by name" if kwargs else ""
        hint = (
            f"do not fit {self.task_name}{inspect.Signature(bare)}: {error}. A send and lock_for "
            "give all that a run takes. Where the message was sent for another version of the "
            "task, let a worker of that version run it, or let the function take both: give a new "
            "argument a default, keep an old one while messages have it"
        )
        level = f"task {self.task_name!r}"
        return ArgumentsError(level, "arguments", f"({len(args)} by position{named})", hint)

    @functools.cached_property
    def _plain(self) -> Sequence[str] | None:
        """The names of the parameters where each can stand by position or name, else None."""
        parameters = self.signature.parameters.values()
        all_plain = all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters)
        return tuple(self.signature.parameters) if all_plain else None

    def _called(self, rules: TaskLockOptions, task: Any, args: Any, kwargs: Any) -> tuple[str, ...]:
        source, key = self.source("key"), rules.key
        try:
            returned = key(task, args, kwargs)
        except Exception as error:
            raise source.wrong(
                key, f"the callable raised {type(error).__name__}: {error}"
            ) from error
        found = returned if isinstance(returned, (list, tuple)) else [returned]
        if not found or not all(isinstance(resource, str) and resource for resource in found):
            got = f"got {type(returned).__name__}"
            raise source.wrong(key, f"must return a text or a list of texts, not empty; {got}")
        resources = in_order(found)
        check_permits(source.level, limit=rules.limit, fencing=rules.fencing, resources=resources)
        return resources

    def _filled(self, template: str, arguments: Mapping[str, Any], queue: str) -> str:
        source = self.source("key")
        known = _Arguments(self.task_name, queue, arguments)
        try:
            text = _FORMATTER.vformat(template, (), known)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            hint = f"cannot be filled ({type(error).__name__}: {error}); is an argument missing?"
            raise source.wrong(template, hint) from error
        if not text:
            raise source.wrong(template, "gives an empty text for these arguments")
        return text


def compile_config(
    app: AppSettings,
    task_name: str,
    attributes: Mapping[str, Any],
    signature: inspect.Signature,
    others: Sequence[str] = (),
) -> TaskLockConfig:
    """Return the plan of a task; raises SettingsError.

    attributes: its lock_* attributes by their full names, functions unbound.
    others: names of lock_* attributes that are methods or properties, and so no options.
    """
    level = f"task {task_name!r}"
    options = {}
    for written, value in attributes.items():
        name = written.removeprefix("lock_")
        if name not in OPTIONS:
            if callable(value) or written in others:
                continue
            hint = f"is not an option{_option_meant(written, 'lock_')}"
            raise SettingsError(level, written, repr(value), hint)
        options[name] = value

    def source(name: str) -> OptionSource:
        return OptionSource(level, f"lock_{name}")

    options = check_options(options, app, source, travels=False)
    return _check_config(TaskLockConfig(task_name, app, options, signature, source))


def compile_adopted_config(
    app: AppSettings, task_name: str, pattern: str, signature: inspect.Signature
) -> TaskLockConfig:
    """Return the plan of a task that `redlock_tasks` locks; raises SettingsError.

    pattern: the entry that it goes by. What the task itself says of `lock_*` is not about locks.
    """
    if pattern not in app.tasks:
        hint = "came after the settings had been read: set it before the app finalizes"
        raise tasks_source(pattern).wrong("...", hint)
    source = pattern_source("task", pattern)
    return _check_config(TaskLockConfig(task_name, app, app.tasks[pattern], signature, source))


def _check_config(plan: TaskLockConfig) -> TaskLockConfig:
    """Return a plan whose key its function can fill, and whose options go together."""
    if decides_key(plan.options):
        plan.check_key(plan.options, plan.source)
    elif decides_key(plan.app.options) or not any(map(decides_key, plan.app.queues.values())):
        plan.check_key({"key": None, **plan.app.options}, app_source)
    of_task = merged(plan.app.options, plan.options)
    check_together(f"task {plan.task_name!r}", of_task)
    of_all_queues = plan.app.for_queue("")  # what a glob for any name says
    built_in = {"ttl": plan.app.built_in_ttl}
    check_built_in(plan.app, merged(built_in, plan.app.options, of_all_queues, plan.options))
    unique_for = plan.options.get("unique_for")
    if plan.options.get("key") is False and unique_for is not None:
        hint = "deduplicates by the lock's key, and key=False makes none: name a key"
        raise plan.source("unique_for").wrong(unique_for, hint)
    return plan
