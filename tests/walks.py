"""How much of the package one run passes: `python -m tests.walks`; Python 3.11 or newer.

A reader who follows a run opens these files and functions. Four walks: a plain lock; a message in a
solo worker that acknowledges late; one that is refused, until it waits; and from the release to its
end. Prints one JSON object a walk: the least of three times, as threads and timers that come
between add some. The functions of `celery_redlock.testing` do not count.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import celery.contrib.testing.tasks  # noqa: F401 - the worker looks for its task
from celery import Celery
from celery.contrib.testing.worker import start_worker

import celery_redlock
from celery_redlock import LockedTask, Redlock
from celery_redlock.testing import embedded_nodes

PACKAGE = f"{Path(celery_redlock.__file__).parent}/"
PATIENCE = 60.0  # s
TIMES = 3


class Walks:
    """Notes each function of the package that any thread enters during a walk."""

    def __init__(self) -> None:
        self.figures: dict[str, list[dict[str, int]]] = {}  # by title, each time's
        self._entered: set[tuple[str, str]] = set()
        self._is_on = False

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """Note a call; for `sys.setprofile`."""
        file = frame.f_code.co_filename
        if event == "call" and self._is_on and file.startswith(PACKAGE):
            name = file.removeprefix(PACKAGE)
            if not name.startswith("testing/"):
                self._entered.add((name, frame.f_code.co_qualname))  # type: ignore[attr-defined]

    @contextmanager
    def of(self, title: str) -> Iterator[None]:
        """Count what is entered inside the block."""
        self._is_on = True
        yield
        self._is_on = False
        names = {(file, name.split(".<locals>")[0]) for file, name in self._entered}
        figures = {
            "files": len({file for file, _ in self._entered}),
            "functions": len(self._entered),
            "classes": len({(file, n.partition(".")[0]) for file, n in names if "." in n}),
        }
        self.figures.setdefault(title, []).append(figures)
        self._entered.clear()


def main() -> None:
    walks = Walks()
    threading.setprofile(walks.note)
    sys.setprofile(walks.note)
    with embedded_nodes(4) as servers:
        broker, *nodes = (server.url for server in servers)
        app = Celery("walk", broker=broker, backend=broker, set_as_current=False)
        app.conf.update(redlock_nodes=nodes, worker_hijack_root_logger=False, task_acks_late=True)

        @app.task(base=LockedTask, name="take", lock_key="stock:{sku}", shared=False)
        def take(sku: str) -> str:
            return sku

        with Redlock(nodes) as redlock:
            redlock.trust()
            for _ in range(TIMES):
                walk(app, take, redlock, walks)
    for title, times in walks.figures.items():
        least = {name: min(one[name] for one in times) for name in times[0]}
        print(json.dumps({"walk": title, **least}))


def walk(app: Celery, take: Any, redlock: Redlock, walks: Walks) -> None:
    """Walk the four ways, each after it was gone once."""
    for _ in range(3):
        redlock.lock("plain").acquire(wait=PATIENCE).release()
    with walks.of("a plain lock"), redlock.lock("plain"):
        pass
    with start_worker(app, pool="solo", perform_ping_check=False, loglevel="ERROR"):
        take.delay("a").get(timeout=PATIENCE)
        time.sleep(0.5)  # what the worker does after a result is stored has no event to wait for
        with walks.of("a message in a worker"):
            take.delay("a").get(timeout=PATIENCE)
            time.sleep(0.3)
        held = redlock.lock("stock:b").acquire(wait=PATIENCE)
        with walks.of("a refused message until it waits"):
            result = take.delay("b")
            see(lambda: result.state == "DEFERRED")
            time.sleep(0.5)
        held.release()
        with walks.of("from the release to its end"):
            result.get(timeout=PATIENCE)
            time.sleep(0.3)


def see(condition: Callable[[], bool]) -> None:
    """Return when a condition is true."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the message is not deferred")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
