"""The site: the pages as they stand in the repository, read by Sphinx; `python -m docs` builds it.

The source folder is the repository, so that every link on a page leads where it leads on GitHub.
The lists of `docs/index.md` are the navigation: each page has to stand in one.
"""

from __future__ import annotations

import contextlib
import html
import inspect
import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes

import celery_redlock

ROOT = Path(__file__).resolve().parent.parent
ABOUT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
URLS = ABOUT.get("urls", {})
DESCRIPTION_LENGTH = 160  # characters; search engines show about as many

project = ABOUT["name"]
copyright = re.findall(r"^Copyright \(c\) (.+)$", (ROOT / "LICENSE").read_text(), re.MULTILINE)[0]  # noqa: A001
version = release = celery_redlock.__version__
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**/*.md", "docs/*.md", "benchmarks/*.md"]
exclude_patterns = [".venv", "build", "dist"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "sphinx_design"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # the anchors that GitHub gives
smartquotes = False  # docstrings quote settings
default_role = "code"  # docstrings are plain text with `names`
autodoc_member_order = "bysource"
autodoc_mock_imports = ["django", "sqlalchemy"]  # the extra `docs` installs neither
maximum_signature_line_length = 80  # a longer one has a line for each parameter

# The copy button takes commands: no prompt, no output, no comment behind a command.
copybutton_prompt_text = "$ "
copybutton_exclude = ".linenos, .gp ~ .c1"
copybutton_copy_empty_lines = False
copybutton_line_continuation_character = "\\"

html_theme = "furo"
html_title = f"celery_redlock {version}"
html_baseurl = URLS.get("Documentation", "")
html_favicon = "site/static/favicon.svg"
html_static_path = ["site/static"]
html_css_files = ["site.css"]
html_search_scorer = str(ROOT / "docs" / "site" / "scorer.js")  # Sphinx opens it from any folder
templates_path = ["site"]
html_context = {
    "description": ABOUT["description"],
    "licence": ABOUT["license"],
    "source_url": URLS.get("Source", ""),
}
html_copy_source = False

_SECTION = re.compile(
    r"^(?:## (?P<title>.+)|\*\*(?P<group>.+)\*\*)\n\n(?P<items>(?:- \[.+\n(?:  .+\n)*)+)",
    re.MULTILINE,
)
_CARDS = re.compile(r"^<!-- cards -->\n(?P<cards>(?:- \[.+\n(?:  .+\n)*)+)", re.MULTILINE)
_CARD = re.compile(
    r"^- \[(?P<title>[^\]]+)\]\((?P<page>[^)]+)\.md\): (?P<text>.+\n(?:  .+\n)*)", re.MULTILINE
)
_WORDS = re.compile(r"^<!-- search: (?P<words>.+) -->$", re.MULTILINE)
_ITEM = re.compile(r"^- \[(?P<title>[^\]]+)\]\((?P<page>[^)]+)\.md\)", re.MULTILINE)


def _with_navigation(text: str) -> str:
    """Return the index with a hidden toctree behind each of its lists."""

    def add(section: re.Match[str]) -> str:
        pages = [f"{item['title']} <{item['page']}>" for item in _ITEM.finditer(section["items"])]
        above = text[: section.start()].rpartition("\n## ")[2].partition("\n")[0]
        caption = section["title"] or f"{above}: {section['group'].lower()}"
        options = [":hidden:", f":caption: {caption}"]
        return "\n".join([section[0], "```{toctree}", *options, "", *pages, "```", ""])

    return _SECTION.sub(add, text)


def _with_cards(text: str) -> str:
    """Return the index with its list of cards as cards; on GitHub it is a plain list."""

    def grid(found: re.Match[str]) -> str:
        cards = [
            f":::{{grid-item-card}} {card['title']}\n:link: {card['page']}\n:link-type: doc\n\n"
            f"{card['text'][0].upper()}{card['text'][1:]}:::\n"
            for card in _CARD.finditer(found["cards"])
        ]
        return "\n".join(["::::{grid} 1 2 2 2", ":gutter: 3", "", *cards, "::::", ""])

    return _CARDS.sub(grid, text)


def _read(app: Any, name: str, content: list[str]) -> None:
    if name == root_doc:
        content[0] = _with_navigation(_with_cards(content[0]))


def _index_words(app: Any, doctree: nodes.document) -> None:
    """Enter what people search for, as a page's last line says, as the main place of these words.

    The search shows such an entry first. It leads to the page, as the page's title does.
    """
    page = app.env.docname
    text = Path(app.env.doc2path(page)).read_text(encoding="utf-8")
    words = [word.strip() for line in _WORDS.finditer(text) for word in line["words"].split(",")]
    if words:
        entries = [("single", word, "", "main", None) for word in words]
        doctree.append(addnodes.index(entries=entries))
        app.env.get_domain("index").entries[page].extend(entries)


def _write_first_page(app: Any, error: Exception | None) -> None:
    """Write the index as the site's first page, too; its links are relative to the other file."""
    if error is None:
        target = app.builder.get_target_uri(root_doc)
        page = (Path(app.outdir) / target).read_text(encoding="utf-8")
        page = page.replace("<head>", f'<head><base href="{target}">', 1)
        (Path(app.outdir) / "index.html").write_text(page, encoding="utf-8")


def _add_metadata(
    app: Any, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Add the page's description, and what services show of a link to it (Open Graph)."""
    title, text = project, ABOUT["description"]
    if doctree is not None and page != root_doc:
        title = next(doctree.findall(nodes.title)).astext()
        first = (p for p in doctree.findall(nodes.paragraph) if isinstance(p.parent, nodes.section))
        text = next((p.astext() for p in first), text)
    text = textwrap.shorten(text, DESCRIPTION_LENGTH, placeholder=" ...")
    given = context.get("metatags", "")  # a page may say its own
    tags = [("name", "description", text)] if 'name="description"' not in given else []
    tags += [
        ("property", "og:title", title),
        ("property", "og:description", text),
        ("property", "og:site_name", project),
        ("property", "og:type", "website" if page == root_doc else "article"),
    ]
    if context.get("pageurl"):
        tags.append(("property", "og:url", context["pageurl"]))
    context["metatags"] = given + "".join(
        f'\n<meta {kind}="{name}" content="{html.escape(content)}">' for kind, name, content in tags
    )


def _without_any(
    app: Any, what: str, name: str, of: Any, more: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Return a signature without the annotations that say nothing: `args: Any = None`."""
    if signature:
        signature = re.sub(r": ~?(?:typing\.)?Any = ", "=", signature)
        signature = re.sub(r": ~?(?:typing\.)?Any(?=[,)])", "", signature)
    if returns and returns.rpartition(".")[2].lstrip("~") == "Any":
        returns = None
    return signature, returns


def _with_lists(app: Any, what: str, name: str, of: Any, options: Any, lines: list[str]) -> None:
    """Turn a docstring, which is plain text, into what a page shows.

    "name: its meaning." of parameters and fields becomes a list, "Raises ..." a paragraph, a page's
    path a link. A module's docstring is for developers.
    """
    paragraphs = [] if what == "module" else "\n".join(lines).strip().split("\n\n")
    known = "|".join(sorted(_names_of(of), key=len, reverse=True)) or "-"
    shown = []
    for paragraph in paragraphs:
        text = re.sub(r"docs/([\w/-]+)\.md", r":doc:`/docs/\1`", " ".join(paragraph.split()))
        item = rf"(?:^|(?<=[.;] ))((?:{known})(?:, (?:{known}))*): "
        begin, *items = re.split(item, text)
        begin, *after = re.split(r"(?<=[.]) (?=Raises |Returns )", begin)
        shown.append(begin.strip())
        for names, meaning in zip(items[::2], items[1::2], strict=True):
            meaning, *more = re.split(r"(?<=[.]) (?=Raises |Returns )", meaning.strip())
            named = ", ".join(f"`{one}`" for one in names.split(", "))
            shown.append(f"- {named}: {meaning.rstrip(';.')}")
            after += more
        shown.append(" ".join(after))
    lines[:] = "\n\n".join(shown).split("\n")


def _names_of(of: Any) -> set[str]:
    """Return the names of the parameters and fields of a class or function."""
    names = set(getattr(of, "__annotations__", ()))
    if callable(of):
        with contextlib.suppress(TypeError, ValueError):  # of a class that has no signature
            names |= {*inspect.signature(of).parameters}
    if isinstance(of, type):
        names.update(*(vars(base).get("__annotations__", ()) for base in of.__mro__))
        with contextlib.suppress(KeyError, OSError):  # of a class whose fields make it
            names |= {*re.findall(r"self\.(\w+)", inspect.getsource(vars(of)["__init__"]))}
    return {one for one in names if not one.startswith("_")}


def setup(app: Any) -> None:
    """Let the index become the navigation as it is read, and add to each page as it is written."""
    app.connect("source-read", _read)
    app.connect("doctree-read", _index_words)
    app.connect("build-finished", _write_first_page)
    app.connect("html-page-context", _add_metadata)
    app.connect("autodoc-process-signature", _without_any)
    app.connect("autodoc-process-docstring", _with_lists)
