"""What `python3 -m tests.integration.storm` does."""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

from tests.integration.storm.show import storm


def main() -> int:
    """Return the exit status: 0 where all is as it must be."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.integration.storm")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--keep", type=Path, help="a folder to keep the lines and logs in")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, storm(words.seed, Path(folder)) as it:
        print(f"seed {words.seed}", flush=True)
        it.run(words.seconds)
        ledger = it.ledger()
        faults = ledger.faults()
        print(it.report(ledger) if faults else it.summary(ledger))
        if words.keep:
            words.keep.mkdir(parents=True, exist_ok=True)
            (words.keep / "lines").write_text(it.log.read_text())
            for actor in it.actors:
                for number, log in enumerate(actor.logs, 1):
                    (words.keep / f"{actor.name}-{number}.log").write_text(log.read_text())
    return 1 if faults else 0
