"""Build the site into build/site: `python3 -m docs`; a warning is an error.

`python3 -m docs --outputs [PAGE ...]` runs the commands of the pages, and writes what they print.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

from example_worker.bootstrap import REPOSITORY, ensure


def main() -> int:
    """Return the exit status: 0 if the site is built without a warning, or the pages written."""
    if sys.argv[1:2] == ["--outputs"]:
        ensure("example")
        console = importlib.import_module("docs.console")  # it needs the environment
        console.write([Path(page).resolve() for page in sys.argv[2:]], print)
        return 0
    ensure("docs")
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    where = ["-c", "docs", "-d", "build/doctrees", ".", "build/site"]
    failed = subprocess.run([*build, *where], cwd=REPOSITORY, check=False).returncode
    if not failed:
        print("build/site/index.html is the first page")
    return failed


if __name__ == "__main__":
    sys.exit(main())
