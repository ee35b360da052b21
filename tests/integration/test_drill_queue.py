"""The queue of a drill on the broker: what is removed, also of a drill that was killed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from kombu import Connection, Exchange

from celery_redlock.operate.drill import own_queue
from celery_redlock.operate.drill.own_queue import BrokerError, OwnQueue
from celery_redlock.operate.drill.worker import isolate
from celery_redlock.testing import EmbeddedNode
from tests.conftest import eventually
from tests.integration.conftest import virtual_host

NAME = "celery_redlock_drill_0123abcd"
OPTIONS = {
    "global_keyprefix": "all:", "unacked_key": "mine", "unacked_index_key": "mine_index",
    "unacked_mutex_key": "mine_mutex", "priority_steps": [0, 5], "sep": ":",
}  # fmt: skip


def app_of(url: str, **settings: Any) -> Celery:
    app = Celery(broker=url, set_as_current=False)
    app.conf.update(redlock_nodes=["redis://127.0.0.1:1"], redlock_prefix="own", **settings)
    return app


@pytest.fixture
def broker() -> Iterator[EmbeddedNode]:
    with EmbeddedNode() as server:
        yield server


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "prefixed"])
def test_another_process_removes_each_key_of_a_queue(
    broker: EmbeddedNode, options: dict[str, Any]
) -> None:
    settings = {"broker_transport_options": options, "task_default_priority": 5}
    sender = OwnQueue(app_of(broker.url, **settings), NAME)
    sender.send("drill-0123abcd-0", "drill:0123abcd:a", 0.1)
    sender.send("drill-0123abcd-1", "drill:0123abcd:a", 0.1)
    app = app_of(broker.url, **settings)
    own = own_queue.transport_options(app, NAME)
    with app.connection_for_read(transport_options=own) as worker:
        assert own_queue.drill_queue(app, NAME)(worker.default_channel).get() is not None
        # a worker has one of them and does not acknowledge it
        assert sender.messages() == {"drill-0123abcd-0", "drill-0123abcd-1"}
    sender.close()
    remover = OwnQueue(app_of(broker.url, **settings), NAME)
    assert broker.client().keys("*")
    remover.remove()
    remover.close()
    assert broker.client().keys("*") == []


@pytest.mark.parametrize("ask", ["open", "messages", "remove"])
def test_a_broker_that_is_away_is_an_error_soon(broker: EmbeddedNode, ask: str) -> None:
    queue = OwnQueue(app_of(broker.url), NAME)
    broker.kill()
    with pytest.raises(BrokerError, match="refused"):
        getattr(queue, ask)()
    queue.close()


def test_a_send_to_a_frozen_broker_is_an_error_soon(broker: EmbeddedNode) -> None:
    queue = OwnQueue(app_of(broker.url), NAME)
    queue.send("drill-0123abcd-0", "drill:0123abcd:a", 0.1)
    broker.pause()
    with pytest.raises(BrokerError, match="Timeout"):
        queue.send("drill-0123abcd-1", "drill:0123abcd:a", 0.1)
    queue.close()
    broker.resume()


def test_rabbitmq_deletes_the_queue_and_the_exchange_of_a_drill_that_was_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(own_queue, "UNUSED_FOR", 0.5)
    with virtual_host() as url, Connection(url) as connection:
        queue = OwnQueue(app_of(url), NAME)
        queue.send("drill-0123abcd-0", "drill:0123abcd:a", 0.1)
        exchange = Exchange(NAME, "direct", passive=True)
        exchange(connection.channel()).declare()
        queue.close()

        def is_gone() -> bool:
            try:
                with connection.channel() as channel:
                    exchange(channel).declare()
            except connection.channel_errors as error:
                return "NOT_FOUND" in str(error)
            return False

        assert eventually(is_gone)


def test_a_worker_of_a_drill_has_none_of_what_an_app_may_set_for_its_own() -> None:
    settings = {
        "task_send_sent_event": True, "task_protocol": 1, "worker_direct": True,
        "worker_pool": "solo", "worker_pool_start_method": "spawn",
    }  # fmt: skip
    app = app_of("redis://127.0.0.1:1", **settings)
    isolate(app, NAME)
    assert not app.conf.task_send_sent_event
    assert not app.conf.worker_direct
    assert (app.conf.task_protocol, app.conf.worker_pool) == (2, "prefork")
    assert app.conf.worker_pool_start_method == "fork"
