"""A drill on the nodes: its keys are removed, and no other key is; and what its bodies tell."""

from __future__ import annotations

from pathlib import Path

from celery_redlock import Lock, Redlock
from celery_redlock.lock.model.keys import completion_key, waiting_key
from celery_redlock.lock.model.options import CompletionMarker, LockOptions
from celery_redlock.lock.server.admin import remove_keys
from celery_redlock.operate.drill.audit import BEGUN, DONE, JournalLine
from celery_redlock.operate.drill.body import Journal, hold_for
from celery_redlock.operate.drill.removal import keys_of
from tests.conftest import Nodes, settle

DRILL, OTHER = "0123abcd", "4567cdef"  # another drill runs on the same nodes


def leave_keys(redlock: Redlock, nodes: Nodes, token: str) -> list[Lock]:
    """Leave what a killed worker does: the locks of a message that was delivered twice.

    Another process waits for each of them, and the message has ended once. An operator has broken
    one more lock. Returns the locks, which are released where nobody has them.
    """
    run = f"drill-{token}-7:celery_redlock.drill:0:0"
    resource = f"drill:{token}:a"
    options = LockOptions(
        (resource,), ttl=60.0, wait=60.0, renew=False, max_hold=None,
        marker=CompletionMarker(run, 300.0, is_redelivered=True), label=run,
    )  # fmt: skip
    lost = options._replace(resources=(f"drill:{token}:b",), marker=None)
    locks = [Lock(redlock, each).acquire() for each in (options, lost)]
    (held,) = locks[0].ownership.acquisitions
    settle(redlock)
    redlock.break_lock(f"drill:{token}:b")
    for node in nodes:
        client = node.client()
        client.set(completion_key("redlock", run), 1)
        for lease in held.leases:
            client.zadd(waiting_key("redlock", lease.key.resource), {"process": 1.0})
    return locks


def names_on(nodes: Nodes) -> list[set[str]]:
    return [set(map(str, node.client().keys("*"))) for node in nodes]


def test_each_key_of_a_drill_is_removed_and_none_of_another_one(
    redlock: Redlock, nodes: Nodes
) -> None:
    locks = [lock for token in (DRILL, OTHER) for lock in leave_keys(redlock, nodes, token)]
    before = names_on(nodes)
    assert [sum(DRILL in name for name in names) for names in before] == [6] * len(nodes)
    _, failing = remove_keys(redlock.session.nodes, keys_of(redlock, DRILL))
    assert failing == {}
    assert names_on(nodes) == [{name for name in names if DRILL not in name} for names in before]
    assert len(locks) == 4


def test_a_body_that_ends_at_once_tells_that_it_has_begun(redlock: Redlock, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with redlock.lock(f"drill:{DRILL}:a", ttl=60.0, wait=60.0) as held:
        hold_for(held, Journal(journal, "0.1"), ("r", "m", "a"), 0.0)
    lines = [JournalLine.of(text) for text in journal.read_text().splitlines()]
    assert [line.what for line in lines if line is not None] == [BEGUN, DONE]
