"""The watchdog's threads do what they were asked to, whoever asks and when."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from celery_redlock.lock.engine.watchdog import Watchdog
from celery_redlock.lock.platform.clock import Platform, SystemClock
from tests import fork_server
from tests.conftest import Nodes

LONG = 600.0  # s: longer than any test
SHORT = 6.0  # s: a ttl
HOLDS_THE_GIL = f"""
import ctypes, sys, time
from celery_redlock import Redlock
from celery_redlock.lock.node_status import ask_nodes
usleep = ctypes.PyDLL(None).usleep
parts = 15 if sys.argv[2].startswith("postgresql") else 5  # libpq yields the GIL at each step
with Redlock(sys.argv[2:], node_timeout={SHORT / 4}) as redlock:
    with redlock.lock(sys.argv[1], ttl={SHORT}, wait=60) as lock:
        while ask_nodes(redlock.session).failing:
            pass
        lock.extend()
        end = time.monotonic() + 3 * {SHORT}
        while time.monotonic() < end and lock.held:
            usleep(int({SHORT} / parts * 1e6))
        print(lock.held)
"""


class Meanwhile(float):
    """A moment at whose first comparison somebody else does something."""

    do: Callable[[], None] | None = None

    def __lt__(self, other: Any) -> bool:
        self._let_it()
        return float(self) < other

    def __gt__(self, other: Any) -> bool:
        self._let_it()
        return float(self) > other

    def _let_it(self) -> None:
        do, self.do = self.do, None
        if do is not None:
            do()


class Dog:
    """A watchdog with nothing to renew. tidied: set at each tidying; again: when to come back."""

    def __init__(self) -> None:
        self.tidied, self.again = threading.Event(), Meanwhile(math.inf)
        platform = Platform(SystemClock())
        self.watchdog: Watchdog = Watchdog(
            platform, lambda renewed: None, self._tidy, lambda one, now: None
        )

    def _tidy(self) -> float:
        self.tidied.set()
        return self.again

    def close(self) -> None:
        self.watchdog.stop()


@pytest.fixture
def dog() -> Iterator[Dog]:
    with closing(Dog()) as made:
        yield made


def now() -> float:
    return SystemClock().now()


def test_who_asks_while_it_settles_when_to_come_back_is_heard(dog: Dog) -> None:
    asked = threading.Event()

    def ask() -> None:
        dog.tidied.clear()
        dog.watchdog.run_maintenance_by(now())
        asked.set()

    dog.again = Meanwhile(now() + LONG)
    dog.again.do = ask
    dog.watchdog.run_maintenance_by(now())
    assert asked.wait(60)
    assert dog.tidied.wait(60)


def test_of_two_that_ask_at_once_the_earlier_one_is_heard(dog: Dog) -> None:
    later = Meanwhile(now() + LONG)
    later.do = lambda: dog.watchdog.run_maintenance_by(now() + 0.1)
    dog.watchdog.run_maintenance_by(later)
    assert dog.tidied.wait(60)


@pytest.mark.slow
def test_c_code_that_keeps_the_gil_for_a_part_of_the_ttl_again_and_again_loses_no_lock(
    nodes: Nodes,
) -> None:
    command, urls = [sys.executable, "-c", HOLDS_THE_GIL], [node.url for node in nodes]
    with ExitStack() as ends:
        both = [
            ends.enter_context(
                fork_server.Process([*command, resource, *urls], stdout=subprocess.PIPE, text=True)
            )
            for resource in ("r", "s")
        ]
        assert [each.communicate(timeout=200)[0] for each in both] == ["True\n", "True\n"]
