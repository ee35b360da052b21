"""A connection to a PostgreSQL node that ends, is cut, pooled or forked costs no lease."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest

from celery_redlock import LockTaken, QuorumUnreachable, Redlock
from celery_redlock.lock import retry
from celery_redlock.lock.postgres import address
from celery_redlock.lock.postgres.pipeline import CLOCK, Pipeline, ready
from celery_redlock.lock.transport.command import encode_command
from celery_redlock.testing import EmbeddedNode
from celery_redlock.testing.servers import claim_port
from tests.conftest import NODE_TIMEOUT, PATIENCE, TTL, eventually, hearing, settle
from tests.contract import stories
from tests.contract.conftest import in_child
from tests.contract.proxy import BOTH_WAYS, FAIR, Proxy, Weather
from tests.contract.renewals import renew_now
from tests.postgres import Pooler, PostgresNode, pooler, standing_node

pytestmark = pytest.mark.postgresql

VALUE = "SELECT value FROM redlock.key WHERE name = '{redlock}:lock:r'"
LEFT = "SELECT name FROM redlock.key WHERE name LIKE '{redlock}:lock:%'"
OURS = "FROM pg_stat_activity WHERE application_name = 'celery_redlock'"
LISTENERS = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock'"
CLOSES = 20
QUICK = 0.5  # s of a node timeout that a test waits for
LONG = 600.0  # s: of a lease that ends by its release alone, and for longer than any test waits


@pytest.fixture
def node(postgres_template: Path) -> Iterator[PostgresNode]:
    with standing_node(postgres_template) as made:
        yield made


@pytest.fixture
def pool_of(node: PostgresNode) -> Iterator[Pooler]:
    """Give a pgbouncer before the node."""
    address.warned_nodes.clear()
    with pooler(node) as made:
        yield made


@contextmanager
def over(url: str, node_timeout: float = NODE_TIMEOUT) -> Iterator[Redlock]:
    """Give a client, connected to its node."""
    with Redlock([url], node_timeout=node_timeout, max_ttl=LONG) as made:
        settle(made)
        yield made


def waits(redlock: Redlock, ttl: float = TTL) -> bool:
    """Acquire and release; return whether the lock was held."""
    with redlock.lock("r", ttl=ttl, wait=LONG) as lock:
        return lock.held


def exchange_without_end(pipeline: Pipeline) -> None:
    while True:
        pipeline.send(encode_command("PING"))
        pipeline.exchange(CLOCK.now() + PATIENCE)


class TestAnEnd:
    def test_a_terminated_backend_costs_no_lock(self, node: PostgresNode) -> None:
        with over(node.url) as redlock, redlock.lock("r", ttl=LONG, wait=60) as lock:
            value = node.query(VALUE)
            for _ in range(2):
                assert node.query(f"SELECT pg_terminate_backend(pid) {OURS}")
                renew_now(redlock, lock)
            assert node.query(VALUE) == value
            with over(node.url) as rival, pytest.raises(LockTaken):
                rival.lock("r", ttl=TTL).acquire()

    def test_one_by_an_idle_timeout_costs_no_vote_and_is_no_error(
        self, node: PostgresNode, caplog: pytest.LogCaptureFixture
    ) -> None:
        # longer than a connection may be idle before its end is looked for
        node.query("ALTER ROLE postgres SET idle_session_timeout = 1500")
        with over(node.url) as redlock:
            for _ in range(2):
                lock = redlock.lock("r", ttl=LONG).acquire()
                eventually(lambda: node.query(f"SELECT count(*) {OURS}") == [(0,)])
                lock.release()
                eventually(lambda: node.query(LEFT) == [])
                eventually(lambda: node.query(f"SELECT count(*) {OURS}") == [(0,)])
        assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []

    @pytest.mark.parametrize("use", [Pipeline.receive, exchange_without_end])
    def test_its_cause_is_in_the_words_of_the_server(
        self, node: PostgresNode, use: Callable[[Pipeline], object]
    ) -> None:
        with over(node.url) as redlock:
            dialled = redlock.session.nodes.all[0].address.dial(PATIENCE)
            node.query(f"SELECT pg_terminate_backend({dialled.server_pid})")
            assert ready(dialled.pipeline.fileno(), writes=False, until=CLOCK.now() + PATIENCE)
            with pytest.raises(OSError, match="terminating connection due to administrator comm"):
                use(dialled.pipeline)
            dialled.disconnect()

    def test_a_lock_can_be_released_after_it(self, node: PostgresNode) -> None:
        with over(node.url) as redlock:
            with redlock.lock("r", ttl=LONG, wait=60):
                assert node.query(f"SELECT pg_terminate_backend(pid) {OURS}")
            eventually(lambda: not node.query(VALUE))

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
            with over(url, QUICK) as redlock, redlock.lock("r", ttl=LONG, wait=60) as lock:
                before = dict(node.query(f"SELECT pid, backend_start {OURS}"))
                line.weather = Weather(swallows=BOTH_WAYS)
                redlock.session.watchdog.renew_by(redlock.session.clock.now())
                eventually(lambda: redlock.session.nodes.all[0].error)
                line.weather = FAIR
                renew_now(redlock, lock)
                assert dict(node.query(f"SELECT pid, backend_start {OURS}")).keys() - before
                line.cut()
                renew_now(redlock, lock)

    def test_a_pooler_that_restarts_costs_no_lock(
        self, node: PostgresNode, pool_of: Pooler
    ) -> None:
        with over(pool_of.url) as redlock, redlock.lock("r", ttl=LONG, wait=60) as lock:
            value = node.query(VALUE)
            pool_of.restart()
            renew_now(redlock, lock)
            renew_now(redlock, lock)
            assert node.query(VALUE) == value
        eventually(lambda: not node.query(VALUE))

    def test_a_close_cuts_off_no_release(self, node: PostgresNode, pool_of: Pooler) -> None:
        for n in range(CLOSES):
            with Redlock([pool_of.url]) as redlock, redlock.lock(f"r{n}", ttl=TTL, wait=60):
                pass
        assert node.query(LEFT) == []

    def test_a_close_does_not_wait_for_a_server_that_stands_still(
        self, node: PostgresNode, pool: ThreadPoolExecutor
    ) -> None:
        redlock = Redlock([node.url], node_timeout=QUICK)
        lock = redlock.lock("r", wait=60).acquire()
        node.pause()
        try:
            lock.release()
            pool.submit(redlock.close).result(60)
        finally:
            node.resume()


class TestTimeoutsAndIsolation:
    def test_a_statement_timeout_costs_a_vote_and_no_more(
        self, node: PostgresNode, pool: ThreadPoolExecutor
    ) -> None:
        node.query("ALTER ROLE postgres SET statement_timeout = '100ms'")
        with over(node.url) as redlock, redlock.lock("r", ttl=LONG, wait=60) as lock:
            with closing(node.connect()) as blocks:
                blocks.execute("SET statement_timeout = 0")
                with blocks.transaction():
                    blocks.execute("LOCK TABLE redlock.key")
                    with pytest.raises(QuorumUnreachable, match="canceling statement due to"):
                        redlock.lock("other", ttl=TTL).acquire()
            renew_now(redlock, lock)
            with redlock.lock("other", ttl=TTL, wait=60) as other:
                assert other.held

    @pytest.mark.parametrize("level", ["serializable", "repeatable read"])
    def test_another_default_isolation_changes_nothing(
        self, node: PostgresNode, pool: ThreadPoolExecutor, level: str
    ) -> None:
        node.query(f"ALTER DATABASE postgres SET default_transaction_isolation = '{level}'")
        with over(node.url) as redlock, over(node.url) as rival:
            with redlock.lock("r", ttl=TTL, wait=60):
                with pytest.raises(LockTaken):
                    rival.lock("r", ttl=TTL).acquire()
                waiting = pool.submit(waits, rival)
                eventually(lambda: hearing(rival))
            assert waiting.result()
            crowd = [pool.submit(waits, one) for one in 4 * [redlock, rival]]
            assert all(one.result() for one in crowd)

    def test_a_default_isolation_that_changes_behind_a_pooler_costs_no_lock(
        self, node: PostgresNode, pool_of: Pooler
    ) -> None:
        with over(pool_of.url) as redlock, redlock.lock("r", ttl=LONG, wait=60) as lock:
            node.query("ALTER DATABASE postgres SET default_transaction_isolation = 'serializable'")
            assert node.query(f"SELECT pg_terminate_backend(pid) {OURS}")
            renew_now(redlock, lock)
            with redlock.lock("other", ttl=TTL, wait=60):
                renew_now(redlock, lock)

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
    @pytest.fixture(autouse=True)
    def looks_if_deaf(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let a waiter that hears look for itself after minutes: what wakes it is a message."""
        monkeypatch.setattr(retry, "MAX_LISTENING_PAUSE", LONG)
        monkeypatch.setattr(retry, "REGISTRATION_TTL", 2 * LONG)

    def free_after(
        self, holder: Redlock, waiter: Redlock, pool: ThreadPoolExecutor
    ) -> Callable[[], None]:
        """Return a function that frees a lock, and returns when the waiter has got it."""

        def free() -> None:
            lock.release()
            assert waiting.result(60)

        lock = holder.lock("r", ttl=LONG, wait=60).acquire()
        waiting = pool.submit(waits, waiter, LONG)
        eventually(lambda: waiter.session.callers.count)
        return free

    def unheard(self, url: str, pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture) -> str:
        """See waiters look by themselves; return the one WARNING that says why."""
        with over(url) as holder, over(url) as waiter:
            for _ in range(2):
                free = self.free_after(holder, waiter, pool)
                eventually(lambda: told(caplog))
                free()
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
            self.free_after(holder, waiter, pool)()
            assert node.query(LISTENERS) == []

    def test_messages_come_from_the_server_that_the_url_names_for_them(
        self, node: PostgresNode, pool_of: Pooler, pool: ThreadPoolExecutor,
        caplog: pytest.LogCaptureFixture,
    ) -> None:  # fmt: skip
        url = f"{pool_of.url}?listen_host=127.0.0.1&listen_port={node.port}"
        with over(url) as holder, over(url) as waiter:
            for _ in range(2):
                free = self.free_after(holder, waiter, pool)
                eventually(lambda: hearing(waiter))
                settle(waiter)
                free()
        assert not told(caplog)

    @pytest.mark.parametrize("mistake", ["the pooler", "a port without a server"])
    def test_one_line_says_so_if_the_url_names_a_wrong_server_for_them(
        self, node: PostgresNode, pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture,
        mistake: str,
    ) -> None:  # fmt: skip
        address.warned_nodes.clear()
        with pooler(node, pool_size=1) as shared:  # of several, a look may meet another one
            wrong, cause = shared.port, "(a pooler stands between)"
            if mistake != "the pooler":
                with closing(claim_port()) as claim:
                    wrong, cause = claim.getsockname()[1], "Connection refused"
            url = f"{shared.url}?listen_host=127.0.0.1&listen_port={wrong}"
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
            free()

    def test_a_release_before_that_wakes_the_waiter_anyway(
        self, node: PostgresNode, pool: ThreadPoolExecutor
    ) -> None:
        with over(node.url) as holder, over(node.url) as waiter:
            free = self.free_after(holder, waiter, pool)
            [(pid,)] = eventually(lambda: node.query(LISTENERS))
            node.query("SELECT pg_terminate_backend(%s)", pid)
            free()

    def test_all_else_works_through_a_pooler(self, pool_of: Pooler) -> None:
        with over(pool_of.url) as redlock, over(pool_of.url) as rival:
            with redlock.lock("r", ttl=TTL, wait=60, fencing=True) as lock:
                with pytest.raises(LockTaken):
                    rival.lock("r", ttl=TTL).acquire()
                renew_now(redlock, lock)
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
            mine = redlock.lock("r", ttl=LONG, wait=60).acquire()
            servers = node.query(f"SELECT count(*) {OURS}")
            for _ in range(2):
                in_child(lambda: child_works(redlock))
                renew_now(redlock, mine)
            mine.release()
            with redlock.lock("r", ttl=TTL, wait=60) as lock:
                renew_now(redlock, lock)
            eventually(lambda: node.query(f"SELECT count(*) {OURS}") == servers)

    @stories.TOGETHER
    def test_greenlets_run_while_others_wait_renew_and_connect(self, node: PostgresNode) -> None:
        story = f"""
redlock = Redlock(["{node.url}"], node_timeout={NODE_TIMEOUT})
other = Redlock(["{node.url}"], node_timeout={NODE_TIMEOUT})
ticks, ends, done, ticked, inside, most = [0], [], [], [], [0], [0]
def tick():
    while not ends:
        sleep(0.001)
        ticks[0] += 1
def work(n):
    with (redlock, other)[n % 2].lock("r", ttl={TTL}, wait=60) as lock:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        before = ticks[0]
        while ticks[0] < before + 5:  # those that wait do not stop this one
            sleep(0.001)
        inside[0] -= 1
        done.append(lock.held)
ticking = spawn(tick)
kept = redlock.lock("kept", ttl={TTL}).acquire(wait=60)
join([spawn(work, n) for n in range(12)])
kept.extend()
refused = not other.lock("kept", ttl={TTL}).try_acquire(wait=0.1)
ends.append(True)
join([ticking])
told = {{"done": done, "most": most[0], "refused": refused}}
"""
        told = stories.tell(stories.GEVENT, story)
        assert told == {"done": [True] * 12, "most": 1, "refused": True}

    @stories.TOGETHER
    def test_a_server_that_stands_still_stops_no_greenlet(self, node: PostgresNode) -> None:
        """The server goes on after ticks of another greenlet: else no lock would be granted."""
        story = f"""
def tick():
    for _ in range(20):
        sleep(0.001)
    print("ticked", flush=True)
redlock = Redlock(["{node.url}"], node_timeout=120, max_ttl=500)
spawn(tick)
told = redlock.lock("r", ttl=500).try_acquire()
"""
        node.pause()
        try:
            with stories.begun(stories.GEVENT, story) as running:
                eventually(lambda: "ticked" in running.said())
                node.resume()
                assert running.told() is True
        finally:
            node.resume()


def child_works(redlock: Redlock) -> bool:
    """Return whether a forked child is refused what its parent holds, and gets another lock."""
    try:
        redlock.lock("r", ttl=TTL).acquire()
    except LockTaken:
        with redlock.lock("other", ttl=TTL, wait=60) as lock:
            renew_now(redlock, lock)
            return lock.held
    return False
