"""What a type checker must refuse: each line with a mark, and no other. Never run."""

from __future__ import annotations

from celery import Celery

from celery_redlock import Backoff, CallOptions, LockedTask, TaskOptions, current_lock

app = Celery("shop")


class Wrong(LockedTask):
    lock_key = 7  # refused
    lock_args = "sku"  # refused
    lock_ttl = "30"  # refused
    lock_renew = 0.5  # refused
    lock_max_hold = "1h"  # refused
    lock_wait = None  # refused
    lock_on_conflict = "wait"  # refused
    lock_backoff = 0.25  # refused
    lock_max_wait = "60"  # refused
    lock_on_give_up = "defer"  # refused
    lock_on_lost = "fail"  # refused
    lock_on_unreachable = "skip"  # refused
    lock_limit = 1.5  # refused
    lock_rate = 10  # refused
    lock_fencing = "yes"  # refused
    lock_unique_for = "60"  # refused
    lock_unique_until = "done"  # refused
    lock_on_duplicate = "drop"  # refused
    lock_debounce = "30"  # refused
    lock_debounce_max = "60"  # refused


TaskOptions(lock_tll=30)  # refused
TaskOptions(ttl=30)  # refused
TaskOptions(lock_ttl="30")  # refused
TaskOptions(lock_key=True)  # refused
TaskOptions(lock_key=lambda task, args, kwargs: 7)  # refused
TaskOptions(lock_on_conflict=lambda contention: 7)  # refused
TaskOptions(lock_on_conflict=lambda contention: contention.holders)  # refused
TaskOptions(lock_limit={"a": "3"})  # refused
TaskOptions(lock_rate=("10", 60))  # refused
TaskOptions(lock_unique_until="done")  # refused
CallOptions(tll=30)  # refused
CallOptions(lock_ttl=30)  # refused
CallOptions(ttl="30")  # refused
CallOptions(key=lambda task, args, kwargs: "a")  # refused
CallOptions(on_conflict=lambda contention: "skip")  # refused
CallOptions(limit=lambda task, args, kwargs: 3)  # refused
CallOptions(backoff=Backoff)  # refused
CallOptions(on_duplicate="drop")  # refused
CallOptions(debounce="30")  # refused
CallOptions(debounce_max="60")  # refused


@app.task(bind=True, base=LockedTask, **TaskOptions(lock_tll=30))  # refused
def take(self: LockedTask) -> None:
    self.lock.insure()  # refused
    held: str = self.lock.held  # refused
    print(held)
    current_lock().ensure()  # refused


def send(task: LockedTask) -> None:
    task.apply_async(lock=CallOptions(ttl="30"))  # refused
