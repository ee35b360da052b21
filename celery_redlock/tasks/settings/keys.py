"""The keys of one task: checked once against its function, and made for each call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from celery_redlock.errors import ArgumentsError
from celery_redlock.lock.model.keys import in_order
from celery_redlock.lock.validation import MOST_BYTES, check_permits, is_too_long
from celery_redlock.tasks.settings.app import (
    AppSettings,
    OptionSource,
    SourceOf,
    did_you_mean,
    pattern_for,
)
from celery_redlock.tasks.settings.levels import decides_key
from celery_redlock.tasks.settings.options import TaskLockOptions
from celery_redlock.tasks.settings.templates import (
    TEMPLATE_NAMES,
    Field,
    canonical,
    compiled,
    digest,
    fields_of,
    fill,
    formattable,
    templates_of,
    unstable,
)

_TOO_LONG = f"a resource has at most {MOST_BYTES} bytes"
ANY_ARGUMENTS = "any-arguments"  # instead of a digest, if no argument is part of the key


class TaskCall(NamedTuple):
    """One call of a task, from which its resources are made. task: for a key that is a callable."""

    task: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    queue: str


@dataclass(frozen=True)
class TaskKeys:
    """How the keys of one task are checked and made.

    signature: of its function, without self. source: from an option's name to its source at the
    task's own level.
    """

    task_name: str
    app: AppSettings
    signature: inspect.Signature
    source: SourceOf

    def check(self, options: Mapping[str, Any], source_of: SourceOf) -> None:
        """Raise SettingsError if a level's `key` or `args` names an argument that does not exist.

        options: of one level, checked one by one. source_of: from an option's name to its source
        at that level.
        """
        if not decides_key(options):
            return
        key, args = options.get("key"), options.get("args")
        if args is not None:
            self._check_names(args, source_of("args"))
            self._check_defaults(None, args)
            return
        source, parameters = source_of("key"), tuple(self.signature.parameters)
        known = (*parameters, *TEMPLATE_NAMES)
        unknown = [field.name for field in _fields_of(key) if field.name not in known]
        if unknown:
            written = list(key) if isinstance(key, tuple) else key
            raise source.wrong(written, self._no_such(unknown[0], known))
        if not callable(key) and key is not False:
            self._check_defaults(key, parameters)

    def _check_names(self, args: tuple[str, ...], source: OptionSource) -> None:
        """Raise SettingsError if one of these is no argument of the function."""
        parameters = self.signature.parameters
        unknown = [name for name in args if name not in parameters]
        if unknown:
            raise source.wrong(list(args), self._no_such(unknown[0], parameters))

    def _no_such(self, name: str, known: Iterable[str]) -> str:
        return f"{self.task_name} has no argument {name!r}{did_you_mean(name, known)}"

    def _check_defaults(self, key: Any, names: tuple[str, ...]) -> None:
        """Raise SettingsError if an argument's default would make another key each time.

        names: the arguments of the digest. None is no error, nor is a default without the item
        that a template names: a call may give another value.
        """
        for name, value, check in self._defaults_of(key, names):
            try:
                check(value)
            except TypeError as error:
                raise unstable(self.task_name, f"default of {name!r}", value, error) from None

    def _defaults_of(
        self, key: Any, names: tuple[str, ...]
    ) -> Iterator[tuple[str, Any, Callable[[Any], Any]]]:
        """Give each default that enters a key: its name, its value, and the check of the value."""
        parameters, fields = self.signature.parameters, _fields_of(key)
        defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
        is_digest = "digest" not in parameters and any(one.name == "digest" for one in fields)
        for name in names if is_digest or not templates_of(key) else ():
            if name in defaults:
                yield name, defaults[name], canonical
        for field in fields:
            try:
                value = field.find(defaults)
            except (LookupError, TypeError):
                continue
            yield field.written, value, formattable

    def resources(self, options: TaskLockOptions, call: TaskCall) -> tuple[str, ...]:
        """Return the resources that a call locks, all or none; () if it takes no lock.

        Raises SettingsError if the key cannot be made, ArgumentsError if the arguments do not fit
        the function.
        """
        key = options.key
        if key is None:
            return (self._own_resource(options, call),)
        if key is False:
            return ()
        if callable(key):
            return self._called(options, call)
        arguments = self._bind(call.args, call.kwargs)
        return tuple(self._filled(text, arguments, call.queue) for text in templates_of(key))

    def _own_resource(self, options: TaskLockOptions, call: TaskCall) -> str:
        """Return the resource of this task alone, made from all arguments or those in `args`."""
        arguments = self._bind(call.args, call.kwargs)
        if options.args is None:
            return f"{self.task_name}:{digest(arguments, self.task_name)}"
        if not options.args:
            return f"{self.task_name}:{ANY_ARGUMENTS}"
        chosen = {name: value for name, value in arguments.items() if name in options.args}
        if len(chosen) < len(options.args):
            # a queue's names cannot be checked against every task when the app finalizes
            pattern = pattern_for(call.queue, self.app.queues) or call.queue
            self._check_names(options.args, OptionSource.at("queues", "args", pattern))
        return f"{self.task_name}:{digest(chosen, self.task_name)}"

    def shapes(self, options: TaskLockOptions, queue: str) -> tuple[str, ...]:
        """Return the resources of any call, with {} for each argument; () if they are not known.

        Tasks with the same shape may lock the same resource. A key without a template begins with
        the task's name, so no other task has it.
        """
        blank = dict.fromkeys(self.signature.parameters, "{}")
        known = {"task": self.task_name, "queue": queue, "digest": "{digest}", **blank}
        return tuple(
            "".join(part if isinstance(part, str) else known.get(part.name, "") for part in parts)
            for parts in map(compiled, templates_of(options.key))
        )

    def _called(self, options: TaskLockOptions, call: TaskCall) -> tuple[str, ...]:
        """Return the resources that a key's callable returns."""
        source, key = self.source("key"), options.key
        try:
            returned = key(call.task, tuple(call.args), dict(call.kwargs))
        except Exception as error:
            hint = f"the callable raised {type(error).__name__}: {error}"
            raise source.wrong(key, hint) from error
        found = returned if isinstance(returned, (list, tuple)) else [returned]
        if not found or not all(isinstance(resource, str) and resource for resource in found):
            got = f"got {type(returned).__name__}"
            raise source.wrong(key, f"must return a text or a list of texts, not empty; {got}")
        if any(map(is_too_long, found)):
            raise source.wrong(key, f"{_TOO_LONG}; a callable returned more")
        found = in_order(found)
        check_permits(source.level, limit=options.limit, fencing=options.fencing, resources=found)
        return found

    def _filled(self, template: str, arguments: Mapping[str, Any], queue: str) -> str:
        try:
            text = fill(template, arguments, self.task_name, queue)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            hint = f"cannot be filled ({type(error).__name__}: {error}); is an argument missing?"
            raise self.source("key").wrong(template, hint) from error
        if not text:
            raise self.source("key").wrong(template, "gives an empty text for these arguments")
        if is_too_long(text):
            raise self.source("key").wrong(template, f"{_TOO_LONG}; these arguments give more")
        return text

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return every argument by its name, defaults included, in the signature's order.

        Raises ArgumentsError if they do not fit the function.
        """
        binder = self._binder
        try:
            return binder(*args, **kwargs)
        except TypeError as error:  # not retried: Celery publishes no retry that does not fit
            why = str(error).removeprefix(f"{binder.__qualname__}() ")
            raise self._misfit(why, args, kwargs) from None

    @functools.cached_property
    def _binder(self) -> Callable[..., dict[str, Any]]:
        """A function with these parameters that returns its arguments by name."""
        parameters = self.signature.parameters.values()
        bare = [p.replace(annotation=p.empty, default=p.empty) for p in parameters]
        shown = ", ".join(f"{p.name!r}: {p.name}" for p in parameters)
        # as `namedtuple` does: Python binds, at a tenth of the cost of `Signature.bind`
        source = f"lambda {str(inspect.Signature(bare))[1:-1]}: {{{shown}}}"
        binder: Any = eval(source, {})  # noqa: S307 - a signature has names and nothing else
        given = [p for p in parameters if p.default is not p.empty]
        binder.__kwdefaults__ = {p.name: p.default for p in given if p.kind is p.KEYWORD_ONLY}
        binder.__defaults__ = tuple(p.default for p in given if p.kind is not p.KEYWORD_ONLY)
        return binder  # type: ignore[no-any-return]

    def _misfit(self, why: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ArgumentsError:
        """Return the error for arguments that do not fit the function; it shows none of them."""
        bare = [p.replace(annotation=p.empty) for p in self.signature.parameters.values()]
        named = f", {', '.join(sorted(map(str, kwargs)))} by name" if kwargs else ""
        hint = (
            f"do not fit {self.task_name}{inspect.Signature(bare)}: {why}. A send and lock_for "
            "give all that a run takes. If the message was sent for another version of the task, "
            "let a worker of that version run it, or let the function take both: give a new "
            "argument a default, and keep an old argument while messages have it"
        )
        level = f"task {self.task_name!r}"
        return ArgumentsError(level, "arguments", f"({len(args)} by position{named})", hint)


def _fields_of(key: Any) -> list[Field]:
    """Return the fields of all templates of a key."""
    return [field for text in templates_of(key) for field in fields_of(compiled(text))]
