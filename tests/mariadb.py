"""A MariaDB server of the tests' own, on a free loopback port, with an empty database `shop`."""

from __future__ import annotations

import contextlib
import shutil
from typing import Any

import pytest

from tests.postgres import Server, run_to_end

ROOT_WITHOUT_PASSWORD = "--auth-root-authentication-method=normal"
SMALL = ("--innodb-buffer-pool-size=16M", "--innodb-log-file-size=4M")


def program(name: str) -> str:
    """Return the path of a program of MariaDB. Without it, skip."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    return found or pytest.skip("no MariaDB server is installed: apt-get install mariadb-server")


class MariaDB(Server):
    """A MariaDB server; its data ends with it."""

    def __init__(self) -> None:
        self._program = program("mariadbd")
        super().__init__()

    @property
    def command(self) -> list[str]:
        """The command line."""
        socket = f"--socket={self.folder}/socket"
        address = ("--bind-address=127.0.0.1", f"--port={self.port}", socket)
        data = ("--no-defaults", f"--datadir={self.folder}/data", self._own_tmpdir)
        return [self._program, *data, *address, *SMALL, "--innodb-flush-log-at-trx-commit=0"]

    @property
    def _own_tmpdir(self) -> str:
        """A folder of its own: at its start a server removes the temporary tables of all there."""
        return f"--tmpdir={self.folder}"

    @property
    def url(self) -> str:
        """The URL that SQLAlchemy takes."""
        return f"mysql+pymysql://root@127.0.0.1:{self.port}/shop"

    def _make_files(self) -> None:
        data = f"--datadir={self.folder}/data"
        install = (program("mariadb-install-db"), "--no-defaults", data, ROOT_WITHOUT_PASSWORD)
        run_to_end(*install, "--skip-test-db", self._own_tmpdir, *SMALL)

    def start(self, timeout: float = 60.0) -> MariaDB:
        """Start the server; return when it answers. timeout, and errors: as of every server."""
        super().start(timeout)
        self.ask("CREATE DATABASE IF NOT EXISTS shop", database=None)
        return self

    def ask(self, sql: str, database: str | None = "shop") -> Any:
        """Run a statement on a connection of its own; return the rows."""
        pymysql = pytest.importorskip("pymysql")
        options = {"host": "127.0.0.1", "port": self.port, "user": "root", "database": database}
        with (
            contextlib.closing(pymysql.connect(**options, autocommit=True)) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute(sql)
            return cursor.fetchall()
