"""Check that this commit can be released: `make release-check`.

It does every step of *A release* in CONTRIBUTING.md that needs no account: the sdist, the wheel and
the SBOM are in `build/release` then. At its end it names the steps that need an account. `--quick`
leaves out `.ci/run` and `make night`, which take hours.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from example_worker.bootstrap import REPOSITORY, ensure

OLDEST_FIGURE = 200  # commits to the package after which a figure is measured again
PACKAGE = ("celery_redlock", "celery_redlock_entry.py", "pytest_celery_redlock.py")
OUTPUT = REPOSITORY / "build" / "release"
DIST = OUTPUT / "dist"
SBOM = OUTPUT / "celery_redlock.cdx.json"
HOURS = ((".ci/run",), ("make", "night"))
PAGES_WITH_A_VERSION = ("docs/getting-started/install.md", "SUPPORT.md")
NEEDS_AN_ACCOUNT = """\
Left are the steps that need an account (CONTRIBUTING.md, *A release*):
- before the first upload: the address in `[project.urls]`, private reports, and a trusted publisher
  on PyPI for the workflow `release.yml` and its environment `pypi`
- the signed tag v{version}, and its push: the workflow builds, attests and uploads
- a look at the page on PyPI, and a release with the changelog's section"""


class CommandError(Exception):
    """A command of a step failed; its text is what it printed last."""


@dataclass(frozen=True)
class Figure:
    """What a benchmark has measured. commit: that of its figures.

    benchmark: its name, and its options. on_page: whether it writes them into *What it costs*.
    """

    benchmark: str
    commit: str
    on_page: bool = False

    @property
    def renewal(self) -> str:
        """What measures it again."""
        if self.on_page:
            return f"run `python -m benchmarks.{self.benchmark} --page`"
        return (
            f"run `python -m benchmarks.{self.benchmark}`, and write its figures and commit into "
            "benchmarks/README.md"
        )


def problems_of_tree(status: str) -> Iterator[str]:
    """Give what is wrong with a work tree. status: of `git status --porcelain`."""
    if files := [line[3:] for line in status.splitlines()]:
        yield f"not committed: {', '.join(files)}; commit them, or run in a clean checkout"


def problems_of_changelog(text: str, version: str) -> Iterator[str]:
    """Give what is wrong with the changelog: an empty *Unreleased*, then this version."""
    found = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)[1:]
    sections = list(zip(found[::2], found[1::2], strict=True))
    if not sections or sections[0][0] != "[Unreleased]":
        yield "CHANGELOG.md begins with no `## [Unreleased]`: put an empty one above the version"
        return
    if sections[0][1].strip():
        yield (
            f"CHANGELOG.md has text below *Unreleased*: make it `## [{version}] - YYYY-MM-DD`, "
            "with an empty `## [Unreleased]` above"
        )
    elif len(sections) < 2 or not re.fullmatch(
        rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", sections[1][0]
    ):
        yield f"CHANGELOG.md has no `## [{version}] - YYYY-MM-DD` below *Unreleased*"


def problems_of_pages(texts: Mapping[str, str], version: str) -> Iterator[str]:
    """Give each page that names another version of the package. texts: by name of the page."""
    for name, text in texts.items():
        others = set(re.findall(r"\bcelery_redlock[- ](\d+\.\d+\.\d+)", text)) - {version}
        for other in sorted(others):
            yield f"{name} names version {other}, and the package is {version}: change the page"


def problems_of_figures(ages: Mapping[Figure, int | None]) -> Iterator[str]:
    """Give each figure that is too old. ages: commits to the package since; None if not known."""
    for figure, age in ages.items():
        if age is None:
            yield (
                f"{figure.benchmark}: {figure.commit} is no commit before this one; name another, "
                "or complete the clone by `git fetch --unshallow`"
            )
        elif age > OLDEST_FIGURE:
            yield (
                f"{figure.benchmark}: its figures are {age} commits to the package old, at most "
                f"{OLDEST_FIGURE} are allowed; {figure.renewal}"
            )


def problems_of_tested(installed: Mapping[str, str], tested: Mapping[str, str]) -> Iterator[str]:
    """Give each package of which a release that pip installs is newer than the newest tested."""
    for name, newest in tested.items():
        minor = ".".join(installed[name].split(".")[:2])
        if minor != newest:
            yield (
                f"pip installs {name} {installed[name]}, and TESTED_VERSIONS of "
                f"celery_redlock/compatibility.py ends with {newest}: run the tests with it"
            )


def problems_of_sbom(document: Mapping[str, Any], version: str) -> Iterator[str]:
    """Give what an SBOM lacks: the package with its version, and what it needs with theirs."""
    root = document.get("metadata", {}).get("component", {})
    if (root.get("name"), root.get("version")) != ("celery_redlock", version):
        yield f"the SBOM is of {root.get('name')} {root.get('version')}, not of {version}"
    versions = {one["name"]: one.get("version") for one in document.get("components", ())}
    if missing := [name for name in ("celery", "kombu", "redis") if not versions.get(name)]:
        yield f"the SBOM lacks {', '.join(missing)}: is the wheel installed in what it describes?"


def figures_of(page: str) -> list[Figure]:
    """Return the rows of the table of benchmarks/README.md."""
    rows = re.findall(r"^\| \[?`(\w+)`\]?\S* \|.*\| `([0-9a-f]+)` \|$", page, re.MULTILINE)
    return [Figure(*row) for row in rows]


def figures_of_costs(text: str) -> list[Figure]:
    """Return what benchmarks/costs.json has, from which the page *What it costs* is written."""
    stored = json.loads(text).items()
    return [Figure(command, entry["commit"], on_page=True) for command, entry in stored]


def with_version(pyproject: str, version: str) -> str:
    """Return a pyproject.toml that says its version itself, as the SBOM's root has to."""
    return re.sub(r"^dynamic = .*$", f'version = "{version}"', pyproject, flags=re.MULTILINE)


def run(*command: str | Path, cwd: Path = REPOSITORY, env: Mapping[str, str] | None = None) -> str:
    """Return what a command prints. Raises CommandError."""
    words = [str(word) for word in command]
    where = {**os.environ, **(env or {})}
    done = subprocess.run(words, cwd=cwd, env=where, capture_output=True, text=True, check=False)
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise CommandError(f"{' '.join(words)} ended with status {done.returncode}:\n{last}")
    return done.stdout


def age_of(figure: Figure) -> int | None:
    """Return the number of commits to the package since a figure's, None if it is not known."""
    try:
        run("git", "merge-base", "--is-ancestor", figure.commit, "HEAD")
        counted = run("git", "rev-list", "--count", f"{figure.commit}..HEAD", "--", *PACKAGE)
    except CommandError:
        return None
    return int(counted)


def read(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


class Check:
    """The steps, in their order; each gives its problems. version: of the package."""

    def __init__(self) -> None:
        (self.version,) = re.findall(
            r'^__version__ = "(.+)"$', read("celery_redlock/__init__.py"), re.MULTILINE
        )
        self.home = OUTPUT / "venv"

    def steps(self, *, quick: bool) -> dict[str, Callable[[], Iterator[str]]]:
        """Return the steps by name."""
        steps: dict[str, Callable[[], Iterator[str]]] = {
            "clean tree": lambda: problems_of_tree(run("git", "status", "--porcelain")),
            "changelog": lambda: problems_of_changelog(read("CHANGELOG.md"), self.version),
            "versions": self.versions,
            "figures": self.figures,
            "sdist and wheel": self.build,
            "empty environment": self.install,
            "SBOM": self.sbom,
        }
        for command in () if quick else HOURS:
            steps[" ".join(command)] = lambda command=command: self.hours(command)  # type: ignore[misc]
        return steps

    def versions(self) -> Iterator[str]:
        """Give each page that names another version."""
        texts = {name: read(name) for name in PAGES_WITH_A_VERSION}
        return problems_of_pages(texts, self.version)

    def figures(self) -> Iterator[str]:
        """Give each figure that is too old."""
        figures = figures_of(read("benchmarks/README.md"))
        figures += figures_of_costs(read("benchmarks/costs.json"))
        return problems_of_figures({one: age_of(one) for one in figures})

    def build(self) -> Iterator[str]:
        """Build what is uploaded, and check it as the index does."""
        shutil.rmtree(OUTPUT, ignore_errors=True)
        run(sys.executable, "-m", "build", "--outdir", DIST)
        files = sorted(DIST.iterdir())
        run(sys.executable, "-m", "twine", "check", "--strict", *files)
        wanted = {f"celery_redlock-{self.version}{end}" for end in (".tar.gz", "-py3-none-any.whl")}
        if {file.name for file in files} != wanted:
            yield f"built were {', '.join(file.name for file in files)}, not {self.version}"

    def install(self) -> Iterator[str]:
        """Install the wheel into an empty environment, and run what needs no server."""
        venv.create(self.home, clear=True)
        python = self.home / "bin" / "python"
        (wheel,) = DIST.glob("*.whl")
        run(sys.executable, "-m", "pip", "--python", python, "install", "-q", wheel)
        run(self.home / "bin" / "celery", "redlock", "explain", cwd=OUTPUT)
        look = (
            "import json; from importlib.metadata import version\n"
            "from celery_redlock.compatibility import TESTED_VERSIONS as tested\n"
            "print(json.dumps([{name: version(name) for name in tested}, tested]))"
        )
        installed, tested = json.loads(run(python, "-c", look, cwd=OUTPUT))
        return problems_of_tested(installed, {name: newest for name, (_, newest) in tested.items()})

    def sbom(self) -> Iterator[str]:
        """Make the SBOM of that environment; it has the time of the commit."""
        project = OUTPUT / "pyproject.toml"
        project.write_text(with_version(read("pyproject.toml"), self.version), encoding="utf-8")
        tool = (sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible")
        names = ("--pyproject", project, "--mc-type", "library", "-o", SBOM)
        when = {"SOURCE_DATE_EPOCH": run("git", "log", "-1", "--format=%ct").strip()}
        run(*tool, *names, self.home / "bin" / "python", env=when)
        return problems_of_sbom(json.loads(SBOM.read_text(encoding="utf-8")), self.version)

    def hours(self, command: Sequence[str]) -> Iterator[str]:
        """Run a command of hours, its output on our terminal."""
        done = subprocess.run(command, cwd=REPOSITORY, check=False)
        if done.returncode:
            yield f"{' '.join(command)} ended with status {done.returncode}: its output is above"


def main() -> int:
    """Return the exit status: 0 if every step found nothing."""
    parser = argparse.ArgumentParser(
        prog="python3 -m tests.release_check", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="without .ci/run and make night")
    quick = parser.parse_args().quick
    ensure("release")
    check = Check()
    failed = [name for name, step in check.steps(quick=quick).items() if not passes(name, step)]
    if quick:
        print("left out by --quick: " + ", ".join(" ".join(command) for command in HOURS))
    if failed:
        print(f"{check.version} cannot be released: {', '.join(failed)}")
        return 1
    print(NEEDS_AN_ACCOUNT.format(version=check.version))
    return 0


def passes(name: str, step: Callable[[], Iterator[str]]) -> bool:
    """Do a step; print its problems. Returns whether it has none."""
    try:
        problems = list(step())
    except (CommandError, OSError, ValueError) as error:
        problems = [f"{error}"]
    for problem in problems:
        print(f"FAILED {name}: {problem}", flush=True)
    if not problems:
        print(f"ok     {name}", flush=True)
    return not problems


if __name__ == "__main__":
    sys.exit(main())
