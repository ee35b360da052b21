"""Run the checks: `python3 -m tests`; with `--all` also the slow tests, which CI runs.

Other words go to pytest, and then no test is left out but by them: `python3 -m tests -k lease`.
`--tests-only` leaves out lint and types.
"""

from __future__ import annotations

import os
import subprocess
import sys

from example_worker.bootstrap import REPOSITORY, ensure

SIDE_BY_SIDE = 4  # tests: most of them wait for servers, workers and the end of leases
CHECKS = (("ruff", "check"), ("ruff", "format", "--check"), ("mypy",))
SCHEDULES = "50000"  # of the simulator, with --all
FAST = ("-m", "not long and not slow")


def main() -> int:
    """Return the exit status: 0 if lint, types and tests all pass."""
    ensure("dev")
    words = [word for word in sys.argv[1:] if word not in ("--all", "--tests-only")]
    if "--tests-only" not in sys.argv:
        for check in CHECKS:
            failed = subprocess.run([sys.executable, "-m", *check], cwd=REPOSITORY, check=False)
            if failed.returncode:
                return failed.returncode
    if "--all" in sys.argv:
        os.environ.setdefault("CELERY_REDLOCK_SCHEDULES", SCHEDULES)
    elif not words:
        words = [*FAST]
    # a process that is done takes tests from one that has long ones left
    side_by_side = ("-n", str(SIDE_BY_SIDE), "--dist", "worksteal")
    tests = [sys.executable, "-m", "pytest", *side_by_side, *words]
    return subprocess.run(tests, cwd=REPOSITORY, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
