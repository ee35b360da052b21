"""A connection to a PostgreSQL node that ends, is cut, pooled or forked costs no lease."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest

from celery_redlock import LockTaken, QuorumUnreachable, Redlock
from celery_redlock.lock.postgres import address
from celery_redlock.testing import EmbeddedNode
from celery_redlock.testing.servers import claim_port
from tests.conftest import NODE_TIMEOUT, PATIENCE, TTL, eventually, hearing, see_renewal, settle
from tests.contract.conftest import in_child
from tests.contract.proxy import BOTH_WAYS, FAIR, Proxy, Weather
from tests.postgres import Pooler, PostgresNode, pooler

VALUE = "SELECT value FROM redlock.key WHERE name = '{redlock}:lock:r'"
LEFT = "SELECT name FROM redlock.key WHERE name LIKE '{redlock}:lock:%'"
OURS = "FROM pg_stat_activity WHERE application_name = 'celery_redlock'"
LISTENERS = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock'"
CLOSES = 20
PROMPT = 1.0  # s in which a message arrives on a busy machine
LOOKS = 2.0  # s in which a waiter that no message reaches looks by itself


@pytest.fixture
def node(postgres_template: Path) -> Iterator[PostgresNode]:
    with PostgresNode(postgres_template, fsync=False, max_connections=100) as made:
        made.setup()
        yield made


@pytest.fixture
def pool_of(node: PostgresNode) -> Iterator[Pooler]:
    """Give a pgbouncer before the node."""
    address.told.clear()
    with pooler(node) as made:
        yield made


@contextmanager
def over(url: str, node_timeout: float = NODE_TIMEOUT) -> Iterator[Redlock]:
    """Give a client, connected to its node."""
    with Redlock([url], node_timeout=node_timeout) as made:
        settle(made)
        yield made


def waits(redlock: Redlock, got: list[float], **options: Any) -> None:
    """Acquire and release, and note when."""
    with redlock.lock("r", ttl=TTL, wait=60, **options):
        got.append(time.monotonic())


class TestAnEnd:
    def test_a_terminated_backend_costs_no_lock(self, node: PostgresNode) -> None:
        with over(node.url) as redlock, redlock.lock("r", ttl=TTL, wait=60) as lock:
            value = node.query(VALUE)
            for _ in range(3):
                assert node.query(f"SELECT pg_terminate_backend(pid) {OURS}")
                see_renewal(lock)
            assert node.query(VALUE) == value
            assert lock.held
            with over(node.url) as rival, pytest.raises(LockTaken):
                rival.lock("r", ttl=TTL).acquire()

    def test_a_lock_can_be_released_after_it(self, node: PostgresNode) -> None:
        with over(node.url) as redlock:
            with redlock.lock("r", ttl=TTL, wait=60):
                assert node.query(f"SELECT pg_terminate_backend(pid) {OURS}")
            eventually(lambda: not node.query(VALUE), within=TTL - NODE_TIMEOUT)

    def test_a_backend_that_ends_in_the_middle_of_a_grant_costs_a_moment(
        self, node: PostgresNode, pool: ThreadPoolExecutor
    ) -> None:
        with over(node.url, PATIENCE) as redlock, psycopg.connect(node.url) as blocks:
            blocks.execute("LOCK TABLE redlock.key")
            granted = pool.submit(redlock.lock("r").try_acquire, 30)
            blocked = f"SELECT pid {OURS} AND wait_event_type = 'Lock'"
            [(pid,)] = eventually(lambda: node.query(blocked))
            node.query("SELECT pg_terminate_backend(%s)", pid)
            blocks.rollback()
            assert granted.result()

    def test_a_line_that_swallows_all_is_replaced_and_the_lock_stays(
        self, node: PostgresNode
    ) -> None:
        """A firewall forgets an idle connection: what is sent on it gets no answer at all."""
        with closing(Proxy(cast("EmbeddedNode", node))) as line:
            url = node.url.replace(str(node.port), str(line.port))
            with over(url) as redlock, redlock.lock("r", ttl=TTL, wait=60) as lock:
                before = dict(node.query(f"SELECT pid, backend_start {OURS}"))
                line.weather = Weather(swallows=BOTH_WAYS)
                eventually(lambda: redlock.session.nodes.all[0].error)
                line.weather = FAIR
                see_renewal(lock)
                assert dict(node.query(f"SELECT pid, backend_start {OURS}")).keys() - before
                line.cut()
                see_renewal(lock)

    def test_a_pooler_that_restarts_costs_no_lock(
        self, node: PostgresNode, pool_of: Pooler
    ) -> None:
        with over(pool_of.url) as redlock, redlock.lock("r", ttl=TTL, wait=60) as lock:
            value = node.query(VALUE)
            pool_of.restart()
            see_renewal(lock)
            see_renewal(lock)
            assert node.query(VALUE) == value
        eventually(lambda: not node.query(VALUE), within=TTL - NODE_TIMEOUT)

    def test_a_close_cuts_off_no_release(self, node: PostgresNode, pool_of: Pooler) -> None:
        for n in range(CLOSES):
            with Redlock([pool_of.url]) as redlock, redlock.lock(f"r{n}", ttl=TTL, wait=60):
                pass
        assert node.query(LEFT) == []

    def test_a_close_waits_for_a_node_timeout_at_most(self, node: PostgresNode) -> None:
        redlock = Redlock([node.url], node_timeout=PROMPT)
        lock = redlock.lock("r", ttl=TTL, wait=60).acquire()
        node.pause()
        try:
            lock.release()
            began = time.monotonic()
            redlock.close()
            assert time.monotonic() - began < 2 * PROMPT
        finally:
            node.resume()


class TestTimeoutsAndIsolation:
    def test_a_statement_timeout_costs_a_vote_and_no_more(
        self, node: PostgresNode, pool: ThreadPoolExecutor
    ) -> None:
        node.query("ALTER ROLE postgres SET statement_timeout = '100ms'")
        with over(node.url) as redlock, redlock.lock("r", ttl=TTL, wait=60) as lock:
            with closing(node.connect()) as blocks:
                blocks.execute("SET statement_timeout = 0")
                with blocks.transaction():
                    blocks.execute("LOCK TABLE redlock.key")
                    with pytest.raises(QuorumUnreachable, match="canceling statement due to"):
                        redlock.lock("other", ttl=TTL).acquire()
            see_renewal(lock)
            assert redlock.lock("other", ttl=TTL).try_acquire(wait=60)

    @pytest.mark.parametrize("level", ["serializable", "repeatable read"])
    def test_another_default_isolation_changes_nothing(
        self, node: PostgresNode, pool: ThreadPoolExecutor, level: str
    ) -> None:
        node.query(f"ALTER DATABASE postgres SET default_transaction_isolation = '{level}'")
        with over(node.url) as redlock, over(node.url) as rival:
            got: list[float] = []
            with redlock.lock("r", ttl=TTL, wait=60):
                with pytest.raises(LockTaken):
                    rival.lock("r", ttl=TTL).acquire()
                waiting = pool.submit(waits, rival, got)
                eventually(lambda: hearing(rival))
            waiting.result()
            assert got
            crowd = [pool.submit(waits, one, got) for one in 4 * [redlock, rival]]
            for one in crowd:
                one.result()

    def test_a_default_isolation_that_changes_behind_a_pooler_costs_no_lock(
        self, node: PostgresNode, pool_of: Pooler
    ) -> None:
        with over(pool_of.url) as redlock, redlock.lock("r", ttl=TTL, wait=60) as lock:
            node.query("ALTER DATABASE postgres SET default_transaction_isolation = 'serializable'")
            assert node.query(f"SELECT pg_terminate_backend(pid) {OURS}")
            see_renewal(lock)
            with redlock.lock("other", ttl=TTL, wait=60):
                see_renewal(lock)

    @pytest.mark.parametrize("code", ["40001", "40P01", "55P03", "57014"])
    def test_a_call_that_must_be_repeated_is_sent_once_more_and_then_it_is_no_vote(
        self, node: PostgresNode, code: str
    ) -> None:
        node.query("CREATE SEQUENCE tries")
        node.query("CREATE TABLE fails (first int, last int)")
        node.query("INSERT INTO fails VALUES (0, 0)")
        node.query(
            "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ DECLARE this int;"
            " BEGIN IF NEW.name LIKE '%:lock:r' THEN this := nextval('public.tries');"
            " IF EXISTS (SELECT FROM public.fails WHERE this BETWEEN first AND last) THEN"
            f" RAISE EXCEPTION 'as if' USING ERRCODE = '{code}'; END IF; END IF;"
            " RETURN NEW; END $$"
        )
        node.query(
            "CREATE TRIGGER fail BEFORE INSERT ON redlock.key FOR EACH ROW EXECUTE FUNCTION fail()"
        )
        with over(node.url) as redlock:
            node.query("UPDATE fails SET first = 1, last = 1")
            with redlock.lock("r", ttl=TTL, renew=False) as lock:  # one try of ours, two there
                assert lock.held
            assert node.query("SELECT last_value FROM public.tries") == [(2,)]
            eventually(lambda: not node.query(VALUE))
            node.query("UPDATE fails SET first = 3, last = 4")
            with pytest.raises(QuorumUnreachable, match="as if"):
                redlock.lock("r", ttl=TTL).acquire()
            assert node.query("SELECT last_value FROM public.tries") == [(4,)]
            assert node.query(VALUE) == []

    def test_a_grant_that_runs_twice_is_one_grant(self, node: PostgresNode) -> None:
        grant = 'SELECT redlock."grant"(%s::bytea[], %s::bytea[])'
        keys = [b"{redlock}:lock:r", b"{redlock}:run", b"{redlock}:quiet", b"{redlock}:fence"]
        call = keys, [b"mine", b"60000", b"7", b"", b""]
        first, again = node.query(grant, *call), node.query(grant, *call)
        assert first == again == [(b"*2\r\n:1\r\n:7\r\n",)]
        assert len(node.query(VALUE)) == 1
        other = keys, [b"other", b"60000", b"9", b"", b""]
        [(refusal,)] = node.query(grant, *other)
        assert refusal.startswith(b"*4\r\n:0\r\n")


class TestMessages:
    def free_after(
        self, holder: Redlock, waiter: Redlock, pool: ThreadPoolExecutor
    ) -> Callable[[], float]:
        """Return a function that returns after how many s a waiter gets a lock once it is free."""
        got: list[float] = []

        def free() -> float:
            lock.release()
            released = time.monotonic()
            waiting.result()
            return got[0] - released

        lock = holder.lock("r", ttl=TTL, wait=60).acquire()
        waiting = pool.submit(waits, waiter, got)
        eventually(lambda: waiter.session.callers.count)
        return free

    def unheard(self, url: str, pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture) -> str:
        """See waiters look by themselves; return the one WARNING that says why."""
        with over(url) as holder, over(url) as waiter:
            for _ in range(4):
                free = self.free_after(holder, waiter, pool)
                eventually(lambda: told(caplog))
                assert free() < LOOKS
            assert not hearing(waiter)
        [line] = told(caplog)
        assert line.levelno == logging.WARNING
        return line.getMessage()

    def test_waiters_behind_a_pooler_look_by_themselves_and_one_line_says_so(
        self, pool_of: Pooler, pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
    ) -> None:
        line = self.unheard(pool_of.url, pool, caplog)
        assert "name listen_host and listen_port" in line
        assert f"127.0.0.1:{pool_of.port}" in line

    def test_no_session_behind_a_pooler_keeps_what_a_subscription_leaves(
        self, node: PostgresNode, pool_of: Pooler, pool: ThreadPoolExecutor
    ) -> None:
        with over(pool_of.url) as holder, over(pool_of.url) as waiter:
            assert self.free_after(holder, waiter, pool)() < LOOKS
            assert node.query(LISTENERS) == []

    def test_messages_come_from_the_server_that_the_url_names_for_them(
        self, node: PostgresNode, pool_of: Pooler, pool: ThreadPoolExecutor,
        caplog: pytest.LogCaptureFixture,
    ) -> None:  # fmt: skip
        url = f"{pool_of.url}?listen_host=127.0.0.1&listen_port={node.port}"
        with over(url) as holder, over(url) as waiter:
            for _ in range(4):
                free = self.free_after(holder, waiter, pool)
                eventually(lambda: hearing(waiter))
                settle(waiter)
                assert free() < PROMPT
        assert not told(caplog)

    @pytest.mark.parametrize("mistake", ["the pooler", "a port without a server"])
    def test_one_line_says_so_if_the_url_names_a_wrong_server_for_them(
        self, node: PostgresNode, pool_of: Pooler, pool: ThreadPoolExecutor,
        caplog: pytest.LogCaptureFixture, mistake: str,
    ) -> None:  # fmt: skip
        wrong, cause = pool_of.port, "(a pooler stands between)"
        if mistake != "the pooler":
            with closing(claim_port()) as claim:
                wrong, cause = claim.getsockname()[1], "Connection refused"
        url = f"{pool_of.url}?listen_host=127.0.0.1&listen_port={wrong}"
        assert cause in self.unheard(url, pool, caplog)

    def test_a_channel_that_was_left_takes_no_part_in_a_ping(self, node: PostgresNode) -> None:
        pubsub, spoke, told = address.address_of(node.url).pubsub(PATIENCE, PATIENCE), False, []

        def hears(count: int) -> bool:
            nonlocal spoke
            heard, replies = pubsub.receive()
            spoke |= heard
            told.extend(replies)
            return len(told) == count

        for channel in ("first", "other"):
            pubsub.send("SUBSCRIBE", channel)
        eventually(lambda: hears(2))
        pubsub.send("UNSUBSCRIBE", "first")
        eventually(lambda: hears(3))
        assert told[2] == [b"unsubscribe", b"first", 0]
        spoke = False
        pubsub.send("PING", "")
        eventually(lambda: hears(3) and spoke)
        pubsub.disconnect()

    def test_a_terminated_listener_is_replaced(
        self, node: PostgresNode, pool: ThreadPoolExecutor
    ) -> None:
        with over(node.url) as holder, over(node.url) as waiter:
            free = self.free_after(holder, waiter, pool)
            [(pid,)] = eventually(lambda: node.query(LISTENERS))
            node.query("SELECT pg_terminate_backend(%s)", pid)
            [(other,)] = eventually(lambda: new_ones(node, pid))
            assert other != pid
            eventually(lambda: hearing(waiter))
            settle(waiter)
            assert free() < PROMPT

    def test_a_release_before_that_wakes_the_waiter_anyway(
        self, node: PostgresNode, pool: ThreadPoolExecutor
    ) -> None:
        with over(node.url) as holder, over(node.url) as waiter:
            free = self.free_after(holder, waiter, pool)
            [(pid,)] = eventually(lambda: node.query(LISTENERS))
            node.query("SELECT pg_terminate_backend(%s)", pid)
            assert free() < LOOKS

    def test_all_else_works_through_a_pooler(self, pool_of: Pooler) -> None:
        with over(pool_of.url) as redlock, over(pool_of.url) as rival:
            with redlock.lock("r", ttl=TTL, wait=60, fencing=True) as lock:
                with pytest.raises(LockTaken):
                    rival.lock("r", ttl=TTL).acquire()
                see_renewal(lock)
                assert lock.fencing_token
                [seen] = redlock.locks().locks
                assert seen.resource == "r"
            two = [one.lock("p", ttl=TTL, limit=2, wait=60).acquire() for one in (redlock, rival)]
            with pytest.raises(LockTaken):
                redlock.lock("p", ttl=TTL, limit=2, reentrant=False).acquire()
            for one in two:
                one.release()
            for one in (redlock, rival):
                with one.lock("s", ttl=TTL, rate="2/h", wait=60):
                    pass
            with pytest.raises(LockTaken):
                redlock.lock("s", ttl=TTL, rate="2/h").acquire()


def told(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [one for one in caplog.records if getattr(one, "event", "") == "messages_unheard"]


def new_ones(node: PostgresNode, before: int) -> list[tuple[Any, ...]]:
    """Return the processes of the server that listen, without one."""
    return [row for row in node.query(LISTENERS) if row != (before,)]


class TestProcesses:
    def test_a_client_that_was_used_before_a_fork_works_on_both_sides(
        self, node: PostgresNode
    ) -> None:
        with over(node.url) as redlock:
            mine = redlock.lock("r", ttl=TTL, wait=60).acquire()
            servers = node.query(f"SELECT count(*) {OURS}")
            for _ in range(3):
                in_child(lambda: child_works(redlock))
                see_renewal(mine)
            assert mine.held
            mine.release()
            with redlock.lock("r", ttl=TTL, wait=60) as lock:
                see_renewal(lock)
            eventually(lambda: node.query(f"SELECT count(*) {OURS}") == servers)

    def test_greenlets_run_while_others_wait_renew_and_connect(self, node: PostgresNode) -> None:
        story = f"""
import gevent.monkey
gevent.monkey.patch_all()
import gevent, json, os, time
from celery_redlock import Redlock
redlock = Redlock(["{node.url}"], node_timeout={NODE_TIMEOUT})
other = Redlock(["{node.url}"], node_timeout={NODE_TIMEOUT})
ends, longest, done, inside, most = [], [0.0], [], [0], [0]
def tick():
    before = time.monotonic()
    while not ends:
        gevent.sleep(0.005)
        now = time.monotonic()
        longest[0] = max(longest[0], now - before)
        before = now
def work(n):
    with (redlock, other)[n % 2].lock("r", ttl={TTL}, wait=60) as lock:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        gevent.sleep(0.02)
        inside[0] -= 1
        done.append(lock.held)
ticking = gevent.spawn(tick)
kept = redlock.lock("kept", ttl={TTL}).acquire(wait=60)
end = time.monotonic() + kept.remaining
gevent.joinall([gevent.spawn(work, n) for n in range(12)])
while time.monotonic() + kept.remaining < end + 1:
    gevent.sleep(0.05)
refused = other.lock("kept", ttl={TTL}).try_acquire(wait=1)
ends.append(True)
gevent.joinall([ticking])
print(json.dumps({{"done": done, "most": most[0], "longest": longest[0], "refused": not refused}}),
      flush=True)
os._exit(0)
"""
        told = run(story)
        assert told["done"] == [True] * 12
        assert told["most"] == 1
        assert told["refused"]
        assert told["longest"] < NODE_TIMEOUT / 2

    def test_a_server_that_stands_still_stops_no_greenlet(self, node: PostgresNode) -> None:
        story = f"""
import gevent.monkey
gevent.monkey.patch_all()
import gevent, json, os, time
from celery_redlock import Redlock
longest, ends = [0.0], []
def tick():
    before = time.monotonic()
    while not ends:
        gevent.sleep(0.005)
        now = time.monotonic()
        longest[0] = max(longest[0], now - before)
        before = now
ticking = gevent.spawn(tick)
words = ""
try:
    Redlock(["{node.url}"], node_timeout={NODE_TIMEOUT}).lock("r", ttl={TTL}).acquire()
except Exception as refusal:
    words = type(refusal).__name__
ends.append(True)
gevent.joinall([ticking])
print(json.dumps({{"longest": longest[0], "words": words}}), flush=True)
os._exit(0)
"""
        node.pause()
        try:
            told = run(story)
        finally:
            node.resume()
        assert told["words"] == "QuorumUnreachable"
        assert told["longest"] < NODE_TIMEOUT / 2


def child_works(redlock: Redlock) -> bool:
    """Return whether a forked child is refused what its parent holds, and gets another lock."""
    try:
        redlock.lock("r", ttl=TTL).acquire()
    except LockTaken:
        with redlock.lock("other", ttl=TTL, wait=60) as lock:
            see_renewal(lock)
            return lock.held
    return False


def run(story: str) -> dict[str, Any]:
    """Run a story in a process of its own; return what it prints last."""
    command = [sys.executable, "-W", "ignore", "-c", story]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return cast("dict[str, Any]", json.loads(done.stdout.splitlines()[-1]))
