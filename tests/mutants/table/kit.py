"""Mutants of the kit by which users test their locked tasks."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

KIT = "tests/testing/test_kit.py"

MUTANTS = (
    Mutant(
        "the kit's holder of a permit takes the whole lock",
        "testing.holders:hold",
        "renew=renew, limit=limit",
        "renew=renew",
        (f"{KIT}::TestHolders::test_a_holder_of_a_permit_leaves_the_other_permits",),
    ),
    Mutant(
        "a jump of the kit's clock does not wake the watchdog",
        "testing.clock:VirtualClock.tell",
        "session.watchdog.look()",
        "pass",
        (f"{KIT}::TestClock::test_a_jump_past_a_lease_is_told_at_once",),
    ),
    Mutant(
        "a fake node takes a quoted letter for a pattern's",
        "testing.model:matches",
        'f"[{quoted}]" if quoted in "*?[" else quoted',
        "quoted",
        (f"{KIT}::TestNodes::test_a_prefix_with_letters_of_a_pattern_is_that_prefix_alone",),
    ),
    Mutant(
        "a send is deduplicated though locking is off",
        "testing.unlocked:locking_off",
        'mock.patch.object(Claim, "send", send),',
        "",
        (f"{KIT}::TestLockingOff::test_a_unique_send_is_published_without_any_node",),
    ),
)
