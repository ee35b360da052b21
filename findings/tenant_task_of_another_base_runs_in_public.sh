#!/bin/sh
# tenant-schemas-celery: a task whose base class is not TenantTask
#
# Expected: a task that is sent in the schema of a tenant runs there. With a base class that cannot enter the
#   schema it ends as FAILURE, or the app refuses it.
# Seen: it runs in the schema public, and ends as SUCCESS. The worker logs that a signal handler has raised.
#   A task with no base of its own runs in the schema of the tenant.
# Source: tenant_schemas_celery/app.py, `switch_schema`, a receiver of task_prerun, calls
#   task.get_tenant_databases, which TenantTask alone has. celery/utils/dispatch/signal.py, `Signal.send`, logs
#   what a receiver raises, and the body runs all the same. TenantTaskRegistry.register derives a class of its
#   own from TenantTask, but only of a class: the decorator registers an instance.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check \
  celery==5.7.0 kombu==5.7.0 tenant-schemas-celery==5.0.0 django-tenants==4.0.1 Django==5.2.19 \
  'psycopg[binary]==3.3.9'

cat > "$folder/shop.py" <<'PYTHON'
from dataclasses import dataclass
from importlib.metadata import version

import django
from celery import Task
from celery.contrib.testing.worker import start_worker
from django.conf import settings

settings.configure(
    DATABASES={"default": {"ENGINE": "django_tenants.postgresql_backend", "NAME": "none"}},
    DATABASE_ROUTERS=["django_tenants.routers.TenantSyncRouter"],
    INSTALLED_APPS=["django_tenants", "django.contrib.contenttypes"],
    TENANT_APPS=["django.contrib.contenttypes"],
    TENANT_MODEL="shop.Tenant",
)
django.setup()

from django.db import connection
from tenant_schemas_celery.app import CeleryApp
from tenant_schemas_celery.task import TenantTask

app = CeleryApp("shop", broker="memory://", backend="cache+memory://")


@dataclass
class Tenant:
    schema_name: str


class Audited(Task):
    """A base class for some tasks of the app."""


@app.task
def plain():
    return connection.schema_name


@app.task(base=Audited)
def audited():
    return connection.schema_name


print("celery", version("celery"), "tenant-schemas-celery", version("tenant-schemas-celery"))
TenantTask.tenant_cache().set("acme", Tenant("acme"), expire_seconds=3600)  # no database is asked
with start_worker(app, perform_ping_check=False, pool="solo", loglevel="CRITICAL"):
    for task in (plain, audited):
        connection.set_schema("acme")
        sent = task.delay()
        connection.set_schema_to_public()
        ran_in = sent.get(timeout=60)
        print(f"{task.name}: sent in acme, ran in {ran_in}, {sent.state}")
PYTHON

"$folder/venv/bin/python" "$folder/shop.py" > "$folder/seen" 2> "$folder/log" || cat "$folder/log"
cat "$folder/seen"
diff "$folder/seen" - <<'SEEN'
celery 5.7.0 tenant-schemas-celery 5.0.0
shop.plain: sent in acme, ran in acme, SUCCESS
shop.audited: sent in acme, ran in public, SUCCESS
SEEN
