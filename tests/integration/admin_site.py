"""The settings of a Django project with the admin page *Locks*, for the tests of that page."""

from __future__ import annotations

import os

SECRET_KEY = "of a test"
DEBUG = True  # `runserver` serves the admin's own styles
ALLOWED_HOSTS = ["127.0.0.1", "testserver"]
ROOT_URLCONF = "tests.integration.admin_urls"
USE_TZ = True
TIME_ZONE = "Asia/Kolkata"  # half an hour beside all others
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("TEST_DB", ":memory:"),
        "OPTIONS": {"timeout": 60},
    },
}
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "celery_redlock.django",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
STATIC_URL = "/static/"
LOGGING_CONFIG = None

if os.environ.get("DJANGO_SETTINGS_MODULE") == __name__:  # a server: as `proj/__init__.py` does it
    from tests.integration import admin_shop  # noqa: F401
