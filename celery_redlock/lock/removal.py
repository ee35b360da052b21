"""What a prefix has on the nodes, and which of it goes with the package.

A key that expires by itself is never deleted. So a lock, a start or a claim that is taken meanwhile
stands, and excludes. A fencing counter stays, too: rows of the user have its tokens.

Not here: the schema of a PostgreSQL node (`postgres/removal.py`), and what is on the broker
(`operate/cli/uninstall.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import redis

from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.model.keys import (
    inbox_channel,
    lock_key,
    pattern_of,
    resource_of,
    votes_channel,
    waiting_key,
)
from celery_redlock.lock.node_status import in_iso
from celery_redlock.lock.server.admin import ask_each, names_on, reply_of
from celery_redlock.lock.transport.command import (
    encoded,
    read_list,
    read_number,
    text_of,
)

if TYPE_CHECKING:
    from celery_redlock.lock.postgres.address import PostgresAddress

# what becomes of keys
GOES = "goes"
STAYS = "stays"
EXPIRES = "expires"
# The names after the prefix of the keys that go. Without the first two a node is new to the prefix:
# the guard's next contact begins a grace period, so a lock that it keeps excludes all the same.
GOING = ("run", "tenure", "terms", "format")
OF_BROKER = "worker_"  # begins the names of worker leases, if the broker is a node, too
KEY_KINDS = {  # by the name after the prefix, for people
    "run": "restart guard",
    "tenure": "restart guard",
    "quiet": "restart guard",
    "terms": "shared settings",
    "format": "shared settings",
    "fence": "fencing counter",
    "lock": "locks",
    "broken": "broken locks",
    "rate": "starts of rates",
    "rate-tokens": "starts of rates",
    "waiting": "waiting processes",
    "done": "completion markers",
    "unique": "claims",
    "order": "order of calls",
}
NO_EXPIRY = -1  # Source: the Redis command PTTL
KEYS_PER_WRITE = 500


@dataclass(frozen=True)
class KeyGroup:
    """Keys of one kind on one server.

    place: the server. what: the kind, for people. fate: GOES, STAYS or EXPIRES. until: a moment at
    which the last one has expired, in ISO 8601; None if they do not.
    """

    place: str
    what: str
    count: int
    fate: str
    until: str | None = None


@dataclass(frozen=True)
class NodeKeys:
    """What one node has of a prefix.

    locked: the resources of the locks. listening: the processes that hear its channels.
    """

    groups: tuple[KeyGroup, ...]
    locked: tuple[str, ...]
    listening: tuple[str, ...]


def list_keys(session: Session) -> tuple[dict[str, NodeKeys], dict[str, str]]:
    """Return what each node has of the prefix, and the causes of the failures by node."""
    prefix = session.options.prefix
    now = session.clock.wall_us() / 1e6
    hears = not is_schema(session)  # `uses_of_schema` sees the clients of a PostgreSQL

    def read_keys(connection: Any) -> tuple[list[tuple[str, int]], tuple[str, ...]]:
        names = sorted(set(names_on(connection, f"{{{prefix}}}:")))
        remaining = list(_remaining_ms(connection, names))
        return remaining, _listening(connection, prefix, names) if hears else ()

    replies, failures = ask_each(session.nodes, read_keys)
    keys = {
        node: NodeKeys(
            key_groups(node, prefix, remaining, now), _locked(prefix, remaining), listening
        )
        for node, (remaining, listening) in replies.items()
    }
    return keys, failures


def key_groups(
    place: str, prefix: str, remaining_ms: Iterable[tuple[str, int]], now: float
) -> tuple[KeyGroup, ...]:
    """Return the keys of a node by kind and fate.

    remaining_ms: the names of the keys, and when each expires, as PTTL says. now: seconds since
    1970.
    """
    found: dict[tuple[str, str], list[int]] = {}
    for name, ms in remaining_ms:
        own_name = name.removeprefix(f"{{{prefix}}}:")
        if own_name.startswith(OF_BROKER):
            continue
        fate = EXPIRES if ms >= 0 else GOES if own_name in GOING else STAYS
        what = KEY_KINDS.get(own_name.partition(":")[0], "keys of another program")
        found.setdefault((what, fate), []).append(ms)
    return tuple(
        KeyGroup(place, what, len(times), fate, _until(now, times) if fate == EXPIRES else None)
        for (what, fate), times in sorted(found.items())
    )


def _until(now: float, remaining_ms: Sequence[int]) -> str | None:
    return in_iso(math.ceil(now + max(remaining_ms) / 1000))


def _locked(prefix: str, remaining_ms: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    beginning = lock_key(prefix, "")
    names = [name for name, _ in remaining_ms if name.startswith(beginning)]
    return tuple(dict.fromkeys(resource_of(prefix, name)[0] for name in names))


def _remaining_ms(connection: Any, names: Sequence[Any]) -> Iterable[tuple[str, int]]:
    """Yield the name of each key that is still there, and what PTTL says of it."""
    for first in range(0, len(names), KEYS_PER_WRITE):
        part = names[first : first + KEYS_PER_WRITE]
        connection.send_packed_command(connection.pack_commands([("PTTL", name) for name in part]))
        for name in part:
            ms = read_number(connection.read_response())
            if ms >= NO_EXPIRY:
                yield text_of(name), ms


def _listening(connection: Any, prefix: str, names: Sequence[Any]) -> tuple[str, ...]:
    """Return the names of the processes that hear channels of the prefix, on this node.

    A client that is not registered is seen only with the right to list the channels, which no
    client needs.
    """
    beginning = waiting_key(prefix, "")
    channels = {encoded(votes_channel(prefix))}
    for name in names:
        if text_of(name).startswith(beginning):
            waiters = read_list(reply_of(connection, "ZRANGE", name, "0", "-1"))
            channels |= {encoded(inbox_channel(prefix, text_of(waiter))) for waiter in waiters}
    with suppress(redis.exceptions.NoPermissionError):
        pattern = encoded(f"{pattern_of(f'{{{prefix}}}:')}*")
        channels |= set(read_list(reply_of(connection, "PUBSUB", "CHANNELS", pattern)))
    asked = sorted(channels)
    counts = read_list(reply_of(connection, "PUBSUB", "NUMSUB", *asked), 2 * len(asked))
    heard = zip(asked, counts[1::2], strict=True)
    inbox = inbox_channel(prefix, "")
    return tuple(text_of(channel).removeprefix(inbox) for channel, count in heard if int(count))


def is_schema(session: Session) -> bool:
    """Return whether the node is a PostgreSQL server, which keeps all keys in one schema."""
    return session.nodes.all[0].address.keeps_locks


def uses_of_schema(session: Session) -> list[str] | None:
    """Return why the schema has to stay now, a line each; None if there is none.

    Raises redis.RedisError.
    """
    from celery_redlock.lock.postgres import removal  # it needs psycopg

    address = cast("PostgresAddress", session.nodes.all[0].address)
    return removal.schema_uses(address, session.options.prefix)


def remove_from_nodes(session: Session) -> tuple[list[str], dict[str, str]]:
    """Delete the keys that go, or drop the schema.

    Returns why the schema stays after all, a line each, and the causes by failed node. Raises
    redis.RedisError if the server of the schema fails.
    """
    prefix = session.options.prefix
    if is_schema(session):
        from celery_redlock.lock.postgres import removal

        address = cast("PostgresAddress", session.nodes.all[0].address)
        return removal.drop_schema(address, prefix), {}
    keys = [encoded(f"{{{prefix}}}:{name}") for name in GOING]
    _, failures = ask_each(
        session.nodes, lambda connection: read_number(reply_of(connection, "DEL", *keys))
    )
    return [], failures
