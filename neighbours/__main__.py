"""Run neighbours, and write what was seen: `python3 -m neighbours`.

Names choose neighbours, in any case and by a part; none means all. The exit status is 1 if a run
saw something else than its declaration says: then its row stays as it was.
"""

from __future__ import annotations

import argparse
import datetime as dt
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from example_worker.bootstrap import ensure
from neighbours.environment import REPOSITORY, cache, distribution_of, environment, versions
from neighbours.row import CONTROLS, KINDS, NOT_RUN, ROWS, Neighbour, Row, write_rows

PACKAGE = ("celery_redlock", f":!{ROWS.relative_to(REPOSITORY)}")  # for git: what the rows are of


def main(words: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 if each run saw what its declaration says."""
    parser = argparse.ArgumentParser(prog="python3 -m neighbours", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a part of a neighbour's name")
    parser.add_argument("--kind", choices=(*KINDS, CONTROLS), help="only neighbours of this kind")
    parser.add_argument("--list", action="store_true", help="name the neighbours, and run none")
    options = parser.parse_args(words)
    declared = declarations()
    chosen = [
        each for each in declared
        if options.kind in (None, each.kind) and _is_named(each, options.names)
    ]  # fmt: skip
    if options.list:
        print("\n".join(f"{each.kind:14}{each.name}" for each in chosen))
        return 0
    known = [(each.kind, each.name) for each in declared]
    failed = []
    for neighbour in chosen:
        row = publishable(neighbour)
        if row is None:
            failed.append(neighbour.name)
        else:
            write_rows([row], known)
    if failed:
        print(f"not as declared: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def declarations() -> list[Neighbour]:
    """Return all neighbours, in the order of their kinds."""
    ensure("example")  # the servers, whose module the next line imports
    found = [import_module(f"neighbours.{kind}").NEIGHBOURS for kind in (*KINDS, CONTROLS)]
    return [neighbour for of_kind in found for neighbour in of_kind]


def _is_named(neighbour: Neighbour, names: Iterable[str]) -> bool:
    wanted = [name.lower() for name in names]
    return not wanted or any(name in neighbour.name.lower() for name in wanted)


def publishable(neighbour: Neighbour) -> Row | None:
    """Run a neighbour; return its row, or None if the run was not as declared."""
    if neighbour.run is None:
        print(f"{neighbour.name}: {NOT_RUN}: {neighbour.reason}")
        return Row.of(neighbour)
    from neighbours.run import Run  # after `ensure`

    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=cache()))
    print(f"{neighbour.name}: in {folder}", flush=True)
    try:
        python = environment(neighbour.requirements, neighbour.python)
        run = Run(python, folder)
        seen = neighbour.run(run)
    except Exception:  # of any neighbour; the others are run all the same
        traceback.print_exc()
        return None
    surprises = neighbour.surprises(seen)
    print(f"{neighbour.name}: {time.monotonic() - began:.0f} s, {seen}")
    for surprise in surprises:
        print(f"{neighbour.name}: {surprise}", file=sys.stderr)
    if surprises:
        return None
    shutil.rmtree(folder)
    installed = versions(python)
    names = neighbour.distributions or map(distribution_of, neighbour.requirements)
    return Row.of(
        neighbour,
        versions={**run.versions, **{name: installed[name] for name in names}},
        date=dt.datetime.now(dt.UTC).date().isoformat(),
        commit=commit(),
        seen={name: value for name, value in asdict(seen).items() if value},
    )


def commit() -> str:
    """Return the last commit that changed the package, with "+" if it has changed since."""
    git = ["git", "-C", str(REPOSITORY)]
    last = [*git, "log", "-1", "--format=%h", "--abbrev=12", "--", *PACKAGE]
    name = subprocess.run(last, check=True, capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *PACKAGE], check=False)
    return name + ("+" if changed.returncode else "")


if __name__ == "__main__":
    sys.exit(main())
