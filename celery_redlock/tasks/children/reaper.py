"""Waits for the exit of each child, and releases the locks that it still held.

Not here: the journal that it reads (`journal.py`), and the children's processes (`forks.py`).
"""

from __future__ import annotations

import logging
import select
from collections import defaultdict
from contextlib import suppress
from typing import Any

from celery_redlock import anchors
from celery_redlock.errors import RedlockError
from celery_redlock.lock.client import session_of
from celery_redlock.lock.engine.releaser import OrphanedKey
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.model.acquisition import Acquisition
from celery_redlock.lock.model.keys import label_of
from celery_redlock.lock.model.options import CompletionMarker, LockOptions
from celery_redlock.lock.platform.threads import DeadlineTimer, new_poll, start_thread
from celery_redlock.tasks.children.forks import ChildProcess, Children, this_process
from celery_redlock.tasks.children.journal import CLAIMED, HELD, RELEASED, JournalEntry, JournalSlot
from celery_redlock.tasks.per_app import redlock_of, settings_of

logger = logging.getLogger(__name__)

POLL_INTERVAL = 0.1  # seconds between looks at a process that has no descriptor to wait for
RETRY_AFTER = 1.0  # seconds, after an error that no part of ours should raise


def watch_children(app: Any, pool: Any) -> None:
    """Start the reaper for the children of this worker.

    pool: the worker's, started; a pool that scales itself may begin without a process.
    """
    children = this_process.children
    if children is None or children.has_reaper:
        return
    counts = getattr(pool, "uses_semaphore", False)  # only such a pool says how many it has
    if counts and pool.num_processes and not children.slots:
        logger.warning(
            "the pool does not fork its processes: the lock of a killed one expires with its ttl",
            extra={"event": "not_forked"},
        )
        return
    children.has_reaper = True
    start_thread(ChildReaper(children, app).run)


def stop_watching(**_: Any) -> None:
    """End the reaper after the pool's end.

    Source: celery.worker.worker sends worker_shutdown when the pool has stopped.
    """
    children = this_process.children
    if children is not None and children.has_reaper:
        children.has_reaper = False
        children.waker.wake()


class ChildReaper:
    """Waits for the exit of each child, in a thread of its own, and releases the child's locks."""

    def __init__(self, children: Children, app: Any) -> None:
        self._children, self._app = children, app

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
        poll, milliseconds = new_poll(True), None
        poll.register(self._children.waker.descriptor, select.POLLIN)
        for process in self._children.watched.values():
            if process.descriptor >= 0:
                poll.register(process.descriptor, select.POLLIN)
            else:
                milliseconds = POLL_INTERVAL * 1000
        return {descriptor for descriptor, _ in poll.poll(milliseconds)}

    def _reap_exited(self, ready: set[int]) -> None:
        """Watch the new children, release the locks of those that exited, then send signals."""
        children, waker = self._children, self._children.waker
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
        for entry in sorted(slot.read(), key=lambda entry: entry.requested_at):
            by_acquisition[entry.session, entry.acquisition].append(entry)
        ended = {
            acquisition
            for acquisition, entries in by_acquisition.items()
            if slot.is_end_announced(entries[0].run_id)
        }
        slot.close()
        released = [
            self._release(entries, process.pid, acquisition in ended)
            for acquisition, entries in by_acquisition.items()
        ]
        return [held for held in released if held is not None]

    def _release(
        self, entries: list[JournalEntry], pid: int, is_ended: bool
    ) -> tuple[Session, Acquisition] | None:
        """Release one acquisition on all nodes; return it if the child held it.

        entries: of its keys that the child had not settled when it exited, in the order of their
        requests. is_ended: the parent announced that Celery ended the run.
        """
        first, states = entries[0], {entry.state for entry in entries}
        session = self._session_of(first.session)
        extra = {"event": "child_exited", "pid": pid, "resource": first.resource}
        if session is None:  # of nodes that this process does not know
            if states != {RELEASED}:
                text = "process %d exited: its lock %r is not released and expires with its ttl"
                logger.warning(text, pid, first.resource, extra=extra)
            return None
        marker = None
        # a run that never had its lock is not done: its message may be on its way to run later
        if is_ended and states != {CLAIMED}:
            marker = CompletionMarker(first.run_id, settings_of(self._app).done_ttl)
        options = LockOptions(  # as far as the release needs them
            resources=tuple(dict.fromkeys(one.resource for one in entries if one.is_requested)),
            ttl=first.ttl,
            wait=0.0,
            renew=False,
            max_hold=None,
            label=label_of(first.value),
            sender=self._app.tasks.get(first.task_name),
            marker=marker,
        )
        keys = [OrphanedKey(one.resource, one.limit, one.value) for one in entries]
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
