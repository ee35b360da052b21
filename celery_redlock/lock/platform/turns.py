"""Mutual exclusion in which no caller waits for another."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from celery_redlock.lock.platform.threads import get_ident


class Turn:
    """Mutual exclusion without waiting: one caller at a time runs its function, others are refused.

    With a mutex, a finalizer or a signal handler that interrupts the owner would wait for itself.
    Here it is refused, and leaves its work to the owner.
    """

    __slots__ = ("_get_ident", "_looked_at", "_looks", "_seen", "taken")

    def __init__(self, get_ident: Callable[[], int] = get_ident) -> None:
        self._get_ident = get_ident
        self.taken: dict[None, list[int]] = {}  # empty, or the list that the owner made
        self._seen: list[int] | None = None
        self._looks, self._looked_at = 0, 0.0

    def run(self, work: Callable[..., object], *arguments: object) -> bool:
        """Call a function in the turn; return False, without a call, if another has the turn."""
        taken, mine = self.taken, [self._get_ident()]
        try:
            if taken.setdefault(None, mine) is not mine:  # atomic: one caller is first
                return False
            work(*arguments)
        finally:  # without a call: no exception from outside strikes here
            try:
                if taken[None] is mine:
                    del taken[None]
            except KeyError:  # it was cut before it took the turn
                pass
        return True

    @property
    def is_interrupted(self) -> bool:
        """Whether the caller interrupts the owner of the turn, and so keeps it from continuing."""
        owner = self.taken.get(None)
        return owner is not None and owner[0] == self._get_ident()

    def is_stuck(self, now: float, seconds: float, looks: int) -> bool:
        """Return whether one owner had the turn at `looks` looks, each `seconds` apart.

        now: monotonic seconds. Counts looks, too: a stopped process has used up only one of them.
        """
        owner = self.taken.get(None)
        if owner is None or owner is not self._seen:
            self._seen, self._looks, self._looked_at = owner, 0, now
        elif now - self._looked_at >= seconds:
            self._looks, self._looked_at = self._looks + 1, now
        return self._looks >= looks


class SerialJobs:
    """Jobs in order, each done by the caller that has the turn.

    A caller that finds the turn taken leaves its job behind and goes on: the other one looks for
    more at its end. So a finalizer or a signal handler may add a job in the middle of another.
    jobs: what is left to do. wake: called if an exception cuts a job, so that someone goes on.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def reset_jobs(self, turn: Turn) -> None:
        """Start anew without jobs; turn: one that nobody has."""
        self._turn = turn
        self.jobs: deque[Callable[[], None]] = deque()

    @property
    def is_interrupted(self) -> bool:
        """Whether the caller interrupts its own thread as that changes the connection."""
        return self._turn.is_interrupted

    def go_on(self) -> None:
        """Do the remaining jobs; an exception from outside may have interrupted their caller."""
        if self.jobs:
            self._do_all()

    def _do(self, job: Callable[[], None]) -> None:
        """Do a job now, or leave it to the one that does another: it looks for more at its end."""
        self.jobs.append(job)
        self._do_all()

    def _do_all(self) -> None:
        try:
            while self.jobs and self._turn.run(self._work):
                pass  # once more: a job may have come as the turn ended
        except BaseException:
            self._wake()  # a waiting caller continues the job
            raise

    def _work(self) -> None:
        jobs = self.jobs
        while jobs:
            jobs[0]()
            jobs.popleft()  # last: a job that is cut is done again, and none is lost
