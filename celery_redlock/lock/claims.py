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
    beginning = unique_key(session.options.prefix, "")

    def ask(connection: Any) -> list[tuple[Any, Any, float]]:
        return list(values_on(connection, list(set(names_on(connection, beginning)))))

    found, failing = ask_each(nodes, ask)
    votes: dict[tuple[str, str], dict[str, float]] = {}
    values: dict[tuple[str, str], list[str]] = {}
    for node, keys in found.items():
        for key, value, left in keys:
            name = text_of(key).removeprefix(beginning)
            text = text_of(value or b"")
            of = name, text.partition(":")[0]
            votes.setdefault(of, {})[node] = left
            values.setdefault(of, []).append(text)
    claims = [_claim(session, *of, values[of], on) for of, on in votes.items()]
    matching = [one for one in claims if fnmatch.filter(one.known_as, pattern)]
    matching.sort(key=lambda one: (one.resource, one.task, -len(one.votes)))
    return ClaimList(tuple(matching), failing, len(nodes.all), nodes.quorum)


def _claim(
    session: Session, name: str, token: str, values: list[str], votes: dict[str, float]
) -> ClaimReport:
    task, _, resource = name.partition(":")  # as `tasks.unique.send.unique_name` makes it
    needed = session.nodes.quorum
    left = sorted(votes.values(), reverse=True)
    counts = len(votes) >= needed
    parts = [parts_of_claim(value) for value in values]
    return ClaimReport(
        ", ".join(resources_of(resource)),
        unquote(task),
        next((run_id for _, _, run_id in parts if run_id), "").partition(":")[0],
        is_sent=sum(is_sent for _, is_sent, _ in parts) >= needed,
        counts=counts,
        expires_in=left[needed - 1] if counts else 0.0,
        votes=votes,
        needed=needed,
        name=name,
        token=token,
    )


def delete_claim(session: Session, claim: ClaimReport) -> EndedClaim:
    """End a claim, unless a later send has replaced it. Its own message runs all the same."""
    key = encoded(unique_key(session.options.prefix, claim.name))
    delete = "EVAL", UNIQUE.source, "1", key, encoded(claim.token), "", "", ""

    def ask(connection: Any) -> bool:
        is_there = reply_of(connection, "EXISTS", key) == 1
        return bool(reply_of(connection, *delete) == 1 and is_there)

    deleted, failing = ask_each(session.nodes, ask)
    return EndedClaim(claim, tuple(node for node, gone in deleted.items() if gone), failing)
