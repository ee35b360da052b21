"""Several beats as real processes: one sends, and another takes over, whatever happens to it."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from celery_redlock.tasks.per_app import redlock_of
from celery_redlock.testing import WorkerProcess
from tests.conftest import NODE_TIMEOUT, TTL, Nodes, eventually, paused
from tests.integration.conftest import ROOT, MakeStage, Stage
from tests.pages import blocks, on_servers
from tests.workers import ForkedWorker

APP, LOCK = "tests.integration.beats", "beat:tests"
SCHEDULER = "celery_redlock.beat:LockedScheduler"
CELERY = (sys.executable, "-m", "celery", "-A", APP)
EVERY = 0.3  # s between two sends
PATIENT = f"""
app.conf.redlock_node_timeout = {NODE_TIMEOUT}
app.conf.beat_schedule["report every minute"]["schedule"] = {EVERY}
"""
CONF = {
    "beat_schedule": {"note": {"task": "tests.plain", "args": ["note"], "schedule": EVERY}},
    "result_expires": None,
}


class Beats:
    """Beats on one stage. ttl: of their lock."""

    def __init__(self, stage: Stage, folder: Path, ttl: float) -> None:
        self.stage, self.folder, self.ttl = stage, folder, ttl

    def start(self, *names: str, env: dict[str, str] | None = None) -> list[WorkerProcess]:
        """Start beats, each with a schedule file of its own; return at once."""
        beats = []
        for name in names:
            file = str(self.folder / f"{name}.schedule")
            command = (*CELERY, "beat", "-S", SCHEDULER, "--pidfile=", "-s", file, "-l", "INFO")
            beats.append(self.run(name, command, env))
        return beats

    def run(
        self, name: str, command: tuple[str, ...], env: dict[str, str] | None = None
    ) -> WorkerProcess:
        environment = {**self.stage.env, **(env or {})}
        made = ForkedWorker(name, name=name, command=command, env=environment, cwd=ROOT)
        self.stage.stack.push(made)  # removes its log
        self.stage.stack.callback(made.kill)
        made.launch()
        return made

    def see_sends(self, by: int | None = None, since: float = 0.0) -> int:
        """Return which process sends, once there are three sends by one, or by that one."""
        since = since or time.monotonic()

        def sender() -> int | None:
            pids = [line.pid for line in self.stage.lines("sent") if line.at > since]
            known = [pid for pid in pids if by in (None, pid)]
            return known[0] if len(known) >= 3 else None

        return eventually(sender) or 0

    def turns(self) -> list[int]:
        """Return the processes that sent, in order; one that sent twice in a row once."""
        return [pid for pid, _ in groupby(line.pid for line in self.stage.lines("sent"))]

    def holders(self) -> list[str]:
        locks = redlock_of(self.stage.app).locks(LOCK).locks
        return sorted({str(lock.holder) for lock in locks if lock.held})

    def keep(self, lock: str = LOCK) -> None:
        """Let the lock end by a release alone: not by its ttl, for minutes.

        A node whose first vote a rival had got has no key until the next renewal.
        """
        key = f"{{redlock}}:lock:{lock}"
        kept = [node for node in self.stage.nodes if node.client().pexpire(key, 300_000)]
        assert len(kept) > len(self.stage.nodes) // 2

    def of(self, beats: list[WorkerProcess], pid: int) -> WorkerProcess:
        return next(beat for beat in beats if beat.pid == pid)


@pytest.fixture
def beats(make_stage: MakeStage, nodes: Nodes, tmp_path: Path) -> Beats:
    return Beats(make_stage(nodes, redlock_ttl=TTL, **CONF), tmp_path, TTL)


@pytest.fixture
def lasting_beats(make_stage: MakeStage, nodes: Nodes, tmp_path: Path) -> Beats:
    """Give beats whose lock has the default ttl."""
    return Beats(make_stage(nodes, **CONF), tmp_path, 30.0)


def test_one_of_two_sends_and_at_a_clean_end_another_one_at_once(lasting_beats: Beats) -> None:
    beats = lasting_beats
    processes = beats.start("one", "two")
    leaders: list[int] = []
    for left in (1, 0):
        leader = beats.see_sends()
        waiting = [one for one in processes if one.runs and one.pid != leader]
        assert len(waiting) == left
        for one in waiting:
            eventually(lambda one=one: "beat waits: the lock 'beat:tests' is held" in one.output())
        (label,) = beats.holders()
        assert re.fullmatch(rf"beat, pid {leader} on \S+", label)
        leaders.append(leader)
        beats.keep()
        ended = beats.of(processes, leader)
        ended.signal(signal.SIGTERM)
        assert ended.wait() == 0, ended.output()
    assert beats.turns() == leaders
    eventually(lambda: beats.stage.is_free(LOCK))


@pytest.mark.slow
def test_after_a_kill_another_one_sends(beats: Beats) -> None:
    processes = beats.start("one", "two", "three")
    first = beats.see_sends()
    eventually(lambda: sum("beat waits" in one.output() for one in processes) == 2)
    beats.of(processes, first).kill()
    second = beats.see_sends()
    assert beats.turns() == [first, second]


@pytest.mark.slow
def test_a_frozen_one_sends_no_more_and_waits_when_it_is_back(beats: Beats) -> None:
    processes = beats.start("one", "two")
    first = beats.see_sends()
    frozen = beats.of(processes, first)
    frozen.signal(signal.SIGSTOP)
    second = beats.see_sends()
    assert second != first
    frozen.signal(signal.SIGCONT)
    eventually(lambda: frozen.output().count("beat waits") == 1)
    beats.see_sends()
    assert beats.turns() == [first, second]
    assert "lost 'beat:tests'" in frozen.output()
    beats.of(processes, second).signal(signal.SIGTERM)
    assert beats.see_sends(by=first) == first, "it goes on as a standby"
    assert beats.turns() == [first, second, first]


@pytest.mark.slow
def test_without_a_quorum_nothing_is_sent_and_one_line_says_so(
    make_stage: MakeStage, mortal_nodes: Nodes, tmp_path: Path
) -> None:
    beats = Beats(make_stage(mortal_nodes, redlock_ttl=TTL, **CONF), tmp_path, TTL)
    processes = beats.start("one", "two")
    beats.see_sends()
    eventually(lambda: any("beat waits" in one.output() for one in processes))
    told = "beat sends no periodic tasks until the lock nodes answer: no quorum of 2 nodes voted"
    with paused(*mortal_nodes[:2]):
        gone = time.monotonic()
        eventually(lambda: all(told in one.output() for one in processes))
        silent = time.monotonic()
        with pytest.raises(AssertionError, match="not true within"):
            eventually(lambda: beats.stage.lines("sent")[-1].at > silent, within=2 * TTL)
        assert beats.stage.lines("sent")[-1].at < gone + beats.ttl
    back = time.monotonic()
    beats.see_sends(since=back)
    for one in processes:
        assert one.output().count("beat sends no periodic tasks") == 1, one.output()


@pytest.mark.slow
def test_in_a_worker(lasting_beats: Beats) -> None:
    """The process of a beat is forked by a worker that is connected to the nodes by then."""
    beats = lasting_beats
    command = (*CELERY, "worker", "-B", "--scheduler", SCHEDULER, "-c", "1", "-l", "INFO")
    files = {name: str(beats.folder / name) for name in ("one", "two")}
    workers = [
        beats.run(name, (*command, "-n", f"{name}@%h", "-s", file)) for name, file in files.items()
    ]
    for worker in workers:
        worker.wait_ready()
    first = beats.see_sends()
    assert first not in {worker.pid for worker in workers}
    assert beats.holders()[0].startswith(f"beat, pid {first} on ")
    beats.keep()
    os.kill(first, signal.SIGKILL)
    second = beats.see_sends()  # the worker releases the lock of its dead child
    assert beats.turns() == [first, second]
    for worker in workers:
        worker.signal(signal.SIGTERM)
    assert [worker.wait() for worker in workers] == [0, 0]
    eventually(lambda: beats.stage.is_free(LOCK))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("redbeat") is None, reason="needs redbeat")
def test_around_redbeat(make_stage: MakeStage, nodes: Nodes, tmp_path: Path) -> None:
    """redbeat's own lock would end the process that loses it."""
    conf = {"redlock_beat_scheduler": "redbeat.RedBeatScheduler", "redlock_ttl": TTL, **CONF}
    stage = make_stage(nodes, **conf)
    beats = Beats(stage, tmp_path, TTL)
    env = {"REDBEAT_REDIS_URL": stage.broker.url}
    stage.app.conf.redbeat_redis_url = stage.broker.url
    processes = beats.start("one", "two", env=env)
    first = beats.see_sends()
    assert stage.broker.client().exists("redbeat:note")
    assert not stage.broker.client().exists("redbeat::lock")
    beats.of(processes, first).kill()
    second = beats.see_sends()
    assert beats.turns() == [first, second]
    assert not any("Traceback" in one.output() for one in processes)


@pytest.fixture
def database(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """Give a database with django-celery-beat's tables, and the environment that names it."""
    file = tmp_path / "db.sqlite3"
    env = {"TEST_DB": str(file), "DJANGO_SETTINGS_MODULE": "tests.integration.beats_site"}
    migrate = [sys.executable, "-m", "django", "migrate", "-v", "0"]
    subprocess.run(migrate, env={**os.environ, **env}, cwd=ROOT, check=True)
    return file, env


@pytest.mark.slow
@pytest.mark.skipif(find_spec("django_celery_beat") is None, reason="needs django_celery_beat")
def test_around_django_celery_beat(
    make_stage: MakeStage, nodes: Nodes, tmp_path: Path, database: tuple[Path, dict[str, str]]
) -> None:
    """A frozen leader that comes back does not write its old last runs over newer ones."""
    file, env = database
    beats = Beats(
        make_stage(nodes, redlock_beat_scheduler="django", redlock_ttl=TTL, **CONF), tmp_path, TTL
    )
    processes = beats.start("one", "two", env=env)
    first = beats.see_sends()
    frozen = beats.of(processes, first)
    # not within a transaction, which would keep the file from the other process
    eventually(lambda: run_of(file)[1] == len(beats.stage.lines("sent")))
    frozen.signal(signal.SIGSTOP)
    second = beats.see_sends()
    beats.of(processes, second).signal(signal.SIGTERM)
    beats.of(processes, second).wait()
    saved = run_of(file)
    assert abs(saved[1] - len(beats.stage.lines("sent"))) <= 1
    frozen.signal(signal.SIGTERM)  # pending until it goes on
    frozen.signal(signal.SIGCONT)
    assert frozen.wait() == 0
    assert run_of(file)[1] >= saved[1]
    assert beats.turns()[:2] == [first, second]


def run_of(database: Path) -> Any:
    connection = sqlite3.connect(database, timeout=60)
    try:
        query = "SELECT last_run_at, total_run_count FROM django_celery_beat_periodictask"
        return connection.execute(f"{query} WHERE name = 'note'").fetchone()
    finally:
        connection.close()


@pytest.mark.pages
@pytest.mark.slow
@pytest.mark.skipif(find_spec("redbeat") is None, reason="needs redbeat")
def test_the_page_of_one_beat(make_stage: MakeStage, nodes: Nodes, tmp_path: Path) -> None:
    page = ROOT / "docs" / "how-to" / "one-beat.md"
    (program,), (command,), (shown,) = (
        [block.code for block in blocks(page, kind)] for kind in ("python", "console", "text")
    )
    stage = make_stage(nodes)
    urls = stage.broker.url, [node.url for node in nodes]
    (tmp_path / "shop.py").write_text(f"{on_servers(program, *urls)}{PATIENT}")
    beats = Beats(stage, tmp_path, 30.0)
    words = tuple(command.removeprefix("$ ").split())
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    processes = [
        beats.run(name, (sys.executable, "-m", *words, f"--pidfile={tmp_path / name}"), env)
        for name in ("one", "two")
    ]
    leads, waits = shown.splitlines()
    waits = re.escape(waits).replace("7", r"\d+").replace("web1", r"\S+")
    (leader,) = eventually(lambda: [one for one in processes if leads in one.output()])
    (standby,) = eventually(lambda: [one for one in processes if re.search(waits, one.output())])
    eventually(lambda: stage.broker.client().llen("celery") > 2)
    beats.keep("beat:shop")
    leader.signal(signal.SIGTERM)
    eventually(lambda: leads in standby.output())
