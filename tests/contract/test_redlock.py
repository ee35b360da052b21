"""The lock on real nodes: acquire, renew, lose, release; nodes that die, stall and come back."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import redis

from celery_redlock import (
    Lock,
    LockLost,
    LockTaken,
    QuorumUnreachable,
    Redlock,
    RedlockError,
    SettingsError,
)
from celery_redlock.lock import retry
from celery_redlock.lock.engine.callers import Caller
from celery_redlock.lock.model.acquisition import SPLIT_TRIES
from celery_redlock.lock.model.keys import fence_key, lock_key
from celery_redlock.lock.node_status import ask_nodes
from celery_redlock.signals import LockLostEvent, NodeFailedEvent, lock_lost, node_failed
from celery_redlock.testing import EmbeddedNode, FakeNode, fake_nodes, trust_nodes
from tests.conftest import (
    NODE_TIMEOUT,
    PATIENCE,
    TTL,
    Journal,
    Nodes,
    end_of,
    eventually,
    hearing,
    keys_on,
    paused,
    receiving,
    see_freed,
    see_quorum,
    see_renewal,
    settle,
)
from tests.contract.conftest import MAJORITY, REDIS_SERVER, at_once, in_child
from tests.contract.renewals import hurry, renew_now

KEY = "{redlock}:lock:r"
WAIT = 60.0  # s
NEVER = 1000.0  # s: a wait that ends a test by its own bound, where it is not to be waited for


Fakes = list[FakeNode]


@pytest.fixture
def fakes() -> Iterator[Fakes]:
    """Give three fake nodes with one clock, for what becomes of leases in time."""
    with fake_nodes(3) as made:
        trust_nodes(made)
        yield made


@contextlib.contextmanager
def over(nodes: Nodes | Fakes, **options: float) -> Iterator[Redlock]:
    options = {"node_timeout": PATIENCE, **options}
    with Redlock([node.url for node in nodes], **options) as made:  # type: ignore[arg-type]
        see_quorum(made)
        yield made


@contextlib.contextmanager
def over_urls(*nodes: str | redis.Redis) -> Iterator[Redlock]:
    with Redlock(nodes, node_timeout=PATIENCE) as made:
        yield made


class TestAcquireAndRelease:
    def test_a_lock_stands_on_every_node_and_is_gone_after_its_release(
        self, redlock: Redlock, nodes: Nodes
    ) -> None:
        with redlock.lock("r") as lock:
            assert lock.held
            assert 10 < lock.remaining < 30
            settle(redlock)
            assert keys_on(nodes) == [[KEY]] * len(nodes)
        assert not lock.held
        assert lock.remaining == 0.0
        see_freed(nodes, "r")

    def test_its_value_starts_with_the_token_and_ends_with_a_readable_label(
        self, redlock: Redlock, nodes: Nodes
    ) -> None:
        with redlock.lock("r"):
            settle(redlock)
            value = nodes[0].client().get(KEY)
        token, _, label = str(value).split(":", 2)
        assert len(bytes.fromhex(token)) == 16
        assert label.startswith(f"pid {os.getpid()} on ")

    def test_each_attempt_has_a_token_of_its_own(self, redlock: Redlock, nodes: Nodes) -> None:
        lock, values = redlock.lock("r"), set()
        for _ in range(5):
            with lock:
                settle(redlock)
                values.add(nodes[0].client().get(KEY))
        assert len(values) == 5

    def test_a_second_one_is_taken_and_says_by_whom_and_until_when(
        self, redlock: Redlock, nodes: Nodes
    ) -> None:
        with redlock.lock("r"), over(nodes) as other:
            with pytest.raises(LockTaken) as caught:
                other.lock("r").acquire()
            assert caught.value.holder.startswith("pid ")
            assert caught.value.expires_in is not None
            assert 10 < caught.value.expires_in <= 30
            assert "Wait longer (wait) " in str(caught.value)
            assert other.lock("r").try_acquire() is False

    @MAJORITY
    def test_a_failed_try_leaves_no_key_of_its_own(self, nodes: Nodes) -> None:
        with over(nodes) as mine, over(nodes[1:]) as rival, rival.lock("r"):
            settle(rival)
            settle(mine)
            assert mine.lock("r").try_acquire() is False
            settle(mine)
            assert keys_on(nodes[:1]) == [[]]

    @MAJORITY
    def test_rivals_that_share_the_nodes_do_not_send_a_third_one_away(
        self, redlock: Redlock, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for node, rival in zip(nodes, ("x:one", "y:other"), strict=False):
            node.client().set(KEY, rival, px=60_000)
        pauses: list[float] = []

        def sleep_until_they_have_given_back(seconds: float) -> None:
            pauses.append(seconds)
            for node in nodes[:2]:
                node.client().delete(KEY)

        monkeypatch.setattr(redlock.session.clock, "sleep", sleep_until_they_have_given_back)
        assert redlock.lock("r").try_acquire(wait=0)
        assert len(pauses) == 1

    @MAJORITY
    def test_who_waits_tries_again_soon_where_rivals_share_the_nodes(
        self, redlock: Redlock, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("MAX_SPIN", "MAX_LISTENING_PAUSE"):  # by itself it does not try again in time
            monkeypatch.setattr(retry, name, 10 * WAIT)
        for node, rival in zip(nodes, ("x:one", "y:other"), strict=False):
            node.client().set(KEY, rival)  # for ever, so that no end of a lease is waited for
        tries: list[object] = []

        class Counting(Journal):
            def claiming(self, *claim: object) -> None:
                tries.append(claim)
                if len(tries) == SPLIT_TRIES:
                    for node in nodes[:2]:
                        node.client().delete(KEY)

        redlock.session.events.journal = Counting()
        callers = redlock.session.callers
        for other in (Caller("other", 1, 1.0), Caller("r", 1, 1.0)):
            callers.join(other)
            eventually(lambda: hearing(redlock) == len(nodes))  # nothing opens, which would wake
            settle(redlock)
            try:
                with redlock.lock("r", wait=WAIT):
                    assert len(tries) == SPLIT_TRIES, other.resource
            finally:
                callers.leave(other)
            tries.clear()
            for node, rival in zip(nodes, ("x:one", "y:other"), strict=False):
                node.client().set(KEY, rival)

    def test_one_that_a_quorum_refuses_is_sent_away_at_once(
        self, redlock: Redlock, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for node in nodes[:2]:
            node.client().set(KEY, "x:one", px=60_000)
        pauses: list[float] = []
        monkeypatch.setattr(redlock.session.clock, "sleep", pauses.append)
        assert not redlock.lock("r").try_acquire(wait=0)
        assert not pauses

    def test_waiting_in_vain_takes_no_longer_than_asked_and_says_how_long_it_was(
        self, redlock: Redlock, nodes: Nodes
    ) -> None:
        with redlock.lock("r"), over(nodes) as other:
            settle(other)
            with pytest.raises(LockTaken) as caught:
                other.lock("r").acquire(wait=0.3)
        assert caught.value.waited >= 0.3

    def test_a_lease_that_nobody_renews_ends_and_a_waiter_gets_it(self, fakes: Fakes) -> None:
        with over(fakes) as made, over(fakes) as other:
            lock = made.lock("r", renew=False).acquire(wait=WAIT)
            assert not other.lock("r").try_acquire()
            fakes[0].advance(31)
            with other.lock("r", wait=WAIT) as second:
                assert second.held
                assert not lock.held
            lock.release()

    def test_the_watchdog_keeps_a_lock_past_its_ttl(self, fakes: Fakes) -> None:
        with over(fakes) as made, made.lock("r") as lock, over(fakes) as other:
            for _ in range(4):
                fakes[0].advance(12)
                eventually(lambda: lock.remaining > 19)  # it was down to 18 s
                assert lock.held
                settle(made)
                assert not other.lock("r").try_acquire()

    def test_extend_renews_a_fixed_lease(self, redlock: Redlock) -> None:
        with redlock.lock("r", renew=False) as lock:
            (lease,) = lock.ownership.acquisitions[0].leases
            before = lease.valid_until
            lock.extend()
            assert lease.valid_until > before

    def test_extend_without_a_quorum_names_who_is_silent_and_says_how_long_it_waited(
        self, nodes: Nodes
    ) -> None:
        with over(nodes, node_timeout=0.2) as made, made.lock("r", wait=60) as lock:
            with paused(*nodes[:2]), pytest.raises(QuorumUnreachable) as caught:
                lock.extend()
            assert caught.value.waited >= 0.2
            names = [node.name for node in made.session.nodes.all[:2]]
            # on a busy machine the third one may be late, too
            assert {f"{name}: no answer in time" for name in names} <= {*caught.value.causes}
            assert lock.held

    def test_max_hold_ends_the_renewal(self, fakes: Fakes) -> None:
        with over(fakes) as made, made.lock("s", wait=WAIT) as other:
            lock = made.lock("r", max_hold=5).acquire(wait=WAIT)
            fakes[0].advance(12)
            eventually(
                lambda: other.remaining > 19
            )  # it would have been renewed together with this
            assert lock.held
            fakes[0].advance(18.5)
            assert other.held
            assert not lock.held
            with pytest.raises(LockLost):
                lock.ensure()
            lock.release()

    @REDIS_SERVER
    def test_a_redis_py_client_names_a_node_too(self, nodes: Nodes) -> None:
        clients = [redis.Redis(port=node.port, socket_timeout=60) for node in nodes]
        with over_urls(*clients) as made, made.lock("r", wait=60) as lock:
            assert lock.held


class TestRelease:
    def test_it_does_not_touch_a_key_that_another_token_took(
        self, redlock: Redlock, nodes: Nodes
    ) -> None:
        lock = redlock.lock("r").acquire()
        settle(redlock)
        for node in nodes:
            node.client().set(KEY, "theirs", px=300_000)
        lock.release()
        settle(redlock)
        assert [node.client().get(KEY) for node in nodes] == ["theirs"] * len(nodes)

    def test_it_does_not_wait_for_answers(self, mortal_nodes: Nodes) -> None:
        with (
            over(mortal_nodes, node_timeout=NEVER, max_ttl=4 * NEVER) as made,
            ThreadPoolExecutor(1) as owner,
        ):
            lock = made.lock("r", ttl=4 * NEVER)
            owner.submit(lock.acquire).result(WAIT)
            settle(made)
            with paused(*mortal_nodes):
                owner.submit(lock.release).result(WAIT)

    def test_a_second_one_does_nothing(self, redlock: Redlock, nodes: Nodes) -> None:
        lock = redlock.lock("r").acquire()
        lock.release()
        with over(nodes) as other, other.lock("r", wait=60) as second:
            settle(other)
            lock.release()
            settle(redlock)
            assert second.held
            assert keys_on(nodes) == [[KEY]] * len(nodes)

    def test_one_that_was_never_acquired_is_an_error(self, redlock: Redlock) -> None:
        with pytest.raises(RedlockError, match="never acquired"):
            redlock.lock("r").release()

    def test_before_and_after_it_a_lock_is_not_held_rather_than_lost(
        self, redlock: Redlock
    ) -> None:
        lock = redlock.lock("r")
        with pytest.raises(LockLost, match="is not held: it was never acquired"):
            lock.ensure()
        with lock:
            lock.ensure()
        with pytest.raises(LockLost, match="is not held: it was released"):
            lock.extend()

    def test_a_with_calls_an_acquire_that_was_replaced(
        self, redlock: Redlock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def acquire(lock: Lock, wait: float | None = None) -> Lock:
            raise LockTaken(lock.resource, "a test")

        monkeypatch.setattr(Lock, "acquire", acquire)
        with pytest.raises(LockTaken, match="a test"), redlock.lock("r"):
            pytest.fail("the lock's own method was called")

    def test_leaving_a_with_never_hides_the_bodys_error(
        self, redlock: Redlock, mortal_nodes: Nodes
    ) -> None:
        def body(lock: Lock) -> None:
            with lock:
                for node in mortal_nodes:
                    node.kill()
                raise ZeroDivisionError

        with over(mortal_nodes) as made, pytest.raises(ZeroDivisionError):
            body(made.lock("r"))

    @pytest.mark.slow
    def test_a_release_that_a_broken_connection_took_along_is_sent_again(
        self, brisk_redlock: Redlock, nodes: Nodes
    ) -> None:
        lock = brisk_redlock.lock("r").acquire()
        settle(brisk_redlock)
        for node in nodes:
            node.client().client_kill_filter(_type="normal", skipme=True)
        lock.release()
        see_freed(nodes, "r")

    @pytest.mark.slow
    @MAJORITY
    def test_a_grant_that_runs_after_its_release_is_taken_back_when_it_is_met(
        self, brisk_redlock: Redlock, nodes: Nodes
    ) -> None:
        """One whose connection broke behind them both: nobody knows in which order they run."""
        redlock = brisk_redlock
        settle(redlock)
        with paused(nodes[2]):
            with redlock.lock("r", ttl=60):
                value = eventually(lambda: nodes[0].client().get(KEY))
            eventually(lambda: redlock.session.nodes.all[2].connection is None)
        eventually(lambda: redlock.session.releaser.outbox.is_empty)
        settle(redlock)
        for node in nodes:
            node.client().set(KEY, value, px=600_000)
        with redlock.lock("r", wait=30) as lock:
            assert lock.held


class TestLoss:
    def test_a_key_taken_by_another_token_is_noticed_at_the_next_renewal(
        self, brisk_redlock: Redlock, nodes: Nodes, caplog: pytest.LogCaptureFixture
    ) -> None:
        lock = brisk_redlock.lock("r", ttl=TTL).acquire()
        settle(brisk_redlock)
        for node in nodes:
            node.client().set(KEY, "theirs")
        hurry(brisk_redlock)
        eventually(lambda: not lock.held)
        with pytest.raises(LockLost, match="another token took its key"):
            lock.ensure()
        eventually(lambda: "lost 'r': another token took its key" in caplog.text)
        lock.release()

    def test_a_lock_deleted_on_a_quorum_is_lost_and_never_held_again(
        self, brisk_redlock: Redlock, nodes: Nodes
    ) -> None:
        lock = brisk_redlock.lock("r", ttl=TTL).acquire()
        settle(brisk_redlock)  # a grant still on its way would bring the key back
        for node in nodes[:2]:
            node.client().delete(KEY)
        hurry(brisk_redlock)
        eventually(lambda: not lock.held)
        with pytest.raises(LockLost):
            lock.extend()
        assert not lock.held
        lock.release()

    def test_held_turns_false_at_the_validity_with_every_node_frozen(
        self, fakes: Fakes, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.WARNING)
        seen: list[str] = []

        def note(sender: object, event: LockLostEvent) -> None:
            seen.append(event.resource)

        with over(fakes) as made, receiving(lock_lost, note):
            settle(made)
            lock = made.lock("r").acquire()
            for node in fakes:
                node.pause()
            fakes[0].advance(21)
            assert lock.held
            eventually(lambda: "'r' is at risk" in caplog.text)
            fakes[0].advance(10)
            assert not lock.held
            eventually(lambda: seen == ["r"])
            for node in fakes:
                node.resume()
            settle(made)
            assert not lock.held
            assert seen == ["r"]
            lock.release()

    def test_a_holder_that_was_paused_past_its_validity_knows_it_at_once_and_it_is_told(
        self, redlock: Redlock
    ) -> None:
        seen: list[str] = []

        def note(sender: object, event: LockLostEvent) -> None:
            seen.append(event.reason)

        lock = redlock.lock("r", renew=False).acquire()
        settle(redlock)  # a grant that comes later would prolong it
        (claim,) = lock.ownership.acquisitions[0].leases
        with receiving(lock_lost, note):
            claim.valid_until = 0.0  # as if the process had been stopped meanwhile
            assert not lock.held
            lock.release()
            eventually(lambda: len(seen) == 1)

    @pytest.mark.slow
    def test_a_key_that_was_overwritten_before_its_release_is_told_of(
        self, redlock: Redlock, nodes: Nodes, caplog: pytest.LogCaptureFixture
    ) -> None:
        with redlock.lock("r"):
            settle(redlock)
            for node in nodes:
                node.client().set(KEY, "theirs", px=300_000)
        eventually(lambda: "at its release its key was no longer ours" in caplog.text)

    @pytest.mark.slow
    def test_a_receiver_that_is_slow_or_locks_itself_holds_up_no_other_lock(
        self, mortal_nodes: Nodes
    ) -> None:
        heard: list[bool] = []
        go_on = threading.Event()

        def lock_and_wait(redlock: Redlock, event: NodeFailedEvent) -> None:
            with redlock.lock("audit", wait=60) as audit:
                heard.append(audit.held)
            go_on.wait(120)

        with over(mortal_nodes, node_timeout=NODE_TIMEOUT) as made:
            settle(made)
            with receiving(node_failed, lock_and_wait), made.lock("r", ttl=TTL) as lock:
                mortal_nodes[0].kill()
                eventually(lambda: heard == [True])
                for _ in range(2):
                    see_renewal(lock)
                    with made.lock("s", wait=60) as other:
                        assert other.held
                assert not go_on.is_set()
                go_on.set()

    @pytest.mark.slow
    def test_a_renewal_that_one_node_does_not_answer_keeps_the_lock(
        self, mortal_nodes: Nodes
    ) -> None:
        with over(mortal_nodes, node_timeout=NODE_TIMEOUT) as made, made.lock("r", ttl=TTL) as lock:
            settle(made)
            mortal_nodes[2].pause()
            for _ in range(3):
                see_renewal(lock)
            assert lock.held


class TestManyLocks:
    COUNT = 250  # more than one request renews

    def test_all_are_renewed_together_and_what_befalls_one_befalls_no_other(
        self, redlock: Redlock, nodes: Nodes
    ) -> None:
        names = [lock_key("redlock", f"r{n}") for n in range(self.COUNT)]
        hurt = (3, 99, 100)
        with contextlib.ExitStack() as stack:
            locks = [redlock.lock(f"r{n}", ttl=60) for n in range(self.COUNT)]
            for lock in locks:
                stack.enter_context(contextlib.suppress(LockLost))
                stack.enter_context(lock)
            settle(redlock)
            clients = [stack.enter_context(node.client()) for node in nodes]
            for client in clients:
                client.delete(names[3])
                client.set(names[99], "another's", px=60_000)
                client.delete(names[100])
                client.rpush(names[100], "another program's")
                for name in names:
                    client.pexpire(name, 50_000)
            assert redlock.session.renewer.renew(
                [h for lock in locks for h in lock.ownership.acquisitions]
            )
            kept = [lock for n, lock in enumerate(locks) if n not in hurt]
            assert all(lock.held for lock in kept)
            assert not any(locks[n].held for n in hurt)
            settle(redlock)
            for client in clients:
                assert sum(client.pttl(name) > 50_000 for name in names) == len(kept)
                assert client.get(names[99]) == "another's"
                assert not client.exists(names[3])
            assert not redlock.session.renewer.renew(
                [h for lock in kept for h in lock.ownership.acquisitions]
            )

    @REDIS_SERVER
    def test_a_few_requests_to_a_node_renew_them_all(self, redlock: Redlock, nodes: Nodes) -> None:
        client, watchdog = nodes[0].client(), redlock.session.watchdog
        with contextlib.ExitStack() as stack:
            locks = [redlock.lock(f"r{n}", ttl=60) for n in range(self.COUNT)]
            for lock in locks:
                stack.enter_context(lock)
            settle(redlock)
            ends, before = [end_of(lock) for lock in locks], scripts_run(client)
            watchdog.renew_by(redlock.session.clock.now())
            eventually(lambda: all(end_of(k) > end for k, end in zip(locks, ends, strict=True)))
            settle(redlock)
            assert scripts_run(client) - before <= self.COUNT / 10

    @pytest.mark.slow
    def test_a_counter_that_is_no_text_costs_no_lock_its_renewal(
        self, brisk_redlock: Redlock, nodes: Nodes
    ) -> None:
        locks = [brisk_redlock.lock("fenced", ttl=TTL, fencing=True)]
        locks += [brisk_redlock.lock(f"r{n}", ttl=TTL) for n in range(3)]
        with contextlib.ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            for node in nodes:
                node.client().delete(fence_key("redlock"))
                node.client().rpush(fence_key("redlock"), "somebody's")
            for lock in locks:
                see_renewal(lock)


def scripts_run(client: redis.Redis) -> int:
    """Return how many scripts a node has run."""
    calls: int = client.info("commandstats")["cmdstat_evalsha"]["calls"]
    return calls


class TestNodesInTrouble:
    def test_two_dead_nodes_of_three_are_unreachable_not_taken(self, mortal_nodes: Nodes) -> None:
        for node in mortal_nodes[:2]:
            node.kill()
        with over_urls(*[node.url for node in mortal_nodes]) as made:
            eventually(lambda: len(ask_nodes(made.session).failing) == 2)  # a stall fails all three
            with pytest.raises(QuorumUnreachable) as caught:
                made.lock("r").acquire()
            text = str(caught.value)
            assert all(f"127.0.0.1:{node.port}: " in text for node in mortal_nodes[:2])
            assert f"127.0.0.1:{mortal_nodes[2].port}: " not in text
            eventually(lambda: keys_on(mortal_nodes[2:]) == [[]])

    def test_a_frozen_minority_costs_no_round_its_time(self, mortal_nodes: Nodes) -> None:
        def take(made: Redlock) -> None:
            for _ in range(5):
                with made.lock("r", ttl=4 * NEVER):
                    pass

        with (
            over(mortal_nodes, node_timeout=NEVER, max_ttl=4 * NEVER) as made,
            ThreadPoolExecutor(1) as owner,
        ):
            settle(made)
            with paused(mortal_nodes[0]):
                owner.submit(take, made).result(WAIT)

    @MAJORITY
    def test_the_same_server_by_two_names_is_found_when_it_is_connected(self, nodes: Nodes) -> None:
        with EmbeddedNode(bind="127.0.0.1 127.0.0.2") as server:
            urls = [server.url, f"redis://127.0.0.2:{server.port}", nodes[1].url]
            with over_urls(*urls) as made:
                with pytest.raises(SettingsError, match="one server"):
                    eventually(
                        lambda: not ask_nodes(made.session)
                    )  # connects may not be over at first
                for _ in range(2):
                    with pytest.raises(SettingsError, match="one server"):
                        made.lock("r").acquire()
                eventually(lambda: keys_on([server]) == [[]])

    def test_one_server_by_two_names_never_has_two_votes(self) -> None:
        with EmbeddedNode(bind="127.0.0.1 127.0.0.2") as server, EmbeddedNode() as dead:
            dead.kill()
            urls = [server.url, f"redis://127.0.0.2:{server.port}", dead.url]
            with over_urls(*urls) as made, pytest.raises((SettingsError, QuorumUnreachable)):
                made.lock("r").acquire()

    def test_a_credential_provider_that_fails_once_does_not_cost_a_node_for_ever(self) -> None:
        class Flaky(redis.CredentialProvider):
            failed = False

            def get_credentials(self) -> tuple[str]:
                if not self.failed:
                    self.failed = True
                    raise LookupError("the vault is away")
                return ("right-one",)

        with EmbeddedNode() as node:
            node.client().config_set("requirepass", "right-one")
            client = redis.Redis(port=node.port, credential_provider=Flaky())
            with over_urls(client) as made, made.lock("r", wait=60) as lock:
                assert lock.held


class TestRequests:
    def test_no_request_follows_the_release_of_its_token(self, redlock: Redlock) -> None:
        written: list[tuple[int, str, str]] = []
        kind_of_connection = type(redlock.session.nodes.all[0].connection)
        write = kind_of_connection.write

        def note(self: Any, entries: Any, *how: bool) -> None:
            for command, _, _ in entries:
                handler = command.handler
                leases = getattr(handler, "_leases", None)
                one = getattr(handler, "_lease", None) or getattr(handler, "lease", None)
                lease = leases[0] if leases else one
                written.append((id(self), type(handler).__name__, str(id(lease))))
            write(self, entries, *how)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind_of_connection, "write", note)
            kept = [redlock.lock("r") for _ in range(200)]
            for lock in kept:  # kept, so that no two holds share an id
                with lock:
                    redlock.session.renewer.renew(lock.ownership.acquisitions)
        released: set[tuple[int, str]] = set()
        for wire, kind, hold in written:
            assert (wire, hold) not in released or kind == "KeyRelease", kind
            if kind == "KeyRelease":
                released.add((wire, hold))
        assert len(released) == 200 * len(redlock.session.nodes.all)


class TestOneProcess:
    def test_many_threads_share_the_connections_and_exclude_each_other(
        self, redlock: Redlock
    ) -> None:
        inside, most, total = 0, 0, 0

        def work() -> None:
            nonlocal inside, most, total
            for _ in range(8):
                with redlock.lock("r", wait=200):
                    inside += 1
                    most = max(most, inside)
                    total += 1
                    inside -= 1

        at_once(*[work] * 6)
        assert (most, total) == (1, 48)

    def test_many_threads_with_locks_of_their_own_all_get_them(self, redlock: Redlock) -> None:
        def work(name: str) -> None:
            for _ in range(20):
                with redlock.lock(name) as lock:
                    assert lock.held

        at_once(*(partial(work, f"r{n}") for n in range(8)))

    def test_another_threads_call_is_an_error(self, redlock: Redlock) -> None:
        with redlock.lock("r") as lock:
            with pytest.raises(RedlockError, match="another thread"):
                at_once(lock.release)
            assert lock.held

    def test_a_forked_child_neither_holds_nor_releases_its_parents_lock(
        self, redlock: Redlock, nodes: Nodes
    ) -> None:
        lock = redlock.lock("r").acquire()
        settle(redlock)

        def sockets() -> set[int]:
            connections = filter(None, (node.connection for node in redlock.session.nodes.all))
            return {os.fstat(connection.socket.fileno()).st_ino for connection in connections}

        def has_its_own() -> bool:
            held = lock.held
            lock.release()
            gc.collect()
            with redlock.lock("s", wait=60) as own:
                return own.held and not held and not sockets() & parents

        parents = sockets()
        assert parents
        in_child(has_its_own)
        renew_now(redlock, lock)  # the parent's watchdog still runs
        eventually(lambda: keys_on(nodes) == [[KEY]] * len(nodes))
        lock.release()

    def test_a_lock_made_before_a_fork_names_the_child_that_acquires_it(
        self, redlock: Redlock, nodes: Nodes
    ) -> None:
        lock = redlock.lock("r", wait=60)

        def is_named() -> bool:
            with lock:
                settle(redlock)
                holders = [str(node.client().get(KEY)) for node in nodes]
                return all(f"pid {os.getpid()} on " in one for one in holders)

        in_child(is_named)

    def test_a_caller_that_waits_is_told_at_once_that_its_redlock_is_closed(
        self, redlock: Redlock, nodes: Nodes, pool: ThreadPoolExecutor
    ) -> None:
        with redlock.lock("r"), over(nodes) as closed:
            waiting = pool.submit(closed.lock("r", wait=NEVER).acquire)
            eventually(lambda: closed.session.callers.inbox.is_listening)
            closed.close()
            error = waiting.exception(WAIT)
            with pytest.raises(QuorumUnreachable, match="closed"):
                closed.lock("r", wait=NEVER).acquire()
        assert isinstance(error, QuorumUnreachable)
        assert "is closed" in str(error)
        assert "Bring" not in str(error)

    def test_a_closed_redlock_keeps_no_thread_and_no_descriptor(self, nodes: Nodes) -> None:
        def descriptors() -> int:
            gc.collect()
            return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

        with over(nodes) as made, made.lock("r"):
            pass
        before = descriptors()
        for _ in range(5):
            with over(nodes) as made, made.lock("r"):
                pass
        eventually(lambda: descriptors() <= before)


class TestArguments:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"ttl": 27.9}, r"ttl=27.9: must be at least 4 x node_timeout = 28 s"),
            ({"ttl": 61}, r"ttl=61: must be at most redlock_max_ttl"),
            ({"wait": -1}, "wait=-1"),
            ({"max_hold": 0}, "max_hold=0"),
            ({"limit": 0}, "limit=0"),
            ({"limit": True}, "limit=True"),
            ({"limit": 2, "fencing": True}, "limit=2: .*has no fencing tokens"),
            ({"fencing": 1}, "fencing=1"),
        ],
    )
    def test_a_wrong_one_is_refused_by_name_and_value(
        self, redlock: Redlock, options: dict[str, object], words: str
    ) -> None:
        with pytest.raises(SettingsError, match=words):
            redlock.lock("r", **options)  # type: ignore[arg-type]

    def test_permits_are_of_one_resource(self, redlock: Redlock) -> None:
        with pytest.raises(SettingsError, match=r"limit=2: .*one resource"):
            redlock.lock(["a", "b"], limit=2)

    @pytest.mark.parametrize("resource", ["", None, 7, [], ["a", ""], [7], b"a"])
    def test_a_resource_is_a_text_or_a_list_of_texts(
        self, redlock: Redlock, resource: object
    ) -> None:
        with pytest.raises(SettingsError, match="resource"):
            redlock.lock(resource)  # type: ignore[arg-type]

    def test_a_list_of_one_is_that_one(self, redlock: Redlock) -> None:
        assert redlock.lock(["r"]).resource == "r"
