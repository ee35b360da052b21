"""The command group `celery redlock`, and how its commands get the app."""

from __future__ import annotations

from typing import Any

import click

import celery_redlock_entry
from celery_redlock.errors import SettingsError
from celery_redlock.lock.client import Redlock
from celery_redlock.operate.cli.render import command_error
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.tasks.startup import install


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
