"""Commands for operators: trust a node, list its keys, break a lock."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import redis

from celery_redlock.lock.model.keys import (
    completion_key,
    fence_key,
    guard_keys,
    inbox_channel,
    lock_key,
    pattern_of,
    tenure_key,
    votes_channel,
)
from celery_redlock.lock.model.lease import Fence, proposal
from celery_redlock.lock.model.votes import quorum_of
from celery_redlock.lock.platform.clock import Platform
from celery_redlock.lock.server.error_hints import with_hint
from celery_redlock.lock.server.handshake import read_info
from celery_redlock.lock.server.requests import BREAK, FENCE, TRUST
from celery_redlock.lock.transport.address import Address
from celery_redlock.lock.transport.command import (
    encoded,
    read_list,
    read_number,
    read_text,
    text_of,
)

T = TypeVar("T")
_DENIED = re.compile(r"access (?:a|one of the) (key|channel)")  # Redis 7; Redis 6.2


def ask_each(
    addresses: Collection[Address], timeout: float, ask: Callable[[Any], T]
) -> tuple[dict[str, T], dict[str, str]]:
    """Call a function with a new connection to each node, in parallel.

    timeout: seconds, for each step. Returns the results by node, and the causes by failed node.
    """

    def one(address: Address) -> tuple[T | None, str]:
        try:
            return address.ask(timeout, ask), ""
        except Exception as error:  # also an error of the user's credential provider
            return None, with_hint(address.cause_of(error, timeout))

    with ThreadPoolExecutor(len(addresses) or 1) as pool:
        results = dict(zip((a.name for a in addresses), pool.map(one, addresses), strict=True))
    failing = {name: cause for name, (_, cause) in results.items() if cause}
    return {n: cast("T", said) for n, (said, _) in results.items() if n not in failing}, failing


def reply_of(connection: Any, *words: Any) -> Any:
    """Return a node's reply to one command. connection: a result of `Address.dial`."""
    connection.send_command(*words)
    return connection.read_response()


def trust_nodes(
    addresses: Collection[Address],
    names: Collection[str],
    prefix: str,
    timeout: float,
    platform: Platform,
) -> tuple[dict[str, str], dict[str, str]]:
    """Let nodes vote from now on, and wake the clients that wait for that.

    addresses: of all nodes. names: of the nodes to trust. Returns by node the name of one lock on
    the node ("" for none), and the causes by failed node.
    """
    trusted = [address for address in addresses if address.name in names]
    found, failing = ask_each(trusted, timeout, functools.partial(trust_node, prefix=prefix))
    mend_counters(addresses, names, prefix, timeout, platform.clock.wall_us())
    if found:  # only once all of them vote: a client that receives the message tries at once
        news = "PUBLISH", encoded(votes_channel(prefix)), platform.new_token()  # the same on each
        ask_each(addresses, timeout, lambda connection: reply_of(connection, *news))
    return found, failing


def trust_node(connection: Any, prefix: str) -> str:
    """Let a node that does not know this prefix vote at once, on an operator's order.

    connection: a result of `Address.dial`. Returns the name of one lock on the node, "" if it has
    none. Raises redis.RedisError, OSError.
    """
    facts = read_info(connection)
    if "run_id" not in facts:
        raise redis.ResponseError(facts.get("error", "INFO names no run_id"))
    notes = set(names_on(connection, f"{tenure_key(prefix)}:"))
    keys = *map(encoded, (*guard_keys(prefix), tenure_key(prefix))), *notes
    reply_of(connection, "EVAL", TRUST.source, str(len(keys)), *keys, facts["run_id"])
    return next(map(text_of, names_on(connection, lock_key(prefix, ""))), "")


def mend_counters(
    addresses: Collection[Address],
    names: Collection[str],
    prefix: str,
    timeout: float,
    wall_us: int,
) -> None:
    """Set fencing counters that another program has written to the largest one of a quorum.

    No holder's token counts on such a node, and each token is on one node of that quorum. So tokens
    still grow. Without such a quorum nothing is set. wall_us: now. Others: as in `trust_nodes`.
    """
    name, fence = encoded(fence_key(prefix)), Fence(quorum_of(len(addresses)))
    fence.proposed = proposal(wall_us)

    def ask(connection: Any, *words: Any) -> int:
        return read_number(reply_of(connection, "EVAL", FENCE.source, "1", name, *words))

    counters, _ = ask_each(addresses, timeout, ask)
    for node, address in enumerate(addresses):
        if counters.get(address.name, -1) >= 0:
            fence.counted(node, counters[address.name])
    if fence.has_quorum and fence.greatest:
        words = str(fence.greatest), str(fence.bound)
        chosen = [address for address in addresses if address.name in names]
        ask_each(chosen, timeout, lambda connection: ask(connection, *words))


def missing_rights(connection: Any, prefix: str) -> list[str]:
    """Return which rights of lua/*.lua, of the client and of the commands the user lacks.

    Tries each command, and changes nothing. connection: a result of `Address.dial`, of no further
    use. Raises redis.RedisError, OSError.
    """
    key, channel = completion_key(prefix, ""), f"{votes_channel(prefix)}\n"  # nobody has these
    tried = {
        "+ping": ("PING",),
        "+info": ("INFO", "server"),
        "+get": ("GET", key),
        "+set": ("SET", key, "", "XX", "PX", "1"),  # only if there is such a key
        "+del": ("DEL", key),
        "+time": ("TIME",),
        "+pexpire": ("PEXPIRE", key, "1"),
        "+pttl": ("PTTL", key),
        "+exists": ("EXISTS", key),
        "+zadd": ("ZADD", key, "XX", "0", "x"),
        "+zrem": ("ZREM", key, "x"),
        "+zrange": ("ZRANGE", key, "0", "0"),
        "+zrank": ("ZRANK", key, "x"),
        "+publish": ("PUBLISH", channel, ""),
        "+pubsub|numsub": ("PUBSUB", "NUMSUB"),
        "+eval": ("EVAL", "return 1", "0"),
        "+evalsha": ("EVALSHA", "0" * 40, "0"),
        "+script": ("SCRIPT", "EXISTS", "0" * 40),
        "+scan": ("SCAN", "0", "COUNT", "1"),
        "+mget": ("MGET", key),
        f"&{{{prefix}}}:handoff:*": ("PUBLISH", inbox_channel(prefix, "\n"), ""),
        "+unsubscribe": ("UNSUBSCRIBE", channel),
        "+subscribe": ("SUBSCRIBE", channel),  # last: such a connection takes no other command
    }
    connection.send_packed_command(connection.pack_commands(tried.values()))
    missing = dict[str, None]()
    for right, (command, *_) in tried.items():
        try:
            connection.read_response()
        except redis.exceptions.NoPermissionError as error:
            denied = _DENIED.search(str(error))
            if denied is None:  # the command itself
                missing[right if right.startswith("+") else f"+{command.lower()}"] = None
            elif denied[1] == "key":
                missing[f"~{{{prefix}}}:*"] = None
            else:
                missing[f"&{{{prefix}}}:wake:*" if right.startswith("+") else right] = None
        except redis.ResponseError:
            pass  # of a script that is not there, or a replica: the command is allowed
    return list(missing)


def names_on(connection: Any, beginning: str) -> Iterator[Any]:
    """Yield the names of a node's keys that begin like this; a name may come twice.

    Scans the database in parts, so that no other client waits.
    """
    cursor, pattern = b"0", encoded(f"{pattern_of(beginning)}*")
    while True:
        reply = reply_of(connection, "SCAN", cursor, "MATCH", pattern, "COUNT", "1000")
        cursor, names = read_list(reply, 2)
        for name in read_list(names, len(names) if isinstance(names, list) else -1):
            read_text(name)
            yield name
        if text_of(cursor) == "0":
            return


def force_unlock(connection: Any, keys: Sequence[Any], value: Any, *rest: Any) -> bool:
    """Delete a lock for an operator if the key has this value; return whether it had this value.

    connection: a result of `Address.dial`. keys, value, rest: as in `lua/break.lua`. Raises
    redis.RedisError, OSError.
    """
    reply = reply_of(connection, "EVAL", BREAK.source, str(len(keys)), *keys, value, *rest)
    return bool(read_number(reply))
