"""A body that Celery would not wait for: the lock is held until its end, or it is refused."""

from __future__ import annotations

import asyncio
import functools
import gc
import types
import warnings
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import wrapt
from asgiref.sync import async_to_sync
from celery import Celery

from celery_redlock import LockedTask, LockTaken, SettingsError
from tests.conftest import Nodes, is_free, see_freed
from tests.integration.conftest import Stage

began: list[str] = []
looks: list[Callable[[], bool]] = []  # at what is to hold in the middle of a body


@pytest.fixture(autouse=True)
def nothing_began_yet() -> None:
    began.clear()
    looks.clear()


async def settle(order: int) -> bool:
    began.append("settle")
    await asyncio.sleep(0)
    return all(look() for look in looks)


async def stream(order: int) -> AsyncIterator[int]:
    began.append("stream")
    yield order


async def of_instance(self: Any, order: int) -> None:
    began.append("of_instance")


class OfClass(LockedTask):
    name = "of class"
    run = of_instance


class OfCall(LockedTask):
    name = "of call"

    def run(self, order: int) -> None: ...

    async def __call__(self, order: int) -> None: ...


class OfClassMethod(LockedTask):
    name = "of class method"

    @classmethod
    async def run(cls, order: int) -> None: ...


class OfPartialMethod(LockedTask):
    name = "of partial method"
    run = functools.partialmethod(of_instance, order=7)


def of_function(body: Any, **options: Any) -> Callable[[Celery], Any]:
    return lambda app: app.task(base=LockedTask, shared=False, name="settle", **options)(body)


def of_others(app: Celery) -> Any:
    app.conf.redlock_tasks = {"settle": {"key": "order:{order}"}}
    return app.task(shared=False, name="settle")(settle)


DECLARED = {
    "function": of_function(settle),
    "bound function": of_function(of_instance, bind=True),
    "generator": of_function(stream),
    **{cls.name: lambda app, cls=cls: app.register_task(cls())
       for cls in (OfClass, OfCall, OfClassMethod, OfPartialMethod)},
    "of others": of_others,
}  # fmt: skip


@pytest.mark.parametrize("way", DECLARED)
def test_an_async_def_is_refused_when_the_app_finalizes_and_at_each_later_use(
    app: Celery, way: str
) -> None:
    words = "async def: .* async_to_sync"

    def finalize() -> None:
        DECLARED[way](app)  # a class is bound at once
        app.finalize()

    with pytest.raises(SettingsError, match=words):
        finalize()
    for task in app.tasks.values():
        if isinstance(task, LockedTask):
            with pytest.raises(SettingsError, match=words):
                task.delay(7)
            assert isinstance(task.apply((7,)).result, SettingsError)
    assert began == []


def test_an_async_def_without_a_lock_is_none_of_our_business(app: Celery) -> None:
    task = of_function(settle, lock_key=False)(app)
    assert asyncio.run(task.apply((7,)).result) is True


def passing_on(body: Any) -> Any:
    """Decorate a body as one does who never heard of coroutines."""

    @functools.wraps(body)
    def call(*args: Any, **kwargs: Any) -> Any:
        return body(*args, **kwargs)

    return call


@types.coroutine
def of_old(order: int) -> Any:
    began.append("of_old")
    yield


class Awaitable:
    """What can be awaited and is no coroutine."""

    def __init__(self, order: int) -> None:
        self.order = order

    def __await__(self) -> Any:
        yield from settle(self.order).__await__()


def to_be_settled(order: int) -> Any:
    return settle(order)


def to_be_awaited(order: int) -> Any:
    return Awaitable(order)


RETURNED = {
    "decorated": passing_on(settle), "plain": to_be_settled,
    "decorated generator": passing_on(stream), "of old": of_old, "awaitable": to_be_awaited,
}  # fmt: skip


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("way", RETURNED)
def test_a_body_that_returns_what_is_to_be_awaited_fails_and_leaves_no_warning(
    app: Celery, nodes: Nodes, way: str
) -> None:
    task = of_function(RETURNED[way], lock_key="order")(app)
    see_refused(task.apply, nodes)


@pytest.mark.usefixtures("small_heap")
def test_an_async_def_for_which_a_call_asks_for_a_lock_fails(app: Celery, nodes: Nodes) -> None:
    task = of_function(settle, lock_key=False)(app)
    see_refused(functools.partial(task.apply, lock={"key": "order"}), nodes)


def see_refused(apply: Callable[..., Any], nodes: Nodes) -> None:
    """See that a run ends with the way out, having done nothing, and that its lock is free."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = apply((7,)).result
        assert isinstance(error, SettingsError)
        assert "async_to_sync" in str(error)
        del error
        gc.collect()
    assert not [str(warning.message) for warning in caught if "awaited" in str(warning.message)]
    assert began == []
    see_freed(nodes, "order")


def running(body: Any) -> Any:
    @functools.wraps(body)
    def call(*args: Any, **kwargs: Any) -> Any:
        return asyncio.run(body(*args, **kwargs))

    return call


@wrapt.decorator
def running_by_wrapt(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return asyncio.run(wrapped(*args, **kwargs))


def with_django(body: Any) -> Any:
    """Wrap a coroutine function by asgiref, in what Celery takes for a function."""
    return functools.wraps(body)(async_to_sync(body))


class OfDjango(LockedTask):
    name = "settle"

    @async_to_sync
    async def run(self, order: int) -> bool:
        return await settle(order)


SYNCHRONOUS = {
    **{made.__name__: lambda app, lock, made=made: of_function(made(settle), **lock)(app)
       for made in (running, running_by_wrapt, with_django)},
    "class": lambda app, lock: app.register_task(type("Of", (OfDjango,), lock)()),
}  # fmt: skip


@pytest.mark.parametrize("way", SYNCHRONOUS)
@pytest.mark.parametrize(
    "lock",
    [{"lock_key": "orders"}, {"lock_key": "order:{order}"}, {"lock_args": ["order"]}],
    ids=str,
)
def test_a_coroutine_that_is_run_to_its_end_has_its_lock_until_then(
    app: Celery, nodes: Nodes, way: str, lock: dict[str, Any]
) -> None:
    task = SYNCHRONOUS[way](app, lock)
    resource = task.lock_for(7).resource
    assert (resource == task.lock_for(8).resource) == (lock == {"lock_key": "orders"})
    looks.append(lambda: not is_free(nodes, resource))
    assert task.apply((7,)).get() is True
    assert task.apply((), {"order": 7}).get() is True


def test_a_coroutine_in_a_body_takes_other_locks_and_not_the_runs_own(
    app: Celery, nodes: Nodes
) -> None:
    async def settle_both(order: int) -> bool:
        async with task.lock_for(order + 1) as other:
            assert other.held
            assert not is_free(nodes, other.resource)
        with pytest.raises(LockTaken):
            await task.lock_for(order).acquire_async()
        return not is_free(nodes, task.lock_for(order).resource)

    task = of_function(running(settle_both), lock_key="order:{order}")(app)
    assert task.apply((7,)).get() is True
    for order in (7, 8):
        see_freed(nodes, f"order:{order}")


@pytest.mark.skipif(find_spec("celery_aio_pool") is None, reason="needs celery-aio-pool")
def test_a_pool_that_calls_bodies_apart_from_their_runs_takes_no_locked_task(stage: Stage) -> None:
    worker = {**stage.env, "CELERY_CUSTOM_WORKER_POOL": "celery_aio_pool.pool:AsyncIOPool"}
    replace(stage, env=worker).worker(pool="custom", concurrency=1)
    with pytest.raises(SettingsError, match="prefork"):
        stage.tasks.late.delay("k").get(timeout=60)
    assert not stage.lines("begin")
    stage.tasks.note.delay("free").get(timeout=60)
    assert [line.key for line in stage.lines("noted")] == ["free"]
