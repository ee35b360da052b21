"""A reply of PostgreSQL counts only as the reply to the call that it names.

A pooler in transaction mode may hand on the reply to a call of a client that has gone, or one that
it has handed on before. Such a reply is no vote, and costs the connection.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from celery_redlock import QuorumUnreachable, Redlock
from celery_redlock.lock.postgres.address import address_of
from tests.conftest import NODE_TIMEOUT, TTL, eventually, settle
from tests.contract.mixing_gateway import MixingGateway
from tests.contract.postgres_calls import valid_until
from tests.contract.renewals import hurry, renew_now
from tests.postgres import PostgresNode, pooler

pytestmark = pytest.mark.postgresql


@pytest.fixture
def gateway(node: PostgresNode) -> Iterator[MixingGateway]:
    with closing(MixingGateway(node)) as made:
        yield made


@pytest.fixture
def through(gateway: MixingGateway) -> Iterator[Redlock]:
    """Give a client, connected through the gateway."""
    with Redlock([gateway.url], node_timeout=NODE_TIMEOUT, max_ttl=TTL) as made:
        settle(made)
        yield made


@pytest.fixture
def direct(node: PostgresNode) -> Iterator[Redlock]:
    """Give a client that no gateway is before."""
    with Redlock([node.url], node_timeout=NODE_TIMEOUT, max_ttl=TTL) as made:
        settle(made)
        yield made


def is_granted(redlock: Redlock, resource: str) -> bool:
    try:
        return redlock.lock(resource, ttl=TTL).try_acquire()
    except QuorumUnreachable:
        return False


def reply_to_a_grant(gateway: MixingGateway, resource: str) -> bytes:
    """Return the reply by which another client was granted a lock through the gateway."""
    with Redlock([gateway.url], node_timeout=NODE_TIMEOUT, max_ttl=TTL) as other:
        settle(other)
        before = len(gateway.replies)
        lock = other.lock(resource, ttl=TTL, renew=False)
        assert lock.try_acquire()
        reply = gateway.replies[before]
        lock.release()
        settle(other)
        return reply


def test_the_reply_to_a_grant_of_another_client_grants_nothing(
    gateway: MixingGateway, through: Redlock, direct: Redlock
) -> None:
    foreign = reply_to_a_grant(gateway, "r")
    with direct.lock("r", ttl=TTL):
        gateway.insert(foreign)
        assert not is_granted(through, "r")
    eventually(lambda: is_granted(through, "free"))  # by a connection of its own


def test_a_reply_that_comes_twice_grants_nothing(
    gateway: MixingGateway, through: Redlock, direct: Redlock
) -> None:
    before = len(gateway.replies)
    assert is_granted(through, "mine")
    own = gateway.replies[before]
    with direct.lock("r", ttl=TTL):
        gateway.insert(own)
        assert not is_granted(through, "r")


def test_a_late_reply_grants_nothing(
    gateway: MixingGateway, through: Redlock, direct: Redlock
) -> None:
    with gateway.withholding() as kept:
        lock = through.lock("late", ttl=TTL, renew=False)
        with pytest.raises(QuorumUnreachable):
            lock.acquire(wait=0)
    eventually(lambda: is_granted(through, "free"))
    with direct.lock("r", ttl=TTL):
        gateway.insert(kept[0])
        assert not is_granted(through, "r")


def test_the_reply_to_an_earlier_renewal_renews_nothing(
    gateway: MixingGateway, through: Redlock, node: PostgresNode, caplog: pytest.LogCaptureFixture
) -> None:
    with through.lock("r", ttl=TTL) as lock:
        settle(through)
        before = len(gateway.replies)
        renew_now(through, lock)
        renewal = gateway.replies[before]
        settle(through)
        node.query("DELETE FROM redlock.key WHERE name = '{redlock}:lock:r'")
        ends = valid_until(lock)
        gateway.insert(renewal)
        hurry(through)
        eventually(lambda: "another call" in caplog.text or valid_until(lock) > ends)
        assert valid_until(lock) == ends
        eventually(lambda: not lock.held)


def test_a_wrong_reply_costs_the_connection_and_says_why(
    gateway: MixingGateway, through: Redlock, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.insert(reply_to_a_grant(gateway, "r"))
    eventually(lambda: is_granted(through, "s"))
    eventually(lambda: "another call" in caplog.text)


def test_no_cancel_request_goes_through_a_pooler(node: PostgresNode) -> None:
    with pooler(node) as between, closing(MixingGateway(between)) as gateway:
        dialled = address_of(gateway.url).dial(60, 0.5)
        assert dialled.is_pooled
        with gateway.withholding():
            dialled.send_command("PING")
            dialled.disconnect()
        assert gateway.cancels == 0
