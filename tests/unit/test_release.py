"""What a release has to be: the checks of `make release-check`, and the workflow that makes one."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.release_check import (
    OLDEST_FIGURE,
    Figure,
    age_of,
    figures_of,
    figures_of_costs,
    problems_of_changelog,
    problems_of_figures,
    problems_of_pages,
    problems_of_sbom,
    problems_of_tested,
    problems_of_tree,
    with_version,
)

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
PAIR = Figure("pair", "c31843b8")
SBOM = {
    "metadata": {"component": {"name": "celery_redlock", "version": "1.2.3"}},
    "components": [{"name": name, "version": "5"} for name in ("celery", "kombu", "redis")],
}


def loaded(path: Path) -> dict[Any, Any]:
    document: dict[Any, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return document


def test_a_tree_is_clean_without_any_file() -> None:
    assert list(problems_of_tree("")) == []
    (problem,) = problems_of_tree(" M README.md\n?? new.py\n")
    assert "README.md, new.py; commit them" in problem


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# C\n\n## [Unreleased]\n\n## [1.2.3] - 2026-11-30\n\n- x\n", None),
        ("# C\n\n## [Unreleased]\n\n- x\n\n## [1.2.3] - 2026-11-30\n", "text below *Unreleased*"),
        ("# C\n\n## [Unreleased]\n\n## [1.2.2] - 2026-11-30\n", "no `## [1.2.3]"),
        ("# C\n\n## [Unreleased]\n\n## [1.2.3]\n", "no `## [1.2.3] - YYYY-MM-DD`"),
        ("# C\n\n## [Unreleased]\n", "no `## [1.2.3]"),
        ("# C\n\n## [1.2.3] - 2026-11-30\n", "begins with no `## [Unreleased]`"),
    ],
)
def test_the_changelog_has_the_version_and_nothing_unreleased(text: str, said: str | None) -> None:
    problems = list(problems_of_changelog(text, "1.2.3"))
    assert len(problems) == (said is not None)
    assert said is None or said in problems[0]


def test_no_page_names_another_version() -> None:
    texts = {"a.md": "dist/celery_redlock-1.2.3-py3-none-any.whl", "b.md": "celery_redlock 1.2.2"}
    assert list(problems_of_pages(texts, "1.2.3")) == [
        "b.md names version 1.2.2, and the package is 1.2.3: change the page"
    ]


@pytest.mark.parametrize(
    ("age", "said"),
    [
        (0, None),
        (OLDEST_FIGURE, None),
        (OLDEST_FIGURE + 1, "201 commits to the package old"),
        (None, "c31843b8 is no commit before this one"),
    ],
)
def test_no_figure_is_older_than_its_limit(age: int | None, said: str | None) -> None:
    problems = list(problems_of_figures({PAIR: age}))
    assert len(problems) == (said is not None)
    assert said is None or said in problems[0]


def test_the_newest_releases_are_the_tested_ones() -> None:
    tested = {"celery": "5.7", "redis": "8.1"}
    assert list(problems_of_tested({"celery": "5.7.1", "redis": "8.1.0"}, tested)) == []
    (problem,) = problems_of_tested({"celery": "5.8.0", "redis": "8.1.0"}, tested)
    assert problem.startswith("pip installs celery 5.8.0, and TESTED_VERSIONS of")


def test_an_sbom_has_the_package_and_what_it_needs() -> None:
    assert list(problems_of_sbom(SBOM, "1.2.3")) == []
    assert len(list(problems_of_sbom(SBOM, "1.2.4"))) == 1
    (problem,) = problems_of_sbom({**SBOM, "components": []}, "1.2.3")
    assert "lacks celery, kombu, redis" in problem


def test_the_root_of_the_sbom_has_its_version() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '\nversion = "1.2.3"\n' in with_version(text, "1.2.3")
    assert "\ndynamic = " not in with_version(text, "1.2.3")


def test_a_figure_that_is_too_old_says_what_writes_it_again() -> None:
    stored = '{"tens --late": {"commit": "c31843b8"}}'
    (late,) = figures_of_costs(stored)
    page, readme = problems_of_figures({late: OLDEST_FIGURE + 1, PAIR: OLDEST_FIGURE + 1})
    assert page.endswith("run `python -m benchmarks.tens --late --page`")
    assert readme.endswith("write its figures and commit into benchmarks/README.md")


@pytest.mark.filterwarnings("always::UserWarning")
def test_every_benchmark_has_the_commit_of_its_figures() -> None:
    benchmarks = ROOT / "benchmarks"
    figures = figures_of((benchmarks / "README.md").read_text(encoding="utf-8"))
    figures += figures_of_costs((benchmarks / "costs.json").read_text(encoding="utf-8"))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    by_hand = {"instructions"}  # it compares two trees
    assert {one.benchmark.partition(" ")[0] for one in figures} == {
        *re.findall(r"-m benchmarks\.(\w+)", makefile),
        *by_hand,
    }
    # a history that was cut lacks commits: that stops a release, and no other change
    for problem in problems_of_figures({one: age_of(one) for one in figures}):
        warnings.warn(problem, stacklevel=1)


def test_a_commit_that_is_not_there_has_no_age() -> None:
    assert age_of(Figure("pair", "0" * 40)) is None


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_write_only_where_it_publishes(path: Path) -> None:
    workflow = loaded(path)
    assert workflow["permissions"] == {"contents": "read"}
    jobs = workflow["jobs"]
    wider = {name for name, job in jobs.items() if "permissions" in job}
    assert wider == ({"publish"} if path.stem == "release" else set())
    for job in jobs.values():
        assert job["timeout-minutes"] <= 240


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_an_action_is_pinned_by_a_digest_with_its_version_or_by_a_version(path: Path) -> None:
    uses = re.findall(r"- (?:name: .+\n +)?uses: (\S+)(.*)$", path.read_text(), re.MULTILINE)
    assert uses
    for action, comment in uses:
        pin = action.partition("@")[2]
        is_digest = re.fullmatch(r"[0-9a-f]{40}", pin)
        assert is_digest or re.fullmatch(r"(?:release/)?v\d+(?:\.\d+)*", pin), action
        assert bool(is_digest) == bool(re.fullmatch(r"  # v\d+\.\d+\.\d+", comment)), action


def test_what_is_published_is_what_the_check_has_built_and_is_attested() -> None:
    jobs = loaded(GITHUB / "workflows" / "release.yml")["jobs"]
    assert {"run": "make release-check QUICK=--quick"} in jobs["build"]["steps"]
    publish = jobs["publish"]
    assert publish["needs"] == "build"
    assert publish["permissions"]["id-token"] == "write"
    attested = [step["with"] for step in publish["steps"] if "attest@" in step["uses"]]
    assert {"subject-path": "release/dist/*"} in attested
    assert any(step.get("sbom-path", "").endswith(".cdx.json") for step in attested)
    upload = publish["steps"][-1]
    assert upload["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert upload["with"]["attestations"] is True
    assert "password" not in upload["with"]


def test_dependabot_moves_the_actions_and_the_tool_of_the_sbom() -> None:
    updates = loaded(GITHUB / "dependabot.yml")["updates"]
    assert {one["package-ecosystem"] for one in updates} == {"github-actions", "pip"}
    (pip,) = [one for one in updates if one["package-ecosystem"] == "pip"]
    pinned = re.findall(r'"([\w-]+)==[\d.]+"', (ROOT / "pyproject.toml").read_text())
    assert [one["dependency-name"] for one in pip["allow"]] == pinned
