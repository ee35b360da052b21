"""The story of an application: with tasks of a plugin, and then one of the application's own.

The lock of the own task is held from outside, so that a run of it waits, and then runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from celery.states import READY_STATES, SUCCESS

from neighbours.row import Seen
from neighbours.story import QUIET, Stage, run_story, tell
from neighbours.story_setup import read_setup, run_folder


def of_application(stage: Stage) -> Seen:
    seen = tell(stage)
    more = stage.setup.more
    app = stage.tasks.app
    own = app.tasks[more["own"]]
    arguments = more["arguments"]
    call = app.AsyncResult(str(uuid.uuid4()))  # a task that waits for a commit returns none
    with own.lock_for(*arguments, wait=QUIET):
        if more["sender"]:
            call = app.AsyncResult(import_module(more["sender"]).send())
        else:
            own.apply_async(arguments, task_id=call.id)
        waits = stage.waited(lambda: stage.is_deferred(call), QUIET)
    stage.waited(lambda: call.state in READY_STATES, QUIET)
    is_so = waits and call.state == SUCCESS
    shows = {**seen.shows, own.name: f"{'DEFERRED' if waits else 'not deferred'}, {call.state}"}
    differences = seen.differences if is_so else (*seen.differences, "own task")
    return replace(seen, shows=shows, differences=differences)


def prepare() -> None:
    """Set the application up by its own commands."""
    env = {**os.environ, "PYTHONPATH": str(run_folder())}  # settings of this folder
    for program, *words in read_setup().more["prepare"]:
        command = [str(Path(sys.executable).with_name(program)), *words]
        subprocess.run(command, check=True, cwd=run_folder(), env=env)


if __name__ == "__main__":
    prepare()
    run_story(of_application)
