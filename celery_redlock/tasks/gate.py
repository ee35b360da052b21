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
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from celery import states as celery_states
from celery._state import get_current_worker_task
from celery.exceptions import Ignore, Reject
from celery.signals import task_postrun

from celery_redlock.errors import LockLost, LockTaken, NotAcquired, RedlockError
from celery_redlock.lock.keys import in_order
from celery_redlock.lock.redlock import Lock, give_back
from celery_redlock.lock.session import AlreadyDoneError, Mark, Terms
from celery_redlock.tasks import contention, runtime, signals, states
from celery_redlock.tasks.contention import Contention, Past, Requeue, RunUnlocked, Skip
from celery_redlock.tasks.deferral import Address, Slip, bearable, put_back, utc_now
from celery_redlock.tasks.runtime import redlock_of, settings_of
from celery_redlock.tasks.settings import Plan, Rules, compile_plan

logger = logging.getLogger(__name__)

PASSAGE = "_redlock_passage"  # the name on the request under which a run's passage hangs
_CALLS_BODIES = ("celery.map", "celery.starmap", "celery.chunks")

Body = Callable[..., Any]


class Passage:
    """One run on its way through the gate.

    lock: what it holds. late: it lets go in task_postrun, after the result is stored.
    """

    __slots__ = ("late", "lock", "unlocked")

    def __init__(self, lock: Lock, *, late: bool) -> None:
        self.lock, self.late = lock, late
        self.unlocked = False  # runs without a lock, as unreachable="run" says


def passage_of(request: Any) -> Passage | None:
    """Return the passage of a run, None outside one."""
    passage: Passage | None = request.__dict__.get(PASSAGE)
    return passage


def gated(body: Any) -> Body:
    """Return a class's `run` or `__call__` with the gate around it.

    body: the attribute as it stands in the class: a function or a staticmethod. No `__wrapped__`
    is left, for `task_annotations` with "@run" unwraps it and would throw the gate away.
    """
    function = body.__func__ if isinstance(body, staticmethod) else body
    is_static = isinstance(body, staticmethod)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = self.request
        call = function if is_static else functools.partial(function, self)
        if (
            request.called_directly
            or PASSAGE in request.__dict__
            or self.name.startswith("celery.")
        ):
            refuse_map(self, request)
            return call(*args, **kwargs)
        return run_locked(self, request, call, args, kwargs)

    functools.update_wrapper(run, function)
    del run.__wrapped__  # type: ignore[attr-defined]
    run.__signature__ = _without_self(function, is_static)  # type: ignore[attr-defined]
    run.redlock_gate = run  # type: ignore[attr-defined]
    return run


def is_gate(body: Any) -> bool:
    """Tell a gate from a body that `functools.wraps` gave a gate's attributes."""
    return getattr(body, "redlock_gate", None) is body


def _without_self(function: Body, is_static: bool) -> inspect.Signature:
    signature = inspect.signature(function, follow_wrapped=False)
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in signature.parameters.values()):
        # a decorator that passes everything on; one that names its parameters may add some
        signature = inspect.signature(function)
    if not is_static:
        return signature
    # a bound `run` loses its first parameter: give a static one something to lose
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    return signature.replace(parameters=[first, *signature.parameters.values()])


def body_signature(cls: type) -> inspect.Signature:
    """Return the signature of a task's body, without self.

    From the class: on the instance autoretry's wrapper may stand, which hides it.
    """
    gates = (inspect.getattr_static(cls, name) for name in ("run", "__call__"))
    gate = next(g for g in gates if is_gate(g))
    signature = inspect.signature(gate)
    parameters = list(signature.parameters.values())
    named = parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL
    return signature.replace(parameters=parameters[1:]) if named else signature


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


def plan_of(task: Any) -> Plan:
    """Return what a task's declaration means; raises SettingsError each time while it is wrong."""
    cls = type(task)
    plans: dict[Any, Plan] = cls.__dict__.get("_redlock_plans") or {}
    which = (task.name, id(task.app))  # a class may be two tasks, by names set on instances
    plan = plans.get(which)
    if plan is None:
        names = [name for name in dir(task) if name.startswith("lock_")]
        found = {name: inspect.getattr_static(task, name) for name in names}
        others = [n for n, v in found.items() if isinstance(v, (property, classmethod))]
        attributes = {
            name: value.__func__ if isinstance(value, staticmethod) else value
            for name, value in found.items()
        }
        settings, signature = settings_of(task.app), body_signature(cls)
        plan = compile_plan(settings, task.name, attributes, signature, others)
        cls._redlock_plans = {**plans, which: plan}
    return plan


def queue_of(
    app: Any, address: Address, known: dict[tuple[str | None, str], str] | None = None
) -> str:
    """Return the declared queue that a message came through, else its routing key.

    known: queues found before, by exchange and routing key; for those that come with each run.
    """
    exchange, key = address.exchange, address.routing_key
    if known and (found := known.get((exchange, key))) is not None:
        return found
    for name, queue in app.amqp.queues.items():
        if queue.routing_key == key and exchange in (None, queue.exchange.name):
            if known is not None:
                known[exchange, key] = str(name)
            return str(name)
    return key


def lock_of(
    task: Any,
    rules: Rules,
    resources: Sequence[str],
    *,
    label: str,
    wait: float | None = None,
    mark: Mark | None = None,
) -> Lock:
    """Return the lock that a run by these rules takes; wait: s, instead of the rules'.

    mark: of a run that may be delivered again.
    """
    terms = Terms(
        resources=in_order(resources),
        ttl=rules.ttl,
        wait=rules.wait if wait is None else wait,
        renew=rules.renew,
        max_hold=rules.max_hold,
        label=label,
        owner=task,
        limit=rules.limit,
        fencing=rules.fencing,
        mark=mark,
    )
    return Lock(redlock_of(task.app), terms)


def name_of_run(task: Any, request: Any) -> str:
    """Return the name of a run: a retry is another one, and so is what a task is replaced by."""
    nesting = request.replaced_task_nesting or 0
    return f"{request.id}:{task.name}:{request.retries}:{nesting}"


def label_of_run(task: Any, request: Any) -> str:
    """Return what the nodes show of the holder: task id, name, retries, nesting, worker."""
    return f"{name_of_run(task, request)} {request.hostname}"


def mark_of(task: Any, request: Any, slip: Slip) -> Mark | None:
    """Return the mark of a run that acknowledges late; None where its message has no twin to come.

    Each copy of a broadcast message is to run, though all of them have one id.
    """
    if not goes_back(task, request):
        return None
    kept_for = settings_of(task.app).done_ttl
    return Mark(name_of_run(task, request), kept_for, slip.asks_since())


def run_locked(task: Any, request: Any, call: Body, args: Sequence[Any], kwargs: Any) -> Any:
    """Run a body under its lock, or put its message to what the rules say."""
    plan, slip = plan_of(task), Slip.of(request)
    queue = (
        task.own_queue(args, kwargs)
        if request.is_eager
        else queue_of(task.app, Address.of(request.delivery_info, slip), plan.queues)
    )
    rules = plan.rules(queue, slip.options)
    resources = plan.resources(rules, task, args, kwargs, queue)
    if not resources:
        return call(*args, **kwargs)
    late, mark = bool(task.acks_late) and not request.is_eager, None
    if late:
        slip = slip.received(request.delivery_info)
        mark = mark_of(task, request, slip)
    lock = lock_of(task, rules, resources, label=label_of_run(task, request), mark=mark)
    passage = Passage(lock, late=late)
    request.__dict__[PASSAGE] = passage  # before the grant leaves, so that postrun finds the lock
    try:
        lock.acquire()
    except NotAcquired as refused:
        request.__dict__.pop(PASSAGE, None)
        turn_away(task, request, rules, slip, refused, args, kwargs)
        request.__dict__[PASSAGE] = passage  # unreachable="run"
        passage.unlocked = True
    except AlreadyDoneError:
        let_go(request)
        drop(task, request)
    except BaseException:
        let_go(request)
        raise
    return _run_body(task, request, passage, rules, slip, call, args, kwargs)


def _run_body(
    task: Any,
    request: Any,
    passage: Passage,
    rules: Rules,
    slip: Slip,
    call: Body,
    args: Sequence[Any],
    kwargs: Any,
) -> Any:
    try:
        tracked = bool(getattr(task, "_redlock_track_started", False))
        states.show_started(task, request, tracked=tracked, deferred=slip.deferrals > 0)
        if passage.unlocked:
            return call(*args, **kwargs)
        return _run_held(task, request, passage.lock, rules, call, args, kwargs)
    finally:
        if not passage.late:
            let_go(request)


def _run_held(
    task: Any,
    request: Any,
    lock: Lock,
    rules: Rules,
    call: Body,
    args: Sequence[Any],
    kwargs: Any,
) -> Any:
    """Run a body that hears of its lock's loss, and let it not end well without its lock.

    What it raises stands: its own error says more, a retry takes the lock anew, and after Ignore
    or Reject no SUCCESS is stored.
    """
    report = functools.partial(states.show_lock_lost, task, request)
    body = runtime.Body(lock, abort=rules.lost == "abort", report=report)
    try:
        result = body.run(call, args, kwargs)
    except Exception:
        body.report_loss()
        raise
    body.report_loss()
    if rules.lost == "abort":
        ensure_to_the_end(lock)
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
    passage = passage_of(request)
    if passage is not None:
        give_back(passage.lock, done=done)
        request.__dict__.pop(PASSAGE, None)  # last: where this is cut, task_postrun does it again


def turn_away(
    task: Any,
    request: Any,
    rules: Rules,
    slip: Slip,
    refused: NotAcquired,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Do what the rules say of a run without its lock; returns only where it is to run without.

    Raises Ignore (put back, or skipped), or the error that ends the run as FAILURE.
    """
    if is_twin(task, request, refused) and goes_back(task, request):
        await_first(task, request, slip, refused)
    past = slip.past(utc_now())

    def ask(conflict: Callable[[Contention], object], taken: LockTaken) -> object:
        told = (taken.resource, taken.holder, past.deferrals, past.waited, task)
        return conflict(Contention(*told, tuple(args), dict(kwargs)))

    cap = settings_of(task.app).countdown_cap
    decision = contention.decide(rules, refused, past, ask, random.uniform, cap)
    if isinstance(decision, RunUnlocked):
        logger.error("%s runs WITHOUT its lock: %s", task.name, refused)
    elif isinstance(decision, Skip):
        skip(task, request, refused.resource, decision.reason)
    elif isinstance(decision, Requeue) and goes_back(task, request):
        defer(task, request, slip, past, refused, decision)
    else:
        raise contention.told(refused, past)


def goes_back(task: Any, request: Any) -> bool:
    """Tell whether a message can be put back.

    An eager run has none: it has waited up to `wait`, and gives up. On a fan-out exchange each
    copy would go to every queue again, and one message would become many.
    """
    if request.is_eager:
        return False
    address = Address.of(request.delivery_info, Slip.of(request))
    queues = task.app.amqp.queues.values()
    return not any(
        q.exchange.type == "fanout" and q.exchange.name == address.exchange for q in queues
    )


def is_twin(task: Any, request: Any, refused: NotAcquired) -> bool:
    """Tell whether who holds the lock is this very run, by another delivery of its message."""
    own = f"{name_of_run(task, request)} "
    return isinstance(refused, LockTaken) and refused.holder.startswith(own)


def await_first(task: Any, request: Any, slip: Slip, refused: NotAcquired) -> NoReturn:
    """Put a twin back, to look again whether the first delivery is done or has died.

    No state, event or signal tells of it: they would overwrite what the first one is at. For the
    same reason no budget ends it, nor what `conflict` says.
    """
    cap = settings_of(task.app).countdown_cap
    decision = contention.await_twin(refused, slip.twin, random.uniform, cap)
    address = Address.of(request.delivery_info, slip)
    countdown = bearable(task.app, decision.countdown, address)
    logger.info(
        "%s[%s] runs already, by another delivery of its message: this one looks again in %.2f s",
        task.name, request.id, countdown,
    )  # fmt: skip
    put_back(task, request, slip.next_as_twin(request.retries, request.id), countdown)
    raise Ignore("runs already")


def drop(task: Any, request: Any) -> NoReturn:
    """Acknowledge a message whose run is done, and leave its state as it is."""
    logger.info("dropped %s[%s]: another delivery of its message is done", task.name, request.id)
    raise Ignore("done already")


def skip(task: Any, request: Any, resource: str, reason: str) -> None:
    """End a run without running its body."""
    logger.info("skipped %s[%s]: %s", task.name, request.id, reason)
    states.show_skipped(task, request, resource, reason)
    signals.lock_skipped.send(task, event=signals.LockSkipped(resource, reason))
    raise Ignore(reason)


def defer(
    task: Any, request: Any, slip: Slip, past: Past, refused: NotAcquired, decision: Requeue
) -> None:
    """Put the message back: DEFERRED stored, sent, published, then Ignore raised, in this order."""
    now = utc_now()
    address = Address.of(request.delivery_info, slip)
    countdown = bearable(task.app, decision.countdown, address)
    following = slip.next(now, decision.delay, request.retries, request.id)
    holder = refused.holder if isinstance(refused, LockTaken) else ""
    info = {
        "resource": refused.resource,
        "holder": holder,
        "deferrals": following.deferrals,
        "waited": past.waited,
        "next_try": states.in_iso(now, countdown),
    }
    why = f"held by {holder}" if holder else str(refused)
    logger.info("deferred %s[%s] for %.2f s: %s", task.name, request.id, countdown, why)
    states.show_deferred(task, request, info)
    put_back(task, request, following, countdown)
    event = signals.LockDeferred(
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


@task_postrun.connect(weak=False)
def _let_go_late(sender: Any = None, retval: Any = None, state: Any = None, **_: Any) -> None:
    """Release after the result, links and retry are stored or published: late acknowledgement.

    Source: celery.app.trace sends task_postrun in a finally, with the request still in place, on
    every way out of a run that the child itself can see. What is on its way out there meanwhile is
    an exception of the result backend or of a link that could not be sent: not an end.
    """
    passes = sys.exc_info()[1] is not None
    try:
        let_go(sender.request, done=not passes and is_done(state, retval))
    except BaseException:  # cut, as by a soft time limit: nobody comes after this
        let_go(sender.request, done=not passes and is_done(state, retval))
        raise


# before every other receiver: what they raise past Exception would keep the lock for ever
task_postrun.receivers.insert(0, task_postrun.receivers.pop())
