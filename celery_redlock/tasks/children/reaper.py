"""Waits for the end of each child, and releases what a dead one held."""

from __future__ import annotations

import logging
import select
from collections import defaultdict
from collections.abc import Set
from contextlib import suppress
from typing import Any

from celery_redlock.errors import RedlockError
from celery_redlock.lock.client import session_of
from celery_redlock.lock.engine.releaser import OrphanedKey
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.model.acquisition import Acquisition
from celery_redlock.lock.model.keys import label_of
from celery_redlock.lock.model.options import CompletionMarker, LockOptions
from celery_redlock.lock.platform.greenlets import new_poll
from celery_redlock.lock.platform.threads import DeadlineTimer, start_thread
from celery_redlock.tasks.children.forks import Children, known_children
from celery_redlock.tasks.children.journal import CLAIMED, HELD, RELEASED, JournalEntry, JournalSlot
from celery_redlock.tasks.children.process import ChildProcess
from celery_redlock.tasks.per_app import redlock_of, settings_of
from celery_redlock.tasks.signals import tell_released

logger = logging.getLogger(__name__)


def watch_children(app: Any, pool: Any) -> None:
    """Release from now on what the children of this worker leave behind when they are killed.

    pool: of the worker, started; one that scales itself may begin with no process.
    """
    children = known_children()
    if children is None or children.is_watched:
        return
    counts = getattr(pool, "uses_semaphore", False)  # so it has said how many processes it has
    if counts and pool.num_processes and not children.slots:
        logger.warning(
            "the pool's processes are not forked: the lock of one that is killed ends with its ttl",
            extra={"event": "not_forked"},
        )
        return
    children.is_watched = True
    start_thread(ChildReaper(children, app).run)


def stop_watching(**_: Any) -> None:
    """End the watch after the pool's end.

    Source: celery.worker.worker sends worker_shutdown when the pool has stopped.
    """
    children = known_children()
    if children is not None and children.is_watched:
        children.is_watched = False
        children.bell.wake()


LOOK = 0.1  # s: between looks at a child where the system cannot tell of its end
PAUSE = 1.0  # s: after an error that should not be


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
