"""The tables and sections of options and settings, made from the tables in the package.

`python3 -m docs --tables` writes them between their markers; `tests/test_docs.py` fails if a page
differs from them.
"""

from __future__ import annotations

import json
import posixpath
import re
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path

from celery_redlock.tasks.settings.app import APP_SETTINGS, Setting
from celery_redlock.tasks.settings.options import OPTIONS, Option
from docs import option_examples
from docs.option_examples import Shown

ROOT = Path(__file__).resolve().parent.parent
OPTIONS_PAGE, SETTINGS_PAGE = "docs/reference/options.md", "docs/reference/settings.md"
PAGES = (OPTIONS_PAGE, SETTINGS_PAGE)
WIDTH = 100  # characters of a line of text on the pages
_TABLE = re.compile(
    r"(?P<begin><!-- (?P<name>[a-z ]+), from (?P<source>\S+) -->\n).*?"
    r"(?P<end><!-- end of table -->)",
    re.DOTALL,
)
_LINK = re.compile(r"\]\((?P<page>[^)#]+)(?P<anchor>#[^)]*)?\)")


def renewed(page: str) -> str:
    """Return the text of a page with its tables made anew. page: relative to the repository."""
    text = (ROOT / page).read_text(encoding="utf-8")

    def table(found: re.Match[str]) -> str:
        lines = "\n".join(TABLES[found["name"]]())
        return f"{found['begin']}\n{_linked(lines, page)}\n\n{found['end']}"

    return _TABLE.sub(table, text)


def write() -> None:
    """Write the tables of all pages."""
    for page in PAGES:
        (ROOT / page).write_text(renewed(page), encoding="utf-8")


def options() -> Iterable[str]:
    """Give the rows of the table of options."""
    yield from _rows("option", "default", "meaning")
    for option in OPTIONS:
        yield _row(f"[`{option.name}`](#{option.name})", default_of(option), option.doc)


def option_sections() -> Iterable[str]:
    """Give the lines of a section for each option."""
    for number, option in enumerate(OPTIONS):
        name, shown = option.name, option_examples.OPTIONS[option.name]
        levels = f"`lock_{name}` (task), `redlock_{name}` (app), `{name}` (call, queue)"
        if option.may_be_callable:
            levels += "; a callable at task and app level only"
        yield from _section(name, option, shown, levels, is_first=not number)
        yield from ("```python", *imports_of(shown.example), shown.example, "```")


def app_settings() -> Iterable[str]:
    """Give the rows of the table of settings for the whole app."""
    yield from _rows("setting", "default", "meaning")
    for setting in APP_SETTINGS:
        name = f"redlock_{setting.name}"
        yield _row(f"[`{name}`](#{name})", default_of(setting), setting.doc)


def app_setting_sections() -> Iterable[str]:
    """Give the lines of a section for each setting of the whole app."""
    for number, setting in enumerate(APP_SETTINGS):
        name, shown = f"redlock_{setting.name}", option_examples.SETTINGS[setting.name]
        yield from _section(name, setting, shown, "", is_first=not number)
        yield from ("```python", f"app.conf.{name} = {shown.example}", "```")


TABLES: dict[str, Callable[[], Iterable[str]]] = {
    "table of options": options,
    "sections of options": option_sections,
    "table of app settings": app_settings,
    "sections of app settings": app_setting_sections,
}


def imports_of(example: str) -> Iterable[str]:
    """Give the lines in front of the example of an option."""
    yield "from celery import shared_task"
    names = [name for name in ("Backoff", "LockedTask") if name in example]
    yield f"from celery_redlock import {', '.join(names)}"
    yield ""


def default_of(setting: Setting) -> str:
    """Return the default of a setting as the tables show it."""
    if setting.shown_default:
        return setting.shown_default
    if setting.unit:
        return f"{setting.default:g} {setting.unit}"
    value = setting.default
    return f"`{json.dumps(value) if isinstance(value, str) else repr(value)}`"


def _section(
    name: str, setting: Setting, shown: Shown, levels: str, *, is_first: bool
) -> Iterable[str]:
    """Give the lines of a section up to its example. levels: how each level names the option."""
    if not is_first:
        yield ""
    yield from (f"### {name}", "")
    yield from _wrapped(f"{setting.doc} {setting.details}".strip())
    yield ""
    yield from _wrapped(f"- **Type:** {shown.type}", "  ")
    yield from _wrapped(f"- **Default:** {default_of(setting)}", "  ")
    yield from _wrapped(f"- **Values:** {setting.values}", "  ")
    if levels:
        yield from _wrapped(f"- **Set as:** {levels}", "  ")
    if shown.related:
        here = OPTIONS_PAGE if isinstance(setting, Option) else SETTINGS_PAGE
        related = ", ".join(_related(one, here) for one in shown.related)
        yield from _wrapped(f"- **See also:** {related}", "  ")
    yield ""


def _related(name: str, here: str) -> str:
    """Return a link to the section of an option or setting. here: the page of the link."""
    page = SETTINGS_PAGE if name.startswith("redlock_") else OPTIONS_PAGE
    return f"[`{name}`]({'' if page == here else page}#{name})"


def _wrapped(text: str, indent: str = "") -> Iterable[str]:
    fill = textwrap.TextWrapper(
        WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return fill.wrap(text)


def _rows(*titles: str) -> Iterable[str]:
    yield _row(*titles)
    yield "|" + "---|" * len(titles)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _linked(lines: str, page: str) -> str:
    """Return lines whose links, relative to the repository, are relative to a page."""

    def link(found: re.Match[str]) -> str:
        target, anchor = found["page"], found["anchor"] or ""
        if target == page:
            return f"]({anchor})"
        return f"]({posixpath.relpath(target, posixpath.dirname(page))}{anchor})"

    return _LINK.sub(link, lines)
