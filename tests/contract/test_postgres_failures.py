"""A PostgreSQL node that crashes, fails over or stands still grants no lock to two clients."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from celery_redlock import LockTaken, QuorumUnreachable, Redlock
from celery_redlock.lock.node_status import read_nodes
from celery_redlock.lock.postgres.address import address_of
from celery_redlock.lock.transport.node import MAX_RECONNECT_PAUSE
from tests.conftest import NODE_TIMEOUT, TTL, eventually, settle
from tests.contract.postgres_calls import valid_until
from tests.contract.renewals import renew_now
from tests.postgres import PostgresNode, Standby, pooler, standby, standing_node

pytestmark = pytest.mark.postgresql

RUN = "SELECT convert_from(value, 'UTF8') FROM redlock.key WHERE name = '{redlock}:run'"
QUIET = "SELECT extract(epoch FROM expires_at - now()) FROM redlock.key"
QUIET += " WHERE name = '{redlock}:quiet' AND expires_at > now()"
END_OF_QUIET = "UPDATE redlock.key SET expires_at = now() WHERE name = '{redlock}:quiet'"
VALUE = "SELECT value FROM redlock.key WHERE name = '{redlock}:lock:r'"
WAITS_FOR_STANDBY = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
QUICK = 0.5  # s of a node timeout that a test waits for


@pytest.fixture
def node(postgres_template: Path) -> Iterator[PostgresNode]:
    """Give a node that no test here ends."""
    with standing_node(postgres_template) as made:
        yield made


@pytest.fixture
def mortal(postgres_template: Path) -> Iterator[PostgresNode]:
    """Give a node of the test's own."""
    with PostgresNode(postgres_template, fsync=False) as made:
        made.setup()
        yield made


@contextmanager
def over(*urls: str, **options: Any) -> Iterator[Redlock]:
    """Give a client, connected to its node."""
    with Redlock(urls, **{"node_timeout": NODE_TIMEOUT, "max_ttl": TTL, **options}) as made:
        settle(made)
        yield made


def failover_url(first: PostgresNode, second: PostgresNode) -> str:
    hosts = f"127.0.0.1:{first.port},127.0.0.1:{second.port}"
    return f"postgresql://postgres@{hosts}/postgres?target_session_attrs=read-write"


def is_refused(rival: Redlock, name: str = "r") -> bool:
    """Return whether a rival does not get the lock, whatever the reason."""
    try:
        return not rival.lock(name, ttl=TTL).try_acquire()
    except QuorumUnreachable:
        return True


class TestACrash:
    def test_no_lock_is_lost_and_the_server_votes_at_once(self, postgres_template: Path) -> None:
        with PostgresNode(postgres_template) as server:
            server.setup()
            with (
                over(server.url, max_ttl=600) as redlock,
                redlock.lock("r", ttl=600, wait=60) as lock,
            ):
                run, value = server.query(RUN), server.query(VALUE)
                server.kill()
                server.start()
                with Redlock([server.url], node_timeout=NODE_TIMEOUT, max_ttl=TTL) as fresh:
                    with pytest.raises(LockTaken):
                        fresh.lock("r", ttl=TTL).acquire()
                    with fresh.lock("other", ttl=TTL) as other:  # no grace period
                        assert other.held
                renew_now(redlock, lock)
                assert (server.query(RUN), server.query(VALUE)) == (run, value)
                assert server.query(QUIET) == []
                assert lock.held
            assert "was not properly shut down" in server.log()

    def test_what_was_not_committed_is_not_there_afterwards(self, mortal: PostgresNode) -> None:
        with over(mortal.url) as redlock:
            mortal.kill()
            with pytest.raises(QuorumUnreachable):
                redlock.lock("r", ttl=TTL).acquire()
            mortal.start()
            assert redlock.lock("r", ttl=TTL).try_acquire(wait=60)


class TestAPromotion:
    """The standby lacks what the primary had not sent yet, so it may have lost a grant."""

    @pytest.fixture
    def node(self, mortal: PostgresNode) -> PostgresNode:
        return mortal

    @pytest.fixture
    def other(self, node: PostgresNode) -> Iterator[Standby]:
        with standby(node) as made:
            yield made

    def test_it_grants_nothing_for_the_longest_ttl_and_then_it_does(
        self, node: PostgresNode, other: Standby, caplog: pytest.LogCaptureFixture
    ) -> None:
        url = failover_url(node, other)
        with over(url, max_ttl=600) as redlock:  # no stall makes it vote meanwhile
            with redlock.lock("before", ttl=TTL, wait=60):
                pass
            eventually(lambda: other.query(RUN) == node.query(RUN))
            node.kill()
            other.promote()
            refusal = eventually(lambda: refusal_of(redlock, "grants no lock"))
            assert re.search(r"grants no lock for \d+ s more \(restart guard: its server,", refusal)
            assert "its server, timeline or schema changed" in refusal
            lines = eventually(lambda: of_event(caplog, "node_silent"))
            assert lines[0].levelno == logging.WARNING
            assert re.search(r"grants no lock for \d+ s more", lines[0].getMessage())
            status = read_nodes(redlock.session).nodes[0]
            assert 0 < status.silent_for <= 602
            assert not status.votes
            [(left,)] = other.query(QUIET)
            assert 0 < left <= 602
            other.query(END_OF_QUIET)
            assert redlock.lock("r", ttl=TTL).try_acquire(wait=60)

    def test_the_holder_gets_its_lock_back_that_the_standby_lacked(
        self, node: PostgresNode, other: Standby
    ) -> None:
        url = failover_url(node, other)
        with over(url, max_ttl=600) as redlock, over(url, max_ttl=600) as rival:
            with redlock.lock("warm", ttl=TTL, wait=60):
                pass
            eventually(lambda: other.query(RUN) == node.query(RUN))
            cut_off(other)
            lock = redlock.lock("r", ttl=600, wait=60).acquire()
            assert other.query(VALUE) == []
            node.kill()
            other.promote()
            assert other.query(VALUE) == []
            assert is_refused(rival)
            redlock.session.watchdog.renew_by(redlock.session.clock.now())
            eventually(lambda: other.query(VALUE))
            renew_now(redlock, lock)
            assert is_refused(rival)
            lock.release()

    def test_a_standby_that_has_all_grants_renews_them_meanwhile(
        self, node: PostgresNode, other: Standby
    ) -> None:
        url = failover_url(node, other)
        with over(url, max_ttl=600) as redlock, redlock.lock("r", ttl=600, wait=60) as lock:
            eventually(lambda: other.query(VALUE))
            node.kill()
            other.promote()
            renew_now(redlock, lock)
            renew_now(redlock, lock)
            assert other.query(VALUE) != []
            with Redlock([other.url], node_timeout=NODE_TIMEOUT, max_ttl=600) as rival:
                assert is_refused(rival)


def of_event(caplog: pytest.LogCaptureFixture, event: str) -> list[logging.LogRecord]:
    return [record for record in list(caplog.records) if getattr(record, "event", "") == event]


def cut_off(follower: Standby) -> None:
    """Let a standby receive nothing more of its primary."""
    follower.query("ALTER SYSTEM SET primary_conninfo = ''")
    follower.query("SELECT pg_reload_conf()")
    eventually(lambda: not follower.query("SELECT 1 FROM pg_stat_wal_receiver"))


def refusal_of(redlock: Redlock, words: str) -> str:
    """Return why a lock is refused if it is for these words, else ""."""
    try:
        redlock.lock("r", ttl=TTL).acquire()
    except QuorumUnreachable as refusal:
        return str(refusal) if words in str(refusal) else ""
    pytest.fail("a lock was granted")


class TestASynchronousStandby:
    @pytest.mark.parametrize("end", ["pg_cancel_backend", "pg_terminate_backend"])
    def test_a_commit_whose_wait_is_cancelled_is_no_vote(
        self, node: PostgresNode, pool: ThreadPoolExecutor, end: str
    ) -> None:
        with standby(node, synchronous=True) as other, over(node.url) as redlock:
            with redlock.lock("before", ttl=TTL, wait=60):
                pass
            other.kill()
            granted = pool.submit(is_refused, redlock)
            [(pid,)] = eventually(lambda: node.query(WAITS_FOR_STANDBY))
            assert node.query(f"SELECT {end}(%s)", pid) == [(True,)]
            assert granted.result()
            assert "already committed locally" in node.log()
            other.start()

    def test_the_cause_names_the_standby(
        self, node: PostgresNode, pool: ThreadPoolExecutor
    ) -> None:
        with standby(node, synchronous=True) as other, over(node.url) as redlock:
            with redlock.lock("before", ttl=TTL, wait=60):
                pass
            other.kill()
            refusal = pool.submit(refusal_of, redlock, "standby did not confirm")
            [(pid,)] = eventually(lambda: node.query(WAITS_FOR_STANDBY))
            node.query("SELECT pg_cancel_backend(%s)", pid)
            assert refusal.result()
            other.start()

    def test_locks_are_granted_again_once_it_is_back(self, node: PostgresNode) -> None:
        quick = over(node.url, node_timeout=QUICK)
        with standby(node, synchronous=True) as other, quick as redlock:
            other.kill()
            with pytest.raises(QuorumUnreachable):
                redlock.lock("r", ttl=TTL).acquire()
            other.start()
            assert redlock.lock("r", ttl=TTL).try_acquire(wait=60)

    @pytest.mark.parametrize("through", ["no pooler", "a pooler"])
    def test_no_overdue_call_outlives_its_connection(
        self, node: PostgresNode, pool: ThreadPoolExecutor, through: str
    ) -> None:
        with standby(node, synchronous=True) as other, pooler(node) as between:
            url = node.url if through == "no pooler" else between.url
            with over(url, node_timeout=QUICK) as redlock, over(url) as slow:
                other.kill()
                two = [pool.submit(is_refused, redlock, name) for name in ("r", "s")]
                assert all(one.result() for one in two)
                eventually(lambda: not node.query(WAITS_FOR_STANDBY))
                left = pool.submit(is_refused, slow, "t")
                eventually(lambda: node.query(WAITS_FOR_STANDBY))
                with closing(address_of(node.url).dial(60)) as asker:
                    asker.send_command("ENDWAITS")
                    assert asker.read_response() == 0  # its client still waits
            assert left.result()
            eventually(lambda: not node.query(WAITS_FOR_STANDBY))

    def test_a_client_that_tries_again_and_again_connects_once_a_second(
        self, node: PostgresNode
    ) -> None:
        with standby(node, synchronous=True) as other, over(node.url, node_timeout=0.2) as redlock:
            [client], opened = redlock.session.nodes.all, set[float]()
            other.kill()
            while len(opened) < 3:
                connection = eventually(lambda: client.connection)
                opened.add(connection.opened_at)
                assert is_refused(redlock)
            moments = sorted(opened)
            for before, after in pairwise(moments):
                assert after - before >= MAX_RECONNECT_PAUSE


class TestAPause:
    def test_no_caller_waits_for_it_to_end(self, node: PostgresNode) -> None:
        """Neither one that is connected, nor a new one, which waits for its connect."""
        quick = over(node.url, node_timeout=QUICK)
        with quick as redlock, Redlock([node.url], node_timeout=0.2) as fresh:
            node.pause()
            try:
                with pytest.raises(QuorumUnreachable, match="no answer"):
                    redlock.lock("r", ttl=TTL).acquire()
                with pytest.raises(QuorumUnreachable):
                    fresh.lock("r").acquire()
            finally:
                node.resume()
            assert redlock.lock("r", ttl=TTL).try_acquire(wait=60)

    def test_a_held_lock_is_lost_in_time_and_all_goes_on_afterwards(
        self, node: PostgresNode, caplog: pytest.LogCaptureFixture
    ) -> None:
        with over(node.url, node_timeout=QUICK) as redlock:
            lost = Losses()
            lock = redlock.lock("r", ttl=4 * QUICK, wait=60, on_lost=lost).acquire()
            node.pause()
            try:
                eventually(lambda: lost.seen)
                assert not lock.held
            finally:
                node.resume()
            with over(node.url) as rival:
                assert rival.lock("r", ttl=TTL).try_acquire(wait=60)
            eventually(lambda: of_event(caplog, "lock_lost"))

    def test_a_short_one_costs_no_lock(self, node: PostgresNode) -> None:
        options = {"node_timeout": 60.0, "max_ttl": 600.0}
        with over(node.url, **options) as redlock, redlock.lock("r", ttl=600, wait=60) as lock:
            [client], before = redlock.session.nodes.all, valid_until(lock)
            node.pause()
            redlock.session.watchdog.renew_by(redlock.session.clock.now())
            eventually(lambda: client.connection and client.connection.in_flight)
            node.resume()
            eventually(lambda: valid_until(lock) > before)
            assert lock.held


class Losses:
    """Hears of a loss."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def __call__(self, loss: object) -> None:
        self.seen.append(loss)
