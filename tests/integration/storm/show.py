"""One storm, from its start to its verdict."""

from __future__ import annotations

import json
import random
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from celery import Celery
from redis import Redis

from celery_redlock.testing import WorkerProcess, embedded_nodes
from tests.conftest import vouch_for
from tests.integration.storm import tasks
from tests.integration.storm.ledger import FINAL, KINDS, Ledger, Message, read
from tests.integration.storm.weather import Actor, Weather

ROOT = Path(__file__).resolve().parents[3]
NODE_TIMEOUT, TTL = 0.75, 4.0  # s
MAX_TTL = 6.0  # s: a node that comes back empty is silent for as long, and a second
# s: after which the broker delivers again what a dead worker had; nothing is frozen for so long
VISIBILITY = 40.0
KEYS = ("a", "b", "c", "d")
AT_ONCE = 24  # messages that are not over
BETWEEN = (0.2, 1.2)  # s between two blows
LONGEST = 1.5  # s that a body goes on, mostly less; some go on for longer than the ttl
PATIENCE = 240.0  # s: by then all is over after a storm, also on a machine that stalls
CREW = (("prefork1", "prefork", 3), ("prefork2", "prefork", 3), ("threads", "threads", 3),
        ("solo", "solo", 1))  # fmt: skip


class Storm:
    """Workers, nodes and a broker; what is sent, and what becomes of it. seed: of all chance."""

    def __init__(self, seed: int, folder: Path, stack: ExitStack) -> None:
        self.seed, self._stack = seed, stack
        self._chance = random.Random(seed)
        *self.nodes, broker = stack.enter_context(embedded_nodes(4))
        vouch_for(self.nodes)
        self.log = folder / "lines"
        self.log.touch()
        self._client: Redis = broker.client()
        stack.callback(self._client.close)
        self._app = Celery("storm", broker=broker.url, set_as_default=False)
        stack.callback(self._app.close)
        conf = {
            "broker_url": broker.url,
            "result_backend": broker.url,
            "broker_transport_options": {"visibility_timeout": VISIBILITY},
            "redlock_nodes": [node.url for node in self.nodes],
            "redlock_node_timeout": NODE_TIMEOUT,
            "redlock_ttl": TTL,
            "redlock_max_ttl": MAX_TTL,
        }
        self._env = {"STORM_LOG": str(self.log), "STORM_CONF": json.dumps(conf)}
        self.actors = [self._actor(name, pool, slots) for name, pool, slots in CREW]
        self.weather = Weather(self._chance, self.actors, self.nodes, TTL)
        self.messages: list[Message] = []
        self.leftovers: list[str] = []
        self._open: list[Message] = []

    def _actor(self, name: str, pool: str, slots: int) -> Actor:
        def make(life: str) -> WorkerProcess:
            env = {**self._env, "STORM_WORKER": life}
            made = WorkerProcess(
                f"{__package__}.tasks", name=name, pool=pool, concurrency=slots, env=env, cwd=ROOT
            )
            self._stack.callback(made.log.unlink, missing_ok=True)
            self._stack.callback(made.kill)
            return made

        return Actor(name, slots, make)

    def run(self, seconds: float) -> None:
        """Let it storm for so many s, and return when all is over."""
        for actor in self.actors:
            actor.start()
        for actor in self.actors:
            assert actor.process is not None
            actor.process.wait_ready(PATIENCE)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._send()
            self.weather.strike()
            time.sleep(self._chance.uniform(*BETWEEN))
        self.weather.calm()
        self._see_all_over()

    def _send(self) -> None:
        since = (
            tasks.now() - VISIBILITY / 2
        )  # what is not over since then may be lost, or waits long
        self._open = [m for m in self._open if m.at > since and self.state_of(m.id) not in FINAL]
        while len(self._open) < AT_ONCE:
            kind = self._chance.choice(list(KINDS.values()))
            keys = tuple(self._chance.sample(KEYS, self._chance.choice((1, 1, 1, 2))))
            seconds = self._chance.random() ** 3 * LONGEST
            if self._chance.random() < 0.02:
                seconds = 1.5 * TTL
            message = Message(
                str(uuid.UUID(int=self._chance.getrandbits(128))), kind, keys, tasks.now()
            )
            self.messages.append(message)
            self._open.append(message)
            arguments = list(keys), seconds
            self._app.send_task(f"storm.{kind.name}", arguments, task_id=message.id)

    def state_of(self, task_id: str) -> str:
        """Return the state that is stored."""
        stored = self._client.get(f"celery-task-meta-{task_id}")
        return "PENDING" if stored is None else str(json.loads(str(stored))["status"])

    def _see_all_over(self) -> None:
        """Return when the broker has nothing more to give.

        Workers begin anew, for that is when they ask it for what dead ones had.
        """
        time.sleep(VISIBILITY + 1)
        for actor in self.actors:
            assert actor.process is not None
            actor.process.stop(PATIENCE)
        # a worker that was killed just then keeps the others from asking for five minutes
        self._client.delete("unacked_mutex")
        for actor in self.actors:
            actor.start()
        end = time.monotonic() + PATIENCE
        quiet = 0  # looks in a row: a worker takes a message in two steps
        while quiet < 3 and time.monotonic() < end:
            quiet = 0 if self._left() else quiet + 1
            time.sleep(0.5)
        self.leftovers = self._left()

    def _left(self) -> list[str]:
        """Return what is in a queue, in a worker's hands, or locked."""
        queued = [f"in the queue: {text[:200]}" for text in self._client.lrange("celery", 0, -1)]
        held = [f"in hands: {text[:200]}" for text in self._client.hgetall("unacked").values()]
        return [*queued, *held, *(f"locked: {name}" for name in self.locked())]

    def locked(self) -> list[str]:
        """Return the names of all locks on all nodes."""
        return [str(name) for node in self.nodes for name in node.client().keys("*:lock:*")]

    def ledger(self) -> Ledger:
        """Return all that is known."""
        states = {message.id: self.state_of(message.id) for message in self.messages}
        runs, seen = read(self.log)
        return Ledger(self.messages, runs, states, self.weather.blows, seen, self.leftovers)

    def summary(self, ledger: Ledger) -> str:
        """Return in words what happened."""
        kinds = Counter(message.kind.name for message in ledger.messages)
        states = Counter(ledger.states.values())
        cut = sum(not run.ended for run in ledger.runs)
        open_late = [m for m in ledger.messages if m.kind.late and ledger.states[m.id] not in FINAL]
        return (
            f"seed {self.seed}: {len(ledger.messages)} messages {dict(kinds)}, {len(ledger.runs)} "
            f"bodies, {cut} of them cut; states {dict(states)}; {len(open_late)} late ones lost "
            f"with killed workers; blows {self.weather.counts}"
        )

    def report(self, ledger: Ledger) -> str:
        """Return every fault with what is around it, and what the workers said last."""
        lines = [self.summary(ledger), *map(ledger.around, ledger.faults()[:10])]
        for actor in self.actors:
            for log in actor.logs[-2:]:
                lines += [f"-- {actor.name}: {log}", *log.read_text().splitlines()[-20:]]
        return "\n".join(lines)


@contextmanager
def storm(seed: int, folder: Path) -> Iterator[Storm]:
    """Give a storm; its servers and workers end with it."""
    with ExitStack() as stack:
        yield Storm(seed, folder, stack)
