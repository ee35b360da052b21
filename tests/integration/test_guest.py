"""Beside an app that locks nothing the package adds one word to `celery --help`, and no more."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import celery
import pytest
from redis import Redis

from celery_redlock.testing import EmbeddedNode
from tests.conftest import Nodes, eventually, see_listening
from tests.integration.conftest import ROOT

OWN = ("celery_redlock", "celery_redlock_entry.py", "pytest_celery_redlock.py")
HOOK = "celery_redlock_entry.look_at_worker"
CARRIER = "celery_redlock.tasks.unique.send.carry_options"  # of sends by name with lock=
MEASURED = {"names", "kilobytes", "cpu", "receivers", "sockets"}  # compared in other ways
SPARE = 2  # sockets to its broker that a worker opens or not, as its greenlets happen to meet
POOLS = ("prefork", "threads", "gevent", "solo")


@dataclass(frozen=True)
class Place:
    """A copy of this environment's packages, with or without ours.

    imports: the app imports it. locks_on: URLs of nodes, with which the app has a locked task.
    """

    path: Path
    imports: bool = False
    locks_on: str = ""

    def celery(self, *arguments: str) -> list[str]:
        return [sys.executable, "-S", "-m", "celery", "-A", "guest", *arguments]

    def env(self, broker: str) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        imports = {"GUEST_IMPORTS": "1"} if self.imports else {}
        more = {"PYTHONPATH": str(self.path), "GUEST_BROKER": broker, "GUEST_NODES": self.locks_on}
        return {**kept, **more, **imports, "PYTHONWARNINGS": "ignore"}


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Place:
    path = tmp_path_factory.mktemp("without")
    for one in Path(sysconfig.get_path("purelib")).iterdir():
        if "celery_redlock" not in one.name and one.suffix != ".pth":
            (path / one.name).symlink_to(one)
    (path / "guest.py").symlink_to(ROOT / "tests" / "integration" / "guest.py")
    return Place(path)


@pytest.fixture(scope="module")
def installed(without: Place, tmp_path_factory: pytest.TempPathFactory) -> Place:
    path = tmp_path_factory.mktemp("installed")
    for one in without.path.iterdir():
        (path / one.name).symlink_to(one)
    for name in OWN:
        (path / name).symlink_to(ROOT / name)
    metadata = path / "celery_redlock-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: celery_redlock\nVersion: 0.1.0"
    )
    project = (ROOT / "pyproject.toml").read_text()
    (command,) = re.findall(r'^redlock = "(.+)"$', project, re.MULTILINE)
    (metadata / "entry_points.txt").write_text(f"[celery.commands]\nredlock = {command}\n")
    return Place(path)


class GuestWorker:
    """A worker of `tests/integration/guest.py`, and what its processes tell of themselves."""

    def __init__(self, broker: str, log: Path) -> None:
        self.app = celery.Celery("asks", broker=broker, backend=broker, set_as_current=False)
        self._log = log

    def look(self, task: str = "guest.look") -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what the main process tells, and what the process of a task tells."""
        where = see_listening(self.app, "guest")
        child = self.app.send_task(task).get(timeout=120)
        (reply,) = self.app.control.broadcast(
            "look_at_worker", destination=where, reply=True, timeout=60, limit=1
        )
        return reply[where[0]], child

    def lines(self) -> list[str]:
        varying = r"0x[0-9a-f]+|[0-9a-f-]{36}|[\d.]+|redis://\S+|/tmp/\S+"
        lines = [one for one in self._log.read_text().splitlines() if " succeeded in " not in one]
        return sorted(re.sub(varying, "#", one) for one in lines)


@contextmanager
def worker(place: Place, pool: str, broker: str, folder: Path) -> Iterator[GuestWorker]:
    folder.mkdir()
    log = folder / "log"
    with log.open("w") as written:
        process = subprocess.Popen(
            place.celery("worker", "-P", pool, "-c", "1", "-n", "guest@%h", "-l", "INFO"),
            env=place.env(broker), cwd=folder, stdout=written, stderr=written,
        )  # fmt: skip
        try:
            yield GuestWorker(broker, log)
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 0, log.read_text()


@pytest.fixture
def broker() -> Iterator[EmbeddedNode]:
    with EmbeddedNode() as server:
        yield server


Told = tuple[dict[str, Any], dict[str, Any]]


def differing(plain: Told, guest: Told) -> list[Any]:
    """Return what differs in the main process, and in a process that runs bodies."""
    found: list[Any] = []
    for theirs, ours in zip(plain, guest, strict=True):
        found += [
            (name, theirs[name], ours[name])
            for name in theirs.keys() - MEASURED
            if theirs[name] != ours[name]
        ]
        found += sorted(set(theirs["names"]) - set(ours["names"]))  # replaced, or gone
        found += [one for one in ours["names"] if "redlock" in one]
        if ours["sockets"] > theirs["sockets"] + SPARE:
            found.append(("sockets", theirs["sockets"], ours["sockets"]))
        for name, receivers in ours["receivers"].items():
            if [one for one in receivers if one not in (HOOK, CARRIER)] != theirs["receivers"][
                name
            ]:
                found.append((name, receivers))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("pool", POOLS)
def test_a_worker_that_locks_nothing_is_what_it_is_without_the_package(
    pool: str, without: Place, installed: Place, broker: EmbeddedNode, tmp_path: Path
) -> None:
    places = (without, installed, Place(installed.path, imports=True))
    with ExitStack() as stack:
        workers = [
            stack.enter_context(worker(place, pool, f"{broker.url[:-1]}{n}", tmp_path / str(n)))
            for n, place in enumerate(places)
        ]

        def found() -> list[list[Any]]:  # a thread or a connection may be about to end
            told = [one.look() for one in workers]
            looks.append(told)
            return [differing(told[0], one) for one in told[1:]]

        looks: list[list[Told]] = []
        with suppress(AssertionError):
            eventually(lambda: not any(found()), within=60)
        assert [differing(looks[-1][0], one) for one in looks[-1][1:]] == [[], []]
        plain, *guests = looks[-1]
        for told in (one for guest in guests for one in guest):
            assert told["receivers"]["worker_init"].count(HOOK) == 1
    (main, child), (installed_main, installed_child) = plain, guests[0]
    assert installed_main["kilobytes"] < 1.05 * main["kilobytes"]  # the package itself: 1.2
    assert installed_child["kilobytes"] < 1.05 * child["kilobytes"]
    for guest_worker in workers[1:]:
        assert guest_worker.lines() == workers[0].lines()


def keys_and_scripts(broker: str) -> tuple[list[str], int]:
    """Return the keys of worker leases, and of all leases, and how often a script was run."""
    with Redis.from_url(broker, decode_responses=True) as client:
        keys = [
            key for what in ("worker", "leases") for key in client.scan_iter(f"{{redlock}}:{what}*")
        ]
        scripts: dict[str, int] = client.info("commandstats").get("cmdstat_eval", {})
        return sorted(keys), scripts.get("calls", 0)


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["threads", "prefork"])
def test_a_worker_that_locks_nothing_leaves_no_worker_lease(
    pool: str, installed: Place, broker: EmbeddedNode, nodes: Nodes, tmp_path: Path
) -> None:
    """One with a locked task has joined before it gets its first message."""
    imports = replace(installed, imports=True)
    for place in (installed, imports):
        with worker(place, pool, broker.url, tmp_path / f"{place.imports}") as guest:
            guest.look()
            assert keys_and_scripts(broker.url) == ([], 0)
        assert keys_and_scripts(broker.url) == ([], 0)
    locks = replace(imports, locks_on=" ".join(node.url for node in nodes))
    with worker(locks, pool, broker.url, tmp_path / "locks") as locking:
        locking.look("guest.look_under_lock")
        keys, scripts = keys_and_scripts(broker.url)
        assert keys == ["{redlock}:worker_leases:unacked", "{redlock}:worker_names:unacked"]
        assert scripts > 0


TRIES = 5
COMMANDS = (("--help",), ("--version",), ("report",), ("call", "guest.look"))


@dataclass(frozen=True)
class Cost:
    """What a command has taken at the least of several runs. modules: that it has imported."""

    cpu: float
    kilobytes: int
    printed: str
    modules: frozenset[str]


def cost(place: Place, arguments: tuple[str, ...], broker: str, folder: Path) -> Cost:
    found = []
    for options in ((), (), (), ("-X", "importtime")):
        out = folder / "printed"
        with out.open("w") as written, (folder / "err").open("w") as errors:
            command = [sys.executable, "-S", *options, *place.celery(*arguments)[2:]]
            process = subprocess.Popen(
                command, env=place.env(broker), cwd=folder, stdout=written, stderr=errors
            )
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0, (folder / "err").read_text()
        found.append((used.ru_utime + used.ru_stime, used.ru_maxrss))
    modules = re.findall(r"\|\s+(\S+)$", (folder / "err").read_text(), re.MULTILINE)
    cpu, kilobytes = (min(values) for values in zip(*found[:-1], strict=True))
    return Cost(cpu, kilobytes, out.read_text(), frozenset(modules))


@pytest.mark.slow
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_command_is_what_it_is_without_the_package(
    arguments: tuple[str, ...],
    without: Place,
    installed: Place,
    broker: EmbeddedNode,
    tmp_path: Path,
) -> None:
    for _ in range(TRIES):  # each run of a busy machine may take half as much again
        plain, guest = (
            cost(place, arguments, broker.url, tmp_path) for place in (without, installed)
        )
        if guest.cpu < 1.3 * plain.cpu:
            break
    assert guest.modules == plain.modules  # without that of the entry point itself
    assert len(plain.modules) > 100
    assert guest.cpu < 1.3 * plain.cpu  # 1.4 with an import of the package
    assert guest.kilobytes < 1.04 * plain.kilobytes  # 1.3
    lines = [line for line in guest.printed.splitlines() if "redlock" in line]
    if arguments == ("--help",):
        assert len(lines) == 1
        shown = [line for line in guest.printed.splitlines() if line not in lines]
        assert shown == plain.printed.splitlines()
    elif arguments != ("call", "guest.look"):
        assert guest.printed == plain.printed


def test_the_group_of_commands_is_imported_when_it_is_called(
    installed: Place, tmp_path: Path
) -> None:
    command = installed.celery("redlock", "--help")
    env = installed.env("memory://")
    shown = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "doctor" in shown.stdout


ROWS = {
    "the main process of a prefork worker": ("prefork", 0),
    "a child of it that has run a locked task": ("prefork", 1),
    "the process of a worker with `threads`": ("threads", 0),
}


def rows_of(page: str, pool: str) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield what the page says of each process of a pool: threads, descriptors, MB."""
    for row, (of_pool, which) in ROWS.items():
        if of_pool == pool:
            line = rf"^\| {row} \| (\d+) \| (\d+) \| (\d+) MB \|$"
            found = re.search(line, page, re.MULTILINE)
            assert found is not None, row
            yield which, tuple(map(int, found.groups()))


def too_many_descriptors(page: str, pool: str, told: Told, plain: Told) -> list[tuple[int, int]]:
    """Return the processes that have more than the page says, and how many more than without."""
    found = []
    for which, (_, descriptors, _) in rows_of(page, pool):
        ours, theirs = told[which], plain[which]
        more = len(ours["descriptors"]) + ours["sockets"]
        more -= len(theirs["descriptors"]) + theirs["sockets"]
        if more > descriptors + SPARE:
            found.append((which, more))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_worker_with_locked_tasks_gets_what_the_page_says(
    pool: str, installed: Place, broker: EmbeddedNode, nodes: Nodes, tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "operations" / "sizing.md").read_text()
    by_number = [f"{broker.url[:-1]}{n}" for n in range(2)]
    locks = replace(installed, locks_on=" ".join(node.url for node in nodes))
    with (
        worker(installed, pool, by_number[0], tmp_path / "guest") as guest,
        worker(locks, pool, by_number[1], tmp_path / "locks") as locking,
    ):
        plain = guest.look()
        looks: list[Told] = []

        def is_as_said() -> bool:  # for some seconds there may be a poller more
            looks.append(locking.look("guest.look_under_lock"))
            return not too_many_descriptors(page, pool, looks[-1], plain)

        with suppress(AssertionError):
            eventually(is_as_said)
        told = looks[-1]
        commands = set(told[0]["commands"]) - set(plain[0]["commands"])
    assert commands == {"redlock_held", "redlock_waiting", "redlock_settings"}
    assert [name for name in told[0]["steps"] if "redlock" in name]
    assert too_many_descriptors(page, pool, told, plain) == []
    for which, (threads, _, megabytes) in rows_of(page, pool):
        ours, theirs = told[which], plain[which]
        assert ours["tasks"] - theirs["tasks"] <= threads
        assert ours["kilobytes"] - theirs["kilobytes"] <= 1.5 * 1000 * megabytes
        replaced = [name.partition(" is ")[0] for name in ours["names"] if "redlock" in name]
        assert replaced == ["celery.app.trace.ExceptionInfo"]
