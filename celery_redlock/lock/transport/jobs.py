"""Jobs that are done one at a time by whoever comes, while nobody waits for another."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from celery_redlock.lock.platform.threads import Turn


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
        """Do what is left to do; an exception from outside may have cut who was at it."""
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
            self._wake()  # whoever waits goes on with it
            raise

    def _work(self) -> None:
        jobs = self.jobs
        while jobs:
            jobs[0]()
            jobs.popleft()  # last: a job that is cut is done again, and none is lost
