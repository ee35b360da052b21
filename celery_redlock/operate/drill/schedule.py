"""Which faults a drill brings, and when: decided by a seed, before anything is started."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from celery_redlock.errors import SettingsError
from celery_redlock.lock.engine.acquirer import ROUNDS_IN_TTL

SHORTEST = 10.0  # seconds of a drill
LEAST_TTL = 2.0  # seconds: a lock of a dead holder is to expire well within the shortest drill
FIRST_AT = 1.0  # seconds until the first fault: by then each worker has run something
BACK_AFTER = 4.0  # seconds for which a killed worker is counted as down: another one starts
GAPS = (0.8, 2.5)  # seconds from one fault to the next, at least and at most
FREEZES = (1.2, 1.6)  # how long a freeze is, in ttls: the lock has expired when it ends
LAST_KILL = 4.0  # seconds before the end: a message of the killed worker is to come back
# what is done to a worker: the whole of it is killed or stopped, one child of its pool is killed,
# or all connections of its processes are cut
KILL = "kill worker"
KILL_CHILD = "kill child"
CUT = "cut connections"
FREEZE = "freeze worker"
KINDS = (KILL, KILL_CHILD, CUT, FREEZE)


@dataclass(frozen=True)
class Fault:
    """One fault. at: seconds after the begin. worker: its number. lasts: seconds, of a freeze."""

    at: float
    kind: str
    worker: int
    lasts: float = 0.0


def ttl_for(node_timeout: float, max_ttl: float, seconds: float) -> float:
    """Return the ttl of a drill's locks: short, so that many of them expire. All in seconds.

    Raises SettingsError if the drill is too short for what the app's settings allow.
    """
    ttl = min(max(LEAST_TTL, (ROUNDS_IN_TTL + 1) * node_timeout), max_ttl)
    shortest = max(SHORTEST, 5 * ttl)
    if seconds < shortest:
        hint = (
            f"is too short: with redlock_node_timeout={node_timeout:g} a lock of the drill lasts "
            f"{ttl:g} s, and it has to see some of them expire: give {shortest:g}s or more"
        )
        raise SettingsError("command line", "--for", f"{seconds:g}", hint)
    return ttl


def plan_faults(seed: int, seconds: float, ttl: float, pools: Sequence[str]) -> tuple[Fault, ...]:
    """Return the faults of a drill, in order. pools: of its workers, by number.

    Each kind is there once in each round. One worker at most is stopped or dead at any time, so
    that the others can take over. A freeze ends before the drill does.
    """
    return tuple(_faults(random.Random(seed), seconds, ttl, pools))  # noqa: S311 - no secret


def _faults(
    chance: random.Random, seconds: float, ttl: float, pools: Sequence[str]
) -> Iterator[Fault]:
    at = FIRST_AT
    down = -1  # the worker that is stopped or dead
    back_at = 0.0
    kinds = list(KINDS)  # the shortest drill has the kill first: what it leaves takes longest
    while True:
        for kind in kinds:
            lasts = ttl * chance.uniform(*FREEZES) if kind == FREEZE else 0.0
            if kind in (KILL, FREEZE):
                at = max(at, back_at)
            if at + max(lasts, FIRST_AT) > seconds:
                return
            is_late = kind == KILL and at > seconds - LAST_KILL
            up = [
                number
                for number, pool in enumerate(pools)
                if (number != down or at >= back_at) and (kind != KILL_CHILD or pool == "prefork")
            ]
            if not up or is_late:
                continue
            worker = chance.choice(up)
            yield Fault(at, kind, worker, lasts)
            if kind in (KILL, FREEZE):
                down = worker
                back_at = at + (lasts or BACK_AFTER)
            at += chance.uniform(*GAPS)
        chance.shuffle(kinds)
        at += chance.uniform(*GAPS)
