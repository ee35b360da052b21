"""Hypothesis chooses what happens: to one lease, and to a whole world, step by step."""

from __future__ import annotations

import math
import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from celery_redlock.lock.model.handoff import MAX_TURNS, TURN
from celery_redlock.lock.model.lease import MARGIN, Lease, LockKey, State
from celery_redlock.lock.retry import MAX_LISTENING_PAUSE
from tests.simulation.clients import simulated_system
from tests.simulation.runner import SCHEDULES
from tests.simulation.stage import Actor, Stage

NODES, QUORUM, TTL, DRIFT = 5, 3, 10.0, 0.01
nodes = st.integers(0, NODES - 1)
late = st.floats(0, 12).map(lambda seconds: round(seconds, 2))


class OneLease(RuleBasedStateMachine):
    """A `Hold` hears what nodes say, in any order and however late."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.hold = Lease(LockKey("redlock", "r", TTL), "value", NODES, QUORUM, DRIFT, MARGIN, True)
        self.sent = dict.fromkeys(range(NODES), -math.inf)  # of the last yes of each node
        self.losses = 0
        self.was_over = False

    def was_sent(self, ago: float) -> float:
        return self.now - ago

    @rule(seconds=late)
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(node=nodes, ago=late, run=st.sampled_from("xy"))
    def a_node_grants(self, node: int, ago: float, run: str) -> None:
        self.sent[node] = max(self.sent[node], self.was_sent(ago))
        self.hold.confirm(node, self.was_sent(ago), run)

    @rule(node=nodes, ago=late, run=st.sampled_from("xy"))
    def a_node_renews(self, node: int, ago: float, run: str) -> None:
        before = self.hold.state
        lapsed = self.hold.ends[node] <= self.now
        self.sent[node] = max(self.sent[node], self.was_sent(ago))
        self.losses += before is State.HELD and not self.hold.held(self.now)
        self.hold.renewed(node, self.was_sent(ago), self.now, run)
        if before is self.hold.state is State.HELD and lapsed:
            assert node in self.hold.probation

    @rule(node=nodes, run=st.sampled_from("xy"))
    def a_key_is_missing(self, node: int, run: str) -> None:
        self.losses += self.hold.state is State.HELD and not self.hold.held(self.now)
        self.hold.missing(node, self.now, run)
        if self.hold.state is State.HELD:
            assert node in self.hold.reclaims

    @rule(node=nodes)
    def anothers_key_stands_there(self, node: int) -> None:
        self.losses += self.hold.state is State.HELD and not self.hold.held(self.now)
        self.hold.denied(node, self.now)
        if self.hold.state is State.HELD:
            assert self.hold.ends[node] == -math.inf

    @precondition(lambda self: self.hold.state is State.ACQUIRING)
    @rule()
    def a_quorum_has_granted(self) -> None:
        self.hold.begin(self.now)

    @rule()
    def it_is_judged(self) -> None:
        self.losses += self.hold.expire(self.now)
        assert self.hold.state is not State.HELD or self.hold.held(self.now)

    @rule()
    def it_is_given_back(self) -> None:
        self.hold.end()
        assert not self.hold.held(self.now)

    @invariant()
    def what_is_over_stays_over(self) -> None:
        over = self.hold.state in (State.LOST, State.RELEASED)
        assert over or not self.was_over
        self.was_over = over
        assert not (over and self.hold.held(self.now))

    @invariant()
    def it_is_lost_once(self) -> None:
        assert self.losses <= 1

    @invariant()
    def each_end_was_earned(self) -> None:
        for node, end in enumerate(self.hold.ends):
            assert end <= self.sent[node] + TTL * (1.0 - DRIFT) - MARGIN + 1e-9

    @invariant()
    def a_quorum_of_counted_nodes_makes_the_validity(self) -> None:
        if self.hold.held(self.now):
            ends = [e for n, e in enumerate(self.hold.ends) if n not in self.hold.probation]
            assert sum(end >= self.hold.valid_until for end in ends) >= QUORUM


class OneWorld(RuleBasedStateMachine):
    """Two clients and three nodes; the witness checks its invariants after every event."""

    def __init__(self) -> None:
        super().__init__()
        self.system = simulated_system()
        self.system.__enter__()

    @initialize()
    def begin(self) -> None:
        self.stage = Stage()
        self.actors = [self.stage.actor("A"), self.stage.actor("B")]

    def teardown(self) -> None:
        if hasattr(self, "stage"):
            self.stage.world.close()
        self.system.__exit__(None, None, None)

    who = st.integers(0, 1)
    which = st.integers(0, 2)

    def free(self, who: int) -> Actor | None:
        """Return an actor that waits for nothing."""
        actor = self.actors[who]
        return actor if actor.idle else None

    @rule(who=who)
    def tries(self, who: int) -> None:
        actor = self.free(who)
        if actor is not None and not actor.holds:
            actor.tries()

    @rule(who=who)
    def extends(self, who: int) -> None:
        actor = self.free(who)
        if actor is not None and actor.holds:
            actor.extends()

    @rule(who=who)
    def releases(self, who: int) -> None:
        actor = self.free(who)
        if actor is not None and actor.holds:
            actor.releases()

    @rule(who=who, which=which)
    def is_cut_off(self, who: int, which: int) -> None:
        self.actors[who].cut_off(which)

    @rule(who=who, which=which)
    def reaches(self, who: int, which: int) -> None:
        self.actors[who].reaches(which)

    @rule(who=who, which=which)
    def breaks(self, who: int, which: int) -> None:
        self.actors[who].breaks(which)

    @rule(who=who)
    def what_was_late_arrives(self, who: int) -> None:
        self.actors[who].late()

    @rule(who=who, seconds=st.sampled_from([1, 30, 90, 110]))
    def stops(self, who: int, seconds: int) -> None:
        self.actors[who].stops(self.stage.world.now + seconds)

    @rule(which=which)
    def restarts(self, which: int) -> None:
        self.stage.restarts(which)

    @rule(seconds=st.sampled_from([0.5, 10, 24, 26, 40, 75, 100, 102]))
    def time_passes(self, seconds: float) -> None:
        self.stage.at(self.stage.world.now + seconds)


class HandOff(RuleBasedStateMachine):
    """Four clients wait for one lock, and names, words and processes go missing.

    What is free and wanted is taken in time, once everybody can be reached again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.system = simulated_system()
        self.system.__enter__()

    @initialize(seed=st.integers(0, 1000))
    def begin(self, seed: int) -> None:
        self.stage = Stage(ttl=40.0)
        random.seed(seed)
        self.actors = [
            self.stage.actor(name, wall_error=error)
            for name, error in zip("ABCD", (0.0, 1.0, -1.0, 0.0), strict=True)
        ]
        self.has_restarted = False

    def teardown(self) -> None:
        try:
            if hasattr(self, "stage"):
                self.all_end()
                self.stage.world.close()
        finally:
            self.system.__exit__(None, None, None)

    def all_end(self) -> None:
        """See every wait end within the looks and turns that it may take."""
        world = self.stage.world
        world.is_mute, world.copies, world.lateness = False, 1, 0.0
        alive = [actor for actor in self.actors if not actor.process.dead]
        self.pass_time(max([0.0, *(actor.process.stopped_until for actor in alive)]))
        for actor in alive:
            actor.reaches(0, 1, 2)
        self.pass_time(self.stage.world.now + 45.0)  # tries time out, and leases of the dead end
        for actor in alive:
            if actor.idle and actor.locks and actor.holds:
                actor.releases()
        look = MAX_LISTENING_PAUSE + MAX_TURNS * TURN
        self.pass_time(self.stage.world.now + len(alive) * (look + 1.0))
        assert all(actor.idle for actor in alive)

    def pass_time(self, until: float) -> None:
        self.stage.at(max(until, self.stage.world.now))

    who = st.integers(0, 3)
    which = st.integers(0, 2)

    def free(self, who: int) -> Actor | None:
        """Return an actor that waits for nothing."""
        actor = self.actors[who]
        return actor if actor.idle and not actor.process.dead else None

    @rule(who=who)
    def tries(self, who: int) -> None:
        actor = self.free(who)
        if actor is not None and not actor.holds:
            actor.tries()

    @rule(who=who, section=st.sampled_from([0.0, 0.05, 0.15, 3.0]), wait=st.sampled_from([1, 1e6]))
    def waits(self, who: int, section: float, wait: float) -> None:
        actor = self.free(who)
        if actor is not None and not actor.holds:
            actor.takes_turns(1, section, wait=wait)

    @rule(who=who)
    def releases(self, who: int) -> None:
        actor = self.free(who)
        if actor is not None and actor.holds:
            actor.releases()

    @rule(who=who, which=which)
    def is_cut_off(self, who: int, which: int) -> None:
        self.actors[who].cut_off(which)

    @rule(who=who, which=which)
    def reaches(self, who: int, which: int) -> None:
        self.actors[who].reaches(which)

    @rule(who=who, which=which)
    def loses_its_subscription(self, who: int, which: int) -> None:
        self.actors[who].deafened(which)

    @rule(who=who, which=which)
    def breaks(self, who: int, which: int) -> None:
        self.actors[who].breaks(which)

    @rule(which=which)
    def a_node_forgets_who_waits(self, which: int) -> None:
        self.stage.forgets_waiters(which)

    @rule(is_mute=st.booleans())
    def every_word_is_lost(self, is_mute: bool) -> None:
        self.stage.world.is_mute = is_mute

    @rule(copies=st.sampled_from([1, 2]), lateness=st.sampled_from([0.0, 0.05, 0.15, 2.0]))
    def words_come_twice_or_late(self, copies: int, lateness: float) -> None:
        self.stage.world.copies, self.stage.world.lateness = copies, lateness

    @rule()
    def a_node_loses_its_memory(self) -> None:
        if not self.has_restarted:  # a second one would leave no quorum for a grace period
            self.has_restarted = True
            self.stage.restarts(2)

    @rule(who=who, limit=st.sampled_from([1, 2]), section=st.sampled_from([0.0, 0.15]))
    def another_thread_waits(self, who: int, limit: int, section: float) -> None:
        actor = self.actors[who]
        if not actor.process.dead and len(self.actors) < 8:
            beside = actor.beside()
            self.actors.append(beside)
            beside.takes_turns(1, section, limit=limit, wait=1e6)

    @rule(who=who, seconds=st.sampled_from([0.15, 2, 30]))
    def stops(self, who: int, seconds: float) -> None:
        self.actors[who].stops(self.stage.world.now + seconds)

    @rule(who=who, lost_power=st.booleans())
    def dies(self, who: int, lost_power: bool) -> None:
        process = self.actors[who].process
        if who > 1:
            process.vanish() if lost_power else process.kill()

    @rule(seconds=st.sampled_from([0.01, 0.05, 0.1, 0.2, 1, 6, 41]))
    def time_passes(self, seconds: float) -> None:
        self.stage.at(self.stage.world.now + seconds)


# a schedule of the simulator's is worth more than an example
EXAMPLES = max(40, SCHEDULES // 50)
OneLease.TestCase.settings = settings(max_examples=2 * EXAMPLES, stateful_step_count=40)
OneWorld.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=30)
HandOff.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=40)
TestOneLease = OneLease.TestCase
TestOneWorld = OneWorld.TestCase
TestHandOff = HandOff.TestCase
