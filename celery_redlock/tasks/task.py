"""`LockedTask`, and what connects it to an app."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from celery import Task
from celery._state import connect_on_app_finalize, get_current_task, get_current_worker_task
from celery.signals import worker_ready
from celery.utils import uuid

from celery_redlock.errors import NotAcquired, RedlockError, SettingsError
from celery_redlock.lock.backoff import Backoff
from celery_redlock.lock.inspection import NodeReport, ask_nodes, exchange_terms, terms_of
from celery_redlock.lock.redlock import Lock, check_wait
from celery_redlock.tasks.children import watch_children
from celery_redlock.tasks.deferral import HEADER, Address
from celery_redlock.tasks.gate import gated, is_gate, lock_of, passage_of, plan_of, queue_of
from celery_redlock.tasks.runtime import redlock_of, settings_of
from celery_redlock.tasks.settings import Plan, check_known_names

logger = logging.getLogger(__name__)

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
    dont_autoretry_for = (NotAcquired, SettingsError)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Put the gate around the class's own `run` and `__call__`."""
        super().__init_subclass__(**kwargs)
        cls._put_gate()

    @classmethod
    def _put_gate(cls) -> None:
        for name in ("run", "__call__"):
            body = inspect.getattr_static(cls, name)
            is_celerys = body is Task.__dict__[name]
            if not is_celerys and not is_gate(body):
                setattr(cls, name, gated(body))

    @classmethod
    def on_bound(cls, app: Any) -> None:
        """Check the declaration, and take over `track_started`: STARTED means the lock is held."""
        super().on_bound(app)
        cls._put_gate()
        if (cls.name or "").startswith("celery."):
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
            way_out = "runs bodies by itself, so that no lock would be taken: use Celery's default"
            raise SettingsError(f"task {cls.name!r}", "Strategy", repr(cls.Strategy), way_out)
        plan_of(app._tasks.get(cls.name) or cls())

    @property
    def lock(self) -> Lock | None:
        """The running task's lock; None outside a run, and for a task without one."""
        passage = passage_of(self.request)
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
        queue = self.own_queue(args, kwargs)
        rules = plan.rules(queue)
        resources = plan.resources(rules, self, args, kwargs, queue)
        if not resources:
            raise RedlockError(f"{self.name} takes no lock: its lock_key is False")
        return lock_of(self, rules, resources, label=f"lock_for {self.name}", wait=wait)

    def own_queue(self, args: Any, kwargs: Any) -> str:
        """Return the name of the queue that the task's own routing sends these arguments to."""
        options = dict(self._get_exec_options())
        options = self.app.amqp.router.route(options, self.name, args, kwargs, self)
        queue = options.get("queue")
        return (
            queue_of(self.app, Address.of(options))
            if queue is None
            else str(getattr(queue, "name", queue))
        )

    def apply_async(self, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        """Send the task, as Celery does; `lock={"ttl": 60}` sets options for this call alone.

        Raises SettingsError for a wrong one, and for a task whose declaration is wrong.
        """
        if not self.name.startswith("celery."):
            plan = plan_of(self)
            if not more:
                options["task_id"] = options.get("task_id") or uuid()
            self._write_slip(plan, options, more[0] if more else options["task_id"])
        return super().apply_async(args, kwargs, *more, **options)

    def apply(self, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        """Run the task here and now, as Celery does, under its lock; `lock={...}` as for a send."""
        if "lock" in options:
            options["task_id"] = options.get("task_id") or uuid()
            self._write_slip(plan_of(self), options, options["task_id"])
        return super().apply(args, kwargs, *more, **options)

    def signature_from_request(
        self, request: Any = None, args: Any = None, kwargs: Any = None, queue: Any = None,
        **options: Any,
    ) -> Any:  # fmt: skip
        """Return a retry's signature, as Celery does; headers of its own keep the call's `lock`."""
        carried = (self.request if request is None else request).get(HEADER)
        if carried and "headers" in options:
            options["headers"] = {HEADER: carried, **(options["headers"] or {})}
        return super().signature_from_request(request, args, kwargs, queue, **options)

    def _write_slip(self, plan: Plan, options: dict[str, Any], task_id: str) -> None:
        """Put into the message what the call says and its worker cannot see otherwise."""
        if "lock" in options:
            slip = {"options": self._call_options(plan, options.pop("lock")), "id": task_id}
            options["headers"] = {**(options.get("headers") or {}), HEADER: slip}

    def _call_options(self, plan: Plan, of_call: Any) -> dict[str, Any]:
        if not isinstance(of_call, Mapping):
            way_out = 'must map option names to values, as lock={"ttl": 60}'
            raise SettingsError("call", "lock", repr(of_call), way_out)
        return {
            name: value.to_message() if isinstance(value, Backoff) else value
            for name, value in plan.check_call(of_call).items()
        }

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


def current_lock() -> Lock | None:
    """Return the running task's lock, for tasks without `bind`; None outside a run."""
    for task in (get_current_task(), get_current_worker_task()):
        passage = None if task is None else passage_of(task.request)
        if passage is not None:
            return passage.lock
    return None


@connect_on_app_finalize
def _check_app(app: Any) -> None:
    """Refuse unknown and wrong settings as soon as an app is complete.

    Source: celery._state; what a receiver of on_after_finalize raises would be swallowed.
    """
    check_known_names(app.conf, app.namespace)
    if app.conf.get("redlock_nodes") is not None:
        settings_of(app)


@worker_ready.connect(weak=False)
def _say_what_nodes_say(sender: Any = None, **_: Any) -> None:
    """Check the nodes at a worker's start and say what was found; the worker starts anyway."""
    app = sender.app
    watch_children(app, getattr(sender.pool, "num_processes", 0))
    own = (task for name, task in app.tasks.items() if not name.startswith("celery."))
    if not any(isinstance(task, LockedTask) for task in own):
        return
    try:
        redlock = redlock_of(app)
        report, others = ask_nodes(redlock), exchange_terms(redlock)
    except SettingsError as error:
        logger.error("locks cannot be taken: %s", error)  # noqa: TRY400 - the text says it all
        return
    _say_who_votes(report)
    for terms, names in others.items():
        logger.error(
            "other clients go by %s (so say %s), this worker by %s: until all of them go by the "
            "same, two may hold one lock",
            terms, ", ".join(names), terms_of(redlock),
        )  # fmt: skip


def _say_who_votes(report: NodeReport) -> None:
    enough = report.voting >= report.quorum
    level = logging.WARNING if enough else logging.ERROR
    if report.voting == report.nodes:
        level = logging.INFO
    missing = f"; not: {'; '.join(report.failing)}" if report.failing else ""
    up, needed = report.answering, report.quorum
    logger.log(level, "%d of %d lock nodes answer, %d needed%s", up, report.nodes, needed, missing)
    if report.silent:
        left = math.ceil(max(report.silent.values()))
        until = "the others decide" if enough else "no lock can be taken before enough of them do"
        logger.log(
            level,
            "%d of %d lock nodes do not vote yet, for %d s more: they are new to this prefix, or "
            "restarted and may have forgotten locks (restart guard); %s. Where no lock is held "
            "now, as on a first start, Redlock.trust() lets them vote at once",
            len(report.silent), report.nodes, left, until,
        )  # fmt: skip
