"""The contention test: processes that add one to a counter, each under the same lock.

Each notes when it held the lock, and with which fencing token; the storage refuses a write by an
older holder than the last it has seen. Whatever happens to nodes, network and processes, no two
may have held at once, tokens must grow from holder to holder, and each write must count.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from celery_redlock import Lock, NotAcquired, Redlock
from celery_redlock.lock.platform.clock import SystemClock
from tests.conftest import eventually

RESOURCE = "counter"
CONTENDERS = 6
NODE_TIMEOUT, TTL, MAX_TTL = 0.5, 2.0, 2.0  # s
WAIT = 1.0  # s for which one call waits; then it is made again
LONGEST = 1.5 * TTL  # s: of a section that lives by renewals
LONG_ONES = 0.02  # of all sections, beside those that a test asks for
REST = 0.05  # s at the most between two holds of one contender, so that others have their turn
LOOK = 0.005  # s between two looks at whether the lock is still held

# forked from one process that has imported this module, and nothing else is going on there
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__])


@dataclass(frozen=True)
class Rules:
    """What all contenders of one contest have in common.

    urls: of the nodes. folder: for the counter and the notes. shared: whether they lock the same;
    where not, each has a lock of its own, which excludes nobody. max_ttl: s, as of all clients.
    """

    urls: tuple[str, ...]
    folder: Path
    shared: bool = True
    max_ttl: float = MAX_TTL

    @property
    def end(self) -> Path:
        """The file that ends the contest by being there."""
        return self.folder / "end"

    @property
    def long(self) -> Path:
        """The file that makes the next section a long one by being there."""
        return self.folder / "long"


class Storage:
    """A counter in a file that knows the newest fencing token it has met, and refuses older ones.

    A reader's token counts as well as a writer's: else a late write could come between a newer
    holder's read and its write.
    """

    def __init__(self, folder: Path) -> None:
        self._newest, self._counts = folder / "newest", folder / "counts"
        for path in (self._newest, self._counts):
            path.touch()

    def counts(self) -> list[int]:
        """Return what has been written, in order."""
        return [int(line) for line in self._counts.read_text().split()]

    def read(self, token: int) -> int | None:
        """Return the counter; None where a newer holder has been here."""
        with self._alone(), contextlib.suppress(_OlderTokenError):
            self._meet(token)
            return (self.counts() or [0])[-1]
        return None

    def write(self, token: int, count: int) -> bool:
        """Set the counter; False where a newer holder has been here."""
        with self._alone(), contextlib.suppress(_OlderTokenError):
            self._meet(token)
            append(self._counts, f"{count}\n")
            return True
        return False

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with self._newest.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # ends with the process, if that is killed
            yield

    def _meet(self, token: int) -> None:
        newest = max(map(int, self._newest.read_text().split()), default=0)
        if token < newest:
            raise _OlderTokenError
        if token > newest:
            append(self._newest, f"{token}\n")


class _OlderTokenError(Exception):
    pass


def append(path: Path, line: str) -> None:
    """Add a line to a file by one system call, which a kill does not split."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Note:
    """What a contender saw or did. token: of the hold. at: monotonic s, the same for all processes.

    event: "held" (at that moment), "wrote", "refused" (by the storage) or "left" (the section).
    """

    token: int
    event: str
    at: float


def notes_of(path: Path) -> list[Note]:
    """Return what a contender has noted so far."""
    lines = path.read_text().split("\n") if path.exists() else []
    return [Note(*json.loads(line)) for line in lines[:-1]]  # the last is empty, or being written


class Section:
    """One hold of a contender, as it goes through the critical section."""

    def __init__(self, lock: Lock, path: Path, storage: Storage, rules: Rules) -> None:
        self._lock, self._path, self._storage, self._rules = lock, path, storage, rules
        self._now = SystemClock().now
        self.token = lock.fencing_token

    def run(self) -> None:
        """Read, think, and write if the lock is held still."""
        self._holds()
        count = self._storage.read(self.token)
        if count is None:
            self._note("refused", self._now())
        elif self._think() and self._holds():
            done = self._storage.write(self.token, count + 1)
            self._note("wrote" if done else "refused", self._now())
        self._holds()
        self._note("left", self._now())

    def _think(self) -> bool:
        """Take a little time, or a long one; False where the lock was lost meanwhile."""
        end = self._now() + self._length()
        while self._now() < end and not self._rules.end.exists():
            time.sleep(min(LOOK, max(0.0, end - self._now())))
            if not self._holds():
                return False
        return True

    def _length(self) -> float:
        if self._rules.long.exists():
            self._rules.long.unlink(missing_ok=True)
            return LONGEST
        return random.uniform(0, LONGEST if random.random() < LONG_ONES else LOOK)

    def _holds(self) -> bool:
        at = self._now()  # before the look: at this moment it was held, if it is now
        if not self._lock.held:
            return False
        self._note("held", at)
        return True

    def _note(self, event: str, at: float) -> None:
        append(self._path, json.dumps([self.token, event, at]) + "\n")


def contend(name: str, rules: Rules) -> None:
    """Be one contender, until the contest ends."""
    with (rules.folder / f"{name}.log").open("ab") as log:
        os.dup2(log.fileno(), 2)  # also what a thread says that ends by an error
    logging.basicConfig(level=logging.WARNING)
    storage, path = Storage(rules.folder), rules.folder / f"{name}.notes"
    resource = RESOURCE if rules.shared else name
    with Redlock(rules.urls, node_timeout=NODE_TIMEOUT, max_ttl=rules.max_ttl) as redlock:
        lock = redlock.lock(resource, ttl=TTL, wait=WAIT, fencing=True)
        while not rules.end.exists():
            with contextlib.suppress(NotAcquired), lock:
                Section(lock, path, storage, rules).run()
            time.sleep(random.uniform(0, REST))


@dataclass(frozen=True)
class Hold:
    """One hold as its notes tell of it.

    begin, end: monotonic s of the first and the last moment at which it was seen to be held.
    """

    contender: str
    token: int
    begin: float
    end: float


@dataclass(frozen=True)
class Record:
    """What a contest came to. holds: in the order of their beginnings. counts: what was written.

    wrote: how many writes the contenders know of. refused: how many the storage did not take.
    refused_in_vain: tokens that it refused though their holder held the lock still.
    """

    holds: list[Hold]
    counts: list[int]
    wrote: int
    refused: int
    refused_in_vain: list[int]

    @property
    def overlaps(self) -> list[tuple[Hold, Hold]]:
        """The holds that began before one that had begun earlier was over."""
        return [(a, b) for a, b in itertools.pairwise(self.holds) if b.begin <= a.end]

    @property
    def disorder(self) -> list[tuple[Hold, Hold]]:
        """The holds whose token is not greater than that of the one before."""
        return [(a, b) for a, b in itertools.pairwise(self.holds) if b.token <= a.token]


def record_of(folder: Path) -> Record:
    """Return what all contenders have noted, and what the storage has."""
    holds, refused, wrote, in_vain = [], 0, 0, []
    for path in sorted(folder.glob("*.notes")):
        for token, group in itertools.groupby(notes_of(path), lambda note: note.token):
            notes = list(group)
            events = [note.event for note in notes]
            seen = [note.at for note in notes if note.event == "held"]
            if seen:
                holds.append(Hold(path.stem, token, seen[0], seen[-1]))
            wrote, refused = wrote + events.count("wrote"), refused + events.count("refused")
            if "held" in itertools.dropwhile(lambda event: event != "refused", events):
                in_vain.append(token)
    holds.sort(key=lambda hold: hold.begin)
    return Record(holds, Storage(folder).counts(), wrote, refused, in_vain)


class Contest:
    """Contenders at work. killed: how many were, and replaced. record: once it is over."""

    record: Record

    def __init__(self, rules: Rules) -> None:
        self.rules, self.killed = rules, 0
        self._storage = Storage(rules.folder)
        self._serial = itertools.count()
        self._running: dict[str, multiprocessing.process.BaseProcess] = {}
        for _ in range(CONTENDERS):
            self._start()

    def _start(self) -> None:
        name = f"contender-{next(self._serial)}"
        process = PROCESSES.Process(target=contend, args=(name, self.rules), daemon=True)
        process.start()
        self._running[name] = process

    @property
    def names(self) -> list[str]:
        """The contenders that are at work."""
        return list(self._running)

    @property
    def writes(self) -> int:
        """How often the counter has been written so far."""
        return len(self._storage.counts())

    def check_alive(self) -> None:
        """Fail where a contender has ended by itself."""
        ended = {n: p.exitcode for n, p in self._running.items() if p.exitcode is not None}
        assert not ended, f"contenders have ended by themselves: {ended}\n{self._logs()}"

    def endure(self, seconds: float) -> None:
        """Let it go on for so many s."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.check_alive()
            time.sleep(min(0.05, max(0.0, end - time.monotonic())))

    def endure_turns(self, seconds: float, turn: float, do: Callable[[], object]) -> None:
        """Let it go on for so many s, and do something at each turn of so many s."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            do()
            self.endure(turn)

    def see_progress(self, writes: int = 3) -> None:
        """Return when there have been so many more writes."""
        aim = self.writes + writes

        def is_reached() -> bool:
            self.check_alive()
            return self.writes >= aim

        eventually(is_reached)

    def see_long_section(self) -> str:
        """Return a contender that has a section of `LONGEST` s before it, unless it loses the lock.

        Faults then meet a lock that is held.
        """
        self.rules.long.touch()
        eventually(lambda: not self.rules.long.exists())
        return eventually(self.holder)

    def holder(self) -> str:
        """Return a contender that is in its section just now, "" where none is."""
        return next((name for name in self._running if self._is_inside(name)), "")

    def _is_inside(self, name: str) -> bool:
        notes = notes_of(self.rules.folder / f"{name}.notes")
        return bool(notes) and notes[-1].event == "held"

    def kill(self, name: str) -> None:
        """End a contender as `kill -9` does, and put another in its place."""
        process = self._running.pop(name)
        process.kill()
        process.join()
        self.killed += 1
        self._start()

    @contextlib.contextmanager
    def paused(self, name: str) -> Iterator[None]:
        """Stop a contender, and let it go on afterwards."""
        self._signal(name, signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(name, signal.SIGCONT)

    def _logs(self) -> str:
        return "".join(path.read_text() for path in sorted(self.rules.folder.glob("*.log")))

    def _signal(self, name: str, number: int) -> None:
        pid = self._running[name].pid
        assert pid is not None
        os.kill(pid, number)

    def finish(self) -> Record:
        """Let every contender end what it is at, and return what it came to."""
        self.check_alive()
        self.rules.end.touch()
        for name, process in self._running.items():
            process.join(120)
            assert process.exitcode == 0, f"{name} ended with {process.exitcode}\n{self._logs()}"
        assert "Traceback" not in self._logs(), self._logs()
        self.record = record_of(self.rules.folder)
        return self.record

    def abandon(self) -> None:
        """End every contender at once."""
        for process in self._running.values():
            process.kill()
            process.join()


@contextlib.contextmanager
def contest(urls: Sequence[str], folder: Path, max_ttl: float = MAX_TTL) -> Iterator[Contest]:
    """Let contenders loose on nodes; after the body, see progress again, and check the record."""
    running = Contest(Rules(tuple(urls), folder, max_ttl=max_ttl))
    try:
        running.see_progress()
        yield running
        running.see_progress(CONTENDERS)
        check(running.finish(), killed=running.killed)
    finally:
        running.abandon()


def check(record: Record, *, killed: int = 0) -> None:
    """Fail unless the lock excluded; killed: contenders that may have had no time for a note."""
    assert record.holds, "nobody ever held the lock"
    assert not record.overlaps, f"two held at once: {record.overlaps}"
    assert not record.disorder, f"tokens do not grow: {record.disorder}"
    assert not record.refused_in_vain, f"held, and too late: {record.refused_in_vain}"
    assert record.counts == list(range(1, len(record.counts) + 1)), "a write did not count"
    known = range(record.wrote, record.wrote + killed + 1)
    assert len(record.counts) in known, f"{len(record.counts)} writes, of which {known} are known"
