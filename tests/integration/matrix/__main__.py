"""Write the tables of the page: `python -m tests.integration.matrix --page`."""

from tests.integration.matrix.page import PAGE, with_tables

PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
