"""Stands for your own code: the API of a warehouse, which is slow."""

import asyncio
import time


def count(sku: str) -> int:
    """Count the pieces of a sku."""
    time.sleep(10)
    return 3


async def pick(sku: str, pieces: int) -> None:
    """Pick pieces of a sku."""
    await asyncio.sleep(10)


async def put_back(sku: str) -> None:
    """Put the pieces of a sku back."""
    await asyncio.sleep(1)
