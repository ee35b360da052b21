"""The tenures of servers under the nodes' addresses: which server has served where, and since when.

A server that was frozen or partitioned does not know that another server replaced it: its own
record still names itself. So a server's tenure under an address is recorded on the other nodes,
too. A server whose tenure is older than the recorded one has missed grants of its successor.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from celery_redlock.lock.model.keys import MAX_DIGITS, guard_keys, tenure_key
from celery_redlock.lock.model.votes import quorum_of
from celery_redlock.lock.transport.command import read_list, read_number, read_text

RECORD_TTL_MS = 30 * 86_400_000  # milliseconds until a record about another node's address expires


@dataclass(frozen=True)
class Tenure:
    """The time for which a server serves under an address.

    since: milliseconds since 1970 by the server's clock; 0 if it began before the first record.
    run_id: of the server.
    """

    since: int
    run_id: str

    def __str__(self) -> str:
        return f"{self.since} {self.run_id}"

    def ends_before(self, other: Tenure | None) -> bool:
        return other is not None and other.run_id != self.run_id and other.since >= self.since


def tenure_of(text: str) -> Tenure | None:
    since, _, run_id = text.partition(" ")
    is_number = since.isdecimal() and len(since) <= MAX_DIGITS
    return Tenure(int(since), run_id) if is_number and run_id else None


def noted_address(server: str) -> str:
    """Return an address for the records. A local one gets the host name, to be unique."""
    location = server.removeprefix("sentinel://")
    if server.startswith("/") or location.startswith(("127.", "::1:")):
        return f"{socket.gethostname()}/{server}"
    return server


class Tenures:
    """What this process knows of the tenures under each node's address, by index.

    A tenure is certain if the node itself has said it, or a majority of the nodes knows one that is
    as new. What fewer nodes say against a node counts as well, because these may be all that its
    last holders reached. But it never counts against more nodes than a quorum can do without: a
    forged record on a few nodes must not stop the others.

    prefix: of the keys. servers: of the nodes, as in `Address.server`. is_failing: whether a node
    by index cannot be reached now. Only one thread may change the tenures at a time.
    """

    def __init__(
        self, prefix: str, servers: Sequence[str], is_failing: Callable[[int], bool]
    ) -> None:
        self._prefix = prefix
        self._is_failing = is_failing
        self._records = [tenure_key(prefix, noted_address(server)) for server in servers]
        nodes = len(servers)
        self._quorum = quorum_of(nodes)
        # the newest tenure that each node reported of itself
        self._own_tenures: list[Tenure | None] = [None] * nodes
        # by reporting node: the newest tenures that it reported of the others
        self._notes: list[dict[int, Tenure]] = [{} for _ in servers]

    def others(self, node: int) -> list[int]:
        """Return the other nodes, in the order of their records on this node."""
        return [index for index in range(len(self._own_tenures)) if index != node]

    def keys(self, node: int) -> tuple[str, ...]:
        """Return the keys of the script `guard` on a node."""
        other_records = (self._records[index] for index in self.others(node))
        return *guard_keys(self._prefix), tenure_key(self._prefix), *other_records

    def learn(
        self, node: int, own_tenure: Tenure | None, other_tenures: Sequence[Tenure | None]
    ) -> None:
        """Keep what a node says: its own tenure if it is newer, and its notes of the others."""
        previous = self._own_tenures[node]
        if own_tenure is not None and (previous is None or own_tenure.since > previous.since):
            self._own_tenures[node] = own_tenure
        notes = self._notes[node]
        for index, tenure in zip(self.others(node), other_tenures, strict=True):
            if tenure is not None and (index not in notes or tenure.since > notes[index].since):
                notes[index] = tenure

    def ended(self, node: int, tenure: Tenure | None) -> bool:
        """Return whether another server has served under the node's address since."""
        if tenure is None:
            return False
        if tenure.ends_before(self._certain(node)):
            return True
        return tenure.ends_before(self.newest_note(node)) and self._can_be_spared(self._doubted())

    def arguments_for(self, node: int) -> tuple[str, ...]:
        """Return the arguments about tenures that the script `guard` gets on a node.

        They are the newest tenure at the node's address, the ttl of records in ms, and the certain
        tenure at each other node's address; "" for an unknown tenure.
        """
        others = map(_text_of, map(self._certain, self.others(node)))
        return _text_of(self._newest_at(node)), str(RECORD_TTL_MS), *others

    def _newest_at(self, node: int) -> Tenure | None:
        """Return the tenure that a node is to compare with its own one.

        The node abstains if it gets the tenure of a newer server. So a doubt is passed on only once
        each node has replied or fails: before that, the doubts may still become too many.
        """
        doubted = self._doubted()
        if node in doubted and self._can_be_spared(doubted):
            unknown_nodes = (
                index for index, tenure in enumerate(self._own_tenures) if tenure is None
            )
            if all(map(self._is_failing, unknown_nodes)):
                return self.newest_note(node)
        return self._certain(node)

    def has_news(self, node: int, tenure: Tenure | None) -> bool:
        """Return whether `arguments_for` has what a node does not know. tenure: the node's own."""
        newest, _, *others = self.arguments_for(node)
        notes = (str(self._notes[node].get(index, "")) for index in self.others(node))
        is_behind = any(text not in ("", note) for text, note in zip(others, notes, strict=True))
        return is_behind or newest not in ("", str(tenure))

    def _notes_of(self, node: int) -> list[Tenure]:
        """Return what the other nodes have noted of a node, the newest first."""
        notes = (notes[node] for notes in self._notes if node in notes)
        return sorted(notes, key=lambda tenure: tenure.since, reverse=True)

    def newest_note(self, node: int) -> Tenure | None:
        return next(iter(self._notes_of(node)), None)

    def _certain(self, node: int) -> Tenure | None:
        own_tenure = self._own_tenures[node]
        notes = self._notes_of(node)
        quorum_note = notes[self._quorum - 1] if len(notes) >= self._quorum else None
        return (
            quorum_note
            if quorum_note and (own_tenure is None or quorum_note.since > own_tenure.since)
            else own_tenure
        )

    def _doubted(self) -> set[int]:
        """Return the nodes of which a minority says that another server came later."""
        certain = {node: self._certain(node) for node in range(len(self._own_tenures))}
        return {
            node
            for node, tenure in certain.items()
            if tenure and tenure.ends_before(self.newest_note(node))
        }

    def _can_be_spared(self, doubted: set[int]) -> bool:
        """Return whether the other nodes are a quorum without the doubted ones."""
        return len(doubted) <= len(self._own_tenures) - self._quorum


def _text_of(tenure: Tenure | None) -> str:
    return "" if tenure is None else str(tenure)


def tenures_of(reply: Any, length: int) -> tuple[float, Tenure | None, list[Tenure | None]]:
    """Return what a reply of `guard` says, in the order of `ServerInfo`. length: of the reply."""
    abstains_ms, *texts = read_list(reply, length)
    own, *others = (tenure_of(read_text(text)) for text in texts)
    return read_number(abstains_ms) / 1000, own, others
