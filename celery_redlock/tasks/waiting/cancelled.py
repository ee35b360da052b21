"""Whether a waiting message is not to run any more."""

from __future__ import annotations

from collections.abc import Container
from datetime import datetime
from typing import Any


def is_cancelled(request: Any, revoked: Container[str]) -> bool:
    """Return whether a message has expired or is revoked: by its id, or by a stamp.

    revoked: the ids that this worker was told of. Celery asks the request again when the message is
    dispatched, which does no harm.
    Source: celery.worker.request: `Request.revoked` writes REVOKED. A message that may also run
    elsewhere gets that state when its lock is taken, and until then it is not revoked there.
    """
    if request.id in revoked:
        return True
    expires = request.expires
    if expires is not None and expires < datetime.now(expires.tzinfo):
        return True
    try:
        is_revoked = bool(request.stamped_headers and request.revoked())
    except Exception:  # it is revoked, and the result backend that is to store that is away
        return True
    return is_revoked or getattr(request, "is_revoked", False)
