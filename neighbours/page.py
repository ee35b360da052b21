"""Writes docs/reference/works-with.md from the published rows; standard library only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from neighbours.row import NOT_RUN, REFUSED, WITH_SETTING, Row, read_rows

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "works-with.md"
COMMIT = 8  # characters of a commit that a row shows
IN_ALL = (
    "celery",
    "kombu",
    "redis",
)  # distributions of each environment, whose usual versions are above the tables
# The head of each kind of rows, and what its runs add to the story.
KIND_TEXTS = {
    "brokers": ("Brokers", "The messages of the story are on this broker."),
    "backends": ("Result backends", "The results of the story are in this backend."),
    "schedulers": ("Schedulers", "`LockedScheduler` runs around this scheduler of beat."),
    "agents": (
        "Agents",
        "The agent watches the story, and reports to a collector, which is asked what it has.",
    ),
    "task_classes": ("Task classes", "The tasks of the story have this class."),
    "applications": (
        "Applications",
        "`redlock_tasks` in the application's own settings locks its tasks.",
    ),
    "web_servers": (
        "Web servers",
        "Requests take `lock_for` and send uniquely, before and after the server's fork, beside a "
        "worker.",
    ),
    "lock_nodes": (
        "Lock nodes",
        "The locks of the story are on this server, and the contract tests run on it.",
    ),
}
# The marks of what is looked up and not read: the words between them are not counted.
TABLES = "<!-- the tables: `python3 -m neighbours --page` writes this page -->"
TABLES_END = "<!-- their end -->\n"
HEADS = ("neighbour", "run with", "verdict", "what to know", "run")
BEGIN = """\
# Works with

Which brokers, result backends, schedulers, agents, frameworks and servers work beside the package?
Such other software is called a neighbour here. Each row is one run with real servers, or says that
there was none.

**The story.** A run sends 30 tasks on three keys to two workers. One body holds its key, a second
task waits for it, and a third is revoked while it waits. One call is sent uniquely, twice. Then the
worker of the first body is killed. *Works* means:

- the bodies of a key never overlapped;
- each message ran to its end, and none did so twice;
- the message of the killed worker came back;
- the states in the result backend were right.

The same run of tasks without a lock finds overlaps and losses. *Does not* means that a run saw
something else, and the row says what. *Refused* means that the start fails with this error.

**Run it.** In a clone, `python3 -m neighbours` runs all, each in an environment of its own, and
`python3 -m neighbours rabbitmq` those with this name. `python3 -m neighbours --broker URL` runs the
story on a broker of yours; so do `--backend`, and `--node` for each lock node. `celery -A shop
redlock doctor --neighbours` lists the rows of what is installed in your environment.

"""


def page_of(rows: Sequence[Row]) -> str:
    """Return the whole page."""
    usual = _usual_versions(rows)
    told = ", ".join(f"`{name}` {version}" for name, version in usual.items())
    parts = [f"{BEGIN}Unless a row says otherwise, its environment has {told}.\n\n{TABLES}\n"]
    for kind, (head, text) in KIND_TEXTS.items():
        if of_kind := [row for row in rows if row.kind == kind]:
            parts.append(f"## {head}\n\n{text}\n\n" + "\n".join(_table(of_kind, usual)) + "\n")
    return "\n".join([*parts, TABLES_END])


def write_page() -> None:
    """Write the page anew."""
    PAGE.write_text(page_of(read_rows()), encoding="utf-8")


def _usual_versions(rows: Sequence[Row]) -> dict[str, str]:
    """Return the versions with which most rows were run, of what is in all environments."""
    found = {name: Counter(row.beside[name] for row in rows if row.beside) for name in IN_ALL}
    return {name: counted.most_common(1)[0][0] for name, counted in found.items() if counted}


def _table(rows: Sequence[Row], usual: Mapping[str, str]) -> Iterator[str]:
    yield _line(HEADS)
    yield _line(["---" for _ in HEADS])
    for row in rows:
        yield _line((row.name, _versions(row, usual), _verdict(row), _sentences(row), _when(row)))


def _line(cells: Iterable[str]) -> str:
    whole = [" ".join(cell.replace("|", r"\|").split()) for cell in cells]
    return f"| {' | '.join(whole)} |"


def _versions(row: Row, usual: Mapping[str, str]) -> str:
    """Return what a row was run with; what is usual only if there is nothing else."""
    all_versions = {**row.versions, **{name: row.beside.get(name, usual[name]) for name in usual}}
    shown = {name: one for name, one in all_versions.items() if usual.get(name) != one}
    return ", ".join(
        f"{_code(name) if name in (*row.distributions, *usual) else name} {version}"
        for name, version in (shown or row.versions).items()
    )


def _verdict(row: Row) -> str:
    if row.verdict == WITH_SETTING:
        return f"{row.verdict}: {_code(row.setting)}"
    return f"{row.verdict}: {_code(row.error)}" if row.verdict == REFUSED else row.verdict


def _code(text: str) -> str:
    return text if "`" in text else f"`{text}`"


def _sentences(row: Row) -> str:
    if row.verdict != NOT_RUN:
        return row.sentence
    return f"{row.sentence} Not run: {_whole(row.reason)} {_whole(row.by_hand, begins=True)}"


def _whole(text: str, *, begins: bool = False) -> str:
    """Return a text as a sentence, or as the end of one."""
    begin = text[:1].upper() if begins else text[:1]
    return f"{begin}{text[1:].removesuffix('.')}."


def _when(row: Row) -> str:
    return f"{row.date} `{row.commit[:COMMIT]}`" if row.date else ""
