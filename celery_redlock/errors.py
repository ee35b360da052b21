"""Every error that the package raises.

The text of an error is made from its fields, and its `args` are those fields. So an error survives
pickle and Celery's JSON result encoding.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from typing import Any

from celery.exceptions import Ignore, ImproperlyConfigured

from celery_redlock import anchors
from celery_redlock.label import Holder, is_of_operator

__all__ = [
    "DuplicateTask",
    "LockLost",
    "LockTaken",
    "NodeError",
    "NotAcquired",
    "QuorumUnreachable",
    "RedlockError",
    "SettingsError",
]

MAX_SHOWN_NAMES = 5  # in a text that lists names
# the reasons why a lock that was not lost is not held
NEVER_ACQUIRED = "it was never acquired"
RELEASED = "it was released"
HELD_BY_PARENT = "it belongs to the process that this one was forked from"
CLOSED = "its Redlock is closed"  # the only cause of a `QuorumUnreachable`: no node is asked
_NOT_HELD_HINTS = {
    NEVER_ACQUIRED: (
        "Acquire it first, by `with` or acquire(); a run that on_unreachable='run' lets through "
        "does not hold it"
    ),
    RELEASED: "Acquire it again, or release it later",
    HELD_BY_PARENT: "Acquire a Lock of this process's own",
}

MAX_VALUE_LENGTH = 200  # characters of a wrong value that an error shows

_ABSTAINS = re.compile(
    r"(?P<node>.+): (?P<cause>grants no lock for (?P<seconds>\d+) s more .restart guard[^)]*.)"
)


def closest_or_all(name: str, choices: Sequence[str], fallback: str = "") -> str:
    """Return "did you mean ...?" for a name that is close to one of the choices.

    fallback: the text if no choice is close; "" stands for a list of all choices.
    """
    close = difflib.get_close_matches(name[:MAX_VALUE_LENGTH], choices, n=1)
    fallback = fallback or f"known: {', '.join(choices)}"
    return f"did you mean {close[0]!r}?" if close else fallback


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def first_names(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    omitted = len(names) - MAX_SHOWN_NAMES
    suffix = f" and {omitted} more" if omitted > 0 else ""
    return f"{', '.join(names[:MAX_SHOWN_NAMES])}{suffix}"


def abstention_cause(seconds: float, *, keeps_locks: bool = False) -> str:
    """Return why a node abstains. seconds: the time left of its grace period.

    keeps_locks: whether the node keeps its locks when it restarts; then only a change of its
    server, or a new prefix, makes it abstain.
    """
    keeper_note = (
        ": its server, timeline or schema changed, so it may have lost locks, or its prefix is new"
    )
    guard = f"restart guard{keeper_note if keeps_locks else ''}"
    return f"grants no lock for {math.ceil(seconds)} s more ({guard})"


def summarize_causes(causes: Sequence[str]) -> str:
    """Return causes as one clause; abstaining nodes share one, with their longest grace period."""
    matches = [(cause, _ABSTAINS.fullmatch(cause)) for cause in causes]
    summary = [cause for cause, match in matches if match is None]
    abstaining = [match for _, match in matches if match is not None]
    if abstaining:
        longest = max(abstaining, key=lambda match: int(match["seconds"]))
        names = ", ".join(match["node"] for match in abstaining)
        summary.append(f"{names}: {longest['cause']}")
    return "; ".join(summary) or "no answer in time"


class RedlockError(Exception):
    """The root of all errors of this package. Its text ends with a command that explains it."""

    _anchor = anchors.ANY_ERROR

    def __str__(self) -> str:
        return anchors.see(self._text(), self._anchor)

    def _text(self) -> str:
        return super().__str__()


class SettingsError(RedlockError, ImproperlyConfigured):
    """A setting, an option or an argument is invalid. Celery handles it as ImproperlyConfigured.

    level: where it is set ("app", "queue 'imports'", "task 'shop.settle'", "call", "Redlock").
    name: of the setting or option. value: its text, without passwords, cut to `MAX_VALUE_LENGTH`.
    hint: what is allowed, as a sentence that follows "must be" or stands alone.
    """

    _anchor = anchors.SETTINGS_ERROR

    def __init__(self, level: str, name: str, value: str, hint: str) -> None:
        if len(value) > MAX_VALUE_LENGTH:  # a message may bring any
            value = f"{value[: MAX_VALUE_LENGTH - 3]}..."
        super().__init__(level, name, value, hint)
        self.level = level
        self.name = name
        self.value = value
        self.hint = hint

    def _text(self) -> str:
        setting = f"{self.name}={self.value}"
        if self.name.endswith(": ...}"):  # of a call, as lock={'ttl': ...}
            setting = f"{self.name.removesuffix('...}')}{self.value}}}"
        return f"{self.level}: {setting}: {self.hint}"


class ArgumentsError(SettingsError, TypeError):
    """A call's arguments do not fit the task's function.

    Also a TypeError, because a direct call of the function raises that.
    """


class NoRunError(RedlockError, AttributeError):
    """A task's `lock` was read outside a run that has a lock.

    task: the task's name. in_run: it was read in a run that takes no lock, or that has not acquired
    it yet. in_hook: it was read in a hook that Celery calls outside the run, for example after a
    hard time limit.
    """

    _anchor = anchors.NO_RUN

    def __init__(self, task: str, in_run: bool = False, in_hook: bool = False) -> None:
        super().__init__(task, in_run, in_hook)
        self.task = task
        self.in_run = in_run
        self.in_hook = in_hook

    def _text(self) -> str:
        if self.in_run:
            return (
                f"{self.task} has no lock here: this run takes none, as its lock_key is False or "
                "returns None; or it is before_start, and the lock is acquired after that. "
                "current_lock() is None then"
            )
        if self.in_hook:
            return (
                f"{self.task} has no lock here: this hook is called outside the run. After a hard "
                "time limit, or if its process is killed, Celery calls the hooks in the worker's "
                "main process, and the lock is released once the run's process is gone. The "
                "arguments of the hook have the task's id; lock_for() gives the lock by its name"
            )
        return (
            f"{self.task} has no lock here: a direct call of a task takes no lock. Run it by "
            "apply(), in a unit test with the fixtures of celery_redlock.testing or under its "
            "locking_off(); lock_for() gives the lock outside a run"
        )


class NodeError(RedlockError):
    """One node gave no usable reply.

    node: its address, without credentials. cause: the text of the server or the system.
    lost: True if the connection had worked before, so that one more try makes sense.
    """

    _anchor = anchors.NODE_FAILS

    def __init__(self, node: str, cause: str, lost: bool = False) -> None:
        super().__init__(node, cause, lost)
        self.node = node
        self.cause = cause
        self.lost = lost

    def _text(self) -> str:
        return f"{self.node}: {self.cause}"


class NotAcquired(RedlockError):
    """The lock was not acquired: base class of `LockTaken` and `QuorumUnreachable`."""

    resource: str
    waited: float
    deferrals: int

    def _waiting(self) -> str:
        text = f"waited {self.waited:.1f} s"
        return f"{text}, {self.deferrals} deferrals" if self.deferrals else text


def set_waited(failure: NotAcquired, seconds: float) -> None:
    """Set `waited` of an error, which is the fourth argument of both classes."""
    failure.waited = seconds
    failure.args = (*failure.args[:3], seconds, *failure.args[4:])


class LockTaken(NotAcquired):
    """A quorum of nodes voted, and other clients hold the lock, or have used up the rate.

    holder: the label of the client that holds the lock on most nodes. expires_in: seconds until the
    lock is free if it is not renewed, or until the next start; None if unknown. waited: seconds
    since the first try. deferrals: how often the message was deferred before; 0 if there is no
    message. ttl: seconds of the holder's lease; None if unknown. limit: how many may hold the lock
    at one time. rate: that of the resource, as "100/h", if it is used up; "" if the lock is taken.
    """

    _anchor = anchors.LOCK_TAKEN

    def __init__(
        self, resource: str, holder: str = "", expires_in: float | None = None,
        waited: float = 0.0, deferrals: int = 0, ttl: float | None = None, limit: int = 1,
        rate: str = "",
    ) -> None:  # fmt: skip
        super().__init__(resource, holder, expires_in, waited, deferrals, ttl, limit, rate)
        self.resource = resource
        self.holder = holder
        self.expires_in = expires_in
        self.waited = waited
        self.deferrals = deferrals
        self.ttl = ttl
        self.limit = limit
        self.rate = rate

    @property
    def is_unclear(self) -> bool:
        """Whether nodes have permits of the rate free, but none that a quorum shares."""
        return bool(self.rate) and self.expires_in is None

    @property
    def unrenewed_for(self) -> float | None:
        """Seconds since the holder renewed its lease, if that is late; else None.

        A live holder renews every third of its ttl.
        """
        if _has_several_holders(self) or self.ttl is None or self.expires_in is None:
            return None
        age = self.ttl - self.expires_in
        return age if age > self.ttl * 2 / 3 else None

    def _text(self) -> str:
        options = "wait, max_wait" if self.deferrals else "wait"
        if self.rate:
            text = f"{self.resource!r} is not free: {describe_taken(self)}; {self._waiting()}"
            return f"{text}. Wait until then ({options}), or enqueue fewer"
        behavior = "the holders do" if _has_several_holders(self) else "the holder does"
        return (
            f"{self.resource!r} is {describe_taken(self)}; {self._waiting()}. "
            f"Wait longer ({options}) or find out what {behavior}"
        )


def _has_several_holders(refusal: LockTaken) -> bool:
    """Return whether all permits are taken. An operator's hold refuses all others by itself."""
    return refusal.limit > 1 and not is_of_operator(refusal.holder)


def describe_taken(refusal: LockTaken) -> str:
    """Return in few words who holds a lock: its holder, or how many; or which rate is used up."""
    if refusal.rate:
        next_start = (
            "" if refusal.expires_in is None else f", next start in {refusal.expires_in:.0f} s"
        )
        return f"rate of {refusal.resource}: {refusal.rate}{next_start}"
    if _has_several_holders(refusal):
        return f"held by {refusal.limit} holders, its limit"
    late_seconds = refusal.unrenewed_for
    not_renewed = "" if late_seconds is None else f", not renewed for {late_seconds:.0f} s"
    holder = str(Holder.of(refusal.holder))  # "" if a task that waits is before this one
    return f"held by {holder}{not_renewed}" if holder else "taken"


class QuorumUnreachable(NotAcquired):
    """Fewer nodes than a quorum voted, so it is unknown whether the lock is free.

    causes: "address: cause" for each node that gave no vote; of a closed `Redlock` just that it is
    closed. quorum: number of votes needed. waited, deferrals: as in `LockTaken`.
    """

    _anchor = anchors.NO_QUORUM

    def __init__(
        self, resource: str, causes: Sequence[str] = (), quorum: int = 0, waited: float = 0.0,
        deferrals: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(resource, list(causes), quorum, waited, deferrals)
        self.resource = resource
        self.causes = list(causes)
        self.quorum = quorum
        self.waited = waited
        self.deferrals = deferrals

    @property
    def votes_in(self) -> float | None:
        """Seconds until the next node ends its grace period, if that is all that is missing."""
        matches = [_ABSTAINS.fullmatch(cause) for cause in self.causes]
        waits = [float(match["seconds"]) for match in matches if match is not None]
        return min(waits) if waits and len(waits) == len(matches) else None

    def _text(self) -> str:
        if self.causes == [CLOSED]:
            waited = self._waiting()
            return f"{self.resource!r} is not acquired: {CLOSED}; {waited}. Make another Redlock"
        quorum = counted(self.quorum, "node")
        text = f"no quorum of {quorum} voted on {self.resource!r}; {self._waiting()}."
        abstaining = [cause for cause in self.causes if _ABSTAINS.fullmatch(cause)]
        failing = [cause for cause in self.causes if cause not in abstaining]
        if failing or not abstaining:
            text = f"{text} Bring these nodes back: {summarize_causes(failing)}"
        if abstaining:
            text = (
                f"{text}{'.' if failing else ''} New or restarted nodes wait: "
                f"{summarize_causes(abstaining)}. On a new cluster `celery -A APP redlock trust "
                "--all`, or Redlock.trust(), ends the wait"
            )
        return text


class LockLost(RedlockError):
    """The lease expired or was taken away while the lock was in use; or the lock is not held.

    reason: what ended the lease, or why the lock is not held: never acquired, or released.
    body_ended: True if the task's body had ended before the loss was noticed. Its effects stand.
    """

    def __init__(self, resource: str, reason: str, body_ended: bool = False) -> None:
        super().__init__(resource, reason, body_ended)
        self.resource = resource
        self.reason = reason
        self.body_ended = body_ended
        self._anchor = anchors.NOT_HELD if reason in _NOT_HELD_HINTS else anchors.LOCK_LOST

    def _text(self) -> str:
        hint = _NOT_HELD_HINTS.get(self.reason)
        if hint is not None:
            suffix = "; its body had ended" if self.body_ended else ""
            return f"the lock on {self.resource!r} is not held: {self.reason}{suffix}. {hint}"
        tense = "its body had ended" if self.body_ended else "its body had not ended"
        return (
            f"the lock on {self.resource!r} is lost ({self.reason}); {tense}. Another holder may "
            "run beside it: check what the body has written, and the nodes' logs of that time"
        )


class DuplicateTask(RedlockError):
    """The same task was sent before for the same resource, and the earlier send is still valid.

    task_id: of the earlier send. expires_in: seconds until that send's claim ends, if its run does
    not end it before; None if unknown.
    """

    _anchor = anchors.DUPLICATE_TASK

    def __init__(self, resource: str, task_id: str, expires_in: float | None = None) -> None:
        super().__init__(resource, task_id, expires_in)
        self.resource = resource
        self.task_id = task_id
        self.expires_in = expires_in

    def _text(self) -> str:
        text = f"{self.resource!r} was sent before as task {self.task_id}"
        if self.expires_in is not None:
            text += f", which counts until its end, at the latest in {self.expires_in:.0f} s"
        return f"{text}. A new call is accepted after that"


class Deferred(Ignore):
    """Ends a try of a message that waits for its lock. No error: no body has run.

    Users name it to agents that count each exception as an error, so its place stays.
    It reaches the worker's main process: see `tasks/worker_request.py`. header: what the message is
    to carry, a `LockHeader`. stays: the message is not published again; it stays unacknowledged,
    and waits in the main process.
    """

    def __init__(self, header: Any, stays: bool = False) -> None:
        super().__init__(header, stays)  # pickle makes a copy of that
        self.header = header
        self.stays = stays

    def __str__(self) -> str:
        return f"deferred: {self.header.deferral.why}"
