"""Profiles: how large a world is, what its clients do, and what befalls it.

Times are in s. They are chosen so that what the algorithm counts in comes close together: a ttl of
4 s, an answer within 1 s, clocks that differ by up to 9 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from celery_redlock.lock.model.options import grace_period
from celery_redlock.lock.model.votes import quorum_of
from tests.simulation.invariants import Record
from tests.simulation.nodes import Node, lost_until

if TYPE_CHECKING:
    from tests.simulation.clients import Process
    from tests.simulation.schedules import Schedule

ANY_SIZE = (1, 3, 3, 3, 3, 4, 5)  # one node alone has no restart guard, so it must not restart
TTL, MAX_TTL, NODE_TIMEOUT = 1.0, 1.0, 0.25
RATES = ((1, 1.0), (2, 1.0), (2, 2.5), (3, 4.0))  # starts, and s of their period


@dataclass(frozen=True)
class Profile:
    """What one kind of schedule is made of. Rates of faults are means for a whole schedule.

    sizes, clients: one of them is drawn. rounds: acquisitions that a client tries. sections,
    pauses: one of each is drawn for a client, the mean s that it holds, and lets pass before.
    bases, slow, worst: of `network.Path`. drift: the fraction that clients allow for; every
    clock's rate is off by up to half of it. span: s within which faults begin.
    wall_error: s that calendars are off. deafens: subscriptions break. amnesia: nodes forget who
    waits. limits: of each resource, in place of `limit`. runs: of so many names, each of which may
    be delivered to every client, and again after its end. sends: messages that are sent once, of so
    many names. orders: each of them takes the place of the queued one. claims_end: so often a claim
    of them has come to its end before the next step. rates: of each resource one is drawn, None for
    no rate. wipes: nodes lose memory, as often as a rate allows for. holds: so often a lock is an
    operator's hold.
    """

    name: str
    sizes: tuple[int, ...] = (3, 3, 3, 3, 3, 4, 5)
    clients: tuple[int, ...] = (2, 2, 2, 3)
    rounds: int = 4
    sections: tuple[float, ...] = (0.02, 0.3, 1.5)
    pauses: tuple[float, ...] = (0.01, 0.1)
    horizon: float = 20.0
    events: tuple[int, ...] = (20, 30, 40, 70)
    span: float = 0.7
    bases: tuple[float, ...] = (0.001, 0.005, 0.02, 0.08)
    slow: float = 0.02
    worst: float = 1.0
    drift: float = 0.1
    zombies: float = 0.6
    breaks: float = 0.0
    jams: float = 0.0
    restarts: float = 0.0
    keeps: tuple[str, ...] = ("nothing", "nothing", "some", "all")
    fail_backs: float = 0.0
    freezes: float = 0.0
    flushes: float = 0.0
    forgets: float = 0.0
    stops: float = 0.0
    kills: float = 0.0
    cuts: float = 0.0
    steps_back: float = 0.0
    wall_error: float = 0.2
    deafens: float = 0.0
    amnesia: float = 0.0
    short_writes: float = 0.0
    cold: float = 0.05
    limit: int = 1
    limits: tuple[int, ...] = ()
    fencing: float = 0.0
    resources: int = 1
    runs: int = 0
    sends: int = 0
    orders: bool = False
    claims_end: float = 0.0
    rates: tuple[tuple[int, float] | None, ...] = ()
    wipes: float = 0.0
    holds: float = 0.0
    renews: float = 0.6
    patient: float = 0.2
    extends: float = 0.2


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("calm", sizes=ANY_SIZE, slow=0.0, drift=0.01, cold=0.0),
        Profile("lossy", sizes=ANY_SIZE, breaks=1.0, jams=1.0, slow=0.05, short_writes=0.05),
        Profile("even", sizes=(4,), breaks=0.3, jams=0.5),
        Profile("late", sizes=ANY_SIZE, bases=(0.001, 0.08, 0.12), drift=0.02, renews=0.3,
                sections=(1.5,)),
        Profile("breaks", bases=(0.001, 0.08), breaks=3.0, drift=0.02, renews=0.3, sections=(1.5,)),
        Profile("clocks", steps_back=0.3, renews=0.3, jams=0.3, sections=(1.5,), slow=0.0),
        Profile("restarts", restarts=1.0, jams=0.7, sections=(0.3, 1.5), renews=0.8,
                events=(40, 80), span=1.5),
        Profile("fail-backs", fail_backs=1.0, sizes=(3, 3, 5), slow=0.0, cold=0.5, rounds=8,
                sections=(0.3, 1.5), bases=(0.001, 0.005), events=(80, 160), span=1.0),
        Profile("pauses", sizes=ANY_SIZE, stops=1.5, jams=0.3, breaks=0.3),
        Profile("cuts", sizes=ANY_SIZE, cuts=1.5, breaks=0.3, slow=0.01),
        Profile("fencing", fencing=1.0, clients=(3,), rounds=6, sections=(0.01, 0.1), jams=0.7,
                breaks=0.5, stops=0.2, wall_error=50.0),
        Profile("lost-fences", fencing=1.0, clients=(3,), rounds=5, sections=(0.01, 0.3),
                restarts=1.0, jams=0.7, stops=0.7),
        Profile("forgetful", forgets=2.0, sections=(0.3, 1.5), jams=0.3, slow=0.0),
        Profile("semaphore", limit=2, clients=(3, 4), breaks=0.3, restarts=0.2, jams=0.5),
        Profile("permits", limit=5, clients=(5, 6), sections=(0.05, 0.3), breaks=1.0, jams=0.7,
                restarts=0.2, stops=0.3, cuts=0.3),
        Profile("several", resources=3, breaks=0.3, jams=0.5, restarts=0.2),
        Profile("limits-per-key", resources=3, limits=(2, 1, 3), clients=(4, 5), patient=0.4,
                rounds=5, sections=(0.02, 0.3), breaks=0.5, jams=0.5, restarts=0.2, stops=0.3,
                cuts=0.3, events=(70, 150, 300)),
        Profile("twins-with-limits-per-key", runs=2, resources=2, limits=(3, 2), clients=(3, 4),
                sections=(0.02, 0.3), breaks=0.3, jams=0.5, restarts=0.2, cuts=0.3),
        Profile("twins", runs=2, sections=(0.02, 0.3), breaks=0.5, jams=0.7, slow=0.05, rounds=5),
        Profile("twins-with-permits", runs=2, limit=2, sections=(0.02, 0.3), breaks=0.3, jams=0.5),
        Profile("sends", sends=2, clients=(3,), rounds=6, pauses=(0.01, 0.05), events=(70, 150),
                breaks=1.0, jams=1.0, slow=0.05, stops=0.4, kills=0.2, cuts=0.3),
        Profile("orders", orders=True, clients=(3, 4), rounds=16, pauses=(0.01, 0.05), breaks=1.0,
                jams=1.0, slow=0.05, stops=0.4, cuts=0.3, wall_error=1.0, events=(300, 600),
                span=2.0),
        Profile("orders-without-faults", orders=True, clients=(3, 4), rounds=30, slow=0.0,
                pauses=(0.01, 0.05), bases=(0.0005, 0.001, 0.004), wall_error=1.0, cold=0.0,
                zombies=0.0, events=(300, 600)),
        Profile("orders-whose-claims-end", orders=True, claims_end=0.1, clients=(3, 4), rounds=30,
                slow=0.0, pauses=(0.01, 0.05), bases=(0.0005, 0.001, 0.004), wall_error=1.0,
                cold=0.0, zombies=0.0, events=(300, 600)),
        Profile("hand-off", clients=(3, 4, 5), patient=1.0, rounds=6, sections=(0.02, 0.3),
                deafens=2.0, amnesia=1.0, breaks=0.7, jams=0.7, stops=1.0, kills=0.3, cuts=0.3,
                wall_error=1.0, events=(150, 300, 600), span=5.0),
        Profile("hand-off-of-permits", clients=(3, 4, 5), patient=1.0, rounds=6, limit=2,
                sections=(0.02, 0.3), deafens=1.0, amnesia=0.5, jams=0.5, stops=0.7, cuts=0.3,
                wall_error=1.0, events=(150, 300, 600), span=5.0),
        Profile("lost-windows", sends=1, clients=(3,), rounds=8, pauses=(0.01, 0.05),
                events=(70, 150), restarts=1.0, keeps=("nothing", "all"), jams=0.7),
        Profile("rates", rates=RATES, limit=3, clients=(3, 4, 5), rounds=20, sections=(0.01, 0.1),
                bases=(0.0005, 0.001, 0.004, 0.02), patient=0.3, breaks=2.0, jams=0.5, stops=0.7,
                cuts=0.4, kills=0.2, drift=0.01, events=(300, 600, 1200), span=4.0),
        Profile("rates-by-fast-clocks", rates=RATES, limit=3, clients=(3, 4), rounds=20, slow=0.0,
                sections=(0.01,), bases=(0.0005, 0.001), steps_back=0.2, events=(400, 800)),
        Profile("rates-and-limits", rates=(*RATES, None), resources=3, limits=(2, 1, 3),
                clients=(3, 4, 5), rounds=20, sections=(0.01, 0.1), bases=(0.0005, 0.001, 0.003),
                patient=0.4, breaks=0.5, jams=0.4, stops=0.4, cuts=0.4, events=(400, 800, 1600),
                span=4.0),
        Profile("wiped-rates", rates=((1, 4.0), (2, 3.0), (3, 5.0)), limit=3, sizes=(3, 3, 4, 5),
                wipes=1.5, clients=(3, 4, 5), rounds=20, sections=(0.01,), slow=0.0, cold=0.0,
                bases=(0.001, 0.003), events=(600, 1200), span=5.0, horizon=25.0),
        Profile("everything", breaks=0.5, jams=0.5, restarts=0.5, freezes=0.3, flushes=0.2,
                stops=0.4, kills=0.2, cuts=0.3, steps_back=0.2, short_writes=0.05, fencing=0.3),
        Profile("under-a-hold", limit=4, clients=(4, 5), rounds=6, holds=0.3, sections=(0.05, 0.3),
                breaks=0.7, jams=0.5, restarts=0.2, stops=0.3, cuts=0.3, events=(70, 150)),
    )
}  # fmt: skip


def poisson(draw: Callable[[], float], mean: float) -> int:
    """Draw how often something happens that happens so often on the average."""
    if mean <= 0:
        return 0
    bound, product, count = math.exp(-mean), draw(), 0
    while product > bound:
        product *= draw()
        count += 1
    return count


class Faults:
    """What befalls one schedule: drawn before it begins."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._world, self._profile = schedule.world, schedule.profile
        self._random = schedule.world.random
        self._forgotten: list[float] = []  # real s
        self._wiped: list[Node] = []

    def plan(self, span: float) -> None:
        """Put faults into the first `span` s."""
        profile = self._profile
        plans: list[tuple[float, Callable[[], None]]] = [
            (profile.breaks, self._break),
            (profile.jams, self._jam),
            (profile.restarts, self._restart),
            (profile.wipes, self._wipe),
            (profile.fail_backs, self._fail_back),
            (profile.freezes, self._freeze),
            (profile.flushes, self._flush),
            (profile.forgets, self._forget),
            (profile.stops, self._stop),
            (profile.kills, self._kill),
            (profile.cuts, self._cut),
            (profile.steps_back, self._step_back),
            (profile.deafens, self._deafen),
            (profile.amnesia, self._forget_waiters),
        ]
        for node in self._schedule.nodes if "some" in profile.keeps and profile.restarts else ():
            self._world.at(self._random.random() * span, node.snapshot)
        for mean, do in plans:
            for _ in range(poisson(self._random.random, mean) if mean else 0):
                self._world.at(self._random.random() * span, do)

    def _node(self) -> Node:
        return self._random.choice(self._schedule.nodes)

    def _process(self) -> Process:
        return self._random.choice(self._schedule.processes)

    def _break(self) -> None:
        links = list(self._node().links)
        if links:
            link = self._random.choice(links)
            self._world.note("%s to %s breaks", link.process.name, link.node.name)
            link.break_off()

    def _jam(self) -> None:
        """Cut a process off from some of the nodes for a while."""
        until = self._world.now + self._random.random() * 1.5 * TTL
        for address in self._process().addresses:
            if self._random.random() < 0.6:
                address.path.jams_until = until

    def _restart(self) -> None:
        """Restart some nodes one after another, as in a failure or an upgrade."""
        draw = self._random.random
        chosen = [node for node in self._schedule.nodes if draw() < 0.6]
        pace = self._random.choice((0.0, 0.1, 0.6))
        for number, node in enumerate(chosen):
            self._world.at(self._world.now + number * pace, self._restart_one, node)

    def _restart_one(self, node: Node) -> None:
        if node.down:
            return
        keeps = self._random.choice(self._profile.keeps)
        if keeps != "all":
            node.silent_until = max(node.silent_until, lost_until(node, self._schedule.silence))
        self._world.counts["restarts"] += 1
        self._world.counts["wiped"] += keeps != "all"
        self._world.note("%s restarts, keeps %s", node.name, keeps)
        node.stop(keeps=keeps)
        away = self._random.choice((0.0, 0.02, 0.2, 0.5)) * self._random.random()
        self._world.at(self._world.now + away, node.start)

    def _wipe(self) -> None:
        """Restart a node without its memory: not more than a quorum leaves, and each one once."""
        nodes, world = self._schedule.nodes, self._world
        node = self._node()
        if len(self._wiped) >= len(nodes) - quorum_of(len(nodes)) or node in self._wiped:
            return
        self._wiped.append(node)
        node.silent_until = lost_until(node, self._schedule.silence)
        world.counts["restarts"] += 1
        world.counts["wiped"] += 1
        world.note("%s restarts, keeps nothing", node.name)
        node.stop(keeps="nothing")
        node.start()
        self._schedule.witness.starts.wiped(node)

    def _fail_back(self) -> None:
        """Let another server serve under a node's address for a while, and the first one again.

        So much at a time as the algorithm allows for: one node, and clients reach all others.
        """
        node, world = self._node(), self._world
        if any(other.is_away for other in self._schedule.nodes):
            return
        world.counts["fail-backs"] += 1
        world.note("%s is replaced", node.name)
        node.silent_until = lost_until(node, self._schedule.silence)
        back = node.give_way(copied=self._random.random() < 0.5)
        node.is_away = True

        def come_back() -> None:
            world.note("%s: the first server is back", node.name)
            node.silent_until = lost_until(node, self._schedule.silence)
            node.is_away = False
            back()

        world.at(world.now + (0.5 + self._random.random()) * self._schedule.silence, come_back)

    def _freeze(self) -> None:
        node = self._node()
        node.freeze(self._world.now + self._random.random() * TTL)

    def _flush(self) -> None:
        self._node().forget_scripts()

    def _forget(self) -> None:
        """Lose a lock in a way that no guard sees, as by DEL, where the algorithm allows for it.

        Of the h nodes that keep it so many may do so within a ttl that a rival still meets one.
        """
        node, now = self._node(), self._world.now
        lately = [when for when in self._forgotten if now - when < 1.2 * TTL]
        rivals = len(self._schedule.nodes) - quorum_of(len(self._schedule.nodes)) + 1
        for record in self._schedule.witness.active:
            if record.key and self._keeps(node, record):
                kept = sum(self._keeps(other, record) for other in self._schedule.nodes)
                if len(lately) + 1 > kept - rivals:
                    return
        for key in {record.key for record in self._schedule.witness.active if record.key}:
            node.drop(key)
        self._forgotten.append(now)
        self._world.counts["forgotten"] += 1
        self._world.note("%s forgets its locks", node.name)

    def _keeps(self, node: Node, record: Record) -> bool:
        return not node.down and node.look(record.key)[0] == record.value

    def _stop(self) -> None:
        steps, seconds = self._random.randint(1, 12), self._random.random() ** 2 * 1.5 * TTL
        self._process().stop_after(steps, seconds)

    def _kill(self) -> None:
        process = self._process()
        if not process.dead:
            process.kill()

    def _cut(self) -> None:
        threads = [t for t in self._schedule.workers if t and not t.process.dead]
        if threads:
            thread = self._random.choice(threads)
            thread.process.cut_after(thread, self._random.randint(1, 20))

    def _deafen(self) -> None:
        """Break a subscription."""
        subscribers = self._process().subscribers
        if subscribers:
            self._random.choice(subscribers).broken()

    def _forget_waiters(self) -> None:
        node = self._node()
        keys = node.keys()
        for key in keys:
            if b":waiting:" in key:
                node.drop(key)

    def _step_back(self) -> None:
        self._node().offset -= self._random.random() * TTL


def guard_silence() -> float:
    """Return the s for which a node that lost its memory keeps silent."""
    return grace_period(MAX_TTL)


def options_of(profile: Profile, guard: str) -> dict[str, Any]:
    """Return what a client's `Redlock` is made with."""
    return {
        "node_timeout": NODE_TIMEOUT,
        "clock_drift": profile.drift,
        "max_ttl": MAX_TTL,
        "restart_guard": guard,
    }
