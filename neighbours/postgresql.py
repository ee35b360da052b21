"""PostgreSQL servers of a run's own, which may be of any release, and poolers before them."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from neighbours import servers

MACHINES_OWN = Path("/usr/lib/postgresql")


def programs() -> Path:
    """Return the folder of this machine's newest PostgreSQL."""
    found = [path.parent for path in MACHINES_OWN.glob("*/bin/postgres")]
    if not found:
        raise servers.MissingError("no PostgreSQL is installed: install postgresql")
    return max(found, key=lambda folder: float(folder.parent.name))


def unprivileged() -> dict[str, Any]:
    """Return what `Popen` takes to run a program not as root, as which PostgreSQL refuses to."""
    if os.geteuid() != 0:
        return {}
    known = {entry.pw_name: entry for entry in pwd.getpwall()}
    user = known.get("postgres") or known["nobody"]
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


@contextmanager
def folder_of_user() -> Iterator[Path]:
    """Give a temporary folder of that user."""
    with tempfile.TemporaryDirectory(prefix="postgres-") as name:
        if user := unprivileged():
            os.chown(name, user["user"], user["group"])
        yield Path(name)


@contextmanager
def cluster(folder_of_programs: Path) -> Iterator[str]:
    """Give the URL of the database of a new server."""
    with folder_of_user() as folder:
        data = folder / "data"
        make = [str(folder_of_programs / "initdb"), "-D", str(data), "-U", "postgres"]
        make += ["-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync"]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL, cwd="/", **unprivileged())
        settings = ("listen_addresses=127.0.0.1", "unix_socket_directories=", "fsync=off")
        words = [word for setting in settings for word in ("-c", setting)]
        command = [str(folder_of_programs / "postgres"), "-D", str(data), *words, "-p"]
        with servers.server(
            lambda port: [*command, str(port)], folder / "log", answers=_is_ready,
            stop=signal.SIGINT, **unprivileged(),
        ) as port:  # fmt: skip
            yield f"postgresql://postgres@127.0.0.1:{port}/postgres"


def _is_ready(port: int) -> bool:
    command = [servers.program("pg_isready", "postgresql-client"), "-q", "-h", "127.0.0.1"]
    return subprocess.run([*command, "-p", str(port)]).returncode == 0


@contextmanager
def pgbouncer(program: str, server_port: int) -> Iterator[int]:
    """Give the port of a pgbouncer in transaction mode. program: its path."""
    with folder_of_user() as folder:
        config = folder / "pgbouncer.ini"

        def words(port: int) -> list[str]:
            config.write_text(
                f"[databases]\n* = host=127.0.0.1 port={server_port} user=postgres\n"
                f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n"
                "unix_socket_dir =\nauth_type = any\npool_mode = transaction\n"
                "ignore_startup_parameters = extra_float_digits\n"
            )
            return [program, str(config)]

        with servers.server(words, folder / "log", stop=signal.SIGINT, **unprivileged()) as port:
            yield port


@contextmanager
def pgpool(server_port: int) -> Iterator[int]:
    """Give the port of a Pgpool-II of this machine before one server."""
    with folder_of_user() as folder:
        config = folder / "pgpool.conf"
        (folder / "pool_hba.conf").write_text("host all all 127.0.0.1/32 trust\n")

        def words(port: int) -> list[str]:
            config.write_text(
                f"listen_addresses = '127.0.0.1'\nport = {port}\npcp_port = {port + 10_000}\n"
                f"socket_dir = '{folder}'\npcp_socket_dir = '{folder}'\n"
                f"logdir = '{folder}'\npid_file_name = '{folder}/pid'\n"
                f"backend_hostname0 = '127.0.0.1'\nbackend_port0 = {server_port}\n"
                "backend_clustering_mode = 'streaming_replication'\nnum_init_children = 40\n"
                "load_balance_mode = on\nsr_check_user = 'postgres'\nenable_pool_hba = off\n"
            )
            program = servers.program("pgpool", "pgpool2")
            hba = str(folder / "pool_hba.conf")
            return [program, "-n", "-f", str(config), "-a", hba, "-F", str(folder / "pcp.conf")]

        (folder / "pcp.conf").touch()
        with servers.server(words, folder / "log", stop=signal.SIGINT, **unprivileged()) as port:
            yield port
