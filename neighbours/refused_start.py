"""Starts a worker whose app should be refused as it imports the package; imports none of it itself.

`python -m neighbours.refused_start` writes the error to `seen.json`, as the story does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict

from neighbours.row import Seen
from neighbours.story_setup import read_setup, run_folder


def run() -> None:
    setup = read_setup()
    command = [sys.executable, "-m", "celery", "-A", setup.app, "worker", "-P", "solo"]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=setup.patience, check=False
    )
    print(ended.stdout, ended.stderr, flush=True)
    lines = [line.strip() for line in ended.stderr.splitlines() if "Error" in line]
    seen = Seen(refused=lines[-1] if ended.returncode and lines else "")
    (run_folder() / "seen.json").write_text(json.dumps(asdict(seen)))


if __name__ == "__main__":
    run()
