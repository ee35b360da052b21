"""The command `explain`: prints what the documentation says about an error or a log line.

The list at the top of the page operations/troubleshooting has a link for each passage. The anchor
of the link is the code of the passage. The wheel contains these pages.
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
from typing import TypeAlias

import click

from celery_redlock import anchors
from celery_redlock.errors import closest_or_all
from celery_redlock.operate.cli.group import (
    Table,
    as_data,
    as_json,
    command_error,
    non_empty,
    print_result,
    redlock,
)

PACKAGE = Path(__file__).parents[2]
LIST_OF_PASSAGES = "operations/troubleshooting.md"
LOG_LINES = "reference/log-messages.md"
MAX_WIDTH = 100  # columns of a paragraph
MIN_SCORE = 0.25  # of the best passage; a lower one matches by chance
MIN_SHARED = 2  # words, or pairs, that a passage shares with a text; one alone matches by chance
COMMON_SHARE = 0.25  # of the passages; a word that more of them have is not counted for that
SIMILAR_SHARE = 0.9  # of the best score; passages above it match as well
_Word: TypeAlias = tuple[str, ...]  # a word, or two words that follow each other
_PASSAGE = re.compile(r"^- \[(.+)\]\((.*)#([\w-]+)\): ((?:.+\n)+?)(?=- |\n)", re.MULTILINE)
_ROW = re.compile(r"^\| (`.+`) \| `(\w+)` \| (.+) \|$", re.MULTILINE)
_FIRST_CELL = re.compile(r"^\| (.+?) \| (.+) \|$", re.MULTILINE)
_NAME = re.compile(r"(?<!\w)'\S*")  # a quoted name, which differs from line to line
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
@click.argument("code", required=False, callback=non_empty, metavar="[CODE|TEXT]")
@as_json
def explain(code: str | None, as_json: bool) -> None:
    """Explain an error or a log line, by the CODE in it or by its TEXT.

    A part of a code, or some words, are enough. Without CODE this lists all of them. It needs no
    app and no node.
    """
    passages = read_passages()
    if code is None:
        parts: list[str | Table] = [
            Table(
                ("CODE", "YOU SEE"),
                [(passage.code, passage.symptom) for passage in passages.values()],
                "",
            )
        ]
        chosen = list(passages.values())
    else:
        chosen = [find_passage(code, passages)]
        text = with_commands(chosen[0].text, passages)
        width = min(shutil.get_terminal_size().columns, MAX_WIDTH)
        *parts, _ = as_plain(text, width)  # without the last empty line
    print_result(as_json, {"passages": as_data(chosen)}, *parts)


def _docs() -> Path:
    installed = PACKAGE / "docs"  # of a wheel
    return installed if installed.is_dir() else PACKAGE.parent / "docs"


def read_passages() -> dict[str, Passage]:
    """Return all passages by their codes."""
    list_page = _docs() / LIST_OF_PASSAGES
    passages = {}
    for title, page, code, symptom in _PASSAGE.findall(list_page.read_text(encoding="utf-8")):
        text = (list_page.parent / page if page else list_page).read_text(encoding="utf-8")
        symptom = " ".join(_LINK.sub(r"\1", symptom).split())
        passages[code] = Passage(code, title, symptom, section_of(text, code))
    return passages


def find_passage(code: str, passages: dict[str, Passage]) -> Passage:
    """Return the passage of a code, a part of a code, a title, or the text of a line.

    Raises ClickException if none or several match.
    """
    anchor = anchor_of(code.rpartition("#")[2].rpartition("redlock explain ")[2])
    codes = [anchor] if anchor in passages else [code for code in passages if anchor in code]
    matching = (
        [passages[matching_code] for matching_code in codes]
        or find_by_row(code, passages)
        or find_by_words(code, passages)
    )
    if len(matching) > 1:
        raise command_error(
            f"{code} matches several: {', '.join(passage.code for passage in matching)}"
        )
    if not matching:
        hint = closest_or_all(anchor, list(passages), "`celery redlock explain` lists the codes")
        raise command_error(f"{code} is not a code, and no passage has its words; {hint}")
    return matching[0]


def find_by_row(text: str, passages: dict[str, Passage]) -> list[Passage]:
    """Return the passage with a table's row about a text, such as the word of a server's error.

    A row that leads to another passage does not count. Empty if several passages have such a row.
    """
    quoted = f"`{text.strip(' `').lower()}`"
    found = {
        code: passage
        for code, passage in passages.items()
        for first_cell, rest in _FIRST_CELL.findall(passage.text)
        if quoted in first_cell.lower() and passages.keys().isdisjoint(_ANCHOR.findall(rest))
    }
    return list(found.values()) if len(found) == 1 else []


def find_by_words(text: str, passages: dict[str, Passage]) -> list[Passage]:
    """Return the passages that share the most words with a text; rare words count more.

    The page of the log messages adds the words of each line to the passage that it links to. A line
    that links to none is a passage of its own, by the name of its event.
    """
    candidates, words = _with_log_lines(passages)
    if text in candidates:
        return [candidates[text]]
    passages_with = Counter(word for counts in words.values() for word in counts)
    text_words = {*_words(text)}
    counted_words = {
        word for word in text_words if passages_with[word] <= COMMON_SHARE * len(words)
    }
    needed = MIN_SHARED if len(text_words) > 1 else 0
    scores = {
        code: sum(counts[word] / passages_with[word] for word in text_words & counts.keys())
        for code, counts in words.items()
        if len(counted_words & counts.keys()) >= needed
    }
    best = max(scores.values(), default=0.0)
    if best <= MIN_SCORE:
        return []
    return [candidates[code] for code, score in scores.items() if score > SIMILAR_SHARE * best]


def _with_log_lines(
    passages: dict[str, Passage],
) -> tuple[dict[str, Passage], dict[str, Counter[_Word]]]:
    """Return the passages with those of log lines, and the words of each, both by code."""
    candidates = dict(passages)
    words = {}
    for code, passage in passages.items():
        title_words = Counter(2 * _words(passage.title, passage.symptom))
        words[code] = Counter(_words(passage.text)) | title_words
    log_page = (_docs() / LOG_LINES).read_text(encoding="utf-8")
    for line, event, meaning in _ROW.findall(log_page):
        code = _code_of_line(line, meaning, passages) or event
        words[code] = words.get(code, Counter()) | Counter(2 * _words(line, event))
        if code == event:
            earlier = candidates[event].text if event in candidates else event
            text = f"{earlier}\n\n{line}\n\n{meaning}"
            candidates[event] = Passage(event, event, line, text)
    return candidates, words


def _code_of_line(line: str, meaning: str, passages: dict[str, Passage]) -> str:
    """Return the code of the passage that shows a log line, or that its meaning links to."""
    showing = (code for code, passage in passages.items() if line in passage.text)
    linked = (code for code in _ANCHOR.findall(meaning) if code in passages)
    return next(showing, "") or next(linked, "")


def _words(*texts: str) -> list[_Word]:
    """Return the words of texts, and each pair of words that follow each other, once each."""
    words = re.findall(r"[a-z_]{2,}", _NAME.sub(" name ", " ".join(texts)).lower())
    return [*{(word,) for word in words} | set(pairwise(words))]


def with_commands(text: str, codes: Container[str]) -> str:
    """Return Markdown in which the command that prints a passage replaces each link to it."""

    def command(link: re.Match[str]) -> str:
        title, code = link.groups()
        if code not in codes or code in map(anchor_of, _HEADING.findall(text)):
            return link[0]
        explain_command = anchors.command_for(code)
        return explain_command if anchor_of(title) == code else f"{title} ({explain_command})"

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
    text = re.sub(r"^:::\{(\w+)\}", lambda match: f"{match[1].capitalize()}:", text, flags=re.M)
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
