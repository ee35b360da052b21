"""Which failed tests CI runs again, because a shared machine stalled and nothing is at fault.

All runs are shown. A test that waits for nothing, or that asks about exclusion, fails at once.
"""

from __future__ import annotations

from pathlib import PurePath

import pytest

# these wait for no machine, or a second run would hide that exclusion was broken
NEVER = [
    "tests/unit", "tests/simulation", "tests/test_architecture.py", "tests/test_public_api.py",
    "tests/contract/test_interleavings.py", "tests/contract/test_paused_holder.py",
    "tests/contract/test_real_faults.py", "tests/contract/test_scripts.py",
]  # fmt: skip
# these count bodies: they run again only if a wait was too long, never if a count was wrong
IF_A_WAIT_ENDED = [
    "tests/integration/test_exclusion.py", "tests/integration/test_fencing.py",
    "tests/integration/test_shop.py", "tests/integration/test_permits.py",
    "tests/integration/test_second_deliveries.py", "tests/integration/test_several_resources.py",
    "tests/integration/test_twins.py", "tests/integration/test_unique.py",
    "tests/integration/test_untried.py",
]  # fmt: skip
WAIT_ENDED = ["not true within", "Timeout"]


def limit_reruns(items: list[pytest.Item], reruns: int, delay: float) -> None:
    """Mark the tests that run again in fewer cases than the options say. delay: in seconds."""
    for item in items:
        path = PurePath(item.nodeid.partition("::")[0])
        if any(path.is_relative_to(never) for never in NEVER):
            item.add_marker(pytest.mark.flaky(reruns=0))
        elif any(path == PurePath(counting) for counting in IF_A_WAIT_ENDED):
            again = pytest.mark.flaky(reruns=reruns, reruns_delay=delay, only_rerun=WAIT_ENDED)
            item.add_marker(again)
