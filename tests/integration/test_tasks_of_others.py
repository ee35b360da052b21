"""Tasks whose code one does not own: locked by a setting, like one's own."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from typing import Any

import celery.worker.request
import pytest
from billiard.exceptions import WorkerLostError
from celery import Celery, Task, chord, shared_task
from celery.exceptions import ChordError, TaskRevokedError

import celery_redlock
from celery_redlock import LockedTask, LockTaken, Redlock, RedlockError, SettingsError, current_lock
from celery_redlock.tasks.arguments import BEHIND_A_DECORATOR
from celery_redlock.tasks.worker_request import Request
from celery_redlock.testing import EmbeddedNode
from tests import fork_server
from tests.conftest import PATIENCE, Nodes, eventually
from tests.integration.conftest import ROOT, MakeStage, Stage, Standing, no_shared_task_left
from tests.workers import ForkedWorker

# a module that a stage imports anew gives its shared tasks to each app that is still there, too
pytestmark = [
    pytest.mark.filterwarnings("ignore:Task name .vendor.* is already registered"),
    pytest.mark.xdist_group("vendor"),
]

KINDS = ("plain", "bound", "late_ack", "retried", "shared", "class", "late", "wrapped")
numbers = itertools.count()


@pytest.fixture(scope="module")
def standing(set_standing_stage: MakeStage) -> Standing:
    """Give a stage whose one worker runs an app that imports nothing of ours."""
    made = set_standing_stage(result_extended=True)
    made.stack.callback(sys.modules.pop, "tests.integration.vendor")
    with no_shared_task_left():  # the apps of other tests here would have it, too
        made.tasks = importlib.import_module("tests.integration.vendor")
        made.app.finalize()
    made.stack.callback(made.app.close)
    return Standing(made, [made.worker(module="tests.integration.vendor", concurrency=3)])


@pytest.fixture(scope="module")
def stage(standing: Standing) -> Stage:
    return standing.stage


@pytest.fixture
def account() -> str:
    return f"account{next(numbers)}"


def named(stage: Stage, kind: str) -> Any:
    return stage.app.tasks[f"vendor.every_{kind}"]


def let_end(stage: Stage, account: str) -> None:
    stage.log.with_name(account).touch()


def ran(stage: Stage, account: str) -> int:
    return len([line for line in stage.lines("end") if line.key == account])


def test_the_app_of_the_worker_imports_nothing_of_ours() -> None:
    source = (ROOT / "tests/integration/vendor.py").read_text()
    assert "celery_redlock" not in source


@pytest.mark.parametrize("kind", KINDS)
def test_a_setting_alone_locks_a_task_however_it_is_made(
    stage: Stage, account: str, kind: str
) -> None:
    task = named(stage, kind)
    with task.lock_for(account, wait=60):
        waiting = task.delay(account)
        stage.see_deferred(waiting)
        assert not [line for line in stage.lines("begin") if line.key == account]
    eventually(lambda: [line for line in stage.lines("begin") if line.key == account])
    assert not stage.is_free(f"account:{account}")
    let_end(stage, account)
    assert waiting.get(timeout=120) == account
    assert ran(stage, account) == 1
    stage.see_freed(f"account:{account}")


def test_a_worker_says_at_its_start_which_tasks_stand_behind_a_decorator(
    worker: ForkedWorker,
) -> None:
    [line] = [one for one in worker.output().splitlines() if BEHIND_A_DECORATOR in one]
    assert ": INFO/" in line
    assert "vendor.every_wrapped" in line
    assert "vendor.every_plain" not in line


def test_two_tasks_of_one_template_run_one_after_the_other(stage: Stage, account: str) -> None:
    let_end(stage, account)
    results = [named(stage, kind).delay(account) for kind in KINDS]
    assert [result.get(timeout=120) for result in results] == [account] * len(KINDS)
    lines = [line for line in stage.lines("begin", "end") if line.key == account]
    assert [line.what for line in lines] == ["begin", "end"] * len(KINDS)


def test_an_error_of_the_body_frees_the_lock(stage: Stage, account: str) -> None:
    let_end(stage, account)
    with pytest.raises(KeyError):
        named(stage, "plain").delay(account, "raise").get(timeout=120)
    stage.see_freed(f"account:{account}")


def test_the_lock_of_a_killed_child_is_released(stage: Stage, account: str) -> None:
    let_end(stage, account)
    result = named(stage, "plain").delay(account, "be killed")
    with pytest.raises(WorkerLostError):
        result.get(timeout=120)
    stage.see_freed(f"account:{account}")


def test_autoretry_of_a_task_takes_no_contention_for_an_error(stage: Stage, account: str) -> None:
    task = stage.app.tasks["vendor.strict"]
    with task.lock_for(account, wait=60):
        result = task.delay(account)
        with pytest.raises(LockTaken):
            result.get(timeout=120)
    assert stage.info(result)["retries"] == 0


def test_an_exact_name_goes_before_globs(stage: Stage, account: str) -> None:
    task = stage.app.tasks["vendor.rebuild"]
    with task.lock_for(account, wait=60), pytest.raises(TaskRevokedError):
        task.delay(account).get(timeout=120)
    assert task.lock_for(account).resource == "index"


def test_a_call_sets_options_for_itself(stage: Stage, account: str) -> None:
    task = named(stage, "plain")
    with task.lock_for(account, wait=60), pytest.raises(LockTaken):
        task.apply_async((account,), lock={"on_conflict": "fail"}).get(timeout=120)


def test_a_chord_of_them_ends(stage: Stage, account: str) -> None:
    let_end(stage, account)
    strict, plain = stage.app.tasks["vendor.strict"], named(stage, "plain")
    with plain.lock_for(account, wait=60):
        waits = chord([plain.si(account), plain.si(account)])(named(stage, "late").si(account))
        stage.see_deferred(waits.parent[0])
    assert waits.get(timeout=120) == account
    with strict.lock_for(account, wait=60):
        fails = chord([strict.si(account), plain.si(account)])(plain.si(account))
        with pytest.raises(ChordError):
            fails.get(timeout=120, follow_parents=False)


@pytest.fixture
def app(app: Celery) -> Celery:
    app.conf.redlock_tasks = {"vendor.*": {"key": "account:{account}", "ttl": 29}}
    return app


def held() -> tuple[str, float] | None:
    lock = current_lock()
    return None if lock is None else (lock.resource, lock.ttl)


def test_the_class_of_others_and_the_object_that_they_hold_stay(app: Celery) -> None:
    class Theirs(celery.worker.request.Request):
        pass

    class Synced(Task):
        Request = Theirs

        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, account: str) -> Any:
            return held()

    locked, free = (app.register_task(Synced(name)) for name in ("vendor.sync", "mine.sync"))
    app.finalize()
    assert app.tasks["vendor.sync"] is locked
    assert locked.apply(("a",)).get() == ("account:a", 29.0)
    assert free.apply(("a",)).get() is None
    assert not issubclass(Synced, LockedTask)
    assert issubclass(locked.Request, Request)
    assert issubclass(locked.Request, Theirs)
    assert Synced.Request is Theirs


def test_a_run_that_an_instance_sets_itself_is_locked(app: Celery) -> None:
    class Set(Task):
        name = "vendor.set"

        def __init__(self) -> None:
            self.run = lambda account: held()

    class Retried(Set):
        name = "vendor.retried"
        autoretry_for = (KeyError,)

    for cls in (Set, Retried):
        task = app.register_task(cls())
        app.finalize()
        assert task.apply(("a",)).get() == ("account:a", 29.0)


@pytest.mark.parametrize(("spared", "retries"), [((), 0), ((ValueError,), 2)])
def test_autoretry_stands_around_the_gate_and_spares_what_the_task_says(
    app: Celery, redlock: Redlock, spared: tuple[type[Exception], ...], retries: int
) -> None:
    retried = []

    class Retried(Task):
        name = "vendor.retried"
        autoretry_for = (Exception,)
        dont_autoretry_for = spared
        max_retries = 2
        default_retry_delay = 0

        def run(self, account: str) -> None: ...

        def on_retry(self, *args: Any) -> None:
            retried.append(args)

    task = app.register_task(Retried())
    with redlock.lock("account:a"):
        assert isinstance(task.apply(("a",)).result, LockTaken)
    assert len(retried) == retries


def test_a_shared_task_that_comes_late_is_locked_in_the_apps_that_say_so(app: Celery) -> None:
    app.finalize()
    with no_shared_task_left(app):

        @shared_task(name="vendor.came_late")
        def came_late(account: str) -> Any:
            return held()

        assert app.tasks["vendor.came_late"].apply(("a",)).get() == ("account:a", 29.0)


def test_celerys_own_tasks_are_never_locked(app: Celery) -> None:
    app.conf.redlock_tasks = {"*": {}}
    app.finalize()
    assert not isinstance(app.tasks["celery.chord_unlock"], LockedTask)


@pytest.mark.parametrize("method", ["map", "starmap", "chunks"])
def test_what_would_call_the_body_past_the_lock_is_refused(app: Celery, method: str) -> None:
    @app.task(name="vendor.sync", shared=False)
    def sync(account: str) -> None: ...

    app.finalize()
    more = (1,) if method == "chunks" else ()
    with pytest.raises(RedlockError, match="group"):
        getattr(app.tasks["vendor.sync"], method)([("a",)], *more)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([], None),
        (["vendor.sync"], "must map task names or globs"),
        ({"vendor.sync": 30}, "name or glob to its options"),
        ({"vendor.sync": {"tll": 30}}, r"redlock_tasks\['vendor.sync'\].*did you mean 'ttl'"),
        ({"vendor.s*": {"ttl": "x"}}, r"redlock_tasks\['vendor.s\*'\]\['ttl'\]='x'"),
        ({"vendor.*": {"key": "{acount}"}}, r"\['key'\].*did you mean 'account'"),
        (
            {"vendor.*": {"args": ["acount"]}},
            r"To leave it out, set \{'vendor.sync': \{'key': False\}\} first",
        ),
        ({"vendor.*": {"limit": 2, "fencing": True}}, "limit=1, or no fencing"),
        ({"celery.chord_unlock": {}}, "Celery's own tasks are never locked"),
        ({"celery.*": {}}, "Celery's own tasks are never locked"),
    ],
)
def test_what_cannot_be_meant_raises_when_the_app_finalizes_and_at_each_later_use(
    app: Celery, entries: Any, words: str | None
) -> None:
    app.conf.redlock_tasks = entries

    @app.task(name="vendor.sync", shared=False)
    def sync(account: str) -> None: ...

    if words is None:
        app.finalize()
        assert not isinstance(app.tasks["vendor.sync"], LockedTask)
        return
    with pytest.raises(SettingsError, match=words):
        app.finalize()
    if "vendor" in str(entries):
        for _ in range(2):
            with pytest.raises(SettingsError, match=words):
                sync.delay("a")
        assert isinstance(sync.apply(("a",)).result, SettingsError)


def test_what_cannot_be_meant_is_raised_by_what_it_names_also_beside_shared_locked_tasks(
    app: Celery,
) -> None:
    app.conf.redlock_tasks = {"vendor.sync": 30}

    @app.task(name="vendor.sync", shared=False)
    def sync(account: str) -> None: ...

    with no_shared_task_left(app):
        for number in range(8):  # Celery finalizes an app by a set of functions, in any order

            @shared_task(base=LockedTask, name=f"shared{number}")
            def shared() -> None: ...

        with pytest.raises(SettingsError):
            app.finalize()
    with pytest.raises(SettingsError):
        sync.delay("a")


@pytest.mark.parametrize("late", [False, True])
def test_a_locked_task_of_ones_own_says_its_options_itself(app: Celery, late: bool) -> None:
    app.conf.redlock_tasks = {"shop.take": {"ttl": 40}, "shop.*": {"ttl": 41}}
    if late:
        app.finalize()

    def take() -> Any:
        return held()

    def declare(name: str) -> None:
        app.task(base=LockedTask, name=name, lock_key="take", shared=False)(take)

    declare("shop.give")
    with pytest.raises(SettingsError, match=r"LockedTask already.*task_annotations"):  # noqa: PT012
        declare("shop.take")
        app.finalize()
    assert app.tasks["shop.give"].apply().get() == ("take", 30.0)


@pytest.mark.parametrize("name", ["vendor.sync", "shop.take"])
def test_names_with_a_namespace_are_known_too(nodes: Nodes, name: str) -> None:
    app = Celery("named", broker="memory://", set_as_default=False)
    urls = [node.url for node in nodes]
    conf = {"CELERY_REDLOCK_NODES": urls, "CELERY_REDLOCK_TASKS": {name: {"key": "x"}}}
    app.config_from_object(conf, namespace="CELERY")

    @app.task(name="vendor.sync", shared=False)
    def sync(account: str) -> None: ...

    @app.task(base=LockedTask, name="shop.take", shared=False)
    def take() -> None: ...

    if name == "shop.take":
        with pytest.raises(SettingsError, match="LockedTask already"):
            app.finalize()
    else:
        assert app.tasks["vendor.sync"].lock_for("a").resource == "x"


def test_a_second_send_of_one_is_not_published_where_the_setting_says_so(app: Celery) -> None:
    app.conf.update(task_always_eager=False, redlock_tasks={"vendor.*": {"unique_for": 60}})

    @app.task(name="vendor.sync", shared=False)
    def sync(account: str) -> None: ...

    app.finalize()
    first, second, other = (sync.delay(account) for account in ("a", "a", "b"))
    assert first.id == second.id != other.id


def test_from_outside_its_options_are_set_by_annotations(app: Celery) -> None:
    app.conf.task_annotations = {"shop.take": {"lock_ttl": 40}}

    @app.task(base=LockedTask, name="shop.take", lock_key="take", shared=False)
    def take() -> Any:
        return held()

    assert take.apply().get() == ("take", 40.0)


@pytest.mark.parametrize("call", ["apply", "apply_async"])
@pytest.mark.parametrize(("given", "ttl"), [({}, 40.0), ({"lock": {"ttl": 29}}, 29.0)], ids=str)
def test_a_run_in_this_process_locks_though_the_app_has_not_finalized(
    app: Celery, call: str, given: dict[str, Any], ttl: float
) -> None:
    calls: list[str] = []

    class Counted(Task):
        abstract = True

        def apply(self, *args: Any, **options: Any) -> Any:
            calls.append("apply")
            return super().apply(*args, **options)

    @app.task(base=Counted, name="vendor.sync", shared=False)
    def sync(account: str) -> Any:
        return held()

    app.conf.redlock_tasks = {"vendor.*": {"key": "account:{account}", "ttl": 40}}
    result = getattr(sync, call)(("a",), **given)
    assert (result.get(), result.is_duplicate, calls) == (("account:a", ttl), False, ["apply"])
    assert sync.apply(("a",)).get() == ("account:a", 40.0)


def test_a_run_that_is_not_to_be_locked_does_not_finalize_the_app(app: Celery) -> None:
    @app.task(shared=False)
    def plain() -> bool:
        return current_lock() is None

    @app.task(base=LockedTask, shared=False)
    def take() -> Any:
        return held()

    assert plain.apply().get()
    app.conf.redlock_tasks = {"vendor.*": {}}
    assert plain.apply().get()
    assert take.apply().get()
    assert not app.finalized


def test_a_wrong_option_is_refused_by_a_first_run_in_this_process(app: Celery) -> None:
    @app.task(name="vendor.sync", shared=False)
    def sync(account: str) -> None: ...

    app.conf.redlock_tasks = {"vendor.*": {}}
    with pytest.raises(SettingsError, match="lock_ttl=29"):
        sync.apply(("a",), lock_ttl=29)


def test_a_wrong_entry_is_refused_by_a_run_in_this_process(app: Celery) -> None:
    @app.task(name="vendor.sync", shared=False)
    def sync(account: str) -> None: ...

    app.conf.redlock_tasks = {"vendor.*": {"ttl": -1}}
    for _ in range(2):
        with pytest.raises(SettingsError, match="ttl"):
            sync.apply(("a",), throw=True)


def test_an_entry_that_comes_too_late_is_refused(app: Celery) -> None:
    @app.task(name="other.sync", shared=False)
    def sync(account: str) -> None: ...

    app.finalize()
    app.conf.redlock_tasks = {"other.*": {}}
    with pytest.raises(SettingsError, match="before the app finalizes"):
        celery_redlock.install(app)


def test_an_import_locks_in_an_app_that_had_finalized(nodes: Nodes) -> None:
    program = f"""
from celery import Celery
app = Celery("x", broker="memory://")
app.conf.redlock_nodes = {[node.url for node in nodes]!r}
app.conf.redlock_tasks = {{"vendor.*": {{"key": "account:{{account}}"}}}}
@app.task(name="vendor.sync")
def sync(account): ...
app.finalize()
import celery_redlock
print(hasattr(app.tasks["vendor.sync"], "lock_for"))
celery_redlock.install(app)
celery_redlock.install(app)
print(app.tasks["vendor.sync"].lock_for("a").resource)
"""
    run = [sys.executable, "-c", program]
    said = fork_server.run(run, cwd=ROOT, check=True, package=False).stdout
    assert said.split() == ["True", "account:a"]


def test_a_worker_that_a_program_starts_locks_though_its_app_had_finalized(
    nodes: Nodes, standing_broker: EmbeddedNode
) -> None:
    program = f"""
import os, signal, sys
from celery import Celery
app = Celery("x", broker={standing_broker.url!r})
app.conf.task_default_queue = "started"
app.conf.redlock_nodes = {[node.url for node in nodes]!r}
app.conf.redlock_node_timeout = {PATIENCE}
app.conf.redlock_tasks = {{"vendor.*": {{"key": "account:{{account}}", "ttl": 40}}}}
@app.task(name="vendor.sync")
def sync(account):
    import celery_redlock
    lock = celery_redlock.current_lock()
    os.write(1, f"held: {{lock and lock.resource}}\\n".encode())  # past the worker's redirection
    os.kill(os.getpid(), signal.SIGTERM)
app.finalize()
sync.delay("a")
print("imported:", "celery_redlock" in sys.modules, flush=True)
app.worker_main(["worker", "-P", "solo", "-l", "CRITICAL", "--without-mingle"])
"""
    run = [sys.executable, "-c", program]
    env = {**os.environ, "C_FORCE_ROOT": "1"}
    told = fork_server.run(run, cwd=ROOT, env=env, timeout=240, package=False)
    said = [line for line in told.stdout.splitlines() if line.startswith(("held", "imported"))]
    assert said == ["imported: False", "held: account:a"], told.stderr


def test_what_a_task_goes_by_and_where_it_is_said(stage: Stage) -> None:
    told = named(stage, "plain").lock_options(lock={"ttl": 40})
    places = {one.name: str(one.source) for one in told.options}
    assert places["key"] == "task 'vendor.ever*': redlock_tasks['vendor.ever*']['key']"
    assert (told["ttl"].value, places["ttl"]) == (40.0, "call: lock={'ttl': ...}")
    assert places["wait"] == "built-in"
