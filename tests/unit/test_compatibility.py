"""Names of Celery, kombu, billiard and redis-py that another version may not have."""

from __future__ import annotations

import ast
import inspect
import pkgutil
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
from tests import fork_server
from tests.celery_names import LESSER

PACKAGE = Path(celery_redlock.__file__).parent
SOURCES = [PACKAGE.parent / "celery_redlock_entry.py", *PACKAGE.rglob("*.py")]
NEEDED = (*compatibility.ANYWHERE, *compatibility.IN_BEAT, *compatibility.IN_WORKERS)
EVERY = (*NEEDED, *LESSER)
OTHERS = (celery, kombu, billiard, redis)
# what their reference documents; `celery.worker.request` is for its names without an underscore
PUBLIC = re.compile(
    r"celery|celery\.(app|app\.registry|app\.task|beat|bootsteps|exceptions|signals|states|worker)"
    r"|celery\.contrib\.django\.task|celery\.worker\.(control|request|state)"
    r"|kombu\.(common|entity|exceptions|messaging|pools|serialization)"
    r"|redis|redis\.(backoff|exceptions|retry|sentinel)"
)
# (file, name): ours, or Python's own
NOT_THEIRS = {
    ("django/fenced.py", "_meta"),
    ("lock/lock.py", "_session"),
    ("lock/platform/threads.py", "_epoll"),
    ("lock/platform/threads.py", "_thread"),
    ("lock/platform/threads.py", "_local"),
    *(("tasks/unique/start.py", name) for name in ("_name", "_session", "_token")),
}
# attributes that are set on objects of ours, or on a new ExceptionInfo
NOT_REPLACED = {
    *("app", "args", "capacity", "children", "eta", "exception", "limit", "lock", "messages"),
    *("name", "release", "traceback", "type", "wake"),
}
SKIPPED = {"asyncio", "commands", "contrib", "tests"}  # folders of theirs, to save time
LOADED = "import celery.app.trace, celery.worker.control, celery.worker.request, redis\n"
NO_NAME = "import celery._state\ndel celery._state._get_active_apps"
NO_MODULE = "import sys\nsys.modules['redis.connection'] = None"
NO_ATTRIBUTE = """
import celery.app.base
celery.app.base.Celery = type("Celery", (), {})
"""
OTHER_PARAMETERS = """
import celery._state
celery._state.connect_on_app_finalize = lambda callback, app: None
"""
NO_LESSER_NAMES = """
import redis.sentinel
from celery.worker.request import Request
vars(Request).get("_eta_timer_entry", ...) is ... or delattr(Request, "_eta_timer_entry")
redis.sentinel.Sentinel.__init__ = lambda self: None
"""
# `hide`: the package, and it alone, finds a module or class without a name
HIDE = """
import importlib, sys, types
def hide(path):
    module, _, names = path.partition(":")
    owner = importlib.import_module(module)
    *classes, name = names.split(".")
    for each in classes:
        owner = getattr(owner, each)
    def refuse(wanted):
        frame = sys._getframe(2)
        while frame.f_code.co_name == "of_object":
            frame = frame.f_back
        asks = frame.f_globals.get("__name__", "")
        if wanted == name and asks.startswith("celery_redlock"):
            raise AttributeError(name)
    def of_module(wanted):
        refuse(wanted)
        return getattr(owner, wanted)
    def of_object(self, wanted, inherited=None if not classes else owner.__getattribute__):
        refuse(wanted)
        return inherited(self, wanted)
    if classes:
        owner.__getattribute__ = of_object
        return
    clone = sys.modules[module] = types.ModuleType(module)
    clone.__dict__.update({key: one for key, one in vars(owner).items() if key != name})
    clone.__getattr__ = of_module
"""
LOCKED_RUN = """
import time
from celery import Celery
from celery.contrib.testing.worker import start_worker
from celery_redlock import LockedTask, current_lock
from celery_redlock.testing import fake_nodes, hold, use_nodes

app = Celery("shop", broker="memory://", backend="cache+memory://")
app.conf.redlock_tasks = {"adopted": {"key": "r"}}

@app.task(base=LockedTask, name="own", lock_key="r", acks_late=True, rate_limit="1000/s")
def own():
    return current_lock().held

@app.task(name="adopted", autoretry_for=(KeyError,))
def adopted():
    return current_lock().held

app.finalize()
with fake_nodes() as nodes, use_nodes(app, nodes):
    assert own.apply().get() and adopted.apply().get()
    with start_worker(app, pool="solo", perform_ping_check=False, loglevel="ERROR"):
        with hold("r", on=app):
            results = [own.delay(), adopted.delay()]
            end = time.monotonic() + 100
            while any(one.state != "DEFERRED" for one in results):
                assert time.monotonic() < end, [one.state for one in results]
                time.sleep(0.01)
        assert [one.get(timeout=100) for one in results] == [True, True]
print("held")
"""


def owner_of(path: str) -> object:
    """Return the module or class of a name, or the function whose code has it."""
    module, _, names = path.partition(":")
    return pkgutil.resolve_name(f"{module}:{names.rpartition('.')[0]}" if "." in names else module)


def run(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LOADED + script]
    return fork_server.run(command, timeout=120, package=False)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (NO_NAME, r"celery \S+: celery\._state\._get_active_apps=missing: "),
        (NO_MODULE, r"redis \S+: redis\.connection\.AbstractConnection\._sock=missing: "),
        (NO_ATTRIBUTE, r"celery \S+: celery\.app\.base\.Celery\._tasks=missing: "),
        (
            OTHER_PARAMETERS,
            r"celery \S+: celery\._state\.connect_on_app_finalize="
            r"\(callback, app\): must be \(callback\)",
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


@pytest.mark.parametrize(
    ("package", "version", "oldest"),
    [("celery", "5.5.3", "5.6"), ("celery", "4.4.7", "5.6"), ("redis", "4.6.0", "5.0")],
)
def test_an_older_version_than_the_package_requires_is_refused_at_the_import(
    package: str, version: str, oldest: str
) -> None:
    """An installer may leave out what a wheel requires, and an older Celery has all names."""
    done = run(f"import {package}\n{package}.__version__ = {version!r}\nimport celery_redlock")
    assert done.returncode
    assert done.stderr.splitlines()[-1].startswith(
        f"celery_redlock.errors.SettingsError: environment: {package}={version}: must be at least "
        f"{oldest}: pip install '{package}>={oldest}'"
    )


def test_the_oldest_versions_are_those_that_the_wheel_requires() -> None:
    text = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    required = dict(re.findall(r'^    "(\w+)(?:\[\w+\])?>=([\d.]+)",', text, re.MULTILINE)[:3])
    for package in compatibility.REQUIRED:
        assert compatibility.TESTED_VERSIONS[package][0] == required[package]


@pytest.mark.parametrize("version", ["5.6.0rc1", "5.6.0", "development"])
def test_a_version_that_is_not_older_is_imported(version: str) -> None:
    done = run(f"import celery\ncelery.__version__ = {version!r}\nimport celery_redlock")
    assert done.returncode == 0, done.stderr


OTHER_IN_WORKERS = """
from celery import Celery
from celery.exceptions import ImproperlyConfigured
from celery.worker.request import Request
Request._announce_revoked = lambda self, reason, expired: None
from celery_redlock import LockedTask

app = Celery("shop", broker="memory://", set_as_current=False)
app.conf.redlock_nodes = ["redis://127.0.0.1:1"]

@app.task(base=LockedTask, lock_key="r")
def own(): ...

app.finalize()
try:
    app.Worker(pool="solo")
except ImproperlyConfigured as error:
    print(error)
"""


def test_a_worker_looks_for_more_than_an_import() -> None:
    done = run(OTHER_IN_WORKERS)
    said = (
        r"celery \S+: celery\.worker\.request\.Request\._announce_revoked="
        r"\(reason, expired\): must be \(reason, terminated, signum, expired\)"
    )
    assert re.match(said, done.stdout), done.stderr


def test_the_doctor_looks_for_what_a_worker_looks_for() -> None:
    """So an operator sees it in an environment with a new Celery, before a worker starts there."""
    doctor = (
        "from celery_redlock.operate.cli.doctor import Examination\ntry:\n    Examination.of(app)"
    )
    assert OTHER_IN_WORKERS.count('try:\n    app.Worker(pool="solo")') == 1
    done = run(OTHER_IN_WORKERS.replace('try:\n    app.Worker(pool="solo")', doctor))
    assert "celery.worker.request.Request._announce_revoked=" in done.stdout, done.stderr


def test_the_comparison_says_how_many_private_names_there_are() -> None:
    page = (PACKAGE.parent / "docs" / "explanation" / "comparison.md").read_text(encoding="utf-8")
    (told,) = re.findall(r"(\d+) private names.*?one of (\d+).*?other (\d+)", page, re.DOTALL)
    assert [int(count) for count in told] == [len(EVERY), len(NEEDED), len(LESSER)]


NO_PACKAGE = """
import contextlib, sys
from celery import Celery
import celery_redlock_entry
sys.modules["celery_redlock.signals"] = None
app = Celery("shop", broker="memory://", set_as_current=False)
app.conf.redlock_tasks = {"vendor.*": {}}
for attempt in (app.finalize, lambda: app.Worker(pool="solo")):
    try:
        attempt()
    except ImportError as error:
        print("ended")
"""


def test_a_worker_ends_if_the_package_cannot_be_imported_that_is_to_lock_its_tasks() -> None:
    """Celery would log what a receiver raises, and the worker would run its tasks unlocked."""
    done = run(NO_PACKAGE)
    assert done.stdout == "ended\nended\n", done.stderr


# in modules that only other brokers, pools or processes need, or what Celery does in a function
NOT_HIDDEN = (
    *("kombu.transport.redis", "celery.backends.redis", "celery.beat", "redis.sentinel"),
    "kombu.connection:Connection.close",  # users call it as well; what is set there is private
    "celery._state:_task_stack",  # for tests
)
HIDDEN = [
    one.path
    for one in LESSER
    if not one.path.startswith(NOT_HIDDEN)
    if not inspect.isfunction(owner_of(one.path))
]


@pytest.mark.parametrize(
    "paths",
    [
        pytest.param(HIDDEN, id="all"),
        *(pytest.param([one], id=one, marks=pytest.mark.slow) for one in HIDDEN),
    ],
)
def test_a_name_that_is_not_needed_costs_neither_a_lock_nor_a_message(paths: list[str]) -> None:
    hidden = "".join(f"hide({path!r})\n" for path in paths)
    done = run(f"{HIDE}{hidden}{LOCKED_RUN}")
    assert (done.returncode, done.stdout) == (0, "held\n"), done.stderr


def test_lesser_names_of_other_versions_may_be_missing() -> None:
    done = run(f"{NO_LESSER_NAMES}\nimport celery_redlock")
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
    texts = {
        getattr(node.targets[0], "id", ""): node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "find":
            yield str(eval(compile(ast.Expression(node.args[0]), "", "eval"), {}, texts))
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
    of_other_versions = {re.split("[.:]", one.path)[-1] for one in LESSER if one.is_optional}
    names_of_theirs |= of_other_versions
    defined_by_them |= of_other_versions
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
    seen_elsewhere = ["celery._state:_task_stack", "redis.connection:parse_url"]
    assert sorted(unused) == seen_elsewhere, "take the others off the list"


@pytest.mark.every_celery
def test_each_name_of_the_lists_is_there() -> None:
    compatibility.check(NEEDED)
    missing = [one.path for one in LESSER if not one.is_optional and compatibility.difference(one)]
    assert missing == [], "the package does without these; look what takes their place"
