"""What a test does to locks: others hold them, they are lost, and nothing of them is left."""

from __future__ import annotations

import contextlib
import datetime as dt
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import redis
from celery import current_app

from celery_redlock.errors import describe_holder
from celery_redlock.lock.client import Redlock, sessions
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.held_locks import Sight, Standing, break_lock, look_at_locks
from celery_redlock.lock.lock import Lock
from celery_redlock.lock.model.acquisition import Acquisition
from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.tasks.runtime import forget, redlock_of

__all__ = ["assert_released", "at_work", "hold", "lose", "trust_nodes", "use_nodes"]

PAUSE = 0.02  # s: between looks at the nodes
_in_use: list[Any] = []  # what tests work on just now, the latest last


def trust_nodes(nodes: Sequence[Any], prefix: str = "redlock") -> None:
    """Let new nodes vote at once, as `Redlock.trust` does."""
    with _redlock_over(nodes, prefix) as made:
        made.trust()


@contextlib.contextmanager
def use_nodes(app: Any, nodes: Sequence[Any]) -> Iterator[Redlock]:
    """Let an app of yours lock on these nodes, and trust them; gives its `Redlock`.

    app: a Celery app, with all of its own settings but `redlock_nodes`. nodes: `FakeNode`s,
    `EmbeddedNode`s, or what `redlock_nodes` takes. `hold`, `lose` and `assert_released` mean them
    meanwhile.
    """
    before = app.conf.get("redlock_nodes")
    app.conf.redlock_nodes = addresses_of(nodes)
    forget(app)
    try:
        made = redlock_of(app)
        made.trust()
        with at_work(made):
            yield made
    finally:
        app.conf.redlock_nodes = before
        forget(app)


@contextlib.contextmanager
def at_work(on: Any) -> Iterator[None]:
    """Let `hold`, `lose` and `assert_released` mean the nodes of this app or `Redlock`."""
    _in_use.append(on)
    try:
        yield
    finally:
        _in_use.remove(on)


@contextlib.contextmanager
def hold(
    *resources: str,
    on: Any = None,
    ttl: float = 30.0,
    renew: bool = True,
    limit: int = 1,
    by: str = "another owner, made by hold()",
) -> Iterator[Lock]:
    """Hold resources as somebody else would: whoever wants them meanwhile finds them taken.

    on: an app, a `Redlock` or nodes; where None those of the fixtures or of `use_nodes`, else
    Celery's current app. ttl, renew: as of `Redlock.lock`; renew=False is a holder that has died.
    limit: takes one of so many permits. by: what the nodes, and errors, say of the holder.
    Raises LockTaken where somebody holds them.
    """
    with _redlock_on(on) as theirs, _another(theirs) as others:
        plain = others.lock(resources, ttl=ttl, renew=renew, limit=limit)
        with Lock(others, replace(plain._options, label=by)) as lock:
            yield lock


def lose(resource: str | Lock, *, on: Any = None, within: float = 5.0) -> None:
    """Take a lock from whoever holds it, for ever: a body of this process sees LockLost.

    resource: its name, or the lock. The nodes forget it, as `celery redlock break` has them do,
    and every holder of this process renews at once, and so learns of it; another process does
    that within a third of its ttl. within: s (real ones) for the holder here to learn it.
    Raises AssertionError where nobody holds it.
    """
    names = resource._options.resources if isinstance(resource, Lock) else (resource,)
    with _redlock_on(on) as redlock:
        held = [lock for name in names for lock in look_at_locks(redlock, name).locks]
        if not held:
            raise AssertionError(f"nobody holds {', '.join(names)!r}, so it cannot be lost")
        holders = [holder for lock in held for holder in _holders_of(lock)]
        for lock in held:
            break_lock(redlock, lock)
    for session, acquisition in holders:
        session.renew([acquisition])
    if not _eventually(lambda: not any(a.held(s.clock.now()) for s, a in holders), within):
        raise AssertionError(f"{', '.join(names)!r} is still held after {within:g} s")


def assert_released(*resources: str, on: Any = None, within: float = 5.0) -> None:
    """Assert that no lock on these resources stands on any node; of all resources where none.

    A release is written without waiting for the nodes, so they have `within` s (real ones) for it.
    Raises AssertionError, which says who holds what since when, and where.
    """
    with _redlock_on(on) as redlock:
        found: list[Sight] = []

        def is_free() -> bool:
            found[:] = [look_at_locks(redlock, name) for name in resources or (None,)]
            return not any(sight.locks or sight.failing for sight in found)

        if _eventually(is_free, within):
            return
        now = redlock.session.clock.wall_us() / 1e6
        total = len(redlock.session.node_set.nodes)
        said = [told(lock, now, total) for sight in found for lock in sight.locks]
        failing = {node: cause for sight in found for node, cause in sight.failing.items()}
        said += [f"{node} cannot be asked: {cause}" for node, cause in failing.items()]
        raise AssertionError(f"not released after {within:g} s:\n  " + "\n  ".join(said))


def told(lock: Standing, now: float, nodes: int) -> str:
    """Return in words who holds a lock, since when, and where. now: s since 1970."""
    permit = f" (permit {lock.permit})" if lock.permit else ""
    since = "since nobody knows when"
    if lock.since is not None:
        at = dt.datetime.fromtimestamp(lock.since, dt.timezone.utc)
        since = f"since {at:%Y-%m-%d %H:%M:%S} UTC ({max(0.0, now - lock.since):.1f} s)"
    where = ", ".join(f"{node} ({left:.1f} s left)" for node, left in lock.votes.items())
    holder = f"{lock.resource!r}{permit} is held by {describe_holder(lock.holder)!r}"
    return f"{holder} {since} on {len(lock.votes)} of {nodes} nodes: {where}"


def addresses_of(nodes: Sequence[Any]) -> list[Any]:
    """Return what `redlock_nodes` takes for these nodes."""
    return [getattr(node, "url", node) for node in nodes]


def _another(redlock: Redlock) -> Redlock:
    """Return a `Redlock` over the same nodes, which is to it what another process is."""
    pools = [node.address.pool for node in redlock.session.node_set.nodes]
    return Redlock(
        [redis.Redis(connection_pool=pool) for pool in pools],
        prefix=redlock.prefix,
        node_timeout=redlock.node_timeout,
        clock_drift=redlock.clock_drift,
        max_ttl=redlock.max_ttl,
        restart_guard=redlock.restart_guard,
    )


@contextlib.contextmanager
def _redlock_on(on: Any) -> Iterator[Redlock]:
    """Give a `Redlock` over what a test means; one made for this is closed."""
    meant = on if on is not None else _in_use[-1] if _in_use else current_app._get_current_object()
    if isinstance(meant, Redlock):
        yield meant
    elif hasattr(meant, "conf"):
        yield redlock_of(meant)
    else:
        with _redlock_over(meant, "redlock") as made:
            yield made


def _redlock_over(nodes: Sequence[Any], prefix: str) -> Redlock:
    return Redlock(addresses_of(nodes), prefix=prefix, node_timeout=2.0)


def _holders_of(lock: Standing) -> list[tuple[Session, Acquisition]]:
    """Return who holds a lock in this process."""
    return [
        (session, acquisition)
        for session in sessions()
        for acquisition in session.watchdog.watched
        for one in acquisition.key_leases
        if one.value.encode("utf-8", "surrogatepass") == _bytes(lock.value)
    ]


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


def _eventually(is_true: Callable[[], bool], within: float) -> bool:
    """Tell whether something comes true within so many s of the machine, frozen or not."""
    clock = SystemClock()
    end = clock.now() + within
    while not is_true():
        if clock.now() > end:
            return False
        time.sleep(PAUSE)
    return True
