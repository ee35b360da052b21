"""The label of a lock's holder: its format, and the functions that write and parse it.

- A run of a task: `<task id>:<task>:<retries>:<nesting>`, then `+<life>` and `@<queue>` if it has
  them, then a space and the worker.
- An operator's hold: `operator <user>@<host>`, then `: <reason>` if it has one.
- A process, or a name that a user gave: any text.

`escaped` makes a label, or any other text from outside the package, safe to show. Not here: the
rest of a lock's value (`lock/model/keys.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

OPERATOR = "operator "  # the first word of an operator's label
MAX_LABEL_LENGTH = 500  # characters that people are shown
_RUN = re.compile(
    r"(?P<task_id>.+):(?P<task>[^:\s]+):\d+:\d+(?:\+\d+)?(?:@[^@\s]+)?(?: (?P<worker>\S+))?"
)


class RunId(NamedTuple):
    """The id of one run.

    A retry is another run, and so is the task that replaces a task. If an exchange puts copies of a
    message into several queues, each copy is a run of its own.
    nesting: how often the task was replaced. queue: the queue of a copy, quoted; "" for a message
    to one queue. life: as in `LockHeader`.
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
        """The id without queue and life: the id that the sender of the message knows."""
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
        match = None if label.startswith(OPERATOR) else _RUN.fullmatch(label)
        return cls(label) if match is None else cls(label, **match.groupdict(default=""))

    def __str__(self) -> str:
        """Return the holder for people: "shop.take[id] on worker" for a run, else the label."""
        if not self.task:
            return escaped(self.label, MAX_LABEL_LENGTH)
        worker = f" on {self.worker}" if self.worker else ""
        return escaped(f"{self.task}[{self.task_id}]{worker}", MAX_LABEL_LENGTH)


def label_of_run(run: str, worker: str | None) -> str:
    """Return the label of a run in a lock's value. run: the text of a `RunId`."""
    return f"{run} {worker}"


def run_of_label(label: str) -> str:
    return label.rpartition(" ")[0]


def is_of_run(label: str, run: str) -> bool:
    return label.startswith(f"{run} ")


def label_of_operator(operator: str, reason: str) -> str:
    """Return the label of an operator's hold; waiting tasks show it. reason: "" for none."""
    return f"{OPERATOR}{operator}{reason and f': {reason}'}"


def is_of_operator(label: str) -> bool:
    return label.startswith(OPERATOR)


def escaped(text: str, max_length: int | None = None) -> str:
    """Return a text on one line, with its control characters escaped.

    The names of resources come from tasks, and errors from nodes. Escaped, such a text can neither
    send commands to a terminal nor forge a line of the log. max_length: the number of characters
    after which the text is cut off; None keeps all.
    """
    if max_length is not None and len(text) > max_length:
        text = f"{text[:max_length]}..."
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )
