"""Ends one lock or claim for a person in the admin: that which the person was asked about.

A confirmation names it by a mark. Not here: the requests and who may send them (`admin.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.utils.crypto import salted_hmac

from celery_redlock.label import escaped
from celery_redlock.lock.claims import delete_claim
from celery_redlock.lock.client import Redlock
from celery_redlock.lock.inspection import break_lock
from celery_redlock.lock.reports import Answers, BrokenLock, ClaimReport, EndedClaim, LockReport
from celery_redlock.lock.transport.command import encoded, text_of
from celery_redlock.operate.cli import views
from celery_redlock.operate.cli.commands import send_broken
from celery_redlock.operate.cli.group import within_deadline
from celery_redlock.operate.cli.listing import failing_lines, unknown_lines

logger = logging.getLogger(__name__)
PAGE_DEADLINE = 15.0  # seconds for a page: the nodes, then the workers, then the broker


@dataclass(frozen=True)
class Confirmation:
    """What a person confirms.

    gone: said if there is no such lock or claim any more. unknown: if too few nodes answer to know.
    """

    title: str
    text: str
    gone: str
    unknown: str


CONFIRMATIONS = {
    "break": Confirmation(
        "Break the lock?",
        "Its body goes on until its next renewal, and another one may run beside it.",
        "Nothing is broken: that lock has ended, or another holder has it.",
        "Nothing is broken: whether that lock is held is unknown.",
    ),
    "end-claim": Confirmation(
        "End the claim?",
        "Its message still runs, and the next call is not a duplicate.",
        "Nothing is ended: that claim has ended, or a later call has another one.",
        "Nothing is ended: whether that claim exists is unknown.",
    ),
}


@dataclass(frozen=True)
class Ended:
    """What became of a lock or claim. line: for people. gone_from, failing: as of `BrokenLock`.

    needed: size of a quorum.
    """

    line: str
    gone_from: Sequence[str]
    failing: Mapping[str, str]
    needed: int

    @property
    def was_there(self) -> bool:
        """Whether a node had it, or may have had it."""
        return bool(self.gone_from or self.failing)

    @property
    def is_complete(self) -> bool:
        """Whether a quorum of nodes was told."""
        return not self.failing or len(self.gone_from) >= self.needed


def notes_of(answers: Answers) -> list[str]:
    """Return which nodes did not answer, and whether a quorum is missing."""
    return [*failing_lines(answers.failing), *unknown_lines(answers)]


def mark_of(target: LockReport | ClaimReport) -> str:
    """Return what stands in an address for the lock of this holder, or for this claim.

    The lock of a later holder has another mark. It does not tell the lock's value, a secret.
    """
    if isinstance(target, LockReport):
        parts = [text_of(target.key), text_of(target.value)]
    else:
        parts = [target.name, target.token]
    value = b"\0".join(map(encoded, parts))
    return str(salted_hmac(__name__, value, algorithm="sha256").hexdigest())


def describe(target: LockReport | ClaimReport) -> str:
    """Return what a person confirms to end."""
    if isinstance(target, LockReport):
        return escaped(f"{target.holder} loses {views.lock_name(target)}")
    return escaped(f"{target.task}[{target.task_id}] loses its claim on {target.resource}")


def find_marked(
    app: Any, action: str, mark: str
) -> tuple[LockReport | ClaimReport | None, list[str]]:
    """Return the lock or claim of a mark, and notes for people.

    None if there is none: the first note says so, the others what is not known.
    """
    confirmation = CONFIRMATIONS[action]

    def ask() -> tuple[Any, Answers]:
        client = Redlock.of(app)
        if action == "break":
            lock_list = client.locks()
            return [lock for lock in lock_list.locks if lock.value], lock_list
        claim_list = client.claims()
        return claim_list.claims, claim_list

    answer, cause = within_deadline(ask, PAGE_DEADLINE)
    if answer is None:
        return None, [confirmation.unknown, escaped(cause)]
    candidates, answers = answer
    found = next((target for target in candidates if mark_of(target) == mark), None)
    notes = [*map(escaped, notes_of(answers))]
    if found is None:
        notes.insert(0, confirmation.gone if answers.is_known else confirmation.unknown)
    return found, notes


def end(app: Any, target: LockReport | ClaimReport, by: str) -> Ended:
    """End a lock or claim, unless another one has replaced it, and log it. by: who does so."""
    ended, cause = within_deadline(lambda: _tell_nodes(app, target))
    if ended is None:  # some nodes may have been told
        line = f"{describe(target)}: it is not known on which nodes"
        ended = Ended(f"{line}: {cause}", (), {"": cause}, target.needed)
    if ended.was_there:
        _log(target, escaped(ended.line), escaped(by))
    if ended.gone_from and isinstance(target, LockReport):
        send_broken(app, target, f"{by} in Django's admin")
    return ended


def _log(target: LockReport | ClaimReport, line: str, by: str) -> None:
    if isinstance(target, LockReport):
        task = {"task": target.holder.task, "task_id": target.holder.task_id}
        extra = {"event": "lock_broken", "resource": target.resource, "by": by, **task}
        logger.warning("in Django's admin %s breaks a lock: %s", by, line, extra=extra)
    else:
        task = {"task": target.task, "task_id": target.task_id}
        extra = {"event": "claim_ended", "resource": target.resource, "by": by, **task}
        logger.warning("in Django's admin %s ends a claim: %s", by, line, extra=extra)


def _tell_nodes(app: Any, target: LockReport | ClaimReport) -> Ended:
    session = Redlock.of(app).session
    result: BrokenLock | EndedClaim
    if isinstance(target, LockReport):
        result = broken = break_lock(session, target)
        line = views.broken_line(broken)
    else:
        result = ended = delete_claim(session, target)
        line = views.ended_line(ended)
    return Ended(line, result.gone_from, result.failing, target.needed)
