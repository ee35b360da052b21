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
from celery_redlock.lock.model import keys
from celery_redlock.lock.model.keys import completion_key, format_key, guard_keys, settings_key
from celery_redlock.lock.platform.clock import new_token
from celery_redlock.lock.reports import NodeList, NodeStatus
from celery_redlock.lock.server.admin import ask_each, reply_of
from celery_redlock.lock.server.error_hints import strip_args
from celery_redlock.lock.server.handshake import (
    eviction_policy,
    is_in_cluster,
    read_info,
    refuse_other_format,
)
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

    It uses the connections of the locks, so it begins the grace period of a new node. A status says
    only whether the node fails, abstains or votes. Raises SettingsError if two nodes turn out to be
    one server.
    """
    nodes = session.nodes
    answering = nodes.connect(session.clock.now() + 2 * nodes.timeout)
    session.check_distinct()
    _, grace_key = guard_keys(session.options.prefix)
    # milliseconds; negative if the node does not abstain
    grace_ms = nodes.query(encode_command("PTTL", grace_key), read_number, nodes=answering)
    statuses = []
    for node in nodes.all:
        silent_for = max(0, grace_ms.get(node.index, 0)) / 1000
        status = NodeStatus(node.name, role="master", silent_for=silent_for, votes=not silent_for)
        if node.index not in answering:
            cause = node.error.cause if node.error else ""
            status = NodeStatus(node.name, cause or "no answer in time")
        statuses.append(status)
    return _list_of(session, statuses)


def compare_shared_settings(
    session: Session, names: Collection[str] | None = None, *, writes: bool = False
) -> Mapping[str, list[str]]:
    """Return the nodes whose shared settings differ from this client's, by those settings.

    Locks are safe only among clients with the same shared settings. names: of the nodes to ask;
    None for all. writes: whether this client writes its settings to the nodes, and the number of
    its format where there is none. A node keeps the settings of the last client that wrote. So
    after a change in all clients, each client that writes warns at most once.

    Unlike a client's connection, this query does not begin the grace period of an unused node.
    Raises SettingsError if two nodes turn out to be one server.
    """
    own_settings = shared_settings_of(session)
    key = encoded(settings_key(session.options.prefix))
    query = ("SET", key, encoded(own_settings), "GET") if writes else ("GET", key)
    number = "SET", encoded(format_key(session.options.prefix)), str(keys.NODE_FORMAT), "NX"

    def read_settings(connection: Any) -> tuple[str | None, str]:
        run_id = read_info(connection).get("run_id", "")  # first: what is written is also reported
        if writes:
            reply_of(connection, *number)
        reply = reply_of(connection, *query)
        return None if reply is None else read_text(reply), run_id

    replies, _ = ask_each(session.nodes, read_settings, names)
    node_of_run: dict[str, str] = {}
    differing: dict[str, list[str]] = {}
    for node, (settings, run_id) in replies.items():
        if run_id and run_id in node_of_run:
            raise one_server("Redlock", (node_of_run[run_id], node))
        node_of_run[run_id] = node
        if settings not in (None, own_settings):
            differing.setdefault(settings, []).append(node)
    return differing


def shared_settings_of(session: Session) -> str:
    """Return the settings that all clients of a prefix must share, as text. Times in seconds."""
    options = session.options
    nodes = len(session.nodes.all)
    return f"max_ttl={session.options.max_ttl:g} restart_guard={options.guard.mode} nodes={nodes}"


def read_nodes(session: Session) -> NodeList:
    """Return the status of each node."""
    clock = session.clock
    guard = session.options.guard
    run_key, grace_key = map(encoded, guard_keys(session.options.prefix))
    number_key = encoded(format_key(session.options.prefix))

    def read_status(connection: Any) -> NodeStatus:
        pinged_at = clock.now()
        reply_of(connection, "PING")
        latency = clock.now() - pinged_at
        seconds, microseconds = map(int, read_list(reply_of(connection, "TIME"), 2))
        clock_offset = seconds + microseconds / 1e6 - clock.wall_us() / 1e6
        info = read_info(connection, ("server", "memory", "replication"))
        known_run = reply_of(connection, "GET", run_key)
        silent_for = max(0, read_number(reply_of(connection, "PTTL", grace_key))) / 1000
        knows_us = known_run is not None and read_text(known_run) == info.get("run_id", "")
        version = info.get("valkey_version") or info.get("redis_version", "")
        role = info.get("role", "")
        if role == "master":
            refuse_other_format(reply_of(connection, "GET", number_key))
            _try_to_grant(connection, session.options.prefix)
        may_vote = role == "master" and silent_for <= 0
        return NodeStatus(
            server=f"{info.get('server_name', 'redis')} {version}",  # Redis reports no name
            role=role,
            uptime=float(info.get("uptime_in_seconds", 0)),
            latency=latency,
            clock=clock_offset,
            policy=info.get("maxmemory_policy", ""),
            silent_for=silent_for,
            knows_us=knows_us,
            votes=may_vote and (knows_us or guard.mode == "off"),
            evicts=bool(eviction_policy(info)),
            in_cluster=is_in_cluster(info),
        )

    statuses, failures = ask_each(session.nodes, read_status)
    statuses |= {name: NodeStatus(error=cause) for name, cause in failures.items()}
    names = [node.name for node in session.nodes.all]
    return _list_of(session, [replace(statuses[name], node=name) for name in names])


def _list_of(session: Session, statuses: Sequence[NodeStatus]) -> NodeList:
    guard = session.options.guard
    voting = sum(status.votes for status in statuses)
    return NodeList(guard.mode, session.nodes.quorum, voting, tuple(statuses), guard.grace_period)


def _try_to_grant(connection: Any, prefix: str) -> None:
    """Have a node grant a lock that nobody wants, for a millisecond; raise its error.

    A node whose memory is full, or that refuses scripts, still replies to reads. The request has
    the form of a client's. Its keys are no lock's, so it neither reads nor begins a grace period.
    """
    name = completion_key(prefix, f"\n{new_token()}")
    made_up = [encoded(f"{name}:{number}") for number in range(4)]
    words = "4", *made_up, "", "1", "", "", ""  # no value, a ttl of 1 ms, no fencing, no guard
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

    def try_commands(connection: Any) -> list[str]:
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

    missing_by_node, _ = ask_each(session.nodes, try_commands)
    return {node: rights for node, rights in missing_by_node.items() if rights}


def in_iso(seconds: float | None) -> str | None:
    """Return a moment, in seconds since 1970, as ISO 8601 in UTC; None if out of range."""
    try:
        moment = None if seconds is None else datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):  # another program wrote the value
        return None
    return None if moment is None else moment.isoformat()
