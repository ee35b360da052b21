"""The settings by which an application locks tasks whose code stays as it is."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from celery_redlock import Backoff
from neighbours.story_setup import read_setup
from neighbours.story_tasks import UNIQUE

PLUGIN = "neighbours.adopted.plugin"


def redlock_settings(prefix: str = "CELERY_REDLOCK_") -> dict[str, Any]:
    """Return them, each name with the prefix that the application gives to Celery's settings."""
    setup = read_setup()
    lock = {"key": "story:{key}", "backoff": Backoff(first=0.1, cap=1.0)}
    locks = {
        "story.work": lock,
        "story.once": {**lock, "unique_for": UNIQUE["lock_unique_for"]},
        setup.more["own"]: setup.more["lock"],
    }
    settings = {"nodes": list(setup.nodes), "ttl": 10, "tasks": locks}
    spelt = str.upper if prefix.isupper() else str.lower
    return {f"{prefix}{spelt(name)}": value for name, value in settings.items()}


def database() -> dict[str, Any]:
    """Return what of Django's DATABASES names the database of the run."""
    url = urlsplit(read_setup().more["database"])
    return {
        "NAME": url.path.lstrip("/"),
        "USER": url.username or "",
        "PASSWORD": url.password or "",
        "HOST": url.hostname or "",
        "PORT": url.port or "",
    }
