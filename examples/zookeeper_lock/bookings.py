"""Stands for your own code: what takes long under the lock."""

import time


def add_up(account: str) -> int:
    """Add up the bookings of an account, in cents."""
    time.sleep(10)
    return len(account) * 100
