"""Threads and coroutines that wait for the keys of the storm's tasks, outside of tasks.

`python -m tests.integration.storm.callers threads` (or `coroutines`) goes on until it is killed. A
body here writes the same lines as a task's. It also writes each wait that found no lock: how long
that wait was, and how much of it the process was stopped or the machine stood still.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

from celery_redlock import LockLost, LockTaken, QuorumUnreachable
from tests.integration.storm.tasks import STEP, late, now, write

AT_ONCE = 4  # callers of a process
WAITS = (0.5, 2.0, 8.0)  # s
KEYS = ("a", "b", "c", "d")
BETWEEN = (0.0, 2.0)  # s
LONGEST = 0.5  # s that a body goes on
TICK = 0.05  # s


class Stalls:
    """Adds up the time in which no thread of this process ran: it was stopped, or had no CPU."""

    def __init__(self) -> None:
        self._seconds, self._looked_at = 0.0, now()

    @property
    def seconds(self) -> float:
        """Return the sum by now: the thread that asks may be the first one to go on."""
        return self._seconds + max(0.0, now() - self._looked_at - 2 * TICK)

    def watch(self) -> None:
        while True:
            time.sleep(TICK)
            self._seconds, self._looked_at = self.seconds, now()


stalls = Stalls()


class Call:
    """One wait for a lock and, if that is granted, its body."""

    def __init__(self) -> None:
        self.keys, self.wait = random.sample(KEYS, random.choice((1, 1, 2))), random.choice(WAITS)
        self.lock = late.lock_for(self.keys, 0.0, wait=self.wait)
        self._name = f"{random.getrandbits(64):x}"
        self._request = SimpleNamespace(task="storm.called", id=self._name, retries=0)
        self._since, self._stalled = now(), stalls.seconds

    def ended(self, error: BaseException) -> None:
        write("ended", now(), self._request, error=type(error).__name__, wait=self.wait,
              waited=now() - self._since, stalled=stalls.seconds - self._stalled,
              text=str(error)[:300])  # fmt: skip

    def step(self, what: str) -> None:
        """Write a step of the body. Raises LockLost instead if the lock may be lost."""
        at = now()
        self.lock.ensure()
        write(what, at, self._request, run=f"{os.getpid()}-{self._name}", keys=self.keys,
              stage="last", token=self.lock.fencing_token)  # fmt: skip

    def steps(self) -> list[str]:
        return ["begin", *["step"] * int(random.random() ** 3 * LONGEST / STEP), "end"]


def call() -> None:
    it = Call()
    try:
        with it.lock:
            for what in it.steps():
                it.step(what)
                time.sleep(STEP)
    except (LockTaken, QuorumUnreachable, LockLost) as error:
        it.ended(error)


async def call_async() -> None:
    """Do the same in a coroutine."""
    it = Call()
    try:
        async with it.lock:
            for what in it.steps():
                it.step(what)
                await asyncio.sleep(STEP)
    except (LockTaken, QuorumUnreachable, LockLost) as error:
        it.ended(error)


def in_a_thread() -> None:
    """Call again and again. Any other error ends the process, and is written."""
    while True:
        try:
            call()
        except BaseException as error:
            _end(error)
        time.sleep(random.uniform(*BETWEEN))


async def in_a_task() -> None:
    while True:
        try:
            await call_async()
        except BaseException as error:
            _end(error)
        await asyncio.sleep(random.uniform(*BETWEEN))


def _end(error: BaseException) -> None:
    request = SimpleNamespace(task="storm.called", id="", retries=0)
    write("broken", now(), request, error=repr(error)[:300])
    os._exit(1)


async def in_tasks() -> None:
    await asyncio.gather(*(in_a_task() for _ in range(AT_ONCE)))


def main(kind: str) -> None:
    threading.Thread(target=stalls.watch, daemon=True).start()
    if kind == "coroutines":
        asyncio.run(in_tasks())
        return
    threads: list[Any] = [threading.Thread(target=in_a_thread) for _ in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1])
