"""The nodes, as text, as a table and as data for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from celery_redlock.errors import abstention_cause
from celery_redlock.lock.client import Redlock
from celery_redlock.lock.node_status import NodeStatus, look_at_nodes
from celery_redlock.operate.cli.render import Table, format_duration


@dataclass(frozen=True)
class NodesView:
    """The status of all nodes. guard: the restart guard's setting. needed: size of a quorum.

    grace_period: seconds for which a new node grants no lock.
    """

    nodes: Sequence[NodeStatus]
    guard: str
    needed: int
    grace_period: float

    @classmethod
    def of(cls, redlock: Redlock) -> NodesView:
        """Query the nodes."""
        session = redlock.session
        guard = session.options.guard
        return cls(look_at_nodes(redlock), guard.word, session.node_set.size, guard.grace_period)

    @property
    def voting(self) -> int:
        """The number of nodes that vote."""
        return sum(node.votes(self.guard) for node in self.nodes)

    @property
    def has_quorum(self) -> bool:
        """Whether enough nodes vote for a lock to be acquired."""
        return self.voting >= self.needed

    def vote_of(self, node: NodeStatus) -> str:
        """Return in words whether a node votes, and if not, why."""
        if node.error:
            return node.error
        if node.role != "master":
            return f"no vote: it is a {node.role or 'server of an unknown role'}"
        if node.silent_for > 0:
            return abstention_cause(node.silent_for)
        if node.votes(self.guard):
            return "votes"
        seconds = f"{self.grace_period:.0f} s"
        return f"new: will grant no lock for {seconds} from its first use; see `trust`"

    def quorum_line(self) -> str:
        """Return how many nodes vote, and how many are needed."""
        return f"{self.voting} of {len(self.nodes)} nodes vote, {self.needed} needed"

    def table(self) -> Table:
        """Return a table with a row for each node."""
        rows = [
            (
                node.node, self.vote_of(node), node.server, node.role, format_duration(node.uptime),
                f"{node.latency * 1000:.1f} ms", f"{node.clock:+.3f} s", node.policy,
            )
            if not node.error else (node.node, node.error)
            for node in self.nodes
        ]  # fmt: skip
        heads = ("NODE", "VOTE", "SERVER", "ROLE", "UP", "LATENCY", "CLOCK", "EVICTION")
        return Table(heads, rows, "No nodes are named.")

    def data(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        nodes = [{**asdict(node), "votes": node.votes(self.guard)} for node in self.nodes]
        return {"guard": self.guard, "needed": self.needed, "voting": self.voting, "nodes": nodes}

    def summary(self) -> dict[str, Any]:
        """Return for JSON which nodes do not vote, and why. new: never used by a client."""
        up = [node for node in self.nodes if not node.error and not node.votes(self.guard)]
        return {
            "nodes": len(self.nodes),
            "quorum": self.needed,
            "voting": self.voting,
            "names": [node.node for node in self.nodes],
            "failing": [f"{node.node}: {node.error}" for node in self.nodes if node.error],
            "silent": {node.node: node.silent_for for node in up if node.silent_for > 0},
            "new": [node.node for node in up if not node.silent_for and node.role == "master"],
        }
