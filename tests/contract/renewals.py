"""A renewal that a test calls for, instead of a third of a ttl that it waits."""

from __future__ import annotations

from celery_redlock import Lock, Redlock
from tests.conftest import eventually


def hurry(redlock: Redlock) -> None:
    """Let the watchdog renew now all that it keeps, in its own thread."""
    redlock.session.watchdog.renew_by(redlock.session.clock.now())


def renew_now(redlock: Redlock, *locks: Lock) -> None:
    """Return when the watchdog has renewed these held locks once more, and renews none just now."""
    acquisitions = [one for lock in locks for one in lock.ownership.acquisitions]
    leases = [lease for one in acquisitions for lease in one.leases]
    before = [lease.valid_until for lease in leases]

    def are_renewed() -> bool:
        hurry(redlock)
        return all(one.valid_until > then for one, then in zip(leases, before, strict=True))

    def are_due() -> bool:
        now = redlock.session.clock.now()
        return any(one.renew_at <= now for one in acquisitions)

    eventually(are_renewed)
    eventually(lambda: not are_due())
    assert all(lock.held for lock in locks)
