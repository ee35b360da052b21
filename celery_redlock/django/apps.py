"""`RedlockConfig`: what Django reads of `INSTALLED_APPS += ["celery_redlock.django"]`.

Django finds it by the name of this file, in each process of the project.
"""

from __future__ import annotations

from django.apps import AppConfig
from django.conf import settings


class RedlockConfig(AppConfig):
    """The app in INSTALLED_APPS. Its label names the permissions: `celery_redlock.break_lock`."""

    name = "celery_redlock.django"
    label = "celery_redlock"
    verbose_name = "Celery Redlock"

    def ready(self) -> None:
        """Say that the app has no migrations, unless the project says where they are.

        Else `makemigrations celery_redlock` would write one into the installed package. Source:
        django.db.migrations.writer refuses to write for an app whose MIGRATION_MODULES is None.
        """
        if self.label not in settings.MIGRATION_MODULES:
            settings.MIGRATION_MODULES = {**settings.MIGRATION_MODULES, self.label: None}
