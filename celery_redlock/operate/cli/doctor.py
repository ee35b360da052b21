"""The command `doctor`: checks nodes, rights and settings, and says what to do.

With `--neighbours` it lists what of the installed distributions was run beside the package.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click

from celery_redlock import anchors, compatibility
from celery_redlock.lock.client import Redlock
from celery_redlock.lock.engine.events import EVICTS_LOCKS, LEAVES_WITH_SLOT
from celery_redlock.lock.node_status import (
    compare_shared_settings,
    missing_rights,
    shared_settings_of,
)
from celery_redlock.lock.reports import NodeList
from celery_redlock.lock.server.admin import STEP_TIMEOUT
from celery_redlock.operate.cli import views
from celery_redlock.operate.cli.group import (
    Table,
    app_from,
    as_data,
    as_json,
    print_result,
    redlock,
)
from celery_redlock.operate.cli.stranded import RecoveryTime, StrandedView
from celery_redlock.operate.cli.taken import lint_of_taken
from celery_redlock.operate.cli.views import ask_workers, quorum_line
from celery_redlock.operate.control import prefix_settings_of, redlock_settings
from celery_redlock.operate.lints import ADVICE, ERROR, WARNING, Lint, lint
from celery_redlock.operate.start_report import open_decisions
from celery_redlock.operate.works_with import (
    InstalledNeighbour,
    installed_distributions,
    named,
    neighbours_among,
    read_works_with,
)
from celery_redlock.tasks.per_app import redlock_of, settings_of

DIFFERENCE_WARNING = anchors.see(
    "until all clients use the same, two tasks may hold one lock", anchors.SETTINGS_DIFFER
)


@dataclass(frozen=True)
class Examination:
    """What is found for an app. nodes_from: the setting that names the nodes."""

    nodes_from: str
    nodes: NodeList
    recovery: RecoveryTime
    lints: Sequence[Lint]

    @classmethod
    def of(cls, app: Any, *, asks_workers: bool = True) -> Examination:
        """Ask nodes and broker. asks_workers: running workers, too, by a broadcast.

        Raises SettingsError if no worker or no beat could start with this Celery.
        """
        compatibility.check((*compatibility.IN_WORKERS, *compatibility.IN_BEAT))
        made = redlock_of(app)
        nodes = made.status()
        recovery = RecoveryTime.of(app)
        of_workers = _lints_of_workers(app, recovery.stranded) if asks_workers else ()
        lints = (*_lints_of_nodes(made, nodes), *of_workers, *lint(app), *open_decisions(app))
        return cls(settings_of(app).nodes_from, nodes, recovery, (*lints, *recovery.lints))

    @property
    def is_wrong(self) -> bool:
        """Whether there is an error, or no quorum."""
        fails = any(node.fails for node in self.nodes.nodes)
        return not self.nodes.has_quorum or fails or any(x.level == ERROR for x in self.lints)

    def lines(self) -> list[str]:
        nodes = self.nodes
        lines = [quorum_line(nodes)]
        for node in nodes.nodes:
            level = ERROR if node.fails else "ok" if node.votes else WARNING
            lines.append(
                f"{level:<7}  {node.node} ({self.nodes_from}): {views.vote_of(node, nodes)}"
            )
        lines += [*self.recovery.lines, *(f"{one.level:<7}  {one}" for one in self.lints)]
        return [*lines, views.summary_line(nodes, self.lints)]

    def data(self) -> Any:
        nodes = self.nodes
        up = [node for node in nodes.nodes if not node.error and not node.votes]
        found = {
            "from": self.nodes_from,
            "nodes": len(nodes.nodes),
            "quorum": nodes.needed,
            "voting": nodes.voting,
            "names": [node.node for node in nodes.nodes],
            "failing": [f"{node}: {cause}" for node, cause in nodes.failing.items()],
            "silent": nodes.silent,
            "new": [node.node for node in up if not node.silent_for and node.role == "master"],
        }
        return as_data({"nodes": found, "recovery": self.recovery, "lints": self.lints})


@redlock.command()
@click.option(
    "--neighbours",
    is_flag=True,
    help="List what was run beside the package and is installed here; ask no node.",
)
@as_json
@click.pass_context
def doctor(ctx: click.Context, neighbours: bool, as_json: bool) -> None:
    """Check the settings and the nodes.

    The exit status is 1 for an error, or without a quorum.
    """
    if neighbours:
        listed = neighbours_among(installed_distributions(), read_works_with())
        print_result(as_json, {"neighbours": as_data(listed)}, _neighbour_table(listed))
        return
    found = Examination.of(app_from(ctx))
    print_result(as_json, found.data(), *found.lines())
    if found.is_wrong:
        ctx.exit(1)


def _neighbour_table(neighbours: Sequence[InstalledNeighbour]) -> Table:
    rows = [(named(one.installed), one.title, one.verdict_here, one.advice) for one in neighbours]
    return Table(("INSTALLED", "NEIGHBOUR", "VERDICT", "WHAT TO KNOW"), rows, "")


def _lints_of_nodes(redlock: Redlock, status: NodeList) -> Iterator[Lint]:
    """Yield errors for shared settings that differ, and warnings of servers and missing rights."""
    for node in status.nodes:
        if node.policy not in ("", "noeviction"):  # an error of the worker is one here, too
            level = ERROR if node.evicts else WARNING
            yield Lint(level, f"{node.node}: maxmemory-policy", node.policy, EVICTS_LOCKS)
        if node.in_cluster:
            yield Lint(WARNING, f"{node.node}: cluster-enabled", "yes", LEAVES_WITH_SLOT)
    if len(status.nodes) == 2:
        hint = "while one of them is away, no lock is granted: name three"
        yield Lint(ADVICE, "app: redlock_nodes", "2 nodes", hint)
    for server in redlock.session.nodes.all:
        for setting, value, hint in server.address.doubts(STEP_TIMEOUT):
            level = ADVICE if setting == "rights" else WARNING
            yield Lint(level, f"{server.name}: {setting}", value, hint)
    own_settings = shared_settings_of(redlock.session)
    for settings, nodes in compare_shared_settings(redlock.session).items():
        hint = (
            f"according to {', '.join(nodes)}; this app uses {own_settings}: {DIFFERENCE_WARNING}"
        )
        yield Lint(ERROR, "other clients", settings, hint)
    for node_name, rights in missing_rights(redlock.session).items():
        hint = "its user lacks them (ACL SETUSER): see operations/security"
        yield Lint(WARNING, node_name, " ".join(rights), hint)


def _lints_of_workers(app: Any, stranded: StrandedView) -> Iterator[Lint]:
    """Yield the workers with other settings or names of nodes, and messages that none has."""
    own_settings = prefix_settings_of(app)
    by_worker, cause = ask_workers(app, redlock_settings.__name__)
    if cause:
        yield Lint(WARNING, "workers: settings", "unknown", f"no worker can be asked: {cause}")
    elif (found := lint_of_taken(app, stranded)) is not None:
        yield found
    for worker, worker_settings in by_worker.items():
        # no worker of another prefix, and none without this package
        if worker_settings.get("prefix") != own_settings["prefix"]:
            continue
        if not worker_settings.get("is_logged", True):
            hint = "lines of the logger 'celery_redlock' are not written: give it a handler"
            yield Lint(WARNING, f"worker {worker}: logging", "no handler", hint)
        if worker_settings["settings"] != own_settings["settings"]:
            hint = f"this app uses {own_settings['settings']}: {DIFFERENCE_WARNING}"
            yield Lint(
                ERROR, f"worker {worker}: settings", f"({worker_settings['settings']})", hint
            )
        elif worker_settings["nodes"] != own_settings["nodes"]:
            hint = f"this app names {', '.join(own_settings['nodes'])}: are these the same servers?"
            yield Lint(WARNING, f"worker {worker}", ", ".join(worker_settings["nodes"]), hint)
