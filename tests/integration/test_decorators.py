"""A task whose function stands behind a decorator: no body runs under the lock of another argument.

All here run in this process, as `apply` does it, over real nodes.
"""

from __future__ import annotations

import cProfile
import functools
import inspect
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import wrapt
from celery import Celery, Task

from celery_redlock import LockedTask, SettingsError, current_lock
from celery_redlock.errors import ArgumentsError
from celery_redlock.operate.start_report import open_decisions
from celery_redlock.tasks.arguments import UNSEEN_RUNS, WAYS_OUT
from tests.conftest import Nodes

Body = Callable[..., Any]
KEY = {"lock_key": "account:{account}"}


class Session:
    """What a decorator adds."""


def passing(body: Body) -> Body:
    @functools.wraps(body)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return body(*args, **kwargs)

    return inner


def twice(body: Body) -> Body:
    return passing(passing(body))


def adding(body: Body) -> Body:
    @functools.wraps(body)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return body(Session(), *args, **kwargs)

    return inner


def declared(body: Body) -> Body:
    """Add one, and say so."""
    inner = adding(body)
    own = list(inspect.signature(body).parameters.values())[1:]
    inner.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    return inner


def taking_by_name(body: Body) -> Body:
    @functools.wraps(body)
    def inner(*args: Any, request_id: str | None = None, **kwargs: Any) -> Any:
        return body(*args, **kwargs)

    return inner


def taking_the_first(body: Body) -> Body:
    @functools.wraps(body)
    def inner(tenant: str, *args: Any, **kwargs: Any) -> Any:
        return body(*args, **kwargs)

    return inner


def turning(body: Body) -> Body:
    @functools.wraps(body)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return body(*reversed(args), **kwargs)

    return inner


def dropping(body: Body) -> Body:
    @functools.wraps(body)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return body(*args[1:], **kwargs)

    return inner


def catching(body: Body) -> Body:
    """Add one, and catch what comes of it."""

    @functools.wraps(body)
    def inner(*args: Any, **kwargs: Any) -> Any:
        try:
            return body(Session(), *args, **kwargs)
        except Exception:
            return "caught"

    return inner


def converting(body: Body) -> Body:
    """Make an object of an id, in its place."""

    @functools.wraps(body)
    def inner(account: Any, *args: Any, **kwargs: Any) -> Any:
        return body([account], *args, **kwargs)

    return inner


@wrapt.decorator  # type: ignore[misc]
def of_wrapt(body: Body, instance: Any, args: Any, kwargs: Any) -> Any:
    return body(*args, **kwargs)


class AsObject:
    """Passes all on."""

    def __init__(self, body: Body) -> None:
        functools.update_wrapper(self, body)
        self._body = body

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._body(*args, **kwargs)


def resource() -> str:
    lock = current_lock()
    assert lock is not None
    return lock.resource


RAN: list[Any] = []  # what bodies ran with


def a_body(account: Any, text: str = "", *rest: Any, **more: Any) -> tuple[Any, str]:
    RAN.append(account)
    return account, resource()


def with_session(session: Any, account: Any = "nobody", text: str = "") -> tuple[Any, str]:
    RAN.append(account)
    assert isinstance(session, Session)
    return account, resource()


def make(app: Celery, body: Body, **options: Any) -> Task:
    return app.task(base=LockedTask, shared=False, name="book", **KEY, **options)(body)


CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    (("ann", "a text"), {}),
    ((), {"text": "a text", "account": "ann"}),
    (("ann",), {"text": "a text"}),
    (("ann", "a text", 1, 2), {"other": 3}),
]


@pytest.mark.parametrize(
    ("decorate", "bind"),
    [
        *((one, bind) for one in (passing, of_wrapt, twice) for bind in (False, True)),
        (AsObject, False),  # Python binds no object that has no __get__
    ],
)
def test_what_passes_all_on_is_as_no_decorator(app: Celery, decorate: Any, bind: bool) -> None:
    def bound(self: Task, account: str, *rest: Any, **more: Any) -> tuple[str, str]:
        return a_body(account, *rest, **more)

    task = make(app, decorate(bound if bind else a_body), bind=bind)
    for args, kwargs in CALLS:
        for _ in range(2):  # the second one is not compared any more
            assert task.apply(args, kwargs).get() == ("ann", "account:ann")
        assert task.lock_for(*args, **kwargs).resource == "account:ann"


class TestAnArgumentThatADecoratorTakes:
    @pytest.mark.parametrize("decorate", [taking_by_name, lambda f: passing(taking_by_name(f))])
    def test_by_its_name_is_no_part_of_the_key(self, app: Celery, decorate: Any) -> None:
        task = make(app, decorate(a_body), typing=False)
        for more in ({}, {"request_id": "r"}):
            assert task.apply(("ann", "x"), more).get() == ("ann", "account:ann")
            assert task.lock_for("ann", "x", **more).resource == "account:ann"

    @pytest.mark.parametrize("bind", [False, True])
    def test_by_its_place_is_no_part_of_the_key(self, app: Celery, bind: bool) -> None:
        def after(self: Any, account: str, text: str = "") -> tuple[str, str]:
            return a_body(account)

        @functools.wraps(after)
        def inner(self: Any, tenant: str, *args: Any, **kwargs: Any) -> Any:
            return after(self, *args, **kwargs)

        task = make(app, inner if bind else taking_the_first(a_body), bind=bind, typing=False)
        for args, kwargs in ((("t", "ann"), {}), ((), {"tenant": "t", "account": "ann"})):
            assert task.apply(args, kwargs).get() == ("ann", "account:ann")
            assert task.lock_for(*args, **kwargs).resource == "account:ann"

    def test_is_none_of_a_unique_send_either(self, app: Celery) -> None:
        task = make(app, taking_the_first(a_body), typing=False, lock_unique_for=60)
        app.conf.task_always_eager = False
        sent = [task.delay(*args) for args in (("t", "ann"), ("u", "ann"), ("t", "bob"))]
        assert [one.is_duplicate for one in sent] == [False, True, False]


MISFITS: list[tuple[Body, Body, tuple[Any, ...], dict[str, Any]]] = [
    (adding, with_session, ("ann", "a text"), {}),
    (adding, with_session, ("ann",), {}),
    (catching, with_session, ("ann", "a text"), {}),
    (turning, a_body, ("ann", "a text"), {}),
    (dropping, a_body, ("tenant", "ann"), {}),
    (dropping, a_body, ("tenant", "ann", "a text", 7), {}),
]


@pytest.mark.parametrize(("decorate", "body", "args", "kwargs"), MISFITS)
def test_an_argument_that_arrives_elsewhere_fails_each_run_before_its_body(
    app: Celery, decorate: Any, body: Body, args: Any, kwargs: Any
) -> None:
    RAN.clear()
    task = make(app, decorate(body), typing=False)
    for _ in range(2):
        with pytest.raises(ArgumentsError) as caught:
            task.apply(args, kwargs).get()
        for part in (decorate.__name__, "__signature__", "callable lock_key", "inside the body"):
            assert part in str(caught.value)
    assert RAN == []


def test_arguments_that_do_not_fit_the_wrapped_function_are_refused_at_the_send(
    app: Celery,
) -> None:
    def mail(session: Any, account: str, text: str) -> None: ...

    task = make(app, adding(mail), typing=False, lock_unique_for=60)
    app.conf.task_always_eager = False
    for args, kwargs in ((("ann", "hello"), {}), ((), {"account": "ann", "text": "hello"})):
        with pytest.raises(ArgumentsError, match=r"decorator or `__call__` may add"):
            task.apply_async(args, kwargs)


@pytest.mark.parametrize("options", [{"lock_key": "nightly"}, {"lock_args": ()}])
def test_a_key_without_arguments_is_the_same_wherever_they_arrive(
    app: Celery, options: dict[str, Any]
) -> None:
    def mail(session: Session, account: str) -> str:
        return resource()

    options = {"base": LockedTask, "lock_unique_for": 60, "typing": False, **options}
    task = app.task(shared=False, name="book", **options)(adding(mail))
    expected = options.get("lock_key", "book:any-arguments")
    for name in ("ann", "bob"):
        assert task.lock_for(name).resource == expected
        assert task.apply((name,)).get() == expected
    app.conf.task_always_eager = False
    assert [task.delay(name).is_duplicate for name in ("ann", "bob")] == [False, True]


def test_equal_arguments_prove_nothing_and_are_compared_again(app: Celery) -> None:
    task = make(app, turning(a_body))
    assert task.apply(("ann", "ann")).get() == ("ann", "account:ann")
    with pytest.raises(ArgumentsError, match="of the call arrives as"):
        task.apply(("ann", "bob")).get()


def test_a_value_that_is_converted_in_its_place_is_no_misfit(app: Celery) -> None:
    task = make(app, converting(a_body))
    for _ in range(2):
        assert task.apply(("ann", "a text")).get() == (["ann"], "account:ann")


class TestAWayOut:
    def test_is_a_signature_of_the_decorator(self, app: Celery) -> None:
        task = make(app, declared(with_session))
        for args, kwargs in CALLS[:3]:
            assert task.apply(args, kwargs).get() == ("ann", "account:ann")

    def test_is_the_signature_that_a_key_is_checked_by(self, app: Celery) -> None:
        how: dict[str, Any] = {"base": LockedTask, "shared": False, "lock_key": "{session}"}
        task = app.task(**how)(declared(with_session))
        with pytest.raises(SettingsError, match="has no argument 'session'"):
            task.lock_options()

    def test_is_a_callable_key(self, app: Celery) -> None:
        def key(task: Any, args: Any, kwargs: Any) -> str:
            return f"account:{args[0]}"

        task = app.task(base=LockedTask, shared=False, lock_key=key)(adding(with_session))
        for _ in range(2):
            assert task.apply(("ann",)).get() == ("ann", "account:ann")


@pytest.mark.parametrize("adds", [False, True])
def test_a_call_of_the_class_is_as_a_decorator(app: Celery, adds: bool) -> None:
    class Calls(LockedTask):
        abstract, typing = True, False

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.run(*((Session(),) if adds else ()), *args, **kwargs)

    body = with_session if adds else a_body
    task = app.task(base=Calls, shared=False, name="book", **KEY)(body)
    for _ in range(2):
        if not adds:
            assert task.apply(("ann", "a text")).get() == ("ann", "account:ann")
            continue
        with pytest.raises(ArgumentsError, match=r"Calls\.__call__"):
            task.apply(("ann", "a text")).get()


def test_a_profiler_at_work_is_left_there(app: Celery) -> None:
    events: list[str] = []
    task = make(app, passing(a_body))

    def profile(frame: Any, event: str, _: Any) -> None:
        events.append(event)

    sys.setprofile(profile)
    try:
        assert task.apply(("ann",)).get() == ("ann", "account:ann")
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)
    assert events


class TestATaskThatASettingLocks:
    """As one of a package: its class knows nothing of locks."""

    @staticmethod
    def adopt(app: Celery, body: Body, **options: Any) -> Task:
        app.conf.redlock_tasks = {"book": {"key": "account:{account}"}}
        app.task(shared=False, name="book", **options)(body)
        app.finalize()
        return app.tasks["book"]

    @pytest.mark.parametrize("decorate", [passing, of_wrapt, twice])
    def test_locks_by_what_its_wrapped_function_takes(self, app: Celery, decorate: Any) -> None:
        task = self.adopt(app, decorate(a_body))
        for args, kwargs in CALLS:
            for _ in range(2):
                assert task.apply(args, kwargs).get() == ("ann", "account:ann")
            assert task.lock_for(*args, **kwargs).resource == "account:ann"

    def test_leaves_out_of_the_key_what_a_decorator_takes(self, app: Celery) -> None:
        task = self.adopt(app, taking_the_first(a_body), typing=False)
        assert task.apply(("t", "ann")).get() == ("ann", "account:ann")

    @pytest.mark.parametrize(("decorate", "body", "args", "kwargs"), MISFITS)
    def test_fails_each_run_before_its_body_if_an_argument_arrives_elsewhere(
        self, app: Celery, decorate: Any, body: Body, args: Any, kwargs: Any
    ) -> None:
        RAN.clear()
        task = self.adopt(app, decorate(body), typing=False)
        for _ in range(2):
            with pytest.raises(ArgumentsError, match="callable lock_key"):
                task.apply(args, kwargs).get()
        assert RAN == []

    def test_is_named_as_advice(self, app: Celery) -> None:
        self.adopt(app, passing(a_body))
        (told,) = [str(one) for one in open_decisions(app) if "decorator" in str(one)]
        assert "book" in told


def in_a_thread(body: Body) -> Body:
    """Call it in another thread, as what gives a body a time limit does."""

    @functools.wraps(body)
    def inner(*args: Any, **kwargs: Any) -> Any:
        with ThreadPoolExecutor() as pool:
            return pool.submit(body, *args, **kwargs).result()

    return inner


def profiling(body: Body) -> Body:
    @functools.wraps(body)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return cProfile.Profile().runcall(body, *args, **kwargs)

    return inner


def at_times(body: Body) -> Body:
    """Call it for some accounts alone."""

    @functools.wraps(body)
    def inner(*args: Any, **kwargs: Any) -> Any:
        if args[0] == "wrong":
            raise ValueError(args[0])
        return body(*args, **kwargs) if args[0] == "ann" else "cached"

    return inner


def nothing(account: str, text: str = "") -> None: ...


IS_BY_PROFILE = sys.version_info < (3, 12)  # later versions have a way beside profilers
UNSEEN: dict[str, tuple[Body, str, bool]] = {
    "a thread": (in_a_thread(nothing), "it was called in another thread", True),
    "no Python": (passing(len), "it has no Python code", True),
    "a profiler": (profiling(nothing), "another profiler is at work", IS_BY_PROFILE),
}


class TestAFunctionThatIsNotSeen:
    @pytest.mark.parametrize("case", UNSEEN)
    def test_is_named_once_after_a_few_runs_in_a_row(
        self, app: Celery, case: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        body, why, is_unseen = UNSEEN[case]
        task = app.task(base=LockedTask, shared=False, name="book")(body)
        for _ in range(UNSEEN_RUNS - 1):
            task.apply(("ann",)).get()
        assert told(caplog) == []
        for _ in range(UNSEEN_RUNS * 2):
            task.apply(("ann",)).get()
        lines = told(caplog)
        assert len(lines) == is_unseen
        for line in lines:
            for part in ("book: ", why, WAYS_OUT):
                assert part in line

    def test_is_no_matter_once_another_run_has_shown_it(
        self, app: Celery, caplog: pytest.LogCaptureFixture
    ) -> None:
        task = make(app, at_times(a_body))
        for account in ["bob"] * (UNSEEN_RUNS - 1) + ["ann"]:
            task.apply((account, "a text")).get()
        for _ in range(UNSEEN_RUNS):
            assert task.apply(("bob",)).get() == "cached"
        assert told(caplog) == []

    def test_of_a_run_that_fails_is_no_sign(
        self, app: Celery, caplog: pytest.LogCaptureFixture
    ) -> None:
        task = make(app, at_times(a_body))
        for _ in range(UNSEEN_RUNS):
            with pytest.raises(ValueError, match="wrong"):
                task.apply(("wrong",)).get()
        assert told(caplog) == []
        for _ in range(UNSEEN_RUNS):
            task.apply(("bob",)).get()
        assert len(told(caplog)) == 1


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    events = "arguments_not_seen"
    return [one.getMessage() for one in caplog.records if getattr(one, "event", "") == events]


def test_no_body_runs_under_a_profiler_of_ours(app: Celery) -> None:
    seen: list[Any] = []

    def body(account: str) -> None:
        seen.append(sys.getprofile())

    make(app, passing(body)).apply(("ann",)).get()
    assert seen == [None]


def test_tasks_behind_a_decorator_are_named_as_advice(app: Celery, nodes: Nodes) -> None:
    def plain(account: str) -> None: ...

    make(app, passing(a_body))
    app.task(base=LockedTask, shared=False, name="plain", **KEY)(plain)
    (told,) = [str(one) for one in open_decisions(app) if "decorator" in str(one)]
    assert "book" in told
    assert "plain" not in told
