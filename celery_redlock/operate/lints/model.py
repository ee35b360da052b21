"""What a lint is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from celery_redlock.tasks.settings.app import AppSettings
from celery_redlock.tasks.settings.task_config import TaskLockConfig

ERROR, WARNING, ADVICE = "error", "warning", "advice"
PREFETCH = 4  # Celery's default of the multiplier


@dataclass(frozen=True)
class Lint:
    """One thing that is wrong, or could be better.

    level: "error", "warning" or "advice". setting: where it stands, value: its text. hint: what
    comes of it, and what to do.
    """

    level: str
    setting: str
    value: str
    hint: str

    def __str__(self) -> str:
        return f"{self.setting}={self.value}: {self.hint}"


@dataclass(frozen=True)
class TaskFacts:
    """One locked task. queue: that of its own routing. Times in s.

    retries_after: where it retries by itself. takes_entry: it goes by an entry of `redlock_tasks`.
    """

    config: TaskLockConfig
    queue: str
    acks_late: bool = False
    reject_on_worker_lost: bool = False
    time_limit: float | None = None
    soft_time_limit: float | None = None
    retries_after: float | None = None
    takes_entry: bool = False

    @property
    def name(self) -> str:
        """The task's name."""
        return self.config.task_name


@dataclass(frozen=True)
class Facts:
    """What an app is configured to do.

    visibility: s, None where the broker takes no message for lost by time. queues: declared ones.
    prefetch: `worker_prefetch_multiplier`. names: all tasks'. counts: prometheus-client is there.
    key_prefixes: `global_keyprefix` by the setting whose Redis it is of. on_nodes: those of these
    settings whose Redis is a lock node.
    """

    settings: AppSettings
    visibility: float | None = None
    queues: Sequence[str] = ("celery",)
    creates_queues: bool = True
    prefetch: int = PREFETCH
    prefetch_is_fixed: Sequence[str] = ()
    names: Sequence[str] = ()
    tasks: Sequence[TaskFacts] = field(default=())
    counts: bool = True
    key_prefixes: Mapping[str, str] = field(default_factory=dict)
    on_nodes: Sequence[str] = ()
