"""Let it storm: `python3 -m tests.integration.storm --seconds 600 --seed 7`."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from example_worker.bootstrap import ensure


def main() -> int:
    """Return the exit status: 0 where all is as it must be, 2 where two held one lock, else 1."""
    ensure("checks")
    from tests.integration.storm.show import SEED, storm  # needs what has just been made sure of

    parser = argparse.ArgumentParser(prog="python3 -m tests.integration.storm")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=SEED, help="CELERY_REDLOCK_STORM_SEED, or any")
    parser.add_argument("--keep", type=Path, help="a folder to keep the lines and logs in")
    words = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers and workers end, too
    with tempfile.TemporaryDirectory() as folder, storm(words.seed, Path(folder)) as it:
        print(f"seed {words.seed}", flush=True)
        it.run(words.seconds)
        ledger = it.ledger()
        faults = ledger.faults()
        hollow = it.hollow(ledger, words.seconds)
        print("\n".join([it.report(ledger) if faults else it.summary(ledger), *hollow]))
        if words.keep:
            words.keep.mkdir(parents=True, exist_ok=True)
            (words.keep / "lines").write_text(it.log.read_text())
            struck = [*ledger.blows, *ledger.outages]
            (words.keep / "blows").write_text("\n".join(map(str, struck)))
            for actor in it.actors:
                for number, log in enumerate(actor.logs, 1):
                    (words.keep / f"{actor.name}-{number}.log").write_text(log.read_text())
    if ledger.overlaps() or ledger.tokens():
        return 2
    return 1 if faults or hollow else 0


if __name__ == "__main__":
    sys.exit(main())
