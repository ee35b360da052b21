"""Stands for your own code: the API of a warehouse."""

import time


def pick(order_id: int) -> None:
    """Call the warehouse, which is slow."""
    time.sleep(10)


ship = take_back = pick
