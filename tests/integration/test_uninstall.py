"""`celery redlock uninstall`: what an app leaves goes, once nobody uses it; what expires stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from celery import Celery

from celery_redlock import QuorumUnreachable, Redlock
from celery_redlock.lock.postgres import removal
from celery_redlock.operate.cli import uninstall
from celery_redlock.testing import EmbeddedNode
from tests import fork_server
from tests.conftest import PATIENCE, eventually
from tests.integration.conftest import ROOT, close_connections
from tests.integration.test_command import schema_of
from tests.integration.test_guest import Place
from tests.integration.test_guest import without as without
from tests.postgres import PostgresNode, asked_of, may_go_to_a_standby
from tests.workers import ForkedWorker

SHOP = """
import os
import time

from celery import Celery

if "NODES" in os.environ:
    from celery_redlock import LockedTask

    options = {"base": LockedTask, "lock_key": "stock:{sku}", "lock_unique_until": "expired"}
else:
    options = {}

app = Celery("shop", broker=os.environ["BROKER"], backend=os.environ["BROKER"])
app.conf.redlock_nodes = os.environ.get("NODES", "").split()
app.conf.redlock_node_timeout = 5
app.conf.redlock_fencing = True
app.conf.task_acks_late = "LATE" in os.environ


@app.task(name="shop.take", **options)
def take(sku, name=""):
    with open("ran", "a") as file:
        print(sku, name, file=file)
    while name and os.path.exists(name):
        time.sleep(0.05)
"""
WEB = """
import sys

from celery_redlock import QuorumUnreachable, Redlock

with Redlock(sys.argv[2:], node_timeout=5, max_ttl=60) as redlock:
    with redlock.lock(sys.argv[1], ttl=60, wait=60) as lock:
        print("held", flush=True)
        sys.stdin.readline()
        lock.ensure()
        print("held still", flush=True)
"""
POSTGRESQL = pytest.param("postgresql", marks=pytest.mark.postgresql)
DEADLINE = 120.0  # s
# the sessions of a name that have looked once, and are about to look again
LOOKED = "SELECT pid FROM pg_stat_activity WHERE application_name = %s AND query = 'COMMIT'"
LOCK = "{redlock}:lock:a"
# the sessions that wait for a table of the schema
WAITING = "SELECT pid FROM pg_locks WHERE NOT granted AND relation = 'redlock.key'::regclass"


class Shop:
    """An app in a folder, with a broker and lock nodes."""

    def __init__(self, folder: Path, broker: EmbeddedNode, nodes: list[Any]) -> None:
        self.folder, self.broker, self.nodes = folder, broker, nodes
        self.urls = [node.url for node in nodes]
        self.more: dict[str, str] = {}  # of the environment
        (folder / "shop.py").write_text(SHOP)

    @property
    def is_postgresql(self) -> bool:
        return isinstance(self.nodes[0], PostgresNode)

    @property
    def env(self) -> dict[str, str]:
        paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{self.folder}"}
        servers = {"BROKER": self.broker.url, "NODES": " ".join(self.urls)}
        return {**os.environ, **paths, **servers, **self.more}

    def send(self, code: str) -> None:
        command = [sys.executable, "-c", f"from shop import take; {code}"]
        fork_server.run(command, cwd=self.folder, env=self.env, check=True, timeout=DEADLINE)

    @contextmanager
    def worker(self) -> Iterator[ForkedWorker]:
        with ForkedWorker("shop", name="w1", cwd=self.folder, env=self.env) as made:
            yield made

    def use(self) -> None:
        """Run a task in a worker that ends as it is told to."""
        self.send("take.delay('used')")
        with self.worker() as worker:
            eventually(lambda: "] succeeded in" in worker.output())
            worker.signal(signal.SIGTERM)
            worker.wait(DEADLINE)

    def ran(self) -> list[str]:
        file = self.folder / "ran"
        return [line.split()[0] for line in file.read_text().splitlines()] if file.exists() else []

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start the command; its question and its lines come in one pipe."""
        command = [sys.executable, "-m", "celery", "-A", "shop", "redlock", "uninstall", *words]
        return subprocess.Popen(
            command, cwd=self.folder, env=self.env, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def uninstall(self, *words: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "celery", "-A", "shop", "redlock", "uninstall", *words]
        done = fork_server.run(command, cwd=self.folder, env=self.env, timeout=DEADLINE)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout

    def in_json(self, *words: str) -> tuple[int, Any]:
        status, output = self.uninstall("--json", *words)
        shown = json.loads(output)
        schema_of("uninstall").validate(shown)
        return status, shown

    @contextmanager
    def web(self, resource: str) -> Iterator[subprocess.Popen[str]]:
        """Give a process without Celery that holds a lock, or waits for it."""
        command = [sys.executable, "-c", WEB, resource, *self.urls]
        process = subprocess.Popen(
            command, cwd=self.folder, env=self.env, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        with process:
            try:
                yield process
            finally:
                process.kill()

    def snapshot(self) -> list[Any]:
        """Return each key of the broker and the nodes, and what it is."""
        rows = "SELECT name, value, expires_at FROM redlock.key ORDER BY name"
        nodes = [n.query(rows) if self.is_postgresql else keys_of(n) for n in self.nodes]
        return [keys_of(self.broker), *nodes]

    def lasting(self) -> set[str]:
        """Return the keys of the prefix that do not expire, on any server but a PostgreSQL."""
        servers = [self.broker, *([] if self.is_postgresql else self.nodes)]
        return {
            name
            for server in servers
            for name in map(str, server.client().scan_iter("{redlock}:*"))
            if server.client().ttl(name) == -1
        }

    def see_on_all_nodes(self, key: str) -> None:
        """Return when each node has a key: its client is then connected to all."""
        if not self.is_postgresql:
            eventually(lambda: all(node.client().exists(key) for node in self.nodes))

    def has_schema(self) -> bool:
        return bool(self.nodes[0].query("SELECT to_regnamespace('redlock') IS NOT NULL")[0][0])


def keys_of(server: EmbeddedNode) -> dict[str, int]:
    client = server.client()
    return {str(name): client.ttl(name) < 0 for name in sorted(client.scan_iter("*"))}


def see_held(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"


def see_held_still(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate("\n", timeout=DEADLINE)
    assert output == "held still\n"


@pytest.fixture(params=["valkey", POSTGRESQL])
def servers(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    """Give three Valkey nodes, or a PostgreSQL with the schema, for this test alone.

    The standing nodes have clients: standing workers write there what is removed.
    """
    if request.param == "valkey":
        yield request.getfixturevalue("mortal_nodes")
        return
    template = request.getfixturevalue("postgres_template")
    with PostgresNode(template, fsync=False) as server:
        server.setup()
        yield [server]


@pytest.fixture
def shop(tmp_path: Path, servers: list[Any]) -> Iterator[Shop]:
    with EmbeddedNode() as broker:
        yield Shop(tmp_path, broker, servers)


@pytest.fixture
def app(shop: Shop) -> Iterator[Celery]:
    """Give the app in this process, as the command has it."""
    made = Celery("shop", broker=shop.broker.url, set_as_current=False)
    made.conf.redlock_nodes = shop.urls
    made.conf.redlock_node_timeout = PATIENCE
    yield made
    close_connections(made)
    made.close()


def test_what_does_not_expire_goes_once_nobody_uses_it(shop: Shop) -> None:
    shop.use()
    names = {"run", "tenure", "terms", "format", "fence"}
    on_broker = {"worker_leases_dead:unacked", "worker_names:unacked"}
    before = shop.snapshot()
    lasting = shop.lasting()
    assert on_broker <= {name.removeprefix("{redlock}:") for name in lasting}
    status, shown = shop.in_json("--dry-run")
    assert (status, shown["removed"], shown["reasons"]) == (0, False, [])
    assert shop.snapshot() == before
    goes = {(group["place"], group["what"]) for group in shown["keys"] if group["fate"] == "goes"}
    assert ("broker", "worker leases") in goes
    status, shown = shop.in_json("--yes")
    assert (status, shown["removed"], shown["reasons"]) == (0, True, [])
    if shop.is_postgresql:
        assert not shop.has_schema()
        assert shop.lasting() == set()
    else:
        assert {f"{{redlock}}:{name}" for name in names} <= lasting
        assert shop.lasting() == {"{redlock}:fence"}
    status, shown = shop.in_json("--yes")
    assert (status, shown["removed"]) == (0, False)
    assert not [group for group in shown["keys"] if group["fate"] == "goes"]


def test_a_claim_is_listed_with_its_end_and_stays(shop: Shop) -> None:
    shop.use()
    shop.send("take.apply_async(('claimed',), lock={'unique_for': 3600})")
    before = shop.snapshot()
    status, shown = shop.in_json("--yes")
    (claims,) = {
        (group["what"], group["count"], group["fate"], bool(group["until"]))
        for group in shown["keys"]
        if group["what"] == "claims"
    }
    assert claims == ("claims", 1, "expires", True)
    if shop.is_postgresql:  # all or nothing
        assert status == 1
        (reason,) = shown["reasons"]
        assert reason.startswith("rows in the schema expire by themselves, the last one at 20")
        assert shop.snapshot() == before
    else:
        assert status == 0
        left = {name for keys in shop.snapshot()[1:] for name, lasts in keys.items() if not lasts}
        assert "{redlock}:unique:shop.take:stock:claimed" in left
        assert shop.lasting() == {"{redlock}:fence"}


def test_nothing_is_removed_while_a_worker_runs(shop: Shop) -> None:
    shop.use()
    with shop.worker() as worker:
        eventually(lambda: " ready." in worker.output())
        before = shop.snapshot()
        status, shown = shop.in_json("--yes")
        assert (status, shown["removed"]) == (1, False)
        reasons = " ".join(shown["reasons"])
        assert "runs with this package" in reasons
        assert "the worker lease of w1@" in reasons
        assert shop.snapshot()[0].keys() == before[0].keys()
        assert shop.snapshot()[1:] == before[1:]


def test_nothing_is_removed_while_a_client_holds_or_awaits_a_lock(shop: Shop) -> None:
    shop.use()
    with shop.web("stock:1") as holder:
        see_held(holder)
        with shop.web("stock:1") as waiter, Redlock(shop.urls, node_timeout=PATIENCE) as asks:
            eventually(lambda: asks.waiters("stock:1").processes)
            before = shop.lasting()
            status, shown = shop.in_json("--yes")
            assert (status, shown["removed"]) == (1, False)
            assert "locks are held: stock:1" in shown["reasons"]
            if shop.is_postgresql:
                session = "a session named celery_redlock is connected to the database"
                assert session in shown["reasons"]
                assert shop.has_schema()
            else:
                (waits,) = [one for one in shown["reasons"] if one.startswith("clients wait for")]
                assert f":{waiter.pid}:" in waits
            assert shop.lasting() == before
            see_held_still(holder)
            see_held(waiter)


def test_a_lock_that_is_taken_between_the_look_and_the_removal_stands_and_excludes(
    shop: Shop, app: Celery
) -> None:
    shop.use()
    remains = uninstall.Remains.of(app, err=True)
    assert (remains.reasons, remains.is_removable) == ((), True)
    with shop.web("stock:1") as holder:
        see_held(holder)
        shop.see_on_all_nodes("{redlock}:lock:stock:1")
        left = uninstall.remove_remains(app, remains)
        if shop.is_postgresql:
            assert shop.has_schema()
            assert "a session named celery_redlock is connected to the database" in left
        else:
            assert left == []
            assert shop.lasting() == {"{redlock}:fence"}
        with Redlock(shop.urls, node_timeout=PATIENCE, max_ttl=60) as rival:
            assert rival.lock("stock:1", wait=0).try_acquire() is False
            found = rival.locks("stock:1").locks
        assert [(lock.resource, lock.held) for lock in found] == [("stock:1", True)]
        see_held_still(holder)


def test_a_lock_that_is_taken_while_the_command_asks_is_seen(shop: Shop) -> None:
    shop.use()
    before = shop.lasting()
    process = shop.start()
    assert process.stdout is not None
    shown = iter(lambda: process.stdout.read(1), "?")
    assert "".join(shown).endswith("Remove what goes")
    with shop.web("stock:1") as holder:
        see_held(holder)
        output, _ = process.communicate("y\n", timeout=DEADLINE)
        assert process.returncode == 1
        assert "refused: locks are held: stock:1" in output.splitlines()
        assert shop.lasting() == before
        see_held_still(holder)


@pytest.mark.slow
def test_without_a_yes_nothing_is_removed(shop: Shop) -> None:
    shop.use()
    before = shop.snapshot()
    with shop.start() as process:
        output, _ = process.communicate("n\n", timeout=DEADLINE)
    assert process.returncode == 1
    assert output.endswith("Aborted!\n")
    assert shop.snapshot() == before


@pytest.mark.slow
@pytest.mark.parametrize("servers", ["valkey"], indirect=True)
def test_the_worker_lease_of_a_killed_worker_goes_once_it_is_proved_dead(shop: Shop) -> None:
    shop.more["LATE"] = "1"
    (shop.folder / "busy").touch()
    shop.send("take.delay('busy', 'busy')")
    with shop.worker() as worker:
        eventually(lambda: "busy" in shop.ran())
        worker.kill()
    (lease,) = [name for name in shop.lasting() if "worker_leases" in name]
    assert lease == "{redlock}:worker_leases:unacked"
    for node in shop.nodes:
        node.client().delete("{redlock}:lock:stock:busy")
    notes: list[str] = []

    def removed() -> bool:  # a beat of a moment ago is a sign of life
        status, shown = shop.in_json("--yes")
        notes[:] = shown["notes"]
        return status == 0

    eventually(removed)
    (note,) = notes
    assert note.startswith("1 message of w1@")
    assert "first run `recover`" in note
    assert shop.lasting() <= {"{redlock}:fence"}


@pytest.mark.slow
@pytest.mark.parametrize("servers", ["valkey"], indirect=True)
def test_a_broker_or_a_node_that_does_not_answer_keeps_all(shop: Shop) -> None:
    shop.use()
    before = shop.snapshot()
    here = shop.broker
    with EmbeddedNode() as shop.broker:
        pass
    status, shown = shop.in_json("--yes")
    shop.broker = here
    assert status == 1
    assert [one for one in shown["reasons"] if one.startswith("no worker can be asked")]
    shop.urls[0] = shop.urls[0].replace("//", "//:wrong@")
    status, shown = shop.in_json("--yes")
    assert status == 1
    assert [one for one in shown["reasons"] if " cannot be asked: " in one]
    assert shop.snapshot() == before


@pytest.mark.slow
@pytest.mark.parametrize("servers", ["valkey"], indirect=True)
def test_workers_without_the_package_run_what_waited_and_are_no_reason_to_stay(
    shop: Shop, without: Place, tmp_path: Path
) -> None:
    shop.use()
    calls = [
        "take.delay('plain')",
        "take.apply_async(('late',), lock={'max_wait': 600, 'ttl': 50})",
        "take.apply_async(('claimed',), lock={'unique_for': 3600})",
    ]
    (tmp_path / "busy").touch()
    shop.send("take.delay('busy', 'busy')")
    with shop.worker() as worker:
        eventually(lambda: "busy" in shop.ran())
        shop.send("take.delay('busy', 'again')")
        eventually(lambda: "was taken" in worker.output() or "deferred" in worker.output())
        worker.signal(signal.SIGTERM)
        (tmp_path / "busy").unlink()
        worker.wait(DEADLINE)
    shop.send("; ".join(calls))
    log = tmp_path / "log"
    env = {**without.env(shop.broker.url), "BROKER": shop.broker.url}
    command = [sys.executable, "-S", "-m", "celery", "-A", "shop", "worker", "-l", "INFO"]
    with ExitStack() as stack:
        output = stack.enter_context(log.open("w"))
        process = subprocess.Popen(
            command, cwd=shop.folder, env=env, stdout=output, stderr=subprocess.STDOUT
        )
        stack.callback(process.wait)
        stack.callback(process.terminate)
        names = {"used", "busy", "plain", "late", "claimed"}
        eventually(lambda: set(shop.ran()) == names and shop.ran().count("busy") == 2, DEADLINE)
        status, shown = shop.in_json("--yes")
        assert (status, shown["reasons"]) == (0, [])
        assert shop.lasting() == {"{redlock}:fence"}
    errors = [line for line in log.read_text().splitlines() if "ERROR" in line]
    assert all(line.endswith("error: KeyError('redlock_settings')") for line in errors), errors


@pytest.mark.postgresql
@pytest.mark.parametrize("servers", ["postgresql"], indirect=True)
class TestSchema:
    """What keeps the schema of a PostgreSQL server."""

    def reasons(self, shop: Shop) -> list[str]:
        """Return why the schema stays, which it does."""
        status, shown = shop.in_json("--yes")
        assert (status, shown["removed"]) == (1, False)
        assert shop.has_schema()
        return list(shown["reasons"])

    def test_rows_of_another_prefix_keep_it(self, shop: Shop) -> None:
        shop.use()
        with Redlock(shop.urls, prefix="other", node_timeout=PATIENCE) as other:
            other.trust()
        assert self.reasons(shop) == ["the prefix other has rows in the schema"]

    def test_what_is_not_its_own_keeps_it(self, shop: Shop) -> None:
        server = shop.nodes[0]
        server.query("CREATE VIEW held AS SELECT name FROM redlock.key")
        (reason,) = self.reasons(shop)
        assert reason == "the schema has or carries what is not its own: public.held"
        server.query("DROP VIEW held")
        server.query("CREATE TABLE redlock.notes ()")
        (reason,) = self.reasons(shop)
        assert reason == "the schema has or carries what is not its own: redlock.notes"

    def test_a_session_that_ends_meanwhile_does_not_keep_it(
        self, shop: Shop, app: Celery, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As that of a client which the command itself has just closed."""
        monkeypatch.setattr(removal, "SESSION_END", DEADLINE)
        name = "celery_redlock"
        ending = psycopg.connect(shop.urls[0], application_name=name, autocommit=True)
        with ending, ThreadPoolExecutor(1) as thread:
            remains = thread.submit(uninstall.Remains.of, app, err=True)
            eventually(lambda: shop.nodes[0].query(LOOKED, name) or remains.done())
            ending.close()
            assert remains.result(DEADLINE).reasons == ()

    def test_a_lock_of_a_client_with_another_name_keeps_it(self, shop: Shop, app: Celery) -> None:
        remains = uninstall.Remains.of(app, err=True)
        url = f"{shop.urls[0]}?application_name=web"
        with Redlock([url], node_timeout=PATIENCE) as made, made.lock("a", ttl=60, wait=60) as lock:
            (left,) = uninstall.remove_remains(app, remains)
            assert left.startswith("rows in the schema expire by themselves, the last one at 20")
            assert shop.has_schema()
            lock.ensure()

    def test_a_grant_under_way_as_the_schema_is_looked_at_keeps_it(
        self, shop: Shop, app: Celery, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The drop waits for the call, and sees its row."""
        monkeypatch.setattr(removal, "LOCK_TIMEOUT", "60s")
        remains = uninstall.Remains.of(app, err=True)
        with shop.nodes[0].connect() as call, ThreadPoolExecutor(1) as thread:
            call.autocommit = False
            call.execute(f"SELECT redlock.put('{LOCK}', 'value', 60000, clock_timestamp())")
            left = thread.submit(uninstall.remove_remains, app, remains)
            eventually(lambda: shop.nodes[0].query(WAITING))
            call.commit()
            (reason,) = left.result(DEADLINE)
        assert reason.startswith("rows in the schema expire by themselves, the last one at 20")
        assert shop.has_schema()

    def test_a_grant_that_comes_as_it_is_dropped_is_no_vote(
        self, shop: Shop, app: Celery, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(removal, "LOCK_TIMEOUT", "60s")
        url = f"{shop.urls[0]}?application_name=web"
        with (
            ThreadPoolExecutor(2) as threads,
            shop.nodes[0].connect() as reader,
            Redlock([url], node_timeout=15) as made,
        ):
            assert made.status().has_quorum
            remains = uninstall.Remains.of(app, err=True)
            reader.autocommit = False
            reader.execute("SELECT FROM redlock.key")
            left = threads.submit(uninstall.remove_remains, app, remains)
            eventually(lambda: len(shop.nodes[0].query(WAITING)) == 1)
            granted = threads.submit(made.lock("a", ttl=60, wait=0).try_acquire)
            eventually(lambda: len(shop.nodes[0].query(WAITING)) == 2)
            reader.commit()
            assert left.result(DEADLINE) == []
            with pytest.raises(QuorumUnreachable):
                granted.result(DEADLINE)
        assert not shop.has_schema()

    def test_a_transaction_that_reads_the_rows_keeps_it(self, shop: Shop, app: Celery) -> None:
        remains = uninstall.Remains.of(app, err=True)
        with ThreadPoolExecutor(1) as thread, shop.nodes[0].connect() as reader:
            reader.autocommit = False
            reader.execute("SELECT FROM redlock.key")
            left = thread.submit(uninstall.remove_remains, app, remains)
            try:
                (reason,) = left.result(60)
            finally:
                reader.rollback()
            assert reason.startswith("the schema is not dropped: canceling statement due to lock")
        assert shop.has_schema()

    def test_only_the_owner_of_the_schema_drops_it(self, shop: Shop) -> None:
        server = shop.nodes[0]
        server.query("CREATE ROLE locks LOGIN")
        server.query("GRANT USAGE ON SCHEMA redlock TO locks")
        server.query("GRANT ALL ON ALL TABLES IN SCHEMA redlock TO locks")
        shop.urls[0] = server.url.replace("postgres@", "locks@")
        assert self.reasons(shop) == ["the schema is not dropped: must be owner of schema redlock"]

    def test_what_it_asks_is_not_for_a_standby_that_lags(self, shop: Shop) -> None:
        server = shop.nodes[0]
        with asked_of(server) as asked:
            assert shop.in_json("--yes")[0] == 0
        assert any(one.startswith("DROP SCHEMA") for one in asked)
        assert [one for one in asked if may_go_to_a_standby(server, one)] == []
