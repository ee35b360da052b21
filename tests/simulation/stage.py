"""Exact interleavings: a world in which nothing happens but what the steps say.

Messages arrive at once, on ways that are open; on a closed way they wait until it is let.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import hiredis

from celery_redlock.errors import LockLost, NotAcquired
from celery_redlock.lock.engine.acquirer import AlreadyCompletedError
from celery_redlock.lock.lock import Lock
from celery_redlock.lock.model.acquisition import Acquisition
from celery_redlock.lock.model.keys import waiting_key
from celery_redlock.lock.model.options import CompletionMarker, LockOptions, grace_period
from tests.simulation.clients import Process, SoftTimeLimit, Subscriber
from tests.simulation.invariants import Witness
from tests.simulation.network import Chunk, Link, Path
from tests.simulation.nodes import Node, introduce, library, lost_until
from tests.simulation.world import Thread, World

A_LITTLE = 0.001  # s


class Actor:
    """One process of a stage, with one thread that does what it is told, step by step."""

    def __init__(
        self,
        stage: Stage,
        name: str,
        *,
        new: bool = False,
        process: Process | None = None,
        **times: Any,
    ) -> None:
        self._stage = stage
        self.paths = [Path(0.0, 0.0, 0.0, stage.world.random) for _ in stage.nodes]
        if process is None:
            process = Process(
                stage.world, name, stage.nodes, self.paths, **{**stage.options, **times}
            )
            process.zombies = 0.0
            if not new:
                process.connect()
        self.process = process
        self._late: list[tuple[Link, Chunk]] = []
        self._tasks: deque[Callable[[], None]] = deque()
        self._thread: Thread = self.process.thread(self._work)
        self.locks: list[Lock] = []
        self.began = self.ended = 0.0  # real s: of what it has done last
        self.error: Exception | None = None  # of that
        self.taken_at: list[float] = []  # real s: when it got the lock in its turns

    @property
    def turns(self) -> int:
        """How often it got the lock in its turns."""
        return len(self.taken_at)

    def _work(self) -> None:
        while True:
            while self._tasks:
                self._tasks[0]()
                self._tasks.popleft()
            self._thread.rest()

    @property
    def idle(self) -> bool:
        """Whether it has done all that it was told."""
        return not self._tasks

    @property
    def holds(self) -> bool:
        """Whether it has a lock to extend or release."""
        return bool(self.locks) and self.lock.held

    def _do(self, task: Callable[[], None]) -> Actor:
        self._tasks.append(task)
        self._thread.wake()
        self._stage.settle()
        return self

    @property
    def lock(self) -> Lock:
        """What it has acquired last, or tried to."""
        return self.locks[-1]

    def _makes(self, resource: str | list[str], body_follows: bool = False, **terms: Any) -> Lock:
        terms = {"ttl": self._stage.ttl, "renew": False, **terms}
        lock = self.process.redlock.lock(resource, **terms)
        lock.ownership.options = lock.ownership.options._replace(body_follows=body_follows)
        self.locks.append(lock)
        return lock

    def _timed(self, task: Callable[[], object]) -> Actor:
        def timed() -> None:
            self.began, self.error = self._stage.world.now, None
            try:
                task()
            except (AlreadyCompletedError, LockLost, NotAcquired, SoftTimeLimit) as error:
                self.error = error
            self.ended = self._stage.world.now

        return self._do(timed)

    def tries(self, resource: str | list[str] = "a", **terms: Any) -> Actor:
        """Try to acquire a lock, without waiting where no `wait` is given."""
        lock = self._makes(resource, **terms)

        def task() -> None:
            lock.acquire()
            if terms.get("fencing"):
                self._stage.witness.fenced([lock.resource], lock.fencing_token)

        return self._timed(task)

    def delivers(self, run: str, since: float) -> Actor:
        """Try to take the lock of a run, which must not have ended since a s of its clock."""
        marker = CompletionMarker(run, kept_for=1000.0, asks_since=since)
        ttl = self._stage.ttl
        options = LockOptions(("a",), ttl, 0.0, False, None, f"{run} here", marker=marker)
        self.locks.append(Lock(self.process.redlock, options))
        return self._timed(self.lock.acquire)

    def ends(self) -> Actor:
        """Release what it has acquired last, as the end of its run."""
        return self._timed(lambda: self.lock.ownership.release_all(ended=True))

    def begins(self) -> Actor:
        """Begin the body under what it has acquired last, if its rates let it."""
        return self._timed(self.lock.ownership.begin_body)

    def extends(self) -> Actor:
        """Renew what it has acquired last."""
        return self._timed(self.lock.extend)

    def releases(self) -> Actor:
        """Release what it has tried to acquire last, where it holds it."""
        lock = self.lock
        return self._timed(lambda: lock.release() if lock.held else None)

    def gives_up(self, acquisition: Acquisition, after: float) -> Actor:
        """Release what another thread of the process has acquired, after so many s."""

        def task() -> None:
            self.process.clock.sleep(after)
            self.process.redlock.session.releaser.release(acquisition)

        return self._do(task)

    def takes_turns(self, count: int, section: float, **terms: Any) -> Actor:
        """Wait for a lock, hold it for so many s, and release it, so many times."""

        def task() -> None:
            for _ in range(count):
                with self._makes("a", **{"wait": 1e6, **terms}):
                    self.taken_at.append(self._stage.world.now)
                    self.process.clock.sleep(section)

        return self._timed(task)

    def beside(self) -> Actor:
        """Return another thread of this process."""
        return Actor(self._stage, self.process.name, process=self.process)

    def is_cut(self, step: int, do: Callable[[], object]) -> bool:
        """Do something that is interrupted at this point of I/O; False where it has fewer."""
        self.process.cut_after(self._thread, step)
        do()
        while not self.idle:
            self._stage.at(self._stage.world.now + 1.0)
        self._thread.cut_in = 0
        return isinstance(self.error, SoftTimeLimit)

    def waits(self, wait: float, **terms: Any) -> Actor:
        """Wait for a lock for so many s, and keep it."""
        return self.tries(wait=wait, **terms)

    def cut_after(self, steps: int) -> None:
        """Interrupt it at one of its next points of I/O."""
        self.process.cut_after(self._thread, steps)

    def stops(self, until: float) -> Actor:
        """Stop, at once, until a real s."""
        self.process.stop(until - self._stage.world.now)
        return self

    def cut_off(self, *nodes: int) -> Actor:
        """Let nothing more come through between it and these nodes."""
        for node in nodes:
            self.paths[node].closed = True
        return self

    def breaks(self, *nodes: int) -> Actor:
        """Break its connections to these nodes; what is on its way will arrive when it is said."""
        for node in nodes:
            for link in self._links_to(node):
                self._late += [(link, chunk) for chunk in link.on_its_way]
                link.break_off()
            self._deafen(node)
        self._stage.settle()
        return self

    def deafened(self, *nodes: int) -> Actor:
        """Break its subscriptions to these nodes, and nothing else."""
        for node in nodes:
            self._deafen(node)
        self._stage.settle()
        return self

    def _deafen(self, node: int) -> None:
        for subscriber in self._subscribers_of(node):
            subscriber.broken()

    def late(self) -> Actor:
        """Let arrive what was on its way when connections broke."""
        for link, chunk in self._late:
            chunk.lost = False
            link.on_its_way.append(chunk)
            link.flow()
        self._late.clear()
        self._stage.settle()
        return self

    def _links_to(self, node: int) -> list[Link]:
        found = [thing for thing in self.process.descriptors.values() if isinstance(thing, Link)]
        return [link for link in found if link.node is self._stage.nodes[node]]

    def _subscribers_of(self, node: int) -> list[Subscriber]:
        all_ = self.process.subscribers
        return [one for one in all_ if one.node is self._stage.nodes[node]]

    def reaches(self, *nodes: int) -> Actor:
        """Let through what waits between it and these nodes, and what is sent from now on."""
        for node in nodes:
            self.paths[node].closed = False
            for link in self._links_to(node):
                link.flow()
            for subscriber in self._subscribers_of(node):
                subscriber.flow()
        self._stage.settle()
        return self


class Stage:
    """Nodes and actors, and their one clock. ttl, node_timeout, max_ttl: s."""

    def __init__(
        self, nodes: int = 3, *, ttl: float = 100.0, drift: float = 0.0, trace: bool = False
    ) -> None:
        self.world = world = World(0, trace=trace)
        random.seed(0)
        self.ttl = ttl
        self.options: dict[str, Any] = {
            "rate": 1.0, "offset": 0.0, "wall_error": 0.0,
            "node_timeout": ttl / 4, "clock_drift": drift, "max_ttl": ttl,
            "restart_guard": "strict",
        }  # fmt: skip
        self.silence = grace_period(ttl)
        self.nodes = [
            Node(world, index, rate=1.0, offset=1000.0, scripts=library()) for index in range(nodes)
        ]
        for node in self.nodes:
            node.trusted("redlock")
        introduce(self.nodes, "redlock")
        self.witness = world.witness = Witness(world, self.nodes, drift)

    def actor(self, name: str, *, new: bool = False, **times: Any) -> Actor:
        """Return a process; new: it is not connected yet."""
        return Actor(self, name, new=new, **times)

    def replaces(self, index: int, *, copied: bool) -> Callable[[], None]:
        """Let another server serve under a node's address; returns what brings the first back.

        copied: the other one has been a replica of the first.
        """
        node = self.nodes[index]
        self.world.note("node%d is replaced", index)
        back = node.give_way(copied=copied)
        node.silent_until = lost_until(node, self.silence)
        self.settle()

        def come_back() -> None:
            self.world.note("node%d: the first server is back", index)
            back()
            node.silent_until = lost_until(node, self.silence)
            self.settle()

        return come_back

    def at(self, moment: float) -> Stage:
        """Let time pass until a real s."""
        self.world.run(moment, self.witness.check)
        return self

    def waiting(self, node: int, resource: str = "a") -> list[str]:
        """Return the waiters that a node knows, in order, each by the name of its process."""
        key = waiting_key("redlock", resource).encode()
        reader = hiredis.Reader(encoding="utf-8")
        reader.feed(self.nodes[node].execute([b"ZRANGE", key, b"0", b"-1"])[1])
        return list(reader.gets())

    def forgets_waiters(self, *nodes: int, resource: str = "a") -> Stage:
        """Let nodes forget who waits."""
        for node in nodes:
            self.nodes[node].drop(waiting_key("redlock", resource).encode())
        return self

    def settle(self) -> None:
        """Let happen what is due now, and what that leads to: timers are late by a little."""
        self.world.run(self.world.now + A_LITTLE, self.witness.check)

    def restarts(self, *nodes: int) -> Stage:
        """Restart nodes without their memory."""
        for index in nodes:
            node = self.nodes[index]
            node.silent_until = max(node.silent_until, lost_until(node, self.silence))
            self.world.note("node%d restarts, keeps nothing", index)
            node.stop(keeps="nothing")
            node.start()
        self.settle()
        return self
