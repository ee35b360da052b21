"""The app as the process that sends imports it: it makes the tenants, and sends as one of them."""

from django.db import connection

from neighbours.tenants.app import app, once, work
from neighbours.tenants.models import Domain, Tenant

__all__ = ["TENANTS", "app", "once", "work"]

TENANTS = ("acme", "bolt")
with connection.schema_editor() as editor:
    editor.create_model(Tenant)
    editor.create_model(Domain)
for name in TENANTS:
    Tenant(schema_name=name, name=name).save(verbosity=0)
connection.set_schema(TENANTS[0])
