"""The settings of Django for django-celery-beat's scheduler in a beat of the tests."""

from __future__ import annotations

import os

DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ["TEST_DB"]}}
INSTALLED_APPS = ["django_celery_beat"]
SECRET_KEY, USE_TZ = "of a test", True
DEFAULT_AUTO_FIELD = "django.db.models.AutoField"
