"""What is for sale, and the orders of one phase; pure."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from example_worker.ledger import Item

__all__ = ["Order", "plan", "shelves"]

NAMES = {
    "stock": ("tea", "cups", "pots", "tins", "trays", "spoons"),
    "coupon": ("spring", "summer", "autumn", "winter"),
    "points": ("Ada", "Grace", "Edsger", "Barbara", "Leslie", "Tony"),
}
STEPS = {"stock": -1, "coupon": 1, "points": 10}


@dataclass(frozen=True)
class Order:
    """One order: `number` is unique within the phase."""

    number: int
    kind: str
    name: str


def plan(count: int, random: Random) -> list[Order]:
    """Return so many orders, spread evenly over everything there is, in random order."""
    items = [(kind, name) for kind, names in NAMES.items() for name in names]
    orders = [Order(number, *items[number % len(items)]) for number in range(count)]
    random.shuffle(orders)
    return orders


def shelves(phase: str, orders: list[Order]) -> list[Item]:
    """Return the items of a phase: enough in stock, and a coupon for nine orders in ten."""
    return [
        _item(phase, kind, name, sum(order.name == name for order in orders))
        for kind, names in NAMES.items()
        for name in names
    ]


def _item(phase: str, kind: str, name: str, demand: int) -> Item:
    start = demand if kind == "stock" else 0
    limit = demand * 9 // 10 if kind == "coupon" else None
    return Item(
        phase=phase,
        kind=kind,
        name=name,
        start=start,
        value=start,
        step=STEPS[kind],
        limit=limit,
    )
