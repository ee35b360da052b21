"""Stands for your own code: the API of a warehouse, which is slow."""

import time


def pick(sku: str, pieces: int) -> None:
    """Ask the warehouse to pick pieces of a sku."""
    time.sleep(10)


def count(sku: str) -> None:
    """Count the pieces of a sku."""
    time.sleep(10)


def put_back(sku: str, pieces: int) -> None:
    """Put pieces of a sku back."""
    time.sleep(1)
