"""Stands for your own code: a report that takes longer than a minute."""

import time


def make_report() -> None:
    """Make the report."""
    time.sleep(90)
