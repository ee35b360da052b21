"""Mutual exclusion in which no caller waits for another."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from celery_redlock.lock.platform.threads import get_ident, pause

PAUSE, PAUSES = 0.0001, 1000  # seconds, and how many, to wait until another thread's turn ends


class TryLock:
    """Mutual exclusion without waiting: one caller at a time runs its function, others are refused.

    With a mutex, a finalizer or a signal handler that interrupts the owner would deadlock. Here it
    is refused, and leaves its work to the owner. The owner has the turn.
    """

    __slots__ = ("_get_ident", "_pause", "taken")

    def __init__(
        self, get_ident: Callable[[], int] = get_ident, pause: Callable[[float], None] = pause
    ) -> None:
        self._get_ident, self._pause = get_ident, pause
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

    def run_within(self, tries: int, work: Callable[..., object], *arguments: object) -> bool:
        """As `run`, with short pauses between tries; return False if the lock stays taken."""
        for number in range(tries):
            if number:
                self._pause(PAUSE)
            if self.run(work, *arguments):
                return True
            if self.is_interrupted:  # its turn ends only after this call
                return False
        return False

    @property
    def is_interrupted(self) -> bool:
        """Whether the caller runs in the owner's thread, and so interrupts the owner."""
        owner = self.taken.get(None)
        return owner is not None and owner[0] == self._get_ident()


class JobQueue:
    """Jobs in order, each done by the caller that has the lock.

    A caller that finds the lock taken queues its job and continues. The owner of the lock does
    queued jobs before it ends. So a finalizer or a signal handler may add a job during a job.
    pending: what is left to do. wake: called if an exception interrupts a job, so that a waiting
    caller continues with the queue.
    """

    __slots__ = ("_wake", "lock", "pending")

    def __init__(self, lock: TryLock, wake: Callable[[], None]) -> None:
        self.lock, self._wake = lock, wake
        self.pending: deque[Callable[[], None]] = deque()

    def do(self, job: Callable[[], None]) -> None:
        """Do a job now, or queue it for the owner of the lock."""
        self.pending.append(job)
        self.go_on()

    def go_on(self) -> None:
        """Do the remaining jobs. An asynchronous exception may have interrupted their caller."""
        try:
            while self.pending and self.lock.run(self._do_all):
                pass  # again: a job may have been queued as the owner ended
        except BaseException:
            self._wake()  # a waiting caller continues with the jobs
            raise

    def _do_all(self) -> None:
        jobs = self.pending
        while jobs:
            jobs[0]()
            jobs.popleft()  # last: an interrupted job is done again, and no job is lost
