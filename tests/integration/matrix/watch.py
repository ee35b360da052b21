"""Looks at the nodes, at what bodies write and at their processes, all the time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celery_redlock.testing import EmbeddedNode

BETWEEN_LOOKS = 0.1  # s: so exact is what is measured


@dataclass(frozen=True)
class Look:
    """One look, between two monotonic s: the resources locked anywhere, the processes alive."""

    asked: float
    answered: float
    locked: frozenset[str]
    alive: frozenset[int]


@dataclass
class Body:
    """One body, by its own lines. ended: None where it could not write that."""

    resource: str
    pid: int
    begun: float
    ended: float | None = None


class Watch:
    """All looks so far, and all lines. log: where bodies write."""

    def __init__(self, nodes: Sequence[EmbeddedNode], log: Path) -> None:
        self.looks: list[Look] = []
        self.lines: list[dict[str, Any]] = []
        self._nodes = [node.client() for node in nodes]
        self._log, self._read = log, 0
        self._pids: set[int] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._over.wait(BETWEEN_LOOKS):
            asked = time.monotonic()
            names = {str(name) for node in self._nodes for name in node.keys("*:lock:*")}
            answered = time.monotonic()
            locked = frozenset(name.partition(":lock:")[2] for name in names)
            self._read_on()
            alive = frozenset(pid for pid in self._pids if lives(pid))
            self.looks.append(Look(asked, answered, locked, alive))

    def _read_on(self) -> None:
        with self._log.open() as log:
            log.seek(self._read)
            whole = "".join(log.read().rpartition("\n")[:2])  # the last line may be on its way
        self._read += len(whole.encode())
        for line in map(json.loads, whole.splitlines()):
            self.lines.append(line)
            if line["what"] == "begin":
                self._pids.add(line["pid"])

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._thread.join()
        for node in self._nodes:
            node.close()

    def bodies(self, task_id: str) -> list[Body]:
        found: list[Body] = []
        for line in list(self.lines):
            if line["what"] == "begin" and line["id"] == task_id:
                found.append(Body(line["key"], line["pid"], line["at"]))
            elif line["what"] == "end":
                who = line["key"], line["pid"], None
                of_it = (b for b in reversed(found) if (b.resource, b.pid, b.ended) == who)
                if (body := next(of_it, None)) is not None:
                    body.ended = line["at"]
        return found

    def is_locked(self, resource: str) -> bool:
        return resource in self.looks[-1].locked

    def is_alive(self, pid: int) -> bool:
        return pid in self.looks[-1].alive

    def releases(self, resource: str) -> list[str] | None:
        """Return who gave back the first lock on a resource; None where there was none."""
        told = [line for line in list(self.lines) if line["key"] == resource]
        held = [number for number, line in enumerate(told) if line["what"] == "acquired"]
        if not held:
            return None
        of_first = told[held[0] : held[1] if len(held) > 1 else None]
        return [line["by"] for line in of_first if line["what"] == "released"]


def lives(pid: int) -> bool:
    """Tell whether a process runs: one that waits to be buried does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def follow(
    body: Body, following: Body | None, looks: Sequence[Look]
) -> tuple[list[str], float | None]:
    """Return what went wrong with one body's lock, and how long after its end it was gone, s."""
    watched = [look for look in looks if look.asked > body.begun]
    end = body.ended or death(body, watched)
    if end is None:
        return ["a body has not ended"], None
    wrong = []
    if following is not None and following.begun < end:
        wrong.append("two bodies at once")
    inside = [look for look in watched if look.answered < end]
    if early := [look for look in inside if body.resource not in look.locked]:
        wrong.append(f"not locked {end - early[0].answered:.2f} s before its body's end")
    freed = [
        look.answered for look in watched if look.asked > end and body.resource not in look.locked
    ][:1]
    if following is not None:
        freed.append(following.begun)  # it has the lock, or needed another
    if not freed:
        return [*wrong, "still locked"], None
    return wrong, min(freed) - end


def death(body: Body, watched: Sequence[Look]) -> float | None:
    """Return when a body's process was last seen alive; None where it still is."""
    if not watched or body.pid in watched[-1].alive:
        return None
    return max((look.asked for look in watched if body.pid in look.alive), default=body.begun)
