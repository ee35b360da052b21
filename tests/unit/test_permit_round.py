"""The round for one permit: what it decides by the nodes' replies, also if a handler is cut."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import pytest

from celery_redlock.lock.engine import permits
from celery_redlock.lock.engine.permits import PermitRound
from celery_redlock.lock.model import lease as lease_module
from celery_redlock.lock.model.lease import Lease, LockKey
from celery_redlock.lock.model.votes import quorum_of

LIMIT = 10
SENT = 100.0
FILES = {permits.__file__, lease_module.__file__}
MOST_LINES = 400


class Cut(BaseException):
    """An asynchronous exception."""


class Asked:
    """A round for one of ten permits, and what it has asked of single nodes. moved: those nodes."""

    def __init__(self, nodes: int) -> None:
        self.key = LockKey("p", "r", 30.0, LIMIT)
        self.lease = Lease(self.key, "v:1:x", nodes, quorum_of(nodes), 0.01)
        self.lease.sent = SENT
        self.moved: list[int] = []
        self.round = PermitRound(
            self.lease, lambda node, *_: self.moved.append(node), None, lambda permit: b"x"
        )

    def granted(self, node: int, permit: int, view: str = "0" * LIMIT) -> None:
        self.round.on_reply(node, SENT, [1, permit, view.encode()], "run")

    def refused(self, node: int, view: str) -> None:
        self.round.on_reply(node, SENT, [0, 5000, b"t:1:other", 10**12, view.encode()], "run")

    @property
    def begins(self) -> bool:
        return self.round.tally.reached and self.lease.begin(SENT + 0.01)


def test_a_quorum_for_one_permit_chooses_it_and_moves_the_other_node() -> None:
    asked = Asked(3)
    asked.granted(0, 7)
    asked.granted(1, 4)
    assert not asked.round.decided
    asked.granted(2, 4)
    assert asked.round.decided
    assert (asked.begins, asked.key.permit, asked.moved) == (True, 4, [0])
    asked.granted(0, 4)  # its reply
    assert asked.lease.granted == {0, 1, 2}


def test_a_late_grant_of_another_permit_is_moved_once() -> None:
    asked = Asked(3)
    asked.granted(0, 4)
    asked.granted(1, 4)
    asked.granted(2, 7)
    asked.granted(2, 7)  # what a server that answers nonsense goes on with
    assert asked.moved == [2]


def test_a_full_lock_is_decided_by_a_quorum() -> None:
    asked = Asked(3)
    asked.refused(0, "1" * LIMIT)
    assert not asked.round.decided
    asked.refused(1, "1" * LIMIT)
    assert asked.round.decided
    assert (asked.round.takable(), asked.round.is_free_somewhere) == (None, False)


def test_the_permit_that_a_quorum_has_free_is_takable() -> None:
    asked = Asked(3)
    asked.granted(0, 0, "0111111110")
    asked.granted(1, 1, "1011111110")
    asked.granted(2, 2, "1101111110")
    assert asked.round.decided
    assert asked.round.takable() == 9
    assert asked.round.expires_in() == 0.0


def test_permits_of_single_nodes_are_free_somewhere_and_not_takable() -> None:
    asked = Asked(3)
    for node, view in enumerate(("0a11111111", "b011111111", "bc01111111")):
        asked.granted(node, node, view)
    assert (asked.round.takable(), asked.round.is_free_somewhere) == (None, True)


@pytest.mark.parametrize(
    ("views", "is_free"),
    [
        (
            ("0aaaaaaaaa", "b0bbbbbbbb", "bb0aabbbbb"),
            True,
        ),  # of some, two rivals have one node each
        (("0bbbbbbbbb", "a0bbbbbbbb", "abbbbbbbbb"), False),
        (("0123456789", "0123456789", "a023456789"), True),  # two nodes have permit 0 free
        (("a000000000", "a123456789", "0123456789"), False),
    ],
)
def test_a_permit_whose_holder_has_a_bare_majority_is_not_free(
    views: Sequence[str], is_free: bool
) -> None:
    asked = Asked(3)
    for node, view in enumerate(views):
        if "0" in view:
            asked.granted(node, view.index("0"), view)
        else:
            asked.refused(node, view)
    assert asked.round.is_free_somewhere is is_free


@pytest.mark.parametrize(
    "grants", [(4, 4, 4), (4, 7, 4), (4, 4, 7), (7, 4, 4, 4, 4), (4, 7, 4, 4, 7), (4,)]
)
def test_a_handler_that_is_cut_anywhere_and_called_again_chooses_as_if_it_were_not(
    grants: Sequence[int],
) -> None:
    cuts = 0
    for line in range(1, MOST_LINES):
        asked = Asked(len(grants))
        if not handle_with_cut(asked, grants, line):
            break
        cuts += 1
        assert asked.round.decided, line
        assert asked.begins, line
        assert (asked.key.permit, asked.key.name) == (4, "{p}:lock:r#4")
        assert asked.key.packed_name.endswith(b"r#4\r\n"), line
        assert {node for node, permit in enumerate(grants) if permit != 4} == set(asked.moved)
    assert 20 < cuts < MOST_LINES - 1


def handle_with_cut(asked: Asked, grants: Sequence[int], line: int) -> bool:
    """Handle all replies, with one cut before a line; return whether there was such a line."""
    count, is_cut = 0, False

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count, is_cut
        if frame.f_code.co_filename not in FILES:
            return None
        count += event in ("line", "call")
        if count == line and not is_cut:
            is_cut = True
            raise Cut
        return trace

    for node, permit in enumerate(grants):
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            asked.granted(node, permit)
        except Cut:
            sys.settrace(before)
            asked.granted(node, permit)  # by whoever reads next
        finally:
            sys.settrace(before)
    return is_cut
