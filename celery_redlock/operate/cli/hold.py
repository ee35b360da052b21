"""The command `hold`: an operator holds a resource, and its tasks wait until it is given back.

The values of a hold are marked, so nobody else gets a permit of the resource, whatever its limit:
see lua/permit.lua. The hold takes one permit, and a lower one instead as soon as one is free, until
it has permit 0, which stops the locks with one holder, too. Then the runs that are left may end.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NoReturn

import click

from celery_redlock.errors import (
    LockLost,
    LockTaken,
    QuorumUnreachable,
    SettingsError,
    summarize_causes,
)
from celery_redlock.label import label_of_operator
from celery_redlock.lock.client import Redlock
from celery_redlock.lock.lock import Lock
from celery_redlock.lock.model.keys import MARK
from celery_redlock.lock.model.lease import Lease
from celery_redlock.lock.model.options import LockOptions
from celery_redlock.lock.transport.command import text_of
from celery_redlock.lock.validation import LONGEST, MOST_PERMITS, check_resources
from celery_redlock.operate.cli.group import app_from, as_json, finite, named, print_all, redlock
from celery_redlock.tasks.declaration import config_of
from celery_redlock.tasks.per_app import redlock_of, settings_of
from celery_redlock.tasks.settings.options import TaskLockOptions
from celery_redlock.tasks.startup import locked_tasks
from celery_redlock.tasks.task import LockedTask

LOOK_EVERY = 0.5  # seconds between two looks at what still runs, and whether the hold is lost
TRIES_FOR = 1.0  # seconds of one wait for a permit
LONGEST_RELEASE = 1.0  # seconds until the nodes have deleted it
VOTES_MISSING = "a quorum of the lock nodes"
SHOWN = 5  # of the holders that it waits for
ENDED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ResourceHold:
    """A resource that an operator takes and keeps, by one permit, which gets lower until it is 0.

    limit: how many permits the resource has at least; those that the nodes show count as well.
    """

    def __init__(self, redlock: Redlock, options: LockOptions, limit: int = 1) -> None:
        self._redlock = redlock
        self._options = options
        self._limit = limit
        self._resource = options.resources[0]
        self._clock = redlock.session.clock
        self._lock: Lock | None = None

    def take(self, wait: float, tell: Callable[[str], object] = lambda _: None) -> bool:
        """Take the resource; return whether no task runs any more, after at most `wait` seconds.

        tell: called with what it waits for, if that is something else. Raises LockLost.
        """
        until = self._clock.now() + wait
        told = ""
        while True:
            left = max(0.0, until - self._clock.now())
            awaited = self._take_permit(min(left, TRIES_FOR))
            self._ensure()
            if awaited is None:
                return True
            if awaited != told:
                tell(awaited)
            if self._clock.now() >= until:
                return False
            told = awaited

    def keep(self) -> NoReturn:
        """Wait until the hold is lost; raises LockLost then."""
        while True:
            self._ensure()
            self._clock.sleep(LOOK_EVERY)

    def release(self) -> None:
        """Give the resource back, and wait a moment until the nodes have deleted the hold."""
        value = self._value
        until = self._clock.now() + LONGEST_RELEASE
        if self._lock is not None:
            self._lock.release()
        while value and self._clock.now() < until:
            sight = self._redlock.locks(self._resource)
            if all(one.value is None or text_of(one.value) != value for one in sight.locks):
                return
            self._clock.sleep(LOOK_EVERY / 10)

    def _ensure(self) -> None:
        if self._lock is not None:
            self._lock.ensure()

    @property
    def _leases(self) -> list[Lease]:
        found = [] if self._lock is None else self._lock.ownership.acquisitions
        return [lease for one in found for lease in one.leases]

    @property
    def _permit(self) -> int | None:
        """The permit that it has; None for none."""
        return next((lease.key.permit for lease in self._leases), None)

    @property
    def _value(self) -> str:
        return next((lease.value for lease in self._leases), "")

    def _take_permit(self, wait: float) -> str | None:
        """Take a lower permit, or wait for a while; return what is awaited, None for nothing."""
        permit = self._permit
        resource = self._resource
        if permit == 0:
            self._clock.sleep(min(wait, LOOK_EVERY))
            return self._awaited()
        shown = self._redlock.locks(resource).locks
        # with one permit more than are taken, one is free: its mark stops those who read it
        limits = [number for one in shown for number in (one.limit, one.permit + 2)]
        limit = permit or min(max([self._limit, *limits]), MOST_PERMITS)
        of_it = {resource: limit} if limit > 1 else None
        lock = Lock(self._redlock, replace(self._options, limits=of_it))
        try:
            lock.acquire(wait)
        except QuorumUnreachable as failure:
            return f"{VOTES_MISSING} ({summarize_causes(failure.causes)})"
        except LockTaken:
            return self._awaited()
        higher = self._lock
        self._lock = lock
        if higher is not None:
            higher.release()
        return self._awaited()

    def _awaited(self) -> str | None:
        """Return whose end is awaited; None if a quorum of nodes has this hold and no run.

        Such a node grants no permit any more, and no run holds its lock without one of them. A node
        that lost its keys proves nothing before it votes. Other holds run nothing.
        """
        sight = self._redlock.locks(self._resource)  # reads permit 0 first
        own = self._value
        is_first = self._permit == 0
        clear = set[str]()
        others = []
        for one in sight.locks:
            value = text_of(one.value) if one.value else ""
            if own and value == own:
                clear = set(one.votes)
            elif value and not (is_first and value.startswith(MARK)):
                others.append(one)
        clear -= {node for one in others for node in one.votes}
        clear &= {node.node for node in self._redlock.status().nodes if node.votes}
        if is_first and len(clear) >= sight.needed:
            return None
        names = list(dict.fromkeys(str(one.holder) for one in others))
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        return f"{', '.join(names[:SHOWN])}{more}" if names else VOTES_MISSING


@redlock.command()
@click.argument("resource", callback=named)
@click.option("--reason", default="", help="Shown by `locks`, and for tasks that wait.")
@click.option(
    "--limit", type=click.IntRange(1, MOST_PERMITS), default=1,
    help="How many tasks may run at once, if no holder shows it.",
)  # fmt: skip
@click.option(
    "--wait", type=click.FloatRange(0.0, LONGEST), default=LONGEST, callback=finite,
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
    held = ResourceHold(redlock_of(app), options, limit)
    is_had = False
    last = ("", "")
    try:
        with _ended_by_signals():
            try:
                is_had = held.take(wait, lambda whom: tell("waits", f"waits for {whom}"))
                last = "given up", f"{resource} was not acquired within {wait:g} s"
                if is_had:
                    tell("held", f"HELD {resource}: no task runs. Ctrl-C gives it back.")
                    held.keep()
            except LockLost as loss:
                is_had = False
                last = ("lost", f"LOST {resource}: {loss.reason}. Tasks may run now.")
            except KeyboardInterrupt:
                had = f"{resource} is given back" if is_had else f"{resource} was not acquired"
                last = "given back" if is_had else "given up", had
    finally:
        held.release()
    with suppress(OSError):  # its terminal is closed
        tell(*last)
    if not is_had:
        ctx.exit(1)


def _person() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may have a user without a name
        return f"user {os.getuid()}"


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let the first of some signals interrupt the block, and none interrupt the release."""
    ends = [one for one in ENDED_BY if signal.getsignal(one) is not signal.SIG_IGN]  # by nohup

    def interrupt(*_: object) -> None:
        for one in ends:
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt

    for one in ends:
        signal.signal(one, interrupt)
    yield


def warnings_of(app: Any, resource: str) -> Iterator[str]:
    """Yield what becomes of the messages of tasks that may lock a resource, other than waiting."""
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
    longest = options.max_wait
    if callable(on_conflict):
        yield f"{name} may be skipped or fail meanwhile: its on_conflict is a callable"
    elif on_conflict != "defer":
        does = "is skipped" if on_conflict == "skip" else "fails"
        yield f"{name} {does} meanwhile: on_conflict={on_conflict!r}"
    elif longest is not None:
        does = "is skipped" if options.on_give_up == "skip" else "fails"
        yield f"{name} {does} if it waits for {longest:g} s: max_wait"
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
