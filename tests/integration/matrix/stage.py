"""One pool on one broker: its workers, the messages they get, and what comes of them.

One worker lives through all ends that leave it alive, side by side; each end that is the worker's
own has one to itself. An heir takes over what those leave behind, as the next worker would.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from celery import VERSION, Celery

from celery_redlock import Redlock
from celery_redlock.testing import EmbeddedNode, WorkerProcess
from tests.conftest import FREED, NODE_TIMEOUT, TTL, eventually, see_listening
from tests.integration.matrix import ends
from tests.integration.matrix.ends import After, End
from tests.integration.matrix.tasks import UNSTORABLE, queue_of
from tests.integration.matrix.watch import Watch, follow, lives
from tests.workers import ForkedWorker

ROOT = Path(__file__).resolve().parents[3]
NEWEST = VERSION >= (5, 7)
SHARED = "ends"  # the queue of the worker that lives through most of it
CHILDREN = 8
LONG_TTL = 30.0  # s: the default; what is free by `FREED` after an end was given back
SHORT_TTL = 2 * TTL  # s: where nobody gives it back
EXPIRES = 4.0  # s: for a message that is to be put back before
SOFT_SHUTDOWN = 1.0  # s
VISIBILITY = 2.0  # s: after which an heir gets what a dead worker had; Redis alone needs it
PATIENCE = 120.0  # s: by then every end has shown, also on a machine that stalls


@dataclass
class Cell:
    """One end in one pool on one broker: what is expected, and what was seen.

    took: s from the end of a body until no node had its lock; the longest of its bodies'.
    """

    end: End
    pool: str
    broker: str
    late: bool
    after: After
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    state: str = "?"
    bodies: int = 0
    freed: str = "?"
    took: float | None = None
    wrong: list[str] = field(default_factory=lambda: ["not seen"])

    def __post_init__(self) -> None:
        if self.end.name == "the result backend fails":
            self.id += UNSTORABLE

    @property
    def name(self) -> str:
        return f"{self.end.name}, acks {'late' if self.late else 'early'}"

    @property
    def task(self) -> str:
        rejecting = "_rejecting" if "reject_on_worker_lost" in self.end.name else ""
        return f"ends.{'late' if self.late else 'early'}{rejecting}"

    def __str__(self) -> str:
        took = "" if self.took is None else f" in {self.took:.1f} s"
        seen = f"{self.state:8} {self.bodies} x, {self.freed}{took}"
        wrong = f"  <- {'; '.join(self.wrong)}" if self.wrong else ""
        return f"{self.pool:9} {self.broker:9} {self.name:56} {seen}{wrong}"


def cells_of(pool: str, broker: str) -> list[Cell]:
    """Return the cells of one pool on one broker, not seen yet."""
    return [
        Cell(end, pool, broker, late, after)
        for end in ends.ENDS
        for late in (False, True)
        if (after := end.after(pool, broker, late=late, newest=NEWEST)) is not None
    ]


def shared_worker() -> str:
    """Return the name of the worker that lives through most ends."""
    return f"{SHARED}@{socket.gethostname()}"


class Stage:
    """What the cells of one pool on one broker share. url: of `broker`. backend: for results."""

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        pool: str,
        broker: str,
        url: str,
        backend: EmbeddedNode,
        nodes: Sequence[EmbeddedNode],
    ) -> None:
        self.pool, self._broker, self._stack = pool, broker, stack
        self.cells = cells_of(pool, broker)
        self.workers: list[WorkerProcess] = []
        self.queues: list[str] = []
        self.node_urls = [node.url for node in nodes]
        self._log = folder / "lines"
        self._log.touch()
        self._states = backend.client()
        stack.callback(self._states.close)
        self._app = Celery("stage", broker=url, set_as_default=False)
        self._app.conf.task_default_queue = SHARED
        stack.callback(self._app.close)
        self._conf = {
            "broker_url": url,
            "result_backend": f"{__package__}.tasks:FailingBackend+{backend.url}",
            "task_default_queue": SHARED,
            "redlock_nodes": self.node_urls,
            "redlock_node_timeout": NODE_TIMEOUT,
        }
        self.watch = stack.enter_context(Watch(nodes, self._log))

    def launch(
        self,
        *queues: str,
        pool: str = "",
        concurrency: int = 2,
        options: Sequence[str] = (),
        **conf: Any,
    ) -> WorkerProcess:
        """Launch a worker; it ends with the stage."""
        new = [queue for queue in queues if queue not in self.queues]
        self.queues += new
        for queue in new:
            self._app.amqp.queues.add(queue_of(queue, self._broker))
        made = ForkedWorker(
            f"{__package__}.tasks",
            pool=pool or self.pool,
            concurrency=concurrency,
            name=queues[0],
            env={
                "ENDS_LOG": str(self._log),
                "ENDS_QUEUES": ",".join(queues),
                "ENDS_BROKER": self._broker,
                "ENDS_CONF": json.dumps({**self._conf, **conf}),
            },
            options=options,
            cwd=ROOT,
        )
        made.launch()
        self._stack.callback(made.log.unlink, missing_ok=True)
        self._stack.callback(made.kill)
        self.workers.append(made)
        return made

    def send(self, cell: Cell, queue: str, **more: Any) -> None:
        options = {**cell.end.limits, **more}
        arguments = cell.name, cell.end.name
        self._app.send_task(cell.task, arguments, task_id=cell.id, queue=queue, **options)

    def see_listening(self) -> None:
        see_listening(self._app, SHARED, PATIENCE)

    def revoke(self, *cells: Cell, **how: Any) -> None:
        where = [shared_worker()]
        ids = [cell.id for cell in cells]
        said = self._app.control.revoke(
            ids, destination=where, reply=True, timeout=PATIENCE, **how
        )  # fmt: skip
        assert said, f"{where} does not answer"

    def go(self, *cells: Cell) -> None:
        for cell in cells:
            self._log.with_name(f"{cell.name}.go").touch()

    def see_begun(self, *cells: Cell) -> None:
        for cell in cells:
            body = eventually(lambda cell=cell: self.watch.bodies(cell.id), PATIENCE)[0]
            eventually(lambda pid=body.pid: self.watch.is_alive(pid), PATIENCE)

    def see_known(self, cell: Cell) -> None:
        """Return when the shared worker's main process knows that a cell's body has begun.

        Source: celery.concurrency.asynpool: on_partial_read: what a child had begun that is gone
        before that is taken for not begun, and run by another child.
        """
        where = self._app.control.inspect([shared_worker()], limit=1)

        def is_known() -> bool:
            told = (where.active() or {}).values()
            return any(run["id"] == cell.id for runs in told for run in runs)

        eventually(is_known, PATIENCE)

    def state_of(self, cell: Cell) -> str:
        stored = self._states.get(f"celery-task-meta-{cell.id}")
        return "PENDING" if stored is None else str(json.loads(str(stored))["status"])

    def observe(self, cell: Cell, expected: After) -> None:
        """Note what is seen of a cell, and what is not as expected."""
        bodies, looks = self.watch.bodies(cell.id), list(self.watch.looks)
        cell.state, cell.bodies = self.state_of(cell), len(bodies)
        cell.freed = self._who_freed(cell)
        cell.wrong, took = [], []
        for body, following in zip(bodies, [*bodies[1:], None], strict=False):
            wrong, seconds = follow(body, following, looks)
            cell.wrong += wrong
            took += [] if seconds is None else [seconds]
        cell.took = max(took, default=None)
        cell.wrong += min((self._unlike(cell, after) for after in expected.may_be), key=len)
        if max(took, default=0.0) > (LONG_TTL if expected.freed == ends.TTL else FREED):
            cell.wrong.append("freed too late")

    @staticmethod
    def _unlike(cell: Cell, after: After) -> list[str]:
        wrong = []
        if after.state and cell.state not in after.states:
            wrong.append(f"state {cell.state}, not {after.state}")
        if cell.bodies != after.bodies:
            wrong.append(f"{cell.bodies} bodies, not {after.bodies}")
        if cell.freed != after.freed:
            wrong.append(f"freed by {cell.freed}, not {after.freed}")
        return wrong

    def _who_freed(self, cell: Cell) -> str:
        by = self.watch.releases(cell.name)
        if by is None:
            return ends.NOBODY
        return {"holder": ends.RUN, "parent": ends.PARENT}[by[0]] if by else ends.TTL

    def settle(self, cells: Sequence[Cell], expected: Callable[[After], After]) -> None:
        end = time.monotonic() + PATIENCE
        left = list(cells)
        while left and time.monotonic() < end:
            for cell in left:
                self.observe(cell, expected(cell.after))
            left = [cell for cell in left if cell.wrong]
            time.sleep(0.3)

    def drain(self) -> None:
        last = {queue: Cell(ends.ENDS[0], self.pool, "", False, After("")) for queue in self.queues}
        for queue, cell in last.items():
            self.send(cell, queue)
        for cell in last.values():
            eventually(lambda cell=cell: self.state_of(cell) == "SUCCESS", PATIENCE)

    def report(self) -> str:
        lines = [str(cell) for cell in self.cells]
        if any(cell.wrong for cell in self.cells):
            for worker in self.workers:
                tail = worker.output().splitlines()[-15:] if worker.log.exists() else []
                lines += [f"-- {worker.name}", *tail]
        return "\n".join(lines)


def live(stage: Stage) -> None:
    """Live through all ends of a stage. Raises AssertionError with all cells where it is stuck."""
    try:
        _live(stage)
    except AssertionError as stuck:
        for cell in stage.cells:
            stage.observe(cell, cell.after)
        raise AssertionError(f"{stuck}\n{stage.report()}") from stuck


def _live(stage: Stage) -> None:
    alone = [cell for cell in stage.cells if stage.pool in cell.end.alone]
    together = [cell for cell in stage.cells if stage.pool not in cell.end.alone]
    shared = stage.launch(SHARED, concurrency=CHILDREN)
    troupe = launch_alone(stage, alone)
    shared.wait_ready(PATIENCE)
    stage.see_listening()
    live_together(stage, together)
    live_alone(stage, troupe)
    stage.settle(together, After.before_the_heir)
    shared.stop()
    for cell in alone:
        eventually(lambda cell=cell: not stage.watch.is_locked(cell.name), PATIENCE)
    # of a pool with a hub: others ask the broker for what was left behind once in a while only
    short = {"visibility_timeout": VISIBILITY}
    heir = stage.launch(*stage.queues, pool="prefork", broker_transport_options=short)
    heir.wait_ready(PATIENCE)
    stage.settle(stage.cells, lambda after: after)
    stage.drain()
    for cell in stage.cells:
        stage.observe(cell, cell.after)


def live_together(stage: Stage, cells: Sequence[Cell]) -> None:
    """Send what one worker can live through, and do what is to be done to it there."""
    before = [cell for cell in cells if cell.end.name.endswith("before it runs")]
    waiting = [cell for cell in cells if cell.end.name.endswith("while it waits")]
    revoked = [cell for cell in before if cell.end.name.startswith("revoked")]
    stage.revoke(*revoked)
    with held(stage, waiting):
        for cell in cells:
            expires = EXPIRES if cell in waiting else 0.001
            is_to = cell.end.name.startswith("expired")
            stage.send(cell, SHARED, **({"expires": expires} if is_to else {}))
        for cell in cells:
            end_running(stage, cell)
        for cell in waiting:
            seen = "DEFERRED", "REVOKED"
            eventually(lambda cell=cell, seen=seen: stage.state_of(cell) in seen, PATIENCE)
            if cell.end.name.startswith("revoked"):
                stage.revoke(cell)
        for cell in waiting:
            eventually(lambda cell=cell: stage.state_of(cell) == "REVOKED", PATIENCE)


@contextlib.contextmanager
def held(stage: Stage, cells: Sequence[Cell]) -> Iterator[None]:
    with ExitStack() as stack:
        redlock = stack.enter_context(Redlock(stage.node_urls, node_timeout=NODE_TIMEOUT))
        for cell in cells:
            stack.enter_context(redlock.lock(cell.name, wait=PATIENCE))
        yield


def end_running(stage: Stage, cell: Cell) -> None:
    """End a run that is to be terminated, or to be killed, once its body is there."""
    if cell.end.name.startswith("kill -9 of the child"):
        stage.see_begun(cell)
        stage.see_known(cell)
        stage.go(cell)
        return
    _, is_to, name = cell.end.name.partition("revoked while it runs, ")
    if is_to:
        stage.see_begun(cell)
        stage.revoke(cell, terminate=True, signal=f"SIG{name}")
        if stage.pool == "prefork" and cell.after.state == "SUCCESS":
            stage.go(cell)  # it has not heard it


@dataclass(frozen=True)
class Lonely:
    """A worker that has one end alone, and the messages that it gets."""

    worker: WorkerProcess
    queue: str
    cells: Sequence[Cell]

    @property
    def signal(self) -> signal.Signals | None:
        """What is to be sent to its main process; None where its bodies end by themselves."""
        word = self.cells[0].end.name.split()[0]
        told = {"warm": "SIGTERM", "soft": "SIGQUIT", "cold": "SIGQUIT", "kill": "SIGKILL"}
        return signal.Signals[told[word]] if word in told else None


def launch_alone(stage: Stage, cells: Sequence[Cell]) -> list[Lonely]:
    """Launch the workers that have an end, or a message, to themselves."""
    groups: dict[tuple[str, bool], list[Cell]] = {}
    for cell in cells:
        is_apart = stage.pool in cell.end.apart
        groups.setdefault((cell.end.name, is_apart and cell.late), []).append(cell)
    troupe = []
    for number, group in enumerate(groups.values()):
        first, queue = group[0], f"{SHARED}-{number}"
        conf: dict[str, Any] = {}
        if first.end.name == "soft shutdown":
            conf["worker_soft_shutdown_timeout"] = SOFT_SHUTDOWN
        if first.after.freed == ends.TTL:
            conf["redlock_ttl"] = SHORT_TTL
        worker = stage.launch(queue, options=first.end.options, **conf)
        troupe.append(Lonely(worker, queue, group))
    return troupe


def live_alone(stage: Stage, troupe: Sequence[Lonely]) -> None:
    """Give each worker its messages, and its end while their bodies run."""
    for lonely in troupe:
        lonely.worker.wait_ready(PATIENCE)
        for cell in lonely.cells:
            stage.send(cell, lonely.queue)
    for lonely in troupe:
        if (number := lonely.signal) is None:
            continue
        stage.see_begun(*lonely.cells)
        if lonely.cells[0].end.name.endswith("and child"):
            lonely.worker.kill()
        else:
            lonely.worker.signal(number)
    for lonely in troupe:
        see_the_end(stage, lonely)


def see_the_end(stage: Stage, lonely: Lonely) -> None:
    """Return when a worker is gone; what it waits for ends then, what it cuts does not."""
    worker = lonely.worker
    if lonely.signal is None:
        stage.settle(lonely.cells, After.before_the_heir)
        worker.stop()
        return
    eventually(lambda: "hutdown" in worker.output() or not lives(worker.pid), PATIENCE)
    stage.go(*(cell for cell in lonely.cells if After("SUCCESS") in cell.after.may_be))
    stage.settle(lonely.cells, After.before_the_heir)
    if stage.pool == "solo" and not NEWEST and lonely.signal == signal.SIGQUIT:
        worker.kill()  # what is raised out of the handler keeps Celery from ending it
        return
    eventually(lambda: not lives(worker.pid), PATIENCE)
