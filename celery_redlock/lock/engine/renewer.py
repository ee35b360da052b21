"""Renews acquisitions, many of them with one request to each node, and reclaims keys."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from itertools import chain

from celery_redlock.lock.engine.core import Core
from celery_redlock.lock.engine.releaser import Releaser
from celery_redlock.lock.engine.rounds import RenewRound
from celery_redlock.lock.model.acquisition import Acquisition
from celery_redlock.lock.model.keys import broken_key
from celery_redlock.lock.model.lease import Lease
from celery_redlock.lock.server.requests import RENEW
from celery_redlock.lock.transport.command import Command, Entry, RoundGroup, encode_text

SHORTEST_RENEWAL = 0.05  # least seconds between tries to renew a lock that could not be renewed
RENEWED_AT_ONCE = 100  # keys in one request: a node serves no other client meanwhile
LATE = 0.02  # seconds after which a renewal is late, for example because C code kept the GIL


# keys that one request renews, the acquisition of each, and where a single key is reclaimed
Part = tuple[Sequence[Lease], Sequence[Acquisition], Collection[int]]


class Renewer:
    """Renews acquisitions, of which it releases abandoned ones, and confirms fencing tokens."""

    def __init__(self, core: Core, releaser: Releaser) -> None:
        self._core = core
        self._clock = core.clock
        self._releaser = releaser

    def renew(self, acquisitions: Sequence[Acquisition], *, native: bool = False) -> list[str]:
        """Renew in one batch for each node, and wait. If no quorum confirmed all, return why.

        native: called in a thread of the watchdog. Returns one text for each node that failed.
        """
        kept = [one for one in acquisitions if not self._releaser.release_if_abandoned(one)]
        core = self._core
        sent = self._clock.now()
        renewed = [one for one in kept if one.begin_renewal(sent)]
        group = RoundGroup()
        rounds = []
        entries: list[list[Entry]] = [[] for _ in core.nodes.all]
        for leases, owners, lacking in _in_parts(renewed, sent):
            on_missing = functools.partial(self._on_missing, owners)
            round_ = RenewRound(leases, self._clock, on_missing)
            rounds.append((owners, round_))
            group.add(round_)
            request = core.requests.renew(leases)
            plain = Command(request, round_, RENEW), sent, request
            for own in entries:
                own.append(plain)
            for node in lacking:
                (lease,) = leases
                lease.never_asked.discard(node)  # the reclaim, about to be sent, may set the key
                lease.asked_again.add(node)
                note = encode_text(broken_key(lease.key.name, lease.value))
                request = core.requests.renew(leases, note)
                entries[node][-1] = Command(request, round_, RENEW), sent, request
        group.close()
        core.nodes.scatter(entries, sent)
        if native and any(sent - one.renew_at > LATE for one in renewed):
            core.nodes.wait_keeping_gil(group)
        core.nodes.wait(group, sent + core.nodes.timeout, native=native)
        results = [(owners, round_, round_.unconfirmed) for owners, round_ in rounds]
        unconfirmed = {owners[i] for owners, _, numbers in results for i in numbers}
        now = self._clock.now()
        for one in renewed:
            if one in unconfirmed:
                one.renewal_failed(now, SHORTEST_RENEWAL)
            else:
                one.renewal_reached(sent)
        core.events.extended(one for one in renewed if one not in unconfirmed)
        causes = (round_.causes(core.nodes.all) for _, round_, numbers in results if numbers)
        return list(dict.fromkeys(chain.from_iterable(causes)))

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
        before = fence.token
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
            fence.token = before  # an outer holder keeps the token that a quorum has confirmed
            return causes
        return None if lease.held(self._clock.now()) else []


def _in_parts(acquisitions: Sequence[Acquisition], now: float) -> Iterator[Part]:
    """Yield the parts. Keys that no node lacks are renewed together, but not too many."""
    leases: list[Lease] = []
    owners: list[Acquisition] = []
    for acquisition in acquisitions:
        for lease in acquisition.leases:
            lacking = lease.to_reclaim(now)
            if lacking:
                yield [lease], [acquisition], lacking
                continue
            leases.append(lease)
            owners.append(acquisition)
            if len(leases) == RENEWED_AT_ONCE:
                yield leases, owners, ()
                leases = []
                owners = []
    if leases:
        yield leases, owners, ()
