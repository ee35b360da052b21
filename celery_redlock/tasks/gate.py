"""The way through a run: acquire, body, release.

The gate stands around a task's `run`, and around a `__call__` of the user's own, inside Celery's
tracer: a signal handler before the run could not stop it, and whatever is raised here is handled
by the tracer as any task's exception. Nothing of a run is kept on the task: it hangs on the
request, which Celery keeps a thread and greenlet.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import random
import re
import sys
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from celery import states as celery_states
from celery._state import get_current_worker_task
from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from celery.signals import (
    task_failure,
    task_postrun,
    task_received,
    task_rejected,
    task_revoked,
    task_unknown,
)

from celery_redlock.errors import LockLost, LockTaken, NotAcquired, RedlockError, SettingsError
from celery_redlock.lock.engine.acquirer import AlreadyCompletedError, SupersededError
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.lock import Lock
from celery_redlock.lock.model.keys import completion_key, in_order, is_of_run
from celery_redlock.lock.model.options import CompletionMarker, LockOptions
from celery_redlock.lock.release import loss_of, release_all
from celery_redlock.lock.transport.encoding import encode_command, read_text
from celery_redlock.tasks import contention, runtime, signals, states
from celery_redlock.tasks.children import was_ended
from celery_redlock.tasks.contention import Contention, Defer, Past, RunUnlocked, Skip
from celery_redlock.tasks.deferral import (
    CLOCKS_DIFFER,
    HEADER,
    LockHeader,
    expires_in,
    is_for_another_queue,
    name_of_all_copies,
    name_of_run,
    received_at,
    republish,
    route_of,
    utc_now,
)
from celery_redlock.tasks.routes import has_way_back, queue_of, supported_countdown
from celery_redlock.tasks.runtime import redlock_of, settings_of
from celery_redlock.tasks.settings import (
    CELERY_PREFIX,
    TaskLockConfig,
    TaskLockOptions,
    compile_adopted_config,
    compile_config,
)
from celery_redlock.tasks.uniqueness import UniqueToken

logger = logging.getLogger(__name__)

RUN = "_redlock_passage"  # the name on the request under which a run's passage hangs
ENTRY = "_redlock_entry"  # the name on a class under which its entry of redlock_tasks stands
CONTINUES = "_redlock_goes_on"  # the same of a run that has another one of this message behind it
_OURS = "celery_redlock."
_IS_A_MARK = re.compile(r"-?[0-9]{1,18}")
_CALLS_BODIES = ("celery.map", "celery.starmap", "celery.chunks")

Body = Callable[..., Any]


class LockedRun:
    """One run on its way through the gate.

    lock: what it holds. late: it lets go in task_postrun, after the result is stored. stored: set
    once a hook of the user's is called, and so after the outcome was stored.
    """

    __slots__ = ("late", "lock", "stored", "unlocked")

    stored: bool

    def __init__(self, lock: Lock, *, late: bool) -> None:
        self.lock, self.late = lock, late
        self.unlocked = False  # runs without a lock, as on_unreachable="run" says


def run_of(request: Any) -> LockedRun | None:
    """Return the passage of a run, None outside one."""
    passage: LockedRun | None = request.__dict__.get(RUN)
    return passage


def wrap_run(body: Any) -> Body:
    """Return a class's `run` or `__call__` with the gate around it.

    body: the attribute as it stands in the class: a function, or any other descriptor. No
    `__wrapped__` is left, for `task_annotations` with "@run" unwraps it and would throw the gate
    away.
    """

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = self.request
        call = bound_to(self, body)
        if (
            request.called_directly
            or RUN in request.__dict__
            or self.name.startswith(CELERY_PREFIX)
        ):
            refuse_map(self, request)
            return call(*args, **kwargs)
        try:
            return run_locked(self, request, call, args, kwargs)
        except BaseException as error:
            cut_our_frames(error)
            raise

    functools.update_wrapper(run, body)
    run.__dict__.pop("__wrapped__", None)
    if type(body) in (types.FunctionType, staticmethod):
        run.__signature__ = _with_self(body)  # type: ignore[attr-defined]
    run.redlock_gate, run.redlock_body = run, body  # type: ignore[attr-defined]
    return run


def bound_to(task: Any, attribute: Any) -> Any:
    """Return what stands in a task's class, bound to the task as Python binds it."""
    bind = getattr(type(attribute), "__get__", None)
    return attribute if bind is None else bind(attribute, task, type(task))


def wrap_hook(hook: Any) -> Body:
    """Return a hook of the user's, as it stands in the class, that notes that it was called.

    Source: celery.app.trace calls `on_success`, `on_failure`, `on_retry` and `after_return` when
    the outcome is stored and the links and the retry are published. What such a hook raises goes
    on through the tracer, which says nothing of that.
    """

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        passage = run_of(self.request)
        if passage is not None:
            passage.stored = True
        return bound_to(self, hook)(*args, **kwargs)

    functools.update_wrapper(call, hook)
    call.redlock_gate = call  # type: ignore[attr-defined]
    return call


def is_wrapper(body: Any) -> bool:
    """Tell a gate from a body that `functools.wraps` gave a gate's attributes."""
    return getattr(body, "redlock_gate", None) is body


def signature_of(function: Body) -> inspect.Signature:
    """Return what a function takes; of one that a decorator wraps, what the decorator takes.

    A decorator that passes everything on takes what the function takes.
    """
    if type(function) is functools.partial and hasattr(function, "__wrapped__"):
        # as asgiref binds what it wraps: inspect would give the first parameter, too
        function = functools.partial(function.__wrapped__, *function.args, **function.keywords)
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except ValueError:  # an object that has a __get__: inspect takes it for a builtin
        return inspect.signature(function)
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in signature.parameters.values()):
        signature = inspect.signature(function)
    return signature


def _with_self(body: Any) -> inspect.Signature:
    """Return the signature of a class's function, which loses its first parameter when bound."""
    if not isinstance(body, staticmethod):
        return signature_of(body)
    signature = signature_of(body.__func__)
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    return signature.replace(parameters=[first, *signature.parameters.values()])


def bodies_of(task: Any) -> list[Body]:
    """Return a task's own `run` and `__call__`, as far as it has them, bound.

    By the class: on the instance autoretry's wrapper may stand, which hides them.
    """
    gates = (inspect.getattr_static(type(task), name) for name in ("run", "__call__"))
    return [bound_to(task, gate.redlock_body) for gate in gates if is_wrapper(gate)]


def is_async(function: Any) -> bool:
    """Tell whether a function is an `async def`.

    What wraps one is not, though inspect may say so: of that, only what it returns can tell.
    """
    while type(function) in (functools.partial, types.MethodType):
        is_partial = type(function) is functools.partial
        function = function.func if is_partial else function.__func__
    flags = function.__code__.co_flags if type(function) is types.FunctionType else 0
    return bool(flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR))


def refuse_awaitable(task: Any, found: str) -> NoReturn:
    """Raise SettingsError; found: what is to be awaited."""
    hint = (
        "whoever awaits it would do so without its lock, and Celery does not: take a `def` that "
        "runs it to its end, as by asyncio.run or asgiref's async_to_sync, or lock_key=False"
    )
    raise SettingsError(f"task {task.name!r}", "run", found, hint)


def check_ended(task: Any, result: Any) -> None:
    """Raise SettingsError where a body has returned what is still to be run."""
    if not (inspect.isawaitable(result) or inspect.isasyncgen(result)):
        return
    if isinstance(result, (types.CoroutineType, types.GeneratorType)):
        result.close()  # else Python warns that nobody awaited it
    refuse_awaitable(task, f"a {type(result).__name__} that it returned")


def refuse_map(task: Any, request: Any) -> None:
    """Raise RedlockError where chunks, map or starmap calls this body: it would take no lock."""
    if not request.called_directly:
        return
    caller = get_current_worker_task()
    if caller is not None and caller.name in _CALLS_BODIES:
        raise RedlockError(
            f"{task.name} is called by {caller.name}, directly and so without its lock: use a "
            "group of its signatures instead of chunks, map or starmap"
        )


def refuse_aio_pool(task: Any) -> None:
    """Raise SettingsError in a worker of celery-aio-pool.

    It calls bodies in another thread, and what it keeps of a run there it keeps for the next one
    as well: after a late run its lock would stay, and the next run would take none.
    """
    if sys.modules["celery_aio_pool.pool"].AsyncIOPool.singleton is None:
        return
    hint = (
        f"calls bodies apart from their runs, so that {task.name} cannot be locked: use prefork, "
        "threads, gevent or solo, or lock_key=False"
    )
    raise SettingsError("worker", "pool", "celery_aio_pool", hint)


def config_of(task: Any) -> TaskLockConfig:
    """Return what a task's declaration means; raises SettingsError each time while it is wrong."""
    cls = type(task)
    plans: dict[Any, TaskLockConfig] = cls.__dict__.get("_redlock_plans") or {}
    which = (task.name, id(task.app))  # a class may be two tasks, by names set on instances
    plan = plans.get(which)
    if plan is None:
        settings, bodies = settings_of(task.app), bodies_of(task)
        signature = signature_of(bodies[0])
        pattern = cls.__dict__.get(ENTRY)
        if pattern is None:
            attributes, others = _declared(task)
            plan = compile_config(settings, task.name, attributes, signature, others)
        else:
            plan = compile_adopted_config(settings, task.name, pattern, signature)
        if plan.may_lock and any(map(is_async, bodies)):
            refuse_awaitable(task, "async def")
        cls._redlock_plans = {**plans, which: plan}
    return plan


def _declared(task: Any) -> tuple[dict[str, Any], list[str]]:
    """Return a task's lock_* attributes, and the names of those that are no options."""
    names = [name for name in dir(task) if name.startswith("lock_")]
    found = {name: inspect.getattr_static(task, name) for name in names}
    others = [n for n, v in found.items() if isinstance(v, (property, classmethod))]
    attributes = {
        name: value.__func__ if isinstance(value, staticmethod) else value
        for name, value in found.items()
    }
    return attributes, others


def lock_of(
    task: Any,
    rules: TaskLockOptions,
    resources: Sequence[str],
    *,
    label: str,
    wait: float | None = None,
    mark: CompletionMarker | None = None,
) -> Lock:
    """Return the lock that a run by these rules takes; wait: s, instead of the rules'.

    mark: of a run that may be delivered again.
    """
    options = LockOptions(
        resources=in_order(resources),
        ttl=rules.ttl,
        wait=rules.wait if wait is None else wait,
        renew=rules.renew,
        max_hold=rules.max_hold,
        label=label,
        sender=task,
        limit=rules.limit,
        fencing=rules.fencing,
        marker=mark,
    )
    return Lock(redlock_of(task.app), options)


def label_of_run(task: Any, request: Any) -> str:
    """Return what the nodes show of the holder: task id, name, retries, nesting, worker."""
    return f"{name_of_run(task, request)} {request.hostname}"


def mark_of(task: Any, request: Any, slip: LockHeader) -> CompletionMarker | None:
    """Return the mark of a run that has a twin to come, perhaps; None where it has none.

    With early acknowledgement that is what was put back: where the broker's word was lost that it
    had the message, it was published twice. Each copy of a broadcast message is to run, though all
    of them have one id.
    """
    since = slip.asks_since()
    if since is None and not is_late(task, request):
        return None
    if not goes_back(task, request):
        return None
    came = received_at(request)
    if since is None and came is not None:  # a copy may have run while this one waited here
        since = came + CLOCKS_DIFFER
    kept_for = settings_of(task.app).done_ttl
    return CompletionMarker(
        name_of_run(task, request), kept_for, since, is_redelivered=slip.is_redelivered
    )


def _sent_once(
    task: Any, request: Any, slip: LockHeader, mark: CompletionMarker | None
) -> CompletionMarker | None:
    """Take the place of what a deduplicated send replaces; returns the mark of its own run.

    It asks whether a later send has taken its place in turn. A second delivery does not heed that:
    the first may run, and its state is not to be written over. Nor does a retry, which is a run of
    another name: the task has begun.
    """
    ticket = UniqueToken.of(slip.unique)
    if ticket is None:
        return mark
    ticket.take_place(redlock_of(task.app))
    mark = mark or CompletionMarker(name_of_run(task, request), settings_of(task.app).done_ttl)
    asked = (
        mark.asks_since if slip.may_have_run_elsewhere else None
    )  # else it asks for the first time
    asks_since = -math.inf if asked is None else asked
    return replace(mark, asks_since=asks_since, heeds_later=not slip.is_redelivered)


def _heed_later_send(task: Any, request: Any, slip: LockHeader) -> None:
    """Raise SupersededError where a later send has taken the place of a copy's message.

    Its sender knows no queue, so the mark of that is not the one for which a copy's run asks with
    its lock. Under the lock it is not too early: the later one marks before it asks for that.
    """
    run = name_of_run(task, request)
    own = name_of_all_copies(run)
    if own == run or slip.is_redelivered or request.retries:
        return
    if any(mark is not None and mark < 0 for mark in marks_of(redlock_of(task.app).session, own)):
        raise SupersededError(own)


def _begin(task: Any, request: Any, slip: LockHeader) -> None:
    """Do what a deduplicated send asks for between the grant and the body."""
    if slip.unique is not None:
        _heed_later_send(task, request, slip)
        _start_window(task, request, slip)


def _start_window(task: Any, request: Any, slip: LockHeader) -> None:
    """End the window of a send that is to be good until the start of its body."""
    ticket = None if request.retries else UniqueToken.of(slip.unique)
    if ticket is not None:
        ticket.start(redlock_of(task.app))


def _slip_of(task: Any, request: Any) -> LockHeader:
    """Return what a message carries; raises Ignore for a copy that is meant for another queue."""
    slip = LockHeader.of(request)
    if is_for_another_queue(request, slip):
        request.__dict__[CONTINUES] = True
        text, told = "%s[%s] is for another queue", states.fields("copy_astray", task, request)
        logger.debug(text, task.name, request.id, extra=told)
        raise Ignore("for another queue")
    return slip


def run_locked(task: Any, request: Any, call: Body, args: Sequence[Any], kwargs: Any) -> Any:
    """Run a body under its lock, or put its message to what the rules say."""
    plan, slip = config_of(task), _slip_of(task, request)
    queue = (
        task._own_queue(args, kwargs)
        if request.is_eager
        else queue_of(task.app, route_of(request, slip), plan.queues)
    )
    rules = plan.rules(queue, slip.options)
    resources = plan.resources(rules, task, args, kwargs, queue)
    late, over = is_late(task, request), ""
    if late:
        slip = slip.received(request.delivery_info)
        over = why_over(task, request, slip)
    mark = mark_of(task, request, slip)
    if not resources:
        end_unrun(task, request, slip, over)
        return call(*args, **kwargs)
    if "celery_aio_pool.pool" in sys.modules:
        refuse_aio_pool(task)
    if slip.unique is not None:
        mark = _sent_once(task, request, slip, mark)
    lock = lock_of(task, rules, resources, label=label_of_run(task, request), mark=mark)
    passage = LockedRun(lock, late=late)
    request.__dict__[RUN] = passage  # before the grant leaves, so that postrun finds the lock
    try:
        _acquire(task, request, lock, may_be_twin=late and rules.wait > 0)
        _begin(task, request, slip)
    except NotAcquired as refused:
        request.__dict__.pop(RUN, None)
        release_all(lock)  # where it was taken, and what comes before the body failed
        turn_away_unrun(task, request, slip, refused, over)
        turn_away(task, request, rules, slip, refused, in_order(resources), args, kwargs)
        request.__dict__[RUN] = passage  # on_unreachable="run"
        passage.unlocked = True
        _start_window(task, request, slip)
    except (AlreadyCompletedError, SupersededError) as known:
        let_go(request)
        drop(task, request, known)
    except BaseException as cut:
        let_go(request)
        _tell_nothing(task, request, slip, cut)
        raise
    end_unrun(task, request, slip, over)  # if so, nobody ran it; the lock goes, with its mark, then
    return _run_body(task, request, passage, rules, slip, call, args, kwargs)


def _acquire(task: Any, request: Any, lock: Lock, *, may_be_twin: bool) -> None:
    """Take a run's lock, and do not wait in the slot for another delivery of its own message."""
    if may_be_twin and goes_back(task, request):
        try:
            lock.acquire(wait=0)
        except NotAcquired as refused:
            if is_twin(task, request, refused):
                raise
        else:
            return
    lock.acquire()


def is_late(task: Any, request: Any) -> bool:
    """Tell whether a run's message is acknowledged after it."""
    return bool(task.acks_late) and not request.is_eager


def _tell_nothing(task: Any, request: Any, slip: LockHeader, cut: BaseException) -> None:
    """Put a second delivery back that a soft time limit has cut while it waited for its lock.

    The first one may run by now, and what ends this one as FAILURE would be stored over its state.
    """
    if isinstance(cut, SoftTimeLimitExceeded) and slip.is_redelivered and goes_back(task, request):
        await_first(task, request, slip, cut)


def _run_body(
    task: Any,
    request: Any,
    passage: LockedRun,
    rules: TaskLockOptions,
    slip: LockHeader,
    call: Body,
    args: Sequence[Any],
    kwargs: Any,
) -> Any:
    done = False
    try:
        tracked = bool(getattr(task, "_redlock_track_started", False))
        tracked = tracked or slip.is_redelivered  # for DEFERRED may be stored of an earlier one
        states.show_started(task, request, tracked=tracked, deferred=slip.deferrals > 0)
        done = slip.may_have_run_elsewhere  # no further publication of it is to run
        if passage.unlocked:
            return call(*args, **kwargs)
        return _run_held(task, request, passage, rules, call, args, kwargs)
    finally:
        if not passage.late:
            let_go(request, done=done)


def _run_held(
    task: Any,
    request: Any,
    passage: LockedRun,
    rules: TaskLockOptions,
    call: Body,
    args: Sequence[Any],
    kwargs: Any,
) -> Any:
    """Run a body that hears of its lock's loss, and let it not end well without its lock.

    What it raises stands: its own error says more, a retry takes the lock anew, and after Ignore
    or Reject no SUCCESS is stored. But where the message has been delivered again meanwhile and
    has come to its end so, that end stands, and nobody hears of this one.
    """
    lock, began = passage.lock, utc_now().timestamp()
    report = functools.partial(states.show_lock_lost, task, request)
    body = runtime.MonitoredBody(lock, abort=rules.on_lost == "abort", report=report)
    try:
        try:
            result = body.run(call, args, kwargs)
            if result is not None:
                check_ended(task, result)
        except Exception:
            body.report_loss()
            raise
        body.report_loss()
        if rules.on_lost == "abort":
            ensure_to_the_end(lock)
    except (Ignore, Reject, Retry):
        raise
    except Exception:
        if passage.late and loss_of(lock) is not None and is_done_since(task, request, began):
            make_way(task, request)
        raise
    return result


def is_done_since(task: Any, request: Any, began: float) -> bool:
    """Tell whether another delivery of a message came to its end since this one's body began.

    began: s since 1970. False where no node can say, and where no final state is stored: this body
    may have stored one of its own over it, and then somebody has to store another.
    """
    return is_marked_since(task, request, began - CLOCKS_DIFFER) and states.is_over(task, request)


def marks_of(session: Session, run: str) -> list[float | None]:
    """Return what each node that answers within one node timeout has noted of a run's end.

    s since 1970, below 0 where a later send has taken its place; None: nothing.
    """
    request = encode_command("GET", completion_key(session.options.prefix, run))
    return list(session.node_set.query(request, _read_mark).values())


def _read_mark(reply: Any) -> float | None:
    """Return when a run ended; raises UnexpectedReplyError. A stranger's text is no mark."""
    text = "" if reply is None else read_text(reply)
    return int(text) / 1000 if _IS_A_MARK.fullmatch(text) else None


def is_marked_since(task: Any, request: Any, since: float) -> bool:
    """Tell whether a node knows that a run was done after that, s since 1970."""
    marks = marks_of(redlock_of(task.app).session, name_of_run(task, request))
    return any(mark is not None and mark > since for mark in marks)


def ensure_to_the_end(lock: Lock) -> None:
    """Raise LockLost, which says that the body had ended, where the lock is not held any more."""
    try:
        lock.ensure()
    except LockLost as lost:
        raise LockLost(lost.resource, lost.reason, True) from None


_TO_A_BODY = frozenset(
    f.__code__ for f in (run_locked, _run_body, _run_held, runtime.MonitoredBody.run)
)


def cut_our_frames(error: BaseException) -> None:
    """Leave of our frames the gate's alone; called there, with what comes out of it.

    A body's own error shows its own frames then, and its chain. What ends a run without its body
    shows nothing but that: Celery formats it twice for each deferral, which took half of its time.
    What nobody has foreseen stays whole.
    """
    first = error.__traceback__
    inner = None if first is None else first.tb_next
    while inner is not None and inner.tb_frame.f_code in _TO_A_BODY:
        inner = inner.tb_next
    where = "" if inner is None else inner.tb_frame.f_globals.get("__name__") or "unnamed"
    is_bodys = bool(where) and not where.startswith(_OURS)
    if first is None or not (is_bodys or isinstance(error, (Ignore, Reject, RedlockError))):
        return
    first.tb_next = inner if is_bodys else None
    if not is_bodys:
        error.__context__ = None
        if isinstance(error, (Ignore, Reject)):
            error.__cause__ = None  # of an error, it is the user's own


def let_go(request: Any, *, done: bool = False) -> None:
    """Release a run's lock; nothing happens where that is done or there is none.

    done: the run is at its end, and its message will not come back, unless as a twin.
    """
    passage = run_of(request)
    if passage is not None:
        release_all(passage.lock, ended=done)
        request.__dict__.pop(RUN, None)  # last: where this is cut, task_postrun does it again


def turn_away(
    task: Any,
    request: Any,
    rules: TaskLockOptions,
    slip: LockHeader,
    refused: NotAcquired,
    resources: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Do what the rules say of a run without its lock; returns only where it is to run without.

    Raises Ignore (put back, or skipped), or the error that ends the run as FAILURE.
    """
    refused_at = utc_now().timestamp()
    may_wait = isinstance(refused, LockTaken) or rules.on_unreachable == "defer"
    if may_wait and may_be_twin(task, request, slip, refused):
        await_first(task, request, slip, refused)
    past = slip.past(utc_now())

    def ask(on_conflict: Callable[[Contention], object], taken: LockTaken) -> object:
        told = (taken.resource, taken.holder, past.deferrals, past.waited, task)
        return on_conflict(Contention(*told, tuple(args), dict(kwargs)))

    cap = settings_of(task.app).countdown_cap
    decision = contention.decide(rules, refused, past, ask, random.uniform, cap)
    _make_way_to_done(task, request, rules, slip, refused)
    if isinstance(decision, RunUnlocked):
        told = states.fields("run_unlocked", task, request, resource=refused.resource)
        logger.error("%s runs WITHOUT its lock: %s", task.name, refused, extra=told)
    elif isinstance(decision, Skip):
        skip(task, request, refused.resource, decision.reason)
    elif isinstance(decision, Defer) and goes_back(task, request):
        following = slip.next(utc_now(), decision.delay, request.retries, request.id)
        is_taken = isinstance(refused, LockTaken)
        following = replace(
            following,
            waits_for=tuple(resources),
            reason="" if is_taken else contention.why(refused),
            refused_by=refused.resource if is_taken else None,
            refused_at=refused_at,
            limit=rules.limit,
            patient=is_taken and is_patient(rules),
        )
        defer(task, request, following, past, refused, decision.countdown)
    else:
        raise contention.told(refused, past)


def _make_way_to_done(
    task: Any, request: Any, rules: TaskLockOptions, slip: LockHeader, refused: NotAcquired
) -> None:
    """Let go of a message that another delivery of it has brought to its end since the refusal.

    What this one would store, such as DEFERRED, would stay over that end. Where an end is stored
    and not marked yet, its hooks run, or its process died: this one looks again.
    """
    since = slip.asks_since() if callable(rules.on_conflict) else None  # which takes its time
    if since is not None and is_marked_since(task, request, max(0.0, since)):
        make_way(task, request)
    stores = isinstance(refused, LockTaken) or rules.on_unreachable != "run"
    if (
        slip.is_redelivered
        and stores
        and goes_back(task, request)
        and states.has_end(task, request)
    ):
        await_first(task, request, slip, refused)


def why_over(task: Any, request: Any, slip: LockHeader) -> str:
    """Return why a message is not to run that may run elsewhere: "expired", "revoked", or ""."""
    if slip.revoked:
        return "revoked"
    return "expired" if slip.may_have_run_elsewhere and expires_in(task, request) < 0 else ""


def turn_away_unrun(
    task: Any, request: Any, slip: LockHeader, refused: NotAcquired, over: str
) -> None:
    """End a message that is over, unless it runs already; where nobody can say, it waits.

    over: as of `why_over`. What has expired by now, in its slot, is not put back, either: another
    delivery may have been revoked for that, and DEFERRED would be stored over its end.
    """
    over = over or ("expired" if expires_in(task, request) < 0 else "")
    if not over:
        return
    if may_be_twin(task, request, slip, refused):
        await_first(task, request, slip, refused)
    end_unrun(task, request, slip, over)


def is_patient(rules: TaskLockOptions) -> bool:
    """Tell whether a message may wait for a release alone: without a budget, and asked nothing."""
    return rules.on_conflict == "defer" and rules.max_wait is None and rules.max_deferrals is None


def goes_back(task: Any, request: Any) -> bool:
    """Tell whether a message can be put back.

    An eager run has none: it has waited up to `wait`, and gives up. And where a copy could only go
    to every queue of its exchange again, one message would become many.
    """
    return not request.is_eager and has_way_back(
        task.app, route_of(request, LockHeader.of(request))
    )


def is_twin(task: Any, request: Any, refused: NotAcquired) -> bool:
    """Tell whether who holds the lock is this very run, by another delivery of its message."""
    return isinstance(refused, LockTaken) and is_of_run(refused.holder, name_of_run(task, request))


def may_be_twin(task: Any, request: Any, slip: LockHeader, refused: NotAcquired) -> bool:
    """Tell whether a message is to wait for its own first delivery, which may run or be done.

    Where no quorum answers, nobody can tell that of a second delivery.
    """
    is_unknown = not isinstance(refused, LockTaken) and slip.is_redelivered
    return (is_unknown or is_twin(task, request, refused)) and goes_back(task, request)


def await_first(task: Any, request: Any, slip: LockHeader, refused: Exception) -> NoReturn:
    """Put a twin back, to look again whether the first delivery is done or has died.

    refused: why it did not get its lock; a soft time limit, too. No state, event or signal tells
    of it: they would overwrite what the first one is at. For the same reason no budget ends it, nor
    what `on_conflict` says.
    """
    cap = settings_of(task.app).countdown_cap
    decision = contention.await_twin(refused, slip.twin, random.uniform, cap)
    countdown = supported_countdown(task.app, decision.countdown, route_of(request, slip))
    by = "by another delivery of its message"
    why = f"may run already, {by} ({refused!r})"
    if isinstance(refused, LockTaken):
        runs = is_twin(task, request, refused)
        why = f"runs already, {by}" if runs else f"is at its end already, {by}"
    told = states.fields("redelivery_waits", task, request, countdown=countdown)
    text = "%s[%s] %s: this one looks again in %.2f s"
    logger.info(text, task.name, request.id, why, countdown, extra=told)
    republish(task, request, slip.next_redelivery(request.retries, request.id), countdown)
    request.__dict__[CONTINUES] = True
    raise Ignore("runs already")


def drop(task: Any, request: Any, known: AlreadyCompletedError | SupersededError) -> NoReturn:
    """Let go of a message that is not to run: it has run already, or another one runs instead."""
    if isinstance(known, SupersededError):
        skip(task, request, str(known), "a later send of the same took its place")
    make_way(task, request)


def make_way(task: Any, request: Any) -> NoReturn:
    """Let go of a message that another delivery of it has brought to its end; that state stays."""
    request.__dict__[CONTINUES] = True
    told = states.fields("redelivery_discarded", task, request)
    text = "dropped %s[%s]: another delivery of its message is done"
    logger.info(text, task.name, request.id, extra=told)
    raise Ignore("done already")


def end_unrun(task: Any, request: Any, slip: LockHeader, over: str) -> None:
    """End a message that is over; the worker's main process has left this to the gate.

    over: as of `why_over`. Source: celery.worker.request: Request._announce_revoked.
    """
    if not over:
        return
    if slip.is_redelivered and states.has_end(task, request):
        make_way(task, request)
    told = states.fields("run_cancelled", task, request, reason=over)
    logger.info("%s[%s] is not run: %s", task.name, request.id, over, extra=told)
    states.show_revoked(task, request, over)
    raise Ignore(over)


def skip(task: Any, request: Any, resource: str, reason: str) -> NoReturn:
    """End a run without running its body."""
    told = states.fields("run_skipped", task, request, resource=resource, reason=reason)
    logger.info("skipped %s[%s]: %s", task.name, request.id, reason, extra=told)
    states.show_skipped(task, request, resource, reason)
    signals.lock_skipped.send(task, event=signals.LockSkippedEvent(resource, reason))
    raise Ignore(reason)


def defer(
    task: Any,
    request: Any,
    following: LockHeader,
    past: Past,
    refused: NotAcquired,
    countdown: float,
) -> None:
    """Put the message back: DEFERRED stored, sent, published, then Ignore raised, in this order.

    following: the slip that it goes with. countdown: s.
    """
    now = utc_now()
    countdown = supported_countdown(task.app, countdown, route_of(request, following))
    holder = refused.holder if isinstance(refused, LockTaken) else ""
    info = {
        "resource": refused.resource,
        "holder": holder,
        "deferrals": following.deferrals,
        "waited": past.waited,
        "next_try": states.in_iso(now, countdown),
    }
    why = contention.why(refused)
    told = states.fields("run_deferred", task, request, **info)
    text = "Task %s[%s] deferred for %.2f s: lock %r %s %s"
    verb = "is" if isinstance(refused, LockTaken) else "has"
    names = task.name, request.id, countdown, refused.resource
    logger.info(text, *names, verb, why, extra=told)
    states.show_deferred(task, request, info, why)
    republish(task, request, following, countdown)
    request.__dict__[CONTINUES] = True
    event = signals.LockDeferredEvent(
        refused.resource, holder, following.deferrals, past.waited, countdown
    )
    signals.lock_deferred.send(task, event=event)
    raise Ignore(f"deferred: {why}")


def is_done(state: str | None, outcome: object) -> bool:
    """Tell whether a run that ended like this is done: its message does not come back by itself.

    state: the tracer's word, None where an exception passed it. outcome: the result or the error.
    Source: celery.worker.request: Request.on_success, on_failure and on_retry acknowledge, or
    reject without requeue. A MemoryError ends the worker with the message in its hands.
    """
    if state == celery_states.REJECTED:
        return isinstance(outcome, Reject) and not outcome.requeue
    if state == celery_states.FAILURE:
        return not isinstance(outcome, MemoryError)
    return state in (celery_states.SUCCESS, celery_states.RETRY, celery_states.IGNORED)


def is_stored(request: Any, passing: BaseException) -> bool:
    """Tell whether a run is done although an exception passes Celery's tracer: its hook's.

    Source: celery.worker.request: Request.on_failure lets go of the message whatever comes out of
    the tracer, but for Reject with requeue, MemoryError, and what ends a process.
    """
    passage = run_of(request)
    if passage is None or not getattr(passage, "stored", False):
        return False
    if isinstance(passing, Reject):
        return not passing.requeue
    return isinstance(passing, Exception) and not isinstance(passing, MemoryError)


@task_postrun.connect(weak=False)
def _let_go_late(sender: Any = None, retval: Any = None, state: Any = None, **_: Any) -> None:
    """Release after the result, links and retry are stored or published: late acknowledgement.

    Source: celery.app.trace sends task_postrun in a finally, with the request still in place, on
    every way out of a run that the child itself can see. What is on its way out there meanwhile is
    an exception of the result backend or of a link that could not be sent: not an end; or of a hook
    of the user's, which comes after the end.
    """
    passing = sys.exc_info()[1]
    try:
        _end_late(sender, retval, state, passing)
    except BaseException:  # cut, as by a soft time limit: nobody comes after this
        _end_late(sender, retval, state, passing)
        raise


def _end_late(task: Any, retval: Any, state: str | None, passing: BaseException | None) -> None:
    """End a send's window, mark the run as done, and release; twice does no harm.

    passing: the exception on its way out of the tracer.
    """
    request = task.request
    if passing is None:
        done = is_done(state, retval)
    else:
        done = is_stored(request, passing) or was_ended(name_of_run(task, request))
    if done and HEADER in request.__dict__:
        _end_window(task.app, request, state)
    let_go(request, done=done)


# before every other receiver: what they raise past Exception would keep the lock for ever
task_postrun.receivers.insert(0, task_postrun.receivers.pop())


def _end_window(app: Any, request: Any, state: str | None) -> None:
    """End the window of a send whose run is at its end, and neither put back nor to be retried."""
    if state != celery_states.RETRY and CONTINUES not in request.__dict__:
        end_window(app, request)


def end_window(app: Any, request: Any) -> None:
    """End the window that a message's send has opened; nothing happens where there is none."""
    ticket = UniqueToken.of(LockHeader.of(request).unique)
    if ticket is not None:
        ticket.end(redlock_of(app))


@task_revoked.connect(weak=False)
def _end_window_of_revoked(sender: Any = None, request: Any = None, **_: Any) -> None:
    """End the window of what is revoked or expired, in the worker's main process."""
    if HEADER in request.__dict__:
        end_window(sender.app, request)


@task_unknown.connect(weak=False)
@task_rejected.connect(weak=False)
def _end_window_of_unread(sender: Any = None, message: Any = None, **_: Any) -> None:
    """End the window of a message that no run comes of: its task is unknown, or its text wrong.

    Source: celery.worker.consumer: Consumer.on_unknown_task, on_invalid_task, on_unknown_message
    have rejected it by then, each without requeue. sender: the consumer.
    """
    headers = message.headers
    if isinstance(headers, Mapping) and HEADER in headers:
        end_window(sender.app, Context(headers))


_received: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


@task_received.connect(weak=False)
def _note_ticket(request: Any = None, **_: Any) -> None:
    """Keep what has a window at hand for its end, as long as Celery itself keeps it."""
    if HEADER in request.request_dict and LockHeader.of(request._context).unique is not None:
        _received[request.id] = request


@task_failure.connect(weak=False)
def _end_window_of_killed(sender: Any = None, task_id: Any = None, **_: Any) -> None:
    """End the window of a run whose process is gone; its message does not come back.

    Source: celery.worker.request: Request.on_failure sends this in the worker's main process where
    the child could not, and not where it hands the message back.
    """
    request = _received.get(task_id)
    if request is not None:
        end_window(sender.app, request._context)
