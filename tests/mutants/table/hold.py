"""Mutants of an operator's hold: what would let a task run, or refuse it for ever."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TESTS, STORIES = "contract/test_hold.py", "integration/test_hold.py"
HOLD = "operate.cli.hold:ResourceHold"

# of each: name; where and what catches it; old and new
# fmt: off
MUTANTS = (
    Mutant("a free permit is granted beside a hold",
           "lock/server/lua/permit.lua:", f"{TESTS}::whatever_his_limit",
           "if hold then", "if false then"),
    Mutant("a hold is refused by another hold, of which it has a permit less",
           "lock/server/lua/permit.lua:", f"{TESTS}::no_other_hold",
           "string.byte(value) ~= mark", "true"),
    Mutant("who waits for a permit beside a hold tries again and again",
           "lock/server/lua/register.lua:", f"{TESTS}::until_the_hold_ends",
           "if free > 0 and", "if false and"),
    Mutant("a hold has no mark",
           "lock.engine.acquirer:Acquirer.new_lease", f"{TESTS}::drains_a_semaphore",
           "HOLD_MARK * options.is_hold + ", ""),
    Mutant("a hold waits behind who came before it",
           "lock.retry:Attempts._join", f"{TESTS}::before_all_that_wait",
           "0.0 if self._options.is_hold else session.guard.wall()", "session.guard.wall()"),
    Mutant("a permit that one node lacks counts as free",
           f"{HOLD}._blocker", f"{TESTS}::leave_no_quorum",
           "if has_first_permit and len(clear_nodes) >= lock_list.needed:",
           "if has_first_permit and not any(lock.held for lock in running):"),
    Mutant("a node that lost a permit proves that it is free",
           f"{HOLD}._blocker", f"{TESTS}::lost_its_keys",
           "clear_nodes &= {node.node for node in self._redlock.status().nodes if node.votes}",
           "pass"),
    Mutant("two holds wait for each other",
           "operate.cli.hold:_running", f"{TESTS}::two_holds",
           "not (has_first_permit and value.startswith(HOLD_MARK))", "True"),
    Mutant("a hold that is lost is kept",
           f"{HOLD}._check_held", f"{TESTS}::says_that_it_is_lost",
           "self._lock is not None", "False"),
    Mutant("a closed terminal ends a hold only after its ttl",
           "operate.cli.hold:", f"{STORIES}::no_start_of_a_rate",
           ", signal.SIGHUP)", ")"),
)
