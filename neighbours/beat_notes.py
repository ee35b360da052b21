"""Notes what a process sends; the app of a story with beats includes it."""

from typing import Any

from celery.signals import after_task_publish

from neighbours.bodies import note
from neighbours.story_setup import run_folder

SENT = "sent"  # the file of the notes, and their event


@after_task_publish.connect(weak=False)
def note_sent(headers: Any, **_: Any) -> None:
    note(run_folder() / SENT, SENT, headers["id"])
