"""What a traceback shows: the user's own frames, and hardly any of ours."""

from __future__ import annotations

import inspect
import pickle
import traceback
import typing
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from billiard.einfo import ExceptionInfo
from celery import Celery
from celery.app import trace
from celery.app.trace import build_tracer
from celery.exceptions import Ignore, Reject, Retry
from celery.signals import task_postrun

import celery_redlock
from celery_redlock import LockedTask, LockTaken, QuorumUnreachable, Redlock, SettingsError
from celery_redlock.tasks.wrapping import keep_tracebacks

OURS = str(Path(celery_redlock.__file__).parent)


@pytest.fixture
def app(app: Celery) -> Celery:
    app.conf.task_always_eager = False
    return app


def outcome(task: Any, *args: Any, **request: Any) -> Any:
    """Run a task as a worker's child does; return what it raised, as Celery's signals give it."""
    told: list[Any] = []

    def note(retval: Any = None, **_: Any) -> None:
        told.append(retval)

    task_id = str(uuid.uuid4())
    delivery = {"exchange": "", "routing_key": "celery"}
    given = {"id": task_id, "task": task.name, "delivery_info": delivery, "hostname": "here"}
    task_postrun.connect(note)
    try:
        build_tracer(task.name, task, app=task.app)(task_id, args, {}, {**given, **request})
    finally:
        task_postrun.disconnect(note)
    return told[0]


def frames(error: BaseException) -> list[str]:
    """Return the functions of an error's frames, ours as OURS; Celery's own one is left out."""
    found = traceback.extract_tb(error.__traceback__)[1:]
    return ["OURS" if frame.filename.startswith(OURS) else frame.name for frame in found]


def fails(number: int) -> None:
    try:
        deep(number)
    except KeyError as error:
        raise ValueError(number) from error


def deep(number: int) -> None:
    try:
        [].pop(number)
    except IndexError:
        raise KeyError(number)  # noqa: B904 - its context is what is looked at


class OfClass(LockedTask):
    name = "class"

    def run(self, number: int) -> None:
        fails(number)


class OfCall(OfClass):
    name = "call"

    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args)


def of_function(body: Any, **options: Any) -> Callable[[Celery], Any]:
    return lambda app: app.task(base=LockedTask, shared=False, name="function", **options)(body)


WRITTEN: dict[str, tuple[Callable[[Celery], Any], list[str]]] = {
    "function": (of_function(fails), ["OURS", "fails"]),
    "late": (of_function(fails, acks_late=True), ["OURS", "fails"]),
    "no lock": (of_function(fails, lock_key=False), ["OURS", "fails"]),
    "class": (lambda app: app.register_task(OfClass()), ["OURS", "run", "fails"]),
    "call": (
        lambda app: app.register_task(OfCall()),
        ["OURS", "__call__", "__call__", "OURS", "run", "fails"],
    ),
    "autoretry": (of_function(fails, autoretry_for=(OSError,)), ["run", "OURS", "fails"]),
}


@pytest.mark.parametrize("way", WRITTEN)
def test_a_bodys_own_error_has_its_own_frames_and_its_chain(app: Celery, way: str) -> None:
    make, expected = WRITTEN[way]
    error = outcome(make(app), 7)
    assert isinstance(error, ValueError)
    assert frames(error) == expected
    cause = error.__cause__
    assert isinstance(cause, KeyError)
    assert isinstance(cause.__context__, IndexError)
    assert [frame.name for frame in traceback.extract_tb(cause.__traceback__)] == ["fails", "deep"]
    text = "".join(traceback.format_exception(error))
    assert "raise ValueError(number) from error" in text
    assert "[].pop(number)" in text


def test_a_body_that_runs_without_its_lock_has_no_more_frames_of_ours(app: Celery) -> None:
    unreachable(app)
    task = of_function(fails, lock_on_unreachable="run")(app)
    assert frames(outcome(task, 7)) == ["OURS", "fails"]


@pytest.mark.parametrize("kind", [Ignore, Reject, Retry])
def test_what_a_body_raises_to_end_its_run_keeps_its_frames_and_its_context(
    app: Celery, kind: type[Exception]
) -> None:
    def ends(number: int) -> None:
        try:
            deep(number)
        except KeyError:
            raise kind()  # noqa: B904 - its context is what is looked at

    error = outcome(of_function(ends)(app), 7)
    assert type(error) is kind
    assert frames(error) == ["OURS", "ends"]
    assert isinstance(error.__context__, KeyError)


def unreachable(app: Celery) -> None:
    app.conf.redlock_nodes = ["redis://127.0.0.1:1"]


def unpublished(app: Celery) -> None:
    app.conf.task_serializer = "no such"


def as_ever(app: Celery) -> None: ...


REFUSED: dict[str, tuple[dict[str, Any], type[BaseException], Callable[..., None]]] = {
    "put back": ({}, Ignore, as_ever),
    "skipped": ({"lock_on_conflict": "skip"}, Ignore, as_ever),
    "failed": ({"lock_on_conflict": "fail"}, LockTaken, as_ever),
    "unreachable": ({"lock_on_unreachable": "fail"}, QuorumUnreachable, unreachable),
    "not put back": ({"acks_late": True}, Reject, unpublished),
}


@pytest.mark.parametrize("way", REFUSED)
def test_a_refused_run_carries_neither_traceback_nor_context(
    app: Celery, redlock: Redlock, way: str
) -> None:
    options, kind, come = REFUSED[way]
    come(app)
    task = of_function(fails, lock_key="k", **options)(app)
    with redlock.lock("k"):
        error = outcome(task, 7)
    assert isinstance(error, kind)
    assert frames(error) == ["OURS"]
    assert (error.__cause__, error.__context__) == (None, None)


def test_an_error_in_a_users_callable_is_shown_with_its_own_frames(
    app: Celery, redlock: Redlock
) -> None:
    def decide(contention: Any) -> str:
        raise KeyError(contention.resource)

    task = of_function(fails, lock_key="k", lock_on_conflict=decide)(app)
    with redlock.lock("k"):
        error = outcome(task, 7)
    assert isinstance(error, SettingsError)
    assert frames(error) == ["OURS"]
    assert isinstance(error.__cause__, KeyError)
    assert traceback.extract_tb(error.__cause__.__traceback__)[-1].name == "decide"


@pytest.fixture
def as_in_a_worker() -> Iterator[None]:
    found = trace.ExceptionInfo
    keep_tracebacks()
    yield
    trace.ExceptionInfo = found


def told(task: Any) -> Any:
    """Run a task as a worker's child does; return what its main process would be told."""
    request = {"id": str(uuid.uuid4()), "task": task.name, "hostname": "here"}
    request["delivery_info"] = {"exchange": "", "routing_key": "celery"}
    return build_tracer(task.name, task, app=task.app)(request["id"], (7,), {}, request).retval


def functions(info: Any) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(info.tb)]


@pytest.mark.parametrize("way", ["put back", "skipped", "not put back"])
@pytest.mark.usefixtures("as_in_a_worker")
def test_a_worker_tells_of_each_refused_run_what_billiard_would(
    app: Celery, redlock: Redlock, way: str
) -> None:
    options, _, come = REFUSED[way]
    come(app)
    names = ["one", "one", "other"]
    tasks = {
        name: app.task(
            base=LockedTask, shared=False, name=name, lock_key=name, lock_ttl=60, **options
        )(fails)
        for name in names
    }
    with redlock.lock("one"), redlock.lock("other"):
        infos = [told(tasks[name]) for name in names]
    for info in infos:
        error = info.exception.exc
        plain = ExceptionInfo((type(error), error, error.__traceback__), internal=True)
        assert (info.type, info.internal) == (plain.type, True)
        assert (info.traceback, str(info)) == (plain.traceback, str(plain))
        assert str(info.exception) == str(plain.exception)
        assert functions(info) == functions(plain)[1:] == ["run"]
        back = pickle.loads(pickle.dumps(info))
        assert (type(back.exception), str(back.exception)) == (type(error), str(error))
        assert back.traceback == info.traceback
    texts = [info.traceback.splitlines()[:-1] for info in infos]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("kind", [Ignore, Reject, Retry, ValueError])
@pytest.mark.usefixtures("as_in_a_worker")
def test_a_worker_tells_all_of_what_a_body_raises(app: Celery, kind: type[Exception]) -> None:
    def ends(number: int) -> None:
        raise kind("ended")

    task = app.task(base=LockedTask, shared=False, name="ends", lock_key="k")(ends)
    for _ in range(2):
        assert functions(told(task)) == ["trace_task", "run", "ends"]


@pytest.mark.usefixtures("as_in_a_worker")
def test_a_refused_run_shows_the_frames_of_each_tool_around_it(
    app: Celery, redlock: Redlock
) -> None:
    task = app.task(base=LockedTask, shared=False, name="traced", lock_key="k")(fails)
    inner = task.run

    def watched(*args: Any) -> Any:
        return inner(*args)

    def timed(*args: Any) -> Any:
        return inner(*args)

    with redlock.lock("k"):
        assert functions(told(task)) == ["run"]
        for tool in (watched, timed, watched):
            task.run = tool
            assert functions(told(task)) == [tool.__name__, "run"]


@pytest.mark.usefixtures("as_in_a_worker")
def test_the_tracers_name_is_a_class_for_others(app: Celery, redlock: Redlock) -> None:
    named = trace.ExceptionInfo
    task = app.task(base=LockedTask, shared=False, name="named", lock_key="k")(fails)
    with redlock.lock("k"):
        infos = [told(task) for _ in range(2)]
    given = (KeyError, KeyError("own"), infos[0].exception.exc.__traceback__)

    class Longer(named):  # type: ignore[misc, valid-type]
        length = 1

    infos += [ExceptionInfo(given), named(given, internal=True)]
    longer = Longer(given)
    assert inspect.isclass(named)
    assert issubclass(named, ExceptionInfo)
    assert issubclass(ExceptionInfo, named)
    assert typing.get_type_hints(described) == {"info": named | None, "return": bool}
    assert all(type(info) is ExceptionInfo and isinstance(info, named) for info in infos)
    assert (type(longer), longer.traceback) == (Longer, infos[-1].traceback)
    assert isinstance(longer, named)
    assert not isinstance(infos[0], Longer)
    assert not isinstance(KeyError(), named)


def described(info: trace.ExceptionInfo | None) -> bool:
    return info is not None


@pytest.mark.usefixtures("as_in_a_worker")
def test_what_a_deferral_is_told_by_does_not_grow_with_celerys_tracer(
    app: Celery, redlock: Redlock
) -> None:
    task = app.task(base=LockedTask, shared=False, name="brief", lock_key="k")(fails)
    with redlock.lock("k"):
        infos = [told(task) for _ in range(2)]
    assert all(len(pickle.dumps(info)) < 8_000 for info in infos)  # 32 kB with the tracer's frame
