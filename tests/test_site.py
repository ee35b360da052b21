"""The site that Sphinx makes of the pages: its navigation, its search, what a browser shows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.browser import browser
from tests.conftest import eventually, made_once
from tests.pages import PAGES, ROOT, SITE, blocks, name_of, shown_commands

# what people call these things elsewhere, and so what they look for
SEARCHED = [
    "beat high availability", "concurrency limit", "concurrency per key", "cookbook", "drain",
    "duplicate periodic task", "etcd", "idempotent", "maintenance", "mock", "mutex", "overlap",
    "pause", "per tenant", "rate limit", "redbeat", "reentrant", "requests per second",
    "run one beat", "semaphore", "several beats", "singleton", "stop a task", "task_cls",
    "throttle", "zookeeper",
]  # fmt: skip
# words of others for these things, and the page that answers, or two
FIRST = {
    "acks_late": "explanation/celerys-default-and-here",
    "advisory lock": "explanation/pgbouncer-and-advisory-locks",
    "Celery default": "explanation/celerys-default-and-here",
    "coalesce": "how-to/debounce how-to/deduplicate-calls",
    "Django admin": "how-to/django-admin",
    "double click": "how-to/django",
    "downtime": "operations/change-nodes",
    "enqueue": "how-to/deduplicate-calls",
    "FIFO": "how-to/strict-order",
    "flaky": "how-to/test",
    "graceful shutdown": "how-to/kubernetes explanation/crashes-and-shutdown",
    "heartbeat": "how-to/long-running-tasks",
    "Kubernetes": "how-to/kubernetes",
    "keep last if active": "how-to/deduplicate-calls",
    "last save": "how-to/debounce",
    "last write wins": "how-to/deduplicate-calls",
    "leader election": "how-to/one-beat",
    "live": "reference/cli",
    "lock every task": "how-to/existing-base-class",
    "lock in a view": "how-to/django",
    "lock stuck": "how-to/clear-a-lock",
    "lost after kill": "how-to/after-a-crash",
    "mutex": "getting-started/first-locked-task",
    "mutual exclusion": "getting-started/first-locked-task",
    "one run at a time": "getting-started/first-locked-task",
    "per tenant": "how-to/rate-limit",
    "pgbouncer": "explanation/pgbouncer-and-advisory-locks how-to/postgresql",
    "PostgreSQL": "how-to/postgresql",
    "rate limit": "how-to/rate-limit",
    "restart of Redis": "how-to/after-a-crash",
    "rolling": "operations/change-nodes",
    "second click": "how-to/django",
    "semaphore": "how-to/limit-concurrency",
    "singleton": "how-to/deduplicate-calls",
    "stale write": "how-to/idempotent-writes",
    "third-party tasks": "how-to/existing-base-class",
    "stuck": "how-to/after-a-crash how-to/clear-a-lock",
    "throttle": "how-to/rate-limit",
    "transaction pooling": "explanation/pgbouncer-and-advisory-locks",
    "beat failover": "how-to/one-beat",
    "lock in a request": "how-to/lock-outside-tasks",
    "two beats": "how-to/one-beat",
    "two workers": "getting-started/first-locked-task",
    "unacked": "how-to/after-a-crash",
    "unique": "how-to/deduplicate-calls",
    "visibility timeout": "how-to/after-a-crash",
    "watch": "reference/cli",
    "worker killed": "explanation/crashes-and-shutdown",
}
SHOWN_FIRST = 3
# it is built once
pytestmark = [pytest.mark.pages, pytest.mark.xdist_group("site")]
HIGHEST = 6_000  # pixels of a page on a laptop
NOT_FOR_USERS = {"CHANGELOG", "CONTRIBUTING"}
# what each copy button of the consoles on a page puts into the clipboard, line by line
COPIED = """
const copied = [];
document.execCommand = () => copied.push(document.activeElement.value);
for (const button of document.querySelectorAll(".highlight-console button.copybtn")) button.click();
return copied.map(text => text.split("\\n").map(line => line.trim()));
"""
LAPTOP, PHONE = 1280, 390  # pixels: with the contents beside the text, and with the text alone
# how wide a page is, and where its contents begin
MEASURED = """
const contents = document.querySelector(".toc-tree li li a");
const left = contents && contents.getBoundingClientRect().left;
return [document.documentElement.scrollWidth, left];
"""
# what the search's own program finds, best first
FOUND = """
const asked = Search._parseQuery(arguments[0]);
return Search._performSearch(...asked).reverse().map(([page]) => page);
"""


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder of the site, which is built once, with warnings as errors."""

    def build(where: Path) -> None:
        doctrees = tmp_path_factory.mktemp("doctrees")
        command = [sys.executable, *SITE, "-d", str(doctrees), ".", str(where)]
        built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert built.returncode == 0, built.stderr

    return made_once(tmp_path_factory, "site", build)


@pytest.fixture(scope="session")
def search_index(site: Path) -> dict[str, Any]:
    """Give what the site's search looks into."""
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index: dict[str, Any] = json.loads(text.removeprefix("Search.setIndex(").rstrip(");\n"))
    return index


def find(index: dict[str, Any], query: str) -> set[str]:
    """Return the pages with all words of a query, as the site's search does: by their stems."""
    from sphinx.search.en import SearchEnglish  # imported late: it comes with this lane

    english = SearchEnglish({})
    stems = [
        english.stem(word)
        for word in re.findall(r"\w+", query.lower())
        if word not in english.stopwords
    ]
    assert stems, f"the search drops every word of {query!r}"
    pages = set.intersection(*(pages_with(index, stem) for stem in stems))
    return {index["docnames"][page] for page in pages}


def pages_with(index: dict[str, Any], stem: str) -> set[int]:
    """Return the numbers of the pages that have a word of this stem, in their text or a heading."""
    found = [index[words].get(stem, []) for words in ("terms", "titleterms")]
    return {page for one in found for page in ([one] if isinstance(one, int) else one)}


def test_the_site_lists_every_page(site: Path) -> None:
    index = (site / "docs" / "index.html").read_text(encoding="utf-8")
    for page in PAGES:
        if page.name != "index.md":
            assert f"{page.stem}.html" in index, f"docs/index.md does not list {page.name}"


def test_the_groups_of_a_list_are_those_of_the_navigation(site: Path) -> None:
    listed = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    guides = listed.partition("\n## How-to guides\n")[2].partition("\n## ")[0]
    groups = re.findall(r"^\*\*(.+)\*\*$", guides, re.MULTILINE)
    html = (site / "docs" / "index.html").read_text(encoding="utf-8")
    captions = re.findall(r'class="caption-text">(?:How-to guides: )?([^<]+)<', html)
    assert len(groups) > 4
    assert [group for group in groups if group.lower() not in captions] == []
    assert "How-to guides" not in captions  # a list without a group


def test_the_first_page_of_the_site_is_its_index(site: Path) -> None:
    first = (site / "index.html").read_text(encoding="utf-8")
    (base,) = re.findall(r'<base href="([^"]+)">', first)
    index = (site / base).read_text(encoding="utf-8")
    assert re.sub("<base [^>]+>", "", first) == index
    assert len(re.findall('<div class="sd-card ', index)) == 4
    leads_to = [link for link in re.findall(r'href="([^":#?]+)', index) if link.endswith(".html")]
    assert [link for link in leads_to if not (site / base).parent.joinpath(link).is_file()] == []


def test_the_reference_shows_every_public_name_and_no_type_that_says_nothing(site: Path) -> None:
    api = (site / "docs" / "reference" / "python-api.html").read_text(encoding="utf-8")
    for line in (ROOT / "tests" / "public_api.txt").read_text().splitlines():
        if not line.startswith(" "):
            name = re.split(r"[(:]", line)[0].rpartition(".")[2]
            assert f'.{name}"' in api, f"docs/reference/python-api.md leaves out {name}"
    shown = re.sub(r"<[^>]+>", "", api)
    assert "Parameters:" not in shown
    assert re.findall(r"\w+ ?\(Any\)|\w+: Any\b|→ Any\b", shown) == []


def test_the_python_api_lists_parameters_and_tells_developers_nothing(site: Path) -> None:
    api = (site / "docs" / "reference" / "python-api.html").read_text(encoding="utf-8")
    told = [re.sub(r"<[^>]+>", "", one) for one in re.findall(r"<p>(.*?)</p>", api, re.DOTALL)]
    assert len(told) > 200
    assert [one for one in told if re.search(r"[.;]\s\w+:\s|\.(?:md|py)\b|`", one)] == []
    for name in ("node_timeout", "on_lost", "is_sent", "unique_until", "task_id"):
        assert re.search(rf'<li><p>[^:]*<span class="pre">{name}</span></code>[^:]*: ', api), name


@pytest.mark.parametrize("query", SEARCHED)
def test_the_search_of_the_site_finds_the_words_of_the_field(
    search_index: dict[str, Any], query: str
) -> None:
    found = find(search_index, query) - NOT_FOR_USERS
    assert found, f"no page has {query!r}: say it on the page where a user would look for it"
    if " " in query:  # the search does not care whether they stand side by side; a reader does
        texts = [(ROOT / f"{page}.md").read_text(encoding="utf-8") for page in found]
        assert any(query in " ".join(text.split()).lower() for text in texts), query


def test_every_page_of_the_site_says_what_it_is_about(site: Path) -> None:
    described = {}
    for page in PAGES:
        html = (site / page.relative_to(ROOT).with_suffix(".html")).read_text(encoding="utf-8")
        for name in ("og:title", "og:type", "og:site_name"):
            assert f'<meta property="{name}" content="' in html, name_of(page)
        (told,) = re.findall(r'<meta name="description" content="([^"]+)">', html)
        assert f'<meta property="og:description" content="{told}">' in html
        described[name_of(page)] = told
    assert len(set(described.values())) == len(described), "two pages say the same of themselves"


def test_the_foot_of_a_page_names_the_project_and_its_licence(site: Path) -> None:
    html = (site / "docs" / "index.html").read_text(encoding="utf-8")
    foot = re.sub(
        r"<[^>]+>", "", html.partition('class="bottom-of-page"')[2].partition("</footer>")[0]
    )
    about = metadata("celery_redlock")
    for word in (about["Name"], about["Summary"], about["License-Expression"], "Copyright"):
        assert word in foot
    assert "Made with" not in html


def test_the_site_has_a_picture_of_its_own_for_a_browsers_tab(site: Path) -> None:
    page = site / "docs" / "index.html"
    (icon,) = re.findall(r'<link rel="(?:shortcut )?icon" href="([^"?]+)', page.read_text())
    assert ET.parse(page.parent / icon).getroot().tag.endswith("svg")


@pytest.mark.slow
def test_the_copy_button_of_a_console_takes_its_commands_alone(site: Path, tmp_path: Path) -> None:
    with browser(tmp_path / "chromium") as chrome:
        for page in PAGES:
            chrome.get((site / page.relative_to(ROOT).with_suffix(".html")).as_uri())
            copied = chrome.execute_script(COPIED)
            told = [shown_commands(block) for block in blocks(page, "console")]
            assert copied == told, name_of(page)


@pytest.mark.slow
def test_the_search_shows_the_page_that_answers_among_the_first(site: Path, tmp_path: Path) -> None:
    with browser(tmp_path / "chromium") as chrome:
        chrome.get((site / "search.html").as_uri() + "?q=lock")
        eventually(lambda: chrome.execute_script("return Search.hasIndex()"))
        found = {query: chrome.execute_script(FOUND, query)[:SHOWN_FIRST] for query in FIRST}
    missed = {
        query: pages
        for query, pages in found.items()
        if not {f"docs/{page}" for page in FIRST[query].split()} <= {*pages}
    }
    assert missed == {}, "say the word in the page's last line: <!-- search: word, word -->"


@pytest.mark.slow
@pytest.mark.parametrize("width", [LAPTOP, PHONE])
def test_no_page_is_wider_than_the_screen_or_too_long_and_a_laptop_shows_its_contents(
    site: Path, tmp_path: Path, width: int
) -> None:
    screen = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width == PHONE}
    with browser(tmp_path / "chromium") as chrome:
        chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        for page in PAGES:
            chrome.get((site / page.relative_to(ROOT).with_suffix(".html")).as_uri())
            taken, contents = chrome.execute_script(MEASURED)
            assert taken == width, f"{name_of(page)} is {taken} wide"
            if contents is not None and width == LAPTOP:
                assert width / 2 < contents < width, f"{name_of(page)} hides its contents"
            if width == LAPTOP and page.parent.name != "reference":  # which is looked up, not read
                height = chrome.execute_script("return document.documentElement.scrollHeight")
                assert height <= HIGHEST, f"{name_of(page)} is {height} high: divide it"
