"""The figures of the page *What it costs* are those of the runs that are stored."""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from benchmarks import comparison, costs
from benchmarks.costs import COMMANDS, PAGE, Entry, Section, read, tables
from benchmarks.figures import filled
from celery_redlock.tasks.recovery.observer import DETECTION_TIME

WRITE = "write them again: python -m benchmarks.costs"


@pytest.fixture
def stored() -> dict[str, Any]:
    return deepcopy(dict(read()))


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The store and the page, as copies that a test may write."""
    for name in ("STORED", "PAGE"):
        copied = tmp_path / getattr(costs, name).name
        copied.write_text(getattr(costs, name).read_text(encoding="utf-8"), encoding="utf-8")
        monkeypatch.setattr(costs, name, copied)
    return tmp_path


def options(*, quick: bool = False, page: bool = True) -> argparse.Namespace:
    return argparse.Namespace(quick=quick, page=page)


def doubled(figures: Any) -> Any:
    if isinstance(figures, dict):
        return {name: doubled(one) for name, one in figures.items()}
    if isinstance(figures, list):
        return [doubled(one) for one in figures]
    return figures and 2 * figures


def page_of(stored: dict[str, Any]) -> str:
    return filled(PAGE.read_text(encoding="utf-8"), PAGE.name, tables(stored))


def test_the_page_has_the_figures_of_the_stored_runs(stored: dict[str, Any]) -> None:
    assert page_of(stored) == PAGE.read_text(encoding="utf-8"), WRITE


def test_every_row_of_the_page_was_measured(stored: dict[str, Any]) -> None:
    assert list(stored) == list(COMMANDS), "run each of the others with --page"


@pytest.mark.parametrize("command", [*read()])
def test_another_figure_makes_another_page(stored: dict[str, Any], command: str) -> None:
    stored[command]["figures"] = doubled(stored[command]["figures"])
    assert page_of(stored) != PAGE.read_text(encoding="utf-8")


def test_a_figure_that_misses_its_aim_is_in_italics() -> None:
    section = Section({}, {"p99": 3.0})
    assert section.cell(3.0, "p99") == "3.00"
    assert section.cell(3.01, "p99") == "*3.01*"
    assert section.cell(3.01) == "3.01"
    assert section.cell(None, "p99") == "-"
    assert section.head("p99 s", "p99") == "p99 s (aim 3)"


def test_a_run_with_page_writes_its_figures_commit_and_versions(elsewhere: Path) -> None:
    figures = {"first": {"p50": 0.111, "max": 0.222}, "last": {"p50": 0.333, "max": 1.444}}
    Entry("recovery", "0123abcd").write(figures, {"max": 1.3})
    assert read()["recovery"]["figures"] == figures
    assert {"Python", "celery", "redis"} <= set(read()["recovery"]["versions"])
    page = costs.PAGE.read_text(encoding="utf-8")
    assert "| last | 0.33 | *1.44* |" in page
    assert "\n- `0123abcd`: `recovery`\n" in page
    assert f"\n- with Python {platform.python_version()}, celery" in page


def test_only_a_whole_run_of_a_known_command_is_written() -> None:
    assert Entry.of(options(page=False), "no such run") is None
    with pytest.raises(SystemExit, match="leave out --quick"):
        Entry.of(options(quick=True), "rate")
    with pytest.raises(SystemExit, match="no place for 'handoff --workers 7'"):
        Entry.of(options(), "handoff --workers 7")


def test_figures_of_a_package_that_is_not_committed_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(
            ("git", *identity, *words), cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    package = tmp_path / costs.PACKAGE
    package.mkdir()
    (package / "lock.py").write_text("")
    (tmp_path / "page.md").write_text("")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    monkeypatch.setattr(costs, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text("changed")
    entry = Entry.of(options(), "rate")
    assert entry is not None
    assert git("rev-parse", "HEAD").startswith(entry.commit)
    (package / "lock.py").write_text("changed")
    with pytest.raises(SystemExit, match=r"commit first:\nM celery_redlock/lock\.py"):
        Entry.of(options(), "rate")


def test_what_the_page_says_of_a_run_is_what_the_benchmark_does() -> None:
    page = PAGE.read_text(encoding="utf-8")
    # not imported: its tasks would be shared with the apps of other tests
    relay = (costs.ROOT / "benchmarks" / "relay.py").read_text(encoding="utf-8")
    (body,) = re.findall(r"^SHORT_BODY_SECONDS = (\S+)", relay, re.MULTILINE)
    assert f"bodies of {float(body) * 1000:g} ms" in page
    assert f"at most {1 / float(body):g} tasks a second" in page
    assert f"of {1 / float(body):g} tasks/s" in page
    assert f"{DETECTION_TIME:.1f} s" in page
    compared = json.loads(comparison.STORED.read_text(encoding="utf-8"))["figures"]
    assert compared["celery_redlock, 3 nodes"]["run"] < 2, "less than twice as long"


def commands_of_the_page() -> Iterator[str]:
    yield from re.findall(r"`python -m (benchmarks\.\w+)", PAGE.read_text(encoding="utf-8"))


def test_every_command_of_the_page_is_there() -> None:
    for name in commands_of_the_page():
        assert (costs.ROOT / f"{name.replace('.', '/')}.py").is_file()
