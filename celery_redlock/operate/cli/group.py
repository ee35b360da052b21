"""The command group `celery redlock`, and how its commands get the app."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import click

import celery_redlock_entry
from celery_redlock.errors import SettingsError
from celery_redlock.lock.client import Redlock
from celery_redlock.operate.cli.render import command_error
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.tasks.startup import install

T = TypeVar("T")
DEADLINE = 5.0  # seconds in which the broker or the result backend must answer a command
UNKNOWN = 2  # exit status if too few nodes answer for anything to be known


def named(_: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Return the name that an argument or option gives; refuses an empty one."""
    if value is not None and not value.strip():
        raise click.BadParameter("the name is empty.", param=param)
    return value


def finite(_: click.Context, param: click.Parameter, value: float) -> float:
    """Return the number that an option gives; refuses NaN, which passes each range."""
    if not math.isfinite(value):
        raise click.BadParameter("give a finite number.", param=param)
    return value


class RedlockGroup(click.Group):
    """Commands that print a SettingsError as one line."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except SettingsError as error:
            named = ctx.find_root().params.get("app") is not None
            hint = "" if named else ". No app is named: celery -A shop redlock ..."
            raise command_error(f"{error}{hint}") from None


@click.group(cls=RedlockGroup, help=celery_redlock_entry.redlock.help)
def redlock(**_: Any) -> None:
    """Run one of the commands."""


def app_from(ctx: click.Context) -> Any:
    """Return the app of the command line, complete with all its tasks."""
    app = ctx.find_root().obj.app
    app.loader.import_default_modules()
    app.finalize()
    install(app)
    return app


def redlock_from(ctx: click.Context) -> Redlock:
    """Return the `Redlock` of that app."""
    return redlock_of(app_from(ctx))


def within_deadline(ask: Callable[[], T]) -> tuple[T | None, str]:
    """Call the broker or the result backend; return its answer and "", else None and the cause.

    A server that accepts a connection and stays silent would keep a command for ever. The thread of
    such a call ends with the process.
    """
    answers: list[tuple[T | None, str]] = []

    def run() -> None:
        try:
            answers.append((ask(), ""))
        except Exception as error:  # each transport and backend has its own
            answers.append((None, str(error) or type(error).__name__))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(DEADLINE)
    return answers[0] if answers else (None, f"no answer within {DEADLINE:g} s")
