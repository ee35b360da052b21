"""Nautobot's Celery app, with its configuration read, as `nautobot-server celery` reads it."""

import nautobot

nautobot.setup()
from nautobot.core.celery import app  # noqa: E402, F401 - it needs the configuration
