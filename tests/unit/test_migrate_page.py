"""What the guide for those who come from other plugins writes means what it says there."""

from __future__ import annotations

import ast
import functools
import re
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from celery_redlock import LockedTask, Redlock
from tests.pages import ROOT, blocks

GUIDE = ROOT / "docs" / "how-to" / "migrate.md"
ROWS = [line.split(" | ") for line in GUIDE.read_text().splitlines() if line.startswith("| ")]
SPELLINGS = {match[1] for row in ROWS if (match := re.fullmatch(r"`(.*)`", row[1]))}
ALL = "shop.f:[0-9a-f]{32}"  # of all arguments, as a digest
ALONE = "shop.f:any-arguments"
# by spelling: the resource of a call, another call of the same one, and what a refused run does
HERE: dict[str, tuple[str, tuple[int, int], str]] = {
    "@app.task(base=LockedTask)": (ALL, (1, 2), "defer"),
    'lock_args=["a"]': (ALL, (1, 9), "defer"),
    'lock_args=["a", "c"]': (ALL, (1, 9), "defer"),
    "lock_args=[]": (ALONE, (9, 9), "defer"),
    'lock_key=lambda task, args, kwargs: f"report:{args[0]}"': ("report:1", (1, 9), "defer"),
    'lock_key="report", lock_rate="100/h"': ("report", (9, 9), "defer"),
    'lock_key="stock:{sku}"': ("stock:s", (9, 9), "defer"),
    'lock_key="stock:{sku}", lock_wait=5': ("stock:s", (9, 9), "defer"),
    'lock_on_conflict="skip"': (ALL, (1, 2), "skip"),
    '@shared_task(base=LockedTask, lock_on_conflict="skip")': (ALL, (1, 2), "skip"),
    '@app.task(base=LockedTask, lock_on_conflict="skip")': (ALL, (1, 2), "skip"),
    '@app.task(base=LockedTask, lock_args=[], lock_on_conflict="skip")': (ALONE, (9, 9), "skip"),
}
# by spelling: until when a send is one with an earlier one, and what a second one does until then
AT_THE_SEND = {
    "lock_unique_for=60": ("finished", "existing"),
    "lock_unique_for=120": ("finished", "existing"),
    "lock_unique_for=3600": ("finished", "existing"),
    'lock_unique_for=3600, lock_on_duplicate="fail"': ("finished", "fail"),
    'lock_unique_for=3600, lock_unique_until="started"': ("started", "existing"),
    'lock_unique_for=3600, lock_unique_until="expired"': ("expired", "existing"),
    '@shared_task(base=LockedTask, lock_unique_for=3600, lock_unique_until="started", '
    'lock_on_conflict="skip")': ("started", "existing"),
}
DEBOUNCED = "lock_debounce=3600"
FREE, IN_A_BODY = "lock_key=False", 'with redlock.lock("ledger", wait=5):'


# in the order of the page: what a task after the change sets, beside its defaults
CHANGED: list[dict[str, Any]] = [
    {"args": ("sku",), "unique_for": 3600, "on_duplicate": "fail"},
    {"args": ("sku",), "unique_for": 60},
    {"args": ("sku",), "unique_for": 60},
    {"unique_for": 60},
]


def task_of(spelling: str) -> Any:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.redlock_nodes = ["redis://nowhere"]
    whole = re.fullmatch(r"@(?:app\.task|shared_task)\((.*)\)", spelling)
    options = eval(f"dict({whole[1] if whole else spelling})", {"LockedTask": LockedTask})

    @app.task(**{"name": "shop.f", "base": LockedTask, "shared": False, **options})
    def f(a: int, b: int = 0, c: int = 0, sku: str = "s") -> None: ...

    return app.tasks["shop.f"]


def test_every_spelling_of_the_guide_is_told_of_here() -> None:
    assert {*HERE, *AT_THE_SEND, DEBOUNCED, FREE, IN_A_BODY} == SPELLINGS


@pytest.mark.parametrize("spelling", HERE)
def test_a_spelling_makes_the_resource_and_the_end_of_a_refused_run(spelling: str) -> None:
    pattern, other, on_conflict = HERE[spelling]
    task = task_of(spelling)
    resource = task.lock_for(1, 2).resource
    assert re.fullmatch(pattern, resource)
    assert task.lock_for(*other).resource == resource
    assert task.lock_options()["on_conflict"].value == on_conflict


@pytest.mark.parametrize("spelling", AT_THE_SEND)
def test_a_spelling_makes_the_window_of_a_send(spelling: str) -> None:
    options = task_of(spelling).lock_options()
    told = tuple(options[name].value for name in ("unique_until", "on_duplicate"))
    seconds = re.findall(r"lock_unique_for=(\d+)", spelling)
    assert ([f"{options['unique_for'].value:g}"], told) == (seconds, AT_THE_SEND[spelling])


def test_the_other_spellings_debounce_a_send_take_no_lock_and_one_in_a_body() -> None:
    assert task_of(DEBOUNCED).lock_options()["debounce"].value == 3600
    assert task_of(FREE).lock_options()["key"].value is False
    with Redlock(["redis://127.0.0.1:1"]) as redlock:
        lock = eval(IN_A_BODY.removeprefix("with ").removesuffix(":"), {"redlock": redlock})
        assert lock.resource == "ledger"


def side_of(diff: str, sign: str) -> str:
    """Return one side of a change: its lines, and those that both sides have."""
    return "".join(line[1:] for line in diff.splitlines(True) if line[0] in (sign, " "))


def test_each_change_is_valid_before_and_after_and_sets_what_the_tables_say() -> None:
    diffs = blocks(GUIDE, "diff")
    assert len(diffs) == len(CHANGED)
    for diff, changed in zip(diffs, CHANGED, strict=True):
        assert ast.parse(side_of(diff.code, "-"))
        app = Celery("shop", broker="memory://", set_as_current=False)
        app.conf.redlock_nodes = ["redis://nowhere"]
        named = SimpleNamespace(task=functools.partial(app.task, shared=False))
        exec(side_of(diff.code, "+"), {"app": named, "LockedTask": LockedTask, "__name__": "shop"})
        options = app.tasks["shop.take"].lock_options()
        found = [one for one in options.options if str(one.source) != "built-in"]
        assert {one.name: one.value for one in found if one.value is not None} == changed


def test_a_leftover_of_another_plugin_changes_the_key() -> None:
    kept, changed = (task_of(spelling) for spelling in ('lock_args=["a"]', 'unique_on=["a"]'))
    assert kept.lock_for(1, 2).resource == kept.lock_for(1, 9).resource
    assert changed.lock_for(1, 2).resource != changed.lock_for(1, 9).resource
