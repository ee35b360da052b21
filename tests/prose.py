"""The prose of the pages: how long its sentences are, and phrases that a reader stumbles over.

The same phrases are looked for in the texts that the package prints, logs and raises.

`python -m tests.prose [PAGE ...]` prints both, with the line of each finding.
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.pages import PAGES, name_of

MEAN_WORDS = 18  # words a sentence, of a page
MOST_WORDS = 30  # words in one sentence
_NOT_PROSE = re.compile(
    r"^```(?s:.*?)^```$|(?s:<!--.*?-->)|^\|.*$|^#.*$|^:{3,}.*$|^\[[^\]]+\]: .*$|^\(.+\)=$",
    re.MULTILINE,
)
_LINK = re.compile(r"!?\[(?P<text>[^\]]*)\]\([^)]*\)")
_CODE = re.compile(r"`[^`]+`")
_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+")
_ENDS = re.compile(r"(?<=[.!?])(?:\*\*|[)\"”])*\s+|:\s*$")
# each is a habit that hides who does what, with what to write
HABITS = {
    r"\b(?:nobody|no one|whoever|whom)\b": "name the component: no task, no worker, the holder",
    r"\b[Tt]ells? whether\b": "return whether, show whether",
    r"\bthat one\b|\bthe one before it\b": "repeat the noun",
    r"\bfor ever\b": "forever, or without a limit",
    r"\blets? go\b": "release",
    r"\bdoes no harm\b|\bdo no harm\b": "say what happens",
    r"\bmid-run\b": "while the body runs",
    r"\bso many (?:seconds|s)\b": "a number of seconds",
    r"\b[Ww]here (?:it|they|there|no|nothing|not|several|none)\b": "if",
    r"\btwins?\b": "redelivered message",
    r"\bnot for nothing\b|\bfor nothing\b": "say what is lost",
    r"\bgoes by\b": "is set by, uses",
    r"\b(?:is|are) (?:an)?other's\b|\banother's\b": "belongs to another holder",
    r"(?<![Tt]here )\bis no (?!longer\b|more\b|less\b)\w+": "is not a",
    r"\ball the same\b": "still",
    r"\bknown are\b": "known:",
    r"\b(?:lock|locks|claim|claims) stands?\b": "is held, exists",
}


@dataclass(frozen=True)
class Sentence:
    """One sentence of a page. line: that on which its paragraph begins."""

    line: int
    text: str

    @property
    def words(self) -> int:
        return len(self.text.split())


def sentences(page: Path) -> list[Sentence]:
    """Return the sentences of a page outside of code, tables and headings, in order."""
    text = page.read_text(encoding="utf-8")
    text = _NOT_PROSE.sub(lambda found: "\n" * found[0].count("\n"), text)
    return [
        Sentence(line, sentence)
        for line, paragraph in _paragraphs(text)
        for sentence in _ENDS.split(paragraph)
        if sentence and sentence.strip()
    ]


def _paragraphs(text: str) -> list[tuple[int, str]]:
    """Return the paragraphs and list items, each with its line; code is one word."""
    found: list[tuple[int, list[str]]] = []
    is_open = False
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            is_open = False
        elif is_open and not _ITEM.match(line):
            found[-1][1].append(line)
        else:
            found.append((number, [_ITEM.sub("", line)]))
            is_open = True
    return [(line, _plain(" ".join(lines))) for line, lines in found]


def _plain(text: str) -> str:
    return " ".join(_CODE.sub("CODE", _LINK.sub(lambda found: found["text"], text)).split())


def mean_words(page: Path) -> float:
    lengths = [sentence.words for sentence in sentences(page)]
    return sum(lengths) / len(lengths) if lengths else 0.0


def long_sentences(page: Path) -> list[Sentence]:
    return [sentence for sentence in sentences(page) if sentence.words > MOST_WORDS]


def habits(page: Path) -> list[tuple[Sentence, str]]:
    """Return the sentences of a page or module with a phrase of HABITS, and what to write."""
    return [
        (sentence, better)
        for sentence in (texts(page) if page.suffix == ".py" else sentences(page))
        for pattern, better in HABITS.items()
        if re.search(pattern, sentence.text)
    ]


def texts(module: Path) -> list[Sentence]:
    """Return the texts of a module with three words or more, its docstrings aside.

    A part that is filled in at run time is one word.
    """
    tree = ast.parse(module.read_text(encoding="utf-8"))
    told = {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            told.update(id(part) for part in node.values)
            whole = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "CODE"
                for part in node.values
            )
            found.append((id(node), node.lineno, whole))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append((id(node), node.lineno, node.value))
    return [
        Sentence(line, " ".join(text.split()))
        for name, line, text in found
        if name not in told and text.count(" ") >= 2
    ]


def main(names: list[str]) -> None:
    for page in [Path(name).resolve() for name in names] or PAGES:
        print(f"{name_of(page)}: {mean_words(page):.1f} words a sentence")
        for sentence in long_sentences(page):
            print(f"  {sentence.line}: {sentence.words} words: {sentence.text}")
        for sentence, better in habits(page):
            print(f"  {sentence.line}: write {better!r}: {sentence.text}")


if __name__ == "__main__":
    main(sys.argv[1:])
