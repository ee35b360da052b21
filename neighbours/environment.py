"""The environment of each neighbour: exact requirements, and a wheel of this checkout.

All are below one folder, which is kept: $CELERY_REDLOCK_NEIGHBOURS, else one in the system's
temporary folder. uv makes them in seconds.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
UV = "uv==0.13.9"
# in every environment, unless a neighbour requires another version
REQUIRED = ("celery==5.7.0", "kombu==5.7.0", "redis==8.1.0", "hiredis==3.5.0")


def cache() -> Path:
    """Return the folder of all environments."""
    kept = os.environ.get("CELERY_REDLOCK_NEIGHBOURS")
    folder = Path(kept) if kept else Path(tempfile.gettempdir(), "celery-redlock-neighbours")
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


def distribution_of(requirement: str) -> str:
    """Return the normalized name of a requirement's distribution."""
    name = re.split(r"[\[=<>!~ @;]", requirement, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def environment(requirements: Iterable[str], version: str = "", *, forced: bool = False) -> Path:
    """Return the Python of an environment with these requirements and the package.

    version: of Python, such as "3.13"; "" means that of this process. forced: they hold against
    what the package requires. It is made if there is none with the same requirements. Raises
    subprocess.CalledProcessError if one cannot be installed; uv's message is on stderr.
    """
    pinned = {distribution_of(each): each for each in (*REQUIRED, *requirements)}
    chosen = sorted(pinned.values())
    words = (version or sys.version, *chosen)
    name = hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]
    home = cache() / f"environment-{name}"
    python, stamp = home / "bin" / "python", home / "complete"
    if not stamp.exists():
        shutil.rmtree(home, ignore_errors=True)
        interpreter = python_of(version) if version else sys.executable
        _run(uv(), "venv", "-q", "--python", interpreter, str(home))
        _install(python, *chosen)
    wheel = built_wheel()
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text() != digest:
        words = ("--reinstall-package", "celery-redlock", str(wheel))
        if forced:
            overrides = home / "overrides.txt"
            overrides.write_text("\n".join(chosen))
            words = ("--override", str(overrides), *words)
        _install(python, *words)
        stamp.write_text(digest)
    return python


def python_of(version: str) -> str:
    """Return the path of a Python of this machine, also of one that only pyenv knows."""
    in_path = shutil.which(f"python{version}")
    of_pyenv = Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
    found: list[str] = [*([in_path] if in_path else ()), *map(str, of_pyenv)]
    for path in found:
        if not subprocess.run([path, "-c", ""], capture_output=True).returncode:
            return path
    raise LookupError(f"no Python {version} is in PATH")


def versions(python: Path) -> dict[str, str]:
    """Return the version of each distribution of an environment, by its normalized name."""
    command = [uv(), "pip", "list", "-q", "--format", "json", "--python", str(python)]
    listed = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return {distribution_of(each["name"]): each["version"] for each in listed}


@functools.cache
def uv() -> str:
    """Return the path of uv: the one in PATH, else one in an environment of its own."""
    if found := shutil.which("uv"):
        return found
    home = cache() / "uv"
    if not (home / "bin" / "uv").exists():
        _run(sys.executable, "-m", "venv", str(home))
        _run(str(home / "bin" / "python"), "-m", "pip", "install", "-q", UV)
    return str(home / "bin" / "uv")


@functools.cache
def built_wheel() -> Path:
    """Build the wheel of this checkout, once for a process."""
    folder = Path(tempfile.mkdtemp(prefix="wheel-", dir=cache()))
    _run(uv(), "build", "-q", "--wheel", "--out-dir", str(folder), str(REPOSITORY))
    (wheel,) = folder.glob("*.whl")
    kept = cache() / wheel.name
    wheel.replace(kept)
    shutil.rmtree(folder)
    return kept


def _install(python: Path, *words: str) -> None:
    _run(uv(), "pip", "install", "-q", "--python", str(python), *words)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
