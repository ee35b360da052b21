"""Make the pictures of Flower in docs/pictures: `python3 -m tests.integration.flower`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from example_worker.bootstrap import REPOSITORY, ensure

PICTURES = REPOSITORY / "docs" / "pictures"


def main() -> int:
    """Return the exit status: 0 where the test that makes them has run, and is green."""
    ensure("dev")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "tests/integration/test_flower.py"]
        env = {**os.environ, "CELERY_REDLOCK_PICTURES": folder}
        failed = subprocess.run(command, cwd=REPOSITORY, env=env, check=False).returncode
        made = sorted(Path(folder).glob("*.png"))
        if failed or not made:  # without a browser the test is skipped, and says so
            return failed or 1
        for picture in made:
            shutil.copy(picture, PICTURES)
            print(PICTURES / picture.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
