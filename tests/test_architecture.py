"""The house: three floors, imports only downward, few rooms, each with a name."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

import celery_redlock
from celery_redlock.compatibility import ANYWHERE, IN_BEAT, IN_WORKERS
from tests.celery_names import LESSER
from tests.private_names import PrivateNames, uses_in
from tests.reruns import MAY_RUN_AGAIN
from tests.sources import ONE_PROCESS, nodes_of, text_of, tree_of

pytestmark = ONE_PROCESS
PACKAGE = Path(celery_redlock.__file__).parent
TESTS = Path(__file__).parent
# A group imports only groups named before it, and itself without a circle. The first group that
# matches a module is its own: a folder of the lock, a file of its model, one of its faces.
GROUPS: list[tuple[str, list[str]]] = [
    ("errors", ["anchors", "label", "errors", "compatibility"]), ("platform", ["lock.platform.*"]),
    ("transport", ["lock.transport.*"]), ("model", ["lock.model.*"]), ("server", ["lock.server.*"]),
    ("postgres", ["lock.postgres.*"]),
    ("engine", ["lock.engine.*"]), ("face of the lock", ["lock.*"]),
]  # fmt: skip
# Above the lock each folder is a group, and each file beside the folders is one, too.
ORDER = [
    *("tasks.arguments", "tasks.settings.*", "tasks.per_app", "tasks.declaration", "tasks.body"),
    *("signals", "tasks.reporting", "tasks.children.*", "tasks.delivery.*"),
    *("tasks.unique.*", "tasks.waiting.*", "tasks.recovery.*", "tasks.execution.*"),
    *("tasks.untried", "tasks.worker_request"),
    *(
        "tasks.wrapping",
        "tasks.typed_options",
        "tasks.sending",
        "tasks.task",
        "tasks.startup",
    ),
    *(
        "operate.lints",
        "operate.pass_through",
        "operate.start_report",
        "operate.works_with",
        "operate.control",
        "operate.metrics",
        "operate.tracing",
    ),
    *("operate.drill.*", "operate.cli.*", "wiring", "beat", "sqlalchemy", "django.*"),
]
GROUPS += [(name, [name]) for name in ORDER]
# They only re-export, so nothing below may import them.
FACES = [
    "",
    *(
        "lock",
        "lock.platform",
        "lock.transport",
        "lock.model",
        "lock.server",
        "lock.engine",
        "lock.postgres",
    ),
    *("tasks", "tasks.settings", "tasks.children", "tasks.delivery", "tasks.unique"),
    *("tasks.waiting", "tasks.recovery", "tasks.execution"),
    *("operate", "operate.drill", "operate.cli", "django"),
]
# Folders that are small and say what lives there, relative to the package.
FOLDERS = [
    "lock", *(f"lock/{name}" for name in ("platform", "transport", "model", "server", "engine")),
    "lock/postgres",
    "tasks", *(f"tasks/{name}" for name in ("settings", "children", "delivery", "unique")),
    *("tasks/waiting", "tasks/recovery", "tasks/execution"),
    *("operate", "operate/cli", "operate/drill"), "django", "testing",
]  # fmt: skip
# Public functions with more parameters than others: each is an option.
PUBLIC_OPTIONS = {
    ("lock/client.py", "Redlock.lock"),
    ("tasks/unique/send.py", "send_unique"),
    ("testing/servers.py", "WorkerProcess.__init__"),
}
# Names that the lock once had, each for something that has a standard term.
OLD_WORDS = re.compile(
    "Grip|Holding|Claim|Spot|Terms|Setup|Context|Here|Wire|Seat|Bell|Alarm|Ear|Listener|Debt|Left|"
    "Mark|GrantRound|Refusal|Refused|Greeting|Vigil|Errand|Served|Renewable|Batch|Renewal|Orphaned|"
    "let_go|give_back|hand_over|owe|pay|doubt|recognize|greet|judge|attend|hurry|mend|tidy|vouch|"
    "answered|failed|packed|masked|advised|in_short|strike|request_of|bulk|silence"
)
POINT = "stops or enters a step that others only see the result of"
# The private names of the package that tests use, and why.
PRIVATE_NAMES_IN_TESTS: dict[str, tuple[str, str]] = {
    "conftest.py": ("_is_worker", "puts back what a worker changes in its process"),
    "contract/test_interleavings.py": ("_counters _give_up", POINT),
    "contract/test_redlock.py": ("_lease _leases", "tells which lock a request is of"),
    "contract/test_sending.py": ("_dump_pydantic_arguments", "is Celery's, not ours"),
    "contract/test_waiting_room.py": ("_limit_move_to_pool", "is Celery's, not ours"),
    "contract/test_wakeup.py": ("_ends _run", POINT),
    "integration/test_call_styles.py": (
        "_redlock_track_started",
        "what a task class keeps for its subclasses",
    ),
    "integration/storm/queue.py": ("_put", "is kombu's, not ours"),
    "unit/transport/test_nodes.py": ("_sockets", "notes which calls keep the GIL"),
    "integration/test_metrics.py": ("_exporter", "sees in a script that counting is on"),
    "integration/test_start.py": ("_get_active_apps", "is Celery's, not ours"),
    "simulation/clients.py": (
        "_dropped",
        "tells the invariants what a client knows, by a clock of its own",
    ),
    "simulation/mutants.py": (
        "_check_loss _clock _confirm_others _core _count _ended_at _deadlines _give_up _has_ended "
        "_is_doubted _lease _leases _lock_key _lock_keys _redirected _offers _reclaim_at _recount "
        "_resend _settle_on _take _take_starts _unwritten _write",
        "a mutant replaces a step",
    ),
    "simulation/nodes.py": (
        "_call _loaded _lua _run _scripts",
        "is a fake node, with other faults",
    ),
    "simulation/recovery_mutants.py": (
        "_abandoned_lease _clock _confirm _former_leases _is_alive _move _move_former_leases "
        "_own_lease _rejoin _take_over",
        "a mutant replaces a step",
    ),
    "unit/test_compatibility.py": ("_announce_revoked _get_active_apps", "is Celery's"),
    "unit/test_log_page.py": ("_log_report", "writes lines that no format shows"),
    "unit/test_delivery.py": ("_apply_result", "is Celery's, not ours"),
    "unit/test_dispatch.py": (
        "_eta_timer_entry _limit_move_to_pool _limit_task",
        "is Celery's, not ours",
    ),
    "unit/test_untried.py": ("_limit_move_to_pool _limit_task", "is Celery's, not ours"),
}
# What a walk of `tests/walks.py` passes: files, functions and classes. A change that makes a walk
# longer writes it here, and its commit says why.
WALKS = {
    "a plain lock": (25, 103, 28),
    "a message in a worker": (53, 198, 45),
    "a refused message until it waits": (64, 337, 67),
    "from the release to its end": (51, 233, 51),
}
MOST_WALKS = 3  # a busy machine lets threads come between
# Modules of fewer than 60 lines. Each new one is a subject that no other file has.
SHORT = {
    "anchors.py",
    *(f"django/{name}.py" for name in ("apps", "models", "task")),  # by Django's names
    *("tasks/recovery/observer.py", "tasks/recovery/tries.py", "tasks/settings/call.py"),
}
# Names that two classes, or two public functions or constants have. No new one: a reader who looks
# for a name finds one thing.
TWICE = {"fenced_update"}  # of Django and of SQLAlchemy
# Protocols that fewer than two classes of the package have.
LONELY_PROTOCOLS: set[str] = set()
# Classes that override a method of another class of ours. A round, an error and an interrupter say
# what differs; of the others there is no new one.
OVERRIDING = {
    *("AcquireRound", "ClaimRound", "PermitRound", "Question", "RateKey", "Start", "StartRound"),
    *("OrderedRound", "PlaceRelease", "RunStart"),
    *("DuplicateTask", "LockLost", "LockTaken", "NoRunError", "NodeError", "QuorumUnreachable"),
    *("SettingsError", "GreenletInterrupter", "SignalInterrupter", "UnyieldingTlsSocket"),
    *("FakeServer", "Unlocked"),
}
# Files that use a private name of another class of ours.
OF_OTHERS = {"tasks/wrapping.py"}
# They decide, and no clock, thread, socket or log decides with them.
PURE = [
    *("lock.model.*", "tasks.settings.*", "tasks.waiting.queues", "tasks.execution.deferral"),
    *("tasks.recovery.observer", "tasks.recovery.tags", "tasks.recovery.tries"),
    *("operate.drill.schedule", "operate.drill.audit"),
]
IMPURE = {"time", "threading", "socket", "select", "logging"}
BANNED = {"utils", "helpers", "manager", "base", "common", "misc"}
MODULES = sorted(
    path for path in PACKAGE.rglob("*.py") if "testing" not in path.relative_to(PACKAGE).parts
)


@functools.cache
def private_names() -> PrivateNames:
    return PrivateNames(PACKAGE)


@functools.cache
def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


@functools.cache
def imports_of(path: Path) -> list[tuple[str, int]]:
    """Return every own module imported anywhere in a file, also late and for types alone."""
    found = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            module = node.module or ""
            for alias in node.names:
                inner = f"{module}.{alias.name}".removeprefix("celery_redlock.")
                found.append((f"celery_redlock.{inner}" if inner in NAMES else module, node.lineno))
    prefix = "celery_redlock"
    own = [(n, line) for n, line in found if n == prefix or n.startswith(f"{prefix}.")]
    return [(name.removeprefix(prefix).lstrip("."), line) for name, line in own]


NAMES = {name_of(path) for path in MODULES}


@functools.cache
def group_of(name: str) -> int:
    """Return the place of a module's group in `GROUPS`."""
    for place, (_, patterns) in enumerate(GROUPS):
        if any(fnmatch(name, pattern) for pattern in patterns):
            return place
    raise LookupError(f"{name} is in no group: add it to GROUPS")


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_only_groups_named_before_its_own(path: Path) -> None:
    name = name_of(path)
    own = len(GROUPS) if name in FACES else group_of(name)
    for imported, line in imports_of(path):
        where = f"{path}:{line}: {name} imports {imported}"
        assert imported not in FACES, where
        assert group_of(imported) <= own, where


def test_no_imports_within_a_group_make_a_circle() -> None:
    imports = {name_of(path): {name for name, _ in imports_of(path)} for path in MODULES}
    done: set[str] = set()
    while len(done) < len(imports):
        free = {name for name in imports if name not in done and imports[name] - {name} <= done}
        assert free, f"a circle among {sorted(imports.keys() - done)}"
        done |= free


def test_the_lock_floor_imports_no_celery() -> None:
    paths = [path for path in MODULES if name_of(path).partition(".")[0] == "lock"]
    assert len(paths) > 20
    for path in paths:
        for node in nodes_of(path):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            outside = {name.partition(".")[0] for name in names}
            assert not outside & {"celery", "kombu", "billiard", "vine"}, path


def test_the_transport_stands_alone() -> None:
    """It could be a package of its own: it knows no votes, no keys and no restart guard."""
    folder = PACKAGE / "lock" / "transport"
    for path in folder.glob("*.py"):
        for imported, line in imports_of(path):
            own = imported.startswith(("lock.platform.", "lock.transport."))
            own |= imported in ("errors", "label")  # how a text of others is shown
            assert own, f"{path}:{line}: the transport imports {imported}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_has_short_files(folder: str) -> None:
    paths = files_of(folder)
    assert [path for path in paths if path.stem != "__init__"]
    for path in paths:
        assert len(text_of(path).splitlines()) <= 450, path


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_has_short_functions_with_few_parameters(folder: str) -> None:
    for path in files_of(folder):
        file = path.relative_to(PACKAGE).as_posix()
        for name, node in functions_in(tree_of(path)):
            assert (node.end_lineno or 0) - node.lineno < 60, (file, name)
            if (file, name) not in PUBLIC_OPTIONS:
                assert len(parameters_of(node)) <= 8, (file, name)


@pytest.mark.parametrize("folder", ["", *FOLDERS])
def test_a_folder_says_what_lives_there_and_what_to_read_first(folder: str) -> None:
    text = ast.get_docstring(tree_of(PACKAGE / folder / "__init__.py"))
    assert text is not None
    first = re.search(r"\bRead\b[^`]*`([a-z_]+\.py)`", text)
    assert first is not None, f"{folder}: say which file to read first"
    assert (PACKAGE / folder / first[1]).is_file(), first[1]
    floor = PACKAGE / folder.partition("/")[0]
    named = set(re.findall(r"`([a-z_]+\.py)`", text))
    assert not [name for name in named if not list(floor.rglob(name))], folder
    lines = set(re.findall(r"^- `(\w+\.py)`: ", text, re.MULTILINE))
    assert lines == {path.name for path in files_of(folder)} - {"__init__.py"}
    classes = set(re.findall(r"`((?:[A-Z]+[a-z]+)+)(?:\.\w+)?`", text))
    assert not classes - Classes().methods.keys(), f"{folder}: no class has this name"


@pytest.mark.parametrize("folder", ["", *FOLDERS])
def test_the_line_of_a_file_names_what_is_in_that_file(folder: str) -> None:
    text = ast.get_docstring(tree_of(PACKAGE / folder / "__init__.py")) or ""
    lines = re.findall(r"^- `(\w+\.py)`: ((?:`[\w.]+`,?\s)*`[\w.]+`):", text, re.MULTILINE)
    for file, names in lines:
        nodes = nodes_of(PACKAGE / folder / file)
        defined = {getattr(node, "name", "") for node in nodes if not isinstance(node, ast.alias)}
        defined |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        missing = set(re.findall(r"\w+", names)) - defined
        assert not missing, f"{folder}/{file} has no {missing}"


def files_of(folder: str) -> list[Path]:
    return sorted((PACKAGE / folder).glob("*.py"))


def functions_in(
    tree: ast.AST, within: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Give each function, also one inside another, with the names that lead to it."""
    for node in ast.iter_child_nodes(tree):
        name = f"{within}{getattr(node, 'name', '')}"
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield name, node
        is_named = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        yield from functions_in(node, f"{name}." if is_named else within)


def parameters_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    named = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    return [one.arg for one in named if one.arg not in ("self", "cls")]


@pytest.mark.parametrize("folder", [name for name in FOLDERS if name.startswith("lock")])
def test_the_lock_speaks_no_old_word(folder: str) -> None:
    for path in files_of(folder):
        for node in nodes_of(path):
            name = getattr(node, "name", None) or getattr(node, "id", None) or ""
            assert not OLD_WORDS.fullmatch(name), (path, name)


def test_only_the_clock_knows_the_time() -> None:
    for path in MODULES:
        if name_of(path) != "lock.platform.clock":
            nodes = nodes_of(path)
            imported = [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
            assert "time" not in imported, f"{path} imports time: take a Clock"


def test_what_decides_is_pure() -> None:
    paths = [path for path in MODULES if any(fnmatch(name_of(path), name) for name in PURE)]
    for pattern in PURE:
        assert any(fnmatch(name_of(path), pattern) for path in paths), pattern
    for path in paths:
        for node in nodes_of(path):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            impure = [n for n in names if n.partition(".")[0] in IMPURE or ".lock.platform." in n]
            assert not impure, (path, impure)


def test_every_log_line_names_its_event() -> None:
    for path in MODULES:
        logs = {
            node
            for node in nodes_of(path)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "logger"
        }
        named = {
            word
            for call in nodes_of(path)
            if isinstance(call, ast.Call) and "extra" in {key.arg for key in call.keywords}
            for word in (call.func, *call.args)  # also as the first word of a partial
        }
        lines = [log.lineno for log in logs - named]
        assert not lines, f"{path}:{lines}: give it extra={{'event': ...}}"


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert not {path.stem for path in MODULES} & BANNED


@pytest.mark.slow
def test_a_run_passes_no_more_of_the_package_than_before() -> None:
    """A walk may be 2 percent longer. It is walked again if threads of a busy machine add more."""
    longer: dict[str, tuple[int, ...]] = dict(WALKS)
    for _ in range(MOST_WALKS):
        if not longer:
            break
        passed = walked()
        assert passed.keys() == WALKS.keys()
        longer = {
            title: passed[title]
            for title in longer
            if any(p > 1.02 * m for p, m in zip(passed[title], WALKS[title], strict=True))
        }
    assert not longer


def walked() -> dict[str, tuple[int, ...]]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.walks"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=TESTS.parent)
    walks = map(json.loads, printed.stdout.splitlines())
    return {walk.pop("walk"): tuple(walk.values()) for walk in walks}


def test_a_short_module_has_a_reason() -> None:
    lines = {
        path.relative_to(PACKAGE).as_posix(): len(text_of(path).splitlines())
        for path in MODULES
        if path.stem != "__init__"
    }
    assert {path for path, count in lines.items() if count < 60} == SHORT


def public_names() -> Iterator[str]:
    """Give the name of each class, and of each public function and constant of a module."""
    for path in MODULES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                yield node.name
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from [node.name] if not node.name.startswith("_") else []
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
                yield from [name for name in names if re.fullmatch("[A-Z][A-Z_]+", name)]


def test_no_two_things_share_a_name() -> None:
    assert {name for name, count in Counter(public_names()).items() if count > 1} == TWICE


@functools.cache
class Classes:
    """The classes of the package by name: what each has itself, and its bases of the package."""

    def __init__(self) -> None:
        paths = sorted(PACKAGE.rglob("*.py"))
        nodes = [n for path in paths for n in nodes_of(path) if isinstance(n, ast.ClassDef)]
        named = {node.name: [ast.unparse(base) for base in node.bases] for node in nodes}
        last = {
            name: [re.split("[.]", base.partition("[")[0])[-1] for base in bases]
            for name, bases in named.items()
        }
        self.bases = {
            name: [b for b in bases if b in named and b != name] for name, bases in last.items()
        }
        self.protocols = {name for name, bases in last.items() if "Protocol" in bases}
        self.methods = {node.name: set(methods_of(node)) for node in nodes}
        self.attributes = {node.name: set(attributes_of(node)) for node in nodes}

    def above(self, name: str) -> set[str]:
        return set(self.bases[name]).union(*(self.above(base) for base in self.bases[name]))

    def has(self, name: str) -> set[str]:
        return set().union(
            *(self.methods[n] | self.attributes[n] for n in {name} | self.above(name))
        )


def methods_of(node: ast.ClassDef) -> Iterator[str]:
    """Give the methods in a class's own body; none that Python names."""
    for inner in node.body:
        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)) and inner.name[:2] != "__":
            yield inner.name


def attributes_of(node: ast.ClassDef) -> Iterator[str]:
    """Give what a class declares in its body, and what its methods set on `self`."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            yield inner.attr
    for inner in node.body:
        targets = inner.targets if isinstance(inner, ast.Assign) else []
        targets = [inner.target] if isinstance(inner, ast.AnnAssign) else targets
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_no_other_class_overrides_a_method_of_ours() -> None:
    classes = Classes()
    found = {
        name
        for name in classes.bases
        for above in classes.above(name)
        if classes.methods[name] & classes.methods[above]
    }
    assert found == OVERRIDING


def test_no_other_file_uses_a_private_name_of_another_class() -> None:
    listed = {name.path.rpartition(".")[2] for name in (*ANYWHERE, *IN_BEAT, *IN_WORKERS, *LESSER)}
    ours = private_names().all - listed
    own = {"self", "cls", "super()"}
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in MODULES
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and node.attr in ours
        if ast.unparse(node.value) not in own
    }
    assert found == OF_OTHERS


def test_a_protocol_has_two_classes() -> None:
    classes = Classes()
    lonely = {
        protocol
        for protocol in classes.protocols
        if sum(
            (classes.methods[protocol] | classes.attributes[protocol]) <= classes.has(name)
            for name in classes.bases.keys() - classes.protocols
        )
        < 2
    }
    assert lonely == LONELY_PROTOCOLS


def test_nothing_in_the_package_imports_its_test_support() -> None:
    for path in MODULES:
        assert not [name for name, _ in imports_of(path) if name.startswith("testing")], path


def test_the_repository_stands_alone() -> None:
    root = PACKAGE.parent
    files = [*PACKAGE.rglob("*.py"), *root.glob("*.md"), *(root / "docs").rglob("*.md")]
    for path in files:
        assert "shared/" not in text_of(path), path


def test_every_test_that_ci_names_is_there() -> None:
    text = (TESTS.parent / ".ci" / "run").read_text().replace("\\\n", " ")
    words = re.findall(r"tests/[^\s;)\"'$]+", text)
    command = ["bash", "-c", "printf '%s\\n' " + " ".join(words)]  # which writes braces out
    paths = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert len(paths) > 30
    paths += MAY_RUN_AGAIN
    assert [path for path in paths if not (TESTS.parent / path).exists()] == []


def test_tests_use_private_names_of_the_package_only_as_listed() -> None:
    """A test that goes through what a part shows to others survives a new inside of that part."""
    private = private_names()
    unlisted, used = [], set()
    for path in sorted(TESTS.rglob("*.py")):
        file = str(path.relative_to(TESTS))
        if file.startswith("mutants/table/"):  # these rows are pieces of the package's source
            continue
        if file == "celery_names.py":  # a list of names of others
            continue
        listed = set(PRIVATE_NAMES_IN_TESTS.get(file, ("", ""))[0].split())
        for line, name in uses_in(path.read_text(), private):
            used.add((file, name))
            unlisted += [] if name in listed else [f"tests/{file}:{line}: {name}"]
    assert not unlisted, "use a public name; or list it in PRIVATE_NAMES_IN_TESTS, and say why"
    table = {
        (f, name) for f, (names, _) in PRIVATE_NAMES_IN_TESTS.items() for name in names.split()
    }
    assert not table - used, "no test uses these any more: take them off the list"


# Methods that change what they are called on.
CHANGING = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem"),
    *("popleft", "remove", "setdefault", "update"),
}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_an_assignment_has_one_value(path: Path) -> None:
    """A swap, the result of one call and a pair that belongs together may be unpacked."""
    packed = [node.lineno for node in nodes_of(path) if is_packed(node)]
    assert not packed, f"{path}: one assignment a line in lines {packed}"


def is_packed(node: ast.AST) -> bool:
    """Return whether unrelated values are assigned to several names at once."""
    if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple) or len(target.elts) != len(node.value.elts):
        return False
    return {ast.unparse(name) for name in target.elts} != {
        ast.unparse(value) for value in node.value.elts
    }


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_condition_changes_nothing(path: Path) -> None:
    changed = [
        node.lineno
        for condition in conditions_of(path)
        for node in ast.walk(condition)
        if isinstance(node, ast.Call) and changes_state(node.func)
    ]
    assert not changed, f"{path}: a condition of lines {changed} changes what it asks"


def conditions_of(path: Path) -> Iterator[ast.expr]:
    for node in nodes_of(path):
        if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs


def changes_state(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and function.attr in CHANGING
