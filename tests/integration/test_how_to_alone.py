"""The how-to guides whose example needs a worker of its own: its queues, its slots, its end."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from celery import Celery

from celery_redlock.testing import EmbeddedNode, WorkerProcess
from tests import fork_server
from tests.conftest import eventually
from tests.integration.conftest import ROOT, close_connections
from tests.integration.test_how_to import PATIENT, READERS, is_of_module, page_of
from tests.pages import blocks, on_servers
from tests.snippets import missing_names
from tests.workers import ForkedWorker

pytestmark = [pytest.mark.pages, pytest.mark.slow]

ALONE = ("kubernetes", "limit-a-queue", "lock-a-workflow", "strict-order")


@dataclass
class Shop:
    """The app of one guide, with its worker. sends: the blocks that a reader runs beside it."""

    folder: Path
    worker: WorkerProcess
    app: Celery
    sends: list[str]

    def run(self, code: str) -> str:
        """Run a block as a script; return what it prints."""
        command = [sys.executable, "-c", code]
        ran = fork_server.run(
            command, cwd=self.folder, env=env_of(self.folder), check=True, timeout=120,
        )  # fmt: skip
        return ran.stdout

    def call(self, task: str, *args: Any, **options: Any) -> Any:
        return self.app.send_task(f"shop.{task}", args, **options)

    def hold(self, task: str) -> Path:
        """Hold back the runs of a task, until the result is removed."""
        held = self.folder / f"hold-{task}"
        held.touch()
        return held

    def steps(self, task: str) -> list[str]:
        """Return which runs have begun and ended, in order."""
        return [what for name, what, *_ in self.noted() if name == task]

    def begun(self, task: str) -> int:
        return self.steps(task).count("begin")

    def noted(self) -> list[list[Any]]:
        path = self.folder / "runs"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]


def env_of(folder: Path) -> dict[str, str]:
    return {**os.environ, "TEST_FOLDER": str(folder), "PYTHONPATH": str(ROOT)}


def program_of(name: str) -> str:
    """Return the module of a guide: its blocks with tasks, which are one file `shop.py`."""
    codes = [block.code for block in blocks(page_of(name), "python") if is_of_module(block.code)]
    whole = "\n".join(codes).replace("from shop import app\n", "")
    return f"{whole}\n{READERS}{PATIENT}"


@contextmanager
def shop(
    name: str, folder: Path, without: str = "", more: str = "", **worker: Any
) -> Iterator[Shop]:
    """Give the shop of a guide; the worker holds back no run for longer than this `with`.

    without: code of the guide that is left out. more: code behind the guide's.
    """
    with EmbeddedNode() as server:
        program = program_of(name)
        assert without in program
        program = on_servers(program.replace(without, "") + more, server.url, ["", "", ""])
        (folder / "shop.py").write_text(program)
        codes = [block.code for block in blocks(page_of(name), "python")]
        sends = [code for code in codes if not is_of_module(code)]
        app = Celery(broker=server.url, backend=server.url)
        runs = ForkedWorker("shop", name=name, env=env_of(folder), cwd=folder, **worker)
        try:
            with runs:
                try:
                    yield Shop(folder, runs, app, sends)
                finally:
                    for held in folder.glob("hold-*"):
                        held.unlink()
        finally:
            close_connections(app)
            app.close()


@pytest.mark.parametrize("name", ALONE)
def test_each_example_has_its_own_imports(name: str) -> None:
    codes = [block.code for block in blocks(page_of(name), "python")]
    assert [missing for code in codes if (missing := missing_names(code))] == []


def test_no_step_of_a_workflow_runs_within_another_one(tmp_path: Path) -> None:
    with shop("lock-a-workflow", tmp_path, queues=["celery"]) as here:
        held = here.hold("fulfil")
        sent = [here.call("fulfil", 7) for _ in range(3)]
        eventually(lambda: [one.state for one in sent].count("DEFERRED") == 2)
        eventually(lambda: here.begun("fulfil") == 1)
        held.unlink()
        assert {one.get(timeout=120) for one in sent} == {"order 7 is packed"}
        assert here.steps("fulfil") == ["begin", "end"] * 6  # two steps each


def test_a_workflow_holds_its_lock_until_its_last_part_has_ended(tmp_path: Path) -> None:
    queues = ["celery", "parts"]
    with shop("lock-a-workflow", tmp_path, queues=queues, concurrency=8) as here:
        held = here.hold("index_part")
        first = here.call("index", 7)
        eventually(lambda: here.begun("index_part") == 4)
        second = here.call("index", 7)
        eventually(lambda: second.state == "DEFERRED")
        assert here.call("index", 8).state != "DEFERRED"
        eventually(lambda: here.begun("index_part") == 6)  # of the other shop: 8 slots less 2
        held.unlink()
        assert first.get(timeout=120) == second.get(timeout=120) == "7 is indexed"
        assert here.begun("index_part") == 12


def test_a_chain_runs_on_its_own_workers_while_its_task_holds_the_lock(tmp_path: Path) -> None:
    """A step in the queue of `deliver` would wait for the one slot that `deliver` holds."""
    with shop("lock-a-workflow", tmp_path, queues=["celery"], concurrency=1) as here:
        parts = {"queues": ["parts"], "env": env_of(tmp_path), "cwd": tmp_path}
        with ForkedWorker("shop", name="parts", concurrency=1, **parts):
            held = here.hold("post")
            first, second = (here.call("deliver", 7) for _ in range(2))
            eventually(lambda: here.begun("post") == 1)
            assert here.begun("label") == 1
            held.unlink()
            sent = (first, second)
            assert {one.get(timeout=120) for one in sent} == {"order 7 is delivered"}
            assert (here.begun("label"), here.begun("post")) == (2, 2)
            (send,), (shown,) = here.sends, blocks(page_of("lock-a-workflow"), "text")
            assert here.run(send) == shown.code


def test_a_workflow_whose_app_ignores_results_ends_nevertheless(tmp_path: Path) -> None:
    """`get()` waits in vain for a step without a result, and its task holds the lock meanwhile."""
    ignores, queues = "app.conf.task_ignore_result = True\n", ["celery", "parts"]
    with shop("lock-a-workflow", tmp_path, more=ignores, queues=queues, concurrency=8) as here:
        here.call("deliver", 7)
        here.call("index", 7)
        done = re.compile(r"Task shop\.(deliver|index)\[.+\] succeeded")
        eventually(lambda: sorted(done.findall(here.worker.output())) == ["deliver", "index"])


def test_entries_are_booked_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    with shop("strict-order", tmp_path, queues=["celery"], concurrency=4) as here:
        send, _ = here.sends
        here.run(send)
        numbers = (5, 2, 4)
        again = [here.call("book", "ann", number, 100 * number) for number in numbers]
        said = [one.get(timeout=120) for one in again]
        assert (said.count("booked"), said.count("known")) == (2, 1)
        booked = (tmp_path / "account-ann").read_text().splitlines()
        assert booked == [f"{number}: {number * 100}" for number in range(1, 6)]


def test_a_queue_with_one_slot_keeps_the_order_without_a_retry(tmp_path: Path) -> None:
    (started,) = blocks(page_of("strict-order"), "console")
    words = shlex.split(started.code.removeprefix("$ celery -A shop worker "))
    queues = [f"accounts-{n}" for n in range(4)]
    assert words[words.index("-Q") + 1] == queues[0]
    slots = int(words[words.index("--concurrency") + 1])
    with shop("strict-order", tmp_path, queues=queues, concurrency=slots) as here:
        _, send = here.sends
        assert "in (1, 2, 3)" in send
        here.run(send.replace("in (1, 2, 3)", "in range(1, 21)"))
        done = re.compile(r"Task shop\.book\[.+\] succeeded")
        eventually(lambda: len(done.findall(here.worker.output())) == 20)
        booked = (tmp_path / "account-bob").read_text().splitlines()
        assert booked == [f"{number}: {number * 100}" for number in range(1, 21)]
        assert "Retry in" not in here.worker.output()


def test_two_run_at_once_in_each_queue_whatever_their_arguments(tmp_path: Path) -> None:
    queues = ["partner-acme", "partner-best"]
    with shop("limit-a-queue", tmp_path, queues=queues, concurrency=8) as here:
        held = here.hold("ask")
        here.run(here.sends[0])
        eventually(lambda: here.worker.output().count("] deferred: lock 'partner-") >= 6)
        assert here.begun("ask") == 4
        held.unlink()
        eventually(lambda: here.steps("ask").count("end") == 10)


def test_without_a_key_the_limit_of_a_queue_is_of_each_set_of_arguments(tmp_path: Path) -> None:
    of_queue = {"queues": ["partner-acme"], "concurrency": 8}
    with shop("limit-a-queue", tmp_path, '"key": "{queue}", ', **of_queue) as here:
        held = here.hold("ask")
        sent = [here.call("ask", n, queue="partner-acme") for n in (1, 2, 3, 4, 5, 5, 5)]
        eventually(lambda: here.begun("ask") == 6)
        eventually(lambda: [one.state for one in sent].count("DEFERRED") == 1)
        held.unlink()
        eventually(lambda: here.steps("ask").count("end") == 7)


def test_two_settings_count_every_task_of_a_queue_and_lock_none_elsewhere(tmp_path: Path) -> None:
    page = page_of("limit-a-queue").read_text(encoding="utf-8")
    told = re.findall(r"`(redlock_(?:tasks|key) = [^`]+)`", page)
    assert len(told) == 2
    more = "".join(f"\napp.conf.{setting}" for setting in told)
    worker = {"queues": ["partner-acme", "celery"], "concurrency": 8}
    with shop("limit-a-queue", tmp_path, "base=LockedTask, ", more, **worker) as here:
        held = here.hold("ask")
        limited = [here.call("ask", n, queue="partner-acme") for n in (1, 2, 3)]
        for _ in range(3):
            here.call("ask", 7)
        eventually(lambda: here.begun("ask") == 5)
        eventually(lambda: [one.state for one in limited].count("DEFERRED") == 1)
        held.unlink()
        eventually(lambda: here.steps("ask").count("end") == 6)


def manifests() -> dict[str, Any]:
    """Return what the page tells Kubernetes about the pods of each deployment."""
    (block,) = blocks(page_of("kubernetes"), "yaml")
    found = list(yaml.safe_load_all(block.code))
    for one in found:
        assert one["kind"] == "Deployment"
        labels = one["spec"]["template"]["metadata"]["labels"]
        assert one["spec"]["selector"]["matchLabels"] == labels
    return {one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in found}


def test_a_pod_that_is_ended_finishes_its_body_and_frees_its_lock(tmp_path: Path) -> None:
    pod = manifests()["shop-worker"]
    (limit,) = re.findall(r"task_time_limit = (\d+)", program_of("kubernetes"))
    page = page_of("kubernetes").read_text(encoding="utf-8")
    assert pod["terminationGracePeriodSeconds"] > int(limit)
    assert f"{pod['terminationGracePeriodSeconds']} s is above the longest body" in page
    (container,) = pod["containers"]
    command = [sys.executable, "-m", *container["command"]]
    with shop("kubernetes", tmp_path, command=command) as here:
        (doctor,) = pod["initContainers"]
        checked = [sys.executable, "-m", *doctor["command"]]
        fork_server.run(checked, cwd=tmp_path, env=env_of(tmp_path), check=True, timeout=120)
        held = here.hold("take")
        sent, waits = (here.call("take", "sku-7", pieces) for pieces in (1, 2))
        eventually(lambda: here.begun("take"))
        eventually(lambda: "DEFERRED" in (sent.state, waits.state))
        here.worker.signal(signal.SIGTERM)
        eventually(lambda: "Warm shutdown" in here.worker.output())
        held.unlink()
        assert here.worker.wait(120) == 0
        assert sorted([sent.state, waits.state]) == ["DEFERRED", "SUCCESS"]
        with here.app.connection_for_read() as connection:
            client = connection.default_channel.client
            assert client.llen("celery") == 1  # what waited is with the broker again
            assert client.keys("{redlock}:lock:*") == []


def test_beat_of_the_manifest_has_the_lock(tmp_path: Path) -> None:
    (beat,) = manifests()["shop-beat"]["containers"]
    command = [sys.executable, "-m", *beat["command"], "-l", "INFO"]
    with shop("kubernetes", tmp_path) as here:
        one = ForkedWorker("shop", command=command, env=env_of(tmp_path), cwd=tmp_path)
        try:
            one.launch()
            eventually(lambda: "beat has the lock 'beat:shop'" in one.output())
            assert "in a file of this machine" not in one.output()  # there are two pods
            assert socket.gethostname() in here.worker.output()
        finally:
            one.kill()
            one.log.unlink()
