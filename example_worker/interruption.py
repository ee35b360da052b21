"""Ctrl-C and SIGTERM, so that they leave nothing behind; standard library only."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["Interruption"]


class Interruption:
    """Turns SIGINT and SIGTERM into SystemExit (130, 143) where that leaves nothing behind.

    Raised at once only inside `allowed`; else kept until then, or until a `held` ends. Only the
    first one counts, so that nothing interrupts the cleaning up.
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
        """Let a signal end the block at once, or at its end where a finalizer swallowed it."""
        with self._set(True):
            self.check()
            yield
        self.check()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep a signal until the block is done, as while a server starts.

        It is raised in place of the block's own error: in a terminal Ctrl-C ends the servers,
        too, and what then fails, fails because of it.
        """
        try:
            with self._set(False):
                yield
        finally:
            self.check()

    @contextlib.contextmanager
    def _set(self, allowed: bool) -> Iterator[None]:
        earlier = self._allowed
        self._allowed = allowed
        try:
            yield
        finally:
            self._allowed = earlier

    def _arrived(self, number: int, _frame: object) -> None:
        if self._number:
            return
        self._number = number
        if self._allowed:
            self.check()

    def check(self) -> None:
        """Raise what has arrived: also a second time, where a finalizer swallowed the first."""
        if self._number:
            raise SystemExit(128 + self._number)

    def _swallowed(self, unraisable: Any) -> None:
        """Say nothing of our own exception out of a finalizer: `check` raises it again."""
        if not (self._number and unraisable.exc_type is SystemExit):
            sys.__unraisablehook__(unraisable)
