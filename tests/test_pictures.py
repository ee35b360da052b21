"""The pictures in docs/ are what their scripts draw, and say what the lock does."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

import celery_redlock
from celery_redlock.lock.model.handoff import TURN
from celery_redlock.lock.model.lease import lease_end, validity

LUA = Path(celery_redlock.__file__).parent / "lock" / "server" / "lua"
DOCS = Path(__file__).parent.parent / "docs"
SMALL = 150_000  # bytes


@pytest.fixture(scope="module")
def crowd() -> dict[str, Any]:
    """Give what the script of the crowd's picture defines."""
    return runpy.run_path(str(DOCS / "pictures" / "crowd.py"))


@pytest.fixture(scope="module")
def lease() -> dict[str, Any]:
    """Give what the script of the lease's picture defines."""
    return runpy.run_path(str(DOCS / "pictures" / "lease.py"))


@pytest.fixture(scope="module")
def handoff() -> dict[str, Any]:
    """Give what the script of the hand-off's picture defines."""
    return runpy.run_path(str(DOCS / "pictures" / "handoff.py"))


def test_the_picture_of_a_hand_off_is_what_its_script_draws(handoff: dict[str, Any]) -> None:
    assert handoff["PICTURE"].read_text(encoding="utf-8") == handoff["draw"](), (
        "run `python docs/pictures/handoff.py` and look at the result"
    )


def test_the_picture_of_a_hand_off_names_as_many_and_waits_as_long_as_the_lock_does(
    handoff: dict[str, Any],
) -> None:
    announce = (LUA / "announce.lua").read_text(encoding="utf-8")
    assert handoff["TURN_MS"] == pytest.approx(TURN * 1000)
    assert f"local NAMED, DEAD = {len(handoff['WAITERS'])}," in announce


def test_the_picture_of_a_lease_is_what_its_script_draws(lease: dict[str, Any]) -> None:
    drawn = lease["draw"]()
    assert lease["PICTURE"].read_text(encoding="utf-8") == drawn, (
        "run `python docs/pictures/lease.py` and look at the result"
    )


def test_the_picture_counts_as_the_lock_does(lease: dict[str, Any]) -> None:
    story = lease["tell"]()
    counted = lease_end(0.0, lease["TTL"] / 1000, drift=0.01)
    assert lease["COUNTED"] == pytest.approx(counted * 1000)
    ends = [lane.end for lane in story.lanes]
    assert story.valid_until == validity(ends, lease["QUORUM"])


def test_the_picture_shows_a_loss_that_comes_before_any_rival(lease: dict[str, Any]) -> None:
    story = lease["tell"]()
    assert max(story.sends) < story.lost < story.rival_from


def test_the_picture_of_a_crowd_is_what_its_script_draws_of_its_figures(
    crowd: dict[str, Any],
) -> None:
    drawn = crowd["draw"](crowd["read"]())
    assert crowd["PICTURE"].read_text(encoding="utf-8") == drawn, (
        "run `python docs/pictures/crowd.py`, or measure anew: benchmarks/README.md"
    )


def test_the_picture_of_a_crowd_shows_what_the_page_says_of_it(crowd: dict[str, Any]) -> None:
    figures = crowd["read"]()
    few, *others = figures
    sizes = f"{', '.join([few, *others[:-1]])} and {others[-1]}"
    page = (DOCS / "explanation" / "waiting.md").read_text(encoding="utf-8")
    assert f"![What one task costs among {sizes} that wait for one key" in page
    for kind in crowd["KINDS"]:
        assert figures[few][kind] == 1
        assert max(ratios[kind] for ratios in figures.values()) <= crowd["MOST"]


@pytest.fixture(scope="module")
def workers() -> dict[str, Any]:
    """Give what the script of the picture of more and more workers defines."""
    return runpy.run_path(str(DOCS / "pictures" / "workers.py"))


def test_the_picture_of_the_workers_is_what_its_script_draws_of_its_figures(
    workers: dict[str, Any],
) -> None:
    assert workers["PICTURE"].read_text(encoding="utf-8") == workers["draw"](workers["read"]()), (
        "run `python docs/pictures/workers.py`, or measure anew: benchmarks/README.md"
    )


def test_the_picture_of_the_workers_has_each_figure_of_both_ways(workers: dict[str, Any]) -> None:
    figures = workers["read"]()
    assert set(figures) == set(workers["WAYS"])
    assert len({tuple(by_size) for by_size in figures.values()}) == 1
    for by_size in figures.values():
        assert all(set(one) == set(workers["KINDS"]) for one in by_size.values())


@pytest.mark.parametrize("name", ["lease", "crowd", "handoff", "workers"])
def test_a_picture_needs_nothing_but_itself(name: str) -> None:
    root = ET.fromstring((DOCS / "pictures" / f"{name}.svg").read_text(encoding="utf-8"))
    names = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert names <= {"svg", "title", "desc", "pattern", "rect", "path", "circle", "text"}
    values = [value for element in root.iter() for value in element.attrib.values()]
    assert all(value.startswith("url(#") for value in values if "url" in value)


@pytest.mark.parametrize("name", ["lease", "crowd", "handoff", "workers"])
def test_a_picture_can_be_read_on_a_dark_page(name: str) -> None:
    root = ET.fromstring((DOCS / "pictures" / f"{name}.svg").read_text(encoding="utf-8"))
    ground = next(element for element in root if element.tag.endswith(("rect", "path", "text")))
    size = [ground.attrib.get(side) for side in ("x", "y", "width", "height")]
    assert size == [None, None, *root.attrib["viewBox"].split()[2:]]
    assert ground.attrib["fill"] == "#fff"


def test_every_picture_on_a_page_is_there() -> None:
    shown = _shown()
    assert any(page.name == "safety-proof.md" for page, _ in shown)
    for page, name in shown:
        assert (page.parent / name).is_file(), f"{page.name} shows {name}"


def test_every_picture_of_a_screen_is_small_and_stands_on_a_page() -> None:
    screens = set((DOCS / "pictures").glob("*.png"))
    assert screens
    assert screens <= {(page.parent / name).resolve() for page, name in _shown()}
    for screen in screens:
        assert screen.read_bytes().startswith(b"\x89PNG"), screen.name
        assert screen.stat().st_size < SMALL, f"{screen.name}: clip it to what matters"


def _shown() -> list[tuple[Path, str]]:
    """Return each local picture that a page shows, and the page."""
    pages = [DOCS.parent / "README.md", *DOCS.rglob("*.md")]
    return [(page, name) for page in pages for name in _pictures_on(page)]


def _pictures_on(page: Path) -> list[str]:
    """Return the local pictures that a page shows."""
    shown = re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    return [name for name in shown if "://" not in name]
