"""A send of a locked task: when it is published, by which route, and what of it is compared.

The broker is in this process; the nodes are real.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, Task
from celery.signals import after_task_publish
from kombu import Exchange, Queue
from kombu.transport import virtual
from kombu.transport.virtual.exchange import DirectExchange
from pydantic import BaseModel

from celery_redlock import LockedTask, SettingsError, install
from tests.conftest import Nodes

LONG = 500.0  # s: a window that outlives a test
Published = list[dict[str, Any]]
OF_THEIR_OWN = ("x-consistent-hash", "x-random", "x-delayed-message")
# before a channel is made, which has a copy: the broker in this process knows none of these types
virtual.Channel.exchange_types.update(dict.fromkeys((*OF_THEIR_OWN, "headers"), DirectExchange))


@pytest.fixture
def published() -> Iterator[Published]:
    """Give what is published: task id, queue or routing key, and arguments."""
    seen: Published = []

    def note(body: Any, headers: Any, exchange: str, routing_key: str, **_: Any) -> None:
        where = {"exchange": exchange, "routing_key": routing_key}
        seen.append({"id": headers["id"], "args": body[0], "kwargs": body[1], **where})

    after_task_publish.connect(note)
    yield seen
    after_task_publish.disconnect(note)


class Transaction:
    """Calls what was put off to its commit, as a database's does; a rollback drops it."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []

    def on_commit(self, call: Callable[[], object]) -> None:
        self._calls.append(call)

    def commit(self) -> None:
        calls, self._calls = self._calls, []
        for call in calls:
            call()

    def rollback(self) -> None:
        self._calls.clear()


@pytest.fixture
def transaction() -> Transaction:
    return Transaction()


@pytest.fixture(params=["locked first", "locked last", "adopted"])
def settle(request: Any, sending_app: Celery, transaction: Transaction) -> Task:
    """Give a task whose class sends at the end of a transaction, locked in each way there is."""

    class OnCommit(Task):
        abstract = True

        def apply_async(self, *args: Any, **options: Any) -> None:
            transaction.on_commit(lambda: super(OnCommit, self).apply_async(*args, **options))

    def body(order: int, note: str = "") -> None: ...

    options = {"key": "order:{order}", "unique_for": LONG}
    if request.param == "adopted":
        sending_app.conf.redlock_tasks = {"settle": options}
        install(sending_app)
        made = sending_app.task(base=OnCommit, name="settle", shared=False)(body)
        sending_app.finalize()
        return made
    bases = (LockedTask, OnCommit) if request.param == "locked first" else (OnCommit, LockedTask)
    both = type("Both", bases, {"abstract": True})
    own = {f"lock_{name}": value for name, value in options.items()}
    return sending_app.task(base=both, name="settle", shared=False, **own)(body)


class TestASendThatIsPublishedLater:
    def test_holds_no_claim_before_and_none_if_it_never_is(
        self, settle: Task, transaction: Transaction, published: Published, nodes: Nodes
    ) -> None:
        settle.delay(1)
        assert [node.client().keys("*:unique:*") for node in nodes] == [[]] * len(nodes)
        transaction.rollback()
        settle.delay(1)
        transaction.commit()
        assert [one["args"] for one in published] == [(1,)]

    def test_is_dropped_as_it_is_published_if_it_is_a_duplicate(
        self, settle: Task, transaction: Transaction, published: Published
    ) -> None:
        for order in (1, 1, 2):
            settle.delay(order)
        transaction.commit()
        settle.delay(1)
        transaction.commit()
        assert [one["args"] for one in published] == [(1,), (2,)]

    def test_replaces_a_debounced_one_only_once_it_is_published(
        self, settle: Task, transaction: Transaction, published: Published, nodes: Nodes
    ) -> None:
        debounced: dict[str, Any] = {"lock": {"unique_for": None, "debounce": LONG}}
        settle.apply_async((1, "first"), **debounced)
        transaction.commit()
        settle.apply_async((1, "never"), **debounced)
        transaction.rollback()
        assert [node.client().keys("*:done:*") for node in nodes] == [[]] * len(nodes)
        settle.apply_async((1, "last"), **debounced)
        transaction.commit()
        assert [one["args"][1] for one in published] == ["first", "last"]


def test_the_key_is_made_of_what_is_published(sending_app: Celery, published: Published) -> None:
    class WithToken(Task):
        abstract = True

        def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
            rest = {name: value for name, value in (kwargs or {}).items() if name != "token"}
            return super().apply_async(args, rest, **options)

    both = type("Both", (LockedTask, WithToken), {"abstract": True})

    @sending_app.task(base=both, shared=False, typing=False, lock_unique_for=LONG)
    def settle(order: int) -> None: ...

    assert not settle.apply_async(kwargs={"order": 1, "token": "a"}).is_duplicate
    assert settle.apply_async(kwargs={"order": 1, "token": "b"}).is_duplicate
    assert [one["kwargs"] for one in published] == [{"order": 1}]


def test_a_send_that_is_stored_elsewhere_holds_no_claim_and_says_so(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    rows: list[Any] = []

    class Outbox(Celery):
        def send_task(self, name: str, args: Any = None, *_: Any, **options: Any) -> Any:
            rows.append((name, args, options["headers"]))

    urls = [node.url for node in nodes]
    app = Outbox("outbox", broker="memory://", set_as_default=False)
    app.conf.update(redlock_nodes=urls)

    @app.task(base=LockedTask, shared=False, lock_unique_for=LONG)
    def settle(order: int) -> None: ...

    with caplog.at_level(logging.WARNING, "celery_redlock"):
        for _ in range(2):
            settle.delay(1)
    assert [args for _, args, _ in rows] == [(1,)] * 2
    assert caplog.text.count("send_task returned before it was published") == 2
    app.close()


class Cycle:
    """A router that counts its calls, and leads to two queues in turn."""

    def __init__(self) -> None:
        self.queues = itertools.cycle(["left", "right"])
        self.calls: list[Any] = []

    def __call__(self, name: str, args: Any, kwargs: Any, options: Any, **_: Any) -> Any:
        self.calls.append((name, args, kwargs, options))
        return {"queue": next(self.queues), "priority": 7}


@pytest.fixture
def cycle(sending_app: Celery) -> Cycle:
    router = Cycle()
    sending_app.conf.task_routes = [router]
    sending_app.conf.task_queues = [Queue("left"), Queue("right")]
    return router


class TestARouterOfTheUsersOwn:
    def test_is_asked_once_for_each_send(
        self, sending_app: Celery, cycle: Cycle, published: Published
    ) -> None:
        @sending_app.task(
            base=LockedTask, shared=False, lock_key="{queue}:{n}", lock_unique_for=LONG
        )
        def unique(n: int) -> None: ...

        @sending_app.task(base=LockedTask, shared=False, lock_key="{n}")
        def plain(n: int) -> None: ...

        sent = [unique.delay(n) for n in range(4)]
        plain.delay(1)
        assert [one["routing_key"] for one in published] == ["left", "right"] * 2 + ["left"]
        assert len(cycle.calls) == 5
        assert not any(result.is_duplicate for result in sent)
        # as Celery asks: without what is not for a router
        unique_options, plain_options = cycle.calls[0][3], cycle.calls[-1][3]
        assert unique_options.keys() == plain_options.keys() - {"ignore_result"}  # since Celery 5.7

    @pytest.mark.parametrize("key", ["{queue}", "all"])
    def test_is_not_asked_for_what_is_no_send(
        self, sending_app: Celery, cycle: Cycle, key: str
    ) -> None:
        @sending_app.task(base=LockedTask, shared=False, lock_key=key)
        def work(n: int) -> None: ...

        if key == "all":
            assert work.lock_for(1).resource == "all"
            assert work.lock_options().queue == ""
        else:
            for ask in (lambda: work.lock_for(1), work.lock_options):
                with pytest.raises(SettingsError, match=r"function in task_routes.*queue='celery'"):
                    ask()
        assert work.lock_for(1, queue="left").resource == key.format(queue="left")
        assert work.lock_options("left").queue == "left"
        assert cycle.calls == []

    def test_is_asked_as_for_a_send_by_a_run_in_this_process(
        self, sending_app: Celery, cycle: Cycle
    ) -> None:
        @sending_app.task(base=LockedTask, shared=False, bind=True, lock_key="{queue}")
        def work(self: Any) -> str:
            return str(self.lock.resource)

        assert [work.apply().get() for _ in range(3)] == ["left", "right", "left"]
        assert len(cycle.calls) == 3


def test_a_table_of_routes_is_asked_for_anything(sending_app: Celery) -> None:
    sending_app.conf.task_routes = {"told.*": "right"}

    @sending_app.task(base=LockedTask, shared=False, name="told.work", lock_key="{queue}")
    def work() -> None: ...

    assert work.lock_for().resource == "right"
    assert work.lock_options().queue == "right"


def bind_queues(app: Celery, kind: str, **arguments: Any) -> None:
    """Give an app two queues of an exchange that its broker, in this process, takes for direct."""
    exchange = Exchange("by", type=kind)
    app.conf.task_default_queue = "de"
    rows = [("de", {"country": "de", **arguments}), ("fr", {"country": "fr", **arguments})]
    app.conf.task_queues = [
        Queue(name, exchange, routing_key=name, binding_arguments=row) for name, row in rows
    ]


class TestAnExchangeThatChoosesTheQueue:
    @pytest.mark.parametrize("arguments", [{}, {"x-match": "all"}, {"x-match": "any", "lang": "x"}])
    def test_of_headers_is_known_by_its_bindings(
        self, sending_app: Celery, published: Published, arguments: dict[str, str]
    ) -> None:
        bind_queues(sending_app, "headers", **arguments)

        @sending_app.task(
            base=LockedTask, shared=False, lock_key="{queue}:{n}", lock_unique_for=LONG
        )
        def index(n: int) -> None: ...

        how: dict[str, Any] = {"exchange": "by", "routing_key": ""}
        countries = ["de", "fr", "fr"]
        sent = [index.apply_async((1,), headers={"country": one}, **how) for one in countries]
        assert [one.is_duplicate for one in sent] == [False, False, True]
        assert len(published) == 2

    @pytest.mark.parametrize("kind", OF_THEIR_OWN)
    def test_by_a_rule_of_its_own_is_unknown_so_that_nothing_is_dropped(
        self, sending_app: Celery, published: Published, kind: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        bind_queues(sending_app, kind)

        @sending_app.task(
            base=LockedTask, shared=False, lock_key="{queue}:{n}", lock_unique_for=LONG
        )
        def index(n: int) -> None: ...

        @sending_app.task(base=LockedTask, shared=False, lock_key="{n}", lock_unique_for=LONG)
        def everywhere(n: int) -> None: ...

        how: dict[str, Any] = {"exchange": "by", "routing_key": "17"}
        with caplog.at_level(logging.WARNING, "celery_redlock"):
            for _ in range(2):
                index.apply_async((1,), **how)
        assert len(published) == 2
        assert caplog.text.count("its exchange chooses the queue") == 2
        with pytest.raises(SettingsError, match="by an exchange"):
            index.lock_for(1)
        assert [everywhere.apply_async((1,), **how).is_duplicate for _ in range(2)] == [False, True]


def test_a_run_that_sends_itself_again_is_told_that_this_is_dropped(
    sending_app: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    @sending_app.task(base=LockedTask, shared=False, bind=True, lock_unique_for=LONG)
    def poll(self: Any) -> Any:
        # as in a worker, where the run's own message has made the claim
        return poll.delay()

    first = poll.delay()
    with caplog.at_level(logging.WARNING, "celery_redlock"):
        assert poll.apply(task_id=first.id).get().is_duplicate
    assert "sends itself from its own run" in caplog.text


class Order(BaseModel):
    sku: str


# since Celery 5.7 a call may have a model
FORMS = [{"sku": "a"}, *([Order(sku="a")] if hasattr(Task, "_dump_pydantic_arguments") else [])]


@pytest.mark.parametrize("form", FORMS, ids=["dict", "model"][: len(FORMS)])
@pytest.mark.parametrize("serializer", ["json", "pickle"])
@pytest.mark.parametrize("lock", [{"lock_key": "stock:{order[sku]}"}, {}], ids=["key", "digest"])
def test_a_model_has_the_key_of_its_dump(
    sending_app: Celery, form: Any, serializer: str, lock: dict[str, str]
) -> None:
    how: dict[str, Any] = {"shared": False, "pydantic": True, "bind": True, "lock_unique_for": LONG}

    @sending_app.task(base=LockedTask, serializer=serializer, **how, **lock)
    def take(self: Any, order: Order) -> str:
        return f"{order.sku} {self.lock.resource}"

    dump = {"sku": "a"}
    resource = take.lock_for(dump).resource
    assert not take.delay(dump).is_duplicate
    assert take.delay(form).is_duplicate
    assert take.lock_for(form).resource == resource
    assert take.apply((form,)).get() == f"a {resource}"
