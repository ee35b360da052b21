"""The app of the storm: bodies that write what they are sure of, step by step.

A body takes the time *before* it asks whether its lock is held. Where it is, the lock was held at
that time, too, however long the process was stopped between the two. So a body held its lock from
the first time that it wrote to the last.
"""

from __future__ import annotations

import functools
import json
import os
import random
import time
from pathlib import Path
from typing import Any

from celery import Celery
from celery.app.task import Context
from celery.exceptions import Reject
from celery.signals import task_received, task_retry

from celery_redlock import Backoff, Contention, LockedTask, LockLost
from celery_redlock.signals import lock_deferred, lock_released

LOG = Path(os.environ.get("STORM_LOG", os.devnull))
WORKER = os.environ.get("STORM_WORKER", "")  # the name and the number of its life
STEP = 0.02  # s

app = Celery("storm", set_as_default=False)
app.conf.update(
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    **json.loads(os.environ.get("STORM_CONF", "{}")),
)


def now() -> float:
    """Return s of a clock that is one for all processes, and goes on while they are stopped."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def write(what: str, at: float, request: Any, **more: Any) -> None:
    name = request.task.removeprefix("storm.")
    line = {"what": what, "at": at, "id": request.id, "kind": name, "pid": os.getpid(),
            "worker": WORKER, "retries": request.retries, **more}  # fmt: skip
    file = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, json.dumps(line).encode() + b"\n")
    finally:
        os.close(file)


def is_of_a_run(sender: Any) -> bool:
    """Tell a run of a task here from a lock of other tests, or one taken outside of tasks."""
    return getattr(sender, "name", "").startswith("storm.") and sender.request.id is not None


@lock_deferred.connect(weak=False)
def note_deferred(sender: Any, event: Any, **_: Any) -> None:
    if is_of_a_run(sender):
        write("deferred", now(), sender.request)


@lock_released.connect(weak=False)
def note_released(sender: Any, event: Any, **_: Any) -> None:
    if event.by == "holder" and is_of_a_run(
        sender
    ):  # with a late message's lock goes its mark that it is done
        write("released", now(), sender.request)


@task_received.connect(weak=False)
def note_received(sender: Any, request: Any, **_: Any) -> None:
    write("received", now(), Context(request.request_dict))


@task_retry.connect(weak=False)
def note_retried(sender: Any, request: Any, reason: Any = None, **_: Any) -> None:
    """Note that RETRY is stored, and why: Celery sends this just after it."""
    if sender.name.startswith("storm."):
        cause = type(getattr(reason, "exc", None)).__name__
        write("retried", now(), request, cause=cause)


def work(self: Any, keys: list[str], seconds: float, stage: str = "last") -> None:
    """Hold the lock for a while, and write so. stage: which of a message's runs this is."""
    told = {"run": f"{os.getpid()}-{random.getrandbits(64):x}", "keys": keys, "stage": stage,
            "token": self.lock.fencing_token if self.lock_fencing else None}  # fmt: skip
    until = now() + seconds
    what = "begin"
    while True:
        at = now()
        self.lock.ensure()
        write(what, at, self.request, **told)
        if what == "end":
            return
        time.sleep(STEP)
        what = "step" if now() < until else "end"


def plain(self: Any, keys: list[str], seconds: float) -> None:
    work(self, keys, seconds)


def failing(self: Any, keys: list[str], seconds: float) -> None:
    work(self, keys, seconds)
    raise ValueError("as it is meant to")


def retrying(self: Any, keys: list[str], seconds: float, times: int = 2) -> None:
    work(self, keys, seconds, f"{times} to go" if times else "last")
    if times:
        raise self.retry(args=(keys, seconds, times - 1), countdown=0.1, max_retries=None)


def putting_back(self: Any, keys: list[str], seconds: float) -> None:
    """Reject its message some times, so that the broker delivers it again."""
    rejects = random.random() < 0.5
    work(self, keys, seconds, "rejected" if rejects else "last")
    if rejects:
        raise Reject("again", requeue=True)


def joining(self: Any, results: list[None], keys: list[str], seconds: float, parts: int) -> None:
    if results != [None] * parts:
        raise ValueError(f"joined {results}, not {parts}")
    work(self, keys, seconds)


def decide(contention: Contention) -> str:
    """Skip now and then, and write so."""
    if random.random() < 0.9:
        return "defer"
    write("skips", now(), contention.task.request)
    return "skip"


quick = Backoff(first=0.05, cap=1.0)
task = functools.partial(
    app.task, shared=False, bind=True, base=LockedTask, lock_fencing=True, lock_backoff=quick,
    lock_key=lambda task, args, kwargs: args[0],
    autoretry_for=(LockLost,), retry_backoff=False, retry_kwargs={"countdown": 0.1},
    max_retries=None,
)  # fmt: skip
late_task = functools.partial(task, acks_late=True, reject_on_worker_lost=True)

late = late_task(name="storm.late")(plain)
named = late_task(name="storm.named", lock_key="{keys[0]}")(plain)  # a dead worker's are moved
unfenced = late_task(name="storm.unfenced", lock_fencing=False)(plain)
patient = late_task(name="storm.patient", lock_wait=2.0)(plain)
late_failing = late_task(name="storm.failing")(failing)
late_retrying = late_task(name="storm.retrying")(retrying)
late_putting_back = late_task(name="storm.putting_back")(putting_back)
skipping = late_task(name="storm.skipping", lock_on_conflict="skip")(plain)
deciding = late_task(name="storm.deciding", lock_on_conflict=decide)(plain)
deduplicated = late_task(name="storm.deduplicated")(plain)
permitted = late_task(name="storm.permitted", lock_limit=2, lock_fencing=False)(plain)
expiring = late_task(name="storm.expiring")(plain)
early = task(name="storm.early")(plain)
early_retrying = task(name="storm.early_retrying")(retrying)
revoked = late_task(name="storm.revoked")(plain)
limited = late_task(name="storm.limited")(plain)
late_joining = late_task(name="storm.joining", lock_key=lambda task, args, kwargs: args[1])(joining)
