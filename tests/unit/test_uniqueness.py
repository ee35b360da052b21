from __future__ import annotations

import math
from typing import Any

import pytest
from celery import Celery
from hypothesis import example, given
from hypothesis import strategies as st

from celery_redlock import LockedTask, SettingsError
from celery_redlock.tasks.unique.claim import ClaimToken
from celery_redlock.tasks.unique.send import unique_name

texts = st.text(alphabet="t:%1", min_size=1, max_size=5)
sends = st.tuples(texts, st.lists(texts, min_size=1, max_size=2).map(tuple))


@given(sends, sends)
@example(("t", ("1",)), ("t", ("t:1",)))
@example(("t", ("1:2",)), ("t:1", ("2",)))
@example(("t:", ("1",)), ("t", (":1",)))
def test_what_two_tasks_or_two_keys_send_is_no_duplicate(
    one: tuple[str, tuple[str, ...]], other: tuple[str, tuple[str, ...]]
) -> None:
    assert (unique_name(*one) == unique_name(*other)) == (one == other)


def test_what_is_sent_once_is_named_by_task_and_resource() -> None:
    assert unique_name("shop.sync", ("stock:42",)) == "shop.sync:stock:42"


TOKEN = {"name": "t:k", "token": "0f" * 16, "until": "finished"}


@pytest.mark.parametrize(
    "strange",
    [
        {"token": "0"}, {"token": ""}, {"token": "0f" * 16 + "0"}, {"token": "x" * 32},
        {"until": "never"}, {"name": ""}, {"replaces": 7}, {"kept_for": math.nan},
        {"kept_for": math.inf}, {"kept_for": -1}, {"ends_at": 10**400}, {"ends_at": None},
    ],
)  # fmt: skip
def test_a_token_that_no_sender_wrote_counts_as_absent(strange: dict[str, Any]) -> None:
    assert ClaimToken.of(TOKEN) is not None
    assert ClaimToken.of({**TOKEN, **strange}) is None


@pytest.mark.parametrize("wrong", [{"countdown": 5}, {"eta": "2030-01-01"}, {"expires": 3}])
def test_an_eager_send_is_refused_for_what_contradicts_its_debounce(wrong: dict[str, Any]) -> None:
    """A project's tests send so: they are to fail as production does."""
    app = Celery("unit", broker="memory://", set_as_current=False)
    app.conf.update(task_always_eager=True, redlock_nodes=["redis://127.0.0.1:1"])

    @app.task(base=LockedTask, lock_debounce=5, shared=False)
    def index(order: int) -> None: ...

    with pytest.raises(SettingsError, match=f"call: {next(iter(wrong))}="):
        index.apply_async((1,), **wrong)


def test_an_eager_send_is_refused_for_what_its_task_says() -> None:
    app = Celery("unit", broker="memory://", set_as_current=False)
    app.conf.update(task_always_eager=True, redlock_nodes=["redis://127.0.0.1:1"])

    @app.task(base=LockedTask, lock_debounce=5, expires=3, shared=False)
    def index(order: int) -> None: ...

    with pytest.raises(SettingsError, match="call: expires=3"):
        index.delay(1)


def test_an_eager_send_is_refused_for_what_its_queue_says() -> None:
    app = Celery("unit", broker="memory://", set_as_current=False)
    app.conf.update(task_always_eager=True, redlock_nodes=["redis://127.0.0.1:1"])
    app.conf.redlock_queues = {"celery": {"on_duplicate": "newest"}}

    @app.task(base=LockedTask, lock_debounce=5, shared=False)
    def index(order: int) -> None: ...

    with pytest.raises(SettingsError, match="in queue 'celery'"):
        index.delay(1)


@pytest.mark.parametrize("wrong", [{"countdown": 5}, {"eta": "2030-01-01"}])
def test_a_send_that_replaces_the_queued_one_has_no_time_of_its_own(wrong: dict[str, Any]) -> None:
    app = Celery("unit", broker="memory://", set_as_current=False)
    app.conf.update(task_always_eager=True, redlock_nodes=["redis://127.0.0.1:1"])
    newest: dict[str, Any] = {"lock_unique_until": "started", "lock_on_duplicate": "newest"}

    @app.task(base=LockedTask, lock_unique_for=5, **newest, shared=False)
    def index(order: int) -> int:
        return order

    with pytest.raises(SettingsError, match=f'call: {next(iter(wrong))}=.*on_duplicate="newest"'):
        index.apply_async((1,), **wrong)


@pytest.mark.parametrize("key", [False, lambda task, args, kwargs: None])
def test_a_send_without_a_key_is_not_debounced_and_takes_any_countdown(key: Any) -> None:
    app = Celery("unit", broker="memory://", set_as_current=False)
    app.conf.update(task_always_eager=True, redlock_nodes=["redis://127.0.0.1:1"])
    app.conf.redlock_debounce = 60

    @app.task(base=LockedTask, lock_key=key, shared=False)
    def index(order: int) -> int:
        return order

    assert index.apply_async((1,), countdown=5).get() == 1
