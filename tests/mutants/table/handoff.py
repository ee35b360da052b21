"""Mutants of the hand-off: what the nodes know of waiters, and whom a release names."""

from __future__ import annotations

from tests.mutants.mutant import CONTRACT, SIMULATION, UNIT, Mutant

ANNOUNCE, REGISTER = "lock/server/lua/announce.lua:", "lock/server/lua/register.lua:"
HAND_OFF, SIMULATED = f"{CONTRACT}/test_hand_off.py", f"{SIMULATION}/test_hand_off.py"

MUTANTS = (
    Mutant(
        "a dead waiter is named again and again",
        ANNOUNCE,
        "if heard == 0 then",
        "if false then",
        (HAND_OFF,),
        "without_a_listener",
    ),
    Mutant(
        "the break of another program's lock names its successor in a text that makes no sense",
        ANNOUNCE,
        "'^[^: ]*'",
        "'^[^:]*'",
        (HAND_OFF,),
        "without_a_token",
    ),
    Mutant(
        "who waits is struck out while the lock is taken",
        REGISTER,
        "if least ~= 0 or rank == 0 then",
        "if rank == 0 then",
        (HAND_OFF,),
        "only_if_a_key_is_free",
    ),
    Mutant(
        "a registration leaves the dead before it",
        REGISTER,
        " or tonumber(counts[2 * place]) == 0",
        "",
        (HAND_OFF,),
        "strikes_the_dead",
    ),
    Mutant(
        "the set of waiters that are dead stays for ever",
        REGISTER,
        "redis.call('PEXPIRE', KEYS[1], ARGV[3])\n",
        "",
        (HAND_OFF,),
        "ends_by_itself",
    ),
    Mutant(
        "who is named first by one node acts at once",
        "lock.model.handoff:Namings.turns",
        "return 1 if named.rank == 0 and ranks.count(0) == 1 else None",
        "return named.rank",
        (f"{UNIT}/test_handoff.py",),
    ),
    Mutant(
        "two act at once where nodes differ",
        "lock.model.handoff:Namings.turns",
        "else min(ranks) + 1",
        "else min(ranks)",
        (f"{UNIT}/test_handoff.py",),
    ),
    Mutant(
        "a lock counts as free where one node says so",
        "lock.model.handoff:merged",
        "[quorum - 1]",
        "[0]",
        (f"{UNIT}/test_handoff.py",),
    ),
    Mutant(
        "who was struck out though it lives is registered late",
        "lock.engine.wait_queue:WaitQueue.was_refused",
        "self._registered.pop(resource, None)",
        "pass",
        (SIMULATED,),
        "struck_out",
    ),
    Mutant(
        "a registration that came late stays for as long as its process waits for anything",
        "lock.engine.wait_queue:WaitQueue.heard",
        "self._unregister(named.resource)",
        "pass",
        (SIMULATED,),
        "after_its_removal",
    ),
    Mutant(
        "who waits for one of several is named for the others, too",
        "lock.engine.wait_queue:WaitQueue._since",
        ' if one.awaits in ("", resource)',
        "",
        (SIMULATED,),
        "one_of_several",
    ),
    Mutant(
        "two permits that are free at once wake one thread",
        "lock.engine.wait_queue:_firsts",
        'if release and waiter.limit > 1 and waiter.release not in ("", release):',
        "if False:",
        (f"{UNIT}/test_wakeup.py", SIMULATED),
        "permits",
    ),
    Mutant(
        "a forked child is named together with its parent",
        "lock.engine.wait_queue:WaitQueue.forget",
        "self._name = process_name(",
        'self._name = getattr(self, "_name", "") or process_name(',
        (f"{UNIT}/test_wakeup.py",),
        "forked_child",
    ),
    Mutant(
        "those behind try in vain after each release",
        "lock.retry_schedule:RetrySchedule.taken",
        "if is_first or self._hold.splits",
        "if True or self._hold.splits",
        (SIMULATED,),
        "those_behind_ask",
    ),
    Mutant(
        "a stopped waiter costs each release a turn",
        "lock.retry_schedule:RetrySchedule.taken",
        "wait_queue.ask(waiter, passed)",
        "wait_queue.ask(waiter, 0)",
        (SIMULATED,),
        "costs_one_release",
    ),
    Mutant(
        "who waits takes the lock out of order as a lease ends",
        "lock.retry_schedule:RetrySchedule.taken",
        "(standing.is_free and standing.rank <= passed)",
        "standing.is_free",
        (SIMULATED,),
        "followed_in_order",
    ),
    Mutant(
        "releases that come fast put a turn off for ever",
        "lock.retry_schedule:RetrySchedule.woken",
        "turn = min(waiter.turn, self._due_by, moment)",
        "turn = waiter.turn",
        (SIMULATED,),
        "keeps_taking_the_lock",
    ),
)
