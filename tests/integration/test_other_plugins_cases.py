"""What the test suites of other uniqueness plugins check, told here as scenarios of our own.

celery-once, celery-singleton, celery-unique, celery-dedupe, celery-deduplicate, celery-heimdall.
docs/how-to/migrate.md says which of their cases mean something else here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, chain
from celery.exceptions import Ignore
from kombu.exceptions import OperationalError

from celery_redlock import LockedTask, LockTaken, Redlock, current_lock
from tests.conftest import NODE_TIMEOUT, PATIENCE, Nodes, eventually, is_free, see_freed


@pytest.fixture
def app(nodes: Nodes) -> Iterator[Celery]:
    made = Celery("others", broker="memory://", backend="cache+memory://", set_as_default=False)
    made.conf.update(redlock_nodes=[node.url for node in nodes], task_always_eager=True)
    made.conf.redlock_node_timeout = NODE_TIMEOUT
    yield made
    made.close()


def held() -> str:
    """Return the resource that the running task holds."""
    lock = current_lock()
    assert lock is not None
    assert lock.held
    return lock.resource


class TestWhatIsLocked:
    def test_positional_and_keyword_arguments_make_one_key(self, app: Celery) -> None:
        @app.task(base=LockedTask, shared=False)
        def add(a: int, b: int) -> str:
            return held()

        assert add.delay(1, 2).get() == add.delay(a=1, b=2).get() == add.delay(1, b=2).get()

    def test_other_arguments_make_other_keys(self, app: Celery) -> None:
        @app.task(base=LockedTask, shared=False)
        def anything(*args: Any, **kwargs: Any) -> str:
            return held()

        calls = [((), {}), ((True, False), {}), ((), {"something": 2}), ((), {"other": 2})]
        assert len({anything.apply(*call).get() for call in calls}) == 4

    def test_self_of_a_bound_task_is_no_part_of_the_key(self, app: Celery) -> None:
        @app.task(bind=True, base=LockedTask, lock_key="{a}-{b}", shared=False)
        def bound(self: Any, a: int, b: int) -> str:
            return held()

        assert bound.delay(1, b=2).get() == "1-2"

    def test_a_key_of_some_arguments_leaves_the_others_out(self, app: Celery) -> None:
        @app.task(base=LockedTask, lock_args=["a", "c"], shared=False)
        def some(a: int, b: int, c: int = 3, d: int = 4) -> str:
            return held()

        assert some.delay(1, 2).get() == some.delay(1, 5, c=3, d=6).get()
        assert some.delay(1, 2).get() != some.delay(2, 2).get()

    def test_a_key_of_no_argument_is_one_for_the_task(self, app: Celery) -> None:
        @app.task(base=LockedTask, lock_args=[], name="one", shared=False)
        def one(a: int) -> str:
            return held()

        assert one.delay(1).get() == one.delay(2).get() == "one:any-arguments"

    def test_a_callable_makes_a_key_of_what_it_likes(self, app: Celery) -> None:
        def key(task: Any, args: Any, kwargs: Any) -> str:
            return f"{args[0]}.{kwargs['four']}"

        @app.task(base=LockedTask, lock_key=key, shared=False)
        def keyed(one: int, two: int, *, three: int, four: int) -> str:
            return held()

        assert keyed.delay(1, 2, three=3, four=4).get() == "1.4"

    def test_letters_of_every_alphabet_stand_in_a_key(self, app: Celery) -> None:
        @app.task(base=LockedTask, lock_key="{task}:{a}", name="éxample", shared=False)
        def accented(a: str) -> str:
            return held()

        assert accented.delay("é").get() == "éxample:é"

    def test_autoretry_does_not_hide_the_arguments(self, app: Celery) -> None:
        @app.task(base=LockedTask, lock_key="{a}", autoretry_for=(OSError,), shared=False)
        def retried(a: int, b: int) -> str:
            return held()

        assert retried.delay(a=1, b=2).get() == "1"

    def test_a_task_without_a_key_is_not_locked(self, app: Celery) -> None:
        @app.task(base=LockedTask, lock_key=False, shared=False)
        def free() -> bool:
            return current_lock() is None

        assert free.delay().get()


class TestWhenItIsFree:
    @pytest.mark.parametrize("error", [None, ValueError, Ignore])
    def test_it_is_free_after_the_run_however_that_ends(
        self, app: Celery, nodes: Nodes, error: type[Exception] | None
    ) -> None:
        @app.task(base=LockedTask, lock_key="ends", shared=False)
        def ends() -> None:
            held()
            if error is not None:
                raise error

        for _ in range(2):
            result = ends.delay()
            assert result.state == ("SUCCESS" if error is None else result.state)
            assert not isinstance(result.result, LockTaken)
            see_freed(nodes, "ends")

    def test_a_retry_with_other_arguments_meets_no_lock_of_its_own(self, app: Celery) -> None:
        @app.task(bind=True, base=LockedTask, lock_key="{task}", name="again", shared=False)
        def again(self: Any, a: int = 0) -> str:
            if a != 1:
                raise self.retry(kwargs={"a": 1})
            return held()

        assert again.delay().get() == "again"

    def test_a_lock_that_a_dead_holder_left_ends_with_its_ttl(
        self, app: Celery, nodes: Nodes
    ) -> None:
        @app.task(base=LockedTask, lock_key="left", lock_wait=60, shared=False)
        def left() -> str:
            return held()

        for node in nodes:
            node.client().set("{redlock}:lock:left", "of one that died", px=300)
        assert left.delay().get() == "left"

    def test_a_send_that_fails_leaves_no_lock(self, app: Celery, nodes: Nodes) -> None:
        @app.task(base=LockedTask, lock_key="sent", shared=False)
        def sent() -> None: ...

        app.conf.update(task_always_eager=False, task_publish_retry=False, result_backend=None)
        app.conf.broker_url = "redis://127.0.0.1:1"  # where nobody listens
        with pytest.raises(OperationalError):
            sent.delay()
        assert is_free(nodes, "sent")


class TestWhatTheSecondOneMeets:
    @pytest.fixture
    def task(self, app: Celery) -> Any:
        @app.task(base=LockedTask, lock_key="order:{order}", lock_on_conflict="fail", shared=False)
        def settle(order: int) -> str:
            return held()

        return settle

    def test_it_fails_and_says_who_holds_it_and_for_how_long(
        self, task: Any, redlock: Redlock
    ) -> None:
        with redlock.lock("order:7", ttl=30):
            error = task.delay(7).result
        assert isinstance(error, LockTaken)
        assert error.resource == "order:7"
        assert error.expires_in is not None
        assert 0 < error.expires_in <= 30

    def test_another_argument_does_not_meet_it(self, task: Any, redlock: Redlock) -> None:
        with redlock.lock("order:7"):
            assert task.delay(8).get() == "order:8"

    def test_it_runs_once_the_first_is_through(self, task: Any, redlock: Redlock) -> None:
        with redlock.lock("order:7"):
            assert task.delay(7).state == "FAILURE"
        # the release is written, and may reach a node after the next grant
        assert task.apply_async((7,), lock={"wait": PATIENCE}).get() == "order:7"

    def test_a_chain_of_the_same_task_does_not_lock_itself_out(self, app: Celery) -> None:
        @app.task(base=LockedTask, shared=False)
        def simple(*args: Any) -> str:
            return held()

        for last in (2, 3):
            assert chain(simple.si(1), simple.s(last)).apply().get()


class TestOptions:
    def test_a_tasks_option_goes_before_the_apps(self, app: Celery) -> None:
        app.conf.redlock_ttl = 40

        @app.task(base=LockedTask, shared=False)
        def plain() -> None: ...

        @app.task(base=LockedTask, lock_ttl=50, shared=False)
        def own() -> None: ...

        assert (plain.lock_for().ttl, own.lock_for().ttl) == (40.0, 50.0)

    def test_a_calls_ttl_reaches_the_nodes(self, app: Celery, nodes: Nodes) -> None:
        @app.task(base=LockedTask, lock_key="timed", shared=False)
        def timed() -> list[int]:
            name = "{redlock}:lock:timed"
            clients = [node.client() for node in nodes]  # the last of which may grant it late
            eventually(lambda: all(client.exists(name) for client in clients))
            return [client.pttl(name) for client in clients]

        found = timed.apply_async(lock={"ttl": 50}).get()
        assert all(30_000 < ttl <= 50_000 for ttl in found)
