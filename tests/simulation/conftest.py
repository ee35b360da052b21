"""What the simulation did, told at the end of every test run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import pytest

from tests.simulation.runner import summary

Told = Callable[[Mapping[str, int]], None]
PROPERTY = "simulated"


@pytest.fixture
def simulated(record_property: Callable[[str, object], None]) -> Told:
    """Give what takes the counts of a test: they travel with its report, also from xdist."""
    return lambda counts: record_property(PROPERTY, dict(counts))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was simulated."""
    counts: Counter[str] = Counter()
    for report in [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]:
        for name, value in report.user_properties:
            if name == PROPERTY:
                counts.update(value)
    if counts:
        terminalreporter.section("simulation")
        terminalreporter.write_line(summary(counts))
