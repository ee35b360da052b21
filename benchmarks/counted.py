"""What `benchmarks.instructions` runs under callgrind, with the package of another tree.

callgrind ends a part of its count whenever the C library's `getloadavg` is entered, and begins the
next one at `getsid`: nothing else here calls these. Between them the program waits for its turn,
and does some work that does not count: what is due after a wait falls on that. Standard input is a
socket of whoever counts.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import os
import sys
from collections.abc import Callable, Sequence

from celery import Celery
from kombu.asynchronous import get_event_loop

from celery_redlock import LockedTask, Redlock
from celery_redlock.lock.transport import nodes as nodes_of_a_process

QUEUE = "counted"
SENT = "sent"  # the queue of the unique sends, which nobody reads
PLAIN = "plain"
LOCKED = "locked"
MARK = "mark"
BEGIN = "begin"
END = "end"
# Under callgrind a process is fifty times as slow, and it waits for its turn: with these times no
# node is given up, and no lock is renewed.
PATIENCE = 600.0  # s
TTL = 7200.0  # s
TURNS = 0  # descriptor of a socket
DONE = GO = b"."
UNCOUNTED = 2  # pairs, sends or tasks, before a part that counts
FIRST_NUMBER = 10**6  # of a send: all have as many digits
IMPORTED = ("celery.apps.worker", "celery.bin.celery", "kombu.transport.redis")  # by a worker


def mark() -> None:
    """End a part of the count, and wait for the turn."""
    os.getloadavg()
    wait_for_turn()


def wait_for_turn() -> None:
    """Say that this one has ended, and wait for the next one."""
    os.write(TURNS, DONE)
    if not os.read(TURNS, 1):
        os._exit(0)  # whoever counts has ended, and wants no more


def mark_in_worker() -> None:
    """As `mark`, and drop the timers of the worker and of kombu's transport.

    They fire each second, or less often. The slower this process is, the more of them would fall on
    a task.
    """
    mark()
    loop = get_event_loop()
    assert loop is not None
    loop.timer.clear()


def begin() -> None:
    """Begin a part that counts."""
    os.getsid(0)


def beat_seldom() -> None:
    """Let the worker beat for its worker lease once, and trust the answer to the end.

    Otherwise a thread would beat each second, and the slower this process is, the more often within
    a task. A tree from before worker leases has no such thread.
    """
    try:
        keeper = importlib.import_module("celery_redlock.tasks.recovery.keeper")
    except ModuleNotFoundError:
        return
    vars(keeper).update(BEAT_INTERVAL=TTL, TRUST=TTL)


def yield_always() -> None:
    """Have no broadcast taken for one that waited for the GIL: here each one takes as long."""
    vars(nodes_of_a_process).update(CONTENDED_AFTER=PATIENCE)


def pairs(urls: Sequence[str], count: int) -> None:
    """Acquire and release a lock, once in each part.

    The replies of the nodes are there, or are waited for: in one pair less often than in several.
    """
    with Redlock(urls, node_timeout=PATIENCE, max_ttl=TTL) as redlock:
        redlock.trust()
        lock = redlock.lock("x", ttl=TTL, wait=PATIENCE)

        def pair() -> None:
            lock.acquire()
            lock.release()

        in_parts(pair, count)


def in_parts(work: Callable[[], object], count: int) -> None:
    """Do some work once in each part: one that fills caches, then so many that count."""
    for _ in range(1 + count):
        mark()
        for number in range(UNCOUNTED + 1):
            if number == UNCOUNTED:
                begin()
            work()
    mark()


def sends(urls: Sequence[str], broker: str, count: int) -> None:
    """Send a task with `unique_for`, each time with another key, as `pairs` acquires a lock."""
    app = Celery("sender", broker=broker, set_as_current=False)
    app.conf.update(
        task_default_queue=SENT, task_ignore_result=True, redlock_nodes=list(urls),
        redlock_node_timeout=PATIENCE, redlock_ttl=TTL, redlock_max_ttl=TTL,
    )  # fmt: skip

    def body(number: int) -> None: ...

    task = app.task(name=SENT, shared=False, base=LockedTask, lock_unique_for=TTL)(body)
    numbers = itertools.count(FIRST_NUMBER)
    in_parts(lambda: task.delay(next(numbers)), count)
    app.close()


def tasks(urls: Sequence[str], broker: str) -> None:
    """Run a solo worker until a task ends it; the parts are between two tasks `mark`."""
    app = Celery("counted", broker=broker)
    app.conf.update(
        task_default_queue=QUEUE, task_ignore_result=True, redlock_nodes=list(urls),
        redlock_node_timeout=PATIENCE, redlock_ttl=TTL, redlock_max_ttl=TTL,
        worker_prefetch_multiplier=1,  # so that each task is fetched alike
    )  # fmt: skip

    def body(number: int) -> None: ...

    def end() -> None:
        os._exit(0)

    app.task(name=PLAIN)(body)
    app.task(name=LOCKED, base=LockedTask, lock_key="{number}")(body)
    app.task(name=MARK)(mark_in_worker)
    app.task(name=BEGIN)(begin)
    app.task(name=END)(end)
    options = ["--pool", "solo", "--concurrency", "1", "--loglevel", "WARNING"]
    quiet_options = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    app.worker_main(["worker", *options, *quiet_options])


def main() -> None:
    """Do all of it in one process. callgrind begins to count after the imports, in the first turn.

    An instruction takes ten times as long from then on.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("broker")
    parser.add_argument("pairs", type=int, help="parts of each kind of pairs and of sends")
    parser.add_argument("nodes", type=int, help="of the locked task")
    parser.add_argument("urls", nargs="+")
    arguments = parser.parse_args()
    gc.disable()  # its passes fall on one part or on another
    sys.setswitchinterval(PATIENCE)  # a thread that waits for the GIL would wake each 5 ms
    for name in IMPORTED:
        importlib.import_module(name)
    beat_seldom()
    yield_always()
    wait_for_turn()
    pairs(arguments.urls[:1], arguments.pairs)
    pairs(arguments.urls, arguments.pairs)
    sends(arguments.urls[:1], arguments.broker, arguments.pairs)
    sends(arguments.urls, arguments.broker, arguments.pairs)
    tasks(arguments.urls[: arguments.nodes], arguments.broker)


if __name__ == "__main__":
    main()
