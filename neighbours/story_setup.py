"""What the story is told of a neighbour; standard library only."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VARIABLE = "NEIGHBOUR_SETUP"  # the path of the file that all processes of a run read


@dataclass(frozen=True)
class Setup:
    """What the processes of a run read; all of it can be written as JSON.

    broker, backend: URLs. nodes: URLs of the lock nodes. conf: settings of the app, over the
    story's own. app: the module for `celery -A`. tasks: the module that has `app`, `work` and
    `once`, if that is another one.
    pool, concurrency, options: of each worker's command line. wrapper: a command of the environment
    before it, such as ["ddtrace-run"].
    before: words after `celery -A app`, of a command before the first worker starts.
    after_kill: words after `celery -A app`, if a killed worker's messages come back only by a
    command. patience: seconds without any progress, after which what has not ended
    is lost. more: what a program of a neighbour's own needs.
    """

    broker: str
    backend: str
    nodes: tuple[str, ...]
    conf: Mapping[str, Any] = field(default_factory=dict)
    app: str = "neighbours.story_app"
    tasks: str = ""
    pool: str = "prefork"
    concurrency: int = 2
    options: tuple[str, ...] = ()
    wrapper: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    after_kill: tuple[str, ...] = ()
    patience: float = 60.0
    more: Mapping[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))


def read_setup() -> Setup:
    """Return the setup of the run that this process belongs to."""
    return Setup(**json.loads(Path(os.environ[VARIABLE]).read_text()))


def run_folder() -> Path:
    """Return the folder of the run that this process belongs to."""
    return Path(os.environ[VARIABLE]).parent
