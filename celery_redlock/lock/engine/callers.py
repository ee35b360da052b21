"""The callers of this process that wait for locks: threads, greenlets and coroutines, in order.

Not here: what the nodes know of them (`inbox.py`), and when a caller looks (`lock/retry.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable

from celery_redlock.lock.engine.core import Core
from celery_redlock.lock.engine.inbox import Inbox
from celery_redlock.lock.model.handoff import FALLBACK, LOOK, TURN, Step
from celery_redlock.lock.model.rate import Rate

MAX_SPIN = 1.0  # seconds between two tries of a caller that no release can name
LOOK_INTERVAL = 3 * TURN  # seconds between two looks for which no majority names this process


class Caller:
    """A thread or coroutine that waits until a lock may be free; it sleeps on its own wake-up.

    name: of `keys.name_of_lock` or `keys.name_of_rate`; of several, what refused it. limit: of this
    lock, which may be free for a higher limit only; or the rate. since: seconds since 1970 by the
    nodes' clocks. step, due: why it may act, and from which monotonic second; None and inf: not
    yet. looked_at: the monotonic second of its last look at the nodes. was_first: it leaves as the
    first one.
    """

    __slots__ = ("decided", "due", "limit", "looked_at", "name", "since", "step", "wake",
                 "was_first")  # fmt: skip

    def __init__(self, name: str, limit: int | Rate, since: float) -> None:
        self.name = name
        self.limit = limit
        self.since = since
        self.step: Step | None = None
        self.due = math.inf
        self.looked_at = -math.inf
        self.decided = self.was_first = False
        self.wake: Callable[[], None] | None = None

    def wake_up(self) -> None:
        """Wake the caller. Never waits."""
        self.decided = True
        wake = self.wake
        if wake is not None:
            wake()

    def plan(self, step: Step, due: float) -> None:
        """Let the caller act at a monotonic second; a step that is due before is never put off.

        If it were put off by each release, a stopped process in front would stay there for as long
        as releases follow each other faster than turns.
        """
        if due < self.due:
            self.step = step
            self.due = due
            self.wake_up()

    def take_step(self, now: float) -> Step | None:
        """Return the step that is due, once."""
        if self.due > now:
            return None
        self.due = math.inf  # first: a step that comes now is for the next time
        step = self.step
        self.step = None
        return step


class Callers:
    """The callers of this process that wait, by resource and in order of arrival.

    Of the callers for one lock only the first of each limit looks at the nodes, and only this one
    is told of a release: the others would collide. Each change is atomic and needs no mutex. So a
    finalizer or a signal handler may interrupt a change and wait for a lock, too.
    """

    def __init__(self, core: Core) -> None:
        self._clock = core.clock
        self._lines: dict[str, dict[int, Caller]] = {}
        self.inbox = Inbox(core, self)

    def join(self, caller: Caller) -> None:
        """Let a caller wait. The first one is to ask: a release may have come before it joined."""
        self._add(caller)
        self.inbox.listen()
        if self.inbox.is_listening and self.first_of(caller) is caller:
            caller.plan(Step(LOOK), self._clock.now())  # which registers it, too
        else:
            self.inbox.changed(caller.name)

    def _add(self, caller: Caller) -> None:
        while True:
            line = self._lines.setdefault(caller.name, {})
            line[id(caller)] = caller
            if self._lines.get(caller.name) is line:
                return
            line.pop(id(caller), None)  # another thread has just removed the empty line

    def leave(self, caller: Caller, *, acquired: bool = False) -> None:
        """Let a caller wait no more; the next one goes on for it. A second call has no effect.

        acquired: it has the lock, so that the next one need not ask whether it is free. Of several
        permits more may be.
        """
        # kept in the caller: an exception may cut this off, and it is called again
        caller.was_first = caller.was_first or self.first_of(caller) is caller
        self._remove(caller)
        successor = self.first_of(caller)
        if successor is not None and caller.was_first:
            successor.looked_at = self._clock.now()
            if caller.step is not None:
                successor.plan(caller.step, caller.due)
            elif not acquired or caller.limit != 1:
                successor.plan(Step(LOOK), successor.looked_at)
            successor.wake_up()
        caller.was_first = False
        self.inbox.changed(caller.name, reregister=successor is not None and acquired)

    def _remove(self, caller: Caller) -> None:
        line = self._lines.get(caller.name, {})
        line.pop(id(caller), None)
        if not line and self._lines.get(caller.name) is line:
            removed_line = self._lines.pop(caller.name, line)
            if removed_line:  # another thread has just joined
                self._lines.setdefault(caller.name, removed_line).update(removed_line)

    def move(self, caller: Caller, name: str, limit: int | Rate) -> None:
        """Let a caller wait for something else, which has refused it."""
        self.leave(caller)
        caller.name = name
        caller.limit = limit
        self.join(caller)

    def pass_over(self, caller: Caller) -> None:
        """Put a first caller that does not act to the end: its event loop may stand still.

        Also if it waits below a signal handler that waits for the same lock.
        """
        line = self._lines.get(caller.name, {})
        removed_caller = line.pop(id(caller), None)
        if removed_caller is not None:
            self._add(caller)

    def line(self, resource: str) -> list[Caller]:
        """Return the callers that wait for a resource, in order of arrival."""
        return list(self._lines.get(resource, {}).values())

    def first_of(self, caller: Caller) -> Caller | None:
        """Return the first caller that waits for the same lock."""
        candidates = (
            candidate for candidate in self.line(caller.name) if candidate.limit == caller.limit
        )
        return next(candidates, None)

    @property
    def count(self) -> int:
        """For how many resources somebody waits."""
        return len(self._lines)

    def close(self) -> None:
        """Wake all callers, which end their waits, and close the inbox for ever."""
        for resource in self.resources():
            for caller in self.line(resource):
                caller.wake_up()
        self.inbox.close()

    # as a `Line`

    def since(self, resource: str) -> float | None:
        """Return since when the first caller waits for a resource; None if none does."""
        line = self.line(resource)
        return line[0].since if line else None

    def resources(self) -> Collection[str]:
        """Return the resources that callers wait for."""
        return list(self._lines)

    def on_step(self, resource: str, step: Step, due: float) -> None:
        """Let the first caller of each limit act; each release of a permit is for another one."""
        line = self.line(resource)
        undecided = [caller for caller in line if caller.limit == 1 or caller.due > due]
        for caller in _firsts(undecided):
            # what one node alone says makes nobody look all the time
            earliest = caller.looked_at + LOOK_INTERVAL if step.why == FALLBACK else due
            caller.plan(step, max(due, earliest))

    def on_listening(self) -> None:
        """Let the first caller of each limit ask, once a second: a node may open often."""
        now = self._clock.now()
        for resource in self.resources():
            self.inbox.changed(resource)  # before, a release would have taken this process for dead
            for caller in _firsts(self.line(resource)):
                caller.plan(Step(LOOK), max(now, caller.looked_at + MAX_SPIN))


def _firsts(callers: Iterable[Caller]) -> list[Caller]:
    """Return the first caller of each limit."""
    by_limit: dict[int | Rate, Caller] = {}
    for caller in callers:
        by_limit.setdefault(caller.limit, caller)
    return list(by_limit.values())
