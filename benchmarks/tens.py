"""Many messages, ten of each key, in one queue: `python -m benchmarks.tens [--quick] [--late]`.

Two prefork workers, three nodes, short bodies. The ten messages of a key lie next to each other,
and unrelated plain tasks lie behind all of them. Measured: the time until all have run, how long
the plain tasks waited, and the longest time for which a key's lock lay idle while a message of the
key had not run: in all, while a slot was free, and once the last plain task had begun; and all the
hand-offs, from the end of a body to the beginning of the next one of its key. Beside it: as many
messages with a key for each, and as many plain tasks of the same length.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import cast

from celery import Celery

from benchmarks import costs, relay
from benchmarks.figures import Aim, Times, against, percentile, rotations, table
from benchmarks.usage import await_workers
from celery_redlock import Redlock
from celery_redlock.testing import EmbeddedNode, WorkerProcess, embedded_nodes

# messages of a crowd
FULL_COUNT = 1500
QUICK_COUNT = 500
ROUNDS = 3
QUICK_ROUNDS = 1
WARM_UP = 100
MESSAGES_PER_KEY = 10
CROWD_PER_PLAIN = 100  # a crowd's messages for each plain task behind it
MIN_PLAIN = 20
QUEUE = "tens"
UNRELATED = "unrelated"
TENS = "ten of each key"
APART = "a key for each"
PLAIN = "plain"
CROWDS = (TENS, APART, PLAIN)
PATIENCE = 900  # s
WORKERS = 2
SLOTS = 2  # of each worker
BUSY_GAP = 0.05  # s: a slot is busy from one body to the next if no more lies between them
AIM_TOTAL = 1.7
AIM_BEHIND = 3.0
AIM_IDLE = 3.0  # p99 of the hand-offs of the same run
AIM_HANDOFF = 0.6  # s


def main() -> None:
    """Run the benchmark and print its tables and the aims."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tens", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="half a minute, for a look")
    parser.add_argument("--late", action="store_true", help="the tasks acknowledge late")
    parser.add_argument("--count", type=int, help="messages of a crowd")
    parser.add_argument("--broker", help="a RabbitMQ's URL; else an embedded Valkey")
    costs.add_option(parser)
    options = parser.parse_args()
    given = [f"--{name}" for name in ("late", "count", "broker") if getattr(options, name)]
    entry = costs.Entry.of(options, " ".join(["tens", *given]))
    count, rounds = (QUICK_COUNT, QUICK_ROUNDS) if options.quick else (FULL_COUNT, ROUNDS)
    count = options.count or count
    total: Times[str] = Times()
    waited: Times[str] = Times()
    tens: list[Outcome] = []
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(EmbeddedNode())
        nodes = stack.enter_context(embedded_nodes(3))
        site = Site(options.broker or store.url, store, nodes, late=options.late)
        for worker in site.workers:
            stack.push(worker)
            worker.launch()
        for worker in site.workers:
            worker.wait_ready()
        for kind in CROWDS:
            site.run(kind, WARM_UP)  # connections, caches
        for order in rotations(CROWDS, rounds):
            outcomes = {kind: site.run(kind, count) for kind in order}
            total.add({kind: outcome.seconds for kind, outcome in outcomes.items()})
            waited.add({kind: outcome.waited for kind, outcome in outcomes.items()})
            tens.append(outcomes[TENS])
    print(report(count, total, waited))
    print(f"\n{report_idle(tens)}\n\n{against(aims(total, waited, tens))}")
    if entry is not None:
        bounds = {
            "total": AIM_TOTAL, "behind": AIM_BEHIND, "p99": AIM_HANDOFF, "idle / p99": AIM_IDLE,
        }  # fmt: skip
        entry.write(figures(total, waited, tens), bounds)


@dataclass(frozen=True)
class Outcome:
    """What one crowd took, in s: all of it, and p50 of the waits of the plain tasks behind it.

    idle, idle_free, idle_after: each key's longest idle time: in all, while a slot was free, and
    once the last plain task had begun. hand_offs: all idle times of all keys.
    """

    seconds: float
    waited: float
    idle: list[float]
    idle_free: list[float]
    idle_after: list[float]
    hand_offs: list[float]


Period = tuple[float, float]  # the monotonic s at which it begins and ends


@dataclass(frozen=True)
class Span:
    """One body that ran. begin, end: monotonic s. slot: the process id of its worker's child."""

    key: str
    begin: float
    end: float
    slot: int


class Site:
    """Two workers, and crowds that they run; each crowd has a queue of its own."""

    def __init__(
        self, broker: str, store: EmbeddedNode, nodes: Sequence[EmbeddedNode], *, late: bool
    ) -> None:
        self._client = store.client()
        self._sender = Celery("sender", broker=broker, set_as_current=False)
        urls = [node.url for node in nodes]
        with Redlock(urls, prefix=QUEUE) as redlock:
            redlock.trust()
        env = {
            relay.BROKER: broker,
            relay.STORE: store.url,
            relay.NODES: " ".join(urls),
            relay.QUEUE: QUEUE,
            relay.LATE: "yes" if late else "no",
        }
        self.workers = [
            WorkerProcess(
                "benchmarks.relay",
                concurrency=SLOTS,
                env=env,
                queues=[QUEUE],
                name=f"{QUEUE}-{number}",
            )
            for number in range(WORKERS)
        ]
        self._crowds = 0

    def run(self, kind: str, count: int) -> Outcome:
        """Fill a queue, let the workers consume it, and return what the crowd took."""
        self._crowds += 1
        queue = f"{QUEUE}-{self._crowds}"
        task = "unlocked" if kind == PLAIN else "hot"
        group_size = MESSAGES_PER_KEY if kind == TENS else 1
        for number in range(count):
            self._send(queue, task, f"{queue}-{number // group_size}")
        plain_count = max(MIN_PLAIN, count // CROWD_PER_PLAIN)
        for _ in range(plain_count):
            self._send(queue, "unlocked", UNRELATED)
        spans = self._consume(queue, count + plain_count)
        period = min(span.begin for span in spans), max(span.end for span in spans)
        began, end = period
        plain_begins = [span.begin for span in spans if span.key == UNRELATED]
        crowd = [span for span in spans if span.key != UNRELATED]
        return Outcome(
            seconds=end - began,
            waited=median(plain_begins) - began,
            idle=longest_idle(crowd, [period]),
            idle_free=longest_idle(crowd, with_free_slot(spans, period)),
            idle_after=longest_idle(crowd, [(max(plain_begins), end)]),
            hand_offs=hand_offs(crowd),
        )

    def _send(self, queue: str, task: str, key: str) -> None:
        self._sender.send_task(task, (key,), queue=queue, ignore_result=True)

    def _consume(self, queue: str, count: int) -> list[Span]:
        """Have all workers consume a full queue; return what ran, when all has."""
        self._sender.control.add_consumer(queue)
        list_name = f"{QUEUE}:ran"
        await_workers(self.workers, lambda: self._client.llen(list_name) == count, PATIENCE)
        spans = [
            json.loads(text) for text in cast("list[str]", self._client.lrange(list_name, 0, -1))
        ]
        self._client.delete(list_name)
        return [Span(*span) for span in spans]


def with_free_slot(spans: Iterable[Span], period: Period) -> list[Period]:
    """Return the periods in which at least one slot of the workers was free, in order.

    A slot that refuses a message is free here, because it runs no body.
    """
    changes: list[tuple[float, int]] = []
    by_slot: dict[int, list[Span]] = {}
    for span in spans:
        by_slot.setdefault(span.slot, []).append(span)
    for bodies in by_slot.values():
        bodies.sort(key=lambda span: span.begin)
        for earlier, span in itertools.pairwise(bodies):
            if span.begin - earlier.end > BUSY_GAP:
                changes += [(earlier.end, -1), (span.begin, 1)]
        changes += [(bodies[0].begin, 1), (bodies[-1].end, -1)]
    periods = []
    busy = 0
    free_since = period[0]
    for time, change in sorted(changes):
        if busy == WORKERS * SLOTS:
            free_since = time
        busy += change
        if busy == WORKERS * SLOTS:
            periods.append((free_since, time))
    return [*periods, (free_since, period[1])]


def longest_idle(spans: Iterable[Span], periods: Sequence[Period]) -> list[float]:
    """Return for each key the longest s between the end of a body and the next one's beginning.

    periods: what alone counts. It is the longest s in a row.
    """
    return [
        max(
            max(
                (min(gap_end, end) - max(gap_begin, period_begin) for period_begin, end in periods),
                default=0.0,
            )
            for gap_begin, gap_end in gaps
        )
        for gaps in gaps_of_keys(spans)
    ]


def hand_offs(spans: Iterable[Span]) -> list[float]:
    """Return the s from the end of each body to the beginning of the next one of its key."""
    return [begin - end for gaps in gaps_of_keys(spans) for end, begin in gaps]


def gaps_of_keys(spans: Iterable[Span]) -> list[list[Period]]:
    """Return for each key with several bodies the periods between them."""
    by_key: dict[str, list[Period]] = {}
    for span in spans:
        by_key.setdefault(span.key, []).append((span.begin, span.end))
    return [
        [(end, begin) for (_, end), (begin, _) in itertools.pairwise(sorted(bodies))]
        for bodies in by_key.values()
        if len(bodies) > 1
    ]


def report(count: int, total: Times[str], waited: Times[str]) -> str:
    """Return the table of the crowds: each time with its ratio to what stands beside it."""
    rows = [
        [
            kind,
            *(f"{total.p50(kind):.2f}", f"{total.ratio(kind, APART):.2f}"),
            *(f"{waited.p50(kind):.2f}", f"{waited.ratio(kind, PLAIN):.2f}"),
        ]
        for kind in CROWDS
    ]
    head = [f"{count} messages", "total s", f"to {APART}", "p50 behind s", f"to {PLAIN}"]
    return table(head, rows, left=1)


def report_idle(outcomes: Sequence[Outcome]) -> str:
    """Return the table of the keys' longest idle times, as a share of the total as well."""
    readers: dict[str, Callable[[Outcome], list[float]]] = {
        "in all": lambda outcome: outcome.idle,
        "while a slot is free": lambda outcome: outcome.idle_free,
        "after the plain tasks": lambda outcome: outcome.idle_after,
        "each hand-off": lambda outcome: outcome.hand_offs,
    }
    times_by_kind = {
        name: [
            (max(0.0, idle), outcome.seconds)
            for outcome in outcomes
            for idle in idle_times(outcome)
        ]
        for name, idle_times in readers.items()
    }
    rows = []
    for name, pairs in times_by_kind.items():
        ranked = sorted(pairs)
        for share, word in ((0.5, "p50"), (0.99, "p99"), (1.0, "max")):
            idle, total = percentile(ranked, share)
            rows.append([f"{name}, {word}", f"{idle:.2f}", f"{idle / total:.2f}"])
    count = len(times_by_kind["in all"])
    return table([f"a key's longest idle time, {count} keys", "s", "to the total"], rows, left=1)


def aims(total: Times[str], waited: Times[str], outcomes: Sequence[Outcome]) -> list[Aim]:
    """Return the aims."""
    measured = figures(total, waited, outcomes)
    return [
        Aim(f"total, {TENS} / {APART}", measured["total"], AIM_TOTAL),
        Aim(f"p50 behind, {TENS} / {PLAIN}", measured["behind"], AIM_BEHIND),
        Aim("a key's longest idle time / a hand-off, p99", measured["idle / p99"], AIM_IDLE),
        Aim("a hand-off, p99 s", measured["p99"], AIM_HANDOFF),
    ]


def figures(total: Times[str], waited: Times[str], outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return what the page shows: ratios, and times in s."""
    idle = max(0.0, *(idle for outcome in outcomes for idle in outcome.idle))
    idle_free = max(0.0, *(idle for outcome in outcomes for idle in outcome.idle_free))
    p99 = percentile(sorted(idle for outcome in outcomes for idle in outcome.hand_offs), 0.99)
    measured = {
        "total": total.ratio(TENS, APART),
        "behind": waited.ratio(TENS, PLAIN),
        "idle": idle,
        "idle, a slot free": idle_free,
        "p99": p99,
        "idle / p99": idle / p99,
    }
    return {name: round(figure, 4) for name, figure in measured.items()}


if __name__ == "__main__":
    main()
