"""Functions that an asynchronous exception must not interrupt, because they release locks.

A body that loses its lock is interrupted by an exception that is raised between two of its lines.
If that happened inside a release, the release would be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_codes: set[CodeType] = set()


def uninterruptible(function: F) -> F:
    """Register a function and return it; `is_uninterruptible` then recognizes its frames."""
    _codes.add(function.__code__)
    return function


def is_uninterruptible(code: CodeType) -> bool:
    """Return whether a frame with this code must not be interrupted."""
    return code in _codes
