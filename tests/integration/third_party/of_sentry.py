"""Sentry beside locked tasks: its transactions, and the check-ins of periodic tasks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import sentry_sdk
from celery import Celery
from celery.beat import ScheduleEntry, Scheduler
from celery.exceptions import TaskRevokedError
from celery.schedules import schedule
from sentry_sdk.envelope import Envelope
from sentry_sdk.integrations.celery import CeleryIntegration
from sentry_sdk.transport import Transport

from celery_redlock import LockedTask
from tests.conftest import eventually
from tests.integration.third_party.stage import over_nodes, tell, working

PERIODIC, EXCLUDED = "of-beat", "of-the-body"  # names of entries: their monitors
HOUR = schedule(3600)
seen: dict[str, list[dict[str, Any]]] = {"transaction": [], "check_in": []}
ran: list[str] = []


class Noting(Transport):
    """Keeps what another transport would send."""

    def capture_envelope(self, envelope: Envelope) -> None:
        for item in envelope.items:
            if item.type in seen:
                seen[item.type].append(item.payload.json)


sentry_sdk.init(
    dsn="http://key@127.0.0.1/1", transport=Noting, traces_sample_rate=1.0,
    integrations=[CeleryIntegration(monitor_beat_tasks=True, exclude_beat_tasks=[EXCLUDED])],
)  # fmt: skip
app = over_nodes(Celery("of_sentry"))


@app.task(base=LockedTask, lock_key="k:{key}")
def take(key: str) -> None:
    ran.append(key)


@app.task(base=LockedTask, lock_key="k:{key}")
def watched(key: str) -> None:
    with sentry_sdk.monitor(monitor_slug=EXCLUDED):
        ran.append(key)


def statuses() -> list[str]:
    """Return the status of each transaction of a run so far."""
    found = [one for one in seen["transaction"] if one["transaction"] in app.tasks]
    return [one["contexts"]["trace"]["status"] for one in found]


@contextlib.contextmanager
def until_one_more(status: str) -> Iterator[None]:
    """Return once one more transaction has ended so: that is after all signals of its run."""
    before = statuses().count(status)
    yield
    eventually(lambda: statuses().count(status) > before)


def check_ins(monitor: str) -> list[str]:
    return [one["status"] for one in seen["check_in"] if one["monitor_slug"] == monitor]


def send_by_beat(task: LockedTask, name: str, key: str, **lock: Any) -> Any:
    """Send a task as beat sends an entry, and return its result."""
    entry = ScheduleEntry(
        name=name, task=task.name, schedule=HOUR, args=(key,), options={"lock": lock}, app=app
    )
    results: list[Any] = []

    class Once(Scheduler):
        def apply_async(self, *args: Any, **kwargs: Any) -> Any:
            results.append(super().apply_async(*args, **kwargs))
            return results[-1]

    Once(app, schedule={}, lazy=True).apply_entry(entry)
    return results[0]


def of_deferred() -> None:
    """Tell of a message that is deferred once or more, then runs."""
    with until_one_more("ok"):
        with take.lock_for("deferred"):
            result = take.delay("deferred")
            eventually(statuses)
            before, had_run = statuses(), [*ran]
        result.get(timeout=60)
    tell(deferred=sorted({*before}), had_run=had_run, after=statuses()[-1])


def of_periodic(task: LockedTask, name: str) -> None:
    """Tell what check-ins a skipped run has, one that is deferred first, and one that just runs."""

    def see(act: Callable[[], None]) -> list[str]:
        before = len(check_ins(name))
        act()
        return check_ins(name)[before:]

    def skip() -> None:
        with (
            task.lock_for("skipped"),
            until_one_more("aborted"),
            contextlib.suppress(TaskRevokedError),
        ):
            send_by_beat(task, name, "skipped", on_conflict="skip").get(timeout=60)

    def run() -> None:
        with until_one_more("ok"):
            send_by_beat(task, name, "free").get(timeout=60)

    def defer() -> None:
        before = len(check_ins(name))
        with until_one_more("ok"):
            with task.lock_for("late"):
                with until_one_more("aborted"):
                    result = send_by_beat(task, name, "late")
                while_deferred.extend(check_ins(name)[before:])
            result.get(timeout=60)

    while_deferred: list[str] = []
    tell(skipped=see(skip), ran=see(run), deferred=see(defer), while_deferred=while_deferred)


with working(app):
    of_deferred()
    of_periodic(take, PERIODIC)
    of_periodic(watched, EXCLUDED)
