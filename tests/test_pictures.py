"""The pictures in docs/ are what their scripts draw, and say what the lock does."""

from __future__ import annotations

import re
import sqlite3
from dataclasses import replace
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from celery import states as celery_states
from rich.console import Console

import celery_redlock
from celery_redlock.lock.model.handoff import TURN
from celery_redlock.lock.model.lease import Lease, LockKey, validity
from celery_redlock.lock.model.votes import quorum_of
from celery_redlock.tasks.reporting import DEFERRED
from docs.pictures import crowd, deferral, fencing, handoff, lease, nodes, shop, states, workers
from example_worker import screen
from example_worker.orders import NAMES
from example_worker.verdict import Account, Phase

LUA = Path(celery_redlock.__file__).parent / "lock" / "server" / "lua"
DOCS = Path(__file__).parent.parent / "docs"
SMALL = 150_000  # bytes
NARROW, LEGIBLE = 640, 13  # pixels: the widest picture, and its smallest letters
MEASURED = ("crowd", "workers")
DIAGRAMS = ("handoff", "deferral", "fencing", "nodes", "states")
ALL_DRAWN = ("lease", *MEASURED, *DIAGRAMS)


@pytest.mark.pages
@pytest.mark.parametrize("name", ALL_DRAWN)
def test_a_picture_is_what_its_script_draws_of_its_figures(name: str) -> None:
    script = import_module(f"docs.pictures.{name}")
    drawn = script.draw(script.read()) if name in MEASURED else script.draw()
    assert script.PICTURE.read_text(encoding="utf-8") == drawn, (
        f"run `python3 -m docs.pictures.{name}` and look at the result; "
        "to measure its figures anew: benchmarks/README.md"
    )


def test_the_picture_of_a_hand_off_names_as_many_and_waits_as_long_as_the_lock_does() -> None:
    announce = (LUA / "announce.lua").read_text(encoding="utf-8")
    assert pytest.approx(TURN * 1000) == handoff.TURN_MS
    assert f"local NAMED, DEAD = {len(handoff.WAITERS)}," in announce


def test_the_picture_of_a_lease_counts_as_the_lock_does_and_shows_a_loss_before_any_rival() -> None:
    story = lease.tell()
    one = Lease(LockKey("redlock", "r", lease.TTL / 1000), "value", nodes=1, quorum=1, drift=0.01)
    one.confirm(0, 0.0)
    assert pytest.approx(one.valid_until * 1000) == lease.COUNTED
    assert story.valid_until == validity([lane.end for lane in story.lanes], lease.QUORUM)
    assert max(story.sends) < story.lost < story.rival_from


def test_the_picture_of_a_crowd_shows_what_the_page_says_of_it() -> None:
    figures = crowd.read()
    few, *others = figures
    sizes = f"{', '.join([few, *others[:-1]])} and {others[-1]}"
    page = (DOCS / "explanation" / "waiting.md").read_text(encoding="utf-8")
    assert f"![What one task costs among {sizes} that wait for one key" in page
    assert set(figures[few].values()) == {1}
    assert max(ratio for ratios in figures.values() for ratio in ratios.values()) <= crowd.MOST


def test_the_picture_of_the_workers_has_each_figure_of_both_ways() -> None:
    figures = workers.read()
    assert set(figures) == set(workers.WAYS)
    assert len({tuple(by_size) for by_size in figures.values()}) == 1
    for by_size in figures.values():
        assert all(set(one) == set(workers.KINDS) for one in by_size.values())


def test_the_picture_of_the_states_has_those_of_celery_and_the_one_that_the_package_adds() -> None:
    shown = set(states.PLACES)
    assert states.ADDED == deferral.STATE == DEFERRED
    assert shown - celery_states.ALL_STATES == {DEFERRED}
    # RECEIVED is an event, and no result backend stores it
    assert celery_states.ALL_STATES - shown == {celery_states.RECEIVED}


def test_the_picture_of_the_nodes_counts_a_quorum_as_the_lock_does() -> None:
    for panel in nodes.PANELS:
        up = len(panel.up)
        assert panel.has_quorum == (up >= quorum_of(len(nodes.NODES)))
        assert panel.verdict.startswith(f"{up} of {len(nodes.NODES)}: ")
    assert {panel.has_quorum for panel in nodes.PANELS} == {True, False}


def test_the_picture_of_a_fencing_token_shows_what_a_database_does() -> None:
    set_fence, where = re.findall(r"fence (?:=|<=) :token", fencing.UPDATE)
    with sqlite3.connect(":memory:") as database:
        database.execute("CREATE TABLE account (fence INTEGER)")
        database.execute("INSERT INTO account VALUES (0)")
        update = f"UPDATE account SET {set_fence} WHERE {where}"
        rows = [
            database.execute(update, {"token": token}).rowcount
            for token in (fencing.SECOND, fencing.FIRST)
        ]
    database.close()
    assert rows == [1, 0]  # the late write is refused


@pytest.mark.pages
@pytest.mark.parametrize("name", ALL_DRAWN)
def test_a_picture_needs_nothing_else_and_can_be_read_on_a_phone_and_on_a_dark_page(
    name: str,
) -> None:
    root = ET.fromstring((DOCS / "pictures" / f"{name}.svg").read_text(encoding="utf-8"))
    size = root.attrib["viewBox"].split()[2:]
    values = [value for element in root.iter() for value in element.attrib.values()]
    assert all(value.startswith("url(#") for value in values if "url" in value)
    names = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert names <= {"svg", "title", "desc", "pattern", "rect", "path", "circle", "text"}
    ground = next(element for element in root if element.tag.endswith(("rect", "path", "text")))
    assert ground.attrib["fill"] == "#fff"
    assert [ground.attrib.get(side) for side in ("x", "y", "width", "height")] == [
        None,
        None,
        *size,
    ]
    if name != "lease":
        letters = [element.attrib.get("font-size") for element in root.iter()]
        assert float(size[0]) <= NARROW
        assert min(float(letter) for letter in letters if letter) >= LEGIBLE


def test_the_shop_prints_the_table_of_its_picture_today() -> None:
    accounts = [
        Account(kind, name, 0, 1, 1, None, 1, 1, 1, 0, 0)
        for kind, names in sorted(NAMES.items())
        for name in sorted(names)
    ]
    now = screen.Picture("with the lock", 1.0, 1, 1, 0, 0, 0, (), accounts, accounts)
    phase = Phase("with the lock", 1, accounts, 0, 1.0, finished=True)
    table = screen._table(now)
    console = Console(width=200, highlight=False)
    with console.capture() as printed:
        console.print(table)
    _, *rows = printed.get().splitlines()
    summary = screen.summary(replace(phase, title="without the lock"), phase, None).splitlines()

    shown = shop.read(shop.TABLE.read_text(encoding="utf-8"))
    titles = list(takewhile(lambda line: line.startswith(" "), shown))
    words = " ".join(str(column.header) for column in table.columns).split()
    assert sorted(" ".join(titles).split()) == sorted(words)  # a narrow terminal folds them
    below = [line.partition("  ")[0] for line in shown[len(titles) :]]
    assert below[: len(rows)] == [line.partition("  ")[0] for line in rows]
    assert below[-len(summary) :] == [line.partition("  ")[0] for line in summary]
    assert shown[-len(summary)].split() == summary[0].split()
    unlocked, locked = next(line.split()[-2:] for line in shown if line.startswith("lost updates"))
    assert (int(unlocked) > 0, locked) == (True, "0")


@pytest.mark.pages
def test_the_recording_plays_once_and_ends_with_the_verdict() -> None:
    drawn = shop.RECORDING.read_text(encoding="utf-8")
    root = ET.fromstring(drawn)
    texts = {e.attrib["id"]: "".join(e.itertext()) for e in root.iter() if e.tag.endswith("}text")
             and "id" in e.attrib}  # fmt: skip
    film = next(e for e in root.iter() if e.attrib.get("class") == "film")
    last = [texts[use.attrib["href"].removeprefix("#")] for use in film[-1]]
    assert last[0] != f"$ {shop.COMMAND}"
    assert any(line.startswith("PASSED: ") for line in last)
    assert shop.read(shop.TABLE.read_text(encoding="utf-8"))[-1] in last
    # without motion, and after it, the film stands at its last frame
    style = next(e.text or "" for e in root.iter() if e.tag.endswith("}style"))
    at_rest = re.search(r"[.]film{transform:translateX[(]-(\d+)px[)];animation:film", style)
    assert at_rest is not None
    assert film[-1].attrib["transform"] == f"translate({at_rest[1]})"
    assert "@media(prefers-reduced-motion:reduce){.film{animation:none}}" in style
    assert "infinite" not in style


@pytest.mark.pages
def test_the_pictures_of_the_shop_are_small_and_need_nothing_but_themselves() -> None:
    for path, most in ((shop.TABLE, 20_000), (shop.RECORDING, 250_000)):
        drawn = path.read_text(encoding="utf-8")
        assert len(drawn.encode()) < most
        assert not re.search(
            r"url\(|@import|<script|<image|https?://(?!www.w3.org/2000/svg)", drawn
        )
        assert float(ET.fromstring(drawn).attrib["viewBox"].split()[2]) <= NARROW
    assert shop.FONT >= LEGIBLE


@pytest.mark.pages
def test_a_terminal_shows_what_rich_makes_of_it() -> None:
    terminal = shop.Terminal()
    terminal.feed("one\r\ntwo\r\n\x1b[1A\x1b[2K\x1b[1;31mred\x1b[0m and more\r\n")
    terminal.feed("x" * (shop.COLUMNS + 2))
    assert terminal.shown() == [
        (("one", ""),),
        (("red", "r"), (" and more", "")),
        (("x" * shop.COLUMNS, ""),),
        (("xx", ""),),
    ]
    with pytest.raises(ValueError, match="does not know 3J"):
        terminal.feed("\x1b[3J")


def test_every_picture_of_a_page_is_there_and_every_picture_stands_on_a_page() -> None:
    pages = [DOCS.parent / "README.md", *DOCS.rglob("*.md")]
    shown = {
        page.parent / name
        for page in pages
        for name in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
        if "://" not in name
    }
    assert any(path.name == "lease.svg" for path in shown)
    assert [path for path in shown if not path.is_file()] == []
    drawn, screens = ([*(DOCS / "pictures").glob(f"*.{kind}")] for kind in ("svg", "png"))
    assert {*drawn, *screens} <= {path.resolve() for path in shown}
    for path in screens:
        assert path.read_bytes().startswith(b"\x89PNG"), path.name
        assert path.stat().st_size < SMALL, f"{path.name}: clip it to what matters"
