"""Run the example shop: `python3 -m example_worker`."""

from __future__ import annotations

import sys

from example_worker import bootstrap, options
from example_worker.interruption import Interruption


def main() -> int:
    """Run both phases and return the exit status: 0 only where the lock did what it promises."""
    interruption = Interruption()
    interruption.install()
    with interruption.allowed():
        chosen = options.parse(sys.argv[1:])
        bootstrap.ensure("example")
    with interruption.held():
        # Only now is there anything to import.
        from example_worker import run
    return run.main(chosen, interruption)


if __name__ == "__main__":
    sys.exit(main())
