"""Removes what a drill has made on nodes and broker, which the name of its queue tells.

The drill does so at its end. What it could not remove, the command removes later.
"""

from __future__ import annotations

import re
from typing import Any

from celery_redlock.lock.client import Redlock
from celery_redlock.lock.model.keys import (
    broken_beginning,
    completion_key,
    lock_key,
    name_of_run,
    waiting_key,
)
from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.lock.server.admin import remove_keys
from celery_redlock.operate.drill.own_queue import BrokerError, OwnQueue
from celery_redlock.tasks.per_app import redlock_of

MORE_PASSES = 2  # of the removal: a node may run a command of a killed worker a moment later
BETWEEN_PASSES = 0.2  # seconds
_QUEUE = re.compile(r"celery_redlock_drill_([0-9a-f]{8})")


def drill_queue_name(token: str) -> str:
    """Return the name of a drill's queue."""
    return f"celery_redlock_drill_{token}"


def drill_token(queue: str) -> str:
    """Return the token of a drill by the name of its queue; "" for what is no such name."""
    found = _QUEUE.fullmatch(queue)
    return found[1] if found is not None else ""


def keys_of(redlock: Redlock, token: str) -> list[str]:
    """Return how the keys begin that a drill makes on a node."""
    prefix = redlock.prefix
    run = f"drill-{token}-"
    resources = (f"drill:{token}:", name_of_run(run))  # the second one of a message that came again
    locks = [lock_key(prefix, resource) for resource in resources]
    return [
        *locks,
        *map(broken_beginning, locks),  # an operator has broken one
        *(waiting_key(prefix, resource) for resource in resources),
        completion_key(prefix, run),
    ]


def remove_drill(app: Any, queue: OwnQueue) -> list[str]:
    """Remove what a drill has made on nodes and broker; return a line for each that could not be.

    No worker of the drill may run any more.
    """
    redlock = redlock_of(app)
    nodes = redlock.session.nodes
    keys = keys_of(redlock, drill_token(queue.name))
    removed, failing = remove_keys(nodes, keys)
    clock = SystemClock()
    for _ in range(MORE_PASSES):
        clock.sleep(BETWEEN_PASSES)
        removed, failed_later = remove_keys(nodes, keys, removed)  # not of those that are away
        failing |= failed_later
    left = [f"{node} keeps keys until they expire: {cause}" for node, cause in failing.items()]
    try:
        queue.remove()
    except BrokerError as error:
        left.append(f"the broker keeps the queue {queue.name} and its keys: {error}")
    return left
