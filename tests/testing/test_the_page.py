"""The examples of docs/how-to/test.md, word by word, in a pytest of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.pages import ROOT, blocks

PAGE = ROOT / "docs" / "how-to" / "test.md"


def examples() -> tuple[str, list[str]]:
    """Return a test file, and for pytest-celery the tasks, the conftest and the test file."""
    codes = [block.code for block in blocks(PAGE, "python")]
    return "\n\n".join(codes[:-3]), codes[-3:]


def run_pytest(folder: Path, *words: str) -> str:
    """Run the tests of a folder as a user does; returns what pytest says of those that passed."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words],
        cwd=folder, capture_output=True, text=True, check=False, env=clean,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout.splitlines()[-1]


def test_the_examples_run(tmp_path: Path) -> None:
    tests, _ = examples()
    (tmp_path / "test_page.py").write_text(tests)
    said = run_pytest(tmp_path, "-p", "no:celery", "-p", "no:docker_tools")
    assert said.startswith(f"{tests.count('def test_')} passed")


@pytest.mark.slow
def test_the_examples_for_pytest_celery_run(tmp_path: Path) -> None:
    _, files = examples()
    for name, code in zip(("shop_tasks", "conftest", "test_page"), files, strict=True):
        (tmp_path / f"{name}.py").write_text(code)
    assert run_pytest(tmp_path).startswith("1 passed")


@pytest.mark.slow
def test_a_users_file_needs_no_server(tmp_path: Path) -> None:
    """Its time is printed, not asserted: it says more about the machine."""
    file = Path(__file__).with_name("test_as_a_user.py")
    (tmp_path / file.name).write_text(file.read_text())
    cpu, wall = os.times(), time.monotonic()
    said = run_pytest(tmp_path, "-p", "no:celery", "-p", "no:docker_tools")
    after = os.times()
    spent = after.children_user + after.children_system - cpu.children_user - cpu.children_system
    wall = time.monotonic() - wall
    print(
        f"{said}; with the start of Python {wall:.1f} s, of which it had a processor {spent:.1f} s"
    )
    assert "passed" in said
