"""What each owner (a thread, greenlet or asyncio task) holds, for nested acquires."""

from __future__ import annotations

import asyncio
import os
from asyncio.events import _get_running_loop

from celery_redlock.lock.model.acquisition import Acquisition, Owner
from celery_redlock.lock.model.options import LockOptions
from celery_redlock.lock.platform.clock import Platform


class Flow:
    """One thread or greenlet. held: acquisitions, by asyncio task (None outside) and resource."""

    def __init__(self) -> None:
        self.held: dict[tuple[object, str], Acquisition] = {}


class Reentrancy:
    """The acquisitions that the owners of one process hold by one `Redlock`."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self.forget()

    def forget(self) -> None:
        """Reset in a forked child, which holds no lock of its parent."""
        self._flows = self._platform.new_local(Flow)

    def current_owner(self) -> Owner:
        """Return the calling owner."""
        task = None if _get_running_loop() is None else asyncio.current_task()
        return os.getpid(), self._flows.get(in_task=task is not None), task

    def held_by(self, owner: Owner, options: LockOptions, now: float) -> dict[str, Acquisition]:
        """Return the acquisitions of an owner that cover resources in `options`, by resource.

        Raises LockLost if one is lost, and SettingsError if one promises less than `options`.
        """
        _, flow, task = owner
        found = {}
        for resource in options.resources:
            outer = flow.held.get((task, resource))
            if outer is not None:
                outer.check_covers(resource, options, now)
                found[resource] = outer
        return found

    def enter(self, acquisition: Acquisition) -> None:
        """Let the owner of an acquisition acquire its resources again."""
        _, flow, task = acquisition.owner
        for key in acquisition.keys:
            flow.held[task, key.resource] = acquisition

    def exit(self, acquisition: Acquisition) -> None:
        """Undo `enter`. A second call has no effect."""
        _, flow, task = acquisition.owner
        held = flow.held
        for key in acquisition.keys:
            name = task, key.resource
            if held.get(name) is acquisition:
                held.pop(name, None)
