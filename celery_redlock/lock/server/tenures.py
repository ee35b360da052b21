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

from celery_redlock.lock.model.keys import MOST_DIGITS, guard_keys, tenure_key
from celery_redlock.lock.model.votes import quorum_of
from celery_redlock.lock.transport.command import read_list, read_number, read_text

KEPT_MS = 30 * 86_400_000  # milliseconds until a record about another node's address expires


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
    is_number = since.isdecimal() and len(since) <= MOST_DIGITS
    return Tenure(int(since), run_id) if is_number and run_id else None


def noted_address(server: str) -> str:
    """Return an address for the records. A local one gets the host name, to be unique."""
    first = server.removeprefix("sentinel://")
    if server.startswith("/") or first.startswith(("127.", "::1:")):
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
        self._own: list[Tenure | None] = [None] * nodes  # the newest that each node said of itself
        # the newest that each node said of the others, by teller
        self._notes: list[dict[int, Tenure]] = [{} for _ in servers]

    def others(self, node: int) -> list[int]:
        """Return the other nodes, in the order of their records on this node."""
        return [other for other in range(len(self._own)) if other != node]

    def keys(self, node: int) -> tuple[str, ...]:
        """Return the keys of the script `guard` on a node."""
        others = (self._records[other] for other in self.others(node))
        return *guard_keys(self._prefix), tenure_key(self._prefix), *others

    def learn(self, node: int, own: Tenure | None, others: Sequence[Tenure | None]) -> None:
        """Keep what a node says: its own tenure if it is newer, and its notes of the others."""
        known = self._own[node]
        if own is not None and (known is None or own.since > known.since):
            self._own[node] = own
        notes = self._notes[node]
        for other, tenure in zip(self.others(node), others, strict=True):
            if tenure is not None and (other not in notes or tenure.since > notes[other].since):
                notes[other] = tenure

    def ended(self, node: int, tenure: Tenure | None) -> bool:
        """Return whether another server has served under the node's address since."""
        if tenure is None:
            return False
        if tenure.ends_before(self._certain(node)):
            return True
        return tenure.ends_before(self.newest_note(node)) and self._counts(self._doubted())

    def told(self, node: int) -> tuple[str, ...]:
        """Return arguments for a node: its newest tenure, the records' ttl, the others' tenures.

        A node abstains if it is told of a newer server. So a doubt is told once each node has been
        heard: until then the doubts may turn out to be too many.
        """
        own = self._certain(node)
        doubted = self._doubted()
        unheard = (other for other, tenure in enumerate(self._own) if tenure is None)
        if node in doubted and self._counts(doubted) and all(map(self._is_failing, unheard)):
            own = self.newest_note(node)
        tenures = own, *map(self._certain, self.others(node))
        first, *others = ("" if tenure is None else str(tenure) for tenure in tenures)
        return first, str(KEPT_MS), *others

    def has_news(self, node: int, tenure: Tenure | None) -> bool:
        """Return whether a node does not know all that it would be told. tenure: its own."""
        own, _, *others = self.told(node)
        notes = [str(self._notes[node].get(other, "")) for other in self.others(node)]
        is_behind = any(text not in ("", note) for text, note in zip(others, notes, strict=True))
        return is_behind or own not in ("", str(tenure))

    def _notes_of(self, node: int) -> list[Tenure]:
        """Return what the other nodes have noted of a node, the newest first."""
        notes = (notes[node] for notes in self._notes if node in notes)
        return sorted(notes, key=lambda tenure: tenure.since, reverse=True)

    def newest_note(self, node: int) -> Tenure | None:
        return next(iter(self._notes_of(node)), None)

    def _certain(self, node: int) -> Tenure | None:
        own = self._own[node]
        notes = self._notes_of(node)
        agreed = notes[self._quorum - 1] if len(notes) >= self._quorum else None
        return agreed if agreed and (own is None or agreed.since > own.since) else own

    def _doubted(self) -> set[int]:
        """Return the nodes of which a minority says that another server came later."""
        certain = {node: self._certain(node) for node in range(len(self._own))}
        return {n for n, own in certain.items() if own and own.ends_before(self.newest_note(n))}

    def _counts(self, doubted: set[int]) -> bool:
        """Return whether a quorum can do without the doubted nodes."""
        return len(doubted) <= len(self._own) - self._quorum


def tenures_of(reply: Any, length: int) -> tuple[float, Tenure | None, list[Tenure | None]]:
    """Return what a reply of `guard` says, in the order of `ServerInfo`. length: of the reply."""
    left, *texts = read_list(reply, length)
    own, *others = (tenure_of(read_text(text)) for text in texts)
    return read_number(left) / 1000, own, others
