"""Which clock of the machine a lease goes by."""

from __future__ import annotations

import sys
import time

import pytest

from celery_redlock.lock.platform.clock import SystemClock


@pytest.mark.parametrize(
    ("platform", "clock"), [("linux", "CLOCK_BOOTTIME"), ("darwin", "CLOCK_MONOTONIC")]
)
def test_a_lease_goes_by_the_clock_that_goes_on_while_the_machine_is_suspended(
    platform: str, clock: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = {"CLOCK_BOOTTIME": 7, "CLOCK_MONOTONIC": 1}
    for name, number in numbers.items():
        monkeypatch.setattr(time, name, number, raising=False)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(time, "clock_gettime", float)
    monkeypatch.setattr(time, "clock_getres", lambda which: which / 1e9)
    made = SystemClock()
    assert made.now() == numbers[clock]
    assert made.resolution == numbers[clock] / 1e9


def test_where_there_is_none_it_goes_by_pythons_monotonic_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(time, "CLOCK_BOOTTIME", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    made = SystemClock()
    before = time.monotonic()
    assert before <= made.now() <= time.monotonic()
