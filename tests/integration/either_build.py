"""The app of workers of two builds; it uses of the package only what both have.

What a worker imports is decided by its PYTHONPATH. The test process does not import this module.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import worker_ready

import celery_redlock
from celery_redlock import Backoff, LockedTask

LOG = Path(os.environ["TEST_LOG"])
LONG = Backoff(first=100, cap=100, jitter="none")  # no test lasts so long
BUILD = {
    "file": celery_redlock.__file__,
    "hands_off": importlib.util.find_spec("celery_redlock.lock.engine.registrar") is not None,
}

app = Celery("either", set_as_default=False)
app.conf.update(
    broker_url=os.environ["TEST_BROKER"],
    result_backend=os.environ["TEST_BACKEND"],
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    redlock_nodes=os.environ["TEST_NODES"].split(","),
    **json.loads(os.environ["TEST_CONF"]),
)


def write(what: str, key: str, **more: Any) -> None:
    """Append a line, as that of `tests.integration.app` does."""
    line = {"what": what, "key": key, "at": time.monotonic(), "pid": os.getpid(), **more}
    with LOG.open("a") as log:
        log.write(json.dumps(line) + "\n")


@contextmanager
def written(key: str, **more: Any) -> Iterator[None]:
    write("begin", key, **BUILD, **more)
    try:
        yield
    finally:
        write("end", key, **more)


@worker_ready.connect
def tell_of_build(sender: Any, **_: Any) -> None:
    """Write which build the worker has imported."""
    write("build", str(sender.hostname).partition("@")[0], **BUILD)


@app.task(base=LockedTask, lock_key="k:{key}", lock_backoff=LONG, lock_ttl=150,
          name="patient", shared=False)  # fmt: skip
def patient(key: str, name: str) -> str:
    """Go on until there is a file of the name, if the name asks for that."""
    with written(key, name=name):
        end = time.monotonic() + 120
        while name.startswith("until") and not LOG.with_name(name).exists():
            if time.monotonic() > end:
                break
            time.sleep(0.02)
    return name


# acks late: a message that the broker restores would run twice in a worker of the earlier build
@app.task(base=LockedTask, lock_key="k:{key}", name="short", ignore_result=True, acks_late=True,
          shared=False)  # fmt: skip
def short(key: str, name: str) -> None:
    """Run for a moment, with the delays of a task that chooses none."""
    with written(key, name=name):
        time.sleep(0.01)
