"""Which failed tests are run again, and why: what failed there is a program of others.

No other test is run again. One that fails now and then is a bug, of the test or of the package.
"""

from __future__ import annotations

from pathlib import PurePath

import pytest

BROWSER = "a headless browser that does not answer is no fault of a page"
# the file of the tests, and the reason
MAY_RUN_AGAIN = {
    "tests/test_site.py": BROWSER,
    "tests/integration/test_flower.py": BROWSER,
    "tests/integration/test_django_admin_pages.py": BROWSER,
}
TWICE = 2  # more runs of a test that failed
PAUSE = 3  # s before each


def mark_flaky(items: list[pytest.Item]) -> None:
    """Mark the tests that may run again."""
    for item in items:
        path = PurePath(item.nodeid.partition("::")[0]).as_posix()
        if path in MAY_RUN_AGAIN:
            item.add_marker(pytest.mark.flaky(reruns=TWICE, reruns_delay=PAUSE))
