"""The pages: every link leads somewhere, every example runs, every command and option is there."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import json
import re
import shlex
import subprocess
import sys
import tokenize
import types
import xml.etree.ElementTree as ET
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from celery.bin.celery import celery as celery_command
from django.core.management import get_commands as django_commands
from prometheus_client import CollectorRegistry
from sphinx.search.en import SearchEnglish

from celery_redlock.operate.cli.group import redlock as redlock_command
from celery_redlock.operate.metrics import Metrics
from tests.browser import browser
from tests.conftest import Nodes, made_once
from tests.integration.test_how_to import GUIDES
from tests.pages import PAGES, ROOT, SITE, Block, blocks, name_of, on_servers

GIVEN = """
from typing import Any
from celery import Celery, shared_task
from celery_redlock import Backoff, LockedTask, LockTaken, Redlock, current_lock
app = Celery("pages", broker="redis://localhost")
app.conf.redlock_nodes = ["redis://a", "redis://b", "redis://c"]
shop: Any = None
search: Any = None
"""
# what the examples of a page call, that is the reader's own
OWN = {
    "docs/explanation/when-not-to-use-a-lock.md": """
class Payments:
    def charge(self, amount: int, *, idempotency_key: str) -> None: ...
payments = Payments()
amount = invoice = 7
class self:
    class request:
        id = "7"
"""
}
# tests/integration/test_how_to.py runs them
ON_A_WORKER = {
    "docs/getting-started/first-locked-task.md",
    *(f"docs/how-to/{name}.md" for name in GUIDES),
}
# tests/integration/test_frameworks.py runs these folders of examples/, and mypy reads them
FROM_EXAMPLES = {
    "docs/how-to/django.md": "django_shop",
    "docs/how-to/existing-base-class.md": "own_base_class",
    "docs/how-to/fastapi.md": "fastapi_shop",
    "docs/how-to/flask.md": "flask_shop",
}
IN_PYTEST = {"docs/how-to/test.md"}  # tests/testing/test_the_page.py runs it
WITH_PYTHON = [
    page for page in PAGES if blocks(page, "python") and name_of(page) not in FROM_EXAMPLES
]
RUN_HERE = [page for page in WITH_PYTHON if name_of(page) not in ON_A_WORKER | IN_PYTEST]


# what people call these things elsewhere, and so what they look for
SEARCHED = [
    "concurrency limit", "concurrency per key", "cookbook", "idempotent", "mock", "mutex",
    "overlap", "per tenant", "rate limit", "reentrant", "semaphore", "singleton", "task_cls",
    "throttle",
]  # fmt: skip
CODE_COLUMNS = 76
NOT_FOR_USERS = {"CHANGELOG", "CONTRIBUTING"}
# what each copy button of the consoles on a page puts into the clipboard, line by line
COPIED = """
const copied = [];
document.execCommand = () => copied.push(document.activeElement.value);
for (const button of document.querySelectorAll(".highlight-console button.copybtn")) button.click();
return copied.map(text => text.split("\\n").map(line => line.trim()));
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


def whole(page: Path) -> tuple[str, list[Block]]:
    """Return the examples of a page as one program: what is given comes first."""
    found = blocks(page, "python")
    own = OWN.get(name_of(page), "")
    return "\n".join([GIVEN, own, *(block.code for block in found)]), found


@pytest.mark.slow
def test_the_examples_of_every_page_have_the_right_types(tmp_path: Path) -> None:
    files = []
    for page in WITH_PYTHON:
        file = tmp_path / (re.sub(r"\W", "_", name_of(page)) + ".py")
        file.write_text(whole(page)[0])
        files.append(file.name)
    (tmp_path / "tasks.py").write_text(
        "from docs_getting_started_first_locked_task_md import take as take\n"
    )
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\ncheck_untyped_defs = True\nignore_missing_imports = True\n"
        # one page shows several ways to write the same thing
        "disable_error_code = no-redef, method-assign\n"
    )
    mypy = [sys.executable, "-m", "mypy", "--cache-dir", str(ROOT / ".mypy_cache" / "pages")]
    checked = subprocess.run(
        [*mypy, *files], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def asserted(statement: ast.stmt) -> ast.stmt:
    """Return a comparison that stands alone, as it does to tell the reader, as an assertion."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Compare):
        return ast.Assert(statement.value)
    return statement


@pytest.mark.parametrize("page", RUN_HERE, ids=name_of)
def test_the_examples_of_a_page_run(page: Path, nodes: Nodes, tmp_path: Path) -> None:
    program = on_servers(whole(page)[0], "memory://", [node.url for node in nodes])
    tree = ast.parse(program + "\napp.finalize()\n")
    tree.body = [asserted(statement) for statement in tree.body]
    (tmp_path / "page.py").write_text(ast.unparse(ast.fix_missing_locations(tree)))
    ran = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def too_wide(page: Path) -> list[str]:
    """Return the lines of Python and commands of a page that a reader has to scroll."""
    return [
        f"{number}: {line}"
        for language in ("python", "console")
        for block in blocks(page, language)
        for number, line in enumerate(block.code.splitlines(), block.line)
        if len(line) > CODE_COLUMNS and (language == "python" or is_typed(line))
    ]


def is_typed(line: str) -> bool:
    """Return whether a console's line is a command; one with a quoted program is pasted."""
    return line.startswith("$ ") and "'" not in line


def comments_behind_code(block: Block) -> list[str]:
    """Return the lines of a block with a comment behind code: a narrow page cuts it off."""
    tokens = tokenize.generate_tokens(io.StringIO(block.code).readline)
    return [
        f"{block.line + token.start[0] - 1}: {token.line.strip()}"
        for token in tokens
        if token.type == tokenize.COMMENT and token.line[: token.start[1]].strip()
    ]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_code_of_a_page_is_narrow_and_has_its_comments_above(page: Path) -> None:
    assert too_wide(page) == []
    found = [line for block in blocks(page, "python") for line in comments_behind_code(block)]
    assert found == []


@pytest.mark.parametrize("page", FROM_EXAMPLES)
def test_the_blocks_of_a_page_are_pieces_of_its_example(page: str) -> None:
    folder = ROOT / "examples" / FROM_EXAMPLES[page]
    files = [file.read_text(encoding="utf-8") for file in sorted(folder.rglob("*.py"))]
    found = blocks(ROOT / page, "python")
    assert found
    for block in found:
        place = f"{page}:{block.line}"
        assert any(block.code in file for file in files), f"{place} is in no file of {folder.name}"


def shown_commands(block: Block) -> list[str]:
    """Return the commands of a console, without what is said of each behind it."""
    lines = [line for line in block.code.splitlines() if line.startswith("$ ")]
    return [line.removeprefix("$ ").partition("  #")[0].strip() for line in lines]


def commands(page: Path) -> list[str]:
    """Return the commands of a page: what stands after a prompt, and what stands in its text."""
    text = page.read_text(encoding="utf-8")
    shown = [command for block in blocks(page, "console") for command in shown_commands(block)]
    told = re.findall(r"`((?:celery -A|python3? -m|pip install|make|docker compose)\s[^`]+)`", text)
    return [" ".join(command.split()) for command in [*shown, *told]]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name_of)
def test_every_command_of_a_page_is_there(page: Path) -> None:
    for command in commands(page):
        words = shlex.split(command)
        if words[0] == "celery":
            check_celery(words[3:])
        elif words[:2] in (["python", "-m"], ["python3", "-m"]):
            assert importlib.util.find_spec(words[2]), command
        elif words[:2] == ["pip", "install"]:
            for target in (word for word in words[2:] if word != "-e"):
                check_extras(target)
        elif words[0] == "make":
            assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text(), command
        elif words[:2] == ["docker", "compose"]:
            assert words[2] in ("stop", "up"), command
            check_services([word for word in words[3:] if not word.startswith("--")])
        else:
            check_readers_own(page, words)


def check_readers_own(page: Path, words: list[str]) -> None:
    """Fail where a command that runs code of the reader's own is not known here."""
    if words[:2] == ["python", "manage.py"]:
        assert words[2] in django_commands(), words
    elif words[0] == "python":
        assert f"`{words[1]}`" in page.read_text(encoding="utf-8"), words
    elif words[0] in ("flask", "uvicorn"):
        assert importlib.util.find_spec(words[0]), words
    else:
        assert words[0] == "curl", f"nobody checks {words!r}"
        assert words[-1].startswith("http://127.0.0.1:"), words


def check_celery(words: list[str]) -> None:
    """Fail where Celery, or our part of its command line, does not take these words."""
    group: click.Group = celery_command
    if words[0] == "redlock":
        group, words = redlock_command, words[1:]
    if words and words[0] not in ("COMMAND", "--help"):  # the first stands for any
        assert words[0] in group.commands, words
        group.commands[words[0]].make_context(words[0], words[1:], resilient_parsing=True)


def check_services(names: list[str]) -> None:
    """Fail where a service is not in both compose files: the repository's, and a beginner's."""
    install = blocks(ROOT / "docs" / "getting-started" / "install.md", "yaml")
    theirs = yaml.safe_load(install[0].code)["services"]
    ours = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert {name for name in names if name != "shop"} <= set(theirs) & set(ours)
    assert set(names) <= set(ours)


def check_extras(target: str) -> None:
    """Fail where what is to be installed is not known here, or has no such extra."""
    name, _, extras = target.rstrip("]").partition("[")
    known = metadata("celery_redlock" if name == "." else name).get_all("Provides-Extra", [])
    assert {extra for extra in extras.split(",") if extra} <= set(known), target


def test_every_command_metric_and_event_is_on_its_page() -> None:
    commands = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    operate = (ROOT / "docs" / "operations" / "monitoring.md").read_text(encoding="utf-8")
    schemas = json.loads((ROOT / "docs" / "command-line.schema.json").read_text())["$defs"]
    for name, command in redlock_command.commands.items():
        section = commands.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        for shown in (f"redlock {name} --help", f"redlock {name}( .*)?(?<!--help)\n.+\n"):
            assert re.search(rf"^\$ celery -A shop {shown}", section, re.MULTILINE), name
        assert "--json" in {flag for option in command.params for flag in option.opts}, name
        assert name in schemas
    registry = CollectorRegistry()
    with contextlib.closing(Metrics(registry)):
        counted = [family.name for family in registry.collect()]
    assert [name for name in counted if f"`{name}" not in operate] == []
    sources = "".join(path.read_text() for path in (ROOT / "celery_redlock").rglob("*.py"))
    states = (ROOT / "docs" / "reference" / "states-and-events.md").read_text(encoding="utf-8")
    events = set(re.findall(r'"(task-[a-z-]+)"', sources)) - {"task-revoked"}  # Celery's own
    assert "task-lock-lost" in events
    assert [name for name in sorted(events) if f"`{name}`" not in states] == []


def test_every_key_and_script_is_on_the_page_of_the_lock() -> None:
    page = (ROOT / "docs" / "explanation" / "safety-proof.md").read_text(encoding="utf-8")
    package = ROOT / "celery_redlock"
    sources = "".join(path.read_text() for path in package.rglob("*.py"))
    keys = set(re.findall(r"\}\}:([a-z]+)", sources))
    assert {"lock", "unique"} <= keys
    assert [key for key in sorted(keys) if f"`{{redlock}}:{key}" not in page] == []
    scripts = sorted(path.stem for path in package.rglob("*.lua") if path.stem != "server")
    assert [name for name in scripts if f"\n| `{name}` |" not in page] == []


def test_the_tables_of_sizes_are_what_the_calculator_on_their_page_gives() -> None:
    page = ROOT / "docs" / "operations" / "sizing.md"
    module = types.ModuleType("sizing")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "sizing", module)  # dataclasses look their module up
        exec(blocks(page, "python")[0].code, module.__dict__)
    rows = [
        [cell.strip().replace(",", "") for cell in line.strip("|").split("|")]
        for line in page.read_text(encoding="utf-8").splitlines()
        if re.match(r"\| [\d.,]+( %)? \|", line)
    ]
    loads = [[float(cell) for cell in row] for row in rows if "%" not in row[0]]
    assert len(loads) == 5
    for tasks, *told, sets in loads:
        node = module.node_for(module.Load(tasks=tasks))
        gives = [node.scripts, node.cores, node.megabytes, node.megabits, node.connections]
        assert told == pytest.approx(gives, rel=0.1), tasks
        assert sets == module.sets_for(module.Load(tasks=tasks))
    shares = [
        [1 - float(cell.removesuffix(" %")) / 100 for cell in row] for row in rows if "%" in row[0]
    ]
    assert len(shares) == 2
    for node, *told in shares:
        gives = [1 - module.available(count, 1 - node) for count in (1, 3, 5)]
        assert told == pytest.approx(gives, rel=0.02)
