"""The children that a worker's main process forks: the fork hooks, their exit, and their release.

A thread waits for the exit of each child, and releases the locks that the child still held. Not
here: what a child notes of its locks (`journal.py`).
"""

from __future__ import annotations

import logging
import os
import select
from collections import defaultdict
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from threading import get_ident
from typing import Any

from celery_redlock import anchors
from celery_redlock.compatibility import find
from celery_redlock.errors import RedlockError
from celery_redlock.lock.client import session_of
from celery_redlock.lock.engine.events import Events
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.model.acquisition import Acquisition
from celery_redlock.lock.model.keys import label_of
from celery_redlock.lock.model.options import CompletionMarker, LockOptions
from celery_redlock.lock.platform.forks import reset_in_children
from celery_redlock.lock.platform.threads import (
    DeadlineTimer,
    Waker,
    new_mutex,
    new_poll,
    start_thread,
)
from celery_redlock.tasks.children.journal import CLAIMED, HELD, RELEASED, JournalEntry, JournalSlot
from celery_redlock.tasks.per_app import redlock_of, settings_of

logger = logging.getLogger(__name__)

# the fallback is for a worker that has resolved its pool class already
_get_implementation = find("celery.concurrency:get_implementation", lambda pool: pool)

MAX_UNWATCHED = 1000  # slots of forks that failed, or of children that have not signed theirs yet
FORK_WAIT = 1.0  # seconds that a fork waits for receivers of signals to return
POLL_INTERVAL = 0.1  # seconds between checks of a process that has no descriptor to wait for
RETRY_AFTER = 1.0  # seconds after an unexpected error
NOT_RELEASED = "process %d exited: its lock %r is not released and expires with its ttl"


class ChildProcess:
    """A child process whose exit is to be detected.

    descriptor: a pidfd, readable once the process has exited, also before its parent has waited for
    it; -1 if the system has none, and `has_exited` must be polled. start_time: as of
    `start_time_of`, because pids are reused.
    """

    def __init__(self, pid: int, start_time: int) -> None:
        self.pid = pid
        self._start_time = start_time
        self.descriptor = -1
        self._has_exited = False
        try:
            self.descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._has_exited = True
        except (AttributeError, OSError):  # not this system, an older kernel, or not allowed
            return
        self._has_exited = self._pid_is_reused()

    def has_exited(self, ready: set[int]) -> bool:
        """Return whether the process has exited. ready: the descriptors that are readable."""
        if self._has_exited or self.descriptor >= 0:
            return self._has_exited or self.descriptor in ready
        return pid_has_exited(self.pid) or self._pid_is_reused()

    def _pid_is_reused(self) -> bool:
        """Return whether the pid is another process's by now; False if a start time is unknown."""
        start_time = start_time_of(self.pid)  # 0 if this process may open no more files
        return start_time not in (0, self._start_time) and self._start_time != 0

    def close(self) -> None:
        descriptor = self.descriptor
        self.descriptor = -1  # before it is closed: a fork may copy this moment
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
        self.waker = Waker()
        self.sending = new_mutex()
        self.slots: list[JournalSlot] = []
        self.watched: dict[JournalSlot, ChildProcess] = {}
        self.has_reaper = False
        # by the id of a thread that forks: its child's slot, or None without memory for it, and
        # whether the thread has the mutex
        self._forks_by_thread: dict[int, tuple[JournalSlot | None, bool]] = {}

    def before_fork(self) -> None:
        has_mutex = self.sending.acquire(True, FORK_WAIT)
        new_slot = None
        unwatched = [slot for slot in self.slots if slot not in self.watched]
        if len(unwatched) >= MAX_UNWATCHED:
            self.slots.remove(unwatched[0])
        try:
            new_slot = JournalSlot()
        except (OSError, ValueError) as error:
            text = "no memory to share with a child of the pool: %s"
            logger.warning(text, error, extra={"event": "no_shared_memory"})
        else:
            self.slots.append(new_slot)
        self._forks_by_thread[get_ident()] = new_slot, has_mutex

    def after_fork(self) -> None:
        """Let signals be sent again, in the parent."""
        _, has_mutex = self._forks_by_thread.pop(get_ident(), (None, False))
        if has_mutex:
            self.sending.release()

    def become_child(self) -> JournalSlot | None:
        """In the child, close all but its own slot, sign that slot, and return it."""
        # not the slot of another thread that forks as well
        own_slot, _ = self._forks_by_thread.get(get_ident(), (None, False))
        for process in self.watched.values():
            process.close()
        for slot in self.slots:
            if slot is not own_slot:
                slot.close()
        if own_slot is not None:
            pid = os.getpid()
            own_slot.sign(pid, start_time_of(pid))
            self.waker.wake()
        return own_slot


class ForkingProcess:
    """The role of the current process among forks; the hooks change it in each child.

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
        parent_children = self.children
        self.children = None
        self.slot = None
        if parent_children is not None:
            self.slot = parent_children.become_child()
        Events.journal = self.slot  # None also in a child's child, which has no reaper
        Events.sending = nullcontext()


this_process = ForkingProcess()
os.register_at_fork(
    before=this_process.before_fork, after_in_parent=this_process.after_fork_in_parent
)
reset_in_children(this_process.after_fork_in_child)


def _slots() -> list[JournalSlot]:
    children = this_process.children
    return [] if children is None else children.slots.copy()


def announce_end(pid: int, run_id: str) -> None:
    """Note in a child's slot, for the child and the reaper, that Celery ended a run."""
    for slot in _slots():
        with suppress(ValueError):  # closed meanwhile: the child has exited and was reaped
            if (slot.child or (0, 0))[0] == pid:
                slot.announce_end(run_id)


def is_end_announced(run_id: str) -> bool:
    """Return, in a child, whether the main process ended this run, so that it counts as done."""
    slot = this_process.slot
    return slot is not None and slot.is_end_announced(run_id)


def held_by_children() -> list[JournalEntry]:
    """Return an entry for each key that the children of this process hold now as requested."""
    entries_by_value: dict[str, JournalEntry] = {}
    for slot in _slots():
        with suppress(ValueError):  # closed meanwhile: the child has exited
            entries_by_value |= {entry.value: entry for entry in slot.read() if entry.state == HELD}
    return [entry for entry in entries_by_value.values() if entry.is_requested]


def held_by_worker(session: Session) -> set[tuple[str, str]]:
    """Return resource and value of each key that this process and its children hold now."""
    held = {(entry.resource, entry.value) for entry in held_by_children()}
    for acquisition in session.watchdog.watched:
        if acquisition.held(session.clock.now()):
            held |= {(lease.key.resource, lease.value) for lease in acquisition.leases}
    return held


def may_hold(session: Session, resource: str, label: str) -> bool:
    """Return False if a run of this worker holds no lock, and can take none without a quorum."""
    failing = [node for node in session.nodes.all if node.error is not None]
    if len(session.nodes.all) - len(failing) >= session.nodes.quorum:
        return True  # it takes the lock by the time that anybody reads of it
    return (resource, label) in [(name, label_of(value)) for name, value in held_by_worker(session)]


def expect_children(sender: Any, **_: Any) -> Children | None:
    """Prepare for forks before the pool is made, if the pool may fork; return `Children` for it."""
    # Source: celery.worker.worker sends worker_init before it resolves the pool's name
    if forks_children(sender) and this_process.children is None:
        this_process.children = Children()
        Events.sending = this_process.children.sending
    return this_process.children


def forks_children(worker: Any) -> bool:
    """Return whether a worker's pool may fork, also before the pool is made.

    Celery's own pools fork only if they count their processes. Any other pool may fork, unless it
    is one of greenlets. Source: celery.concurrency; BasePool has `uses_semaphore` and `is_green`.
    """
    pool = _get_implementation(worker.pool_cls)
    is_celery_pool = pool.__module__.startswith("celery.concurrency.")
    return bool(pool.uses_semaphore or not (is_celery_pool or pool.is_green))


def watch_children(app: Any, pool: Any) -> None:
    """Start the reaper for the children of a worker whose pool has started."""
    children = this_process.children
    if children is None or children.has_reaper:
        return
    counts_processes = getattr(
        pool, "uses_semaphore", False
    )  # only such a pool says how many it has
    # a pool that scales itself may begin without a process
    if counts_processes and pool.num_processes and not children.slots:
        logger.warning(
            "the pool does not fork its processes: the lock of a killed one expires with its ttl",
            extra={"event": "not_forked"},
        )
        return
    children.has_reaper = True
    start_thread(ChildReaper(children, app).run)


def stop_watching(**_: Any) -> None:
    """End the reaper after the pool's end."""
    # Source: celery.worker.worker sends worker_shutdown when the pool has stopped
    children = this_process.children
    if children is not None and children.has_reaper:
        children.has_reaper = False
        children.waker.wake()


class ChildReaper:
    """Waits for the exit of each child, in a thread of its own, and releases the child's locks."""

    def __init__(self, children: Children, app: Any) -> None:
        self._children = children
        self._app = app

    def run(self) -> None:
        """Return when the worker has shut down."""
        while self._children.has_reaper:
            try:
                ready = self._wait()
                with self._children.sending:
                    self._reap_exited(ready)
            except BaseException:
                if not self._children.has_reaper:
                    return  # a worker that restarts closes all descriptors before it runs anew
                # without this thread the lock of each killed child would stay for its ttl
                text = "watching the pool's processes failed; trying again in a moment. See %s"
                logger.exception(text, anchors.UNEXPECTED, extra={"event": "watch_failed"})
                DeadlineTimer().sleep(RETRY_AFTER)

    def _wait(self) -> set[int]:
        """Wait until a child signs its slot or exits; return the readable descriptors."""
        poll = new_poll(True)
        milliseconds = None
        poll.register(self._children.waker.descriptor, select.POLLIN)
        for process in self._children.watched.values():
            if process.descriptor >= 0:
                poll.register(process.descriptor, select.POLLIN)
            else:
                milliseconds = POLL_INTERVAL * 1000
        return {descriptor for descriptor, _ in poll.poll(milliseconds)}

    def _reap_exited(self, ready: set[int]) -> None:
        """Watch the new children, release the locks of those that exited, then send signals."""
        children = self._children
        waker = self._children.waker
        if waker.descriptor in ready:
            waker.clear()
        for slot in list(children.slots):
            child = slot.child
            if child is not None and slot not in children.watched:
                children.watched[slot] = ChildProcess(*child)
        released = []
        for slot, process in list(children.watched.items()):
            if process.has_exited(ready):
                released += self.reap(slot, process)
        for session, acquisition in released:  # last: a receiver may take its time
            session.events.released(acquisition, by="parent")

    def reap(self, slot: JournalSlot, process: ChildProcess) -> list[tuple[Session, Acquisition]]:
        """Release what an exited child claimed; return the locks that it held."""
        self._children.slots.remove(slot)
        del self._children.watched[slot]
        process.close()
        by_acquisition = defaultdict[tuple[bytes, int], list[JournalEntry]](list)
        results = []
        with closing(slot):
            for entry in sorted(slot.read(), key=lambda entry: entry.requested_at):
                by_acquisition[entry.session, entry.acquisition].append(entry)
            for entries in by_acquisition.values():
                is_ended = slot.is_end_announced(entries[0].run_id)
                try:
                    results.append(self._release(entries, process.pid, is_ended))
                except Exception:  # the other locks, and the other children, are still to do
                    resource = entries[0].resource
                    extra = {"event": "child_exited", "pid": process.pid, "resource": resource}
                    logger.warning(NOT_RELEASED, process.pid, resource, extra=extra, exc_info=True)
        return [result for result in results if result is not None]

    def _release(
        self, entries: list[JournalEntry], pid: int, is_ended: bool
    ) -> tuple[Session, Acquisition] | None:
        """Release one acquisition on all nodes; return it if the child held it.

        entries: by time. is_ended: the parent announced that Celery ended the run.
        """
        first = entries[0]
        states = {entry.state for entry in entries}
        session = self._session_of(first.session)
        extra = {"event": "child_exited", "pid": pid, "resource": first.resource}
        if session is None:  # of nodes that this process does not know
            if states != {RELEASED}:
                logger.warning(NOT_RELEASED, pid, first.resource, extra=extra)
            return None
        marker = None
        # a run that never had its lock is not done: its message may be on its way to run later
        if is_ended and states != {CLAIMED}:
            marker = CompletionMarker(first.run_id, settings_of(self._app).done_ttl)
        options = LockOptions(  # as far as the release needs them
            resources=tuple(
                dict.fromkeys(entry.resource for entry in entries if entry.is_requested)
            ),
            ttl=first.ttl,
            wait=0.0,
            renew=False,
            max_hold=None,
            label=label_of(first.value),
            sender=self._app.tasks.get(first.task_name),
            marker=marker,
        )
        keys = [(entry.resource, entry.limit, entry.value) for entry in entries]
        acquisition = session.release_orphans(options, keys, first.requested_at)
        extra["resource"] = acquisition.resource
        if HELD in states:
            text = "process %d exited: released its lock %r"
            logger.warning(text, pid, acquisition.resource, extra=extra)
            return session, acquisition
        if CLAIMED in states:  # mostly a refused request, whose rollback a node may have missed
            text = "process %d exited: withdrew its request for lock %r"
            logger.info(text, pid, acquisition.resource, extra=extra)
        return None

    def _session_of(self, identity: bytes) -> Session | None:
        with suppress(RedlockError):
            session = redlock_of(self._app).session
            if session.identity == identity:
                return session
        return session_of(identity)
