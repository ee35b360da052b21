"""What the example shop concludes from its ledger."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from example_worker import options
from example_worker.ledger import Ledger
from example_worker.orders import plan, shelves
from example_worker.screen import Picture, summary
from example_worker.verdict import Account, Outage, Phase, faults

EXACT = Account(
    kind="coupon", name="spring", start=0, value=2, step=1, limit=2, executed=3, orders=3,
    change=2, serials=2, distinct_serials=2,
)  # fmt: skip
LOSSY = replace(EXACT, value=1, distinct_serials=1)
UNLOCKED = Phase(
    title="without the lock", sent=3, accounts=[LOSSY], deferrals=0, seconds=1.0, finished=True
)
LOCKED = replace(UNLOCKED, title="with the lock", accounts=[EXACT])
OUTAGE = Outage("127.0.0.1:7000", killed_at=1, back_at=2)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger(f"sqlite:///{tmp_path}/shop.sqlite3")
    opened.create()
    opened.stock(shelves("test", plan(160, random.Random(1))))
    yield opened
    opened.close()


def account(ledger: Ledger, name: str) -> Account:
    return next(found for found in ledger.accounts("test") if found.name == name)


TEA, ADA, SPRING = ("stock", "tea"), ("points", "Ada"), ("coupon", "spring")


@pytest.mark.parametrize(
    ("item", "step", "orders", "is_stale", "told"),
    [
        pytest.param(TEA, -1, [1, 2], False, {"should": 8, "value": 8, "lost": 0}, id="in turn"),
        pytest.param(TEA, -1, [1, 2], True, {"should": 8, "value": 9, "lost": 1}, id="stale"),
        pytest.param(ADA, 10, [1, 2], True, {"lost": 1}, id="points, counted in orders"),
        pytest.param(TEA, -1, [7, 7], False, {"twice": 1, "lost": 0}, id="an order twice"),
        pytest.param(SPRING, 1, range(10), False, {"limit": 9, "oversold": 1}, id="oversold"),
        pytest.param(SPRING, 0, [1], False, {"executed": 1, "lost": 0, "oversold": 0}, id="gone"),
    ],
)
def test_the_ledger_tells_what_orders_did(
    ledger: Ledger, item: Any, step: int, orders: Any, is_stale: bool, told: dict[str, int]
) -> None:
    first = ledger.read("test", *item)
    for order in orders:
        read = first if is_stale else ledger.read("test", *item)
        serial = {"serial": order} if item == SPRING and step else {}
        ledger.write(order, read, read.value + step, **serial)
    found = account(ledger, item[1])
    assert {name: getattr(found, name) for name in told} == told


def test_a_serial_number_given_out_twice_is_counted(ledger: Ledger) -> None:
    first, second = (ledger.read("test", "coupon", "spring") for _ in range(2))
    ledger.write(1, first, 1, serial=1)
    ledger.write(2, second, 1, serial=1)
    assert account(ledger, "spring").duplicate_serials == 1


def test_the_phases_keep_their_items_apart(ledger: Ledger) -> None:
    ledger.stock(shelves("later", plan(160, random.Random(2))))
    tea = ledger.read("test", "stock", "tea")
    ledger.write(1, tea, tea.value - 1)
    assert sum(found.executed for found in ledger.accounts("later")) == 0


def test_the_orders_are_spread_evenly_and_numbered_once() -> None:
    orders = plan(160, random.Random(3))
    assert set(Counter(order.name for order in orders).values()) == {10}
    assert sorted(order.number for order in orders) == list(range(160))


@pytest.mark.parametrize("outage", [OUTAGE, None], ids=["an outage", "nodes of one's own"])
def test_a_run_that_loses_without_the_lock_and_is_exact_with_it_proves_the_lock(
    outage: Outage | None,
) -> None:
    assert faults(UNLOCKED, LOCKED, outage) == []


@pytest.mark.parametrize(
    ("unlocked", "locked", "outage", "fault"),
    [
        (replace(UNLOCKED, accounts=[EXACT]), LOCKED, OUTAGE, "no update was lost"),
        (replace(UNLOCKED, finished=False), None, OUTAGE, "without the lock: not finished"),
        (UNLOCKED, None, OUTAGE, "with the lock: not run"),
        (UNLOCKED, replace(LOCKED, finished=False), OUTAGE, "with the lock: not finished"),
        (UNLOCKED, replace(LOCKED, sent=4), OUTAGE, "1 orders never executed"),
        (UNLOCKED, replace(LOCKED, accounts=[replace(EXACT, executed=4)]), OUTAGE, "1 orders exec"),
        (UNLOCKED, replace(LOCKED, accounts=[replace(EXACT, value=1)]), OUTAGE, "1 lost updates"),
        (UNLOCKED, replace(LOCKED, accounts=[replace(EXACT, limit=1)]), OUTAGE, "1 coupons over"),
        (UNLOCKED, replace(LOCKED, accounts=[LOSSY]), OUTAGE, "1 duplicate serial numbers"),
        (UNLOCKED, LOCKED, replace(OUTAGE, back_at=None), "not both killed and brought back"),
    ],
)
def test_a_run_fails_for_a_reason_that_it_names(
    unlocked: Phase, locked: Phase | None, outage: Outage, fault: str
) -> None:
    assert any(fault in found for found in faults(unlocked, locked, outage))


def test_workers_elsewhere_need_servers_that_they_can_reach(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        options.parse(["--no-workers", "--broker", "redis://127.0.0.1/0"])
    assert "--no-workers needs --broker, --nodes and --database" in capsys.readouterr().err


def test_nodes_are_named_with_commas_between_them() -> None:
    parsed = options.parse(["--nodes", "redis://a, redis://b,redis://c"])
    assert parsed.nodes == ("redis://a", "redis://b", "redis://c")


def test_a_node_that_does_not_vote_yet_is_shown_as_such() -> None:
    nodes = [("a:1", "up"), ("b:1", "abstains"), ("c:1", "DOWN")]
    picture = Picture(
        "with the lock", 1.0, 3, 3, 0, 0, deferrals=0, nodes=nodes, unlocked=[LOSSY], locked=[EXACT]
    )
    assert picture.line().endswith("lock nodes up abstains DOWN")


def test_the_summary_says_that_a_node_that_came_back_empty_abstains() -> None:
    lines = summary(UNLOCKED, LOCKED, OUTAGE).splitlines()
    assert lines[-1] == (
        "lock node 127.0.0.1:7000: killed after 1 orders, back, empty, after 2: "
        "abstains for a minute"
    )


INTERRUPTED_IN_A_FINALIZER = """
import signal, time
from example_worker.interruption import Interruption

class Finalized:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

interruption = Interruption()
interruption.install()
with interruption.allowed():
    Finalized()
    print("the finalizer swallowed it", flush=True)
print("not reached", flush=True)
"""


def test_a_signal_that_a_finalizer_swallows_still_ends_the_run_without_a_traceback() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IN_A_FINALIZER], capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (130, "the finalizer swallowed it\n")
    assert ended.stderr == ""
