"""The story of a scheduler, run in its environment: of two beats, the one that sends is killed.

Both run under `LockedScheduler`, or under `more["scheduler"]` for a control, beside a worker.
`python -m neighbours.beats` reads its `Setup`, and writes what it saw to `seen.json` beside it.
"""

from __future__ import annotations

import sys
from itertools import groupby, pairwise

from celery_redlock.testing import WorkerProcess
from neighbours.beat_notes import SENT
from neighbours.beat_schedule import EVERY
from neighbours.bodies import Note, overlaps, read_notes, spans, whole_runs
from neighbours.row import Seen
from neighbours.story import Stage, run_story

ENOUGH = 3  # sends of one beat, after which it leads
SCHEDULER = "celery_redlock.beat:LockedScheduler"


class Beats:
    """Two beats of a stage."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.beats: dict[int, WorkerProcess] = {}

    def start(self, name: str) -> None:
        """Start a beat; return at once."""
        stage = self.stage
        scheduler = stage.setup.more.get("scheduler", SCHEDULER)
        command = [
            *(sys.executable, "-m", "celery", "-A", stage.setup.app, "beat", "-S", scheduler),
            *("-s", str(stage.folder / "schedule"), "--pidfile=", "-l", "INFO"),
        ]
        beat = stage.launch(name, command)
        self.beats[beat.pid] = beat

    def sent(self) -> list[Note]:
        """Return what both have sent. A worker sends as well, if it gives a message back."""
        notes = read_notes(self.stage.folder / SENT)
        return [each for each in notes if each.group in self.beats]

    def leader(self, *others: int) -> int | None:
        """Return the beat that has sent enough and is none of the others; None if there is none."""
        pids = [each.group for each in self.sent() if each.group not in others]
        return pids[-1] if len(pids) >= ENOUGH else None

    def both_send(self) -> bool:
        return {each.group for each in self.sent()} == self.beats.keys()

    def one_waits(self) -> bool:
        return any("beat waits: the lock" in beat.output() for beat in self.beats.values())


def tell(stage: Stage) -> Seen:
    """Run the story to its end, and return what was seen."""
    stage.start("w1")
    stage.command("redlock", "trust", "--all", "--yes")
    beats = Beats(stage)
    for name in ("b1", "b2"):
        beats.start(name)
    stage.see("a beat sends", beats.leader)
    stage.see("the other one waits or sends", lambda: beats.one_waits() or beats.both_send())
    waits = beats.one_waits()
    first = beats.sent()[-1].group
    last_send = beats.sent()[-1].at
    beats.beats[first].kill()
    stage.see("another beat sends", lambda: beats.leader(first))
    for beat in beats.beats.values():
        beat.stop()
    sent = beats.sent()
    ids = {each.task for each in sent}
    stage.waited(lambda: ids <= stage.ended().keys())
    bodies = spans(read_notes(stage.notes))
    runs = whole_runs(bodies)
    twice = sum(after.at - before.at < EVERY / 2 for before, after in pairwise(sent))
    turns = [group for group, _ in groupby(each.group for each in sent)]
    seen = {
        "a beat that waits": waits,
        "one beat at a time": len(turns) == len(beats.beats),
        "no entry sent twice": not twice,
    }
    took_over = next(each.at for each in sent if each.group != first)
    return Seen(
        overlaps=overlaps(bodies),
        lost=len(ids - runs.keys()),
        run_twice=sum(count > 1 for count in runs.values()),
        differences=tuple(name for name, is_so in seen.items() if not is_so),
        shows={
            "entries sent twice": twice,
            "seconds without a send after the kill": round(took_over - last_send, 1),
        },
    )


if __name__ == "__main__":
    run_story(tell)
