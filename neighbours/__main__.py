"""Run neighbours, and write what was seen, as rows and as a page: `python3 -m neighbours`.

Names choose neighbours, in any case and by a part; none means all. The exit status is 1 if a run
saw something else than its declaration says: then its row stays as it was.
"""

from __future__ import annotations

import argparse
import datetime as dt
import functools
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
from neighbours.environment import REPOSITORY, built_wheel, cache, environment, versions
from neighbours.own_servers import add_options, own_servers, setup_of
from neighbours.page import write_page
from neighbours.row import CONTROLS, KINDS, NOT_RUN, ROWS, Neighbour, Row, write_rows

PACKAGE = ("celery_redlock", f":!{ROWS.relative_to(REPOSITORY)}")  # for git: what the rows are of


def main(words: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 if each run saw what its declaration says."""
    parser = argparse.ArgumentParser(prog="python3 -m neighbours", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a part of a neighbour's name")
    parser.add_argument("--kind", choices=(*KINDS, CONTROLS), help="only neighbours of this kind")
    parser.add_argument("--list", action="store_true", help="name the neighbours, and run none")
    parser.add_argument("--page", action="store_true", help="run none, and write the page anew")
    add_options(parser)
    options = parser.parse_args(words)
    if options.page:
        write_page()
        return 0
    declared = declarations()
    chosen = [
        each for each in declared
        if options.kind in (None, each.kind) and _is_named(each, options.names)
    ]  # fmt: skip
    if options.list:
        print("\n".join(f"{each.kind:14}{each.name}" for each in chosen))
        return 0
    if setup := setup_of(options):
        return 0 if publishable(own_servers(setup, options.require)) else 1
    known = [(each.kind, each.name) for each in declared]
    failed = []
    for neighbour in chosen:
        row = publishable(neighbour)
        if row is None:
            failed.append(neighbour.name)
        else:
            write_rows([row], known)
    write_page()
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
    from celery_redlock.operate.works_with import IN_EACH_RUN  # both after `ensure`
    from neighbours.run import Run

    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=cache()))
    print(f"{neighbour.name}: in {folder}", flush=True)
    try:
        built_wheel()
        built_of = commit()  # now, and not after a run, in which the checkout may change
        python = environment(neighbour.requirements, neighbour.python, forced=neighbour.forced)
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
    own = {name: installed[name] for name in neighbour.all_distributions()}
    return Row.of(
        neighbour,
        versions={**run.versions, **own},
        beside={name: installed[name] for name in IN_EACH_RUN if name in installed},
        date=dt.datetime.now(dt.UTC).date().isoformat(),
        commit=built_of,
        seen={name: value for name, value in asdict(seen).items() if value},
    )


@functools.cache  # as the wheel is built once for a process
def commit() -> str:
    """Return the last commit that changed the package, with "+" if it has changed since."""
    git = ["git", "-C", str(REPOSITORY)]
    last = [*git, "log", "-1", "--format=%h", "--abbrev=12", "--", *PACKAGE]
    name = subprocess.run(last, check=True, capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *PACKAGE], check=False)
    return name + ("+" if changed.returncode else "")


if __name__ == "__main__":
    sys.exit(main())
