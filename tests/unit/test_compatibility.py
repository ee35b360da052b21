"""Names of Celery, kombu, billiard and redis-py that another version may not have."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import billiard
import celery
import celery.beat
import celery.worker.request
import kombu
import pytest
import redis

import celery_redlock
from celery_redlock import compatibility
from celery_redlock.beat import WrappedScheduler
from celery_redlock.tasks.worker_request import Request

PACKAGE = Path(celery_redlock.__file__).parent
SOURCES = [PACKAGE.parent / "celery_redlock_entry.py", *PACKAGE.rglob("*.py")]
EVERY = (*compatibility.ANYWHERE, *compatibility.IN_BEAT, *compatibility.IN_WORKERS)
OTHERS = (celery, kombu, billiard, redis)
# what their reference documents; `celery.worker.request` is for its names without an underscore
PUBLIC = re.compile(
    r"celery|celery\.(app|app\.registry|app\.task|beat|bootsteps|exceptions|signals|states|worker)"
    r"|celery\.contrib\.django\.task|celery\.worker\.(control|request|state)"
    r"|kombu\.(common|entity|exceptions|messaging|pools|serialization)"
    r"|redis|redis\.(backoff|retry|sentinel)"
)
# (file, name): ours, or Python's own
NOT_THEIRS = {
    ("lock/lock.py", "_session"),
    ("lock/platform/threads.py", "_epoll"),
    ("lock/platform/threads.py", "_thread"),
    ("lock/platform/threads.py", "_local"),
}
# attributes that are set on objects of ours, or on a new ExceptionInfo
NOT_REPLACED = {
    *("app", "args", "capacity", "children", "eta", "exception", "limit", "lock", "name"),
    *("release", "traceback", "type", "wake"),
}
SKIPPED = {"asyncio", "commands", "contrib", "tests"}  # folders of theirs, to save time
LOADED = "import celery.app.trace, celery.worker.control, celery.worker.request, redis\n"
NO_NAME = "import celery._state\ndel celery._state.get_current_worker_task"
NO_MODULE = "import sys\nsys.modules['kombu.transport.native_delayed_delivery'] = None"
NO_ATTRIBUTE = """
import celery.app.base
celery.app.base.Celery = type("Celery", (), {})
"""
OTHER_PARAMETERS = """
from celery.worker.request import Request
def _announce_revoked(self, reason, expired): ...
Request._announce_revoked = _announce_revoked
"""
NO_OPTIONAL_NAMES = """
import redis.sentinel
from celery.worker.request import Request
vars(Request).get("_eta_timer_entry", ...) is ... or delattr(Request, "_eta_timer_entry")
redis.sentinel.Sentinel.__init__ = lambda self: None
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LOADED + script]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (NO_NAME, r"celery \S+: celery\._state\.get_current_worker_task=missing: "),
        (NO_MODULE, r"kombu \S+: kombu\.transport\.native_delayed_delivery\.\w+=missing: "),
        (NO_ATTRIBUTE, r"celery \S+: celery\.app\.base\.Celery\._finalize_mutex=missing: "),
        (
            OTHER_PARAMETERS,
            r"celery \S+: celery\.worker\.request\.Request\._announce_revoked="
            r"\(reason, expired\): must be \(reason, terminated, signum, expired\)",
        ),
    ],
    ids=["a name", "a module", "an attribute of an instance", "parameters"],
)
@pytest.mark.parametrize("module", ["celery_redlock", "celery_redlock.tasks.task"])
def test_a_required_name_that_is_not_there_is_named_at_the_import(
    broken: str, said: str, module: str
) -> None:
    catch = (
        "from celery.exceptions import ImproperlyConfigured\n"
        f"for _ in range(2):\n try:\n  import {module}\n"
        " except ImproperlyConfigured as error:\n  print(type(error).__name__, error)"
    )
    done = run(f"{broken}\n{catch}")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == second
    assert re.match(f"SettingsError {said}", first), first
    assert re.search(r"It works with \w+ \d+\.\d+ to \d+\.\d+", first), first


def test_an_optional_name_may_be_missing() -> None:
    done = run(f"{NO_OPTIONAL_NAMES}\nimport celery_redlock")
    assert done.returncode == 0, done.stderr


def names_given(tree: ast.AST) -> set[str]:
    """Return the names that a source defines, or assigns to."""
    found = defined_in(tree)
    for node in ast.walk(tree):
        if isinstance(getattr(node, "ctx", None), ast.Store):
            found.add(getattr(node, "attr", getattr(node, "id", "")))
    return found


def defined_in(tree: ast.AST) -> set[str]:
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_uses(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Give each private name that is an attribute, or stands in a text. own: those of `self`."""
    slots = {
        each
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__slots__"
        for each in ast.walk(node.value)
    }
    for node in ast.walk(tree):
        name = None
        if isinstance(node, ast.Attribute) and not (is_self(node.value) and node.attr in own):
            name = node.attr
        elif isinstance(node, ast.Constant) and node not in slots:
            name = node.value
        if isinstance(name, str) and re.fullmatch(r"_[a-z]\w*", name):
            yield name


def replaced_in(tree: ast.AST) -> set[str]:
    """Return the names that are assigned to another object than `self`."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if not is_self(node.value) and not node.attr.startswith("__")
    }


def internal_imports(tree: ast.AST) -> Iterator[str]:
    """Give "module:name" of what is imported of modules that their reference leaves out."""
    modules = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        if node.module.partition(".")[0] not in {one.__name__ for one in OTHERS}:
            continue
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            if inner in sys.modules:  # a module itself
                modules[alias.asname or alias.name] = inner
            elif not PUBLIC.fullmatch(node.module) or alias.name.startswith("_"):
                yield f"{node.module}:{alias.name}"
    for node in ast.walk(tree):
        module = isinstance(node, ast.Attribute) and modules.get(getattr(node.value, "id", ""))
        if isinstance(node, ast.Attribute) and module and not PUBLIC.fullmatch(module):
            yield f"{module}:{node.attr}"


def overridden() -> set[str]:
    """Return the names of Celery's requests and schedulers that ours have as well."""
    pairs = (celery.worker.request.Request, Request), (celery.beat.Scheduler, WrappedScheduler)
    found = {name for theirs, ours in pairs for name in {*dir(theirs)} & {*vars(ours)}}
    return {name for name in found if not name.startswith("__")}


def test_the_list_has_each_private_name_that_the_package_uses_and_no_other_one() -> None:
    names_of_theirs, defined_by_them = set(), set()
    for package in OTHERS:
        folder = Path(package.__file__).parent
        for path in folder.rglob("*.py"):
            if not SKIPPED & {*path.relative_to(folder).parts}:
                tree = ast.parse(path.read_text(encoding="utf-8"))
                names_of_theirs |= names_given(tree)
                defined_by_them |= defined_in(tree)
    # other versions of theirs have those that are optional
    names_of_theirs |= {re.split("[.:]", one.path)[-1] for one in EVERY if one.optional}
    names, imports = overridden(), set()
    for path in SOURCES:
        if "testing" in path.parts or path.stem == "compatibility":
            continue
        tree = ast.parse(path.read_text())
        file = path.relative_to(PACKAGE).as_posix() if PACKAGE in path.parents else path.name
        own = set() if file == "tasks/worker_request.py" else names_given(tree)
        used = {name for name in private_uses(tree, own) if (file, name) not in NOT_THEIRS}
        names |= used & names_of_theirs
        names |= replaced_in(tree) & defined_by_them - NOT_REPLACED
        imports |= set(internal_imports(tree))
    paths = {one.path for one in EVERY}
    assert len(paths) == len(EVERY)
    last = {re.split("[.:]", path)[-1] for path in paths}
    unlisted = sorted({*(imports - paths), *(names - last)})
    assert unlisted == [], "put them on the list of celery_redlock/compatibility.py"
    unused = {path for path in paths - imports if re.split("[.:]", path)[-1] not in names}
    assert sorted(unused) == ["celery._state:_task_stack"], "take the others off the list"


def test_each_name_of_the_list_is_there_unless_it_is_optional() -> None:
    compatibility.check(compatibility.ANYWHERE)
    compatibility.check(compatibility.IN_BEAT)
    compatibility.check(compatibility.IN_WORKERS)
