"""The tables of options and settings on the pages, made from the tables in the package.

`python3 -m docs --tables` writes them between their markers; `tests/test_docs.py` fails if a page
differs from them.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from celery_redlock.tasks.settings.app import APP_SETTINGS, Setting
from celery_redlock.tasks.settings.options import OPTIONS

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("docs/reference/options.md", "docs/reference/settings.md")
_TABLE = re.compile(
    r"(?P<begin><!-- table of (?P<name>[a-z ]+), from (?P<source>\S+) -->\n).*?"
    r"(?P<end><!-- end of table -->)",
    re.DOTALL,
)
_LINK = re.compile(r"\]\((?P<page>[^)#]+)(?P<anchor>#[^)]*)?\)")


def renewed(page: str) -> str:
    """Return the text of a page with its tables made anew. page: relative to the repository."""
    text = (ROOT / page).read_text(encoding="utf-8")

    def table(found: re.Match[str]) -> str:
        rows = "\n".join(TABLES[found["name"]]())
        return f"{found['begin']}\n{_linked(rows, page)}\n\n{found['end']}"

    return _TABLE.sub(table, text)


def write() -> None:
    """Write the tables of all pages."""
    for page in PAGES:
        (ROOT / page).write_text(renewed(page), encoding="utf-8")


def options() -> Iterable[str]:
    """Give the rows of the table of options."""
    yield from _rows("name", "default", "meaning")
    for option in OPTIONS:
        yield _row(f"`{option.name}`", default_of(option), _meaning(option))


def app_settings() -> Iterable[str]:
    """Give the rows of the table of settings for the whole app."""
    yield from _rows("name", "default", "meaning")
    for setting in APP_SETTINGS:
        yield _row(f"`redlock_{setting.name}`", default_of(setting), _meaning(setting))


def option_values() -> Iterable[str]:
    """Give the rows of the reference of options."""
    yield from _rows("option", "values", "built-in value", "may be a callable")
    for option in OPTIONS:
        may = "at app and task level" if option.may_be_callable else "no"
        yield _row(f"`{option.name}`", option.values, default_of(option), may)


def app_setting_values() -> Iterable[str]:
    """Give the rows of the reference of settings for the whole app."""
    yield from _rows("setting", "values", "default")
    for setting in APP_SETTINGS:
        yield _row(f"`redlock_{setting.name}`", setting.values, default_of(setting))


TABLES: dict[str, Callable[[], Iterable[str]]] = {
    "options": options,
    "app settings": app_settings,
    "option values": option_values,
    "app setting values": app_setting_values,
}


def default_of(setting: Setting) -> str:
    """Return the default of a setting as the tables show it."""
    if setting.shown_default:
        return setting.shown_default
    if setting.unit:
        return f"{setting.default:g} {setting.unit}"
    value = setting.default
    return f"`{json.dumps(value) if isinstance(value, str) else repr(value)}`"


def _meaning(setting: Setting) -> str:
    return f"{setting.doc} {setting.details}".strip()


def _rows(*titles: str) -> Iterable[str]:
    yield _row(*titles)
    yield "|" + "---|" * len(titles)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _linked(rows: str, page: str) -> str:
    """Return rows whose links, relative to the repository, are relative to a page."""

    def link(found: re.Match[str]) -> str:
        target, anchor = found["page"], found["anchor"] or ""
        if target == page:
            return f"]({anchor})"
        return f"]({posixpath.relpath(target, posixpath.dirname(page))}{anchor})"

    return _LINK.sub(link, rows)
