"""Let it storm: `python3 -m tests.integration.storm --seconds 600 --seed 7`."""

from __future__ import annotations

import sys

from example_worker.bootstrap import ensure


def main() -> int:
    """Return the exit status: 0 where all is as it must be."""
    ensure("dev")
    from tests.integration.storm import command  # needs what has just been made sure of

    return command.main()


if __name__ == "__main__":
    sys.exit(main())
