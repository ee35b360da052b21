"""An app of somebody who never heard of locks: nothing here imports the package.

It gets `redlock_tasks` as a setting, and its tasks come in every way that Celery has.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from celery import Celery, Task, shared_task

LOG = Path(os.environ.get("TEST_LOG", os.devnull))

app = Celery("vendor", set_as_default=False)
app.conf.update(
    broker_url=os.environ.get("TEST_BROKER", "memory://"),
    result_backend=os.environ.get("TEST_BACKEND", "cache+memory://"),
    broker_connection_retry_on_startup=True,
    redlock_nodes=os.environ.get("TEST_NODES", "redis://nowhere").split(","),
    redlock_tasks={
        "vendor.ever*": {"key": "account:{account}", "backoff": {"first": 0.05, "cap": 0.5}},
        "vendor.*": {"args": ["account"], "on_conflict": "fail"},
        "vendor.rebuild": {"key": "index", "on_conflict": "skip"},
    },
    **json.loads(os.environ.get("TEST_CONF", "{}")),
)


def write(what: str, key: str) -> None:
    line = {"what": what, "key": key, "at": time.monotonic(), "pid": os.getpid()}
    with LOG.open("a") as log:
        log.write(json.dumps(line) + "\n")


def sync(account: str, how: str = "") -> str:
    """Run until there is a file of the account's name; then end as it is told."""
    write("begin", account)
    end = time.monotonic() + 120
    while not LOG.with_name(account).exists() and time.monotonic() < end:
        time.sleep(0.02)
    write("end", account)
    if how == "raise":
        raise KeyError(account)
    if how == "be killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return account


def timed(body: Callable[..., str]) -> Callable[..., str]:
    """Stand before a body, as a decorator of another package does; all is passed on."""

    @functools.wraps(body)
    def inner(*args: Any, **kwargs: Any) -> str:
        return body(*args, **kwargs)

    return inner


@app.task(name="vendor.every_wrapped", shared=False)
@timed
def wrapped(account: str, how: str = "") -> str:
    return sync(account, how)


@app.task(name="vendor.every_plain", shared=False)
def plain(account: str, how: str = "") -> str:
    return sync(account, how)


@app.task(name="vendor.every_bound", shared=False, bind=True)
def bound(self: Any, account: str) -> str:
    return f"{sync(account)} {self.request.retries}"[: len(account)]


@app.task(name="vendor.every_late_ack", shared=False, acks_late=True)
def late_ack(account: str) -> str:
    return sync(account)


@app.task(name="vendor.every_retried", shared=False, autoretry_for=(Exception,))
def retried(account: str) -> str:
    return sync(account)


@app.task(name="vendor.strict", shared=False, autoretry_for=(Exception,), default_retry_delay=0)
def strict(account: str) -> str:
    return sync(account)


@app.task(name="vendor.rebuild", shared=False)
def rebuild(account: str) -> str:
    return sync(account)


@shared_task(name="vendor.every_shared")
def shared(account: str) -> str:
    return sync(account)


class Own(Task):
    """A base that calls super() nowhere, with words of its own."""

    abstract = True
    lock_timeout = 5  # nothing that is ours

    def __init__(self) -> None:
        self.lock = "mine"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def on_success(self, *args: Any) -> None: ...


class ClassTask(Own):
    name = "vendor.every_class"
    autoretry_for = (KeyError,)

    def run(self, account: str) -> str:
        assert self.lock == "mine"
        return sync(account)


app.register_task(ClassTask())
app.finalize()


@app.task(name="vendor.every_late", shared=False, base=Own, autoretry_for=(KeyError,))
def late(account: str) -> str:
    return sync(account)
