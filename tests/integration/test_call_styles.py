"""However a task is written and called: locked where it is a run, plain where it is a call."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, Task, xmap
from celery.app.task import Context
from celery.signals import task_postrun
from kombu import Queue
from kombu.common import Broadcast

from celery_redlock import (
    Backoff,
    LockedTask,
    LockTaken,
    Redlock,
    RedlockError,
    SettingsError,
    current_lock,
)
from celery_redlock.signals import (
    LockAcquired,
    LockReleased,
    lock_acquired,
    lock_released,
)
from celery_redlock.tasks.deferral import Address
from celery_redlock.tasks.gate import _let_go_late, goes_back, queue_of
from celery_redlock.testing import EmbeddedNode
from tests.conftest import PATIENCE, see_freed
from tests.integration.conftest import Stage, overlaps


@pytest.fixture
def app(nodes: list[EmbeddedNode]) -> Iterator[Celery]:
    made = Celery("styles", broker="memory://", backend="cache+memory://", set_as_default=False)
    made.conf.update(redlock_nodes=[node.url for node in nodes], task_always_eager=True)
    made.conf.redlock_node_timeout = PATIENCE
    made.conf.task_queues = [Queue("celery"), Queue("slow")]
    yield made
    made.close()


@pytest.mark.parametrize("name", ["rude", "polite", "class_task"])
def test_a_users_own_hooks_without_super_cannot_switch_the_lock_off(
    stage: Stage, name: str
) -> None:
    stage.worker(concurrency=4)
    task = getattr(stage.tasks, name)
    results = [task.delay("k") for _ in range(6)]
    assert [result.get(timeout=120) for result in results] == [0] * 6
    assert len(stage.intervals()["k"]) == 6
    assert not overlaps(stage.intervals()["k"])
    stage.see_freed("k:k")
    if name != "class_task":
        assert len(stage.lines("called")) == 6, "the user's __call__ ran for deferrals too"


def test_a_direct_call_takes_no_lock(app: Celery, nodes: list[EmbeddedNode]) -> None:
    @app.task(bind=True, base=LockedTask, shared=False)
    def settle(self: Any, order: int) -> tuple[Any, bool]:
        return self.lock, current_lock() is None

    with settle.lock_for(7):
        assert settle(7) == (None, True)
        assert settle.run(7) == (None, True)


def test_an_eager_run_locks_and_lets_go(app: Celery, nodes: list[EmbeddedNode]) -> None:
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


def test_super_run_locks_once(app: Celery) -> None:
    class First(LockedTask):
        name = "first"

        def run(self) -> str:
            assert self.lock is not None
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


def test_a_class_that_is_two_tasks_has_two_keys(app: Celery) -> None:
    class Named(LockedTask):
        def __init__(self, colour: str) -> None:
            self.name, self.lock_key = f"named.{colour}", f"{colour}:{{x}}"

        def run(self, x: int) -> str:
            assert self.lock is not None
            return self.lock.resource

    red, blue = (app.register_task(Named(colour)) for colour in ("red", "blue"))
    assert (red.apply((1,)).get(), blue.apply((1,)).get()) == ("red:1", "blue:1")


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


def test_an_eager_run_follows_the_tasks_own_routing(app: Celery) -> None:
    @app.task(base=LockedTask, lock_key="{queue}:{order}", shared=False)
    def settle(order: int) -> str:
        lock = current_lock()
        assert lock is not None
        return lock.resource

    app.conf.task_routes = {settle.name: {"queue": "slow"}}
    assert settle.apply((7,)).get() == settle.lock_for(7).resource == "slow:7"


def test_a_message_that_rabbitmq_kept_back_is_still_of_its_queue(app: Celery) -> None:
    assert queue_of(app, Address(None, "slow")) == "slow"
    assert queue_of(app, Address("elsewhere", "slow")) == "slow"


def test_a_message_of_a_fan_out_is_not_put_back(app: Celery) -> None:
    @app.task(base=LockedTask, shared=False)
    def settle() -> None: ...

    app.conf.task_queues = [Queue("celery"), Broadcast("all")]
    task = settle._get_current_object()
    for exchange, back in (("celery", True), ("all", False)):
        delivery = {"exchange": exchange, "routing_key": exchange}
        assert goes_back(task, Context({"delivery_info": delivery})) is back


def test_the_lock_is_let_go_before_any_receiver_of_a_users_own() -> None:
    task_postrun.connect(lambda **_: None, weak=False, dispatch_uid="somebody")
    try:
        assert task_postrun.receivers[0][1] is _let_go_late
    finally:
        task_postrun.disconnect(dispatch_uid="somebody")


def test_app_task_as_base_leaves_celerys_own_tasks_alone(nodes: list[EmbeddedNode]) -> None:
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


def test_map_starmap_and_chunks_are_refused_with_the_way_out(app: Celery) -> None:
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


def test_a_key_of_false_takes_no_lock(app: Celery, nodes: list[EmbeddedNode]) -> None:
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


def test_signals_carry_records_and_name_the_task(app: Celery) -> None:
    @app.task(base=LockedTask, lock_key="s", shared=False)
    def settle() -> None: ...

    heard: list[tuple[Any, Any]] = []

    def note(sender: Any = None, event: Any = None, **_: Any) -> None:
        heard.append((sender, event))

    for signal in (lock_acquired, lock_released):
        signal.connect(note)
    settle.apply()
    (first, acquired), (second, released) = heard
    assert first.name == second.name == settle.name
    assert acquired == LockAcquired("s", 30.0)
    assert isinstance(released, LockReleased)
    assert (released.resource, released.by) == ("s", "holder")
    assert released.held_for >= 0


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
            ({"lock_limit": 3, "lock_key": ["a:{sku}", "b:{sku}"]}, "of one resource"),
        ],
    )
    def test_they_raise_when_the_app_finalizes_and_at_each_later_use(
        self, nodes: list[EmbeddedNode], options: dict[str, Any], words: str
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

    def test_another_strategy_is_refused(self, nodes: list[EmbeddedNode]) -> None:
        app = Celery("batches", broker="redis://", set_as_default=False)

        class Batches(Task):
            abstract = True
            Strategy = "celery_batches:Strategy"

        class Both(Batches, LockedTask):
            abstract = True

        @app.task(base=Both, shared=False)
        def batched(requests: Any) -> None: ...

        with pytest.raises(SettingsError, match="Strategy"):
            app.finalize()
