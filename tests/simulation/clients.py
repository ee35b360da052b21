"""Processes that use the shipped code, and the system under it: clocks, mutexes, polls, sockets.

Each process hands its own `Platform` to the shipped code: its clock, threads, mutexes and polls.
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from celery_redlock.lock.client import Redlock, sessions
from celery_redlock.lock.engine import acquirer as acquirer_module
from celery_redlock.lock.engine.events import Events, LockLostEvent
from celery_redlock.lock.model.acquisition import Acquisition
from celery_redlock.lock.model.lease import Lease
from celery_redlock.lock.model.rate import RateKey, Start
from celery_redlock.lock.platform.clock import Platform
from celery_redlock.lock.platform.forks import call_at_end
from celery_redlock.lock.platform.threads import DeadlineTimer
from celery_redlock.lock.server.handshake import ServerInfo
from celery_redlock.lock.server.tenures import RECORD_TTL_MS, tenure_of
from celery_redlock.lock.transport.address import RedisAddress
from celery_redlock.lock.transport.command import encode_words
from celery_redlock.tasks.unique import claim as claim_module
from tests.conftest import Journal
from tests.simulation.network import Link, Path
from tests.simulation.nodes import Node
from tests.simulation.world import STALE, Thread, World, running

EPOCH = 1_700_000_000.0  # s since 1970 at the real s 0

BURST = 0.3  # s: in place of `REPLACED_FOR`, so that some messages keep their place


class SoftTimeLimit(Exception):  # noqa: N818 - as billiard names it
    """What a signal handler raises in the middle of anything."""


class Stepping(Protocol):
    """A process: its world, and its points of I/O."""

    world: World

    def step(self) -> None:
        """Pass a point of I/O."""


class Clock:
    """A process's clocks. rate: s of its clock in a real s; wall_error: s its calendar is ahead."""

    resolution = 0.0

    def __init__(self, process: Stepping, rate: float, offset: float, wall_error: float) -> None:
        self._process, self._world = process, process.world
        self.rate, self._offset, self.wall_error = rate, offset, wall_error

    def now(self) -> float:
        """Return monotonic s."""
        return self._world.now * self.rate + self._offset

    def wall_us(self) -> int:
        """Return the us since 1970 as the process believes."""
        self._process.step()
        return int((EPOCH + self._world.now + self.wall_error) * 1e6)

    def sleep(self, seconds: float) -> None:
        """Rest for so many s of this clock."""
        self._process.step()
        thread = running()
        assert thread is not None
        thread.rest(self.real(seconds))

    def since(self, epoch: float) -> float:
        """Return the real s, below 0, at which the calendar showed so many s since 1970."""
        return (epoch - EPOCH - self._world.now - self.wall_error) / self.rate

    def real(self, seconds: float) -> float:
        """Return the real s at which so many s of this clock are over."""
        return self._world.now + seconds / self.rate


class Process:
    """One process: its clocks, its connections, and its own `Redlock`.

    zombies: how often what is on its way in a breaking connection still arrives, up to
    zombie_delay s later. Both, and short_writes, are fractions of 1 and s.
    """

    def __init__(
        self,
        world: World,
        name: str,
        nodes: Sequence[Node],
        paths: Sequence[Path],
        *,
        rate: float,
        offset: float,
        wall_error: float,
        **options: Any,
    ) -> None:
        self.world, self.name = world, name
        self.clock = Clock(self, rate, offset, wall_error)
        self.zombies, self.zombie_delay, self.short_writes = 0.5, 1.2, 0.0
        self.stopped_until = 0.0  # real s: stopped by SIGSTOP, or by a machine that swaps
        self._stop_in, self._stop_for = 0, 0.0  # I/O steps from now on, and s
        self._alert = False  # whether a step may be where something befalls it
        self.dead = False
        self.descriptors: dict[int, Any] = {}
        self.polls: list[Poll] = []
        self.subscribers: list[Subscriber] = []
        self.said: list[str] = []  # in its log
        self.lost: list[Acquisition] = []  # as it was told
        self._number = 0
        self.platform = Platform(
            self.clock,
            start_thread=self._start,
            pause=self.clock.sleep,
            pause_keeping_gil=_passes_for_all,
            get_ident=lambda: id(running()),
            new_mutex=Mutex,
            new_poll=lambda native: Poll(self),
            new_waker=lambda: Waker(self),
            new_sleeper=lambda: Sleeper(self),
            new_local=PerThread,
            new_token=lambda: str(world.witness.new_token()),
            new_subscriber=Subscriber,
        )
        self.addresses = [
            Address(node.name, node.name, None, self.platform, self, node, path)
            for node, path in zip(nodes, paths, strict=True)
        ]
        self.redlock = SimulatedRedlock(self, self.addresses, **options)

    def connect(self) -> None:
        """Be connected to every node when the schedule begins."""
        for node in self.redlock.session.nodes.all:
            connection = node.address.dial(node.timeout)
            node.adopt(connection, self._knows(node.index))

    def _knows(self, node: int) -> ServerInfo:
        """Return what a handshake learns of a node that knows this prefix and has all scripts.

        Without the handshake itself: that is faster, for many worlds.
        """
        guard, servers = self.redlock.session.options.guard, [one.node for one in self.addresses]
        run_id, wall = servers[node].run_id, servers[node].wall_ms / 1000
        arguments = guard.arguments(run_id)
        info = ServerInfo(run_id, encode_words(arguments), arguments, wall=wall)
        if guard.mode != "off":
            servers.insert(0, servers.pop(node))  # its own tenure is named first
            texts = [server.tenure(guard.prefix).decode() for server in servers]
            info.tenure, *info.others = map(tenure_of, texts)
            info.sent_tenures = (texts[0], str(RECORD_TTL_MS), *texts[1:])
        return info

    def thread(self, run: Callable[[], object]) -> Thread:
        """Start a thread."""
        return Thread(self.world, self, run)

    def _start(self, run: Callable[[], None]) -> None:
        self.thread(run)

    def step(self) -> None:
        """Pass a point of I/O, where a thread may be stopped or interrupted."""
        if self._alert:
            thread = running()
            if thread is not None:
                self._befall(thread)

    def _befall(self, thread: Thread) -> None:
        if self._stop_in:
            self._stop_in -= 1
            if not self._stop_in:
                self.stop(self._stop_for)
                thread.rest(self.stopped_until)
        if thread.cut_in:
            thread.cut_in -= 1
            if not thread.cut_in:
                self.world.counts["cuts"] += 1
                self.world.note("%s is cut", self.name)
                raise SoftTimeLimit

    def stop_after(self, steps: int, seconds: float) -> None:
        """Stop for so many real s at one of the next points of I/O."""
        self._stop_in, self._stop_for, self._alert = steps, seconds, True

    def cut_after(self, thread: Thread, steps: int) -> None:
        """Interrupt a thread at one of its next points of I/O."""
        thread.cut_in, self._alert = steps, True

    def stop(self, seconds: float) -> None:
        """Stop all its threads for so many real s, as SIGSTOP does."""
        self.world.counts["stops"] += 1
        self.world.note("%s stops for %.2f s", self.name, seconds)
        self.stopped_until = max(self.stopped_until, self.world.now + seconds)

    def kill(self) -> None:
        """End as `kill -9` does; what it wrote may still arrive."""
        self.vanish()
        for link in list(self.descriptors.values()):
            if isinstance(link, Link):
                link.disconnect()
        for subscriber in self.subscribers:
            subscriber.close()

    def vanish(self) -> None:
        """End as a machine without power does: no node learns of it."""
        self.dead = True
        self.world.note("%s is killed", self.name)

    def open(self, thing: Any) -> int:
        """Return a descriptor for a socket or a bell."""
        self._number += 1
        self.descriptors[self._number] = thing
        return self._number

    def notify(self, descriptor: int) -> None:
        """Wake the threads that poll something which is readable now."""
        for poll in [poll for poll in self.polls if descriptor in poll.masks]:
            if running() is None:
                poll.thread.go_on()
            else:
                poll.thread.wake()

    def socket_takes(self, size: int) -> int:
        """Draw how many bytes a socket takes of so many."""
        draw = self.world.random.random
        return int(draw() * size) if self.short_writes and draw() < self.short_writes else size


def here() -> Process:
    """Return the process that runs."""
    thread = running()
    assert thread is not None
    process: Process = thread.process
    return process


class PerThread:
    """What each simulated thread has for itself: all of them share the one real thread."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._of: dict[Thread | None, Any] = {}

    def get(self, *, in_task: bool) -> Any:
        """Return what belongs to the thread that runs."""
        thread = running()
        if thread not in self._of:
            self._of[thread] = self._make()
        return self._of[thread]


class Mutex:
    """A lock of the operating system, for one process's threads."""

    __slots__ = ("_locked", "_waiting")

    def __init__(self) -> None:
        self._locked = False
        self._waiting: list[Thread] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it; False where it was not free (in time)."""
        if not self._locked:
            self._locked = True
            return True
        if not blocking:
            return False
        thread = running()
        assert thread is not None, "nobody else would release it"
        until = thread.process.clock.real(timeout) if timeout >= 0 else math.inf
        return self._wait(thread, until)

    def _wait(self, thread: Thread, until: float) -> bool:
        while self._locked:
            self._waiting.append(thread)
            try:
                woken = thread.rest(until)
            finally:
                if thread in self._waiting:
                    self._waiting.remove(thread)
            if self._locked and not woken:
                return False
        self._locked = True
        return True

    def release(self) -> None:
        """Give it back."""
        if not self._locked:
            raise RuntimeError("release unlocked lock")
        self._locked = False
        if self._waiting:
            self._waiting.pop(0).wake()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class Waker:
    """What a waiter is woken by, beside what it waits for: the pipe of the shipped one."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.descriptor = self._process.open(self)
        self.readable = False

    def wake(self) -> None:
        """Wake whoever polls it."""
        self.readable = True
        self._process.notify(self.descriptor)

    def clear(self) -> None:
        """Take note of all the ringing so far."""
        self.readable = False


class Sleeper(DeadlineTimer):
    """What a thread sleeps on."""

    __slots__ = ("_process",)

    def __init__(self, process: Process) -> None:
        super().__init__(Mutex)
        self._process = process

    def sleep(self, seconds: float) -> bool:
        """Sleep until somebody wakes the thread, for so many s of the process's clock."""
        self._process.step()
        thread = running()
        if thread is not None:
            self._process.world.witness.rests(thread)
        return super().sleep(seconds)


class Poll:
    """A poll object over this process's sockets and bells."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.masks: dict[int, int] = {}
        self.thread: Any = None

    def register(self, descriptor: int, events: int) -> None:
        """Watch a descriptor."""
        self.masks[descriptor] = events

    def poll(self, milliseconds: int) -> list[tuple[int, int]]:
        """Return what is ready, after so many ms of the process's clock at the most."""
        process = self._process
        process.step()
        ready = self._ready()
        if not ready and milliseconds > 0:
            self.thread = running()
            process.polls.append(self)
            try:
                self.thread.rest(process.clock.real(milliseconds / 1000))
            finally:
                process.polls.remove(self)
            ready = self._ready()
        elif ready:
            thread = running()
            if thread is not None:
                thread.spin()
        return ready

    def _ready(self) -> list[tuple[int, int]]:
        things, ready = self._process.descriptors, []
        for descriptor, mask in self.masks.items():
            thing = things.get(descriptor)
            if thing is None or thing.readable or mask & select.POLLOUT:
                ready.append((descriptor, mask))
        return ready


class Subscriber:
    """A subscriber connection: messages come in order, late, and not while it is broken.

    A node counts it as a subscriber until the node learns that the connection is gone.
    """

    def __init__(
        self,
        address: Address,
        timeout: float,
        platform: Platform,
        channels: Callable[[], set[str]],
        heard: Callable[[str, str], None],
        refused: Callable[[str], object],
    ) -> None:
        self._process, self.node, self._path = address.process, address.node, address.path
        self._channels, self._heard = channels, heard
        self._asked = False
        self._life, self._at = 0, 0.0  # of the connection; real s: nothing overtakes
        self._held: deque[tuple[Callable[..., None], Any]] = deque()  # what a closed way keeps
        self._come_in: deque[tuple[Callable[..., None], Any]] = deque()
        self._thread: Thread | None = None
        self._is_idle = False
        self.confirmed: set[str] = set()
        self._process.subscribers.append(self)

    @property
    def requested(self) -> set[str]:
        """The channels that it has requested."""
        return self.confirmed

    def resubscribe(self) -> None:
        """Ask for what is wanted."""
        if not self._asked:
            self._asked = True
            self._later(self._subscribe, self._life)

    def close(self) -> None:
        """Hear nothing more; the node learns of it."""
        self.node.subscriptions.pop(self, None)

    def published(self, channel: bytes, message: bytes) -> None:
        """Take a message from the node."""
        world = self._process.world
        for _ in range(world.copies):
            say = self._say, self._life, channel.decode(), message.decode()
            if world.lateness:
                world.at(world.now + world.lateness, self._later, *say)
            else:
                self._later(*say)

    def broken(self) -> None:
        """Learn that the connection is gone, and make another."""
        self.close()
        self.confirmed, self._asked = set(), False
        self._life += 1
        self._held.clear()
        self.resubscribe()

    def flow(self) -> None:
        """Let go on what a closed way has kept."""
        for _ in range(len(self._held)):
            self._later(*self._held.popleft())

    def _later(self, do: Callable[..., None], *args: Any) -> None:
        world = self._process.world
        delay = self._path.delay(world.now) + self._path.delay(world.now)
        if delay == math.inf:
            self._held.append((do, *args))
            return
        self._at = max(self._at, world.now + delay)
        world.at(self._at, self._come, do, args)

    def _come(self, do: Callable[..., None], args: Any) -> object:
        process = self._process
        if process.dead or args[0] != self._life:
            return STALE
        if process.stopped_until > process.world.now:
            process.world.at(process.stopped_until, self._come, do, args)
            return STALE
        self._come_in.append((do, args))
        if self._thread is None:
            self._thread = process.thread(self._work)
        elif self._is_idle:
            self._thread.go_on()
        return None

    def _work(self) -> None:
        assert self._thread is not None
        while True:
            while self._come_in:
                do, args = self._come_in.popleft()
                if args[0] == self._life:
                    do(*args)
            self._is_idle = True
            self._thread.rest()
            self._is_idle = False

    def _subscribe(self, life: int) -> None:
        self._asked = False
        if self.node.down:
            self.resubscribe()
            return
        wanted = self._channels()
        self.node.subscriptions[self] = {channel.encode() for channel in wanted}
        new, self.confirmed = wanted - self.confirmed, set(wanted)
        for channel in sorted(new):
            self._heard(channel, "")

    def _say(self, life: int, channel: str, message: str) -> None:
        if not self._process.world.is_mute:
            self._heard(channel, message)


@dataclass(frozen=True)
class Address(RedisAddress):
    """Where a node is, for one process."""

    pool: Any = None
    process: Any = None
    node: Any = None
    path: Any = None

    def dial(self, timeout: float, node_timeout: float | None = None) -> Link:
        """Return a connection, after the time that takes."""
        thread, path, world = running(), self.path, self.process.world
        if thread is not None:
            delay = path.delay(world.now) + path.delay(world.now)
            thread.rest(self.process.clock.real(min(delay, timeout)))
            if delay > timeout or self.node.stopped_until > world.now:
                raise TimeoutError("Timeout connecting to server")
            if self.node.down or path.random.random() < path.refuses:
                raise ConnectionError("Connection refused")
        return Link(self.process, self.node, path)

    def cause_of(self, error: BaseException, timeout: float) -> str:
        """Return the text of an error."""
        return str(error)


class Witness(Journal):
    """Hands on what the shipped code says of its acquisitions."""

    def __init__(self, process: Process, events: Events) -> None:
        self._process, self._lost = process, events.lost
        self._losing: Acquisition | None = None
        events.journal, events.wants, events.send = self, self._wants, self._told
        events.lost = self._look_at_lost  # type: ignore[method-assign]

    def claiming(self, session: bytes, at: float, holding: Acquisition, claim: Lease) -> None:
        """Take note that the request for a key is about to leave."""
        marker = holding.options.marker
        run = "" if marker is None else marker.run
        self._process.world.witness.claimed(claim, run, self._process)

    def held(self, holding: Acquisition) -> None:
        """Take note that a lock is held from now on."""
        self._process.world.witness.acquired()

    def _look_at_lost(self, acquisition: Acquisition, reason: str) -> None:
        self._losing = acquisition  # a record does not say which one it is of
        self._lost(acquisition, reason)

    def _wants(self, kind: type[Any]) -> bool:
        return kind is LockLostEvent

    def _told(self, sender: Any, record: LockLostEvent) -> None:
        """Take note that a lock is lost."""
        assert self._losing is not None
        self._process.lost.append(self._losing)
        self._process.world.witness.lost(self._losing, self._process)


class WatchedStart(Start):
    """A shipped `Start` that tells the witness when it is asked for, and when its body begins."""

    __slots__ = ()

    def __init__(self, key: RateKey, token: str, *terms: Any) -> None:
        super().__init__(key, token, *terms)
        here().world.witness.start_asked(self, here())

    @property
    def started_at(self) -> float | None:
        """As of `Start`."""
        moment: float | None = _started_at.__get__(self)
        return moment

    @started_at.setter
    def started_at(self, moment: float | None) -> None:
        _started_at.__set__(self, moment)
        if moment is not None:
            here().world.witness.starts.flagged(self)


_started_at: Any = Start.__dict__["started_at"]  # its slot


class SimulatedRedlock(Redlock):
    """A shipped `Redlock` in a simulated process."""

    def __init__(self, process: Process, nodes: Sequence[Address], **options: Any) -> None:
        self.process = process
        super().__init__(nodes, **options)
        self.session.exchanged_every = math.inf  # events that many schedules have no use for
        Witness(process, self.session.events)
        self._dropped.detach()  # it ends with its world


class Log(logging.Handler):
    """What the shipped code logs: kept where somebody reads it, and an error if it is one."""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line, with the process that says it."""
        thread = running()
        if thread is None:
            return
        if record.exc_info:
            thread.process.world.witness.failed(record.exc_info[1])
        else:
            thread.process.said.append(record.getMessage())


def _passes_for_all(seconds: float) -> None:
    """Return at once: simulated time passes for all threads of a process."""


@contextlib.contextmanager
def patched(thing: Any, **names: Any) -> Iterator[None]:
    """Give a module or a class other names for a while."""
    before = {name: vars(thing)[name] for name in names if name in vars(thing)}
    for name, value in names.items():
        setattr(thing, name, value)
    try:
        yield
    finally:
        for name in names:
            if name in before:
                setattr(thing, name, before[name])
            else:
                delattr(thing, name)  # it is inherited


@contextlib.contextmanager
def simulated_system() -> Iterator[None]:
    """Read what the package logs, and see its starts, for a while."""
    package, log = logging.getLogger("celery_redlock"), Log()
    before = package.level, package.propagate
    package.addHandler(log)
    package.setLevel(logging.INFO)
    package.propagate = False
    try:
        with (
            patched(acquirer_module, Start=WatchedStart),
            patched(claim_module, REPLACED_FOR=BURST),
        ):
            yield
    finally:
        package.removeHandler(log)
        package.level, package.propagate = before


def end_sessions() -> None:
    """Leave nothing to deliver as the test process ends: the nodes of a schedule are gone then."""
    for session in sessions():
        if isinstance(session.clock, Clock):
            session.is_closed = True


call_at_end(end_sessions)  # it comes before what the package has registered earlier
