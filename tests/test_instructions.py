"""The counts of instructions are those of the batches that they are told to be of."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from kombu.asynchronous import Hub, get_event_loop, set_event_loop

from benchmarks import counted
from benchmarks.instructions import (
    KINDS,
    ROOT,
    SINGLE,
    SINGLE_PARTS,
    by_kind,
    of_one,
    ratio,
    send,
    summed,
    unpacked,
)
from tests.conftest import Nodes

COUNT, BATCH = 2, 3


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The socket of whoever counts."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        monkeypatch.setattr(counted, "TURNS", theirs.fileno())
        yield ours


def test_nothing_is_counted_between_a_part_and_the_next_turn(
    turns: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(os, "getloadavg", lambda: done.append("a part ends"))
    monkeypatch.setattr(os, "getsid", lambda _: done.append("a part begins"))
    read = os.read

    def wait(descriptor: int, count: int) -> bytes:
        assert turns.recv(1) == counted.DONE  # said before it waits
        done.append("the turn of another")
        turns.send(counted.GO)
        return read(descriptor, count)

    monkeypatch.setattr(os, "read", wait)
    counted.mark()
    counted.begin()
    assert done == ["a part ends", "the turn of another", "a part begins"]


def test_no_timer_of_the_worker_is_left_in_a_part_that_counts(turns: socket.socket) -> None:
    turns.send(counted.GO)
    before = get_event_loop()
    with contextlib.closing(Hub()) as hub:
        set_event_loop(hub)
        hub.timer.call_repeatedly(0.0, hub.timer.clear)
        try:
            counted.mark_in_worker()
        finally:
            set_event_loop(before)
        assert not hub.timer.queue


def test_parts_in_which_something_waited_do_not_count() -> None:
    calm = {"task": [1000, 1001, 999, 1002, 1000, 1001, 999, 1000]}
    busy = {"task": [1000, 1300, 999, 1900, 1000, 1250, 970, 1001]}
    assert of_one(calm, 5)["task"] == pytest.approx(200, rel=0.002)
    assert of_one(busy, 5)["task"] == pytest.approx(200, rel=0.002)
    assert of_one({SINGLE[0]: calm["task"]}, 5)[SINGLE[0]] == pytest.approx(1000, rel=0.002)


def test_a_ratio_is_that_of_the_parts_of_the_same_turn() -> None:
    later_ones_are_longer = [1000, 1010, 1020, 1500, 1040]
    slower = [round(one * 1.02) for one in later_ones_are_longer]
    assert ratio(later_ones_are_longer, slower) == pytest.approx(1.02, rel=0.001)
    with_replies_at_once = [1000, 970, 1000, 970, 1000, 970, 1000]
    assert ratio(with_replies_at_once, [1020] * 7) == pytest.approx(1.02)


def test_a_part_of_the_count_is_found_by_its_number(tmp_path: Path) -> None:
    for number in (1, 2, 10):
        (tmp_path / f"out.{number}").write_text(f"events: Ir\nsummary: {number * 100}\n\nfn=(1)\n")
    (tmp_path / "out").write_text("summary: 7\n")  # what follows the last mark
    assert summed(tmp_path) == [100, 200, 1000]
    (tmp_path / "out.11").write_text("events: Ir\n")
    with pytest.raises(RuntimeError, match=r"out\.11 .* has no summary"):
        summed(tmp_path)


def test_each_kind_gets_the_parts_that_are_its_batches(
    nodes: Nodes, turns: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    single = SINGLE_PARTS * COUNT
    turns.send(counted.GO * len(SINGLE) * (single + 2))
    urls = [node.url for node in nodes]
    done = ["start"]

    def end_part() -> tuple[float, float, float]:
        done.append("between")
        return (0.0, 0.0, 0.0)

    monkeypatch.setattr(os, "getloadavg", end_part)
    for kind, size in (("pair", 1), ("pair", 3), ("send", 1), ("send", 3)):
        if kind == "pair":
            counted.pairs(urls[:size], single)
        else:
            counted.sends(urls[:size], urls[0], single)
        done[-single - 2 : -1] = [f"first {kind} {size}", *[f"{kind} {size}"] * single]
    send(urls[0], COUNT, BATCH)
    with nodes[0].client() as client:
        waiting = [json.loads(raw)["headers"] for raw in client.lrange(counted.QUEUE, 0, -1)]
    names = [headers["task"] for headers in reversed(waiting)]
    assert names[-2:] == [counted.MARK, counted.END]
    batches = " ".join(names[:-2]).split(counted.MARK)[1:]
    assert [batch.split() for batch in batches] == [
        [*[kind] * counted.UNCOUNTED, counted.BEGIN, *[kind] * BATCH]
        for kind in (counted.PLAIN, counted.LOCKED)
    ] * (1 + COUNT)
    parts = [*done, *(batch.split()[0] for batch in batches)]
    numbered = by_kind(range(len(parts)), COUNT)
    singles = [[name] * single for name in ("pair 1", "pair 3", "send 1", "send 3")]
    assert {kind: [parts[place] for place in places] for kind, places in numbered.items()} == dict(
        zip(KINDS, (*singles, ["plain"] * 2, ["locked"] * 2), strict=True)
    )
    with pytest.raises(RuntimeError, match="39 parts were counted, for 3 batches"):
        by_kind(range(len(parts)), COUNT + 1)


def test_a_tree_is_a_folder_or_a_revision(tmp_path: Path) -> None:
    assert unpacked(str(ROOT), tmp_path) == ROOT
    found = unpacked("HEAD", tmp_path)
    assert found == tmp_path
    assert (found / "celery_redlock" / "__init__.py").is_file()
