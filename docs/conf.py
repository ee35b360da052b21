"""The site: the pages as they stand in the repository, read by Sphinx; `python -m docs` builds it.

The source folder is the repository, so that every link on a page leads where it leads on GitHub.
The lists of `docs/index.md` are the navigation: each page has to stand in one.
"""

from __future__ import annotations

import re
from typing import Any

import celery_redlock

project = "celery_redlock"
version = release = celery_redlock.__version__
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "benchmarks/*.md"]
exclude_patterns = [".venv", "build", "dist"]
extensions = ["myst_parser", "sphinx.ext.autodoc"]

myst_heading_anchors = 4  # the anchors that GitHub gives
smartquotes = False  # docstrings quote settings
default_role = "code"  # docstrings are plain text with `names`
autodoc_typehints = "description"
autodoc_member_order = "bysource"

html_theme = "furo"
html_title = f"celery_redlock {version}"
html_extra_path = ["front"]  # the site's first page leads to the index
html_show_sphinx = False
html_copy_source = False

_SECTION = re.compile(r"^## (?P<title>.+)\n\n(?P<items>(?:- \[.+\n(?:  .+\n)*)+)", re.MULTILINE)
_ITEM = re.compile(r"^- \[(?P<title>[^\]]+)\]\((?P<page>[^)]+)\.md\)", re.MULTILINE)


def _with_navigation(text: str) -> str:
    """Return the index with a hidden toctree behind each of its lists."""

    def add(section: re.Match[str]) -> str:
        pages = [f"{item['title']} <{item['page']}>" for item in _ITEM.finditer(section["items"])]
        options = [":hidden:", f":caption: {section['title']}"]
        return "\n".join([section[0], "```{toctree}", *options, "", *pages, "```", ""])

    return _SECTION.sub(add, text)


def _read(app: Any, name: str, content: list[str]) -> None:
    if name == root_doc:
        content[0] = _with_navigation(content[0])


def setup(app: Any) -> None:
    """Let the index become the navigation as it is read."""
    app.connect("source-read", _read)
