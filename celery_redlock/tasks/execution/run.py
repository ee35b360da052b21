"""One execution of a task's body under its lock."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import sys
import types
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from celery.exceptions import Ignore, Reject, Retry

from celery_redlock.errors import LockLost, NotAcquired, SettingsError
from celery_redlock.lock.engine.acquirer import AlreadyCompletedError, SupersededError
from celery_redlock.lock.lock import Lock
from celery_redlock.lock.model.keys import in_order
from celery_redlock.lock.model.options import CompletionMarker, LockOptions
from celery_redlock.lock.release import loss_of, release_all
from celery_redlock.tasks import reporting
from celery_redlock.tasks.body.monitored import MonitoredBody
from celery_redlock.tasks.declaration import config_of, refuse_awaitable
from celery_redlock.tasks.delivery.delivery import is_for_another_queue, route_of, utc_now
from celery_redlock.tasks.delivery.header import LockHeader
from celery_redlock.tasks.delivery.route import queue_of
from celery_redlock.tasks.delivery.run_id import name_of_all_copies, name_of_run
from celery_redlock.tasks.execution.outcomes import (
    _tell_nothing,
    drop,
    end_unrun,
    make_way,
    turn_away,
    turn_away_unrun,
    why_over,
)
from celery_redlock.tasks.execution.redelivery import (
    CONTINUES,
    goes_back,
    is_done_since,
    is_late,
    is_twin,
    mark_of,
    marks_of,
)
from celery_redlock.tasks.per_app import redlock_of, settings_of
from celery_redlock.tasks.settings.keys import TaskCall
from celery_redlock.tasks.settings.options import TaskLockOptions
from celery_redlock.tasks.signatures import Body
from celery_redlock.tasks.unique.token import UniqueToken

logger = logging.getLogger(__name__)


RUN = "_redlock_passage"  # the name on the request under which a run's passage hangs


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


def check_ended(task: Any, result: Any) -> None:
    """Raise SettingsError where a body has returned what is still to be run."""
    if not (inspect.isawaitable(result) or inspect.isasyncgen(result)):
        return
    if isinstance(result, (types.CoroutineType, types.GeneratorType)):
        result.close()  # else Python warns that nobody awaited it
    refuse_awaitable(task, f"a {type(result).__name__} that it returned")


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
        text, told = "%s[%s] is for another queue", reporting.fields("copy_astray", task, request)
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
    rules = plan.options_for(queue, slip.options)
    resources = plan.resources(rules, TaskCall(task, args, kwargs, queue))
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
        reporting.show_started(task, request, tracked=tracked, deferred=slip.deferrals > 0)
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
    report = functools.partial(reporting.show_lock_lost, task, request)
    body = MonitoredBody(lock, abort=rules.on_lost == "abort", report=report)
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


def ensure_to_the_end(lock: Lock) -> None:
    """Raise LockLost, which says that the body had ended, where the lock is not held any more."""
    try:
        lock.ensure()
    except LockLost as lost:
        raise LockLost(lost.resource, lost.reason, True) from None


def let_go(request: Any, *, done: bool = False) -> None:
    """Release a run's lock; nothing happens where that is done or there is none.

    done: the run is at its end, and its message will not come back, unless as a twin.
    """
    passage = run_of(request)
    if passage is not None:
        release_all(passage.lock, ended=done)
        request.__dict__.pop(RUN, None)  # last: where this is cut, task_postrun does it again
