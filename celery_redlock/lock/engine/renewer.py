"""Renews acquisitions, many of them with one request to each node, and reclaims keys."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from celery_redlock.lock.engine.core import Core
from celery_redlock.lock.engine.releaser import Releaser
from celery_redlock.lock.engine.rounds import RenewRound
from celery_redlock.lock.model.acquisition import Acquisition
from celery_redlock.lock.model.keys import broken_key
from celery_redlock.lock.model.lease import Lease
from celery_redlock.lock.server.requests import RENEW
from celery_redlock.lock.transport.command import Command, Entry, RoundGroup, encode_text

MIN_RENEWAL_PAUSE = 0.05  # least seconds between tries to renew a lock that could not be renewed
MAX_KEYS_PER_REQUEST = 100  # keys in one request: a node serves no other client meanwhile
# seconds after which a renewal is late, for example because C code kept the GIL
LATE_RENEWAL = 0.02


class RenewPart(NamedTuple):
    """The keys that one request renews."""

    leases: Sequence[Lease]
    owners: Sequence[Acquisition]  # the acquisition of each lease
    reclaim_nodes: Collection[int]  # nodes that lack the key, if it is a single one


class Renewer:
    """Renews acquisitions, of which it releases abandoned ones, and confirms fencing tokens."""

    def __init__(self, core: Core, releaser: Releaser) -> None:
        self._core = core
        self._clock = core.clock
        self._releaser = releaser

    def renew(self, acquisitions: Sequence[Acquisition], *, native: bool = False) -> list[str]:
        """Renew acquisitions in one batch for each node, and wait for a quorum.

        Releases those that are abandoned, and leaves out those that are not held any more. native:
        whether a thread of the watchdog calls this. Returns one text for each node that did not
        renew all keys, if no quorum confirmed one of the keys; else an empty list.
        """
        core = self._core
        nodes = core.nodes
        release_if_abandoned = self._releaser.release_if_abandoned
        # `users` first: it is the answer for nearly all, without a call
        in_use = [lock for lock in acquisitions if lock.users or not release_if_abandoned(lock)]
        sent_at = self._clock.now()
        renewed = [lock for lock in in_use if lock.begin_renewal(sent_at)]
        group = RoundGroup()
        rounds: list[tuple[RenewPart, RenewRound]] = []
        entries: list[list[Entry]] = [[] for _ in nodes.all]
        for part in _in_parts(renewed, sent_at):
            round_ = RenewRound(
                part.leases, self._clock, functools.partial(self._on_missing, part.owners)
            )
            rounds.append((part, round_))
            group.add(round_)
            self._add_entries(entries, part, round_, sent_at)
        group.close()
        nodes.scatter(entries, sent_at)
        if native and any(sent_at - lock.renew_at > LATE_RENEWAL for lock in renewed):
            nodes.wait_keeping_gil(group)
        nodes.wait(group, sent_at + nodes.timeout, native=native)
        unconfirmed: set[Acquisition] = set()
        causes: dict[str, None] = {}
        for part, round_ in rounds:
            indexes = round_.unconfirmed  # read once: a late reply may change it
            unconfirmed.update(part.owners[index] for index in indexes)
            if indexes:
                causes.update(dict.fromkeys(round_.causes(nodes.all)))
        now = self._clock.now()
        for lock in renewed:
            if lock in unconfirmed:
                lock.renewal_failed(now, MIN_RENEWAL_PAUSE)
            else:
                lock.renewal_reached(sent_at)
            if not lock.users:  # dropped meanwhile, and the next renewal may be never
                core.watchdog.release_dropped(lock)
        core.events.extended(lock for lock in renewed if lock not in unconfirmed)
        return list(causes)

    def _add_entries(
        self, entries: list[list[Entry]], part: RenewPart, round_: RenewRound, sent_at: float
    ) -> None:
        """Add the request for a part to the entries of each node.

        A node that lacks the key gets a reclaim instead, which sets the key again.
        """
        request = self._core.requests.renew(part.leases)
        renewal = Command(request, round_, RENEW), sent_at, request
        for node, node_entries in enumerate(entries):
            if node in part.reclaim_nodes:
                reclaim = self._reclaim_request(part.leases, node)
                node_entries.append((Command(reclaim, round_, RENEW), sent_at, reclaim))
            else:
                node_entries.append(renewal)

    def _reclaim_request(self, leases: Sequence[Lease], node: int) -> bytes:
        """Return the request that sets a missing key on a node, unless an operator broke it."""
        (lease,) = leases
        lease.never_asked.discard(node)  # the reclaim, about to be sent, may set the key
        lease.asked_again.add(node)
        break_record = encode_text(broken_key(lease.key.name, lease.value))
        return self._core.requests.renew(leases, break_record)

    def _on_missing(self, owners: Sequence[Acquisition], number: int) -> None:
        """Check the deadline again, and reclaim the key soon, after the present round."""
        owner = owners[number]
        owner.reclaim_by(self._clock.now() + self._core.nodes.timeout)
        self._core.watchdog.reschedule(owner)

    def confirm_fencing_token(self, lease: Lease, token: int, until: float) -> list[str] | None:
        """Return None once a quorum has reached a token; why not at the monotonic second `until`.

        That is one text for each node that failed.
        """
        fence = lease.fence
        if fence is None:
            return None
        previous_token = fence.token
        causes = list[str]()
        fence.choose(token)
        if not fence.usable:
            nodes = self._core.nodes
            clock = self._clock
            round_ = RenewRound([lease], clock, lambda number: None)
            request = self._core.requests.renew([lease])
            nodes.broadcast(Command(request, round_, RENEW), clock.now())
            nodes.wait(round_, until)
            causes = round_.causes(nodes.all)
        if not fence.usable:
            # an outer holder keeps the token that a quorum has confirmed
            fence.token = previous_token
            return causes
        return None if lease.held(self._clock.now()) else []


def _in_parts(acquisitions: Sequence[Acquisition], now: float) -> Iterator[RenewPart]:
    """Yield the parts: up to `MAX_KEYS_PER_REQUEST` keys, or a single key that a node lacks.

    now: monotonic seconds.
    """
    leases: list[Lease] = []
    owners: list[Acquisition] = []
    for acquisition in acquisitions:
        for lease in acquisition.leases:
            reclaim_nodes = lease.reclaims and lease.to_reclaim(now)
            if reclaim_nodes:
                yield RenewPart([lease], [acquisition], reclaim_nodes)
                continue
            leases.append(lease)
            owners.append(acquisition)
    for first in range(0, len(leases), MAX_KEYS_PER_REQUEST):
        part = slice(first, first + MAX_KEYS_PER_REQUEST)
        yield RenewPart(leases[part], owners[part], ())
