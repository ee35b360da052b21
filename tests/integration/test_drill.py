"""`celery redlock drill` as a person runs it: what it sees, what it refuses, what it leaves.

Each drill has two workers with prefork and one with threads.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from kombu import Connection, Exchange, Queue

from celery_redlock import Redlock
from celery_redlock.testing import EmbeddedNode, WorkerProcess
from tests.conftest import Nodes, eventually, three_nodes, trust_nodes
from tests.integration.conftest import ROOT, virtual_host
from tests.integration.test_command import run_of as run_of
from tests.integration.test_command import schema_of

pytestmark = pytest.mark.slow
SHOP = """
from celery import Celery
from celery_redlock import LockedTask

app = Celery("shop", broker={broker!r}, backend={backend!r})
app.conf.redlock_nodes = {nodes!r}
app.conf.redlock_node_timeout = 0.4  # a busy machine is slow
app.conf.worker_send_task_events = True

@app.task(base=LockedTask, lock_key="stock:{{sku}}", acks_late=True)
def take(sku): ...
"""
HOSTILE = """
# what applies to all tasks and queues, and to none of a drill
app.conf.redlock_fencing = True
app.conf.redlock_queues = {"*": {"limit": 4, "on_conflict": "skip", "rate": "1/h"}}
app.conf.redlock_tasks = {"*": {"limit": 4}}
app.conf.task_annotations = {"*": {"rate_limit": "1/h"}}
app.conf.task_routes = {"*": {"queue": "elsewhere"}}
# what has workers read a queue more, run another pool, spawn, and tell of what is sent
import billiard
billiard.set_start_method("spawn", force=True)
app.conf.worker_pool_start_method = "spawn"
app.conf.worker_direct = True
app.conf.worker_pool = "solo"
app.conf.task_protocol = 1
app.conf.task_send_sent_event = True
"""
MODULE = "celery_redlock.operate.drill.worker"
DEADLINE = 400.0
MORE = 250.0  # s that a drill may take for its start and its end
Rows = dict[Any, Any]
Snapshot = list[Rows]


class Field:
    """An app in a folder, with a broker and nodes that a worker of the app has used before.

    Messages of the app wait in its queue, one is unacknowledged, and a lock is held.
    """

    def __init__(self, folder: Path, url: str, broker: EmbeddedNode, nodes: Nodes) -> None:
        self.folder, self.url, self.broker, self.nodes = folder, url, broker, nodes
        self.urls = [node.url for node in nodes]

    def write(self, code: str = "") -> None:
        text = SHOP.format(broker=self.url, backend=self.broker.url, nodes=self.urls)
        (self.folder / "shop.py").write_text(text + code)

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(ROOT), "DRILL_MORE": str(MORE)}

    def use(self) -> None:
        """Run a worker of the app once, and leave messages."""
        options = ["-Q", "used"]
        send = "from shop import take; take.apply_async(('a',), queue={!r})"
        for queue in ("used", "waits"):
            command = [sys.executable, "-c", send.format(queue)]
            subprocess.run(command, cwd=self.folder, env=self.env, check=True, timeout=DEADLINE)
        with WorkerProcess("shop", cwd=self.folder, env=self.env, options=options) as worker:
            eventually(lambda: "] succeeded in" in worker.output())
        if self.url == self.broker.url:
            with self.broker.client() as client:
                client.hset("unacked", "tag", '[{"headers": {}, "properties": {}}, "", "waits"]')
                client.zadd("unacked_index", {"tag": 1})

    def start(self, *words: str) -> subprocess.Popen[str]:
        module = "tests.integration.patient_drill"
        command = [sys.executable, "-m", module, "-A", "shop", "redlock", "drill", *words]
        return subprocess.Popen(
            command, cwd=self.folder, env=self.env, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def drill(self, *words: str) -> tuple[int, Any, str]:
        """Hold a drill; return its exit status, what it prints for programs, and the rest."""
        process = self.start("--for", "10s", "--yes", "--json", *words)
        output, more = process.communicate(timeout=DEADLINE)
        if output:
            schema_of("drill").validate(json.loads(output))
        return process.returncode, json.loads(output or "null"), more

    def workers(self) -> list[str]:
        """Return the worker processes of drills here that run, or are stopped."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                line = " ".join(process.cmdline())
                if MODULE in line and process.cwd() == str(self.folder):
                    found.append(line)
        return found

    def snapshot(self) -> Snapshot:
        """Return each byte of the servers, but for what a clock changes."""
        of_nodes = [_rows(node) if hasattr(node, "query") else _keys(node) for node in self.nodes]
        return [_keys(self.broker), *of_nodes]


def changes(before: Snapshot, after: Snapshot) -> list[tuple[int, Any, Any, Any]]:
    """Return what differs: the number of the server, 0 the broker, the name, and both values."""
    return [
        (number, name, old.get(name), new.get(name))
        for number, (old, new) in enumerate(zip(before, after, strict=True))
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


def _keys(server: EmbeddedNode) -> Rows:
    with server.client() as client:
        client.connection_pool.connection_kwargs["decode_responses"] = False
        names = sorted(client.scan_iter("*"))
        return {name: (client.dump(name), client.ttl(name) < 0) for name in names}


def _rows(server: Any) -> Rows:
    """Return the rows of keys that have not expired: the server deletes the others at times."""
    lives = "coalesce(expires_at, 'infinity') > clock_timestamp()"
    keys = server.query(f"SELECT id, name, value FROM redlock.key WHERE {lives} ORDER BY name")
    ids = f"SELECT id FROM redlock.key WHERE {lives}"
    items = server.query(f"SELECT * FROM redlock.item WHERE id IN ({ids}) ORDER BY id, field")
    return {**{name: value for _, name, value in keys}, **{f"{row[:2]}": row for row in items}}


@contextmanager
def field_over(request: pytest.FixtureRequest, folder: Path, url: str = "") -> Iterator[Field]:
    with ExitStack() as stack:
        broker = stack.enter_context(EmbeddedNode())
        nodes = stack.enter_context(three_nodes(request))
        if hasattr(nodes[0], "client") and not hasattr(nodes[0], "query"):
            trust_nodes(nodes)
        field = Field(folder, url or broker.url, broker, nodes)
        field.write()
        field.use()
        field.write(HOSTILE)
        yield field


@pytest.fixture
def field(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Field]:
    with field_over(request, tmp_path) as made:
        yield made


@contextmanager
def hearing_all(server: EmbeddedNode) -> Iterator[list[Any]]:
    """Give the channels on which something was published meanwhile, as they are at the end."""
    heard: list[Any] = []
    with server.client() as client, client.pubsub(ignore_subscribe_messages=True) as published:
        published.psubscribe("*")
        yield heard
        client.publish("end", "")
        for message in published.listen():
            if message["channel"] == "end":
                return
            heard.append(message["channel"])


def check_good(field: Field, told: tuple[int, Any, str]) -> None:
    status, seen, more = told
    assert status == 0, more
    audit = seen["audit"]
    assert audit["grants"] > 0
    assert (audit["overlaps"], audit["lost"]) == ([], [])
    assert "kill worker: worker" in more
    assert field.workers() == []


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["valkey", "postgresql"])
def test_a_drill_beside_locks_changes_no_byte_of_others(
    nodes: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    request.param = nodes
    with ExitStack() as stack:
        field = stack.enter_context(field_over(request, tmp_path))
        redlock = stack.enter_context(Redlock(field.urls))
        stack.enter_context(redlock.lock("stock:held", ttl=60.0, wait=60.0))
        before = field.snapshot()
        status, _, more = field.drill()
        assert status == 1
        assert "these nodes are in use (stock:held by" in more
        assert changes(before, field.snapshot()) == []
        with hearing_all(field.broker) as heard:
            check_good(field, field.drill("--beside-locks", "--seed", "3"))
        assert heard == []
        assert changes(before, field.snapshot()) == []


@pytest.mark.slow
def test_a_drill_on_rabbitmq_deletes_its_queue_and_its_exchange(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with virtual_host() as url, field_over(request, tmp_path, url) as field:
        before = field.snapshot()
        told = field.drill("--seed", "3")
        check_good(field, told)
        assert told[1]["doctor"]["recovery"]["state"] == "none"
        assert changes(before, field.snapshot()) == []
        with Connection(url) as connection:
            name = told[1]["queue"]
            own = Queue(name, Exchange(name, "direct", passive=True))
            for look in (
                lambda: own(connection.channel()).queue_declare(passive=True),
                lambda: own.exchange(connection.channel()).declare(),
            ):
                with pytest.raises(connection.channel_errors, match="NOT_FOUND"):
                    look()
            waits = Queue("waits")(connection.channel()).queue_declare(passive=True)
            assert waits.message_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", ["start", "faults"])
def test_a_signal_ends_it_and_nothing_is_left(
    field: Field, number: signal.Signals, when: str
) -> None:
    before = field.snapshot()
    process = field.start("--for", "10m", "--yes")
    assert process.stdout is not None
    if when == "faults":
        assert any("freeze worker" in line for line in process.stdout)  # a worker is stopped now
    else:
        eventually(field.workers, 60)
    process.send_signal(number)
    _, more = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert "Error: ended by a signal: its workers, its keys and its queue are gone" in more
    assert changes(before, field.snapshot()) == []
    assert field.workers() == []


@pytest.mark.slow
def test_its_workers_end_with_a_drill_that_is_killed_also_one_that_is_stopped(
    field: Field,
) -> None:
    process = field.start("--for", "10m", "--yes")
    assert process.stdout is not None
    assert any("freeze worker" in line for line in process.stdout)
    assert field.workers()
    process.kill()
    process.communicate()
    eventually(lambda: not field.workers())


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, more = process.communicate(timeout=DEADLINE)
    return process.returncode, output, more


def remove_by_command(field: Field, more: str) -> None:
    """Run the command that an error names, and see that it removes what was left."""
    words = more.rstrip().partition("run: celery -A shop redlock drill ")[2].split()
    assert words[0] == "--remove"
    status, output, more = ended(field.start(*words))
    assert (status, more) == (0, "")
    assert output == f"removed: {words[1]}, its keys and locks\n"


@pytest.mark.slow
def test_what_a_frozen_broker_keeps_is_named_and_removed_by_a_command(field: Field) -> None:
    before = field.snapshot()
    process = field.start("--for", "10m", "--yes")
    assert process.stdout is not None
    assert any("kill worker" in line for line in process.stdout)
    field.broker.pause()
    status, _, more = ended(process)
    field.broker.resume()
    assert status == 1
    assert "Error: the broker fails: " in more
    assert "NOT REMOVED: the broker keeps the queue celery_redlock_drill_" in more
    assert "Traceback" not in more
    assert {number for number, *_ in changes(before, field.snapshot())} == {0}  # of the broker
    assert field.workers() == []
    remove_by_command(field, more)
    assert changes(before, field.snapshot()) == []


@pytest.mark.slow
def test_what_frozen_nodes_keep_is_named_and_removed_by_a_command(
    field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "MORE", 30.0)
    before = field.snapshot()
    process = field.start("--for", "10s", "--yes")
    assert process.stdout is not None
    assert any("kill worker" in line for line in process.stdout)
    for node in field.nodes[:2]:
        node.pause()
    status, output, more = ended(process)
    for node in field.nodes[:2]:
        node.resume()
    assert status == 1
    assert re.search("^overlaps +0$", output, re.MULTILINE), output
    assert re.search("^lost +0$", output, re.MULTILINE), output
    assert "Error: it is not all removed\nNOT REMOVED: 127.0.0.1:" in more
    assert field.workers() == []
    assert {number for number, *_ in changes(before, field.snapshot())} <= {1, 2}
    remove_by_command(field, more)
    assert changes(before, field.snapshot()) == []


def test_a_broker_that_is_away_at_the_start_is_named(field: Field) -> None:
    nodes = field.snapshot()[1:]
    field.broker.kill()
    status, output, more = ended(field.start("--for", "10s", "--yes"))
    assert (status, output) == (1, "")
    assert re.fullmatch("Error: the broker fails: .*refused.*\n", more), more
    assert field.workers() == []
    assert [_keys(node) for node in field.nodes] == nodes


# each process locks on a node of its own, so locks of two processes exclude each other not
APART = """
import os
app.conf.redlock_nodes = [app.conf.redlock_nodes[os.getpid() % 3]]
"""
WAITED_FOR = re.compile("celery_redlock_drill_[0-9a-f]{8}")


@pytest.mark.slow
def test_workers_that_lock_on_different_nodes_are_found_out(field: Field) -> None:
    field.write(HOSTILE + APART)
    for attempt in range(3):  # all three may have got the same node
        status, seen, more = field.drill("--beside-locks", "--seed", str(attempt))
        if seen["audit"]["overlaps"]:
            break
    assert status == 1, more
    assert seen["audit"]["overlaps"][0]["resource"].startswith("drill:")


@pytest.mark.slow
def test_an_overlap_is_told_also_if_a_signal_ends_the_drill(field: Field) -> None:
    for attempt in range(3):
        field.write(HOSTILE + APART)
        process = field.start("--for", "10m", "--yes", "--seed", str(attempt))
        assert process.stdout is not None
        assert any("cut connections" in line for line in process.stdout)
        process.terminate()
        status, _, more = ended(process)
        assert (status, field.workers()) == (1, [])
        if "OVERLAP" in more:
            break
    assert re.search(r"\nOVERLAP of \d+\.\d+ s on drill:\w+:\w: drill-", more), more


@pytest.mark.slow
def test_a_message_that_is_gone_is_lost(field: Field, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "MORE", 60.0)
    process = field.start("--for", "10s", "--yes")
    with field.broker.client() as client:
        # the server gives a message to who has waited longest, and workers wait a second at a time
        queue = WAITED_FOR.search(eventually(field.workers, 120)[0])
        assert queue is not None
        assert client.brpop(queue.group(), DEADLINE)
    output, more = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1, output + more
    assert re.search(r"^lost +[1-9]", output, re.MULTILINE), output
    assert "\nLOST drill-" in output


ADDS_A_QUEUE = """
from celery.signals import worker_init

@worker_init.connect
def add(**_):
    app.amqp.queues.select_add("waits")
"""


def test_an_app_whose_workers_all_read_a_queue_of_yours_is_refused(field: Field) -> None:
    field.write(ADDS_A_QUEUE)
    before = field.snapshot()
    status, _, more = field.drill()
    assert status == 1
    assert "a drill reads none of yours" in more
    assert changes(before, field.snapshot()) == []
    assert field.workers() == []


def test_the_command_refuses_what_it_cannot_do(run_of: Callable[..., Any]) -> None:
    code = SHOP.format(broker="memory://", backend="cache+memory://", nodes=["redis://127.0.0.1:1"])
    for words, told in (
        (("--for", "9s"), "give a time from 10s to 24h"),
        (("--for", "2 m"), "give a time from 10s to 24h"),
        (("--yes",), "a drill needs a quorum: 0 of 1 nodes vote"),
        (("--remove", "celery"), "celery is not the queue of a drill"),
    ):
        result = run_of(code, "drill", *words)
        assert result.exit_code in (1, 2)
        assert told in result.output
    slow = run_of(f"{code}\napp.conf.redlock_node_timeout = 5", "drill", "--for", "10s")
    assert "give 125s or more" in slow.output


def test_nothing_of_a_drill_is_imported_by_other_commands() -> None:
    code = (
        "import sys, celery_redlock.operate.cli;"
        "print([name for name in sys.modules if name.startswith('celery_redlock.operate.drill')])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
