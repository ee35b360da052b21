"""The command `explain`: prints what the documentation says about an error or a log line.

The list at the top of the page of troubleshooting names the passages. Each has a link, and the
link's anchor is the code. So text and list are those of the pages, which the wheel has.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import click

from celery_redlock import anchors
from celery_redlock.errors import closest_or_all
from celery_redlock.operate.cli.group import (
    Table,
    as_data,
    as_json,
    command_error,
    named,
    print_result,
    redlock,
)

PACKAGE = Path(__file__).parents[2]
LIST_OF_PASSAGES = "operations/troubleshooting.md"
LOG_LINES = "reference/log-messages.md"
WIDEST = 100  # columns of a paragraph
# the score of a passage that has a text's words, by which few score
LEAST = 0.25
SIMILAR = 0.9
_PASSAGE = re.compile(r"^- \[(.+)\]\((.*)#([\w-]+)\): ((?:.+\n)+?)(?=- |\n)", re.MULTILINE)
_ROW = re.compile(r"^\| (`.+`) \| `(\w+)` \| (.+) \|$", re.MULTILINE)
_NAME = re.compile(r"(?<!\w)'\S*")  # of a resource, which another text has not
_ANCHOR = re.compile(r"#([\w-]+)\)")
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
@click.argument("code", required=False, callback=named, metavar="[CODE|TEXT]")
@as_json
def explain(code: str | None, as_json: bool) -> None:
    """Explain an error or a log line, by the CODE in it or by its TEXT.

    A part of a code, or some words, are enough. Without CODE this lists all of them. It needs no
    app and no node.
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


def _docs() -> Path:
    installed = PACKAGE / "docs"  # of a wheel
    return installed if installed.is_dir() else PACKAGE.parent / "docs"


def read_passages() -> dict[str, Passage]:
    """Return all passages by their codes."""
    listed = _docs() / LIST_OF_PASSAGES
    found = {}
    for title, page, code, symptom in _PASSAGE.findall(listed.read_text(encoding="utf-8")):
        text = (listed.parent / page if page else listed).read_text(encoding="utf-8")
        symptom = " ".join(_LINK.sub(r"\1", symptom).split())
        found[code] = Passage(code, title, symptom, section_of(text, code))
    return found


def find_passage(code: str, known: dict[str, Passage]) -> Passage:
    """Return the passage of a code, of a part of one, of a title, or of the text of a line."""
    wanted = anchor_of(code.rpartition("#")[2].rpartition("redlock explain ")[2])
    codes = [wanted] if wanted in known else [one for one in known if wanted in one]
    matching = [known[one] for one in codes] or find_by_words(code, known)
    if len(matching) > 1:
        raise command_error(f"{code} matches several: {', '.join(one.code for one in matching)}")
    if not matching:
        hint = closest_or_all(wanted, list(known), "`celery redlock explain` lists the codes")
        raise command_error(f"{code} is not a code, and no passage has its words; {hint}")
    return matching[0]


def find_by_words(text: str, known: dict[str, Passage]) -> list[Passage]:
    """Return the passages that share the most words with a text; rare words count more.

    A line of the log adds its words to the passage that it leads to; else its event is a passage.
    """
    found = dict(known)
    words = {code: Counter(_words(one.text)) for code, one in known.items()}
    for code, one in known.items():
        words[code] |= Counter(2 * _words(one.title, one.symptom))
    for line, event, meaning in _ROW.findall((_docs() / LOG_LINES).read_text(encoding="utf-8")):
        code = next((one for one in _ANCHOR.findall(meaning) if one in known), event)
        code = next((of for of, one in known.items() if line in one.text), code)
        words[code] = words.get(code, Counter()) | Counter(2 * _words(line, event))
        if code == event:
            before = found[event].text if event in found else event
            found[event] = Passage(event, event, line, f"{before}\n\n{line}\n\n{meaning}")
    if text in found:
        return [found[text]]
    passages_with = Counter(word for one in words.values() for word in one)
    scores = {
        code: sum(one[word] / passages_with[word] for word in {*_words(text)} & one.keys())
        for code, one in words.items()
    }
    best = max(scores.values())
    return [found[code] for code, one in scores.items() if best > LEAST and one > SIMILAR * best]


def _words(*texts: str) -> list[tuple[str, ...]]:
    """Return the words of texts, and each pair of words that follow each other, once each."""
    words = re.findall(r"[a-z_]{2,}", _NAME.sub(" name ", " ".join(texts)).lower())
    return [*{(one,) for one in words} | set(pairwise(words))]


def with_commands(text: str, known: Container[str]) -> str:
    """Return Markdown with the command that prints a passage in the place of a link to it."""

    def command(link: re.Match[str]) -> str:
        title, code = link.groups()
        if code not in known or code in map(anchor_of, _HEADING.findall(text)):
            return link[0]
        told = anchors.command_for(code)
        return told if anchor_of(title) == code else f"{title} ({told})"

    return _SECTION_LINK.sub(command, text)


def anchor_of(title: str) -> str:
    """Return the anchor that GitHub, and the site as it does, gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


def section_of(page: str, anchor: str) -> str:
    """Return a section of a page with its heading and its sections; "" if there is none."""
    lines: list[str] = []
    level = 0
    is_code = False
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
