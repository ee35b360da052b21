"""A log line has its fields beside its text."""

from __future__ import annotations

import logging
import re

import pytest
from celery import Celery

from celery_redlock import LockedTask, Redlock
from celery_redlock.lock.transport.node import UNREAD_LIMIT
from celery_redlock.tasks.per_app import redlock_of
from tests.conftest import NODE_TIMEOUT, PATIENCE, TTL, Nodes, eventually, settle
from tests.contract.proxy import Proxy, Way


def fields(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, object]]:
    """Return the records of this event that are logged so far, as their fields."""
    records = [vars(record) for record in list(caplog.records)]
    return [record for record in records if record.get("event") == event]


@pytest.mark.slow
def test_a_loss_and_its_nodes_are_told_with_their_names(
    mortal_nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "celery_redlock")
    urls = [node.url for node in mortal_nodes]
    with Redlock(urls, node_timeout=NODE_TIMEOUT) as redlock:
        settle(redlock)
        lock = redlock.lock("stock:1", ttl=TTL).acquire()
        for node in mortal_nodes[:2]:
            node.kill()
        (lost,) = eventually(lambda: fields(caplog, "lock_lost"))
        assert lost["resource"] == "stock:1"
        assert str(lost["reason"]) in lost["message"]  # type: ignore[operator]
        assert fields(caplog, "lock_at_risk")[0]["resource"] == "stock:1"
        dead = {f"127.0.0.1:{node.port}" for node in mortal_nodes[:2]}
        assert {one["node"] for one in fields(caplog, "node_failed")} == dead
        lock.release()


def test_a_line_of_a_run_has_its_task_and_resource(
    nodes: Nodes, redlock: Redlock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "celery_redlock")
    app = Celery("logs", broker="memory://", set_as_default=False)
    app.conf.update(redlock_nodes=[node.url for node in nodes], redlock_node_timeout=PATIENCE)

    @app.task(base=LockedTask, lock_key="stock:{sku}", lock_on_conflict="skip", shared=False)
    def take(sku: str) -> None: ...

    with redlock.lock("stock:1"):
        result = take.apply(("1",))
    (skipped,) = fields(caplog, "run_skipped")
    assert skipped["resource"] == "stock:1"
    assert (skipped["task"], skipped["task_id"]) == (take.name, result.id)
    assert "is held by" in str(skipped["reason"])
    assert "renewed" not in str(skipped["reason"])
    with redlock.lock("stock:2", ttl=30.0, renew=False):
        for node in nodes:  # as if its holder had died a while ago
            node.client().pexpire(f"{{{redlock.prefix}}}:lock:stock:2", 8_000)
        take.apply(("2",))
    reason = str(fields(caplog, "run_skipped")[1]["reason"])
    assert re.search(r"^'stock:2' is held by .+, not renewed for 2[2-9] s$", reason)
    redlock_of(app).close()
    app.close()


@pytest.mark.parametrize("guard", ["strict", "off"])
def test_an_idle_process_tells_of_a_node_only_if_it_is_not_back_and_of_its_return(
    guard: str, mortal_nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "celery_redlock")
    urls = [node.url for node in mortal_nodes]
    with Redlock(urls, node_timeout=NODE_TIMEOUT, restart_guard=guard) as redlock:
        settle(redlock)
        session, (node, *_) = redlock.session, redlock.session.nodes.all
        before = node.connection

        def look() -> None:
            """Do what its maintenance does, which is idle for longer."""
            session.nodes.drain()
            session.nodes.reconnect()

        mortal_nodes[0].kill()
        mortal_nodes[0].start()
        eventually(lambda: look() or node.connection not in (None, before))
        mortal_nodes[0].kill()
        (failed,) = eventually(lambda: look() or fields(caplog, "node_failed"))
        assert "refused" in str(failed["message"])
        mortal_nodes[0].start()
        session.watchdog.run_maintenance_by(session.clock.now())
        # without the guard it comes by itself, after seconds; with it sooner
        asks = look if guard == "strict" else list
        (back,) = eventually(lambda: asks() or fields(caplog, "node_recovered"))
        assert back["node"] == failed["node"] == node.name


def test_connections_that_servers_end_while_they_are_idle_are_no_failure(
    network: list[Proxy], caplog: pytest.LogCaptureFixture
) -> None:
    urls = [line.url for line in network]
    with Redlock(urls, node_timeout=PATIENCE, restart_guard="off") as redlock:
        settle(redlock)
        nodes = redlock.session.nodes.all
        before = [node.connection for node in nodes]
        for connection, line in zip(before, network, strict=True):
            assert connection is not None
            connection.opened_at = connection.used_at = connection.used_at - 2 * UNREAD_LIMIT
            line.half_close(Way.TO_CLIENT)
        with redlock.lock("r") as lock:
            assert lock.held
        eventually(lambda: all(node.connection not in (None, *before) for node in nodes))
        settle(redlock)
        eventually(lambda: not redlock.session.watchdog.is_busy)
    assert not fields(caplog, "node_failed")
