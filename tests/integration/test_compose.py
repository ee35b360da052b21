"""The compose file is one that Docker takes, where Docker's client is there to ask."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def has_compose() -> bool:
    if shutil.which("docker") is None:
        return False
    asked = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    return asked.returncode == 0


@pytest.mark.skipif(not has_compose(), reason="docker compose is not installed")
def test_docker_takes_the_compose_file() -> None:
    command = ["docker", "compose", "-f", "docker-compose.yml", "config", "--quiet"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
