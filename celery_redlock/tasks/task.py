"""`LockedTask` and `current_lock`: what a user's task is, and what it may ask. Read this first."""

from __future__ import annotations

import inspect
import pkgutil
import types
from collections.abc import Mapping
from typing import Any, NoReturn
from uuid import uuid4

from celery import Task, current_task

from celery_redlock.errors import NoRunError, NotAcquired, RedlockError, SettingsError
from celery_redlock.lock.lock import Lock
from celery_redlock.lock.validation import check_wait
from celery_redlock.tasks import per_app
from celery_redlock.tasks.declaration import (
    config_of,
    dumped,
    is_wrapper,
    may_lock_anywhere,
    to_leave_out,
)
from celery_redlock.tasks.delivery.delivery import RUN_STATE, RunState, own_headers
from celery_redlock.tasks.delivery.header import HEADER, NO_HEADER, LockHeader
from celery_redlock.tasks.execution.run import lock_of, lock_of_run, run_of
from celery_redlock.tasks.sending import (
    check_send,
    checked_options,
    options_mapping,
    publish_through,
    queue_needed,
    write_header,
)
from celery_redlock.tasks.settings.app import CELERY_PREFIX
from celery_redlock.tasks.settings.call import TaskCall
from celery_redlock.tasks.settings.levels import check_outside
from celery_redlock.tasks.settings.options import EffectiveOptions
from celery_redlock.tasks.typed_options import (
    AnyRate,
    Decision,
    Delays,
    Key,
    Limit,
    Names,
    OnDuplicate,
    OnGiveUp,
    OnLost,
    OnUnreachable,
    Seconds,
    UniqueUntil,
)
from celery_redlock.tasks.unique.send import add_is_duplicate
from celery_redlock.tasks.wrapping import hook_outside_run, wrap_hook, wrap_run
from celery_redlock_entry import without_proxy

HOOKS = ("on_success", "on_failure", "on_retry", "after_return")
TENANT_METHOD = "get_tenant_databases"  # of TenantTask of tenant-schemas-celery
REQUEST = "celery_redlock.tasks.worker_request:Request"  # by name: only workers import it
DEFAULT_STRATEGY = "celery.worker.strategy:default"


class LockedTask(Task):
    """A task that takes a lock before its body runs, and releases it when the run ends.

    `@app.task(base=LockedTask, lock_key="stock:{sku}", lock_ttl=30)`. The lock's key is made from
    the arguments. Each option is an attribute `lock_<name>`: see docs/reference/options.md. A
    wrong option raises SettingsError when the app finalizes.
    """

    # Sources of the extension points: `__init_subclass__` is the one place that function tasks,
    # class tasks, autoretry and mixed bases all pass; `on_bound` is Celery's, called after
    # `task_annotations` may have replaced `run`.
    abstract = True
    Request: Any = REQUEST
    # of the class `TaskOptions`, for a subclass that sets them; an option that none sets is no
    # attribute
    lock_key: Key
    lock_args: Names
    lock_ttl: float
    lock_renew: bool
    lock_max_hold: Seconds
    lock_wait: float
    lock_on_conflict: Decision
    lock_backoff: Delays
    lock_max_wait: Seconds
    lock_on_give_up: OnGiveUp
    lock_on_lost: OnLost
    lock_on_unreachable: OnUnreachable
    lock_limit: Limit
    lock_rate: AnyRate
    lock_fencing: bool
    lock_unique_for: Seconds
    lock_unique_until: UniqueUntil
    lock_on_duplicate: OnDuplicate
    lock_debounce: Seconds
    lock_debounce_max: Seconds
    dont_autoretry_for = (NotAcquired, SettingsError)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._wrap()

    @classmethod
    def _wrap(cls) -> None:
        wraps = {"run": wrap_run, "__call__": wrap_run, **dict.fromkeys(HOOKS, wrap_hook)}
        for name, wrap in wraps.items():
            attribute = inspect.getattr_static(cls, name)
            is_of_celery = attribute is Task.__dict__[name]
            if not is_of_celery and not is_wrapper(attribute):
                setattr(cls, name, wrap(attribute))
        request = inspect.getattr_static(cls, "Request")
        if request != REQUEST and not isinstance(request, _CombinedRequest):
            cls.Request = _CombinedRequest(request)

    @classmethod
    def on_bound(cls, app: Any) -> None:
        """Check the declaration, and take over `track_started`: STARTED means the lock is held."""
        super().on_bound(app)
        cls._app = app = without_proxy(app)  # of a class that no app has registered
        cls._wrap()
        if (cls.name or "").startswith(CELERY_PREFIX):
            return
        if "_redlock_track_started" not in cls.__dict__:
            inherited = getattr(cls, "_redlock_track_started", cls.track_started)
            tracks = cls.track_started if "track_started" in cls.__dict__ else inherited
            cls._redlock_track_started = tracks
            cls.track_started = False
        if not app.finalized:
            per_app.owners.add(app)
        add_is_duplicate(app)
        publish_through(app, LockedTask)
        per_app.on_locked_task(app)
        # a class without a name is checked at the first use of an instance
        if app in per_app.checked and cls.name:
            check_declaration(app._tasks.get(cls.name) or cls())

    @property
    def lock(self) -> Lock:
        """The lock of the run, in its body and its hooks.

        It stays after its release. It is not held then, nor in a run without a quorum that
        on_unreachable="run" lets through: `held` is False, and `ensure` raises LockLost. Outside a
        run, in a direct call, and in a run that takes no lock, it raises a RedlockError. The error
        is also an AttributeError, so `hasattr` returns False there.
        """
        lock = lock_of_run(self.request)
        if lock is None:
            in_run = not self.request.called_directly
            raise NoRunError(self.name, in_run, hook_outside_run.get() and not in_run)
        return lock

    def lock_for(self, /, *args: Any, **kwargs: Any) -> Lock:
        """Return the lock that a run with these arguments takes, for use outside a run.

        Among them may be `wait`, the seconds to wait for the lock, and `queue`, the name of the
        queue whose options and `{queue}` are meant; without it that to which the task is routed. A
        task's own argument of such a name goes first. Raises SettingsError, also if a function in
        `task_routes` chooses the queue: it is not asked. Raises RedlockError if the task takes no
        lock for these arguments.
        """
        config = config_of(self)
        wait = None
        queue = None
        parameters = config.signature.parameters
        if "wait" in kwargs and "wait" not in parameters:
            wait = check_wait(f"task {self.name!r}", "lock_for(wait=...)", kwargs.pop("wait"))
        if "queue" in kwargs and "queue" not in parameters:
            queue = kwargs.pop("queue")
        if queue is None:
            queue = queue_needed(self, "lock_for", args, kwargs)
        options = config.options_for(queue)
        call = TaskCall(self, *dumped(self, args, kwargs), queue)
        resources = config.resources(options, call)
        if not resources:
            hint = "its lock_key is False, or returns None"
            raise RedlockError(f"{self.name} takes no lock for these arguments: {hint}")
        keys = config.keys(options, call, resources)
        return lock_of(self, options, keys, f"lock_for {self.name}", wait=wait)

    def lock_options(
        self, queue: str | None = None, lock: Mapping[str, Any] | None = None
    ) -> EffectiveOptions:
        """Return the options in force, each with the level and the name by which it was set.

        queue: its name; None for the queue to which the task is routed. lock: the options of a
        call, as in `apply_async`. `str()` of the result is a table. Raises SettingsError.
        """
        queue_name = queue_needed(self, "lock_options") if queue is None else queue
        call_options = options_mapping({} if lock is None else lock)
        return config_of(self).effective_options(queue_name, call_options)

    def apply_async(self, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        """Send the task, as Celery does; `lock={"ttl": 60}` sets options for this call alone.

        With `unique_for`, a duplicate returns the result of the first send, or raises
        DuplicateTask: see the option `on_duplicate`. The result's `is_duplicate` is True if it is
        that of an earlier send. With `debounce`, a send replaces an earlier one whose run is not
        due. A send with an id or links of its own, or in a canvas, is always published and
        replaces none. Raises SettingsError for a wrong option. Raises
        QuorumUnreachable if a send is to be deduplicated, no quorum votes, and
        on_unreachable="fail".
        """
        if not self.name.startswith(CELERY_PREFIX):
            config = config_of(self)
            check_outside(options)
            if not config.app.nodes and config.may_lock:
                per_app.redlock_of(self.app)  # raises, unless a setting names nodes by now
            # Celery's settings are slow to read, and without any of these nothing can be wrong
            may_be_wrong = options or config.app.queues or self.expires is not None
            if may_be_wrong and self.app.conf.task_always_eager:
                check_send(self, options)
            elif "lock" in options:  # early: another class may send later
                checked_options(config, dict(options))
        return super().apply_async(args, kwargs, *more, **options)

    def apply(self, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        """Run the task in this process under its lock; `lock={...}` as in `apply_async`."""
        prepare_apply(self, options)
        result = super().apply(args, kwargs, *more, **options)
        result.is_duplicate = False
        return result

    def signature_from_request(
        self, request: Any = None, args: Any = None, kwargs: Any = None, queue: Any = None,
        **options: Any,
    ) -> Any:  # fmt: skip
        """Return a retry's signature, as Celery does, with the `lock` options of the call.

        Also beside headers that the retry is given, or that came in one called "headers".
        """
        run_request = self.request if request is None else request
        carried = run_request.get(HEADER)
        user_headers = own_headers(run_request)
        if carried and ("headers" in options or HEADER not in (run_request.headers or {})):
            options["headers"] = {HEADER: carried, **(options.get("headers") or user_headers)}
        elif RUN_STATE in (run_request.headers or {}):  # Celery takes it of a copy for a header
            options.setdefault("headers", user_headers)
        return super().signature_from_request(request, args, kwargs, queue, **options)

    def chunks(self, it: Any, n: int) -> NoReturn:
        """Refuse: the body would be called directly, without the lock. Raises RedlockError."""
        self._refuse("chunks")

    def map(self, it: Any) -> NoReturn:
        """Refuse: the body would be called directly, without the lock. Raises RedlockError."""
        self._refuse("map")

    def starmap(self, it: Any) -> NoReturn:
        """Refuse: the body would be called directly, without the lock. Raises RedlockError."""
        self._refuse("starmap")

    def _refuse(self, name: str) -> NoReturn:
        raise RedlockError(
            f"{self.name}.{name} would call the body inside another task's run, without its lock: "
            f"use group({self.name}.s(...) for ...) instead"
        )


class _CombinedRequest:
    """Gives the class of a task's requests, which derives from ours and from the user's own.

    It is made in a worker, as celery.worker.strategy asks for it. user_class: a class or its name.
    """

    def __init__(self, user_class: Any) -> None:
        self._user_class = user_class

    def __get__(self, task: Any, owner: Any = None) -> type:
        ours = pkgutil.resolve_name(REQUEST)
        user_class = self._user_class
        if isinstance(user_class, str):
            user_class = pkgutil.resolve_name(user_class)
        if issubclass(user_class, ours):
            return user_class  # type: ignore[no-any-return]
        return types.new_class(user_class.__name__, (ours, user_class))


def check_declaration(task: LockedTask) -> None:
    check_tenant(task)
    config = config_of(task)
    if task.Strategy != DEFAULT_STRATEGY and may_lock_anywhere(config):
        hint = (
            "runs bodies by itself, so no lock would be taken: use Celery's default. "
            f"{to_leave_out(task)}"
        )
        raise SettingsError(f"task {task.name!r}", "Strategy", repr(task.Strategy), hint)


def check_tenant(task: LockedTask) -> None:
    """Raise SettingsError if a task would run in another schema than that of its tenant.

    Source: tenant_schemas_celery.app: its receiver of task_prerun enters the schema by a method of
    its task class. Celery logs what a receiver raises, and runs the body.
    """
    of_app = task.app.Task
    if hasattr(of_app, TENANT_METHOD) and not hasattr(task, TENANT_METHOD):
        base = type(task).__mro__[1].__name__
        hint = (
            "its body would run in the schema public, whatever the tenant: "
            f"derive one class from LockedTask and {of_app.__name__}, and use that"
        )
        raise SettingsError(f"task {task.name!r}", "base", repr(base), hint)


def prepare_apply(task: LockedTask, options: dict[str, Any]) -> None:
    """Check the options of an `apply`, and write its `lock` into the header that the run reads."""
    check_outside(options)
    if "lock" in options:
        options["task_id"] = options.get("task_id") or str(uuid4())
        write_header(options, checked_options(config_of(task), options))


def keep_arguments(task: Any = None, args: Any = None, kwargs: Any = None, **_: Any) -> None:
    """Keep a run's arguments as they came, for a deferral, and show it the `eta` of its send.

    Source: celery.app.trace hands the very same mapping to receivers of task_prerun, to
    `before_start` and to the body, and they take from it what is not the body's.
    """
    if isinstance(task, LockedTask):
        request = task.request
        header = LockHeader.of(request)
        request.__dict__[RUN_STATE] = RunState(header, (tuple(args), dict(kwargs)))
        if header is not NO_HEADER and header.was_republished:
            request.eta = header.eta or None


def current_lock() -> Lock | None:
    """Return the lock of the running task, for tasks without `bind`; None outside a run."""
    if not current_task:
        return None
    for task in (current_task, current_task.app.current_worker_task):
        run = None if task is None else run_of(task.request)
        if run is not None:
            return run.lock
    return None
