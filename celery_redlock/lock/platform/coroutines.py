"""Runs blocking calls of a coroutine in threads, and its pauses in the event loop.

A try to acquire waits for nodes, so it would block the event loop. It is short, and a waiting
coroutine holds no thread, so a few threads serve any number of coroutines and no waiter starves a
holder. A release waits for nothing and runs in the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import queue
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from celery_redlock.lock.platform.clock import Platform
from celery_redlock.lock.platform.threads import original

# of one `Redlock`
MIN_THREADS = 2
MAX_THREADS = 32
# seconds: if fewer than one call ends in this time, threads mostly wait for nodes
SLOW_STEP = 0.005
THREAD_IDLE_LIMIT = 10.0  # seconds that an idle thread is kept
T = TypeVar("T")


class ThreadPool:
    """The threads of one `Redlock` that run steps for coroutines. Idle threads end.

    Two threads are enough for fast nodes. More threads would compete with the event loop for the
    interpreter's lock (GIL), so the pool grows only while steps are slow.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._clock = platform.clock
        self.forget()

    def forget(self) -> None:
        """Reset in a forked child: the threads and their steps stay with the parent."""
        self._mutex = self._platform.new_mutex()
        self._steps: Any = original("queue", "SimpleQueue")()
        self._closed = False
        self.count = self.unfinished = 0  # threads, and steps that are queued or running

    def add(self, step: WorkItem[Any]) -> None:
        self._steps.put(step)
        with self._mutex:
            self.unfinished += 1
        self._grow(MIN_THREADS)

    def _grow(self, max_threads: int) -> None:
        """Start one more thread, up to `max_threads`, if there is a step for it."""
        with self._mutex:
            if self.count >= min(max_threads, self.unfinished):
                return
            self.count += 1
            try:
                self._platform.start_thread(self._run)
            except BaseException as error:  # the system has no thread left
                self.count -= 1
                if not self.count or not isinstance(error, Exception):
                    raise  # else the threads that run do the steps

    def close(self) -> None:
        """End the threads after the steps that are already queued."""
        self._closed = True
        for _ in range(self.count):
            self._steps.put(None)  # wakes one thread

    def _run(self) -> None:
        try:
            self._run_steps()
        except BaseException:  # the end of a step failed: Python reports it, and the thread ends
            with self._mutex:
                self.count -= 1
            self._grow(MIN_THREADS)  # otherwise the queued steps wait for ever
            raise

    def _run_steps(self) -> None:
        while True:
            try:
                step = self._steps.get(True, 0.001 if self._closed else THREAD_IDLE_LIMIT)
            except queue.Empty:
                with self._mutex:
                    if self._steps.empty():  # otherwise a step was queued just now
                        self.count -= 1
                        return
                continue
            if step is None:
                with self._mutex:
                    if not self._steps.empty():
                        continue
                    self.count -= 1
                    if self.count:  # this thread may have taken what was to wake another one
                        self._steps.put(None)
                return
            began = self._clock.now()
            try:
                step.run()
            finally:
                del step  # an idle thread must not keep a Lock alive: an abandoned one is released
                with self._mutex:
                    self.unfinished -= 1
            if self._clock.now() - began > SLOW_STEP * self.count:
                self._grow(MAX_THREADS)


class WorkItem(Generic[T]):
    """One call that runs in a thread, with the contextvars of the coroutine that made the item.

    tell: called in that thread after the call.
    """

    def __init__(self, call: Callable[[], T], notify: Callable[[], object]) -> None:
        self._call = call
        self._context = contextvars.copy_context()
        self._notify = notify
        self._winner: dict[None, str] = {}  # whether `run` or `skip` came first
        self._followups: deque[Callable[[], object]] = deque()
        self._outcome: deque[T] = deque()
        self._errors: deque[BaseException] = deque()
        self.is_done = False

    def run(self) -> None:
        """Make the call, unless `skip` came first."""
        winner = self._winner.setdefault(None, "run")
        if winner != "run":
            return
        try:
            self._outcome.append(self._context.run(self._call))
        except BaseException as error:  # raised again in the coroutine
            self._errors.append(error)
        self.is_done = True
        try:
            self._run_followup()
        finally:  # otherwise the coroutine waits for ever
            self._notify()

    def skip(self) -> bool:
        """Prevent the call. Return False if it is running or over."""
        return self._winner.setdefault(None, "skip") == "skip"

    def then(self, followup: Callable[[], object]) -> None:
        """Run `followup` after the call: now, or in the thread if the call is still running."""
        self._followups.append(followup)
        # the thread sets `is_done` before it reads the queue, so one of the two runs `followup`
        if self.is_done or self.skip():
            self._run_followup()

    def _run_followup(self) -> None:
        try:
            # atomic: either the thread or the coroutine gets it
            followup = self._followups.popleft()
        except IndexError:
            return
        followup()

    def result(self) -> T:
        """Return the result of the call or raise its error. May be called once."""
        if self._errors:
            raise self._errors.pop()  # not kept: the traceback would refer to this item
        return self._outcome.pop()


class StepRunner:
    """The steps of one coroutine, one after another.

    A coroutine that is cancelled during a step waits until the step ends: at most one node timeout
    for each key. If it is cancelled again or destroyed, the thread runs the function of `then`.
    """

    def __init__(self, threads: ThreadPool) -> None:
        self._threads = threads
        self._step: WorkItem[Any] | None = None

    async def do(self, call: Callable[[], T]) -> T:
        finished = asyncio.get_running_loop().create_future()
        step = WorkItem(call, functools.partial(_settle_soon, finished))
        self._step = step
        self._threads.add(step)
        try:
            await asyncio.shield(finished)
        except asyncio.CancelledError:
            if not step.skip():
                await asyncio.shield(finished)
            raise
        return step.result()

    def then(self, followup: Callable[[], object]) -> None:
        """As `WorkItem.then`, after the last step."""
        if self._step is None:
            followup()
        else:
            self._step.then(followup)


class Wakeable(Protocol):
    """What a coroutine waits for. decided: set before `wake` is called, in any thread."""

    decided: bool
    wake: Callable[[], None] | None


async def rest(waiter: Wakeable, seconds: float) -> None:
    """Wait until the waiter is woken, for at most the given seconds."""
    loop = asyncio.get_running_loop()
    finished = loop.create_future()
    timer = loop.call_later(seconds, _settle, finished)
    waiter.wake = functools.partial(_settle_soon, finished)
    try:
        if not waiter.decided:  # read after `wake` is set, so no wake-up is lost
            await finished
    finally:
        waiter.wake = None
        timer.cancel()


def _settle_soon(future: asyncio.Future[None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, so no coroutine waits in it
        future.get_loop().call_soon_threadsafe(_settle, future)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
