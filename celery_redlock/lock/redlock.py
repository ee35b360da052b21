"""`Redlock` and `Lock`: acquire, extend, release over a majority of independent nodes.

Source: redis.io "Distributed Locks with Redis" (Redlock), made exact: a deadline a node counted
from before the request left, a round that ends as soon as the votes decide it, a fresh token for
each round, and a release that goes to every node on the wire that the grant took.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import os
import random
import socket
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from celery_redlock.errors import (
    NEVER_ACQUIRED,
    OF_THE_PARENT,
    RELEASED,
    LockLost,
    LockTaken,
    NotAcquired,
    QuorumUnreachable,
    RedlockError,
    SettingsError,
)
from celery_redlock.lock.coroutines import Errand, rest
from celery_redlock.lock.engine.wait_queue import Waiter
from celery_redlock.lock.keys import in_order, wake_channel
from celery_redlock.lock.lease import silence
from celery_redlock.lock.platform.clock import platform_for
from celery_redlock.lock.platform.greenlets import is_patched_by_eventlet
from celery_redlock.lock.server.admin import say_trusted, trust_node
from celery_redlock.lock.server.error_hints import is_misconfigured, is_of_a_replica
from celery_redlock.lock.server.handshake import Guard
from celery_redlock.lock.session import (
    ROUNDS_IN_TTL,
    Context,
    Holding,
    Observer,
    Refused,
    Session,
    Setup,
    Spot,
    Terms,
    causes_of,
)
from celery_redlock.lock.transport.address import parse_address, redact_url

logger = logging.getLogger(__name__)

RESTART_GUARDS = ("auto", "strict", "on", "off")
FIRST_SPIN, LONGEST_SPIN = 0.05, 1.0  # s: between tries while the caller waits for the lock
LONGEST_DEAF = 5.0  # s: between tries of one that would be woken, for a word that was missed
HOPELESS = 3.0  # s: for which one waits for nodes that are set up wrongly
SPLIT_TRIES = 6  # where rivals that came at once share the nodes, and none has got it
LONGEST_SPLIT = 0.25  # s: the widest range of a pause between those
WOKEN = 0.02  # s: within which those that one release wakes try, each at a moment of its own


def is_number(value: object) -> bool:
    """Tell whether a value is a finite number; bool is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_seconds(level: str, name: str, value: object, *, above: float = 0.0) -> float:
    """Return a number of s above a bound; raises SettingsError for anything else."""
    if not is_number(value) or value <= above:  # type: ignore[operator]
        raise SettingsError(
            level, name, repr(value), f"must be a number of seconds above {above:g}"
        )
    return float(value)  # type: ignore[arg-type]


def check_ttl(level: str, name: str, ttl: object, node_timeout: float, max_ttl: float) -> float:
    """Return a ttl in s that leaves time to renew it and is no longer than any client expects."""
    seconds = check_seconds(level, name, ttl)
    if seconds < ROUNDS_IN_TTL * node_timeout:
        hint = (
            f"must be at least {ROUNDS_IN_TTL} x node_timeout = "
            f"{ROUNDS_IN_TTL * node_timeout:g} s: raise it, or lower redlock_node_timeout"
        )
        raise SettingsError(level, name, repr(ttl), hint)
    if seconds > max_ttl:
        hint = f"must be at most redlock_max_ttl = {max_ttl:g} s: raise that for every client"
        raise SettingsError(level, name, repr(ttl), hint)
    return seconds


def check_prefix(level: str, name: str, prefix: object) -> str:
    """Return a prefix that can stand as a hash tag."""
    if not isinstance(prefix, str) or not prefix or "{" in prefix or "}" in prefix:
        hint = "must be a text, not empty, without { and }"
        raise SettingsError(level, name, repr(prefix), hint)
    return prefix


def check_drift(level: str, name: str, drift: object) -> float:
    """Return a fraction by which clocks may differ in speed."""
    if not is_number(drift) or not 0 <= drift < 0.5:  # type: ignore[operator]
        hint = "must be a fraction from 0 to below 0.5; 0.01 allows for 1 %"
        raise SettingsError(level, name, repr(drift), hint)
    return float(drift)  # type: ignore[arg-type]


def check_guard(level: str, name: str, guard: object) -> str:
    """Return a known word for the restart guard."""
    if guard not in RESTART_GUARDS:
        hint = f"must be one of {', '.join(map(repr, RESTART_GUARDS))}"
        raise SettingsError(level, name, repr(guard), hint)
    return str(guard)


class Redlock:
    """Locks over N independent Redis or Valkey nodes, of which a majority decides.

    nodes: URLs (redis://, rediss://, unix://, sentinel://host:port,host:port/name) or redis-py
    clients, whose connection settings are taken. prefix: of all names on the nodes.
    node_timeout: s that one node may take. clock_drift: fraction by which clocks may differ in
    speed. max_ttl: s, the longest ttl of any client of the prefix.
    restart_guard: "strict": a node that this prefix does not know, since it is new or restarted
    without its data, does not vote for max_ttl and a second, unless it is trusted (`trust`); "on":
    one that has been up for longer is believed; "off"; "auto": strict with two nodes and more.
    One object serves a whole process, every thread and greenlet of it; a forked child connects
    anew. Raises SettingsError.
    """

    observer: ClassVar[Observer] = Observer()

    def __init__(
        self,
        nodes: Iterable[Any],
        *,
        prefix: str = "redlock",
        node_timeout: float = 0.2,
        clock_drift: float = 0.01,
        max_ttl: float = 60.0,
        restart_guard: str = "auto",
    ) -> None:
        level = type(self).__name__
        if is_patched_by_eventlet():
            hint = "its threads cannot renew a lock in time: use gevent, or threads"
            raise SettingsError(level, "monkey_patch", "eventlet", hint)
        self.prefix = check_prefix(level, "prefix", prefix)
        self.node_timeout = check_seconds(level, "node_timeout", node_timeout)
        self.clock_drift = check_drift(level, "clock_drift", clock_drift)
        self.max_ttl = check_seconds(level, "max_ttl", max_ttl)
        self.restart_guard = check_guard(level, "restart_guard", restart_guard)
        addresses = check_nodes(level, "nodes", nodes, self.node_timeout)
        word = self.restart_guard
        if word == "auto":
            word = "strict" if len(addresses) > 1 else "off"
        guard = Guard(word, self.prefix, silence(self.max_ttl))
        setup = Setup(self.prefix, self.node_timeout, self.clock_drift, guard)
        self.session = Session(self, setup, addresses, platform_for(addresses))
        self._dropped = weakref.finalize(self, _end_dropped, self.session)
        self._dropped.atexit = False
        _sessions.add(self.session)
        _by_identity.setdefault(self.session.identity, self.session)

    def lock(
        self,
        resource: str | Sequence[str],
        *,
        ttl: float = 30.0,
        wait: float = 0.0,
        renew: bool = True,
        limit: int = 1,
        fencing: bool = False,
        max_hold: float | None = None,
    ) -> Lock:
        """Return the lock on a resource, or on several at once, not acquired yet.

        ttl: s that a node keeps it unrenewed, so how long a dead holder's lock stays.
        wait: s that `acquire` and `with` wait for it. renew: the watchdog renews it every ttl/3.
        limit: how many may hold it at once; above 1 neither with several resources nor with
        fencing. fencing: give each holder a `fencing_token`. max_hold: s after which renewal stops.
        Raises SettingsError.
        """
        level = f"{type(self).__name__}.lock"
        resources = check_resources(level, resource)
        check_permits(level, limit=limit, fencing=fencing, resources=resources)
        terms = Terms(
            resources=resources,
            limit=limit,
            fencing=fencing,
            ttl=check_ttl(level, "ttl", ttl, self.node_timeout, self.max_ttl),
            wait=check_wait(level, "wait", wait),
            renew=bool(renew),
            max_hold=None if max_hold is None else check_seconds(level, "max_hold", max_hold),
            label=f"pid {os.getpid()} on {socket.gethostname()}",
        )
        return Lock(self, terms)

    def trust(self) -> None:
        """Take the operator's word that no lock is held now: every reachable node votes at once.

        For a new cluster, or nodes that restarted without their data while nothing ran. Says in
        the log which nodes could not be told, and which hold locks all the same.
        Raises QuorumUnreachable where no node could be told.
        """
        causes = []
        nodes, timeout = self.session.quorum.nodes, max(self.node_timeout, LONGEST_SPIN)
        for node in nodes:
            try:
                held = node.address.ask(timeout, functools.partial(trust_node, prefix=self.prefix))
            except Exception as error:  # also what a user's credential provider raises
                causes.append(f"{node.name}: {node.address.without_secrets(str(error))}")
                told = {"event": "node_not_trusted", "node": node.name}
                text = "node %s could not be trusted: %s"
                logger.warning(text, node.name, causes[-1], extra=told)
            else:
                told = {"event": "node_trusted", "node": node.name}
                text = "node %s is trusted: it votes from now on"
                logger.info(text, node.name, extra=told)
                if held:
                    logger.warning(
                        "node %s is trusted, but holds %r: if its holder lives, a node that forgot "
                        "this lock may now give it to another", node.name, held,
                        extra={"event": "node_trusted_with_locks", "node": node.name},
                    )  # fmt: skip
        if len(causes) == len(nodes):
            raise QuorumUnreachable(f"every lock under {self.prefix!r}", causes, 1)
        word = self.session.platform.new_token()
        say = functools.partial(say_trusted, prefix=self.prefix, word=word)
        for node in nodes:  # once all of them vote, for who hears it tries at once
            with contextlib.suppress(Exception):  # a hint, and said above
                node.address.ask(timeout, say)

    def close(self) -> None:
        """Close the connections and end the threads. Held locks end with their ttl.

        One that is dropped without it does so by itself, with a ResourceWarning.
        """
        self._dropped.detach()
        self.session.close()

    def __enter__(self) -> Redlock:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        names = ", ".join(node.name for node in self.session.quorum.nodes)
        return f"<{type(self).__name__} {names}>"


class Lock:
    """One lock on one resource, of one context (thread, greenlet, asyncio task) at a time.

    `with lock:` acquires, waiting up to `wait` s, and releases; `async with lock:` does the same
    without blocking the event loop. The same object may be acquired again after its release.
    """

    def __init__(self, redlock: Redlock, terms: Terms) -> None:
        self._redlock, self._terms = redlock, terms
        self._grips: list[Grip] = []  # one for each acquire that is not released yet
        self._last: Grip | None = None  # to say of it why it is over
        self._spots = spots_of(redlock.prefix, terms)

    @property
    def resource(self) -> str:
        """What is protected, as the user names it; of several, all of them with commas between."""
        return ", ".join(self._terms.resources)

    @property
    def ttl(self) -> float:
        """S that a node keeps the lock unrenewed."""
        return self._terms.ttl

    @property
    def held(self) -> bool:
        """Whether the lock is ours now, by arithmetic on the clock: no I/O."""
        holdings = self._holdings()
        return bool(holdings) and all(holding.held for holding in holdings)

    @property
    def remaining(self) -> float:
        """S of validity left if nothing renews it; 0.0 once it is lost or released."""
        return min((holding.remaining for holding in self._holdings()), default=0.0)

    @property
    def fencing_token(self) -> int:
        """A number greater than every earlier holder's, for storage that refuses smaller ones.

        Of several resources the largest. Raises RedlockError where the lock was taken without
        `fencing=True`, or is not acquired.
        """
        if not self._terms.fencing:
            raise RedlockError(f"{self.resource!r} has no fencing token: take it with fencing=True")
        holdings = self._holdings()
        if not holdings:
            raise RedlockError(f"{self.resource!r} is not acquired, so it has no fencing token yet")
        return max(holding.fencing_token for holding in holdings)

    def ensure(self) -> None:
        """Raise LockLost, which says why, unless the lock is held now. No I/O."""
        if not self.held:
            raise LockLost(self.resource, self._why())

    def try_acquire(self, wait: float | None = None) -> bool:
        """Acquire; False where it is taken. Raises QuorumUnreachable; wait: as for `acquire`."""
        try:
            self.acquire(wait)
        except LockTaken:
            return False
        return True

    def acquire(self, wait: float | None = None) -> Lock:
        """Acquire and return the lock itself.

        Keep the object: a Lock that nobody keeps is released instead of renewed.
        wait: s to keep trying, the lock's own `wait` where None. What this thread, greenlet or
        asyncio task holds already by the same `Redlock` is taken again and counted: it is free
        once each acquire has had its release.
        Raises LockTaken, QuorumUnreachable, LockLost where what it holds already is lost,
        SettingsError where that promises less than is asked here, or where nodes turn out to be
        one server, and RedlockError in another context than the one that has acquired this object.
        """
        patience = self._patience("Lock.acquire", wait)
        grip = Grip(self._redlock.session.context())
        try:
            self._enter(grip)
            self._take(grip, patience)
        except BaseException:
            # also an exception from outside, as a soft time limit's, at whatever point
            self._end(grip)
            raise
        self._last = grip
        return self

    async def acquire_async(self, wait: float | None = None) -> Lock:
        """Acquire without blocking the event loop, and return the lock itself.

        The asyncio task that awaits this is the owner. What it holds already, by `acquire` or
        `acquire_async`, is taken again and counted. If the task is cancelled, the lock is given
        back. Use `wait` instead of `asyncio.wait_for`, which before Python 3.12 runs this in a task
        of its own. wait, and what is raised: as for `acquire`.
        """
        patience, session = self._patience("Lock.acquire_async", wait), self._redlock.session
        grip, errand = Grip(session.context()), Errand(session.threads)
        try:
            self._enter(grip)
            await self._take_async(grip, patience, errand)
        except BaseException:  # cancelled, too; or the loop has ended
            self._leave(grip)
            errand.then(grip.give_up)
            raise
        self._last = grip
        return self

    def _patience(self, level: str, wait: float | None) -> float:
        return self._terms.wait if wait is None else check_wait(level, "wait", wait)

    def _enter(self, grip: Grip) -> None:
        self._check_owner(grip.context)
        self._grips.append(grip)
        self._check_owner(grip.context)  # of two threads that came at once, one was first

    def _leave(self, grip: Grip) -> None:
        if grip in self._grips:  # else it was cut before it was in
            self._grips.remove(grip)

    def _take(self, grip: Grip, patience: float) -> None:
        outer, others = self._nest(grip)
        if not others:
            return
        session, fenced = self._redlock.session, self._terms.fencing and bool(outer)
        started = session.clock.now()
        refused = self._try(grip, others)
        if refused is not None:
            go_on = self._wait if patience > 0 else self._try_while_split
            refused = go_on(grip, others, refused, started + patience)
        if refused is None and fenced:
            refused = grip.settle_fences()
        if refused is not None:
            raise refused._after(session.clock.now() - started)
        _see_held(outer)

    async def _take_async(self, grip: Grip, patience: float, errand: Errand) -> None:
        outer, others = self._nest(grip)
        if not others:
            return
        session, fenced = self._redlock.session, self._terms.fencing and bool(outer)
        started = session.clock.now()
        refused = await errand.do(functools.partial(self._try, grip, others))
        if refused is not None and patience > 0:
            vigil = Vigil(session, grip, others, self._terms.limit, started + patience)
            refused = await self._wait_async(vigil, refused, errand)
        while refused is not None and patience <= 0:
            pause = grip.pause_of_split()
            if pause is None:
                break
            await asyncio.sleep(pause)
            refused = await errand.do(functools.partial(self._try, grip, others))
        if refused is None and fenced:
            refused = await errand.do(grip.settle_fences)
        if refused is not None:
            raise refused._after(session.clock.now() - started)
        _see_held(outer)

    def _nest(self, grip: Grip) -> tuple[dict[str, Holding], list[Spot]]:
        """Join what the context holds already. Return that, by resource, and the other spots."""
        outer = self._redlock.session.outer(self._terms, grip.context)
        if not outer:
            return outer, self._spots
        for resource, holding in list(outer.items()):
            grip.join(holding)
            if holding.abandoned:  # nobody kept its Lock, and it is given back just now
                grip.leave(holding)
                del outer[resource]
        return outer, [spot for spot in self._spots if spot.resource not in outer]

    def _try(self, grip: Grip, spots: Sequence[Spot]) -> Refused | None:
        """Try once; None where it got everything."""
        session, began = self._redlock.session, self._redlock.session.clock.now()
        holding = Holding(session, self._terms, spots, grip.context)
        grip.join(holding)  # before its grant leaves, so that a cut gives it back
        refused = holding.acquire()
        if refused is None:
            return None
        grip.leave(holding)
        grip.splits = grip.splits + 1 if holding.was_split else 0
        grip.took = session.clock.now() - began
        return refused

    def _try_while_split(
        self, grip: Grip, spots: Sequence[Spot], first: Refused, until: float
    ) -> Refused | None:
        """Try again where rivals kept each other from it, which no release will tell of.

        until: monotonic s; they come to terms within some rounds, also where that is over.
        """
        refused: Refused | None = first
        while refused is not None and (pause := grip.pause_of_split()) is not None:
            self._redlock.session.clock.sleep(pause)
            refused = self._try(grip, spots)
        return refused

    def _wait(
        self, grip: Grip, spots: Sequence[Spot], first: Refused, until: float
    ) -> Refused | None:
        """Try again whenever it may be free, up to the monotonic s `until`."""
        refused: Refused | None = first
        session, limit = self._redlock.session, self._terms.limit
        vigil = Vigil(session, grip, spots, limit, until)
        with session.listener.waiting(vigil.channels, limit) as waiter:
            while refused is not None and (moment := vigil.rests_until(refused)) is not None:
                session.quorum.wait(waiter, moment)
                if waiter.take():
                    session.clock.sleep(vigil.woken())
                    vigil.share(waiter)
                vigil.tries(waiter)
                refused = self._try(grip, spots)
                vigil.tried(waiter, refused)
        return refused

    async def _wait_async(self, vigil: Vigil, first: Refused, errand: Errand) -> Refused | None:
        """Do what `_wait` does: try in threads, and wait in the event loop."""
        refused: Refused | None = first
        session = self._redlock.session
        with session.listener.waiting(vigil.channels, self._terms.limit) as waiter:
            try:
                while refused is not None and (moment := vigil.rests_until(refused)) is not None:
                    await rest(waiter, moment - session.clock.now())
                    if waiter.take():
                        await asyncio.sleep(vigil.woken())
                        vigil.share(waiter)
                    vigil.tries(waiter)
                    attempt = functools.partial(self._try, vigil.grip, vigil.spots)
                    refused = await errand.do(attempt)
                    vigil.tried(waiter, refused)
            except BaseException:
                waiter.decided = True  # a release it did not use wakes the next waiter
                raise
        return refused

    def extend(self) -> None:
        """Renew the lease now.

        Raises LockLost where it is lost, and QuorumUnreachable where no quorum answered in time:
        then the lock is held for `remaining` s and extend may be called again.
        """
        self._check_owner(self._redlock.session.context())
        self.ensure()
        session = self._redlock.session
        reached = session.renew(self._holdings())
        self.ensure()
        if not reached:
            quorum = session.quorum
            raise QuorumUnreachable(self.resource, causes_of(quorum), quorum.size)

    def release(self) -> None:
        """Give the lock back: written to every node, without waiting for their replies.

        Does nothing where it is released already; one that was lost is logged.
        Raises RedlockError where it was never acquired, or from another context.
        """
        last = self._grips[-1:]  # no call: an exception from outside strikes in the `try`, or above
        held: list[Holding] = []
        lost: list[Holding] = []
        try:
            self._check_acquired()
            grip = last[0] if last else None
            context = self._redlock.session.context()
            if grip is None or grip.context[0] != context[0] or not grip.holdings:
                return  # released; or a child, which neither holds nor releases its parent's locks
            self._check_owner(context)
            mine = [holding for holding in grip.holdings if holding.users == 1]
            held = [holding for holding in mine if holding.held]
            if len(held) < len(mine):
                lost = [holding for holding in mine if holding.lost]
            self._end(grip)
        except RedlockError:
            raise
        except BaseException:  # cut before it was on its way, it would be renewed for ever
            self._end_again(last)
            raise
        for holding in held:
            self._redlock.observer.released(holding)
        for holding in lost:
            told = {"event": "lock_released_lost", "resource": holding.resource}
            text = "released %r after it was lost: %s"
            logger.warning(text, holding.resource, holding.reason, extra=told)
            holding.session.watchdog.tell(functools.partial(holding.say_lost, holding.reason))

    async def release_async(self) -> None:
        """Give the lock back, in the asyncio task that has acquired it.

        The release is written to the nodes at once, without waiting for replies, so a cancellation
        cannot interrupt it. Raises what `release` raises.
        """
        self.release()

    def _end_again(self, grips: Sequence[Grip]) -> None:
        """Let go of what a cut release may have left."""
        for grip in grips:
            if grip in self._grips and grip.context[0] == os.getpid():
                self._end(grip)

    def _check_acquired(self) -> None:
        if self._last is None:
            raise RedlockError(f"{self.resource!r} was never acquired: call acquire() first")

    def _end(self, grip: Grip) -> None:
        """Let go of what may be held."""
        try:
            grip.let_go()
        except BaseException:
            grip.let_go()  # cut before it was on its way
            raise
        finally:
            self._leave(grip)

    def __enter__(self) -> Lock:
        return self.acquire()

    def __exit__(self, *exc_info: object) -> None:
        last = self._grips[-1:]
        try:
            self.release()
        except RedlockError:
            raise
        except BaseException:  # cut before the first line of `release`
            self._end_again(last)
            raise

    async def __aenter__(self) -> Lock:
        return await self.acquire_async()

    async def __aexit__(self, *exc_info: object) -> None:
        last = self._grips[-1:]
        try:
            self.__exit__(*exc_info)
        except RedlockError:  # another task leaves the block, as when it closes an async generator
            self._end_again(last)
            if exc_info[0] is None:
                raise

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.resource!r} {'held' if self.held else 'not held'}>"

    def _holdings(self) -> list[Holding]:
        """Return what the last acquire relies on; nothing in a child, whose parent holds it."""
        grips = self._grips
        if not grips or grips[0].context[0] != os.getpid():
            return []
        return grips[-1].holdings

    def _why(self) -> str:
        if self._last is None:
            return NEVER_ACQUIRED
        if self._grips and not self._holdings():
            return OF_THE_PARENT
        holdings = self._holdings()
        if not holdings:
            return RELEASED
        return next((h.reason for h in holdings if h.lost), RELEASED)

    def _check_owner(self, context: Context) -> None:
        """Raise where the object is acquired in another context; the first one in is its owner."""
        first = self._grips[:1]  # in one step: it may go meanwhile
        if not first or first[0].context is context:
            return
        owner = first[0].context
        if owner[0] != context[0]:
            self._grips.clear()  # in a child, of which nothing of its parent's is
        elif owner != context:
            raise RedlockError(
                f"the lock on {self.resource!r} belongs to another thread, greenlet or task: make "
                "one Lock for each"
            )


class Grip:
    """What one acquire relies on: its own acquisition, and those around it that it takes again.

    context: whose it is. splits: its tries in a row that rivals shared the nodes at. took: s, of
    its last try.
    """

    __slots__ = ("__weakref__", "context", "holdings", "splits", "took")

    def __init__(self, context: Context) -> None:
        self.context = context
        self.holdings: list[Holding] = []
        self.splits, self.took = 0, 0.0

    def pause_of_split(self) -> float | None:
        """Return the s until the next try where rivals share the nodes, None where that is over.

        Some rounds, drawn from a range that doubles, so that one of them is soon alone. After some
        such tries they are no rivals that came at once, and it is waited for like any holder.
        """
        if not 0 < self.splits < SPLIT_TRIES:
            return None
        return random.uniform(0, min(LONGEST_SPLIT, self.took * 2**self.splits))  # noqa: S311

    def join(self, holding: Holding) -> None:
        """Rely on a holding from now on."""
        if holding not in self.holdings:
            self.holdings.append(holding)
            holding.join(self)

    def leave(self, holding: Holding) -> None:
        """Rely on a holding no more, which is over."""
        self.holdings.remove(holding)
        holding.part(self)

    def settle_fences(self) -> Refused | None:
        """Have one fencing token confirmed for all; None where it may be used."""
        token = max(holding.fencing_token for holding in self.holdings)
        refusals = (holding.settle_fences(token) for holding in self.holdings)
        return next((refused for refused in refusals if refused is not None), None)

    def let_go(self) -> None:
        """Give back what nobody else relies on; twice does no harm."""
        for holding in self.holdings:
            holding.part(self)
            if not holding.users:
                holding.let_go()

    def give_up(self) -> None:
        """Release in any thread, while the context may be about to take the same lock again."""
        for holding in self.holdings:
            holding.give_up(self)


class Vigil:
    """When a waiter tries again and when it gives up; for threads and coroutines alike.

    spots: what it waits for. limit: as of `Terms`. until: monotonic s at which it gives up. If too
    many nodes are misconfigured it gives up earlier, but not at once: their answers may be older
    than their last reconnect.
    """

    def __init__(
        self, session: Session, grip: Grip, spots: Sequence[Spot], limit: int, until: float
    ) -> None:
        self.grip, self.spots = grip, spots
        self._session, self._limit, self._until = session, limit, until
        resources = dict.fromkeys(spot.resource for spot in spots)
        self.channels = [wake_channel(session.setup.prefix, resource) for resource in resources]
        self._tries = self._vain = 0
        self._tried_at = session.clock.now()
        self._hopeless_at = self._tried_at + HOPELESS

    def rests_until(self, refused: Refused) -> float | None:
        """Return the monotonic s of the next try if no release comes before; None to give up."""
        session, now = self._session, self._session.clock.now()
        if now >= self._until:
            return None
        if not self._is_hopeless(refused):
            self._hopeless_at = now + HOPELESS
        elif self._tried_at > self._hopeless_at:  # by then, and not by a clock that ran on alone
            return None
        pause = self.grip.pause_of_split()
        if pause is None:
            hears = all(map(session.listener.hears, self.channels))
            pause = _pause(refused, self._tries, hears=hears)
        return min(session.clock.now() + pause, self._until)

    def woken(self) -> float:
        """Return the s to wait after a ring: random, since a release rings other waiters, too."""
        self.grip.splits = 0
        seconds = random.uniform(0, min(LONGEST_SPIN, WOKEN * 2**self._vain))  # noqa: S311
        self._vain = min(self._vain + 1, 16)
        return seconds

    def share(self, waiter: Waiter) -> None:
        """Drop the rings of the other nodes for the same release; with permits wake the next."""
        waiter.take()
        if self._limit > 1:  # of permits
            self._session.listener.pass_on(waiter)

    def tries(self, waiter: Waiter) -> None:
        """Note that a try begins."""
        self._tried_at, waiter.awaits = self._session.clock.now(), ""  # any of them may refuse it

    def tried(self, waiter: Waiter, refused: Refused | None) -> None:
        """Note the result of a try, and the resource to wait for.

        A try for several resources releases those it has won, which rings their channels, so the
        waiter listens to the refused one alone.
        """
        self._tries += 1
        if isinstance(refused, LockTaken):
            channel = wake_channel(self._session.setup.prefix, refused.resource)
            waiter.awaits = channel if channel in self.channels else ""

    def _is_hopeless(self, refused: Refused) -> bool:
        """Tell whether no quorum can come about before somebody changes a setting."""
        if isinstance(refused, LockTaken):
            return False
        quorum = self._session.quorum
        wrong = [cause for cause in refused.causes if is_misconfigured(cause)]
        lasting = [cause for cause in wrong if not is_of_a_replica(cause)]  # a failover ends that
        return len(lasting) > len(quorum.nodes) - quorum.size


def _see_held(outer: Mapping[str, Holding]) -> None:
    """Raise LockLost if an outer lock expired while the other resources were waited for."""
    for holding in outer.values():
        if not holding.held:
            raise LockLost(holding.resource, holding.reason)


def spots_of(prefix: str, terms: Terms) -> list[Spot]:
    """Return the keys that a lock may claim: one a resource, or one a permit of its resource."""
    return [
        Spot(prefix, resource, permit, terms.ttl)
        for resource in terms.resources
        for permit in range(terms.limit)
    ]


def give_back(lock: Lock, *, done: bool = False) -> None:
    """Release a lock as often as it has been acquired; for whoever was cut and cannot know.

    done: what ran under it is, and is marked so, also where the lock was released or lost before.
    """
    if done and lock._last is not None:
        own = [holding for holding in lock._last.holdings if holding.terms is lock._terms]
        for holding in own:  # and not those around it, whose end is not this one's
            holding.mark_done()
            if lock._last not in lock._grips:
                holding.let_go(publish=False)
    while lock._grips:
        before = len(lock._grips)
        lock.release()
        if len(lock._grips) == before:  # a child's, or never more than begun
            return


def holdings_of(lock: Lock) -> list[Holding]:
    """Return what a lock relies on now: its own acquisition, and those around it."""
    return lock._holdings()


def loss_of(lock: Lock) -> LockLost | None:
    """Return the error that tells of a lock's loss; None where it is held, or given back."""
    if any(holding.lost for holding in holdings_of(lock)):
        return LockLost(lock.resource, lock._why())
    return None


def _pause(refused: NotAcquired, tries: int, *, hears: bool) -> float:
    """Return the s until the next try: randomized, and soon after the lease that refused.

    hears: a release would wake us, so that trying by ourselves is for what was missed.
    """
    uniform = random.uniform
    if hears and isinstance(refused, LockTaken):
        spin = uniform(LONGEST_SPIN, LONGEST_DEAF)
    else:
        spin = uniform(0.001, min(LONGEST_SPIN, FIRST_SPIN * 2 ** min(tries, 16)))
    ends = refused.expires_in if isinstance(refused, LockTaken) else None
    return spin if ends is None else min(spin, ends + uniform(0, FIRST_SPIN))


def _end_dropped(session: Session) -> None:
    """End what a `Redlock` has begun that nobody closed; says so, as sockets do.

    Called by the garbage collector, in any thread and at any point of it: so it waits for nothing.
    """
    if not session.is_used:
        return
    with contextlib.suppress(RuntimeError):  # the interpreter ends
        session.platform.start_thread(session.end)
    if session.warns:
        names = ", ".join(node.name for node in session.quorum.nodes)
        warnings.warn(f"unclosed <Redlock {names}>", ResourceWarning, stacklevel=2)


def _forget_all() -> None:
    for session in list(_sessions):
        session.forget()


def session_of(identity: bytes) -> Session | None:
    """Return a session of this process by what names its nodes and prefix; see `identity`."""
    found = _by_identity.get(identity)
    if found is None:  # or the first one made is gone
        found = next((one for one in list(_sessions) if one.identity == identity), None)
    return found


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
_by_identity: weakref.WeakValueDictionary[bytes, Session] = weakref.WeakValueDictionary()
os.register_at_fork(after_in_child=_forget_all)


def check_nodes(level: str, name: str, nodes: Any, node_timeout: float) -> list[Any]:
    """Return the addresses of nodes, each named once; raises SettingsError."""
    if isinstance(nodes, (str, bytes)) or not isinstance(nodes, Iterable):
        shown = repr(redact_url(nodes)) if isinstance(nodes, str) else f"a {type(nodes).__name__}"
        raise SettingsError(level, name, shown, "must be a list of URLs or redis-py clients")
    addresses = [parse_address(node, level, name, node_timeout) for node in nodes]
    if not addresses:
        raise SettingsError(level, name, "[]", "must name one node at least, better three or five")
    seen: dict[str, str] = {}
    for address in addresses:
        if address.server in seen:
            shown = f"{seen[address.server]}, {address.name}"
            hint = "name each server once: the same one twice is one vote counted twice"
            raise SettingsError(level, name, shown, hint)
        seen[address.server] = address.name
    return addresses


def check_resources(level: str, resources: object) -> tuple[str, ...]:
    """Return the resources that are named, in the order in which everybody takes several."""
    named = resources
    if isinstance(named, str) or not isinstance(named, Iterable) or isinstance(named, bytes):
        named = (named,)
    found = list(named)
    if not found or not all(isinstance(name, str) and name for name in found):
        hint = "must be a text, or a list of texts, none of them empty"
        raise SettingsError(level, "resource", repr(resources), hint)
    return in_order(found)


def check_wait(level: str, name: str, wait: object) -> float:
    """Return a number of s from 0 upwards; raises SettingsError."""
    if not is_number(wait) or wait < 0:  # type: ignore[operator]
        raise SettingsError(level, name, repr(wait), "must be a number of seconds, 0 or more")
    return float(wait)  # type: ignore[arg-type]


def check_limit(level: str, name: str, limit: object) -> int:
    """Return a number of permits, 1 or more; raises SettingsError."""
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise SettingsError(level, name, repr(limit), "must be a whole number, 1 or more")
    return limit


def check_permits(level: str, *, limit: object, fencing: object, resources: Sequence[str]) -> None:
    """Refuse what cannot be together; raises SettingsError."""
    permits = check_limit(level, "limit", limit)
    if not isinstance(fencing, bool):
        raise SettingsError(level, "fencing", repr(fencing), "must be True or False")
    if permits > 1 and len(resources) > 1:
        hint = "permits above 1 are of one resource: name one, or leave the limit at 1"
        raise SettingsError(level, "limit", repr(limit), hint)
    if permits > 1 and fencing:
        hint = "holders side by side have no order, so no fencing tokens: limit=1, or no fencing"
        raise SettingsError(level, "limit", repr(limit), hint)
