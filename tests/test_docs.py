"""The pages: every link leads somewhere, every example runs, every command and option is there."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import json
import re
import shlex
import subprocess
import sys
import types
from importlib.metadata import metadata
from pathlib import Path

import click
import pytest
from celery.bin.celery import celery as celery_command
from prometheus_client import CollectorRegistry

from celery_redlock import Backoff
from celery_redlock.operate.cli.group import redlock as redlock_command
from celery_redlock.operate.metrics.counters import Metrics
from celery_redlock.tasks.settings.app import APP_SETTING
from celery_redlock.tasks.settings.conf import read_app
from celery_redlock.tasks.settings.options import OPTION
from celery_redlock.tasks.settings.task_config import compile_config
from celery_redlock.testing import EmbeddedNode
from docs import tables
from tests.pages import PAGES, ROOT, Block, blocks, name_of, on_servers

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
    "README.md": """
shelf = {"sku-7": 3}
def read(sku: str) -> int: return shelf[sku]
def write(sku: str, stock: int) -> None: shelf[sku] = stock
def update(sku: str, price: int, token: int) -> None: ...
""",
    "docs/configuration.md": """
import asyncio
async def settle_order(order_id: int) -> None: ...
""",
    "docs/when-this-is-not-enough.md": """
class Payments:
    def charge(self, amount: int, *, idempotency_key: str) -> None: ...
payments = Payments()
amount = invoice = 7
class self:
    class request:
        id = "7"
""",
}
ON_A_WORKER = {"docs/start.md", "docs/how-to.md"}  # tests/integration/test_how_to.py runs them
IN_PYTEST = {"docs/testing.md"}  # tests/testing/test_the_page.py runs it
WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]
RUN_HERE = [page for page in WITH_PYTHON if name_of(page) not in ON_A_WORKER | IN_PYTEST]


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-c", "docs"]
    command = [*build, "-d", str(tmp_path / "doctrees"), ".", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    index = (tmp_path / "site" / "docs" / "index.html").read_text()
    for page in PAGES:
        if page.name != "index.md":
            assert f"{page.stem}.html" in index, f"docs/index.md does not list {page.name}"
    api = (tmp_path / "site" / "docs" / "api.html").read_text()
    for line in (ROOT / "tests" / "public_api.txt").read_text().splitlines():
        if not line.startswith(" "):
            name = re.split(r"[(:]", line)[0].rpartition(".")[2]
            assert f'.{name}"' in api, f"docs/api.md leaves out {name}"


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
    (tmp_path / "tasks.py").write_text("from docs_start_md import take as take\n")
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
def test_the_examples_of_a_page_run(page: Path, nodes: list[EmbeddedNode], tmp_path: Path) -> None:
    program = on_servers(whole(page)[0], "memory://", [node.url for node in nodes])
    tree = ast.parse(program + "\napp.finalize()\n")
    tree.body = [asserted(statement) for statement in tree.body]
    (tmp_path / "page.py").write_text(ast.unparse(ast.fix_missing_locations(tree)))
    ran = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def commands(page: Path) -> list[str]:
    """Return the commands of a page: what stands after a prompt, and what stands in its text."""
    text = page.read_text(encoding="utf-8")
    shown = [
        line.removeprefix("$ ").partition("  #")[0]
        for block in blocks(page, "console")
        for line in block.code.splitlines()
        if line.startswith("$ ")
    ]
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
        else:
            assert words[:3] == ["docker", "compose", "up"], f"nobody checks {command!r}"
            assert f"\n  {words[-1]}:" in (ROOT / "docker-compose.yml").read_text(), command


def check_celery(words: list[str]) -> None:
    """Fail where Celery, or our part of its command line, does not take these words."""
    group: click.Group = celery_command
    if words[0] == "redlock":
        group, words = redlock_command, words[1:]
    if words and words[0] != "COMMAND":  # which stands for any
        assert words[0] in group.commands, words
        group.commands[words[0]].make_context(words[0], words[1:], resilient_parsing=True)


def check_extras(target: str) -> None:
    """Fail where what is to be installed is not known here, or has no such extra."""
    name, _, extras = target.rstrip("]").partition("[")
    known = metadata("celery_redlock" if name == "." else name).get_all("Provides-Extra", [])
    assert {extra for extra in extras.split(",") if extra} <= set(known), target


def option_rows() -> dict[str, str]:
    """Return the README's table of options: the default of each, by its name."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    table = page.partition("\n## Options\n")[2].partition("\n\nFor the whole app")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| `")]
    return {name: row[1] for row in rows for name in re.findall(r"`(\w+)`", row[0])}


def test_every_option_is_in_the_table_with_the_default_that_it_has() -> None:
    rows = option_rows()
    assert list(rows) == list(OPTION)
    app = read_app({"redlock_nodes": ["redis://a"]})
    rules = compile_config(app, "f", {}, inspect.signature(lambda: None)).options_for("celery")
    assert rows.pop("key") == "all arguments"
    for name, told in rows.items():
        default = eval(told.removesuffix(" s").strip("`"), {"Backoff": Backoff})
        assert default == getattr(rules, name), name


@pytest.mark.parametrize("page", tables.PAGES)
def test_the_tables_of_options_are_those_of_the_package(page: str) -> None:
    written = (ROOT / page).read_text(encoding="utf-8")
    assert written.count("<!-- end of table -->") == 2
    assert written == tables.renewed(page), "run python3 -m docs --tables"


def test_every_setting_of_the_app_is_on_the_first_page() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in APP_SETTING if not re.search(rf"\bredlock_{name}\b", page)] == []


def test_every_command_metric_and_event_is_on_its_page() -> None:
    operate = (ROOT / "docs" / "operate.md").read_text(encoding="utf-8")
    schemas = json.loads((ROOT / "docs" / "command-line.schema.json").read_text())["$defs"]
    for name, command in redlock_command.commands.items():
        assert re.search(rf"^\| `{name}\b", operate, re.MULTILINE), name
        assert "--json" in {flag for option in command.params for flag in option.opts}, name
        assert name in schemas
    registry = CollectorRegistry()
    with contextlib.closing(Metrics(registry)):
        counted = [family.name for family in registry.collect()]
    assert [name for name in counted if f"`{name}" not in operate] == []
    sources = "".join(path.read_text() for path in (ROOT / "celery_redlock").rglob("*.py"))
    states = (ROOT / "docs" / "states.md").read_text(encoding="utf-8")
    events = set(re.findall(r'"(task-[a-z-]+)"', sources)) - {"task-revoked"}  # Celery's own
    assert "task-lock-lost" in events
    assert [name for name in sorted(events) if f"`{name}`" not in states] == []


def test_every_key_and_script_is_on_the_page_of_the_lock() -> None:
    page = (ROOT / "docs" / "the-lock.md").read_text(encoding="utf-8")
    package = ROOT / "celery_redlock"
    sources = "".join(path.read_text() for path in package.rglob("*.py"))
    keys = set(re.findall(r"\}\}:([a-z]+)", sources))
    assert {"lock", "unique"} <= keys
    assert [key for key in sorted(keys) if f"`{{redlock}}:{key}" not in page] == []
    scripts = sorted(path.stem for path in package.rglob("*.lua") if path.stem != "server")
    assert [name for name in scripts if f"\n| `{name}` |" not in page] == []


def test_every_log_line_on_the_page_is_written_by_the_package() -> None:
    page = (ROOT / "docs" / "states.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| (?:INFO|WARNING|ERROR) \| `([^`]+)` \| `(\w+)` \|", page, re.MULTILINE)
    sources = "".join(path.read_text() for path in (ROOT / "celery_redlock").rglob("*.py"))
    assert len(told) > 10
    for text, event in told:
        assert f'"{text}"' in sources, text
        assert f'"{event}"' in sources, event


def test_the_tables_of_sizes_are_what_the_calculator_on_their_page_gives() -> None:
    page = ROOT / "docs" / "sizing.md"
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
