"""tenant-schemas-celery beside locked tasks: each schema has locks of its own.

No database is asked: a run finds its tenant in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import django
from django.conf import settings
from django.db import connection
from tenant_schemas_celery.app import CeleryApp
from tenant_schemas_celery.task import TenantTask

from celery_redlock import LockedTask, SettingsError, current_lock
from tests.integration.third_party.stage import over_nodes, tell, working

TENANTS = ("acme", "bolt")
settings.configure(
    DATABASES={"default": {"ENGINE": "django_tenants.postgresql_backend", "NAME": "nowhere"}},
    DATABASE_ROUTERS=["django_tenants.routers.TenantSyncRouter"],
    INSTALLED_APPS=["django_tenants", "django.contrib.contenttypes"],
    TENANT_APPS=["django.contrib.contenttypes"],
    TENANT_MODEL="shop.Tenant",
)
django.setup()
app = over_nodes(CeleryApp("of_tenants"))


@dataclass
class Tenant:
    schema_name: str


class LockedTenantTask(LockedTask, TenantTask):
    abstract = True


def by_tenant(task: Any, args: Any, kwargs: Any) -> str:
    return f"{connection.schema_name}:stock:{args[0]}"


@app.task(base=LockedTenantTask, lock_key=by_tenant, lock_unique_for=600)
def take(sku: str) -> list[str]:
    lock = current_lock()
    assert lock is not None
    return [connection.schema_name, lock.resource]


for name in TENANTS:
    TenantTask.tenant_cache().set(name, Tenant(name), expire_seconds=3600)
sent = []
for name in (*TENANTS, *TENANTS):
    connection.set_schema(name)
    sent.append(take.delay("sku-7"))
connection.set_schema_to_public()
with working(app):
    refused = ""
    try:
        app.task(by_tenant, name="of.no.tenant", base=LockedTask)
    except SettingsError as error:
        refused = str(error)
    tell(
        duplicates=[one.is_duplicate for one in sent],
        ran=[one.get(timeout=60) for one in sent],
        refused=refused,
    )
