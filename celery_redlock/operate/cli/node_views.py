"""The nodes, as text and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from celery_redlock.errors import abstention_cause
from celery_redlock.lock.client import Redlock
from celery_redlock.lock.node_status import NodeStatus, look_at_nodes
from celery_redlock.operate.cli.render import Table, format_duration


@dataclass(frozen=True)
class NodesView:
    """The status of all nodes. Its fields are those of the documented JSON.

    guard: the restart guard's setting. needed: size of a quorum. voting: the number of nodes that
    vote. grace_period: seconds for which a new node grants no lock.
    """

    guard: str
    needed: int
    voting: int
    nodes: Sequence[NodeStatus]
    grace_period: float = field(repr=False)

    @classmethod
    def of(cls, redlock: Redlock) -> NodesView:
        """Query the nodes."""
        session, nodes = redlock.session, look_at_nodes(redlock)
        guard, voting = session.options.guard, sum(node.votes for node in nodes)
        return cls(guard.word, session.node_set.size, voting, nodes, guard.grace_period)

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
        if node.votes:
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
