"""What holds for a whole app, checked and frozen."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

DEFAULT_TTL, DEFAULT_MAX_TTL = 30.0, 60.0  # s
CELERY_PREFIX = "celery."  # what the names of Celery's own tasks begin with


@dataclass(frozen=True)
class AppSettings:
    """What holds for a whole app. Times in s. metrics: host and port where a worker serves them.

    nodes_from: the setting that the nodes come from, as "broker_url".
    """

    nodes: tuple[Any, ...] = field(repr=False)  # URLs may hold passwords
    prefix: str
    node_timeout: float
    clock_drift: float
    max_ttl: float
    restart_guard: str
    done_ttl: float
    options: Mapping[str, Any]
    queues: Mapping[str, Mapping[str, Any]]
    tasks: Mapping[str, Mapping[str, Any]]
    countdown_cap: float
    metrics: tuple[str, int] | None = None
    nodes_from: str = "redlock_nodes"

    @property
    def built_in_ttl(self) -> float:
        """The ttl where nobody sets one."""
        return min(DEFAULT_TTL, self.max_ttl)

    def for_queue(self, queue: str) -> Mapping[str, Any]:
        """Return the options of a queue: an exact name goes before globs, those in their order."""
        return self.queues.get(pattern_for(queue, self.queues) or "", {})


def pattern_for(name: str, patterns: Iterable[str]) -> str | None:
    """Return the name or glob that a name goes by, None where there is none.

    An exact name goes before globs, and of globs the first one that fits.
    """
    patterns = list(patterns)
    if name in patterns:
        return name
    return next((glob for glob in patterns if fnmatch.fnmatchcase(name, glob)), None)


def is_glob(pattern: str) -> bool:
    """Tell a glob from a plain name."""
    return any(sign in pattern for sign in "*?[")
