"""Hold a lock as another owner, lose a lock, check that it was released, switch locking off.

No setting and no environment variable switches locking off, only `locking_off` in the test's own
process. A process that is forked or started there locks, and so does a worker's run of a message.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from celery import current_app
from celery._state import _task_stack

from celery_redlock.errors import RedlockError
from celery_redlock.lock.client import Redlock, sessions
from celery_redlock.lock.engine.acquirer import Acquirer, Failure
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.inspection import break_lock
from celery_redlock.lock.lock import Lock
from celery_redlock.lock.model.acquisition import Acquisition, Hold, Owner
from celery_redlock.lock.model.fencing import proposal
from celery_redlock.lock.model.lease import LockKey
from celery_redlock.lock.model.options import LockOptions
from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.lock.platform.threads import new_mutex
from celery_redlock.lock.reports import LockList, LockReport
from celery_redlock.lock.transport.command import text_of
from celery_redlock.tasks.per_app import forget, redlock_as_set, redlock_of
from celery_redlock.tasks.unique.claim import Claim
from celery_redlock_entry import without_proxy

POLL_INTERVAL = 0.02  # seconds between two checks of a condition
_targets: list[Any] = []  # set by `default_target`, the innermost last
_last_token = 0  # the last fencing token of an `Unlocked`
_token_mutex = new_mutex()


def trust_nodes(nodes: Sequence[Any], prefix: str = "redlock") -> None:
    """Let new nodes grant locks at once, as `Redlock.trust` does."""
    with _redlock_over(nodes, prefix) as redlock:
        redlock.trust()


@contextlib.contextmanager
def use_nodes(app: Any, nodes: Sequence[Any]) -> Iterator[Redlock]:
    """Let an app lock on these nodes inside the `with`, and trust them; gives its `Redlock`.

    app: a Celery app; it keeps all settings except `redlock_nodes`. nodes: each a
    `FakeNode`, an `EmbeddedNode`, or a value that `redlock_nodes` takes. They are also the default
    target of `hold`, `lose` and `assert_released`.
    """
    app = without_proxy(app)
    earlier_nodes = app.conf.get("redlock_nodes")
    app.conf.redlock_nodes = [getattr(node, "url", node) for node in nodes]
    forget(app)
    try:
        with redlock_of(app) as redlock:  # the app makes another one if a worker of it ends
            redlock.trust()
            with default_target(redlock):
                yield redlock
    finally:
        app.conf.redlock_nodes = earlier_nodes
        forget(app)


@contextlib.contextmanager
def default_target(on: Any) -> Iterator[None]:
    """Make an app or a `Redlock` the default target of `hold`, `lose` and `assert_released`."""
    _targets.append(on)
    try:
        yield
    finally:
        _targets.remove(on)


def close_beside(redlock: Redlock) -> None:
    """Close every other `Redlock` of this process on the same nodes: an app keeps its own open.

    Otherwise it would meet nodes that are gone, and say so once the tests have ended.
    """
    for session in sessions():
        is_beside = session is not redlock.session and not session.is_closed
        if is_beside and session.identity == redlock.session.identity:
            session.close()


@contextlib.contextmanager
def hold(
    *resources: str, on: Any = None, ttl: float = 30.0, renew: bool = True, limit: int = 1,
    by: str = "another owner, made by hold()",
) -> Iterator[Lock]:  # fmt: skip
    """Hold resources as another owner: an acquire by the test or a task finds them taken.

    on: an app, a `Redlock` or nodes; None means those of the fixtures or of `use_nodes`, else
    Celery's current app. ttl, renew: as for `Redlock.lock`; renew=False acts like a holder that has
    died. limit: the number of permits, of which this takes one. by: the holder's name on the nodes
    and in errors.
    Raises LockTaken if the resources are held already.
    """
    with _redlock_on(on) as redlock, _other_client(redlock) as client:
        options = client.lock(resources, ttl=ttl, renew=renew, limit=limit).ownership.options
        with Lock(client, options._replace(label=by)) as lock:
            yield lock


def lose(resource: str | Lock, *, on: Any = None, within: float = 5.0) -> None:
    """Take a lock away from its holder for good: a body in this process sees LockLost.

    resource: its name, or the lock. The key is deleted on the nodes, as by `celery redlock break`.
    Every holder in this process renews at once and so notices the loss; a holder in another process
    notices it within a third of its ttl.
    within: seconds of the machine's time for the holders in this process to notice.
    Raises AssertionError if no owner holds the lock.
    """
    names = resource.ownership.options.resources if isinstance(resource, Lock) else (resource,)
    with _redlock_on(on) as redlock:
        held = [lock for name in names for lock in redlock.locks(name).locks]
        if not held:
            raise AssertionError(f"no lock is held on {', '.join(names)!r}, so it cannot be lost")
        holders = [holder for lock in held for holder in _holders_of(lock)]
        for lock in held:
            break_lock(redlock.session, lock)
    for session, acquisition in holders:
        session.renewer.renew([acquisition])

    def is_lost() -> bool:
        return not any(acquisition.held(session.clock.now()) for session, acquisition in holders)

    if not _eventually(is_lost, within):
        raise AssertionError(f"{', '.join(names)!r} is still held after {within:g} s")


def assert_released(*resources: str, on: Any = None, within: float = 5.0) -> None:
    """Assert that no node has a lock on these resources, or on any resource if none is given.

    within: seconds of the machine's time to wait, because a release does not wait for the nodes.
    Raises AssertionError, which names each lock, its holder, its nodes and the time of its acquire.
    """
    with _redlock_on(on) as redlock:
        lock_lists: list[LockList] = []

        def is_free() -> bool:
            lock_lists[:] = [redlock.locks(name) for name in resources or (None,)]
            return not any(lock_list.locks or lock_list.failing for lock_list in lock_lists)

        if _eventually(is_free, within):
            return
        total = len(redlock.session.nodes.all)
        lines = [describe(lock, total) for lock_list in lock_lists for lock in lock_list.locks]
        failing = {
            node: cause for lock_list in lock_lists for node, cause in lock_list.failing.items()
        }
        lines += [f"{node} cannot be asked: {cause}" for node, cause in failing.items()]
        raise AssertionError(f"not released after {within:g} s:\n  " + "\n  ".join(lines))


def describe(lock: LockReport, nodes: int) -> str:
    permit = f" (permit {lock.permit})" if lock.permit else ""
    held_since = "since an unknown time"
    if lock.since is not None:
        acquired_at = dt.datetime.fromisoformat(lock.since)
        held_since = f"since {acquired_at:%Y-%m-%d %H:%M:%S} UTC ({lock.held_for:.1f} s)"
    node_texts = ", ".join(f"{node} ({seconds:.1f} s left)" for node, seconds in lock.votes.items())
    holder = f"{lock.resource!r}{permit} is held by {str(lock.holder)!r}"
    return f"{holder} {held_since} on {len(lock.votes)} of {nodes} nodes: {node_texts}"


def _other_client(redlock: Redlock) -> Redlock:
    """Return a new `Redlock` over the same nodes: another owner, as another process would be."""
    names = ("prefix", "node_timeout", "clock_drift", "max_ttl", "restart_guard")
    options = {name: getattr(redlock, name) for name in names}
    return Redlock([node.address for node in redlock.session.nodes.all], **options)


@contextlib.contextmanager
def _redlock_on(on: Any) -> Iterator[Redlock]:
    """Give the `Redlock` of an app or over nodes; it is closed at exit if it is made here."""
    if on is None:
        on = _targets[-1] if _targets else current_app
    if isinstance(on, Redlock):
        yield on
    elif hasattr(on, "conf"):
        yield redlock_as_set(without_proxy(on))
    else:
        with _redlock_over(on, "redlock") as redlock:
            yield redlock


def _redlock_over(nodes: Sequence[Any], prefix: str) -> Redlock:
    urls = [getattr(node, "url", node) for node in nodes]
    return Redlock(urls, prefix=prefix, node_timeout=2.0)


def _holders_of(lock: LockReport) -> list[tuple[Session, Acquisition]]:
    """Return the acquisitions of this process that hold a lock, each with its session."""
    return [
        (session, acquisition)
        for session in sessions()
        for acquisition in session.watchdog.watched
        for lease in acquisition.leases
        if lease.value == text_of(lock.value)
    ]


def _eventually(is_true: Callable[[], bool], timeout: float) -> bool:
    """Return whether a condition comes true in time. timeout: seconds of the machine's time."""
    clock = SystemClock()
    deadline = clock.now() + timeout
    while not is_true():
        if clock.now() > deadline:
            return False
        time.sleep(POLL_INTERVAL)
    return True


class Unlocked(Acquisition):
    """An acquisition while locking is off: no node has it, and it is held until its release."""

    __slots__ = ("_token",)

    def __init__(self, options: LockOptions, keys: Sequence[LockKey], owner: Owner) -> None:
        super().__init__(options, keys, owner)
        self._token = _next_token()

    def held(self, now: float) -> bool:
        """Return True: it is not called after the release."""
        return True

    def lost(self, now: float) -> bool:
        return False

    def remaining(self, now: float) -> float:
        return self.options.ttl

    @property
    def fencing_token(self) -> int:
        """A number greater than the token of every earlier acquisition, as `_next_token` says."""
        return self._token

    def begin_renewal(self, now: float) -> bool:
        """Return False: there is nothing to renew."""
        return False


def _next_token() -> int:
    """Return a fencing token as nodes give it, greater than the last one of this process.

    A row may keep the token of an earlier process, of a lock on nodes, or of another test.
    """
    global _last_token
    with _token_mutex:
        _last_token = max(_last_token + 1, proposal(SystemClock().wall_us()))
        return _last_token


@contextlib.contextmanager
def locking_off() -> Iterator[None]:
    """Run locked bodies in this process without locks: no node is asked, no acquire waits or fails.

    `apply`, eager calls, `lock_for` and `Redlock.lock` take no lock, and `self.lock` and
    `current_lock()` say that it is held. A send is not deduplicated. A worker's run of a message is
    still locked. Raises RedlockError inside such a run.
    """
    if in_worker():
        raise RedlockError("locking_off() is for tests: a run in a worker is always locked")
    pid = os.getpid()
    locking_acquire = Acquirer.try_acquire
    claiming_send = Claim.send

    def is_off() -> bool:
        return os.getpid() == pid and not in_worker()

    def try_acquire(
        acquirer: Acquirer, hold: Hold, options: LockOptions, keys: Sequence[LockKey]
    ) -> Failure | None:
        if not is_off():
            return locking_acquire(acquirer, hold, options, keys)
        acquisition = Unlocked(options, keys, hold.owner)
        hold.add(acquisition)
        acquisition.acquired_at = acquirer.core.clock.now()
        acquisition.nest()
        acquirer.core.events.acquired(acquisition)
        return None

    def send(claim: Claim, publish: Any) -> Any:
        return publish(None) if is_off() else claiming_send(claim, publish)

    # a test fails if another method takes over one of these steps
    with (
        mock.patch.object(Acquirer, "try_acquire", try_acquire),
        mock.patch.object(Claim, "send", send),
    ):
        yield


def in_worker() -> bool:
    """Return whether this code is part of a worker's run of a message."""
    requests = [task.request for task in _task_stack.stack]
    return any(not (request.called_directly or request.is_eager) for request in requests)
