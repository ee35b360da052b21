"""Every error that the package raises.

The text of each is made from its fields, and its `args` are those fields: so an error comes
through pickle and through Celery's JSON result encoding as what it was.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from celery.exceptions import ImproperlyConfigured

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


# why a lock is not held that nobody took away, and what to do
NEVER_ACQUIRED = "it was never acquired"
RELEASED = "it was released"
HELD_BY_PARENT = "it belongs to the process that this one was forked from"
_NOT_HELD = {
    NEVER_ACQUIRED: (
        "Acquire it first, by `with` or acquire(); a run that on_unreachable='run' lets through "
        "has none"
    ),
    RELEASED: "Acquire it again, or release it later",
    HELD_BY_PARENT: "Acquire a Lock of this process's own",
}


# what the nodes show of a run: its id, task, retries and nesting; then its worker
RUN = re.compile(r"(?P<task_id>.+):(?P<task>[^:\s]+):\d+:\d+(?:@[^@\s]+)?(?: (?P<worker>\S+))?")
_ABSTAINS = re.compile(r"(?P<node>.+): grants no lock for (?P<seconds>\d+) s more .restart guard.")


def describe_holder(label: str) -> str:
    """Return who a label on the nodes speaks of: "shop.take[id] on worker" for a run of a task."""
    found = RUN.fullmatch(label)
    if found is None:
        return label
    worker = f" on {found['worker']}" if found["worker"] else ""
    return f"{found['task']}[{found['task_id']}]{worker}"


def abstention_cause(seconds: float) -> str:
    """Return why a node that is up gives no vote: it waits for so many s more."""
    return f"grants no lock for {seconds:.0f} s more (restart guard)"


def summarize_causes(causes: Sequence[str]) -> str:
    """Return the causes of a `QuorumUnreachable` as one clause: nodes that abstain together."""
    found = [(cause, _ABSTAINS.fullmatch(cause)) for cause in causes]
    summary = [cause for cause, match in found if match is None]
    abstaining = [match for _, match in found if match is not None]
    if abstaining:
        longest = max(int(match["seconds"]) for match in abstaining)
        names = ", ".join(match["node"] for match in abstaining)
        summary.append(f"{names}: {abstention_cause(longest)}")
    return "; ".join(summary) or "no answer in time"


class RedlockError(Exception):
    """The root of all errors of this package."""


class SettingsError(RedlockError, ImproperlyConfigured):
    """A setting, an option or an argument that cannot be meant; to Celery ImproperlyConfigured.

    level: where it stands ("app", "queue 'imports'", "task 'shop.settle'", "call", "Redlock").
    name: as the user wrote it. value: its text, passwords masked.
    hint: what is allowed, as a sentence that follows "must be" or stands alone.
    """

    def __init__(self, level: str, name: str, value: str, hint: str) -> None:
        super().__init__(level, name, value, hint)
        self.level, self.name, self.value, self.hint = level, name, value, hint

    def __str__(self) -> str:
        return f"{self.level}: {self.name}={self.value}: {self.hint}"


class ArgumentsError(SettingsError, TypeError):
    """A call's arguments do not fit the task's function: a TypeError, as the call itself raises."""


class NoRunError(RedlockError, AttributeError):
    """A task's `lock` was asked for outside a run of it. task: its name."""

    def __init__(self, task: str) -> None:
        super().__init__(task)
        self.task = task

    def __str__(self) -> str:
        return (
            f"{self.task} has no lock here: a direct call of a task takes no lock. Run it by "
            "apply(), in a unit test with the fixtures of celery_redlock.testing or under its "
            "locking_off(); lock_for() gives the lock outside a run"
        )


class NodeError(RedlockError):
    """One node gave no usable answer.

    node: its address, without credentials. cause: the server's or the system's own words.
    lost: True where the connection had worked before, so that trying it once more makes sense.
    """

    def __init__(self, node: str, cause: str, lost: bool = False) -> None:
        super().__init__(node, cause, lost)
        self.node, self.cause, self.lost = node, cause, lost

    def __str__(self) -> str:
        return f"{self.node}: {self.cause}"


class NotAcquired(RedlockError):
    """The lock was not acquired; the two kinds below say why."""

    resource: str


class LockTaken(NotAcquired):
    """A quorum of nodes voted, and others hold what we lack.

    holder: the label of the one that holds most of it. expires_in: s until its lease ends if nobody
    renews it, None where that is not known. waited: s since the first try.
    deferrals: how often the message was put back before; 0 where there is none to put back.
    """

    def __init__(
        self,
        resource: str,
        holder: str = "",
        expires_in: float | None = None,
        waited: float = 0.0,
        deferrals: int = 0,
    ) -> None:
        super().__init__(resource, holder, expires_in, waited, deferrals)
        self.resource, self.holder, self.expires_in = resource, holder, expires_in
        self.waited, self.deferrals = waited, deferrals

    def _after(self, waited: float) -> LockTaken:
        """Return the same, as it is to be told after so many s."""
        return LockTaken(self.resource, self.holder, self.expires_in, waited, self.deferrals)

    def __str__(self) -> str:
        options = "wait, max_wait, max_deferrals" if self.deferrals else "wait"
        return (
            f"{self.resource!r} is held by {describe_holder(self.holder) or 'an unnamed holder'}; "
            f"{_waited(self.waited, self.deferrals)}. Wait longer ({options}) or find out what the "
            "holder does"
        )


class QuorumUnreachable(NotAcquired):
    """Fewer nodes than a quorum voted, so nobody can tell whether the lock is free.

    causes: one text a node that gave no vote, "address: cause". quorum: votes needed.
    waited, deferrals: as of `LockTaken`.
    """

    def __init__(
        self,
        resource: str,
        causes: Sequence[str] = (),
        quorum: int = 0,
        waited: float = 0.0,
        deferrals: int = 0,
    ) -> None:
        super().__init__(resource, list(causes), quorum, waited, deferrals)
        self.resource, self.causes, self.quorum = resource, list(causes), quorum
        self.waited, self.deferrals = waited, deferrals

    def _after(self, waited: float) -> QuorumUnreachable:
        """Return the same, as it is to be told after so many s."""
        return QuorumUnreachable(self.resource, self.causes, self.quorum, waited, self.deferrals)

    def __str__(self) -> str:
        text = (
            f"no quorum of {self.quorum} nodes voted on {self.resource!r}; "
            f"{_waited(self.waited, self.deferrals)}."
        )
        abstaining = [cause for cause in self.causes if _ABSTAINS.fullmatch(cause)]
        failing = [cause for cause in self.causes if cause not in abstaining]
        if failing or not abstaining:
            text = f"{text} Bring these nodes back: {summarize_causes(failing)}"
        if abstaining:
            text = (
                f"{text}{'.' if failing else ''} New or restarted nodes wait: "
                f"{summarize_causes(abstaining)}. On a new cluster `celery redlock trust`, or "
                "Redlock.trust(), ends that"
            )
        return text


def _waited(seconds: float, deferrals: int) -> str:
    text = f"waited {seconds:.1f} s"
    return f"{text}, {deferrals} deferrals" if deferrals else text


class LockLost(RedlockError):
    """The lease ran out, or was taken away, while the lock was in use; or it was never in use.

    reason: what ended it, or why it is not held: it was never acquired, or was released.
    body_ended: True where the task's body had run to its end before the loss was noticed, so that
    its effects stand.
    """

    def __init__(self, resource: str, reason: str, body_ended: bool = False) -> None:
        super().__init__(resource, reason, body_ended)
        self.resource, self.reason, self.body_ended = resource, reason, body_ended

    def __str__(self) -> str:
        if self.reason in _NOT_HELD:
            ended = "; its body had ended" if self.body_ended else ""
            hint = _NOT_HELD[self.reason]
            return f"the lock on {self.resource!r} is not held: {self.reason}{ended}. {hint}"
        tense = "its body had ended" if self.body_ended else "its body had not ended"
        return (
            f"the lock on {self.resource!r} is lost ({self.reason}); {tense}. Another holder may "
            "run beside it: check what was written, and see the nodes' logs for that time"
        )


class DuplicateTask(RedlockError):
    """The same task for the same resource was sent before, and that send is still good.

    task_id: the earlier send's.
    """

    def __init__(self, resource: str, task_id: str) -> None:
        super().__init__(resource, task_id)
        self.resource, self.task_id = resource, task_id

    def __str__(self) -> str:
        return f"{self.resource!r} was sent before as task {self.task_id}: wait for that one"
