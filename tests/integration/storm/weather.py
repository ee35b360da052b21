"""What is done to the workers and nodes of a storm, by chance."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from celery import Celery
from redis import Redis

from celery_redlock.testing import EmbeddedNode, WorkerProcess
from tests.conftest import Nodes
from tests.integration.matrix.watch import lives
from tests.integration.storm.ledger import Blow, Outage
from tests.integration.storm.queue import deliver_again
from tests.integration.storm.tasks import now

ROOT = Path(__file__).resolve().parents[3]


class Actor:
    """One worker through all its lives: `name/1`, `name/2`... make: gives the process of a life."""

    def __init__(self, name: str, slots: int, make: Callable[[str], WorkerProcess]) -> None:
        self.name, self.slots, self._make = name, slots, make
        self.lives = 0
        self.process: WorkerProcess | None = None
        self.logs: list[Path] = []

    @property
    def life(self) -> str:
        return f"{self.name}/{self.lives}"

    @property
    def is_up(self) -> bool:
        return self.process is not None and lives(self.process.pid)

    def start(self) -> None:
        self.lives += 1
        self.process = self._make(self.life)
        self.logs.append(self.process.log)
        self.process.launch()

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()

    def children(self) -> list[int]:
        if self.process is None:
            return []
        with contextlib.suppress(OSError):
            pid = self.process.pid
            return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return []


class Calling:
    """A process of callers, through all its lives. kind: "threads" or "coroutines"."""

    def __init__(self, kind: str, env: Mapping[str, str]) -> None:
        self.kind, self._env = kind, {**os.environ, **env}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = [sys.executable, "-m", f"{__package__}.callers", self.kind]
        self.process = subprocess.Popen(words, cwd=ROOT, env=self._env)

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class Weather:
    """Strikes at random until it is told to calm down. ttl: s, of the locks."""

    def __init__(
        self, chance: random.Random, actors: Sequence[Actor], nodes: Sequence[EmbeddedNode],
        broker: Redis, ttl: float, callers: Sequence[Calling] = (),
    ) -> None:  # fmt: skip
        self._callers = callers
        self._chance, self._actors, self._nodes, self._ttl = chance, actors, nodes, ttl
        self._broker = broker
        self.blows: list[Blow] = []
        self.outages: list[Outage] = []
        self.revoked: dict[str, float] = {}  # when, by message
        self.counts: dict[str, int] = {}
        self._due: list[tuple[float, Callable[[], object]]] = []  # what brings back, and when
        self._down: set[object] = set()  # what was struck, and is not brought back yet
        self.ways: dict[Callable[[], bool], int] = {
            self._kill_child: 4,
            self._freeze_child: 3,
            self._freeze_worker: 2,
            self._kill_worker: 1,
            self._stop_worker: 1,
            self._freeze_node: 2,
            self._kill_node: 1,
            self._deliver_again: 3,
            self._freeze_callers: 2,
            self._kill_callers: 1,
        }

    def strike(self) -> None:
        """Bring back what is due, else do one thing."""
        if self._bring_back(now()):
            return  # else what was frozen may be killed with what it has in its socket
        way = self._chance.choices(list(self.ways), list(self.ways.values()))[0]
        if way():
            name = way.__name__.strip("_")
            self.counts[name] = self.counts.get(name, 0) + 1

    def calm(self) -> None:
        self._bring_back(float("inf"))

    def _bring_back(self, until: float) -> int:
        due = [item for item in self._due if item[0] <= until]
        for item in due:
            self._due.remove(item)
            item[1]()
        return len(due)

    def _later(
        self, shortest: float, longest: float, what: object, undo: Callable[[], object]
    ) -> None:
        self._down.add(what)

        def back() -> None:
            self._down.discard(what)
            undo()

        self._due.append((now() + self._chance.uniform(shortest, longest), back))

    def _actor(self, *pools: str) -> Actor | None:
        """Return one that is up and not struck; never the last one but one."""
        up = [actor for actor in self._actors if actor.is_up and actor not in self._down]
        if len(up) <= len(self._actors) - 2:
            return None
        fit = [actor for actor in up if not pools or actor.name.startswith(pools)]
        return self._chance.choice(fit) if fit else None

    def _child(self) -> tuple[Actor, int] | None:
        actor = self._actor("prefork")
        children = actor.children() if actor is not None else []
        return (actor, self._chance.choice(children)) if actor and children else None

    def revoke(self, app: Celery, task_id: str) -> None:
        """Revoke a message, and end its run where it has begun; that may strike the next one."""
        at = self.revoked[task_id] = now()  # a worker that is stopped hears of it when it goes on
        if self._chance.random() < 0.5:
            app.control.revoke(task_id)
            return
        self.blows.append(Blow(at, "", 0, "revoke", message=task_id, until=at + 3 * self._ttl))
        name = self._chance.choice(("SIGTERM", "SIGKILL"))
        app.control.revoke(task_id, terminate=True, signal=name)

    def _note(self, actor: Actor, pid: int, what: str, slots: int) -> Blow:
        blow = Blow(now(), actor.life, pid, what, slots)
        self.blows.append(blow)
        return blow

    def _kill_child(self) -> bool:
        if (found := self._child()) is None:
            return False
        actor, pid = found
        blow = self._note(actor, pid, "kill", 1)
        _signal(pid, signal.SIGKILL)
        blow.until = now()
        return True

    def _freeze_child(self) -> bool:
        if (found := self._child()) is None:
            return False
        actor, pid = found
        self._due.append((now() + self._chance.uniform(0.1, 1.5 * self._ttl),
                          self._freeze(actor, pid, [pid])))  # fmt: skip
        return True

    def _freeze(self, actor: Actor, pid: int, pids: Sequence[int]) -> Callable[[], None]:
        """Stop processes; returns what lets them go on. pid: as of the blow."""
        blow = self._note(actor, pid, "freeze", 0)
        for each in pids:
            _signal(each, signal.SIGSTOP)

        def thaw() -> None:
            for each in pids:
                _signal(each, signal.SIGCONT)
            blow.until = now()

        return thaw

    def _freeze_worker(self) -> bool:
        """Stop the main process, or all processes of a worker, for a while."""
        actor = self._actor()
        if actor is None or actor.process is None:
            return False
        children = actor.children() if self._chance.random() < 0.5 else []
        main = actor.process.pid
        thaw = self._freeze(actor, 0 if children else main, [main, *children])
        self._later(0.1, 2 * self._ttl, actor, thaw)
        return True

    def _kill_worker(self) -> bool:
        actor = self._actor()
        if actor is None or actor.process is None:
            return False
        self._fell(actor, with_children=self._chance.random() < 0.5)
        self._later(0.0, self._ttl, actor, lambda: self._restart(actor))
        return True

    def close(self, actor: Actor, patience: float) -> None:
        """End a worker warmly; kill it where it hangs, as Celery's pool now and then does then."""
        assert actor.process is not None
        _signal(actor.process.pid, signal.SIGTERM)
        try:
            actor.process.wait(patience)
        except RuntimeError:
            self._fell(actor, with_children=True)
        actor.end()

    def _fell(self, actor: Actor, *, with_children: bool) -> None:
        assert actor.process is not None
        blow = self._note(actor, 0, "kill", actor.slots)
        if with_children:
            actor.process.kill()
        else:
            _signal(actor.process.pid, signal.SIGKILL)
        blow.until = now()

    def _deliver_again(self) -> bool:
        return deliver_again(self._broker, self._chance)

    def _freeze_callers(self) -> bool:
        """Stop a process of callers for a while: its locks may expire, and others pass it by."""
        return self._strike_callers(signal.SIGSTOP, 1.5 * self._ttl)

    def _kill_callers(self) -> bool:
        return self._strike_callers(signal.SIGKILL, self._ttl)

    def _strike_callers(self, number: signal.Signals, longest: float) -> bool:
        up = [calling for calling in self._callers if calling not in self._down]
        if not up:
            return False
        calling = self._chance.choice(up)
        process = calling.process
        assert process is not None
        _signal(process.pid, number)

        def undo() -> None:
            if number == signal.SIGSTOP:
                _signal(process.pid, signal.SIGCONT)
            else:
                calling.end()
                calling.start()

        self._later(0.1, longest, calling, undo)
        return True

    def _stop_worker(self) -> bool:
        """Tell a worker to end: warmly, or where it can also coldly."""
        actor = self._actor()
        if actor is None or actor.process is None:
            return False
        is_cold = actor.name.startswith("prefork") and self._chance.random() < 0.5
        if is_cold:
            self._note(actor, 0, "cold", actor.slots)
        _signal(actor.process.pid, signal.SIGQUIT if is_cold else signal.SIGTERM)
        self._later(2 * self._ttl, 3 * self._ttl, actor, lambda: self._restart(actor))
        return True

    def _restart(self, actor: Actor) -> None:
        if actor.is_up:  # told to end, and not done in time
            self._fell(actor, with_children=True)
        actor.end()
        actor.start()

    def _nodes_up(self, count: int) -> Nodes:
        """Return so many nodes, none where one is struck already."""
        up = [node for node in self._nodes if node not in self._down]
        return self._chance.sample(up, count) if len(up) == len(self._nodes) else []

    def _freeze_node(self) -> bool:
        nodes = self._nodes_up(1)
        for node in nodes:
            outage = self._begin_outage(node, killed=False)
            node.pause()
            back = functools.partial(self._end_outage, outage, node.resume)
            self._later(0.1, 1.5 * self._ttl, node, back)
        return bool(nodes)

    def _kill_node(self) -> bool:
        """Kill a node, or a majority at once, which come back empty."""
        nodes = self._nodes_up(self._chance.choice((1, 1, 2)))
        for node in nodes:
            outage = self._begin_outage(node, killed=True)
            node.kill()
            back = functools.partial(self._end_outage, outage, node.start)
            self._later(0.0, self._ttl, node, back)
        return bool(nodes)

    def _begin_outage(self, node: EmbeddedNode, *, killed: bool) -> Outage:
        outage = Outage(self._nodes.index(node), now(), killed=killed)
        self.outages.append(outage)
        return outage

    def _end_outage(self, outage: Outage, undo: Callable[[], object]) -> None:
        undo()
        outage.until = now()


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
