"""Functions that an exception from outside must not cut: they give back what is held.

A body that loses its lock is interrupted by an exception that is raised between two of its lines.
If that struck inside a release, the release would be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_codes: set[CodeType] = set()


def uninterruptible(function: F) -> F:
    """Register a function, whose frames `is_uninterruptible` then recognizes; return it."""
    _codes.add(function.__code__)
    return function


def is_uninterruptible(code: CodeType) -> bool:
    """Return whether a frame with this code must not be cut."""
    return code in _codes
