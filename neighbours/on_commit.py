"""The story of a Django project, and then two sends on commit: one is rolled back."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from django.db import transaction

from neighbours.bodies import read_notes
from neighbours.row import Seen
from neighbours.story import Stage, run_story, tell


class RolledBackError(Exception):
    """Ends a transaction."""


def on_commit(stage: Stage) -> Seen:
    seen = tell(stage)
    with suppress(RolledBackError), transaction.atomic():
        stage.tasks.work.delay_on_commit("rolled-back")
        raise RolledBackError
    with transaction.atomic():
        stage.tasks.work.delay_on_commit("committed")
        ran_before = "committed" in keys(stage)
    ran = stage.waited(lambda: "committed" in keys(stage))
    is_so = ran and not ran_before and "rolled-back" not in keys(stage)
    return replace(seen, differences=(*seen.differences, *(() if is_so else ("on commit",))))


def keys(stage: Stage) -> set[str]:
    return {each.key for each in read_notes(stage.notes)}


if __name__ == "__main__":
    run_story(on_commit)
