"""Runs what depends on the interpreter on several: `python -m tests.pythons [PYTHON...]`.

Without a name, each supported Python that PATH has. Each gets its own environment, as the test
command makes one. The last lines say what became of each.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

from example_worker.bootstrap import REPOSITORY

SUPPORTED = ("3.11", "3.12", "3.13", "3.14")
# cuts at each point, threads, greenlets, asyncio, subinterpreters, decorators (compared in two
# ways), and the simulator with its properties
DEPENDS = (
    *("tests/contract/test_cut_anywhere.py", "tests/contract/test_reentry.py"),
    *("tests/contract/test_async.py", "tests/contract/test_event_loop.py"),
    *("tests/contract/test_greenlets.py", "tests/contract/test_dropped.py"),
    *("tests/contract/test_watchdog.py", "tests/contract/test_wakeup.py"),
    "tests/contract/test_subinterpreters.py",
    "tests/integration/test_decorators.py",
    *("tests/unit/test_interrupts.py", "tests/unit/test_children.py", "tests/unit/test_sleeper.py"),
    *("tests/unit/test_compatibility.py", "tests/unit/transport", "tests/simulation"),
)
CHOSEN = ("-m", "not slow and not long")


def main(names: list[str]) -> int:
    """Return the exit status: 0 if the part passes on each Python, and there is one."""
    pythons = names or [path for each in SUPPORTED if (path := shutil.which(f"python{each}"))]
    ends = {}
    for python in pythons:
        print(f"== {python}", flush=True)
        command = [python, "-m", "tests", "--tests-only", *CHOSEN, *DEPENDS]
        ends[python] = subprocess.run(command, cwd=REPOSITORY, check=False).returncode
    for python, end in ends.items():
        print(f"== {python}: {'passed' if end == 0 else f'failed with status {end}'}")
    return 0 if ends and not any(ends.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
