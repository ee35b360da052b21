"""What the nodes say of themselves and of their clients, read for people."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import hiredis

from celery_redlock.errors import NodeError
from celery_redlock.lock.keys import guard_keys
from celery_redlock.lock.nodes import Command, packed
from celery_redlock.lock.quorum import Question
from celery_redlock.lock.redlock import Redlock


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
    left = _ask(redlock, answering, "PTTL", quiet)  # ms, below 0 where it is not silent
    silent = {quorum.nodes[index].name: ms / 1000 for index, ms in left.items() if ms > 0}
    return NodeReport(len(quorum.nodes), quorum.size, tuple(causes), silent)


def exchange_terms(redlock: Redlock) -> Mapping[str, list[str]]:
    """Note on every node what this client goes by; returns what others noted there, if not that.

    By their terms, the nodes that say so. Locks are safe only among clients that agree. What was
    noted last stays, so a change that all clients follow is told of by each of them once.
    Raises SettingsError for nodes that turn out to be one server.
    """
    own = terms_of(redlock)
    noted = _ask(redlock, _connect(redlock), "SET", f"{{{redlock.prefix}}}:terms", own, "GET")
    nodes = redlock.session.quorum.nodes
    others: dict[str, list[str]] = {}
    for index, before in noted.items():
        terms = own if before is None else before.decode(errors="replace")
        if terms != own:
            others.setdefault(terms, []).append(nodes[index].name)
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


def _ask(redlock: Redlock, nodes: Collection[int], *words: str) -> Mapping[int, Any]:
    """Return what these nodes reply to one command, within one node timeout; an error is none."""
    quorum, now = redlock.session.quorum, redlock.session.clock.now()
    question = Question(nodes)
    command = Command(b"*%d\r\n%b" % (len(words), b"".join(map(packed, words))), question)
    for node in nodes:
        quorum.send_to(node, command, now)
    if nodes:
        quorum.wait(question, now + quorum.timeout)
    replies = question.replies.items()
    return {node: reply for node, reply in replies if not isinstance(reply, hiredis.ReplyError)}
