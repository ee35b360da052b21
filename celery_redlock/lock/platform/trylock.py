"""Mutual exclusion in which no caller waits for another."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from celery_redlock.lock.platform.threads import get_ident


class TryLock:
    """Mutual exclusion without waiting: one caller at a time runs its function, others are refused.

    With a mutex, a finalizer or a signal handler that interrupts the owner would deadlock. Here it
    is refused, and leaves its work to the owner.
    """

    __slots__ = ("_get_ident", "taken")

    def __init__(self, get_ident: Callable[[], int] = get_ident) -> None:
        self._get_ident = get_ident
        self.taken: dict[None, list[int]] = {}  # empty, or the owner's own list

    def run(self, work: Callable[..., object], *arguments: object) -> bool:
        """Call a function in the turn. If another caller has the turn, return False at once."""
        taken, mine = self.taken, [self._get_ident()]
        try:
            if taken.setdefault(None, mine) is not mine:  # atomic: only one caller takes the turn
                return False
            work(*arguments)
        finally:  # without a call, so that no asynchronous exception is raised here
            try:
                if taken[None] is mine:
                    del taken[None]
            except KeyError:  # an exception interrupted this before it took the turn
                pass
        return True

    @property
    def is_interrupted(self) -> bool:
        """Whether the caller runs in the owner's thread, and so interrupts the owner."""
        owner = self.taken.get(None)
        return owner is not None and owner[0] == self._get_ident()


class JobQueue:
    """Jobs in order, each done by the caller that has the turn.

    A caller that finds the turn taken queues its job and continues. The owner of the turn does
    queued jobs before it ends. So a finalizer or a signal handler may add a job during a job.
    jobs: what is left to do. wake: called if an exception interrupts a job, so that a waiting
    caller continues with the queue.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def reset_jobs(self, turn: TryLock) -> None:
        """Discard all jobs. turn: a new turn that is free."""
        self._turn = turn
        self.jobs: deque[Callable[[], None]] = deque()

    @property
    def is_interrupted(self) -> bool:
        """Whether the caller interrupts a job of its own thread."""
        return self._turn.is_interrupted

    def go_on(self) -> None:
        """Do the remaining jobs. An asynchronous exception may have interrupted their caller."""
        if self.jobs:
            self._do_all()

    def _do(self, job: Callable[[], None]) -> None:
        """Do a job now, or queue it for the owner of the turn."""
        self.jobs.append(job)
        self._do_all()

    def _do_all(self) -> None:
        try:
            while self.jobs and self._turn.run(self._work):
                pass  # again: a job may have been queued as the turn ended
        except BaseException:
            self._wake()  # a waiting caller continues with the jobs
            raise

    def _work(self) -> None:
        jobs = self.jobs
        while jobs:
            jobs[0]()
            jobs.popleft()  # last: an interrupted job is done again, and no job is lost
