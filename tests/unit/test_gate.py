from __future__ import annotations

import pytest
from celery.exceptions import Ignore, Reject, Retry

from celery_redlock import LockLost
from celery_redlock.tasks.deferral import Requeue
from celery_redlock.tasks.gate import is_done


@pytest.mark.parametrize(
    ("state", "outcome"),
    [
        ("SUCCESS", 7),
        ("SUCCESS", None),
        ("FAILURE", ValueError()),
        ("FAILURE", LockLost("r", "gone", True)),
        ("RETRY", Retry()),
        ("IGNORED", Ignore()),
        ("REJECTED", Reject("no", requeue=False)),
    ],
)
def test_a_run_whose_message_does_not_come_back_is_done(state: str, outcome: object) -> None:
    assert is_done(state, outcome)


@pytest.mark.parametrize(
    ("state", "outcome"),
    [
        (None, None),  # an exception passed the tracer: SystemExit, GreenletExit
        ("REJECTED", Reject("again", requeue=True)),
        ("REJECTED", Requeue("broker away", requeue=True)),
        ("FAILURE", MemoryError()),
        ("PENDING", None),
    ],
)
def test_a_run_whose_message_comes_back_is_not_done(state: str | None, outcome: object) -> None:
    assert not is_done(state, outcome)
