"""Reads the status of the nodes, for operators.

Not here: the locks on the nodes (`inspection.py`), and how to ask a node (`server/admin.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import redis

from celery_redlock.lock.engine.core import one_server
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.model.keys import completion_key, guard_keys
from celery_redlock.lock.platform.clock import new_token
from celery_redlock.lock.reports import NodeList, NodeStatus
from celery_redlock.lock.server.admin import ask_each, reply_of
from celery_redlock.lock.server.error_hints import strip_args
from celery_redlock.lock.server.handshake import eviction_policy, is_in_cluster, read_info
from celery_redlock.lock.server.requests import GRANT
from celery_redlock.lock.server.rights import commands_tried, denied_right, trial_words
from celery_redlock.lock.transport.command import (
    UnexpectedReplyError,
    encode_command,
    encoded,
    read_list,
    read_number,
    read_text,
)


def ask_nodes(session: Session) -> NodeList:
    """Connect to every node and return the status of each, within three node timeouts.

    Over the connections of the locks, so this begins the grace period of a new node. Of a status it
    is known whether the node fails, abstains or votes. Raises SettingsError if two nodes turn out
    to be one server.
    """
    nodes = session.nodes
    answering = nodes.connect(session.clock.now() + 2 * nodes.timeout)
    session.check_distinct()
    _, grace_key = guard_keys(session.options.prefix)
    # milliseconds; negative if the node does not abstain
    left = nodes.query(encode_command("PTTL", grace_key), read_number, nodes=answering)
    statuses = []
    for node in nodes.all:
        silent_for = max(0, left.get(node.index, 0)) / 1000
        status = NodeStatus(node.name, role="master", silent_for=silent_for, votes=not silent_for)
        if node.index not in answering:
            cause = node.error.cause if node.error else ""
            status = NodeStatus(node.name, cause or "no answer in time")
        statuses.append(status)
    return _list_of(session, statuses)


def compare_shared_settings(
    session: Session, names: Collection[str] | None = None, *, writes: bool = False
) -> Mapping[str, list[str]]:
    """Return the nodes by shared settings that differ from this client's, as found there.

    Locks are safe only among clients with the same ones. names: of the nodes to ask; None for all.
    writes: whether to leave this client's on the nodes. The last client's stay there: so after a
    change in all clients, each client that writes warns at most once.

    Unlike a client's connection, this query does not begin the grace period of an unused node.
    Raises SettingsError if two nodes turn out to be one server.
    """
    own = shared_settings_of(session)
    key = encoded(f"{{{session.options.prefix}}}:terms")
    query = ("SET", key, encoded(own), "GET") if writes else ("GET", key)

    def look(connection: Any) -> tuple[str | None, str]:
        run_id = read_info(connection).get("run_id", "")  # first: what is written is also reported
        reply = reply_of(connection, *query)
        return None if reply is None else read_text(reply), run_id

    found, _ = ask_each(session.nodes, look, names)
    seen: dict[str, str] = {}
    others: dict[str, list[str]] = {}
    for node, (settings, run_id) in found.items():
        if run_id and run_id in seen:
            raise one_server("Redlock", (seen[run_id], node))
        seen[run_id] = node
        if settings not in (None, own):
            others.setdefault(settings, []).append(node)
    return others


def shared_settings_of(session: Session) -> str:
    """Return the settings that all clients of a prefix must share, as text. Times in seconds."""
    options = session.options
    nodes = len(session.nodes.all)
    return f"max_ttl={session.options.max_ttl:g} restart_guard={options.guard.mode} nodes={nodes}"


def read_nodes(session: Session) -> NodeList:
    """Return the status of each node."""
    clock = session.clock
    guard = session.options.guard
    keys = [encoded(key) for key in guard_keys(session.options.prefix)]

    def look(connection: Any) -> NodeStatus:
        asked = clock.now()
        reply_of(connection, "PING")
        latency = clock.now() - asked
        seconds, microseconds = map(int, read_list(reply_of(connection, "TIME"), 2))
        ahead = seconds + microseconds / 1e6 - clock.wall_us() / 1e6
        facts = read_info(connection, ("server", "memory", "replication"))
        run = reply_of(connection, "GET", keys[0])
        left = reply_of(connection, "PTTL", keys[1])
        knows_us = run is not None and read_text(run) == facts.get("run_id", "")
        version = facts.get("valkey_version") or facts.get("redis_version", "")
        role = facts.get("role", "")
        silent_for = max(0, read_number(left)) / 1000
        if role == "master":
            _try_to_grant(connection, session.options.prefix)
        may_vote = role == "master" and silent_for <= 0
        return NodeStatus(
            server=f"{facts.get('server_name', 'redis')} {version}",  # Redis reports no name
            role=role,
            uptime=float(facts.get("uptime_in_seconds", 0)),
            latency=latency,
            clock=ahead,
            policy=facts.get("maxmemory_policy", ""),
            silent_for=silent_for,
            knows_us=knows_us,
            votes=may_vote and (knows_us or guard.mode == "off"),
            evicts=bool(eviction_policy(facts)),
            in_cluster=is_in_cluster(facts),
        )

    found, failing = ask_each(session.nodes, look)
    names = [node.name for node in session.nodes.all]
    found |= {name: NodeStatus(error=cause) for name, cause in failing.items()}
    return _list_of(session, [replace(found[name], node=name) for name in names])


def _list_of(session: Session, statuses: Sequence[NodeStatus]) -> NodeList:
    guard = session.options.guard
    voting = sum(status.votes for status in statuses)
    return NodeList(guard.mode, session.nodes.quorum, voting, tuple(statuses), guard.grace_period)


def _try_to_grant(connection: Any, prefix: str) -> None:
    """Have a node grant a lock that nobody wants, for a millisecond; raise what it refuses.

    A node with a full memory, or without the scripts, answers all that only reads. Its grace period
    is not looked at, and not begun: the keys are no lock's. Sent as a client sends it.
    """
    name = completion_key(prefix, f"\n{new_token()}")
    keys = [encoded(f"{name}:{number}") for number in range(4)]
    words = "4", *keys, "", "1", "", "", ""  # no value, a ttl of 1 ms, no fencing, no guard
    try:
        try:
            reply = reply_of(connection, "EVALSHA", GRANT.digest, *words)
        except redis.exceptions.NoScriptError:
            reply = reply_of(connection, "EVAL", GRANT.source, *words)
        if read_number(reply) != 1:
            raise UnexpectedReplyError(reply)
    except redis.ResponseError as error:
        raise redis.ResponseError(f"no vote: {strip_args(str(error))}") from None


def missing_rights(session: Session) -> Mapping[str, list[str]]:
    """Return by node which of the `NODE_RIGHTS` its user lacks.

    Tries each command, and changes nothing. Nodes whose user lacks no right are left out.
    """
    prefix = session.options.prefix
    commands = commands_tried()

    def ask(connection: Any) -> list[str]:
        tried = [trial_words(command, prefix) for command in commands]
        connection.send_packed_command(connection.pack_commands(tried))
        missing = dict[str, None]()
        for command in commands:
            try:
                connection.read_response()
            except redis.exceptions.NoPermissionError as error:
                missing[denied_right(command, str(error), prefix)] = None
            except redis.ResponseError:
                pass  # of a script that is not there, or a replica: the command is allowed
        return list(missing)

    found, _ = ask_each(session.nodes, ask)
    return {node: rights for node, rights in found.items() if rights}


def in_iso(seconds: float | None) -> str | None:
    """Return a moment, in seconds since 1970, as ISO 8601 in UTC; None if out of range."""
    try:
        moment = None if seconds is None else datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):  # another program wrote the value
        return None
    return None if moment is None else moment.isoformat()
