"""The Celery app: its tasks have a lock, and run in the schema of the tenant that sent them."""

from __future__ import annotations

from typing import Any

import django
from django.db import connection
from tenant_schemas_celery.app import CeleryApp

from celery_redlock import LockedTask
from neighbours.bodies import note
from neighbours.story_setup import read_setup, run_folder
from neighbours.story_tasks import LOCKED, add_tasks, settings

django.setup()
from tenant_schemas_celery.task import TenantTask  # noqa: E402 - needs Django's settings

SCHEMAS = "schemas"  # the file of what the bodies see


class LockedTenantTask(LockedTask, TenantTask):
    """What the page names."""

    abstract = True


def by_tenant(task: Any, args: Any, kwargs: Any) -> str:
    return f"{connection.schema_name}:story:{args[0]}"


def see_schema() -> None:
    """Note the schema that PostgreSQL names, not the one that the connection is told to have."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_schema()")
        (schema,) = cursor.fetchone()
    task = app.current_task
    note(run_folder() / SCHEMAS, "schema", task.request.id, schema)


app = CeleryApp("neighbours.tenants.app")
app.conf.update(settings())
_base = LockedTask if read_setup().more.get("alone") else LockedTenantTask
work, once = add_tasks(app, {**LOCKED, "base": _base, "lock_key": by_tenant}, check=see_schema)
