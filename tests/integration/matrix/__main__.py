"""Measure the matrix, or write its page: `python3 -m tests.integration.matrix --pool solo`."""

from __future__ import annotations

import sys

from example_worker.bootstrap import ensure


def main() -> int:
    """Return the exit status: 0 where all is as it must be."""
    ensure("dev")
    from tests.integration.matrix import command  # needs what has just been made sure of

    return command.main()


if __name__ == "__main__":
    sys.exit(main())
