"""Run schedules for as long as one likes, or one of them again, step by step.

`python3 -m tests.simulation --seconds 60`, `--profile restarts --seed 12345`.
"""

from __future__ import annotations

import sys

from example_worker.bootstrap import ensure


def main() -> int:
    """Return the exit status: 0 where no invariant was broken."""
    ensure("checks")
    from tests.simulation import command  # needs what has just been made sure of

    return command.main()


if __name__ == "__main__":
    sys.exit(main())
