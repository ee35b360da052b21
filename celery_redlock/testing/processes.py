"""pytest-celery without Docker: its broker, backend and worker as processes of this machine.

`pytest_plugins = ["celery_redlock.testing.processes"]` in a conftest, and `celery_setup` works as
ever: the broker and the result backend are embedded servers, and the worker runs what pytest-celery
would put into its container (app, tasks, signals, configuration), in a folder of its own.
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
from pytest_celery.vendors.worker.content.app import app as template
from redis import Redis

from celery_redlock.testing.servers import EmbeddedNode, WorkerProcess

__all__ = ["celery_backend", "celery_broker", "default_worker_container"]


# pytest-celery's template of a worker's app is imported with it and finalized, for pytest looks at
# each name of its plugin. Nobody runs it, but shared tasks that a test module declares are bound to
# it, too, and checked.
template.conf.redlock_nodes = ["redis://nobody-locks-by-this-app.invalid"]


class ServerContainer:
    """An embedded server with the face of a pytest-celery container."""

    def __init__(self) -> None:
        self._node = EmbeddedNode().__enter__()
        self.id = uuid.uuid4().hex
        self.name = f"valkey-{self._node.port}"

    @property
    def celeryconfig(self) -> dict[str, Any]:
        """What Celery is to be told of it."""
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
        """A client of it."""
        return self._node.client()

    @property
    def status(self) -> str:
        """Docker's word for whether it runs."""
        return "running" if self._node.pid else "exited"

    def ready(self) -> bool:
        """Tell whether it runs: it answered when it was started."""
        return bool(self._node.pid)

    def logs(self) -> str:
        """Return what it has written."""
        return self._node.log()

    def kill(self, signal: str | int = "SIGKILL") -> None:
        """End it, or send it another signal."""
        number = number_of(signal)
        if number in ENDS:
            self._node.kill()
        else:
            os.kill(self._node.pid, number)

    def restart(self, timeout: float = 60.0) -> None:
        """Start it anew, empty."""
        self._node.kill()
        self._node.start(timeout)

    def reload(self) -> None:
        """Nothing: what is told of it is always of now."""

    def teardown(self) -> None:
        """End it for good."""
        self._node.__exit__()


class WorkerContainer:
    """A worker process with the face of a pytest-celery container.

    about: pytest-celery's class of worker containers, or one made of it: its name, queue and log
    level. content: the files that it would find in its volume.
    """

    def __init__(
        self,
        about: Any,
        command: Sequence[str],
        env: Mapping[str, str],
        content: Mapping[str, bytes],
        folder: Path,
    ) -> None:
        self.id = uuid.uuid4().hex
        self.name = f"worker-{self.id[:12]}"
        self._about, self._folder = about, folder
        for name, text in content.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(text)
        path = os.pathsep.join([str(folder), *filter(None, sys.path)])
        self._env = {**env, "PYTHONPATH": path}
        programs = {"celery": [sys.executable, "-m", "celery"], "python": [sys.executable]}
        words = [*programs.get(command[0], command[:1]), *command[1:]]
        # a container's host has its own name, and pytest-celery knows the worker by it
        self._command = [word.replace("%h", self.id[:12]) for word in words]
        self._lives: list[WorkerProcess] = []
        self._launch()

    def _launch(self) -> None:
        life = WorkerProcess(
            "app", name=self.name, env=self._env, cwd=self._folder, command=self._command
        )
        self._lives.append(life)
        life.start()

    @property
    def status(self) -> str:
        """Docker's word for whether it runs."""
        return "running" if self._lives[-1].runs else "exited"

    def ready(self) -> bool:
        """Tell whether it runs: it said that it was ready when it was started."""
        return self._lives[-1].runs

    def logs(self) -> str:
        """Return what it has written, in all of its lives."""
        return "".join(life.output() for life in self._lives)

    def kill(self, signal: str | int = "SIGKILL") -> None:
        """End it with its children, or send its main process another signal."""
        number = number_of(signal)
        if number == KILL:
            self._lives[-1].kill()
        else:
            self._lives[-1].signal(number)

    def restart(self, timeout: float = 60.0) -> None:
        """End it warmly, by force after so many s, and start it again."""
        self._lives[-1].stop(timeout)
        self._launch()

    def reload(self) -> None:
        """Nothing: what is told of it is always of now."""

    def teardown(self) -> None:
        """End it for good."""
        for life in self._lives:
            life.__exit__()

    def exec_run(self, command: str) -> tuple[int, bytes]:
        """Run a command in its folder; returns the exit code and the output."""
        done = subprocess.run(  # noqa: S602 - a command line of the test's own
            command, shell=True, cwd=self._folder, env={**os.environ, **self._env}, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return done.returncode, done.stdout

    def version(self) -> str:
        """Return the version of Celery that it runs: this environment's."""
        return str(celery.__version__)

    def log_level(self) -> str:
        """Return its log level."""
        return str(self._about.log_level())

    def worker_name(self) -> str:
        """Return its name, without the host's."""
        return str(self._about.worker_name())

    def worker_queue(self) -> str:
        """Return the queue that it consumes."""
        return str(self._about.worker_queue())


KILL = signal.SIGKILL
ENDS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


def number_of(word: str | int) -> int:
    """Return a signal's number, from its name or itself."""
    return int(signal.Signals[word]) if isinstance(word, str) else int(word)


@pytest.fixture
def celery_broker() -> Iterator[CeleryTestBroker]:
    """Give an embedded server as the broker, instead of one container after another."""
    broker = CeleryTestBroker(ServerContainer())
    yield broker
    broker.teardown()


@pytest.fixture
def celery_backend() -> Iterator[CeleryTestBackend]:
    """Give an embedded server as the result backend, instead of one container after another."""
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
    """Give a worker process, made of what pytest-celery's container would be made of."""
    folder = tmp_path / "worker"
    about = default_worker_container_cls
    content = default_worker_initial_content
    return WorkerContainer(about, default_worker_command, default_worker_env, content, folder)
