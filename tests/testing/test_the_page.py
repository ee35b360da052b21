"""The examples of docs/how-to/test.md, as they stand there, in a pytest of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT, blocks
from tests.snippets import missing_names

PAGE = ROOT / "docs" / "how-to" / "test.md"


APART = 3  # blocks at the end of the page, which are an example of their own: pytest-celery


def write_files(codes: list[str], folder: Path) -> dict[str, str]:
    """Write blocks into the files that their first lines name; returns the text of each file.

    A file's blocks that a reader copies one by one stand in it one after the other.
    """
    files: dict[str, str] = {}
    for code in codes:
        first, rest = code.split("\n", 1)
        files[first.removeprefix("# ")] = files.get(first.removeprefix("# "), "") + rest + "\n\n"
    for name, text in files.items():
        (folder / name).write_text(text)
    return files


def examples() -> list[str]:
    return [block.code for block in blocks(PAGE, "python")]


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


@pytest.mark.pages
def test_the_examples_run(tmp_path: Path) -> None:
    files = write_files(examples()[:-APART], tmp_path)
    said = run_pytest(tmp_path, "-p", "no:celery", "-p", "no:docker_tools")
    assert said.startswith(f"{files['test_shop.py'].count('def test_')} passed")


@pytest.mark.pages
def test_the_fixtures_of_celery_are_there_and_lock_on_the_fake_nodes(tmp_path: Path) -> None:
    configures = next(code for code in examples() if "def celery_config" in code)
    test = (
        "# test_app.py\ndef test_it(celery_app, redlock_nodes):\n"
        "    urls = [node.url for node in redlock_nodes]\n"
        "    assert celery_app.conf.redlock_nodes == urls"
    )
    write_files([configures, test], tmp_path)
    assert run_pytest(tmp_path, "-p", "no:celery", "-p", "no:docker_tools").startswith("1 passed")


@pytest.mark.pages
def test_the_result_on_the_page_is_that_of_the_examples_before_it(tmp_path: Path) -> None:
    console = next(block for block in blocks(PAGE, "console") if "pytest -q" in block.code)
    codes = [block.code for block in blocks(PAGE, "python") if block.line < console.line]
    write_files(codes, tmp_path)
    said = run_pytest(tmp_path, "-p", "no:celery", "-p", "no:docker_tools")
    assert said.partition(" in ")[0] == console.code.splitlines()[-1].partition(" in ")[0]


def test_each_example_has_its_own_imports() -> None:
    assert [missing for code in examples() if (missing := missing_names(code))] == []


@pytest.mark.pages
@pytest.mark.slow
def test_the_examples_for_pytest_celery_run(tmp_path: Path) -> None:
    write_files(examples()[-APART:], tmp_path)
    shutil.copy(Path(__file__).with_name("celery_processes.py"), tmp_path)
    assert run_pytest(tmp_path).startswith("1 passed")
