"""Indico's Celery app, with its configuration read, as `indico celery` reads it."""

from indico.core.celery import celery as app  # noqa: F401
from indico.web.flask.app import make_app

make_app()
