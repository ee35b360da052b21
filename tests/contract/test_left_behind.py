"""What a process that is gone had claimed: known to the last, and released by its own tokens."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from celery import Celery

from celery_redlock import LockTaken, Redlock
from celery_redlock.lock.client import session_of
from celery_redlock.lock.engine.releaser import ORPHAN_RELEASE_DELAYS
from celery_redlock.lock.model.acquisition import Acquisition
from celery_redlock.lock.model.lease import Lease, LockKey
from celery_redlock.lock.model.options import LockOptions
from celery_redlock.tasks.children.journal import CLAIMED, HELD, RELEASED, JournalSlot
from celery_redlock.tasks.children.reaper import ChildProcess, ChildReaper, Children, start_time_of
from celery_redlock.tasks.per_app import redlock_of
from tests.conftest import NODE_TIMEOUT, TTL, Journal, Nodes, eventually, is_free, see_freed, settle
from tests.contract.conftest import MAJORITY
from tests.contract.proxy import FAIR, Proxy, Way, Weather, proxies


class Ledger(Journal):
    """Keeps what is claimed until it hears that no node has anything of it any more."""

    def __init__(self) -> None:
        self.open: list[Lease] = []
        self.written: list[str] = []

    def claiming(self, session: bytes, at: float, holding: Acquisition, claim: Lease) -> None:
        assert holding.leases[-1] is claim
        self.open.append(claim)
        self.written.append(claim.key.name)

    def settled(self, claim: Lease) -> None:
        if claim in self.open:
            self.open.remove(claim)


@pytest.fixture
def ledger(redlock: Redlock) -> Ledger:
    redlock.session.events.journal = made = Ledger()
    return made


@pytest.fixture
def before(nodes: Nodes) -> Iterator[list[Proxy]]:
    with proxies(nodes) as made:
        yield made


def left_by(resource: str, value: str) -> tuple[LockOptions, list[tuple[str, int, str]]]:
    terms = LockOptions((resource,), 30.0, 0.0, renew=False, max_hold=None, label="theirs")
    return terms, [(resource, 0, value)]


def test_a_claim_is_told_of_before_its_request_leaves(before: list[Proxy]) -> None:
    sent: list[int] = []

    class Watches(Journal):
        def claiming(self, *claim: object) -> None:
            sent.append(sum(proxy.received[Way.TO_NODE] for proxy in before))

    with Redlock([proxy.url for proxy in before], node_timeout=NODE_TIMEOUT) as redlock:
        redlock.trust()
        redlock.session.events.journal = Watches()
        settle(redlock)
        so_far = sum(proxy.received[Way.TO_NODE] for proxy in before)
        with redlock.lock("k"):
            assert sent == [so_far]


@pytest.mark.slow
def test_a_claim_is_settled_once_every_node_has_been_told_also_if_it_was_refused(
    redlock: Redlock, rival: Redlock, ledger: Ledger
) -> None:
    with redlock.lock(["one", "two"]), redlock.lock("permit", limit=2):
        assert len(ledger.open) == 3
    with rival.lock("k", wait=60), pytest.raises(LockTaken):
        redlock.lock(["a", "k"]).acquire(wait=0)
    assert len(ledger.written) == 5
    eventually(lambda: not ledger.open)


@MAJORITY
def test_a_claim_stays_open_while_a_node_has_not_answered(before: list[Proxy]) -> None:
    with Redlock([proxy.url for proxy in before], node_timeout=NODE_TIMEOUT) as redlock:
        redlock.trust()
        settle(redlock)
        ledger = redlock.session.events.journal = Ledger()
        lock = redlock.lock("k").acquire()
        before[0].weather = Weather(swallows=frozenset(Way))
        lock.release()
        with redlock.lock("other"):  # by now the other two have answered
            assert "k" in {claim.key.resource for claim in ledger.open}
        before[0].weather = FAIR
        eventually(lambda: not ledger.open)


@pytest.mark.slow
def test_a_claim_is_settled_when_its_time_is_up(mortal_nodes: Nodes) -> None:
    urls = [node.url for node in mortal_nodes]
    with Redlock(urls, node_timeout=NODE_TIMEOUT) as redlock:
        settle(redlock)
        ledger = redlock.session.events.journal = Ledger()
        lock = redlock.lock("k", ttl=TTL).acquire()
        mortal_nodes[0].kill()
        lock.release()
        eventually(lambda: not ledger.open)


@pytest.mark.slow
def test_a_request_of_the_dead_that_comes_after_their_release_leaves_no_lock(
    redlock: Redlock, nodes: Nodes
) -> None:
    assert any(comes_late(redlock, nodes) for _ in range(10))


def comes_late(redlock: Redlock, nodes: Nodes) -> bool:
    """Let a key be set after its release, and see it go; False where this machine was too slow."""
    until = time.monotonic() + ORPHAN_RELEASE_DELAYS[-1]
    redlock.session.release_orphans(*left_by("k", "token:theirs"), 0.0)
    settle(redlock)
    for node in nodes:
        node.client().set("{redlock}:lock:k", "token:theirs", px=300_000)
    if time.monotonic() > until:
        return False
    see_freed(nodes, "k")
    return True


def test_what_another_has_taken_since_is_left_alone(redlock: Redlock, nodes: Nodes) -> None:
    for node in nodes:
        node.client().set("{redlock}:lock:k", "later:theirs", px=300_000)
    redlock.session.release_orphans(*left_by("k", "token:theirs"), 0.0)
    settle(redlock)
    assert not is_free(nodes, "k")


def test_a_node_that_is_away_is_told_of_what_was_left_when_it_is_back(mortal_nodes: Nodes) -> None:
    for node in mortal_nodes:
        node.client().set("{redlock}:lock:k", "token:theirs", px=300_000)
    with Redlock([node.url for node in mortal_nodes], node_timeout=NODE_TIMEOUT) as redlock:
        mortal_nodes[0].pause()
        redlock.session.release_orphans(*left_by("k", "token:theirs"), 0.0)
        eventually(lambda: is_free(mortal_nodes[1:], "k"))
        mortal_nodes[0].resume()
        see_freed(mortal_nodes, "k")


def test_a_session_is_found_by_what_names_its_nodes(nodes: Nodes) -> None:
    urls = [node.url for node in nodes]
    with Redlock(urls, prefix="mine") as one, Redlock(urls, prefix="yours") as other:
        assert session_of(one.session.identity) is one.session
        assert session_of(other.session.identity) is other.session
        with Redlock(urls[::-1], prefix="mine") as again:
            assert again.session.identity == one.session.identity
        assert session_of(b"nobody's") is None


def test_a_closed_session_is_not_found(nodes: Nodes) -> None:
    """It sends nothing: what a killed child held would stay, and be told as released."""
    urls = [node.url for node in nodes]
    closed = [Redlock(urls) for _ in range(8)]
    with Redlock(urls) as stays:
        for one in closed:
            one.close()
        assert session_of(stays.session.identity) is stays.session
    assert session_of(stays.session.identity) is None


def test_a_session_is_looked_for_while_another_thread_makes_one(nodes: Nodes) -> None:
    made: list[Redlock] = []

    class Meanwhile(bytes):
        """Compared to the identity of a session, as another thread makes a `Redlock`."""

        __hash__ = bytes.__hash__

        def __eq__(self, other: object) -> bool:
            made.append(Redlock([node.url for node in nodes]))
            return False

    with Redlock([node.url for node in nodes]), Redlock([node.url for node in nodes]):
        assert session_of(Meanwhile()) is None
    assert len(made) >= 2
    for one in made:
        one.close()


def test_what_a_run_claims_for_itself_is_released_and_not_named(
    redlock: Redlock, nodes: Nodes
) -> None:
    for node in nodes:
        for resource in ("k", "run:id"):
            node.client().set(f"{{redlock}}:lock:{resource}", "token:theirs", px=300_000)
    terms, left = left_by("k", "token:theirs")
    own = ("run:id", 0, "token:theirs")
    holding = redlock.session.release_orphans(terms, [own, *left], 0.0)
    assert holding.resource == "k"
    see_freed(nodes, "k")
    see_freed(nodes, "run:id")


@pytest.mark.parametrize(("state", "is_done"), [(CLAIMED, False), (HELD, True), (RELEASED, True)])
def test_a_run_that_was_ended_is_done_only_where_it_had_its_lock(
    nodes: Nodes, state: int, is_done: bool
) -> None:
    run = "id:task:0:0"
    app = Celery("reaps", set_as_default=False)
    app.conf.redlock_nodes = [node.url for node in nodes]
    with redlock_of(app) as redlock:
        terms = LockOptions(("k",), TTL, 0.0, renew=False, max_hold=None, label=f"{run} worker")
        session = redlock.session
        keys = [LockKey("redlock", "k", TTL)]
        holding = Acquisition(terms, keys, session.current_owner())
        holding.leases = [session.acquirer.new_lease(terms, key) for key in keys]
        slot, known = JournalSlot(), Children()
        slot.sign(os.getpid(), 0)
        slot.claiming(session.identity, session.clock.now(), holding, holding.leases[0])
        if state != CLAIMED:
            (slot.held if state == HELD else slot.released)(holding)
        slot.announce_end(run)
        known.slots.append(slot)
        process = ChildProcess(os.getpid(), start_time_of(os.getpid()))
        known.watched[slot] = process
        ChildReaper(known, app).reap(slot, process)
        settle(redlock)
    marks = [node.client().keys(f"*:done:{run}") for node in nodes]
    assert [bool(found) for found in marks] == [is_done] * len(nodes)
