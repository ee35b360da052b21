"""What `test_reentry` runs in a process of its own, which may stand still: `python -m` with URLs.

Finalizers and signal handlers acquire and release while their own thread does so.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import os
import random
import signal
import sys
import time
from typing import Any

from redis import Redis

from celery_redlock import Lock, LockTaken, NotAcquired, QuorumUnreachable, Redlock
from tests.clients import client_of
from tests.contract.points import files_below_the_engine, files_of_the_engine, interrupt

FILES = (*files_below_the_engine(), *files_of_the_engine())
TURNS = 400
NODE_TIMEOUT = 2.0  # s
LONG = 600.0  # s: of leases that end by a release alone, and for longer than any test waits
GONE_BY = 60.0  # s: it is not the end of a lease
DEADLINE = 200.0  # s after which the process stands still; it needs some
TICK = 0.005  # s from a signal's handler to the next signal, at most


def lock_of(made: Redlock, name: str, wait: float = 0.0) -> Lock:
    return made.lock(name, ttl=LONG, wait=wait)


class Keeps:
    """In a cycle, so that the collector ends it: releases its lock then, and takes another."""

    def __init__(self, lock: Lock, other: Lock) -> None:
        self.lock, self.other, self.itself = lock, other, self

    def __del__(self) -> None:
        self.lock.release()
        take_and_give(self.other)


def take_and_give(lock: Lock) -> bool:
    """Acquire and release; False if no quorum voted in time."""
    try:
        with lock:
            return True
    except QuorumUnreachable:
        return False


def release_at_every_point(made: Redlock) -> int:
    """Return at how many points of an acquire and a release another lock was released."""
    for at in itertools.count(1):
        inner, outer = lock_of(made, f"inner{at}").acquire(), lock_of(made, "outer")

        def pair(lock: Lock = outer) -> None:
            lock.acquire()
            lock.release()

        if not interrupt(pair, at, inner.release, FILES, "acquire"):
            inner.release()
            return at - 1
    return 0


def release_itself_at_every_point(made: Redlock, rival: Redlock) -> int:
    """Return at how many points of a refused acquire its own lock, held before, was released."""
    own = lock_of(made, "own").acquire()
    own.release()

    def refused() -> None:
        with contextlib.suppress(NotAcquired):
            own.acquire()

    with lock_of(rival, "own", wait=60):
        for at in itertools.count(1):
            if not interrupt(refused, at, own.release, files_of_the_engine(), "acquire"):
                return at - 1
    return 0


def acquire_at_every_point(made: Redlock) -> int:
    """Return at how many points of an acquire and a release another lock could be acquired."""
    got = 0
    for at in itertools.count(1):
        outer = lock_of(made, "outer")
        inner: list[bool] = []

        def pair(lock: Lock = outer) -> None:
            lock.acquire()
            lock.release()

        def act(at: int = at, inner: list[bool] = inner) -> None:
            inner.append(take_and_give(lock_of(made, f"inner{at}")))

        if not interrupt(pair, at, act, FILES, "acquire"):
            return got
        got += sum(inner)
    return got


def at_random(made: Redlock, witness: Redis) -> int:
    """Take turns under a barrage of signals and collections; returns how many signals came.

    Another process does the same: it meets this one in "shared" alone.
    """
    numbers, held, struck = itertools.count(), list[Lock](), itertools.count()
    own = os.getpid()
    turns = 0

    def strike(number: int, frame: Any) -> None:
        next(struck)
        if held:
            held.pop().release()
        with contextlib.suppress(NotAcquired):
            held.append(lock_of(made, f"handler{own}-{next(numbers)}").acquire())
        if turns < TURNS:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0, TICK))

    signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, TICK)
    gc.set_threshold(20)
    while turns < TURNS:
        with contextlib.suppress(NotAcquired):
            number = next(numbers)
            kept = lock_of(made, f"kept{own}-{number}").acquire()
            Keeps(kept, lock_of(made, f"finalizer{own}-{number}"))
            with lock_of(made, "shared", wait=0.05):
                assert witness.set("inside", 1, nx=True), "two are inside"
                assert witness.delete("inside")
            turns += 1
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    gc.set_threshold(700)
    gc.collect()
    for lock in held:
        lock.release()
    return next(struck)


def main(how: str, *urls: str) -> None:
    """Do it, and see every lock go that is not held any more."""
    clients = [client_of(url) for url in urls]
    with Redlock(urls, node_timeout=NODE_TIMEOUT, max_ttl=LONG) as made:
        with contextlib.suppress(LockTaken):
            lock_of(made, "first", wait=60).acquire().release()
        if how == "random":
            done = at_random(made, clients[0])
        elif how == "itself":
            with Redlock(urls, node_timeout=NODE_TIMEOUT, max_ttl=LONG) as rival:
                done = release_itself_at_every_point(made, rival)
        else:
            done = {"release": release_at_every_point, "acquire": acquire_at_every_point}[how](made)
        # the other process of a barrage may go on for long
        names = f"{os.getpid()}-" if how == "random" else ""
        end = time.monotonic() + GONE_BY
        while any(left := [client.keys(f"{{redlock}}:lock:*{names}*") for client in clients]):
            assert time.monotonic() < end, left
            time.sleep(0.05)
    print(done)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(DEADLINE, exit=True)
    main(*sys.argv[1:])
