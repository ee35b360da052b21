"""The figures on the page of the comparison are those of the run that is stored."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.comparison import PAGE, STORED, filled, overlaps
from benchmarks.contestants import OTHERS

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    figures: dict[str, Any] = json.loads(STORED.read_text(encoding="utf-8"))
    return figures


def test_the_page_has_the_figures_of_the_stored_run(stored: dict[str, Any]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page, stored) == page, (
        "write them again: python -m benchmarks.comparison --page, or `filled` of the stored run"
    )


def test_another_run_would_make_another_page(stored: dict[str, Any]) -> None:
    figures = {**stored["figures"]}
    figures["celery-once"] = {**figures["celery-once"], "finished": 49}
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page, {**stored, "figures": figures}) != page


def test_the_stored_run_has_every_lock(stored: dict[str, Any]) -> None:
    ours = {"celery_redlock, 3 nodes", "celery_redlock, 1 node"}
    assert set(stored["figures"]) == ours | {one.name for one in OTHERS}


def test_every_package_of_the_run_is_in_the_extra(stored: dict[str, Any]) -> None:
    extra = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    bounds = dict(re.findall(r'"([\w-]+)>=([\d.]+)",?$', extra, re.MULTILINE))
    for one in OTHERS:
        if one.package not in ("", "redis"):  # which is a dependency
            assert bounds[one.package] == stored["versions"][one.package]


def test_what_the_page_says_of_ours_is_what_was_measured(stored: dict[str, Any]) -> None:
    for name in ("celery_redlock, 3 nodes", "celery_redlock, 1 node"):
        ours = stored["figures"][name]
        assert ours["finished"] == ours["sent_at_once"] == 50
        assert (ours["overlaps"], ours["outlived"]) == (0, 0)
        assert ours["again"] is not None
    assert stored["figures"]["celery_redlock, 3 nodes"]["restarted"] == 0


def test_what_the_page_says_of_all_locks_is_what_was_measured(stored: dict[str, Any]) -> None:
    for name, of in stored["figures"].items():
        assert of["overlaps"] == 0, name
        assert of["blocked"] == pytest.approx(1, abs=0.1), name
        assert of["time"] <= 1.25, name
        if not name.startswith("celery_redlock"):
            assert of["restarted"] == 1, name


def test_overlaps_are_counted_between_runs_that_meet() -> None:
    assert overlaps([(0, 0.0, 1.0), (1, 1.0, 2.0), (2, 2.5, 3.0)]) == 0
    assert overlaps([(0, 0.0, 4.0), (1, 1.0, 2.0), (2, 3.0, 5.0)]) == 2
