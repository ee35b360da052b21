"""Ends the example on Ctrl-C or SIGTERM without leaving servers behind; standard library only."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["Interruption"]


class Interruption:
    """Turns SIGINT and SIGTERM into SystemExit (130, 143) at safe places.

    Inside `allowed` the error is raised at once. Elsewhere it is kept until the next `allowed`, or
    the end of a `held`. Later signals are ignored, so that none interrupts the cleanup.
    """

    def __init__(self) -> None:
        self._allowed = False
        self._number = 0

    def install(self) -> None:
        """Take over both signals."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._arrived)
        sys.unraisablehook = self._swallowed

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Let a signal end the block at once, or at its end if a finalizer swallowed the error."""
        with self._set(True):
            self.check()
            yield
        self.check()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep a signal until the end of the block, for example while a server starts.

        The SystemExit replaces an error of the block: in a terminal Ctrl-C reaches the servers,
        too, so the signal caused that error.
        """
        try:
            with self._set(False):
                yield
        finally:
            self.check()

    @contextlib.contextmanager
    def _set(self, allowed: bool) -> Iterator[None]:
        previous = self._allowed
        self._allowed = allowed
        try:
            yield
        finally:
            self._allowed = previous

    def _arrived(self, number: int, _frame: object) -> None:
        if self._number:
            return
        self._number = number
        if self._allowed:
            self.check()

    def check(self) -> None:
        """Raise SystemExit if a signal has arrived; again if a finalizer swallowed the first."""
        if self._number:
            raise SystemExit(128 + self._number)

    def _swallowed(self, unraisable: Any) -> None:
        """Do not print the own SystemExit that a finalizer swallowed: `check` raises it again."""
        if not (self._number and unraisable.exc_type is SystemExit):
            sys.__unraisablehook__(unraisable)
