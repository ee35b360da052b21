"""In a subinterpreter the package cannot be imported, as the page of web servers says."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.pages import ROOT

# what `concurrent.interpreters` of Python 3.14 is made of
pytestmark = pytest.mark.skipif(
    find_spec("_interpreters") is None, reason="Python has subinterpreters from 3.13 on"
)
# in a process of its own, as its end ends the subinterpreter
PROGRAM = """
import _interpreters
within = _interpreters.create()
failed = _interpreters.exec(within, "import {module}")
print("imported" if failed is None else f"{{failed.type.__name__}}: {{failed.msg}}")
_interpreters.destroy(within)
"""


def imported(module: str) -> str:
    command = [sys.executable, "-c", PROGRAM.format(module=module)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=True
    ).stdout


@pytest.mark.parametrize("module", ["celery_redlock", "celery_redlock.testing"])
def test_the_parser_of_replies_refuses_it(module: str) -> None:
    said = imported(module)
    assert said.startswith("ImportError: "), said
    assert "hiredis" in said, said


def test_celery_and_its_broker_are_imported_there() -> None:
    assert imported("celery, kombu, redis").strip() == "imported"
