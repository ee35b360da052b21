from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import Ignore, Reject, Retry

from celery_redlock import LockLost
from celery_redlock.tasks.delivery.republish import Requeue
from celery_redlock.tasks.execution.end import is_completed
from celery_redlock.tasks.wrapping import wrap_hook


@pytest.mark.parametrize(
    ("state", "outcome"),
    [
        ("SUCCESS", 7), ("SUCCESS", None), ("FAILURE", ValueError()),
        ("FAILURE", LockLost("r", "gone", True)), ("RETRY", Retry()), ("IGNORED", Ignore()),
        ("REJECTED", Reject("no", requeue=False)),
    ],
)  # fmt: skip
def test_a_run_whose_message_does_not_come_back_is_completed(state: str, outcome: object) -> None:
    assert is_completed(state, outcome)


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
    assert not is_completed(state, outcome)


class Unbound:
    """A callable that no class binds, as an object of a user's own may be one."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)


@pytest.mark.parametrize("kind", [lambda f: f, staticmethod, classmethod, Unbound])
def test_a_hook_of_any_kind_is_called_as_it_was_written(kind: Callable[[Any], Any]) -> None:
    calls: list[tuple[Any, ...]] = []
    is_bound = kind not in (staticmethod, Unbound)
    hook = kind(lambda *args: calls.append(args))
    task = SimpleNamespace(request=SimpleNamespace())
    wrap_hook(hook)(task, "a", "b")
    assert [call[-2:] for call in calls] == [("a", "b")]
    assert len(calls[0]) == (3 if is_bound else 2)
