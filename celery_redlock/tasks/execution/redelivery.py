"""Another delivery of the same message: whether it runs, or has come to its end."""

from __future__ import annotations

import re
from typing import Any

from celery_redlock.errors import LockTaken, NotAcquired
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.model.keys import completion_key, is_of_run
from celery_redlock.lock.model.options import CompletionMarker
from celery_redlock.lock.transport.encoding import encode_command, read_text
from celery_redlock.tasks import reporting
from celery_redlock.tasks.delivery.delivery import received_at, route_of
from celery_redlock.tasks.delivery.header import CLOCKS_DIFFER, LockHeader
from celery_redlock.tasks.delivery.route import has_way_back
from celery_redlock.tasks.delivery.run_id import name_of_run
from celery_redlock.tasks.per_app import redlock_of, settings_of

CONTINUES = "_redlock_goes_on"  # the same of a run that has another one of this message behind it


def is_late(task: Any, request: Any) -> bool:
    """Tell whether a run's message is acknowledged after it."""
    return bool(task.acks_late) and not request.is_eager


def goes_back(task: Any, request: Any) -> bool:
    """Tell whether a message can be put back.

    An eager run has none: it has waited up to `wait`, and gives up. And where a copy could only go
    to every queue of its exchange again, one message would become many.
    """
    return not request.is_eager and has_way_back(
        task.app, route_of(request, LockHeader.of(request))
    )


_IS_A_MARK = re.compile(r"-?[0-9]{1,18}")


def mark_of(task: Any, request: Any, slip: LockHeader) -> CompletionMarker | None:
    """Return the mark of a run that has a twin to come, perhaps; None where it has none.

    With early acknowledgement that is what was put back: where the broker's word was lost that it
    had the message, it was published twice. Each copy of a broadcast message is to run, though all
    of them have one id.
    """
    since = slip.asks_since()
    if since is None and not is_late(task, request):
        return None
    if not goes_back(task, request):
        return None
    came = received_at(request)
    if since is None and came is not None:  # a copy may have run while this one waited here
        since = came + CLOCKS_DIFFER
    kept_for = settings_of(task.app).done_ttl
    return CompletionMarker(
        name_of_run(task, request), kept_for, since, is_redelivered=slip.is_redelivered
    )


def is_done_since(task: Any, request: Any, began: float) -> bool:
    """Tell whether another delivery of a message came to its end since this one's body began.

    began: s since 1970. False where no node can say, and where no final state is stored: this body
    may have stored one of its own over it, and then somebody has to store another.
    """
    return is_marked_since(task, request, began - CLOCKS_DIFFER) and reporting.is_over(
        task, request
    )


def marks_of(session: Session, run: str) -> list[float | None]:
    """Return what each node that answers within one node timeout has noted of a run's end.

    s since 1970, below 0 where a later send has taken its place; None: nothing.
    """
    request = encode_command("GET", completion_key(session.options.prefix, run))
    return list(session.node_set.query(request, _read_mark).values())


def _read_mark(reply: Any) -> float | None:
    """Return when a run ended; raises UnexpectedReplyError. A stranger's text is no mark."""
    text = "" if reply is None else read_text(reply)
    return int(text) / 1000 if _IS_A_MARK.fullmatch(text) else None


def is_marked_since(task: Any, request: Any, since: float) -> bool:
    """Tell whether a node knows that a run was done after that, s since 1970."""
    marks = marks_of(redlock_of(task.app).session, name_of_run(task, request))
    return any(mark is not None and mark > since for mark in marks)


def is_twin(task: Any, request: Any, refused: NotAcquired) -> bool:
    """Tell whether who holds the lock is this very run, by another delivery of its message."""
    return isinstance(refused, LockTaken) and is_of_run(refused.holder, name_of_run(task, request))


def may_be_twin(task: Any, request: Any, slip: LockHeader, refused: NotAcquired) -> bool:
    """Tell whether a message is to wait for its own first delivery, which may run or be done.

    Where no quorum answers, nobody can tell that of a second delivery.
    """
    is_unknown = not isinstance(refused, LockTaken) and slip.is_redelivered
    return (is_unknown or is_twin(task, request, refused)) and goes_back(task, request)
