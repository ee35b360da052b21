"""What a process knows of the children that it forks; the hooks of a fork."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from threading import get_ident
from typing import Any

from celery.concurrency import get_implementation

from celery_redlock.lock.client import Redlock
from celery_redlock.lock.platform.threads import Waker, new_mutex
from celery_redlock.tasks.children.journal import HELD, JournalEntry, JournalSlot
from celery_redlock.tasks.children.observers import JournalingObserver, ParentObserver
from celery_redlock.tasks.children.process import ChildProcess, started_at
from celery_redlock.tasks.signals import SignalObserver

logger = logging.getLogger(__name__)


UNWATCHED = 1000  # slots of forks that failed, or of children that have not said a word yet
PATIENCE = 1.0  # s: for which a fork waits until users' handlers have heard of a release


class Children:
    """What a process knows of the children that it forks.

    bell: each child rings it once. processes: those that are watched. working: taken while a
    thread tells of a release or of a node, so that no fork copies a mutex that users' handlers
    hold, or the counters of the metrics, or a signal of Celery's.
    """

    def __init__(self) -> None:
        self.bell, self.working = Waker(), new_mutex()
        self.slots: list[JournalSlot] = []
        self.processes: dict[JournalSlot, ChildProcess] = {}
        self.is_watched = False
        # by the thread that forks: the slot, and whether it has taken `working`
        self._forks: dict[int, tuple[JournalSlot | None, bool]] = {}

    def before_fork(self) -> None:
        """Make a slot for the child that is about to be forked."""
        paused, made = self.working.acquire(True, PATIENCE), None
        unwatched = [slot for slot in self.slots if slot not in self.processes]
        if len(unwatched) >= UNWATCHED:
            self.slots.remove(unwatched[0])
        try:
            made = JournalSlot()
        except (OSError, ValueError) as error:
            told = {"event": "no_shared_memory"}
            logger.warning("no memory to share with a child of the pool: %s", error, extra=told)
        else:
            self.slots.append(made)
        self._forks[get_ident()] = made, paused

    def tell_end(self, pid: int, run: str) -> None:
        """Say to a child that a run is at its end, and to whoever buries it."""
        for slot in list(self.slots):
            with suppress(ValueError):  # closed meanwhile: the child is gone, and buried
                if (slot.child or (0, 0))[0] == pid:
                    slot.tell_end(run)

    def after_fork(self) -> None:
        """Go on, in the parent."""
        _, paused = self._forks.pop(get_ident(), (None, False))
        if paused:
            self.working.release()

    def become_child(self) -> JournalSlot | None:
        """Keep of all this, in the child, its own slot alone; returns that."""
        # not that of another thread, which is about to fork, too
        own, _ = self._forks.get(get_ident(), (None, False))
        for process in self.processes.values():
            process.close()
        for slot in self.slots:
            if slot is not own:
                slot.close()
        if own is not None:
            pid = os.getpid()
            own.sign(pid, started_at(pid))
            self.bell.wake()
        return own


_children: Children | None = None  # in the main process of a worker whose pool forks
_own: JournalSlot | None = None  # in a child of it


def known_children() -> Children | None:
    """Return what this process knows of its children; None if its pool does not fork."""
    return _children


def tell_end(pid: int, run: str) -> None:
    """Say, in the main process, that Celery ended a run and has let go of its message."""
    if _children is not None:
        _children.tell_end(pid, run)


def held_by_children() -> list[JournalEntry]:
    """Return what the children of this process hold by now, each lock once."""
    found: dict[str, JournalEntry] = {}
    for slot in list(_children.slots) if _children is not None else ():
        with suppress(ValueError):  # closed meanwhile: the child is gone
            found |= {entry.value: entry for entry in slot.read() if entry.state == HELD}
    return [entry for entry in found.values() if entry.is_asked_for]


def was_ended(run: str) -> bool:
    """Tell, in a child, whether that was said of a run: then it is done, however it is cut."""
    return _own is not None and _own.is_ended(run)


def _before_fork() -> None:
    if _children is not None:
        _children.before_fork()


def _after_fork_in_parent() -> None:
    if _children is not None:
        _children.after_fork()


def _after_fork_in_child() -> None:
    global _children, _own
    before, _children = _children, None
    _own = None if before is None else before.become_child()
    if before is not None:
        Redlock.observer = SignalObserver() if _own is None else JournalingObserver(_own)
    elif isinstance(
        Redlock.observer, JournalingObserver
    ):  # a child's child, of which nobody watches the end
        Redlock.observer = SignalObserver()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)


def expect_children(sender: Any, **_: Any) -> Children | None:
    """Be ready before the pool is made, if it may fork; returns what is known of its children.

    Source: celery.worker.worker sends worker_init before it resolves the pool's name.
    """
    global _children
    if forks_children(sender) and _children is None:
        _children = Children()
        Redlock.observer = ParentObserver(_children.working)
    return _children


def forks_children(worker: Any) -> bool:
    """Return whether a worker's pool may fork, also before the pool is made.

    Celery's own pools fork only if they count their processes. Any other pool may fork, unless it
    is one of greenlets: its class comes from `worker_pool` or CELERY_CUSTOM_WORKER_POOL.
    Source: celery.concurrency; BasePool has `uses_semaphore` and `is_green`.
    """
    pool = get_implementation(worker.pool_cls)
    is_celerys = pool.__module__.startswith("celery.concurrency.")
    return bool(pool.uses_semaphore or not (is_celerys or pool.is_green))
