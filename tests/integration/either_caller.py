"""A program that takes the lock of a key as it is told. Arguments: the key, and the nodes' URLs.

Its first line is which build of the package it has imported. It replies to each word with the
monotonic second at which that was done.
"""

from __future__ import annotations

import json
import sys
import time

from celery_redlock import Redlock
from tests.integration.either_build import BUILD, written

WAIT = 100.0
TTL = 150.0  # s: no test lasts so long


def main() -> None:
    """Take the lock, release it, or hold it for a moment, as each line of stdin says."""
    key, *urls = sys.argv[1:]
    print(json.dumps(BUILD), flush=True)
    with Redlock(urls, node_timeout=2.0, max_ttl=200.0) as redlock:
        lock = redlock.lock(f"k:{key}", ttl=TTL, wait=WAIT)
        for word in map(str.strip, sys.stdin):
            if word == "take":
                lock.acquire()
                print(time.monotonic(), flush=True)
            elif word == "release":
                print(time.monotonic(), flush=True)  # before it: the next holder may be quick
                lock.release()
            elif word.startswith("turn "):
                with lock, written(key, name=word):
                    time.sleep(0.01)
                print(time.monotonic(), flush=True)
            else:
                raise ValueError(word)


if __name__ == "__main__":
    main()
