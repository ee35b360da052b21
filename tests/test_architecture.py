"""The house: three floors, imports only downward, few rooms, each with a name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import celery_redlock

PACKAGE = Path(celery_redlock.__file__).parent
# A module imports only modules named before it.
ORDER = [
    "errors",
    *(f"lock.{name}" for name in ("keys", "votes", "lease", "backoff", "clock", "nodes", "quorum")),
    *(f"lock.{name}" for name in ("wakeup", "watchdog", "session", "redlock", "inspection")),
    *(f"tasks.{name}" for name in ("settings", "contention", "runtime", "signals", "states")),
    *(f"tasks.{name}" for name in ("children", "uniqueness", "deferral", "waiting")),
    *(f"tasks.{name}" for name in ("request", "gate", "task")),
    *(f"operate.{name}" for name in ("lints", "control", "metrics", "cli")),
]
# They only re-export, so nothing below may import them.
FACES = ["", "lock", "tasks", "operate", "signals"]
BANNED = {"utils", "helpers", "manager", "base", "common", "misc"}
MODULES = sorted(
    path for path in PACKAGE.rglob("*.py") if "testing" not in path.relative_to(PACKAGE).parts
)


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports_of(path: Path) -> list[tuple[str, int]]:
    """Return every own module imported anywhere in a file, also late and for types alone."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            module = node.module or ""
            known = {name_of(p) for p in MODULES}
            for alias in node.names:
                inner = f"{module}.{alias.name}".removeprefix("celery_redlock.")
                found.append((f"celery_redlock.{inner}" if inner in known else module, node.lineno))
    prefix = "celery_redlock"
    own = [(n, line) for n, line in found if n == prefix or n.startswith(f"{prefix}.")]
    return [(name.removeprefix(prefix).lstrip("."), line) for name, line in own]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_only_modules_named_before_it(path: Path) -> None:
    name = name_of(path)
    rank = len(ORDER) if name in FACES else ORDER.index(name)
    for imported, line in imports_of(path):
        assert imported in ORDER[:rank], f"{path}:{line}: {name} imports {imported}"


def test_the_lock_floor_imports_no_celery() -> None:
    for path in (PACKAGE / "lock").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            outside = {name.partition(".")[0] for name in names}
            assert not outside & {"celery", "kombu", "billiard", "vine"}, path


def test_only_the_clock_knows_the_time() -> None:
    for path in MODULES:
        if name_of(path) != "lock.clock":
            nodes = ast.walk(ast.parse(path.read_text()))
            imported = [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
            assert "time" not in imported, f"{path} imports time: take a Clock"


def test_every_log_line_names_its_event() -> None:
    for path in MODULES:
        tree = ast.parse(path.read_text())
        logs = {
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "logger"
        }
        named = {
            word
            for call in ast.walk(tree)
            if isinstance(call, ast.Call) and "extra" in {key.arg for key in call.keywords}
            for word in (call.func, *call.args)  # also as the first word of a partial
        }
        lines = [log.lineno for log in logs - named]
        assert not lines, f"{path}:{lines}: give it extra={{'event': ...}}"


def test_every_room_has_a_name_and_there_are_few() -> None:
    assert not {path.stem for path in MODULES} & BANNED
    assert len([path for path in MODULES if path.stem != "__init__"]) <= 30


def test_nothing_in_the_package_imports_its_test_support() -> None:
    for path in MODULES:
        assert not [name for name, _ in imports_of(path) if name.startswith("testing")], path


def test_the_repository_stands_alone() -> None:
    root = PACKAGE.parent
    files = [*PACKAGE.rglob("*.py"), *root.glob("*.md"), *(root / "docs").rglob("*.md")]
    for path in files:
        assert "shared/" not in path.read_text(), path
