"""The compose file: one image for all that run the shop; Docker takes it if it is there to ask."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "docker-compose.yml"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE.read_text())["services"]
OF_THE_SHOP = {"worker-prefork", "worker-threads", "flower", "shop"}


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


def test_one_service_builds_the_image_of_all_that_run_the_shop() -> None:
    (builder,) = [name for name, service in SERVICES.items() if "build" in service]
    built = SERVICES[builder]["image"]
    assert {name for name, one in SERVICES.items() if one["image"] == built} == {
        builder, *OF_THE_SHOP
    }  # fmt: skip
    for name in OF_THE_SHOP:
        service = SERVICES[name]
        assert service["pull_policy"] == "never"
        assert service["depends_on"][builder] == {"condition": "service_completed_successfully"}
        assert "pip" not in str(service["command"])


def test_a_service_waits_only_for_what_tells_that_it_is_ready() -> None:
    waits = [
        (name, *one) for name in SERVICES for one in SERVICES[name].get("depends_on", {}).items()
    ]
    assert len(waits) > 20
    for name, awaited, how in waits:
        if how["condition"] == "service_healthy":
            assert "healthcheck" in SERVICES[awaited], (name, awaited)


def test_the_image_has_the_extras_that_there_are_and_the_files_that_are_copied() -> None:
    build = SERVICES["image"]["build"]
    text = (ROOT / build["context"] / build["dockerfile"]).read_text()
    found = re.search(r'pip install .*"\.\[(.+)\]"', text)
    assert found is not None
    assert {*found[1].split(",")} <= {*metadata("celery_redlock").get_all("Provides-Extra", [])}
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not {*ignored} & {"celery_redlock", "example_worker", "pyproject.toml", "README.md"}
