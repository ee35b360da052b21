"""Tasks that nothing imports by name: the test app finds them."""

from __future__ import annotations

import time

from celery import shared_task

from celery_redlock import LockedTask, current_lock
from tests.integration.app import QUICK, written


def body(key: str) -> str:
    lock = current_lock()
    assert lock is not None
    with written(key):
        time.sleep(0.05)
    return lock.resource


shared_task(base=LockedTask, lock_backoff=QUICK)(body)
shared_task(base=LockedTask, lock_backoff=QUICK, name="shop.renamed")(body)
