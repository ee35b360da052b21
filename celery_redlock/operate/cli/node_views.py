"""The nodes and the locks on them, as tables and as lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from celery_redlock.errors import abstention_cause
from celery_redlock.lock.client import Redlock
from celery_redlock.lock.held_locks import LockReport, Sight
from celery_redlock.lock.node_status import NodeStatus, look_at_nodes
from celery_redlock.lock.waiting_processes import WaitingSight
from celery_redlock.operate.cli.render import Table, format_duration

LOCKS_UNKNOWN = "Which locks are held cannot be known."


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
        return cls(guard.word, session.nodes.quorum, voting, nodes, guard.grace_period)

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


def lock_name(lock: LockReport) -> str:
    """Return the resource of a lock, with the permit if it is not the first one."""
    return f"{lock.resource} (permit {lock.permit})" if lock.permit else lock.resource


def lock_table(sight: Sight) -> Table:
    """Return a table with a row for each lock."""
    rows = []
    for lock in sight.locks:
        held_for = "" if lock.held_for is None else format_duration(lock.held_for)
        valid_for = format_duration(lock.valid_for) if lock.held else "not held: no quorum"
        ago = lock.since_renewal
        renewed = "" if ago is None else f"{format_duration(ago)} ago"
        votes = f"{len(lock.votes)}, {lock.needed} needed"
        holder = lock.holder
        names = (holder.task or holder.label, holder.task_id, holder.worker)
        rows.append((lock_name(lock), *names, held_for, renewed, valid_for, votes))
    heads = ("RESOURCE", "HOLDER", "ID", "WORKER", "HELD FOR", "RENEWED", "VALID FOR", "VOTES")
    return Table(heads, rows, "No locks are held." if sight.is_known else LOCKS_UNKNOWN)


def vote_table(lock: LockReport, sight: Sight) -> Table:
    """Return a table of the nodes that have the key of a lock, and of those that failed."""
    rows = [(node, format_duration(left)) for node, left in lock.votes.items()]
    return Table(("NODE", "KEY EXPIRES IN"), [*rows, *sight.failing.items()], "")


def failing_lines(failing: Mapping[str, str]) -> list[str]:
    """Return a line for each node that could not be queried. failing: the causes by node."""
    return [f"{node} cannot be queried: {cause}" for node, cause in failing.items()]


def unknown_lines(sight: Sight | WaitingSight) -> list[str]:
    """Return a line if too few nodes answered for the list above to be complete."""
    if sight.is_known:
        return []
    answered = sight.asked - len(sight.failing)
    text = f"{answered} of {sight.asked} nodes answered, {sight.needed} needed"
    return [f"{text}: what is not listed here may be held, or wait, all the same"]
