"""Run every check: `python3 -m tests`; more words go to pytest: `python3 -m tests -k lease`."""

from __future__ import annotations

import subprocess
import sys

from example_worker.bootstrap import REPOSITORY, ensure

SIDE_BY_SIDE = 3  # tests: most of them wait for servers, workers and the end of leases
CHECKS = (("ruff", "check"), ("ruff", "format", "--check"), ("mypy",))


def main() -> int:
    """Return the exit status: 0 where lint, types and tests all pass."""
    ensure("dev")
    for check in CHECKS:
        failed = subprocess.run([sys.executable, "-m", *check], cwd=REPOSITORY, check=False)
        if failed.returncode:
            return failed.returncode
    # a process that is done takes tests from one that has long ones left
    side_by_side = ("-n", str(SIDE_BY_SIDE), "--dist", "worksteal")
    tests = [sys.executable, "-m", "pytest", *side_by_side, *sys.argv[1:]]
    return subprocess.run(tests, cwd=REPOSITORY, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
