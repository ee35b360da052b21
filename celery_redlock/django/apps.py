"""`RedlockConfig`: what Django reads of `INSTALLED_APPS += ["celery_redlock.django"]`.

Django finds it by the name of this file, in each process of the project.
"""

from __future__ import annotations

from django.apps import AppConfig


class RedlockConfig(AppConfig):
    """The app in INSTALLED_APPS. Its label names the permissions: `celery_redlock.break_lock`."""

    name = "celery_redlock.django"
    label = "celery_redlock"
    verbose_name = "Celery Redlock"
