"""A release is never cut by the exception that tells a body of its lock's loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from celery_redlock import Lock, Redlock
from celery_redlock.lock.engine.releaser import Releaser
from celery_redlock.lock.hold import Hold
from celery_redlock.lock.platform.interrupts import is_uninterruptible

RELEASES = [
    Lock.release,
    Lock.__exit__,
    Redlock.__exit__,
    Hold.release,
    Hold.release_anywhere,
    Releaser.release,
    Releaser.roll_back,
    Releaser.roll_back_last,
    Releaser.release_if_abandoned,
    Releaser.release_if_unused,
]


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.__qualname__)
def test_what_releases_is_not_interrupted(release: Callable[..., Any]) -> None:
    assert is_uninterruptible(release.__code__)


@pytest.mark.parametrize("other", [Lock.acquire, Lock.extend, Lock.ensure, Lock.__enter__])
def test_what_acquires_is_made_to_be_interrupted(other: Callable[..., Any]) -> None:
    assert not is_uninterruptible(other.__code__)
