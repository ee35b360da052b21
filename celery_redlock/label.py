"""The label of a lock's holder: its one spelling, and all that reads it.

A run of a task is `<task id>:<task>:<retries>:<nesting>`, then `+<life>` and `@<queue>` if it has
them, and after a space the worker. Of a process, and of a name that a user gave, it is any text.
What stands around a label in a lock's value is in `lock/model/keys.py`. `escaped` is how people are
shown a label, or any other text that is not the package's own. Of an operator's hold it is
`operator <user>@<host>`, then `: <reason>` if it has one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

OPERATOR = "operator "  # begins the label of an operator's hold
LONGEST_LABEL = 500  # characters of it that people are shown
_RUN = re.compile(
    r"(?P<task_id>.+):(?P<task>[^:\s]+):\d+:\d+(?:\+\d+)?(?:@[^@\s]+)?(?: (?P<worker>\S+))?"
)


class RunId(NamedTuple):
    """What tells one run from all others.

    A retry is another run than the one before, and so is what a task is replaced by. Each copy of a
    message that an exchange may have given to several queues is a run of its own, too.
    nesting: how often the task was replaced. queue: of a copy, quoted; "" for a message to one
    queue. life: as of `LockHeader`.
    """

    task_id: str
    name: str
    retries: int = 0
    nesting: int = 0
    queue: str = ""
    life: int = 0

    def __str__(self) -> str:
        text = f"{self.task_id}:{self.name}:{self.retries}:{self.nesting}"
        text = f"{text}+{self.life}" if self.life else text
        return f"{text}@{self.queue}" if self.queue else text

    @property
    def of_all_copies(self) -> RunId:
        """The id without its queue and its life, as the sender of the message knows it."""
        return RunId(self.task_id, self.name, self.retries, self.nesting)


@dataclass(frozen=True)
class Holder:
    """The holder of a lock, by its label. task_id, task, worker: "" if the holder is no task."""

    label: str
    task_id: str = ""
    task: str = ""
    worker: str = ""

    @classmethod
    def of(cls, label: str) -> Holder:
        """Parse the label in a lock's value, as the nodes store it."""
        found = None if label.startswith(OPERATOR) else _RUN.fullmatch(label)
        return cls(label) if found is None else cls(label, **found.groupdict(default=""))

    def __str__(self) -> str:
        """Return it for people; of a run of a task: "shop.take[id] on worker"."""
        if not self.task:
            return escaped(self.label, LONGEST_LABEL)
        worker = f" on {self.worker}" if self.worker else ""
        return escaped(f"{self.task}[{self.task_id}]{worker}", LONGEST_LABEL)


def label_of_run(run: str, worker: str | None) -> str:
    """Return what the nodes show of a lock's holder. run: the text of a `RunId`."""
    return f"{run} {worker}"


def run_of_label(label: str) -> str:
    return label.rpartition(" ")[0]


def is_of_run(label: str, run: str) -> bool:
    return label.startswith(f"{run} ")


def label_of_operator(who: str, reason: str) -> str:
    """Return what the nodes, and so tasks that wait, show of an operator's hold."""
    return f"{OPERATOR}{who}{reason and f': {reason}'}"


def is_of_operator(label: str) -> bool:
    return label.startswith(OPERATOR)


def escaped(text: str, longest: int | None = None) -> str:
    """Return a text of others on one line, with its control characters spelled out.

    A task names its resource, and a node its errors. Neither may send commands to a terminal, or
    write a line of the log. longest: characters before the rest is cut off; None for all.
    """
    if longest is not None and len(text) > longest:
        text = f"{text[:longest]}..."
    if text.isprintable():
        return text
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text
    )
