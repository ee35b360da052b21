"""The handshake of a new connection: loads the scripts, and records the server's run id.

A restarted server may have forgotten locks that it granted. So the client sends the run id and the
grace period to the server, which records both before its first vote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis

from celery_redlock.lock.model.keys import guard_keys, tenure_key
from celery_redlock.lock.model.options import Guard
from celery_redlock.lock.server.requests import GRANT, GUARD, RELEASE, RENEW
from celery_redlock.lock.server.tenures import Tenure, Tenures, tenure_of
from celery_redlock.lock.transport.command import PING
from celery_redlock.lock.transport.connection import Peer
from celery_redlock.lock.transport.encoding import (
    encode_command,
    encode_words,
    encoded,
    read_list,
    read_number,
    read_text,
    text_of,
)


@dataclass
class ServerInfo(Peer):
    """What is known of a server: from the handshake, and of tenures from its latest reply.

    arguments: the result of `Guard.arguments`, which is also the suffix of each grant. evicts: the
    server's eviction policy, "" if it evicts nothing. wall: seconds since 1970 by the server's
    clock, None if it does not tell. abstains_for: remaining seconds of the node's grace period.
    tenure: the node's own. others: the newest tenures that the node knows at the other nodes'
    addresses, in order. told: what the node was last sent about tenures, the result of
    `Tenures.told`; empty if it could record nothing. told_at: when, in monotonic seconds.
    """

    arguments: tuple[str, ...] = ("", "")
    evicts: str = ""
    wall: float | None = None
    abstains_for: float = 0.0
    tenure: Tenure | None = None
    others: Sequence[Tenure | None] = ()
    told: tuple[str, ...] = ()
    told_at: float = 0.0


def handshake(connection: Any, guard: Guard, tenures: Tenures, node: int) -> ServerInfo:
    """Load the scripts on a new connection, and let the server record its run id.

    Takes one round trip, and a second one with the guard. tenures: of all nodes. Raises
    redis.ResponseError if the guard needs the run id and the server does not report it.
    """
    # an ACL may refuse PING, which changes nothing, and SCRIPT: then EVAL sends the text
    facts = read_info(connection, before=(PING, GRANT.load, RENEW.load, RELEASE.load))
    run_id = facts.get("run_id", "")
    if guard.word != "off" and not run_id:
        raise redis.ResponseError(
            f"{facts.get('error') or 'INFO names no run_id'}: without INFO the restart guard "
            'cannot tell a restart; allow it (ACL: +info), or set redlock_restart_guard = "off"'
        )
    arguments = guard.arguments(run_id)
    evicts = facts.get("maxmemory_policy", "noeviction")
    time_us = facts.get("server_time_usec", "")
    info = ServerInfo(
        run_id,
        encode_words(arguments),
        arguments,
        evicts if facts.get("maxmemory", "0") != "0" and evicts != "noeviction" else "",
        int(time_us) / 1e6 if time_us.isdecimal() else None,
    )
    if guard.word != "off":
        _note_run(connection, guard, info, tenures, node)
    return info


def read_info(
    connection: Any,
    sections: Sequence[str] = ("server", "memory"),
    *,
    before: Sequence[bytes] = (),
) -> dict[str, str]:
    """Return the fields of some sections of INFO. If the server refuses, return only "error".

    before: requests that are sent in the same write; an error reply to them is ignored.
    """
    requests = [*before, *(encode_command("INFO", section) for section in sections)]
    facts: dict[str, str] = {}
    for reply in _ask(connection, requests)[len(before) :]:
        if isinstance(reply, redis.ResponseError):
            return {"error": str(reply)}
        pairs = (line.partition(":") for line in text_of(reply).splitlines())
        facts |= {name: value.strip() for name, colon, value in pairs if colon}
    return facts


def _ask(connection: Any, requests: Sequence[bytes]) -> list[Any]:
    """Write requests in one go, and return their replies; an error reply as an exception.

    A server that refuses a client sends one error and closes the connection: raises that error.
    """
    connection.send_packed_command([b"".join(requests)])  # a second write might fail
    replies: list[Any] = []
    for _ in requests:
        try:
            replies.append(connection.read_response())
        except redis.ResponseError as error:
            replies.append(error)
        except redis.ConnectionError:
            if replies and isinstance(replies[0], redis.ResponseError):
                raise replies[0] from None
            raise
    return replies


def _note_run(connection: Any, guard: Guard, info: ServerInfo, tenures: Tenures, node: int) -> None:
    """Let a server record its run id, so that its grace period begins now."""
    names, words = noted_keys(guard.prefix, tenures, node), tenures.told(node)
    sent = "EVAL", GUARD.source, str(len(names)), *map(encoded, names), *info.arguments, *words
    try:
        connection.send_command(*sent)
        reply = connection.read_response()
    except redis.ResponseError:
        return  # a replica, a full memory, no permission: each grant gets the same error
    info.abstains_for, info.tenure, info.others = tenures_of(reply, len(words))
    info.told = words


def noted_keys(prefix: str, tenures: Tenures, node: int) -> tuple[str, ...]:
    """Return the keys of the script `guard` for one node."""
    others = (tenure_key(prefix, tenures.addresses[other]) for other in tenures.others(node))
    return *guard_keys(prefix), tenure_key(prefix), *others


def tenures_of(reply: Any, length: int) -> tuple[float, Tenure | None, list[Tenure | None]]:
    """Return what a reply of the script `guard` says, in the order of `ServerInfo`.

    length: of the arguments that told it of tenures. Raises UnexpectedReplyError.
    """
    left, *texts = read_list(reply, length)
    own, *others = (tenure_of(read_text(text)) for text in texts)
    return read_number(left) / 1000, own, others
