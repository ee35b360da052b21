"""Build the site into build/site: `python3 -m docs`; a warning is an error."""

from __future__ import annotations

import subprocess
import sys

from example_worker.bootstrap import REPOSITORY, ensure


def main() -> int:
    """Return the exit status: 0 where the site is built and nothing was wrong."""
    ensure("dev")
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    where = ["-c", "docs", "-d", "build/doctrees", ".", "build/site"]
    failed = subprocess.run([*build, *where], cwd=REPOSITORY, check=False).returncode
    if not failed:
        print("build/site/index.html is the first page")
    return failed


if __name__ == "__main__":
    sys.exit(main())
