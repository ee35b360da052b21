"""A drill from its begin to its end: it sends, brings the faults, reads the journal, and removes.

Not here: when which fault comes (`schedule.py`), and what the journal proves (`audit.py`).
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from celery_redlock.lock.platform.clock import SystemClock
from celery_redlock.operate.drill.audit import Audit, JournalLine, RunsSoFar, SentMessage, audit
from celery_redlock.operate.drill.crew import DrillWorker
from celery_redlock.operate.drill.own_queue import BrokerError, OwnQueue
from celery_redlock.operate.drill.removal import drill_queue_name, remove_drill
from celery_redlock.operate.drill.schedule import (
    CUT,
    FREEZE,
    KILL,
    Fault,
    plan_faults,
    ttl_for,
)
from celery_redlock.operate.drill.worker import WorkerOrder
from celery_redlock.tasks.per_app import settings_of

POOLS = ("prefork", "prefork", "threads")  # one worker each
RESOURCES = ("a", "b", "c")
WAITING = 3  # messages of a resource that are sent and have not ended: the lock is always wanted
BODIES = (0.1, 0.5)  # seconds of a body, at least and at most
TICK = 0.05  # seconds between two looks at the journal
MORE = 20.0  # seconds that start and end may take, beside the drill
START_WITHIN = 10.0  # of these until all workers consume
REMOVE_WITHIN = 9.0  # and to end the workers and to remove the keys
FIND_WITHIN = 2.0  # of these until RabbitMQ has back what a killed worker had
# seconds of a warm shutdown, for most of which a worker waits for lock nodes that are silent. One
# that is killed loses what it has just been given, as a message that it has put back itself.
WARM = 5.0
# seconds before a fault in which nothing is sent. Source: kombu.transport.redis: a message that
# BRPOP has taken is noted as unacknowledged after its reply is read, so a death between loses it.
QUIET_BEFORE = 0.4
SEEK_BODY = 1.5  # seconds for which a kill waits until a body runs where it is to strike
RUNS_STILL = 0.3  # seconds since the last line of a body that counts as running


class DrillError(Exception):
    """A drill cannot be held: a worker does not start, or the broker fails."""


@dataclass(frozen=True)
class DrillReport:
    """What a drill has seen. seconds: of the drill itself. faults: how often each was brought."""

    queue: str
    seconds: float
    seed: int
    workers: int
    ttl: float
    faults: dict[str, int]
    audit: Audit


class Drill:
    """One drill. app_name: as of `celery -A`. tell: called with what is done, as text.

    left: after `hold`, a line for each server from which it could not remove what is the drill's.
    Raises SettingsError if the drill is too short for the settings of the app.
    """

    def __init__(
        self, app: Any, app_name: str, seconds: float, seed: int, tell: Callable[[str], object]
    ) -> None:
        settings = settings_of(app)
        self.token = uuid4().hex[:8]
        self.left: list[str] = []
        self._app = app
        self._seconds = seconds
        self._seed = seed
        self._tell = tell
        self._app_name = app_name
        self._ttl = ttl_for(settings.node_timeout, settings.max_ttl, seconds)
        self._clock = SystemClock()
        self._chance = random.Random(seed)  # noqa: S311 - no secret
        self._sent: list[SentMessage] = []
        self._waiting: list[SentMessage] = []  # those that have not ended, and perhaps others
        self._runs = RunsSoFar()
        self._deaths: dict[str, float] = {}
        self._faults: dict[str, int] = {}
        self._thaws: list[tuple[float, DrillWorker]] = []
        self._asked = self._clock.now()
        self._is_stopped = False

    @property
    def queue_name(self) -> str:
        return drill_queue_name(self.token)

    def count_from_now(self) -> None:
        """Count from now on what its start and its end take: people have agreed."""
        self._asked = self._clock.now()

    def hold(self) -> DrillReport:
        """Hold the drill; whatever ends it, its processes are gone then, and all but `left`.

        Raises DrillError, or KeyboardInterrupt after `stop`.
        """
        try:
            still_there = self._hold()
        except BrokerError as error:
            raise DrillError(f"the broker fails: {error}") from None
        seen = self.seen(still_there)
        return DrillReport(
            queue=self.queue_name,
            seconds=self._seconds,
            seed=self._seed,
            workers=len(POOLS),
            ttl=self._ttl,
            faults=dict(self._faults),
            audit=seen,
        )

    def seen(self, still_there: Collection[str] = ()) -> Audit:
        """Return what was seen so far. still_there: messages that the broker has."""
        runs = list(self._runs.by_run.values())
        return audit(self._sent, runs, self._deaths, still_there, self._runs.unheld)

    def _hold(self) -> set[str]:
        """Begin, run and end; return which messages the broker has that did not end."""
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="drill-")))
            queue = OwnQueue(self._app, self.queue_name)
            stack.callback(queue.close)
            queue.open()
            self._tell(f"queue {self.queue_name}, locks drill:{self.token}:*")
            workers = [self._worker(number, pool, folder) for number, pool in enumerate(POOLS)]
            stack.callback(lambda: self.left.extend(remove_drill(self._app, queue)))
            stack.callback(_kill_all, workers)
            with (folder / "journal").open("a+") as journal:
                journal.seek(0)
                self._begin(queue, workers, journal)
                self._run(queue, workers, journal)
                self._drain(journal)
                return self._still_there(queue, workers, journal)

    def stop(self) -> None:
        """Have the drill end soon, by a KeyboardInterrupt of `hold`; for a handler of signals."""
        self._is_stopped = True

    def _tick(self) -> None:
        """Sleep a moment. Only here a signal ends the drill: no process has just been started."""
        if self._is_stopped:
            raise KeyboardInterrupt
        self._clock.sleep(TICK)

    def _worker(self, number: int, pool: str, folder: Path) -> DrillWorker:
        def order(life: str, cut: Path) -> WorkerOrder:
            journal = str(folder / "journal")
            return WorkerOrder(
                self._app_name, life, pool, self.queue_name, journal, str(cut), self._ttl
            )

        return DrillWorker(number, folder, order)

    def _begin(self, queue: OwnQueue, workers: Collection[DrillWorker], journal: Any) -> None:
        """Start the workers, and return when all of them consume."""
        for worker in workers:
            worker.start()
        until = self._clock.now() + START_WITHIN
        while not {worker.life for worker in workers} <= self._runs.ready:
            for worker in workers:
                if not worker.runs:
                    raise DrillError(f"a worker has ended at its start:\n{worker.last_lines()}")
            if self._clock.now() > until:
                late = next(worker for worker in workers if worker.life not in self._runs.ready)
                raise DrillError(
                    f"a worker does not consume after {START_WITHIN:g} s:\n{late.last_lines()}"
                )
            self._tick()
            self._read(journal)

    def _read(self, journal: Any) -> None:
        """Read what is new in the journal; a line that is not whole yet is read later."""
        while True:
            at = journal.tell()
            text = journal.readline()
            if not text.endswith("\n"):
                journal.seek(at)
                return
            if (line := JournalLine.of(text)) is not None:
                self._runs.add(line)

    def _run(self, queue: OwnQueue, workers: list[DrillWorker], journal: Any) -> None:
        """Send and bring the faults, for as long as the drill lasts."""
        faults = list(plan_faults(self._seed, self._seconds, self._ttl, POOLS))
        begun = self._clock.now()
        while (now := self._clock.now() - begun) < self._seconds:
            self._read(journal)
            self._thaw(begun + now)
            if faults and now >= faults[0].at and self._bring(faults[0], now, workers):
                faults.pop(0)
            if not faults or now < faults[0].at - QUIET_BEFORE:
                self._send(queue)
            self._tick()
        self._thaw(float("inf"))
        for worker in workers:
            if not worker.runs:
                worker.start()

    def _send(self, queue: OwnQueue) -> None:
        waiting = Counter(message.resource for message in self._open())
        for name in RESOURCES:
            resource = f"drill:{self.token}:{name}"
            for _ in range(WAITING - waiting[resource]):
                message_id = f"drill-{self.token}-{len(self._sent)}"
                message = SentMessage(message_id, resource, self._clock.now())
                queue.send(message_id, resource, self._chance.uniform(*BODIES))
                self._sent.append(message)
                self._waiting.append(message)

    def _bring(self, fault: Fault, now: float, workers: list[DrillWorker]) -> bool:
        """Bring a fault; return False if it is to be tried again: no body runs there yet."""
        worker = workers[fault.worker]
        if not worker.runs:
            worker.start()
        is_seeking = now < fault.at + SEEK_BODY
        if worker.life not in self._runs.ready:
            return not is_seeking  # it still starts: then the fault is left out
        at = self._clock.now()
        running = self._runs.running_in(worker.life, at - RUNS_STILL)
        if not running and is_seeking:
            return False
        text = f"worker {worker.number + 1}"
        if fault.kind == KILL:
            worker.kill()
            self._deaths[worker.life] = at
            worker.start()
        elif fault.kind == FREEZE:
            worker.freeze()
            self._thaws.append((at + fault.lasts, worker))
            text = f"{text} for {fault.lasts:.1f} s"
        elif fault.kind == CUT:
            worker.cut()
        elif not any(worker.kill_child(run.pid) for run in running):
            return not is_seeking
        self._faults[fault.kind] = self._faults.get(fault.kind, 0) + 1
        self._tell(f"{now:5.1f} s  {fault.kind}: {text}")
        return True

    def _thaw(self, until: float) -> None:
        for thaw in [thaw for thaw in self._thaws if thaw[0] <= until]:
            self._thaws.remove(thaw)
            _, worker = thaw
            worker.thaw()

    def _drain(self, journal: Any) -> None:
        """Wait until all messages have ended, or the time is over."""
        until = self._asked + self._seconds + MORE - REMOVE_WITHIN
        while self._open() and self._clock.now() < until:
            self._tick()
            self._read(journal)

    def _open(self) -> list[SentMessage]:
        """Return the messages that have not ended."""
        self._waiting = [message for message in self._waiting if message.id not in self._runs.ended]
        return self._waiting

    def _still_there(
        self, queue: OwnQueue, workers: Collection[DrillWorker], journal: Any
    ) -> set[str]:
        """Return which messages the broker has that did not end, once no worker runs."""
        if not self._open():
            return set()
        for worker in workers:
            worker.stop()
        until = self._clock.now() + WARM
        while any(worker.runs for worker in workers) and self._clock.now() < until:
            self._tick()
        _kill_all(workers)
        self._read(journal)
        found = queue.messages()
        until = self._clock.now() + FIND_WITHIN
        while {message.id for message in self._open()} - found and self._clock.now() < until:
            self._tick()
            found |= queue.messages()
        return found


def _kill_all(workers: Collection[DrillWorker]) -> None:
    for worker in workers:
        worker.kill()
