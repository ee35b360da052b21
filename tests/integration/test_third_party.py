"""Tools of others beside locked tasks do what the pages say of them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from gunicorn.config import Config

from tests.conftest import Nodes, eventually, is_free
from tests.pages import ROOT

pytestmark = [pytest.mark.pages, pytest.mark.slow]
PROGRAMS = "tests.integration.third_party"
MONITORING = (ROOT / "docs" / "operations" / "monitoring.md").read_text(encoding="utf-8")
WORKERS = 2  # of gunicorn
# New Relic looks for the cloud that it runs in by requests over the network
CLOUDS = (
    *("aws", "azure", "azurefunction", "azureappservice"),
    *("docker", "gcp", "kubernetes", "pcf"),
)


def told_by(program: str, nodes: Nodes, *before: str, **env: str) -> list[dict[str, Any]]:
    """Run a program; return what it tells. before: a command that starts it."""
    command = [*(before or (sys.executable,)), "-m", f"{PROGRAMS}.{program}"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(nodes, **env), capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def environment(nodes: Nodes, **more: str) -> dict[str, str]:
    return {**os.environ, "TEST_NODES": ",".join(node.url for node in nodes), **more}


def test_sentry_sees_aborted_tries_and_the_check_ins_that_the_page_names(nodes: Nodes) -> None:
    of_deferred, of_beat, of_the_body = told_by("of_sentry", nodes)
    assert of_deferred == {"deferred": ["aborted"], "had_run": [], "after": "ok"}
    assert of_beat["skipped"] == ["in_progress"]  # which nothing closes
    assert of_beat["ran"] == ["in_progress", "ok"]
    assert of_the_body["skipped"] == of_the_body["while_deferred"] == []
    assert of_the_body["ran"] == of_the_body["deferred"] == ["in_progress", "ok"]


@pytest.mark.parametrize("ignores", [False, True])
def test_new_relic_counts_what_is_deferred_or_skipped_unless_it_is_told_not_to(
    nodes: Nodes, tmp_path: Path, ignores: bool
) -> None:
    [skip, defer] = re.findall(r"`([\w.]+:\w+)`", MONITORING)
    file = tmp_path / "newrelic.ini"
    lines = ["[newrelic]", "app_name = shop", "developer_mode = true", "log_file = stderr"]
    lines += [f"utilization.detect_{cloud} = false" for cloud in CLOUDS]
    lines += [f"error_collector.ignore_classes = {skip} {defer}"] if ignores else []
    file.write_text("\n".join(lines))
    command = (sys.executable, "-m", "newrelic.admin", "run-program", sys.executable)
    [told] = told_by("of_new_relic", nodes, *command, NEW_RELIC_CONFIG_FILE=str(file))
    skipped, deferred = ([], []) if ignores else ([skip], [defer])
    assert told == {"skipped": skipped, "deferred": deferred, "ran": []}


def test_each_schema_of_tenant_schemas_celery_has_locks_of_its_own(nodes: Nodes) -> None:
    [told] = told_by("of_tenants", nodes)
    assert told["duplicates"] == [False, False, True, True]
    assert told["ran"] == [[name, f"{name}:stock:sku-7"] for name in ("acme", "bolt")] * 2
    assert "task 'of.no.tenant': base='LockedTask': " in told["refused"]  # its schema is another's
    assert "LockedTask and TenantTask" in told["refused"]


@contextmanager
def gunicorn(nodes: Nodes) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Give a server that imports the app before it forks its workers, and its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        descriptor, port = listening.fileno(), listening.getsockname()[1]
        serve = [
            *(sys.executable, "-m", "gunicorn", "--preload", f"--workers={WORKERS}"),
            *(f"--bind=fd://{descriptor}", "--no-control-socket", f"{PROGRAMS}.of_gunicorn"),
        ]
        env = environment(nodes)
        with subprocess.Popen(serve, cwd=ROOT, env=env, pass_fds=[descriptor]) as process:
            try:
                yield process, f"http://127.0.0.1:{port}"
            finally:
                process.terminate()
                assert process.wait(120) == 0


def test_workers_of_gunicorn_lock_and_renew_beside_a_lock_of_their_parents_import(
    nodes: Nodes,
) -> None:
    answers: list[dict[str, Any]] = []

    def ask(_: int) -> None:
        with urllib.request.urlopen(address, timeout=240) as reply:
            answers.append(json.load(reply))

    def both_have_answered() -> bool:
        """Ask at once: a worker has one request at a time, and one of two waits for the lock."""
        with ThreadPoolExecutor(WORKERS) as threads:
            list(threads.map(ask, range(WORKERS)))
        return len({one["pid"] for one in answers}) == WORKERS

    with gunicorn(nodes) as (parent, address):
        eventually(both_have_answered)
        parent.send_signal(signal.SIGTTOU)  # one worker less
        eventually(lambda: len(children_of(parent.pid)) == WORKERS - 1)
        assert not is_free(nodes, "import")
    assert not any(one["import_is_free"] or one["is_held"] for one in answers)


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_the_time_limit_of_gunicorn_is_what_the_page_says() -> None:
    page = (ROOT / "docs" / "how-to" / "lock-outside-tasks.md").read_text(encoding="utf-8")
    [seconds] = re.findall(r"Its `--timeout`, (\d+) s by default", page)
    assert Config().timeout == int(seconds)
    assert Config().worker_class_str == "sync"
