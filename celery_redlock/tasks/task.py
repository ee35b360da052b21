"""`LockedTask`, and what connects it to an app."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Mapping
from typing import Any, NoReturn

from celery import Task
from celery._state import get_current_task, get_current_worker_task
from celery.utils import uuid
from celery.utils.imports import symbol_by_name

from celery_redlock.errors import NoRunError, NotAcquired, RedlockError, SettingsError
from celery_redlock.lock.lock import Lock
from celery_redlock.lock.validation import check_wait
from celery_redlock.tasks.adoption import AdoptingRegistry
from celery_redlock.tasks.declaration import config_of
from celery_redlock.tasks.delivery.delivery import own_headers
from celery_redlock.tasks.delivery.header import HEADER
from celery_redlock.tasks.delivery.route import Route, queue_of
from celery_redlock.tasks.execution.run import lock_of, run_of
from celery_redlock.tasks.settings.app import CELERY_PREFIX
from celery_redlock.tasks.settings.keys import TaskCall
from celery_redlock.tasks.settings.levels import check_outside
from celery_redlock.tasks.settings.options import TaskLockOptions
from celery_redlock.tasks.settings.sources import EffectiveOptions
from celery_redlock.tasks.settings.task_config import TaskLockConfig
from celery_redlock.tasks.signatures import is_wrapper
from celery_redlock.tasks.unique.receivers import options_to_message
from celery_redlock.tasks.unique.rounds import EarlierSend
from celery_redlock.tasks.unique.send import is_awaited, publish_once, send_of, told
from celery_redlock.tasks.wrapping import wrap_hook, wrap_run

HOOKS = ("on_success", "on_failure", "on_retry", "after_return")
REQUEST = "celery_redlock.tasks.worker_request:Request"  # by name: only workers import it
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
        wraps = {"run": wrap_run, "__call__": wrap_run, **dict.fromkeys(HOOKS, wrap_hook)}
        for name, wrap in wraps.items():
            body = inspect.getattr_static(cls, name)
            is_celerys = body is Task.__dict__[name]
            if not is_celerys and not is_wrapper(body):
                setattr(cls, name, wrap(body))
        theirs = inspect.getattr_static(cls, "Request")
        if theirs != REQUEST and not isinstance(theirs, _CombinedRequest):
            cls.Request = _CombinedRequest(theirs)

    @classmethod
    def on_bound(cls, app: Any) -> None:
        """Check the declaration, and take over `track_started`: STARTED means the lock is held."""
        super().on_bound(app)
        cls._put_gate()
        if (cls.name or "").startswith(CELERY_PREFIX):
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
        if app.conf.get("redlock_tasks") and not isinstance(app._tasks, AdoptingRegistry):
            # Celery calls what finalizes an app in any order: if this raises, others' tasks are
            # behind their gate already, and do not run without their lock
            AdoptingRegistry.put_gates(app, LockedTask)
        config_of(app._tasks.get(cls.name) or cls())

    @property
    def lock(self) -> Lock | None:
        """The running task's lock; None in a run that takes none, or has given it back.

        Outside a run, so in a direct call too, it raises a RedlockError that is an AttributeError:
        `hasattr`, and whatever walks a task's attributes, takes it for missing.
        """
        request = self.request
        passage = run_of(request)
        if passage is None and request.called_directly:
            raise NoRunError(self.name)
        return None if passage is None else passage.lock

    def lock_for(self, *args: Any, **kwargs: Any) -> Lock:
        """Return the lock that a run with these arguments takes, for use outside a run.

        `wait` (s) is the lock's, unless the task has an argument of that name. Options and
        `{queue}` are those of the task's own routing. Raises SettingsError, and RedlockError for
        a task or arguments that take no lock.
        """
        plan = config_of(self)
        wait = None
        if "wait" in kwargs and "wait" not in plan.signature.parameters:
            wait = check_wait(f"task {self.name!r}", "lock_for(wait=...)", kwargs.pop("wait"))
        queue = self._own_queue(args, kwargs)
        rules = plan.options_for(queue)
        resources = plan.resources(rules, TaskCall(self, args, kwargs, queue))
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
        return config_of(self).effective_options(
            own, self._checked_call({} if lock is None else lock)
        )

    def _own_queue(self, args: Any, kwargs: Any) -> str:
        """Return the name of the queue that the task's own routing sends these arguments to."""
        return self._queue_of(args, kwargs, {})

    def _queue_of(self, args: Any, kwargs: Any, of_call: Mapping[str, Any]) -> str:
        """Return the same for a send with options of its own."""
        options = {**self._get_exec_options(), **of_call}
        if options.get("routing_key") and not options.get("queue"):
            return queue_of(self.app, Route.of(options))
        options = self.app.amqp.router.route(options, self.name, args, kwargs, self)
        queue = options.get("queue")
        return (
            queue_of(self.app, Route.of(options))
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
        if self.name.startswith(CELERY_PREFIX):
            return super().apply_async(args, kwargs, *more, **options)
        plan = config_of(self)
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
        self, plan: TaskLockConfig, args: Any, kwargs: Any, options: Mapping[str, Any]
    ) -> tuple[str, TaskLockOptions] | None:
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
        rules = plan.options_for(queue, of_call)
        return None if rules.unique_for is None else (queue, rules)

    def _send_once(
        self,
        plan: TaskLockConfig,
        found: tuple[str, TaskLockOptions],
        args: Any,
        kwargs: Any,
        options: dict[str, Any],
    ) -> Any:
        """Send it unless it is a duplicate."""
        queue, rules = found
        resources = plan.resources(rules, TaskCall(self, args or (), kwargs or {}, queue))
        if not resources:
            return super().apply_async(args, kwargs, **options)
        send = send_of(self.app, self.name, resources, options, rules, plan.app)
        plain = functools.partial(super().apply_async, args, kwargs)
        sent = publish_once(self.app, send, options, plain)
        return self.AsyncResult(told(sent, rules, resources)) if type(sent) is EarlierSend else sent

    def apply(self, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        """Run the task here and now, as Celery does, under its lock; `lock={...}` as for a send."""
        check_outside(options)
        if "lock" in options:
            options["task_id"] = options.get("task_id") or uuid()
            self._write_slip(config_of(self), options, options["task_id"])
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

    def _write_slip(self, plan: TaskLockConfig, options: dict[str, Any], task_id: str) -> None:
        """Put into the message what the call says and its worker cannot see otherwise."""
        if "lock" in options:
            slip = {"options": self._call_options(plan, options.pop("lock")), "id": task_id}
            options["headers"] = {**(options.get("headers") or {}), HEADER: slip}

    def _checked_call(self, of_call: Any) -> Mapping[str, Any]:
        if not isinstance(of_call, Mapping):
            hint = 'must map option names to values, as lock={"ttl": 60}'
            raise SettingsError("call", "lock", repr(of_call), hint)
        return of_call

    def _call_options(self, plan: TaskLockConfig, of_call: Any) -> dict[str, Any]:
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


class _CombinedRequest:
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
        passage = None if task is None else run_of(task.request)
        if passage is not None:
            return passage.lock
    return None
