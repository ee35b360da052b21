"""What the pages of keys and settings say of tenants, and of settings that change late."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import pytest
from celery import Celery

from celery_redlock import LockedTask, Redlock, RedlockError, SettingsError, current_lock
from celery_redlock.testing import FakeNode, use_nodes
from tests.pages import ROOT, blocks

KEYS = ROOT / "docs" / "reference" / "keys.md"


@pytest.fixture
def app() -> Celery:
    return Celery("pages", broker="memory://", backend="cache+memory://", set_as_current=False)


def test_each_tenant_has_locks_of_its_own(
    app: Celery, redlock_fake_nodes: list[FakeNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery.shared_task", partial(app.task, shared=False))
    names: dict[str, Any] = {"__name__": "tenants"}
    (code,) = (block.code for block in blocks(KEYS, "python") if "by_tenant" in block.code)
    exec(code, names)
    tenant = names["tenant"]

    @app.task(base=LockedTask, lock_key=names["by_tenant"], shared=False)
    def take(sku: str) -> str:
        lock = current_lock()
        assert lock is not None
        return lock.resource

    app.conf.redlock_nodes = [node.url for node in redlock_fake_nodes]
    with use_nodes(app, redlock_fake_nodes):
        for name in ("acme", "best"):  # as in two web requests
            tenant.set(name)
            assert take.lock_for("sku-7").resource == f"{name}:stock:sku-7"
        # the context of a worker is that of the message before, until the header is read
        headers = {"tenant": "acme"}
        ran = take.apply(("sku-7",), headers=headers, throw=True)
        assert ran.get() == "acme:stock:sku-7"


def block_of_keys(word: str) -> dict[str, Any]:
    """Return what the block of the page of keys with this word makes."""
    made: dict[str, Any] = {"__name__": "pages"}
    (code,) = (block.code for block in blocks(KEYS, "python") if word in block.code)
    exec(code, made)
    return made


def test_a_key_is_made_of_what_airflow_sends(app: Celery) -> None:
    """As its provider 3.26 does: `apply_async(args=(workload.model_dump_json(),))`."""

    @app.task(name="execute_workload", shared=False)
    def execute_workload(text: str) -> None: ...

    @app.task(name="another", shared=False)
    def another(text: str) -> None: ...

    app.conf.update(redlock_nodes=["redis://a"], **block_of_keys("airflow_key")["CELERY_CONFIG"])
    app.conf.redlock_tasks["another"] = {}
    app.finalize()
    of_airflow, plain = (
        [app.tasks[name].lock_for(sent).resource for sent in map(airflow_workload, "ab")]
        for name in ("execute_workload", "another")
    )
    assert of_airflow == ["reports:load", "reports:load"]
    assert plain[0] != plain[1]
    with pytest.raises(RedlockError, match="takes no lock"):
        app.tasks["execute_workload"].lock_for(json.dumps({"token": "a", "callback": {}}))


def airflow_workload(token: str) -> str:
    ti = {"id": "0199", "dag_id": "reports", "task_id": "load", "run_id": token, "try_number": 1}
    return json.dumps({"token": token, "ti": ti, "log_path": None, "type": "ExecuteTask"})


class Event:
    """An object of an ORM: it has an id, and no text of its own."""

    def __init__(self, number: int) -> None:
        self.id = number


def test_a_task_that_takes_objects_needs_an_entry_beside_one_for_all_tasks(
    app: Celery, redlock_fake_nodes: list[FakeNode]
) -> None:
    names = ("shop.plain", "vendor.notify", "vendor.unlocked", "vendor.forgotten")
    for name in names:

        @app.task(name=name, shared=False)
        def body(event: Any) -> str | None:
            lock = current_lock()
            return lock and lock.resource

    entry = block_of_keys("vendor.notify")["app"].conf.redlock_tasks["vendor.notify"]
    app.conf.redlock_tasks = {"*": {}, "vendor.notify": entry, "vendor.unlocked": {"key": False}}
    app.finalize()
    with use_nodes(app, redlock_fake_nodes):
        ends = [app.tasks[name].apply((Event(7),)) for name in names[1:]]
        assert app.tasks["shop.plain"].apply((7,)).get()
    assert [end.state for end in ends] == ["SUCCESS", "SUCCESS", "FAILURE"]
    assert [end.result for end in ends[:2]] == ["event:7", None]
    assert "has no stable form" in str(ends[2].result)


@pytest.fixture
def two() -> Iterator[tuple[FakeNode, FakeNode]]:
    with FakeNode() as before, FakeNode() as later:
        yield before, later


def locks_on(node: FakeNode) -> bool:
    with node.client() as client:
        return bool(client.exists("{redlock}:lock:r"))


class Conf:
    """Settings in a module or in Django's, of which an app has a view."""

    CELERY_BROKER_URL = "memory://"
    CELERY_REDLOCK_TTL = 30
    CELERY_REDLOCK_NODES: ClassVar[list[str]] = []


@pytest.mark.parametrize("named_by", ["redlock_nodes", "in place", "broker_url", "result", "conf"])
def test_nodes_that_change_after_the_app_has_finalized_count_from_the_next_use(
    app: Celery, two: tuple[FakeNode, FakeNode], named_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, later = two

    @app.task(base=LockedTask, lock_key="r", lock_unique_for=60, shared=False)
    def take() -> None: ...

    def change(node: FakeNode) -> None:
        if named_by == "conf":
            monkeypatch.setattr(Conf, "CELERY_REDLOCK_NODES", [node.url])
        elif named_by == "in place":
            app.conf.redlock_nodes[:] = [node.url]
        elif named_by == "redlock_nodes":
            app.conf.redlock_nodes = (node.url,)
        else:
            app.conf["broker_url" if named_by == "broker_url" else "result_backend"] = node.url

    if named_by == "conf":
        app.config_from_object(Conf, namespace="CELERY")
    if named_by == "in place":
        app.conf.redlock_nodes = []
    change(before)
    app.finalize()
    with take.lock_for():
        assert (locks_on(before), locks_on(later)) == (True, False)
        assert Redlock.of(app).locks().locks
        change(later)
        for use in (take.lock_for, take.delay, partial(Redlock.of, app)):
            with pytest.raises(SettingsError) as caught:
                use()
            for node in two:
                assert node.url.rpartition("/")[2] in str(caught.value)
    with take.lock_for():
        assert (locks_on(before), locks_on(later)) == (False, True)
    Redlock.of(app).close()


def test_nodes_that_are_named_no_longer_are_not_used(
    app: Celery, redlock_fake_nodes: list[FakeNode]
) -> None:
    @app.task(base=LockedTask, lock_key="r", shared=False)
    def take() -> None: ...

    app.conf.broker_url = redlock_fake_nodes[0].url
    app.finalize()
    with take.lock_for():
        pass
    app.conf.broker_url = "memory://"
    with pytest.raises(SettingsError, match="redlock_nodes"):
        take.lock_for()


def test_an_app_without_nodes_is_read_again_with_all_its_settings(
    app: Celery, two: tuple[FakeNode, FakeNode], caplog: pytest.LogCaptureFixture
) -> None:
    @app.task(base=LockedTask, lock_key="r", shared=False)
    def take() -> None: ...

    app.finalize()
    assert take.lock_options()["ttl"].value == 30
    app.conf.update(redlock_nodes=[two[0].url], redlock_ttl=35, redlock_done_ttl=70)
    assert take.lock_options()["ttl"].value == 35
    with take.lock_for() as lock:
        assert lock.held
        assert locks_on(two[0])
    assert not caplog.records
    app.conf.redlock_ttl = 40
    assert take.lock_options()["ttl"].value == 35
    Redlock.of(app).close()


def test_another_setting_that_changes_after_it_was_read_is_a_warning_at_the_first_use(
    app: Celery, two: tuple[FakeNode, FakeNode], caplog: pytest.LogCaptureFixture
) -> None:
    @app.task(base=LockedTask, lock_key="r", shared=False)
    def take() -> None: ...

    queues: dict[str, dict[str, int]] = {"celery": {}}
    app.conf.update(redlock_nodes=[two[0].url], redlock_ttl=30, redlock_queues=queues)
    app.finalize()
    queues["celery"]["limit"] = 2
    app.conf.update(redlock_ttl=35, redlock_prefix="another")
    take.lock_ttl = 36
    for _ in range(2):
        with take.lock_for() as lock:
            assert lock.held
            assert locks_on(two[0])
        assert take.lock_options()["ttl"].value == 30
    late = [one for one in caplog.records if getattr(one, "event", "") == "settings_late"]
    assert [one.getMessage().partition(":")[0] for one in late] == [
        "redlock_prefix, redlock_queues, redlock_ttl"
    ]
    Redlock.of(app).close()


def test_a_glob_for_all_tasks_fails_one_that_takes_objects_and_an_entry_of_its_own_does_not(
    app: Celery, redlock_fake_nodes: list[FakeNode]
) -> None:
    app.conf.redlock_nodes = [node.url for node in redlock_fake_nodes]
    app.conf.redlock_tasks = {"vendor.own": {"key": False}, "vendor.id": {"key": "id"}, "*": {}}

    def body(thing: object) -> None: ...

    names = ("any", "own", "id")
    bodies = {name: app.task(name=f"vendor.{name}", shared=False)(body) for name in names}
    app.finalize()
    with use_nodes(app, redlock_fake_nodes):
        states = {name: task.apply((object(),)).state for name, task in bodies.items()}
    assert states == {"any": "FAILURE", "own": "SUCCESS", "id": "SUCCESS"}
