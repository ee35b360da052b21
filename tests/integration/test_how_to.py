"""The how-to guides and the page for beginners, run on real workers as they stand there."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, Popen
from types import ModuleType
from typing import Any

import pytest
from celery import _state
from celery.exceptions import TaskRevokedError

from celery_redlock import DuplicateTask, LockTaken
from celery_redlock.testing import EmbeddedNode, WorkerProcess, hold
from tests import fork_server
from tests.conftest import NODE_TIMEOUT, Nodes, eventually, trust_nodes
from tests.integration.conftest import ROOT, close_connections, no_shared_task_left
from tests.pages import blocks, on_servers
from tests.snippets import missing_names
from tests.workers import ForkedWorker

pytestmark = [pytest.mark.pages, pytest.mark.slow]

# each is one module of the app that the worker runs
GUIDES = (
    "debounce", "deduplicate-calls", "idempotent-writes", "limit-concurrency",
    "lock-outside-tasks", "lock-several-resources", "long-running-tasks",
    "per-queue-and-per-call-options", "rate-limit", "several-limits", "skip-overlapping-runs",
)  # fmt: skip
QUEUES = ("celery", "imports", "tenant-7")
START = ROOT / "docs" / "getting-started" / "first-locked-task.md"
PATIENT = f"\napp.conf.redlock_node_timeout = {NODE_TIMEOUT}\n"  # as the machine needs it
APP = (
    """
from celery import Celery

app = Celery("how_to", broker="redis://localhost", backend="redis://localhost")
app.conf.redlock_nodes = ["redis://a", "redis://b", "redis://c"]
app.conf.task_track_started = True
"""
    + PATIENT
)
READERS = "from tests.integration.readers import Path, sqlite3, time"
LOCK_BYTES = 320 - 100  # of the page about sizing, without the tables in which a server finds a key
_IN_EACH_RUN = {r"\bhow_to_\w+\.": "shop.", r" +": " "}  # the names of modules, and widths by them
# what differs from one run to the next, and what stands for it
_VARIES = {
    r"^\[[^]]+\] ": "",
    r"\b[0-9a-f]{8}-(?:\.\.\.|[-0-9a-f]{27})": "ID",
    r"\b\w+@[\w.-]+": "WORKER",
    r"\b\d+\.\d+": "N",
    **_IN_EACH_RUN,
}


@dataclass
class Guide:
    """One guide as a module of the worker's app, and its blocks that are no part of it."""

    path: Path
    module: ModuleType
    urls: tuple[str, list[str]]

    @property
    def snippets(self) -> list[str]:
        """The blocks that a reader runs apart from the worker: sends, scripts, a web request."""
        codes = [block.code for block in blocks(self.path, "python")]
        return [on_servers(code, *self.urls) for code in codes if not is_of_module(code)]

    def run(self, snippet: str) -> dict[str, Any]:
        """Run a block, with the guide's module as its `shop`; returns its names."""
        names: dict[str, Any] = {"__name__": "snippet"}
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "shop", self.module)
            exec(in_module(snippet, self.module.__name__), names)
        return names

    def shown(self, language: str = "text") -> list[str]:
        return [block.code for block in blocks(self.path, language)]


def is_of_module(code: str) -> bool:
    return "@app.task" in code


def in_module(code: str, module: str) -> str:
    """Return a page's code with the names that its tasks have if its module is not `shop`."""
    return re.sub(r"(?<=[\"'])shop(?=\.\w+[\"'])", module, code)


def on_shared_app(code: str) -> str:
    """Return a page's code, whose `app` is the one of all guides."""
    lines = code.splitlines()
    for statement in reversed(ast.parse(code).body):
        first, last = statement.lineno - 1, statement.end_lineno
        match statement:
            case ast.Assign(targets=[ast.Name("app")], value=ast.Call(func=ast.Name("Celery"))):
                lines[first:last] = ["from how_to_app import app"]
            case ast.ImportFrom(module="shop"):  # the same module here
                del lines[first:last]
    return "\n".join(lines)


def plain(text: str, varies: dict[str, str] = _VARIES) -> list[str]:
    """Return the lines of an output, with words for what differs from one run to the next."""
    for pattern, word in varies.items():
        text = re.sub(pattern, word, text, flags=re.MULTILINE)
    return [line.strip() for line in text.splitlines()]


@dataclass
class Guides:
    """All guides, on one worker."""

    folder: Path
    worker: WorkerProcess
    by_name: dict[str, Guide]

    def __getitem__(self, name: str) -> Guide:
        return self.by_name[name]

    def hold(self, name: str) -> Path:
        """Hold back the runs of a task, or the writes of a file, until the result is removed."""
        held = self.folder / f"hold-{name}"
        held.touch()
        return held

    def see_logged(self, text: str) -> None:
        told = {line for line in plain(text) if line}
        assert told
        eventually(lambda: told <= set(plain(self.worker.output())))


@pytest.fixture(scope="module")
def guides(
    standing_broker: EmbeddedNode, standing_nodes: Nodes, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Guides]:
    """Give the guides, each a module of the app that one worker runs."""
    for node in (*standing_nodes, standing_broker):
        node.client().flushall()
    trust_nodes(standing_nodes)
    folder = tmp_path_factory.mktemp("how_to")
    urls = standing_broker.url, [node.url for node in standing_nodes]
    modules = {name: f"how_to_{name.replace('-', '_')}" for name in GUIDES}
    (folder / "how_to_app.py").write_text(on_servers(APP, *urls))
    for name, module in modules.items():
        codes = [block.code for block in blocks(page_of(name), "python")]
        program = "\n".join([*(on_shared_app(c) for c in codes if is_of_module(c)), READERS])
        (folder / f"{module}.py").write_text(on_servers(in_module(program, module), *urls))
    imports = [f"import {module}" for module in modules.values()]
    (folder / "how_to.py").write_text("\n".join([*imports, "from how_to_app import app"]))
    env = {"TEST_FOLDER": str(folder), "PYTHONPATH": str(ROOT)}
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("TEST_FOLDER", str(folder))
        patch.syspath_prepend(str(folder))
        patch.chdir(folder)
        patch.setattr(_state, "default_app", _state.default_app)
        patch.setattr(_state._tls, "current_app", None)
        stack.enter_context(no_shared_task_left())
        for module in ("tests.integration.readers", "how_to", "how_to_app", *modules.values()):
            stack.callback(sys.modules.pop, module, None)
        app = importlib.import_module("how_to").app
        stack.callback(app.close)
        stack.callback(close_connections, app)
        worker = ForkedWorker(
            "how_to", name="how_to", concurrency=6, queues=QUEUES, env=env, cwd=folder
        )
        stack.enter_context(worker)
        made = {
            name: Guide(page_of(name), sys.modules[module], urls)
            for name, module in modules.items()
        }
        yield Guides(folder, worker, made)


@pytest.fixture(autouse=True)
def no_run_is_held_back_any_longer(guides: Guides) -> Iterator[None]:
    """Let the runs go on that a failed test held back: they would keep the worker's slots."""
    yield
    for held in guides.folder.glob("hold-*"):
        held.unlink()


def page_of(name: str) -> Path:
    return ROOT / "docs" / "how-to" / f"{name}.md"


def runs_of(name: str) -> list[Any]:
    return list(sys.modules["tests.integration.readers"].runs_of(name))


def results_of(sent: list[Any]) -> list[Any]:
    return [result.get(timeout=120) for result in sent]


@pytest.mark.parametrize("name", GUIDES)
def test_each_example_has_its_own_imports(name: str) -> None:
    codes = [block.code for block in blocks(page_of(name), "python")]
    assert [missing for code in codes if (missing := missing_names(code))] == []


def test_a_periodic_run_that_overlaps_is_skipped(guides: Guides) -> None:
    guide = guides["skip-overlapping-runs"]
    app, held = guide.module.app, guides.hold("report")
    (entry,) = app.conf.beat_schedule.values()
    task = app.tasks[entry["task"]]
    first = task.apply_async(**{**entry["options"], "expires": None})
    eventually(lambda: runs_of("report"))
    (cron, logged) = guide.shown()
    (call,) = re.findall(r"celery -A shop (call .+)", cron)
    second = app.AsyncResult(celery("how_to", in_module_call(call, task.name), guides).strip())
    with pytest.raises(TaskRevokedError):
        second.get(timeout=120)
    guides.see_logged(logged)
    held.unlink()
    assert first.get(timeout=120) == "written"
    assert len(runs_of("report")) == 2


def in_module_call(command: str, task: str) -> str:
    return re.sub(r"shop\.\w+", task, command)


def celery(app: str, command: str, guides: Guides) -> str:
    """Return what a command of Celery prints."""
    words = [sys.executable, "-m", "celery", "-A", app, *command.split()]
    ran = fork_server.run(words, cwd=guides.folder)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_no_more_run_at_once_than_the_limit(guides: Guides) -> None:
    guide = guides["limit-concurrency"]
    send, _ = guide.snippets
    held = guides.hold("ask_partner")
    guide.run(send)
    (logged,) = guide.shown()
    guides.see_logged(logged)
    assert len(logged.splitlines()) == 2
    deferral = re.compile(r"ask_partner\[(.+?)\] deferred: ")
    eventually(lambda: len(set(deferral.findall(guides.worker.output()))) == 2)
    eventually(lambda: len(runs_of("ask_partner")) >= 3)  # the third body may be about to begin
    assert len(runs_of("ask_partner")) == guide.module.ask_partner.lock_limit == 3
    held.unlink()
    eventually(lambda: len(runs_of("ask_partner")) == 10)


def test_a_doctor_and_a_clinic_have_limits_of_their_own(guides: Guides) -> None:
    guide, held = guides["several-limits"], guides.hold("see_patient")
    (send,) = guide.snippets
    imports, *calls = [line for line in send.splitlines() if line]
    of_doctor, of_clinic = guide.shown()[0].splitlines()
    for call, begun, logged in zip(
        calls, (1, 1, 2, 2), ("", of_doctor, "", of_clinic), strict=True
    ):
        guide.run(f"{imports}\n{call}")
        eventually(lambda begun=begun: len(runs_of("see_patient")) == begun)
        if logged:
            guides.see_logged(logged)
    assert [patient for *_, patient in runs_of("see_patient")] == ["ann", "cleo"]
    held.unlink()
    eventually(lambda: len(runs_of("see_patient")) == 8)


def test_a_tenant_has_as_many_places_as_the_table_says(guides: Guides) -> None:
    task, held = guides["several-limits"].module.sync_tenant, guides.hold("sync_tenant")
    sent = [task.delay(tenant, part) for tenant in ("big-tenant", "small") for part in range(4)]
    eventually(lambda: len(runs_of("sync_tenant")) == 4)
    eventually(lambda: sum(result.state == "DEFERRED" for result in sent) == 4)
    assert sorted(tenant for _, tenant, _ in runs_of("sync_tenant")) == ["big-tenant"] * 3 + [
        "small"
    ]
    held.unlink()
    assert results_of(sent)[0] == "0 of big-tenant"


def test_a_tenant_starts_a_hundred_runs_an_hour_and_the_next_ones_wait(guides: Guides) -> None:
    guide = guides["rate-limit"]
    task, (send,) = guide.module.call_partner, guide.snippets
    assert "range(200)" in send
    guide.run(send.replace("range(200)", "range(102)"))
    name = re.escape(task.name)
    done = re.compile(rf"Task {name}\[(.+?)\] succeeded")
    rated = re.compile(rf"Task {name}\[(.+?)\] deferred: rate of partner:ann: 100/h, next start")
    eventually(lambda: len(set(rated.findall(guides.worker.output()))) == 2)
    eventually(lambda: len(set(done.findall(guides.worker.output()))) == 100)
    waiting = [task.AsyncResult(one) for one in set(rated.findall(guides.worker.output()))]
    assert task.delay("bob", 7).get(timeout=120) == "order 7 of bob is known"
    with pytest.raises(TaskRevokedError):
        task.apply_async(("ann", 7), lock={"on_conflict": "skip"}).get(timeout=120)
    with pytest.raises(LockTaken) as caught:
        task.apply_async(("ann", 7), lock={"on_conflict": "fail"}).get(timeout=120)
    assert (caught.value.resource, caught.value.rate) == ("partner:ann", "100/h")
    assert [result.state for result in waiting] == ["DEFERRED"] * 2
    for result in waiting:
        result.revoke()


def test_a_throttle_runs_all_starts_that_are_free_though_one_is_at_work(guides: Guides) -> None:
    task, held = guides["rate-limit"].module.ask_for_news, guides.hold("ask_for_news")
    begun = []
    for count in (1, 2, 3):
        begun.append(task.delay("ann"))
        eventually(lambda count=count: len(runs_of("ask_for_news")) == count)
    for _ in range(3):
        with pytest.raises(TaskRevokedError):
            task.delay("ann").get(timeout=120)
    held.unlink()
    assert results_of(begun) == ["news for ann"] * 3


def test_tenants_share_the_starts_of_the_partner(guides: Guides) -> None:
    task = guides["rate-limit"].module.ask_partner
    rated = re.compile(rf"Task {re.escape(task.name)}\[.+\] deferred: rate of partner: 10/s")

    def is_rated_in_twelve() -> bool:  # a busy machine may take longer than a second for them
        sent = [task.delay(f"tenant-{n}", "who?") for n in range(12)]
        assert results_of(sent) == [f"tenant-{n} asks: who?" for n in range(12)]
        return bool(rated.search(guides.worker.output()))

    eventually(is_rated_in_twelve)


def test_three_files_of_a_customer_go_in_at_a_time(guides: Guides) -> None:
    guide = guides["limit-concurrency"]
    _, send = guide.snippets
    held = guides.hold("import_file")
    others = [guide.module.import_file.delay("bob", path) for path in ("1.csv", "2.csv")]
    guide.run(send)
    refused = "lock 'customer:ann' is held by 3 holders, its limit"
    eventually(lambda: guides.worker.output().count(refused) >= 2)
    eventually(lambda: len(runs_of("import_file")) >= 5)  # a child may be slow to begin bob's
    assert sorted(who for _, who, _ in runs_of("import_file")) == ["ann"] * 3 + ["bob"] * 2
    held.unlink()
    assert sorted(results_of(others)) == ["1.csv", "2.csv"]
    eventually(lambda: len(runs_of("import_file")) == 14)
    at_once, most = 0, 0
    for step, who, _ in runs_of("import_file"):
        at_once += {"begin": 1, "end": -1}[step] * (who == "ann")
        most = max(most, at_once)
    assert most == 3


def test_a_burst_is_one_run_with_the_last_arguments(guides: Guides) -> None:
    guide = guides["debounce"]
    (send,) = guide.snippets
    sooner = '.apply_async((7, reason), lock={"debounce": 10})'
    assert ".delay(7, reason)" in send
    guide.run(send.replace(".delay(7, reason)", sooner))
    guides.see_logged(guide.shown()[0])
    with guide.module.rebuild_index.lock_for(7, "none", wait=60):  # no other run is about to begin
        runs = re.findall(r"rebuild_index\[.+\] succeeded", guides.worker.output())
        assert len(runs) == 1


def test_ten_sends_during_a_run_are_one_more_run(guides: Guides) -> None:
    module, held = guides["deduplicate-calls"].module, guides.hold("write_feed")
    running = module.write_feed.delay(7)
    eventually(lambda: runs_of("write_feed"))
    (queued,) = {module.write_feed.delay(7).id for _ in range(10)}
    assert queued != running.id
    held.unlink()
    assert results_of([running, module.app.AsyncResult(queued)]) == ["feed of 7 is written"] * 2
    assert runs_of("write_feed") == [["begin", 7], ["end", 7]] * 2


def test_of_ten_sends_during_a_run_the_last_one_runs(guides: Guides) -> None:
    guide, held = guides["deduplicate-calls"], guides.hold("publish_price")
    task = guide.module.publish_price
    running = task.delay("sku-7", 1)
    eventually(lambda: runs_of("publish_price"))
    sent = [task.delay("sku-7", price) for price in range(2, 12)]
    held.unlink()
    assert results_of([running, sent[-1]]) == ["sku-7 costs 1", "sku-7 costs 11"]
    with pytest.raises(TaskRevokedError, match=f"replaced it: {sent[1].id}"):
        sent[0].get(timeout=120)
    (logged,) = guide.shown()
    guides.see_logged(logged)
    assert [key for step, *key in runs_of("publish_price") if step == "begin"] == [
        ["sku-7", 1],
        ["sku-7", 11],
    ]


def test_a_second_send_is_the_first(guides: Guides) -> None:
    guide, held = guides["deduplicate-calls"], guides.hold("rebuild_catalog")
    twice, by_name = guide.snippets
    first = guide.run(twice)["first"]
    assert guide.run(by_name)["result"].id == first.id
    with pytest.raises(DuplicateTask) as refused:
        guide.module.rebuild_catalog.apply_async((7,), lock={"on_duplicate": "fail"})
    assert refused.value.task_id == first.id
    other = guide.module.rebuild_catalog.delay(8)
    assert other.id != first.id
    held.unlink()
    assert results_of([first, other]) == ["catalog of 7 is ready", "catalog of 8 is ready"]
    assert [key for step, *key in runs_of("rebuild_catalog") if step == "begin"].count([7]) == 1


def test_points_that_cross_are_all_there_in_the_end(guides: Guides) -> None:
    guide = guides["lock-several-resources"]
    (send,) = guide.snippets
    module, held = guide.module, guides.hold("points-bob")
    (guides.folder / "points-bob").write_text("50")
    guide.run(re.sub(r"^write_points\(\"bob.*\n", "", send, flags=re.MULTILINE))
    guides.see_logged(guide.shown()[0])
    held.unlink()

    def points() -> tuple[int, int]:
        with module.move_points.lock_for("ann", "bob", 0, wait=60):  # no run writes meanwhile
            return module.read_points("ann"), module.read_points("bob")

    eventually(lambda: points() == (48, 52))
    crossing = [("ann", "bob", 5), ("bob", "ann", 3)] * 4
    assert results_of([module.move_points.delay(*one) for one in crossing]) == ["moved"] * 8
    assert (module.read_points("ann"), module.read_points("bob")) == (40, 60)


def test_a_long_run_asks_between_its_steps(guides: Guides) -> None:
    guide, held = guides["long-running-tasks"], guides.hold("export")
    (send,) = guide.snippets
    guide.run(send)
    eventually(lambda: runs_of("export"))
    (console,) = guide.shown("console")
    asked, header, row, *_ = plain(console)
    printed = plain(celery("how_to", asked.removeprefix("$ celery -A shop "), guides))
    assert {header, row} <= set(printed)
    held.unlink()
    eventually(lambda: len(runs_of("export")) == 24)
    assert runs_of("export") == [["begin", 2031], ["end", 2031]] * 12


def test_no_piece_of_a_stock_is_lost(guides: Guides) -> None:
    module = guides["lock-outside-tasks"].module
    module.write_stock("sku", 20)
    taken = results_of([module.take.delay("sku", 3) for _ in range(8)])
    assert sorted(taken) == ["3 of sku"] * 6 + ["sold out"] * 2
    assert module.read_stock("sku") == 2


def test_a_web_request_excludes_the_task(guides: Guides) -> None:
    guide = guides["lock-outside-tasks"]
    request, *_ = guide.snippets
    restock = guide.run(request)["restock"]
    guide.module.write_stock("sku-7", 3)
    assert f"{restock('sku-7', 2)}" == "(200, '5 in stock')"
    held = guides.hold("stock-sku-7")
    taken = guide.module.take.delay("sku-7", 1)
    eventually(lambda: taken.state == "STARTED")
    busy = restock("sku-7", 2)
    held.unlink()
    assert plain(str(busy)) == plain(guide.shown()[0])
    assert taken.get(timeout=120) == "1 of sku-7"
    assert guide.module.read_stock("sku-7") == 4


def test_a_script_takes_a_lock(guides: Guides, capsys: pytest.CaptureFixture[str]) -> None:
    guide = guides["lock-outside-tasks"]
    _, script, _ = guide.snippets
    assert not guide.run(script)["lock"].held
    assert capsys.readouterr().out == ""
    with hold("stock:sku-7", on=guide.module.app):
        guide.run(script)
    assert capsys.readouterr().out == ""


def test_two_coroutines_exclude_each_other(
    guides: Guides, capsys: pytest.CaptureFixture[str]
) -> None:
    guide = guides["lock-outside-tasks"]
    *_, coroutines = guide.snippets
    guide.run(coroutines)
    assert capsys.readouterr().out == guide.shown()[1]


def test_a_queue_and_a_call_have_options_of_their_own(guides: Guides) -> None:
    guide = guides["per-queue-and-per-call-options"]
    (send,) = guide.snippets
    module = guide.module
    with hold("stock:sku-7", on=module.app):
        in_queue, of_call, canvas = (
            eval(line, {"take": module.take}) for line in send.splitlines()[2:]
        )
        with pytest.raises(TaskRevokedError):
            in_queue.get(timeout=120)
        with pytest.raises(LockTaken):
            of_call.get(timeout=120)
        eventually(lambda: canvas.state == "DEFERRED")
    assert canvas.get(timeout=120) == "3 of sku-7"
    with module.sync.lock_for(7):  # in another queue it is another lock
        sent = module.sync.apply_async((7,), queue="tenant-7")
        assert sent.get(timeout=120) == "7 is up to date"


def test_the_command_shows_the_options_in_force(guides: Guides) -> None:
    guide = guides["per-queue-and-per-call-options"]
    (console,) = guide.shown("console")
    asked, *told = (line for line in plain(console, _IN_EACH_RUN) if line != "...")
    command = in_module_call(asked.removeprefix("$ celery -A shop "), guide.module.take.name)
    printed = plain(celery("how_to", command, guides), _IN_EACH_RUN)
    assert [line for line in told if line not in printed] == []
    assert guide.module.take.lock_options("imports")["on_conflict"].value == "skip"


def test_a_late_write_is_refused(guides: Guides, capsys: pytest.CaptureFixture[str]) -> None:
    guide = guides["idempotent-writes"]
    engine, prices = guide.module.engine, guide.module.Price.__table__
    prices.create(engine)
    with engine.begin() as db:
        db.execute(prices.insert().values(sku="sku-7", cents=0))
    late, *_ = guide.snippets
    guide.run(late)
    assert capsys.readouterr().out == guide.shown()[0]
    with engine.connect() as db:
        assert [price.cents for price in db.execute(prices.select())] == [999]
    engine.dispose()


def test_the_first_five_minutes(tmp_path: Path) -> None:
    tasks, send, *_ = (block.code for block in blocks(START, "python"))
    with EmbeddedNode() as server:
        program = on_servers(tasks, server.url, ["", "", ""])
        (tmp_path / "tasks.py").write_text(program + PATIENT)
        (tmp_path / "send.py").write_text(send)
        with ForkedWorker("tasks", name="start", concurrency=4, cwd=tmp_path) as worker:
            client = server.client()
            command = [sys.executable, "send.py"]
            with Popen(command, cwd=tmp_path, stdout=PIPE, text=True) as sends:
                taken = eventually(lambda: client.memory_usage("{redlock}:lock:stock:sku-7"))
                said, _ = sends.communicate(timeout=240)
            other, three = said.split(" and ")
            assert other == "1 of sku-8"
            assert sorted(three.split()[::3]) == ["1", "2", "3"]
            eventually(lambda: "] deferred: " in worker.output())
            assert taken <= LOCK_BYTES
