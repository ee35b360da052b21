"""`Locks`: the model of the admin page. It has no table: locks are on the nodes.

Source: django.contrib.auth.management.create_permissions makes the permissions of each model after
each `migrate`, also of a model that is not managed. The app has no migrations, so `makemigrations`
finds nothing to do, and refuses the app's own label (`apps.py`).
"""

from __future__ import annotations

from typing import Any

from django.db import models


class NoRows(models.Manager):
    """Finds nothing, so that `dumpdata` and others that read all models ask for no table."""

    def get_queryset(self) -> Any:
        """Return an empty set, which sends no query."""
        return super().get_queryset().none()


class Locks(models.Model):
    """Carries the permissions `view_locks`, `break_lock` and `end_claim`; it is never stored.

    An instance stands for a resource in the admin's own log.
    """

    resource = models.TextField(primary_key=True)
    objects = NoRows()

    class Meta:
        """No table, and what a user may do with a lock."""

        managed = False
        base_manager_name = "objects"
        default_permissions = ("view",)
        permissions = (("break_lock", "Can break a lock"), ("end_claim", "Can end a claim"))
        verbose_name = "lock"
        verbose_name_plural = "locks"

    def __str__(self) -> str:
        return str(self.resource)
