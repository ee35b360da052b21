"""`Redlock`: the client of one set of nodes, made once per program for all its locks."""

from __future__ import annotations

import contextlib
import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from celery_redlock.errors import LockLost, QuorumUnreachable, SettingsError
from celery_redlock.lock.claims import delete_claim, list_claims
from celery_redlock.lock.engine.session import Session
from celery_redlock.lock.inspection import break_lock, break_rate, list_locks, list_waiting
from celery_redlock.lock.lock import Lock
from celery_redlock.lock.model.keys import in_order
from celery_redlock.lock.model.options import ClientOptions, Guard, LockOptions, grace_period
from celery_redlock.lock.node_status import read_nodes
from celery_redlock.lock.platform.clock import platform_for
from celery_redlock.lock.platform.forks import call_at_end, check_process, reset_in_children
from celery_redlock.lock.platform.threads import is_patched_by_eventlet, uninterruptible
from celery_redlock.lock.reports import (
    Answers,
    BreakReport,
    ClaimList,
    EndedClaim,
    LockList,
    LockReport,
    NodeList,
    RateReport,
    WaitingList,
)
from celery_redlock.lock.server.admin import trust_nodes
from celery_redlock.lock.validation import (
    check_callback,
    check_drift,
    check_flag,
    check_guard,
    check_nodes,
    check_permits,
    check_prefix,
    check_rates,
    check_resources,
    check_seconds,
    check_text,
    check_ttl,
    check_wait,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")


def _without_celery(app: Any) -> Redlock:
    raise RuntimeError("Redlock.of needs an import of celery_redlock")


# Returns the `Redlock` of a Celery app. The module `wiring` sets it: tasks are above the lock.
own_of_app: Callable[[Any], Redlock] = _without_celery


class Redlock:
    """Locks on N independent Redis or Valkey nodes; a majority of them grants a lock.

    nodes: URLs (redis://, rediss://, unix://, sentinel://host:port,host:port/name), or redis-py
    clients, whose connection settings are used; or one PostgreSQL (postgresql://).
    prefix: the start of all names on the nodes.
    node_timeout: seconds for one node to answer; an acquire that has to connect may take 2 s.
    clock_drift: fraction by which clocks may differ in speed. max_ttl: seconds, the longest ttl of
    any client of the prefix.
    restart_guard: which new or restarted nodes wait before they vote. "strict": a node waits for
    max_ttl and a second, unless it is trusted (`trust`). "off": every node votes. "auto": "strict"
    with two nodes or more, or with PostgreSQL, else "off".

    One object serves all threads and greenlets of a process. A forked child makes its own
    connections. Raises SettingsError.
    """

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
        addresses = check_nodes(level, "nodes", nodes)
        mode = self.restart_guard
        if mode == "auto":
            mode = "strict" if len(addresses) > 1 or addresses[0].keeps_locks else "off"
        guard = Guard(mode, self.prefix, grace_period(self.max_ttl))
        shared = self.clock_drift, self.max_ttl, guard
        options = ClientOptions(self.prefix, self.node_timeout, *shared)
        self._session = Session(self, options, addresses, platform_for(addresses))
        self._dropped = weakref.finalize(self, _end_dropped, self._session)
        self._dropped.atexit = False
        _sessions.append(weakref.ref(self._session, _sessions.remove))

    @property
    def session(self) -> Session:
        """What this process keeps for all locks of the client."""
        check_process()
        return self._session

    @classmethod
    def of(cls, app: Any) -> Redlock:
        """Return the `Redlock` of a Celery app in this process: the one that its tasks use.

        The app keeps it, and closes it. Your own `close` ends the locks of all tasks that run in
        this process; the next use by the app makes another one. Raises SettingsError, also if no
        setting names a node.
        """
        return own_of_app(app)

    def lock(
        self,
        resource: str | Sequence[str],
        *,
        ttl: float = 30.0,
        wait: float = 0.0,
        renew: bool = True,
        limit: int | Mapping[str, int] = 1,
        rate: str | tuple[int, float] | Mapping[str, Any] | None = None,
        fencing: bool = False,
        max_hold: float | None = None,
        reentrant: bool = True,
        on_lost: Callable[[LockLost], object] | None = None,
    ) -> Lock:
        """Return the lock on a resource, or on several at once. The lock is not acquired yet.

        ttl: seconds that a node keeps the key without a renewal, so the time until the lock of a
        dead holder expires. wait: seconds that `acquire` and `with` wait for the lock. renew:
        whether the watchdog renews the lock every ttl/3. limit: number of holders at one time.
        Of several resources, a mapping from a resource to its number; one that it leaves out has
        one holder. fencing: whether each holder gets a `fencing_token`; only with limit 1.
        rate: at most so many acquires in any period, as "100/h" or (100, 3600), over all clients;
        of several resources, a mapping. max_hold: seconds after which renewal stops. reentrant:
        whether a thread, greenlet or asyncio task that holds the resource may acquire it again; if
        not, it is refused as another client is. on_lost: called with the LockLost once the lock is
        lost, in a thread of the package, as the signal `lock_lost` is sent; what it raises is
        logged. Raises SettingsError.

        A nested acquire relies on the outer lock, and on the `on_lost` of the outer lock.
        """
        level = f"{type(self).__name__}.lock"
        resources = check_resources(level, resource)
        limits = check_permits(level, limit=limit, fencing=fencing, names=resources)
        options = LockOptions(
            resources=in_order(resources, limits) if limits else resources,
            limits=limits,
            rates=None if rate is None else check_rates(level, rate=rate, names=resources),
            fencing=fencing,
            ttl=check_ttl(level, "ttl", ttl, self.node_timeout, self.max_ttl),
            wait=check_wait(level, "wait", wait),
            renew=check_flag(level, "renew", renew),
            reentrant=check_flag(level, "reentrant", reentrant),
            max_hold=None if max_hold is None else check_seconds(level, "max_hold", max_hold),
            label="",  # of the process that acquires it, which may be a forked child
            on_lost=None if on_lost is None else check_callback(level, "on_lost", on_lost),
        )
        return Lock(self, options)

    def status(self) -> NodeList:
        """Return the status of each node: whether it answers and votes, and its clock.

        This and the methods below ask all nodes, each on a new connection, in the thread that
        calls. A node that does not answer costs up to a second, or the node_timeout if longer.
        """
        return read_nodes(self.session)

    def locks(self, resource: str | None = None) -> LockList:
        """Return all locks and rates on the nodes, or those of one resource.

        Without a resource it reads the names of all keys of the nodes' databases.
        """
        if resource is not None:
            self._check("locks", resource)
        return list_locks(self.session, resource)

    def rates(self, resource: str | None = None) -> tuple[RateReport, ...]:
        """Return the rates of which starts are used: those of `locks`.

        Raises QuorumUnreachable if it finds none, and too few nodes answer to know.
        """
        lock_list = self.locks(resource)
        return self._known(lock_list.rates, lock_list, resource)

    def holder(self, resource: str) -> LockReport | None:
        """Return the lock that is held on a resource, None if it is free; of permits the first.

        The answer may be old once it arrives: to act on a free lock, acquire it. Raises
        QuorumUnreachable if too few nodes answer to know.
        """
        self._check("holder", resource)
        lock_list = self.locks(resource)
        held = next((lock for lock in lock_list.locks if lock.held), None)
        return self._known(held, lock_list, resource)

    def waiters(self, resource: str | None = None) -> WaitingList:
        """Return all processes that wait for a lock or a start, or those of one resource.

        In order. Of a worker it is the process; `celery redlock waiters` also asks for its tasks.
        """
        if resource is not None:
            self._check("waiters", resource)
        return list_waiting(self.session, resource)

    def break_lock(self, resource: str) -> BreakReport:
        """Take a resource from its holders, give its starts back, and return what was broken.

        A holder is not stopped: its body runs on until its next renewal, and another one may run
        beside it. Nothing is broken of a resource that nobody holds. Raises as `rates` does.
        """
        self._check("break_lock", resource)
        lock_list = self.locks(resource)
        self._known(lock_list.locks or lock_list.rates, lock_list, resource)
        locks = tuple(break_lock(self.session, lock) for lock in lock_list.locks if lock.value)
        rates = tuple(break_rate(self.session, rate) for rate in lock_list.rates)
        return BreakReport(resource, locks, rates, lock_list.needed)

    def claims(self, pattern: str = "*") -> ClaimList:
        """Return the claims of deduplicated calls whose resource matches a pattern: `"stock:*"`.

        It reads the names of all keys of the nodes' databases.
        """
        self._check("claims", pattern, "pattern")
        return list_claims(self.session, pattern)

    def end_claim(self, resource: str) -> tuple[EndedClaim, ...]:
        """End the claims of all tasks on a resource, so that the next send is no duplicate.

        resource: as a `ClaimReport` names it. The message of an earlier send runs all the same.
        Raises as `rates` does.
        """
        self._check("end_claim", resource)
        claim_list = self.claims()
        claims = [claim for claim in claim_list.claims if resource in claim.known_as]
        self._known(claims, claim_list, resource)
        return tuple(delete_claim(self.session, claim) for claim in claims)

    def _known(self, result: T, answers: Answers, resource: str | None) -> T:
        """Return the result of a query.

        Raises QuorumUnreachable if the result is empty and too few nodes answered to be sure.
        """
        if not result and not answers.is_known:
            causes = [f"{node}: {cause}" for node, cause in answers.failing.items()]
            subject = resource or f"every lock under {self.prefix!r}"
            raise QuorumUnreachable(subject, causes, answers.needed)
        return result

    def _check(self, method: str, text: object, name: str = "resource") -> None:
        check_text(f"{type(self).__name__}.{method}", name, text)  # None would be every resource

    def trust(self) -> None:
        """Let every reachable node vote at once. The operator confirms that no lock is held now.

        For a new cluster, or for nodes that restarted without their data while no holder ran. Logs
        the nodes that could not be reached, and the nodes that hold locks nevertheless. Raises
        QuorumUnreachable if no node could be reached.
        """
        nodes = self.session.nodes
        trusted, failures = trust_nodes(nodes, [node.name for node in nodes.all], self.prefix)
        for name, cause in failures.items():
            extra = {"event": "node_not_trusted", "node": name}
            logger.warning("node %s could not be trusted: %s", name, cause, extra=extra)
        for name, lock_name in trusted.items():
            extra = {"event": "node_trusted", "node": name}
            logger.info("node %s is trusted: it votes from now on", name, extra=extra)
            if lock_name:
                logger.warning(
                    "node %s is trusted, but holds the lock %r: if its owner still runs, a node "
                    "that has lost this lock may now grant it to another one", name, lock_name,
                    extra={"event": "node_trusted_with_locks", "node": name},
                )  # fmt: skip
        if not trusted:
            causes = [f"{name}: {cause}" for name, cause in failures.items()]
            raise QuorumUnreachable(f"every lock under {self.prefix!r}", causes, 1)

    def close(self) -> None:
        """Close the connections and end the threads. Held locks expire within their ttl.

        A release that a node has not confirmed gets one node_timeout, with a reconnect.
        Each caller that waits for a lock gets a QuorumUnreachable that says so. A `Redlock` that is
        garbage collected without `close` closes itself, with a ResourceWarning.
        """
        self._dropped.detach()
        self.session.close()

    def __enter__(self) -> Redlock:
        return self

    @uninterruptible
    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        names = ", ".join(node.name for node in self.session.nodes.all)
        return f"<{type(self).__name__} {names}>"


def _end_dropped(session: Session) -> None:
    """End the session of an unclosed `Redlock`, with a ResourceWarning as for sockets.

    The garbage collector calls this in any thread and at any point, so this never blocks.
    """
    if not session.is_used:
        return
    with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
        session.platform.start_thread(session.end)
    if session.warns:
        names = ", ".join(node.name for node in session.nodes.all)
        warnings.warn(f"unclosed <Redlock {names}>", ResourceWarning, stacklevel=2)


def _forget_all() -> None:
    for session in sessions():
        session.forget()


def _deliver_all() -> None:
    """Give each client one node timeout for what its nodes are owed, as the process ends."""
    check_process()
    for session in sessions():
        if not session.is_closed:
            session.deliver()


def sessions() -> list[Session]:
    """Return the sessions of this process, the oldest first."""
    references = list(_sessions)  # in one step: another thread may add one meanwhile
    candidates = [reference() for reference in references]
    return [session for session in candidates if session is not None]


def session_of(identity: bytes) -> Session | None:
    """Return an open session of this process by its `identity`: that of its nodes and prefix."""
    for session in sessions():
        if session.identity == identity and not session.is_closed:  # a closed one sends nothing
            return session
    return None


_sessions: list[weakref.ref[Session]] = []
reset_in_children(_forget_all)
call_at_end(_deliver_all)  # a script may release a lock in its last line
