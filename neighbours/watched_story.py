"""The story beside an agent, which reports to servers on loopback; then, what the agent recorded.

Beside the tries of the story, which are deferred or run, a run is skipped, a body fails, and one
raises Retry. `python -m neighbours.watched_story` writes what it saw, as the story does.
"""

from __future__ import annotations

import os
import sys
import urllib.request
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from neighbours import collector, servers
from neighbours.agent_reports import AGENTS, Agent, Recorded, Where
from neighbours.row import Seen
from neighbours.story import QUIET, Stage, run_story, tell
from neighbours.story_setup import read_setup, run_folder

KEY = "d"  # which the tasks of the story do not need
TOLD = {"story.work": "waits or runs", "story.skipped": "skipped", "story.failed": "fails",
        "story.retried": "Retry"}  # fmt: skip


def tell_watched(stage: Stage) -> Seen:
    """Run the story, then the runs that it does not have."""
    seen = tell(stage)
    tasks, gate = stage.tasks, stage.folder / "second gate"
    held = tasks.work.delay(KEY, str(gate))
    stage.see("a body begins", lambda: stage.begun(held))
    calls = [tasks.skipped.delay(KEY), tasks.failed.delay(), tasks.retried.delay()]
    stage.see("they end", lambda: all(call.ready() for call in calls))
    gate.touch()
    stage.see("the body ends", held.ready)
    states = [call.state for call in calls]
    if states != ["REVOKED", "FAILURE", "SUCCESS"]:
        raise RuntimeError(f"skipped, failed and retried end as {states}")
    return seen


def shown(recorded: Recorded) -> dict[str, Any]:
    """Return what an agent recorded, by a name for the reader."""
    shows: dict[str, Any] = {}
    for task, name in TOLD.items():
        shows[f"{name}: statuses"] = recorded.statuses(task)
        shows[f"{name}: errors"] = recorded.classes(task)
    return shows


def differences(recorded: Recorded) -> tuple[str, ...]:
    """Return what a user would not expect of an agent."""
    so = {
        "no try is reported": not recorded.statuses("story.work"),
        "no error of a body is reported": not recorded.classes("story.failed"),
        "a deferral is an error": recorded.classes("story.work"),
        "a skip is an error": recorded.classes("story.skipped"),
    }
    return tuple(name for name, is_so in so.items() if is_so)


def beside(agent: Agent) -> AbstractContextManager[int]:
    """Run an agent that watches the events of workers; give its port."""
    broker = read_setup().broker

    def command(port: int) -> list[str]:
        program, *words = agent.command(broker, port)
        return [str(Path(sys.executable).with_name(program)), *words]

    return servers.server(command, run_folder() / "agent.log", timeout=300)


def report_of(port: int, page: str) -> collector.Report:
    """Ask an agent for what it shows."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{page}", timeout=60) as reply:
        return collector.Report(page, reply.read())


def run() -> None:
    agent = AGENTS[read_setup().more["agent"]]
    with ExitStack() as stack:
        certificate = collector.make_certificate(run_folder()) if agent.has_tls else None
        web = stack.enter_context(collector.http(agent.answer, certificate))
        frames = stack.enter_context(collector.frames())
        where = Where(web.port, frames.port, run_folder(), certificate, read_setup().more)
        os.environ.update(agent.env(where))
        port = stack.enter_context(beside(agent)) if agent.pages else 0

        def read() -> Recorded:
            asked = [report_of(port, page) for page in agent.pages]
            return agent.read([*web.kept, *frames.kept, *asked])

        def watched(stage: Stage) -> Seen:
            seen = tell_watched(stage)
            stage.waited(lambda: not differences(read()), QUIET)
            stage.end()
            recorded = read()
            return replace(
                seen, shows={**seen.shows, **shown(recorded)},
                differences=(*seen.differences, *differences(recorded)),
            )  # fmt: skip

        run_story(watched)


if __name__ == "__main__":
    run()
