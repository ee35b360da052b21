"""The hooks of a fork, what a process knows of the children that it forks, and their exit.

Not here: what a child notes of its locks (`journal.py`), and their release (`reaper.py`).
"""

from __future__ import annotations

import logging
import os
from contextlib import nullcontext, suppress
from pathlib import Path
from threading import get_ident
from typing import Any

from celery.concurrency import get_implementation

from celery_redlock.lock.engine.events import Events
from celery_redlock.lock.platform.threads import Waker, new_mutex
from celery_redlock.tasks.children.journal import HELD, JournalEntry, JournalSlot

logger = logging.getLogger(__name__)

MAX_UNWATCHED = 1000  # slots of forks that failed, or of children that have not signed theirs yet
FORK_WAIT = 1.0  # seconds that a fork waits for receivers of signals to return


class ChildProcess:
    """A child process whose exit is to be detected.

    descriptor: a pidfd, readable once the process has exited, also before its parent has waited for
    it; -1 if the system has none, and `has_exited` must be polled. start_time: as of
    `start_time_of`, because pids are reused.
    """

    def __init__(self, pid: int, start_time: int) -> None:
        self.pid, self._start_time = pid, start_time
        self.descriptor, self._exited = -1, False
        try:
            self.descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._exited = True
        except (AttributeError, OSError):  # not this system, an older kernel, or not allowed
            return
        self._exited = self._pid_is_reused()

    def has_exited(self, ready: set[int]) -> bool:
        """Return whether the process has exited. ready: the descriptors that are readable."""
        if self._exited or self.descriptor >= 0:
            return self._exited or self.descriptor in ready
        return pid_has_exited(self.pid) or self._pid_is_reused()

    def _pid_is_reused(self) -> bool:
        """Return whether the pid is another process's by now; False if a start time is unknown."""
        now = start_time_of(self.pid)  # 0 if this process may open no more files
        return now not in (0, self._start_time) and self._start_time != 0

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1  # first: a fork may copy this moment
        if descriptor >= 0:
            os.close(descriptor)


def pid_has_exited(pid: int) -> bool:
    """Return whether a child has exited, and leave its exit status to the pool."""
    try:
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            os.kill(pid, 0)  # the pid is there until the pool has waited for it
            return False
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except (ProcessLookupError, ChildProcessError):
        return True


def start_time_of(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot; 0 if it is unknown.

    Source: proc(5), /proc/<pid>/stat, field 22; the name before it may contain any character.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])


class Children:
    """The children that a process forks: their journals, and their processes.

    waker: each child wakes it once. watched: the processes whose exit is awaited. sending: a mutex,
    held while the reaper or a watchdog sends signals. So no fork copies a mutex that users'
    receivers hold, counters of the metrics halfway through a change, or the lock of a signal.
    """

    def __init__(self) -> None:
        self.waker, self.sending = Waker(), new_mutex()
        self.slots: list[JournalSlot] = []
        self.watched: dict[JournalSlot, ChildProcess] = {}
        self.has_reaper = False
        # by the id of a thread that forks: its child's slot, or None without memory for it, and
        # whether the thread has the mutex
        self._forks: dict[int, tuple[JournalSlot | None, bool]] = {}

    def before_fork(self) -> None:
        has_mutex, made = self.sending.acquire(True, FORK_WAIT), None
        unwatched = [slot for slot in self.slots if slot not in self.watched]
        if len(unwatched) >= MAX_UNWATCHED:
            self.slots.remove(unwatched[0])
        try:
            made = JournalSlot()
        except (OSError, ValueError) as error:
            text = "no memory to share with a child of the pool: %s"
            logger.warning(text, error, extra={"event": "no_shared_memory"})
        else:
            self.slots.append(made)
        self._forks[get_ident()] = made, has_mutex

    def after_fork(self) -> None:
        """Let signals be sent again, in the parent."""
        _, has_mutex = self._forks.pop(get_ident(), (None, False))
        if has_mutex:
            self.sending.release()

    def become_child(self) -> JournalSlot | None:
        """In the child, close all but its own slot, sign that slot, and return it."""
        # not the slot of another thread that forks as well
        own, _ = self._forks.get(get_ident(), (None, False))
        for process in self.watched.values():
            process.close()
        for slot in self.slots:
            if slot is not own:
                slot.close()
        if own is not None:
            pid = os.getpid()
            own.sign(pid, start_time_of(pid))
            self.waker.wake()
        return own


class ForkingProcess:
    """What the current process is among forks; replaced by the hooks in each child.

    children: in the main process of a worker whose pool forks. slot: in a child of such a process.
    """

    def __init__(self) -> None:
        self.children: Children | None = None
        self.slot: JournalSlot | None = None

    def before_fork(self) -> None:
        if self.children is not None:
            self.children.before_fork()

    def after_fork_in_parent(self) -> None:
        if self.children is not None:
            self.children.after_fork()

    def after_fork_in_child(self) -> None:
        """Journal this child's locks from now on, unless its parent has no reaper."""
        parents, self.children, self.slot = self.children, None, None
        if parents is not None:
            self.slot = parents.become_child()
        Events.journal = self.slot  # None also in a child's child, which has no reaper
        Events.sending = nullcontext()


this_process = ForkingProcess()
os.register_at_fork(
    before=this_process.before_fork,
    after_in_parent=this_process.after_fork_in_parent,
    after_in_child=this_process.after_fork_in_child,
)


def _slots() -> list[JournalSlot]:
    children = this_process.children
    return [] if children is None else children.slots.copy()


def announce_end(pid: int, run_id: str) -> None:
    """Note in a child's slot that Celery ended a run and acknowledged its message.

    The main process does so, for the child and for the reaper.
    """
    for slot in _slots():
        with suppress(ValueError):  # closed meanwhile: the child has exited and was reaped
            if (slot.child or (0, 0))[0] == pid:
                slot.announce_end(run_id)


def is_end_announced(run_id: str) -> bool:
    """Return, in a child, whether the main process ended this run: it is done, however it exits."""
    slot = this_process.slot
    return slot is not None and slot.is_end_announced(run_id)


def held_by_children() -> list[JournalEntry]:
    """Return an entry for each key that the children of this process hold now.

    Without the runs' own keys, which are locked beside a permit.
    """
    found: dict[str, JournalEntry] = {}
    for slot in _slots():
        with suppress(ValueError):  # closed meanwhile: the child has exited
            found |= {entry.value: entry for entry in slot.read() if entry.state == HELD}
    return [entry for entry in found.values() if entry.is_requested]


def expect_children(sender: Any, **_: Any) -> Children | None:
    """Prepare for forks before the pool is made, if the pool may fork; return `Children` for it.

    Source: celery.worker.worker sends worker_init before it resolves the pool's name.
    """
    if forks_children(sender) and this_process.children is None:
        this_process.children = Children()
        Events.sending = this_process.children.sending
    return this_process.children


def forks_children(worker: Any) -> bool:
    """Return whether a worker's pool may fork, also before the pool is made.

    Celery's own pools fork only if they count their processes. Any other pool may fork, unless it
    is one of greenlets: its class comes from `worker_pool` or CELERY_CUSTOM_WORKER_POOL.
    Source: celery.concurrency; BasePool has `uses_semaphore` and `is_green`.
    """
    pool = get_implementation(worker.pool_cls)
    is_celerys = pool.__module__.startswith("celery.concurrency.")
    return bool(pool.uses_semaphore or not (is_celerys or pool.is_green))
