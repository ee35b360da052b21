"""The test app with tasks as users of Flask, Django and celery.contrib write them.

Only workers import it: a test sends by name, as a process does that has none of the classes.
"""

from __future__ import annotations

import time
from typing import Any

import django
import flask
from celery import Task, shared_task
from celery.contrib.abortable import AbortableTask
from django.conf import settings

from celery_redlock import LockedTask
from tests.integration.app import QUICK, app, task, write, written

settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
)
django.setup()

from celery.contrib.django.task import DjangoTask  # noqa: E402 - needs Django's settings

web = flask.Flask("tests")
app.autodiscover_tasks(["tests.integration"], related_name="found")


class ContextTask(Task):
    """A base as Flask's documentation shows it: a `__call__` of its own, without super()."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with web.app_context():
            return self.run(*args, **kwargs)


class Hooks(Task):
    """A user's own base whose hooks call super() nowhere."""

    abstract = True

    def before_start(self, *args: Any) -> None: ...

    def after_return(self, *args: Any) -> None: ...

    def on_retry(self, *args: Any) -> None: ...

    def on_success(self, *args: Any) -> None: ...

    def on_failure(self, *args: Any) -> None: ...


OF_OTHERS = {"flask": (ContextTask,), "django": (DjangoTask,), "abortable": (AbortableTask,),
             "all": (ContextTask, Hooks, DjangoTask, AbortableTask)}  # fmt: skip


def body(self: Any, key: str) -> bool:
    assert self.lock.held
    with written(key):
        time.sleep(0.05)
    return flask.has_app_context()


for name, others in OF_OTHERS.items():
    for order, bases in (("first", (*others, LockedTask)), ("last", (LockedTask, *others))):
        base = type(f"{name}{order}", bases, {"abstract": True})
        task(bind=True, base=base, lock_key="k:{key}", lock_backoff=QUICK,
             name=f"tests.{name}_{order}")(body)  # fmt: skip

shared_task(bind=True, base=LockedTask, lock_key="k:{key}", lock_backoff=QUICK,
            name="tests.shared")(body)  # fmt: skip


@task(bind=True, base=type("Abortable", (AbortableTask, LockedTask), {"abstract": True}),
      lock_key="k:{key}", lock_backoff=QUICK, track_started=True, name="tests.aborts",
      lock_max_wait=3600)  # so that it does not wait for a release alone  # fmt: skip
def aborts(self: Any, key: str) -> str:
    write("begin", key)
    end = time.monotonic() + 120
    while not self.is_aborted() and time.monotonic() < end:
        time.sleep(0.02)
    return "aborted" if self.is_aborted() else "never aborted"


@task(name="tests.commits")
def commits(key: str) -> None:
    """Send a locked task at the end of a transaction."""
    app.tasks["tests.django_first"].delay_on_commit(key)
