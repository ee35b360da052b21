"""What a beat under its lock sends and saves, in this process: each way to send a run twice."""

from __future__ import annotations

import gc
import logging
import shelve
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, current_app
from celery._state import get_current_app
from celery.beat import PersistentScheduler
from celery.signals import after_task_publish, before_task_publish

from celery_redlock import Redlock, SettingsError
from celery_redlock.beat import LockedScheduler
from celery_redlock.testing import EmbeddedNode, lose
from tests.conftest import NODE_TIMEOUT, TTL, Nodes, eventually, is_free, see_freed
from tests.integration.conftest import close_connections

LOCK = "beat:shop"
LONG_AGO = datetime(2020, 1, 1)
SHORT = 2.0  # s, of a beat that is to lose its lock by itself


class Recorder(PersistentScheduler):
    """A scheduler that writes down what is called; `hooks` has what else a call does."""

    made: list[Recorder]
    saves: list[int]
    hooks: dict[str, Callable[[Recorder], object]]

    def __init__(self, *args: Any, **options: Any) -> None:
        type(self).made.append(self)
        super().__init__(*args, **options)

    def setup_schedule(self) -> None:
        super().setup_schedule()
        for entry in self.schedule.values():
            if entry.total_run_count == 0:
                entry.last_run_at = LONG_AGO

    def tick(self, *args: Any, **options: Any) -> Any:
        self.do("tick")
        return super().tick(*args, **options)

    def reserve(self, entry: Any) -> Any:
        made = super().reserve(entry)
        self.do("reserve")
        return made

    def sync(self) -> None:
        self.saves.append(self.schedule["note"].total_run_count)
        self.do("sync")
        super().sync()

    def do(self, call: str) -> None:
        self.hooks.pop(call, lambda scheduler: None)(self)


class Beat:
    """A `LockedScheduler` around a `Recorder`. file: that of the schedule."""

    def __init__(self, app: Celery, file: Path) -> None:
        self.app, self.file = app, file
        self.recorder: Any = type("Recorder", (Recorder,), {"made": [], "saves": [], "hooks": {}})
        app.conf.redlock_beat_scheduler = self.recorder
        self.scheduler = LockedScheduler(app=app, schedule_filename=str(file))

    @property
    def is_leader(self) -> bool:
        return bool(self.recorder.made)

    def lead(self) -> Beat:
        eventually(lambda: self.scheduler.tick() is not None and self.is_leader)
        return self

    def see_sent(self, sent: list[str]) -> None:
        """Tick until one more was sent."""
        before = len(sent)
        eventually(lambda: self.scheduler.tick() is not None and len(sent) > before)

    def saved(self) -> Any:
        """Return the run count of the entry in the file, which no scheduler has open."""
        with shelve.open(str(self.file), flag="r") as store:
            return store["entries"]["note"].total_run_count


@pytest.fixture
def app(nodes: Nodes) -> Iterator[Celery]:
    made = Celery("shop", broker="memory://", set_as_default=False)
    made.conf.update(
        redlock_nodes=[node.url for node in nodes], redlock_node_timeout=NODE_TIMEOUT,
        redlock_ttl=TTL, beat_schedule={"note": {"task": "note", "schedule": 3600.0}},
        result_expires=None,
    )  # fmt: skip
    yield made
    close_connections(made)
    made.close()


@pytest.fixture
def beat(app: Celery, tmp_path: Path) -> Iterator[Beat]:
    made = Beat(app, tmp_path / "schedule")
    yield made
    made.scheduler.close()


@pytest.fixture
def sent() -> Iterator[list[str]]:
    with published(after_task_publish) as names:
        yield names


@contextmanager
def published(signal: Any, do: Callable[[], object] = lambda: None) -> Iterator[list[str]]:
    names: list[str] = []

    def receive(sender: Any, **_: Any) -> None:
        names.append(sender)
        do()

    signal.connect(receive)
    try:
        yield names
    finally:
        signal.disconnect(receive)


def test_a_standby_makes_no_scheduler_and_sends_nothing(
    beat: Beat, redlock: Redlock, nodes: Nodes, sent: list[str]
) -> None:
    """One that is made before reads old runs, and sends later what another beat has sent."""
    with redlock.lock(LOCK):
        before = time.monotonic()
        assert beat.scheduler.tick() == 0.0
        assert time.monotonic() - before > TTL / 6, "it asks the nodes all the time"
        beat.scheduler.sync()
        beat.scheduler.close()
        assert not is_free(nodes, LOCK), "its close released the lock of another beat"
        assert (beat.recorder.made, sent) == ([], [])
    beat.lead()
    beat.see_sent(sent)
    assert len(beat.recorder.made) == 1


def test_a_send_is_saved_at_once(beat: Beat, sent: list[str]) -> None:
    """Celery saves every 3 minutes: after a crash the next beat would send all of them again."""
    beat.lead()
    assert beat.recorder.saves[-1] == 0
    beat.see_sent(sent)
    assert beat.recorder.saves[-1] == 1


def test_a_run_that_lost_its_lock_before_the_send_does_not_count(
    beat: Beat, redlock: Redlock, sent: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Celery counts it before it sends it, and takes any Exception for a send that failed."""
    beat.lead().recorder.hooks["reserve"] = lambda scheduler: lose(LOCK, on=redlock)
    before = len(beat.recorder.saves)
    with published(before_task_publish, lambda: None) as prepared:
        eventually(lambda: beat.scheduler.tick() is not None and not beat.recorder.hooks)
    assert (sent, len(beat.recorder.saves), prepared) == ([], before, [])
    assert "Message Error" not in caplog.text
    gc.collect()  # a shelf that is collected writes what it has
    assert beat.saved() == 0
    beat.see_sent(sent)
    assert (sent, len(beat.recorder.made)) == (["note"], 2)


def test_a_run_that_lost_its_lock_as_its_message_was_prepared_is_not_sent(
    beat: Beat, redlock: Redlock, sent: list[str]
) -> None:
    """A claim, a result store or a receiver of the signal may take longer than a ttl."""
    beat.lead()
    with published(before_task_publish, lambda: lose(LOCK, on=redlock)) as begun:
        eventually(lambda: beat.scheduler.tick() is not None and begun)
    assert (sent, beat.saved()) == ([], 0)
    beat.see_sent(sent)
    assert (sent, len(beat.recorder.made)) == (["note"], 2)


def test_a_beat_whose_redlock_was_closed_by_a_users_code_leads_again(
    beat: Beat, app: Celery, sent: list[str]
) -> None:
    beat.lead()
    with Redlock.of(app):
        pass  # nothing renews the lock of this beat from now on
    eventually(lambda: beat.scheduler.tick() is not None and len(beat.recorder.made) == 2)
    assert sent == ["note"]


def test_a_loser_saves_nothing_and_closes_its_store(
    beat: Beat, redlock: Redlock, sent: list[str]
) -> None:
    beat.lead()
    (inner,) = beat.recorder.made
    inner.schedule["note"].total_run_count = 7
    lose(LOCK, on=redlock)
    before = len(beat.recorder.saves)
    beat.scheduler.sync()
    beat.scheduler.close()
    inner.sync()  # as its finalizer does at the end of the process
    del inner
    gc.collect()
    assert len(beat.recorder.saves) == before
    assert beat.saved() == 0


def test_a_loser_does_not_tick_although_nothing_is_due(beat: Beat, redlock: Redlock) -> None:
    beat.lead()
    lose(LOCK, on=redlock)
    calls: list[Recorder] = []
    beat.recorder.hooks["tick"] = calls.append
    eventually(lambda: beat.scheduler.tick() == 0.0 and len(beat.recorder.made) == 2)
    assert calls == []


def test_a_clean_end_saves_and_then_releases(beat: Beat, nodes: Nodes, sent: list[str]) -> None:
    """A successor reads the last runs as soon as it has the lock."""
    beat.lead()
    held: list[bool] = []
    beat.recorder.hooks["sync"] = lambda scheduler: held.append(not is_free(nodes, LOCK))
    beat.scheduler.close()
    assert held == [True]
    see_freed(nodes, LOCK)
    beat.scheduler.close()  # Celery calls it in the handler of SIGTERM, and once more at the end


@pytest.mark.parametrize("closes", [True, False], ids=["of celery beat", "of worker -B"])
def test_a_send_that_a_signal_interrupts_is_not_saved(
    beat: Beat, nodes: Nodes, closes: bool
) -> None:
    """A handler of SIGTERM exits in the middle of the send; Celery's also closes the scheduler."""

    def handler() -> None:
        if closes:
            beat.scheduler.close()
            see_freed(nodes, LOCK)
        raise SystemExit

    beat.lead()
    with published(before_task_publish, handler) as begun, pytest.raises(SystemExit):
        eventually(lambda: beat.scheduler.tick() is None)
    beat.scheduler.close()
    assert (begun, beat.saved()) == (["note"], 0)
    eventually(lambda: beat.scheduler.tick() is not None and beat.recorder.saves[-1] == 1)


def test_a_publish_is_not_retried_after_the_lock_is_lost(
    app: Celery, tmp_path: Path, redlock: Redlock, sent: list[str]
) -> None:
    forever = {"max_retries": None, "interval_start": 0.1, "interval_step": 0, "interval_max": 0.1}
    with EmbeddedNode() as broker:
        app.conf.update(broker_url=broker.url, task_publish_retry_policy=forever)
        app.conf.beat_schedule["note"]["schedule"] = 0.5
        beat = Beat(app, tmp_path / "schedule").lead()
        beat.see_sent(sent)
        (inner,) = beat.recorder.made
        broker.kill()
        retrying = threading.Event()
        beat.recorder.hooks["reserve"] = lambda scheduler: retrying.set()

        def take_away() -> None:
            assert retrying.wait(60)
            lose(LOCK, on=redlock)
            with suppress(AssertionError):
                eventually(lambda: inner.is_discarded, within=30)
                return
            broker.start()  # so that the publish ends, and the test fails

        thread = threading.Thread(target=take_away)
        thread.start()
        before = len(sent)
        eventually(lambda: beat.scheduler.tick() is not None and inner.is_discarded)
        thread.join()
        assert len(sent) == before
        beat.scheduler.close()


def test_a_beat_whose_broker_refuses_lets_another_lead_and_counts_nothing_as_sent(
    app: Celery, tmp_path: Path, nodes: Nodes, sent: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with EmbeddedNode() as broker:
        app.conf.update(broker_url=broker.url, task_publish_retry_policy={"max_retries": 1})
        app.conf.beat_schedule["note"]["schedule"] = 0.5
        beat = Beat(app, tmp_path / "schedule").lead()
        beat.see_sent(sent)
        made = beat.recorder.made
        broker.kill()
        for times in (1, 2):  # the second time it leads, and has no connection from before
            eventually(lambda: beat.scheduler.tick() is not None and len(made) == times)  # noqa: B023
            eventually(lambda: beat.scheduler.tick() is not None and made[-1].is_discarded)
            see_freed(nodes, LOCK)
            assert 0 < beat.scheduler.tick() <= TTL / 3  # and stays behind
            see_freed(nodes, LOCK)
            assert beat.saved() == len(sent)
        assert "its broker cannot be reached" in caplog.text
        broker.start()
        beat.see_sent(sent)
        beat.scheduler.close()
        assert beat.saved() == len(sent)


def test_a_message_that_a_broker_does_not_take_stops_no_other(
    app: Celery, tmp_path: Path, sent: list[str]
) -> None:
    with EmbeddedNode(proto_max_bulk_len="1mb") as broker:
        large = {"task": "large", "schedule": 3600.0, "args": ["x" * 2_000_000]}
        app.conf.update(broker_url=broker.url, task_publish_retry_policy={"max_retries": 1})
        app.conf.beat_schedule["large"] = large
        beat = Beat(app, tmp_path / "schedule").lead()
        beat.see_sent(sent)
        for _ in range(5):
            beat.scheduler.tick()
        (inner,) = beat.recorder.made
        assert (sent, inner.is_discarded) == (["note"], False)
        beat.scheduler.close()


def test_the_interval_is_short_enough_to_see_a_loss_in_time(beat: Beat, sent: list[str]) -> None:
    beat.lead()
    beat.see_sent(sent)
    assert beat.scheduler.max_interval == pytest.approx(TTL / 3)
    interval = eventually(beat.scheduler.tick)
    assert interval == pytest.approx(TTL / 3), "the next entry is due in an hour"


def test_a_beat_that_hangs_loses_its_lock_and_a_slow_one_does_not(
    app: Celery, tmp_path: Path, redlock: Redlock, caplog: pytest.LogCaptureFixture
) -> None:
    app.conf.redlock_node_timeout, app.conf.redlock_ttl = SHORT / 4, SHORT
    beat, done = Beat(app, tmp_path / "schedule"), threading.Event()
    waited: list[float] = []

    def hang(scheduler: Recorder) -> None:
        done.wait(120)

    def tick() -> None:
        beat.lead().recorder.hooks["tick"] = hang
        beat.scheduler.tick()
        waited.append(beat.scheduler.tick())
        beat.scheduler.close()

    thread = threading.Thread(target=tick)
    thread.start()
    eventually(lambda: beat.is_leader and not beat.recorder.hooks)
    assert not redlock.lock(LOCK).try_acquire(1.5 * SHORT), "it did not keep it for a slow tick"
    with redlock.lock(LOCK, wait=60):
        done.set()
        thread.join()
        assert waited == [0.0], "it went on without its lock"
    assert "lost 'beat:shop': its process hung, so it was not renewed" in caplog.text
    assert beat.recorder.saves == [0]


def test_an_error_of_the_scheduler_ends_beat_and_frees_the_lock(beat: Beat, nodes: Nodes) -> None:
    def fail(scheduler: Recorder) -> None:
        raise ConnectionRefusedError("the database is away")

    beat.lead().recorder.hooks["tick"] = fail
    with pytest.raises(ConnectionRefusedError):
        beat.scheduler.tick()
    beat.scheduler.close()  # as Celery does at the end of the process
    see_freed(nodes, LOCK)


def test_an_app_without_a_name_locks_beat(nodes: Nodes) -> None:
    app = Celery(broker="memory://", set_as_default=False)
    app.conf.redlock_nodes = [node.url for node in nodes]
    assert "    . lock -> beat\n" in LockedScheduler(app=app, lazy=True).info


def test_the_current_app_is_an_app(app: Celery) -> None:
    before = get_current_app()
    app.set_current()
    try:
        assert "    . lock -> beat:shop\n" in LockedScheduler(app=current_app, lazy=True).info
    finally:
        before.set_current()


@pytest.mark.parametrize("own", ["celery_redlock.beat:LockedScheduler", "celery.beat.Scheduler"])
def test_without_the_setting_it_wraps_what_celery_would_take(
    app: Celery, own: str, caplog: pytest.LogCaptureFixture
) -> None:
    app.conf.beat_scheduler = own
    with caplog.at_level(logging.WARNING):
        info = LockedScheduler(app=app, schedule_filename="runs").info
    wraps_file = own.startswith("celery_redlock")
    assert ("celery.beat.PersistentScheduler" in info) == wraps_file
    assert ("in a file of this machine, runs" in caplog.text) == wraps_file


class Again(LockedScheduler):
    pass


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("celery_redlock.beat:LockedScheduler", "name the scheduler that it is to wrap"),
        ("celery_redlock.beat.LockedScheduler", "name the scheduler that it is to wrap"),
        (LockedScheduler, "name the scheduler that it is to wrap"),
        (Again, "name the scheduler that it is to wrap"),
        ("no_such_module:Scheduler", "cannot be imported: No module named 'no_such_module'"),
        ("celery.beat:NoScheduler", "cannot be imported: "),
        ("celery.beat:shelve", "must be a subclass of celery.beat.Scheduler"),
        ("", "must be a scheduler, as "),
        (7, "must be a scheduler, as "),
    ],
)
def test_a_wrong_setting_ends_beat_before_its_first_tick(
    app: Celery, value: object, hint: str
) -> None:
    app.conf.redlock_beat_scheduler = value
    with pytest.raises(SettingsError, match="app: redlock_beat_scheduler=") as caught:
        LockedScheduler(app=app, lazy=True)
    assert hint in str(caught.value)
