"""The test app in a release whose message headers have the format 2, and otherwise as it is."""

from __future__ import annotations

from celery_redlock.tasks.delivery import header
from tests.integration.app import app

__all__ = ["app"]
header.HEADER_FORMAT = 2
