"""Locks in PostgreSQL: `python -m benchmarks.postgres [--quick]`.

A pair beside a raw INSERT and DELETE of one row, each with its commit, and beside a pair on one
Redis node; renewals beside as many UPDATEs; the connections of a worker at rest; and a task beside
the same task on one Redis node. The server is one of the tests' own, with fsync on.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import monotonic, perf_counter, process_time, sleep, thread_time
from typing import Any

from benchmarks import worker
from benchmarks.figures import Aim, Times, against, rotations, table
from benchmarks.pair import Runner, ours
from benchmarks.renewals import LOCKS, TTL, held
from benchmarks.task import Lane
from celery_redlock import Redlock
from celery_redlock.lock.postgres.schema import create_schema
from celery_redlock.testing import EmbeddedNode, WorkerProcess
from tests.postgres import PostgresNode, make_template

# rotations of pairs
FULL_ROTATIONS = 60
QUICK_ROTATIONS = 6
FULL_TASKS = 30
QUICK_TASKS = 4
BATCH = 40
# seconds of renewals
FULL_WINDOW = 20.0
QUICK_WINDOW = 6.0
STATISTICS = 2.0  # seconds after which a server has counted what was done
KEYS_PER_LOCK = 100  # renewed in one request, as the watchdog does
CHILDREN = 4
AIM_RAW = 0.8
RAW = "CREATE TABLE raw (id bytea PRIMARY KEY, value bytea, ends timestamptz)"
INSERT = "INSERT INTO raw VALUES (%b, %b, clock_timestamp() + interval '30 s')"
DELETE = "DELETE FROM raw WHERE id = %b AND value = %b"
UPDATE = "UPDATE raw SET ends = clock_timestamp() + interval '30 s' WHERE id = %b AND value = %b"
RENEWED = "SELECT n_tup_upd FROM pg_stat_user_tables WHERE relid = 'redlock.key'::regclass"
CONNECTIONS = (
    "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'celery_redlock' "
    "AND pid <> pg_backend_pid()"
)


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.postgres", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds, for a look")
    quick = parser.parse_args().quick
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(served())
        redis = stack.enter_context(EmbeddedNode())
        raw = stack.enter_context(contextlib.closing(server.connect()))
        raw.execute(RAW)
        times = pairs(stack, server, redis, raw, QUICK_ROTATIONS if quick else FULL_ROTATIONS)
        print(report_pairs(times), flush=True)
        print(renewals(server, raw, QUICK_WINDOW if quick else FULL_WINDOW), flush=True)
        broker = stack.enter_context(EmbeddedNode())
        print(connections(server, broker), flush=True)
        tasks = run_tasks(stack, server, redis, broker, QUICK_TASKS if quick else FULL_TASKS)
        print(report_tasks(tasks), flush=True)
    print(against([Aim("a pair / INSERT and DELETE", times.ratio("ours", "raw"), AIM_RAW)]))


@contextlib.contextmanager
def served() -> Iterator[PostgresNode]:
    """Give a server with the schema."""
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template"
        make_template(template)
        with PostgresNode(template) as server:
            with contextlib.closing(server.connect()) as connection:
                create_schema(connection)
            yield server


def pairs(
    stack: contextlib.ExitStack, server: PostgresNode, redis: EmbeddedNode, raw: Any, count: int
) -> Times[str]:
    """Return the seconds of a pair, by what does it."""
    row = (b"key", b"value")
    runners = {
        "ours": Runner(ours(stack, [server.url], "pair")),
        "raw": Runner((lambda: raw.execute(INSERT, row), lambda: raw.execute(DELETE, row))),
        "ours on Redis": Runner(ours(stack, [redis.url], "pair")),
    }
    times: Times[str] = Times()
    for runner in runners.values():
        runner.run()
    for order in rotations(runners, count):
        times.add({kind: runners[kind].run() for kind in order})
    return times


def report_pairs(times: Times[str]) -> str:
    """Return the table of the pairs."""
    rows = [
        [kind, f"{times.p50(kind) * 1e6:.0f}", f"{times.ratio('ours', kind):.2f}"]
        for kind in ("ours", "raw", "ours on Redis")
    ]
    return table(["one pair", "us", "ours on PostgreSQL/it"], rows, left=1) + "\n"


def renewals(server: PostgresNode, raw: Any, window: float) -> str:
    """Return what a renewal of each of 1,000 locks costs, beside as many UPDATEs."""
    keys = [(b"row %d" % number, b"value") for number in range(LOCKS)]
    for key in keys:
        raw.execute(INSERT, key)
    with Redlock([server.url], prefix="renewals") as redlock:
        redlock.trust()
        with held(redlock, TTL):
            cpu = renewed_in(server, window)
        groups = [
            [f"{start} {name}" for name in range(KEYS_PER_LOCK)] for start in range(0, LOCKS, 100)
        ]
        with contextlib.ExitStack() as stack:
            locks = [stack.enter_context(redlock.lock(group, ttl=60, wait=10)) for group in groups]
            wall = min(timed(*[lock.extend for lock in locks]) for _ in range(5))
    started = thread_time()
    update_wall = timed(*[partial(raw.execute, UPDATE, key) for key in keys])
    update_cpu = thread_time() - started
    ratios = [f"{cpu / update_cpu:.2f}", f"{wall / update_wall:.3f}"]
    rows = [
        ["ours", f"{cpu * 1e3:.1f}", f"{wall * 1e3:.0f}", *ratios],
        ["UPDATEs", f"{update_cpu * 1e3:.1f}", f"{update_wall * 1e3:.0f}", "1", "1"],
    ]
    head = [f"{LOCKS} renewals", "client CPU ms", "wall ms", "CPU/UPDATEs", "wall/UPDATEs"]
    return table(head, rows, left=1) + "\n"


def renewed_in(server: PostgresNode, window: float) -> float:
    """Return what the library's threads spend on one renewal of each lock, over a window."""
    sleep(STATISTICS)
    ((before,),) = server.query(RENEWED)
    started = process_time() - thread_time()
    end = monotonic() + window
    while monotonic() < end:
        sleep(0.1)
    cpu = process_time() - thread_time() - started
    ((after,),) = server.query(RENEWED)  # as late as the first count
    return cpu / int(after - before) * LOCKS


def timed(*works: Callable[[], object]) -> float:
    """Return the seconds that calls take, one after the other."""
    started = perf_counter()
    for work in works:
        work()
    return perf_counter() - started


def connections(server: PostgresNode, broker: EmbeddedNode) -> str:
    """Return how many connections a worker has at rest."""
    env = {worker.BROKER: broker.url, worker.NODES: server.url, worker.QUEUE: "rest"}
    running = WorkerProcess(
        "benchmarks.worker", pool="prefork", concurrency=CHILDREN, name="rest", env=env,
        queues=["rest"],
    )  # fmt: skip
    with running:
        sleep(STATISTICS)
        ((count,),) = server.query(CONNECTIONS)
    return f"connections of a worker with {CHILDREN} children, at rest: {count}\n"


def run_tasks(
    stack: contextlib.ExitStack,
    server: PostgresNode,
    redis: EmbeddedNode,
    broker: EmbeddedNode,
    count: int,
) -> Times[tuple[str, str]]:
    """Return the seconds of a plain and of a locked task, on each kind of node."""
    kinds = ("plain", "locked")
    nodes: dict[str, Any] = {"postgresql": server, "redis": redis}
    lanes = [Lane(name, broker, [node], kinds) for name, node in nodes.items()]
    for lane in lanes:
        stack.push(lane.worker)
        lane.worker.launch()
        lane.rotate(kinds, BATCH)
    times: Times[tuple[str, str]] = Times()
    for order in rotations(kinds, count):
        rotation: dict[tuple[str, str], float] = {}
        for lane in lanes:
            rotation |= lane.rotate(order, BATCH)
        times.add(rotation)
    return times


def report_tasks(times: Times[tuple[str, str]]) -> str:
    """Return the table of the tasks."""
    rows = [
        [
            name,
            f"{times.p50(('plain', name)) * 1e6:.0f}",
            f"{times.p50(('locked', name)) * 1e6:.0f}",
            f"{times.ratio(('locked', name), ('plain', name)):.2f}",
            f"{times.ratio(('locked', name), ('locked', 'redis')):.2f}",
        ]
        for name in ("postgresql", "redis")
    ]
    head = ["a task, locked on", "plain us", "locked us", "locked/plain", "to one Redis"]
    return table(head, rows, left=1) + "\n"


if __name__ == "__main__":
    main()
