"""The sentences of the pages are short and plain: tests/prose.py measures them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT, name_of
from tests.prose import MEAN_WORDS, MOST_WORDS, habits, long_sentences, mean_words, sentences

WORDS = 56_000  # of the README and the pages, without what a program writes from its figures
# tables below the mark of a benchmark, and those of how runs end, which have a mark of their end
WRITTEN_BY_PROGRAMS = re.compile(
    r"""^<!--\ (?:cost|failures|versions|hot\ key|hand-off|rate|recovery|tens|origins)\ -->\n
        .+?(?=\n\n|\Z)
        | ^<!--\ the\ tables:\ .+?<!--\ their\ end\ -->""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_sentences_of_a_page_are_short_and_have_no_habit(page: Path) -> None:
    assert mean_words(page) <= MEAN_WORDS
    assert [f"{one.line}: {one.words} words: {one.text}" for one in long_sentences(page)] == []
    found = [f"{one.line}: write {better!r}: {one.text}" for one, better in habits(page)]
    assert found == []


def test_all_pages_together_can_be_read() -> None:
    pages = [page for page in PAGES if page.is_relative_to(ROOT / "docs")]
    words = sum(count_words(page.read_text()) for page in [ROOT / "README.md", *pages])
    assert words <= WORDS, "shorten a page before you write another one"


def test_a_table_that_a_program_writes_is_not_counted() -> None:
    assert count_words("A lock.\n\n<!-- cost -->\n| a | b |\n|---|---|\n\nTwo words.\n") == 4
    assert count_words("<!-- the tables: x -->\n\n| a |\n<!-- their end -->\nOne\n") == 1


def count_words(text: str) -> int:
    return len(WRITTEN_BY_PROGRAMS.sub("", text).split())


def test_a_text_that_the_package_shows_has_no_habit() -> None:
    found = [
        f"{name_of(module)}:{one.line}: write {better!r}: {one.text}"
        for module in sorted((ROOT / "celery_redlock").rglob("*.py"))
        for one, better in habits(module)
    ]
    assert found == []


def test_a_long_sentence_and_a_habit_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    long = " ".join(["word"] * (MOST_WORDS + 1))
    page.write_text(f"# Title\n\nA lock. Nobody waits: no one.\n\n{long}.\n\n| {long} |\n")
    assert [one.words for one in sentences(page)] == [2, 4, MOST_WORDS + 1]
    assert [one.line for one in long_sentences(page)] == [5]
    assert [one.text for one, _ in habits(page)] == ["Nobody waits: no one."]
    assert mean_words(page) == pytest.approx((2 + 4 + MOST_WORDS + 1) / 3)
