"""What stands on the nodes and what they say of themselves, read for people.

Apart from the connections that locks are taken by: a node is asked over a connection of its own,
so that asking disturbs nobody, and shows what a new client would see.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from celery_redlock.errors import NodeError
from celery_redlock.lock.keys import (
    broken_key,
    guard_keys,
    label_of,
    lock_key,
    resource_of,
    since_of,
    waiting_key,
    wake_channel,
)
from celery_redlock.lock.lease import silence
from celery_redlock.lock.nodes import (
    Address,
    names_on,
    read_info,
    request_of,
    strike,
    text_of,
    vouch,
)
from celery_redlock.lock.redlock import Redlock
from celery_redlock.lock.votes import advised

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
    left = quorum.ask(request_of("PTTL", quiet), nodes=answering)
    silent = {quorum.nodes[index].name: ms / 1000 for index, ms in left.items() if ms > 0}
    return NodeReport(len(quorum.nodes), quorum.size, tuple(causes), silent)


def exchange_terms(redlock: Redlock) -> Mapping[str, list[str]]:
    """Note on every node what this client goes by; returns what others noted there, if not that.

    By their terms, the nodes that say so. Locks are safe only among clients that agree. What was
    noted last stays, so a change that all clients follow is told of by each of them once.
    Raises SettingsError for nodes that turn out to be one server.
    """
    return _other_terms(redlock, "SET", terms_of(redlock), "GET")


def look_at_terms(redlock: Redlock) -> Mapping[str, list[str]]:
    """Return what others noted on the nodes, if not what this client goes by; notes nothing.

    By their terms, the nodes that say so. Raises SettingsError for nodes that are one server.
    """
    return _other_terms(redlock, "GET")


def _other_terms(redlock: Redlock, verb: str, *words: str) -> Mapping[str, list[str]]:
    own = terms_of(redlock)
    quorum, answering = redlock.session.quorum, _connect(redlock)
    request = request_of(verb, f"{{{redlock.prefix}}}:terms", *words)
    others: dict[str, list[str]] = {}
    for index, before in quorum.ask(request, nodes=answering).items():
        terms = own if before is None else text_of(before)
        if terms != own:
            others.setdefault(terms, []).append(quorum.nodes[index].name)
    return others


def terms_of(redlock: Redlock) -> str:
    """Return what all clients of a prefix must agree on, for people; times in s."""
    setup, nodes = redlock.session.setup, len(redlock.session.quorum.nodes)
    return f"max_ttl={redlock.max_ttl:g} restart_guard={setup.guard.word} nodes={nodes}"


def _connect(redlock: Redlock) -> Collection[int]:
    """Return the nodes that answer within two node timeouts."""
    session = redlock.session
    answering = session.quorum.connect(session.clock.now() + 2 * session.quorum.timeout)
    error = session.same_server()
    if error is not None:
        raise error
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
class WhoWaits:
    """A run that the nodes know as the one of its task that waits. votes: how many nodes do."""

    resource: str
    task: str
    run: str
    votes: int


@dataclass(frozen=True)
class Sight:
    """What stands on the nodes that answer. failing: of the others, by node, why not."""

    locks: tuple[Standing, ...]
    waiting: tuple[WhoWaits, ...]
    failing: Mapping[str, str]


def look_at_nodes(redlock: Redlock) -> tuple[NodeStatus, ...]:
    """Return what each node says of itself, in the order of the setting."""
    clock, guard = redlock.session.clock, guard_keys(redlock.prefix)

    def look(connection: Any) -> NodeStatus:
        asked = clock.now()
        _reply(connection, "PING")
        latency = clock.now() - asked
        seconds, microseconds = map(int, _reply(connection, "TIME"))
        ahead = seconds + microseconds / 1e6 - clock.wall_us() / 1e6
        facts = read_info(connection, ("server", "memory", "replication"))
        run, left = _reply(connection, "GET", guard[0]), _reply(connection, "PTTL", guard[1])
        version = facts.get("valkey_version") or facts.get("redis_version", "")
        return NodeStatus(
            server=f"{facts.get('server_name', 'redis')} {version}",  # Redis does not name itself
            role=facts.get("role", ""),
            uptime=float(facts.get("uptime_in_seconds", 0)),
            latency=latency,
            clock=ahead,
            policy=facts.get("maxmemory_policy", ""),
            silent_for=max(0, int(left)) / 1000,
            knows_us=run is not None and text_of(run) == facts.get("run_id"),
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
    """Return the locks that stand on the nodes, and who is noted as waiting; all, or of a resource.

    What else the nodes hold is looked through in parts, which keeps nobody waiting.
    """
    prefix, needed = redlock.prefix, redlock.session.quorum.size
    beginnings = lock_key(prefix, ""), waiting_key(prefix, "")

    def look(connection: Any) -> tuple[list[tuple[Any, Any, float]], list[tuple[Any, Any, Any]]]:
        locks, waiting = (list(set(names_on(connection, text))) for text in beginnings)
        entries = [
            (name, task, entry)
            for name in waiting
            for task, entry in _pairs(_reply(connection, "HGETALL", name))
        ]
        return list(_values(connection, locks)), entries

    found, failing = _ask_each(redlock, look)
    votes: dict[tuple[Any, Any], dict[str, float]] = {}
    noted: Counter[tuple[str, str, str]] = Counter()
    for node, (values, entries) in found.items():
        for key, value, left in values:
            votes.setdefault((key, value), {})[node] = left
        for key, task, entry in entries:
            run = text_of(entry).partition(" ")[2]
            noted[text_of(key).removeprefix(beginnings[1]), text_of(task), run] += 1
    standing = [_standing(prefix, key, value, on, needed) for (key, value), on in votes.items()]
    of_it = [lock for lock in standing if resource in (None, lock.resource)]
    waits = [
        WhoWaits(*names, count) for names, count in noted.items() if resource in (None, names[0])
    ]
    return Sight(
        tuple(sorted(of_it, key=lambda lock: (lock.resource, lock.permit, -len(lock.votes)))),
        tuple(sorted(waits, key=lambda one: (one.resource, one.task, one.run))),
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
    keys = (lock.key, broken_key(text_of(lock.key), text_of(lock.value)))
    lasting = str(int(silence(redlock.max_ttl) * 1000))  # no holder repairs for longer than a lease
    channel = wake_channel(redlock.prefix, lock.resource)

    def break_it(connection: Any) -> bool:
        return strike(connection, keys, lock.value, lasting, channel)

    return _ask_each(redlock, break_it)


def trust_nodes(
    redlock: Redlock, names: Collection[str]
) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Let these nodes vote from now on; see `Redlock.trust`.

    Returns by node the name of one lock that stands there, "" for none, and why the others could
    not be told.
    """
    return _ask_each(redlock, lambda connection: vouch(connection, redlock.prefix), names)


def _values(connection: Any, names: Sequence[Any]) -> Iterator[tuple[Any, Any, float]]:
    """Yield of each key that stands there its name, its value, and its ttl in s."""
    for first in range(0, len(names), ASKED_AT_ONCE):
        part = names[first : first + ASKED_AT_ONCE]
        connection.send_packed_command(
            connection.pack_commands([("MGET", *part), *(("PTTL", name) for name in part)])
        )
        values = connection.read_response()
        left = [int(connection.read_response()) for _ in part]
        for name, value, ms in zip(part, values, left, strict=True):
            if ms != GONE:
                yield name, value, math.inf if ms < 0 else ms / 1000


def _pairs(reply: Any) -> Iterable[tuple[Any, Any]]:
    return reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)


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
            return None, advised(address.without_secrets(str(error) or type(error).__name__))

    with ThreadPoolExecutor(len(asked) or 1) as pool:
        results = dict(zip((a.name for a in asked), pool.map(one, asked), strict=True))
    failing = {name: cause for name, (_, cause) in results.items() if cause}
    return {n: cast("T", said) for n, (said, _) in results.items() if n not in failing}, failing
