"""The consoles of the pages: their commands print what the pages show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs import console
from docs.console import (
    Marked,
    Worlds,
    all_pages,
    differences,
    is_same,
    marked_blocks,
    run,
    shortened,
)
from docs.scenarios import SCENARIOS, SHOP
from tests.pages import PAGES, blocks, name_of

pytestmark = pytest.mark.pages

BLOCKS = marked_blocks(all_pages())
OURS = "$ celery -A shop redlock "
# a task of hours that only this page has, and a command that does not end
UNMARKED = {"docs/how-to/long-running-tasks.md", "docs/how-to/hold-a-resource.md"}
LOCKS = [
    "RESOURCE     HOLDER     ID            HELD FOR  VOTES",
    "stock:sku-7  shop.take  4c8f3226-...  5.4 s     3, 2 needed",
]


def test_every_marker_names_a_scenario_and_stands_above_a_console() -> None:
    assert [str(block) for block in BLOCKS if block.scenario not in SCENARIOS] == []
    for page in PAGES:
        markers = re.findall(r"^ *<!-- console:", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(markers) == len([one for one in BLOCKS if one.page == page]), name_of(page)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "console")], ids=name_of)
def test_every_command_of_the_shop_has_a_marker(page: Path) -> None:
    marked = {block.line for block in BLOCKS if block.page == page}
    ours = [block for block in blocks(page, "console") if OURS in block.code]
    unmarked = [block.line for block in ours if block.line not in marked]
    assert bool(unmarked) == (name_of(page) in UNMARKED), unmarked


@pytest.mark.pages
@pytest.mark.slow
@pytest.mark.timeout(1200)  # one world serves all pages
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_commands_of_the_pages_print_what_the_pages_show(scenario: str) -> None:
    of_scenario = [block for block in BLOCKS if block.scenario == scenario]
    found = list(differences(of_scenario))
    assert not found, "run python3 -m docs --outputs\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("5.4 s", "1 min 3 s"),
        ("4c8f3226-...", "4c8f3226-0d5e-4a8e-9b55-2b1f0a6c7d11"),
        ("   ", "     "),
    ],
)
def test_what_varies_from_run_to_run_is_no_difference(old: str, new: str) -> None:
    assert is_same(LOCKS, [line.replace(old, new) for line in LOCKS])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("HELD FOR", "HELD"), ("sku-7", "sku-8"), ("2 needed", "3 needed"),
        ("4c8f3226", "a63e1c39"), ("5.4 s", ""),
    ],
)  # fmt: skip
def test_what_a_command_says_is_a_difference(old: str, new: str) -> None:
    changed = [line.replace(old, new) for line in LOCKS]
    assert not is_same(LOCKS, changed)
    assert not is_same(changed, LOCKS)
    assert not is_same(LOCKS, LOCKS[:1])


def test_a_line_of_dots_stands_for_any_lines_and_stays() -> None:
    shown = ["a", "...", "c", "d"]
    assert is_same(shown, ["a", "b", "b", "c", "d"])
    assert not is_same(shown, ["a", "b", "c"])
    assert shortened(["a", "b", "b", "c", "e"], shown) == ["a", "...", "c", "e"]


@pytest.mark.slow
def test_the_outputs_are_written_into_each_block_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    block = "<!-- console: idle -->\n```console\n$ celery -A shop redlock locks\n```\n"
    page.write_text(f"{block}\nText.\n\n{block}")
    told: list[str] = []
    console.write([page], told.append)
    assert told == ["page.md:3: renewed", "page.md:10: renewed"]
    assert page.read_text() == f"{block}\nText.\n\n{block}".replace(
        "redlock locks\n", "redlock locks\nNo locks are held.\n"
    )


@pytest.mark.slow
def test_the_app_of_a_page_is_its_first_block_of_python(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```python\n{SHOP.replace('take', 'sell')}```\n")
    block = Marked(page, 1, "this page", "$ celery -A shop redlock options shop.sell\n")
    with Worlds() as worlds:
        assert "task 'shop.sell': lock_key" in run(block, worlds.world_of(block))


@pytest.mark.slow
def test_a_wrong_output_is_replaced_by_the_real_one_with_the_names_of_the_pages() -> None:
    page = Path("page.md")
    text = "$ celery -A shop redlock status\nanything\n$ celery -A shop redlock locks\nwrong\n"
    with Worlds() as worlds:
        world = worlds.world_of(block := Marked(page, 1, "idle", text))
        assert worlds.world_of(block) is world
        renewed = run(block, world)
        assert run(Marked(page, 1, "idle", renewed), world) == renewed
    lines = renewed.splitlines()
    assert lines[0] == "$ celery -A shop redlock status"
    assert re.match(r"NODE    VOTE   SERVER ", lines[1])
    assert re.match(r"a:6379  votes  ", lines[2])
    assert lines[5:] == [
        "3 of 3 nodes vote, 2 needed",
        "$ celery -A shop redlock locks",
        "No locks are held.",
    ]
