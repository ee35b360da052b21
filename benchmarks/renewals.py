"""Hold 1,000 locks over three nodes: `python -m benchmarks.renewals [--quick]`.

What the process spends on renewing each of them once, beside as many renewals written to bare
sockets; and the memory that a held lock takes. It is the library's own threads whose processor
time is counted, whatever they do in that time, and the nodes that count the renewals.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import process_time, sleep, thread_time
from typing import cast

from redis import Redis

from benchmarks.figures import Aim, Times, against, table
from benchmarks.floor import connected, overheard
from celery_redlock import Redlock
from celery_redlock.testing import embedded_nodes

LOCKS = 1000
NODES = 3
TTL = 3.0  # s: each lock is renewed once a second
LONG_TTL = 60.0  # s: none is renewed while memory is looked at
WINDOW = 3 * LOCKS  # renewals; the more, the less what a window cuts off at its ends
CHECK_INTERVAL = 0.1  # s: between two looks at how many there were
FULL_WINDOWS = 8  # windows
QUICK_WINDOWS = 2  # windows
BARE_ROUNDS = 5  # beside each window
CONNECT_WAIT = 10.0  # s
AIM_MS = 10.0


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.renewals", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds, for a look")
    quick = parser.parse_args().quick
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(embedded_nodes(NODES))
        urls = [node.url for node in nodes]
        redlock = stack.enter_context(Redlock(urls))
        redlock.trust()
        memory = Memory.of(redlock)
        bare = stack.enter_context(contextlib.closing(Bare(urls)))
        client = stack.enter_context(nodes[0].client())
        with held(redlock, TTL):
            times = run(client, bare, QUICK_WINDOWS if quick else FULL_WINDOWS)
    print(report(times, memory))


@contextlib.contextmanager
def held(redlock: Redlock, ttl: float) -> Iterator[None]:
    """Hold all the locks, with a ttl in s."""
    with contextlib.ExitStack() as stack:
        for number in range(LOCKS):
            lock = redlock.lock(f"item {number}", ttl=ttl, wait=CONNECT_WAIT)
            stack.enter_context(lock)
        yield


@dataclass(frozen=True)
class Memory:
    """Bytes a held lock. traced: what Python allocated; resident: by the system, nan if untold."""

    traced: float
    resident: float

    @classmethod
    def of(cls, redlock: Redlock) -> Memory:
        """Hold all the locks twice: tracing what is allocated takes memory itself."""
        with redlock.lock("first", wait=CONNECT_WAIT):
            gc.collect()
        before = resident()
        with held(redlock, LONG_TTL):
            growth = resident() - before
        gc.collect()
        tracemalloc.start()
        with held(redlock, LONG_TTL):
            gc.collect()
            traced, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return cls(traced / LOCKS, growth / LOCKS)


def resident() -> float:
    """Return the bytes that the system keeps for this process; nan where it does not say."""
    with contextlib.suppress(FileNotFoundError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return float(pages * os.sysconf("SC_PAGE_SIZE"))
    return float("nan")


class Bare:
    """The renewal of one lock, written as often as there are locks to bare sockets."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._wires = []
        for url, requests in zip(urls, overheard(urls, "bare"), strict=True):
            sock = connected(url)
            sock.sendall(requests.grant)
            sock.recv(65536)
            sock.sendall(requests.renew)
            reply_bytes = len(sock.recv(65536)) * LOCKS
            self._wires.append((sock, requests.renew * LOCKS, reply_bytes))

    def round(self) -> None:
        """Write them all to each node, and read all the replies."""
        for sock, renewals, _ in self._wires:
            sock.sendall(renewals)
        for sock, _, unread in self._wires:
            while unread > 0:
                unread -= len(sock.recv(65536))

    def close(self) -> None:
        """Close the sockets."""
        for sock, _, _ in self._wires:
            sock.close()


def run(client: Redis, bare: Bare, count: int) -> Times[str]:
    """Return the seconds of processor time for one renewal of each lock, in so many windows."""
    times: Times[str] = Times()
    ours(client)  # holds taken one after another find together
    bare.round()
    for _ in range(count):
        started = thread_time()
        for _ in range(BARE_ROUNDS):
            bare.round()
        times.add({"bare": (thread_time() - started) / BARE_ROUNDS, "ours": ours(client)})
    return times


def ours(client: Redis) -> float:
    """Return what the library's threads spend on one renewal of each lock, over a window."""
    first_count = renewals(client)
    started = spent_by_others()
    while (count := renewals(client) - first_count) < WINDOW:
        sleep(CHECK_INTERVAL)
    return (spent_by_others() - started) / count * LOCKS


def renewals(client: Redis) -> int:
    """Return how many keys a node has been told to keep for longer: each is a lock renewed."""
    info = cast("dict[str, dict[str, int]]", client.info("commandstats"))
    return info.get("cmdstat_pexpire", {}).get("calls", 0)


def spent_by_others() -> float:
    """Return the seconds of processor time of all threads but this one."""
    return process_time() - thread_time()


def report(times: Times[str], memory: Memory) -> str:
    """Return the table and the aim."""
    rows = [
        [name, f"{times.p50(name) * 1e3:.2f}", f"{times.ratio(name, 'bare'):.1f}"]
        for name in ("ours", "bare")
    ]
    head = [f"{LOCKS} renewals, {NODES} nodes", "CPU ms", "to bare"]
    return (
        f"{table(head, rows, left=1)}\n\n"
        f"memory a held lock: {memory.traced:.0f} bytes allocated by Python; "
        f"the process grew by {memory.resident:.0f} bytes\n\n"
        f"{against([Aim('CPU ms of one renewal of each lock', times.p50('ours') * 1e3, AIM_MS)])}"
    )


if __name__ == "__main__":
    main()
