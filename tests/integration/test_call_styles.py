"""However a task is written and called: locked where it is a run, plain where it is a call."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import wrapt
from celery import Celery, Task, xmap
from celery.app import trace
from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from kombu import Queue
from kombu.common import Broadcast

from celery_redlock import (
    Backoff,
    LockedTask,
    LockLost,
    LockTaken,
    Redlock,
    RedlockError,
    SettingsError,
    current_lock,
)
from celery_redlock.errors import NoRunError
from celery_redlock.tasks.delivery.delivery import SEEN, Delivery
from celery_redlock.tasks.delivery.route import Route, queue_of
from celery_redlock.testing import locking_off
from tests import fork_server
from tests.conftest import PATIENCE, Nodes, see_freed
from tests.integration.conftest import ROOT, STANDING, Stage, overlaps

WORKER = STANDING


@pytest.fixture
def app(app: Celery) -> Celery:
    app.conf.task_queues = [Queue("celery"), Queue("slow")]
    return app


@pytest.mark.parametrize("name", ["rude", "polite", "class_task"])
def test_a_users_own_hooks_without_super_cannot_switch_the_lock_off(
    stage: Stage, key: str, name: str
) -> None:
    task = getattr(stage.tasks, name)
    results = [task.delay(key) for _ in range(6)]
    assert [result.get(timeout=120) for result in results] == [0] * 6
    assert len(stage.intervals()[key]) == 6
    assert not overlaps(stage.intervals()[key])
    stage.see_freed(f"k:{key}")
    if name != "class_task":
        assert len(stage.lines("called")) == 6, "the user's __call__ ran for deferrals too"


def test_a_direct_call_takes_no_lock(app: Celery, nodes: Nodes) -> None:
    @app.task(bind=True, base=LockedTask, shared=False)
    def settle(self: Any, order: int) -> tuple[bool, bool]:
        return hasattr(self, "lock"), current_lock() is None

    with settle.lock_for(7):
        assert settle(7) == (False, True)
        assert settle.run(7) == (False, True)


def test_a_body_that_is_called_directly_and_wants_its_lock_is_told_why_there_is_none(
    app: Celery,
) -> None:
    @app.task(bind=True, base=LockedTask, shared=False, name="shop.take")
    def take(self: Any, sku: str) -> None:
        self.lock.ensure()

    with pytest.raises(RedlockError, match=r"shop\.take .*direct call .*takes no lock") as caught:
        take("42")
    for hint in ("apply()", "celery_redlock.testing", "locking_off", "lock_for"):
        assert hint in str(caught.value)
    with locking_off():
        take.apply(("42",)).get()


def test_the_lock_of_an_eager_run_is_held_in_its_hooks(app: Celery) -> None:
    seen: list[Any] = []

    class Told(LockedTask):
        name = "told"

        def run(self, fails: bool) -> None:
            seen.append(self.lock)
            if fails:
                raise ValueError

        def see(self, *args: Any) -> None:
            seen.append(self.lock)
            seen.append((self.lock.held, current_lock() is self.lock))

        on_success = on_failure = after_return = see

    task = app.register_task(Told())
    for fails in (False, True):
        seen.clear()
        task.apply((fails,))
        lock, *rest = seen
        assert rest == [lock, (True, True)] * 2
        assert not lock.held
        with pytest.raises(LockLost, match="it was released"):
            lock.ensure()
    with pytest.raises(RedlockError, match="told has no lock here"):
        _ = task.lock


@pytest.mark.parametrize("option", [{"lock_limit": 2}, {"lock_rate": "9/h"}], ids=str)
def test_a_link_of_an_eager_run_may_need_the_lock_of_its_parent(
    app: Celery, option: dict[str, Any]
) -> None:
    seen: list[bool] = []

    @app.task(base=LockedTask, lock_key="k", lock_on_conflict="fail", shared=False, **option)
    def link(*args: Any) -> None:
        lock = current_lock()
        seen.append(lock is not None and lock.held)

    @app.task(base=LockedTask, lock_key="k", shared=False)
    def parent(result: Any = None) -> None: ...

    app.conf.task_always_eager = True
    result = parent.apply_async(link=link.s())
    assert result.successful()
    assert seen == [True]


@pytest.mark.parametrize(
    ("of_parent", "of_link", "hint"),
    [
        ({}, {"lock_fencing": True}, "without a fencing token: take the outer one with fencing"),
        ({"lock_limit": 3}, {}, "as one of 3 permits"),
    ],
    ids=["fencing", "permits"],
)
def test_a_link_of_an_eager_run_that_its_parents_lock_does_not_cover_is_told_of_the_parent(
    app: Celery, of_parent: dict[str, Any], of_link: dict[str, Any], hint: str
) -> None:
    """A worker runs it: the parent has released by then. In eager mode its hooks are to come."""
    ends: list[Any] = []

    class Told(LockedTask):
        abstract = True

        def after_return(self, state: str, retval: Any, *_: Any) -> None:
            ends.append((self.name, state, str(retval) if state == "FAILURE" else self.lock.held))

    @app.task(base=Told, name="link", lock_key="k", shared=False, **of_link)
    def link(*args: Any) -> bool:
        lock = current_lock()
        return lock is not None and lock.held

    @app.task(base=Told, name="parent", lock_key="k", shared=False, **of_parent)
    def parent(result: Any = None) -> None: ...

    result = parent.apply_async(link=link.s())
    (refused, state, text), *rest = ends
    assert (refused, state, rest) == ("link", "FAILURE", [("parent", "SUCCESS", True)])
    assert f"'k' is held here by parent[{result.id}]" in text
    assert hint in text
    ends.clear()
    parent.apply_async(link=link.s(), lock={"fencing": True, "limit": 1})
    assert ends == [("link", "SUCCESS", True), ("parent", "SUCCESS", True)]


def test_the_lock_of_a_run_without_a_quorum_is_there_and_not_held(app: Celery) -> None:
    @app.task(bind=True, base=LockedTask, lock_on_unreachable="run", shared=False)
    def settle(self: Any) -> tuple[bool, bool, str]:
        with pytest.raises(LockLost) as caught:
            self.lock.ensure()
        return self.lock.held, self.lock is current_lock(), str(caught.value)

    app.conf.update(redlock_nodes=["redis://127.0.0.1:1"], redlock_node_timeout=0.2)
    held, is_current, text = settle.apply().get()
    assert (held, is_current) == (False, True)
    assert "on_unreachable='run'" in text


def test_a_hook_outside_its_run_is_told_why_there_is_no_lock(app: Celery) -> None:
    """As in a worker's main process, which calls hooks of a run that its time limit has ended."""
    texts: list[str] = []

    class Noted(LockedTask):
        abstract = True

        def on_failure(self, *args: Any) -> None:
            with pytest.raises(RedlockError, match="has no lock here") as caught:
                self.lock  # noqa: B018
            texts.append(str(caught.value))

    @app.task(base=Noted, shared=False)
    def settle() -> None: ...

    for _ in range(2):
        settle.on_failure(ValueError(), "id", (), {}, None)
    assert all("hard time limit" in one and "direct call" not in one for one in texts)
    with pytest.raises(RedlockError, match="direct call"):
        settle.lock  # noqa: B018
    error = NoRunError("t", in_hook=True)
    assert "hard time limit" in str(pickle.loads(pickle.dumps(error)))
    assert "hard time limit" in str(NoRunError(*error.args)), "as a result in JSON gives it"


def test_a_run_that_takes_no_lock_is_told_why_there_is_none(app: Celery) -> None:
    class Plain(LockedTask):
        name = "plain"
        abstract = True

        def before_start(self, *args: Any) -> None:
            assert not hasattr(self, "lock")

        def run(self, order: int) -> bool:
            assert current_lock() is None
            return hasattr(self, "lock")

    class WithoutKey(Plain):
        lock_key = False

    class GivesNone(Plain):
        name = "none"
        lock_key = staticmethod(lambda task, args, kwargs: None)

    for task in (WithoutKey(), GivesNone()):
        assert app.register_task(task).apply((7,)).get() is False

    @app.task(bind=True, base=LockedTask, lock_key=False, shared=False, name="shop.take")
    def take(self: Any) -> None:
        self.lock.ensure()

    with pytest.raises(RedlockError, match=r"shop\.take has no lock here: .*lock_key is False"):
        take.apply(throw=True)


def test_whoever_walks_the_attributes_of_a_task_meets_no_error(app: Celery) -> None:
    @app.task(bind=True, base=LockedTask, shared=False)
    def take(self: Any, sku: str) -> None: ...

    task = app.tasks[take.name]
    assert "lock" in dir(task)
    assert "lock" not in dict(inspect.getmembers(task))
    assert mock.create_autospec(task).delay("42") is not None


def test_an_eager_run_locks_and_lets_go(app: Celery, nodes: Nodes) -> None:
    @app.task(bind=True, base=LockedTask, lock_key="order:{order}", shared=False)
    def settle(self: Any, order: int) -> tuple[bool, bool]:
        return self.lock.held, self.lock is current_lock()

    assert settle.delay(7).get() == (True, True)
    assert settle.apply((7,)).get() == (True, True)
    see_freed(nodes, "order:7")


def test_an_eager_run_of_a_held_resource_waits_and_then_fails_with_lock_taken(
    app: Celery, redlock: Redlock
) -> None:
    @app.task(base=LockedTask, lock_wait=0.2, shared=False)
    def settle(order: int) -> None: ...

    with redlock.lock(settle.lock_for(7).resource):
        result = settle.apply((7,))
        assert result.state == "FAILURE"
        assert isinstance(result.result, LockTaken)
        assert result.result.waited >= 0
        with pytest.raises(LockTaken):
            settle.apply((7,), throw=True)


def test_an_eager_call_takes_the_options_of_the_call(app: Celery) -> None:
    @app.task(base=LockedTask, shared=False)
    def resource(order: int) -> str:
        lock = current_lock()
        assert lock is not None
        return f"{lock.resource} {lock.ttl}"

    assert resource.apply_async((7,), lock={"key": "o:{order}", "ttl": 29}).get() == "o:7 29.0"
    for call in (resource.apply_async, resource.apply, resource.s(7).set(lock_ttl=29).apply_async):
        with pytest.raises(SettingsError, match=r'lock_ttl=29.*lock=\{"ttl": \.\.\.\}'):
            call((7,), lock_ttl=29)


def test_a_lock_inside_another_tasks_body_is_that_tasks_own(app: Celery) -> None:
    @app.task(base=LockedTask, shared=False)
    def inner() -> str:
        lock = current_lock()
        assert lock is not None
        return lock.resource

    @app.task(bind=True, base=LockedTask, shared=False)
    def outer(self: Any) -> tuple[str, str, bool]:
        return self.lock.resource.split(":")[0], inner.apply().get(), self.lock.held

    own, others, held = outer.apply().get()
    assert own == outer.name
    assert others.startswith(inner.name)
    assert held


class CallsTheTask:
    """A proxy whose `run` calls the task itself, as that of an agent which traces tasks."""

    def __init__(self, task: Any, times: int) -> None:
        self.__dict__.update(inner=task, times=times)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        kind: type = self.inner.__class__  # also of a lazy task
        return kind

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if self.times > 1:
            with pushed(self.inner):
                return self.inner(*args, **kwargs)
        return self.inner(*args, **kwargs)

    __call__ = run


@contextlib.contextmanager
def pushed(task: Any) -> Iterator[None]:
    task.push_request()
    try:
        yield
    finally:
        task.pop_request()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_lock_is_released_if_a_tool_calls_the_task_in_the_place_of_its_run(
    app: Celery, nodes: Nodes, late: bool, fails: bool, times: int
) -> None:
    held: list[Any] = []

    class Hooked(LockedTask):
        abstract = True

        def after_return(self, *args: Any) -> None:
            held.append(self.lock.held)

    @app.task(base=Hooked, lock_key="k", acks_late=late, bind=True, shared=False)
    def take(self: Any) -> None:
        held.append(self.lock.held)
        if fails:
            raise ValueError

    where = {"delivery_info": {"exchange": "", "routing_key": "celery"}}
    for number in range(2):
        request = {"id": f"id-{number}", "task": take.name, **where}
        tracer = trace.build_tracer(take.name, CallsTheTask(take, times), app=app)
        tracer(f"id-{number}", (), {}, request)
        see_freed(nodes, "k")
    assert held == [True, True] * 2


def raising(error: type[BaseException]) -> Callable[[Any], object]:
    def end(task: Any) -> object:
        raise error

    return end


def succeed(task: Any) -> None: ...


# by how the body ends: the hooks that Celery calls then
ENDS: dict[str, tuple[Callable[[Any], object], list[str]]] = {
    "a result": (succeed, ["on_success", "after_return"]),
    "an error": (raising(ValueError), ["on_failure", "after_return"]),
    "a soft time limit": (raising(SoftTimeLimitExceeded), ["on_failure", "after_return"]),
    "a retry": (raising(Retry), ["on_retry"]),
    "Ignore": (raising(Ignore), []),
    "Reject": (raising(Reject), []),
    "an exit": (raising(SystemExit), []),
    "no memory": (raising(MemoryError), ["on_failure", "after_return"]),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("fails_in", [None, ValueError, SystemExit])
@pytest.mark.parametrize("how", ENDS)
def test_a_lock_is_held_in_the_hooks_and_released_after_them(
    app: Celery, nodes: Nodes, how: str, fails_in: type[BaseException] | None, late: bool
) -> None:
    end, hooks = ENDS[how]
    held: list[tuple[str, bool]] = []

    def hook(name: str) -> Callable[..., None]:
        def call(self: Any, *args: Any) -> None:
            held.append((name, self.lock.held and current_lock() is self.lock))
            if fails_in is not None:
                raise fails_in

        return call

    names = "on_success", "on_failure", "on_retry", "after_return"
    hooked = type("Hooked", (LockedTask,), {"abstract": True, **{n: hook(n) for n in names}})
    options = {"base": hooked, "lock_key": "k", "acks_late": late, "shared": False}
    task = app.task(bind=True, name="hooked", **options)(end)
    request = {"id": "id", "task": task.name, "delivery_info": {"routing_key": "celery"}}
    with contextlib.suppress(BaseException):
        trace.build_tracer(task.name, task, app=app)("id", (), {}, request)
    called = [name for name, _ in held]
    # what Celery calls after a hook that fails differs between its versions
    assert called == (hooks if fails_in is None else hooks[: len(called) or 1])
    assert all(is_held for _, is_held in held)
    see_freed(nodes, "k")


def test_super_run_locks_once(app: Celery) -> None:
    class First(LockedTask):
        name = "first"

        def run(self) -> str:
            return self.lock.resource

    class Second(First):
        name = "second"

        def run(self) -> str:
            return super().run()

    app.register_task(First())
    second = app.register_task(Second())
    assert second.apply().get().startswith("second:")


def test_annotations_cannot_throw_the_gate_away(app: Celery) -> None:
    def around(run: Any) -> Any:
        return lambda *args, **kwargs: run(*args, **kwargs)

    app.conf.task_annotations = {"annotated": {"@run": around}}

    @app.task(base=LockedTask, name="annotated", shared=False)
    def annotated() -> bool:
        return current_lock() is not None

    assert annotated.apply().get()


def test_wraps_cannot_make_a_body_pass_for_a_gate(app: Celery) -> None:
    class First(LockedTask):
        name = "first"

        def run(self) -> bool:
            return self.lock is not None

    class Second(First):
        name = "second"

        @functools.wraps(First.run)
        def run(self) -> bool:
            return self.lock is not None

    app.register_task(First())
    assert app.register_task(Second()).apply().get()


def test_a_decorator_that_adds_an_argument_does_not_shift_the_key(app: Celery) -> None:
    def with_session(body: Any) -> Any:
        @functools.wraps(body)
        def inner(sku: str, qty: int = 1) -> Any:
            return body("session", sku, qty)

        return inner

    @app.task(base=LockedTask, lock_key="stock:{sku}", shared=False)
    @with_session
    def take(session: str, sku: str, qty: int = 1) -> str:
        lock = current_lock()
        assert lock is not None
        return lock.resource

    assert take.apply(("sku-7", 2)).get() == "stock:sku-7"


@wrapt.decorator
def noting_the_instance(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return on which object the body was called, and what it returned."""
    return instance, wrapped(*args, **kwargs)


class Held:
    """A callable that no class binds."""

    def __call__(self, sku: str, qty: int = 1) -> Any:
        return resource_held()


class Chosen:
    """A descriptor that looks at its task before it says what runs."""

    def __get__(self, task: Any, owner: Any) -> Any:
        prefix = task.prefix

        def run(sku: str, qty: int = 1) -> tuple[str, Any]:
            return prefix, resource_held()

        return run


def resource_held() -> str:
    lock = current_lock()
    assert lock is not None
    return lock.resource


def passing(body: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(body)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return body(*args, **kwargs)

    return inner


def of_class(cls: Any, sku: str, qty: int = 1) -> tuple[Any, str]:
    return cls, resource_held()


def of_unit(self: Any, unit: str, sku: str, qty: int = 1) -> tuple[Any, str, str]:
    return self, unit, resource_held()


def of_colour(self: Any, sku: str, qty: int = 1, *, colour: str) -> tuple[Any, str, str]:
    return self, colour, resource_held()


def of_nobody(sku: str, qty: int = 1) -> str:
    return resource_held()


STYLES: dict[str, tuple[Any, Callable[[Any, str], object]]] = {  # and what a run returns
    "class method": (classmethod(of_class), lambda task, key: (type(task), key)),
    "partial method": (
        functools.partialmethod(of_unit, "box"), lambda task, key: (task, "box", key)
    ),
    "partial method by name": (
        functools.partialmethod(of_colour, colour="red"), lambda task, key: (task, "red", key)
    ),
    "static method": (staticmethod(of_nobody), lambda task, key: key),
    "wrapt": (
        noting_the_instance(lambda self, sku, qty=1: resource_held()),
        lambda task, key: (task, key),
    ),
    "wrapt around a static method": (
        noting_the_instance(staticmethod(of_nobody)), lambda task, key: (None, key)
    ),
    "wrapt around a class method": (
        noting_the_instance(classmethod(of_class)),
        lambda task, key: (type(task), (type(task), key)),
    ),
    "static method around wrapt": (
        staticmethod(noting_the_instance(of_nobody)), lambda task, key: (None, key)
    ),
    "object": (Held(), lambda task, key: key),
    "descriptor": (Chosen(), lambda task, key: ("p", key)),
    "property": (
        property(lambda self: functools.partial(of_unit, self, self.prefix)),
        lambda task, key: (task, "p", key),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "lock", [{}, {"lock_args": ["sku"]}, {"lock_key": "stock:{sku}:{qty}"}], ids=str
)
@pytest.mark.parametrize("style", STYLES)
def test_a_body_of_any_kind_is_bound_as_python_binds_it_and_makes_the_key(
    app: Celery, style: str, lock: dict[str, Any]
) -> None:
    body, returned = STYLES[style]
    members = {"name": "taken", "run": body, "prefix": "p", **lock}
    task = app.register_task(type("Taken", (LockedTask,), members)())
    key, another = task.lock_for("s").resource, task.lock_for("t", 1).resource
    assert key != another
    assert (key == "stock:s:1") == ("lock_key" in lock)
    assert task.apply(("s",)).get() == returned(task, key)
    assert task.apply((), {"qty": 1, "sku": "s"}).get() == returned(task, key)
    with pytest.raises(SettingsError, match="do not fit"):
        task.lock_for("s", 1, "more")


@pytest.mark.parametrize("form", ["{0}, sku", "sku, *, {0}", "sku, {0}=None", "sku, **{0}"])
@pytest.mark.parametrize("name", ["self", "task", "args"])
@pytest.mark.parametrize("decorate", [lambda body: body, passing])
def test_a_parameter_may_have_any_name_without_bind(
    app: Celery, name: str, form: str, decorate: Any
) -> None:
    made: dict[str, Any] = {"held": resource_held}
    exec(f"def take({form.format(name)}): return held()", made)
    task = app.task(base=LockedTask, lock_key="stock:{sku}", shared=False)(decorate(made["take"]))
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((), {"sku": "s", name: 1})]
    if form == "{0}, sku":
        calls.append((((1, "s")), {}))
    for args, kwargs in calls:
        for _ in range(2):  # the second one is not compared any more
            assert task.apply(args, kwargs).get() == "stock:s"
        assert task.lock_for(*args, **kwargs).resource == "stock:s"


def test_a_missing_argument_called_self_names_the_option_that_gives_it(app: Celery) -> None:
    def take(self: Any, sku: str) -> None: ...

    task = app.task(base=LockedTask, lock_key="stock:{sku}", shared=False, typing=False)(take)
    with pytest.raises(TypeError, match=r"take\(self, sku\).*bind=True"):
        task.apply(("s",)).get()


@pytest.mark.parametrize("retried", [{}, {"autoretry_for": (Exception,)}])
@pytest.mark.parametrize(("args", "kwargs"), [((5,), {}), ((5,), {"y": 1, "wrong": 2})])
def test_arguments_that_do_not_fit_are_a_type_error_as_in_celery(
    app: Celery, retried: Any, args: Any, kwargs: Any
) -> None:
    @app.task(base=LockedTask, typing=False, shared=False, name="add", **retried)
    def add(x: int, y: int) -> None: ...

    @app.task(base=LockedTask, shared=False, name="once", lock_unique_for=60)
    def once(x: int, y: int) -> None: ...

    with pytest.raises(TypeError, match=r"add\(x, y\)"):
        add.delay(*args, **kwargs).get()
    app.conf.task_always_eager = False
    with pytest.raises(TypeError, match=r"once\(\) (missing|got an unexpected)"):
        once.delay(*args, **kwargs)
    with pytest.raises(TypeError):
        add.lock_for(*args, **kwargs)


def test_a_class_that_is_two_tasks_has_two_keys(app: Celery) -> None:
    class Named(LockedTask):
        def __init__(self, colour: str) -> None:
            self.name, self.lock_key = f"named.{colour}", f"{colour}:{{x}}"

        def run(self, x: int) -> str:
            assert self.lock is not None
            return self.lock.resource

    red, blue = (app.register_task(Named(colour)) for colour in ("red", "blue"))
    assert (red.apply((1,)).get(), blue.apply((1,)).get()) == ("red:1", "blue:1")


@pytest.mark.usefixtures("small_heap")
def test_a_class_that_outlives_its_apps_has_the_settings_of_the_present_one() -> None:
    class Lasting(LockedTask):
        name = "lasting"

        def run(self) -> None: ...

    for ttl in range(10, 30):
        app = Celery("brief", broker="memory://", set_as_current=False)
        app.conf.update(redlock_nodes=["redis://nowhere"], redlock_ttl=ttl)
        assert app.register_task(Lasting()).lock_options()["ttl"].value == ttl
        app.close()
        del app
        gc.collect()  # the next one may get its id


def test_a_subclass_of_a_registered_task_keeps_its_started(app: Celery) -> None:
    class First(LockedTask):
        name = "first"
        track_started = True

        def run(self) -> None: ...

    app.register_task(First())

    class Second(First):
        name = "second"

    second = app.register_task(Second())
    assert type(second)._redlock_track_started is True
    assert second.track_started is False  # the gate stores it, once the lock is held


def test_a_retry_with_headers_of_its_own_keeps_the_calls_options(app: Celery) -> None:
    @app.task(base=LockedTask, shared=False)
    def settle(order: int) -> None: ...

    app.finalize()
    carried = {"options": {"ttl": 9}, "id": "1"}
    request = Context({"id": "1", "redlock": carried, "delivery_info": {}}, args=(7,), kwargs={})
    again = app.tasks[settle.name].signature_from_request(request, headers={"x": "y"})
    assert again.options["headers"] == {"x": "y", "redlock": carried}


def test_a_retry_keeps_the_calls_options_beside_a_header_called_headers(app: Celery) -> None:
    @app.task(base=LockedTask, shared=False)
    def settle(order: int) -> None: ...

    carried = {"options": {"ttl": 9}, "id": "1"}
    message = {"id": "1", "retries": 0, "redlock": carried, "x-own": "v", "headers": {"b": 2}}
    request = Context({**message, "properties": {SEEN: {"nested": True}}})
    again = app.tasks[settle.name].signature_from_request(request)
    assert again.options["headers"] == {"redlock": carried, "x-own": "v", "headers": {"b": 2}}


def test_an_eager_run_follows_the_tasks_own_routing(app: Celery) -> None:
    @app.task(base=LockedTask, lock_key="{queue}:{order}", shared=False)
    def settle(order: int) -> str:
        lock = current_lock()
        assert lock is not None
        return lock.resource

    app.conf.task_routes = {settle.name: {"queue": "slow"}}
    assert settle.apply((7,)).get() == settle.lock_for(7).resource == "slow:7"


def test_a_message_that_rabbitmq_kept_back_is_still_of_its_queue(app: Celery) -> None:
    assert queue_of(app, Route(None, "slow"), {}) == "slow"
    assert queue_of(app, Route("elsewhere", "slow"), {}) == "slow"


def test_a_message_of_a_fan_out_is_not_put_back(app: Celery) -> None:
    @app.task(base=LockedTask, shared=False)
    def settle() -> None: ...

    app.conf.task_queues = [Queue("celery"), Broadcast("all")]
    task = settle._get_current_object()
    for exchange, back in (("celery", True), ("all", False)):
        delivery = {"exchange": exchange, "routing_key": exchange}
        assert Delivery(task, Context({"delivery_info": delivery})).can_republish is back


CONNECTS_FIRST = """
import sys
from celery import Celery
from celery.signals import task_postrun

seen = []

@task_postrun.connect
def note(sender, **_):
    seen.append(lock.held)
    raise SystemExit

from celery_redlock import LockedTask, current_lock

app = Celery("first", broker="memory://", backend="cache+memory://")
app.conf.update(redlock_nodes=sys.argv[1:], redlock_node_timeout=7)

@app.task(base=LockedTask, acks_late=True)
def take():
    global lock
    lock = current_lock()
    seen.append(lock.held)

from celery.app.trace import build_tracer

try:
    build_tracer(take.name, take, app=app)("id", (), {}, {"id": "id", "delivery_info": {}})
except SystemExit:
    pass
print(seen)
"""


def test_the_lock_is_released_before_any_receiver_of_a_users_own(nodes: Nodes) -> None:
    command = [sys.executable, "-c", CONNECTS_FIRST, *(node.url for node in nodes)]
    done = fork_server.run(command, check=True, cwd=ROOT)
    assert done.stdout.split("\n")[0] == "[True, False]"


def test_app_task_as_base_leaves_celerys_own_tasks_alone(nodes: Nodes) -> None:
    app = Celery("base", broker="memory://", task_cls=LockedTask, set_as_default=False)
    app.conf.redlock_nodes = [node.url for node in nodes]
    app.conf.redlock_node_timeout = PATIENCE

    @app.task(shared=False)
    def mine() -> bool:
        return current_lock() is not None

    app.finalize()
    assert isinstance(app.tasks["celery.chord_unlock"], LockedTask)
    assert mine.apply().get()
    assert app.tasks["celery.backend_cleanup"].apply(throw=True).get() is None


def test_map_starmap_and_chunks_are_refused_with_the_hint(app: Celery) -> None:
    @app.task(base=LockedTask, shared=False)
    def settle(order: int) -> None: ...

    for refused in (
        lambda: settle.map([1]),
        lambda: settle.starmap([(1,)]),
        lambda: settle.chunks([(1,)], 1),
    ):
        with pytest.raises(RedlockError, match="group"):
            refused()


def test_a_map_made_past_the_task_is_refused_when_it_runs(app: Celery) -> None:
    @app.task(base=LockedTask, shared=False)
    def settle(order: int) -> int:
        return order

    app.finalize()
    call = xmap(settle.s(), [1, 2], app=app)
    with pytest.raises(RedlockError, match="group"):
        app.tasks["celery.map"].apply(kwargs=call.kwargs, throw=True)


def test_lock_for_is_the_lock_that_the_run_takes(app: Celery) -> None:
    @app.task(base=LockedTask, lock_key="{queue}:{order}", lock_ttl=29, shared=False)
    def settle(order: int, wait: int = 3) -> None: ...

    app.conf.task_routes = {settle.name: {"queue": "slow"}}
    lock = settle.lock_for(7, wait=5)
    assert (lock.resource, lock.ttl) == ("slow:7", 29.0)


def test_lock_for_waits_as_it_is_told(app: Celery, redlock: Redlock) -> None:
    @app.task(base=LockedTask, shared=False)
    def settle(order: int) -> None: ...

    held = redlock.lock(settle.lock_for(7).resource)
    with held, pytest.raises(LockTaken) as caught, settle.lock_for(7, wait=0.2):
        pass
    assert caught.value.waited >= 0.2


def test_a_key_of_false_takes_no_lock(app: Celery, nodes: Nodes) -> None:
    @app.task(base=LockedTask, lock_key=False, shared=False)
    def free() -> bool:
        return current_lock() is None

    assert free.apply().get()
    with pytest.raises(RedlockError, match="takes no lock"):
        free.lock_for()


def test_a_users_mixed_in_run_is_gated(app: Celery) -> None:
    class Body:
        def run(self) -> bool:
            return current_lock() is not None

    class Mixed(Body, LockedTask):
        name = "mixed"

    assert app.register_task(Mixed()).apply().get()


class TestDeclarationsThatCannotBeMeant:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"lock_tll": 3}, "did you mean 'lock_ttl'"),
            ({"lock_ttl": "3"}, "number of seconds"),
            ({"lock_ttl": 0.5}, "4 x node_timeout"),
            ({"lock_key": "{skuu}"}, "no argument 'skuu'; did you mean 'sku'"),
            ({"lock_unique_for": 60, "lock_key": False}, "name a key"),
            ({"lock_limit": 3, "lock_fencing": True}, "limit=1, or no fencing"),
            ({"lock_limit": 3, "lock_key": ["a:{sku}", "b:{sku}"]}, "to one resource"),
        ],
    )
    def test_they_raise_when_the_app_finalizes_and_at_each_later_use(
        self, nodes: Nodes, options: dict[str, Any], words: str
    ) -> None:
        app = Celery("wrong", broker="memory://", set_as_default=False)
        app.conf.redlock_nodes = [node.url for node in nodes]

        @app.task(base=LockedTask, shared=False, name="shop.take", **options)
        def take(sku: str) -> None: ...

        with pytest.raises(SettingsError, match=words) as caught:
            app.finalize()
        assert caught.value.level == "task 'shop.take'"
        task = app.tasks["shop.take"]
        for use in (task.delay, task.lock_for):
            with pytest.raises(SettingsError, match=words):
                use("s")
        result = task.apply(("s",))
        assert isinstance(result.result, SettingsError)

    @pytest.mark.parametrize(
        ("conf", "words"),
        [
            ({"redlock_nodes": ["http://:s3cret@a"]}, "starts with one of redis://"),
            ({"redlock_nodes": ["redis://a", "redis://A:6379"]}, "one vote counted twice"),
            ({"redlock_nods": []}, "did you mean 'redlock_nodes'"),
        ],
    )
    def test_wrong_settings_raise_when_the_app_finalizes_and_at_each_later_use(
        self, conf: dict[str, Any], words: str
    ) -> None:
        app = Celery("wrong", broker="redis://", set_as_default=False)
        app.conf.update(conf)

        @app.task(base=LockedTask, shared=False, name="shop.take")
        def take(sku: str) -> None: ...

        with pytest.raises(SettingsError, match=words) as caught:
            app.finalize()
        assert "s3cret" not in str(caught.value)
        for _ in range(2):
            with pytest.raises(SettingsError, match=words):
                take.delay("s")

    def test_names_with_a_namespace_are_known_too(self) -> None:
        app = Celery("named", broker="redis://", set_as_default=False)
        conf = {"CELERY_REDLOCK_TTL": 9, "CELERY_REDLOCK_TLL": 9}
        app.config_from_object(conf, namespace="CELERY")

        @app.task(base=LockedTask, shared=False)
        def settle() -> None: ...

        with pytest.raises(SettingsError, match="CELERY_REDLOCK_TLL"):
            app.finalize()

    def test_an_app_without_locked_tasks_is_not_asked_for_nodes(self) -> None:
        app = Celery("plain", broker="memory://", set_as_default=False)

        @app.task(shared=False)
        def plain() -> int:
            return 1

        app.finalize()
        assert plain.apply().get() == 1

    def test_a_wrong_option_of_a_call_raises_at_the_call(self, app: Celery) -> None:
        @app.task(base=LockedTask, shared=False)
        def settle(order: int) -> None: ...

        for wrong in ({"ttl": -1}, {"tll": 1}, {"key": "{nope}"}, 7, {"backoff": 3}):
            with pytest.raises(SettingsError, match="call"):
                settle.apply_async((7,), lock=wrong)
        assert settle.apply_async((7,), lock={"backoff": Backoff(1, 2)})

    def test_another_strategy_is_refused(self, nodes: Nodes) -> None:
        app = Celery("batches", broker="redis://", set_as_default=False)

        class Batches(Task):
            abstract = True
            Strategy = "celery_batches:Strategy"

        class Both(Batches, LockedTask):
            abstract = True

        @app.task(base=Both, shared=False)
        def batched(requests: Any) -> None: ...

        @app.task(base=Both, shared=False, lock_key=False)
        def counted(requests: Any) -> None: ...

        with pytest.raises(SettingsError, match=r"batched.*Strategy.*set lock_key=False"):
            app.finalize()

    @pytest.mark.parametrize(
        ("conf", "is_refused"),
        [
            ({"redlock_tasks": {"*": {}}}, True),
            ({"redlock_tasks": {"clicks": {"key": False}, "*": {}}}, False),
            ({"redlock_tasks": {"*": {}}, "redlock_key": False}, False),
            ({"redlock_tasks": {"*": {}}, "redlock_key": False,
              "redlock_queues": {"locked": {"key": "{queue}"}}}, True),
        ],
    )  # fmt: skip
    def test_another_strategy_may_stand_beside_a_lock_of_all_tasks(
        self, conf: dict[str, Any], is_refused: bool
    ) -> None:
        app = Celery("batches", broker="redis://", set_as_default=False)
        app.conf.update(conf)

        @app.task(name="clicks", Strategy="celery_batches:Strategy", shared=False)
        def clicks(requests: Any) -> None: ...

        @app.task(name="sync", shared=False)
        def sync(account: str) -> None: ...

        if is_refused:
            way_out = r"Strategy.*To leave it out, set \{'clicks': \{'key': False\}\} first"
            with pytest.raises(SettingsError, match=way_out):
                app.finalize()
        else:
            app.finalize()
        assert isinstance(app.tasks["sync"], LockedTask)
