"""How soon the messages of a killed worker run: `python -m benchmarks.recovery [--quick]`.

A worker has taken messages from a Redis broker, late acknowledged and with a free lock each, and is
killed before it begins them. Another worker consumes the same queue. Measured: the time from the
kill to the begin of the first and of the last of them, in detection times: the time from the last
beat of a worker lease to the proof that its worker is dead.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import cast

from celery import Celery

from benchmarks import costs, relay
from benchmarks.figures import Aim, against, table
from benchmarks.usage import await_workers
from celery_redlock import Redlock
from celery_redlock.tasks.recovery.observer import DETECTION_TIME
from celery_redlock.testing import EmbeddedNode, WorkerProcess, embedded_nodes

KILLS = 5
QUICK_KILLS = 1
MESSAGES = 10  # as `FIRST` says; that each killed worker leaves behind
QUEUE = "recovery"
REST = "recovery-rest"  # the queue of the worker that stays alive
STAY_SECONDS = 300.0  # s: until the worker is killed
PATIENCE = 60  # s
FIRST, LAST = "first of ten", "last of ten"
WORDS = ("p50", "max")
AIM_LAST = 1.3  # detection times

Delays = tuple[float, float]  # s from a kill to the first and to the last run


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one kill, for a look")
    costs.add_option(parser)
    options = parser.parse_args()
    entry = costs.Entry.of(options, "recovery")
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(EmbeddedNode())
        site = Site(broker, stack.enter_context(embedded_nodes(3)))
        survivor = stack.enter_context(site.worker("survivor", REST))
        delays = [
            site.kill(f"{QUEUE}-{number}", survivor)
            for number in range(QUICK_KILLS if options.quick else KILLS)
        ]
    print(report(delays))
    if entry is not None:
        entry.write(figures(delays), {"max": AIM_LAST})


class Site:
    """A broker, lock nodes, and workers that are killed there."""

    def __init__(self, broker: EmbeddedNode, nodes: Sequence[EmbeddedNode]) -> None:
        self._client = broker.client()
        self._sender = Celery("sender", broker=broker.url, set_as_current=False)
        urls = [node.url for node in nodes]
        with Redlock(urls, prefix=QUEUE) as redlock:
            redlock.trust()
        self._env = {
            relay.BROKER: broker.url,
            relay.STORE: broker.url,
            relay.NODES: " ".join(urls),
            relay.QUEUE: QUEUE,
            relay.LATE: "yes",
            relay.PREFETCH: str(MESSAGES),
        }

    def worker(self, name: str, queue: str) -> WorkerProcess:
        """Return a worker with one slot, not started yet."""
        return WorkerProcess(
            "benchmarks.relay", name=name, env=self._env, queues=[queue], concurrency=1
        )

    def kill(self, queue: str, survivor: WorkerProcess) -> Delays:
        """Kill a worker that has taken messages, and return when they have run in another one."""
        with self.worker(queue, queue) as victim:
            self._send("stay", queue, STAY_SECONDS)
            await_workers([victim], lambda: bool(self._client.lpop(f"{QUEUE}:stays")), PATIENCE)
            for number in range(MESSAGES):
                self._send("hot", queue, f"{queue}-{number}")
            await_workers([victim], lambda: self._client.hlen("unacked") == MESSAGES, PATIENCE)
            self._sender.control.add_consumer(
                queue, reply=True, timeout=PATIENCE, limit=1, matcher="glob",
                pattern=f"{survivor.name}@*",
            )  # fmt: skip
            killed_at = time.monotonic()
            victim.kill()
            begins = [begin - killed_at for begin in self._begins(survivor)]
        return min(begins), max(begins)

    def _send(self, task: str, queue: str, *args: object) -> None:
        self._sender.send_task(task, args, queue=queue, ignore_result=True)

    def _begins(self, survivor: WorkerProcess) -> Iterator[float]:
        """Yield when each stranded message began, in monotonic s, once all have run."""
        list_name = f"{QUEUE}:ran"
        await_workers([survivor], lambda: self._client.llen(list_name) == MESSAGES, PATIENCE)
        for text in cast("list[str]", self._client.lrange(list_name, 0, -1)):
            yield json.loads(text)[1]
        self._client.delete(list_name)


def report(delays: Sequence[Delays]) -> str:
    """Return the table and the aims."""
    measured = figures(delays)
    rows = [[name, *(f"{measured[name][word]:.2f}" for word in WORDS)] for name in (FIRST, LAST)]
    head = [f"runs after, of {len(delays)} kills, in {DETECTION_TIME:.1f} s", *WORDS]
    return f"{table(head, rows, left=1)}\n\n{against(aims(delays))}"


def aims(delays: Sequence[Delays]) -> list[Aim]:
    """Return the aim."""
    return [
        Aim("kill to the last run, max, detection times", figures(delays)[LAST]["max"], AIM_LAST)
    ]


def figures(delays: Sequence[Delays]) -> dict[str, dict[str, float]]:
    """Return what the page shows, in detection times."""
    by_name = zip((FIRST, LAST), zip(*delays, strict=True), strict=True)
    return {
        name: {
            "p50": round(median(seconds) / DETECTION_TIME, 3),
            "max": round(max(seconds) / DETECTION_TIME, 3),
        }
        for name, seconds in by_name
    }


if __name__ == "__main__":
    main()
