"""The command `explain`: prints what the documentation says about an error or a log line.

The list at the top of the page of troubleshooting names the passages. Each has a link, and the
link's anchor is the code. So text and list are those of the pages, which the wheel has.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from celery_redlock.operate.cli.group import (
    Table,
    as_data,
    as_json,
    command_error,
    named,
    print_result,
    redlock,
)
from celery_redlock.tasks.settings.app import did_you_mean

PACKAGE = Path(__file__).parents[2]
LIST_OF_PASSAGES = "operations/troubleshooting.md"
WIDEST = 100  # columns of a paragraph
_PASSAGE = re.compile(r"^- \[(.+)\]\((.*)#([\w-]+)\): ((?:.+\n)+?)(?=- |\n)", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")
_SECTION_LINK = re.compile(r"(?:the section )?\[([^\]]+)\]\([^)#]*#([\w-]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_FENCE = re.compile(r"^(```.*?^```)$", re.DOTALL | re.MULTILINE)
_CELLS = re.compile(r" *\| *")
_ITEM = re.compile(r"\n(?=- |\d+\. )")


@dataclass(frozen=True)
class Passage:
    """A section of a page. symptom: what a user sees. text: Markdown."""

    code: str
    title: str
    symptom: str
    text: str


@redlock.command()
@click.argument("code", required=False, callback=named)
@as_json
def explain(code: str | None, as_json: bool) -> None:
    """Explain an error or a log line, by the CODE in it.

    A part of a code is enough, if no other code has it. Without CODE this lists all of them. It
    needs no app and no node.
    """
    known = read_passages()
    if code is None:
        shown: list[str | Table] = [
            Table(("CODE", "YOU SEE"), [(one.code, one.symptom) for one in known.values()], "")
        ]
        chosen = list(known.values())
    else:
        chosen = [find_passage(code, known)]
        text = with_commands(chosen[0].text, known)
        width = min(shutil.get_terminal_size().columns, WIDEST)
        *shown, _ = as_plain(text, width)  # without the last empty line
    print_result(as_json, {"passages": as_data(chosen)}, *shown)


def read_passages() -> dict[str, Passage]:
    """Return all passages by their codes."""
    folder = PACKAGE / "docs"  # of an installed wheel
    if not folder.is_dir():
        folder = PACKAGE.parent / "docs"
    listed = folder / LIST_OF_PASSAGES
    found = {}
    for title, page, code, symptom in _PASSAGE.findall(listed.read_text(encoding="utf-8")):
        text = (listed.parent / page if page else listed).read_text(encoding="utf-8")
        symptom = " ".join(_LINK.sub(r"\1", symptom).split())
        found[code] = Passage(code, title, symptom, section_of(text, code))
    return found


def find_passage(code: str, known: dict[str, Passage]) -> Passage:
    """Return the passage of a code, of a part of one, or of a title."""
    wanted = anchor_of(code.rpartition("#")[2])
    matching = [wanted] if wanted in known else [one for one in known if wanted in one]
    if len(matching) > 1:
        raise command_error(f"{code} matches several: {', '.join(matching)}")
    if not matching:
        raise command_error(f"{code} is not a code{did_you_mean(wanted, known)}")
    return known[matching[0]]


def with_commands(text: str, known: Container[str]) -> str:
    """Return Markdown with the command that prints a passage in the place of a link to it."""

    def command(link: re.Match[str]) -> str:
        title, code = link.groups()
        if code not in known or code in map(anchor_of, _HEADING.findall(text)):
            return link[0]
        told = f"`celery redlock explain {code}`"
        return told if anchor_of(title) == code else f"{title} ({told})"

    return _SECTION_LINK.sub(command, text)


def anchor_of(title: str) -> str:
    """Return the anchor that GitHub, and the site as it does, gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


def section_of(page: str, anchor: str) -> str:
    """Return a section of a page with its heading and its sections; "" if there is none."""
    lines: list[str] = []
    level, is_code = 0, False
    for line in page.splitlines():
        is_code ^= line.startswith("```")
        marks, _, title = line.partition(" ")
        if not is_code and marks and not marks.strip("#"):
            if level and len(marks) <= level:
                break
            if not level and anchor_of(title) == anchor:
                level = len(marks)
        if level:
            lines.append(line)
    return "\n".join(lines).strip()


def as_plain(text: str, width: int) -> Iterator[str | Table]:
    """Yield the lines and tables of Markdown without its marks. width: of a paragraph."""
    text = re.sub(r"<!--.*?-->\n|^:::\n?", "", text, flags=re.MULTILINE)
    text = re.sub(r"^:::\{(\w+)\}", lambda found: f"{found[1].capitalize()}:", text, flags=re.M)
    for part in _FENCE.split(text):
        if part.startswith("```"):
            yield from (f"    {line}" for line in part.splitlines()[1:-1])
            yield ""
            continue
        blocks = re.split(r"\n\n+", _LINK.sub(r"\1", part).replace("**", "").strip())
        for block in filter(None, blocks):
            if block.startswith("|"):
                heads, _, *rows = [_CELLS.split(line[1:-1].strip()) for line in block.split("\n")]
                yield Table(heads, rows, "")
            else:
                for item in _ITEM.split(block):
                    words = " ".join(item.lstrip("# ").split())
                    indent = "  " if item.startswith("- ") else ""
                    yield from textwrap.wrap(
                        words, width, subsequent_indent=indent, break_on_hyphens=False
                    )
            yield ""
