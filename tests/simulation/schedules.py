"""Schedules: a world made from a profile and a seed, and run from its start to its end."""

from __future__ import annotations

import math
import random
from typing import Any

from celery_redlock.errors import LockLost, LockTaken, NotAcquired, QuorumUnreachable
from celery_redlock.label import RunId
from celery_redlock.lock.engine.acquirer import AlreadyCompletedError
from celery_redlock.lock.lock import Lock
from celery_redlock.lock.model.keys import completion_key
from celery_redlock.lock.model.options import CompletionMarker
from celery_redlock.tasks.settings.options import BUILT_IN, TaskLockOptions
from celery_redlock.tasks.unique.claim import MIN_ROUNDS, SENDING_TTL, Claim, ClaimToken
from celery_redlock.tasks.unique.rounds import EarlierSend
from tests.simulation.clients import Process, SoftTimeLimit
from tests.simulation.faults import NODE_TIMEOUT, TTL, Faults, Profile, guard_silence, options_of
from tests.simulation.invariants import Witness
from tests.simulation.network import Path
from tests.simulation.nodes import Node, introduce, library
from tests.simulation.orders import Orders
from tests.simulation.world import Thread, World

KEPT = 100.0  # s: of a done mark, or a window; no schedule is longer
DEBOUNCED = {"debounce": 0.3, "debounce_max": 0.6}  # s: a burst ends within a schedule


class Schedule:
    """One run of a world: its nodes, its processes and what they do."""

    def __init__(self, profile: Profile, seed: int, *, trace: bool = False) -> None:
        self.profile = profile
        self.world = world = World(seed, trace=trace)
        random.seed(seed)  # the shipped code draws its pauses from there
        draw = world.random
        self.silence = guard_silence()
        size = draw.choice(profile.sizes)
        guard = "off" if size == 1 else "strict"
        rate = 0.47 * profile.drift
        scripts = library()
        self.nodes = [
            Node(
                world, index, rate=1 + draw.choice((-rate, 0, rate)), offset=1000 + 10 * index,
                scripts=scripts,
            )
            for index in range(size)
        ]  # fmt: skip
        world.witness = self.witness = Witness(world, self.nodes, profile.drift)
        self.processes: list[Process] = []
        self.workers: list[Thread] = []
        # what was sent: the real s at which it is due, 0.0: at once; task id; its window
        self.queue: list[tuple[float, str, ClaimToken | None]] = []
        self.debounced = [f"s{n}" for n in range(profile.sends) if draw.random() < 0.5]
        drawn = {name: draw.choice(profile.rates) for name in "abc"} if profile.rates else {}
        self.rates = {name: rate for name, rate in drawn.items() if rate is not None}
        self.orders = Orders(self)
        for index in range(draw.choice(profile.clients)):
            self._add_process(index, guard)
        for node in self.nodes:
            node.trusted("redlock")
        introduce(self.nodes, "redlock")
        for process in self.processes:
            if draw.random() >= profile.cold:
                process.connect()
        for process in self.processes:
            self.workers.append(process.thread(Worker(self, process).run))

    def _add_process(self, index: int, guard: str) -> None:
        profile, world = self.profile, self.world
        draw = world.random
        paths = [
            Path(draw.choice(profile.bases), profile.slow, profile.worst, draw) for _ in self.nodes
        ]
        rate = 0.47 * profile.drift
        process = Process(
            world, f"p{index}", self.nodes, paths,
            rate=1 + draw.choice((-rate, 0, rate)), offset=100.0 * (index + 1),
            wall_error=draw.uniform(-profile.wall_error, profile.wall_error),
            **options_of(profile, guard),
        )  # fmt: skip
        process.zombies, process.short_writes = profile.zombies, profile.short_writes
        self.processes.append(process)

    def run(self) -> None:
        """Run it to its end. Raises Violation."""
        world, profile = self.world, self.profile
        Faults(self).plan(profile.span)
        try:
            world.run(profile.horizon, self.witness.check, most=world.random.choice(profile.events))
        finally:
            world.close()


class Worker:
    """What one thread of a process does with locks: what tasks do, at random.

    patient: it waits as the shipped code does. Else it tries when a lease that refused it ends,
    or at any moment: fewer events, and those that matter.
    """

    def __init__(self, schedule: Schedule, process: Process) -> None:
        self.schedule, self.process = schedule, process
        self.random = draw = schedule.world.random
        self.section = draw.choice(schedule.profile.sections)
        self.pause = draw.choice(schedule.profile.pauses)
        self.patient = draw.random() < schedule.profile.patient

    def run(self) -> None:
        """Acquire, hold and release some times."""
        pause = self.random.random() * 2 * self.pause
        for _ in range(self.schedule.profile.rounds):
            try:
                self.process.clock.sleep(pause)
                pause = self.one()
            except SoftTimeLimit:
                pass

    def one(self) -> float:
        """Make one lock and use it; returns the s after which to make another."""
        profile, draw = self.schedule.profile, self.random.random
        if profile.orders:
            self.schedule.orders.step(self.process)
            return draw() * 2 * self.pause
        if profile.sends:
            return self._send() if draw() < 0.6 else self._end_window()
        resources, fencing = self._resources(), draw() < profile.fencing
        wait = self.random.choice((0.3, 5.0)) if self.patient else 0.0
        limits, rates = dict(zip("abc", profile.limits, strict=False)), self.schedule.rates
        lock = self.process.redlock.lock(
            resources, ttl=TTL, wait=wait, renew=draw() < profile.renews, fencing=fencing,
            limit={name: limits[name] for name in resources} if limits else profile.limit,
            rate={name: rates[name] for name in resources if name in rates} or None,
        )  # fmt: skip
        if profile.holds and draw() < profile.holds:
            lock.ownership.options = lock.ownership.options._replace(is_hold=True)
        if profile.runs:
            return self._delivery(lock)
        if lock.ownership.options.rates:
            return self._rated(lock, wait)
        try:
            with self.schedule.witness.waiting(self.process, wait, keys=len(resources)):
                lock.acquire()
        except LockTaken as error:
            return self._next(error.expires_in)
        except QuorumUnreachable:
            return self._next(None)
        if fencing:
            self.schedule.witness.fenced(resources, lock.fencing_token)
        try:
            self._section(lock)
        finally:
            lock.release()
        return draw() * 2 * self.pause

    def _send(self) -> float:
        """Send what is sent once; returns the s after which to do something else."""
        schedule, witness, draw = self.schedule, self.schedule.witness, self.random.random
        schedule.world.counts["sends"] += 1
        task_id = f"m{schedule.world.counts['sends']}"
        name = f"s{self.random.randrange(schedule.profile.sends)}"
        debounced = DEBOUNCED if name in schedule.debounced else {}
        options = TaskLockOptions(
            **{**BUILT_IN, "ttl": TTL, "unique_until": "started", **debounced}
        )
        claim = Claim(self.process.redlock.session, name, RunId(task_id, "t"), options, KEPT, KEPT)
        began = schedule.world.now
        due = [0.0]

        def publish(ticket: ClaimToken | None) -> None:
            now = schedule.world.now
            if debounced:
                due[0] = now + claim.duration * (1 + schedule.profile.drift)
            if ticket is not None:
                lease = min(claim.duration, max(SENDING_TTL, MIN_ROUNDS * NODE_TIMEOUT))
                opened = began - now
                if not debounced:
                    opened = self.process.clock.since(ticket.ends_at - KEPT)
                replaces = ticket.replaces.partition(":")[0]
                witness.window_opened(claim, lease, opened, replaces, began, due[0])
            self.process.clock.sleep(draw() * 0.1)
            if draw() < 0.1:
                witness.window_ends(task_id)
                raise OSError("no broker")
            witness.published(task_id)
            schedule.queue.append((due[0], task_id, ticket))

        try:
            found = claim.send(publish)
        except (OSError, SoftTimeLimit):
            witness.window_ends(task_id)
        else:
            if isinstance(found, EarlierSend):
                witness.dropped(found.task_id, began)
        return draw() * 2 * self.pause

    def _end_window(self) -> float:
        """Take a message and let its window end, as the beginning of its body does.

        One that is debounced is taken once it is due, and dropped if a later send has marked it.
        """
        schedule, draw = self.schedule, self.random.random
        session = self.process.redlock.session
        message = next((one for one in schedule.queue if one[0] <= schedule.world.now), None)
        if message is not None:
            schedule.queue.remove(message)
            due, task_id, ticket = message
            if ticket is not None and due:
                ticket.mark_superseded(session, "t")
                mark = completion_key("redlock", str(RunId(task_id, "t"))).encode()
                if any(node.holder(mark) for node in schedule.nodes):
                    schedule.witness.run_dropped(task_id)
            elif ticket is not None:
                schedule.witness.window_ends(task_id)
                if ticket.release(session).wait():
                    schedule.witness.window_over(task_id)
        return draw() * 2 * self.pause

    def _delivery(self, lock: Lock) -> float:
        """Run what may have run before; returns the s after which to take another message."""
        witness, draw = self.schedule.witness, self.random.random
        run = f"run{self.random.randrange(self.schedule.profile.runs)}"
        lock.ownership.options = lock.ownership.options._replace(
            marker=CompletionMarker(run, KEPT, asks_since=-math.inf)
        )
        done = False
        try:
            lock.acquire()
            holding = lock.ownership.acquisitions[0]
            witness.body_began(holding)
            self._section(lock)
            done = draw() < 0.8  # else its message comes back by itself
            if done:
                witness.body_ended(holding)
        except LockTaken as error:
            return self._next(error.expires_in)
        except QuorumUnreachable:
            return self._next(None)
        except AlreadyCompletedError:
            self.schedule.world.counts["dropped"] += 1
        finally:
            lock.ownership.release_all(ended=done)
        return draw() * 2 * self.pause

    def _rated(self, lock: Lock, wait: float) -> float:
        """Run a body that takes starts of rates; returns the s after which to take another one."""
        witness, draw, process = self.schedule.witness, self.random.random, self.process
        rates = lock.ownership.options.rates or {}
        follows = draw() < 0.8
        lock.ownership.options = lock.ownership.options._replace(body_follows=follows)
        try:
            with witness.waiting(process, wait, keys=2 * len(lock.ownership.options.resources)):
                lock.acquire()
            if follows:
                slack = min(rate.slack for rate in rates.values())
                process.clock.sleep(slack * self.random.choice((0.0, 0.5, 0.9, 2.0)) * draw())
                lock.ownership.begin_body()
            self._section(lock)
        except (LockTaken, QuorumUnreachable) as error:
            lock.ownership.release_all()
            witness.starts.refused(process)
            return self._next(error.expires_in if isinstance(error, LockTaken) else None)
        finally:
            lock.ownership.release_all()
        return draw() * 2 * self.pause

    def _next(self, expires_in: float | None) -> float:
        """Return when to try again: as a lease ends, or at any moment."""
        draw = self.random.random
        if expires_in is not None and draw() < 0.6:
            return expires_in + draw() * 0.02
        return draw() * TTL

    def _resources(self) -> Any:
        names = ["a", "b", "c"][: self.schedule.profile.resources]
        return self.random.sample(names, self.random.randint(1, len(names)))

    def _section(self, lock: Lock) -> None:
        draw, clock = self.random.random, self.process.clock
        left = draw() * 2 * self.section
        while left > 0:
            pause = min(left, draw() * TTL)
            left -= pause
            clock.sleep(pause)
            if draw() < self.schedule.profile.extends:
                try:
                    lock.extend()
                except (LockLost, NotAcquired):
                    return
