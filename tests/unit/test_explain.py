"""`celery redlock explain`: what it prints of the pages, and how a passage is found."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import jsonschema
import pytest
from celery.bin.celery import celery
from click.testing import CliRunner, Result

from celery_redlock.operate.cli.explain import (
    LIST_OF_PASSAGES,
    LOG_LINES,
    Passage,
    anchor_of,
    as_plain,
    find_by_words,
    find_passage,
    read_passages,
    section_of,
    with_commands,
)
from celery_redlock.operate.cli.group import Table
from tests import fork_server
from tests.pages import ROOT

DOCS = ROOT / "docs"
PASSAGES = read_passages()
UNKNOWN = "is not a code, and no passage has its words"
LISTED = (DOCS / LIST_OF_PASSAGES).read_text(encoding="utf-8")
LOG_PAGE = (DOCS / LOG_LINES).read_text(encoding="utf-8")
PAGE = """# Page

## One

```console
# no heading
```

### Part of one

Text.

## Two

Text.
"""


def explain(*words: str) -> Result:
    return CliRunner().invoke(celery, ["redlock", "explain", *words])


@pytest.mark.xdist_group("fork server")
def test_a_person_without_an_app_gets_the_passage(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "celery", "redlock", "explain", "a-node-gives-no-vote"]
    done = fork_server.run(command, cwd=tmp_path, package=False)
    assert done.returncode == 0, done.stderr
    title, *lines = done.stdout.splitlines()
    assert title == "A node gives no vote"
    assert any(re.match("`MISCONF`  +It cannot save to disk", line) for line in lines)
    assert not [line for line in lines if "](" in line or line.startswith(("#", "```", "|"))]
    assert "A node evicts keys" not in done.stdout


def test_a_link_to_another_passage_is_the_command_that_prints_it() -> None:
    shown = [" ".join(line.split()) for line in explain("no-quorum").stdout.splitlines()]
    rest = "any other text The node refuses See `celery redlock explain a-node-gives-no-vote`"
    assert rest in shown
    twice = explain("task-ran-twice").stdout
    assert "`lost` (`celery redlock explain locklost`)" in " ".join(twice.split())
    for code in PASSAGES:  # to be copied from one line
        lines = explain(code).stdout.splitlines()
        assert [line for line in lines if line.endswith("-") and "explain" in line] == []
        assert f"`celery redlock explain {code}`" not in explain(code).stdout
    stays = explain("task-stays-deferred").stdout
    assert "explain free-a-lock-that-is-held" not in stays  # it stands below


@pytest.mark.parametrize("code", PASSAGES)
def test_a_passage_has_its_heading_and_no_marks_of_markdown(code: str) -> None:
    one = PASSAGES[code]
    heading, *_ = one.text.splitlines()
    assert heading.lstrip("# ") == one.title
    assert anchor_of(one.title) == code
    shown = list(as_plain(one.text, 72))
    texts = [line for line in shown if isinstance(line, str) and line[:4].strip()]
    assert [x for x in texts if len(x) > 72 or re.search(r"\]\(|^#|^:::|```|<!--|\*\*", x)] == []
    tables = [table for table in shown if isinstance(table, Table)]
    assert len(tables) == len(re.findall(r"^\|[-| ]+\|$", one.text, re.MULTILINE))
    for table in tables:
        assert {len(row) for row in table.rows} == {len(table.heads)}


@pytest.mark.parametrize("code", PASSAGES)
def test_a_passage_names_the_page_or_section_that_it_sends_to(code: str) -> None:
    """In a terminal a link is its words alone."""
    text = " ".join(with_commands(PASSAGES[code].text, PASSAGES).split())
    assert re.findall(r"(?:\b[Ss]ee |\()\[[^\]]+\]\([^)]*\)", text) == []


def test_the_list_has_each_section_of_its_page_once() -> None:
    without_code = re.sub(r"^```.*?^```$", "", LISTED, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^## (.+)$", without_code, re.MULTILINE)
    assert len(titles) > 8
    assert [title for title in titles if anchor_of(title) not in PASSAGES] == []
    links = re.findall(r"^- \[.+?\]\(.*?#([\w-]+)\): ", LISTED.partition("\n## ")[0], re.MULTILINE)
    assert links == list(PASSAGES)


def test_the_wheel_gets_each_page_of_the_list() -> None:
    pages = {page for page in re.findall(r"^- \[.+?\]\((.*?)#", LISTED, re.MULTILINE) if page}
    wanted = {(DOCS / LIST_OF_PASSAGES).parent.joinpath(page).resolve() for page in pages}
    wanted.add(DOCS / LIST_OF_PASSAGES)
    included = r'^"docs/(.+?)" = "celery_redlock/docs/\1"$'
    found = re.findall(included, (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert {DOCS / page for page in found} == wanted


def test_without_a_code_it_lists_all_with_what_a_user_sees() -> None:
    head, *lines = explain().stdout.splitlines()
    assert head.split() == ["CODE", "YOU", "SEE"]
    assert [line.split()[0] for line in lines] == list(PASSAGES)
    assert [line for line in lines if "](" in line or len(line.split()) < 4] == []


def test_json_fits_its_schema_and_has_the_text() -> None:
    schemas = json.loads((DOCS / "command-line.schema.json").read_text())
    for words, codes in (([], list(PASSAGES)), (["no-quorum"], ["no-quorum"])):
        shown = json.loads(explain(*words, "--json").stdout)
        jsonschema.validate(shown, {**schemas, "$ref": "#/$defs/explain"})
        found = [Passage(**one) for one in shown["passages"]]
        assert found == [PASSAGES[code] for code in codes]


@pytest.mark.parametrize(
    "word", ["quorum", "No quorum", "NO-QUORUM", "operations/troubleshooting#no-quorum"]
)
def test_a_part_and_a_title_and_a_path_find_the_passage(word: str) -> None:
    assert explain(word).stdout.startswith("No quorum\n")


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("lost 'stock", "LockLost"),
        ("[2026-11-26 17:40:25,047: ERROR/MainProcess] node 10.0.0.1:6379 gives no vote: "
         "READONLY You can't write against a read only replica.", "A node gives no vote"),
        ("no quorum of 2 nodes voted on 'points:ann'; waited 5.0 s", "No quorum"),
        ("'shop.take:98' was sent before as task 0398, which counts until its", "DuplicateTask"),
        ("RedlockError: it failed. See `celery redlock explain redlockerror`", "RedlockError"),
        ("node_recovered", "node_recovered"),
        ("functools.wraps", "Decorators"),
        ("task: __call__=FlaskTask.__call__: recount: the key is made of what the wrapped function "
         "takes", "Decorators"),
    ],
)  # fmt: skip
def test_the_text_of_a_line_or_an_error_finds_the_passage(text: str, title: str) -> None:
    assert explain(text).stdout.startswith(f"{title}\n")


@pytest.mark.parametrize("word", ["NOSCHEMA", "`OLDERSCHEMA`", "tryagain"])
def test_a_word_of_a_servers_error_finds_the_passage_with_its_row(word: str) -> None:
    """Not one that leads on to it."""
    assert explain(word).stdout.startswith("A PostgreSQL gives no vote\n")
    assert explain("NOREPLICAS").stdout.startswith("A node gives no vote\n")


def test_each_line_of_the_log_finds_the_passage_that_its_row_leads_to_or_the_row() -> None:
    table = re.findall(r"^\| `(.+)` \| `(\w+)` \| (.+) \|$", LOG_PAGE, re.MULTILINE)
    assert len(table) > 50
    own = "unexpected-errors"  # has its rows in its text
    for line, event, meaning in table:
        linked = [code for code in PASSAGES if f"#{code})" in meaning] or [event]
        wanted = own if line in PASSAGES[own].text else linked[0]
        found = [one.code for one in find_by_words(line, PASSAGES)]
        # the line without a fault has the words of that with one
        assert found == ([wanted] if wanted != "nodes_answer" else found), line
        assert wanted in found or "no-quorum" in found, line
    assert find_by_words("process 7 exited: released its lock", PASSAGES)[0].text.count("\n\n") > 5


def test_a_section_ends_at_the_next_heading_of_its_level() -> None:
    assert section_of(PAGE, "one").endswith("### Part of one\n\nText.")
    assert section_of(PAGE, "part-of-one") == "### Part of one\n\nText."
    assert section_of(PAGE, "no-heading") == ""


def test_a_whole_code_that_is_a_part_of_another_is_found() -> None:
    known = {code: Passage(code, code, "", "") for code in ("lost", "lock-lost")}
    assert find_passage("lost", known) is known["lost"]


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("quorom", f"quorom {UNKNOWN}; did you mean 'no-quorum'?"),
        ("lockt4ken", f"lockt4ken {UNKNOWN}; did you mean 'locktaken'?"),
        ("foo bar", f"foo bar {UNKNOWN}; `celery redlock explain` lists the codes"),
        ("nonsense words", f"nonsense words {UNKNOWN}; `celery redlock explain` lists the codes"),
        ("could not acquire", "could not acquire matches several: unexpected-errors, "),
        ("evict", None),
        (
            "node",
            "node matches several: a-node-gives-no-vote, a-node-evicts-keys, ",
        ),
        (" ", "the name is empty"),
    ],
)
def test_a_word_that_is_no_code_says_which_there_are(word: str, told: str | None) -> None:
    done = explain(word)
    assert (done.exit_code == 0) == (told is None)
    assert (told or "A node evicts keys\n") in done.output
