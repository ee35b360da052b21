"""What a lint is, and the facts that the rules look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from celery_redlock.tasks.settings.app import AppSettings
from celery_redlock.tasks.settings.sources import EffectiveOptions
from celery_redlock.tasks.settings.task_config import TaskLockConfig

ERROR, WARNING, ADVICE = "error", "warning", "advice"
DEFAULT_PREFETCH = 4  # Celery's default of worker_prefetch_multiplier

# For the broker and the result backend, the setting that may hold their `global_keyprefix`.
TRANSPORT_OPTIONS = {
    "broker_url": "broker_transport_options",
    "result_backend": "result_backend_transport_options",
}
_NAMED = 5  # the most tasks that one lint names


@dataclass(frozen=True)
class Lint:
    """One thing that is wrong with the settings, or could be better.

    level: "error", "warning" or "advice". setting, value: what is set, and where. hint: the
    consequence, and what to do.
    """

    level: str
    setting: str
    value: str
    hint: str

    def __str__(self) -> str:
        return f"{self.setting}={self.value}: {self.hint}"


@dataclass(frozen=True)
class TaskFacts:
    """One locked task. queue: the name that its own routing gives. Times in seconds.

    retries_after: the delay of its automatic retries, None if it has none. takes_entry: an entry of
    `redlock_tasks` locks it.
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
class TaskInQueue:
    """A locked task with the options in force in its queue."""

    task: TaskFacts
    options: EffectiveOptions


@dataclass(frozen=True)
class Facts:
    """The configuration of an app.

    visibility: seconds after which the broker delivers an unacknowledged message again, None if
    never. queues: the declared ones; creates_queues: a send may make another one. prefetch:
    `worker_prefetch_multiplier`; prefetch_is_fixed: the queues whose deferred messages use up the
    prefetch. drops_oldest: the queues that drop a message if they are full. names: of all tasks.
    counts: prometheus-client is installed. key_prefixes: `global_keyprefix` by the setting of its
    Redis; on_nodes: those of these settings whose Redis is a lock node.
    """

    settings: AppSettings
    visibility: float | None = None
    queues: Sequence[str] = ("celery",)
    creates_queues: bool = True
    prefetch: int = DEFAULT_PREFETCH
    prefetch_is_fixed: Sequence[str] = ()
    drops_oldest: Sequence[str] = ()
    names: Sequence[str] = ()
    tasks: Sequence[TaskFacts] = field(default=())
    counts: bool = True
    key_prefixes: Mapping[str, str] = field(default_factory=dict)
    on_nodes: Sequence[str] = ()


def listed(names: Sequence[str]) -> str:
    """Return task names as a text, the first few of many."""
    more = len(names) - _NAMED
    return ", ".join(sorted(names)[:_NAMED]) + (f" and {more} more" if more > 0 else "")
