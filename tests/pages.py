"""The pages of the documentation, and the blocks of code that stand on them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")),
         *sorted((ROOT / "benchmarks").glob("*.md"))]  # fmt: skip
SITE = ("-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-c", "docs")  # builds it
_BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
_REAL = re.compile(r"redis://(?P<host>[a-z]\w*)")


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
