"""Run mutants: `python3 -m tests.mutants`, `python3 -m tests.mutants "a late release"`."""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from example_worker.bootstrap import ensure
from tests.changes import changed, touches
from tests.mutants.mutant import ROOT, Mutant, mutated
from tests.mutants.table import MUTANTS

SIDE_BY_SIDE = 2
MOST_RUNS = 2  # of a mutant that a thread may hide from its test: it survives if it does in each
IF_UNKNOWN = 90.0  # s of mutants where nobody knows what changed
LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "__pycache__", "*.egg-info")
FAILED = 1  # pytest's exit status if a test failed
FAILED_TEST = "FAILED "  # what a line of its summary begins with that names one, and its error


def main() -> int:
    """Return the exit status: 0 if each mutant that ran was caught, and one ran if there is any."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names; none: all")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="begin no other mutant after that"
    )
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument(
        "--changed", action="store_true",
        help="of the files that changed alone; where these are not known, for 90 s",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print the names alone")
    given = parser.parse_args()
    chosen = [m for m in MUTANTS if not given.names or any(n in m.name for n in given.names)]
    if given.names and not chosen:
        parser.error(f"no mutant has such a name: {given.names}")
    seconds = given.seconds
    if given.changed:
        files = changed()
        if files is None:
            seconds = min(seconds, IF_UNKNOWN)
        else:
            chosen = [mutant for mutant in chosen if touches((mutant.path,), files)]
    if given.list:
        print(*(mutant.name for mutant in chosen), sep="\n")
        return 0
    ensure("checks")
    random.Random(given.seed).shuffle(chosen)
    end = time.monotonic() + seconds
    print(f"{len(chosen)} mutants, seed {given.seed}")
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        found = list(pool.map(lambda mutant: survives(mutant, end), chosen))
    ran = len(found) - found.count(None)
    print(f"{ran} of {len(chosen)} mutants ran, {found.count(True)} survived")
    return 0 if (ran or not chosen) and True not in found else 1


def survives(mutant: Mutant, end: float) -> bool | None:
    """Return whether no test fails with a mutant; None if not run: after `end`, monotonic s."""
    if time.monotonic() > end:
        return None
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder, "copy")
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
        path = copy / mutant.path
        path.write_text(mutated(mutant, path.read_text()))
        keyword = ("-k", mutant.keyword) if mutant.keyword else ()
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        runs = 0
        caught = False
        while not caught and runs < MOST_RUNS:
            runs += 1
            done = subprocess.run(
                [*command, *mutant.files, *keyword], cwd=copy, capture_output=True, text=True,
                env={**os.environ, "PYTHONPATH": str(copy), "COLUMNS": "160"}, check=False,
            )  # fmt: skip
            caught = done.returncode == FAILED
    lines = done.stdout.splitlines()
    # without the word, which in a log names what is wrong
    by = [f"by {line.removeprefix(FAILED_TEST)}" for line in lines if line.startswith(FAILED_TEST)]
    if runs > 1:
        by.append(f"in run {runs} alone: a test that catches it each time is missing")
    said = by if caught else [done.stdout[-3000:], done.stderr[-1000:]]
    title = f"{'caught' if caught else 'SURVIVED'}: {mutant.name} ({mutant.where})"
    print("\n  ".join([title, *said]), flush=True)
    return not caught


if __name__ == "__main__":
    sys.exit(main())
