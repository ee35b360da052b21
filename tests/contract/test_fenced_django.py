"""An update of Django that carries the fencing token of a lock is never a late write."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests import fork_server
from tests.contract.conftest import for_django
from tests.integration.conftest import ROOT

pytestmark = pytest.mark.xdist_group("fenced updates")  # they share the servers
DATABASES = [
    "sqlite",
    pytest.param("postgresql", marks=pytest.mark.postgresql),
    pytest.param("mariadb", marks=pytest.mark.slow),
]
LATE = (
    "could not serialize access due to concurrent update"  # PostgreSQL's word for an old snapshot
)
KEPT = {"coal": 10, "milk": 10, "tea": 20}
NEEDS = "the table needs the column `fence BIGINT NOT NULL DEFAULT 0`, but its column is"
# what each scenario gives on every database
FOUND = {
    "one_row": [[1, 1, 1, 1, "lost"], True, 0],
    "all_or_none": [{"coal": 10, "milk": 20, "tea": 10}, 7, 3],
    "rolled_back": [3, [10]],
    "expressions_and_a_field_that_is_called_lock": [3, 11],
    "other_tables": [
        [2, 2, 2, "lost", "lost", "lost"],
        {"coal": 10, "milk": 20, "tea": 11},
        [2, 2, 2],
    ],
    "managers_of_the_model": [
        [3, [["coal", "kept"], ["milk", "kept"], ["tea", "kept"]]],
        [2, [["coal", ""], ["milk", "kept"], ["tea", "kept"]]],
    ],
    "rows_of_a_select_for_update": ["lost", "lost", {"coal": 10, "milk": 20, "tea": 10}],
}
ROWS_OF_KEYS = "cannot be updated: filter the model by the keys of these rows"
# parts of the errors, in order, and what stays then
REFUSED: dict[str, list[Any]] = {
    "autocommit": ["call it inside transaction.atomic(using='default')", 10],
    "of_a_router": ["call it inside transaction.atomic(using='later')", 1],
    "tokens": ["lock_fencing=True", 10],
    "other_querysets": [
        "Price'>: must be a QuerySet of the rows to update",
        "=<Price: Price object (tea)>: must be a QuerySet of the rows",
        f"queryset=a slice: {ROWS_OF_KEYS}",
        f"queryset=a slice: {ROWS_OF_KEYS}",
        f"queryset=a union, intersection or difference: {ROWS_OF_KEYS}",
        f"queryset=groups by values(...).annotate(...): {ROWS_OF_KEYS}",
        [10],
    ],
    "values_of_annotations": [
        "queryset=annotated with double: no value may name an annotation",
        [[2, 2], {"coal": 10, "milk": 40, "tea": 40}],
    ],
    "fields": [
        "shop.Bare: the table needs the column `fence BIGINT NOT NULL DEFAULT 0`, but it has no",
        f"shop.Small: {NEEDS} IntegerField",
        "fence=shop.Child: is in the table of shop.Price",
        "and a row has NULL",
        "fence=3: leave it out",
        1,
    ],
}
BEFORE = {"coal": 20, "milk": 11, "tea": 11}  # of PostgreSQL: as if the late holder were first
ROWS = ("own", "all", "joined")
LEVELS = ("read committed", "repeatable read")


@pytest.fixture(scope="module", params=DATABASES)
def database(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def found(database: str, database_url: Callable[[str], str]) -> dict[str, Any]:
    given = json.dumps(for_django(database_url(database)))
    ended = fork_server.run([sys.executable, "-m", "tests.contract.fenced_django", given], cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    return dict(json.loads(ended.stdout))


@pytest.mark.parametrize("scenario", FOUND)
def test_rows_are_written_unless_a_later_holder_has(found: dict[str, Any], scenario: str) -> None:
    assert found[scenario] == FOUND[scenario]


@pytest.mark.parametrize("scenario", REFUSED)
def test_a_wrong_call_is_refused_and_writes_nothing(found: dict[str, Any], scenario: str) -> None:
    *texts, left = REFUSED[scenario]
    *told, stays = found[scenario]
    assert stays == left
    for part, text in zip(texts, told, strict=True):
        assert part in text


def test_a_later_holder_that_commits_meanwhile_is_not_overwritten(
    database: str, found: dict[str, Any]
) -> None:
    ends = {"sqlite": [], "postgresql": ["lost", LATE]}.get(database, ["lost"] * 2)
    levels = dict(zip(LEVELS[: len(ends)], ends, strict=True))
    wanted = {f"{rows} {level}": [end, KEPT] for rows in ROWS for level, end in levels.items()}
    assert found["waited"] == wanted


def test_an_old_snapshot_does_not_hide_a_later_holder(database: str, found: dict[str, Any]) -> None:
    ends = {"sqlite": ["database is locked"] * 2, "postgresql": ["lost", LATE]}
    levels = zip(LEVELS, ends.get(database, ["lost"] * 2), strict=True)
    assert found["old_snapshot"] == {
        f"{rows} {level}": [end, KEPT] for level, end in levels for rows in ROWS
    }


def test_a_row_that_a_later_holder_has_moved_to_the_filter_is_seen(
    database: str, found: dict[str, Any]
) -> None:
    kept = {"coal": 20, "milk": 10, "tea": 10}
    committed, repeatable = ["lost", kept], ["lost", kept]
    if database == "postgresql":
        repeatable = [2, BEFORE]
    if database == "sqlite":
        committed = repeatable = ["database is locked", kept]
    assert found["moved_to_the_filter"] == {
        f"{rows} {level}": end
        for rows in ("own", "joined")
        for level, end in zip(LEVELS, (committed, repeatable), strict=True)
    }
