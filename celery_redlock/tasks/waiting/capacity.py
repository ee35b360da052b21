"""How many messages may wait in a worker's memory."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

CAPACITY = 1000  # messages that wait in one worker's memory, some 10 KB each; the rest in its queue


def capacity(conf: Mapping[str, Any], prefetch: int) -> int:
    """Return how many messages may wait in a worker at once.

    prefetch: how many it takes in otherwise; 0: all that come, so that one which leaves makes room
    for nobody, and would only go round. Else below a `worker_eta_task_limit`: at that Celery takes
    in no message any more, whatever it is, and once it is passed forgets some of its prefetch.
    Source: kombu.common.QoS, which adds up to a limit and takes away without one.
    """
    if prefetch == 0:
        return sys.maxsize
    limit = conf.get("worker_eta_task_limit")
    return CAPACITY if limit is None else max(1, min(CAPACITY, limit - prefetch))
