"""The shortcuts that look right, each as a small patch of the shipped code, to be caught.

If the simulation did not catch them, its silence about the shipped code would mean nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from celery_redlock.lock import client as client_module
from celery_redlock.lock.engine import acquirer as acquirer_module
from celery_redlock.lock.engine import rounds as rounds_module
from celery_redlock.lock.engine.acquirer import Acquirer
from celery_redlock.lock.engine.permits import PermitRound
from celery_redlock.lock.engine.releaser import KeyRelease, Releaser
from celery_redlock.lock.engine.renewer import Renewer
from celery_redlock.lock.engine.rounds import AcquireRound, RenewRound
from celery_redlock.lock.engine.starts import StartRound
from celery_redlock.lock.model import lease as lease_module
from celery_redlock.lock.model import votes as votes_module
from celery_redlock.lock.model.acquisition import Acquisition
from celery_redlock.lock.model.fencing import Fence
from celery_redlock.lock.model.keys import value_of
from celery_redlock.lock.model.lease import UNKNOWN, Lease, LockKey, Probation, State
from celery_redlock.lock.model.options import Guard
from celery_redlock.lock.model.rate import Rate, RateKey, Start
from celery_redlock.lock.model.votes import Vote
from celery_redlock.lock.server import restart_guard as guard_module
from celery_redlock.lock.server.requests import (
    CANCEL,
    GRANT,
    GUARD,
    NEWEST,
    PERMIT,
    RECORD,
    RELEASE,
    RENEW,
    TAKE,
    Requests,
)
from celery_redlock.lock.server.restart_guard import RestartGuard
from celery_redlock.lock.server.tenures import Tenures
from celery_redlock.lock.transport.command import IGNORE_REPLY, Command, Round, Script
from celery_redlock.tasks.unique.claim import Claim
from celery_redlock.tasks.unique.rounds import ClaimRound, EarlierSend, PlainRequests
from celery_redlock.tasks.unique.start import RunStart
from tests.simulation import faults as faults_module
from tests.simulation.clients import Clock, here, patched
from tests.simulation.invariants import Witness
from tests.simulation.nodes import patched_scripts
from tests.simulation.world import running

Patch = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Mutant:
    """A shortcut.

    breaks: the invariants of which the first one broken is one; none: it only looks wrong.
    profile: of schedules in which it shows. steps: instead, an exact interleaving that shows it.
    """

    name: str
    patch: Patch
    breaks: frozenset[str]
    profile: str
    steps: str

    @property
    def safe(self) -> bool:
        """Whether it must not be caught."""
        return not self.breaks


MUTANTS: dict[str, Mutant] = {}


def mutant(
    *breaks: str, profile: str = "everything", steps: str = ""
) -> Callable[[Callable[[], Iterator[None]]], Patch]:
    """Register a patch of the shipped code under the name of its function."""

    def register(patch: Callable[[], Iterator[None]]) -> Patch:
        manager: Patch = contextlib.contextmanager(patch)
        name = patch.__name__
        MUTANTS[name] = Mutant(name, manager, frozenset(breaks), profile, steps)
        return manager

    return register


def without(script: Script, *lines: str, instead: str = "") -> bytes:
    """Return a script's text with some of it replaced."""
    text = "\n".join(lines)
    source = script.source.decode()
    assert source.count(text) == 1, f"not once in the script: {text}"
    return source.replace(text, instead).encode()


# leases


@mutant("ends_are_promised", "leases_end_before_keys", profile="late")
def after_reply() -> Iterator[None]:
    """The lease counts from the reply, not from before the request left."""
    confirm, renewed = Lease.confirm, Lease.renewed

    def confirm_now(self: Lease, node: int, sent: float, run_id: str = "") -> None:
        confirm(self, node, here().clock.now(), run_id)

    def renewed_now(self: Lease, node: int, sent: float, now: float, run_id: str = "") -> bool:
        return renewed(self, node, now, now, run_id)

    with patched(Lease, confirm=confirm_now, renewed=renewed_now):
        yield


@mutant("ends_are_promised", "leases_end_before_keys", profile="clocks")
def no_drift() -> Iterator[None]:
    """The whole ttl counts, as if all clocks were of one speed."""

    make = Lease.__init__

    def whole(self: Lease, key: LockKey, *args: Any, **options: Any) -> None:
        make(self, key, *args, **options)
        self.span = key.ttl

    with patched(Lease, __init__=whole):
        yield


@mutant("probation_does_not_count", "truth", profile="lossy")
def v_max() -> Iterator[None]:
    """One renewed node is enough."""

    def largest(ends: list[float], quorum: int) -> float:
        return max(ends)

    with patched(lease_module, validity=largest):
        yield


@mutant("one_holder", "truth", "probation_does_not_count", profile="even")
def half_quorum() -> Iterator[None]:
    """Half of an even number of nodes is a quorum."""

    def half(nodes: int) -> int:
        return (nodes + 1) // 2

    with (
        patched(votes_module, quorum_of=half),
        patched(guard_module, quorum_of=half),
        patched(rounds_module, quorum_of=half),
    ):
        yield


@mutant("ends_are_promised", profile="lossy")
def timeout_counts() -> Iterator[None]:
    """A renewal that was not answered counts as done."""
    on_error = RenewRound.on_error

    def renewed(self: RenewRound, node: int, command: Command, error: Any) -> None:
        now = here().clock.now()
        for lease in self._leases:
            lease.renewed(node, now - faults_module.NODE_TIMEOUT, now)
        on_error(self, node, command, error)

    with patched(RenewRound, on_error=renewed):
        yield


@mutant("one_holder", "ended_before_release", profile="lossy")
def late_clear() -> Iterator[None]:
    """The lease ends when the release is answered, not before it is sent."""

    def write(self: Releaser, release: KeyRelease) -> None:
        nodes = self.core.nodes
        self.core.watchdog.unwatch(release.acquisition)
        nodes.broadcast(release.command(), self.core.clock.now())
        until = self.core.clock.now() + nodes.timeout / 2
        nodes.wait(Round(), until)
        release.lease.end()
        self._unwritten.pop(id(release), None)

    with patched(Releaser, _write=write):
        yield


@mutant("continuity", steps="a_renewal_after_the_end")
def not_terminal() -> Iterator[None]:
    """What is lost may be won back by a later reply, or by a repair."""

    def of_states(self: Acquisition, now: float) -> bool:
        return bool(self.leases) and all(one.state is State.HELD for one in self.leases)

    def begin_renewal(self: Acquisition, now: float) -> bool:
        self._reclaim_at = math.inf
        return of_states(self, now)

    with (
        repair_counts(),
        patched(Lease, expire=lambda self, now: False),
        patched(Acquisition, held=of_states, begin_renewal=begin_renewal, deadline=math.inf),
    ):
        yield


# scripts and tokens


@mutant("leases_end_before_keys", steps="anothers_key")
def unowned_renew() -> Iterator[None]:
    """A renewal prolongs whatever stands there."""
    text = without(RENEW, "  elseif current ~= value then", "    return -1")
    with patched_scripts({RENEW: text}):
        yield


@mutant("one_holder", "truth", profile="lossy")
def unowned_release() -> Iterator[None]:
    """A release deletes whatever stands there."""
    line = "redis.call('GET', KEYS[1]) == ARGV[1] and"
    text = without(RELEASE, line, instead="redis.call('GET', KEYS[1]) and")
    with patched_scripts({RELEASE: text}):
        yield


@mutant("leases_end_before_keys", profile="breaks")
def resend_stale() -> Iterator[None]:
    """A grant sent again finds its own token, leaves the old ttl, and counts from the new time."""
    line = "if current and current ~= ARGV[1] then"
    text = without(GRANT, line, instead=f"if current == ARGV[1] then\n  return 1\nend\n{line}")
    make = AcquireRound.__init__

    def init(self: AcquireRound, lease: Lease, resend: Any, marker: Any = None) -> None:
        make(self, lease, lambda node, command, sent: resend(node, command, None), marker)

    with patched_scripts({GRANT: text}), patched(AcquireRound, __init__=init):
        yield


@mutant("one_holder", "truth", steps="a_late_release")
def reuse_token() -> Iterator[None]:
    """Each round of one process takes the same token, and so the same value."""

    def value(token: str, since_ms: int, label: str, ttl: float, limit: int) -> str:
        return value_of(token, 0, label, ttl, limit)

    new = Witness.new_token

    def token(self: Witness) -> str:
        return f"of {here().name}" if running() is not None else new(self)  # as it is made

    with patched(Witness, new_token=token), patched(acquirer_module, value_of=value):
        yield


# permits


@mutant("one_permit", profile="permits")
def a_second_permit() -> Iterator[None]:
    """A request sent twice gets a second permit, for the script does not look for its value."""
    text = without(
        PERMIT,
        "  if current == value and (not asked or asked == i - 1) then",
        "    ours = ours or i - 1",
        "  elseif current == value then",
        "    redis.call('DEL', names[i])",
        "  end\n",
    )
    with patched_scripts({PERMIT: text}):
        yield


@mutant("truth", "one_holder", "ends_are_promised", profile="permits")
def any_permit_counts() -> Iterator[None]:
    """A quorum that has granted permits is enough, whichever each node has granted."""
    count = PermitRound._count

    def blind(self: PermitRound, node: int, vote: Vote) -> None:
        for other, (_, sent, run_id) in list(self._offers.items()):
            self._offers[other] = 0, sent, run_id
        count(self, node, vote)

    with patched(PermitRound, _count=blind):
        yield


@mutant("nothing_after_release", "truth", "ended_before_release", profile="permits")
def a_move_by_release() -> Iterator[None]:
    """A node that has granted another permit than the quorum is sent a release, then a request."""
    settle_on = PermitRound._settle_on

    def release_first(self: PermitRound, permit: int, node: int) -> None:
        if self._offers[node][0] != permit and node not in self._redirected:
            request = Requests("redlock", 0.0).release(self._lease)
            self._resend(node, Command(request, IGNORE_REPLY, RELEASE), None)
        settle_on(self, permit, node)

    with patched(PermitRound, _settle_on=release_first):
        yield


@mutant("holds_refuse", profile="under-a-hold")
def a_mark_that_nobody_heeds() -> Iterator[None]:
    """A node grants a free permit beside an operator's hold."""
    with patched_scripts({PERMIT: without(PERMIT, "if hold then", instead="if false then")}):
        yield


# ends of runs


@mutant("done_once", profile="twins")
def release_before_done() -> Iterator[None]:
    """The lock is free before its run is marked as done, be it by the next command on the wire."""
    write = Releaser._write

    def release_and_mark(self: Releaser, release: KeyRelease) -> None:
        ended_at, release._ended_at = release._ended_at, None
        write(self, release)
        if ended_at is not None:
            release._ended_at = ended_at
            write(self, release)

    with patched(Releaser, _write=release_and_mark):
        yield


@mutant("done_once", profile="twins")
def done_by_a_majority() -> Iterator[None]:
    """One node that knows of the end is not enough."""
    has_ended = AcquireRound._has_ended
    said: dict[Lease, int] = {}

    def counted(self: AcquireRound, age_ms: int, sent: float) -> bool:
        lease = self._lease
        said[lease] = said.get(lease, 0) + has_ended(self, age_ms, sent)
        return said[lease] > 1

    with patched(AcquireRound, _has_ended=counted):
        yield


@mutant("done_once", profile="twins")
def done_read_before_the_grant() -> Iterator[None]:
    """A run asks whether it is done, with a lock that nobody else wants, and then for its own."""
    lock_key = Acquirer._lock_key

    def ask_first(self: Acquirer, acquisition: Acquisition, key: LockKey) -> Any:
        options = acquisition.options
        assert options.marker is not None
        nobody_wants = here().world.witness.new_token()
        prefix = here().redlock.prefix
        failure = lock_key(self, acquisition, LockKey(prefix, nobody_wants, options.ttl))
        if failure is None:
            marker = replace(options.marker, asks_since=None)
            acquisition.options = options._replace(marker=marker)
            failure = lock_key(self, acquisition, key)
        return failure

    with patched(Acquirer, _lock_key=ask_first):
        yield


# restarts


@mutant("silent_nodes_grant_nothing", profile="restarts")
def no_guard() -> Iterator[None]:
    """A node that restarted empty votes at once."""
    with patched(Guard, arguments=lambda self, run_id: (run_id, "1")):
        yield


@mutant("silent_nodes_grant_nothing", profile="restarts")
def short_guard() -> Iterator[None]:
    """It keeps silent for less than a ttl."""
    with patched(client_module, grace_period=lambda max_ttl: max_ttl / 2):
        yield


@contextlib.contextmanager
def _only_its_own_note() -> Iterator[None]:
    """A server is believed that finds its own run id in its own note."""
    text = without(GUARD, "since(elsewhere) >= since(own) then", instead="false then")
    never = patched(Tenures, ended=lambda self, node, tenure: False)
    with patched_scripts({GUARD: text}), never:
        yield


@mutant("one_holder", steps="a_fail_back_to_a_primary")
def own_note_after_a_promotion() -> Iterator[None]:
    """A primary that was away while its replica served votes at once."""
    with _only_its_own_note():
        yield


@mutant("one_holder", steps="a_fail_back_to_another_server")
def own_note_after_a_move() -> Iterator[None]:
    """So does a server whose address led to another one for a while."""
    with _only_its_own_note():
        yield


@mutant("one_holder", steps="a_client_that_stays")
def own_note_though_seen() -> Iterator[None]:
    """So does one of which the client itself has seen that it was replaced."""
    with _only_its_own_note():
        yield


@mutant("one_holder", steps="a_fail_back_to_a_primary")
def a_minority_is_not_believed() -> Iterator[None]:
    """What fewer nodes than a majority say of another one's server does not count."""
    with patched(Tenures, newest_note=lambda self, node: None):
        yield


@mutant("one_holder", steps="a_vote_before_the_note")
def votes_are_kept() -> Iterator[None]:
    """A vote stays good though a note that comes after it says that its server is behind."""

    def drop_alone(self: RestartGuard, node: Any, wire: Any) -> None:
        node.drop(wire, "replaced")

    with patched(RestartGuard, _give_up=drop_alone):
        yield


@mutant("one_holder", steps="a_fail_back_to_another_server")
def nobody_is_introduced() -> Iterator[None]:
    """Nodes are not told who serves under the addresses of the others."""
    arguments_for = Tenures.arguments_for

    def of_itself(self: Tenures, node: int) -> tuple[str, ...]:
        own, kept, *others = arguments_for(self, node)
        return own, kept, *[""] * len(others)

    with patched(Tenures, arguments_for=of_itself):
        yield


def _renewed(
    self: Lease, node: int, sent: float, now: float, run_id: str, *, repaired: Any
) -> bool:
    """Do what `Hold.renewed` does, but for what is done about a node whose lease had run out."""
    if self.expire(now) or self.state is not State.HELD:
        return node not in self.probation
    self.runs[node] = run_id
    self.reclaims.pop(node, None)
    repaired(self, node, self.ends[node] <= now)
    self.ends[node] = max(self.ends[node], sent + self.span)
    if self.probation:
        self._confirm_others(node, sent)
    self._recount()
    return node not in self.probation


def _with(repaired: Callable[[Lease, int, bool, float], None]) -> AbstractContextManager[None]:
    def renewed(self: Lease, node: int, sent: float, now: float, run_id: str = "") -> bool:
        def act(hold: Lease, index: int, lapsed: bool) -> None:
            repaired(hold, index, lapsed, now)

        return _renewed(self, node, sent, now, run_id, repaired=act)

    return patched(Lease, renewed=renewed)


@mutant("one_holder", steps="three_restarts")
def repair_counts() -> Iterator[None]:
    """A repaired node counts at once."""
    with _with(lambda hold, node, lapsed, now: None):
        yield


@mutant("one_holder", steps="three_restarts")
def early_ends_probation() -> Iterator[None]:
    """A later answer of the repaired node itself ends its probation."""

    def repaired(hold: Lease, node: int, lapsed: bool, now: float) -> None:
        hold.probation.pop(node, None)
        if lapsed:
            hold.probation[node] = Probation(now, set())

    with _with(repaired):
        yield


@mutant("one_holder", steps="three_restarts")
def self_confirm() -> Iterator[None]:
    """A repaired node's own answers speak for it."""

    def confirm(self: Lease, node: int, sent: float) -> None:
        for other, probation in list(self.probation.items()):
            if sent > probation.since:
                probation.confirmed.add(node)
                if len(probation.confirmed) >= self.quorum:
                    del self.probation[other]

    with patched(Lease, _confirm_others=confirm):
        yield


@mutant("lost_truly", profile="restarts")
def a_restart_takes_the_lock() -> Iterator[None]:
    """At its release a key is missed on nodes that restarted, though they voted for nobody."""
    with patched(Lease, keeps_its_promise=lambda self, node, run_id: False):
        yield


@mutant("lost_truly", steps="a_release_after_the_keys")
def a_release_that_is_late() -> Iterator[None]:
    """Keys that end while their release is on its way count as taken away."""
    check = KeyRelease._check_loss

    def whenever(self: KeyRelease, node: int, run_id: str) -> None:
        ends, self._deadlines = self._deadlines, [math.inf for _ in self._deadlines]
        check(self, node, run_id)
        self._deadlines = ends

    with patched(KeyRelease, _check_loss=whenever):
        yield


@mutant(profile="restarts")
def old_kept_on_missing() -> Iterator[None]:
    """What a node promised stays true though it says that the key is gone: the guard sees to it."""

    def missing(self: Lease, node: int, now: float, run_id: str = "") -> None:
        if self.expire(now) or self.state is not State.HELD:
            return
        self.reclaims[node] = UNKNOWN

    with patched(Lease, missing=missing):
        yield


@mutant(profile="restarts")
def early_repair() -> Iterator[None]:
    """A repair answered before the old lease of its node ends counts at once: as shipped."""
    yield


# fencing


@mutant("fences_grow", profile="fencing")
def incr_only() -> Iterator[None]:
    """Each node counts upwards, the largest is the token, and nobody is told."""
    with patched(acquirer_module, proposal=lambda wall_us: 0), _never_written_back():
        yield


def _never_written_back() -> AbstractContextManager[None]:
    return patched(Fence, usable=property(lambda self: self.token > 0))


@mutant("fences_grow", steps="a_counter_that_only_the_fast_saw")
def no_write_back() -> Iterator[None]:
    """The largest counter is the token, without a quorum that has reached it."""
    with _never_written_back():
        yield


@mutant("fences_grow", steps="a_token_on_its_way")
def write_back_not_awaited() -> Iterator[None]:
    """The token is used while it is on its way to a quorum."""

    def confirm(self: Renewer, lease: Lease, token: int, until: float) -> None:
        if lease.fence is not None:
            lease.fence.choose(token)
            nodes, clock = self._core.nodes, self._clock
            round_ = RenewRound([lease], clock, lambda number: None)
            request = self._core.requests.renew([lease])
            nodes.broadcast(Command(request, round_, RENEW), clock.now())

    with patched(Renewer, confirm_fencing_token=confirm):
        yield


@mutant("fences_grow", "leases_end_before_keys", profile="fencing")
def write_back_unowned() -> Iterator[None]:
    """A node confirms a token though another's key stands there."""
    source = without(
        RENEW,
        "  elseif current ~= value then",
        "    return -1",
        instead="  elseif current ~= value and least == '' then\n    return -1",
    )
    source = source.replace(b"if not current then\n", b"if not current and least == '' then\n", 1)
    source = source.replace(
        b"elseif redis.call('PTTL', key) <",
        b"elseif current == value and redis.call('PTTL', key) <",
    )
    with patched_scripts({RENEW: source}):
        yield


@mutant("fences_grow", steps="counters_lost")
def counters_without_clock() -> Iterator[None]:
    """Counters alone make the tokens, and nodes lose them."""
    with patched(acquirer_module, proposal=lambda wall_us: 0):
        yield


@mutant("fences_grow", steps="a_proposal_from_before_the_loss")
def clock_before_sent() -> Iterator[None]:
    """The wall clock is read before the sending time, and a pause may lie between."""
    lock_key = Acquirer._lock_key

    def early(self: Acquirer, *what: Any) -> Any:
        clock = here().clock
        clock.wall_us()  # as for the key's value
        wall = clock.wall_us()
        clock.sleep(0.001)
        with patched(Clock, wall_us=lambda self: wall):
            return lock_key(self, *what)

    with patched(Acquirer, _lock_key=early):
        yield


@mutant("fences_grow", "silent_nodes_grant_nothing", steps="a_grant_after_a_short_silence")
def silence_of_max_ttl() -> Iterator[None]:
    """A node is silent for the longest ttl, without the wall clocks' error on top."""
    with patched(client_module, grace_period=lambda max_ttl: max_ttl):
        yield


# what is sent once


@mutant("dropped_for_a_sent", profile="sends")
def sending_is_sent() -> Iterator[None]:
    """Who is about to send counts as one that has sent."""
    of = EarlierSend.of

    def sent(value: str, expires_in: float, age: float) -> EarlierSend:
        return replace(of(value, expires_in, age), is_sent=True)

    with patched(EarlierSend, of=staticmethod(sent)):
        yield


@mutant("dropped_for_a_live", profile="sends")
def one_node_knows_it() -> Iterator[None]:
    """One node that knows of an earlier send is enough to drop one."""

    def agreed(self: ClaimRound) -> EarlierSend | None:
        return next((s for s in self.earlier_sends.values() if s.is_sent), None)

    with patched(ClaimRound, agreed_send=property(agreed)):
        yield


@mutant("one_window", profile="sends")
def a_window_of_one_node() -> Iterator[None]:
    """One node opens a window."""
    with patched(ClaimRound, has_quorum=property(lambda self: bool(self.changed_nodes))):
        yield


@mutant("a_burst_runs", profile="sends")
def marked_before_it_is_published() -> Iterator[None]:
    """A debounced send marks the earlier one as soon as the nodes have replaced it."""
    opened = Claim.open

    def marking(self: Claim) -> EarlierSend | None:
        earlier = opened(self)
        if self.message_token is not None:
            self.message_token.mark_superseded(here().redlock.session, "t")
        return earlier

    with patched(Claim, open=marking):
        yield


@mutant("due_runs", profile="sends")
def a_claim_until_its_body_starts() -> Iterator[None]:
    """The claim of a debounced send lasts for longer than until its run is due."""
    claim = PlainRequests.claim

    def lasting(
        self: PlainRequests, earlier: Any, value: str, times: tuple[float, float], round_: Any
    ) -> Any:
        return claim(self, earlier, value, (100.0, 100.0), round_)

    with patched(PlainRequests, claim=lasting):
        yield


# sends that take the place of the queued one


@mutant("order_kept", profile="orders")
def a_start_that_no_quorum_has_noted() -> Iterator[None]:
    """A run does not wait for what the nodes know of later starts."""
    with patched(RunStart, wait=lambda self: True):
        yield


@mutant("order_kept", profile="orders")
def a_start_that_nodes_forget() -> Iterator[None]:
    """A run gives up its place when it starts, and that is all that the nodes know of its start."""
    noted = "  largest, started, id = math.max(largest, number), number, ARGV[4]"
    with patched_scripts({NEWEST: without(NEWEST, noted)}):
        yield


@mutant("order_of_sends", "replaced_for_a_later", profile="orders")
def any_number_is_taken() -> Iterator[None]:
    """A node takes the number of any send, by the clock of its sender."""
    source = without(NEWEST, "if number <= largest then", instead="if false then")
    with patched_scripts({NEWEST: source}):
        yield


@mutant("replaced_for_a_later", profile="orders")
def replaced_before_it_is_published() -> Iterator[None]:
    """A send marks the queued message as soon as it has its place."""
    with marked_before_it_is_published():
        yield


@mutant("replaced_in_its_burst", profile="orders-whose-claims-end")
def a_claim_that_ends_as_if_replaced() -> Iterator[None]:
    """What was sent before a claim ended counts as replaced by a later burst."""
    with patched_scripts({NEWEST: without(NEWEST, "before = last", instead="before = before")}):
        yield


@mutant("two_queued", profile="orders-without-faults")
def a_kept_place_that_is_forgotten() -> Iterator[None]:
    """A message is queued beside one that keeps its place, and the nodes know the last alone."""
    source = without(NEWEST, "lines = {sent, kept}", instead="lines = {sent}")
    with patched_scripts({NEWEST: source}):
        yield


@mutant("two_queued", profile="orders-without-faults")
def a_burst_that_begins_while_another_message_keeps_its_place() -> Iterator[None]:
    """What is queued beside a message that keeps its place keeps its own after a while."""
    age = "lines[2] and 0 or math.max(0, now - newest.began)"
    with patched_scripts({NEWEST: without(NEWEST, age, instead="math.max(0, now - newest.began)")}):
        yield


# the starts of rates


@mutant("rate_kept", "starts_apart", profile="rates")
def a_period_from_the_grant() -> Iterator[None]:
    """A node counts a start for a period, though its body begins a moment later."""
    with patched(Rate, slack=property(_no_slack)), patched(RateKey, __init__=_late_rate_key):
        yield


def _no_slack(self: Rate) -> float:
    return 0.0


_make_rate_key, _slack = RateKey.__init__, Rate.slack


def _late_rate_key(self: RateKey, prefix: str, resource: str, rate: Rate, drift: float) -> None:
    _make_rate_key(self, prefix, resource, rate, drift)
    self.ttl = _slack.__get__(rate)


@mutant("rate_kept", "starts_apart", "stamps_stand", profile="rates-by-fast-clocks")
def a_period_without_drift() -> Iterator[None]:
    """A node counts a start for a period and the slack, as if all clocks were of one speed."""
    kept_ms = Rate.kept_ms
    with patched(Rate, kept_ms=lambda self, drift: kept_ms(self, 0.0)):
        yield


@mutant("rate_kept", "starts_apart", steps="a_body_after_a_pause")
def a_late_body() -> Iterator[None]:
    """A body begins whenever it is ready: its start has been taken."""
    with patched(Start, held=lambda self, now: self.state is State.HELD):
        yield


@mutant("rate_kept", "starts_apart", steps="an_extension_on_its_way")
def an_extension_not_awaited() -> Iterator[None]:
    """A late start is asked for once more, and its body begins meanwhile."""

    def take(self: Acquirer, acquisition: Any, start: Start, asked: Any, **how: Any) -> Any:
        if not how:
            return taken(self, acquisition, start, asked)

        def request(permit: int | None, is_repeated: bool) -> bytes:
            return self.core.requests.take(start, 0, permit, is_repeated=True)

        round_ = StartRound(start, self.core.nodes.send_to, request, asked, is_repeated=True)
        self.core.nodes.broadcast(round_.command(asked), self.core.clock.now())
        start.valid_until = math.inf
        return None, round_

    taken = Acquirer._take
    with patched(Acquirer, _take=take):
        yield


@mutant("rate_kept", "starts_apart", profile="rates")
def a_start_counts_from_the_reply() -> Iterator[None]:
    """The slack begins when a node has replied, not before its request left."""

    def confirm(self: Start, node: int, sent: float, run_id: str = "") -> None:
        Lease.confirm(self, node, here().clock.now(), run_id)

    with patched(Start, confirm=confirm):
        yield


@mutant("no_cancel_after_the_start", profile="rates")
def a_release_gives_the_start_back() -> Iterator[None]:
    """A start is given back with its lock, though its body has begun: as a permit is."""

    def cancel_starts(self: Releaser, acquisition: Acquisition) -> None:
        while acquisition.starts:
            self.cancel(acquisition.starts.pop())

    with patched(Releaser, cancel_starts=cancel_starts):
        yield


@mutant("nothing_after_cancel", profile="rates")
def a_start_moved_by_a_cancel() -> Iterator[None]:
    """A node that has granted another permit than the quorum gives it back, and is asked again."""
    settle_on = StartRound._settle_on

    def cancel_first(self: StartRound, permit: int, node: int) -> None:
        if self._offers[node][0] != permit and node not in self._redirected:
            start: Any = self._lease
            request = here().redlock.session.requests.cancel(start)
            self._resend(node, Command(request, IGNORE_REPLY, CANCEL), None)
        settle_on(self, permit, node)

    with patched(StartRound, _settle_on=cancel_first):
        yield


@mutant("refusals_leave_no_start", "waits_without_keys", profile="rates-and-limits")
def a_refusal_keeps_its_starts() -> Iterator[None]:
    """A start is used up if another key or rate refuses its run: it expires by itself."""

    def cancel_starts(self: Releaser, acquisition: Acquisition) -> None:
        acquisition.starts.clear()

    with patched(Releaser, cancel_starts=cancel_starts):
        yield


@mutant("starts_after_keys", profile="rates-and-limits")
def starts_before_keys() -> Iterator[None]:
    """A run takes its starts first, and gives them back if its lock is taken."""
    lock_keys, take_starts = Acquirer._lock_keys, Acquirer._take_starts

    def starts_first(self: Acquirer, acquisition: Acquisition) -> Any:
        rates = acquisition.options.rates
        failure = take_starts(self, acquisition, rates) if rates else None
        return failure or lock_keys(self, acquisition)

    with patched(Acquirer, _lock_keys=starts_first, _take_starts=lambda *_: None):
        yield


@mutant("rate_kept", "starts_apart", profile="rates")
def starts_by_a_count() -> Iterator[None]:
    """A quorum of nodes with a permit free is enough, whichever it is: a log of starts."""
    count = StartRound._count

    def blind(self: StartRound, node: int, vote: Vote) -> None:
        for other, (_, sent, run_id) in list(self._offers.items()):
            self._offers[other] = 0, sent, run_id
        count(self, node, vote)

    with patched(StartRound, _count=blind):
        yield


@mutant("one_start_a_node", steps="a_lost_reply_to_a_start")
def a_second_start() -> Iterator[None]:
    """A request sent twice takes a second permit, for the script does not look for its token."""
    text = without(TAKE, "    ours = all[i + 1] == token and all[i] or ours\n")
    with patched_scripts({TAKE: text}):
        yield


@mutant("silent_nodes_grant_nothing", profile="wiped-rates")
def starts_in_the_grace_period() -> Iterator[None]:
    """A node that lost its memory grants starts at once: its lock keys do not matter to it."""
    text = without(TAKE, "if redis.call('EXISTS', KEYS[4]) == 1 then", instead="if false then")
    with patched_scripts({TAKE: text}):
        yield


@mutant("rate_kept", "starts_apart", steps="a_node_that_was_told_later")
def starts_without_a_record() -> Iterator[None]:
    """Only the nodes that granted a start know of it."""
    with patched(Releaser, record=lambda self, start, started_at: None):
        yield


@mutant("rate_kept", "starts_apart", steps="a_node_that_remembers")
def young_nodes_count() -> Iterator[None]:
    """A node that has served for less than a period counts as the others do."""
    with patched(StartRound, _is_doubted=lambda self, permit, due: False):
        yield


@mutant("stamps_stand", steps="a_record_after_the_next_start")
def a_record_that_moves_back() -> Iterator[None]:
    """What a node is told of a start is when that began, whatever has its permit by then."""
    text = without(RECORD, "math.max(at, tonumber(known or at))", instead="at")
    with patched_scripts({RECORD: text}):
        yield
