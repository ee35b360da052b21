"""What is uploaded is whole, and works where it is installed, alone and with each of its extras."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import metadata
from pathlib import Path

import pytest

from tests.conftest import made_once, unpack
from tests.pages import ROOT, SITE, blocks, shown_commands

# for work on the repository itself: the environment in which these tests run has them
FOR_DEVELOPERS = {"benchmarks", "checks", "dev", "docs", "example", "release"}
EXTRAS = sorted({*metadata("celery_redlock").get_all("Provides-Extra", [])} - FOR_DEVELOPERS)
INSTALL = "docs/getting-started/install.md"
LOOK = """
import importlib.metadata, importlib.util, sys
import celery_redlock
from celery_redlock import LockedTask, Redlock
assert sys.prefix in celery_redlock.__file__, celery_redlock.__file__
has_pytest = importlib.util.find_spec("pytest") is not None
for entry in importlib.metadata.distribution("celery_redlock").entry_points:
    if has_pytest or entry.group != "pytest11":
        print(entry.group, entry.name, callable(entry.load()))
"""
APP = """
from celery import Celery
from celery_redlock import LockedTask
app = Celery("shop", broker="redis://localhost")
@app.task(base=LockedTask, lock_key="stock:{sku}")
def take(sku): ...
"""
TEST = """
import pytest
from celery_redlock import LockTaken
from celery_redlock.testing import assert_released, hold, use_nodes
from shop import app, take

def test_it(redlock_nodes):
    with use_nodes(app, redlock_nodes):
        with hold("stock:7"), pytest.raises(LockTaken):
            take.apply((7,), throw=True)
        assert_released()

def test_it_on_servers(redlock_embedded_nodes):
    with use_nodes(app, redlock_embedded_nodes):
        take.apply((7,), throw=True)
        assert_released()
"""
# what an extra is for, used
USES = {
    "flower": ("-m", "celery", "-A", "shop", "flower", "--help"),
    "metrics": (
        "-c",
        "from prometheus_client import CollectorRegistry, generate_latest as show\n"
        "from celery_redlock.operate.metrics import Metrics\n"
        "made = Metrics(registry := CollectorRegistry())\n"
        "made.lost.labels('shop.take').inc()\n"
        "assert b'redlock_lost_total{task=\"shop.take\"} 1.0' in show(registry)",
    ),
    "postgresql": (
        "-c",
        "from celery_redlock import Redlock\n"
        "(node,) = Redlock(['postgresql://locks@127.0.0.1:1/app']).status().nodes\n"
        "assert node.node == '127.0.0.1:1/app'\n"
        "assert 'Connection refused' in node.error",
    ),
    "testing": ("-m", "pytest", "-q", "test_shop.py"),
}

PAGES_IN_THE_WHEEL = (
    "how-to/after-a-crash.md",
    "how-to/postgresql.md",
    "operations/change-nodes.md",
    "operations/troubleshooting.md",
    "operations/upgrade.md",
    "reference/errors.md",
    "reference/keys.md",
    "reference/log-messages.md",
)

# an installation on a busy machine takes its time
pytestmark = [pytest.mark.pages, pytest.mark.slow, pytest.mark.timeout(1200)]


def run(*command: str, cwd: Path) -> str:
    """Return what a command says; fails with all of it where the command does."""
    ours = ("PYTHONPATH", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Need a package index; where pip finds none the test is skipped, and fails where CI is set."""
    where = tmp_path_factory.mktemp("probe")
    ask = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(where)]
    asked = subprocess.run([*ask, "hatchling"], capture_output=True, text=True, check=False)
    if asked.returncode:
        say = pytest.fail if os.environ.get("CI") else pytest.skip
        say(f"pip finds no package index: {asked.stderr.strip()[-300:]}")


@pytest.fixture(scope="session")
def built(index: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder of the wheel and the sdist."""

    def build(where: Path) -> None:
        run(sys.executable, "-m", "build", "--outdir", str(where), cwd=ROOT)

    return made_once(tmp_path_factory, "dist", build)


def install(home: Path, *wanted: str, cwd: Path | None = None) -> str:
    """Install into an environment by the pip of this one; returns its python. cwd: of the pip."""
    python = str(home / "bin" / "python")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    # the few modules that are imported are compiled then
    run(*pip, "install", "-q", "--no-compile", *wanted, cwd=cwd or home)
    run(*pip, "check", cwd=home)
    return python


@pytest.fixture(scope="session")
def plain(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give an environment that has the wheel and what it needs, to be looked at and copied."""

    def make(home: Path) -> None:
        venv.create(home)
        install(home, str(next(built.glob("*.whl"))))

    return made_once(tmp_path_factory, "plain", make)


@pytest.fixture
def copied(plain: Path, tmp_path: Path) -> Path:
    """Give an environment of the test's own with what is in `plain`: its scripts name that one."""
    home = tmp_path / "venv"
    venv.create(home)
    (packages,) = home.glob("lib/*/site-packages")
    shutil.copytree(plain / packages.relative_to(home), packages, dirs_exist_ok=True)
    return home


@pytest.fixture
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


def test_the_package_index_takes_both(built: Path) -> None:
    files = [str(path) for path in built.glob("celery_redlock-*")]
    assert len(files) == 2
    run(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=built)


def test_the_index_shows_a_readme_without_dead_links(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
        _, _, text = opened.read(name).decode().partition("\n\n")
    assert text.startswith("# celery_redlock\n\nRun Celery tasks one at a time per order")
    assert "`take.lock_for(" in text
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert not [link for link in links if not link.startswith("https://")]
    assert "<!--" not in text


def test_the_wheel_has_all_of_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if ".dist-info/" not in name}
    package = ROOT / "celery_redlock"
    wanted = {
        str(path.relative_to(ROOT))
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    # the pages that `celery redlock explain` reads
    wanted |= {f"celery_redlock/docs/{page}" for page in PAGES_IN_THE_WHEEL}
    # beside it: Celery and pytest import these at each of their starts
    wanted |= {"celery_redlock_entry.py", "pytest_celery_redlock.py"}
    assert names == wanted
    assert "celery_redlock/py.typed" in names
    assert "celery_redlock/lock/server/lua/grant.lua" in names
    assert "celery_redlock/operate/works_with.json" in names


def test_the_sdist_has_what_its_tests_need(built: Path, tmp_path: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as opened:
        unpack(opened, tmp_path)
    (unpacked,) = tmp_path.iterdir()
    assert not (unpacked / "findings").exists()
    pytest_ = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    everything = run(*pytest_, "--collect-only", "tests", cwd=unpacked)
    assert "tests/integration/test_shop.py" in everything
    # of those that need neither a server nor an index, the ones that read files beside their own
    readers = ("unit/test_mutants.py", "test_architecture.py", "test_pictures.py")
    assert " passed" in run(*pytest_, *(f"tests/{name}" for name in readers), cwd=unpacked)
    kept = (
        "README.md",
        "CHANGELOG.md",
        "CODE_OF_CONDUCT.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "Makefile",
    )
    for name in kept:
        assert (unpacked / name).read_bytes() == (ROOT / name).read_bytes()


def see_it_work(python: str, folder: Path) -> None:
    """Return if the package can be used in an environment, and Celery has its commands."""
    assert "celery.commands redlock True" in run(python, "-c", LOOK, cwd=folder)
    (folder / "shop.py").write_text(APP)
    celery = (python, "-m", "celery", "-A", "shop", "redlock")
    assert "stock:{sku}" in run(*celery, "options", "shop.take", cwd=folder)


def test_it_works_in_an_environment_of_its_own(plain: Path, tmp_path: Path) -> None:
    see_it_work(str(plain / "bin" / "python"), tmp_path)
    celery = (str(plain / "bin" / "celery"), "-A", "shop", "redlock")
    assert "--json" in run(*celery, "doctor", "--help", cwd=tmp_path)
    assert "RabbitMQ, quorum queues" in run(*celery, "doctor", "--neighbours", cwd=tmp_path)


def test_what_it_needs_is_enough_for_a_broker_and_results_on_redis(
    plain: Path, tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(APP)
    use = (
        "from shop import app; app.conf.result_backend = app.conf.broker_url\n"
        "app.connection_for_read().transport; app.connection_for_write().transport\n"
        "app.backend.client"
    )
    run(str(plain / "bin" / "python"), "-c", use, cwd=tmp_path)


def test_it_explains_each_code_without_an_app_and_without_the_repository(
    plain: Path, tmp_path: Path
) -> None:
    explain = (str(plain / "bin" / "celery"), "redlock", "explain")
    listed = run(*explain, cwd=tmp_path).splitlines()[1:]
    assert len(listed) > 20
    known = json.loads(run(*explain, "--json", cwd=tmp_path))["passages"]
    assert [one["code"] for one in known] == [line.split()[0] for line in listed]
    assert [one["code"] for one in known if one["text"].count("\n") < 3] == []
    assert run(*explain, "no-quorum", cwd=tmp_path).startswith("No quorum\n")


@pytest.mark.parametrize("extra", EXTRAS)
def test_it_works_with_an_extra(wheel: Path, copied: Path, tmp_path: Path, extra: str) -> None:
    python = install(copied, f"{wheel}[{extra}]")
    see_it_work(python, tmp_path)
    (tmp_path / "test_shop.py").write_text(TEST)
    run(python, *USES[extra], cwd=tmp_path)


@pytest.fixture(scope="session")
def clone(index: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a clone of the repository, as somebody has it who installs from one."""

    def make(where: Path) -> None:
        run("git", "clone", "-q", str(ROOT), str(where), cwd=ROOT)

    return made_once(tmp_path_factory, "clone", make)


def installed_words(line: str) -> list[str]:
    """Return what a command of a page gives to `pip install`."""
    pip_, install_, *words = shlex.split(line)
    assert (pip_, install_) == ("pip", "install")
    return words


def run_the_start(python: str, tmp_path: Path) -> None:
    """Return if the app of the first page can reach its broker and its results."""
    page = ROOT / "docs" / "getting-started" / "first-locked-task.md"
    (tmp_path / "tasks.py").write_text(blocks(page, "python")[0].code)
    look = "from tasks import app; app.connection_for_write().transport_cls; app.backend.client"
    run(python, "-c", look, cwd=tmp_path)


def test_the_command_of_the_first_pages_installs_a_clone_into_an_empty_environment(
    clone: Path, tmp_path: Path
) -> None:
    first = ("README.md", "docs/index.md", "docs/getting-started/first-locked-task.md")
    shown = {page: shown_commands(blocks(ROOT / page, "console")[0]) for page in (*first, INSTALL)}
    command = shown[INSTALL]
    assert shown == dict.fromkeys(shown, command)
    home = tmp_path / "venv"
    venv.create(home)
    (line,) = command
    run_the_start(install(home, *installed_words(line), cwd=clone), tmp_path)


def test_the_wheel_of_the_install_page_can_be_built_and_installed(
    clone: Path, copied: Path, tmp_path: Path
) -> None:
    _, build_, install_ = shown_commands(blocks(ROOT / INSTALL, "console")[1])
    python_, *words = shlex.split(build_)
    assert python_ == "python"
    run(sys.executable, *words, cwd=clone)
    wheel, *more = installed_words(install_)
    pip = (sys.executable, "-m", "pip", "--python", str(copied / "bin" / "python"))
    run(*pip, "uninstall", "-q", "-y", "celery_redlock", cwd=tmp_path)
    run_the_start(install(copied, str(clone / wheel), *more), tmp_path)


def test_a_commit_can_be_pinned_as_the_install_page_says(
    clone: Path, copied: Path, tmp_path: Path
) -> None:
    line = blocks(ROOT / INSTALL, "text")[0].code.strip()
    commit = run("git", "rev-parse", "HEAD", cwd=clone).strip()
    (tmp_path / "requirements.txt").write_text(
        line.replace("/srv/celery_redlock", str(clone)).replace("COMMIT", commit)
    )
    pip = (sys.executable, "-m", "pip", "--python", str(copied / "bin" / "python"))
    run(*pip, "uninstall", "-q", "-y", "celery_redlock", cwd=tmp_path)
    python = install(copied, "-r", "requirements.txt", cwd=tmp_path)
    run_the_start(python, tmp_path)
    (recorded,) = copied.glob("lib/*/site-packages/celery_redlock-*.dist-info/direct_url.json")
    assert json.loads(recorded.read_text())["vcs_info"]["commit_id"] == commit


def test_a_release_can_be_checked_and_has_an_sbom(clone: Path) -> None:
    pytest.importorskip("cyclonedx_py")  # of the extra `release`, which `dev` has
    check = [sys.executable, "-m", "tests.release_check", "--quick"]
    done = subprocess.run(check, cwd=clone, capture_output=True, text=True, check=False)
    for step in ("versions", "sdist and wheel", "empty environment", "SBOM"):
        assert f"ok     {step}\n" in done.stdout, done.stdout + done.stderr
    failed = re.findall(r"^FAILED (.+?): ", done.stdout, re.MULTILINE)
    assert done.returncode == bool(failed)
    assert set(failed) <= {"changelog", "figures"}, done.stdout  # until the release is near
    built = {path.name for path in (clone / "build" / "release" / "dist").iterdir()}
    assert {name.rpartition(".")[2] for name in built} == {"whl", "gz"}
    sbom = json.loads((clone / "build" / "release" / "celery_redlock.cdx.json").read_text())
    assert sbom["bomFormat"] == "CycloneDX"


def test_the_site_needs_its_own_extra_alone(wheel: Path, copied: Path, tmp_path: Path) -> None:
    python = install(copied, f"{wheel}[docs]")
    run(python, *SITE, "-d", str(tmp_path / "doctrees"), ".", str(tmp_path / "site"), cwd=ROOT)
    assert (tmp_path / "site" / "index.html").is_file()
