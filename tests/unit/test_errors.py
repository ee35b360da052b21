from __future__ import annotations

import json
import pickle
import re
from importlib.metadata import files

import pytest
from celery import Celery
from celery.exceptions import ImproperlyConfigured
from hypothesis import given
from hypothesis import strategies as st

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
from celery_redlock.errors import (
    HELD_BY_PARENT,
    NEVER_ACQUIRED,
    RELEASED,
    ArgumentsError,
    NoRunError,
    NoTokenError,
    abstention_cause,
    summarize_causes,
)
from celery_redlock.label import Holder

ERRORS = [
    SettingsError("task 'a'", "lock_ttl", "-1", "must be a number of seconds above 0"),
    ArgumentsError("task 'a'", "arguments", "(1 by position)", "do not fit a(x, y)"),
    NodeError("10.0.0.1:6379", "Connection refused", True),
    LockTaken("stock:7", "id:task:0:0 w1@host", 2.5, 1.25, 3),
    LockTaken("stock:7", "pid 7 on host", 2.5, 1.25),
    LockTaken("stock:7", "pid 7 on host", 2.5, 1.25, ttl=30.0),
    LockTaken("stock:7", "pid 7 on host", 2.5, 1.25, limit=3),
    QuorumUnreachable("stock:7", ["10.0.0.1:6379: Connection refused"], 2, 1.0, 4),
    LockLost("stock:7", "another token took its key", True),
    NoRunError("shop.take"),
    NoRunError("shop.take", True),
    NoTokenError("'stock:7' has no fencing token"),
    DuplicateTask("stock:7", "3f2a"),
    DuplicateTask("stock:7", "3f2a", 12.5),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
class TestEveryError:
    def test_comes_through_pickle_as_it_was(self, error: RedlockError) -> None:
        assert isinstance(error, RedlockError)
        back = pickle.loads(pickle.dumps(error))
        assert (type(back), back.args, str(back), vars(back)) == (
            type(error), error.args, str(error), vars(error),
        )  # fmt: skip

    def test_comes_through_celerys_json_result_as_it_was(self, error: RedlockError) -> None:
        backend = Celery("t", backend="cache+memory://", set_as_default=False).backend
        stored = backend.encode(backend.prepare_exception(error))
        json.dumps(error.args)
        back = backend.exception_to_python(backend.decode(stored))
        assert (type(back), str(back)) == (type(error), str(error))


def test_a_refusal_by_a_task_that_waits_names_no_holder() -> None:
    assert str(LockTaken("stock:7", "", None)).startswith("'stock:7' is taken; ")


@pytest.mark.parametrize("error", [e for e in ERRORS if hasattr(e, "resource")])
def test_an_error_of_a_lock_names_the_resource(error: NotAcquired) -> None:
    assert "stock:7" in str(error)


def test_a_wrong_setting_is_improperly_configured_to_celery() -> None:
    error = SettingsError("app", "redlock_ttl", "0", "must be above 0")
    assert isinstance(error, ImproperlyConfigured)
    assert error.hint == "must be above 0"
    assert str(error).startswith("app: redlock_ttl=0: must be above 0. See ")


CATCHES = re.compile(r"\b(?:except|suppress)\b[^:]*?\b(?:ImproperlyConfigured|CeleryError)\b")


@pytest.mark.parametrize("package", ["celery", "kombu", "billiard"])
def test_nothing_between_a_wrong_setting_and_its_user_catches_what_is_improperly_configured(
    package: str,
) -> None:
    """Celery only raises it so far: an error of ours would be silent where it caught that."""
    assert CATCHES.search("    except (KeyError,\n            ImproperlyConfigured) as error:\n")
    assert CATCHES.search("with suppress(exceptions.ImproperlyConfigured):")
    assert not CATCHES.search("except KeyError:\n    raise ImproperlyConfigured(text)")
    modules = [path for path in files(package) or () if path.suffix == ".py"]
    assert len(modules) > 10
    found = [str(path) for path in modules if CATCHES.search(path.read_text(encoding="utf-8"))]
    assert found == []


def test_taken_and_unreachable_are_two_kinds_of_not_acquired() -> None:
    assert issubclass(LockTaken, NotAcquired)
    assert issubclass(QuorumUnreachable, NotAcquired)
    assert not issubclass(LockTaken, QuorumUnreachable)


def test_unreachable_names_each_node_and_its_cause() -> None:
    text = str(QuorumUnreachable("r", ["a:1: refused", "b:2: timed out"], 2))
    assert "a:1: refused" in text
    assert "b:2: timed out" in text


def test_nodes_that_are_up_and_abstain_are_not_to_be_brought_back() -> None:
    abstaining = [
        f"{node}: {abstention_cause(left)}" for node, left in (("a:1", 60.2), ("b:2", 41.0))
    ]
    text = str(QuorumUnreachable("r", abstaining, 2))
    assert "Bring" not in text
    assert "a:1, b:2: grants no lock for 61 s more (restart guard)" in text
    assert "redlock trust" in text
    both = str(QuorumUnreachable("r", [abstaining[0], "c:3: refused"], 2))
    assert "Bring these nodes back: c:3: refused. New or restarted nodes wait: a:1: " in both
    assert summarize_causes([*abstaining, "c:3: refused"]).startswith(
        "c:3: refused; a:1, b:2: grants no lock"
    )


def test_a_label_of_a_run_is_shown_without_its_counts() -> None:
    assert str(Holder.of("id:shop.take:0:0 w1@host")) == "shop.take[id] on w1@host"
    assert str(Holder.of("id:shop.take:3:1")) == "shop.take[id]"
    assert str(Holder.of("pid 7 on host")) == "pid 7 on host"


@given(st.text(max_size=2000))
def test_a_label_of_others_is_one_short_line(label: str) -> None:
    assert str(Holder.of(label)).isprintable()
    assert len(str(Holder.of(label))) < 6000  # each character may be spelled out
    for error in (LockTaken("r", label), LockTaken("r", f"{label}:shop.take:0:0 w1@host")):
        assert str(error).isprintable()


def test_lost_says_whether_the_body_had_ended() -> None:
    assert "its body had ended" in str(LockLost("r", "why", True))
    assert "its body had not ended" in str(LockLost("r", "why", False))


@pytest.mark.parametrize("reason", [NEVER_ACQUIRED, RELEASED, HELD_BY_PARENT])
def test_what_is_not_held_is_not_called_lost(reason: str) -> None:
    text = str(LockLost("r", reason))
    assert f"the lock on 'r' is not held: {reason}" in text
    assert "lost" not in text
    assert "body" not in text
    assert "its body had ended" in str(LockLost("r", reason, True))


def test_taken_names_the_options_of_whoever_asked() -> None:
    """A plain lock has no message that could be put back."""
    plain, task = str(LockTaken("r", "h", None, 0.5)), str(LockTaken("r", "h", None, 0.5, 3))
    assert "waited 0.5 s. Wait longer (wait) " in plain
    assert "waited 0.5 s, 3 deferrals. Wait longer (wait, max_wait) " in task


@pytest.mark.parametrize(
    ("expires_in", "late"),
    [(30.0, ""), (10.5, ""), (9.5, ", not renewed for 20 s"), (0.0, ", not renewed for 30 s")],
)
def test_taken_says_how_long_a_dead_holder_has_not_renewed(expires_in: float, late: str) -> None:
    assert f"held by h{late}; waited" in str(LockTaken("r", "h", expires_in, ttl=30.0))
    assert "held by h; waited" in str(LockTaken("r", "h", expires_in))


def test_taken_counts_the_holders_of_a_semaphore() -> None:
    text = str(LockTaken("r", "h", 1.0, ttl=30.0, limit=3))
    assert "held by 3 holders, its limit; waited 0.0 s" in text
    assert "find out what the holders do" in text


def test_unreachable_counts_deferrals_of_messages_alone() -> None:
    assert "waited 0.5 s. Bring" in str(QuorumUnreachable("r", [], 2, 0.5))
    assert "waited 0.5 s, 3 deferrals. Bring" in str(QuorumUnreachable("r", [], 2, 0.5, 3))
