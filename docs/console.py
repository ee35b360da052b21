"""The outputs of commands on the pages: `python3 -m docs --outputs [PAGE ...]` runs them.

A comment `<!-- console: SCENARIO -->` above a block of a page names the scenario, of
`docs/scenarios.py`, in which its commands run. A block stays as it is if it shows what the commands
print, but for what differs from run to run: durations, times, versions, other ids, spaces. On a
page a line `...` stands for any lines, and `4c8f3226-...` for a whole id.
`tests/integration/test_console_blocks.py` fails if an output differs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from difflib import SequenceMatcher, unified_diff
from pathlib import Path

from docs.scenarios import HOLDER, NOT_SHARED, ROOT, WAITER, World, set_scenario

PROMPT = "$ "
ELLIPSIS = "..."
_BLOCK = re.compile(
    r"^<!-- console: (?P<scenario>[^\n]+?) -->\n```console\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_HEADS = re.compile(r"[A-Z]+(?: [A-Z]+)*(?: {2,}[A-Z]+(?: [A-Z]+)*)+ *")
_ID = re.compile(r"\b([0-9a-f]{8})-(?:\.\.\.|[0-9a-f]{4}(?:-[0-9a-f]{4,12}){3})")
_CAST = (HOLDER[:8], WAITER[:8])
_VARYING = {"PID", "DEFERRALS"}  # heads of columns


def _in_order(found: re.Match[str]) -> str:
    """Return the causes of a missing quorum without their order: nodes answer in any."""
    causes = found[1].split("; ")
    return f"no quorum of 2 nodes ({'; '.join(sorted(causes))})"


_NORMAL = (  # what differs from run to run, and what it is compared as
    (re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:[+-]\d\d:\d\d|Z)?"), "TIME"),
    (_ID, lambda found: f"{found[1]}-..." if found[1] in _CAST else "ID"),
    (re.compile(r"\b\d\d:\d\d:\d\d UTC"), "TIME"),
    (re.compile(r'("(?:pid|deferrals)": )\d+'), r"\1N"),
    (re.compile(r"[+-]?\b\d+(?:\.\d+)+(?:e-\d+)?"), "N"),
    (re.compile(r"(?:\b[\dN]+ (?:d|h|min|s|ms)\b ?)+"), "N s "),
    (re.compile(r"(?:[abc]:6379, )*[abc]:6379(?=: grants no lock)"), "NODES"),
    (re.compile(r"no quorum of 2 nodes \((.*)\)"), _in_order),
    (re.compile(r"\d(?=, 2 needed)"), "N"),
    (re.compile(r"\s+"), " "),
)


@dataclass(frozen=True)
class Marked:
    """A block of a page whose commands can be run. line: that of its first command."""

    page: Path
    line: int
    scenario: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def entries(self) -> Iterator[tuple[str, list[str]]]:
        """Yield each command, with the lines of its output on the page."""
        for part in re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]:
            command, *shown = part.splitlines()
            yield command, shown


def marked_blocks(pages: Iterable[Path]) -> list[Marked]:
    """Return the marked blocks of pages, in order."""
    found = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for block in _BLOCK.finditer(text):
            line = text.count("\n", 0, block.start("text")) + 1
            found.append(Marked(page, line, block["scenario"], block["text"]))
    return found


def all_pages() -> list[Path]:
    """Return the pages that may have marked blocks."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


class Worlds:
    """Sets scenarios, one at a time. One that no command changes serves all blocks in turn."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._kept: tuple[str, World] | None = None

    def __enter__(self) -> Worlds:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def world_of(self, block: Marked) -> World:
        """Return a world for the commands of one block."""
        name = block.scenario
        if self._kept is None or self._kept[0] != name or name in NOT_SHARED:
            self._stack.close()
            self._kept = name, self._stack.enter_context(set_scenario(name, block.page))
        return self._kept[1]


def run(block: Marked, world: World) -> str:
    """Return a block with the real outputs of its commands, shortened where the block is."""
    lines = []
    for command, shown in block.entries():
        real = as_shown(world.run(command), world)
        lines += [PROMPT + command, *(shown if is_same(shown, real) else shortened(real, shown))]
    return "".join(f"{line}\n" for line in lines)


def as_shown(output: str, world: World) -> list[str]:
    """Return an output with the names of the pages' cast, its tables aligned again."""

    def change(text: str) -> str:
        for real, shown in world.shown.items():
            text = re.sub(rf"\b{re.escape(real)}\b", shown, text)
        return text

    lines = []
    for part in _parts(output.rstrip().splitlines()):
        if isinstance(part, str):
            lines.append(re.sub(rf"(?<=\[){_ID.pattern}", r"\1-...", change(part)))
        else:
            lines += _aligned([[_ID.sub(r"\1-...", change(cell)) for cell in row] for row in part])
    return [line.rstrip() for line in lines]


def is_same(shown: Sequence[str], real: Sequence[str]) -> bool:
    """Return whether a page shows an output, but for what differs from run to run."""
    pattern = [r"(?:.*\n)*?" if x == ELLIPSIS else re.escape(x) + r"\n" for x in normal(shown)]
    return re.fullmatch("".join(pattern), "".join(f"{x}\n" for x in normal(real))) is not None


def shortened(real: Sequence[str], shown: Sequence[str]) -> list[str]:
    """Return an output with `...` for the lines that a page leaves out."""
    lines: list[str] = []
    matcher = SequenceMatcher(None, normal(shown), normal(real), autojunk=False)
    for _, first, last, begin, end in matcher.get_opcodes():
        left_out = shown[first:last] == [ELLIPSIS]
        lines += [ELLIPSIS] if left_out else real[begin:end]
    return lines


def normal(lines: Sequence[str]) -> list[str]:
    """Return lines without what differs from run to run."""
    texts: list[str] = []
    for part in _parts(lines):
        if isinstance(part, str):
            texts.append(part)
        else:
            heads, *rows = part
            texts.append(" ".join(heads))
            for row in rows:
                cells = zip(heads, row, strict=True)
                texts.append(" ".join("N" if head in _VARYING else cell for head, cell in cells))
    for pattern, normal_form in _NORMAL:
        texts = [pattern.sub(normal_form, text) for text in texts]
    return [text.strip() for text in texts]


def _parts(lines: Iterable[str]) -> Iterator[str | list[list[str]]]:
    """Yield lines and tables. A table is a list of rows; the first one has the heads."""
    table: list[list[str]] = []
    starts: list[int] = []
    for line in lines:
        is_head = _HEADS.fullmatch(line) is not None
        if table and (is_head or not _is_row(line, starts)):
            yield table
            table = []
        if is_head:
            starts = [found.start() for found in re.finditer(r"(?:^|(?<=  ))\S", line)]
        if is_head or table:
            ends = [*starts[1:], max(len(line), starts[-1])]
            cells = zip(starts, ends, strict=True)
            table.append([line[start:end].strip() for start, end in cells])
        else:
            yield line
    if table:
        yield table


def _is_row(line: str, starts: Sequence[int]) -> bool:
    """Return whether a line has a gap before each column."""
    return len(line) > starts[1] and not any(line[at - 2 : at].strip() for at in starts[1:])


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in table
    ]


def differences(blocks: Iterable[Marked]) -> Iterator[str]:
    """Run blocks; yield what differs for each block that does not show its real output.

    A block that differs is run once more: a stall of the machine changes what a node answers.
    """
    for block, renewed in renewals(blocks, tries=2):
        if renewed != block.text:
            old, new = block.text.splitlines(), renewed.splitlines()
            diff = unified_diff(old, new, str(block), "the real output", lineterm="", n=1)
            yield "\n".join(diff)


def renewals(blocks: Iterable[Marked], tries: int = 1) -> Iterator[tuple[Marked, str]]:
    """Run blocks, by scenario; yield each with its text and real outputs."""
    with Worlds() as worlds:
        for block in sorted(blocks, key=lambda block: block.scenario):
            for _ in range(tries):
                renewed = run(block, worlds.world_of(block))
                if renewed == block.text:
                    break
            yield block, renewed


def write(pages: Sequence[Path], report: Callable[[str], None]) -> None:
    """Write the real outputs into pages, or into all."""
    for block, renewed in renewals(marked_blocks(pages or all_pages())):
        if renewed != block.text:
            text = block.page.read_text(encoding="utf-8")
            marker = f"<!-- console: {block.scenario} -->\n```console\n"
            text = text.replace(f"{marker}{block.text}```", f"{marker}{renewed}```")
            block.page.write_text(text, encoding="utf-8")
            report(f"{block}: renewed")
