"""The public interface as a user writes it: type-checked, never run."""

from __future__ import annotations

from typing import Any

from celery import Celery
from sqlalchemy import Connection, Update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from celery_redlock import (
    Backoff,
    CallOptions,
    Contention,
    Lock,
    LockedTask,
    LockLost,
    LockTaken,
    QuorumUnreachable,
    Redlock,
    TaskOptions,
    current_lock,
    django,
    install,
    sqlalchemy,
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
    self.lock.ensure()
    if not self.lock.held:
        raise LockLost(self.lock.resource, "why")


@app.task(bind=True, base=LockedTask, lock_key=["account:{a}", "account:{b}"], lock_fencing=True)
def transfer(self: LockedTask, a: str, b: str) -> int:
    return self.lock.fencing_token


@app.task(
    bind=True,
    base=LockedTask,
    **TaskOptions(lock_key="stock:{sku}", lock_ttl=30, lock_backoff={"first": 0.1, "cap": 5}),
)
def checked(self: LockedTask, sku: str) -> None:
    left: float = self.lock.remaining
    print(left)


def account(task: LockedTask, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    return f"account:{args[0]}" if args else None


def permits(task: Any, args: Any, kwargs: Any) -> dict[str, int]:
    return {"account": 3}


EACH = TaskOptions(
    lock_key=account, lock_args=None, lock_ttl=30, lock_renew=False, lock_max_hold=None,
    lock_wait=0.5, lock_on_conflict="skip", lock_backoff=Backoff(), lock_max_wait=60,
    lock_on_give_up="skip", lock_on_lost="warn", lock_on_unreachable="run", lock_limit=permits,
    lock_rate="10/s", lock_fencing=False, lock_unique_for=60, lock_unique_until="started",
    lock_on_duplicate="fail", lock_debounce=30, lock_debounce_max=None,
)  # fmt: skip
KEYS = [
    TaskOptions(lock_key=False),
    TaskOptions(lock_key=None),
    TaskOptions(lock_key=["account:{a}", "account:{b}"]),
    TaskOptions(lock_key=("account:{a}", "account:{b}"), lock_limit={"account:{a}": 3}),
    TaskOptions(lock_key=lambda task, args, kwargs: ["a", "b"]),
    TaskOptions(lock_args=["sku"], lock_rate=(10, 60)),
    TaskOptions(lock_rate={"account:{a}": "10/s", "account:{b}": (10, 60.0)}),
]


def send(task: LockedTask) -> None:
    options = CallOptions(key=["a", "b"], args=None, backoff={"first": 1}, limit=2, wait=1)
    task.apply_async(("sku",), lock=options)
    task.apply_async(("sku",), lock=CallOptions(ttl=60, unique_for=None, key=False))
    if not task.apply_async(("sku",)).is_duplicate:
        print(task.lock_options(lock=CallOptions(ttl=40)))


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
    lock_key = ("customer:{customer}", "imports")
    lock_ttl = 30
    lock_unique_until = "started"
    lock_limit = 2

    def run(self, customer: str) -> None: ...


class ByCallable(LockedTask):
    lock_key = staticmethod(account)
    lock_on_conflict = staticmethod(decide)


class Later(LockedTask):
    lock_ttl: float = 0.5
    lock_backoff = Backoff(cap=5)


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


def write(lock: Lock, database: Any) -> None:
    lock.confirm_in(database)


async def write_async(task: LockedTask, session: Any) -> None:
    await task.lock.confirm_in_async(session)


def write_rows(lock: Lock, session: Session, connection: Connection, rows: Update) -> int:
    written: int = django.fenced_update(app, lock, queryset=1, lock=2)
    written += sqlalchemy.fenced_update(connection, rows, lock)
    return written + sqlalchemy.fenced_update(session, rows, lock)


async def write_rows_async(lock: Lock, session: AsyncSession, rows: Update) -> int:
    return await sqlalchemy.fenced_update_async(session, rows, lock)


def deferred(sender: Any = None, event: LockDeferredEvent | None = None, **_: Any) -> None:
    if event is not None:
        waited: float = event.waited
        print(waited, event.holder)


lock_deferred.connect(deferred)
app.conf.redlock_tasks = {"vendor.sync_*": {"args": ["account"], "on_conflict": "skip"}}
install(app)
