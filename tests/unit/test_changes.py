"""What counts as changed decides which tests the default run leaves out."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.__main__ import FAST, FAST_AND_PAGES, NOT_POSTGRESQL, selection
from tests.changes import STORES, changed, touches

LONG_AGO, NOW = "2020-01-01T00:00:00", ""  # dates of commits; "": the machine's
IDENTITY = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")


class Clone:
    """A repository with one commit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.git("init", "-q", "-b", "main")

    def git(self, *words: str, date: str = NOW) -> None:
        dated = {"GIT_COMMITTER_DATE": date, "GIT_AUTHOR_DATE": date} if date else {}
        subprocess.run(
            ["git", *IDENTITY, *words], cwd=self.folder, check=True, capture_output=True,
            env={"PATH": os.environ["PATH"], "HOME": str(self.folder), **dated},
        )  # fmt: skip

    def commit(self, file: str, date: str = NOW) -> None:
        (self.folder / file).write_text(file)
        self.git("add", "-A")
        self.git("commit", "-q", "-m", file, date=date)


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_what_differs_from_the_upstream_changed_committed_or_not(clone: Clone) -> None:
    clone.commit("old", LONG_AGO)
    clone.git("update-ref", "refs/remotes/origin/main", "HEAD")
    clone.commit("committed")
    (clone.folder / "old").write_text("edited")
    (clone.folder / "untracked").touch()
    assert changed(clone.folder) == {"committed", "old", "untracked"}


def test_in_a_fresh_clone_what_is_younger_than_a_day_changed(clone: Clone) -> None:
    clone.commit("old", LONG_AGO)
    clone.commit("new")
    clone.git("update-ref", "refs/remotes/origin/main", "HEAD")
    assert changed(clone.folder) == {"new"}
    clone.git("update-ref", "-d", "refs/remotes/origin/main")  # of a clone without that branch, too
    assert changed(clone.folder) == {"new"}


def test_without_git_or_an_older_commit_it_is_unknown(clone: Clone, tmp_path: Path) -> None:
    clone.commit("new")
    assert changed(clone.folder) is None
    bare = tmp_path / "no repository"
    bare.mkdir()
    (tmp_path / ".git").rename(tmp_path / "moved")
    assert changed(bare) is None


def test_nothing_changed_is_not_unknown(clone: Clone) -> None:
    clone.commit("old", LONG_AGO)
    assert changed(clone.folder) == frozenset()


@pytest.mark.parametrize(
    ("files", "marks", "store"),
    [
        (frozenset(), FAST, "valkey"),
        (frozenset({"celery_redlock/errors.py"}), FAST, "valkey"),
        (frozenset({"docs/index.md"}), FAST_AND_PAGES, "valkey"),
        (frozenset({"README.md"}), FAST_AND_PAGES, "valkey"),
        (frozenset({"celery_redlock/lock/server/lua/grant.lua"}), FAST, "all"),
        (frozenset({"celery_redlock/lock/postgres/schema.sql"}), FAST, "all"),
        (frozenset({"tests/contract/test_postgres_scripts.py"}), FAST, "all"),
        (None, FAST_AND_PAGES, "all"),
    ],
)
def test_a_default_run_leaves_out_what_a_change_cannot_break(
    monkeypatch: pytest.MonkeyPatch, files: frozenset[str] | None, marks: str, store: str
) -> None:
    monkeypatch.setattr("tests.__main__.changed", lambda: files)
    if store == "valkey":
        marks = f"{marks} and {NOT_POSTGRESQL}"
    assert selection(every=False, pages=False) == ["-m", marks, "--store", store]


def test_what_chooses_a_store_is_there() -> None:
    root = Path(__file__).resolve().parents[2]
    assert all((root / path).exists() or list(root.glob(f"{path}*")) for path in STORES)
    assert not touches(STORES, frozenset({"celery_redlock/lock/postgres"}))
