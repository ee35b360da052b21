"""The page on the ends of life shows the table that the matrix measures."""

from __future__ import annotations

from tests.integration.matrix.ends import ENDS, POOLS
from tests.integration.matrix.page import PAGE, table, with_table


def test_the_page_shows_the_table_as_it_is() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == with_table(text), "run `python -m tests.integration.matrix --page`"
    assert table() in text


def test_every_end_says_what_it_does_in_every_pool() -> None:
    names = [end.name for end in ENDS]
    assert len(set(names)) == len(names)
    for end in ENDS:
        assert {*end.pools, *end.alone, *end.apart} <= set(POOLS), end.name
        assert {*end.other, *end.on_rabbitmq} <= set(end.pools), end.name
