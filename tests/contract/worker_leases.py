"""The worker leases of a broker as a test opens them, and one that it takes for dead."""

from __future__ import annotations

from typing import Any

from celery import Celery

from celery_redlock.tasks.recovery.ledger import Ledger, ledger_beside


def open_ledger(url: str, **options: Any) -> Ledger:
    """Return the worker leases of a broker; options: of kombu's transport."""
    app = Celery("beside", broker=url, set_as_current=False)
    return ledger_beside(app.connection_for_read(transport_options=options), "redlock")


def declare_dead(
    ledger: Ledger, lease: str, joins_as: str = "w1@host", *, claims: bool = True
) -> None:
    """Let a worker lease join, and take it for dead; as of `Ledger.declare_dead`."""
    ledger.beat(lease, joins_as=joins_as)
    assert ledger.declare_dead(lease, claims=claims)
