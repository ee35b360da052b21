from __future__ import annotations

import json
import pickle

import pytest
from celery import Celery

from celery_redlock import (
    DuplicateTask,
    LockLost,
    LockTaken,
    NodeError,
    NotAcquired,
    QuorumUnreachable,
    RedlockError,
    SettingsError,
)
from celery_redlock.errors import NEVER_ACQUIRED, OF_THE_PARENT, RELEASED

ERRORS = [
    SettingsError("task 'a'", "lock_ttl", "-1", "must be a number of seconds above 0"),
    NodeError("10.0.0.1:6379", "Connection refused", True),
    LockTaken("stock:7", "id:task:0:0 w1@host", 2.5, 1.25, 3),
    LockTaken("stock:7", "pid 7 on host", 2.5, 1.25),
    QuorumUnreachable("stock:7", ["10.0.0.1:6379: Connection refused"], 2, 1.0, 4),
    LockLost("stock:7", "another token took its key", True),
    DuplicateTask("stock:7", "3f2a"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
class TestEveryError:
    def test_is_a_redlock_error(self, error: RedlockError) -> None:
        assert isinstance(error, RedlockError)

    def test_comes_through_pickle_as_it_was(self, error: RedlockError) -> None:
        back = pickle.loads(pickle.dumps(error))
        assert (type(back), back.args, str(back), vars(back)) == (
            type(error), error.args, str(error), vars(error),
        )  # fmt: skip

    def test_comes_through_celerys_json_result_as_it_was(self, error: RedlockError) -> None:
        backend = Celery("t", backend="cache+memory://", set_as_default=False).backend
        stored = backend.encode(backend.prepare_exception(error))
        back = backend.exception_to_python(backend.decode(stored))
        assert (type(back), str(back)) == (type(error), str(error))

    def test_has_arguments_that_json_takes(self, error: RedlockError) -> None:
        json.dumps(error.args)


@pytest.mark.parametrize("error", [e for e in ERRORS if hasattr(e, "resource")])
def test_an_error_of_a_lock_names_the_resource(error: NotAcquired) -> None:
    assert "stock:7" in str(error)


def test_taken_and_unreachable_are_two_kinds_of_not_acquired() -> None:
    assert issubclass(LockTaken, NotAcquired)
    assert issubclass(QuorumUnreachable, NotAcquired)
    assert not issubclass(LockTaken, QuorumUnreachable)


def test_unreachable_names_each_node_and_its_cause() -> None:
    text = str(QuorumUnreachable("r", ["a:1: refused", "b:2: timed out"], 2))
    assert "a:1: refused" in text
    assert "b:2: timed out" in text


def test_lost_says_whether_the_body_had_ended() -> None:
    assert "its body had ended" in str(LockLost("r", "why", True))
    assert "its body had not ended" in str(LockLost("r", "why", False))


@pytest.mark.parametrize("reason", [NEVER_ACQUIRED, RELEASED, OF_THE_PARENT])
def test_what_is_not_held_is_not_called_lost(reason: str) -> None:
    text = str(LockLost("r", reason))
    assert f"the lock on 'r' is not held: {reason}" in text
    assert "lost" not in text
    assert "body" not in text
    assert "its body had ended" in str(LockLost("r", reason, True))


def test_taken_names_the_way_out_of_whoever_asked() -> None:
    """A plain lock has no message that could be put back."""
    plain, task = str(LockTaken("r", "h", None, 0.5)), str(LockTaken("r", "h", None, 0.5, 3))
    assert "waited 0.5 s. Wait longer (wait) " in plain
    assert "waited 0.5 s, 3 deferrals. Wait longer (wait, max_wait, max_deferrals) " in task


def test_unreachable_counts_deferrals_of_messages_alone() -> None:
    assert "waited 0.5 s. Bring" in str(QuorumUnreachable("r", [], 2, 0.5))
    assert "waited 0.5 s, 3 deferrals. Bring" in str(QuorumUnreachable("r", [], 2, 0.5, 3))
