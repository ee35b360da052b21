"""The handshake of a new connection: what a server says of itself before its first vote.

A restarted server may have forgotten locks that it granted. So the client sends the run id and the
grace period to the server, which records both before its first vote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from celery_redlock.label import escaped
from celery_redlock.lock.model import keys
from celery_redlock.lock.model.options import Guard
from celery_redlock.lock.server.requests import GRANT, GUARD, RELEASE, RENEW
from celery_redlock.lock.server.tenures import Tenure, Tenures, tenures_of
from celery_redlock.lock.transport.command import (
    PING,
    encode_command,
    encode_words,
    encoded,
    read_text,
    text_of,
)
from celery_redlock.lock.transport.connection import Peer

MAX_NUMBER_LENGTH = 20  # of the number of a format, in an error


@dataclass
class ServerInfo(Peer):
    """What is known of a server: from the handshake, and of tenures from its latest reply.

    arguments: the result of `Guard.arguments`, which is also the suffix of each grant. evicts: the
    server's eviction policy, "" if it evicts nothing. in_cluster: whether it is a member of one.
    wall: seconds since 1970 by the server's clock, None if it does not tell. abstains_for:
    remaining seconds of the node's grace period. tenure: the node's own. others: the newest tenures
    that the node knows at the other nodes' addresses, in order. sent_tenures: the tenures that this
    process last sent to the node, a result of `Tenures.arguments_for`; empty if the node could
    record nothing. sent_at, timed_at: monotonic seconds of that, and of the last query of its time.
    """

    arguments: tuple[str, ...] = ("", "")
    evicts: str = ""
    in_cluster: bool = False
    wall: float | None = None
    abstains_for: float = 0.0
    tenure: Tenure | None = None
    others: Sequence[Tenure | None] = ()
    sent_tenures: tuple[str, ...] = ()
    sent_at: float = 0.0
    timed_at: float = 0.0


def handshake(connection: Any, guard: Guard, tenures: Tenures, node: int) -> ServerInfo:
    """Load the scripts on a new connection, and let the server record its run id.

    Takes one round trip, and a second one with the guard. tenures: of all nodes. Raises
    redis.ResponseError for a replica, for keys of another format, and if the guard needs the run id
    and the server does not report it.
    """
    # an ACL may refuse PING, which changes nothing, and SCRIPT: then EVAL sends the text
    preceding = PING, GRANT.load, RENEW.load, RELEASE.load
    sections = "server", "memory", "replication"
    requests = [*preceding, format_request(guard.prefix), *_info_requests(sections)]
    number, *info_replies = ask_all(connection, requests)[len(preceding) :]
    fields = _fields_of(info_replies)
    # one that takes writes would grant locks, and the next full resynchronization deletes them
    if fields.get("role", "master") != "master":
        raise redis.ResponseError("it is a replica")
    refuse_other_format(number)
    run_id = fields.get("run_id", "")
    if guard.mode != "off" and not run_id:
        raise redis.ResponseError(
            f"{fields.get('error') or 'INFO names no run_id'}: without INFO the restart guard "
            'cannot tell a restart; allow it (ACL: +info), or set redlock_restart_guard = "off"'
        )
    arguments = guard.arguments(run_id)
    time_us = fields.get("server_time_usec", "")
    info = ServerInfo(
        run_id,
        encode_words(arguments),
        arguments,
        eviction_policy(fields),
        is_in_cluster(fields),
        int(time_us) / 1e6 if time_us.isdecimal() else None,
    )
    if guard.mode == "off":
        return info
    guarded = tenures.keys(node)
    sent_tenures = tenures.arguments_for(node)
    script = "EVAL", GUARD.source, str(len(guarded)), *map(encoded, guarded)
    try:
        connection.send_command(*script, *arguments, *sent_tenures)
        reply = connection.read_response()
    except redis.ResponseError:
        return info  # a replica, a full memory, no permission: each grant gets the same error
    info.abstains_for, info.tenure, info.others = tenures_of(reply, len(sent_tenures))
    info.sent_tenures = sent_tenures
    return info


def eviction_policy(fields: Mapping[str, str]) -> str:
    """Return by which policy a server deletes keys once its memory is full; "" if it does not."""
    policy = fields.get("maxmemory_policy", "noeviction")
    return policy if fields.get("maxmemory", "0") != "0" and policy != "noeviction" else ""


def is_in_cluster(fields: Mapping[str, str]) -> bool:
    # Valkey has the first two names, Redict the last one
    modes = map(fields.get, ("redis_mode", "server_mode", "redict_mode"))
    return "cluster" in modes


def read_info(connection: Any, sections: Sequence[str] = ("server", "memory")) -> dict[str, str]:
    """Return the fields of some sections of INFO. If the server refuses, return only "error".

    A server that refuses a client sends one error and closes the connection: raises that error.
    """
    return _fields_of(ask_all(connection, _info_requests(sections)))


def _info_requests(sections: Sequence[str]) -> list[bytes]:
    return [encode_command("INFO", section) for section in sections]


def ask_all(connection: Any, requests: Sequence[bytes]) -> list[Any]:
    """Return the replies to requests that are sent in one write, error replies among them.

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


def format_request(prefix: str) -> bytes:
    """Return the request for the number of the format that a node's keys have."""
    return encode_command("GET", keys.format_key(prefix))


def other_format(reply: Any) -> str:
    """Return the error of a node whose keys have another format; "" if they have this one.

    reply: to `format_request`, perhaps an error reply.
    """
    if isinstance(reply, Exception):  # another program has the key, or its user has no rights
        return str(reply)
    text = "1" if reply is None else read_text(reply)
    if text == str(keys.NODE_FORMAT):
        return ""
    return (
        f"OTHERFORMAT {escaped(text, MAX_NUMBER_LENGTH)}, and this release has {keys.NODE_FORMAT}"
    )


def refuse_other_format(reply: Any) -> None:
    """Raise redis.ResponseError if the keys of a node may have another format. reply: as above."""
    if error := other_format(reply):
        raise redis.ResponseError(error)


def _fields_of(replies: Sequence[Any]) -> dict[str, str]:
    """Return the fields in replies to INFO; only "error" for an error reply."""
    facts: dict[str, str] = {}
    for reply in replies:
        if isinstance(reply, redis.ResponseError):
            return {"error": str(reply)}
        pairs = (line.partition(":") for line in text_of(reply).splitlines())
        facts |= {name: value.strip() for name, colon, value in pairs if colon}
    return facts
