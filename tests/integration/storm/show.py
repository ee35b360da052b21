"""One storm, from its start to its verdict."""

from __future__ import annotations

import functools
import json
import math
import os
import random
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from celery import Celery, Signature, chord
from redis import Redis

from celery_redlock import send_unique
from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.testing import WorkerProcess, embedded_nodes
from tests.conftest import trust_nodes
from tests.integration.storm import tasks
from tests.integration.storm.ledger import CALLED, FINAL, KINDS, Kind, Ledger, Message, read
from tests.integration.storm.queue import Transit
from tests.integration.storm.weather import ROOT, Actor, Calling, Weather
from tests.workers import ForkedWorker

SEED = int(os.environ.get("CELERY_REDLOCK_STORM_SEED") or random.SystemRandom().randrange(1 << 32))
NODE_TIMEOUT, TTL = 0.75, 4.0  # s
MAX_TTL = 6.0  # s: a node that comes back empty is silent for as long, and a second
# s: after which the broker delivers again what a dead worker had; nothing is frozen for so long
VISIBILITY = 40.0
# s: Redis's transport may take five minutes more than that, where a killed worker was just asking
REMEMBERED = 900.0
KEYS = ("a", "b", "c", "d")
PERMITS = "permits"  # a key that two may hold at once
LIMIT = 2.5  # s: a hard time limit
AT_ONCE = 24  # messages that are not over
WINDOW = 20.0  # s in which a second send of a key is a duplicate, unless the first one is done
BETWEEN = (0.2, 1.2)  # s between two blows
LONGEST = 1.5  # s that a body goes on, mostly less; some go on for longer than the ttl
PATIENCE = 240.0  # s: by then all is over after a storm, also on a machine that stalls
LONG = 240.0  # s: in so long a storm all comes to pass that there is
SHUTDOWN = 60.0  # s: no body goes on for so long, and no message waits for its worker
CREW = (("prefork1", "prefork", 3), ("prefork2", "prefork", 3), ("threads", "threads", 3),
        ("solo", "solo", 1))  # fmt: skip


class Storm:
    """Workers, nodes and a broker; what is sent, and what becomes of it. seed: of all chance."""

    def __init__(self, seed: int, folder: Path, stack: ExitStack) -> None:
        self.seed, self._stack = seed, stack
        self._chance = random.Random(seed)
        *self.nodes, broker = stack.enter_context(embedded_nodes(4))
        trust_nodes(self.nodes)
        self.log = folder / "lines"
        self.log.touch()
        self._client: Redis = broker.client()
        stack.callback(self._client.close)
        conf = {
            "broker_url": broker.url, "result_backend": broker.url,
            "broker_transport_options": {"visibility_timeout": VISIBILITY},
            "redlock_nodes": [node.url for node in self.nodes],
            "redlock_node_timeout": NODE_TIMEOUT, "redlock_ttl": TTL, "redlock_max_ttl": MAX_TTL,
            "redlock_done_ttl": REMEMBERED,
        }  # fmt: skip
        self._app = Celery("storm", set_as_default=False)
        self._app.conf.update(conf)
        stack.callback(self._app.close)
        stack.callback(redlock_of(self._app).close)
        self._env = {"STORM_LOG": str(self.log), "STORM_CONF": json.dumps(conf)}
        self.actors = [self._actor(name, pool, slots) for name, pool, slots in CREW]
        self.transit = Transit(self._client, broker.port)
        stack.callback(self.transit.close)
        self.callers = [Calling(kind, self._env) for kind in ("threads", "coroutines")]
        for calling in self.callers:
            stack.callback(calling.end)
        self.weather = Weather(
            self._chance, self.actors, self.nodes, self._client, TTL, self.callers
        )
        self.messages: list[Message] = []
        self.dropped: list[Message] = []
        self.leftovers: list[str] = []
        self._open: list[Message] = []
        self._to_revoke: list[tuple[float, str]] = []

    def _actor(self, name: str, pool: str, slots: int) -> Actor:
        def make(life: str) -> WorkerProcess:
            env = {**self._env, "STORM_WORKER": life}
            made = ForkedWorker(
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
        for calling in self.callers:
            calling.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._send()
            self._revoke()
            self.weather.strike()
            time.sleep(self._chance.uniform(*BETWEEN))
        self.weather.calm()
        for calling in self.callers:
            calling.end()
        self._see_all_over()

    def _send(self) -> None:
        since = (
            tasks.now() - VISIBILITY / 2
        )  # what is not over since then may be lost, or waits long
        self._open = [m for m in self._open if m.at > since and self.state_of(m.id) not in FINAL]
        while len(self._open) < AT_ONCE:
            self._send_one(self._chance.choice(list(KINDS.values())))

    def _send_one(self, kind: Kind) -> None:
        keys = list(self._chance.sample(KEYS, self._chance.choice((1, 1, 1, 2))))
        seconds = self._chance.random() ** 3 * LONGEST
        if self._chance.random() < 0.02:
            seconds = 1.5 * TTL
        if kind.name == "joining":
            self._send_chord(kind, keys, seconds)
            return
        if kind.name == "deduplicated":
            for _ in range(self._chance.choice((1, 2, 3))):
                self._send_once(kind, keys[:1], seconds)
            return
        options: dict[str, float] = {}
        if kind.name == "named":
            keys = keys[:1]
        if kind.limit > 1:
            keys = [PERMITS]
        if kind.expires < math.inf:
            options["expires"] = kind.expires
        if kind.name == "limited":
            seconds = self._chance.choice((0.1, 2 * LIMIT))
            options["time_limit"] = LIMIT
        message = self._note(kind, keys)
        if kind.name == "revoked":
            self._to_revoke.append((message.at + self._chance.uniform(0.0, 5.0), message.id))
        self._app.send_task(f"storm.{kind.name}", [keys, seconds], task_id=message.id, **options)

    def _send_once(self, kind: Kind, keys: list[str], seconds: float) -> None:
        """Send one, unless an earlier one of its key is on its way."""
        at, known = tasks.now(), {message.id for message in self.messages}
        sent = send_unique(
            self._app, f"storm.{kind.name}", (keys, seconds), resource=keys[0], unique_for=WINDOW
        )
        message = Message(sent.id, kind, tuple(keys), at)
        if sent.id in known:
            self.dropped.append(message)
        else:
            self._keep(message)

    def _send_chord(self, kind: Kind, keys: list[str], seconds: float) -> None:
        """Send two or three late ones of the same keys, and one that comes after them."""
        parts = [self._note(KINDS["late"], keys) for _ in range(self._chance.choice((2, 3)))]
        body = self._note(kind, keys, tuple(part.id for part in parts))
        sign = functools.partial(Signature, app=self._app)
        header = [sign("storm.late", (keys, seconds), task_id=part.id) for part in parts]
        more = keys, seconds, len(parts)
        chord(header, app=self._app)(sign("storm.joining", more, task_id=body.id))

    def _note(self, kind: Kind, keys: list[str], after: tuple[str, ...] = ()) -> Message:
        made = str(uuid.UUID(int=self._chance.getrandbits(128)))
        message = Message(made, kind, tuple(keys), tasks.now(), after)
        self._keep(message)
        return message

    def _keep(self, message: Message) -> None:
        self.messages.append(message)
        self._open.append(message)

    def _revoke(self) -> None:
        due = [item for item in self._to_revoke if item[0] < tasks.now()]
        for item in due:
            self._to_revoke.remove(item)
            self.weather.revoke(self._app, item[1])

    def state_of(self, task_id: str) -> str:
        stored = self._client.get(f"celery-task-meta-{task_id}")
        return "PENDING" if stored is None else str(json.loads(str(stored))["status"])

    def _see_all_over(self) -> None:
        """Return when the broker has nothing more to give.

        Workers begin anew, for that is when they ask it for what dead ones had.
        """
        held = self._tokens()
        time.sleep(VISIBILITY + 1)
        # no body goes on for so long, so whose is it?
        leaked = [f"locked for ever: {name}" for name, _ in held & self._tokens()]
        for actor in self.actors:
            self.weather.close(actor, SHUTDOWN)
        # a worker that was killed just then keeps the others from asking for five minutes
        self._client.delete("unacked_mutex")
        for actor in self.actors:
            actor.start()
        end = time.monotonic() + PATIENCE
        quiet = 0  # looks in a row: a worker takes a message in two steps
        while quiet < 3 and time.monotonic() < end:
            quiet = 0 if self._left() else quiet + 1
            time.sleep(0.5)
        self.leftovers = [*leaked, *self._left()]

    def _left(self) -> list[str]:
        queued = [f"in the queue: {text[:200]}" for text in self._client.lrange("celery", 0, -1)]
        held = [f"in hands: {text[:200]}" for text in self._client.hgetall("unacked").values()]
        return [*queued, *held, *(f"locked: {name}" for name in self._locked())]

    def _locked(self) -> list[str]:
        return sorted({name for name, _ in self._tokens()})

    def _tokens(self) -> set[tuple[str, str]]:
        found = set()
        for node in self.nodes:
            with node.client() as client:
                found |= {(str(name), str(client.get(name))) for name in client.keys("*:lock:*")}
        return found

    def ledger(self) -> Ledger:
        states = {message.id: self.state_of(message.id) for message in self.messages}
        runs, lines, waits = read(self.log)
        weather = self.weather
        return Ledger(
            self.messages,
            runs,
            states,
            weather.blows,
            weather.outages,
            lines,
            self.transit.lost(),
            self.transit.given_back(),
            weather.revoked,
            self.dropped,
            self.leftovers,
            waits,
        )

    def summary(self, ledger: Ledger) -> str:
        """Return in words what happened."""
        kinds = Counter(message.kind.name for message in ledger.messages)
        states = Counter(ledger.states.values())
        cut = sum(not run.ended for run in ledger.runs)
        called = sum(run.kind == CALLED.name for run in ledger.runs)
        waits = Counter(wait.error for wait in ledger.waits)
        return (
            f"seed {self.seed}: {len(ledger.messages)} messages {dict(kinds)}, {len(ledger.runs)} "
            f"bodies, {called} of them of callers, {cut} of them cut; waits without a lock "
            f"{dict(waits)}; states {dict(states)}; {len(ledger.lost)} lost "
            f"on their way to killed workers; {len(ledger.dropped)} duplicates not sent; "
            f"blows {self.weather.counts}"
        )

    def hollow(self, ledger: Ledger, seconds: float) -> list[str]:
        """Return what did not happen in a storm of so many s, and so is not proven by it."""
        # a chord needs all of its header before its body runs, and what skips a free key: a short
        # storm may not see that
        needed = {*KINDS} if seconds >= LONG else {*KINDS} - {"joining", "skipping", "deciding"}
        missing = sorted(needed - {run.kind for run in ledger.runs if run.ended})
        ways = {way.__name__.strip("_") for way in self.weather.ways} if seconds >= LONG else set()
        missing += sorted(ways - {*self.weather.counts})
        if not ledger.dropped:
            missing.append("a duplicate")
        if not any(run.kind == CALLED.name and run.ended for run in ledger.runs):
            missing.append("a caller's body")
        if not ledger.waits:
            missing.append("a caller's wait without a lock")
        told = [f"it never came to this: {what}" for what in missing]
        if len(ledger.runs) <= seconds / 2:
            told.append(f"only {len(ledger.runs)} bodies in {seconds:g} s")
        return told

    def report(self, ledger: Ledger) -> str:
        faults = ledger.faults()
        lines = [self.summary(ledger), *(fault.splitlines()[0] for fault in faults)]
        lines += map(ledger.around, faults[:10])
        for actor in self.actors:
            for log in actor.logs[-2:]:
                lines += [f"-- {actor.name}: {log}", *log.read_text().splitlines()[-20:]]
        return "\n".join(lines)


@contextmanager
def storm(seed: int, folder: Path) -> Iterator[Storm]:
    """Give a storm; its servers and workers end with it."""
    with ExitStack() as stack:
        yield Storm(seed, folder, stack)
