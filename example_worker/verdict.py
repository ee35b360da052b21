"""The faults that the ledger shows: lost updates, repeated orders, excess coupons. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Account", "Outage", "Phase", "faults"]


@dataclass(frozen=True)
class Account:
    """One item: its row, and the sums of its ledger entries.

    start, value: the item's number before the first order and now.
    step: what one effective order adds; every order of an item adds the same.
    limit: how many may be issued; None for no limit.
    executed, orders: ledger rows, and the different orders among them.
    change: sum of what the orders meant to add.
    serials, distinct_serials: serial numbers given out, and the different ones among them.
    """

    kind: str
    name: str
    start: int
    value: int
    step: int
    limit: int | None
    executed: int
    orders: int
    change: int
    serials: int
    distinct_serials: int

    @property
    def should(self) -> int:
        """The value that the item would have without lost updates."""
        return self.start + self.change

    @property
    def lost(self) -> int:
        """How many executed orders left no trace in the value."""
        return (self.should - self.value) // self.step

    @property
    def twice(self) -> int:
        """How many executions were of an order that had been executed before."""
        return self.executed - self.orders

    @property
    def oversold(self) -> int:
        """How many were issued above the limit."""
        return 0 if self.limit is None else max(0, self.serials - self.limit)

    @property
    def duplicate_serials(self) -> int:
        """How many serial numbers had been given out before."""
        return self.serials - self.distinct_serials


@dataclass(frozen=True)
class Phase:
    """One phase after its end, or at its deadline.

    seconds: from the first order sent. deferrals: how often a message did not get its lock.
    finished: every message is off the broker.
    """

    title: str
    sent: int
    accounts: Sequence[Account]
    deferrals: int
    seconds: float
    finished: bool

    @property
    def executed(self) -> int:
        """Executions, a second one of the same order included."""
        return sum(account.executed for account in self.accounts)

    @property
    def missing(self) -> int:
        """Orders sent and never executed."""
        return self.sent - sum(account.orders for account in self.accounts)

    @property
    def twice(self) -> int:
        """Executions of an order that had been executed before."""
        return sum(account.twice for account in self.accounts)

    @property
    def lost(self) -> int:
        """Lost updates, in orders."""
        return sum(account.lost for account in self.accounts)

    @property
    def oversold(self) -> int:
        """Coupons issued above the limit."""
        return sum(account.oversold for account in self.accounts)

    @property
    def duplicate_serials(self) -> int:
        """Serial numbers given out once more."""
        return sum(account.duplicate_serials for account in self.accounts)


@dataclass(frozen=True)
class Outage:
    """The lock node that is killed during the run.

    killed_at, back_at: the orders that were executed by then; None if it has not happened.
    """

    node: str
    killed_at: int | None = None
    back_at: int | None = None


def faults(unlocked: Phase, locked: Phase | None, outage: Outage | None) -> list[str]:
    """Return the reasons why the run has failed; none if it has passed.

    locked: None if that phase never began. outage: None if the run may kill no node.
    """
    problems = [*_unfinished(unlocked)]
    if unlocked.finished and unlocked.lost == 0:
        problems.append("without the lock no update was lost: there was nothing to protect from")
    if locked is None:
        return [*problems, "with the lock: not run"]
    problems += [*_unfinished(locked), *_inexact(locked)]
    if outage is not None and (outage.killed_at is None or outage.back_at is None):
        problems.append(f"lock node {outage.node} was not both killed and brought back in mid-run")
    return problems


def _unfinished(phase: Phase) -> list[str]:
    if phase.finished:
        return []
    return [f"{phase.title}: not finished after {phase.seconds:.0f} s"]


def _inexact(phase: Phase) -> list[str]:
    """Return a text for each count of a locked phase that must be 0 and is not."""
    counts = {
        "orders never executed": phase.missing,
        "orders executed twice": phase.twice,
        "lost updates": phase.lost,
        "coupons over the limit": phase.oversold,
        "duplicate serial numbers": phase.duplicate_serials,
    }
    return [f"{phase.title}: {count} {noun}" for noun, count in counts.items() if count]
