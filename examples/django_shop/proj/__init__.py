"""The project. Django loads the Celery app, for @shared_task uses it."""

from .celery import app as celery_app

__all__ = ("celery_app",)
