"""The claims of deduplicated calls, as the nodes know them; ends one for an operator.

Not here: how a send claims its key (`tasks/unique`).
"""

from __future__ import annotations

import fnmatch
from typing import Any
from urllib.parse import unquote

from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.inspection import values_on
from celery_redlock.lock.model.keys import parts_of_claim, resources_of, unique_key
from celery_redlock.lock.reports import ClaimList, ClaimReport, EndedClaim
from celery_redlock.lock.server.admin import ask_each, names_on, reply_of
from celery_redlock.lock.server.requests import UNIQUE
from celery_redlock.lock.transport.command import encoded, text_of


def list_claims(session: Session, pattern: str = "*") -> ClaimList:
    """Return the claims whose resource matches a pattern of the shell, as "stock:*"."""
    nodes = session.nodes
    key_prefix = unique_key(session.options.prefix, "")

    def read_claims(connection: Any) -> list[tuple[Any, Any, float]]:
        keys = list(set(names_on(connection, key_prefix)))
        return list(values_on(connection, keys))

    replies, failures = ask_each(nodes, read_claims)
    # by name and token of the claim: the remaining seconds by node, and the values
    votes: dict[tuple[str, str], dict[str, float]] = {}
    values: dict[tuple[str, str], list[str]] = {}
    for node, entries in replies.items():
        for key, value, remaining in entries:
            text = text_of(value or b"")
            token, _, _ = text.partition(":")
            claim_id = text_of(key).removeprefix(key_prefix), token
            votes.setdefault(claim_id, {})[node] = remaining
            values.setdefault(claim_id, []).append(text)
    claims = [
        _claim(session, *claim_id, values[claim_id], node_votes)
        for claim_id, node_votes in votes.items()
    ]
    matching = [claim for claim in claims if fnmatch.filter(claim.known_as, pattern)]
    matching.sort(key=lambda claim: (claim.resource, claim.task, -len(claim.votes)))
    return ClaimList(tuple(matching), failures, len(nodes.all), nodes.quorum)


def _claim(
    session: Session, name: str, token: str, values: list[str], votes: dict[str, float]
) -> ClaimReport:
    """Return the report of one claim.

    values: the texts that the nodes have. votes: by node, the seconds until the key expires.
    """
    task, _, resource = name.partition(":")  # as `tasks.unique.send.unique_name` makes it
    quorum = session.nodes.quorum
    remaining = sorted(votes.values(), reverse=True)
    counts = len(votes) >= quorum
    parts = [parts_of_claim(value) for value in values]
    return ClaimReport(
        ", ".join(resources_of(resource)),
        unquote(task),
        next((run_id for _, _, run_id in parts if run_id), "").partition(":")[0],
        is_sent=sum(is_sent for _, is_sent, _ in parts) >= quorum,
        counts=counts,
        expires_in=remaining[quorum - 1] if counts else 0.0,
        votes=votes,
        needed=quorum,
        name=name,
        token=token,
    )


def delete_claim(session: Session, claim: ClaimReport) -> EndedClaim:
    """End a claim, unless a later send has replaced it. Its own message runs all the same."""
    key = encoded(unique_key(session.options.prefix, claim.name))
    delete = "EVAL", UNIQUE.source, "1", key, encoded(claim.token), "", "", ""

    def delete_on(connection: Any) -> bool:
        is_there = reply_of(connection, "EXISTS", key) == 1
        return bool(reply_of(connection, *delete) == 1 and is_there)

    deleted, failures = ask_each(session.nodes, delete_on)
    gone_from = tuple(node for node, is_deleted in deleted.items() if is_deleted)
    return EndedClaim(claim, gone_from, failures)
