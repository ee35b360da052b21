"""The output of a run: a live table in a terminal, or plain lines; and the summary."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from example_worker.verdict import Account, Outage, Phase

__all__ = ["LiveScreen", "Picture", "PlainScreen", "Screen", "summary"]

LINE_INTERVAL = 2.0
UNITS = {"stock": "pieces of", "coupon": "coupons", "points": "points of"}


@dataclass(frozen=True)
class Picture:
    """The run at one moment.

    elapsed: s of this phase. queued: messages on the broker that no worker has taken.
    taken: messages that a worker has: running, or waiting there for their lock.
    deferrals: how often a message was deferred in this phase.
    nodes: host and port of each lock node, and "up", "abstains" (it does not vote yet) or "DOWN".
    unlocked, locked: the items of either phase; empty before it begins.
    """

    title: str
    elapsed: float
    orders: int
    sent: int
    queued: int
    taken: int
    deferrals: int
    nodes: Sequence[tuple[str, str]]
    unlocked: Sequence[Account]
    locked: Sequence[Account]

    @property
    def current(self) -> Sequence[Account]:
        """The items of the phase that runs."""
        return self.locked or self.unlocked

    @property
    def executed(self) -> int:
        """Executions in the phase that runs."""
        return sum(account.executed for account in self.current)

    @property
    def lost(self) -> int:
        """Lost updates of the phase that runs, in orders."""
        return sum(account.lost for account in self.current)

    def line(self) -> str:
        """Return everything but the items in one line."""
        nodes = " ".join(state for _, state in self.nodes)
        return (
            f"{self.title}, {self.elapsed:.1f} s: {self.executed} of {self.orders} executed, "
            f"{self.lost} updates lost; {self.queued} queued, {self.taken} with workers, "
            f"{self.deferrals} deferrals; lock nodes {nodes}"
        )


class Screen(Protocol):
    """The output of the run; `close` ends it."""

    def show(self, picture: Picture) -> None:
        """Show the state of the run."""

    def tell(self, event: str) -> None:
        """Show an event as a line of text."""

    def close(self) -> None:
        """Give the terminal back."""


class PlainScreen:
    """One line at each event, and one every couple of seconds."""

    def __init__(self) -> None:
        self._next = 0.0

    def show(self, picture: Picture) -> None:
        """Print a line, unless the last one is younger than `LINE_INTERVAL` seconds."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_INTERVAL
            self.tell(picture.line())

    def tell(self, event: str) -> None:
        """Print the event at once, also into a pipe."""
        print(event, flush=True)

    def close(self) -> None:
        """Do nothing: plain lines do not change the terminal's mode."""


class LiveScreen:
    """A table that changes in place, the events scrolling by above it."""

    def __init__(self) -> None:
        self._live = Live(console=Console(highlight=False), refresh_per_second=4)
        self._live.start()

    def show(self, picture: Picture) -> None:
        """Put the new table in the place of the old one."""
        self._live.update(Group(_table(picture), Text(picture.line())))

    def tell(self, event: str) -> None:
        """Print the event above the table."""
        self._live.console.print(Text(event))

    def close(self) -> None:
        """Leave the last table standing and show the cursor again."""
        self._live.stop()


def _table(picture: Picture) -> Table:
    """Return the items, both phases side by side."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for title in ("no lock: should be", "is", "lost", "locked: should be", "is", "lost"):
        table.add_column(title, justify="right")
    locked = {(account.kind, account.name): account for account in picture.locked}
    for account in picture.unlocked:
        locked_account = locked.get((account.kind, account.name))
        label = f"{UNITS[account.kind]} {account.name}"
        table.add_row(label, *_cells(account), *(_cells(locked_account) if locked_account else ()))
    return table


def _cells(account: Account) -> tuple[Text, Text, Text]:
    style = "bold red" if account.lost else "green"
    return (
        Text(str(account.should)),
        Text(str(account.value), style),
        Text(str(account.lost or ""), style),
    )


def summary(unlocked: Phase, locked: Phase | None, outage: Outage | None) -> str:
    """Return the numbers of both phases side by side, as plain text."""
    phases = [phase for phase in (unlocked, locked) if phase is not None]
    rows = [("", *(phase.title for phase in phases))]
    rows += [
        ("orders sent", *(str(phase.sent) for phase in phases)),
        ("orders executed", *(str(phase.executed) for phase in phases)),
        ("executed twice", *(str(phase.twice) for phase in phases)),
        ("lost updates", *(str(phase.lost) for phase in phases)),
        ("coupons over the limit", *(str(phase.oversold) for phase in phases)),
        ("duplicate serial numbers", *(str(phase.duplicate_serials) for phase in phases)),
        ("deferrals", *(str(phase.deferrals) for phase in phases)),
        ("seconds", *(f"{phase.seconds:.1f}" for phase in phases)),
    ]
    lines = [f"{label:<26}" + "".join(f"{cell:>18}" for cell in cells) for label, *cells in rows]
    return "\n".join([*lines, *_outage_lines(outage)])


def _outage_lines(outage: Outage | None) -> list[str]:
    if outage is None or outage.killed_at is None:
        return []
    return_text = "never back"
    if outage.back_at is not None:
        return_text = f"back, empty, after {outage.back_at}: abstains for a minute"
    return [f"lock node {outage.node}: killed after {outage.killed_at} orders, {return_text}"]
