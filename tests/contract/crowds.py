"""What many waiting callers of one process cost: `python -m tests.contract.crowds CASE`.

Prints one JSON object. CASE: threads, coroutines, resources, gevent, shortage, permits or flood.
The function of a case says what its figures mean. Each case runs in a process of its own, so that
processor time and descriptors are its own. Starts three nodes, or uses those whose URLs follow.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

from celery_redlock import Lock, Redlock
from celery_redlock.lock import retry
from celery_redlock.testing import embedded_nodes, trust_nodes
from tests import fork_server
from tests.clients import client_of

MODULE = "tests.contract.crowds"
WAIT = 60.0  # s: longer than any case
LEASE = 60.0  # s: of locks that a holder keeps without renewals, which would cost commands
FAR = 600.0  # s: of a lock that ends by its release alone
DEADLINE = 150.0  # s for a case

THREADS, COROUTINES, RESOURCES, GREENLETS = 500, 1_000, 3_000, 400
MEASURED = 2.0  # s of waiting
SETTLED, SETTLE, STEP = 0.03, 3.0, 0.5  # of a core; s at the most; s between two looks
UNRELATED_TTL = 20.0  # s: of a lock that is renewed meanwhile, and outlives a stall
WAIT_IN_THREAD, SPREAD = 8.0, 2.0  # s: the ends of the waits are spread over so many s
WAIT_FOR_RESOURCE = 8.0  # s
PATIENCE = 5.0  # s for a node's reply, on a machine that does much else
WAIT_IN_GREENLET = 4.0  # s
TICK = 0.01  # s
DESCRIPTORS = 1024  # at the most of a process
LIMIT, TAKEN_BELOW, TAKEN_ABOVE = 200, 100, 50  # permits: all below the 101st, and some above
WAIT_FOR_PERMIT, SHORT_LEASE = 60.0, 3.0  # s
FLOODED, BATCH, PAUSE = 2000, 50, 0.005  # messages; of a batch; s between two batches


def main(case: str, *urls: str) -> None:
    """Run a case, or be a `Caller`, and print what there is to say."""
    if not urls:
        with embedded_nodes(3) as nodes:
            trust_nodes(nodes)
            print(json.dumps(measure(case, [node.url for node in nodes])))
        return
    if case == "caller":
        obey(urls)
        return
    print(json.dumps(CASES[case](urls)), flush=True)
    os._exit(0)  # CPython 3.11 can crash at its end if daemon threads are left


def measure(case: str, urls: Sequence[str]) -> Any:
    """Run a case in a process of its own over nodes that vote; return its figures."""
    patched = ["gevent.monkey", "--module"] if case == "gevent" else []
    command = [sys.executable, "-m", *patched, MODULE, case, *urls]
    done = fork_server.run(command, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.splitlines()[-1])


# one call that waits


def outcome(lock: Lock, wait: float) -> tuple[str, float]:
    """Wait for a lock; return how that ended, and for how many s longer than it may."""
    began, end = time.monotonic(), "acquired"
    try:
        lock.acquire(wait)
    except Exception as error:
        end = type(error).__name__
    return end, time.monotonic() - began - wait


async def outcome_async(lock: Lock, wait: float) -> tuple[str, float]:
    """Do what `outcome` does, in an event loop."""
    began, end = time.monotonic(), "acquired"
    try:
        await lock.acquire_async(wait)
    except Exception as error:
        end = type(error).__name__
    return end, time.monotonic() - began - wait


def summary(outcomes: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """Return how many calls ended in which way, and the longest overrun in s."""
    ends = Counter(end for end, _ in outcomes)
    return {"ends": dict(ends), "overrun": round(max(late for _, late in outcomes), 2)}


# what is measured


def connected(urls: Sequence[str]) -> list[Any]:
    """Return clients of the nodes that need no more descriptors."""
    clients = [client_of(url) for url in urls]
    for client in clients:
        client.ping()
    return clients


def commands(clients: Sequence[Any]) -> int:
    """Return how many commands the nodes have executed, those of scripts too; 0 on PostgreSQL."""
    return sum(client.info("stats").get("total_commands_processed", 0) for client in clients)


def descriptors() -> int:
    """Return how many descriptors this process has open. A listing of /proc would need one."""
    count = 0
    for number in range(DESCRIPTORS):
        with contextlib.suppress(OSError):
            os.fstat(number)
            count += 1
    return count


def closed(before: int) -> int:
    """Return how many descriptors are open, once there are no more than before, or after 10 s."""
    end = time.monotonic() + 10.0
    while (now := descriptors()) > before and time.monotonic() < end:
        time.sleep(0.05)
    return now


def settle_steps() -> Iterator[float]:
    """Give s to sleep, until the calls that began have come to rest."""
    end = time.monotonic() + SETTLE
    yield STEP
    while time.monotonic() < end:
        began, used = time.monotonic(), time.process_time()
        yield STEP
        if time.process_time() - used < SETTLED * (time.monotonic() - began):
            return


class Usage:
    """What a stretch of time costs from now on: a core's share, and commands a second."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._clients = connected(urls)
        self._commands, self._used = commands(self._clients), time.process_time()
        self._began = time.monotonic()

    def end(self) -> dict[str, float]:
        """Return it."""
        seconds, used = time.monotonic() - self._began, time.process_time() - self._used
        return {"cpu": round(used / seconds, 3), "commands": round(self.count() / seconds, 1)}

    def count(self, others: int = 0) -> int:
        """Return how many commands there were. others: commands that are not to count."""
        return commands(self._clients) - self._commands - len(self._clients) - others


class Ticker:
    """Notes how long an event loop stood still at most.

    busiest: s of CPU that its thread took between two ticks, whatever else the machine does.
    """

    def __init__(self) -> None:
        self.busiest = 0.0

    async def run(self) -> None:
        """Tick until it is cancelled."""
        while True:
            used = time.thread_time()
            await asyncio.sleep(TICK)
            self.busiest = max(self.busiest, time.thread_time() - used)


@contextlib.asynccontextmanager
async def ticking() -> AsyncIterator[Ticker]:
    """Give a ticker that ticks inside of the block."""
    ticker = Ticker()
    task = asyncio.create_task(ticker.run())
    try:
        yield ticker
    finally:
        task.cancel()


def started(run: Callable[[int], object], count: int) -> list[threading.Thread]:
    """Start so many threads, each with its number; they are greenlets where gevent has patched."""
    made = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in made:
        thread.start()
    return made


# the cases


def threads(urls: Sequence[str]) -> dict[str, Any]:
    """Have threads wait for one held lock, beside an unrelated lock with a short ttl.

    cpu: share of a core while all wait. control: the same of as many threads that wait for a plain
    event. unrelated: whether that lock was held at the end. ends, overrun: as of `summary`.
    """
    with Redlock(urls) as redlock, Redlock(urls) as other:
        unrelated = redlock.lock("unrelated", ttl=UNRELATED_TTL).acquire(wait=WAIT)
        with held(other, "r"):
            control = _control()
            outcomes = list[tuple[str, float]]()

            def wait(number: int) -> None:
                seconds = WAIT_IN_THREAD + SPREAD * number / THREADS
                outcomes.append(outcome(redlock.lock("r"), seconds))

            callers = started(wait, THREADS)
            for step in settle_steps():
                time.sleep(step)
            usage = Usage(urls)
            time.sleep(MEASURED)
            used = usage.end()
            for caller in callers:
                caller.join()
        figures = {**used, "control": control, "unrelated": unrelated.held, **summary(outcomes)}
        unrelated.release()
    return figures


def _control() -> float:
    """Return the share of a core that as many threads take that wait for a plain event."""
    never = threading.Event()
    waiting = started(lambda _: never.wait(), THREADS)
    used, began = time.process_time(), time.monotonic()
    time.sleep(1.0)
    share = (time.process_time() - used) / (time.monotonic() - began)
    never.set()
    for thread in waiting:
        thread.join()
    return round(share, 3)


@contextlib.contextmanager
def held(client: Redlock, name: str, count: int = 0) -> Iterator[None]:
    """Hold a resource, or as many whose names have a number behind this one, without renewals."""
    names = [f"{name}{number}" for number in range(count)] or [name]
    with contextlib.ExitStack() as stack:
        for one in names:
            stack.enter_context(client.lock(one, ttl=LEASE, wait=WAIT, renew=False))
        yield


def coroutines(urls: Sequence[str]) -> dict[str, Any]:
    """Have coroutines wait for one held lock.

    commands: a second, of all nodes together, while all wait. cpu: share of a core.
    """

    async def crowd(redlock: Redlock) -> dict[str, Any]:
        waits = [redlock.lock("r").acquire_async(WAIT) for _ in range(COROUTINES)]
        tasks = [asyncio.create_task(wait) for wait in waits]
        for step in settle_steps():
            await asyncio.sleep(step)
        usage = Usage(urls)
        await asyncio.sleep(MEASURED)
        used = usage.end()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return used

    with Redlock(urls) as redlock, Redlock(urls) as other, held(other, "r"):
        return asyncio.run(crowd(redlock))


def resources(urls: Sequence[str]) -> dict[str, Any]:
    """Have coroutines wait for a held resource each.

    busy: the longest s of CPU for which the event loop stood still. ends: as of `summary`.
    """

    async def crowd(redlock: Redlock) -> dict[str, Any]:
        locks = [redlock.lock(f"r{n}", ttl=LEASE) for n in range(RESOURCES)]
        async with ticking() as ticker:
            waits = [outcome_async(lock, WAIT_FOR_RESOURCE) for lock in locks]
            outcomes = await asyncio.gather(*waits)
        return {"busy": round(ticker.busiest, 2), **summary(outcomes)}

    with (
        Redlock(urls, node_timeout=PATIENCE) as redlock,
        Redlock(urls) as other,
        held(other, "r", RESOURCES),
    ):
        return asyncio.run(crowd(redlock))


def greenlets(urls: Sequence[str]) -> dict[str, Any]:
    """Have greenlets wait for one held lock, with few descriptors.

    before, most, after: open descriptors before, while all wait, and after. ends, overrun: as of
    `summary`. later: as of `fate`, after all that.
    """
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    clients = connected(urls)
    with (
        Redlock(urls, node_timeout=PATIENCE, max_ttl=FAR) as redlock,
        Redlock(urls) as other,
        held(other, "r"),
    ):
        outcome(redlock.lock("r"), 1.0)  # connections for a waiter, which are kept for the next one
        before, most, outcomes = descriptors(), 0, list[tuple[str, float]]()
        renewed = redlock.lock("renewed", ttl=UNRELATED_TTL).acquire(wait=WAIT)

        def wait(_: int) -> None:
            outcomes.append(outcome(redlock.lock("r"), WAIT_IN_GREENLET))

        callers = started(wait, GREENLETS)
        while len(outcomes) < GREENLETS:
            most = max(most, descriptors())
            time.sleep(0.1)
        for caller in callers:
            caller.join()
        figures = {"before": before, "most": most, "after": closed(before), **summary(outcomes)}
        renewed.release()
        return {**figures, "later": fate(redlock, clients)}


def shortage(urls: Sequence[str]) -> dict[str, Any]:
    """Let renewals meet a process without free descriptors, with and without their connections.

    later: as of `fate`, after that.
    """
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    clients = connected(urls)
    with Redlock(urls, node_timeout=PATIENCE, max_ttl=FAR) as redlock:
        early = redlock.lock("early", ttl=FAR).acquire(wait=WAIT)
        with no_descriptors():
            see_renewed(redlock, early)
            before = [node.connection for node in redlock.session.nodes.all]
            for client in clients:
                client.client_kill_filter(_type="normal", skipme=True)
            redlock.session.watchdog.renew_by(redlock.session.clock.now())
            while any(node.connection in before for node in redlock.session.nodes.all):
                time.sleep(0.01)
        early.release()
        return {"later": fate(redlock, clients)}


def fate(redlock: Redlock, clients: Sequence[Any]) -> list[Any]:
    """Return what becomes of a lock that is acquired and renewed; no node has it when it is over.

    How the acquire ends, and whether the lock is held then.
    """
    lock = redlock.lock("later", ttl=FAR)
    end, _ = outcome(lock, WAIT)
    if end != "acquired":
        return [end]
    see_renewed(redlock, lock)
    is_held = lock.held
    lock.release()
    while any(client.exists("{redlock}:lock:later") for client in clients):
        time.sleep(0.01)
    return [end, is_held]


def see_renewed(redlock: Redlock, lock: Lock) -> None:
    """Let the watchdog renew a held lock now; return once it has."""
    [lease] = lock.ownership.acquisitions[0].leases
    before = lease.valid_until
    redlock.session.watchdog.renew_by(redlock.session.clock.now())
    while lease.valid_until <= before:
        time.sleep(0.01)


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Have none left to open inside of the block."""
    before, taken = descriptors(), list[int]()
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        closed(before)  # gevent's os.close closes a little later


def permits(urls: Sequence[str]) -> dict[str, Any]:
    """Have callers wait for the permits above the 100th, as others leave them.

    free, released, expired: how many of these permits were taken, and after how many s the last
    one. They were free from the first, were released, or expired as those of dead holders.
    """
    free, figures = LIMIT - TAKEN_BELOW - TAKEN_ABOVE, {}
    with Redlock(urls) as redlock, Redlock(urls) as other, contextlib.ExitStack() as stack:
        stack.enter_context(permits_held(other, TAKEN_BELOW, limit=TAKEN_BELOW))
        stack.enter_context(permits_held(other, TAKEN_ABOVE))
        with permits_wanted(redlock, free) as waiting:
            figures["free"] = waiting.seen(time.monotonic())
        with permits_held(other, free) as held, permits_wanted(redlock, free) as waiting:
            time.sleep(1.5)  # all have tried, and wait
            released = time.monotonic()
            held.set()
            figures["released"] = waiting.seen(released)
        with permits_held(other, free, ttl=SHORT_LEASE), permits_wanted(redlock, free) as waiting:
            figures["expired"] = waiting.seen(time.monotonic() + SHORT_LEASE)
    return figures


@contextlib.contextmanager
def permits_held(
    client: Redlock, count: int, *, limit: int = LIMIT, ttl: float = LEASE
) -> Iterator[threading.Event]:
    """Hold so many permits, each in its own thread, until the event is set or the block ends."""
    over, holding = threading.Event(), threading.Semaphore(0)

    def hold(_: int) -> None:
        with client.lock("r", limit=limit, ttl=ttl, wait=WAIT, renew=False):
            holding.release()
            over.wait()

    holders = started(hold, count)
    for _ in holders:
        holding.acquire()
    try:
        yield over
    finally:
        over.set()
        for holder in holders:
            holder.join()


class Waiting:
    """Callers that each wait for a permit. taken: when each got one, in monotonic s."""

    def __init__(self, count: int) -> None:
        self._count, self.taken = count, list[float]()

    def seen(self, since: float) -> tuple[int, float]:
        """Return how many got one, once all have, and the s until the last one did."""
        while len(self.taken) < self._count and time.monotonic() < since + WAIT_FOR_PERMIT:
            time.sleep(0.02)
        return len(self.taken), round(max(self.taken, default=since) - since, 2)


@contextlib.contextmanager
def permits_wanted(client: Redlock, count: int) -> Iterator[Waiting]:
    """Have so many threads wait for a permit each, which they keep until the block ends."""
    over, waiting = threading.Event(), Waiting(count)

    def take(_: int) -> None:
        lock = client.lock("r", limit=LIMIT, ttl=LEASE, renew=False)
        if lock.try_acquire(2 * WAIT_FOR_PERMIT):
            waiting.taken.append(time.monotonic())
            over.wait()
            lock.release()

    callers = started(take, count)
    try:
        yield waiting
    finally:
        over.set()
        for caller in callers:
            caller.join()


def flood(urls: Sequence[str]) -> dict[str, Any]:
    """Forge release messages to a process that waits, on one node.

    waited, others: commands that the nodes executed meanwhile, without `FLOODED` forged messages
    that name the resource for which it waits, or another one. It gets the lock by a real release,
    while both are forged: by that message, as it does not look for itself.
    """
    client = client_of(urls[0], decode_responses=True)
    figures = dict[str, Any]()
    with Redlock(urls, max_ttl=FAR) as redlock, calling(urls) as caller:
        lock = redlock.lock("flooded", ttl=FAR, renew=False)
        channel, message = _real_message(lock, caller, client)
        lock.acquire(wait=WAIT)
        caller.wait("flooded")
        see_waiting(urls, "flooded")
        forged = [message, message.replace("flooded", "other")]
        for name, text in zip(("waited", "others"), forged, strict=True):
            with Flood(client, channel, [text]) as flooding:
                flooding.see(FLOODED / 4)
                usage, sent = Usage(urls), flooding.sent
                flooding.see(FLOODED)
                figures[name] = usage.count(flooding.sent - sent)
        with Flood(client, channel, forged) as flooding:
            flooding.see(FLOODED / 4)
            lock.release()
            caller.got()
        caller.release()
    return figures


def _real_message(lock: Lock, caller: Caller, client: Any) -> tuple[str, str]:
    """Return the channel and the text by which a node names a caller."""
    with client.pubsub(ignore_subscribe_messages=True) as heard:
        heard.psubscribe("*handoff*")
        heard.get_message(timeout=WAIT)
        lock.acquire(wait=WAIT)
        caller.wait("flooded")
        see_waiting(caller.urls, "flooded")
        lock.release()
        caller.got()
        while (message := heard.get_message(timeout=WAIT)) is None:
            pass
        caller.release()
    return message["channel"], message["data"]


class Flood:
    """Publishes messages with fresh release ids while the block runs. sent: how many so far."""

    def __init__(self, client: Any, channel: str, messages: Sequence[str]) -> None:
        self._client, self._channel, self._messages = client, channel, messages
        self._over, self.sent = threading.Event(), 0
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.wait(PAUSE):
            batch = [fresh(text) for text in self._messages for _ in range(BATCH)]
            pipeline = self._client.pipeline(transaction=False)
            for text in batch:
                pipeline.publish(self._channel, text)
            pipeline.execute()
            self.sent += len(batch)

    def see(self, count: float) -> None:
        """Return when so many more have been sent."""
        until = self.sent + count
        while self.sent < until:
            time.sleep(PAUSE)

    def __enter__(self) -> Flood:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._thread.join()


def fresh(message: str) -> str:
    """Return a release message with another release id."""
    text, count = re.subn(r"\b[0-9a-f]{32}\b", uuid.uuid4().hex, message)
    assert count == 1, f"no release id in {message!r}"
    return text


# one caller in a process of its own


class Caller:
    """A process that waits for a lock, holds it and releases it as it is told.

    environment: of the process, for example with another clock.
    """

    def __init__(self, urls: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.urls = urls
        command = [sys.executable, "-m", MODULE, "caller", *urls]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process: Any = (
            subprocess.Popen(command, env={**os.environ, **environment}, **pipes)
            if environment
            else fork_server.Process(command, **pipes)
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._input, self.output = self.process.stdin, self.process.stdout

    def wait(self, name: str) -> None:
        """Begin to wait for a resource."""
        self._tell(name)

    def got(self) -> None:
        """Return when the lock is acquired."""
        assert self.output.readline() == "got\n", "it was not acquired"

    def release(self) -> None:
        """Release the lock."""
        self._tell("release")

    def _tell(self, line: str) -> None:
        self._input.write(f"{line}\n")
        self._input.flush()


@contextlib.contextmanager
def calling(urls: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[Caller]:
    """Give a caller, which ends with the block."""
    caller = Caller(urls, environment)
    with caller.process:
        try:
            yield caller
        finally:
            caller.process.kill()


def obey(urls: Sequence[str]) -> None:
    """Be the process of a `Caller`; after minutes it looks for itself: only a release wakes it."""
    retry.MAX_LISTENING_PAUSE, retry.REGISTRATION_TTL = FAR, 2 * FAR
    with Redlock(urls) as redlock:
        for line in sys.stdin:
            with redlock.lock(line.strip(), wait=WAIT):
                print("got", flush=True)
                sys.stdin.readline()


def see_waiting(urls: Sequence[str], name: str, count: int = 1) -> None:
    """Return when every node knows so many processes that wait for a resource."""
    end = time.monotonic() + WAIT
    for url in urls:
        client = client_of(url)
        while client.zcard(f"{{redlock}}:waiting:{name}") != count:
            assert time.monotonic() < end, f"{count} do not wait for {name!r} on {url}"
            time.sleep(0.02)


CASES: dict[str, Callable[[Sequence[str]], dict[str, Any]]] = {
    "threads": threads,
    "coroutines": coroutines,
    "resources": resources,
    "gevent": greenlets,
    "shortage": shortage,
    "permits": permits,
    "flood": flood,
}

if __name__ == "__main__":
    main(*sys.argv[1:])
