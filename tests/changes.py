"""Which files have changed, so that what they cannot break is not run again."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UPSTREAM = "origin/main"
OLD = "1 day ago"  # of a fresh clone, what has come since is new
PAGES = ("docs/", "examples/", "README.md", "CHANGELOG.md", "tests/test_docs.py")
STORES = (
    "celery_redlock/lock/postgres/", "celery_redlock/lock/server/lua/",
    "celery_redlock/lock/fenced_rows.py", "celery_redlock/django/fenced.py",
    "celery_redlock/sqlalchemy.py", "tests/contract/test_fenced",
    "tests/postgres", "tests/contract/test_postgres", "tests/contract/test_confirm_in.py",
    "tests/integration/test_postgres_setup.py", "tests/integration/test_move_to_postgresql.py",
    "tests/contract/test_advisory_locks.py",
)  # fmt: skip


def changed(root: Path = ROOT) -> frozenset[str] | None:
    """Return the files that changed, relative to the repository, uncommitted changes included.

    Compared is `origin/main`; where that is the commit itself, as in a fresh clone, the newest
    commit that is older than a day. None means that it is not known: without git, or without such
    a commit, every file counts as changed.
    """
    base = _base(root)
    if base is None:
        return None
    differing = _git(root, "diff", "--name-only", "--no-renames", base)
    new = _git(root, "ls-files", "--others", "--exclude-standard")
    if differing is None or new is None:
        return None
    return frozenset([*differing.splitlines(), *new.splitlines()])


def touches(paths: tuple[str, ...], files: frozenset[str] | None) -> bool:
    """Return whether a file is one of these, or below one of them that ends with "/"."""
    return files is None or any(file.startswith(paths) for file in files)


def _base(root: Path) -> str | None:
    """Return the commit to compare with."""
    head = _git(root, "rev-parse", "HEAD")
    upstream = _git(root, "rev-parse", "--verify", "--quiet", UPSTREAM)
    if upstream and upstream != head:
        return upstream
    return _git(root, "rev-list", "--max-count=1", f"--before={OLD}", "HEAD") or None


def _git(root: Path, *words: str) -> str | None:
    """Return what git prints, None where it fails or is not installed."""
    command = ["git", *words]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
