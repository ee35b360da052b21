"""What each owner (a thread, greenlet or asyncio task) holds, so that it can take it again."""

from __future__ import annotations

import asyncio
import os
from asyncio.events import _get_running_loop

from celery_redlock.lock.model.acquisition import Acquisition, Owner
from celery_redlock.lock.model.options import LockOptions
from celery_redlock.lock.platform.clock import Platform


class Flow:
    """One thread or greenlet. held: what it holds, by asyncio task (None outside) and resource."""

    def __init__(self) -> None:
        self.held: dict[tuple[object, str], Acquisition] = {}


class Reentrancy:
    """What the owners of one process hold of one `Redlock`."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self.forget()

    def forget(self) -> None:
        """Start anew in a forked child, which holds nothing of its parent's."""
        self._flows = self._platform.new_local(Flow)

    def current_owner(self) -> Owner:
        """Return the caller."""
        task = None if _get_running_loop() is None else asyncio.current_task()
        return os.getpid(), self._flows.get(in_task=task is not None), task

    def held_by(self, owner: Owner, options: LockOptions, now: float) -> dict[str, Acquisition]:
        """Return what an owner holds already of what is asked for, by resource.

        Raises LockLost if that is lost, and SettingsError if it promises less than is asked.
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
        """Let the owner of an acquisition take it again."""
        _, flow, task = acquisition.owner
        for key in acquisition.keys:
            flow.held[task, key.resource] = acquisition

    def exit(self, acquisition: Acquisition) -> None:
        """Let its owner not take it again; twice does no harm."""
        _, flow, task = acquisition.owner
        held = flow.held
        for key in acquisition.keys:
            name = task, key.resource
            if held.get(name) is acquisition:
                held.pop(name, None)
