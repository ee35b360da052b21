"""What was run beside the package: the rows, the page of them, and `doctor --neighbours`."""

from __future__ import annotations

import json
import re
import sys
from argparse import ArgumentParser
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from celery import __version__ as celery_version
from celery.bin.celery import celery
from click.testing import CliRunner

from celery_redlock.operate.works_with import (
    IN_EACH_RUN,
    ROWS_FILE,
    installed_distributions,
    neighbours_among,
    read_works_with,
)
from neighbours.own_servers import add_options, setup_of
from neighbours.page import PAGE, page_of
from neighbours.row import (
    KINDS,
    NOT_RUN,
    REFUSED,
    ROWS,
    VERDICTS,
    WITH_SETTING,
    WORKS,
    Neighbour,
    Row,
    read_rows,
)
from neighbours.run import Run
from tests.pages import ROOT
from tests.prose import MOST_WORDS, habits, long_sentences

PUBLISHED = read_rows()
DECLARED = [one for kind in KINDS for one in import_module(f"neighbours.{kind}").NEIGHBOURS]
BESIDE = {"celery": "5.7.0", "kombu": "5.7.0", "redis": "8.1.0"}
RUN = Row(
    "RabbitMQ",
    "brokers",
    WORKS,
    "It works.",
    distributions=("amqp",),
    versions={"RabbitMQ": "4.1.0", "amqp": "5.4.2"},
    beside=BESIDE,
    date="2026-11-30",
    commit="0123456789ab",
)
UNTRIED = Row(
    "MongoDB",
    "brokers",
    NOT_RUN,
    "It may work.",
    distributions=("pymongo",),
    reason="no registry has it",
    by_hand="start mongod.",
)
TOGETHER = replace(RUN, name="Both", distributions=("amqp", "boto3"))


def among(installed: dict[str, str], *rows: Row) -> list[Any]:
    """Return what is said of these distributions beside Celery and its own."""
    found = neighbours_among({**BESIDE, **installed}, [row.as_json() for row in rows])
    assert [[*one.installed] for one in found[: len(BESIDE)]] == [[name] for name in BESIDE]
    return found[len(BESIDE) :]


def test_the_page_is_what_the_rows_make() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page_of(PUBLISHED) == page, "write it again: python3 -m neighbours --page"


def test_another_row_would_make_another_page() -> None:
    first, *others = PUBLISHED
    assert page_of([replace(first, sentence="Another."), *others]) != page_of(PUBLISHED)
    assert page_of(others) != page_of(PUBLISHED)


def test_a_page_has_for_each_verdict_what_a_reader_needs() -> None:
    rows = [
        RUN,
        replace(RUN, name="Set", verdict=WITH_SETTING, setting="a = 1 | 2"),
        replace(RUN, name="Refused", verdict=REFUSED, error="SettingsError: it is not"),
        UNTRIED,
        replace(RUN, name="Kombu alone", versions={"kombu": "5.7.0"}, distributions=("kombu",)),
        replace(
            RUN, name="Older", versions={"celery": "5.6.0"}, beside={**BESIDE, "celery": "5.6.0"}
        ),
        replace(RUN, name="Beside an older one", beside={**BESIDE, "redis": "7.4.1"}),
    ]
    table = page_of(rows).partition("## Brokers")[2].partition("\n| --- ")[2].partition("\n\n")[0]
    assert table.splitlines()[1:] == [
        "| RabbitMQ | RabbitMQ 4.1.0, `amqp` 5.4.2 | works | It works. | 2026-11-30 `01234567` |",
        "| Set | RabbitMQ 4.1.0, `amqp` 5.4.2 | works with this setting: `a = 1 \\| 2` "
        "| It works. | 2026-11-30 `01234567` |",
        "| Refused | RabbitMQ 4.1.0, `amqp` 5.4.2 | refused: `SettingsError: it is not` | It works."
        " | 2026-11-30 `01234567` |",
        "| MongoDB |  | not run | It may work. Not run: no registry has it. Start mongod. |  |",
        "| Kombu alone | `kombu` 5.7.0 | works | It works. | 2026-11-30 `01234567` |",
        "| Older | `celery` 5.6.0 | works | It works. | 2026-11-30 `01234567` |",
        "| Beside an older one | RabbitMQ 4.1.0, `amqp` 5.4.2, `redis` 7.4.1 | works | It works. |"
        " 2026-11-30 `01234567` |",
    ]


def test_each_declared_neighbour_has_its_row_and_each_row_its_neighbour() -> None:
    told = [(one.kind, one.name, one.verdict, one.sentence) for one in DECLARED]
    assert told == [(row.kind, row.name, row.verdict, row.sentence) for row in PUBLISHED]
    assert len({(row.kind, row.name) for row in PUBLISHED}) == len(PUBLISHED)


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row.kind}: {row.name}")
def test_a_row_is_complete(row: Row, tmp_path: Path) -> None:
    assert row.verdict in VERDICTS
    assert bool(row.setting) == (row.verdict == WITH_SETTING)
    assert row.verdict != REFUSED or row.error
    if row.verdict == NOT_RUN:
        assert row.reason
        assert row.by_hand
        assert not row.date
    else:
        assert row.versions
        assert {*row.distributions} <= {*row.versions}
        assert row.beside.keys() >= {"celery", "kombu", "redis"}
        assert row.date
        assert row.commit[-1] != "+", "run it again, once the package is committed"
    prose = tmp_path / "row.md"
    prose.write_text("\n\n".join((row.sentence, row.reason, row.by_hand)))
    assert long_sentences(prose) == [], f"at most {MOST_WORDS} words"
    assert habits(prose) == []
    assert row.sentence.endswith(".")


def test_the_package_reads_the_rows_that_the_runs_write() -> None:
    assert ROWS_FILE.samefile(ROWS)
    assert read_works_with() == [row.as_json() for row in PUBLISHED]


def test_a_neighbour_in_the_version_of_its_run_has_its_verdict() -> None:
    (one,) = among({"amqp": "5.4.2"}, RUN, UNTRIED)
    assert (one.title, one.verdict_here, one.advice) == ("RabbitMQ (brokers)", WORKS, "It works.")
    assert one.run_with == {"RabbitMQ": "4.1.0", "amqp": "5.4.2"}


def test_a_neighbour_in_another_version_is_shown_with_that_of_its_run() -> None:
    (one,) = among({"amqp": "5.3.1"}, RUN)
    assert one.installed == {"amqp": "5.3.1"}
    assert one.verdict_here == "works, with amqp 5.4.2"


def test_a_setting_and_an_error_are_shown() -> None:
    needs = replace(RUN, verdict=WITH_SETTING, setting="`a = 1`")
    refused = replace(RUN, verdict=REFUSED, error="SettingsError: no")
    told = [one.advice for one in among({"amqp": "5.4.2"}, needs, refused)]
    assert told == ["It works. Set `a = 1`.", "It works. The error: SettingsError: no"]


def test_a_neighbour_without_a_run_is_shown_with_the_reason() -> None:
    (one,) = among({"pymongo": "4.15.0"}, RUN, UNTRIED)
    assert (one.verdict_here, one.advice) == (NOT_RUN, "No registry has it.")


def test_a_row_about_two_distributions_needs_both() -> None:
    both = {"amqp": "5.4.2", "boto3": "1.44.8"}
    assert [one.installed for one in among(both, TOGETHER)] == [both]
    (one,) = among({"boto3": "1.44.8"}, TOGETHER)
    assert (one.installed, one.verdict_here) == ({"boto3": "1.44.8"}, NOT_RUN)
    assert one.advice.endswith("distributions that are not here: amqp.")
    told = among({"amqp": "5.4.2"}, RUN, TOGETHER)
    assert [one.name for one in told] == ["RabbitMQ"]  # of amqp alone there is a row


def test_celery_and_its_own_come_first_with_the_number_of_their_runs() -> None:
    older = replace(RUN, beside={**BESIDE, "celery": "5.6.0"})
    rows = [one.as_json() for one in (RUN, older, UNTRIED)]
    installed = {"psycopg": "3.3.9", "celery": "5.6.3", "kombu": "5.7.0", "vine": "5.1.0"}
    told = [
        (*one.installed, one.verdict_here, one.advice.partition(" runs ")[0])
        for one in neighbours_among(installed, rows)
    ]
    assert told == [
        ("celery", "run, with celery 5.6.0, 5.7.0", "0 of 2"),
        ("kombu", "run", "2 of 2"),
        ("psycopg", NOT_RUN, "0 of 2"),
    ]


def test_the_doctor_lists_the_neighbours_without_an_app_and_without_a_node() -> None:
    told = CliRunner().invoke(celery, ["redlock", "doctor", "--neighbours"])
    assert told.exit_code == 0, told.output
    head, *lines = told.output.splitlines()
    assert head.split() == ["INSTALLED", "NEIGHBOUR", "VERDICT", "WHAT", "TO", "KNOW"]
    assert lines[0].startswith(f"celery {celery_version} ")
    for name, line in zip(IN_EACH_RUN, lines, strict=False):
        assert line.startswith(f"{name} {installed_distributions()[name]} ")
    amqp = installed_distributions()["amqp"]
    assert any(line.startswith(f"amqp {amqp} ") and "RabbitMQ" in line for line in lines)


def test_the_doctor_lists_the_neighbours_as_its_schema_says() -> None:
    told = CliRunner().invoke(celery, ["redlock", "doctor", "--neighbours", "--json"])
    schemas = json.loads((ROOT / "docs" / "command-line.schema.json").read_text())
    shown = json.loads(told.stdout)
    jsonschema.validate(shown, {**schemas, "$ref": "#/$defs/doctor"})
    jsonschema.validate(shown, {**schemas, "$ref": "#/$defs/neighbours"})
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"neighbours": [{}]}, {**schemas, "$ref": "#/$defs/doctor"})


def test_a_distribution_has_its_normalized_name() -> None:
    installed = installed_distributions()
    assert "celery-redlock" in installed
    assert {name for name in installed if name != name.lower() or "_" in name} == set()


def test_the_words_of_a_neighbour_are_those_of_its_row() -> None:
    one = Neighbour("SQS", "brokers", "It works.", requirements=("kombu[sqs]==5.7.0", "Boto_3==1"))
    assert Row.of(one).distributions == ("kombu", "boto-3")


def test_the_weekly_run_installs_each_program_that_a_neighbour_needs() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "neighbours.yml").read_text())
    sources = "".join(path.read_text() for path in (ROOT / "neighbours").glob("*.py"))
    needed = set(re.findall(r'program\("[\w./-]+", "([\w.+-]+)"\)', sources))
    assert needed
    assert needed <= {*workflow["jobs"]["rows"]["env"]["PACKAGES"].split()}
    assert {"run": "make neighbours"} in workflow["jobs"]["rows"]["steps"]


def test_the_servers_of_a_reader_are_told_to_the_story() -> None:
    parser = ArgumentParser()
    add_options(parser)
    assert setup_of(parser.parse_args([])) == {}
    words = ["--broker", "sqs://", "--node", "redis://a", "--node", "redis://b"]
    words += ["--conf", 'broker_transport_options={"region": "eu=1"}']
    assert setup_of(parser.parse_args(words)) == {
        "broker": "sqs://",
        "nodes": ["redis://a", "redis://b"],
        "conf": {"broker_transport_options": {"region": "eu=1"}},
    }


@pytest.mark.parametrize("text", ["region", "region=eu"])
def test_a_setting_that_is_no_json_is_refused(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = ArgumentParser()
    add_options(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--broker", "sqs://", "--conf", text])
    assert f"'{text}' is not NAME=JSON: write text as NAME='" in capsys.readouterr().err


def test_a_story_of_another_module_is_told_by_that_module(tmp_path: Path) -> None:
    (tmp_path / "told.py").write_text(
        "from pathlib import Path\n"
        'Path("seen.json").write_text(\'{"overlaps": 7, "differences": ["told"]}\')'
    )
    run = Run(Path(sys.executable), tmp_path)
    seen = run.story(module="told", broker="b", backend="b", nodes=("n",))
    assert (seen.overlaps, seen.differences) == (7, ("told",))
