"""What a worker's main process knows of the children of its pool, and gives back for a dead one.

A child that is killed releases nothing, and its parent cannot compute what it held: tokens are
fresh, and keys may come from a callable. So each child writes what it is about to claim into
memory that it has shared with its parent since before the fork, ahead of the first byte of the
request. The parent watches the child's process itself, for Celery's own hooks fire before a killed
child is gone, or seconds later. When it is gone, it reads what stands there and releases it by its
tokens.

Nothing of this happens in pools that do not fork. A child that is spawned, not forked, shares no
memory: its locks end with their ttl.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import select
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from typing import Any

from celery.concurrency import get_implementation
from celery.signals import worker_init, worker_shutdown

from celery_redlock.errors import RedlockError
from celery_redlock.lock.client import Redlock, session_of
from celery_redlock.lock.engine.releaser import OrphanedKey
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.model.acquisition import Acquisition
from celery_redlock.lock.model.key_lease import KeyLease
from celery_redlock.lock.model.keys import label_of
from celery_redlock.lock.model.options import CompletionMarker, LockOptions
from celery_redlock.lock.platform.greenlets import new_poll
from celery_redlock.lock.platform.threads import DeadlineTimer, Waker, new_mutex, start_thread
from celery_redlock.tasks.runtime import redlock_of, settings_of
from celery_redlock.tasks.signals import SignalObserver, tell_released

logger = logging.getLogger(__name__)

HEADER, LINE, LINES = 64, 1024, 255  # bytes, bytes, how many locks one child can write down
SIZE = HEADER + LINE * LINES  # of which only what is written ever takes memory
UNWATCHED = 1000  # slots of forks that failed, or of children that have not said a word yet
LOOK = 0.1  # s: between looks at a child where the system cannot tell of its end
PATIENCE = 1.0  # s: for which a fork waits until users' handlers have heard of a release
PAUSE = 1.0  # s: after an error that should not be

FREE, CLAIMED, HELD, RELEASED = range(4)  # the first byte of a line
BORN = 1  # the first byte of a slot
TOLD, TOLD_SIZE = 16, 8  # where in a slot the parent names a run, and in how many bytes


_SEAL = struct.Struct("<II")  # checksum and length of what follows
_HEAD = struct.Struct("<8sQdd?IIII")
_BIRTH = struct.Struct("<IQ")  # pid, start time


@dataclass(frozen=True)
class JournalEntry:
    """One line: what a child claims of one key.

    state: CLAIMED, HELD, or RELEASED where some node may not have heard of the release yet.
    session: `Session.identity`. holding: `Acquisition.number`. asked_at: monotonic s. ttl: s.
    is_asked_for: not so where it is of the run's own lock, beside a permit. owner: the task's
    name. value: token and label.
    """

    state: int
    session: bytes
    holding: int
    asked_at: float
    ttl: float
    is_asked_for: bool
    permit: int
    resource: str
    owner: str
    value: str

    @property
    def run(self) -> str:
        """The name of the run that claims it; behind that its label has the worker's."""
        return label_of(self.value).rpartition(" ")[0]


def encode_entry(session: Session, acquisition: Acquisition, key_lease: KeyLease) -> bytes:
    """Return what a child writes of a claim, without its state."""
    key, options = key_lease.key, acquisition.options
    resource = key.resource.encode("utf-8", "surrogatepass")
    owner = getattr(options.sender, "name", "").encode("utf-8", "surrogatepass")
    value = key_lease.value.encode("utf-8", "surrogatepass")
    head = _HEAD.pack(
        session.identity, acquisition.number, session.clock.now(), options.ttl,
        key.resource in options.resources, key.permit, len(resource), len(owner), len(value),
    )  # fmt: skip
    body = head + resource + owner + value
    return _SEAL.pack(zlib.crc32(body), len(body)) + body


def parse_entry(state: int, line: bytes) -> JournalEntry | None:
    """Return what stands on a line; None where it is not whole: a dying child writes anything."""
    checksum, length = _SEAL.unpack_from(line)
    body = line[_SEAL.size : _SEAL.size + length]
    if state not in (CLAIMED, HELD, RELEASED) or len(body) != length or length < _HEAD.size:
        return None
    if zlib.crc32(body) != checksum:
        return None
    *numbers, resource_size, owner_size, value_size = _HEAD.unpack_from(body)
    texts, at = [], _HEAD.size
    for size in (resource_size, owner_size, value_size):
        texts.append(body[at : at + size].decode("utf-8", "surrogatepass"))
        at += size
    return JournalEntry(state, *numbers, *texts)


def _digest(run: str) -> bytes:
    text = run.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=TOLD_SIZE).digest()


class JournalSlot:
    """The memory that one child shares with its parent, and with nobody else.

    A line is whole or free at any moment: its first byte is written last, and cleared before the
    line is used again. memory: what it is kept in, SIZE zeros.
    """

    def __init__(self, memory: Any = None) -> None:
        self._memory = mmap.mmap(-1, SIZE) if memory is None else memory
        self._free = list(range(HEADER + LINE * (LINES - 1), 0, -LINE))  # the first line last

    def sign(self, pid: int, started: int) -> None:
        """Say whose it is: the child's first word. started: as of `started_at`."""
        self._memory[1 : 1 + _BIRTH.size] = _BIRTH.pack(pid, started)
        self._memory[0] = BORN

    @property
    def child(self) -> tuple[int, int] | None:
        """Pid and start time of the child; None where it has not said them yet."""
        if self._memory[0] != BORN:
            return None
        pid, started = _BIRTH.unpack_from(self._memory, 1)
        return pid, started

    def tell_end(self, run: str) -> None:
        """Say, in the parent, that a run is at its end, whatever its child still sees of that."""
        self._memory[TOLD : TOLD + TOLD_SIZE] = _digest(run)

    def is_ended(self, run: str) -> bool:
        """Tell whether the parent has said that."""
        return bytes(self._memory[TOLD : TOLD + TOLD_SIZE]) == _digest(run)

    def write(self, line: bytes) -> int:
        """Write what `encode_entry` gives, and return where; 0 where there is no room for it."""
        if len(line) >= LINE or not self._free:
            return 0
        at = self._free.pop()
        self._memory[at + 1 : at + 1 + len(line)] = line
        self._memory[at] = CLAIMED
        return at

    def mark(self, at: int, state: int) -> None:
        """Change the state of what has been written."""
        self._memory[at] = state

    def clear(self, at: int) -> None:
        """Free a line."""
        self._memory[at] = FREE
        self._free.append(at)

    def read(self) -> Iterator[JournalEntry]:
        """Yield what stands there."""
        for at in range(HEADER, SIZE, LINE):
            state = self._memory[at]
            if state != FREE:
                entry = parse_entry(state, self._memory[at + 1 : at + LINE])
                if entry is not None:
                    yield entry

    def close(self) -> None:
        """Give the memory back, as far as this process goes."""
        self._memory.close()


class JournalingObserver(SignalObserver):
    """Writes down what a child claims, in its slot, until no node has anything of it any more."""

    def __init__(self, slot: JournalSlot) -> None:
        self._slot, self._pid = slot, os.getpid()
        self._lines: dict[KeyLease, int] = {}
        self._told = False

    def claiming(self, redlock: Any, acquisition: Acquisition, key_lease: KeyLease) -> None:
        """Write it down, before its grant leaves."""
        if os.getpid() != self._pid:  # forked past Python, so that nobody told us
            return
        at = self._slot.write(encode_entry(redlock.session, acquisition, key_lease))
        if at:
            self._lines[key_lease] = at
        elif not self._told:
            self._told = True
            logger.warning(
                "the parent process is not told of %r: its name is too long, or too many locks are "
                "held at once; if this process is killed, it ends with its ttl",
                key_lease.key.resource,
                extra={"event": "parent_not_told", "resource": key_lease.key.resource},
            )

    def acquired(self, redlock: Any, acquisition: Acquisition) -> None:
        """Mark it as held, and tell."""
        self._mark(acquisition, HELD)
        super().acquired(redlock, acquisition)

    def released(self, redlock: Any, acquisition: Acquisition) -> None:
        """Mark it as given back, and tell."""
        self._mark(acquisition, RELEASED)
        super().released(redlock, acquisition)

    def _mark(self, acquisition: Acquisition, state: int) -> None:
        for key_lease in acquisition.key_leases:
            at = self._lines.get(key_lease)
            if at is not None:
                self._slot.mark(at, state)

    def settled(self, key_lease: KeyLease) -> None:
        """Forget it: every node has been told."""
        at = self._lines.pop(key_lease, None)
        if at is not None:
            self._slot.clear(at)


class ParentObserver(SignalObserver):
    """Tells what a process hears that forks; working: taken meanwhile, as of `Children`.

    What it holds itself it tells as any process does, and has no threads that do.
    """

    def __init__(self, working: Any) -> None:
        self._working = working

    def node_failed(self, redlock: Any, node: str, cause: str) -> None:
        """Send node_failed, and let no fork come in between."""
        with self._working:
            super().node_failed(redlock, node, cause)

    def node_recovered(self, redlock: Any, node: str) -> None:
        """Send node_recovered, and let no fork come in between."""
        with self._working:
            super().node_recovered(redlock, node)


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


@worker_init.connect(weak=False)
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


def watch_children(app: Any, pool: Any) -> None:
    """Release from now on what the children of this worker leave behind when they are killed.

    pool: of the worker, started; one that scales itself may begin with no process.
    """
    if _children is None or _children.is_watched:
        return
    counts = getattr(pool, "uses_semaphore", False)  # so it has said how many processes it has
    if counts and pool.num_processes and not _children.slots:
        logger.warning(
            "the pool's processes are not forked: the lock of one that is killed ends with its ttl",
            extra={"event": "not_forked"},
        )
        return
    _children.is_watched = True
    start_thread(ChildReaper(_children, app).run)


@worker_shutdown.connect(weak=False)
def _watch_no_longer(**_: Any) -> None:
    """End the watch after the pool's end.

    Source: celery.worker.worker sends worker_shutdown when the pool has stopped.
    """
    if _children is not None and _children.is_watched:
        _children.is_watched = False
        _children.bell.wake()


class ChildReaper:
    """Waits for the end of each child, in a thread of its own, and gives back what it held."""

    def __init__(self, children: Children, app: Any) -> None:
        self._children, self._app = children, app

    def run(self) -> None:
        """Return when the worker has shut down."""
        while self._children.is_watched:
            try:
                ready = self._wait()
                with self._children.working:
                    self._look(ready)
            except BaseException:
                if not self._children.is_watched:
                    return  # a worker that restarts closes all descriptors before it runs anew
                # a thread that ended here would leave every dead child's locks to their ttl
                text = "watching the pool's processes failed; trying again in a moment"
                logger.exception(text, extra={"event": "watch_failed"})
                DeadlineTimer().sleep(PAUSE)

    def _wait(self) -> set[int]:
        """Return which descriptors are readable, after a child's first word or its end."""
        poll, milliseconds = new_poll(True), None
        poll.register(self._children.bell.descriptor, select.POLLIN)
        for process in self._children.processes.values():
            if process.descriptor >= 0:
                poll.register(process.descriptor, select.POLLIN)
            else:
                milliseconds = LOOK * 1000
        return {descriptor for descriptor, _ in poll.poll(milliseconds)}

    def _look(self, ready: set[int]) -> None:
        """Begin to watch those that are new, release what the dead held, then tell of it."""
        bell, slots, processes = (
            self._children.bell, self._children.slots, self._children.processes
        )  # fmt: skip
        if bell.descriptor in ready:
            bell.clear()
        for slot in list(slots):
            child = slot.child
            if child is not None and slot not in processes:
                processes[slot] = ChildProcess(*child)
        released = []
        for slot, process in list(processes.items()):
            if process.is_gone(ready):
                released += self.reap(slot, process)
        for session, acquisition in released:
            tell_released(session.client(), acquisition, by="parent")

    def reap(self, slot: JournalSlot, process: ChildProcess) -> list[tuple[Session, Acquisition]]:
        """Release what a dead child held; returns what is to be told of."""
        self._children.slots.remove(slot)
        del self._children.processes[slot]
        process.close()
        by_holding: dict[tuple[bytes, int], list[JournalEntry]] = defaultdict(list)
        for entry in sorted(slot.read(), key=lambda entry: entry.asked_at):
            by_holding[entry.session, entry.holding].append(entry)
        runs = {left[0].run for left in by_holding.values()}
        ended = {run for run in runs if slot.is_ended(run)}
        slot.close()
        return [
            held
            for left in by_holding.values()
            if (held := self._release(left, process.pid, ended)) is not None
        ]

    def _release(
        self, left: list[JournalEntry], pid: int, ended: Set[str]
    ) -> tuple[Session, Acquisition] | None:
        """Release what one acquisition claimed, on all nodes; returns it where it was held.

        ended: names of runs that are done, so that no other delivery of them is to run; one that
        never had its lock is not, for its message may be on its way to run later.
        """
        first, states = left[0], {entry.state for entry in left}
        is_done = first.run in ended and states != {CLAIMED}
        session = self._session_of(first.session)
        if session is None and states == {RELEASED}:
            return None
        if session is None:
            told = {"event": "child_exited", "pid": pid, "resource": first.resource}
            logger.warning(
                "process %d is gone; %r ends with its ttl", pid, first.resource, extra=told
            )
            return None
        options = LockOptions(
            resources=tuple(dict.fromkeys(e.resource for e in left if e.is_asked_for)),
            ttl=first.ttl,
            wait=0.0,
            renew=False,
            max_hold=None,
            label=label_of(first.value),
            sender=self._app.tasks.get(first.owner),
            marker=CompletionMarker(first.run, settings_of(self._app).done_ttl)
            if is_done
            else None,
        )
        orphans = [OrphanedKey(entry.resource, entry.permit, entry.value) for entry in left]
        acquisition = session.release_orphans(options, orphans, first.asked_at)
        told = {"event": "child_exited", "pid": pid, "resource": acquisition.resource}
        if HELD in states:
            text = "process %d is gone: released %r for it"
            logger.warning(text, pid, acquisition.resource, extra=told)
            return session, acquisition
        if CLAIMED in states:  # refused, mostly: a node may not have heard that it gave up
            text = "process %d is gone: gave up %r for it"
            logger.info(text, pid, acquisition.resource, extra=told)
        return None

    def _session_of(self, identity: bytes) -> Session | None:
        with suppress(RedlockError):
            session = redlock_of(self._app).session
            if session.identity == identity:
                return session
        return session_of(identity)


class ChildProcess:
    """A child's process, of which the system tells the end where it can.

    descriptor: readable once it is gone, also while nobody has waited for it; -1 where there is
    none, and one has to look. started: as of `started_at`, for pids are used again.
    """

    def __init__(self, pid: int, started: int) -> None:
        self.pid, self._started = pid, started
        self.descriptor, self._gone = -1, False
        try:
            self.descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._gone = True
        except (AttributeError, OSError):  # not this system, an older kernel, or not allowed
            return
        self._gone = self._is_anothers()

    def is_gone(self, ready: set[int]) -> bool:
        """Tell whether it runs no more. ready: the descriptors that are readable."""
        if self._gone or self.descriptor >= 0:
            return self._gone or self.descriptor in ready
        return has_ended(self.pid) or self._is_anothers()

    def _is_anothers(self) -> bool:
        """Tell whether the pid is another process's by now; no, where nobody can say."""
        now = started_at(self.pid)  # not with all descriptors in use
        return now not in (0, self._started) and self._started != 0

    def close(self) -> None:
        """Watch it no more."""
        descriptor, self.descriptor = self.descriptor, -1  # first: a fork may copy this moment
        if descriptor >= 0:
            os.close(descriptor)


def has_ended(pid: int) -> bool:
    """Tell whether a child is gone, and leave it to its pool to wait for it."""
    try:
        if not hasattr(os, "waitid"):  # macOS before Python 3.13; gone once the pool has waited
            os.kill(pid, 0)
            return False
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except (ProcessLookupError, ChildProcessError):
        return True


def started_at(pid: int) -> int:
    """Return when a process was started, in clock ticks since boot; 0 where nobody says.

    Source: proc(5), /proc/<pid>/stat, field 22; the name before it may hold anything.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])
