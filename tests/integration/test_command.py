"""What a person who runs it is told: by a worker at its start, and by `celery redlock`."""

from __future__ import annotations

import fcntl
import functools
import itertools
import json
import logging
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from celery import Celery, _state
from celery.bin.celery import celery
from click import ClickException
from click.testing import CliRunner, Result
from redis import Redis

from celery_redlock import LockedTask, LockLost, Redlock
from celery_redlock.lock.model.keys import lock_key, waiting_key
from celery_redlock.operate import control
from celery_redlock.operate.cli import views
from celery_redlock.testing import EmbeddedNode, embedded_nodes
from celery_redlock_entry import without_proxy
from tests import fork_server
from tests.conftest import PATIENCE, Nodes, eventually, register, serve_all_slots, settle
from tests.integration.conftest import (
    PASSWORD,
    ROOT,
    MakeStage,
    Stage,
    Standing,
    close_connections,
    no_shared_task_left,
    pools,
    slow_but,
)
from tests.integration.deliveries import heard
from tests.workers import ForkedWorker

WORK = "tests.integration.app.work"
SCHEMAS = json.loads((ROOT / "docs" / "command-line.schema.json").read_text())


def command(*words: str, says: str | None = None) -> Result:
    """Run `celery redlock` in this process as Celery's command line does; says: at a prompt."""
    line = ["-A", "tests.integration.app", "redlock", *words]
    return CliRunner().invoke(celery, line, input=says)


Run = Callable[..., Result]


@pytest.fixture
def run_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Give what runs `celery redlock` in this process, for an app of which it takes the code."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(_state, "default_app", _state.default_app)
    numbers = itertools.count()

    def run(code: str, *words: str) -> Result:
        name = f"app_of_{tmp_path.name}_{next(numbers)}"
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.setattr(_state._tls, "current_app", None)
        try:
            with no_shared_task_left():  # of this app, for the next one
                return CliRunner().invoke(celery, ["-A", name, "redlock", *words])
        finally:
            app = without_proxy(sys.modules.pop(name).app)
            close_connections(app)
            app.close()

    return run


@functools.cache
def schema_of(name: str) -> Any:
    """Return what validates the output of a command for programs."""
    schema = {**SCHEMAS, "$ref": f"#/$defs/{name}"}
    validator = jsonschema.validators.validator_for(schema)
    validator.check_schema(schema)
    return validator(schema)


def in_json(*words: str) -> Any:
    """Return what a command prints for programs, once it fits the schema in the docs."""
    told = command(*words, "--json")
    shown = json.loads(told.stdout)
    schema_of(words[0]).validate(shown)
    return shown


@pytest.fixture
def no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no command wait for a second where there is no worker to answer."""
    monkeypatch.setattr(views, "REPLY_TIMEOUT", 0.05)


def test_a_worker_says_once_at_its_start_what_is_wrong(make_stage: MakeStage, nodes: Nodes) -> None:
    queues = {"othre": {"ttl": 40}, "other": {"ttl": 40}}
    stage = make_stage(nodes, redlock_queues=queues)
    worker = stage.worker(concurrency=1)
    eventually(lambda: "did you mean 'other'?" in worker.output())
    assert stage.tasks.work.delay("k").get(timeout=120) == 0
    lines = worker.output().splitlines()
    (said,) = [line for line in lines if "'othre'" in line]
    assert "WARNING" in said
    assert not [line for line in lines if "acks_late" in line]  # advice is for who asks


CURRENT = """
from celery import Celery, current_app
from celery_redlock import LockedTask
shop = Celery(broker="memory://")
shop.conf.redlock_nodes = {}
shop.set_current()
app = current_app

@app.task(base=LockedTask, lock_key="stock:{{sku}}", name="take")
def take(sku): ...
"""


@pytest.mark.usefixtures("no_worker")
@pytest.mark.parametrize("words", ["status", "options take", "waiters", "top --count 1"])
def test_the_current_app_is_an_app(run_of: Run, nodes: Nodes, words: str) -> None:
    told = run_of(CURRENT.format([node.url for node in nodes]), *words.split())
    unknown = 2 if words == "waiters" else 0  # only workers know it
    assert told.exit_code == unknown, told.output


def test_no_name_commands_the_operators_terminal(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, shown = "k\x1b[2J\x07\u202e", r"k\x1b[2J\x07\u202e"
    for node in stage.nodes:
        node.client().set(lock_key("redlock", name), f"token:1:{name}", px=60_000)
        node.client().zadd(waiting_key("redlock", name), {f"w@{name}:7:aa": 1.0})
        node.client().hset(waiting_key("redlock", f"wrong {name}"), name, name)
    waits = {"resources": [name], "reason": name, "task_id": name, "task": name, "deferrals": 1,
             "since": "2026-01-01T00:00:00+00:00", "tries_in": 1.0}  # fmt: skip
    answer = [{f"w@{name}": [waits]}]
    monkeypatch.setattr("celery.app.control.Control.broadcast", lambda *_, **__: answer)
    lines = (["locks"], ["waiters"], ["show", name], ["top", "--count", "1"], ["break", name],
             ["trust", "--all"], ["break", name, "--yes"], ["break", f"no {name}"])  # fmt: skip
    for words in lines:
        line = ["-A", "tests.integration.app", "redlock", *words]
        told = CliRunner().invoke(celery, line, input="n\n", color=True).output
        told = re.sub("\x1b\\[[01]m", "", told)  # heads are bold
        assert shown in told, words
        assert not set("\x1b\x07\u202e") & set(told), words


@pytest.mark.usefixtures("stage")
def test_a_message_behind_another_one_has_no_moment_of_its_next_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    id_ = str(uuid.uuid4())
    waits = {"resources": ["k"], "resource": "k", "rate": "", "reason": "the lock was taken",
             "task_id": id_, "task": "late", "deferrals": 1,
             "since": "2026-01-01T00:00:00+00:00", "tries_in": 0.0}  # fmt: skip
    monkeypatch.setattr("celery.app.control.Control.broadcast", lambda *_, **__: [{"w": [waits]}])
    assert in_json("show", id_)["task"]["next_try"] is None
    told = command("show", id_).output
    assert "WAITS FOR  k\n" in told
    assert "NEXT TRY" not in told


WRONG = """
from celery import Celery, _state
from celery_redlock import LockedTask

app = Celery("wrong", broker="redis://localhost", set_as_default=False)

@app.task(base=LockedTask, lock_key="k:{nn}", name="shop.f", shared=False)
def f(n): ...
"""
WORDS = [["status"], ["locks"], ["waiters"], ["claims"], ["show", "r"], ["break", "r"],
         ["trust", "--all"], ["top", "--count", "1"], ["options", "shop.f"],
         ["doctor"]]  # fmt: skip


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_each_command_says_in_one_line_what_is_wrong_with_the_settings(
    words: list[str], run_of: Run
) -> None:
    told = run_of(WRONG, *words)
    assert told.exit_code == 1
    assert told.output.startswith("Error: task 'shop.f': lock_key='k:{nn}': ")
    assert told.output.count("\n") == 1
    assert "no app is given" not in told.output


def test_who_forgets_to_name_the_app_is_told(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "celery", "redlock", "locks"]
    told = fork_server.run(line, cwd=tmp_path)
    assert told.returncode == 1
    use = "Error: no app is given. Use: celery -A shop redlock locks (without an app: app: "
    assert told.stderr.startswith(use)


def test_rules_are_shown_with_where_each_was_set(stage: Stage) -> None:
    table = command("options", "--queue", "other", WORK)
    assert table.exit_code == 0
    first, *rows = table.output.splitlines()
    assert first == f"{WORK} in queue other"
    assert rows[0].split(None, 2) == ["key", "'k:{key}'", f"task '{WORK}': lock_key"]
    shown = in_json("options", WORK)
    assert (shown["task"], shown["queue"]) == (WORK, "celery")
    assert shown["options"]["ttl"] == {"value": 30.0, "from": "built-in"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "tests.integration.app.wrok",
            "is not a task of this app; did you mean 'tests.integration.app.work'",
        ),
        ("tests.integration.app.add", "takes no lock"),
    ],
)
def test_a_task_without_rules_is_told_with_a_proposal(stage: Stage, name: str, words: str) -> None:
    asked = command("options", name)
    assert asked.exit_code == 1
    assert words in asked.output


def test_celerys_own_tasks_have_no_rules_though_they_are_locked_tasks(nodes: Nodes) -> None:
    app = Celery("base", broker="memory://", task_cls=LockedTask, set_as_default=False)
    app.conf.redlock_nodes = [node.url for node in nodes]
    with pytest.raises(ClickException, match="takes no lock: it is Celery's own"):
        app.start(["redlock", "options", "celery.chord_unlock"])


@pytest.mark.parametrize("propagate", [True, False])
@pytest.mark.parametrize("disabled", [True, False])
def test_the_doctor_names_a_worker_whose_lines_reach_no_handler(
    make_stage: MakeStage, nodes: Nodes, monkeypatch: pytest.MonkeyPatch,
    propagate: bool, disabled: bool,
) -> None:  # fmt: skip
    """As an application's own configuration of logging may leave them."""
    app = make_stage(nodes).app
    monkeypatch.setattr(logging.getLogger("celery_redlock"), "propagate", propagate)
    monkeypatch.setattr(logging.getLogger(control.__name__), "disabled", disabled)
    answer = [{"celery@web1": control.redlock_settings(SimpleNamespace(app=app))}]
    monkeypatch.setattr("celery.app.control.Control.broadcast", lambda *_, **__: answer)
    told = command("doctor")
    line = "warning  worker celery@web1: logging=no handler: lines of the logger 'celery_redlock'"
    assert (line in told.output) == (disabled or not propagate)
    assert told.exit_code == 0


@pytest.mark.usefixtures("no_worker")
def test_the_doctor_says_what_is_wrong_and_which_nodes_vote(
    make_stage: MakeStage, mortal_nodes: Nodes
) -> None:
    make_stage(mortal_nodes, redlock_queues={"celrey": {}})
    told = command("doctor")
    assert told.exit_code == 0
    first, *rest = told.output.splitlines()
    assert first == "3 of 3 nodes vote, 2 needed"
    for line, node in zip(rest, mortal_nodes, strict=False):
        assert line == f"ok       127.0.0.1:{node.port} (redlock_nodes): votes"
    lints = rest[3:]
    assert "No problems found." not in lints
    assert [line for line in lints if line.startswith("warning  app: redlock_queues='celrey'")]
    assert [line for line in lints if line.startswith("advice   acks_late=False")]
    explain = "celery redlock explain"
    count = sum(line.startswith("warning") for line in rest)
    assert rest[-1] == f"{count} warnings found. See `{explain} doctor-reports-a-setting`"
    codes = f"`{explain} a-node-gives-no-vote` and `{explain} doctor-reports-a-setting`"
    for node, errors in zip(mortal_nodes, ("1 error", "2 errors"), strict=False):
        node.kill()
        told = command("doctor")
        assert told.output.endswith(f"\n{errors} and {count} warnings found. See {codes}\n")
        assert told.exit_code == 1
    shown = in_json("doctor")
    assert (shown["nodes"]["voting"], shown["nodes"]["from"]) == (1, "redlock_nodes")
    assert len(shown["nodes"]["failing"]) == 2
    assert {"level", "setting", "value", "hint"} == set(shown["lints"][0])


@pytest.mark.usefixtures("no_worker")
def test_the_doctor_finds_no_problem_where_there_is_none(nodes: Nodes, run_of: Run) -> None:
    told = run_of(f"from celery import Celery\napp = Celery(broker={nodes[0].url!r})", "doctor")
    assert told.exit_code == 0, told.output
    assert told.output.splitlines() == [
        "1 of 1 nodes vote, 1 needed",
        f"ok       127.0.0.1:{nodes[0].port} (broker_url): votes",
        "No problems found.",
    ]


@pytest.mark.usefixtures("no_worker")
def test_the_doctor_advises_against_two_nodes(make_stage: MakeStage, nodes: Nodes) -> None:
    line = (
        "advice   app: redlock_nodes=2 nodes: while one of them is away, no lock is granted: name "
    )
    for count in (2, 3):
        make_stage(nodes[:count])
        assert (line in command("doctor").output) == (count == 2)


@pytest.mark.usefixtures("no_worker")
def test_a_node_that_nobody_has_used_is_new_and_not_silent_and_stays_so(
    make_stage: MakeStage,
) -> None:
    with embedded_nodes(3) as new:
        make_stage(new)
        told = command("doctor")
        assert told.exit_code == 1  # the first lock would have to wait
        assert told.output.count("(redlock_nodes): new: will grant no lock for 61 s") == 3
        assert "restart guard" not in told.output
        last = " warnings found. See `celery redlock explain restarted-and-new-nodes` and `celery "
        assert last in told.output.splitlines()[-1]
        shown = in_json("doctor")["nodes"]
        assert (shown["new"], shown["silent"]) == (shown["names"], {})
        assert not any(node.client().keys("*") for node in new)  # to look is not to use


HELP = [[], *([words[0]] for words in WORDS)]


@pytest.mark.parametrize("words", HELP, ids=lambda words: " ".join(words) or "all")
def test_a_help_text_fits_a_terminal(words: list[str]) -> None:
    told = CliRunner().invoke(celery, ["redlock", *words, "--help"], terminal_width=80).output
    assert not re.search(r"\w\.\.\.$", told, re.MULTILINE)
    assert max(map(len, told.splitlines())) <= 80


class Terminal:
    """A command that runs at a terminal of 80 columns and 24 lines."""

    def __init__(self, *words: str) -> None:
        self.output, end = "", pty.openpty()
        self._side, other = end
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
        line = [sys.executable, "-m", "celery", "-A", "tests.integration.app", "redlock", *words]
        env = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
        std = {"stdin": other, "stdout": other, "stderr": other}
        self.process = fork_server.Process(line, cwd=ROOT, env={**env, "TERM": "xterm"}, **std)
        os.close(other)

    def read(self) -> bool:
        """Read what is there; return whether the command goes on."""
        if select.select([self._side], [], [], 0.1)[0]:
            try:
                self.output += os.read(self._side, 65536).decode()
            except OSError:  # the other side is closed
                return False
        return True

    def press(self, key: str) -> None:
        os.write(self._side, key.encode())

    def lines(self) -> list[str]:
        while self.read():
            pass
        self.close()
        return re.sub(r"\x1b\[[\d;]*m", "", self.output).splitlines()

    def screen(self) -> list[str]:
        screens = [one for one in self.output.split("\x1b[H") if one.endswith("\x1b[J")]
        text = screens[-1] if screens else ""
        return re.sub(r"\x1b\[[\d;]*[mKJ]", "", text).splitlines()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._side)


def hold_on_nodes(nodes: Nodes, holders: dict[str, str]) -> None:
    """Write locks of tasks by hand. holders: task ids, by resource."""
    for node in nodes:
        for key, task_id in holders.items():
            label = f"{task_id}:shop.orders.take_from_stock:0:0 celery@worker-1.shop.example"
            node.client().set(lock_key("redlock", key), f"token:1:{label}", px=600_000)


@pytest.mark.usefixtures("no_worker")
def test_a_table_has_the_first_characters_of_an_id_and_show_the_whole_one(stage: Stage) -> None:
    task_id = str(uuid.uuid4())
    hold_on_nodes(stage.nodes, {"stock:sku-7": task_id, "stock:sku-8": task_id})
    for words in (["locks"], ["show", "stock:sku-7"], ["top", "--count", "1"]):
        assert f" {task_id[:8]}-... " in command(*words).output, words
    lines = Terminal("locks").lines()
    assert [line for line in lines if f"{task_id[:8]}-..." in line]
    assert max(map(len, lines)) <= 80
    for name in (task_id, task_id[:8], f"{task_id[:8]}-...", task_id[:20]):
        assert in_json("show", name)["task"]["task_id"] == task_id
    told = command("show", task_id).output
    assert f"[{task_id}]" in told
    assert f" {task_id[:8]}-... " in told
    assert in_json("show", task_id[:7])["task"] is None
    assert {one["holder"]["task_id"] for one in in_json("locks")["locks"]} == {task_id}


@pytest.mark.usefixtures("no_worker")
def test_ids_that_begin_alike_are_whole_and_so_are_those_of_the_users_own(stage: Stage) -> None:
    one, other = (f"4c8f3226{str(uuid.uuid4())[8:]}" for _ in range(2))
    own = "import-2026-11"
    hold_on_nodes(stage.nodes, {"a": one, "b": other, "c": own})
    told = command("locks").output
    assert [f" {name} " in told for name in (one, other, own)] == [True, True, True]
    asked = command("show", "4c8f3226")
    assert asked.exit_code == 1
    assert (
        asked.output
        == f"Error: 4c8f3226 begins several task ids: {', '.join(sorted((one, other)))}\n"
    )
    assert in_json("show", other)["task"]["resources"] == ["b"]
    assert in_json("show", own)["task"]["task_id"] == own
    told = in_json("show", "import-2")  # a resource may have this name
    assert (told["task"], told["resource"]) == (None, "import-2")


@pytest.mark.parametrize("pool", ["prefork"])
def test_the_doctor_asks_running_workers_for_what_all_clients_must_share(
    of_pool: Standing, run_of: Run
) -> None:
    """No log line proves that the old clients are gone: a record has the last one's settings."""
    stage = of_pool.stage
    worker, urls = f"worker w1@{socket.gethostname()}", [node.url for node in stage.nodes]
    named = ", ".join(sorted(url.removeprefix("redis://").split("/")[0] for url in urls))
    other_names = [url.replace("127.0.0.1", "localhost") for url in urls]
    code = "from celery import Celery\napp = Celery(broker={!r})\napp.conf.redlock_nodes = {!r}\n"
    code += f"app.conf.update(redlock_node_timeout={PATIENCE}, redlock_max_ttl=200)\n"
    less = "nodes=3): this app uses max_ttl=200 restart_guard=off nodes=1: "
    for nodes, level, words in (
        (urls[:1], "error  ", less),
        (other_names, "warning", f"{worker}={named}: this app names localhost:"),
        (urls, "", ""),
    ):

        def lines(nodes: list[str] = nodes) -> list[str]:
            return run_of(code.format(stage.broker.url, nodes), "doctor").output.splitlines()

        if words:
            (line,) = eventually(lambda: [one for one in lines() if worker in one])
            assert line.startswith(f"{level}  {worker}")
            assert words in line
        else:
            assert not [one for one in lines() if worker in one]


@pytest.mark.usefixtures("no_worker")
def test_a_node_that_evicts_keys_is_an_error_of_the_doctor_as_of_the_worker(stage: Stage) -> None:
    client, name = stage.nodes[0].client(), f"127.0.0.1:{stage.nodes[0].port}"
    client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        unlimited = command("doctor")  # such a node evicts nothing yet, and no worker tells of it
        assert command("status").exit_code == 0
        client.config_set("maxmemory", "1gb")
        limited = command("doctor")
        told = command("status")
    finally:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "0")
    found = f"{name}: maxmemory-policy=allkeys-lru: with a full memory"
    assert f"warning  {found}" in unlimited.output
    assert f"error    {found}" in limited.output
    assert (unlimited.exit_code, limited.exit_code) == (0, 1)
    assert told.exit_code == 1
    assert f"\n{name} has maxmemory-policy allkeys-lru: with a full memory" in told.output
    assert "explain a-node-evicts-keys" in told.output
    assert "maxmemory" not in command("doctor").output + command("status").output


@pytest.mark.usefixtures("no_worker")
def test_a_replica_among_the_nodes_is_an_error_of_the_doctor(stage: Stage) -> None:
    stage.nodes[0].client().replicaof("127.0.0.1", 1)
    try:
        told = command("doctor")
    finally:
        stage.nodes[0].client().replicaof("NO", "ONE")
    name = f"127.0.0.1:{stage.nodes[0].port}"
    assert f"error    {name} (redlock_nodes): no vote: it is a slave\n" in told.output
    assert (told.exit_code, "1 error " in told.output) == (1, True)


@pytest.mark.usefixtures("no_worker")
def test_the_doctor_warns_of_a_member_of_a_cluster(run_of: Run) -> None:
    with EmbeddedNode(cluster_enabled="yes") as member:
        serve_all_slots(member)
        told = run_of(
            "from celery import Celery\nimport celery_redlock\napp = Celery(broker='memory://')\n"
            f"app.conf.redlock_nodes = [{member.url!r}]\n",
            "doctor",
        )
    warning = f"warning  127.0.0.1:{member.port}: cluster-enabled=yes: once the slot of its locks"
    assert warning in told.output
    assert (told.exit_code, "1 of 1 nodes vote" in told.output) == (0, True)


def test_a_long_line_of_text_is_broken_between_words(stage: Stage) -> None:
    whole = command("doctor").output.split()
    lines = Terminal("doctor").lines()
    assert max(map(len, lines)) <= 80
    assert len(lines) > len(command("doctor").output.splitlines())
    assert {word for line in lines for word in line.split()} == {*whole}


@pytest.mark.usefixtures("no_worker")
def test_an_empty_list_says_so(stage: Stage) -> None:
    assert command("locks").output == "No locks are held.\n"
    nobody = "No process waits.\nWhich tasks wait is unknown.\n"
    assert command("waiters").output.startswith(nobody)
    assert "no worker answered" in command("waiters").output
    assert in_json("waiters")["workers"] == []
    of_it = "No lock is held on k:k.\nIf it is the id of a task, that task may be queued, lost, or "
    assert command("show", "k:k").output.startswith(of_it)
    task_id = str(uuid.uuid4())
    of_it = f"No task with the id {task_id} holds a lock.\nA task with this id may be queued, "
    assert command("show", task_id).output.startswith(of_it)
    of_it = f"No task with the id {task_id[:8]} holds a lock.\nGive the whole id of a task "
    assert command("show", task_id[:8]).output.startswith(of_it)
    assert command("top", "--count", "1").output.count("No locks are held.") == 1


@dataclass
class Busy:
    """A stage on which one task runs under its lock until "go", and another waits for that."""

    stage: Stage
    worker: ForkedWorker
    key: str
    running: Any
    waiting: Any

    @property
    def resource(self) -> str:
        return f"k:{self.key}"

    def go_on(self) -> None:
        self.stage.log.with_name("go").touch()
        assert self.running.get(timeout=120)
        assert self.waiting.get(timeout=120) == 0
        self.stage.see_freed(self.resource)


@pytest.fixture
def busy(standing: Standing, key: str) -> Busy:
    stage = standing.stage
    running = stage.tasks.until.delay(key, "go")
    stage.wait_for("begin")
    waiting = stage.tasks.late.delay(key)
    stage.see_deferred(waiting)
    return Busy(stage, standing.workers[0], key, running, waiting)


def see_waiting(pattern: str) -> dict[str, Any]:
    """Return the row of the one that waits; between two tries it is nowhere for a moment."""
    rows = eventually(lambda: in_json("waiters", pattern)["waiting"])
    return dict(rows[0])


def test_an_operator_sees_who_holds_a_lock_and_who_waits_for_it(busy: Busy) -> None:
    (held,) = in_json("locks", busy.resource)["locks"]
    assert held["resource"] == busy.resource
    assert held["holder"]["task_id"] == busy.running.id
    assert held["holder"]["task"] == busy.stage.tasks.until.name
    assert held["holder"]["worker"].startswith("w1@")
    assert held["held"]
    assert len(held["votes"]) >= held["needed"]
    waiting = see_waiting(busy.resource)
    assert (waiting["task_id"], waiting["resources"]) == (busy.waiting.id, [busy.resource])
    assert waiting["deferrals"] >= 1
    apart = rf"RESOURCE .*\n{busy.resource} .* waits\n\nWAITS FOR .*\n{busy.resource} .*\n"
    eventually(lambda: re.fullmatch(apart, command("waiters", busy.resource).output))
    told = command("top", "--count", "1", busy.resource).output
    assert len(re.findall(r"\n\n(RESOURCE|WAITS FOR) ", told)) == 3, told
    for words in (("show", busy.resource), ("top", "--count", "1", busy.resource)):
        assert in_json(*words)["locks"][0]["holder"] == held["holder"], words
    told = command("show", busy.resource).output
    assert re.match("RESOURCE .* HELD FOR .* VALID FOR", told)
    assert f" {busy.running.id[:8]}-... " in told
    twice = command("top", "--count", "2", "--interval", "0.01", busy.resource).output
    assert twice.count(f" {busy.running.id[:8]}-... ") >= 2
    busy.go_on()
    assert in_json("locks", busy.resource)["locks"] == []
    eventually(lambda: not in_json("waiters", busy.resource)["waiting"])


@pytest.mark.slow
def test_a_task_is_found_by_its_id_whatever_became_of_it(busy: Busy) -> None:
    running, waiting, tasks = busy.running, busy.waiting, busy.stage.tasks
    holder = f"{tasks.until.name}[{running.id}] on w1@{socket.gethostname()}"
    held = in_json("show", running.id)["task"]
    assert (held["task"], held["state"]) == (tasks.until.name, "STARTED")
    assert (held["holds"], held["resources"]) == (True, [busy.resource])
    told = command("show", running.id).output
    assert re.search(rf"HOLDS +{busy.resource}\n", told)
    assert "VALID FOR" in told
    waits = in_json("show", waiting.id)["task"]
    found = (waits["state"], waits["resources"], waits["holds"])
    assert found == ("DEFERRED", [busy.resource], False)
    assert (waits["holder"], waits["next_try"][:2]) == (holder, "20")
    assert f"HELD BY    {holder}\n" in command("show", waiting.id).output
    next_try = r"NEXT TRY +in \d+\.\d s \(\d\d:\d\d:\d\d UTC\)\n"  # of a worker that answers
    eventually(lambda: re.search(next_try, command("show", waiting.id).output))
    line = f"Task {tasks.late.name}[{waiting.id}] deferred: lock '{busy.resource}'"
    assert f"{line} is held by {holder}; it waits for a release\n" in busy.worker.lately()
    busy.go_on()
    done = in_json("show", running.id)["task"]
    assert (done["state"], done["resources"]) == ("SUCCESS", [])
    assert re.search("STATE +SUCCESS\n", command("show", running.id).output)
    nobody = in_json("show", str(uuid.uuid4()))
    assert (nobody["task"], nobody["locks"], nobody["waiters"]["waiting"]) == (None, [], [])


@pytest.mark.slow
def test_a_task_for_which_no_quorum_votes_is_among_those_that_wait(
    make_stage: MakeStage, mortal_nodes: Nodes
) -> None:
    stage = make_stage(mortal_nodes)
    stage.worker(concurrency=1)
    for node in mortal_nodes[1:]:
        node.kill()
    result = stage.tasks.work.apply_async(("k",), lock={"backoff": {"first": 1e7, "cap": 1e7}})
    stage.see_deferred(result)
    (row,) = eventually(lambda: in_json("waiters")["waiting"])
    assert (row["task_id"], row["resources"]) == (result.id, ["k:k"])
    assert row["reason"].startswith("no quorum of 2 nodes (127.0.0.1:")
    # a worker that does not answer within 1 s is left out, so each is looked at until it is told of
    (shown,) = eventually(lambda: in_json("show", "k:k")["waiters"]["waiting"])
    assert shown["reason"] == row["reason"]
    assert eventually(lambda: in_json("show", result.id)["task"]["reason"]) == row["reason"]
    line = r"WHY +no quorum of 2 nodes \(.*\)\. See `celery redlock explain no-quorum`\n"
    eventually(lambda: re.search(line, command("show", result.id).output))

    def is_told() -> bool:
        told = command("waiters").output
        return "no quorum of 2 nodes" in told and result.id[:8] in told

    eventually(is_told)
    ((_, rows),) = asked(stage, "redlock_waiting").items()
    assert rows[0]["task_id"] == result.id


def asked(stage: Stage, command: str) -> Any:
    """Return what the worker answers, by its name: who is not named is waited for to the end."""
    to = {"destination": stage.see_listening(), "timeout": 30}
    (reply,) = stage.app.control.broadcast(command, reply=True, **to)
    return reply


@pytest.mark.parametrize("pool", pools("prefork", "threads", every=("prefork", "threads")))
def test_a_worker_tells_what_it_holds(of_pool: Standing, key: str) -> None:
    stage, (worker,) = of_pool.stage, of_pool.workers
    result = stage.tasks.until.delay(key, f"{key}-go")
    stage.wait_for("begin")
    told = asked(stage, "redlock_held")
    ((name, (held,)),) = told.items()
    assert name.startswith("w1@")
    assert (held["resource"], held["holder"]["task_id"]) == (f"k:{key}", result.id)
    assert held["since"] is not None
    stage.log.with_name(f"{key}-go").touch()
    result.get(timeout=120)
    stage.see_freed(f"k:{key}")
    eventually(lambda: asked(stage, "redlock_held")[name] == [])
    assert "Traceback" not in worker.lately()


@pytest.mark.slow
def test_no_command_shows_a_password_or_a_token(guarded_stage: Stage) -> None:
    lines = ("status", "locks", "waiters", "show k:k", "top --count 1", f"options {WORK}", "doctor",
             "trust --all --yes", "break k:k --yes")  # fmt: skip
    stage, (first, second, refusing) = guarded_stage, guarded_stage.nodes
    told: dict[str, str] = {}
    with Redis.from_url(first.url, decode_responses=True) as client:
        for more in ("", " --json"):
            with stage.tasks.work.lock_for("k", wait=60):
                token = client.get(lock_key("redlock", "k:k")).partition(":")[0]
                shown = {line + more: command(*(line + more).split()) for line in lines}
            told |= {line: result.output for line, result in shown.items()}
            assert all(told.values())
            assert token not in "".join(told.values())
    assert f"127.0.0.1:{refusing.port}" in told["doctor"]
    left = f"127.0.0.1:{first.port}, 127.0.0.1:{second.port}"
    assert f"k:k is broken on {left}; " in told["break k:k --yes"]
    assert PASSWORD not in "".join(told.values())


@pytest.mark.slow
def test_breaking_a_lock_is_asked_for_and_learned_by_its_body_alone(stage: Stage) -> None:
    stage.worker(concurrency=2)
    loser, keeper = stage.tasks.loses.delay("k"), stage.tasks.until.delay("other", "go")
    stage.wait_for("begin", 2)
    asked = command("break", "k:k", says="n\n")
    assert asked.exit_code == 1
    assert f"[{loser.id}] on w1@" in asked.output
    assert not stage.is_free("k:k")
    with heard(stage) as events:
        (broken,) = in_json("break", "k:k", "--yes")["locks"]
        assert broken["lock"]["holder"]["task_id"] == loser.id
        assert len(broken["gone_from"]) >= 2
        with pytest.raises(LockLost, match="an operator broke it"):
            loser.get(timeout=120)
        told = eventually(lambda: [e for e in events if e["type"] == "task-lock-broken"])
    assert (told[0]["uuid"], told[0]["resource"]) == (loser.id, "k:k")
    assert told[0]["result"] == f"k:k: its lock is broken by {told[0]['by']}"
    assert not stage.is_free("k:other")
    stage.log.with_name("go").touch()
    assert keeper.get(timeout=120)
    nobody = command("break", "k:k", "--yes")
    assert nobody.exit_code == 1
    assert "no lock is held on k:k" in nobody.output


@pytest.mark.usefixtures("no_worker")
def test_breaking_a_permit_leaves_the_others_to_their_holders(stage: Stage, nodes: Nodes) -> None:
    urls = [node.url for node in nodes]
    with (
        Redlock(urls, node_timeout=PATIENCE) as one,
        Redlock(urls, node_timeout=PATIENCE) as other,
        one.lock("p", limit=2, wait=60),
    ):
        settle(one)  # else the last node may grant each of them the permit of the other
        with other.lock("p", limit=2, wait=60):
            settle(other)
            told = command("show", "p").output
            for permit in range(2):  # one table, with what `--permit` takes
                row = rf"^p \(permit {permit}\)  127\.0\.0\.1:\d+  \d+\.\d s$"
                assert len(re.findall(row, told, re.MULTILINE)) >= 2, told
            assert told.count("KEY EXPIRES IN") == 1
            (broken,) = in_json("break", "p", "--permit", "1", "--yes")["locks"]
            assert broken["lock"]["permit"] == 1
            assert [lock["permit"] for lock in in_json("locks")["locks"]] == [0]


def test_an_operator_sees_what_is_used_of_a_rate_and_gives_its_starts_back(
    shared_stage: Stage, key: str
) -> None:
    stage, rate, of = shared_stage, {"lock": {"rate": "1/h"}}, f"rated:{key}"
    with heard(stage) as events:
        stage.tasks.rated.apply_async((key,), **rate).get(timeout=120)
        waiting = stage.tasks.rated.apply_async((key,), **rate)
        stage.see_deferred(waiting)
        told = eventually(lambda: [e for e in events if e["type"] == "task-deferred"])[0]
    assert re.match(rf"rate of {of}: 1/h, next start in 36\d\d s; deferrals: 1", told["result"])
    info = stage.info(waiting)["result"]
    assert (info["rate"], told["rate"]) == ("1/h", "1/h")
    assert 3500 < seconds_until(info["next_start"]) < 3700
    (used,) = in_json("locks", of)["rates"]
    assert (used["resource"], used["rate"], used["used"], used["starts"]) == (of, "1/h", 1, 1)
    assert used["next_start_in"] == pytest.approx(seconds_until(used["next_start"]), abs=60)
    assert 3500 < used["next_start_in"] < 3700
    of_it = rf"RESOURCE +RATE +STARTS USED +NEXT START\n{of} +1/h +1 of 1 +in 1 h \d min\n"
    for words in (["locks", of], ["show", of], ["top", "--count", "1", of]):
        assert re.search(of_it, command(*words).output), words
    row = see_waiting(of)
    assert (row["task_id"], row["resource"], row["rate"]) == (waiting.id, of, "1/h")
    assert 3500 < seconds_until(row["next_start"]) < 3700
    task = eventually(lambda: in_json("show", waiting.id)["task"])
    assert 3500 < seconds_until(task["next_try"]) < 3700  # as WHY says it, and no try before that
    shown = in_json("show", of)
    assert [one["resource"] for one in shown["rates"]] == [of]
    (process,) = shown["waiters"]["processes"]
    assert (process["resource"], process["waits_for"]) == (of, "rate")
    assert 3500 < seconds_until(process["next_start"]) < 3700
    waits = rf"{of} +0 .* waits for a start, free in 1 h \d min\n"
    assert re.search(waits, command("waiters", of).output)
    # of a worker that answers; its next try says nothing that the next start does not
    why = rf" 1 +rate of {of}: 1/h, next start in 1 h \d min\n"
    eventually(lambda: re.search(why, command("waiters", of).output))
    asked = command("break", of, says="n\n")
    assert (asked.exit_code, stage.runs_of(key)) == (1, 1)
    assert f"{of} (1/h) gets 1 used starts back\nMore bodies may start" in asked.output
    (freed,) = in_json("break", of, "--yes")["rates"]
    assert (freed["rate"]["resource"], set(freed["starts_from"].values())) == (of, {1})
    waiting.get(timeout=60)


@pytest.mark.usefixtures("no_worker")
def test_the_claims_of_sends_are_shown_and_ended(stage: Stage) -> None:
    assert command("claims").output == "There are no claims.\n"
    first = stage.tasks.once_returns.delay("a")
    stage.tasks.once_returns.delay("b")
    eventually(lambda: [one["is_sent"] for one in in_json("claims")["claims"]] == [True, True])
    claim, _ = in_json("claims")["claims"]
    assert (claim["resource"], claim["task_id"]) == ("step:a", first.id)
    of_it = rf"step:a +tests.once_returns +{first.id[:8]}-... +sent +\d+ min \d+ s +\d, 2 needed\n"
    assert re.search(of_it, command("claims").output)
    assert [one["resource"] for one in in_json("claims", "*:b")["claims"]] == ["step:b"]
    assert command("show", "step:a").output.startswith("No lock is held on step:a.\nRESOURCE ")
    assert re.search(of_it, command("show", "step:a").output)
    (of_key,) = in_json("show", "step:a")["claims"]
    assert (of_key["resource"], of_key["task_id"]) == ("step:a", first.id)
    shown = in_json("show", first.id[:8])
    assert (shown["resource"], shown["task"]["task"]) == (first.id, "tests.once_returns")
    assert [one["resource"] for one in shown["claims"]] == ["step:a"]
    later = "a later call is its duplicate, or replaces it"
    why = rf"its call has the claim on step:a: for \d+ min \d+ s {later}"
    assert re.fullmatch(why, shown["task"]["reason"])
    asked = command("break", "--claim", "step:a", says="n\n")
    assert (asked.exit_code, stage.tasks.once_returns.delay("a").is_duplicate) == (1, True)
    assert f"tests.once_returns[{first.id}] has the claim on step:a\nIts message" in asked.output
    (ended,) = in_json("break", "--claim", "step:a", "--yes")["claims"]
    assert (ended["claim"], len(ended["gone_from"]) >= 2) == ({**claim, **ended["claim"]}, True)
    assert [one["resource"] for one in in_json("claims")["claims"]] == ["step:b"]
    assert not stage.tasks.once_returns.delay("a").is_duplicate
    nobody = command("break", "--claim", "step:c", "--yes")
    assert (nobody.exit_code, "there is no claim on step:c" in nobody.output) == (1, True)
    both = command("break", "--claim", "--permit", "1", "step:a", "--yes")
    assert (both.exit_code, "give one of them" in both.output) == (1, True)


def seconds_until(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp() - time.time()


@pytest.mark.usefixtures("no_worker")
def test_an_operator_sees_how_many_permits_are_taken(stage: Stage, nodes: Nodes) -> None:
    with (
        Redlock([node.url for node in nodes], node_timeout=PATIENCE) as redlock,
        redlock.lock("p", limit=3, wait=60),
        redlock.lock("plain", wait=60, rate="2/h"),
    ):
        permits, plain = in_json("locks")["locks"]
        assert (permits["used"], permits["limit"]) == (1, 3)
        assert (plain["used"], plain["limit"]) == (1, 1)
        rows = r"p \(permit \d\) .*, 2 needed  1 of 3\nplain .*, 2 needed\n"
        assert re.search(rows, command("locks").output)
        for pattern, shown in (("p", ["p"]), ("pl*", ["plain"]), ("l", [])):
            assert [one["resource"] for one in in_json("locks", pattern)["locks"]] == shown
        assert command("locks", "l").output == "No lock is held on l.\n"
        assert "PERMITS" not in command("show", "plain").output
        keeps = "keeps a second delivery of the message from running beside the first"
        assert keeps not in command("locks").output
        with redlock.lock("run:4c8f3226", wait=60):
            assert command("locks").output.endswith(f"\nrun:<task id>: {keeps}\n")
        for words in ("locks", "plain"), ("top", "--count", "1", "plain"):
            (used,) = in_json(*words)["rates"]
            assert (used["resource"], used["used"], used["starts"]) == ("plain", 1, 2), words
    eventually(lambda: "PERMITS" not in command("locks").output)  # a release does not wait


@pytest.mark.usefixtures("no_worker")
def test_an_order_that_no_quorum_of_nodes_took_ends_with_a_status_of_its_own(
    make_stage: MakeStage, mortal_nodes: Nodes
) -> None:
    stage = make_stage(mortal_nodes)
    with stage.tasks.work.lock_for("k", wait=60) as lock:
        for node in mortal_nodes[1:]:
            node.kill()
        told = command("break", "k:k", "--yes")
        assert told.exit_code == 1, told.output
        told = command("trust", "--all", "--yes")
        assert told.exit_code == 1, told.output
        assert lock.resource == "k:k"


def test_the_nodes_are_shown_and_a_quorum_that_is_away_is_told_by_the_exit_status(
    make_stage: MakeStage, mortal_nodes: Nodes
) -> None:
    make_stage(mortal_nodes)
    assert command("status").exit_code == 0
    assert in_json("status")["voting"] == 3
    for node in mortal_nodes[:2]:
        node.kill()
    told = command("status")
    assert told.exit_code == 1
    line = "1 of 3 nodes vote, 2 needed. See `celery redlock explain no-quorum`"
    assert told.output.splitlines()[-1] == line
    away = in_json("status")["nodes"][0]
    assert (away["votes"], "refused" in away["error"]) == (False, True)


def test_nodes_are_trusted_by_name_once_that_is_confirmed(
    make_stage: MakeStage, mortal_nodes: Nodes
) -> None:
    make_stage(mortal_nodes)
    for node in mortal_nodes:
        node.client().flushall()
    name = f"127.0.0.1:{mortal_nodes[0].port}"
    asked = command("trust", name, says="n\n")
    assert asked.exit_code == 1
    assert (
        f"Let {name} grant locks immediately? If a task may still run under a lock" in asked.output
    )
    assert "two tasks can run together. [y/N]" in asked.output
    assert in_json("status")["voting"] == 0
    assert in_json("trust", name, "--yes")["trusted"] == {name: ""}
    assert in_json("status")["voting"] == 1
    assert command("trust", "--all", says="y\n").exit_code == 0
    assert in_json("status")["voting"] == 3
    with Redlock([node.url for node in mortal_nodes], node_timeout=PATIENCE) as redlock:
        settle(redlock)
        with redlock.lock("k:k", wait=60):
            settle(redlock)
            line = f"{name} grants locks from now on; it holds the lock 'k:k': if its owner still "
            assert line in command("trust", name, "--yes").output
    assert "is not a node of this app" in command("trust", "127.0.0.1:1").output
    assert "--all" in command("trust").output


WAITS = """
import sys
from celery_redlock import Redlock
with Redlock(sys.argv[1:], node_timeout=2.0) as redlock, redlock.lock("k:k", wait=600):
    pass
"""


@pytest.mark.usefixtures("no_worker")
def test_an_operator_sees_a_stopped_process_that_waits(stage: Stage) -> None:
    def shown(pid: int) -> Any:
        rows = [row for row in in_json("waiters")["processes"] if row["pid"] == pid]
        return rows[0] if rows and len(rows[0]["nodes"]) == 3 else None

    line = [sys.executable, "-c", WAITS, *(node.url for node in stage.nodes)]
    with stage.tasks.work.lock_for("k", wait=60), fork_server.Process(line) as process:
        try:
            eventually(lambda: shown(process.pid))
            process.send_signal(signal.SIGSTOP)
            row = shown(process.pid)
            assert (row["resource"], row["rank"], row["name"]) == ("k:k", 0, socket.gethostname())
            assert row["since"].startswith("20")
            assert in_json("show", "k:k")["waiters"]["processes"] == [row]
            assert in_json("show", "k:other")["waiters"]["processes"] == []
            for pattern, rows in {"k:*": [row], "other:*": []}.items():
                assert in_json("top", "--count", "1", pattern)["waiters"]["processes"] == rows
                assert in_json("waiters", pattern)["processes"] == rows
            for words in (["waiters", "k:*"], ["show", "k:k"]):
                told = command(*words).output
                of_it = rf"k:k +0 +{socket.gethostname()} +{process.pid} .* 3 of 3 +waits\n"
                assert re.search(of_it, told), told
                assert f"{socket.gethostname()} did not answer" not in told  # it is no worker
        finally:
            process.kill()


@pytest.mark.parametrize("pool", slow_but(("prefork",), ("prefork", "threads", "gevent")))
def test_a_stopped_worker_is_shown_at_its_place_with_since_when_its_first_message_waits(
    stage: Stage, pool: str
) -> None:
    first = stage.worker("w1", pool=pool, concurrency=1, queues=["other"])
    stage.worker("w2", pool=pool, concurrency=1, queues=["celery"])
    (stopped,), (answers,) = stage.see_listening("w1"), stage.see_listening("w2")

    def shown() -> Any:
        rows = in_json("show", "k:k")["waiters"]["processes"]
        return rows if [len(row["nodes"]) for row in rows] == [3, 3] else None

    with stage.tasks.patient.lock_for("k", wait=60):
        results = []
        for queue in ("other", "celery", "other"):  # what is deferred last changes no order
            results.append(stage.tasks.patient.apply_async(("k",), queue=queue))
            stage.see_deferred(results[-1])
        rows = eventually(shown)
        assert [(row["rank"], row["name"]) for row in rows] == [(0, stopped), (1, answers)]
        told = eventually(lambda: asked_of(stage, stopped))
        since = datetime.fromisoformat(told[0]["since"]).timestamp()
        assert datetime.fromisoformat(rows[0]["since"]).timestamp() == pytest.approx(since, abs=0.1)
        first.signal(signal.SIGSTOP)
        try:
            seen = in_json("waiters")
            assert stopped not in seen["workers"]
            assert [row["name"] for row in seen["processes"]] == [stopped, answers]
            line = f"{stopped} did not answer: the messages that wait in it are not shown"
            assert line in command("waiters").output
        finally:
            first.signal(signal.SIGCONT)
    for result in results:
        result.get(timeout=60)
    eventually(lambda: not in_json("waiters")["processes"])


def asked_of(stage: Stage, worker: str) -> Any:
    """Return the messages that wait in one of several workers, as it tells."""
    to = {"destination": [worker], "timeout": 30}
    (reply,) = stage.app.control.broadcast("redlock_waiting", reply=True, **to)
    return reply[worker]


@pytest.mark.usefixtures("no_worker")
def test_workers_that_wait_are_shown_in_order_and_it_is_said_that_they_do_not_answer(
    make_stage: MakeStage, mortal_nodes: Nodes
) -> None:
    make_stage(mortal_nodes)
    with Redlock([node.url for node in mortal_nodes], node_timeout=PATIENCE) as redlock:
        settle(redlock)
        for name, since in (("celery@web1", 30.0), ("celery@web2", 20.0)):
            register(redlock, f"{name}:7:aa", "k:k", since)
        settle(redlock)
    mortal_nodes[0].client().hset(waiting_key("redlock", "k:wrong"), "a", "b")
    mortal_nodes[2].kill()
    names = [f"127.0.0.1:{node.port}" for node in mortal_nodes]
    shown = in_json("waiters")
    assert [(row["name"], row["rank"]) for row in shown["processes"]] == [
        ("celery@web2", 0),
        ("celery@web1", 1),
    ]
    assert {tuple(row["nodes"]) for row in shown["processes"]} == {tuple(names[:2])}
    assert (list(shown["failing"]), shown["wrong_type"]) == (names[2:], {"k:wrong": names[:1]})
    told = command("waiters").output
    assert re.search(r"^RESOURCE +RANK +PROCESS +PID +WAITED +NODES +STATE$", told, re.MULTILINE)
    ranks = r"k:k +0 +celery@web2 .* 2 of 3 +gone\nk:k +1 +celery@web1 .* 2 of 3 +gone\n"
    assert re.search(ranks, told)
    for name in ("celery@web1", "celery@web2"):  # nobody listens as them
        assert told.count(f"{name} is gone: its messages are back in their queues\n") == 1
    assert f"no waiter for k:wrong can register on {names[0]}: " in told
    assert f"{names[2]} cannot be queried: " in told
    assert command("show", "k:k").output.count(f"{names[2]} cannot be queried: ") == 1


WITHOUT_QUORUM = [["locks"], ["waiters"], ["claims"], ["show", "k:k"], ["show", str(uuid.uuid4())]]


@pytest.mark.usefixtures("no_worker")
def test_without_a_quorum_no_command_says_that_no_lock_is_held(
    make_stage: MakeStage, mortal_nodes: Nodes
) -> None:
    make_stage(mortal_nodes)
    for victim in mortal_nodes[:2]:
        for words in WITHOUT_QUORUM:
            asks_workers = words[0] in ("waiters", "show")  # there is none to answer
            assert command(*words).exit_code == (2 if asks_workers else 0), words
        victim.kill()
    for words in WITHOUT_QUORUM:
        told = command(*words)
        assert told.exit_code == 2, words
        assert "1 of 3 nodes answered, 2 needed" in told.output, words
        assert told.output.endswith(" See `celery redlock explain no-quorum`\n"), words
        assert not re.search("No (lock|process|task|claim)|Nothing", told.output), words
        unknown = [line for line in told.output.splitlines() if line.endswith("is unknown.")]
        assert unknown, words
        assert len({*unknown}) == len(unknown), words
        assert command(*words, "--json").exit_code == 2, words


@pytest.mark.parametrize(
    "line",
    [
        "show|", "break|", "options|", f"options|{WORK}|--queue|", "top|--count|0",
        "break|k|--permit|-1",
    ]
    + [f"top|--interval|{text}" for text in ("nan", "0", "-1", "inf")],
)  # fmt: skip
def test_a_word_that_means_nothing_is_refused_with_a_sentence(stage: Stage, line: str) -> None:
    told = command(*line.split("|"))
    assert told.exit_code == 2
    assert re.search(r"Error: Invalid value for .*: .*\.$", told.output)


def test_a_broker_that_is_silent_ends_no_command_and_hides_no_break(
    nodes: Nodes, run_of: Run
) -> None:
    for node in nodes:
        node.client().set(lock_key("redlock", "k"), "token:1:somebody", px=600_000)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        code = f"from celery import Celery\napp = Celery(broker={url!r})\n"
        code += f"app.conf.redlock_nodes = {[node.url for node in nodes]}\n"
        shown = run_of(code, "show", "k").output
        assert "somebody" in shown
        assert "the workers cannot be asked who waits: no answer within" in shown
        waiters, checked = run_of(code, "waiters"), run_of(code, "doctor")
        broken = run_of(code, "break", "k", "--yes")
    assert (waiters.exit_code, "Which tasks wait is unknown." in waiters.output) == (2, True)
    line = "warning  workers: settings=unknown: no worker can be asked: no answer within 5 s"
    assert line in checked.output
    assert (checked.exit_code, "No problems found" in checked.output) == (0, False)
    assert broken.exit_code == 0
    assert broken.stdout.startswith("k is broken on ")
    assert "no event is sent: no answer within" in broken.stderr


@pytest.mark.slow
def test_top_fits_a_terminal_shows_a_clock_and_ends_at_q(busy: Busy) -> None:
    waiting = [busy.stage.tasks.late.delay(busy.key) for _ in range(30)]
    for result in waiting:
        busy.stage.see_deferred(result)
    shown = Terminal("top", "--interval", "1", busy.resource)
    try:

        def shows_all() -> bool:
            assert shown.read(), shown.output[-2000:]
            text = "\n".join(shown.screen())
            return busy.resource in text and bool(re.search(r"\.\.\. and \d+ more", text))

        eventually(shows_all)
        lines = shown.screen()
        assert len(lines) <= 24
        assert max(map(len, lines)) <= 80
        assert re.match(r"\d\d:\d\d:\d\d  figures \d+ s old  3 of 3 nodes vote, 2 needed", lines[0])
        heads = [line.split()[0] for line in lines if re.match("NODE |RESOURCE |WAITS FOR", line)]
        assert heads == ["NODE", "RESOURCE", "RESOURCE", "WAITS"]
        first = lines[0][:8]
        eventually(lambda: shown.read() and shown.screen()[0][:8] != first)  # the clock goes on
        shown.press("q")
        while shown.read():
            pass
        assert shown.process.wait(timeout=60) == 0
    finally:
        shown.close()
    busy.go_on()
    for result in waiting:
        assert result.get(timeout=120) == 0


@pytest.mark.slow
def test_top_does_without_columns_on_a_narrow_terminal_and_ctrl_c_ends_it(stage: Stage) -> None:
    for node in stage.nodes:
        for number in range(10, 40):
            label = f"{uuid.uuid4()}:vendor.reports.build_{number}:0:0 celery@worker-1.shop.example"
            key = lock_key("redlock", f"vendor.reports.build_{number}")
            node.client().set(key, f"token:1:{label}", px=60_000)
    shown = Terminal("top", "--interval", "1")
    try:
        eventually(lambda: shown.read() and "build_1" in "\n".join(shown.screen()))
        seen = []
        for number in range(10, 40):  # as resource and as task
            name = f"vendor.reports.build_{number}"
            seen += [name for line in shown.screen() if line.split()[:2] == [name, name]]
        assert len(seen) > 10, shown.screen()  # the lines that no other table needs
        shown.process.send_signal(signal.SIGINT)
        while shown.read():
            pass
        assert shown.process.wait(timeout=60) == 0
    finally:
        shown.close()


@pytest.mark.usefixtures("no_worker")
def test_a_lock_whose_holder_is_dead_tells_since_when_it_was_not_renewed(stage: Stage) -> None:
    line = [sys.executable, "-c", HOLDS, *(node.url for node in stage.nodes)]
    with fork_server.Process(line, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
    killed = time.monotonic()

    def is_told() -> bool:
        dead_for = time.monotonic() - killed
        (lock,) = in_json("show", "k:k")["locks"]
        assert lock["since_renewal"] + lock["valid_for"] == pytest.approx(600, abs=30)
        assert lock["since_renewal"] >= dead_for - 0.1
        return bool(lock["since_renewal"] > 1.0)

    eventually(is_told)
    assert re.search(r"k:k .* \d+\.\d s ago ", command("show", "k:k").output)


HOLDS = """
import sys, time
from celery_redlock import Redlock
with Redlock(sys.argv[1:], node_timeout=2.0, max_ttl=600) as redlock, redlock.lock("k:k", ttl=600):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.usefixtures("no_worker")
def test_without_a_result_backend_a_task_is_shown_from_what_nodes_and_workers_know(
    nodes: Nodes, run_of: Run
) -> None:
    task_id = str(uuid.uuid4())
    label = f"{task_id}:shop.take:0:0 celery@web1"
    for node in nodes:
        node.client().set(lock_key("redlock", "stock:1"), f"token:1:{label}", px=60_000)
    code = f"from celery import Celery\napp = Celery(broker={nodes[0].url!r})\n"
    none = "No task with the id "  # as far as is known without a worker
    for name, found, status in ((task_id, "stock:1", 0), (str(uuid.uuid4()), none, 2)):
        told = run_of(code, "show", name)
        assert told.exit_code == status, told.output
        assert found in told.output
    ended = "Without a result backend the state of a task that has ended is not known."
    assert ended in told.output.splitlines()


def test_a_task_whose_holder_may_have_died_says_so(shared_stage: Stage, key: str) -> None:
    """At the 20th of its 30 seconds a living holder has renewed its lock twice."""
    stage, holder = shared_stage, str(uuid.uuid4())
    value = f"token:{int(time.time() * 1000)}+30000:{holder}:shop.take:0:0 celery@web1"
    for node in stage.nodes:
        node.client().set(lock_key("redlock", f"k:{key}"), value, px=9_000)
    waits = stage.tasks.late.delay(key)
    stage.see_deferred(waits)
    told = command("show", waits.id).output
    late = r"not renewed for 2\d\.\d s: its worker may be dead; expires in \d\.\d s\n"
    assert re.search(rf"HELD BY .*shop.take.* on celery@web1, {late}", told)
    for node in stage.nodes:
        node.client().set(lock_key("redlock", f"k:{key}"), value, px=9_000)
    assert re.search(rf"HOLDS +k:{key}\nRENEWED +{late}", command("show", holder).output)
    for node in stage.nodes:
        node.client().set(lock_key("redlock", f"k:{key}"), value, px=9_000)
    assert re.search(rf"^k:{key}: {late}", command("show", f"k:{key}").output, re.MULTILINE)
