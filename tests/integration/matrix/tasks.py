"""The app of the matrix: tasks that end in the way that their message asks for."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from celery import Celery
from celery.backends.redis import RedisBackend
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from greenlet import GreenletExit
from kombu import Exchange, Queue

from celery_redlock import Backoff, LockedTask
from celery_redlock.signals import lock_acquired, lock_released

LOG = Path(os.environ.get("ENDS_LOG", os.devnull))
UNSTORABLE = "unstorable"  # what an id ends with whose result the backend does not take

app = Celery("ends", set_as_default=False)
app.conf.update(
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=0,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    **json.loads(os.environ.get("ENDS_CONF", "{}")),
)


def queue_of(name: str, broker: str) -> Queue:
    """Return a queue as a broker is to have it; RabbitMQ keeps messages back by topic exchanges."""
    if broker != "quorum":
        return Queue(name)
    quorum = {"x-queue-type": "quorum"}
    return Queue(name, Exchange(name, "topic"), routing_key=name, queue_arguments=quorum)


names, broker = os.environ.get("ENDS_QUEUES", "ends"), os.environ.get("ENDS_BROKER", "")
app.conf.task_queues = [queue_of(name, broker) for name in names.split(",")]


class FailingBackend(RedisBackend):
    """A result backend that is away at the end of some first bodies."""

    def store_result(self, task_id: str, *args: Any, **kwargs: Any) -> Any:
        if task_id.endswith(UNSTORABLE) and bodies(task_id) < 2:
            raise ConnectionError("the result backend is away")
        return super().store_result(task_id, *args, **kwargs)


def write(what: str, key: str, **more: Any) -> None:
    """Append a line, whole, whoever else writes; the clock is one for all processes."""
    line = {"what": what, "key": key, "at": time.monotonic(), "pid": os.getpid(), **more}
    file = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, json.dumps(line).encode() + b"\n")
    finally:
        os.close(file)


@lock_acquired.connect(weak=False)
def note_acquired(sender: Any, event: Any, **_: Any) -> None:
    write("acquired", event.resource)


@lock_released.connect(weak=False)
def note_released(sender: Any, event: Any, **_: Any) -> None:
    write("released", event.resource, by=event.by)


class AgainError(Exception):
    """What autoretry is for."""


class Hooked(LockedTask):
    """A user's base, some of whose hooks fail."""

    abstract = True
    lock_key = "{key}"
    lock_backoff = Backoff(first=0.05, cap=0.5)
    max_retries = 3
    default_retry_delay = 1  # s: kombu bears no shorter one for quorum queues

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        if args[1] == "on_success of the user's raises":
            raise ValueError("on_success")

    def after_return(self, status: str, retval: Any, task_id: str, args: Any, *more: Any) -> None:
        if args[1] == "after_return of the user's raises":
            raise ValueError("after_return")

    def on_failure(self, exc: Any, task_id: str, args: Any, *more: Any) -> None:
        if args[1] == "on_failure of the user's raises":
            raise ValueError("on_failure")


def bodies(task_id: str) -> int:
    return LOG.read_text().count(f'"id": "{task_id}"')


def live(self: Any, key: str, end: str) -> Any:
    """Run and end in the way that is asked for; a second body just returns."""
    before = bodies(self.request.id)
    write("begin", key, id=self.request.id, held=self.lock.held)
    try:
        if before:
            return "again"
        return WAYS.get(end, wait_for_the_end)(self, key, end)
    finally:
        write("end", key)


def raising(error: BaseException) -> Callable[..., Any]:
    def way(*_: Any) -> Any:
        raise error

    return way


def wait_for_the_end(self: Any, key: str, end: str) -> str:
    until = time.monotonic() + 180
    while not LOG.with_name(f"{key}.go").exists() and time.monotonic() < until:
        time.sleep(0.02)
    return "done"


def clean_up(self: Any, key: str, end: str) -> Any:
    try:
        return wait_for_the_end(self, key, end)
    except SoftTimeLimitExceeded:
        time.sleep(0.5)
        write("cleaned up", key, held=self.lock.held)
        raise


def ignore_term(self: Any, key: str, end: str) -> Any:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return wait_for_the_end(self, key, end)


def die(self: Any, key: str, end: str) -> None:
    wait_for_the_end(self, key, end)
    write("end", key)
    os.kill(os.getpid(), signal.SIGKILL)


WAYS: dict[str, Callable[..., Any]] = {
    "success": lambda *_: "done",
    "exception": raising(ValueError("body")),
    "MemoryError": raising(MemoryError()),
    "SystemExit": lambda *_: sys.exit(3),
    "KeyboardInterrupt": raising(KeyboardInterrupt()),
    "GreenletExit": raising(GreenletExit()),
    "Ignore": raising(Ignore()),
    "Reject": raising(Reject("no", requeue=False)),
    "Reject with requeue": raising(Reject("again", requeue=True)),
    "self.retry()": lambda self, *_: self.retry(),
    "self.retry() with other arguments": lambda self, key, end: self.retry(
        args=(f"{key}, other", end)
    ),
    "autoretry": raising(AgainError()),
    "self.replace()": lambda self, key, end: self.replace(self.si(f"{key}, other", end)),
    "unpicklable result": lambda *_: lambda: None,
    "on_success of the user's raises": lambda *_: "done",
    "after_return of the user's raises": lambda *_: "done",
    "on_failure of the user's raises": raising(ValueError("body")),
    "the result backend fails": lambda *_: "done",
    "soft limit": clean_up,
    "hard limit, SIGTERM ignored": ignore_term,
    "kill -9 of the child": die,
    "kill -9 of the child, reject_on_worker_lost": die,
    "max_tasks_per_child": lambda *_: "done",
    "max_memory_per_child": lambda *_: "done",
}

task = functools.partial(
    app.task, shared=False, bind=True, base=Hooked, autoretry_for=(AgainError,), retry_backoff=False
)
early = task(name="ends.early")(live)
late = task(name="ends.late", acks_late=True)(live)
early_rejecting = task(name="ends.early_rejecting", reject_on_worker_lost=True)(live)
late_rejecting = task(
    name="ends.late_rejecting", acks_late=True, reject_on_worker_lost=True
)(live)  # fmt: skip
