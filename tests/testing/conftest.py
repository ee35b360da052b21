"""What is told here is told with the kit's own fixtures."""

from __future__ import annotations

import pytest

from celery_redlock import Redlock


@pytest.fixture
def redlock(_redlock: Redlock) -> Redlock:
    """Give the kit's, instead of that of the other tests."""
    return _redlock
