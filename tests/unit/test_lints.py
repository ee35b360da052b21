from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from celery import Celery
from kombu import Exchange, Queue
from kombu.transport import _transport_cache

from celery_redlock import LockedTask, SettingsError
from celery_redlock.operate.lints import Lint, lint
from celery_redlock.operate.start_report import open_decisions, report_lints
from celery_redlock.tasks.settings.levels import declared_queues

NODES = ["redis://a", "redis://b", "redis://c"]
App = Callable[[], Celery]


def f(a: object) -> None:
    """Stand for the body of each task."""


def of_two(a: object, why: str) -> None:
    """Stand for a body whose second argument says why it runs."""


OF_TWO = {"body": of_two}


def shop_of(
    conf: dict[str, Any], tasks: dict[str, dict[str, Any]], unlocked: str | None = None
) -> Celery:
    """Return an app of its own with these settings and locked tasks.

    tasks: the options of each by its name; "body" is its function. unlocked: the name of a task
    without a lock.
    """
    app = Celery("shop", set_as_default=False)
    app.conf.update({"broker_url": "memory://", "redlock_nodes": NODES, **conf})
    late = {"acks_late": True, "reject_on_worker_lost": True, "shared": False}
    for name, options in tasks.items():
        given = {"body": f, **late, **options}
        app.task(name=name, base=LockedTask, **given)(given.pop("body"))
    if unlocked:
        app.task(name=unlocked, **late)(f)
    app.finalize()
    return app


def shop(
    conf: dict[str, Any] | None = None,
    lock: dict[str, Any] | None = None,
    task: dict[str, Any] | None = None,
) -> Celery:
    """Return an app with one task. lock: the options of its lock. task: those of itself."""
    attributes = {f"lock_{name}": value for name, value in (lock or {}).items()}
    return shop_of(conf or {}, {"shop.f": {**attributes, **(task or {})}})


def said(app: Celery) -> list[tuple[str, str]]:
    return [(one.level, one.setting) for one in lint(app)]


def test_a_configuration_with_nothing_wrong_gives_no_lint() -> None:
    assert lint(shop()) == ()


def a_queue(name: str, exchange: str, kind: str) -> Queue:
    return Queue(name, Exchange(name, exchange), name, queue_arguments={"x-queue-type": kind})


def on_rabbitmq(*queues: Queue, **more: Any) -> dict[str, Any]:
    """Return the settings of an app with these queues. The tasks go to "celery"."""
    return {"broker_url": "amqp://a", "task_queues": queues, **more}


ON_REDIS = {"broker_url": "redis://a"}
RETRIED = {"autoretry_for": (OSError,)}
DIRECT = on_rabbitmq(a_queue("celery", "direct", "quorum"))
PREFETCH = "worker_prefetch_multiplier"
MINE = "task 'shop.f': lock_"
TWO, RATED = {"key": "{queue}", "limit": 2}, {"key": "{queue}", "rate": "9/m"}
CASES: list[tuple[str, App, App, str, str]] = [
    ("a retry delay above the visibility timeout",
     partial(shop, ON_REDIS, task={**RETRIED, "default_retry_delay": 3601}),
     partial(shop, ON_REDIS, task={**RETRIED, "default_retry_delay": 3600}), "warning",
     "task 'shop.f': default_retry_delay"),
    ("a fixed lease below the time limit",
     partial(shop, lock={"renew": False, "ttl": 20}, task={"time_limit": 21}),
     partial(shop, lock={"renew": False, "ttl": 20}, task={"time_limit": 20}), "warning",
     f"{MINE}renew"),
    ("a fixed lease below the time limit of the app",
     partial(shop, {"task_time_limit": 21}, lock={"renew": False, "ttl": 20}),
     partial(shop, {"task_soft_time_limit": 20}, lock={"renew": False, "ttl": 20}), "warning",
     f"{MINE}renew"),
    ("a fixed lease without a time limit", partial(shop, lock={"renew": False}),
     partial(shop, lock={"renew": False}, task={"soft_time_limit": 9}), "advice", f"{MINE}renew"),
    ("a fencing token for runs without a lock",
     partial(shop, lock={"on_unreachable": "run", "fencing": True}),
     partial(shop, lock={"on_unreachable": "run"}), "warning", f"{MINE}on_unreachable"),
    ("a queue's key that the task cannot fill",
     partial(shop, {"redlock_queues": {"celery": {"key": "{b}"}}}),
     partial(shop, {"redlock_queues": {"celery": {"key": "{b}"}}}, lock={"key": "{a}"}), "warning",
     "queue 'celery': redlock_queues['celery']['key']"),
    ("a queue's argument that the task has not",
     partial(shop, {"redlock_queues": {"celery": {"args": ["b"]}}}),
     partial(shop, {"redlock_queues": {"celery": {"args": ["b"]}}}, lock={"args": ["a"]}),
     "warning", "queue 'celery': redlock_queues['celery']['args']"),
    ("a key that is the bare name of an argument", partial(shop, lock={"key": ["x", "a"]}),
     partial(shop, lock={"key": ["x", "{a}"]}), "warning", f"{MINE}key"),
    ("a queue's option beside which the task's cannot stand",
     partial(shop, {"redlock_queues": {"celery": TWO}}, lock={"fencing": True}),
     partial(shop, {"redlock_queues": {"celery": TWO}}), "warning",
     "task 'shop.f' in queue 'celery': limit"),
    ("permits of each set of arguments", partial(shop, lock={"limit": 2}),
     partial(shop, lock={"limit": 2, "args": ["a"]}), "warning", f"{MINE}limit"),
    ("permits of each set of arguments, in a queue that a call may name",
     partial(shop, {"redlock_queues": {"partner-*": {"limit": 2}}}),
     partial(shop, {"redlock_queues": {"partner-*": TWO}}), "warning",
     "queue 'partner-*': redlock_queues['partner-*']['limit']"),
    ("permits for the app, of each set of arguments", partial(shop, {"redlock_limit": 2}),
     partial(shop, {"redlock_limit": 2, "redlock_key": "{task}"}), "warning",
     "app: redlock_limit"),
    ("permits of a queue for a key of the task's own",
     partial(shop, {"redlock_queues": {"celery": {"limit": 2}}}, lock={"key": "{a}"}),
     partial(shop, {"redlock_queues": {"celery": TWO}}, lock={"key": "{a}"}),
     "warning", "queue 'celery': redlock_queues['celery']['limit']"),
    ("permits of the app for arguments of the task's own",
     partial(shop, {"redlock_limit": 2}, lock={"args": ["a"]}),
     partial(shop, {"redlock_key": "{task}", "redlock_limit": 2}, lock={"args": ["a"]}), "warning",
     "app: redlock_limit"),
    ("starts of each set of arguments", partial(shop, lock={"rate": "1/h"}),
     partial(shop, lock={"rate": "1/h", "args": ["a"]}), "warning", f"{MINE}rate"),
    ("starts of each set of arguments, in a queue that a call may name",
     partial(shop, {"redlock_queues": {"partner-*": {"rate": "9/m"}}}),
     partial(shop, {"redlock_queues": {"partner-*": RATED}}), "warning",
     "queue 'partner-*': redlock_queues['partner-*']['rate']"),
    ("starts for the app, of each set of arguments", partial(shop, {"redlock_rate": "9/m"}),
     partial(shop, {"redlock_rate": "9/m", "redlock_key": "{task}"}), "warning",
     "app: redlock_rate"),
    ("bursts of each set of arguments", partial(shop, lock={"debounce": 5}, task=OF_TWO),
     partial(shop, lock={"debounce": 5, "args": ["a", "why"]}, task=OF_TWO), "warning",
     f"{MINE}debounce"),
    ("bursts of each set of arguments, of a task with one argument alone",
     partial(shop_of, {"redlock_debounce": 5}, {"shop.f": {}, "shop.g": OF_TWO}),
     partial(shop, {"redlock_debounce": 5}), "warning", "app: redlock_debounce"),
    ("bursts of each set of arguments, in a queue that a call may name",
     partial(shop, {"redlock_queues": {"partner-*": {"debounce": 5}}}, task=OF_TWO),
     partial(shop, {"redlock_queues": {"partner-*": {"debounce": 5}}}), "warning",
     "queue 'partner-*': redlock_queues['partner-*']['debounce']"),
    ("starts of a queue for a key of the task's own",
     partial(shop, {"redlock_queues": {"celery": {"rate": "9/m"}}}, lock={"key": "{a}"}),
     partial(shop, {"redlock_queues": {"celery": RATED}}, lock={"key": "{a}"}),
     "warning", "queue 'celery': redlock_queues['celery']['rate']"),
    ("starts of the app for arguments of the task's own",
     partial(shop, {"redlock_rate": "9/m"}, lock={"args": ["a"]}),
     partial(shop, {"redlock_key": "{task}", "redlock_rate": "9/m"}, lock={"args": ["a"]}),
     "warning",
     "app: redlock_rate"),
    ("what becomes of duplicates that are not looked for",
     partial(shop, lock={"on_duplicate": "fail"}),
     partial(shop, lock={"on_duplicate": "fail", "unique_for": 60}), "warning",
     f"{MINE}on_duplicate"),
    ("early acknowledgement",
     partial(shop, task={"acks_late": False, "reject_on_worker_lost": False}), shop, "advice",
     "acks_late"),
    ("late acknowledgement of killed children",
     partial(shop, task={"reject_on_worker_lost": False}), shop, "advice", "reject_on_worker_lost"),
    ("a fixed prefetch that nobody has raised", partial(shop, {**DIRECT, PREFETCH: 4}),
     partial(shop, {**DIRECT, PREFETCH: 5}), "warning", "queue 'celery'"),
    ("a fixed prefetch that waiting messages fill", partial(shop, DIRECT),
     partial(shop, DIRECT, lock={"on_conflict": "skip"}), "warning", "queue 'celery'"),
    ("a name of a task that is not there", partial(shop, {"redlock_tasks": {"shop.g": {}}}),
     partial(shop, {"redlock_tasks": {}}), "warning", "app: redlock_tasks"),
    ("a glob of tasks that fits none", partial(shop, {"redlock_tasks": {"c*.map": {}}}), shop,
     "advice", "app: redlock_tasks"),
    ("a glob that fits a locked task of one's own",
     partial(shop, {"redlock_tasks": {"shop.*": {}}}),
     partial(shop_of, {"redlock_tasks": {"vendor.*": {}}}, {}, "vendor.f"), "advice",
     "app: redlock_tasks"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "right", "level", "setting"), [c[1:] for c in CASES],
                         ids=[c[0] for c in CASES])  # fmt: skip
def test_what_is_wrong_is_said_once_and_what_is_right_is_not(
    wrong: App, right: App, level: str, setting: str
) -> None:
    (one,) = lint(wrong())
    assert (one.level, one.setting) == (level, setting)
    assert one.hint
    assert str(one) == f"{one.setting}={one.value}: {one.hint}"
    assert lint(right()) == ()


@pytest.mark.parametrize(
    ("scheme", "modules", "cause"),
    [
        (
            "redis",
            ["kombu.transport.redis", "packaging.version"],
            "its transport cannot import packaging.version: run pip install 'kombu[redis]'",
        ),
        ("etcd", ["kombu.transport.etcd", "etcd"], "no message can be sent: Missing python-etcd"),
        ("librabbitmq", [], "its transport cannot import librabbitmq: run pip install 'kombu["),
        ("nosuch", [], "no message can be sent: No such transport: nosuch"),
    ],
)
def test_a_transport_that_cannot_be_imported_is_one_error_beside_what_else_is_found(
    scheme: str, modules: list[str], cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {one: kind for one, kind in _transport_cache.items() if one != scheme}
    monkeypatch.setattr("kombu.transport._transport_cache", known)
    for name in modules[:1]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in modules[1:]:
        monkeypatch.setitem(sys.modules, name, None)
    url = f"{scheme}://me:secret@a"
    app = shop({"broker_url": url, "redlock_queues": {"x": {}}})
    found = lint(app)
    assert [(one.level, one.setting) for one in found] == [
        ("error", "app: broker_url"),
        ("warning", "app: redlock_queues"),
    ]
    assert found[0].value == f"{scheme}://a"
    assert found[0].hint.startswith(cause)
    app = shop({"broker_read_url": "memory://", "broker_write_url": [url, "memory://"]})
    assert said(app) == [("error", "app: broker_write_url")]


def test_a_broker_that_forgets_what_a_killed_worker_has_received_is_named(tmp_path: Path) -> None:
    folder = {"data_folder_in": str(tmp_path), "data_folder_out": str(tmp_path)}
    forgets = {"broker_url": "filesystem://", "broker_transport_options": folder}
    assert said(shop(forgets)) == [("warning", "app: broker_url")]
    assert said(shop({"broker_url": "memory://"})) == []  # it ends with its process


def test_a_task_that_cannot_be_meant_leaves_other_tasks_their_lints() -> None:
    conf = {"redlock_queues": {"celery": TWO}}
    tasks = {"bad": {"lock_fencing": True}, "good": {"lock_renew": False}}
    assert said(shop_of(conf, tasks)) == [
        ("warning", "task 'bad' in queue 'celery': limit"),
        ("advice", "task 'good': lock_renew"),
    ]


def test_a_thing_of_many_tasks_is_said_once_and_names_some() -> None:
    tasks = {f"shop.t{n}": {"acks_late": False} for n in range(7)}
    (found,) = lint(shop_of({}, tasks))
    assert found.setting == "acks_late"
    assert found.hint.startswith("shop.t0, shop.t1, shop.t2, shop.t3, shop.t4 and 2 more: ")


def several(conf: dict[str, Any], **tasks: dict[str, Any]) -> tuple[Lint, ...]:
    """Return the lints of tasks with one argument each, by the options of their locks."""
    locked = {
        name: {**{f"lock_{option}": value for option, value in lock.items()}, "body": body}
        for (name, lock), body in zip(tasks.items(), (take, give), strict=True)
    }
    return lint(shop_of(conf, locked))


def take(a_id: object) -> None: ...


def give(b_id: object) -> None: ...


def test_tasks_that_share_a_lock_are_told_that_their_limits_differ() -> None:
    a = {"key": "stock:{a_id}", "limit": 1}
    assert not several({}, a=a, b={"key": "stock:{b_id}", "limit": 1})
    assert not several({}, a=a, b={"key": "goods:{b_id}", "limit": 3})
    (found,) = several({}, a=a, b={"key": "stock:{b_id}", "limit": 3})
    assert (found.level, found.setting) == ("warning", "lock 'stock:{}': limit")
    assert found.value == "1 and 3"
    assert found.hint.startswith("limit=1: a; limit=3: b. A task with a higher limit")


@pytest.mark.parametrize(
    ("conf", "lock", "args"),
    [
        ({}, {"key": "a"}, "lock_args"),
        ({"redlock_key": "a"}, {}, "redlock_args"),
        ({"redlock_queues": {"celery": {"key": "a"}}}, {}, "redlock_queues['celery']['args']"),
    ],
    ids=["task", "app", "queue"],
)
def test_an_arguments_bare_name_in_a_key_is_asked_about_at_its_level(
    conf: dict[str, Any], lock: dict[str, Any], args: str
) -> None:
    (found,) = lint(shop(conf, lock=lock))
    assert f"did you mean {args}=['a'] or '{{a}}'?" in found.hint
    assert not lint(shop(conf, lock={"args": ["a"]}))


def test_tasks_share_a_lock_where_one_of_several_keys_is_the_same() -> None:
    found = several({}, a={"key": ["x:{a_id}", "y:{a_id}"]}, b={"key": "y:{b_id}", "limit": 2})
    assert [one.setting for one in found] == ["lock 'y:{}': limit"]


@pytest.mark.parametrize("key", ["{task}:{digest}", "{task}", lambda *_: "x"])
def test_tasks_whose_keys_name_them_or_are_not_known_share_no_lock(key: Any) -> None:
    assert not several({"redlock_key": key}, a={"limit": 2}, b={"limit": 3})


def test_a_mapping_gives_each_of_several_keys_its_own_limit_and_a_callable_is_not_asked() -> None:
    keys = {"key": ["x:{a_id}", "y:{a_id}"], "limit": {"y:{a_id}": 2}}
    assert not several({}, a=keys, b={"key": "y:{b_id}", "limit": 2})
    assert not several({}, a={**keys, "limit": lambda *_: 1 / 0}, b={"key": "y:{b_id}"})
    (found,) = several({}, a=keys, b={"key": "x:{b_id}", "limit": 2})
    assert (found.setting, found.value) == ("lock 'x:{}': limit", "1 and 2")


def test_errors_stand_first_and_advice_last() -> None:
    entries: dict[str, Any] = {"redlock_queues": {"celrey": {}}, "redlock_tasks": {"shop.g": {}}}
    app = shop(entries, lock={"renew": False})
    app.conf.task_create_missing_queues = False
    assert [one.level for one in lint(app)] == ["error", "warning", "advice"]


def test_a_task_of_others_is_looked_at_like_ones_own() -> None:
    app = shop_of({"redlock_tasks": {"vendor.*": {"renew": False}}}, {}, "vendor.f")
    assert said(app) == [("advice", "task 'vendor.*': redlock_tasks['vendor.*']['renew']")]


@pytest.mark.parametrize(
    ("broker", "queues", "is_told"),
    [
        ("amqp://a", [("celery", "direct", "quorum"), ("b", "topic", "quorum")], True),
        ("amqp://a", [("celery", "direct", "classic"), ("b", "topic", "quorum")], True),
        ("amqp://a", [("celery", "direct", "classic"), ("b", "topic", "classic")], False),
        ("amqp://a", [("celery", "topic", "quorum"), ("b", "direct", "quorum")], False),
        ("redis://a", [("celery", "direct", "quorum")], False),
    ],
)
def test_where_rabbitmq_has_a_quorum_queue_the_prefetch_is_fixed(
    broker: str, queues: list[tuple[str, str, str]], is_told: bool
) -> None:
    app = shop({"broker_url": broker, "task_queues": [a_queue(*queue) for queue in queues]})
    assert said(app) == ([("warning", "queue 'celery'")] if is_told else [])


@pytest.mark.parametrize(
    ("broker", "queue", "drops"),
    [
        ("amqp://a", {"queue_arguments": {"x-max-length": 9}}, True),
        ("amqp://a", {"queue_arguments": {"x-max-length-bytes": 9}}, True),
        ("amqp://a", {"max_length": 9}, True),
        ("amqp://a", {"max_length": 9, "queue_arguments": {"x-overflow": "drop-head"}}, True),
        ("amqp://a", {"max_length": 9, "queue_arguments": {"x-overflow": "reject-publish"}}, False),
        ("amqp://a", {}, False),
        ("redis://a", {"max_length": 9}, False),
    ],
)
def test_a_bounded_queue_of_rabbitmq_drops_its_oldest_message_unless_it_refuses_new_ones(
    broker: str, queue: dict[str, Any], drops: bool
) -> None:
    app = shop({"broker_url": broker, "task_queues": [Queue("celery", **queue)]})
    assert said(app) == ([("warning", "app: task_queues")] if drops else [])


class TestQueues:
    MISSPELLED: ClassVar = {"redlock_queues": {"celrey": {}}}

    def test_a_name_that_no_queue_has_is_told_with_a_proposal(self) -> None:
        (one,) = lint(shop(self.MISSPELLED))
        assert (one.level, one.value) == ("warning", "'celrey'")
        assert "did you mean 'celery'?" in one.hint

    def test_it_is_an_error_if_no_send_can_create_it(self) -> None:
        with pytest.raises(SettingsError, match="did you mean 'celery'") as caught:
            shop({**self.MISSPELLED, "task_create_missing_queues": False})
        assert caught.value.name == "redlock_queues"

    def test_a_glob_and_a_declared_name_are_not(self) -> None:
        conf = {"task_queues": {"slow": {}}, "task_default_queue": "slow"}
        closed = {**conf, "task_create_missing_queues": False}
        assert not lint(shop({**closed, "redlock_queues": {"slow": {}, "x*": {}}}))

    @pytest.mark.parametrize(
        ("queues", "names"),
        [(None, ("celery",)), ({"a": {}, "b": {}}, ("a", "b")), ([Queue("a")], ("a",))],
    )
    def test_queues_are_declared_in_each_way_that_celery_has(
        self, queues: Any, names: tuple[str, ...]
    ) -> None:
        conf = {"task_queues": queues, "task_default_queue": "celery"}
        assert declared_queues(conf) == names


def test_a_lint_is_a_frozen_record() -> None:
    change: Callable[..., None] = setattr
    with pytest.raises(AttributeError):
        change(Lint("advice", "a", "b", "c"), "level", "error")


STAGING = {"broker_transport_options": {"global_keyprefix": "staging:"}}


def of_prefix(conf: dict[str, Any]) -> list[Lint]:
    """Return what is said of the prefix of an app's locks."""
    app = Celery("prefixed", broker="redis://a/1", set_as_default=False)
    app.conf.update(conf)
    return [one for one in lint(app) if one.setting == "app: redlock_prefix"]


@pytest.mark.parametrize(
    ("conf", "level"),
    [
        (STAGING, "warning"),  # the broker's Redis is the node
        ({**STAGING, "redlock_nodes": NODES}, "warning"),  # one of them is the broker's Redis
        ({**STAGING, "redlock_nodes": ["redis://x"]}, "advice"),  # maybe nobody else's
        ({"result_backend_transport_options": {"global_keyprefix": "staging:"},
          "broker_url": "amqp://a", "result_backend": "redis://a"}, "warning"),
    ],
)  # fmt: skip
def test_a_key_prefix_of_the_brokers_that_locks_do_not_carry_is_told(
    conf: dict[str, Any], level: str
) -> None:
    (found,) = of_prefix(conf)
    assert (found.level, found.value) == (level, "'redlock'")
    assert "global_keyprefix='staging:'" in found.hint
    assert "redlock_prefix='staging-redlock'" in found.hint


@pytest.mark.parametrize("conf", [{}, {**STAGING, "redlock_prefix": "mine"}])
def test_a_prefix_of_ones_own_is_enough(conf: dict[str, Any]) -> None:
    assert of_prefix(conf) == []


def test_a_task_is_looked_at_in_the_queue_of_its_own_routing() -> None:
    conf = {
        "task_queues": {"slow": {}, "celery": {}},
        "task_routes": {"routed": {"queue": "slow"}},
        "redlock_queues": {"slow": {"key": "{b}"}},
    }
    found = lint(shop_of(conf, {"plain": {}, "routed": {}, "none": {"lock_key": False}}))
    assert [one.setting for one in found] == ["queue 'slow': redlock_queues['slow']['key']"]
    assert found[0].hint.startswith("every run of routed there")


def test_a_task_that_no_setting_locks_is_not_told_of() -> None:
    early, late = {"acks_late": False}, {"reject_on_worker_lost": False}
    app = shop_of({"redlock_key": False, **ON_REDIS}, {"thank": early, "greet": late})
    assert lint(app) == open_decisions(app) == ()
    own = shop_of({"redlock_key": False}, {"thank": early, "take": {**early, "lock_key": "all"}})
    (found,) = lint(own)
    assert found.hint.startswith("take: a message is lost")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("once", {"keys": ["a"]}, "set lock_args to its keys"),
        ("unique_on", ["a"], "set lock_args"),
        ("raise_on_duplicate", True, 'set lock_on_duplicate="fail"'),
    ],
)
def test_an_option_that_another_plugin_has_left_behind_is_told_of(
    name: str, value: Any, words: str
) -> None:
    (found,) = lint(shop(task={name: value}))
    assert (found.level, found.setting) == ("warning", f"task 'shop.f': {name}")
    assert words in found.hint


def opened(app: Celery) -> list[tuple[str, str, str]]:
    return [(one.level, one.setting, one.value) for one in open_decisions(app)]


ONE_NODE = {**ON_REDIS, "redlock_nodes": ["redis://a"]}


def test_what_the_defaults_leave_open_is_told_in_one_line_each() -> None:
    adopting = {**ONE_NODE, "redlock_tasks": {"vendor.*": {"unique_for": 20}}}
    assert opened(shop_of(adopting, {"shop.f": {}}, unlocked="vendor.build")) == [
        ("advice", "app: redlock_nodes", "1 node"),
        ("advice", "app: redlock_tasks", "unique_for or debounce"),
    ]


def test_a_worker_logs_once_what_is_left_open(caplog: pytest.LogCaptureFixture) -> None:
    sender = SimpleNamespace(app=shop(ONE_NODE))
    with caplog.at_level("INFO", "celery_redlock"):
        report_lints(sender)
        report_lints(sender)
    (line,) = [one for one in caplog.records if vars(one).get("event") == "left_open"]
    assert line.levelname == "INFO"
    assert line.getMessage().startswith("app: redlock_nodes=1 node: ")


@pytest.mark.parametrize(
    ("decided", "what"),
    [
        (shop, "app: redlock_nodes"),
        (partial(shop, {**ONE_NODE, "redlock_restart_guard": "strict"}), "app: redlock_nodes"),
        (partial(shop, {"redlock_nodes": ["postgresql://a/b"]}), "app: redlock_nodes"),
        (partial(shop, {"redlock_tasks": {"vendor.*": {}}}), "app: redlock_tasks"),
    ],
)
def test_what_the_user_has_decided_is_not_left_open(decided: App, what: str) -> None:
    assert what not in [setting for _, setting, _ in opened(decided())]


def test_adopted_tasks_with_deduplicated_sends_are_told_what_their_senders_need() -> None:
    declared = {"shop.f": {"lock_unique_for": 60}}  # with its base its senders have the rest
    for option in ("unique_for", "debounce", "ttl"):
        conf = {"redlock_tasks": {"vendor.*": {option: 20}}}
        found = open_decisions(shop_of(conf, declared, unlocked="vendor.build"))
        hints = [one.hint for one in found if one.setting == "app: redlock_tasks"]
        told = [hint.startswith("vendor.build: a process that sends them") for hint in hints]
        assert told == ([] if option == "ttl" else [True])


def test_an_app_without_locked_tasks_leaves_nothing_open() -> None:
    assert open_decisions(shop_of(ONE_NODE, {})) == ()


def test_an_entry_after_a_glob_that_takes_its_tasks_is_told_from_one_without_tasks() -> None:
    for entries, hint in (
        ({"ven*": {}, "vendor.*": {"ttl": 20}}, "because 'ven*' comes first: name it before that"),
        ({"vendor.*": {"ttl": 20}, "ven*": {}}, "because 'vendor.*' comes first"),
        ({"vendor.*": {"ttl": 20}, "x*": {}}, "matches no task of this worker"),
    ):
        (one,) = lint(shop_of({"redlock_tasks": entries}, {}, unlocked="vendor.build"))
        assert (one.setting, one.value) == ("app: redlock_tasks", repr([*entries][1]))
        assert hint in one.hint
