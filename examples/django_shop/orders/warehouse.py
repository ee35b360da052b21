"""Stands for your own code: the API of a warehouse, which is slow."""

import time


def pick(order_id: int) -> None:
    """Ask the warehouse to pick the pieces of an order, once."""
    time.sleep(10)


def ship(order_id: int) -> None:
    """Ask the warehouse to ship an order."""
    time.sleep(10)


def take_back(order_id: int) -> None:
    """Ask the warehouse to take the pieces of an order back."""
    time.sleep(10)
