"""`async with` on real nodes: an asyncio task is the owner, and its loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import random
import statistics
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest

from celery_redlock import (
    Lock,
    LockLost,
    LockTaken,
    QuorumUnreachable,
    Redlock,
    RedlockError,
    SettingsError,
)
from celery_redlock.lock.engine.callers import MAX_SPIN
from celery_redlock.lock.platform.clock import Platform, SystemClock
from celery_redlock.lock.platform.coroutines import MIN_THREADS, ThreadPool, WorkItem
from celery_redlock.lock.platform.threads import start_thread
from celery_redlock.signals import lock_acquired
from tests.conftest import (
    FREED,
    NODE_TIMEOUT,
    PATIENCE,
    TTL,
    Nodes,
    eventually,
    hearing,
    is_free,
    receiving,
    see_freed,
    see_quorum,
    see_renewal,
    settle,
)
from tests.contract.conftest import in_child

WAIT = 60.0  # s
TICK = 0.01  # s
CUTS = 30

T = TypeVar("T")
now = SystemClock().now


def run(body: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine function in a loop of its own; one that stands still fails."""
    return asyncio.run(asyncio.wait_for(body(), 4 * WAIT))


async def come_true(condition: Callable[[], object]) -> None:
    await asyncio.to_thread(eventually, condition)


@pytest.fixture(autouse=True)
def none_abandoned(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail where only the watchdog gave a lock back, a while later, since nobody keeps it."""
    yield
    events = [getattr(record, "event", "") for record in caplog.get_records("call")]
    assert "lock_abandoned" not in events


def see_nothing_left(redlock: Redlock, nodes: Nodes, resource: str = "r") -> None:
    """Return when a lock is free, and nobody holds it, waits for it, or is on the way to it."""
    see_freed(nodes, resource)
    session = redlock.session
    eventually(lambda: not session.watchdog.watched)
    assert not session.callers.resources()


def rests(redlock: Redlock) -> bool:
    """Return whether somebody waits for `r`, has no step before it, and asks and tries nothing."""
    line = redlock.session.callers.line("r")
    is_idle = all(caller.step is None for caller in line)
    return bool(line) and is_idle and not redlock.session.threads.unfinished


async def hold(lock: Lock, seconds: float = 0.0) -> float:
    """Return the monotonic s at which it was got."""
    async with lock:
        got = now()
        await asyncio.sleep(seconds)
    return got


class TestOneTask:
    def test_holds_it_for_the_body_and_no_longer(self, redlock: Redlock, nodes: Nodes) -> None:
        async def body() -> None:
            lock = redlock.lock("r")
            async with lock as entered:
                assert entered is lock
                assert lock.held
                assert not is_free(nodes, "r")
            assert not lock.held
            assert await lock.acquire_async() is lock
            await lock.release_async()
            await lock.release_async()  # of what is released already: nothing

        run(body)
        see_nothing_left(redlock, nodes)

    @pytest.mark.parametrize("ways", ["aa", "as", "sa", "aas", "asa"])
    def test_takes_it_again_with_and_without_await_and_frees_it_after_the_last(
        self, redlock: Redlock, nodes: Nodes, ways: str
    ) -> None:
        async def body() -> None:
            locks = [redlock.lock("r") for _ in ways]
            for lock, way in zip(locks, ways, strict=True):
                if way == "a":
                    await lock.acquire_async()
                else:
                    lock.acquire()
            settle(redlock)
            for lock, way in zip(locks, reversed(ways), strict=True):
                assert lock.held
                assert not is_free(nodes, "r")
                if way == "a":
                    await lock.release_async()
                else:
                    lock.release()

        run(body)
        see_nothing_left(redlock, nodes)

    def test_takes_the_same_object_again(self, redlock: Redlock, nodes: Nodes) -> None:
        async def body() -> None:
            lock = redlock.lock("r")
            async with lock:
                async with lock:
                    pass
                assert lock.held

        run(body)
        see_nothing_left(redlock, nodes)

    def test_takes_several_permits_and_fencing_tokens(self, redlock: Redlock) -> None:
        async def body() -> None:
            async with redlock.lock(["a", "b"], fencing=True) as both:
                assert both.fencing_token
                async with redlock.lock(["a", "b", "c"], fencing=True) as three:
                    assert three.fencing_token >= both.fencing_token
            async with redlock.lock("p", limit=2):
                assert await asyncio.create_task(hold(redlock.lock("p", limit=2)))

        run(body)

    def test_has_it_renewed(self, brisk_redlock: Redlock) -> None:
        async def body() -> None:
            async with brisk_redlock.lock("r", ttl=TTL) as lock:
                await asyncio.to_thread(see_renewal, lock)
                lock.ensure()

        run(body)

    def test_has_its_contextvars_where_its_lock_is_told_of(self, nodes: Nodes) -> None:
        request = contextvars.ContextVar("request", default="")
        told = []

        def note(sender: object, event: object) -> None:
            told.append((request.get(), threading.current_thread() is threading.main_thread()))

        async def body() -> None:
            request.set("of the task")
            await hold(made.lock("r"))

        urls = [node.url for node in nodes]
        with Redlock(urls, node_timeout=NODE_TIMEOUT) as made, receiving(lock_acquired, note):
            run(body)
        assert told == [("of the task", False)]


class TestTwoTasks:
    def test_of_one_thread_exclude_each_other(self, redlock: Redlock) -> None:
        inside, most = 0, 0

        async def turn() -> None:
            nonlocal inside, most
            async with redlock.lock("r", wait=WAIT):
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(TICK)
                inside -= 1

        async def body() -> None:
            await asyncio.gather(*(turn() for _ in range(12)))

        run(body)
        assert most == 1

    def test_and_one_without_patience_is_told_who_holds_it(self, redlock: Redlock) -> None:
        async def body() -> None:
            async with redlock.lock("r"):
                with pytest.raises(LockTaken, match="pid"):
                    await asyncio.create_task(hold(redlock.lock("r")))
                with pytest.raises(LockTaken):
                    await asyncio.create_task(hold(redlock.lock("r", wait=0.2)))

        run(body)

    def test_need_a_lock_object_each(self, redlock: Redlock, nodes: Nodes) -> None:
        async def body() -> None:
            async with redlock.lock("r") as lock:
                for other in (lock.acquire_async, lock.release_async):
                    with pytest.raises(RedlockError, match="another thread, greenlet or task"):
                        await asyncio.create_task(other())
                assert lock.held
            await asyncio.create_task(hold(lock))  # free, it may be another's

        run(body)
        see_nothing_left(redlock, nodes)

    def test_that_wait_need_no_thread(self, redlock: Redlock) -> None:
        async def body() -> None:
            async with redlock.lock("r"):
                waiting = [
                    asyncio.create_task(hold(redlock.lock("r", wait=WAIT))) for _ in "x" * 40
                ]
                callers = redlock.session.callers
                await come_true(lambda: len(callers.line("r")) == len(waiting))
                for number in range(20):
                    await hold(redlock.lock(f"other {number}"))
                assert redlock.session.threads.count < len(waiting)
                for one in waiting:
                    one.cancel()
            await asyncio.wait(waiting)
            assert all(one.cancelled() for one in waiting)

        run(body)


class TestErrors:
    def test_no_quorum(self, mortal_nodes: Nodes) -> None:
        """The loop goes on while a majority of nodes is silent."""
        ticks = 0

        async def beat() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(TICK)
                ticks += 1

        async def body() -> None:
            beating = asyncio.create_task(beat())
            with pytest.raises(QuorumUnreachable):
                await redlock.lock("r").acquire_async()
            beating.cancel()

        urls = [node.url for node in mortal_nodes]
        with Redlock(urls, node_timeout=NODE_TIMEOUT) as redlock:
            see_quorum(redlock)
            for node in mortal_nodes[1:]:
                node.pause()
            run(body)
        assert ticks > 10

    def test_a_wait_that_is_no_number(self, redlock: Redlock) -> None:
        async def body() -> None:
            with pytest.raises(SettingsError, match="acquire_async"):
                await redlock.lock("r").acquire_async(wait=-1)

        run(body)

    def test_a_release_of_what_was_never_acquired(self, redlock: Redlock) -> None:
        async def body() -> None:
            with pytest.raises(RedlockError, match="never acquired"):
                await redlock.lock("r").release_async()

        run(body)

    def test_a_loss(self, nodes: Nodes) -> None:
        async def lose() -> None:
            async with redlock.lock("r", ttl=1.0, renew=False) as lock:
                await come_true(lambda: not lock.held)
                with pytest.raises(LockLost):
                    lock.ensure()
                async with redlock.lock("r", ttl=1.0):  # its time is over: taken anew
                    pass
                raise ValueError("own")

        async def body() -> None:
            with pytest.raises(ValueError, match="own"):
                await lose()

        with Redlock([node.url for node in nodes], node_timeout=0.25) as redlock:
            for _ in range(20):  # a stall may cost a try its short lease
                with contextlib.suppress(QuorumUnreachable):
                    return run(body)
        return pytest.fail("no quorum in time")

    def test_that_a_body_raises_is_what_comes_out(self, redlock: Redlock, nodes: Nodes) -> None:
        async def fail(*, released: bool) -> None:
            async with redlock.lock("r") as lock:
                if released:
                    await lock.release_async()
                raise KeyError("own")

        async def body() -> None:
            for released in (False, True):
                with pytest.raises(KeyError, match="own"):
                    await fail(released=released)

        run(body)
        see_nothing_left(redlock, nodes)

    def test_that_a_body_raises_comes_out_where_another_task_leaves_it(
        self, redlock: Redlock, nodes: Nodes
    ) -> None:
        """As an async generator does that is closed, or thrown into, by another task."""

        async def stream() -> AsyncIterator[int]:
            async with redlock.lock("r"):
                yield 1

        async def body() -> None:
            streams: Any = stream()
            await asyncio.create_task(anext_of(streams))
            with pytest.raises(KeyError, match="own"):
                await streams.athrow(KeyError("own"))

        async def anext_of(streams: Any) -> int:
            return await streams.__anext__()

        run(body)
        see_nothing_left(redlock, nodes)


class TestWoken:
    def test_by_a_release_long_before_it_would_try_by_itself(
        self, redlock: Redlock, rival: Redlock, nodes: Nodes
    ) -> None:
        async def body() -> float:
            hand_offs = []
            for _ in range(9):
                lock = await redlock.lock("r").acquire_async()
                waiting = asyncio.create_task(hold(rival.lock("r", wait=WAIT)))
                await come_true(lambda: hearing(rival) == len(nodes) and rests(rival))
                await asyncio.to_thread(settle, rival)  # it has tried again since it is heard
                released = now()
                await lock.release_async()
                hand_offs.append(await waiting - released)
                await asyncio.to_thread(settle, rival)  # its release may come after our next try
            return statistics.median(hand_offs)

        assert run(body) < MAX_SPIN / 2

    def test_by_one_that_a_cancelled_waiter_has_heard(self, redlock: Redlock, nodes: Nodes) -> None:
        """A word is for the first in the line; if that one is cancelled, it is the next one's."""
        callers, threads = redlock.session.callers, redlock.session.threads

        async def turn() -> float:
            lock = await redlock.lock("r").acquire_async()
            waiting = []
            for place in (1, 2):
                waiting.append(asyncio.create_task(hold(redlock.lock("r", wait=WAIT))))
                await come_true(lambda place=place: len(callers.line("r")) == place)
            await come_true(lambda: hearing(redlock) == len(nodes))
            await asyncio.sleep(0.3)  # they try once more, since they are heard
            await come_true(lambda: not threads.unfinished)
            busy, count = threading.Event(), max(threads.count, MIN_THREADS)
            for _ in range(count):
                threads.add(WorkItem(busy.wait, str))
            await lock.release_async()
            await come_true(lambda: threads.unfinished > count)  # it is about to try
            waiting[0].cancel()
            await asyncio.wait(waiting[:1])  # or a thread might still begin that try
            cancelled = now()
            busy.set()
            return await waiting[1] - cancelled

        async def body() -> float:
            return statistics.median([await turn() for _ in range(5)])

        assert run(body) < MAX_SPIN / 2
        see_nothing_left(redlock, nodes)


class TestCancelled:
    @pytest.mark.parametrize("wait", [0.0, WAIT])
    def test_at_any_step_of_an_acquire_it_gives_back_what_it_took(
        self, redlock: Redlock, nodes: Nodes, wait: float
    ) -> None:
        async def cut_after(passes: int, seconds: float) -> bool:
            lock = redlock.lock("r", wait=wait)
            task = asyncio.create_task(lock.acquire_async())
            for _ in range(passes):
                await asyncio.sleep(0)
            await asyncio.sleep(seconds)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
                return False
            assert not lock.held
            await asyncio.to_thread(see_freed, nodes, "r")
            await hold(lock)  # it is as good as new
            return True

        async def body() -> int:
            cuts = 0
            for number in itertools.count():
                if await cut_after(number % 6, random.choice((0, random.uniform(0, 0.003)))):
                    cuts += 1
                else:  # it was through, and its owner is gone
                    redlock.session.releaser.release(redlock.session.watchdog.watched[0])
                if cuts == CUTS:
                    break
            return cuts

        assert run(body) == CUTS
        see_nothing_left(redlock, nodes)

    def test_while_it_waits(self, redlock: Redlock, nodes: Nodes) -> None:
        async def body() -> None:
            async with redlock.lock("r"):
                lock = redlock.lock("r", wait=WAIT)
                waiting = asyncio.create_task(lock.acquire_async())
                await come_true(lambda: redlock.session.callers.line("r"))
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                assert not redlock.session.callers.resources()
                waiting = asyncio.create_task(redlock.lock("r", wait=WAIT).acquire_async())
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(waiting, TICK)
                assert not redlock.session.callers.resources()

        run(body)
        see_nothing_left(redlock, nodes)

    @pytest.mark.parametrize("cancellations", [1, 2])
    def test_while_nodes_are_silent_in_its_first_round(
        self, mortal_nodes: Nodes, cancellations: int
    ) -> None:
        """The second cancellation is not waited for: then the thread gives it back."""

        async def body() -> None:
            task = asyncio.create_task(redlock.lock("r").acquire_async())
            await come_true(lambda: redlock.session.nodes.outstanding)
            for _ in range(cancellations):
                task.cancel()
                await asyncio.sleep(TICK)
            if cancellations > 1:
                await come_true(task.done)
            assert task.done() == (cancellations > 1)
            assert redlock.session.nodes.outstanding, "the round ended by itself"
            for node in mortal_nodes[1:]:
                node.resume()
            with pytest.raises(asyncio.CancelledError):
                await task

        urls = [node.url for node in mortal_nodes]
        with Redlock(urls, node_timeout=PATIENCE) as redlock:
            see_quorum(redlock)
            for node in mortal_nodes[1:]:
                node.pause()
            run(body)
            see_nothing_left(redlock, mortal_nodes)

    def test_for_good_where_its_loop_ends_in_the_middle(
        self, redlock: Redlock, nodes: Nodes
    ) -> None:
        """Nobody cancels, nobody runs the loop any more: the coroutine is thrown away."""
        for passes in range(12):
            loop = asyncio.new_event_loop()
            lock = redlock.lock("r")
            acquiring = lock.acquire_async()
            task = loop.create_task(acquiring)

            async def look_on(passes: int = passes) -> None:
                for _ in range(passes):
                    await asyncio.sleep(0)

            loop.run_until_complete(look_on())
            if not task.done():
                acquiring.close()
                task.cancel()
            else:
                lock = None  # type: ignore[assignment]
                redlock.session.releaser.release(redlock.session.watchdog.watched[0])
            loop.close()
            del lock, task, acquiring
            see_nothing_left(redlock, nodes)

    def test_in_its_body_and_as_it_leaves_that(self, redlock: Redlock, nodes: Nodes) -> None:
        async def in_body() -> None:
            async with redlock.lock("r"):
                await asyncio.sleep(WAIT)

        async def at_its_end() -> None:
            task = asyncio.current_task()
            assert task is not None
            async with redlock.lock("r"):
                task.cancel()  # is raised where the task next waits
            await asyncio.sleep(0)

        async def body() -> None:
            task = asyncio.create_task(in_body())
            await come_true(lambda: not is_free(nodes, "r"))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(see_freed, nodes, "r")
            with pytest.raises(asyncio.CancelledError):
                await asyncio.create_task(at_its_end())

        run(body)
        see_nothing_left(redlock, nodes)


class TestThreads:
    def test_end_with_the_redlock(self, nodes: Nodes) -> None:
        async def body() -> None:
            await asyncio.gather(*(hold(redlock.lock(f"r{i}", wait=WAIT)) for i in range(20)))

        with Redlock([node.url for node in nodes], node_timeout=NODE_TIMEOUT) as redlock:
            run(body)
            threads = redlock.session.threads
            assert threads.count
        eventually(lambda: threads.count == 0, within=FREED)

    def test_are_more_where_nodes_are_far(self, mortal_nodes: Nodes) -> None:
        async def body() -> None:
            acquiring = (redlock.lock(f"r{i}").acquire_async() for i in range(20))
            ends = await asyncio.gather(*acquiring, return_exceptions=True)
            assert {type(end) for end in ends} == {QuorumUnreachable}

        with Redlock([node.url for node in mortal_nodes], node_timeout=0.2) as redlock:
            see_quorum(redlock)
            for node in mortal_nodes:
                node.pause()
            run(body)
            assert redlock.session.threads.count > MIN_THREADS

    def test_end_with_an_error_that_says_so_if_the_redlock_is_closed(
        self, redlock: Redlock, rival: Redlock
    ) -> None:
        async def body() -> None:
            waiting = asyncio.create_task(rival.lock("r", wait=WAIT).acquire_async())
            await come_true(lambda: rival.session.callers.inbox.is_listening)
            rival.close()
            with pytest.raises(QuorumUnreachable, match="is closed") as caught:
                await waiting
            assert caught.value.waited < WAIT / 2

        with redlock.lock("r"):
            run(body)

    @pytest.mark.parametrize("allowed", [1, MIN_THREADS])
    def test_go_on_if_the_system_has_no_thread_left(self, allowed: int) -> None:
        left, steps = iter(range(allowed)), 3 * MIN_THREADS

        def start(run: Callable[[], None]) -> None:
            if next(left, None) is None:
                raise RuntimeError("can't start new thread")
            start_thread(run)

        clock = SystemClock()
        clock.now = itertools.count().__next__  # each step is slow, so the pool wants to grow
        threads = ThreadPool(Platform(clock, start_thread=start))
        may_end, ended = threading.Event(), threading.Semaphore(0)
        for _ in range(steps):
            threads.add(WorkItem(may_end.wait, ended.release))
        may_end.set()
        assert all(ended.acquire(timeout=FREED) for _ in range(steps))
        threads.close()
        eventually(lambda: not threads.count)

    def test_go_on_after_an_error_at_the_end_of_a_step(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail() -> None:
            raise ValueError("own")

        raised: list[object] = []  # a thread that ends by an error tells it as its very last
        monkeypatch.setattr(sys, "unraisablehook", lambda what: raised.append(what.exc_type))
        threads = ThreadPool(Platform(SystemClock()))
        begun, told = threading.Event(), threading.Event()
        may_end = threading.Event()
        left_behind = WorkItem(lambda: begun.set() or may_end.wait(), told.set)
        threads.add(left_behind)
        assert begun.wait(FREED)
        left_behind.then(fail)
        may_end.set()
        assert told.wait(FREED), "its coroutine waits for ever"
        told.clear()
        for _ in range(MIN_THREADS):
            threads.add(WorkItem(bool, fail))
        threads.add(WorkItem(bool, told.set))
        assert told.wait(FREED), "no thread is left"
        threads.close()
        eventually(lambda: len(raised) == 1 + MIN_THREADS)
        assert set(raised) == {ValueError}
        eventually(lambda: not threads.count)

    def test_of_a_forked_child_are_its_own(self, redlock: Redlock, nodes: Nodes) -> None:
        run(lambda: hold(redlock.lock("r")))

        def has_its_own() -> bool:
            run(lambda: hold(redlock.lock("s", wait=WAIT)))
            return redlock.session.threads.count > 0

        in_child(has_its_own)
        run(lambda: hold(redlock.lock("r")))
        see_nothing_left(redlock, nodes)
