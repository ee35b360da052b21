"""A web server and a worker, of which the requests and the tasks need one key.

20 requests at once beside 10 tasks, until two processes of the server have answered; two requests
that work for longer than a lock lasts without a renewal; a unique send by several requests.
`python -m neighbours.web_story` writes what it saw, as the story does.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from urllib.error import URLError

from celery.states import READY_STATES

from neighbours import servers
from neighbours.bodies import overlaps, read_notes, spans, whole_runs
from neighbours.row import Seen
from neighbours.story import Stage, run_story
from neighbours.story_setup import Setup

REQUESTS, TASKS, ROUNDS, PROCESSES = 20, 10, 5, 2
KEY = "a"
SHORT = 0.05
LEASES = 2.5  # a long request: of its lock's time without a renewal


@contextmanager
def serving(setup: Setup, folder: Path) -> Iterator[str]:
    """Run the web server; give its address."""
    program, *words = setup.more["command"]

    def command(port: int) -> list[str]:
        at = Path(sys.executable).with_name(program)
        return [str(at), *(word.format(port=port, folder=folder) for word in words)]

    with servers.server(command, folder / "server.log", timeout=300) as port:
        yield f"http://127.0.0.1:{port}"


class Client:
    """Asks the server. answers: of all requests that succeeded. errors: of the others."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.answers: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self._numbers = count()

    def ask(self, path: str) -> None:
        try:
            with urllib.request.urlopen(self.address + path, timeout=300) as reply:
                self.answers.append(json.load(reply))
        except URLError as error:
            self.errors.append(str(error))

    def ask_at_once(self, path: str, times: int) -> None:
        """path: with `{number}` where each request has one of its own."""
        paths = [path.format(number=f"request-{next(self._numbers)}") for _ in range(times)]
        with ThreadPoolExecutor(times) as threads:
            list(threads.map(self.ask, paths))

    def hold_at_once(self, times: int, seconds: float) -> None:
        self.ask_at_once(f"/hold?task={{number}}&seconds={seconds}", times)

    def of(self, name: str) -> set[Any]:
        """Return the values of a field in all answers that have it."""
        return {answer[name] for answer in self.answers if name in answer}


def tell_web(stage: Stage) -> Seen:
    stage.start("w1")
    stage.command("redlock", "trust", "--all", "--yes")  # new lock nodes grant no lock for a minute
    with serving(stage.setup, stage.folder) as address:
        client = Client(address)
        calls: list[Any] = []
        for _ in range(ROUNDS):
            calls += [stage.tasks.work.delay(KEY) for _ in range(TASKS)]
            client.hold_at_once(REQUESTS, SHORT)
            if len(client.of("pid")) >= PROCESSES:
                break
        client.hold_at_once(PROCESSES, LEASES * stage.setup.conf["redlock_ttl"])
        client.ask_at_once("/send", 2 * PROCESSES)
        stage.gate.touch()
        stage.waited(lambda: all(call.state in READY_STATES for call in calls))
    unique = [stage.tasks.app.AsyncResult(one) for one in client.of("id")]
    stage.waited(lambda: all(call.state in READY_STATES for call in unique))
    bodies = spans(read_notes(stage.notes))
    runs = whole_runs(bodies)
    mules = sum(task.startswith("mule-") for task in runs)
    so = {
        "a request fails": client.errors,
        "one process alone": len(client.of("pid")) < PROCESSES,
        "a child keeps its parent's lock": True in client.of("keeps_lock"),
        "a child frees its parent's lock": True in client.of("frees_lock"),
        "unique": len(unique) != 1 or len(client.of("sent_at_import")) != 1,
        "mules": stage.setup.more.get("mules", 0) != mules,
    }
    for error in client.errors:
        print(error, file=sys.stderr)
    if any(so.values()):
        print((stage.folder / "server.log").read_text()[-10_000:], file=sys.stderr)
    return Seen(
        overlaps=overlaps(bodies),
        lost=sum(call.id not in runs for call in (*calls, *unique)),
        run_twice=sum(times > 1 for times in runs.values()),
        differences=tuple(name for name, is_so in so.items() if is_so),
        states=dict(Counter(call.state for call in (*calls, *unique))),
        shows={
            "processes": len(client.of("pid")),
            "the app is imported": "before the fork" if client.of("was_forked") == {True}
            else "in each process",
            **({"locks of a mule": mules} if mules else {}),
        },
    )  # fmt: skip


if __name__ == "__main__":
    run_story(tell_web)
