"""Which tests CI may skip, and why. CI fails if any other test is skipped."""

from __future__ import annotations

import re

ALLOWED = {
    "docker compose is not installed": "CI has no Docker engine",
    "there RabbitMQ keeps what is put back": "a quorum queue's message waits in the broker",
    "Celery gives a fan-out's queues no type": "so a fan-out has no quorum queues",
    "only Redis .* or later does that": "the contract suite runs on older servers, too",
    "no server here speaks TLS": "the older servers are built without TLS",
    "Celery has retry_on_worker_lost from 5.7 on": "CI runs older Celery, too",
    "there revoke itself writes REVOKED at once": "CI runs Celery 5.6, too",
    "this machine has no address but loopback": "a machine without a network",
    "ZooKeeper is not installed": "a machine that may not install Debian's package",
    "Python has subinterpreters from 3.13 on": "CI's Python is older",
    "the history of this copy does not have the commit": "an archive, or a shallow clone",
    "this machine has no IPv6": "a container without IPv6",
}


def is_allowed(reason: str) -> bool:
    """Return whether CI may skip a test for this reason, as pytest words it."""
    return any(re.search(allowed, reason) for allowed in ALLOWED)
