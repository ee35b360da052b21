"""The page of ends shows the tables that the matrix measures."""

from __future__ import annotations

from tests.integration.matrix.ends import ENDS, POOLS
from tests.integration.matrix.page import CAUSES, PAGE, ends_of, tables, with_tables


def test_the_page_shows_the_tables_as_they_are() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == with_tables(text), "run `python -m tests.integration.matrix --page`"
    assert tables() in text


def test_every_end_stands_below_one_heading() -> None:
    below = [end.name for cause in CAUSES for end in ends_of(cause)]
    assert sorted(below) == sorted(end.name for end in ENDS)


def test_every_end_says_what_it_does_in_every_pool() -> None:
    names = [end.name for end in ENDS]
    assert len(set(names)) == len(names)
    for end in ENDS:
        assert {*end.pools, *end.alone, *end.apart} <= set(POOLS), end.name
        assert {*end.other, *end.on_rabbitmq} <= set(end.pools), end.name
