"""Start Python programs by a fork of a process that has imported Celery and the package once.

`run` and `Process` take command lines as `subprocess` does: `[sys.executable, "-m", ...]`, `-c`, or
a script. Each is a process of its own, with its own exit code and signals. It only spares the
imports, which cost ten times as much as the rest of a short program. A program that patches the
standard library (gevent), looks at its imports, or needs a terminal is started by `subprocess`.

A client of the server has one connection for each program. It sends the command line with the
descriptors for stdin, stdout and stderr, and hears the pid, then the exit code. The server collects
the ended program only when its client has closed the connection, so no pid is used again before.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any, cast

ROOT = Path(__file__).resolve().parents[1]
# what a worker and the commands import, in their main process and in a child
CELERY = (
    "celery.apps.worker", "celery.apps.beat", "celery.backends.redis",
    "celery.concurrency.prefork", "celery.concurrency.solo", "celery.concurrency.thread",
    "celery.contrib.testing.worker", "celery.events.receiver", "celery.fixups.django",
    "celery.loaders.app", "celery.worker.autoscale", "celery.worker.components",
    "celery.worker.consumer", "celery.worker.control", "celery.worker.strategy",
    "concurrent.futures.thread", "kombu.transport.memory", "kombu.transport.pyamqp",
    "kombu.transport.redis", "redis.sentinel",
)  # fmt: skip
PACKAGE = (
    "celery.bin.celery", "celery_redlock.operate.cli.commands", "celery_redlock.operate.cli.hold",
    "celery_redlock.operate.cli.top", "celery_redlock.operate.start_report",
    "celery_redlock.testing", "celery_redlock_entry",
)  # fmt: skip
PATCHING = ("gevent", "gevent.monkey", "eventlet")  # these patch before they import anything
READ_AT_START = ("CELERY_CUSTOM_WORKER_POOL", "LD_PRELOAD")  # by the linker or an import
LENGTH = 8  # bytes that say how long a request is


class Process:
    """A program that was forked, as `subprocess.Popen` gives one.

    command, cwd, env: as there; env None means that of this process. stdin, stdout, stderr: a
    descriptor, a file, or `subprocess.DEVNULL`, `PIPE`, `STDOUT`; None means those of this process.
    group: whether it is the leader of a process group of its own. text: whether pipes give str.
    package: whether the package is imported already, or Celery alone.
    """

    def __init__(
        self, command: Sequence[str], *, cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None, stdin: Any = None, stdout: Any = None,
        stderr: Any = None, text: bool = False, group: bool = False, package: bool = True,
    ) -> None:  # fmt: skip
        assert can_fork(command, env), f"not a Python program, or one that patches: {command}"
        self.args, self.returncode = list(command), cast("int | None", None)
        self.stdin: Any = None
        self.stdout: Any = None
        self.stderr: Any = None
        pipes: list[int] = []  # the program's ends
        given = {0: stdin, 1: stdout, 2: stderr}
        ends = {number: self._end(number, what, pipes, text) for number, what in given.items()}
        if stderr == subprocess.STDOUT:
            ends[2] = ends[1]
        request = {
            "command": [str(word) for word in command[1:]], "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env), "group": group,
        }  # fmt: skip
        self._connection = server(os.getpid(), package).connect()
        _send(self._connection, request, [ends[number] for number in (0, 1, 2)])
        for descriptor in pipes:
            os.close(descriptor)
        self._replies = self._connection.makefile("rb")
        self.pid = int(self._replies.readline())

    def _end(self, number: int, what: Any, pipes: list[int], text: bool) -> int:
        """Return the descriptor that the program gets as stdin, stdout or stderr."""
        if what is None or what == subprocess.STDOUT:
            return number
        if what == subprocess.DEVNULL:
            pipes.append(os.open(os.devnull, os.O_RDWR))
            return pipes[-1]
        if what != subprocess.PIPE:
            return int(what if isinstance(what, int) else what.fileno())
        reading, writing = os.pipe()
        theirs, ours = (reading, writing) if number == 0 else (writing, reading)
        pipes.append(theirs)
        mode = ("w" if number == 0 else "r") + ("" if text else "b")
        made: IO[Any] = os.fdopen(ours, mode, *(() if text else (0,)))
        setattr(self, ("stdin", "stdout", "stderr")[number], made)
        return theirs

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once it has ended; raises TimeoutExpired after so many seconds."""
        if self.returncode is None:
            told_end = select.poll()  # unlike select.select, of any number of open files
            told_end.register(self._connection, select.POLLIN)
            if not told_end.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            told = self._replies.readline()
            assert told, "the fork server has ended"
            self.returncode = int(told)
            self._replies.close()
            self._connection.close()
        return self.returncode

    def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:  # noqa: A002
        """Write the input, and return what both pipes give; as of Popen, a thread for each pipe."""
        texts: dict[str, Any] = {}

        def read(name: str) -> None:
            texts[name] = getattr(self, name).read()

        names = [name for name in ("stdout", "stderr") if getattr(self, name) is not None]
        threads = [threading.Thread(target=read, args=(name,), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        if self.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                if input is not None:
                    self.stdin.write(input)
                self.stdin.close()
        end = None if timeout is None else time.monotonic() + timeout
        for thread in threads:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))
            if thread.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(None if end is None else max(0.0, end - time.monotonic()))
        return texts.get("stdout"), texts.get("stderr")

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()
        self.wait()


def can_fork(command: Sequence[str], env: Mapping[str, str] | None = None) -> bool:
    """Return whether a fork runs a program as a new process does."""
    is_read_at_start = any(name in READ_AT_START for name in env or {})
    patches = any(word in PATCHING for word in command)
    return command[0] == sys.executable and not (is_read_at_start or patches)


def run(
    command: Sequence[str], *, cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None, timeout: float | None = None, check: bool = False,
    stderr: Any = subprocess.PIPE, package: bool = True,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run a program to its end; return its exit code, and what it printed, as text.

    One that cannot be forked runs in a new process.
    """
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": stderr, "text": True}
    if not can_fork(command):
        return subprocess.run(
            command,
            cwd=cwd,
            env=env,
            timeout=timeout,
            check=check,
            stdin=subprocess.DEVNULL,
            **pipes,
        )
    with Process(
        command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, package=package, **pipes
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.wait(), stdout, stderr)
    if check:
        done.check_returncode()
    return done


class Server:
    """A server of this process. package: whether it has imported the package."""

    def __init__(self, package: bool) -> None:
        ours, theirs = socket.socketpair()
        preloaded = (*CELERY, *(PACKAGE if package else ()))
        command = [sys.executable, "-m", "tests.fork_server", str(theirs.fileno()), *preloaded]
        self._process = subprocess.Popen(
            command, cwd=ROOT, pass_fds=[theirs.fileno()], start_new_session=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        theirs.close()
        self._control, self._mutex = ours, threading.Lock()

    def connect(self) -> socket.socket:
        """Return a connection for one program."""
        ours, theirs = socket.socketpair()
        with self._mutex, theirs:
            _send(self._control, {}, [theirs.fileno()])
        return ours

    def stop(self) -> None:
        self._control.close()
        self._process.wait()


@functools.cache
def server(pid: int, package: bool) -> Server:
    """Return a server of this process, which is started at the first call. pid: of this process."""
    made = Server(package)
    atexit.register(lambda: os.getpid() == pid and made.stop())
    return made


def _send(connection: socket.socket, request: Any, descriptors: Sequence[int]) -> None:
    """Send a request with descriptors."""
    data = json.dumps(request).encode()
    sent = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    connection.sendmsg([len(data).to_bytes(LENGTH, "big")], sent)
    connection.sendall(data)


def _receive(connection: socket.socket) -> tuple[Any, list[int]] | None:
    """Return a request with its descriptors, None at the end of the connection."""
    length, descriptors, _, _ = socket.recv_fds(connection, LENGTH, 3)
    if not length:
        return None
    data, left = b"", int.from_bytes(length, "big")
    while len(data) < left:
        data += connection.recv(left - len(data))
    return json.loads(data), descriptors


class Loop:
    """The server's loop. `serve` returns in each forked child, with what it is to run."""

    def __init__(self, control: socket.socket) -> None:
        self._control, self._selector = control, selectors.PollSelector()
        self._selector.register(control, selectors.EVENT_READ)
        reading, self._woken = os.pipe()
        self._waking = os.fdopen(reading, "rb", 0)
        os.set_blocking(self._woken, False)
        os.set_blocking(reading, False)
        self._selector.register(self._waking, selectors.EVENT_READ)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._programs: dict[
            socket.socket, int
        ] = {}  # pid of each connection's program, 0: none yet
        self._ended: set[int] = set()  # pids whose exit code was sent

    def serve(self) -> dict[str, Any] | None:
        """Return a request in a child that was forked for it; None in the server at its end."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._waking:
                    while self._waking.read(512):
                        pass
                    self._tell_ends()
                elif key.fileobj is self._control:
                    told = _receive(self._control)
                    if told is None:
                        return None
                    connection = socket.socket(fileno=told[1][0])
                    self._programs[connection] = 0
                    self._selector.register(connection, selectors.EVENT_READ)
                else:
                    request = self._read(cast("socket.socket", key.fileobj))
                    if request is not None:
                        return request

    def _read(self, connection: socket.socket) -> dict[str, Any] | None:
        """Fork for a request; returns it in the child. A client that is gone wants no more."""
        told = None
        with contextlib.suppress(ConnectionError):
            told = _receive(connection)
        if told is None:
            self._forget(connection)
            return None
        request, descriptors = told
        pid = os.fork()
        if pid == 0:
            self._become(descriptors)
            return cast("dict[str, Any]", request)
        for descriptor in descriptors:
            os.close(descriptor)
        self._programs[connection] = pid
        _tell(connection, pid)
        return None

    def _tell_ends(self) -> None:
        """Tell clients of the ends of their programs, which stay zombies as long as they listen."""
        for connection, pid in list(self._programs.items()):
            if not pid or pid in self._ended:
                continue
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                self._ended.add(pid)
                exited = ended.si_code == os.CLD_EXITED
                _tell(connection, ended.si_status if exited else -ended.si_status)

    def _forget(self, connection: socket.socket) -> None:
        """End what belongs to a client that has closed its connection."""
        pid = self._programs.pop(connection)
        self._selector.unregister(connection)
        connection.close()
        if pid:
            if pid not in self._ended:
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self._ended.discard(pid)

    def _become(self, descriptors: list[int]) -> None:
        """Leave nothing of the server in a child but its imports."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._selector.close()
        self._waking.close()
        os.close(self._woken)
        self._control.close()
        for connection in self._programs:
            connection.close()
        # first out of the way of 0, 1 and 2, which they replace
        moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10) for descriptor in descriptors]
        for descriptor in descriptors:
            os.close(descriptor)
        for number, descriptor in enumerate(moved):
            os.dup2(descriptor, number)
            os.close(descriptor)


def _tell(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(ConnectionError):
        connection.sendall(b"%d\n" % number)


def named_folders() -> list[str]:
    """Return the folders that PYTHONPATH names."""
    return [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]


def become(request: dict[str, Any]) -> None:
    """Run a program in this process, as the interpreter runs its command line."""
    if request["group"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    cast("Any", sys.stdout).reconfigure(line_buffering=True)  # tests read it as it comes
    if warned := os.environ.get("PYTHONWARNINGS"):
        warnings.simplefilter(cast("Any", warned))
    words = request["command"]
    below = named_folders()
    sys.path[:] = [*below, *request["path"]]
    for path in (Path(folder, "sitecustomize.py") for folder in below):
        if path.exists():  # as the interpreter does at its start
            runpy.run_path(str(path))
    if words[0] == "-c":
        sys.argv, sys.path[:] = ["-c", *words[2:]], ["", *sys.path]
        module = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), module.__dict__)
    elif words[0] == "-m":
        sys.argv, sys.path[:] = words[1:], [str(Path.cwd()), *sys.path]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:] = words, [str(Path(words[0]).resolve().parent), *sys.path]
        runpy.run_path(words[0], run_name="__main__")


def main() -> None:
    """Serve; a child runs its program, and ends as any program does."""
    # Ctrl-C at the terminal is for the test run, which ends its programs
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    loop = Loop(socket.socket(fileno=int(sys.argv[1])))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a program's collector need not look at what it shares, nor have copies of it made
    own = 1 + len(named_folders())  # what this program and its PYTHONPATH have put before the rest
    request = loop.serve()
    if request is not None:
        become({**request, "path": sys.path[own:]})


if __name__ == "__main__":
    main()
