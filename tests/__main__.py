"""Run the checks: `python3 -m tests`. Lint and types run beside the tests.

With other words only the tests run that they name to pytest: `python3 -m tests -k lease`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from example_worker.bootstrap import REPOSITORY, ensure
from tests.changes import PAGES, STORES, changed, touches

SIDE_BY_SIDE = 6  # tests: most of them wait for servers and workers
LINT = (("ruff", "check"), ("ruff", "format", "--check"))
TYPES = ("mypy", "celery_redlock", "celery_redlock_entry.py", "pytest_celery_redlock.py")
ALL_TYPES = ("mypy",)  # and the other trees that pyproject.toml names
NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
CACHE = Path(sys.prefix, "bytecode")
FAST = "not long and not slow and not pages"
FAST_AND_PAGES = "not long and (pages or not slow)"
NOT_POSTGRESQL = "not postgresql"
LANE_OF_PAGES = "not long and pages"


def main() -> int:
    """Return the exit status: 0 if lint, types and tests all pass."""
    parser = argparse.ArgumentParser(
        prog="python3 -m tests", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--all", action="store_true", help="every test but the storm, on all stores, and all types"
    )
    parser.add_argument(
        "--pages", action="store_true", help="what runs or builds pages: examples, site, packaging"
    )
    parser.add_argument("--tests-only", action="store_true", help="leave out lint and types")
    parser.add_argument(
        "--busy", type=int, default=0, metavar="N", help="run N busy loops beside the tests"
    )
    given, words = parser.parse_known_args()
    plan = [] if words else selection(every=given.all, pages=given.pages)
    ensure("dev" if given.all or given.pages or FAST_AND_PAGES in plan else "checks")
    checks = not (given.tests_only or given.pages or words)
    with busy(given.busy), beside(checks_of(every=given.all) if checks else []) as failed:
        # tests that share a worker run in one process: they are in one group
        side_by_side = ["-n", str(SIDE_BY_SIDE), "--dist", "loadgroup"]
        if plan and not CACHE.exists():  # else all processes of the first run would compile all
            pytest("--collect-only", "-q", stdout=subprocess.DEVNULL)
        status = pytest(*side_by_side, *plan, *words)
    return status or (1 if failed else 0)


def pytest(*words: str, stdout: int | None = None) -> int:
    """Run pytest; return its exit status.

    The bytecode is kept in the environment. Without it each process of a run compiles the tests
    anew, which costs more than a minute of CPU, and each program that a test starts the package.
    """
    kept = {name: value for name, value in os.environ.items() if name != NO_BYTECODE}
    env = {**kept, "PYTHONPYCACHEPREFIX": str(CACHE)}
    command = [sys.executable, "-m", "pytest", *words]
    return subprocess.run(command, cwd=REPOSITORY, env=env, stdout=stdout, check=False).returncode


def selection(*, every: bool, pages: bool) -> list[str]:
    """Return what pytest is told where nobody names tests: by what has changed."""
    if every:
        return ["--store", "all"]
    if pages:
        return ["-m", LANE_OF_PAGES]
    files = changed()
    marks = FAST_AND_PAGES if touches(PAGES, files) else FAST
    if touches(STORES, files):
        return ["-m", marks, "--store", "all"]
    return ["-m", f"{marks} and {NOT_POSTGRESQL}", "--store", "valkey"]


def checks_of(*, every: bool) -> list[Sequence[str]]:
    """Return the commands of lint and types, without the interpreter."""
    return [*LINT, ALL_TYPES if every else (*TYPES, "tests/typing")]


@contextlib.contextmanager
def beside(checks: Sequence[Sequence[str]]) -> Iterator[list[str]]:
    """Run checks beside what is done meanwhile; print what fails at the end.

    Gives a list of the names of those that failed, which is complete at the exit.
    """
    failed: list[str] = []
    started = [
        subprocess.Popen(
            [sys.executable, "-m", *check], cwd=REPOSITORY, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for check in checks
    ]  # fmt: skip
    try:
        yield failed
        for check, process in zip(checks, started, strict=True):
            printed, _ = process.communicate()
            if process.returncode:
                failed.append(check[0])
                print(f"== {' '.join(check)} failed\n{printed}", flush=True)
    finally:
        for process in started:
            process.kill()
            process.wait()


@contextlib.contextmanager
def busy(loops: int) -> Iterator[None]:
    """Keep the machine busy meanwhile. loops: processes that do nothing else."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
