"""What stands on the nodes and what they say of themselves, read for people.

Apart from the connections that locks are taken by: a node is asked over a connection of its own,
so that asking disturbs nobody, and shows what a new client would see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from celery_redlock.errors import NodeError
from celery_redlock.lock.client import Redlock
from celery_redlock.lock.engine.session import one_server
from celery_redlock.lock.keys import (
    broken_key,
    guard_keys,
    label_of,
    lock_key,
    resource_of,
    since_of,
    wake_channel,
)
from celery_redlock.lock.model.lease import grace_period
from celery_redlock.lock.server.admin import names_on, say_trusted, strike, trust_node
from celery_redlock.lock.server.error_hints import with_hint
from celery_redlock.lock.server.handshake import read_info
from celery_redlock.lock.transport.address import Address
from celery_redlock.lock.transport.encoding import (
    encode_command,
    encoded,
    read_list,
    read_number,
    read_text,
    text_of,
)

PATIENCE = 1.0  # s that a node may take for each step, if not more: people wait longer than locks
ASKED_AT_ONCE = 500  # keys
GONE = -2  # Source: the Redis command PTTL

T = TypeVar("T")


@dataclass(frozen=True)
class NodeReport:
    """What the nodes say.

    failing: "address: cause" for each that does not answer. silent: for each that answers and does
    not vote yet (restart guard), by address, for how many s more.
    """

    nodes: int
    quorum: int
    failing: tuple[str, ...]
    silent: Mapping[str, float]

    @property
    def answering(self) -> int:
        """How many answer."""
        return self.nodes - len(self.failing)

    @property
    def voting(self) -> int:
        """How many answer and vote."""
        return self.answering - len(self.silent)


def ask_nodes(redlock: Redlock) -> NodeReport:
    """Connect to every node and say what was found, after three node timeouts at the most.

    Raises SettingsError for nodes that turn out to be one server.
    """
    quorum = redlock.session.quorum
    answering = _connect(redlock)
    failing = [node for node in quorum.nodes if node.index not in answering]
    causes = [str(node.error or NodeError(node.name, "no answer in time")) for node in failing]
    _, quiet = guard_keys(redlock.prefix)
    # ms, below 0 where it is not silent
    left = quorum.query(encode_command("PTTL", quiet), read_number, nodes=answering)
    silent = {quorum.nodes[index].name: ms / 1000 for index, ms in left.items() if ms > 0}
    return NodeReport(len(quorum.nodes), quorum.size, tuple(causes), silent)


def exchange_terms(redlock: Redlock) -> Mapping[str, list[str]]:
    """Note on every node what this client goes by; returns what others noted there, if not that.

    By their terms, the nodes that say so. Locks are safe only among clients that agree. What was
    noted last stays, so a change that all clients follow is told of by each of them once.
    Raises SettingsError for nodes that turn out to be one server.
    """
    quorum, answering = redlock.session.quorum, _connect(redlock)
    request = encode_command("SET", _terms_key(redlock), terms_of(redlock), "GET")
    noted = quorum.query(request, _read_terms, nodes=answering)
    return _differing(redlock, {quorum.nodes[index].name: text for index, text in noted.items()})


def look_at_terms(redlock: Redlock) -> Mapping[str, list[str]]:
    """Return what others noted on the nodes, if not what this client goes by; notes nothing.

    Nor does it begin the grace_period of a node that nobody has used yet, as a client would.
    By their terms, the nodes that say so. Raises SettingsError for nodes that are one server.
    """

    def look(connection: Any) -> tuple[str | None, str]:
        run_id = read_info(connection).get("run_id", "")
        return _read_terms(_reply(connection, "GET", encoded(_terms_key(redlock)))), run_id

    found, _ = _ask_each(redlock, look)
    seen: dict[str, str] = {}
    for node, (_, run_id) in found.items():
        if run_id and run_id in seen:
            raise one_server(type(redlock).__name__, (seen[run_id], node))
        seen[run_id] = node
    return _differing(redlock, {node: terms for node, (terms, _) in found.items()})


def _terms_key(redlock: Redlock) -> str:
    return f"{{{redlock.prefix}}}:terms"


def _read_terms(reply: Any) -> str | None:
    """Return what was noted, None for nothing; raises UnexpectedReplyError."""
    return None if reply is None else read_text(reply)


def _differing(redlock: Redlock, noted: Mapping[str, str | None]) -> Mapping[str, list[str]]:
    """Return the nodes by the terms that are noted on them, if not what this client goes by."""
    own = terms_of(redlock)
    others: dict[str, list[str]] = {}
    for node, before in noted.items():
        terms = own if before is None else before
        if terms != own:
            others.setdefault(terms, []).append(node)
    return others


def terms_of(redlock: Redlock) -> str:
    """Return what all clients of a prefix must agree on, for people; times in s."""
    options, nodes = redlock.session.options, len(redlock.session.quorum.nodes)
    return f"max_ttl={redlock.max_ttl:g} restart_guard={options.guard.word} nodes={nodes}"


def _connect(redlock: Redlock) -> Collection[int]:
    """Return the nodes that answer within two node timeouts."""
    session = redlock.session
    answering = session.quorum.connect(session.clock.now() + 2 * session.quorum.timeout)
    session.check_distinct()
    return answering


@dataclass(frozen=True)
class NodeStatus:
    """What one node says of itself.

    node: its address. error: why it cannot be asked; then all else is unknown. role: "master" or
    "slave". uptime, latency: s. clock: s by which its clock is ahead of ours. policy: its
    maxmemory-policy. silent_for: s for which it does not vote yet; knows_us: it votes for this
    prefix without an operator's word, or did before it restarted.
    """

    node: str = ""
    error: str = ""
    server: str = ""
    role: str = ""
    uptime: float = 0.0
    latency: float = 0.0
    clock: float = 0.0
    policy: str = ""
    silent_for: float = 0.0
    knows_us: bool = False

    def votes(self, guard: str) -> bool:
        """Tell whether it votes, under a restart guard's word."""
        knows_us = self.knows_us or guard == "off"
        return not self.error and self.role == "master" and knows_us and self.silent_for <= 0


@dataclass(frozen=True)
class Standing:
    """A lock as it stands on nodes: one value under one key.

    permit: of a semaphore, which. holder: its label. since: s since 1970 by the holder's clock,
    None where a stranger wrote it. votes: by node, for how many s more; inf: it never expires.
    needed: a quorum.
    """

    resource: str
    permit: int
    holder: str
    since: float | None
    votes: Mapping[str, float]
    needed: int
    key: Any = field(repr=False)
    value: Any = field(repr=False)

    @property
    def held(self) -> bool:
        """Whether a quorum has it; else it is on its way, or a rest that ends with its ttl."""
        return len(self.votes) >= self.needed

    @property
    def valid_for(self) -> float:
        """S for which a quorum keeps it if nothing renews it; 0.0 where none does."""
        return sorted(self.votes.values(), reverse=True)[self.needed - 1] if self.held else 0.0


@dataclass(frozen=True)
class Sight:
    """What stands on the nodes that answer. failing: of the others, by node, why not."""

    locks: tuple[Standing, ...]
    failing: Mapping[str, str]


def look_at_nodes(redlock: Redlock) -> tuple[NodeStatus, ...]:
    """Return what each node says of itself, in the order of the setting."""
    clock, guard = redlock.session.clock, redlock.session.options.guard
    keys = [encoded(key) for key in guard_keys(redlock.prefix)]

    def look(connection: Any) -> NodeStatus:
        asked = clock.now()
        _reply(connection, "PING")
        latency = clock.now() - asked
        seconds, microseconds = map(int, read_list(_reply(connection, "TIME"), 2))
        ahead = seconds + microseconds / 1e6 - clock.wall_us() / 1e6
        facts = read_info(connection, ("server", "memory", "replication"))
        run, left = _reply(connection, "GET", keys[0]), _reply(connection, "PTTL", keys[1])
        uptime, run_id = float(facts.get("uptime_in_seconds", 0)), facts.get("run_id", "")
        _, new, _ = guard.arguments(run_id, uptime)  # ms of grace_period of one that knows nobody
        knows_us = new == "0" if run is None else read_text(run) == run_id
        version = facts.get("valkey_version") or facts.get("redis_version", "")
        return NodeStatus(
            server=f"{facts.get('server_name', 'redis')} {version}",  # Redis does not name itself
            role=facts.get("role", ""),
            uptime=uptime,
            latency=latency,
            clock=ahead,
            policy=facts.get("maxmemory_policy", ""),
            silent_for=max(0, read_number(left)) / 1000,
            knows_us=knows_us,
        )

    found, failing = _ask_each(redlock, look)
    names = [node.name for node in redlock.session.quorum.nodes]
    return tuple(
        NodeStatus(node=name, error=failing[name])
        if name in failing
        else replace(found[name], node=name)
        for name in names
    )


def look_at_locks(redlock: Redlock, resource: str | None = None) -> Sight:
    """Return the locks that stand on the nodes; all, or those of a resource.

    What else the nodes hold is looked through in parts, which keeps nobody waiting.
    """
    prefix, needed = redlock.prefix, redlock.session.quorum.size
    beginning = lock_key(prefix, "")

    def look(connection: Any) -> list[tuple[Any, Any, float]]:
        return list(_values(connection, list(set(names_on(connection, beginning)))))

    found, failing = _ask_each(redlock, look)
    votes: dict[tuple[Any, Any], dict[str, float]] = {}
    for node, values in found.items():
        for key, value, left in values:
            votes.setdefault((key, value), {})[node] = left
    standing = [_standing(prefix, key, value, on, needed) for (key, value), on in votes.items()]
    of_it = [lock for lock in standing if resource in (None, lock.resource)]
    return Sight(
        tuple(sorted(of_it, key=lambda lock: (lock.resource, lock.permit, -len(lock.votes)))),
        failing,
    )


def _standing(
    prefix: str, key: Any, value: Any, votes: Mapping[str, float], needed: int
) -> Standing:
    resource, permit = resource_of(prefix, text_of(key))
    text = "" if value is None else text_of(value)
    holder = label_of(text) if text else "no lock, but a key of another type"
    return Standing(resource, permit, holder, since_of(text), votes, needed, key, value)


def break_lock(redlock: Redlock, lock: Standing) -> tuple[Mapping[str, bool], Mapping[str, str]]:
    """Take a lock from its holder, and let none of its repairs bring it back.

    The holder learns of it at its next renewal; until then it goes on, maybe beside another one.
    What stands there by now instead of it is left alone. Returns by node whether it stood there,
    and why the others could not be told.
    """
    keys = (lock.key, encoded(broken_key(text_of(lock.key), text_of(lock.value))))
    # no holder reclaims for longer than a lease
    lasting = str(int(grace_period(redlock.max_ttl) * 1000))
    channel = wake_channel(redlock.prefix, lock.resource)

    def break_it(connection: Any) -> bool:
        return strike(connection, keys, lock.value, lasting, encoded(channel))

    return _ask_each(redlock, break_it)


def trust_nodes(
    redlock: Redlock, names: Collection[str]
) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Let these nodes vote from now on; see `Redlock.trust`.

    Returns by node the name of one lock that stands there, "" for none, and why the others could
    not be told.
    """
    found = _ask_each(redlock, lambda connection: trust_node(connection, redlock.prefix), names)
    # to all nodes, once these vote: a client that hears it tries at once
    word = redlock.session.platform.new_token()
    _ask_each(redlock, lambda connection: say_trusted(connection, redlock.prefix, word))
    return found


def _values(connection: Any, names: Sequence[Any]) -> Iterator[tuple[Any, Any, float]]:
    """Yield of each key that stands there its name, its value, and its ttl in s."""
    for first in range(0, len(names), ASKED_AT_ONCE):
        part = names[first : first + ASKED_AT_ONCE]
        connection.send_packed_command(
            connection.pack_commands([("MGET", *part), *(("PTTL", name) for name in part)])
        )
        values = read_list(connection.read_response(), len(part))
        left = [read_number(connection.read_response()) for _ in part]
        for name, value, ms in zip(part, values, left, strict=True):
            if ms != GONE:
                if value is not None:
                    read_text(value)
                yield name, value, math.inf if ms < 0 else ms / 1000


def _reply(connection: Any, *words: Any) -> Any:
    connection.send_command(*words)
    return connection.read_response()


def _ask_each(
    redlock: Redlock, ask: Callable[[Any], T], names: Collection[str] | None = None
) -> tuple[dict[str, T], dict[str, str]]:
    """Call a function with a new connection to each node, at the same time.

    names: of the nodes, all where None. Returns what it gives, and in words why some could not be
    asked, by node.
    """
    timeout = max(PATIENCE, redlock.node_timeout)
    addresses = [node.address for node in redlock.session.quorum.nodes]
    asked = [address for address in addresses if names is None or address.name in names]

    def one(address: Address) -> tuple[T | None, str]:
        try:
            return address.ask(timeout, ask), ""
        except Exception as error:  # also what a user's credential provider raises
            return None, with_hint(address.without_secrets(str(error) or type(error).__name__))

    with ThreadPoolExecutor(len(asked) or 1) as pool:
        results = dict(zip((a.name for a in asked), pool.map(one, asked), strict=True))
    failing = {name: cause for name, (_, cause) in results.items() if cause}
    return {n: cast("T", said) for n, (said, _) in results.items() if n not in failing}, failing
