"""What lives in a process: its acquisitions, and what keeps them up and gives them back.

A `Session` is what one process has for all locks of one `Redlock`: connections, watchdog, releases
that are not delivered yet. A `Holding` is one acquisition, made of one `Claim` for each key that it
takes: a fresh token, its lease, and the votes on it.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
import logging
import math
import os
import random
from asyncio.events import _get_running_loop
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import ref

from hiredis import ReplyError

from celery_redlock.errors import (
    LockLost,
    LockTaken,
    NodeError,
    QuorumUnreachable,
    RedlockError,
    SettingsError,
    abstains,
)
from celery_redlock.lock.coroutines import Threads
from celery_redlock.lock.engine.rounds import Batch, GrantRound, RenewRound
from celery_redlock.lock.engine.wait_queue import WaitQueue
from celery_redlock.lock.keys import (
    broken_key,
    done_key,
    is_of_run,
    label_of,
    lock_key,
    value_of,
    wake_channel,
)
from celery_redlock.lock.lease import HELD, LOST, MARGIN, Fence, Hold, proposal
from celery_redlock.lock.platform.clock import Platform
from celery_redlock.lock.server.error_hints import with_hint
from celery_redlock.lock.server.handshake import Guard, ServerInfo
from celery_redlock.lock.server.restart_guard import GuardedNodeSet, NodeEvents
from celery_redlock.lock.server.scripts import GRANT, RELEASE, RENEW, SAY_NOTHING, Requests
from celery_redlock.lock.transport.address import Address
from celery_redlock.lock.transport.command import Command, Entry
from celery_redlock.lock.transport.encoding import (
    UnexpectedReplyError,
    encode_bulk,
    encode_text,
    encoded,
)
from celery_redlock.lock.transport.node_client import LONGEST_RECONNECT, NodeClient
from celery_redlock.lock.watchdog import Watchdog

logger = logging.getLogger(__name__)

SHORTEST_RENEWAL = 0.05  # s: between renewals of a lock that could not be renewed
RELEASE_IS_OWED = 1.5  # ttls for which a node that cannot be told may still hold a key of ours
ROUNDS_IN_TTL = 4  # a ttl leaves time for so many rounds
RENEWED_TOGETHER = 10  # of a ttl: what is due within one such part is renewed in one batch
RENEWED_AT_ONCE = 100  # locks a request: a node serves nobody else meanwhile
LATE = 0.02  # s after which a renewal is late, as next to C code that keeps the GIL
LEFT_AGAIN = (0.25, 1.0, 4.0)  # s after which what the dead have left is released once more
EXCHANGED_EVERY = 1 / 3  # of a silence: notes about who serves where
IDLE = 30.0  # s after which a connection that nobody uses is asked whether it still stands

Refused = LockTaken | QuorumUnreachable


class AlreadyDoneError(RedlockError):
    """What was to run under this lock is done, as a node says: nothing is to be run."""


class SupersededError(RedlockError):
    """What was to run under this lock was sent again meanwhile, and that send is to run instead."""


@dataclass(frozen=True)
class Mark:
    """What nodes keep of a run that may be delivered again: that it is done.

    run: its name. kept_for: s. asks_since: s since 1970: the run itself asks before it begins, and
    is done where a mark was made after that; None: it does not ask. heeds_later: it does not begin
    where a later send of the same has taken its place; only one that asks. is_second: it may be
    under way, by another delivery, with another limit than its own.
    """

    run: str
    kept_for: float
    asks_since: float | None = None
    heeds_later: bool = False
    is_second: bool = False


@dataclass(frozen=True)
class Terms:
    """What a lock is to be. Times in s.

    resources: in the order of `keys.in_order`. label: who holds it, for people; owner: for signals.
    mark: of the run that takes it, where one is to be made at its end. With a limit above 1 such a
    run takes a lock of its own, too: another delivery of it would just take another permit.
    """

    resources: tuple[str, ...]
    ttl: float
    wait: float
    renew: bool
    max_hold: float | None
    label: str
    owner: object = None
    limit: int = 1
    fencing: bool = False
    mark: Mark | None = None


@dataclass(frozen=True)
class Setup:
    """What all locks of a `Redlock` have in common. Times in s."""

    prefix: str
    node_timeout: float
    clock_drift: float
    guard: Guard


class Observer:
    """What is told of holds and nodes as it happens; this one keeps it for itself.

    `claiming`, `acquired` and `released` are called in the caller's thread, `settled` in any, the
    others in the watchdog's, apart from all I/O. They tell, and never decide.
    """

    def claiming(self, holding: Holding, claim: Claim) -> None:
        """Hear that the request for a key is about to leave."""

    def settled(self, claim: Claim) -> None:
        """Hear that no node has anything of a claim any more, or is to be told of its end."""

    def acquired(self, holding: Holding) -> None:
        """Hear that a lock is held from now on."""

    def released(self, holding: Holding) -> None:
        """Hear that a lock was given back."""

    def extended(self, holding: Holding) -> None:
        """Hear that a quorum renewed a lock."""

    @property
    def hears_extensions(self) -> bool:
        """Whether `extended` is to be called: often, with many locks."""
        return False

    def lost(self, holding: Holding, reason: str) -> None:
        """Hear that a lock is lost, for ever; reason: in words."""

    def node_failed(self, redlock: Any, node: str, cause: str) -> None:
        """Hear that a node stopped answering; cause: in words."""

    def node_recovered(self, redlock: Any, node: str) -> None:
        """Hear that a node answers again."""


class Served(Protocol):
    """Whom a session works for: the `Redlock`."""

    @property
    def observer(self) -> Observer:
        """Who is told."""


class Debt(Protocol):
    """What a node is still to be told, once it answers. until: monotonic s, after which not."""

    @property
    def until(self) -> float:
        """When it does not matter any more."""

    def command(self) -> Command:
        """Return what to send."""

    def settle(self, node: int) -> None:
        """Hear that a node needs to be told no more."""


class Orphaned:
    """Stands for a `Redlock` that is gone while what it has begun is brought to an end."""

    def __init__(self, made: type[Any]) -> None:
        self._made = made

    @property
    def observer(self) -> Observer:
        """Who is told."""
        observer: Observer = self._made.observer
        return observer


class Session:
    """What one process keeps up for all locks of one `Redlock`.

    redlock: whom it works for; not kept alive by it, nor by its threads. setup: what its locks have
    in common. tells_of_new_nodes: that a node abstains is worth a warning at its first
    contact, too, for nobody else says it. warns: of a `Redlock` that is dropped without `close`.
    """

    tells_of_new_nodes = warns = True

    def __init__(
        self, redlock: Served, setup: Setup, addresses: Sequence[Address], platform: Platform
    ) -> None:
        self._redlock, self._orphaned = ref(redlock), Orphaned(type(redlock))
        self._made_by, self.setup = type(redlock).__name__, setup
        self.platform, self.clock = platform, platform.clock
        self.requests = Requests(setup.prefix)
        self.open(addresses)
        self.margin = MARGIN + self.clock.resolution
        self.exchanged_every = setup.guard.silence * EXCHANGED_EVERY  # s
        self.guarded = setup.guard.word != "off"
        self._forget_own()

    def open(self, addresses: Sequence[Address]) -> None:
        """Make the connections and the threads that it works with; none starts yet."""
        platform, timeout, guard = self.platform, self.setup.node_timeout, self.setup.guard
        events = NodeEvents(self._node_changed, self._node_greeted, self._node_replaced)
        self.quorum = GuardedNodeSet(addresses, timeout, platform, guard, events)
        self.watchdog: Watchdog[Holding] = Watchdog(
            platform, functools.partial(self.renew, native=True), self._tidy
        )
        self.listener = WaitQueue(addresses, timeout, platform)
        self.threads = Threads(platform)

    @property
    def redlock(self) -> Served:
        """Whom it works for."""
        redlock = self._redlock()
        return self._orphaned if redlock is None else redlock

    @property
    def is_used(self) -> bool:
        """Whether it has connections or threads."""
        is_used = any(node.is_used for node in self.quorum.nodes)
        return not self._closed and (is_used or self.watchdog.is_started)

    @functools.cached_property
    def identity(self) -> bytes:
        """8 bytes that are the same in each process for these nodes and this prefix."""
        servers = sorted(node.address.server for node in self.quorum.nodes)
        text = "\n".join((self.setup.prefix, *servers))
        return hashlib.blake2b(encoded(text), digest_size=8).digest()

    def forget(self) -> None:
        """Start anew in a forked child: nothing of the parent's is used or released there."""
        self.quorum.forget()
        self.watchdog.forget()
        self.listener.forget()
        self.threads.forget()
        self._forget_own()

    def _forget_own(self) -> None:
        self._unwritten: dict[int, Release] = {}
        self._owed: list[dict[int, Debt]] = [{} for _ in self.quorum.nodes]
        self._doubtful: dict[str, Release] = {}  # by value: whose grant may still run some day
        self._left: list[tuple[float, Holding]] = []  # monotonic s: to be released again then
        self._here = self.platform.new_local(Here)
        self._hurried_at = -math.inf
        self._greeted: set[int] = set()  # nodes that this process has been connected to
        self._is_ending = self._closed = False

    def end(self) -> None:
        """Release what nobody can any more, and close once every node that answers has heard.

        For the `Redlock` is gone, and with it each `Lock`.
        """
        for holding in self.watchdog.watched:
            holding.is_kept()
        self._is_ending = True  # not before: what is said of them is to be heard
        self.watchdog.tidy_by(self.clock.now())

    def close(self) -> None:
        """Close the connections and end the threads."""
        self._closed = True
        self.watchdog.stop()
        self.listener.close()
        self.threads.close()
        self.quorum.close()

    # what a context (thread, greenlet, asyncio task) holds, so that it can take it again

    def context(self) -> Context:
        """Return where this is called."""
        task = None if _get_running_loop() is None else asyncio.current_task()
        return os.getpid(), self._here.get(in_task=task is not None), task

    def outer(self, terms: Terms, context: Context) -> dict[str, Holding]:
        """Return what a context holds already of what terms ask for, by resource.

        Raises LockLost where that is lost, and SettingsError where it promises less than is asked.
        """
        _, here, task = context
        found = {}
        for resource in terms.resources if here.held else ():
            outer = here.held.get((task, resource))
            if outer is not None:
                outer.check_covers(resource, terms)
                found[resource] = outer
        return found

    # releases

    def hand_over(self, releases: Sequence[Release]) -> None:
        """Write releases to all nodes without waiting; once begun, they cannot be lost.

        An exception in the middle (a soft time limit, a killed greenlet) leaves them to the
        watchdog's thread.
        """
        for release in releases:
            self._unwritten[id(release)] = release
        try:
            for release in releases:
                self._write(release)
        finally:
            # replies are read by the next round here, or by the watchdog a little later
            self.watchdog.tidy_by(self.clock.now() + self.setup.node_timeout)

    def release_left(self, terms: Terms, left: Sequence[Left], acquired_at: float) -> Holding:
        """Give back, by its own tokens, what a process held that is gone; returns what that was.

        A mark among the terms says that its run is done. acquired_at: monotonic s. It is released
        again a little later: what the dead have written may come after the first release, by other
        connections.
        """
        spots = [Spot(self.setup.prefix, one.resource, one.permit, terms.ttl) for one in left]
        named = [spot for spot in spots if spot.resource in terms.resources]
        holding = Holding(self, terms, named, self.context())
        holding.acquired_at = acquired_at
        holding.claims = [
            Claim(self, terms, spot, one.value) for spot, one in zip(spots, left, strict=True)
        ]
        if terms.mark is not None:
            holding.mark_done()
        now = self.clock.now()
        self._left += [(now + seconds, holding) for seconds in LEFT_AGAIN]
        holding.let_go()
        return holding

    def _write(self, release: Release) -> None:
        claim = release.claim
        claim.hold.end()  # before the first byte: from here on nothing is held
        self.watchdog.unwatch(release.holding)
        self.quorum.broadcast(release.command(), self.clock.now())
        self.quorum.hand_on_mail()  # of connections that broke with its grant
        if claim.round.asked_again:
            self.doubt(release)
        self._unwritten.pop(id(release), None)

    def owe(self, node: int, debt: Debt) -> None:
        """Keep a release for a node that could not be told, until its lease is over there."""
        self._owed[node][id(debt)] = debt

    def doubt(self, release: Release) -> None:
        """Keep a release in mind whose grant may still run, after it."""
        self._doubtful[release.claim.value] = release

    def recognize(self, node: int, value: str) -> None:
        """Release again what a node holds of ours, if a refusal shows what we gave up long ago.

        A grant that a broken connection carried may run after the release that followed it.
        """
        release = self._doubtful.get(value)
        if release is not None:
            self.owe(node, release)
            self.watchdog.tidy_by(self.clock.now())

    def same_server(self) -> SettingsError | None:
        """Return the error where two of the nodes are one server, which then would vote twice."""
        pair = self.quorum.same_server
        if pair is None:
            return None
        return one_server(self._made_by, pair)

    # what the watchdog's threads do

    def renew(self, holdings: Sequence[Holding], *, native: bool = False) -> bool:
        """Renew in one batch a node, and wait for the answers; False where a quorum lacks one.

        native: called in a thread of the watchdog's.
        """
        if native:
            self.quorum.mend()
        sent = self.clock.now()
        renewed = [holding for holding in holdings if holding.is_kept() and holding.renews(sent)]
        renewals = [Renewal(self, sent, *part) for part in _in_parts(renewed, sent)]
        batch = Batch()
        entries: list[list[Entry]] = [[] for _ in self.quorum.nodes]
        for renewal in renewals:
            renewal.add_to(entries, batch)
        batch.close()
        self.quorum.scatter(entries, sent)
        if native and any(sent - holding.renew_at > LATE for holding in renewed):
            self.quorum.wait_keeping_gil(batch)
        self.quorum.wait(batch, sent + self.setup.node_timeout, native=native)
        short = {holding for renewal in renewals for holding in renewal.short()}
        for holding in renewed:
            holding.renewed(sent, reached=holding not in short)
        observer = self.redlock.observer
        if observer.hears_extensions:
            for holding in renewed:
                if holding not in short:
                    self.watchdog.tell(functools.partial(observer.extended, holding))
        return not short

    @property
    def owes(self) -> bool:
        """Whether a node that did not answer is still to be told of something, as of a release."""
        return any(self._owed)

    def _tidy(self) -> float:
        """Read late replies, send what is owed; returns when to look again."""
        now, timeout = self.clock.now(), self.setup.node_timeout
        self.quorum.mend()
        self.quorum.drain()
        for release in list(self._unwritten.values()):
            if now - release.made_at > timeout:  # else its owner is at it
                self._write(release)
        for due in [due for due in self._left if due[0] <= now]:
            self._left.remove(due)
            due[1].let_go()
        for node, owed in zip(self.quorum.nodes, self._owed, strict=True):
            self._pay(node, owed, now)
        for value, release in list(self._doubtful.items()):
            if release.until <= now:
                self._doubtful.pop(value, None)
        idle = min(IDLE, self.exchanged_every)
        self.quorum.keep_alive(idle)
        gone = self.watchdog.watches and self.quorum.reconnect()
        again = self.quorum.drop_spare_pollers()
        # the mail before what is owed: it may add to it
        again = min([again, *(due for due, _ in self._left)])
        if gone or self.quorum.outstanding or self._unwritten or self.owes:
            return min(again, now + timeout)
        if self._is_ending:
            return self._close_when_done(now + timeout)
        if any(node.connection for node in self.quorum.nodes):
            return min(again, now + idle)
        return again

    def _close_when_done(self, again: float) -> float:
        """Close unless something is left to do; returns when to look again."""
        if self._left or self.watchdog.is_busy:
            return again
        self.close()
        return math.inf

    def _pay(self, node: NodeClient, owed: dict[int, Debt], now: float) -> None:
        for key, debt in list(owed.items()):
            if debt.until <= now:
                owed.pop(key, None)
                debt.settle(node.index)
            elif node.connection is not None:
                owed.pop(key, None)
                self.quorum.send_to(node.index, debt.command())
        if owed:
            node.connect()

    def _node_changed(self, node: NodeClient, error: NodeError | None) -> None:
        self.watchdog.tell(functools.partial(self._say_of_node, node.name, error))

    def _say_of_node(self, name: str, error: NodeError | None) -> None:
        redlock = self.redlock
        if error is None:
            logger.info(
                "node %s answers again", name, extra={"event": "node_recovered", "node": name}
            )
            redlock.observer.node_recovered(redlock, name)
        else:
            told = {"event": "node_failed", "node": name}
            logger.error("node %s gives no vote: %s", name, with_hint(error.cause), extra=told)
            redlock.observer.node_failed(redlock, name, error.cause)

    def _node_greeted(self, node: NodeClient, greeting: ServerInfo) -> None:
        # a node that restarted is repaired while what it had promised is still true; no oftener
        # than once a second: a connection that each renewal breaks would else be its own cause
        now = self.clock.now()
        if self._hurried_at <= now:  # else it lies ahead, and is for this node, too
            self._hurried_at = max(now, self._hurried_at + LONGEST_RECONNECT)
        self.watchdog.hurry(self._hurried_at)
        silent_for = 0.0 if greeting.notes is None else greeting.notes.silent_for
        if silent_for > 0:
            is_new = node.index not in self._greeted and not self.tells_of_new_nodes
            level = logging.DEBUG if is_new else logging.WARNING
            self._log("node_silent", level, abstains(silent_for), node)
        self._greeted.add(node.index)
        if greeting.evicts:
            hint = "under pressure it forgets locks that are held; set it to noeviction"
            policy = greeting.evicts
            self._log("node_evicts", logging.ERROR, f"has maxmemory-policy {policy}: {hint}", node)

    def _node_replaced(self, node: int) -> None:
        # what its server promised may be true; but since when it was away, nobody knows
        for holding in self.watchdog.watched:
            for claim in holding.claims:
                claim.hold.withdraw(node)
            self.watchdog.attend(holding)

    def _log(self, event: str, level: int, text: str, node: NodeClient) -> None:
        extra = {"event": event, "node": node.name}
        log = functools.partial(logger.log, level, "node %s %s", node.name, text, extra=extra)
        self.watchdog.tell(log)


def one_server(level: str, names: Sequence[str]) -> SettingsError:
    """Return the error for two nodes that are one server, which then would vote twice."""
    hint = "these are one server (same run_id): name each server once"
    return SettingsError(level, "nodes", ", ".join(names), hint)


class Here:
    """One thread or greenlet. held: what it holds, by asyncio task (None outside) and resource."""

    def __init__(self) -> None:
        self.held: dict[tuple[object, str], Holding] = {}


Context = tuple[int, Here, object]  # process, thread or greenlet, asyncio task


class Release:
    """One release of one claim, on its way to every node.

    holding: what it belongs to. made_at: monotonic s. publish: whether waiters are told; of a
    failed try only for what it had won, and may have kept from somebody: the rest would wake those
    that make it fail. Where the run is done it carries the mark of that, which so is ahead of it on
    every connection, however often it is sent.
    """

    __slots__ = (
        "_done_at",
        "_ends",
        "_gone",
        "_heard",
        "_publish",
        "_taken_away",
        "_unsettled",
        "_was_held",
        "claim",
        "holding",
        "made_at",
        "until",
    )
    wanted = True

    def __init__(self, holding: Holding, claim: Claim, made_at: float, *, publish: bool) -> None:
        self.holding, self.claim, self.made_at = holding, claim, made_at
        self.until = made_at + RELEASE_IS_OWED * holding.terms.ttl  # by then every lease is over
        self._publish = publish
        self._done_at = holding.done_at
        self._was_held = claim.hold.state is HELD
        self._ends = claim.hold.ends  # as they are now: its end makes a new list
        self._heard: set[int] = set()  # nodes whose first answer is known, or never will be
        self._gone = 0  # nodes that do not have it
        self._taken_away = False  # one of them had promised to
        self._unsettled = (1 << len(claim.hold.ends)) - 1  # nodes still to be told, as bits

    def command(self) -> Command:
        """Return what to send; not kept, for it refers to this."""
        request = self.claim.release_request(publish=self._publish, done_at=self._done_at)
        return Command(request, self, RELEASE)

    def on_reply(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Take note of nodes where the key was not ours any more.

        Raises UnexpectedReplyError.
        """
        is_error = type(reply) is ReplyError
        if not is_error and (type(reply) is not int or reply not in (0, 1)):
            raise UnexpectedReplyError(reply)
        first = node not in self._heard
        self._heard.add(node)
        if self.claim.round.asked_again:  # a grant was lost that may still run
            self.holding.session.doubt(self)
        if reply == 1:
            self.settle(node)
            return
        session = self.holding.session
        if is_error and session.clock.now() < self.until:
            session.owe(node, self)  # it cannot just now: loading, busy, no disk
        else:
            self.settle(node)
        if first and reply == 0 and self._was_held:
            self._look_closer(node, run_id)

    def _look_closer(self, node: int, run_id: str) -> None:
        """Say that the lock was lost where too few nodes have kept it until its release."""
        session, end = self.holding.session, self._ends[node]
        if end > self.made_at:
            if self.claim.hold.keeps_its_word(node, run_id) or end <= session.clock.now():
                return  # restarted, and so silent; or its lease has ended on the way there
            self._taken_away = True
        self._gone += 1
        if self._taken_away and self._gone > len(session.quorum.nodes) - session.quorum.size:
            reason = "at its release its key was no longer ours"
            session.watchdog.tell(functools.partial(self.holding.say_lost, reason))

    def on_error(self, node: int, command: Command, error: NodeError) -> None:
        """Try again when the node is back, where it may hold a key of ours."""
        session = self.holding.session
        self._heard.add(node)
        if error.lost:
            session.doubt(self)  # the grant may have been lost on the same connection
        never_asked = node in self.claim.round.never_asked
        if not never_asked and session.clock.now() < self.until:
            session.owe(node, self)
        else:
            self.settle(node)

    def settle(self, node: int) -> None:
        """Take note that a node needs to be told no more; after the last one, say so."""
        self._unsettled &= ~(1 << node)
        if not self._unsettled:
            self.holding.session.redlock.observer.settled(self.claim)


@dataclass(frozen=True)
class Left:
    """What is known of a claim whose process is gone: its key, and the value that proves it."""

    resource: str
    permit: int
    value: str


class Spot:
    """One key that a lock may claim, and all of its requests that stays the same.

    permit: which of a semaphore's.
    """

    __slots__ = ("channel", "key", "packed_key", "permit", "resource", "ttl_ms")

    def __init__(self, prefix: str, resource: str, permit: int, ttl: float) -> None:
        self.resource, self.permit = resource, permit
        self.key = lock_key(prefix, resource, permit)
        self.packed_key = encode_text(self.key)
        self.channel = encode_text(wake_channel(prefix, resource))
        self.ttl_ms = encode_bulk(b"%d" % math.ceil(ttl * 1000))


class Claim:
    """What is claimed of one key: a fresh token, its lease, and the votes on it.

    value: of a claim that another process has made.
    """

    __slots__ = (
        "_release",
        "_renewal",
        "_value",
        "fence",
        "hold",
        "mark",
        "round",
        "session",
        "spot",
        "value",
    )

    def __init__(self, session: Session, terms: Terms, spot: Spot, value: str = "") -> None:
        self.session, self.spot, self.mark = session, spot, terms.mark
        quorum, drift = session.quorum, session.setup.clock_drift
        nodes, size = len(quorum.nodes), quorum.size
        hold = Hold(nodes, size, terms.ttl, drift, session.margin, session.guarded)
        fence = Fence(size) if terms.fencing else None
        self.hold, self.fence = hold, fence
        self.round = GrantRound(hold, nodes, quorum.send_to, fence)
        since_ms = session.clock.wall_us() // 1000
        self.value = value or value_of(session.platform.new_token(), since_ms, terms.label)
        self._value = encode_text(self.value)
        self._release = self._renewal = b""

    def attempt(self) -> Refused | None:
        """Make one round; None where it got the lock, else why it did not.

        Whatever it returns or raises, the caller gives the claim back. Raises SettingsError where
        nodes turn out to be one server, AlreadyDoneError and SupersededError.
        """
        session, round_, hold = self.session, self.round, self.hold
        quorum, clock = session.quorum, session.clock
        sent = round_.sent = clock.now()
        least = None if self.fence is None else proposal(clock.wall_us())
        request = self._grant_request(least)
        quorum.broadcast(Command(request, round_, GRANT, suffixed=True, dated=bool(least)), sent)
        self.release_request()  # packed while the nodes think
        until = sent + min(session.setup.node_timeout, hold.ttl / ROUNDS_IN_TTL)
        quorum.wait(round_, until)
        time_is_up, round_.decided = not round_.decided, True
        error = None if quorum.same_server is None else session.same_server()
        if error is not None:
            raise error
        if round_.done and round_.superseded:
            raise SupersededError(self.spot.resource)
        if round_.done:
            raise AlreadyDoneError(self.spot.resource)
        if quorum.replaced_at:
            self.withdraw_replaced()
        if round_.tally.reached and hold.begin(clock.now()):
            return None
        return self._refused(time_is_up)

    def withdraw_replaced(self) -> None:
        """Take back votes of nodes whose server turned out to be replaced since they were asked."""
        for node, moment in self.session.quorum.replaced_at.copy().items():
            if moment >= self.round.sent:
                self.round.withdraw(node)

    def _grant_request(self, least: int | None) -> bytes:
        requests, spot, mark = self.session.requests, self.spot, self.mark
        if mark is None or mark.asks_since is None:
            return requests.grant(spot.packed_key, self._value, spot.ttl_ms, least)
        round_ = self.round
        round_.asks_since, round_.heeds_later = mark.asks_since, mark.heeds_later
        round_.superseded = False
        return requests.ask(spot.packed_key, self._value, spot.ttl_ms, least, self._mark_key(mark))

    def _mark_key(self, mark: Mark) -> bytes:
        return encode_text(done_key(self.session.setup.prefix, mark.run))

    def settle_fence(self, token: int, until: float) -> bool:
        """See to it that a quorum of nodes has reached a token, by the monotonic s `until`."""
        fence = self.fence
        if fence is None:
            return True
        before = fence.token
        fence.choose(token)
        if not fence.usable:
            session, quorum = self.session, self.session.quorum
            round_ = RenewRound([self], len(quorum.nodes), session.clock, lambda number: None)
            request = session.requests.renew([self.spot.packed_key], [self.renewal()])
            quorum.broadcast(Command(request, round_, RENEW), session.clock.now())
            quorum.wait(round_, until)
        if not fence.usable:
            fence.token = before  # of an outer holder: what a quorum has confirmed stays in use
        return fence.usable and self.hold.held(self.session.clock.now())

    def _refused(self, time_is_up: bool) -> Refused:
        round_ = self.round
        for node, refusal in round_.refusals.items():
            self.session.recognize(node, refusal.value)
        if round_.tally.taken(time_is_up=time_is_up):
            return LockTaken(self.spot.resource, label_of(round_.holder()), round_.expires_in())
        quorum = self.session.quorum
        causes = causes_of(quorum, round_, time_is_up=time_is_up)
        return QuorumUnreachable(self.spot.resource, causes, quorum.size)

    def renewal(self) -> bytes:
        """Return what a request that renews it has of it behind the keys; packed once."""
        if self._renewal:
            return self._renewal
        fence, requests = self.fence, self.session.requests
        if fence is not None:  # its token may grow
            return requests.renewal(self._value, self.spot.ttl_ms, fence.token)
        self._renewal = requests.renewal(self._value, self.spot.ttl_ms)
        return self._renewal

    @property
    def broken_key(self) -> str:
        """Where a node notes that an operator broke it."""
        return broken_key(self.spot.key, self.value)

    def release_request(self, *, publish: bool = True, done_at: float = 0.0) -> bytes:
        """Return the request that gives it back, packed once; publish: tells the waiters, too.

        done_at: s since 1970 at which its run was done; 0.0: it is not, or has no mark.
        """
        requests, mark = self.session.requests, self.mark
        if done_at and mark is not None:
            channel = self.spot.channel if publish else SAY_NOTHING
            times = int(done_at * 1000), math.ceil(mark.kept_for * 1000)
            key = self._mark_key(mark)
            return requests.release_done(self.spot.packed_key, self._value, channel, key, *times)
        if not publish:
            return requests.release(self.spot.packed_key, self._value, SAY_NOTHING)
        if not self._release:
            spot = self.spot
            self._release = requests.release(spot.packed_key, self._value, spot.channel)
        return self._release


_numbers = itertools.count(1)


class Holding:
    """One acquisition, from its request to its end: all resources or none.

    spots: one for each resource, in the order of `keys.in_order`, or of one resource one for each
    permit. context: whose it is. Watched by the watchdog while it is held.
    """

    __slots__ = (
        "_context",
        "_last_renewal",
        "_releases",
        "_repair_at",
        "_said_lost",
        "_spots",
        "_users",
        "_warned",
        "abandoned",
        "acquired_at",
        "claims",
        "done_at",
        "leeway",
        "number",
        "renew_at",
        "session",
        "terms",
        "was_split",
    )

    def __init__(
        self, session: Session, terms: Terms, spots: Sequence[Spot], context: Context
    ) -> None:
        self.session, self.terms, self._spots = session, terms, spots
        self._context = context
        self.number = next(_numbers)  # in this process no other one ever has it
        self.claims: list[Claim] = []
        self.leeway = terms.ttl / RENEWED_TOGETHER
        self._users: list[ref[Any]] = []
        self.abandoned = False  # its context may not take it again
        self.renew_at = self._repair_at = math.inf
        self.acquired_at = 0.0
        self._last_renewal = -math.inf  # monotonic s up to which it may be renewed
        self.done_at = 0.0  # s since 1970, once what runs under it is done
        self._warned = self._said_lost = False
        self.was_split = False  # it was refused where nobody else had it either
        self._releases: list[Release] = []

    def join(self, user: object) -> None:
        """Take note of one more that relies on it; it is given back after the last.

        Kept weakly, so that what nobody can give back any more, since its acquire or release was
        cut, is not renewed for ever.
        """
        self._users.append(ref(user))

    def part(self, user: object) -> None:
        """Take note that somebody relies on it no more; twice does no harm."""
        if ref(user) in self._users:
            self._users.remove(ref(user))

    @property
    def users(self) -> int:
        """How many rely on it, and could still give it back."""
        return len([user for user in self._users if user() is not None])

    @property
    def resource(self) -> str:
        """What is held, for people."""
        return ", ".join(dict.fromkeys(spot.resource for spot in self._spots))

    def acquire(self) -> Refused | None:
        """Try once, without waiting; None where it got everything, else why not, rolled back.

        Raises SettingsError where nodes turn out to be one server.
        """
        started = self.session.clock.now()
        if self.terms.limit == 1:
            own_run = self._own_run() if self._is_second else []
            refused = self._claim_all([*own_run, *self._spots])
        else:
            refused = self._claim_all(self._own_run()) or self._claim_permit()
        if refused is None and self.terms.fencing:
            refused = self.settle_fences(self.fencing_token)
        if refused is None and len(self.claims) > 1 and not self.held:
            # the first of them ran out while the last was waited for
            refused = QuorumUnreachable(self.resource, (), self.session.quorum.size)
        if refused is not None:
            now = self.session.clock.now()
            self._releases = [
                Release(self, claim, now, publish=claim.hold.state is HELD) for claim in self.claims
            ]
            self.let_go()
            return refused
        self._begin(started)
        return None

    def _own_run(self) -> list[Spot]:
        """Return what a run that may be delivered again claims beside one of several permits."""
        mark = self.terms.mark
        if mark is None:
            return []
        return [Spot(self.session.setup.prefix, f"run:{mark.run}", 0, self.terms.ttl)]

    @property
    def _is_second(self) -> bool:
        return self.terms.mark is not None and self.terms.mark.is_second

    def _is_own(self, holder: str) -> bool:
        """Tell whether a holder is the run itself, by another delivery of its message."""
        return self.terms.mark is not None and is_of_run(holder, self.terms.mark.run)

    def _claim_all(self, spots: Sequence[Spot]) -> Refused | None:
        for spot in spots:
            refused = self._claim(spot)
            if refused is not None:
                return refused
        return None

    def _claim(self, spot: Spot) -> Refused | None:
        claim = Claim(self.session, self.terms, spot)
        self.claims.append(claim)  # before its grant leaves, so that it is given back
        self.session.redlock.observer.claiming(self, claim)
        refused = claim.attempt()
        self.was_split = self.was_split or (refused is not None and claim.round.is_split)
        return refused

    def _claim_permit(self) -> Refused | None:
        """Try each permit once, from a random one on; where all are taken, say the soonest free.

        A second delivery begins at the plain lock's: the first one, with a limit of 1, holds that.
        """
        first, soonest = random.randrange(self.terms.limit), None  # noqa: S311 - no secret
        if self._is_second:
            first = 0
        for spot in [*self._spots[first:], *self._spots[:first]]:
            refused = self._claim(spot)
            if not isinstance(refused, LockTaken) or self._is_own(refused.holder):
                return refused
            soonest = _sooner(soonest, refused)
            now, claim = self.session.clock.now(), self.claims[-1]
            self.session.hand_over([Release(self, claim, now, publish=False)])
            self.claims.pop()
        return soonest

    def settle_fences(self, token: int) -> Refused | None:
        """Have a token confirmed under each key; None where it may be used, else why it may not.

        One number for several resources: a counter may have grown under one of them alone, where
        a holder to come of another does not meet it.
        """
        session = self.session
        for claim in self.claims:
            until = session.clock.now() + session.setup.node_timeout
            if not claim.settle_fence(token, until):
                causes = causes_of(session.quorum)
                return QuorumUnreachable(claim.spot.resource, causes, session.quorum.size)
        return None

    def _begin(self, started: float) -> None:
        self.acquired_at, terms = started, self.terms
        if terms.renew:
            self._last_renewal = math.inf if terms.max_hold is None else started + terms.max_hold
        self._schedule(started + terms.ttl / 3)
        self.session.watchdog.watch(self)
        if self.session.quorum.replaced_at:  # between the grant of the first key and now
            for claim in self.claims:
                claim.withdraw_replaced()
        _, here, task = self._context
        for spot in self._spots:
            here.held[task, spot.resource] = self
        self.session.redlock.observer.acquired(self)

    @property
    def held(self) -> bool:
        """Whether everything is ours now, by arithmetic."""
        now, claims = self.session.clock.now(), self.claims
        if len(claims) == 1:
            return claims[0].hold.held(now)
        return bool(claims) and all(claim.hold.held(now) for claim in claims)

    @property
    def lost(self) -> bool:
        """Whether it was held once and is over, though nobody gave it back."""
        now = self.session.clock.now()
        return any(
            hold.state is LOST or (hold.state is HELD and not hold.held(now))
            for hold in (claim.hold for claim in self.claims)
        )

    @property
    def reason(self) -> str:
        """Why it is lost, in words."""
        reasons = [claim.hold.reason for claim in self.claims if claim.hold.reason]
        return reasons[0] if reasons else "no quorum of nodes renewed it in time"

    @property
    def held_for(self) -> float:
        """S since it was acquired."""
        return self.session.clock.now() - self.acquired_at

    @property
    def remaining(self) -> float:
        """S of validity left if nothing renews it; 0.0 once it is over."""
        now = self.session.clock.now()
        return min((claim.hold.remaining(now) for claim in self.claims), default=0.0)

    @property
    def fencing_token(self) -> int:
        """Its token, or the greatest that it has heard of while none is chosen; 0: none."""
        fences = [claim.fence for claim in self.claims if claim.fence]
        return max((fence.token or fence.greatest for fence in fences), default=0)

    def check_covers(self, resource: str, terms: Terms) -> None:
        """Raise where what is held cannot stand for what is asked inside of it."""
        if not self.held:
            raise LockLost(resource, self.reason)
        own = self.terms
        if own.limit > terms.limit:
            hint = f"is held here as one of {own.limit} permits, which excludes nobody: nest it "
            raise SettingsError("Lock", "limit", f"{terms.limit}", hint + "with the same limit")
        if terms.fencing and not own.fencing:
            hint = f"{resource!r} is held here without a fencing token: take the outer one with"
            raise SettingsError("Lock", "fencing", "True", f"{hint} fencing=True")

    def mark_done(self) -> None:
        """Let its release mark its run as done, also where the lock is lost."""
        if not self.done_at:
            self.done_at = self.session.clock.wall_us() / 1e6

    def leave(self) -> None:
        """Let its context not take it again."""
        _, here, task = self._context
        held = here.held
        for spot in self._spots:
            if held.get((task, spot.resource)) is self:
                held.pop((task, spot.resource), None)

    def let_go(self, *, publish: bool = True) -> None:
        """Send the release to every node; once is enough, twice does no harm."""
        self.leave()
        if not self._releases:
            now = self.session.clock.now()
            self._releases = [Release(self, c, now, publish=publish) for c in self.claims]
        self.session.hand_over(self._releases)
        self._releases = []  # they refer to each other

    @property
    def judge_at(self) -> float:
        """The monotonic s at which it is at risk, or, warned of that, lost; inf once it is said."""
        if self._said_lost:
            return math.inf
        if len(self.claims) == 1 and (hold := self.claims[0].hold).state is HELD:
            return hold.valid_until - (hold.margin if self._warned else hold.ttl / 3)
        states = {claim.hold.state for claim in self.claims}
        if LOST in states:
            return -math.inf
        if states != {HELD}:
            return math.inf
        before = self.session.margin if self._warned else self.terms.ttl / 3
        return min(claim.hold.valid_until for claim in self.claims) - before

    def judge(self, now: float) -> None:
        """Say in the log that it is at risk, and say once that it is lost."""
        holds = [claim.hold for claim in self.claims]
        for hold in holds:
            hold.judge(now)
        lost = [hold for hold in holds if hold.state is LOST]
        if lost:
            for hold in holds:
                hold.lose(lost[0].reason)  # one of several is lost: so are all
            self.say_lost(lost[0].reason)
        elif not self._warned and any(hold.at_risk(now) for hold in holds):
            self._warned = True
            left = min(hold.remaining(now) for hold in holds)
            text = "%r is at risk: not renewed, lost in %.1f s"
            extra = {"event": "lock_at_risk", "resource": self.resource, "remaining": left}
            log = functools.partial(logger.warning, text, self.resource, left, extra=extra)
            self.session.watchdog.say(log)

    def say_lost(self, reason: str) -> None:
        """Tell of the loss, once; called by the watchdog's second thread alone."""
        if not self._said_lost:
            self._said_lost = True
            self.session.watchdog.unwatch(self)
            self.session.watchdog.say(functools.partial(self._tell_lost, reason))

    def _tell_lost(self, reason: str) -> None:
        extra = {"event": "lock_lost", "resource": self.resource, "reason": reason}
        logger.error("lost %r: %s", self.resource, reason, extra=extra)
        self.session.redlock.observer.lost(self, reason)

    def renews(self, now: float) -> bool:
        """Tell whether there is anything left to renew; what nodes lack is repaired with it."""
        for claim in self.claims:
            if not claim.hold.held(now):
                self.renew_at = math.inf
                return False
        self._repair_at = math.inf
        return True

    def is_kept(self) -> bool:
        """Tell whether anybody is left who could give it back; else it is given back here."""
        for user in self._users:
            if user() is not None:
                return True
        if not self._is_left():
            return True
        self.let_go()
        text = "released %r: nobody keeps its Lock any more"
        extra = {"event": "lock_abandoned", "resource": self.resource}
        log = functools.partial(logger.warning, text, self.resource, extra=extra)
        self.session.watchdog.tell(log)
        return False

    def give_up(self, user: object) -> None:
        """Release in any thread, unless another user relies on the holding."""
        self.part(user)
        if not self.users and self._is_left():
            self.let_go()

    def _is_left(self) -> bool:
        """Return whether it has no users; from then on its context does not take it again."""
        self.abandoned = True  # set before `users` is read; a joiner reads it after joining
        if self.users:
            self.abandoned = False
        return self.abandoned

    def renewed(self, sent: float, *, reached: bool) -> None:
        """Set the next renewal after one that was sent at a monotonic s.

        reached: a quorum confirmed all of it.
        """
        ttl = self.terms.ttl
        if reached:
            self._warned = False
            self._schedule(sent + ttl / 3)
        else:
            hurry = max(SHORTEST_RENEWAL, self.remaining / 4)
            self._schedule(self.session.clock.now() + min(ttl / 3, hurry))

    def node_lacks_it(self) -> None:
        """Look at the deadline anew, and repair soon: when the round that told of it is over."""
        session = self.session
        soon = session.clock.now() + session.setup.node_timeout
        if any(claim.hold.to_repair(soon) for claim in self.claims):
            self._repair_at = soon
            self._schedule(min(soon, self.renew_at))
        session.watchdog.attend(self)

    def _schedule(self, moment: float) -> None:
        if self._repair_at < moment:
            moment = self._repair_at
        self.renew_at = moment if moment <= self._last_renewal else math.inf


class Renewal:
    """Claims that are renewed by one request to each node.

    sent: monotonic s. holdings: what each of the claims belongs to. lacking: nodes that are to set
    its key again, where it is one alone.
    """

    def __init__(
        self,
        session: Session,
        sent: float,
        holdings: Sequence[Holding],
        claims: Sequence[Claim],
        lacking: Collection[int] = (),
    ) -> None:
        self._holdings, self._claims, self._lacking = holdings, claims, lacking
        self._sent, self._requests = sent, session.requests
        self._round = RenewRound(claims, len(session.quorum.nodes), session.clock, self._node_lacks)

    def _node_lacks(self, number: int) -> None:
        self._holdings[number].node_lacks_it()

    def add_to(self, entries: Sequence[list[Entry]], batch: Batch) -> None:
        """Add to what each node is to be sent. batch: is told when it is decided."""
        batch.add(self._round)
        plain = self._entry()
        for own in entries:
            own.append(plain)
        for node in self._lacking:
            self._claims[0].round.asked_anew(node)
            entries[node][-1] = self._entry(encode_text(self._claims[0].broken_key))

    def _entry(self, note: bytes = b"") -> Entry:
        keys = [claim.spot.packed_key for claim in self._claims]
        request = self._requests.renew(keys, [claim.renewal() for claim in self._claims], note)
        return Command(request, self._round, RENEW), self._sent, request

    def short(self) -> list[Holding]:
        """Return what no quorum confirmed."""
        return [self._holdings[number] for number in self._round.short]


def _in_parts(
    holdings: Sequence[Holding], now: float
) -> Iterator[tuple[Sequence[Holding], Sequence[Claim], Collection[int]]]:
    """Yield what is to be renewed by one request, whose, and the nodes that are to set it again.

    Several where there are none, but not too many: a node does them in one go.
    """
    owners: list[Holding] = []
    claims: list[Claim] = []
    for holding in holdings:
        for claim in holding.claims:
            lacking = claim.hold.to_repair(now)
            if lacking:
                yield [holding], [claim], lacking
                continue
            owners.append(holding)
            claims.append(claim)
            if len(claims) == RENEWED_AT_ONCE:
                yield owners, claims, ()
                owners, claims = [], []
    if claims:
        yield owners, claims, ()


def _sooner(one: LockTaken | None, other: LockTaken) -> LockTaken:
    """Return the refusal whose lease ends first; unknown ends come last."""
    if one is None or one.expires_in is None:
        return other
    return other if other.expires_in is not None and other.expires_in < one.expires_in else one


def causes_of(
    quorum: GuardedNodeSet, round_: GrantRound | None = None, *, time_is_up: bool = False
) -> list[str]:
    """Return one text for each node that gave no vote; time_is_up: every node had its time."""
    errors = round_.errors if round_ else {}
    silent = round_.silent if round_ else {}
    voted = {*round_.granted, *round_.refusals} if round_ else set()
    causes = []
    for node in quorum.nodes:
        error = errors.get(node.index) or node.error
        if node.index in silent:
            causes.append(f"{node.name}: {abstains(silent[node.index])}")
        elif error is not None:
            causes.append(f"{node.name}: {with_hint(error.cause)}")
        elif round_ and time_is_up and node.index not in voted:  # frozen, or cut off: no error yet
            causes.append(f"{node.name}: no answer in time")
    return causes or [f"{node.name}: no answer in time" for node in quorum.nodes]
