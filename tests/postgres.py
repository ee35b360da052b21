"""PostgreSQL servers of the tests' own: a node, a streaming standby, and pgbouncer before a node.

They run the machine's programs, and no service that it has already. PostgreSQL refuses to run as
root: then all of them run as an unprivileged user, who owns their folders.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import psycopg
import pytest
from redis import Redis

from celery_redlock.lock.model.keys import guard_keys, tenure_key
from celery_redlock.lock.postgres.schema import create_schema
from celery_redlock.operate.drill import reaper
from celery_redlock.testing.servers import claim_port, spawn
from tests.conftest import eventually, made_once
from tests.postgres_gateway import Gateway, empty

UNPRIVILEGED = ("postgres", "nobody")  # the first that the machine has
ENDED = (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE)  # a zombie is for its parent to reap
FROZEN = (*ENDED, psutil.STATUS_STOPPED)
Connection = psycopg.Connection[tuple[Any, ...]]
# what tests leave of a node that goes on, but for its tables
LEFT = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()",
    "ALTER DATABASE postgres RESET ALL",
    "ALTER ROLE postgres RESET ALL",
    "DROP SCHEMA public CASCADE",
    "CREATE SCHEMA public",
    "GRANT USAGE ON SCHEMA public TO PUBLIC",
    "TRUNCATE redlock.key, redlock.item",
    "UPDATE redlock.swept SET at = '-infinity', after = ''",
)
ROLES = (
    "SELECT quote_ident(rolname) FROM pg_roles WHERE rolname !~ '^pg_' AND rolname <> 'postgres'"
)
PLACE = "SELECT system_identifier, current_database() FROM pg_control_system()"
S = TypeVar("S", bound="Server")


def binaries() -> Path:
    """Return the folder of PostgreSQL's programs, the newest there are. Without it, skip."""
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/postgres")]
    if found:
        return max(found, key=lambda folder: float(folder.parent.name))
    if config := shutil.which("pg_config"):
        told = subprocess.run([config, "--bindir"], capture_output=True, text=True, check=True)
        if (Path(told.stdout.strip()) / "postgres").exists():
            return Path(told.stdout.strip())
    if in_path := shutil.which("postgres"):
        return Path(in_path).resolve().parent
    pytest.skip("no PostgreSQL server is installed: apt-get install postgresql")


def pgbouncer() -> str:
    """Return the path of pgbouncer. Without it, skip."""
    found = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    return found or pytest.skip("no pgbouncer is installed: apt-get install pgbouncer")


def template(factory: pytest.TempPathFactory) -> Path:
    """Return a new data directory, made once for all processes of a run, to be copied."""
    binaries()  # skips before others could wait for a folder that nobody makes
    return made_once(factory, "postgres-template", make_template)


def make_template(where: Path) -> None:
    """Make a template for `PostgresNode`.

    It is made elsewhere first, because pytest's folders are closed to the unprivileged user.
    """
    with tempfile.TemporaryDirectory(prefix="postgres-") as folder:
        _own(Path(folder))
        run_to_end(
            binaries() / "initdb", "--pgdata", f"{folder}/data", "--username=postgres",
            "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync", "--wal-segsize=1",
        )  # fmt: skip
        run_to_end("cp", "-a", f"{folder}/data", where, unprivileged=False)


def _unprivileged() -> pwd.struct_passwd | None:
    """Return whom the servers run as, or None if this process is not root."""
    if os.geteuid() != 0:
        return None
    known = {entry.pw_name: entry for entry in pwd.getpwall()}
    return next(known[name] for name in UNPRIVILEGED if name in known)


def _as_user() -> dict[str, Any]:
    """Return what `Popen` takes to run a program as that user."""
    user = _unprivileged()
    return {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _own(folder: Path) -> None:
    """Give a folder to that user."""
    if user := _unprivileged():
        os.chown(folder, user.pw_uid, user.pw_gid)


def run_to_end(*command: str | Path, unprivileged: bool = True) -> None:
    """Run a program to its end; fail with what it says."""
    user = _as_user() if unprivileged else {}
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False, cwd="/", **user,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}: {done.stdout}"


class Server:
    """A server that speaks PostgreSQL's protocol on a free loopback port.

    It ends with this process. folder: its files, with its log.
    """

    def __init__(self) -> None:
        self._claim = claim_port()
        self.port = int(self._claim.getsockname()[1])
        self._temporary = tempfile.TemporaryDirectory(prefix="postgres-")
        self.folder = Path(self._temporary.name)
        _own(self.folder)
        self._log = self.folder / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self._paused: list[psutil.Process] = []
        self._idle: list[Connection] = []  # of `query`
        atexit.register(self.kill)

    @property
    def command(self) -> list[str]:
        """The command line."""
        raise NotImplementedError

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    @property
    def pid(self) -> int:
        """The process id of the first process; 0 while the server is down."""
        return 0 if self._process is None else self._process.pid

    def start(self: S, timeout: float = 60.0) -> S:
        """Start the server with the files that it has; return when it answers.

        timeout: seconds. Raises RuntimeError with the server's log if it does not answer by then.
        """
        self._make_files()
        self._process = spawn(self.command, self._log, cwd=self.folder, **_as_user())
        end = time.monotonic() + timeout
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise RuntimeError(f"the server does not start:\n{self.log()}")
            time.sleep(0.02)
        return self

    def _make_files(self) -> None:
        """Make the files that the server starts with, if there are none yet."""

    def log(self) -> str:
        """Return what the server has written so far."""
        return self._log.read_text() if self._log.exists() else ""

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self) -> None:
        """End all processes of the server at once, as a crash of its machine does."""
        if self._process is None:
            return
        children = self._freeze()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self._process.kill()
        self._process.wait()
        eventually(lambda: all(_state_of(child) in ENDED for child in children))
        for pid in (self._process.pid, *(child.pid for child in self._paused)):
            reaper.forget_group(pid)
        self._process, self._paused = None, []
        self.disconnect()

    def _freeze(self) -> list[psutil.Process]:
        """Stop the first process, so that it forks no more; return its children."""
        assert self._process is not None, "the server is down"
        if self._process.poll() is not None:
            return []
        first = psutil.Process(self._process.pid)
        first.suspend()
        eventually(lambda: _state_of(first) in FROZEN)
        return list(first.children())

    def pause(self) -> None:
        """Freeze all processes of the server (SIGSTOP): connections stay open, without answers."""
        self._paused = self._freeze()
        for child in self._paused:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.suspend()
            reaper.watch_group(child.pid)  # it leads a group, and would not see its parent's death
        eventually(lambda: all(_state_of(child) in FROZEN for child in self._paused))

    def resume(self) -> None:
        """Let a paused server answer again (SIGCONT)."""
        for child in self._paused:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.resume()
            reaper.forget_group(child.pid)
        self._paused = []
        if self.pid:
            os.kill(self.pid, signal.SIGCONT)

    def connect(self) -> Connection:
        """Return a new connection, with autocommit."""
        return psycopg.connect(self.url, autocommit=True, connect_timeout=60)

    def query(self, sql: str, *args: object) -> list[tuple[Any, ...]]:
        """Run SQL on a connection that nobody else uses; return the rows. args: for each `%s`.

        It is kept for the next call: a new one for each look costs more than the look.
        """
        is_new = not self._idle
        connection = self.connect() if is_new else self._idle.pop()
        try:
            cursor = connection.execute(sql, args or None)
            return cursor.fetchall() if cursor.description else []
        except psycopg.OperationalError:
            if is_new or not connection.closed:
                raise
        finally:
            if not connection.closed:
                self._idle.append(connection)
        return self.query(sql, *args)  # the server had ended a connection that was idle

    def disconnect(self) -> None:
        """Close the connections of `query` that are not in use."""
        while self._idle:
            self._idle.pop().close()

    def __enter__(self: S) -> S:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.kill()
        self.disconnect()
        self._claim.close()
        atexit.unregister(self.kill)
        self._temporary.cleanup()


def dump(node: PostgresNode, to: PostgresNode) -> None:
    """Restore a dump of a node on another one."""
    with tempfile.TemporaryDirectory(prefix="postgres-") as folder:
        _own(Path(folder))
        file = f"{folder}/dump.sql"
        run_to_end(binaries() / "pg_dump", "--schema=redlock", f"--file={file}", node.url)
        run_to_end(
            binaries() / "psql", "--no-psqlrc", "--set=ON_ERROR_STOP=1", f"--file={file}", to.url
        )


def _state_of(process: psutil.Process) -> str:
    """Return the state of a process as the system words it; "dead" if there is none."""
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return str(psutil.STATUS_DEAD)


class PostgresNode(Server):
    """A PostgreSQL server. It keeps its data from one start to the next, also after `kill`.

    template: what `template` returned. fsync: whether a commit waits for the disk. Off is faster,
    and loses nothing: what a killed process has written stays in the system's cache.
    settings: more of the server's settings, by name.
    """

    def __init__(
        self, template: Path, *, max_connections: int = 40, fsync: bool = True, **settings: str
    ) -> None:
        super().__init__()
        self.template = template
        self._gateway: Gateway | None = None
        self.data = self.folder / "data"
        self.settings = {
            "shared_buffers": "16MB", "max_connections": str(max_connections),
            "fsync": "on" if fsync else "off", "wal_keep_size": "64MB",
            "max_logical_replication_workers": "0", "dynamic_shared_memory_type": "mmap",
            "recovery_init_sync_method": "syncfs",  # a start after a crash takes 0.1 s, not 2 s
            "listen_addresses": "127.0.0.1", "unix_socket_directories": "", **settings,
        }  # fmt: skip
        self._program = str(binaries() / "postgres")

    @property
    def command(self) -> list[str]:
        """The command line, with the settings as they are now: a start takes them."""
        settings = [word for pair in self.settings.items() for word in ("-c", "=".join(pair))]
        return [self._program, "-D", str(self.data), "-p", str(self.port), *settings]

    def _make_files(self) -> None:
        if not self.data.exists():
            self._make_data()

    def _make_data(self) -> None:
        run_to_end("cp", "-a", "--reflink=auto", self.template, self.data, unprivileged=False)

    def _answers(self) -> bool:
        try:
            self.connect().close()
        except psycopg.OperationalError:
            return False
        return True

    def kill(self) -> None:
        """End all processes of the server at once, as a crash of its machine does."""
        super().kill()
        if self._gateway is not None:
            self._gateway.disconnect()
        lock_file = self.data / "postmaster.pid"
        if lock_file.exists():  # a new boot of a machine has no such memory, and other processes
            memory = lock_file.read_text().splitlines()[6:7]
            if memory and memory[0].strip():
                run_to_end("ipcrm", "-m", memory[0].split()[1], unprivileged=False)
            lock_file.unlink()

    def setup(self) -> None:
        """Install the schema, as `celery redlock setup` does."""
        with contextlib.closing(self.connect()) as connection:
            create_schema(connection)

    def empty(self) -> None:
        """Delete all that the node keeps, as FLUSHALL does on Redis."""
        with contextlib.closing(self.connect()) as connection:
            empty(connection)

    def restore(self) -> None:
        """Make a node that goes on as good as new: what tests leave goes, and all clients."""
        self.disconnect()
        if self._gateway is not None:
            self._gateway.disconnect()
        own = "-c default_transaction_read_only=off -c statement_timeout=0"
        own += r" -c default_transaction_isolation=read\ committed"
        own += " -c standard_conforming_strings=on"
        made = psycopg.connect(self.url, autocommit=True, connect_timeout=60, options=own)
        with contextlib.closing(made) as connection:
            for statement in LEFT:
                connection.execute(statement.encode())
            for (role,) in connection.execute(ROLES.encode()).fetchall():
                connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())
            keys = [name.encode() for name in (*guard_keys("redlock"), tenure_key("redlock"))]
            trust = b'SELECT redlock."trust"(%s::bytea[], array[redlock.run_id()::bytea])'
            connection.execute(trust, [keys])  # as a new schema does

    def client(self) -> Redis:
        """Return a redis-py client of this node, answering in str: see `Gateway`."""
        if self._gateway is None:
            self._gateway = Gateway(self.connect)
        return Redis(port=self._gateway.port, decode_responses=True, protocol=2)

    def __exit__(self, *exc_info: object) -> None:
        self.kill()  # first, because a command may wait for a paused node
        if self._gateway is not None:
            self._gateway.close()
        super().__exit__(*exc_info)


@functools.cache
def _standing_node(template: Path, pid: int) -> PostgresNode:
    """Return a node with the schema, which ends with this process. pid: of this process."""
    made = PostgresNode(template, fsync=False, max_connections=100)

    def end() -> None:
        if os.getpid() == pid:  # not a forked child
            made.__exit__()

    atexit.register(end)
    made.start().setup()
    return made


@contextlib.contextmanager
def standing_node(template: Path) -> Iterator[PostgresNode]:
    """Give the node that all tests of this process share: as good as new, and not to be ended."""
    made = _standing_node(template, os.getpid())
    made.restore()
    try:
        yield made
    finally:
        made.resume()


class Standby(PostgresNode):
    """A server that follows a primary, until it is promoted.

    synchronous: whether a commit on the primary waits for this one. It waits for ever if this one
    is down, until the primary's `synchronous_standby_names` is reset.
    """

    def __init__(self, primary: PostgresNode, *, synchronous: bool = False) -> None:
        super().__init__(primary.template)
        self.settings = dict(primary.settings)
        self._primary = primary
        self._synchronous = synchronous
        self._name = f"standby_{self.port}"

    def _make_data(self) -> None:
        run_to_end(
            binaries() / "pg_basebackup", "--pgdata", self.data, "--write-recovery-conf",
            "--checkpoint=fast", "--wal-method=stream", "--no-sync",
            "--dbname", f"{self._primary.url}?application_name={self._name}",
        )  # fmt: skip
        with (self.data / "postgresql.auto.conf").open("a") as settings:
            settings.write("synchronous_standby_names = ''\n")  # else it waits for its siblings

    def __enter__(self) -> Standby:
        self.start()
        if self._synchronous:
            self._primary.query(f"ALTER SYSTEM SET synchronous_standby_names = '{self._name}'")
            self._primary.query("SELECT pg_reload_conf()")
            eventually(lambda: self._state() == [("sync",)])
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._synchronous and self._primary.pid:
            self._primary.query("ALTER SYSTEM RESET synchronous_standby_names")
            self._primary.query("SELECT pg_reload_conf()")
            shown = "SHOW synchronous_standby_names"
            eventually(lambda: self._primary.query(shown) == [("",)])
        super().__exit__(*exc_info)

    def _state(self) -> list[tuple[Any, ...]]:
        """Return how the primary waits for this one: async or sync, or no row."""
        sql = "SELECT sync_state FROM pg_stat_replication WHERE application_name = %s"
        return self._primary.query(sql, self._name)

    def promote(self) -> None:
        """Make it a primary of its own, on a new timeline; return when it is."""
        assert self.query("SELECT pg_promote()") == [(True,)], self.log()


def standby(primary: PostgresNode, *, synchronous: bool = False) -> Standby:
    """Return a standby of a primary that runs; `with` starts it."""
    return Standby(primary, synchronous=synchronous)


@contextlib.contextmanager
def asked_of(node: PostgresNode) -> Iterator[list[str]]:
    """Give a list that has in the end each statement of connections that were made meanwhile."""
    asked: list[str] = []
    node.query("ALTER DATABASE postgres SET log_statement = 'all'")
    before = len(node.log())
    try:
        yield asked
    finally:
        node.query("ALTER DATABASE postgres RESET log_statement")
    words = r"LOG:  (?:statement|execute [^:]*):\s*(.*(?:\n\t.*)*)"
    asked += re.findall(words, node.log()[before:])


def may_go_to_a_standby(node: PostgresNode, statement: str) -> bool:
    """Return whether a pooler that balances reads may take a statement for one.

    Pgpool-II does within a transaction, too. It keeps on the primary what locks rows, and what
    calls a function that is VOLATILE.
    """
    if not statement.startswith("SELECT") or statement.endswith(("FOR KEY SHARE", "FOR UPDATE")):
        return False
    volatile = "SELECT count(*) FROM pg_proc WHERE proname = ANY (%s) AND provolatile = 'v'"
    return node.query(volatile, re.findall(r"(\w+)\(", statement)) == [(0,)]


class Pooler(Server):
    """A pgbouncer. In transaction mode each transaction gets any of its connections to the node."""

    def __init__(
        self, node: PostgresNode, max_client_conn: int, pool_mode: str, pool_size: int
    ) -> None:
        super().__init__()
        config = self.folder / "pgbouncer.ini"
        self._node = node
        config.write_text(
            f"""
[databases]
postgres = {self._place("postgres")}
* = host=127.0.0.1 port={node.port} user=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {self.port}
unix_socket_dir =
auth_type = any
pool_mode = {pool_mode}
ignore_startup_parameters = extra_float_digits
max_client_conn = {max_client_conn}
default_pool_size = {pool_size}
server_login_retry = 0.2
"""
        )
        self._config = config
        self._program = pgbouncer()

    @property
    def command(self) -> list[str]:
        return [self._program, str(self._config)]

    def _place(self, database: str) -> str:
        return f"host=127.0.0.1 port={self._node.port} user=postgres dbname={database}"

    def move(self, before: str, after: str, to: PostgresNode | None = None) -> None:
        """Serve another database under the same name; clients stay connected. to: another node."""
        text, place = self._config.read_text(), self._place(before)
        self._node = to or self._node
        self._config.write_text(text.replace(place, self._place(after)))
        os.kill(self.pid, signal.SIGHUP)
        [(cluster, _)] = self._node.query(PLACE)
        eventually(lambda: self.query(PLACE) == [(cluster, after)])

    def restart(self) -> None:
        """End it as `kill -9` does, and start it again: each client loses its connection."""
        self.kill()
        self.start()


def pooler(
    node: PostgresNode, max_client_conn: int = 200, pool_mode: str = "transaction",
    pool_size: int = 10,
) -> Pooler:  # fmt: skip
    """Return a pgbouncer in front of a node; `with` starts it."""
    return Pooler(node, max_client_conn, pool_mode, pool_size)
