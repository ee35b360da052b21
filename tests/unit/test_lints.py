from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from kombu import Exchange, Queue

from celery_redlock import LockedTask
from celery_redlock.operate.lints.app_rules import lint_queues
from celery_redlock.operate.lints.facts import declared_queues, facts_of, visibility_of
from celery_redlock.operate.lints.model import Facts, Lint, TaskFacts
from celery_redlock.operate.lints.rules import left_open, lint
from celery_redlock.tasks.settings.conf import read_app
from celery_redlock.tasks.settings.task_config import compile_adopted_config, compile_config

NODES = ["redis://a", "redis://b", "redis://c"]


def facts(
    conf: dict[str, Any] | None = None,
    lock: dict[str, Any] | None = None,
    task: dict[str, Any] | None = None,
    **more: Any,
) -> Facts:
    """Return those of an app with one task. lock: its options; task: of it; more: of the app."""
    app = read_app({"redlock_nodes": NODES, **(conf or {})})
    attributes = {f"lock_{name}": value for name, value in (lock or {}).items()}
    plan = compile_config(app, "shop.f", attributes, inspect.signature(lambda a: None))
    about = {"queue": "celery", "acks_late": True, "reject_on_worker_lost": True, **(task or {})}
    return Facts(app, names=("shop.f", "celery.map"), tasks=[TaskFacts(plan, **about)], **more)


def said(found: Facts) -> list[tuple[str, str]]:
    return [(one.level, one.setting) for one in lint(found)]


def test_a_configuration_with_nothing_wrong_gives_no_lint() -> None:
    assert lint(facts()) == ()


MINE = "task 'shop.f': lock_"
CASES: list[tuple[str, Facts, Facts, str, str]] = [
    (
        "metrics without the library that counts them",
        facts({"redlock_metrics": 9808}, counts=False),
        facts({"redlock_metrics": 9808}),
        "warning",
        "app: redlock_metrics",
    ),
    (
        "a queue that drops its oldest message for a deferral",
        facts(drops_oldest=("bounded",)),
        facts(),
        "warning",
        "app: task_queues",
    ),
    (
        "a cap above a quarter of the visibility timeout",
        facts({"broker_transport_options": {"visibility_timeout": 100}}),
        facts({"broker_transport_options": {"visibility_timeout": 120}}),
        "warning",
        "built-in",
    ),
    (
        "a cap above half of the time for which a run is known as done",
        facts({"redlock_done_ttl": 59}),
        facts({"redlock_done_ttl": 60}),
        "warning",
        "built-in",
    ),
    (
        "a retry delay above the visibility timeout",
        facts(task={"retries_after": 61}, visibility=60.0),
        facts(task={"retries_after": 60}, visibility=60.0),
        "warning",
        "task 'shop.f': default_retry_delay",
    ),
    (
        "a budget that is over before the first deferral",
        facts(lock={"wait": 5, "max_wait": 5}),
        facts(lock={"wait": 5, "max_wait": 6}),
        "warning",
        f"{MINE}max_wait",
    ),
    (
        "a wait that a time limit cuts",
        facts(lock={"wait": 5}, task={"soft_time_limit": 5, "time_limit": 9}),
        facts(lock={"wait": 5}, task={"soft_time_limit": 6, "time_limit": 9}),
        "warning",
        f"{MINE}wait",
    ),
    (
        "a fixed lease below the time limit",
        facts(lock={"renew": False, "ttl": 20}, task={"time_limit": 21}),
        facts(lock={"renew": False, "ttl": 20}, task={"time_limit": 20}),
        "warning",
        f"{MINE}renew",
    ),
    (
        "a fixed lease without a time limit",
        facts(lock={"renew": False}),
        facts(lock={"renew": False}, task={"soft_time_limit": 9}),
        "advice",
        f"{MINE}renew",
    ),
    (
        "a fixed lease with an end of renewals",
        facts(lock={"renew": False, "max_hold": 9}, task={"time_limit": 9}),
        facts(lock={"max_hold": 9}, task={"time_limit": 9}),
        "warning",
        f"{MINE}max_hold",
    ),
    (
        "an end of renewals below the time limit",
        facts(lock={"max_hold": 20}, task={"time_limit": 21}),
        facts(lock={"max_hold": 20}, task={"time_limit": 20}),
        "warning",
        f"{MINE}max_hold",
    ),
    (
        "a budget of deferrals that never come about",
        facts(lock={"on_conflict": "skip", "on_unreachable": "fail", "max_wait": 3}),
        facts(lock={"on_conflict": "skip", "max_wait": 3}),
        "warning",
        f"{MINE}max_wait",
    ),
    (
        "an end of a budget that is not there",
        facts(lock={"on_give_up": "skip"}),
        facts(lock={"on_give_up": "skip", "max_wait": 9}),
        "warning",
        f"{MINE}on_give_up",
    ),
    (
        "an end of a window that no send opens",
        facts(lock={"unique_until": "started"}),
        facts(lock={"unique_until": "started", "unique_for": 9}),
        "warning",
        f"{MINE}unique_until",
    ),
    (
        "a word on duplicates that nothing finds",
        facts({"redlock_on_duplicate": "fail"}),
        facts({"redlock_on_duplicate": "fail", "redlock_unique_for": 9}),
        "warning",
        "app: redlock_on_duplicate",
    ),
    (
        "a fencing token for runs without a lock",
        facts(lock={"on_unreachable": "run", "fencing": True}),
        facts(lock={"on_unreachable": "run"}),
        "warning",
        f"{MINE}on_unreachable",
    ),
    (
        "a queue's key that the task cannot fill",
        facts({"redlock_queues": {"celery": {"key": "{b}"}}}),
        facts({"redlock_queues": {"celery": {"key": "{b}"}}}, lock={"key": "{a}"}),
        "warning",
        "queue 'celery': redlock_queues['celery']['key']",
    ),
    (
        "a queue's argument that the task has not",
        facts({"redlock_queues": {"celery": {"args": ["b"]}}}),
        facts({"redlock_queues": {"celery": {"args": ["b"]}}}, lock={"args": ["a"]}),
        "warning",
        "queue 'celery': redlock_queues['celery']['args']",
    ),
    (
        "a key that is the bare name of an argument",
        facts(lock={"key": ["x", "a"]}),
        facts(lock={"key": ["x", "{a}"]}),
        "warning",
        f"{MINE}key",
    ),
    (
        "a queue's option beside which the task's cannot stand",
        facts({"redlock_queues": {"celery": {"limit": 2}}}, lock={"fencing": True}),
        facts({"redlock_queues": {"celery": {"limit": 2}}}),
        "warning",
        "task 'shop.f' in queue 'celery': limit",
    ),
    (
        "an even number of nodes",
        facts({"redlock_nodes": NODES[:2]}),
        facts({"redlock_nodes": NODES[:1]}),
        "advice",
        "app: redlock_nodes",
    ),
    (
        "early acknowledgement",
        facts(task={"acks_late": False, "reject_on_worker_lost": False}),
        facts(),
        "advice",
        "acks_late",
    ),
    (
        "late acknowledgement of killed children",
        facts(task={"reject_on_worker_lost": False}),
        facts(),
        "advice",
        "reject_on_worker_lost",
    ),
    (
        "any number of waiting messages in memory",
        facts(prefetch=0),
        facts(prefetch=1),
        "warning",
        "app: worker_prefetch_multiplier",
    ),
    (
        "no message that waits",
        facts(prefetch=0),
        facts(lock={"on_conflict": "fail"}, prefetch=0),
        "warning",
        "app: worker_prefetch_multiplier",
    ),
    (
        "messages that wait in a worker with a fixed prefetch",
        facts(prefetch_is_fixed=("celery",)),
        facts(prefetch_is_fixed=("other",)),
        "warning",
        "queue 'celery'",
    ),
    (
        "a fixed prefetch that nobody has raised",
        facts(prefetch_is_fixed=("celery",), prefetch=4),
        facts(prefetch_is_fixed=("celery",), prefetch=5),
        "warning",
        "queue 'celery'",
    ),
    (
        "a fixed prefetch that waiting messages fill",
        facts(prefetch_is_fixed=("celery",)),
        facts(prefetch_is_fixed=("celery",), lock={"on_conflict": "skip"}),
        "warning",
        "queue 'celery'",
    ),
    (
        "a name of a task that is not there",
        facts({"redlock_tasks": {"shop.g": {}}}),
        facts({"redlock_tasks": {}}),
        "warning",
        "app: redlock_tasks",
    ),
    (
        "a glob of tasks that fits none",
        facts({"redlock_tasks": {"c*.map": {}}}),  # Celery's own is none
        facts(),
        "advice",
        "app: redlock_tasks",
    ),
    (
        "a glob that fits a locked task of one's own",
        facts({"redlock_tasks": {"shop.*": {}}}),
        facts({"redlock_tasks": {"shop.*": {}}}, task={"takes_entry": True}),
        "advice",
        "app: redlock_tasks",
    ),
]


@pytest.mark.parametrize(("wrong", "right", "level", "setting"), [c[1:] for c in CASES],
                         ids=[c[0] for c in CASES])  # fmt: skip
def test_what_is_wrong_is_said_once_and_what_is_right_is_not(
    wrong: Facts, right: Facts, level: str, setting: str
) -> None:
    assert said(wrong) == [(level, setting)]
    assert lint(right) == ()
    (one,) = lint(wrong)
    assert one.hint
    assert str(one) == f"{one.setting}={one.value}: {one.hint}"


def test_a_task_that_cannot_be_meant_in_its_queue_leaves_the_others_their_lints() -> None:
    clash = {"redlock_queues": {"celery": {"limit": 2}}}
    found = facts(clash, lock={"fencing": True}, prefetch=0)
    assert said(found) == [("warning", "task 'shop.f' in queue 'celery': limit")]


def test_a_task_that_cannot_be_meant_leaves_other_tasks_their_lints() -> None:
    conf = {"redlock_queues": {"celery": {"limit": 2}}}
    found = several(conf, bad={"fencing": True}, good={"ttl": 20, "max_wait": 0.1, "wait": 1})
    settings = [one.setting for one in found]
    assert "task 'bad' in queue 'celery': limit" in settings
    assert "task 'good': lock_max_wait" in settings


def test_a_thing_of_many_tasks_is_said_once_and_names_some() -> None:
    app = read_app({"redlock_nodes": NODES, "redlock_max_wait": 1, "redlock_wait": 1})
    signature = inspect.signature(lambda a: None)
    plans = [compile_config(app, f"shop.t{n}", {}, signature) for n in range(7)]
    found = lint(Facts(app, tasks=[TaskFacts(plan, "celery") for plan in plans]))
    assert [one.setting for one in found] == ["app: redlock_max_wait", "acks_late"]
    assert found[1].hint.startswith("shop.t0, shop.t1, shop.t2, shop.t3, shop.t4 and 2 more: ")


def several(conf: dict[str, Any], **tasks: dict[str, Any]) -> tuple[Lint, ...]:
    """Return the lints of some tasks with one argument each, by their options."""
    app = read_app({"redlock_nodes": NODES, **conf})
    plans = [
        compile_config(
            app, name, {f"lock_{n}": v for n, v in lock.items()},
            inspect.signature(eval(f"lambda {name}_id: None")),
        )
        for name, lock in tasks.items()
    ]  # fmt: skip
    return lint(Facts(app, tasks=[TaskFacts(plan, "celery", True, True) for plan in plans]))


@pytest.mark.parametrize(
    ("option", "one", "other", "level"),
    [("limit", 1, 3, "warning"), ("fencing", True, False, "warning"), ("ttl", 20, 40, "advice")],
)
def test_tasks_that_share_a_lock_are_told_in_what_they_differ(
    option: str, one: Any, other: Any, level: str
) -> None:
    a = {"key": "stock:{a_id}", option: one}
    assert not several({}, a=a, b={"key": "stock:{b_id}", option: one})
    assert not several({}, a=a, b={"key": "goods:{b_id}", option: other})
    (found,) = several({}, a=a, b={"key": "stock:{b_id}", option: other})
    assert (found.level, found.setting) == (level, f"lock 'stock:{{}}': {option}")
    for task, value in (("a", one), ("b", other)):
        shown = float(value) if option == "ttl" else value
        assert f"{option}={shown!r}: {task}" in found.hint


@pytest.mark.parametrize(
    ("conf", "lock", "args"),
    [
        ({}, {"key": "a"}, "lock_args"),
        ({"redlock_key": "a"}, {}, "redlock_args"),
        (
            {"redlock_queues": {"celery": {"key": "a"}}},
            {},
            "redlock_queues['celery']['args']",
        ),
    ],
    ids=["task", "app", "queue"],
)
def test_an_arguments_bare_name_in_a_key_is_asked_about_at_its_level(
    conf: dict[str, Any], lock: dict[str, Any], args: str
) -> None:
    (found,) = lint(facts(conf, lock=lock))
    assert f"did you mean {args}=['a'] or '{{a}}'?" in found.hint
    assert not lint(facts(conf, lock={"args": ["a"]}))


def test_tasks_share_a_lock_where_one_of_several_keys_is_the_same() -> None:
    found = several({}, a={"key": ["x:{a_id}", "y:{a_id}"], "ttl": 20}, b={"key": "y:{b_id}"})
    assert [one.setting for one in found] == ["lock 'y:{}': ttl"]


@pytest.mark.parametrize("key", ["{task}:{digest}", None, lambda *_: "x"])
def test_tasks_whose_keys_name_them_or_are_not_known_share_no_lock(key: Any) -> None:
    assert not several({"redlock_key": key}, a={"ttl": 20}, b={"ttl": 40})


def test_a_word_on_duplicates_for_all_is_for_those_that_have_a_window() -> None:
    assert not several({"redlock_on_duplicate": "fail"}, a={"unique_for": 9}, b={})


def test_errors_stand_first_and_advice_last() -> None:
    found = facts(
        {"redlock_queues": {"slwo": {}}, "redlock_nodes": NODES[:2]},
        lock={"on_give_up": "skip"},
        queues=("slow",),
        creates_queues=False,
    )
    assert [one.level for one in lint(found)] == ["error", "warning", "advice"]


def test_a_task_of_others_is_looked_at_like_ones_own() -> None:
    app = read_app({"redlock_nodes": NODES, "redlock_tasks": {"vendor.*": {"on_give_up": "skip"}}})
    plan = compile_adopted_config(app, "vendor.f", "vendor.*", inspect.signature(lambda a: None))
    task = TaskFacts(plan, "celery", True, True, takes_entry=True)
    (one,) = lint(Facts(app, names=("vendor.f",), tasks=[task]))
    assert one.setting == "task 'vendor.*': redlock_tasks['vendor.*']['on_give_up']"


def a_queue(name: str, exchange: str, kind: str) -> Queue:
    return Queue(name, Exchange(name, exchange), name, queue_arguments={"x-queue-type": kind})


@pytest.mark.parametrize(
    ("broker", "queues", "fixed"),
    [
        ("amqp://a", [("a", "direct", "quorum"), ("b", "topic", "quorum")], ("a",)),
        ("amqp://a", [("a", "direct", "classic"), ("b", "topic", "quorum")], ("a",)),
        ("amqp://a", [("a", "direct", "classic"), ("b", "topic", "classic")], ()),
        ("redis://a", [("a", "direct", "quorum")], ()),
    ],
)
def test_where_rabbitmq_has_a_quorum_queue_the_prefetch_is_fixed(
    broker: str, queues: list[tuple[str, str, str]], fixed: tuple[str, ...]
) -> None:
    app = Celery("fixed", broker=broker, set_as_default=False)
    app.conf.redlock_nodes = NODES
    app.conf.task_queues = [a_queue(*queue) for queue in queues]
    assert facts_of(app).prefetch_is_fixed == fixed


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
    app = Celery("bounded", broker=broker, set_as_default=False)
    app.conf.redlock_nodes = NODES
    app.conf.task_queues = [Queue("q", **queue)]
    assert facts_of(app).drops_oldest == (("q",) if drops else ())


class TestQueues:
    @pytest.mark.parametrize(("creates", "level"), [(True, "warning"), (False, "error")])
    def test_a_name_that_no_queue_has_is_told_with_a_proposal(
        self, creates: bool, level: str
    ) -> None:
        (one,) = lint_queues(["slwo"], ["slow", "celery"], creates=creates)
        assert (one.level, one.value) == (level, "'slwo'")
        assert "did you mean 'slow'?" in one.hint

    def test_a_glob_and_a_declared_name_are_not(self) -> None:
        assert not [*lint_queues(["slow", "x*"], ["slow"], creates=False)]

    @pytest.mark.parametrize(
        ("queues", "names"),
        [(None, ("celery",)), ({"a": {}, "b": {}}, ("a", "b")), (["a"], ("a",))],
    )
    def test_queues_are_declared_in_each_way_that_celery_has(
        self, queues: Any, names: tuple[str, ...]
    ) -> None:
        conf = {"task_queues": queues, "task_default_queue": "celery"}
        assert declared_queues(conf) == names


@pytest.mark.parametrize(
    ("url", "given", "visibility"),
    [
        ("redis://a", None, 3600.0),
        (["rediss://a"], 60, 60.0),
        ("redis+socket:///a", None, 3600.0),
        ("sqs://", None, 1800.0),
        ("amqp://a", 60, None),
        (None, None, None),
    ],
)
def test_brokers_take_a_message_for_lost_after_a_time_of_their_own(
    url: Any, given: int | None, visibility: float | None
) -> None:
    options = {} if given is None else {"visibility_timeout": given}
    conf = {"broker_url": url, "broker_transport_options": options}
    assert visibility_of(conf) == visibility


def test_a_lint_is_a_frozen_record() -> None:
    change: Callable[..., None] = setattr
    with pytest.raises(AttributeError):
        change(Lint("advice", "a", "b", "c"), "level", "error")


@pytest.mark.parametrize(
    ("conf", "hint"),
    [
        ({"redlock_done_ttl": 40}, "cut to 20 s, half of redlock_done_ttl"),
        (
            {"broker_transport_options": {"visibility_timeout": 100}},
            "cut to 25 s, a quarter of the broker's visibility timeout",
        ),
    ],
)
def test_a_cap_that_is_too_high_is_told_by_what_it_is_cut(conf: dict[str, Any], hint: str) -> None:
    [found] = lint(facts(conf))
    assert hint in found.hint


STAGING = {"broker_transport_options": {"global_keyprefix": "staging:"}}


def of_prefix(conf: dict[str, Any]) -> list[Lint]:
    """Return what is said of the prefix of an app's locks."""
    app = Celery("prefixed", broker="redis://a/1", set_as_default=False)
    app.conf.update(conf)
    return [one for one in lint(facts_of(app)) if one.setting == "app: redlock_prefix"]


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


def test_the_facts_are_those_of_an_app() -> None:
    app = Celery("facts", broker="redis://a", set_as_default=False)
    app.conf.update(
        redlock_nodes=NODES,
        task_time_limit=50,
        task_soft_time_limit=40,
        task_queues={"slow": {}},
        task_default_queue="slow",
        task_create_missing_queues=False,
        task_routes={"routed": {"queue": "slow"}},
        worker_prefetch_multiplier=0,
        broker_transport_options={"visibility_timeout": 70},
    )

    def body() -> None: ...

    locked = functools.partial(app.task, base=LockedTask, shared=False)
    app.task(name="unlocked", shared=False)(body)
    locked(name="plain", lock_key="k")(body)
    locked(name="no.key", lock_key=False)(body)
    locked(
        name="routed", lock_key="k", acks_late=True, reject_on_worker_lost=True, time_limit=9,
        soft_time_limit=8, autoretry_for=(OSError,), default_retry_delay=80,
    )(body)  # fmt: skip
    app.finalize()
    found = facts_of(app)
    assert (found.visibility, found.prefetch, found.creates_queues) == (70.0, 0, False)
    assert found.queues == ("slow",)
    assert {"plain", "routed", "no.key", "unlocked"} <= set(found.names)
    plain, routed = (
        (task.name, task.queue, task.acks_late, task.reject_on_worker_lost, task.time_limit,
         task.soft_time_limit, task.retries_after)
        for task in sorted(found.tasks, key=lambda task: task.name)
    )  # fmt: skip
    assert plain == ("plain", "slow", False, False, 50, 40, None)
    assert routed == ("routed", "slow", True, True, 9, 8, 80)


def opened(found: Facts) -> list[tuple[str, str, str]]:
    return [(one.level, one.setting, one.value) for one in left_open(found)]


ONE_NODE = {"redlock_nodes": ["redis://a"]}


def test_what_the_defaults_leave_open_is_told_in_one_line_each() -> None:
    assert opened(facts(ONE_NODE, visibility=3600.0)) == [
        ("advice", "app: redlock_nodes", "1 node"),
        ("advice", "max_wait, max_hold", "None"),
        ("advice", "app: broker_transport_options: visibility_timeout", "3600"),
    ]


@pytest.mark.parametrize(
    ("decided", "what"),
    [
        (facts(), "app: redlock_nodes"),
        (facts({**ONE_NODE, "redlock_restart_guard": "strict"}), "app: redlock_nodes"),
        (facts(lock={"max_wait": 60}), "max_wait, max_hold"),
        (facts(lock={"max_hold": 60}), "max_wait, max_hold"),
        (facts(task={"time_limit": 60.0}), "max_wait, max_hold"),
        (facts(visibility=None), "app: broker_transport_options: visibility_timeout"),
        (
            facts(task={"acks_late": False}, visibility=3600.0),
            "app: broker_transport_options: visibility_timeout",
        ),
    ],
)
def test_what_the_user_has_decided_is_not_left_open(decided: Facts, what: str) -> None:
    assert what not in [setting for _, setting, _ in opened(decided)]


def test_an_app_without_locked_tasks_leaves_nothing_open() -> None:
    assert left_open(Facts(read_app(ONE_NODE), visibility=3600.0)) == ()
