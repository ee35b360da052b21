"""Tenures: which server serves under a node's address, and since when.

A server that was frozen or partitioned does not know that another server replaced it: its own
record still names itself. So a server's tenure under an address is recorded on the other nodes,
too. A server whose tenure is older than the recorded one has missed grants of its successor.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

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
        """Return whether another server's tenure began later or at the same time."""
        return other is not None and other.run_id != self.run_id and other.since >= self.since


def tenure_of(text: str) -> Tenure | None:
    """Return the tenure that a node recorded, None if there is none."""
    since, _, run_id = text.partition(" ")
    return Tenure(int(since), run_id) if since.isdecimal() and run_id else None


def noted_address(server: str) -> str:
    """Return an address for the records. A local address gets the host name, to be unique.

    server: as in `Address.server`.
    """
    first = server.removeprefix("sentinel://")
    if server.startswith("/") or first.startswith(("127.", "::1:")):
        return f"{socket.gethostname()}/{server}"
    return server


class Tenures:
    """The newest known tenure under each node's address, by index.

    servers: of the nodes, as in `Address.server`. Only one thread may change the tenures at a time.
    """

    def __init__(self, servers: Sequence[str]) -> None:
        self.addresses = [noted_address(server) for server in servers]
        self._newest: list[Tenure | None] = [None] * len(servers)

    def others(self, node: int) -> list[int]:
        """Return the other nodes, in the order of their records on this node."""
        return [other for other in range(len(self._newest)) if other != node]

    def learn(self, node: int, tenure: Tenure | None) -> None:
        """Keep a tenure if it is newer than the known one."""
        known = self._newest[node]
        if tenure is not None and (known is None or tenure.since > known.since):
            self._newest[node] = tenure

    def ended(self, node: int, tenure: Tenure | None) -> bool:
        """Return whether another server has served under the node's address since."""
        return tenure is not None and tenure.ends_before(self._newest[node])

    def told(self, node: int) -> tuple[str, ...]:
        """Return arguments for a node: its newest tenure, the records' ttl, the others' tenures."""
        newest = [self._newest[other] for other in (node, *self.others(node))]
        own, *others = ("" if tenure is None else str(tenure) for tenure in newest)
        return own, str(KEPT_MS), *others
