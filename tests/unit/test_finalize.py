"""What an app refuses when it finalizes, and that it is whole then, whatever is refused.

Each script is a process of its own: what one app shares, every later app of the process gets.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import fork_server

BEGINNING = """
from celery import Celery, Task, shared_task
from celery.contrib.testing.worker import start_worker

def refused(call, *words):
    from celery_redlock import SettingsError
    try:
        call()
    except SettingsError as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, (missing, str(error))
    else:
        raise AssertionError("not refused")

def app_of(name, **conf):
    app = Celery(name, broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(worker_hijack_root_logger=False, **conf)
    return app

PLAIN = app_of("plain")
OF_CELERY = set(PLAIN.tasks)
"""
pytestmark = pytest.mark.xdist_group("fork server")  # which is started once for all of them
LOCKED = "from celery_redlock import LockedTask\n\n"


def run(script: str, *arguments: str, cwd: Path | None = None) -> str:
    """Run a script; one that begins with the package is in a process that has imported it."""
    command = [sys.executable, *(arguments or ("-c", script))]
    done = fork_server.run(command, cwd=cwd, package=LOCKED in script)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


WITHOUT_A_REDIS = """
shop, mail = app_of("shop", redlock_nodes=["redis://a"]), app_of("mail")

@shop.task(base=LockedTask)
def order(number): ...

@shared_task(base=LockedTask)
def pay(number): ...

@mail.task
def send(): return "sent"

mail.finalize()
assert set(mail.tasks) == OF_CELERY | {f"mail.{name}" for name in ("order", "pay", "send")}
assert all(one.__bound__ for one in mail.tasks.values())
assert mail.tasks["mail.send"].apply().get() == "sent"
for name in ("mail.order", "mail.pay"):
    refused(lambda: mail.tasks[name].delay(1), "redlock_nodes")
    refused(lambda: mail.tasks[name].apply((1,)).get(), "redlock_nodes")
    mail.conf.task_always_eager = True
    refused(lambda: mail.tasks[name].delay(1), "redlock_nodes")
    mail.conf.task_always_eager = False
"""
A_WRONG_SETTING = """
seen = []
shop = app_of("shop", redlock_ttl=-1)
shop.on_after_finalize.connect(lambda **_: seen.append(set(shop.tasks)), weak=False)

@shop.task
def plain(): return "ran"

@shop.task(base=LockedTask, lock_wait=-1)
def order(): ...

refused(shop.finalize, "redlock_ttl=-1")
assert seen == [set(shop.tasks)] == [OF_CELERY | {"shop.order", "shop.plain"}]
assert all(one.__bound__ for one in shop.tasks.values())
assert plain.apply().get() == "ran"
refused(order.delay, "redlock_ttl=-1")
refused(lambda: order.apply().get(), "redlock_ttl=-1")
"""
SETTINGS_OF_OTHERS = """
mail = app_of("mail", redlock_servers=["theirs"], redlock_queues={"no such": {}},
              redlock_ttl="theirs", task_create_missing_queues=False)

@mail.task
def send(): ...

mail.finalize()
shop = app_of("shop", redlock_nodes=["redis://a"], redlock_servers=["theirs"])

@shop.task(base=LockedTask)
def order(): ...

refused(shop.finalize, "redlock_servers", "is not a setting")
"""
NODES_THAT_COME_LATER = """
from celery_redlock.testing import fake_nodes, trust_nodes
shop = app_of("shop")

@shared_task(base=LockedTask)
def order(number): return number

shop.finalize()
task = shop.tasks["shop.order"]
refused(lambda: task.apply((1,)).get(), "redlock_nodes")
with fake_nodes() as nodes:
    trust_nodes(nodes)
    shop.conf.redlock_nodes = [node.url for node in nodes]
    assert task.apply((1,)).get() == 1
    assert task.delay(1)
"""
A_WORKER_OF_SHARED_TASKS = """
from celery.app import trace
from billiard.einfo import ExceptionInfo
mail = app_of("mail")

@shared_task(base=LockedTask)
def order(): ...

@mail.task
def send(): return trace.ExceptionInfo is ExceptionInfo

with start_worker(mail, perform_ping_check=False):
    assert send.delay().get(timeout=60)
    refused(mail.tasks["mail.order"].delay, "redlock_nodes")
"""
A_WORKER_OF_ITS_OWN_TASKS = """
import celery.worker
for lazy in (True, False):
    shop = app_of("shop")

    @shop.task(base=LockedTask, shared=False, lazy=lazy)
    def order(): ...

    shop.finalize()
    refused(lambda: celery.worker.WorkController(app=shop, pool_cls="solo"), "redlock_nodes")
"""


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(WITHOUT_A_REDIS, id="without a Redis"),
        pytest.param(A_WRONG_SETTING, id="a wrong setting"),
        pytest.param(SETTINGS_OF_OTHERS, id="settings of others"),
        pytest.param(NODES_THAT_COME_LATER, id="nodes that come later"),
        pytest.param(A_WORKER_OF_SHARED_TASKS, id="a worker of shared tasks"),
        pytest.param(A_WORKER_OF_ITS_OWN_TASKS, id="a worker of its own tasks"),
    ],
)
def test_an_app_is_whole_when_it_has_finalized(script: str) -> None:
    run(BEGINNING + LOCKED + script)


def test_the_order_of_sends_is_not_imported_if_no_task_has_one() -> None:
    script = """
import sys
from celery.contrib.testing.worker import start_worker
from celery_redlock.testing import EmbeddedNode

ORDER = "celery_redlock.tasks.unique.newest"
with EmbeddedNode() as node:
    shop = Celery("shop", broker="memory://", backend="cache+memory://")
    shop.conf.redlock_nodes = [node.url]

    @shop.task(base=LockedTask, lock_key="k", lock_unique_for=60)
    def once(): return ORDER in sys.modules

    @shop.task(base=LockedTask, lock_key="k", **dict(
        lock_unique_for=60, lock_unique_until="started", lock_on_duplicate="newest"))
    def newest(): return ORDER in sys.modules

    with start_worker(shop, perform_ping_check=False):
        assert once.delay().get(timeout=60) is False
        assert newest.delay().get(timeout=60) is True
"""
    run(BEGINNING + "from celery_redlock import LockedTask\n" + script)


def test_settings_may_import_the_package_while_an_app_finalizes(tmp_path: Path) -> None:
    settings = "from celery_redlock import Backoff\nredlock_backoff = Backoff()\nredlock_ttl = -1\n"
    (tmp_path / "late_settings.py").write_text(settings)
    script = """
import sys
shop = Celery("shop", broker="memory://")
shop.config_from_object("late_settings")

@shop.task
def plain(): ...

shop.finalize()
assert "celery_redlock" in sys.modules
assert set(shop.tasks) == OF_CELERY | {"shop.plain"}
from celery_redlock import LockedTask
def order(): ...

refused(lambda: shop.task(lock_key="k")(order), "base=LockedTask")
refused(lambda: shop.task(base=LockedTask)(order), "redlock_ttl=-1")
"""
    run(BEGINNING + script, cwd=tmp_path)


CELERYS_FIXTURES = """
import pytest
from celery import shared_task
from celery_redlock import LockedTask, SettingsError
from celery_redlock.testing import locking_off

@shared_task(base=LockedTask, lock_key="stock:{sku}")
def take(sku): return sku

@shared_task
def send(): return "sent"

def test_a_task(celery_app):
    assert {take.name, send.name, "celery.chord", "celery.chain"} <= set(celery_app.tasks)
    assert send.apply().get() == "sent"
    with pytest.raises(SettingsError, match="redlock_nodes"):
        take.apply(("a",)).get()

def test_a_worker(celery_app, celery_worker):
    assert send.delay().get(timeout=60) == "sent"

def test_a_locked_task(celery_app, redlock_settings):
    celery_app.conf.update(redlock_settings)
    assert celery_app.tasks[take.name].apply(("a",)).get() == "a"
"""


def test_celerys_own_fixtures_take_shared_locked_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_shop.py").write_text(CELERYS_FIXTURES)
    # of the plugins that are installed these two alone
    line = "-m pytest -q -p celery.contrib.pytest -p pytest_celery_redlock test_shop.py"
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    assert "3 passed" in run("", *line.split(), cwd=tmp_path)


FORGOTTEN = {
    "before the app finalizes": """
@shop.task(lock_key="stock:{sku}")
def take(sku): ...

refused(shop.finalize, "task 'shop.take'", "lock_key='stock:{sku}'", "base=LockedTask")
assert set(shop.tasks) == OF_CELERY | {"shop.take"}
""",
    "after it": """
shop.finalize()
refused(lambda: shop.task(lock_ttl=30)(take), "task 'shop.take'", "lock_ttl=30", "base=LockedTask")
assert set(shop.tasks) == OF_CELERY
""",
    "of all apps": """
refused(lambda: shared_task(lock_args=[])(take), "task 'plain.take'", "lock_args=[]")
refused(shop.finalize, "task 'shop.take'", "lock_args=[]", "base=LockedTask")
""",
    "in a class": """
class Take(Task):
    name = "take"
    lock_key = "stock:{sku}"
    def run(self, sku): ...

refused(lambda: shop.register_task(Take()), "task 'take'", "lock_key='stock:{sku}'")
""",
}
NOT_FORGOTTEN = """
class Singleton(Task):
    lock_expiry = lock_ttl = None

class OfShop(Task):
    lock_key = "of its own"

shop.conf.task_annotations = {"*": {"lock_ttl": 30}}
shop.conf.redlock_tasks = {"shop.adopted": {}}
shop.conf.redlock_nodes = ["redis://a"]

def declare(name, **options):
    shop.task(name=name, shared=False, **options)(take)

for when in ("before", "after"):
    declare(f"{when}.singleton", base=Singleton, lock_expiry=10, lock_ttl=10)
    declare(f"{when}.plain", lock_expiry=10, lock_id="theirs")
    declare(f"{when}.of_shop", base=OfShop)
    declare(f"{when}.locked", base=LockedTask, lock_key="k")
    shop.finalize()
declare("shop.adopted", lock_key="theirs")
"""


@pytest.mark.parametrize("script", [pytest.param(text, id=id_) for id_, text in FORGOTTEN.items()])
def test_a_task_with_a_locks_options_and_without_its_base_is_refused(script: str) -> None:
    declared = 'shop = app_of("shop")\ndef take(sku): ...\n'
    run(BEGINNING + LOCKED + declared + script)


def test_an_import_of_the_package_finds_such_a_task_of_an_app_that_has_finalized() -> None:
    script = """
shop = app_of("shop")

@shop.task(lock_key="stock:{sku}")
def take(sku): ...

shop.finalize()
for _ in range(2):
    try:
        import celery_redlock
    except Exception as error:
        assert "task 'shop.take': lock_key='stock:{sku}'" in str(error)
    else:
        raise AssertionError("not refused")
"""
    run(BEGINNING + script)


def test_names_that_another_declares_are_not_a_locks_options() -> None:
    run(BEGINNING + LOCKED + 'shop = app_of("shop")\ndef take(sku): ...\n' + NOT_FORGOTTEN)


NOT_FINALIZED = """
import logging
from contextlib import redirect_stderr
from io import StringIO
import celery_redlock
shop = app_of("shop", redlock_nodes=["redis://a"])
shop.conf.redlock_tasks = {"shop.mail": {"unique_for": 60}, "shop.*": {}}

@shop.task
def mail(): ...

@shop.task
def plain(): ...

heard, text = logging.StreamHandler(StringIO()), "shop.mail without deduplication: redlock_tasks"
logging.getLogger("celery_redlock").addHandler(heard)
for task in (mail, mail, plain):
    task.delay()
assert heard.stream.getvalue().count("without deduplication") == 1
assert text in heard.stream.getvalue()
assert not shop.finalized
shop.finalize()
assert isinstance(mail, celery_redlock.LockedTask)
"""


def test_a_send_that_an_app_would_deduplicate_once_it_has_finalized_is_told_of() -> None:
    run(BEGINNING + LOCKED + NOT_FINALIZED)


UNREGISTERED = """
from celery import Celery
from celery_redlock import LockedTask

app = Celery(broker="memory://")
app.conf.redlock_nodes = ["redis://a"]

class Take(LockedTask):
    name, lock_ttl = "take", 21
    def run(self): ...

print(Take().lock_options()["ttl"].value, Take.app is app)
"""


def test_a_class_that_no_app_has_registered_goes_by_the_current_app(tmp_path: Path) -> None:
    done = fork_server.run([sys.executable, "-c", UNREGISTERED], cwd=tmp_path, package=False)
    assert done.stdout == "21.0 True\n", done.stderr
