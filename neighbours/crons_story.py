"""The story of Sentry Crons: beat sends a run that is skipped, and ones that wait, run and fail.

Beat opens the check-in of an entry, and the run closes it; of excluded entries the body does both.
`python -m neighbours.crons_story` writes what it saw, as the story does.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable

from neighbours import collector
from neighbours.agent_reports import Sentry, Where, lines_of
from neighbours.beats import Beats
from neighbours.bodies import overlaps, read_notes, spans
from neighbours.row import Seen
from neighbours.story import GATE, QUIET, Stage, run_story
from neighbours.story_setup import read_setup, run_folder

RUN = r"story\.periodic\[([\w-]+)\]"
LINES = (f"skipped {RUN}", f"{RUN} deferred: ", f"{RUN} succeeded", f"{RUN} raised")
OPEN = "in_progress"  # the status of a check-in that is not closed


def check_ins(reports: Iterable[collector.Report]) -> dict[str, list[str]]:
    """Return the statuses of each check-in, as "in_progress, ok", by its monitor, each once."""
    statuses: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for report in reports:
        for item in lines_of(report):
            if "check_in_id" in item:
                statuses[item["monitor_slug"], item["check_in_id"]].append(item["status"])
    by_monitor: defaultdict[str, set[str]] = defaultdict(set)
    for (monitor, _), found in statuses.items():  # those of two processes come in any order
        by_monitor[monitor].add(", ".join(sorted(found, key=lambda one: (one != OPEN, one))))
    return {monitor: sorted(texts) for monitor, texts in by_monitor.items()}


def logged(stage: Stage, line: str) -> set[str]:
    """Return the ids of the runs of which the worker has logged a line."""
    return set(re.findall(line, stage.workers["w1"].output()))


def tell(stage: Stage, web: collector.Collector) -> Seen:
    """Run the story to its end, and return what was seen."""
    from neighbours.crons_app import FAILS, RUNS, SKIPPED, WAITS

    stage.start("w1")
    stage.command("redlock", "trust", "--all", "--yes")
    gate = stage.folder / GATE
    held = [stage.tasks.work.delay(key, str(gate)) for key in (SKIPPED, WAITS)]
    stage.see("both bodies begin", lambda: all(map(stage.begun, held)))
    beats = Beats(stage)
    beats.start("b1")
    stage.see("each kind of run", lambda: all(logged(stage, line) for line in LINES))
    for beat in beats.beats.values():
        beat.stop()
    while_waiting = check_ins(web.kept).get(WAITS, [])
    gate.touch()
    waited = logged(stage, LINES[1])
    stage.see("the deferred run ends", lambda: waited <= stage.ended().keys())
    stage.waited(lambda: OPEN not in check_ins(web.kept).get(WAITS, [OPEN]), QUIET)
    stage.end()
    seen = check_ins(web.kept)
    differences = {
        "a skip leaves a check-in open": OPEN in seen.get(SKIPPED, []),
        "a deferral leaves a check-in open": OPEN in seen.get(WAITS, []),
        "a deferred run has no check-in that ends as ok": seen.get(WAITS) != [f"{OPEN}, ok"],
        "a run has no check-in that ends as ok": seen.get(RUNS) != [f"{OPEN}, ok"],
        "a failure has no check-in that ends as error": seen.get(FAILS) != [f"{OPEN}, error"],
    }
    shows = {f"{name}: check-ins": seen.get(name, []) for name in (SKIPPED, WAITS, RUNS, FAILS)}
    return Seen(
        overlaps=overlaps(spans(read_notes(stage.notes))),
        differences=tuple(name for name, is_so in differences.items() if is_so),
        shows={**shows, "while it waits: check-ins": while_waiting},
    )


def run() -> None:
    agent = Sentry()
    with collector.http(agent.answer) as web:
        os.environ.update(agent.env(Where(web.port, 0, run_folder(), None, read_setup().more)))
        run_story(lambda stage: tell(stage, web))


if __name__ == "__main__":
    run()
