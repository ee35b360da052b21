"""Keep the interpreter's lock (GIL) beside a lock: `python -m benchmarks.gil [--quick]`.

C code that keeps the GIL for a share of the ttl, again and again, also keeps it from the watchdog.
This shows up to which share no lock is lost, beside a watchdog that gives the GIL up in each call
of the system, as Python's sockets do.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import subprocess
import sys
from collections.abc import Sequence
from time import monotonic, sleep

from benchmarks.figures import table
from celery_redlock import Redlock
from celery_redlock.lock.engine import watchdog
from celery_redlock.lock.transport import connection
from celery_redlock.lock.transport.nodes import Nodes
from celery_redlock.testing import embedded_nodes

TTL = 3.0  # s
# ttls for which the GIL is kept
FULL_TTLS = 6
QUICK_TTLS = 2
TRIES = 3  # of each share, side by side
SHARES = (0.06, 0.09, 0.12, 0.16, 0.2, 0.25, 0.3, 0.4, 0.5)
WAYS = ("gives it up", "ours")
CONNECT_WAIT = 20.0  # s


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gil", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds, for a look")
    parser.add_argument("--hog", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.hog:
        way, share, ttls, *urls = arguments.hog
        sys.exit(not keeps_its_lock(way, float(share), int(ttls), urls))
    with embedded_nodes(3) as servers:
        urls = [server.url for server in servers]
        with Redlock(urls) as redlock:
            redlock.trust()
        ttls = QUICK_TTLS if arguments.quick else FULL_TTLS
        shares = SHARES[1::3] if arguments.quick else SHARES
        kept = {way: [count_kept(way, share, ttls, urls) for share in shares] for way in WAYS}
    print(report(shares, kept))


def count_kept(way: str, share: float, ttls: int, urls: Sequence[str]) -> int:
    """Return how many of some processes, side by side, keep their lock."""
    command = [sys.executable, "-m", "benchmarks.gil", "--hog", way, str(share), str(ttls), *urls]
    processes = [subprocess.Popen(command) for _ in range(TRIES)]
    return [process.wait() for process in processes].count(0)


def keeps_its_lock(way: str, share: float, ttls: int, urls: Sequence[str]) -> bool:
    """Keep the GIL for a share of the ttl, again and again; returns whether the lock is held."""
    if way != "ours":
        connection.UnyieldingSocket = lambda sock: sock  # type: ignore[assignment,misc,return-value]
        Nodes.wait_keeping_gil = lambda self, round_: None  # type: ignore[method-assign]
        watchdog.HEAD_START = 0.0
    logging.disable()
    usleep = ctypes.PyDLL(None).usleep
    with Redlock(urls, node_timeout=TTL / 4) as redlock:
        lock = redlock.lock(f"of {id(redlock)} {monotonic()}", ttl=TTL).acquire(CONNECT_WAIT)
        sleep(TTL / 3)  # until every node is connected
        end = monotonic() + ttls * TTL
        while lock.held and monotonic() < end:
            usleep(int(share * TTL * 1e6))
        return lock.held


def report(shares: Sequence[float], kept: dict[str, list[int]]) -> str:
    """Return the table, and the greatest share up to which each way lost nothing."""
    rows = [
        [f"{share:g}", *(f"{kept[way][number]} of {TRIES}" for way in WAYS)]
        for number, share in enumerate(shares)
    ]
    before, after = (greatest(shares, kept[way]) for way in WAYS)
    ratio = f"{after / before:.1f}" if before else "-"
    text = f"greatest share without a loss: {before:g} and {after:g}, ratio {ratio}"
    return f"{table(['share of the ttl', *WAYS], rows)}\n\n{text}"


def greatest(shares: Sequence[float], kept: Sequence[int]) -> float:
    """Return the greatest share up to which no lock was lost."""
    share_kept = 0.0
    for share, count in zip(shares, kept, strict=True):
        if count < TRIES:
            break
        share_kept = share
    return share_kept


if __name__ == "__main__":
    main()
