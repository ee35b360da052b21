"""pytest-celery without Docker: its broker, backend and worker as processes of this machine.

An example to copy: docs/how-to/test.md. With `pytest_plugins = ["celery_processes"]` in a conftest,
`celery_setup` works as before. The broker and the result backend are embedded servers. The worker
runs the files that pytest-celery would put into its container (app, tasks, signals, configuration),
in its own folder.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import celery
import pytest
from pytest_celery import CeleryTestBackend, CeleryTestBroker, RedisTestBackend
from redis import Redis

from celery_redlock.testing import EmbeddedNode, WorkerProcess

__all__ = ["celery_backend", "celery_broker", "default_worker_container"]

KILL = signal.SIGKILL
ENDS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


class ServerContainer:
    """An embedded server with the interface of a pytest-celery container."""

    def __init__(self) -> None:
        self._node = EmbeddedNode().__enter__()
        self.id = uuid.uuid4().hex
        self.name = f"valkey-{self._node.port}"

    @property
    def celeryconfig(self) -> dict[str, Any]:
        """The settings by which Celery finds the server."""
        host, url = "127.0.0.1", self._node.url
        return {
            "url": url,
            "host_url": url,
            "hostname": host,
            "port": self._node.port,
            "vhost": "0",
        }

    @property
    def client(self) -> Redis:
        """A redis-py client of the server."""
        return self._node.client()

    @property
    def status(self) -> str:
        """Docker's word for a process that runs or has ended."""
        return "running" if self._node.pid else "exited"

    def ready(self) -> bool:
        """Return whether the server runs: its start waited for an answer."""
        return bool(self._node.pid)

    def logs(self) -> str:
        """Return what the server has written."""
        return self._node.log()

    def kill(self, signal: str | int = "SIGKILL") -> None:
        """End the server, or send it another signal."""
        number = number_of(signal)
        if number in ENDS:
            self._node.kill()
        else:
            os.kill(self._node.pid, number)

    def restart(self, timeout: float = 60.0) -> None:
        """Restart the server, empty. timeout: seconds for the start."""
        self._node.kill()
        self._node.start(timeout)

    def reload(self) -> None:
        """Do nothing: the attributes are always up to date."""

    def teardown(self) -> None:
        """End it for good, with its files."""
        self._node.__exit__()


class WorkerContainer:
    """A worker process with the interface of a pytest-celery container.

    container_class: pytest-celery's class of worker containers, or a subclass: it gives the
    worker's name, queue and log level. files: the content of the container's volume.
    """

    def __init__(
        self,
        container_class: Any,
        command: Sequence[str],
        env: Mapping[str, str],
        files: Mapping[str, bytes],
        folder: Path,
    ) -> None:
        self.id = uuid.uuid4().hex
        self.name = f"worker-{self.id[:12]}"
        self._container_class, self._folder = container_class, folder
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        path = os.pathsep.join([str(folder), *filter(None, sys.path)])
        self._env = {**env, "PYTHONPATH": path}
        programs = {"celery": [sys.executable, "-m", "celery"], "python": [sys.executable]}
        words = [*programs.get(command[0], command[:1]), *command[1:]]
        # a container's host name is its id, and pytest-celery finds the worker by that
        self._command = [word.replace("%h", self.id[:12]) for word in words]
        self._processes: list[WorkerProcess] = []
        self._launch()

    def _launch(self) -> None:
        process = WorkerProcess(
            "app", name=self.name, env=self._env, cwd=self._folder, command=self._command
        )
        self._processes.append(process)
        process.start()

    @property
    def status(self) -> str:
        """Docker's word for a process that runs or has ended."""
        return "running" if self._processes[-1].runs else "exited"

    def ready(self) -> bool:
        """Return whether the worker runs: its start waited until it was ready."""
        return self._processes[-1].runs

    def logs(self) -> str:
        """Return what the worker has written, before each restart and since."""
        return "".join(process.output() for process in self._processes)

    def kill(self, signal: str | int = "SIGKILL") -> None:
        """Kill the worker with its children, or send its main process another signal."""
        number = number_of(signal)
        if number == KILL:
            self._processes[-1].kill()
        else:
            self._processes[-1].signal(number)

    def restart(self, timeout: float = 60.0) -> None:
        """Start the worker again after a warm shutdown. timeout: seconds before it is killed."""
        self._processes[-1].stop(timeout)
        self._launch()

    def reload(self) -> None:
        """Do nothing: the attributes are always up to date."""

    def teardown(self) -> None:
        """End it for good, with its files."""
        for process in self._processes:
            process.__exit__()

    def exec_run(self, command: str) -> tuple[int, bytes]:
        """Run a command in the worker's folder; return the exit code and the output."""
        done = subprocess.run(
            command, shell=True, cwd=self._folder, env={**os.environ, **self._env}, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return done.returncode, done.stdout

    def version(self) -> str:
        """Return the worker's version of Celery, which is this environment's."""
        return str(celery.__version__)

    def log_level(self) -> str:
        """Return the worker's log level."""
        return str(self._container_class.log_level())

    def worker_name(self) -> str:
        """Return the worker's name, without the host."""
        return str(self._container_class.worker_name())

    def worker_queue(self) -> str:
        """Return the queue that the worker consumes."""
        return str(self._container_class.worker_queue())


def number_of(word: str | int) -> int:
    """Return the number of a signal, given by its name or number."""
    return int(signal.Signals[word]) if isinstance(word, str) else int(word)


@pytest.fixture
def celery_broker() -> Iterator[CeleryTestBroker]:
    """Give an embedded server as the only broker, instead of a container of each kind."""
    broker = CeleryTestBroker(ServerContainer())
    yield broker
    broker.teardown()


@pytest.fixture
def celery_backend() -> Iterator[CeleryTestBackend]:
    """Give an embedded server as the only result backend, instead of a container of each kind."""
    backend = RedisTestBackend(ServerContainer())
    yield backend
    backend.teardown()


@pytest.fixture
def default_worker_container(
    default_worker_container_cls: Any,
    default_worker_command: Sequence[str],
    default_worker_env: Mapping[str, str],
    default_worker_initial_content: Mapping[str, bytes],
    tmp_path: Path,
) -> WorkerContainer:
    """Give a worker process with the command, environment and files of a container."""
    return WorkerContainer(
        default_worker_container_cls,
        default_worker_command,
        default_worker_env,
        default_worker_initial_content,
        tmp_path / "worker",
    )
