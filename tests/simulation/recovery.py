"""Workers with worker leases on one broker: what they do with messages, and what befalls them.

The shipped code beats, observes, proves, moves and answers the guard's question. The workers do
what kombu and Celery do: pop a message, note it under its tag, run its body, acknowledge it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import redis

from celery_redlock.lock.platform.clock import Platform
from celery_redlock.tasks.delivery.republish import MOVES
from celery_redlock.tasks.recovery import ledger as ledger_module
from celery_redlock.tasks.recovery import tags as tags_module
from celery_redlock.tasks.recovery.keeper import Keeper, keepers, still_owned
from celery_redlock.tasks.recovery.ledger import Ledger
from celery_redlock.tasks.recovery.tags import MAX_MOVES, DeliveryTag
from tests.simulation.broker import CLOSES, INDEX, UNACKED, Broker, Client
from tests.simulation.clients import Clock, Mutex, patched
from tests.simulation.invariants import Violation
from tests.simulation.network import Path
from tests.simulation.recovery_invariants import DEAD, LEASES, NAMES, Witness
from tests.simulation.world import Thread, World, running

PROFILE = "recovery"  # the name of these schedules
TIMEOUT = 3.0  # s for a reply to the shipped code, as its ledger's connection has
SPAN = 14.0  # s within which faults begin
SETTLES = 25.0  # s after the last fault within which all is back: proof, claims, tries
LISTS = ("shop", "shop\x06\x163")
PATIENT = 0.2  # s between two looks of a thread of the pool that has nothing to do
FEW = 300  # bytes of messages in one call of a script: two of them
RECONNECTS = 0.5  # s
RECALLS = 10.0  # s after the start of a worker within which what nobody knows of is back


@dataclass(eq=False)
class Delivery:
    """One message that a worker has. due, noted_at: real s; its body does not begin before due."""

    worker: Worker
    tag: str
    uid: str
    entry: str
    connection: int
    due: float
    runs: bool = False
    is_known: bool = False
    noted_at: float = math.inf

    @property
    def came_through(self) -> bool:
        """Whether its worker knows of it: neither was it killed, nor has it lost its connection."""
        worker = self.worker
        return not worker.dead and (self.is_known or self.connection == worker.connection)


class Worker:
    """One worker process: the consumer's thread, the pool's, and that of the shipped keeper.

    recovers: it has a worker lease; else it is one of an earlier release, which keeps all tags.
    """

    def __init__(self, schedule: Recovery, name: str, *, recovers: bool) -> None:
        self.schedule, self.name, self.recovers = schedule, name, recovers
        self.world = world = schedule.world
        draw = world.random
        self.broker = schedule.broker
        self.clock = Clock(
            self, 1 + draw.uniform(-0.01, 0.01), draw.uniform(0, 1e4), draw.uniform(-900, 900)
        )
        self.path = Path(draw.choice((0.001, 0.01, 0.1, 0.2)), 0.02, 1.0, draw)
        self.stopped_until = 0.0  # real s
        self.dead = False
        self.is_ending = self.is_over = False  # a warm shutdown, and after it
        self.said: list[str] = []  # in its log
        self.steps = 0  # points of I/O so far
        self._befalls: dict[int, Callable[[], object]] = {}
        self.before_note: Callable[[], object] = bool  # what befalls it between tag and note
        self.connection = 0  # how often its consumer has lost one
        self.books: list[Delivery] = []
        self._is_consuming = False
        self.threads: list[Thread] = []  # of the keeper
        platform = Platform(self.clock, start_thread=self._start, new_mutex=Mutex)
        self.keeper = Keeper(platform, self._connect, name, self, self._forget_waiting)
        self._client = Client(self, self.broker, self.path, math.inf)
        self.prefetch = draw.choice((2, 4, 12))
        self._consumer = Thread(world, self, self._consume)
        self.slots = draw.choice((1, 2))
        for slot in range(2):
            Thread(world, self, functools.partial(self._run_bodies, slot))

    def _start(self, run: Callable[[], None]) -> None:
        self.threads.append(Thread(self.world, self, run))

    def _connect(self) -> Ledger:
        client = Client(self, self.broker, self.path, TIMEOUT)
        return Ledger(client, "", UNACKED, INDEX, LEASES, DEAD, NAMES)

    @property
    def lives(self) -> bool:
        """Whether it has neither ended nor begun to."""
        return not (self.dead or self.is_ending)

    # points of I/O

    def pass_io(self) -> None:
        """Pass a point of I/O, where something may befall the process."""
        self.steps += 1
        befall = self._befalls.pop(self.steps, None)
        if befall is not None:
            befall()
        self.step()

    def step(self) -> None:
        """Go on, unless the process is stopped or dead."""
        if self.dead or self.stopped_until > self.world.now:
            thread = running()
            assert thread is not None
            thread.rest(self.stopped_until)

    def after(self, steps: int, befall: Callable[[], object]) -> None:
        """Let something befall it at one of its next points of I/O."""
        self._befalls[self.steps + steps] = befall

    def stop(self, seconds: float) -> None:
        """Stop all its threads for so many real s, as SIGSTOP does."""
        self.world.counts["stops"] += 1
        self.world.note("%s stops for %.2f s", self.name, seconds)
        self.stopped_until = max(self.stopped_until, self.world.now + seconds)

    def kill(self) -> None:
        """End as `kill -9` does; the broker learns of it a little later."""
        if not self.dead:
            self.world.counts["kills"] += 1
            self.world.note("%s is killed", self.name)
            self.dead = True
            self.world.at(self.world.now + CLOSES, self._close)

    def _close(self) -> None:
        for question in [one for one in self.broker.asked if one.worker is self]:
            question.over()
            self.broker.unblock(question)

    # the consumer

    def _consume(self) -> None:
        while not self.is_ending:
            try:
                if self.recovers:
                    with contextlib.suppress(redis.ResponseError):  # it goes on without a lease
                        self.keeper.join()
                self._is_consuming, life = True, self.broker.life
                while not self.is_ending:
                    self._take_one()
                    if life != self.broker.life:
                        raise redis.ConnectionError("an outage")
            except redis.RedisError as error:
                self.world.note("%s loses its connection: %r", self.name, error)
                self._forget_all()
                self.clock.sleep(RECONNECTS)
        self._give_all_back()
        self.keeper.end()
        self.books.clear()
        self.is_over = True

    def _take_one(self) -> None:
        if len(self.books) >= self.prefetch:
            self.clock.sleep(PATIENT)
            return
        connection = self.connection
        found = self._client.ask("BRPOP", LISTS, waits=1.0)
        if found is not None:
            self._note(connection, *found)
        if connection != self.connection:
            raise redis.ConnectionError("cut")

    def _note(self, connection: int, name: str, item: str) -> None:
        raw = json.loads(item)
        properties = raw["properties"]
        if self.recovers:
            self._tag(properties, name)
        tag = properties["delivery_tag"]
        self.pass_io()
        self.before_note()
        if connection != self.connection:
            return
        headers = raw["headers"]
        due = self.world.now + headers["due"]
        one = Delivery(self, tag, headers["id"], json.dumps([raw, "", name]), connection, due)
        note = ("ZADD", INDEX, "1", tag), ("HSET", UNACKED, tag, one.entry)
        self._client.ask("MULTI", *note, about=one)
        self.books.append(one)
        one.is_known = True

    def _tag(self, properties: dict[str, object], name: str) -> None:
        tag = self.keeper.tag(name)
        if not tag and DeliveryTag.of(properties["delivery_tag"]) is not None:
            tag = str(self.schedule.new_id())
        if tag:
            properties["delivery_tag"] = tag

    def _forget_all(self) -> None:
        """Forget what has not begun: the connection is lost."""
        self.connection += 1
        self._is_consuming = False
        self.books = [one for one in self.books if one.runs]

    def cut(self) -> None:
        """Lose the connections, but not the broker: kombu gives everything back as it closes."""
        if self._is_consuming and not self.dead:
            self.world.note("%s: its connections are cut", self.name)
            given = [one for one in self.books if one.connection == self.connection]
            self._forget_all()
            for question in [one for one in self.broker.asked if one.worker is self]:
                question.fail()
            Thread(self.world, self, lambda: self._restore(given))

    def _restore(self, given: list[Delivery]) -> None:
        with contextlib.suppress(redis.RedisError):
            for one in given:
                self._client.ask("RESTORE", one.tag, False, about=one)

    def end(self) -> None:
        """End by a warm shutdown."""
        if not self.dead:
            self.world.note("%s: a warm shutdown", self.name)
            self.is_ending = True

    def _give_all_back(self) -> None:
        while any(one.runs for one in self.books):
            self.clock.sleep(PATIENT)
        self._restore([one for one in self.books if one.connection == self.connection])

    # the pool

    def _run_bodies(self, slot: int) -> None:
        while not self.is_over:
            now = self.world.now
            due = [one for one in self.books if one.due <= now and not one.runs]
            if not due or self.is_ending or slot >= self.slots:
                self.clock.sleep(PATIENT)
                continue
            self._run(due[0])

    def _run(self, one: Delivery) -> None:
        one.runs = True
        if not self._still_owned(one.tag):
            self._leave(one)
            return
        self.world.witness.begins(self, one)
        self.clock.sleep(self.schedule.body(one.uid))
        draw = self.world.random.random
        if one.connection == self.connection or draw() < 0.5:  # some over a new connection
            strike = ("ZREM", INDEX, one.tag), ("HDEL", UNACKED, one.tag)
            with contextlib.suppress(redis.RedisError):
                if draw() < 0.1:  # `Reject(requeue=True)`
                    self._client.ask("RESTORE", one.tag, True, about=one)
                else:
                    self._client.ask("MULTI", *strike, about=one)
                    self.world.counts["ends"] += 1
        if one in self.books:
            self.books.remove(one)

    def _still_owned(self, tag: str) -> bool:
        found = DeliveryTag.of(tag)
        if found is not None and keepers.get(found.lease) not in (None, self.keeper):
            return True  # another process' lease: this one does not know it
        return still_owned(tag)

    def _leave(self, one: Delivery) -> None:
        self.world.counts["left"] += 1
        if one in self.books:
            self.books.remove(one)

    def _forget_waiting(self, lease: str) -> None:
        for one in list(self.books):
            if one.tag.startswith(lease) and not one.runs:
                one.due = self.world.now


class Recovery:
    """One schedule: a broker, workers that come and go, and messages."""

    def __init__(self, seed: int, *, trace: bool = False) -> None:
        self.world = world = World(seed, trace=trace)
        self.broker = Broker(world)
        world.witness = self.witness = Witness(self)
        self.workers: list[Worker] = []
        self.quiet_at = SPAN  # real s of the last fault's end
        self._bodies: dict[str, float] = {}
        self._ids = Random(seed)

    def new_id(self) -> uuid.UUID:
        """Return an id of its own, for tags and worker leases."""
        return uuid.UUID(int=self._ids.getrandbits(128))

    @classmethod
    def drawn(cls, seed: int, *, trace: bool = False) -> Recovery:
        """Return a schedule in which all is drawn from its seed."""
        schedule = cls(seed, trace=trace)
        Faults(schedule).plan()
        return schedule

    def add(self, *, recovers: bool = True) -> Worker:
        """Start a worker."""
        worker = Worker(self, f"w{len(self.workers)}", recovers=recovers)
        self.workers.append(worker)
        return worker

    def publish(self, body: float, *, due: float = 0.0, moves: int = 0, name: str = "shop") -> None:
        """Send a message. body: s of its run. due: s after it came. moves: so far."""
        uid = f"m{len(self._bodies)}"
        self._bodies[uid] = body
        properties = {
            "delivery_tag": str(self.new_id()), "delivery_info": {}, MOVES: moves,
        }  # fmt: skip
        raw = {"body": "[]", "headers": {"id": uid, "due": due}, "properties": properties}
        self.broker.execute(None, "LPUSH", name, json.dumps(raw))

    def body(self, uid: str) -> float:
        """Return the s that a body takes."""
        return self._bodies[uid]

    def run(self, steps: Callable[[Recovery], object] = bool) -> None:
        """Run it to its end. Raises Violation. steps: what happens first."""
        world = self.world
        with simulated_workers(self):
            try:
                steps(self)
                while world.now < self.quiet_at:
                    world.run(self.quiet_at, self.witness.check)
                self.is_quiet = True
                if not any(one.recovers and one.lives for one in self.workers):
                    self.add()
                world.run(world.now + SETTLES, self.witness.check)
                if self.witness.stays():  # of joins whose replies were lost: each takes its time
                    world.run(world.now + SETTLES, self.witness.check)
                if self.witness.settled():
                    self.add()  # as what was killed is started again
                    world.run(world.now + RECALLS, self.witness.check)
                    if strays := self.witness.settled():
                        raise Violation("all_back", f"{strays} lie there")
            finally:
                world.close()

    is_quiet = False  # nothing befalls anybody any more

    def until(self, moment: float) -> None:
        """Count on a fault that ends at a real s."""
        self.quiet_at = max(self.quiet_at, moment)


class Faults:
    """What befalls a drawn schedule, and when."""

    def __init__(self, schedule: Recovery) -> None:
        self._schedule, self._world = schedule, schedule.world
        self._draw = schedule.world.random

    def plan(self) -> None:
        """Draw workers, messages and faults."""
        draw, world = self._draw, self._world
        for number in range(draw.choice((2, 3, 3, 4))):
            recovers = number == 0 or draw.random() > 0.15
            world.at(draw.uniform(0, 2), self._add, recovers)
        for _ in range(draw.choice((6, 12, 20))):
            body = draw.choice((0.05, 0.5, 3.0, 8.0)) * draw.uniform(0.5, 1)
            due = draw.choice((0.0, 0.0, 0.0, 5.0, 12.0)) * draw.random()
            moves = MAX_MOVES if draw.random() < 0.03 else 0
            world.at(draw.uniform(0, SPAN), self._publish, body, due, moves, draw.choice(LISTS))
        kinds = (
            self._kill, self._kill, self._kill, self._stop, self._stop, self._stop, self._stop,
            self._outage, self._freeze, self._jam, self._jam, self._cut, self._set_clock,
            self._set_clock, self._stop_and_set, self._stop_and_set, self._refuse, self._restore,
            self._refuse_joins, self._end,
        )  # fmt: skip
        for _ in range(draw.choice((1, 2, 3, 4, 6))):
            world.at(draw.uniform(1, SPAN), draw.choice(kinds))

    def _add(self, recovers: bool) -> None:
        self._schedule.add(recovers=recovers)

    def _publish(self, body: float, due: float, moves: int, name: str) -> None:
        if name not in self._schedule.broker.refusing:
            self._schedule.publish(body, due=due, moves=moves, name=name)

    def _one(self) -> Worker:
        schedule = self._schedule
        living = [one for one in schedule.workers if one.lives] or [schedule.add()]
        return self._draw.choice(living)

    def _befall(self, worker: Worker, befall: Callable[[], object]) -> None:
        """Let something befall a worker: now, or at one of its next points of I/O."""
        if self._draw.random() < 0.4:
            befall()
        else:
            worker.after(self._draw.randrange(1, 15), lambda: self._schedule.is_quiet or befall())

    def _seconds(self) -> float:
        return self._draw.choice((0.5, 1.5, 3.0, 5.0, 6.5, 8.0, 12.0)) * self._draw.uniform(
            0.9, 1.1
        )

    def _kill(self) -> None:
        worker, draw = self._one(), self._draw

        def kill() -> None:
            worker.kill()
            if draw.random() < 0.5:
                self._world.at(self._world.now + draw.uniform(0.1, 8), self._add, worker.recovers)

        self._befall(worker, kill)

    def _stop(self) -> None:
        worker, seconds = self._one(), self._seconds()

        def stop() -> None:
            self._schedule.until(self._world.now + seconds)
            worker.stop(seconds)

        self._befall(worker, stop)

    def _outage(self) -> None:
        broker, until = self._schedule.broker, self._world.now + self._seconds()
        if not broker.down:
            broker.stop()
            self._world.at(until, broker.start)
            self._schedule.until(until)

    def _freeze(self) -> None:
        self._schedule.broker.frozen_until = until = self._world.now + self._seconds()
        self._world.note("the broker answers nobody until %.2f", until)
        self._schedule.until(until)

    def _jam(self) -> None:
        worker = self._one()
        worker.path.jams_until = until = self._world.now + self._seconds()
        self._world.note("nothing of %s comes through until %.2f", worker.name, until)
        self._schedule.until(until)

    def _cut(self) -> None:
        self._one().cut()

    def _set_clock(self) -> None:
        seconds = self._draw.choice((1.7, 5.1, 3600.0, -1.7, -5.1, -7200.0)) + self._draw.random()
        self._world.note("the broker's clock is set by %.2f s", seconds)
        self._schedule.broker.offset += seconds
        self._schedule.witness.clock_was_set()

    def _stop_and_set(self) -> None:
        """Stop a worker for about as long as a proof takes if the clock shows it at once."""
        seconds = self._draw.uniform(4.5, 6.5)
        self._one().stop(seconds)
        self._schedule.until(self._world.now + seconds)
        self._set_clock()

    def _refuse(self) -> None:
        name, until = self._draw.choice(LISTS), self._world.now + self._seconds()
        if not self._schedule.broker.lists.get(name):
            self._schedule.broker.refuse(name)
            self._world.at(until, self._schedule.broker.take_again, name)
            self._schedule.until(until)

    def _refuse_joins(self) -> None:
        """Let all connections be lost, and no worker join for a while."""
        schedule, draw = self._schedule, self._draw
        schedule.broker.no_joins_until = until = self._world.now + self._seconds()
        self._world.note("no worker may join until %.2f", until)
        schedule.until(until)
        if draw.random() < 0.5 and not schedule.broker.down:
            schedule.broker.stop()
            self._world.at(self._world.now + draw.uniform(0.1, 1.0), schedule.broker.start)

    def _restore(self) -> None:
        """Let kombu give back a message after the visibility timeout."""
        there = [*self._schedule.broker.hashes.get(UNACKED, {})]
        if there:
            self._schedule.broker.execute(None, "RESTORE", self._draw.choice(there), False)

    def _end(self) -> None:
        worker = self._one()
        self._befall(worker, worker.end)


class Errors(logging.Handler):
    """The log of the shipped code: an error in it must be one of the broker's."""

    def emit(self, record: logging.LogRecord) -> None:
        """Look for an error."""
        thread = running()
        if thread is None:
            return
        worker = thread.process
        worker.world.note("%s says: %s", worker.name, record.getMessage())
        for error in record.args or ():
            if isinstance(error, Exception) and not isinstance(error, redis.RedisError):
                worker.world.witness.broken("no_inner_error", repr(error))


@contextlib.contextmanager
def simulated_workers(schedule: Recovery) -> Iterator[None]:
    """Let the shipped code draw its names from the seed, and see what it logs, for a while."""
    log, handler = logging.getLogger("celery_redlock.tasks.recovery"), Errors()
    before = log.level, log.propagate
    log.addHandler(handler)
    log.propagate = False
    log.setLevel(logging.DEBUG)
    try:
        rights = patched(Ledger, missing_rights=lambda self: [])
        with (
            patched(tags_module, uuid4=schedule.new_id),
            patched(ledger_module, CHUNK_BYTES=FEW),
            rights,
        ):
            yield
    finally:
        keepers.clear()
        log.removeHandler(handler)
        log.level, log.propagate = before
