"""Worker leases on a broker that is reached in another way than by TCP alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from kombu.utils.json import dumps
from redis import Redis, ResponseError

from celery_redlock.lock.platform.clock import Platform, SystemClock
from celery_redlock.tasks.recovery.keeper import Keeper
from celery_redlock.tasks.recovery.ledger import Ledger, ledger_beside
from celery_redlock.tasks.recovery.step import can_tag
from celery_redlock.tasks.recovery.survey import ALIVE, open_survey
from celery_redlock.tasks.recovery.tags import DeliveryTag, new_lease
from celery_redlock.testing import EmbeddedNode
from tests.conftest import eventually
from tests.contract import test_server_errors
from tests.contract.test_server_errors import SentinelNode, speaking_tls

MESSAGE = [{"body": "", "headers": {"id": "x"}, "properties": {}}, "", "celery"]
certificates = test_server_errors.certificates  # a fixture
Reached = tuple[Redis, dict[str, Any]]  # the broker's administrator, and the settings of an app


@pytest.fixture(params=["socket", "tls", "sentinel"])
def reached(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Reached]:
    """Give a broker, and what an app names to reach it."""
    with ExitStack() as stack:
        if request.param == "tls":
            tls = stack.enter_context(speaking_tls(request.getfixturevalue("certificates")))
            yield tls.node.client(), {"broker_url": f"{tls.url}&ssl_cert_reqs=CERT_REQUIRED"}
        elif request.param == "socket":
            path = f"{tmp_path}/broker.sock"
            node = stack.enter_context(EmbeddedNode(unixsocket=path))
            yield node.client(), {"broker_url": f"redis+socket://{path}"}
        else:
            primary = stack.enter_context(EmbeddedNode())
            sentinel = stack.enter_context(SentinelNode(primary))
            yield primary.client(), behind(sentinel.port)


def behind(port: int) -> dict[str, Any]:
    """Return what an app names to reach the broker that the Sentinel at a port knows."""
    return {
        "broker_url": f"sentinel://127.0.0.1:{port}/0",
        "broker_transport_options": {"master_name": "locks"},
    }


def test_a_dead_workers_messages_are_back_however_the_broker_is_reached(reached: Reached) -> None:
    """Also once all connections were cut."""
    client, conf = reached
    app = Celery("reached", set_as_current=False)

    def connect() -> Ledger:
        return ledger_beside(app.connection_for_read(), "redlock")

    app.conf.update(conf)
    with app.connection_for_read() as connection:
        assert can_tag(connection.default_channel)
    ledger = connect()
    keeper = Keeper(Platform(SystemClock()), connect, "w1@host", app, lambda _: None)
    keeper.join()
    try:
        for number in range(2):
            lost = new_lease()
            ledger.beat(lost, joins_as="w2@host")
            client.hset(ledger.unacked, str(DeliveryTag(lost, 0, "celery")), dumps(MESSAGE))
            ledger.declare_dead(lost, claims=False)
            eventually(lambda number=number: client.llen("celery") == number + 1)
            eventually(lambda: not client.exists(ledger.dead))
            ledger.close()
            client.client_kill_filter(_type="normal", skipme=True)
        assert keeper.lease == client.zrange(ledger.leases, 0, -1)[0]
        with open_survey(app) as survey:
            assert survey is not None
            assert survey.ledger.missing_rights() == []
            eventually(lambda: [one.state for one in survey.leases()] == [ALIVE])
    finally:
        keeper.end()
        ledger.close()


def fails_over(sentinel: Redis) -> bool:
    """Have a Sentinel promote the replica; False while it does not know yet that one is ready."""
    try:
        return bool(sentinel.execute_command("SENTINEL", "FAILOVER", "locks"))
    except ResponseError as error:
        if "NOGOODSLAVE" not in str(error):
            raise
        return False


@pytest.mark.slow
def test_what_was_noted_before_a_failover_is_back_after_it() -> None:
    """The worker that lives joins at the new primary, and proves there which one is dead."""
    app = Celery("failover", set_as_current=False)

    def connect() -> Ledger:
        return ledger_beside(app.connection_for_read(), "redlock")

    with EmbeddedNode() as primary, EmbeddedNode() as replica, SentinelNode(primary) as running:
        app.conf.update(behind(running.port))
        before, after, admin = primary.client(), replica.client(), running.client()
        after.replicaof("127.0.0.1", primary.port)
        ledger = connect()
        keeper = Keeper(Platform(SystemClock()), connect, "w1@host", app, lambda _: None)
        keeper.join()
        try:
            lost = new_lease()
            ledger.beat(lost, joins_as="w2@host")
            before.hset(ledger.unacked, str(DeliveryTag(lost, 0, "celery")), dumps(MESSAGE))
            assert before.wait(1, 60_000) == 1
            eventually(lambda: fails_over(admin))
            eventually(lambda: after.role()[0] == "master")
            eventually(lambda: after.llen("celery") == 1)
            assert not after.exists(ledger.unacked)
            eventually(lambda: after.zrange(ledger.leases, 0, -1) == [keeper.lease])
        finally:
            keeper.end()
            ledger.close()
