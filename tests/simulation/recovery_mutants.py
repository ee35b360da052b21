"""The shortcuts in the recovery of messages that look right, each as a patch, to be caught."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from celery_redlock.tasks.recovery import keeper as keeper_module
from celery_redlock.tasks.recovery import ledger as ledger_module
from celery_redlock.tasks.recovery import observer as observer_module
from celery_redlock.tasks.recovery.keeper import Keeper
from celery_redlock.tasks.recovery.ledger import BEAT_SCRIPT, DECLARE_DEAD, MOVE, RECALL, Ledger
from celery_redlock.tasks.recovery.observer import PROOF, TRUST, Observer
from celery_redlock.tasks.recovery.tags import DeliveryTag, moved
from tests.simulation.broker import patched_texts
from tests.simulation.clients import patched


@dataclass(frozen=True)
class Shortcut:
    """A shortcut. breaks: the invariants of which the first one broken is one.

    seed: of the first schedule that catches it. steps: instead, an exact schedule that does.
    """

    patch: Callable[[], AbstractContextManager[None]]
    breaks: frozenset[str]
    seed: int
    steps: str


SHORTCUTS: dict[str, Shortcut] = {}


def shortcut(
    *breaks: str, seed: int = 0, steps: str = ""
) -> Callable[[Callable[[], Iterator[None]]], Callable[[], AbstractContextManager[None]]]:
    """Register a patch of the shipped code under the name of its function."""

    def register(
        patch: Callable[[], Iterator[None]],
    ) -> Callable[[], AbstractContextManager[None]]:
        manager = contextlib.contextmanager(patch)
        SHORTCUTS[patch.__name__] = Shortcut(manager, frozenset(breaks), seed, steps)
        return manager

    return register


def without(script: bytes, text: str, instead: str = "") -> dict[bytes, bytes]:
    """Return a script with the text that is run in its place."""
    source = script.decode()
    assert source.count(text) == 1, f"not once in the script: {text}"
    return {script: source.replace(text, instead).encode()}


@shortcut("dead_by_proof", seed=37)
def no_comparison_of_the_beat() -> Iterator[None]:
    """A worker lease is declared dead though it has beaten since it was looked at."""
    with patched_texts(without(DECLARE_DEAD, " or (ARGV[2] ~= '' and beat ~= ARGV[2])")):
        yield


@shortcut("dead_by_proof", seed=2)
def no_forgetting() -> Iterator[None]:
    """An observer goes on after a pause or an outage with what it saw before."""
    with patched(observer_module, LOOK_GAP=1e9), patched(Observer, forget=lambda self: None):
        yield


@shortcut("one_place", seed=34)
def struck_out_first() -> Iterator[None]:
    """A message is struck out before it is pushed: a refused push loses it."""
    push = "local pushed = redis.pcall('RPUSH', KEYS[3 + i / 2], ARGV[i + 1])\n"
    strike = "      redis.call('HDEL', KEYS[1], ARGV[i])\n"
    texts = without(MOVE, push, strike + push)
    text = texts[MOVE].decode()
    last = text.rindex(strike)
    with patched_texts({MOVE: (text[:last] + text[last + len(strike) :]).encode()}):
        yield


@shortcut("begun_by_its_owner", steps="a_pause_before_the_reply")
def trusted_from_the_reply() -> Iterator[None]:
    """The worker trusts its lease from the reply of a beat on, not from its sending."""
    confirm = Keeper._confirm

    def confirm_now(self: Keeper, lease: str, sent: float) -> None:
        confirm(self, lease, self._clock.now())

    with patched(Keeper, _confirm=confirm_now):
        yield


@shortcut("begun_by_its_owner", steps="a_pause_as_the_clock_is_set")
def trusted_for_longer_than_the_proof() -> Iterator[None]:
    """The worker trusts its lease for longer than observers need to prove that it is dead."""
    with patched(keeper_module, TRUST=PROOF + 1.0):
        yield


@shortcut("own_entries", seed=3)
def the_tag_is_kept() -> Iterator[None]:
    """A moved message keeps its delivery tag: its first owner's end hits the second's entry."""

    def with_its_tag(entry: str, **options: Any) -> str | None:
        made = moved(entry, **options)
        if made is None:
            return None
        again = json.loads(made)
        again["properties"]["delivery_tag"] = json.loads(entry)[0]["properties"]["delivery_tag"]
        return json.dumps(again)

    with patched(ledger_module, moved=with_its_tag):
        yield


@shortcut("claims_stand", seed=34)
def no_claim() -> Iterator[None]:
    """Each worker that beats is given the same dead worker lease."""
    claim = "    redis.call('ZADD', KEYS[2], string.format('%.0f', now), dead[i])\n"
    with patched_texts(without(BEAT_SCRIPT, claim)):
        yield


@shortcut("claims_stand", seed=37)
def a_claim_that_is_not_renewed() -> Iterator[None]:
    """A mover that needs longer than a claim is taken for dead."""
    renewal = "  redis.pcall('ZADD', KEYS[3], string.format('%.0f', t[1] * 1000), ARGV[1])\n"
    with patched_texts(without(MOVE, renewal)):
        yield


@shortcut("dead_until_empty", "all_back", seed=1)
def forgotten_before_the_move() -> Iterator[None]:
    """A dead worker lease is forgotten first: if the mover dies, nobody goes on."""
    move_all = Ledger.move_all

    def forget_first(self: Ledger, lease: str, *args: Any, **options: Any) -> Any:
        self.forget(lease)
        return move_all(self, lease, *args, **options)

    with patched(Ledger, move_all=forget_first):
        yield


@shortcut("dead_until_empty", "all_back", seed=34)
def forgotten_though_refused() -> Iterator[None]:
    """A dead worker lease is forgotten though the broker has not taken all of its messages."""
    move_all = Ledger.move_all

    def forget(self: Ledger, lease: str, *args: Any, **options: Any) -> Any:
        done = move_all(self, lease, *args, **options)
        self.forget(lease)
        return done

    with patched(Ledger, move_all=forget):
        yield


@shortcut("in_order", seed=2)
def the_oldest_first() -> Iterator[None]:
    """Messages are moved in the order in which they came: the newest ends at the very head."""

    class Backwards(int):
        def __lt__(self, other: int) -> bool:
            return int(self) > int(other)

    def reading(text: object) -> DeliveryTag | None:
        found = DeliveryTag.of(text)
        return found and found._replace(number=Backwards(found.number))

    class Reads:
        of = staticmethod(reading)

    with patched(ledger_module, DeliveryTag=Reads):
        yield


@shortcut("all_back", seed=662)
def given_up_and_kept() -> Iterator[None]:
    """A worker drops what it is unsure of, and beats on: nobody moves it."""

    def owns(self: Keeper, lease: str) -> bool:
        now = self._clock.now()
        if lease != self._own_lease.lease:
            self._former_leases[lease] = None
            return False
        return now - self._own_lease.confirmed_at < TRUST or self._is_alive(lease, now)

    with patched(Keeper, owns=owns):
        yield


@shortcut("all_back", steps="a_pause_before_the_note")
def moved_once() -> Iterator[None]:
    """A worker does not look again for what it noted after its messages were moved."""
    owns = Keeper.owns

    def and_no_more(self: Keeper, lease: str) -> bool:
        before = dict(self._former_leases)
        owned = owns(self, lease)
        if lease not in before:
            self._former_leases.pop(lease, None)
        return owned

    with patched(Keeper, owns=and_no_more):
        yield


@shortcut("all_back", steps="a_kill_after_the_note")
def not_recalled() -> Iterator[None]:
    """A worker does not look for what was noted under worker leases that have been forgotten."""
    with patched(Ledger, recall=lambda self, between: None):
        yield


@shortcut("dead_by_proof", steps="a_worker_beside_one_with_messages")
def recalled_though_it_lives() -> Iterator[None]:
    """A worker that starts puts each worker lease with messages among the dead."""
    with patched_texts(without(RECALL, "redis.call('ZSCORE', KEYS[1], ARGV[i]) or ")):
        yield


@shortcut("all_back", steps="a_reconnect_that_may_not_join")
def kept_though_refused() -> Iterator[None]:
    """A worker whose join is refused goes on with the lease of the connection before."""
    take_over = Keeper._take_over

    def keep(self: Keeper, asked: Ledger, own: Any) -> None:
        take_over(self, asked, own if own.lease else self._own_lease)
        self._former_leases.pop(self.lease, None)

    with patched(Keeper, _take_over=keep):
        yield


@shortcut("nothing_stays", steps="a_reconnect_that_may_not_join")
def joined_once() -> Iterator[None]:
    """A worker whose join is refused does not try again until its next connection."""
    begin_anew = Keeper._rejoin

    def unless_refused(self: Keeper, ledger: Ledger, lost: str) -> None:
        if lost:
            begin_anew(self, ledger, lost)

    with patched(Keeper, _rejoin=unless_refused):
        yield


@shortcut("begun_by_its_owner", seed=839)
def an_answer_of_any_age() -> Iterator[None]:
    """The guard begins a message once it was answered, however long that took."""

    def owns(self: Keeper, lease: str) -> bool:
        own, now = self._own_lease, self._clock.now()
        if lease == own.lease and lease != self._abandoned_lease:
            if now - own.confirmed_at < TRUST or self._is_alive(lease, now):
                return True
            self._abandoned_lease = lease
        else:
            self._former_leases[lease] = None
        return False

    with patched(Keeper, owns=owns):
        yield


@shortcut("all_back", steps="a_cut_as_it_moves_what_it_noted_late")
def one_try_for_its_own() -> Iterator[None]:
    """A worker that was taken for dead tries once to move what is left of its messages."""

    def move_what_is_left(self: Keeper, ledger: Ledger) -> None:
        for lease in list(self._former_leases):
            del self._former_leases[lease]
            self._move(ledger, lease, "was this worker's", "")

    with patched(Keeper, _move_former_leases=move_what_is_left):
        yield
