"""The pages of the documentation, and the blocks of code that stand on them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")),
         *sorted((ROOT / "benchmarks").glob("*.md"))]  # fmt: skip
SITE = ("-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-c", "docs")  # builds it
_BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
_REAL = re.compile(r"redis://(?P<host>[a-z]\w*)")
T = TypeVar("T", bound=Callable[..., object])


@dataclass(frozen=True)
class Block:
    """One block of code. line: of the page, that of its first line of code."""

    page: Path
    line: int
    code: str


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[Block]:
    """Return the blocks of a page in this language, in order."""
    text = page.read_text(encoding="utf-8")
    found = [match for match in _BLOCK.finditer(text) if match["language"] == language]
    return [Block(page, text[: m.start("code")].count("\n") + 1, m["code"]) for m in found]


def on_servers(code: str, broker: str, nodes: list[str]) -> str:
    """Return code with servers that are there in place of the page's: a, b, c, and localhost."""
    known = {"localhost": broker, **dict(zip("abc", nodes, strict=True))}
    return _REAL.sub(lambda match: known[match["host"]].removesuffix("/0"), code)


def shown_commands(block: Block) -> list[str]:
    """Return the commands of a console, without what is said of each behind it."""
    lines = [line for line in block.code.splitlines() if line.startswith("$ ")]
    return [line.removeprefix("$ ").partition("  #")[0].strip() for line in lines]


@dataclass
class RunTable:
    """The table of a page of which each row is run by a test.

    A cell begins with what the test has to see, up to a comma or a colon, or it is as the cell
    before it. run: the rows that tests run, by their first cells.
    """

    page: Path
    run: list[str] = field(default_factory=list)

    def row(self, event: str) -> Callable[[T], T]:
        """Return the mark of a test that runs a row."""

        def mark(test: T) -> T:
            self.run.append(event)
            return test

        return mark

    def see(self, event: str, *seen: str) -> None:
        """Fail if a row says something else than what was seen, cell by cell."""
        told: list[str] = []
        for cell in self.rows()[event]:
            told.append(told[-1] if cell == "the same" else re.split("[,:]", cell)[0])
        assert told == [*seen], f"{event}: seen is {seen}, and told is {told}"

    def see_all_run(self) -> None:
        """Fail if a row has no test, or a test no row."""
        assert [*self.rows()] == self.run, self.page

    def rows(self) -> dict[str, list[str]]:
        """Return the cells of each row by its first cell, without the heading."""
        text = self.page.read_text(encoding="utf-8")
        cells = [line.split(" | ") for line in re.findall(r"^\| (.+) \|$", text, re.MULTILINE)]
        return {first: told for first, *told in cells[1:]}
