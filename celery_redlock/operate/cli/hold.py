"""The command `hold`: an operator holds a resource, and its tasks wait until it is given back.

The value of a hold is marked, so the nodes grant no other permit of the resource, whatever its
limit: see lua/permit.lua. The hold takes any permit first, and changes to a lower one as soon as
one is free. Permit 0 also stops the locks that have one holder. Then it waits until the runs that
hold the other permits have ended.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import click

from celery_redlock.errors import (
    LockLost,
    LockTaken,
    QuorumUnreachable,
    SettingsError,
    first_names,
    summarize_causes,
)
from celery_redlock.label import label_of_operator
from celery_redlock.lock.client import Redlock
from celery_redlock.lock.lock import Lock
from celery_redlock.lock.model.keys import HOLD_MARK
from celery_redlock.lock.model.lease import Lease
from celery_redlock.lock.model.options import LockOptions
from celery_redlock.lock.reports import LockReport
from celery_redlock.lock.transport.command import text_of
from celery_redlock.lock.validation import MAX_PERMITS, MAX_SECONDS, check_resources
from celery_redlock.operate.cli.group import (
    app_from,
    as_json,
    finite,
    non_empty,
    print_all,
    redlock,
)
from celery_redlock.tasks.declaration import config_of
from celery_redlock.tasks.per_app import redlock_of, settings_of
from celery_redlock.tasks.settings.options import TaskLockOptions
from celery_redlock.tasks.startup import locked_tasks
from celery_redlock.tasks.task import LockedTask

CHECK_INTERVAL = 0.5  # seconds between two checks of the running tasks and of the hold
PERMIT_WAIT = 1.0  # seconds of one wait for a permit
RELEASE_TIMEOUT = 1.0  # seconds that a release waits for the nodes
VOTES_MISSING = "a quorum of the lock nodes"
END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ResourceHold:
    """An operator's hold of a resource: one permit, exchanged for lower ones until it is 0.

    limit: the least number of permits of the resource; the nodes may show more.
    """

    def __init__(self, redlock: Redlock, options: LockOptions, limit: int = 1) -> None:
        self._redlock = redlock
        self._options = options
        self._limit = limit
        self._resource = options.resources[0]
        self._clock = redlock.session.clock
        self._lock: Lock | None = None

    def take(self, wait: float, tell: Callable[[str], object] = lambda _: None) -> bool:
        """Take the resource; return whether no task runs any more.

        wait: the most seconds to wait. tell: called with what the hold waits for, each time that
        changes. Raises LockLost if the hold is lost.
        """
        deadline = self._clock.now() + wait
        reported = ""
        while True:
            remaining = max(0.0, deadline - self._clock.now())
            blocker = self._take_permit(min(remaining, PERMIT_WAIT))
            self._check_held()
            if blocker is None:
                return True
            if blocker != reported:
                tell(blocker)
            if self._clock.now() >= deadline:
                return False
            reported = blocker

    def keep(self) -> NoReturn:
        """Wait until the hold is lost. Raises LockLost then."""
        while True:
            self._check_held()
            self._clock.sleep(CHECK_INTERVAL)

    def release(self) -> None:
        """Release the resource, and wait a moment until the nodes have deleted the hold."""
        value = self._value
        deadline = self._clock.now() + RELEASE_TIMEOUT
        if self._lock is not None:
            self._lock.release()
        while value and self._clock.now() < deadline:
            lock_list = self._redlock.locks(self._resource)
            if all(lock.value is None or text_of(lock.value) != value for lock in lock_list.locks):
                return
            self._clock.sleep(CHECK_INTERVAL / 10)

    def _check_held(self) -> None:
        if self._lock is not None:
            self._lock.ensure()

    @property
    def _leases(self) -> list[Lease]:
        acquisitions = [] if self._lock is None else self._lock.ownership.acquisitions
        return [lease for acquisition in acquisitions for lease in acquisition.leases]

    @property
    def _permit(self) -> int | None:
        """The number of the permit that the hold has; None if it has none."""
        return next((lease.key.permit for lease in self._leases), None)

    @property
    def _value(self) -> str:
        return next((lease.value for lease in self._leases), "")

    def _take_permit(self, wait: float) -> str | None:
        """Take a lower permit, or wait for one; return what `_blocker` returns.

        wait: the most seconds to wait.
        """
        permit = self._permit
        resource = self._resource
        if permit == 0:
            self._clock.sleep(min(wait, CHECK_INTERVAL))
            return self._blocker()
        reports = self._redlock.locks(resource).locks
        # one permit more than are taken: that one is free, and its mark stops those that read it
        candidates = [number for report in reports for number in (report.limit, report.permit + 2)]
        limit = permit or min(max([self._limit, *candidates]), MAX_PERMITS)
        limits = {resource: limit} if limit > 1 else None
        lock = Lock(self._redlock, self._options._replace(limits=limits))
        try:
            lock.acquire(wait)
        except QuorumUnreachable as failure:
            return f"{VOTES_MISSING} ({summarize_causes(failure.causes)})"
        except LockTaken:
            return self._blocker()
        earlier_lock = self._lock
        self._lock = lock
        if earlier_lock is not None:
            earlier_lock.release()
        return self._blocker()

    def _blocker(self) -> str | None:
        """Return what the hold still waits for; None once it is proved that no task runs.

        The proof: a quorum of voting nodes has this hold as permit 0, and no lock of a run. Such a
        node grants no permit any more, and a run cannot hold its lock without one of these nodes. A
        node that lost its keys counts only once it votes. Holds of other operators run no task.
        """
        lock_list = self._redlock.locks(self._resource)  # reads permit 0 first
        own_value = self._value
        has_first_permit = self._permit == 0
        running = _running(lock_list.locks, own_value, has_first_permit)
        clear_nodes = _clear_nodes(lock_list.locks, own_value, running)
        clear_nodes &= {node.node for node in self._redlock.status().nodes if node.votes}
        if has_first_permit and len(clear_nodes) >= lock_list.needed:
            return None
        names = list(dict.fromkeys(str(lock.holder) for lock in running))
        return first_names(names) if names else VOTES_MISSING


def _value_in(lock: LockReport) -> str:
    return text_of(lock.value) if lock.value else ""


def _running(
    locks: Sequence[LockReport], own_value: str, has_first_permit: bool
) -> list[LockReport]:
    """Return the locks that a task may run under; also other holds, before this one is the first.

    own_value: the value of this hold; "" if it has no permit.
    """
    values = [(lock, _value_in(lock)) for lock in locks]
    return [
        lock
        for lock, value in values
        if value and value != own_value and not (has_first_permit and value.startswith(HOLD_MARK))
    ]


def _clear_nodes(
    locks: Sequence[LockReport], own_value: str, running: Sequence[LockReport]
) -> set[str]:
    """Return the nodes that have this hold and no lock of a run."""
    own_votes = [lock.votes for lock in locks if own_value and _value_in(lock) == own_value]
    nodes = set(own_votes[-1]) if own_votes else set[str]()
    return nodes - {node for lock in running for node in lock.votes}


@dataclass(frozen=True)
class HoldEnd:
    """How a hold ended. state, text: the last step that the command prints. status: its exit."""

    state: str
    text: str
    status: int = 1


@redlock.command()
@click.argument("resource", callback=non_empty)
@click.option("--reason", default="", help="Shown by `locks`, and for tasks that wait.")
@click.option(
    "--limit", type=click.IntRange(1, MAX_PERMITS), default=1,
    help="How many tasks may run at once, if no holder shows it.",
)  # fmt: skip
@click.option(
    "--wait", type=click.FloatRange(0.0, MAX_SECONDS), default=MAX_SECONDS, callback=finite,
    help="Seconds for running tasks to end; then it gives up.",
)  # fmt: skip
@as_json
@click.pass_context
def hold(
    ctx: click.Context, resource: str, reason: str, limit: int, wait: float, as_json: bool
) -> None:
    """Pause the tasks of RESOURCE until Ctrl-C.

    Waits until the tasks that run have ended, and prints HELD. Ctrl-C, SIGTERM and SIGHUP give the
    resource back. If this is killed, the tasks resume after `ttl`. The exit status is 1 if it was
    not acquired in time, or is lost. With --json each step is one line.
    """
    app = app_from(ctx)
    (resource,) = check_resources("hold", resource)
    options = LockOptions(
        resources=(resource,),
        ttl=settings_of(app).ttl,
        wait=0.0,
        renew=True,
        max_hold=None,
        label=label_of_operator(f"{_person()}@{socket.gethostname()}", reason),
        reentrant=False,
        is_hold=True,
    )

    def tell(state: str, text: str) -> None:
        data = json.dumps({"resource": resource, "state": state, "text": text})
        print_all(data if as_json else text)

    print_all(*dict.fromkeys(warnings_of(app, resource)), err=True)
    resource_hold = ResourceHold(redlock_of(app), options, limit)
    try:
        with _ended_by_signals():
            end = _hold_until_end(resource_hold, resource, wait, tell)
    finally:
        resource_hold.release()
    with suppress(OSError):  # its terminal is closed
        tell(end.state, end.text)
    if end.status:
        ctx.exit(end.status)


def _hold_until_end(
    resource_hold: ResourceHold, resource: str, wait: float, tell: Callable[[str, str], object]
) -> HoldEnd:
    """Take a resource and keep it until a signal, a loss or the end of the wait."""
    is_held = False
    try:
        is_held = resource_hold.take(wait, lambda blocker: tell("waits", f"waits for {blocker}"))
        if not is_held:
            return HoldEnd("given up", f"{resource} was not acquired within {wait:g} s")
        tell("held", f"HELD {resource}: no task runs. Ctrl-C gives it back.")
        resource_hold.keep()
    except LockLost as loss:
        return HoldEnd("lost", f"LOST {resource}: {loss.reason}. Tasks may run now.")
    except KeyboardInterrupt:
        if is_held:
            return HoldEnd("given back", f"{resource} is given back", status=0)
        return HoldEnd("given up", f"{resource} was not acquired")


def _person() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may have a user without a name
        return f"user {os.getuid()}"


def handled_end_signals() -> list[signal.Signals]:
    """Return the signals that end a command, without those that are ignored, as nohup has it."""
    return [number for number in END_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt in the block at the first end signal, and ignore later ones."""
    handled = handled_end_signals()

    def interrupt(*_: object) -> None:
        for number in handled:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in handled:
        signal.signal(number, interrupt)
    yield


def warnings_of(app: Any, resource: str) -> Iterator[str]:
    """Yield a line for each task on the resource whose messages may not simply wait."""
    for task in locked_tasks(app):
        for queue in ("", *settings_of(app).queues):
            try:
                options = config_of(task).options_for(queue)
            except SettingsError:  # `doctor` tells of it
                continue
            if _may_lock(task, options, queue, resource):
                yield from _warnings(task, options)


def _warnings(task: LockedTask, options: TaskLockOptions) -> Iterator[str]:
    name = task.name
    on_conflict = options.on_conflict
    max_wait = options.max_wait
    if callable(on_conflict):
        yield f"{name} may be skipped or fail meanwhile: its on_conflict is a callable"
    elif on_conflict != "defer":
        effect = "is skipped" if on_conflict == "skip" else "fails"
        yield f"{name} {effect} meanwhile: on_conflict={on_conflict!r}"
    elif max_wait is not None:
        effect = "is skipped" if options.on_give_up == "skip" else "fails"
        yield f"{name} {effect} if it waits for {max_wait:g} s: max_wait"
    if options.unique_for is not None:
        yield f"{name} is sent twice after unique_for={options.unique_for:g} s of waiting"
    if task.expires is not None:
        yield f"{name} is revoked if it waits until it expires: expires={task.expires}"


def _may_lock(task: LockedTask, options: TaskLockOptions, queue: str, resource: str) -> bool:
    """Return whether a call of a task in a queue may lock a resource."""
    if options.key is False or callable(options.key):
        return bool(options.key)
    shapes = config_of(task).shapes(options, queue) or (f"{task.name}:{{}}",)
    patterns = (re.sub(r"\\\{(digest)?\\\}", ".*", re.escape(shape)) for shape in shapes)
    return any(re.fullmatch(pattern, resource, re.DOTALL) for pattern in patterns)
