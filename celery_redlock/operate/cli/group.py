"""The command group `celery redlock`."""

from __future__ import annotations

from typing import Any

import click

from celery_redlock.errors import SettingsError
from celery_redlock.lock.client import Redlock
from celery_redlock.operate.cli.render import _refused
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.tasks.startup import install


class Told(click.Group):
    """Commands that say what is wrong with the settings in one line."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except SettingsError as error:
            named = ctx.find_root().params.get("app") is not None
            hint = "" if named else ". No app is named: celery -A shop redlock ..."
            raise _refused(f"{error}{hint}") from None


@click.group(cls=Told)
def redlock(**_: Any) -> None:
    """Show the locks of tasks, and repair what is wrong with them."""


def _redlock(ctx: click.Context) -> Redlock:
    return redlock_of(_loaded(ctx))


def _loaded(ctx: click.Context) -> Any:
    app = ctx.find_root().obj.app
    app.loader.import_default_modules()
    app.finalize()
    install(app)
    return app
