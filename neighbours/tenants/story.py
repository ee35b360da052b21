"""The story as one tenant, and then calls of two tenants: each has locks of its own.

A last call of each has the same dict of headers, in which a tenant is not to stay.
"""

from __future__ import annotations

from dataclasses import replace

from django.db import connection

from neighbours.bodies import read_notes
from neighbours.row import Seen
from neighbours.story import Stage, run_story, tell
from neighbours.tenants.app import SCHEMAS
from neighbours.tenants.tables import TENANTS


def of_tenants(stage: Stage) -> Seen:
    seen = tell(stage)
    sent: dict[str, str] = {}
    for name in (*TENANTS, *TENANTS):
        connection.set_schema(name)
        call = stage.tasks.once.delay("sku-7")
        sent.setdefault(call.id, name)
    is_unique = len(sent) == len(TENANTS)
    headers = {"origin": "story"}  # an empty one would be replaced
    for name in TENANTS:  # by the name of the task, so that no class copies the headers
        connection.set_schema(name)
        sent[stage.tasks.app.send_task("story.work", ["sku-7"], headers=headers).id] = name
    stage.waited(lambda: sent.keys() <= stage.ended().keys())
    schemas = read_notes(stage.folder / SCHEMAS)
    wrong = sum(sent.get(each.task, TENANTS[0]) != each.key for each in schemas)
    checks = {
        "a unique call of each tenant": is_unique,
        "schema": not wrong and sent.keys() <= stage.ended().keys(),
    }
    return replace(
        seen,
        differences=(*seen.differences, *(name for name, is_so in checks.items() if not is_so)),
        shows={**seen.shows, "bodies in another tenant's schema": wrong},
    )


if __name__ == "__main__":
    run_story(of_tenants)
