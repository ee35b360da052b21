"""The story, run in a neighbour's environment: what a user does, and what goes wrong, in a minute.

30 tasks on three keys, over two workers. A body holds its key; a second message of the key is
refused, and waits; a third one is revoked as it waits. One call is sent uniquely, twice. Then the
worker of the first body is killed, and another one takes its place. The message of the killed body
has to come back, and every other message has to run once.

`python -m neighbours.story` reads its `Setup`, and writes what it saw to `seen.json` beside it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from celery.states import READY_STATES

from celery_redlock import RedlockError
from celery_redlock.testing import WorkerProcess
from neighbours.bodies import Note, note, overlaps, read_notes, spans, whole_runs
from neighbours.row import Seen
from neighbours.story_setup import Setup, read_setup, run_folder
from neighbours.story_tasks import KEYS

MESSAGES = 30
GATE = "gate"  # the file for which the long bodies wait
OF_LAST_KEY = (MESSAGES - 4) // len(KEYS)  # messages that wait for no long body
QUIET = 10.0  # seconds without a note, after which a worker receives nothing more


class Stage:
    """The workers of one run and what they note; ends the workers at the exit of `with`."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        self.setup = setup
        self.folder = folder
        self.notes = folder / "notes"
        self.gate = folder / GATE
        self.tasks = import_module(setup.tasks or setup.app)
        self.workers: dict[str, WorkerProcess] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        self._stack.close()

    def start(self, *names: str) -> None:
        """Start workers side by side. Raises RuntimeError with the log of one that does not."""
        for name in names:
            self.launch(name, self._command(name))
        for name in names:
            self.workers[name].wait_ready()

    def end(self) -> None:
        """End the workers by a warm shutdown, in which an agent reports what is left."""
        self._stack.close()

    def launch(self, name: str, command: Sequence[str]) -> WorkerProcess:
        """Start a process of a command line as a worker of that name; return at once."""
        worker = WorkerProcess(self.setup.app, name=name, command=command, cwd=self.folder)
        self.workers[name] = worker
        self._stack.callback(worker.stop)
        worker.launch()
        return worker

    def _command(self, name: str) -> list[str]:
        setup = self.setup
        wrapper = [str(Path(sys.executable).with_name(word)) for word in setup.wrapper[:1]]
        return [
            *wrapper, *setup.wrapper[1:], sys.executable, "-m", "celery", "-A", setup.app, "worker",
            "-P", setup.pool, "-c", str(setup.concurrency), "-n", f"{name}@%h", "-l", "INFO",
            *setup.options,
        ]  # fmt: skip

    def begun(self, call: Any) -> list[Note]:
        """Return the begins of a message's bodies."""
        lines = read_notes(self.notes)
        return [line for line in lines if (line.event, line.task) == ("begin", call.id)]

    def is_deferred(self, call: Any) -> bool:
        """Return whether a worker has logged that a message waits."""
        waits = re.compile(rf"\[{call.id}\] deferred: .* is held by ")
        return any(waits.search(worker.output()) for worker in self.workers.values())

    def ended(self) -> Counter[str]:
        """Return how many runs of each task id have reached their end."""
        return whole_runs(spans(read_notes(self.notes)))

    def is_quiet(self, calls: Iterable[Any]) -> bool:
        """Return whether all messages were received, and no run is about to end."""
        logs = "".join(worker.output() for worker in self.workers.values())
        return all(f"[{call.id}] received" in logs for call in calls) and all(
            f"[{task}] succeeded" in logs for task in self.ended()
        )

    def state(self, call: Any) -> str:
        """Return the state that the backend has; "" without a backend."""
        return str(call.state) if self.setup.backend else ""

    def revoke(self, call: Any) -> str:
        """Revoke a message in all workers; return what failed, "" if both have confirmed it."""
        try:
            replies = self.tasks.app.control.revoke(call.id, reply=True, timeout=10, limit=2)
        except Exception as error:  # each broker has its own
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return "" if len(replies or ()) == 2 else f"{len(replies or ())} of 2 workers answer"

    def kill_worker_of(self, call: Any) -> None:
        """End the worker of a message's body as the death of its machine does."""
        group = self.begun(call)[-1].group
        (worker,) = (each for each in self.workers.values() if each.runs and each.pid == group)
        worker.kill()
        note(self.notes, "kill", group=group)

    def command(self, *words: str) -> None:
        """Run a command of the app. Raises RuntimeError with what it says if it fails."""
        celery = [sys.executable, "-m", "celery", "-A", self.setup.app]
        ended = subprocess.run(
            [*celery, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False, cwd=self.folder,
        )  # fmt: skip
        print(ended.stdout, end="", flush=True)
        if ended.returncode:
            raise RuntimeError(ended.stdout)

    def see(self, what: str, check: Callable[[], object]) -> None:
        """Wait until something is so. Raises TimeoutError with the logs if it never is."""
        if not self.waited(check):
            logs = "\n".join(worker.output()[-5000:] for worker in self.workers.values())
            raise TimeoutError(f"{what}: not within {self.setup.patience:.0f} s\n{logs}")

    def waited(self, check: Callable[[], object], patience: float | None = None) -> bool:
        """Wait until something is so, as long as the bodies note anything; return if it is.

        patience: seconds without a note; None means that of the setup.
        """
        seen, end = -1, 0.0
        patience = self.setup.patience if patience is None else patience
        while not check():
            if (size := len(read_notes(self.notes))) != seen:
                seen, end = size, time.monotonic() + patience
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
        return True


def tell(stage: Stage) -> Seen:
    """Run the story to its end, and return what was seen."""
    work, once = stage.tasks.work, stage.tasks.once
    if stage.setup.before:
        stage.command(*stage.setup.before)
    stage.start("w1", "w2")
    stage.command("redlock", "trust", "--all", "--yes")  # new lock nodes grant no lock for a minute
    held = work.delay("a", str(stage.gate))
    stage.see("a body begins", lambda: stage.begun(held))
    refused, revoked = work.delay("a"), work.delay("a")
    unique, again = (once.delay("b", str(stage.gate)) for _ in range(2))
    others = [work.delay(KEYS[number % len(KEYS)]) for number in range(MESSAGES - 4)]
    waits = stage.waited(lambda: all(map(stage.is_deferred, (refused, revoked))), QUIET)
    is_shown = waits and stage.waited(lambda: stage.state(refused) in ("DEFERRED", ""), QUIET)
    revoke_failed = stage.revoke(revoked)
    calls = [held, refused, revoked, unique, *others]
    # Beside the long bodies, the kill meets no message that is about to be received, which kombu
    # may lose, and no run about to end, which runs again. Behind a full prefetch none is received.
    stage.waited(lambda: len(stage.ended()) >= OF_LAST_KEY and stage.is_quiet(calls), QUIET)
    stage.kill_worker_of(held)
    killed_at = time.monotonic()
    stage.start("w3")
    if stage.setup.after_kill:
        stage.command(*stage.setup.after_kill)
    stage.gate.touch()
    expected = {call.id for call in calls if call is not revoked}
    stage.waited(lambda: expected <= stage.ended().keys())
    if stage.setup.backend:
        stage.waited(lambda: all(call.state in READY_STATES for call in calls))
    bodies = spans(read_notes(stage.notes))
    runs = whole_runs(bodies)
    seen = {
        "waiting": waits,
        "state of a waiting message": is_shown or not waits,
        "revoke": revoked.id not in {body.task for body in bodies}
        and stage.state(revoked) in ("REVOKED", ""),
        "unique": again.id == unique.id and getattr(again, "is_duplicate", False),
        "redelivery": len(stage.begun(held)) > 1,
    }
    shows: dict[str, Any] = {}
    if is_shown and stage.setup.backend:
        shows["state of a waiting message"] = "DEFERRED"
    if revoke_failed:
        shows["revoke"] = revoke_failed
    if seen["redelivery"]:
        shows["seconds until the killed run began again"] = round(
            stage.begun(held)[1].at - killed_at, 1
        )
    return Seen(
        overlaps=overlaps(bodies),
        lost=len(expected - runs.keys()),
        run_twice=sum(count > 1 for count in runs.values()),
        differences=tuple(name for name, is_so in seen.items() if not is_so),
        states=dict(Counter(filter(None, map(stage.state, calls)))),
        shows=shows,
    )


def last_error(text: str) -> str:
    """Return the last line of a log or an error that names an error, else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1])


def run_story(told: Callable[[Stage], Seen]) -> None:
    """Tell a story on a stage, and write what was seen."""
    folder = run_folder()
    try:
        with Stage(read_setup(), folder) as stage:
            seen = told(stage)
    except (RedlockError, RuntimeError) as error:  # of the settings, or of a worker's start
        seen = Seen(refused=last_error(f"{type(error).__name__}: {error}"))
    (folder / "seen.json").write_text(json.dumps(asdict(seen)))


if __name__ == "__main__":
    run_story(tell)
