"""The public interface as a user writes it: type-checked, never run."""

from __future__ import annotations

from typing import Any

from celery import Celery

from celery_redlock import (
    Backoff,
    Contention,
    Lock,
    LockedTask,
    LockLost,
    LockTaken,
    QuorumUnreachable,
    Redlock,
    current_lock,
    install,
)
from celery_redlock.signals import LockDeferredEvent, lock_deferred

app = Celery("shop", broker="redis://localhost")
app.conf.redlock_nodes = ["redis://a", "redis://b", "redis://c"]


@app.task(base=LockedTask, lock_key="stock:{sku}", lock_backoff=Backoff(first=0.1, cap=5))
def take(sku: str) -> None:
    lock = current_lock()
    if lock is not None:
        lock.ensure()
        left: float = lock.remaining
        print(left, lock.held, lock.resource)


@app.task(bind=True, base=LockedTask, acks_late=True)
def settle(self: LockedTask, order: int) -> None:
    if self.lock is not None and not self.lock.held:
        raise LockLost(self.lock.resource, "why")


@app.task(bind=True, base=LockedTask, lock_key=["account:{a}", "account:{b}"], lock_fencing=True)
def transfer(self: LockedTask, a: str, b: str) -> int:
    return 0 if self.lock is None else self.lock.fencing_token


def told(task: LockedTask) -> str:
    options = task.lock_options("imports", lock={"ttl": 40})
    ttl = options["ttl"]
    print(ttl.value, ttl.source.level, ttl.source.name)
    return str(options)


def decide(contention: Contention) -> str:
    waited: float = contention.waited
    print(contention.resource, contention.holder, waited, contention.task.name)
    return "skip" if contention.deferrals > 3 else "defer"


@app.task(base=LockedTask, lock_on_conflict=decide)
def decided(*args: str, **more: str) -> None: ...


class Import(LockedTask):
    name = "import"
    lock_key = ("customer",)

    def run(self, customer: str) -> None: ...


def without_celery() -> bool:
    with Redlock(["redis://a", "redis://b", "redis://c"], node_timeout=0.1) as redlock:
        lock: Lock = redlock.lock("stock:42", ttl=30, wait=5, renew=True)
        try:
            with lock as held:
                held.extend()
        except (LockTaken, QuorumUnreachable) as error:
            print(error.resource)
        with redlock.lock(["a", "b"], fencing=True) as both, redlock.lock("c", limit=3):
            token: int = both.fencing_token
            print(token)
        redlock.trust()
        return lock.try_acquire()


def deferred(sender: Any = None, event: LockDeferredEvent | None = None, **_: Any) -> None:
    if event is not None:
        waited: float = event.waited
        print(waited, event.holder)


lock_deferred.connect(deferred)
app.conf.redlock_tasks = {"vendor.sync_*": {"args": ["account"], "on_conflict": "skip"}}
install(app)
