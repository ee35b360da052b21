"""What operators ask of nodes, each time on a new connection: it sees what a new client sees."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import redis

from celery_redlock.lock.model.fencing import Fence, proposal
from celery_redlock.lock.model.keys import (
    fence_key,
    format_key,
    guard_keys,
    lock_key,
    pattern_of,
    resource_of,
    tenure_key,
    votes_channel,
)
from celery_redlock.lock.platform.clock import new_token
from celery_redlock.lock.server.error_hints import with_hint
from celery_redlock.lock.server.handshake import read_info, refuse_other_format
from celery_redlock.lock.server.requests import FENCE, TRUST
from celery_redlock.lock.transport.address import Address
from celery_redlock.lock.transport.address import ask as ask_one
from celery_redlock.lock.transport.command import (
    encoded,
    read_list,
    read_number,
    read_text,
    text_of,
)
from celery_redlock.lock.transport.nodes import Nodes

STEP_TIMEOUT = 1.0  # seconds for each step with a node, or the node_timeout if that is longer
DELETED_AT_ONCE = 500  # keys in one command
T = TypeVar("T")


def ask_each(
    nodes: Nodes, ask: Callable[[Any], T], names: Collection[str] | None = None
) -> tuple[dict[str, T], dict[str, str]]:
    """Call a function with a new connection to each node, in parallel.

    ask: called with the connection; its result is that of the node. names: of the nodes to ask;
    None for all. Returns the results by node, and the causes of the failures by node.
    """
    timeout = max(STEP_TIMEOUT, nodes.timeout)
    addresses = {
        node.name: node.address for node in nodes.all if names is None or node.name in names
    }

    def ask_or_fail(address: Address) -> tuple[T | None, str]:
        try:
            return ask_one(address, timeout, ask), ""
        except Exception as error:  # also an error of the user's credential provider
            return None, with_hint(address.cause_of(error, timeout))

    with ThreadPoolExecutor(len(addresses) or 1) as pool:
        outcomes = dict(zip(addresses, pool.map(ask_or_fail, addresses.values()), strict=True))
    results: dict[str, T] = {}
    failures: dict[str, str] = {}
    for name, (result, cause) in outcomes.items():
        if cause:
            failures[name] = cause
        else:
            results[name] = cast("T", result)
    return results, failures


def reply_of(connection: Any, *words: Any) -> Any:
    """Return a node's reply to one command. connection: a result of `Address.dial`."""
    connection.send_command(*words)
    return connection.read_response()


def trust_nodes(
    nodes: Nodes, names: Collection[str], prefix: str
) -> tuple[dict[str, str], dict[str, str]]:
    """Let nodes that do not know this prefix vote from now on, and wake who waits for that.

    names: of the nodes to trust. Returns by node the resource of one lock on the node ("" for
    none), and the causes by failed node.
    """

    def trust(connection: Any) -> str:
        _mend_format(connection, prefix)
        info = read_info(connection)
        if "run_id" not in info:
            raise redis.ResponseError(info.get("error", "INFO names no run_id"))
        tenure_keys = set(names_on(connection, f"{tenure_key(prefix)}:"))
        keys = *map(encoded, (*guard_keys(prefix), tenure_key(prefix))), *tenure_keys
        reply_of(connection, "EVAL", TRUST.source, str(len(keys)), *keys, info["run_id"])
        key = next(map(text_of, names_on(connection, lock_key(prefix, ""))), "")
        return key and resource_of(prefix, key)[0]

    lock_names, failures = ask_each(nodes, trust, names)
    _mend_counters(nodes, names, prefix)
    if lock_names:  # only once all of them vote: a client that receives the message tries at once
        announcement = "PUBLISH", encoded(votes_channel(prefix)), new_token()  # the same on each
        ask_each(nodes, lambda connection: reply_of(connection, *announcement))
    return lock_names, failures


def _mend_format(connection: Any, prefix: str) -> None:
    """Delete a node's format if another program has written what is no number.

    Raises redis.ResponseError for the number of another format: its clients may hold locks there.
    """
    name = encoded(format_key(prefix))
    try:
        number = reply_of(connection, "GET", name)
    except redis.ResponseError as error:
        if "WRONGTYPE" not in str(error):
            raise
        number = b""
    if number is None or text_of(number).isdecimal():
        refuse_other_format(number)
    else:
        reply_of(connection, "DEL", name)


def _mend_counters(nodes: Nodes, names: Collection[str], prefix: str) -> None:
    """Set fencing counters that another program has written to the largest one of a quorum.

    No holder's token counts on such a node, and each token is on one node of that quorum. So tokens
    still grow. Without such a quorum nothing is set.
    """
    name = encoded(fence_key(prefix))
    fence = Fence(nodes.quorum)
    fence.proposed = proposal(nodes.clock.wall_us())

    def ask(connection: Any, *words: str) -> int:
        return read_number(reply_of(connection, "EVAL", FENCE.source, "1", name, *words))

    counters, _ = ask_each(nodes, ask)
    for node in nodes.all:
        if counters.get(node.name, -1) >= 0:
            fence.counted(node.index, counters[node.name])
    if fence.has_quorum and fence.greatest:
        words = str(fence.greatest), str(fence.max_counter)
        ask_each(nodes, lambda connection: ask(connection, *words), names)


def remove_keys(
    nodes: Nodes, beginnings: Collection[str], names: Collection[str] | None = None
) -> tuple[dict[str, int], dict[str, str]]:
    """Delete the keys that begin like one of these; for keys of a name that no other client has.

    names: of the nodes to ask; None for all. Returns how many there were by node, and the causes
    by failed node.
    """

    def remove(connection: Any) -> int:
        keys = list({name for one in beginnings for name in names_on(connection, one)})
        for first in range(0, len(keys), DELETED_AT_ONCE):
            reply_of(connection, "DEL", *keys[first : first + DELETED_AT_ONCE])
        return len(keys)

    return ask_each(nodes, remove, names)


def names_on(connection: Any, key_prefix: str) -> Iterator[Any]:
    """Yield the names of a node's keys that begin like this; a name may come twice.

    Scans the database in parts, so that no other client waits.
    """
    cursor = b"0"
    pattern = encoded(f"{pattern_of(key_prefix)}*")
    while True:
        reply = reply_of(connection, "SCAN", cursor, "MATCH", pattern, "COUNT", "1000")
        cursor, names = read_list(reply, 2)
        for name in read_list(names):
            read_text(name)
            yield name
        if text_of(cursor) == "0":
            return
