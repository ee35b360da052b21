"""Runs that have to find a fault, so that a row without one says something. They have no row."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from neighbours import proxies, schedulers, servers
from neighbours.agents import NEW_RELIC, SENTRY, crons, new_relic
from neighbours.lock_nodes import DRIVER, of_npm
from neighbours.row import CONTROLS, DOES_NOT, REFUSED, Neighbour, Seen
from neighbours.run import Run
from neighbours.task_classes import TENANT_REQUIREMENTS, tenants


def unlocked(run: Run) -> Seen:
    return run.story(app="neighbours.unlocked_app", patience=15)


def beats(run: Run) -> Seen:
    return schedulers.beats(run, more={"scheduler": "celery.beat:Scheduler"})


def two_servers(run: Run) -> Seen:
    """Run on one node whose HAProxy leads to two servers in turn."""
    with ExitStack() as stack:
        pair = stack.enter_context(servers.lock_nodes(2))
        port = stack.enter_context(proxies.haproxy(run.folder, *(node.port for node in pair)))
        return run.story(nodes=(f"redis://127.0.0.1:{port}/0",))


def older_celery(run: Run) -> Seen:
    return run.beside_servers("neighbours.refused_start")


NEIGHBOURS = (
    Neighbour(
        "Two beats without LockedScheduler",
        CONTROLS,
        "Both send, so that each entry is sent twice.",
        beats,
        verdict=DOES_NOT,
        faults=frozenset(("a beat that waits", "one beat at a time", "no entry sent twice")),
    ),
    Neighbour(
        "Tasks without the base class",
        CONTROLS,
        "Bodies of one key overlap, and a killed one comes back after the visibility timeout.",
        unlocked,
        verdict=DOES_NOT,
        faults=frozenset(
            ("overlaps", "waiting", "revoke", "unique", "redelivery", "lost"),
        ),
    ),
    Neighbour(
        "New Relic without its setting",
        CONTROLS,
        "It counts each exception as an error, Celery's own, too.",
        new_relic,
        NEW_RELIC,
        verdict=DOES_NOT,
        faults=frozenset(("a deferral is an error", "a skip is an error")),
    ),
    Neighbour(
        "Sentry Crons without its setting",
        CONTROLS,
        "Beat opens a check-in of a skipped run, and nothing closes it.",
        partial(crons, excluded=False),
        SENTRY,
        verdict=DOES_NOT,
        faults=frozenset(("a skip leaves a check-in open",)),
    ),
    Neighbour(
        "One node, and a proxy that leads to two servers",
        CONTROLS,
        "Each server grants the lock, so bodies of one key overlap.",
        two_servers,
        verdict=DOES_NOT,
        faults=frozenset(("overlaps", "waiting")),
    ),
    Neighbour(
        "PostgreSQL 13",
        CONTROLS,
        "It is older than the oldest release that is supported.",
        of_npm("13.23.0-beta.16"),
        DRIVER,
        verdict=REFUSED,
        error="PostgreSQL 13 is too old",
        faults=frozenset((REFUSED,)),
    ),
    Neighbour(
        "Celery 5.5",
        CONTROLS,
        "It is older than the package requires, and was installed beside it all the same.",
        older_celery,
        ("celery==5.5.3", "kombu==5.5.4"),
        forced=True,
        verdict=REFUSED,
        error="environment: celery=5.5.3: must be at least 5.6",
        faults=frozenset((REFUSED,)),
    ),
    Neighbour(
        "tenant-schemas-celery 3",
        CONTROLS,
        "It writes the tenant into the headers of the caller, who may send them for another one.",
        partial(tenants, alone=False),
        ("tenant-schemas-celery==3.0.0", *TENANT_REQUIREMENTS),
        verdict=DOES_NOT,
        faults=frozenset(("schema",)),
    ),
)
