"""Servers on loopback for a run; each ends at the exit of its `with`, or with this process."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from celery_redlock.testing import EmbeddedNode, embedded_nodes
from celery_redlock.testing.servers import claim_port, spawn

RABBITMQ = "CELERY_REDLOCK_RABBITMQ"  # the URL of a server that runs; so do the tests
POSTGRESQL = "CELERY_REDLOCK_POSTGRESQL"
valkey = EmbeddedNode
lock_nodes = embedded_nodes


class MissingError(Exception):
    """A server or program that this machine does not have. Its text says how to get it."""


def program(name: str, package: str) -> str:
    """Return the path of a program of this machine. package: of Debian."""
    if found := shutil.which(name):
        return found
    raise MissingError(f"{name} is not in PATH: install {package}")


def redis() -> EmbeddedNode:
    """Return the Redis server of this machine, to be started by `with`."""
    return EmbeddedNode(binary=program("redis-server", "redis-server"))


def version_of(node: EmbeddedNode) -> str:
    """Return the version of a Redis or Valkey server, or a fork of them, that runs."""
    facts = node.client().info("server")
    own = (f"{name}_version" for name in ("valkey", "redict", "redis"))
    return next(str(facts[name]) for name in own if name in facts)


@contextmanager
def rabbitmq() -> Iterator[str]:
    """Give the URL of a virtual host of RabbitMQ, which goes with all that is in it."""
    server = os.environ.get(RABBITMQ, "amqp://guest:guest@127.0.0.1:5672")
    control = program("rabbitmqctl", "rabbitmq-server")
    name, user = f"neighbour_{uuid.uuid4().hex[:12]}", urlsplit(server).username or "guest"
    try:
        subprocess.run([control, "-q", "add_vhost", name], check=True)
        permit = [control, "-q", "set_permissions", "-p", name, user, ".*", ".*", ".*"]
        subprocess.run(permit, check=True)
        yield f"{server}/{name}"
    finally:
        subprocess.run([control, "-q", "delete_vhost", name], check=False)


def rabbitmq_version() -> str:
    control = program("rabbitmqctl", "rabbitmq-server")
    answer = subprocess.run([control, "version"], check=True, capture_output=True, text=True)
    return answer.stdout.strip()


@contextmanager
def server(
    command: Callable[[int], Sequence[str]], log: Path, *, env: Mapping[str, str] | None = None,
    answers: Callable[[int], bool] | None = None, timeout: float = 60.0,
    stop: signal.Signals = signal.SIGTERM, **options: Any,
) -> Iterator[int]:  # fmt: skip
    """Run a server on a free port, and give the port when it answers.

    command: its command line for a port. env: variables beside those of this process. answers:
    whether it does; None means that it takes a connection. stop: the signal that ends it. options:
    as of `subprocess.Popen`. Raises MissingError with its log.
    """
    with claim_port() as claim:
        port = int(claim.getsockname()[1])
        process = spawn(command(port), log, env={**os.environ, **(env or {})}, **options)
        try:
            _see_answer(process, port, log, answers or _takes_connections, timeout)
            yield port
        finally:
            process.send_signal(stop)
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()


def _see_answer(
    process: subprocess.Popen[bytes], port: int, log: Path, answers: Callable[[int], bool],
    timeout: float,
) -> None:  # fmt: skip
    end = time.monotonic() + timeout
    while not answers(port):
        if process.poll() is not None or time.monotonic() > end:
            raise MissingError(f"the server does not start:\n{log.read_text(errors='replace')}")
        time.sleep(0.05)


def _takes_connections(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def postgresql() -> Iterator[str]:
    """Give the URL of a database of PostgreSQL of its own, which is dropped at the end.

    $CELERY_REDLOCK_POSTGRESQL names a server that runs, with a role that may create databases.
    """
    server_url = os.environ.get(POSTGRESQL, "postgresql://root@127.0.0.1:5432/test")
    psql = [program("psql", "postgresql-client"), "-q", "-v", "ON_ERROR_STOP=1", server_url, "-c"]
    name = f"neighbour_{uuid.uuid4().hex[:12]}"
    with ExitStack() as stack:
        subprocess.run([*psql, f"CREATE DATABASE {name}"], check=True)
        drop = [*psql, f"DROP DATABASE {name} WITH (FORCE)"]
        stack.callback(subprocess.run, drop, check=False)
        yield urlsplit(server_url)._replace(path=f"/{name}").geturl()


def postgresql_version(url: str) -> str:
    """Return the version of a PostgreSQL server that runs, such as "17.6"."""
    psql = [program("psql", "postgresql-client"), "-XAt", url, "-c", "SHOW server_version"]
    answer = subprocess.run(psql, check=True, capture_output=True, text=True)
    return answer.stdout.split()[0]


@contextmanager
def memcached(log: Path) -> Iterator[int]:
    """Give the port of a memcached."""
    binary, account = program("memcached", "memcached"), getpass.getuser()
    words = (binary, "-l", "127.0.0.1", "-u", account, "-p")
    with server(lambda port: (*words, str(port)), log) as port:
        yield port


def memcached_version() -> str:
    command = [program("memcached", "memcached"), "--version"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]
