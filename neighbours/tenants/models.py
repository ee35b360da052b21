"""The models that django-tenants asks for."""

from django.db import models
from django_tenants.models import DomainMixin, TenantMixin


class Tenant(TenantMixin):
    """A tenant, whose schema is made as it is saved."""

    name = models.CharField(max_length=100)
    auto_create_schema = True


class Domain(DomainMixin):
    """No request of the story has one."""
