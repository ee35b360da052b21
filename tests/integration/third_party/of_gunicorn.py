"""An app that gunicorn imports before it forks its workers: its locks in a request."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from typing import Any

from celery_redlock import Redlock
from tests.conftest import NODE_TIMEOUT, TTL, see_renewal

redlock = Redlock(os.environ["TEST_NODES"].split(","), node_timeout=NODE_TIMEOUT)
of_import = redlock.lock("import", ttl=TTL)
of_import.acquire()


def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """Take a lock and renew it; say in which process, and whether the parent's is free."""
    with redlock.lock("request", ttl=TTL, wait=120) as lock:
        see_renewal(lock)
        is_free = redlock.lock("import", ttl=TTL).try_acquire()
    said = {"pid": os.getpid(), "import_is_free": is_free, "is_held": of_import.held}
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps(said).encode()]
