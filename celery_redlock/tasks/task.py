"""`LockedTask`, and what connects it to an app."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import types
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

from celery import Task, bootsteps
from celery._state import connect_on_app_finalize, get_current_task, get_current_worker_task
from celery.app.autoretry import add_autoretry_behaviour
from celery.app.registry import TaskRegistry
from celery.signals import before_task_publish, task_received, worker_init, worker_ready
from celery.utils import uuid
from celery.utils.imports import symbol_by_name
from celery.utils.time import maybe_iso8601, maybe_make_aware

from celery_redlock.errors import (
    DuplicateTask,
    NoRunError,
    NotAcquired,
    RedlockError,
    SettingsError,
)
from celery_redlock.lock.lock import Lock
from celery_redlock.lock.node_status import (
    NodeReport,
    ask_nodes,
    exchange_shared_settings,
    shared_settings_of,
)
from celery_redlock.lock.validation import check_wait
from celery_redlock.tasks.backoff import Backoff
from celery_redlock.tasks.children import watch_children
from celery_redlock.tasks.deferral import HEADER, Slip, own_headers, utc_now
from celery_redlock.tasks.gate import ENTRY, gated, is_gate, lock_of, noted, passage_of, plan_of
from celery_redlock.tasks.routes import Address, queue_of
from celery_redlock.tasks.runtime import name_of as name_of_app
from celery_redlock.tasks.runtime import redlock_of, settings_of
from celery_redlock.tasks.settings import (
    BUILT_IN,
    CELERYS,
    AppSettings,
    EffectiveOptions,
    Place,
    Plan,
    Rules,
    check_known_names,
    check_outside,
    checked,
    pattern_for,
    tasks_place,
)
from celery_redlock.tasks.uniqueness import Send, Standing, is_awaited, name_of, send_once

logger = logging.getLogger(__name__)

HOOKS = ("on_success", "on_failure", "on_retry", "after_return")
REQUEST = "celery_redlock.tasks.request:Request"  # by name: only workers import it
DEFAULT_STRATEGY = "celery.worker.strategy:default"


class LockedTask(Task):
    """A task that takes a Redlock, made of its arguments, before its body runs.

    `@app.task(base=LockedTask, lock_key="stock:{sku}", lock_ttl=30)`; every option of the README's
    table is an attribute `lock_<name>`. Raises SettingsError when the app finalizes.
    Sources of the extension points: `__init_subclass__` is the one place that function tasks,
    class tasks, autoretry and mixed bases all pass; `on_bound` is Celery's, called after
    `task_annotations` may have replaced `run`.
    """

    abstract = True
    Request: Any = REQUEST
    dont_autoretry_for = (NotAcquired, SettingsError)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Put the gate around the class's own `run` and `__call__`, and watch its hooks."""
        super().__init_subclass__(**kwargs)
        cls._put_gate()

    @classmethod
    def _put_gate(cls) -> None:
        wraps = {"run": gated, "__call__": gated, **dict.fromkeys(HOOKS, noted)}
        for name, wrap in wraps.items():
            body = inspect.getattr_static(cls, name)
            is_celerys = body is Task.__dict__[name]
            if not is_celerys and not is_gate(body):
                setattr(cls, name, wrap(body))
        theirs = inspect.getattr_static(cls, "Request")
        if theirs != REQUEST and not isinstance(theirs, _BothRequests):
            cls.Request = _BothRequests(theirs)

    @classmethod
    def on_bound(cls, app: Any) -> None:
        """Check the declaration, and take over `track_started`: STARTED means the lock is held."""
        super().on_bound(app)
        cls._put_gate()
        if (cls.name or "").startswith(CELERYS):
            return
        if "_redlock_track_started" not in cls.__dict__:
            inherited = getattr(cls, "_redlock_track_started", cls.track_started)
            wanted = cls.track_started if "track_started" in cls.__dict__ else inherited
            cls._redlock_track_started, cls.track_started = wanted, False
        if app.finalized and cls.name:  # one that names its instances is checked at its first use
            cls._check(app)

    @classmethod
    def _check(cls, app: Any) -> None:
        if cls.Strategy != DEFAULT_STRATEGY:
            hint = "runs bodies by itself, so that no lock would be taken: use Celery's default"
            raise SettingsError(f"task {cls.name!r}", "Strategy", repr(cls.Strategy), hint)
        if app.conf.get("redlock_tasks") and not isinstance(app._tasks, _Registry):
            # Celery calls what finalizes an app in any order: if this raises, others' tasks are
            # behind their gate already, and do not run without their lock
            _Registry.put_gates(app)
        plan_of(app._tasks.get(cls.name) or cls())

    @property
    def lock(self) -> Lock | None:
        """The running task's lock; None in a run that takes none, or has given it back.

        Outside a run, so in a direct call too, it raises a RedlockError that is an AttributeError:
        `hasattr`, and whatever walks a task's attributes, takes it for missing.
        """
        request = self.request
        passage = passage_of(request)
        if passage is None and request.called_directly:
            raise NoRunError(self.name)
        return None if passage is None else passage.lock

    def lock_for(self, *args: Any, **kwargs: Any) -> Lock:
        """Return the lock that a run with these arguments takes, for use outside a run.

        `wait` (s) is the lock's, unless the task has an argument of that name. Options and
        `{queue}` are those of the task's own routing. Raises SettingsError, and RedlockError for
        a task or arguments that take no lock.
        """
        plan = plan_of(self)
        wait = None
        if "wait" in kwargs and "wait" not in plan.signature.parameters:
            wait = check_wait(f"task {self.name!r}", "lock_for(wait=...)", kwargs.pop("wait"))
        queue = self._own_queue(args, kwargs)
        rules = plan.rules(queue)
        resources = plan.resources(rules, self, args, kwargs, queue)
        if not resources:
            raise RedlockError(f"{self.name} takes no lock: its lock_key is False")
        return lock_of(self, rules, resources, label=f"lock_for {self.name}", wait=wait)

    def lock_options(
        self, queue: str | None = None, lock: Mapping[str, Any] | None = None
    ) -> EffectiveOptions:
        """Return the options in force, each with the level and the name by which it was set.

        queue: by its name; None: the one that the task's own routing gives. lock: as for a call.
        As text it is a table. Raises SettingsError.
        """
        own = self._own_queue((), {}) if queue is None else queue
        return plan_of(self).told(own, self._checked_call({} if lock is None else lock))

    def _own_queue(self, args: Any, kwargs: Any) -> str:
        """Return the name of the queue that the task's own routing sends these arguments to."""
        return self._queue_of(args, kwargs, {})

    def _queue_of(self, args: Any, kwargs: Any, of_call: Mapping[str, Any]) -> str:
        """Return the same for a send with options of its own."""
        options = {**self._get_exec_options(), **of_call}
        if options.get("routing_key") and not options.get("queue"):
            return queue_of(self.app, Address.of(options))
        options = self.app.amqp.router.route(options, self.name, args, kwargs, self)
        queue = options.get("queue")
        return (
            queue_of(self.app, Address.of(options))
            if queue is None
            else str(getattr(queue, "name", queue))
        )

    def apply_async(self, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        """Send the task, as Celery does; `lock={"ttl": 60}` sets options for this call alone.

        With `unique_for` a second send inside the window returns the first one's result, raises
        DuplicateTask, or takes its place, as `on_duplicate` says; one that something waits for (its
        id is given, or it has links, or is part of a canvas) is always sent.
        Raises SettingsError for a wrong option, also for one that stands outside of `lock`, and
        for a task whose declaration is wrong;
        QuorumUnreachable at a send that is to be deduplicated, where on_unreachable="fail".
        """
        if self.name.startswith(CELERYS):
            return super().apply_async(args, kwargs, *more, **options)
        plan = plan_of(self)
        check_outside(options)
        if more:
            self._write_slip(plan, options, more[0])
            return super().apply_async(args, kwargs, *more, **options)
        rules = None
        if plan.may_be_unique or "lock" in options:
            rules = self._rules_of_send(plan, args, kwargs, options)
        if not options.get("task_id"):
            options["task_id"] = uuid()
        self._write_slip(plan, options, options["task_id"])
        if rules is None:
            return super().apply_async(args, kwargs, **options)
        return self._send_once(plan, rules, args, kwargs, options)

    def _rules_of_send(
        self, plan: Plan, args: Any, kwargs: Any, options: Mapping[str, Any]
    ) -> tuple[str, Rules] | None:
        """Return queue and options of a send that is to be deduplicated, else None.

        An eager one is not: it is over when it returns.
        """
        of_call = self._checked_call(options.get("lock", {}))
        asked = plan.may_be_unique or "unique_for" in of_call
        if not asked or is_awaited(options) or self.app.conf.task_always_eager:
            return None
        queue = ""
        if plan.app.queues or plan.may_name_queue(of_call):
            queue = self._queue_of(args, kwargs, {k: options[k] for k in options if k != "lock"})
        rules = plan.rules(queue, of_call)
        return None if rules.unique_for is None else (queue, rules)

    def _send_once(
        self, plan: Plan, found: tuple[str, Rules], args: Any, kwargs: Any, options: dict[str, Any]
    ) -> Any:
        """Send it unless it is a duplicate."""
        queue, rules = found
        resources = plan.resources(rules, self, args or (), kwargs or {}, queue)
        if not resources:
            return super().apply_async(args, kwargs, **options)
        send = send_of(self.app, self.name, resources, options, rules, plan.app)
        plain = functools.partial(super().apply_async, args, kwargs)
        sent = publish_once(self.app, send, options, plain)
        return self.AsyncResult(told(sent, rules, resources)) if type(sent) is Standing else sent

    def apply(self, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        """Run the task here and now, as Celery does, under its lock; `lock={...}` as for a send."""
        check_outside(options)
        if "lock" in options:
            options["task_id"] = options.get("task_id") or uuid()
            self._write_slip(plan_of(self), options, options["task_id"])
        return super().apply(args, kwargs, *more, **options)

    def signature_from_request(
        self, request: Any = None, args: Any = None, kwargs: Any = None, queue: Any = None,
        **options: Any,
    ) -> Any:  # fmt: skip
        """Return a retry's signature, as Celery does; headers of its own keep the call's `lock`.

        And where the message came with a header called "headers", it keeps those beside it.
        """
        retried = self.request if request is None else request
        carried, own = retried.get(HEADER), own_headers(retried)
        if carried and ("headers" in options or HEADER not in (retried.headers or {})):
            options["headers"] = {HEADER: carried, **(options.get("headers") or own)}
        return super().signature_from_request(request, args, kwargs, queue, **options)

    def _write_slip(self, plan: Plan, options: dict[str, Any], task_id: str) -> None:
        """Put into the message what the call says and its worker cannot see otherwise."""
        if "lock" in options:
            slip = {"options": self._call_options(plan, options.pop("lock")), "id": task_id}
            options["headers"] = {**(options.get("headers") or {}), HEADER: slip}

    def _checked_call(self, of_call: Any) -> Mapping[str, Any]:
        if not isinstance(of_call, Mapping):
            hint = 'must map option names to values, as lock={"ttl": 60}'
            raise SettingsError("call", "lock", repr(of_call), hint)
        return of_call

    def _call_options(self, plan: Plan, of_call: Any) -> dict[str, Any]:
        return options_to_message(plan.check_call(self._checked_call(of_call)))

    def chunks(self, it: Any, n: int) -> NoReturn:
        """Refuse: the body would be called directly, without the lock. Raises RedlockError."""
        self._refuse("chunks")

    def map(self, it: Any) -> NoReturn:
        """Refuse: the body would be called directly, without the lock. Raises RedlockError."""
        self._refuse("map")

    def starmap(self, it: Any) -> NoReturn:
        """Refuse: the body would be called directly, without the lock. Raises RedlockError."""
        self._refuse("starmap")

    def _refuse(self, what: str) -> NoReturn:
        raise RedlockError(
            f"{self.name}.{what} would call the body inside another task's run, without its lock: "
            f"use group({self.name}.s(...) for ...) instead"
        )


def options_to_message(of_call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a call as any serializer takes them."""
    return {
        name: value.to_message() if isinstance(value, Backoff) else value
        for name, value in of_call.items()
    }


@before_task_publish.connect(weak=False)
def _carry_options(
    sender: Any = None, body: Any = None, headers: Any = None, properties: Any = None, **_: Any
) -> None:
    """Have a message carry the `lock=` of a send by name, and that of signatures within it.

    Source: celery.app.amqp sends this before the message is serialized. An option of `send_task`
    that Celery does not know is a property by then, which AMQP brokers drop in silence. What is
    raised here would be swallowed, so it is the run that refuses a wrong option.
    """
    if properties and "lock" in properties:
        _put_options(sender, properties.pop("lock"), headers)
    args, embedded = (body[0], body[2]) if isinstance(body, tuple) else (body.get("args"), body)
    for name in ("callbacks", "errbacks", "chain", "chord"):
        _options_within(embedded.get(name))
    for value in args or ():
        _options_within(value)


def _put_options(name: str, of_call: Any, headers: dict[str, Any]) -> None:
    """Put the options of a send by name into its headers, beside what its window has there."""
    if not isinstance(of_call, Mapping):
        of_call = {"lock": repr(of_call)}  # which is no option
    if of_call.get("unique_for") is not None:
        logger.warning(
            "sending %s without deduplication: a send by name knows no key; use send_unique",
            name, extra={"event": "sent_without_check", "task": name},
        )  # fmt: skip
    task_id = headers.get("id")
    slip = headers.get(HEADER)
    if not isinstance(slip, Mapping) or slip.get("id") != task_id:  # a parent's
        slip = {"id": task_id}
    headers[HEADER] = {**slip, "options": options_to_message(of_call)}


_said_unlocked: set[str] = set()


@task_received.connect(weak=False)
def _say_that_none_is_locked(request: Any = None, **_: Any) -> None:
    """Say once that a task takes no lock for which a message brings options of one."""
    if HEADER not in request.request_dict or isinstance(request.task, LockedTask):
        return
    if request.name not in _said_unlocked and Slip.of(request._context).options:
        _said_unlocked.add(request.name)
        text = "%s takes no lock, for it is no LockedTask: lock=... of its calls does nothing"
        logger.warning(text, request.name, extra={"event": "not_locked", "task": request.name})


def _options_within(value: Any) -> None:
    """Make the options of signatures ready for their message: of this one, or of those in a list.

    Of a long list that holds none the first item alone is looked at.
    """
    if isinstance(value, (list, tuple)):
        if value and isinstance(value[0], (list, tuple, Mapping)):
            for item in value:
                _options_within(item)
        return
    if not isinstance(value, Mapping) or not isinstance(value.get("options"), Mapping):
        return
    options, of_call = value["options"], value["options"].get("lock")
    if isinstance(of_call, Mapping):
        options["lock"] = options_to_message(of_call)
    inner = value.get("kwargs") if value.get("subtask_type") else None
    for part in (*options.values(), *(inner or {}).values(), *(value.get("args") or ())):
        _options_within(part)


class _BothRequests:
    """What stands for a task's own `Request`: ours, with theirs below it, made where it is used.

    theirs: a class or its name, as Celery takes it.
    Source: celery.worker.strategy asks for it, in a worker.
    """

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs

    def __get__(self, task: Any, owner: Any = None) -> type:
        ours, theirs = symbol_by_name(REQUEST), symbol_by_name(self._theirs)
        if issubclass(theirs, ours):
            return theirs  # type: ignore[no-any-return]
        return types.new_class(theirs.__name__, (ours, theirs))


def current_lock() -> Lock | None:
    """Return the running task's lock, for tasks without `bind`; None outside a run."""
    for task in (get_current_task(), get_current_worker_task()):
        passage = None if task is None else passage_of(task.request)
        if passage is not None:
            return passage.lock
    return None


def send_unique(
    app: Any, name: str, args: Any = None, kwargs: Any = None, *, resource: str,
    unique_for: float, unique_until: str = "finished", on_duplicate: str = "existing",
    on_unreachable: str = "defer", **options: Any,
) -> Any:  # fmt: skip
    """Send a task by its name, as `app.send_task` does, unless it is a duplicate.

    For processes that do not have the task, and so cannot make its key. resource: what its
    `lock_key` or `lock_args` gives for these arguments, as "stock:42"; then sends by class and by
    name are each other's duplicates. The rest as the options of these names, and of `send_task`.
    Returns an AsyncResult. Raises DuplicateTask, SettingsError, QuorumUnreachable.
    """
    given = {
        "unique_for": unique_for,
        "unique_until": unique_until,
        "on_duplicate": on_duplicate,
        "on_unreachable": on_unreachable,
    }
    settings, level = settings_of(app), "send_unique"
    given = checked(given, settings, lambda option: Place(level, option), travels=True)
    if not isinstance(resource, str) or not resource:
        raise SettingsError(level, "resource", repr(resource), "must be a text, not empty")
    if given["unique_for"] is None or is_awaited(options) or app.conf.task_always_eager:
        return app.send_task(name, args, kwargs, **options)
    options["task_id"] = uuid()
    rules = Rules(**{**BUILT_IN, "ttl": settings.max_ttl, **given})
    send = send_of(app, name, (resource,), options, rules, settings)
    sent = publish_once(app, send, options, functools.partial(app.send_task, name, args, kwargs))
    return app.AsyncResult(told(sent, rules, (resource,))) if type(sent) is Standing else sent


def send_of(
    app: Any,
    name: str,
    resources: tuple[str, ...],
    options: Mapping[str, Any],
    rules: Rules,
    settings: AppSettings,
) -> Send:
    """Return what is known of a send that is to be deduplicated.

    options: Celery's, with its id. The window is never longer than the message is good: one that
    expired in its queue may be dropped there, and no worker would end its window.
    """
    later = seconds_until(app, options.get("eta") or options.get("countdown") or 0.0)
    of_task = getattr(app._tasks.get(name), "expires", None)
    expires = options.get("expires", of_task)
    window = rules.unique_for or 0.0
    if expires is not None:
        window = max(0.0, min(window, seconds_until(app, expires)))
    return Send(
        name=name_of(name, resources),
        task_id=options["task_id"],
        run=f"{options['task_id']}:{name}:0:0",
        window=window,
        until=rules.unique_until,
        on_duplicate=rules.on_duplicate,
        on_unreachable=rules.on_unreachable,
        later=max(0.0, later),
        lateness=settings.done_ttl,
    )


def seconds_until(app: Any, moment: float | str | datetime) -> float:
    """Return the s until a moment, which Celery takes as such, as ISO 8601, or as these s."""
    if isinstance(moment, (str, datetime)):
        at: datetime = maybe_make_aware(maybe_iso8601(moment), app.timezone)
        return (at - utc_now()).total_seconds()
    return float(moment)


def publish_once(app: Any, send: Send, options: dict[str, Any], plain: Callable[..., Any]) -> Any:
    """Return what `plain` gives, called with the options, or the earlier send that it repeats."""

    def publish(ticket: Mapping[str, Any] | None) -> Any:
        if ticket is not None:
            put_ticket(options, ticket)
        return plain(**options)

    return send_once(redlock_of(app), send, publish)


def put_ticket(options: dict[str, Any], ticket: Mapping[str, Any]) -> None:
    """Put what a message carries of its window into the headers of its send."""
    headers, task_id = options.get("headers"), options["task_id"]
    slip = headers.get(HEADER) if headers else None
    if slip is None or not isinstance(slip, Mapping) or slip.get("id") != task_id:  # a parent's
        slip = {"options": {}, "id": task_id}
    options["headers"] = {**(headers or {}), HEADER: {**slip, "unique": ticket}}


def told(earlier: Standing, rules: Rules, resources: tuple[str, ...]) -> str:
    """Return the id of the earlier send; raises DuplicateTask where that is asked for."""
    if rules.on_duplicate == "fail":
        raise DuplicateTask(", ".join(resources), earlier.task_id)
    return earlier.task_id


def install(app: Any) -> None:
    """Lock the tasks that `redlock_tasks` names in an app of this process; once is enough.

    Importing the package does the same for every app that finalizes later, and so does Celery's
    command line. Raises SettingsError where the app has finalized, else when it does.
    """
    if app.finalized:
        _check_app(app)


@connect_on_app_finalize
def _check_app(app: Any) -> None:
    """Lock tasks of others, and refuse unknown and wrong settings, as soon as an app is complete.

    Source: celery._state; what a receiver of on_after_finalize raises would be swallowed.
    """
    others = app.conf.get("redlock_tasks")
    if others:
        _Registry.watch(app)
    check_known_names(app.conf, app.namespace)
    if others or app.conf.get("redlock_nodes") is not None:
        settings_of(app)


@worker_init.connect(weak=False)
def _lock_in_worker(sender: Any = None, **_: Any) -> None:
    """Lock tasks of others in a worker whose app had finalized before the package was imported.

    An error raised here would be swallowed, and bodies would run without their lock: a run of such
    a task raises it again.
    """
    install(sender.app)


class _Registry(TaskRegistry):
    """An app's tasks, of which those that `redlock_tasks` names get their gate as they come in.

    Celery adds a task here before it binds it, whenever that is: with the app, as a shared task,
    or by a module that is imported late. From then on it is a LockedTask like any other.
    """

    @classmethod
    def watch(cls, app: Any) -> None:
        """Lock what an app's registry holds, and what is added to it; refuse what cannot be."""
        registry = cls.put_gates(app)
        for name, task in registry.items():
            registry.check(name, task)

    @classmethod
    def put_gates(cls, app: Any) -> Any:
        """Have an app's registry lock what it holds, and what is added to it; returns that."""
        registry = app._tasks
        if not isinstance(registry, _Registry):
            kind = type(registry)
            registry.__class__ = type(kind.__name__, (cls, kind), {})
        registry.app = app
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
        if name.startswith(CELERYS):
            return None
        entries = self.app.conf.get("redlock_tasks")
        # what is no mapping raises at each use of what it names, rather than have that run unlocked
        known = entries if isinstance(entries, (Mapping, list, tuple, set)) else ()
        return pattern_for(name, map(str, known))

    def put_gate(self, name: str, task: Any) -> bool:
        """Lock a task of others that has an entry; False where nothing was to be done."""
        pattern = self.pattern_for(name)
        if pattern is None or isinstance(task, LockedTask):
            return False
        _lock_anothers(task, pattern)
        return True

    def check(self, name: str, task: Any) -> None:
        """Raise SettingsError where an entry is of a task that has options of its own."""
        pattern = self.pattern_for(name)
        if pattern == name and ENTRY not in type(task).__dict__:
            hint = (
                f"{name} is a LockedTask already: set lock_* on it, or from outside by Celery's "
                f'task_annotations = {{{name!r}: {{"lock_ttl": 30}}}}'
            )
            raise tasks_place(name).wrong(self.app.conf.redlock_tasks[name], hint)


def _lock_anothers(task: Any, pattern: str) -> None:
    """Make a task of others a LockedTask, which goes by an entry of `redlock_tasks`.

    It gets a class of its own below its own one, so that the instance is the one that others may
    hold, and their class stays as it is. LockedTask comes first, for their `apply_async` need not
    know `lock`; what they call `lock` themselves stays theirs.
    """
    cls = type(task)
    own = task.__dict__.pop("run", None)  # of the instance: autoretry, or what its __init__ set
    autoretry = own if "_orig_run" in task.__dict__ else None
    if autoretry is not None:
        own = task.__dict__.pop("_orig_run")
    spared = getattr(task, "dont_autoretry_for", None) or LockedTask.dont_autoretry_for
    body = {ENTRY: pattern, "dont_autoretry_for": spared, "__module__": cls.__module__}
    if cls.Request != Task.Request:
        body["Request"] = cls.Request
    for name in ("lock", "lock_for", "lock_options"):
        if inspect.getattr_static(task, name, None) is not None:
            body[name] = inspect.getattr_static(cls, name, None)
    if own is not None and own != task.run:
        body["run"] = staticmethod(own)
    made = types.new_class(cls.__name__, (LockedTask, cls), {}, lambda made: made.update(body))
    made.__qualname__ = cls.__qualname__
    task.__class__ = made
    if autoretry is not None:  # around the gate, as where a LockedTask is made
        said = dict(inspect.getclosurevars(autoretry).nonlocals)
        said["dont_autoretry_for"] = said["dont_autoretry_for"] or spared
        del said["task"]
        add_autoretry_behaviour(task, **said)


class RefuseEventlet(bootsteps.Step):
    """Ends a worker with the eventlet pool at its start if it has locked tasks.

    Under eventlet a body that never gives way stops every thread, so that no renewal is in time.
    Raises SettingsError. Source: celery.bootsteps; receivers of `worker_init` cannot end a worker.
    """

    name = "celery_redlock pool"

    def __init__(self, worker: Any, **options: Any) -> None:
        super().__init__(worker, **options)
        if not is_of_eventlet(worker.pool_cls):
            return
        locked = sorted(task.name for task in locked_tasks(worker.app) if plan_of(task).may_lock)
        if locked:
            hint = (
                f"eventlet cannot run locked tasks ({', '.join(locked)}): start the worker with "
                "-P gevent, or with prefork, threads or solo"
            )
            raise SettingsError("worker", "worker_pool", "eventlet", hint)


@worker_init.connect(weak=False)
def _refuse_eventlet(sender: Any, **_: Any) -> None:
    sender.app.steps["worker"].add(RefuseEventlet)


def is_of_eventlet(pool: type) -> bool:
    """Return whether a pool's class is Celery's eventlet pool, or is made of it."""
    return any(cls.__module__ == "celery.concurrency.eventlet" for cls in pool.__mro__)


def locked_tasks(app: Any) -> list[LockedTask]:
    """Return an app's LockedTasks, without those of Celery's own."""
    own = (task for name, task in app.tasks.items() if not name.startswith(CELERYS))
    return [task for task in own if isinstance(task, LockedTask)]


@worker_ready.connect(weak=False)
def _say_what_nodes_say(sender: Any = None, **_: Any) -> None:
    """Check the nodes at a worker's start and say what was found; the worker starts anyway."""
    app = sender.app
    watch_children(app, sender.pool)
    if not locked_tasks(app):
        return
    try:
        redlock = redlock_of(app)
        report, others = ask_nodes(redlock), exchange_shared_settings(redlock)
    except SettingsError as error:
        told = {"event": "settings_wrong"}
        logger.error("locks cannot be taken: %s", error, extra=told)  # noqa: TRY400 - says it all
        return
    _say_who_votes(app, report)
    for terms, names in others.items():
        logger.error(
            "other clients go by %s (so say %s), this worker by %s: until all of them go by the "
            "same, two may hold one lock",
            terms, ", ".join(names), shared_settings_of(redlock),
            extra={"event": "settings_differ"},
        )  # fmt: skip


def _say_who_votes(app: Any, report: NodeReport) -> None:
    """Say in one line which nodes answer, and which wait before they grant a lock."""
    level = logging.WARNING
    if report.voting == report.nodes:
        level = logging.INFO
    elif report.voting < report.quorum and report.failing:
        level = logging.ERROR  # else it ends by itself
    told = {"event": "nodes_answer", "answering": report.answering, "voting": report.voting}
    told |= {"nodes": report.nodes, "quorum": report.quorum}
    logger.log(level, "%s", _who_votes(app, report), extra=told)


def _who_votes(app: Any, report: NodeReport) -> str:
    of_them, needed = f"of {report.nodes} lock nodes", f", {report.quorum} needed"
    failing = f"; not: {'; '.join(report.failing)}" if report.failing else ""
    if not report.silent:
        return f"{report.voting} {of_them} answer{needed}{failing}"
    left = math.ceil(max(report.silent.values()))
    if failing or report.voting >= report.quorum:
        waiting = f"new or restarted nodes wait {left} s: {', '.join(report.silent)}"
        return f"{report.voting} {of_them} may grant locks{needed} ({waiting}){failing}"
    name = name_of_app(app)
    command = f"celery{name and f' -A {name}'} redlock trust --all"
    return (
        f"{report.voting} {of_them} may grant locks yet (new or restarted nodes wait {left} s). "
        f"To skip the wait on a new cluster: {command}"
    )
