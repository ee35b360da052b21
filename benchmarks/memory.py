"""What locks take of a process's memory: `python -m benchmarks.memory [--quick]`.

A prefork worker, three nodes. A worker like it has as many messages of Celery's own, which wait for
their ETA. Counted is the memory that a process has for itself alone
(`Private_*` of /proc/PID/smaps_rollup; Linux only), after each process has run tasks of the kind
that is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from celery import Celery

from benchmarks import relay
from benchmarks.figures import table
from benchmarks.usage import await_workers
from celery_redlock import Redlock
from celery_redlock.testing import EmbeddedNode, WorkerProcess, embedded_nodes

# below the number at which a worker stops to keep more
MESSAGES = 900
QUICK_MESSAGES = 300
CHILDREN = 4
LOCK_COUNT = 1000  # locks of this process
WARM_UP = 200  # tasks of each kind before its measurement
QUEUE = "memory"
KEY = "held"
PATIENCE = 300  # s
FAR = 3000.0  # s: the countdown of the others, longer than the run


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="half a minute, for a look")
    count = QUICK_MESSAGES if parser.parse_args().quick else MESSAGES
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(EmbeddedNode())
        urls = [node.url for node in stack.enter_context(embedded_nodes(3))]
        redlock = stack.enter_context(Redlock(urls, prefix=QUEUE))
        redlock.trust()
        env = {
            relay.BROKER: broker.url,
            relay.STORE: broker.url,
            relay.NODES: " ".join(urls),
            relay.QUEUE: QUEUE,
        }
        by_eta = of_messages_by_eta(broker, env, count)
        broker.client().flushall()
        worker = WorkerProcess("benchmarks.relay", concurrency=CHILDREN, env=env)
        stack.enter_context(worker)
        sender = Sender(broker, worker)
        sender.run("unlocked", [str(number) for number in range(WARM_UP)])
        plain = children_of(worker.pid)
        sender.run("hot", [str(number) for number in range(WARM_UP)])
        locked = children_of(worker.pid)
        with redlock.lock(KEY, wait=60):
            waiting = sender.bytes_of(count, sender.waiting, "hot")
            contending = children_of(worker.pid)
        sender.see(lambda: broker.client().llen(f"{QUEUE}:ran") >= count)
        held = held_locks(redlock)
    rows = [
        ["a waiting message, in the worker's main process", f"{waiting / 1024:.0f} KB"],
        ["a message of Celery's that waits for its ETA there", f"{by_eta / 1024:.0f} KB"],
        ["the first over the second (aim: at most 1.5)", f"{waiting / by_eta:.2f}"],
        ["a held lock, in its process", f"{held / 1024:.1f} KB"],
        ["a child after tasks without locks", f"{plain / 2**20:.0f} MB"],
        ["a child after tasks with locks", f"{locked / 2**20:.0f} MB"],
        ["a child after tasks that were refused", f"{contending / 2**20:.0f} MB"],
    ]
    print(table(["what", "memory"], rows, left=1))


def of_messages_by_eta(broker: EmbeddedNode, env: Mapping[str, str], count: int) -> float:
    """Return the bytes that a message of Celery's takes of a worker while it waits for its ETA."""
    with WorkerProcess("benchmarks.relay", concurrency=CHILDREN, env=env) as worker:
        sender = Sender(broker, worker)
        sender.run("unlocked", [str(number) for number in range(WARM_UP)])
        return sender.bytes_of(count, sender.kept, "unlocked", countdown=FAR)


class Sender:
    """Sends tasks to one worker, and sees what becomes of them."""

    def __init__(self, broker: EmbeddedNode, worker: WorkerProcess) -> None:
        self._app = Celery("sender", broker=broker.url, set_as_current=False)
        self._broker = broker
        self._worker = worker

    def send(self, task: str, keys: list[str], countdown: float | None = None) -> None:
        """Send a task for each key. countdown: in seconds."""
        for key in keys:
            self._app.send_task(task, (key,), queue=QUEUE, countdown=countdown)

    def run(self, task: str, keys: list[str]) -> None:
        """Send a task for each key, and return when all have run."""
        self.send(task, keys)
        with self._broker.client() as client:
            self.see(lambda: client.llen(f"{QUEUE}:ran") >= len(keys))
            client.delete(f"{QUEUE}:ran")

    def see(self, condition: Callable[[], bool]) -> None:
        """Return when a condition is true."""
        await_workers([self._worker], condition, PATIENCE)

    def bytes_of(
        self, count: int, kept: Callable[[], int], task: str, countdown: float | None = None
    ) -> float:
        """Return the bytes that each of some messages takes of the worker's main process.

        A third of them comes before, for the memory that the process has free. kept: tells how many
        there are; it is asked at the end alone, because its reply takes memory, too.
        """
        first = count // 3
        self.send(task, [KEY] * first, countdown)
        self.see(lambda: self.kept() >= first)
        before = private(self._worker.pid)
        self.send(task, [KEY] * (count - first), countdown)
        self.see(lambda: self.kept() >= count)
        bytes_per_message = (private(self._worker.pid) - before) / (count - first)
        self.see(lambda: kept() >= count)
        return bytes_per_message

    def kept(self) -> int:
        """Return how many messages the worker has, unacknowledged."""
        with self._broker.client() as client:
            return int(client.hlen("unacked"))

    def waiting(self) -> int:
        """Return how many messages wait in the worker for a lock."""
        replies = self._app.control.broadcast("redlock_waiting", reply=True, limit=1, timeout=10)
        return sum(len(rows) for reply in replies or () for rows in reply.values())


def private(pid: int) -> int:
    """Return the bytes that a process shares with no other one."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def children_of(pid: int) -> float:
    """Return the mean of `private` over the children of a worker."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sum(private(int(child)) for child in children) / len(children)


def held_locks(redlock: Redlock) -> float:
    """Return the bytes that one of many held locks takes of this process."""
    with redlock.lock("warm", wait=60):
        gc.collect()
    before = private(os.getpid())
    locks = [redlock.lock(f"held:{number}").acquire() for number in range(LOCK_COUNT)]
    bytes_per_lock = (private(os.getpid()) - before) / LOCK_COUNT
    for lock in locks:
        lock.release()
    return bytes_per_lock


if __name__ == "__main__":
    main()
