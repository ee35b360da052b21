from __future__ import annotations

import dataclasses
import inspect
import tracemalloc
from collections.abc import Callable
from decimal import Decimal
from types import MappingProxyType
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from hypothesis import given
from hypothesis import strategies as st
from kombu.utils.json import dumps, loads
from redis.sentinel import Sentinel

from celery_redlock import Backoff, LockedTask, SettingsError
from celery_redlock.lock.model.keys import in_order
from celery_redlock.lock.model.rate import Rate
from celery_redlock.lock.validation import check_nodes
from celery_redlock.tasks.per_app import settings_of
from celery_redlock.tasks.settings.app import APP_SETTING, AppSettings, OptionSource, pattern_for
from celery_redlock.tasks.settings.levels import (
    check_known_names,
    check_outside,
    find_nodes,
    one_redis,
    read_app,
    visibility_timeout,
)
from celery_redlock.tasks.settings.options import BUILT_IN, OPTION, TaskLockOptions
from celery_redlock.tasks.settings.task_config import (
    TaskCall,
    TaskLockConfig,
    compile_adopted_config,
    compile_config,
)
from celery_redlock.tasks.settings.templates import canonical, digest

NODES = ["redis://a", "redis://b", "redis://c"]


def f(a: Any, b: Any = 2, *rest: Any, **options: Any) -> None:
    """Stand for a task's body."""


def plan(
    conf: dict[str, Any] | None = None, body: Callable[..., Any] = f, **lock: Any
) -> TaskLockConfig:
    app = read_app({"redlock_nodes": NODES, **(conf or {})})
    attributes = {f"lock_{name}": value for name, value in lock.items()}
    return compile_config(app, "shop.f", attributes, inspect.signature(body))


def resources(
    made: TaskLockConfig, *args: Any, queue: str = "celery", **kwargs: Any
) -> tuple[str, ...]:
    return made.resources(made.options_for(queue), TaskCall(None, args, kwargs, queue))


def resource(made: TaskLockConfig, *args: Any, queue: str = "celery", **kwargs: Any) -> str:
    (one,) = resources(made, *args, queue=queue, **kwargs)
    return one


class TestLevels:
    def test_none_is_a_value_and_overrides_too(self) -> None:
        made = plan({"redlock_max_wait": 9, "redlock_key": "x:{a}"}, max_wait=None, key=None)
        assert made.options_for("q").max_wait is None
        assert made.options_for("q").key is None

    def test_a_queues_exact_name_goes_before_globs_and_globs_in_their_order(self) -> None:
        queues = {"imp*": {"wait": 1}, "import*": {"wait": 2}, "imports": {"wait": 3}}
        made = plan({"redlock_queues": queues})
        assert [made.options_for(q).wait for q in ("imports", "imports.eu", "x")] == [3, 1, 0]

    def test_a_calls_option_that_came_by_a_message_is_checked(self) -> None:
        with pytest.raises(SettingsError, match=r"call: lock=\{'ttl': \.\.\.\}=-1"):
            plan().options_for("q", {"ttl": -1})

    def test_a_calls_key_is_checked_against_the_function(self) -> None:
        with pytest.raises(SettingsError, match="no argument 'skuu'"):
            plan().options_for("q", {"key": "stock:{skuu}"})

    def test_the_default_ttl_stays_below_a_smaller_max_ttl(self) -> None:
        assert plan({"redlock_max_ttl": 10}).options_for("q").ttl == 10

    def test_a_backoff_travels_as_a_mapping(self) -> None:
        rules = plan().options_for("q", {"backoff": Backoff(1, 2).to_message()})
        assert rules.backoff == Backoff(1, 2)


# four values of each option, for four levels; neighbours differ
FOUR: dict[str, list[Any]] = {
    "key": ["1:{a}", "2:{a}", "3:{a}", "4:{a}"], "args": [("a",), ("b",), (), ("a", "b")],
    "ttl": [11, 12, 13, 14], "renew": [False, True, False, True], "max_hold": [1, 2, None, 4],
    "wait": [1, 2, 3, 4], "on_conflict": ["skip", "fail", "defer", "skip"],
    "backoff": [Backoff(n, 9) for n in (1, 2, 3, 4)], "max_wait": [1, 2, None, 4],
    "on_give_up": ["skip", "fail", "skip", "fail"], "on_lost": ["warn", "abort", "warn", "abort"],
    "on_unreachable": ["run", "fail", "defer", "run"], "limit": [2, 3, 4, 5],
    "rate": ["2/s", "3/m", None, "5/90.5 s"],
    "fencing": [True, False, True, False], "unique_for": [1, 2, None, 4],
    "unique_until": ["started", "expired", "finished", "started"],
    "on_duplicate": ["fail", "existing", "fail", "existing"],
    "debounce": [1, 2, None, 4], "debounce_max": [1, 2, None, 4],
}  # fmt: skip


class TestEveryOptionAtEveryLevel:
    def test_each_is_looked_at(self) -> None:
        assert set(OPTION) == set(FOUR)

    @pytest.mark.parametrize("name", [n for n in FOUR if n in TaskLockOptions.__dataclass_fields__])
    @pytest.mark.parametrize("queue", ["slow", "slow.eu"], ids=["by name", "by glob"])
    def test_the_nearer_level_wins_and_is_named(self, name: str, queue: str) -> None:
        of_app, of_queue, of_task, of_call = FOUR[name]
        pattern = "slow" if queue == "slow" else "slow.*"
        app = {f"redlock_{name}": of_app}
        queues = {"redlock_queues": {"other": {name: of_app}, pattern: {name: of_queue}}}
        levels = [
            (plan(), {}, "built-in"),
            (plan(app), {}, f"app: redlock_{name}"),
            (plan(app | queues), {}, f"queue {pattern!r}: redlock_queues[{pattern!r}][{name!r}]"),
            (plan(app | queues, **{name: of_task}), {}, f"task 'shop.f': lock_{name}"),
            (
                plan(app | queues, **{name: of_task}),
                {name: of_call},
                f"call: lock={{{name!r}: ...}}",
            ),
        ]
        default = 30.0 if name == "ttl" else BUILT_IN[name]
        for (made, call, place), value in zip(levels, [default, *FOUR[name]], strict=True):
            assert getattr(made.options_for(queue, call), name) == value
            told = made.effective_options(queue, call)[name]
            assert (told.value, str(told.source)) == (value, place)

    def test_they_are_a_table_as_text(self) -> None:
        lines = str(
            plan({"redlock_ttl": 11}, on_conflict=lambda c: "skip").effective_options("slow")
        ).splitlines()
        assert lines[0] == "shop.f in queue slow"
        assert "all arguments" in lines[1]
        assert [line.split()[0] for line in lines[1:]] == list(TaskLockOptions.__dataclass_fields__)
        assert "app: redlock_ttl" in lines[3]


class TestOptionsThatAMessageMayCarry:
    def test_all_options_are_by_default(self) -> None:
        carried = {"key": False, "limit": 2}
        assert plan().heeded(carried) == carried
        assert plan().options_for("q", carried).key is False

    @pytest.mark.parametrize("named", [["wait"], {"wait"}, []])
    def test_another_one_is_refused_at_a_send_and_ignored_in_a_message(self, named: Any) -> None:
        made = plan({"redlock_call_options": named})
        with pytest.raises(SettingsError, match=r"'key': \.\.\.\}=False.*redlock_call"):
            made.check_call({"key": False})
        assert set(made.heeded({"key": False, "limit": 9, "wait": 3})) == set(named)

    def test_an_option_that_does_not_exist_stays_an_error(self) -> None:
        made = plan({"redlock_call_options": ["ttl"]})
        with pytest.raises(SettingsError, match="is not an option; did you mean 'ttl'"):
            made.options_for("q", made.heeded({"tll": 3}))

    @pytest.mark.parametrize("value", ["wait", 7, True, [7], {"wait": 1}, ["wiat"], [["wait"]]])
    def test_a_wrong_list_is_refused_by_name(self, value: Any) -> None:
        with pytest.raises(SettingsError, match="app: redlock_call_options="):
            plan({"redlock_call_options": value})

    def test_what_a_call_changes_of_what_is_excluded_is_told(self) -> None:
        made = plan(key="k:{a}")
        for carried, changed in (
            ({"key": False}, {"key": False}),
            ({"args": ["a"]}, {"key": None, "args": ("a",)}),
            ({"limit": 3, "wait": 9}, {"limit": 3}),
            ({"rate": [3, 60], "wait": 9}, {"rate": "3/m"}),
            ({"key": "k:{a}", "limit": 1, "rate": None, "ttl": 9}, {}),
        ):
            assert made.overridden("q", made.options_for("q", carried)) == changed


class TestTasksOfOthers:
    def others(self, entries: dict[str, Any], pattern: str) -> TaskLockConfig:
        app = read_app({"redlock_nodes": NODES, "redlock_ttl": 11, "redlock_tasks": entries})
        return compile_adopted_config(app, "vendor.sync", pattern, inspect.signature(f))

    def test_an_entry_stands_where_a_tasks_own_options_do(self) -> None:
        made = self.others({"vendor.*": {"wait": 3, "args": ["a"]}}, "vendor.*")
        told = made.effective_options("q", {"wait": 4})
        assert [told[name].value for name in ("args", "ttl", "wait")] == [("a",), 11, 4]
        assert str(told["args"].source) == "task 'vendor.*': redlock_tasks['vendor.*']['args']"

    def test_a_callable_may_stand_there(self) -> None:
        made = self.others({"vendor.*": {"key": lambda task, args, kwargs: "x"}}, "vendor.*")
        assert resource(made, 1) == "x"

    @pytest.mark.parametrize(
        ("name", "pattern"),
        [("a.b", "a.b"), ("a.c", "a.*"), ("b.c", "*.c"), ("b.d", None), ("a.bc", "a.*")],
    )
    def test_an_exact_name_goes_before_globs_and_globs_in_their_order(
        self, name: str, pattern: str | None
    ) -> None:
        assert pattern_for(name, ["*.c", "a.*", "a.b"][::-1]) == pattern


NAN, INF = float("nan"), float("inf")
WRONG: dict[str, list[Any]] = {
    "ttl": [0.5, 61, "30", None, True, NAN, INF],  # below four node timeouts, above redlock_max_ttl
    "renew": [1],
    "max_hold": [0, NAN],
    "wait": [-1, INF, 3601],
    "on_conflict": ["drop", 3],
    "backoff": [1.5],
    "max_wait": [0, 367 * 86_400],
    "on_give_up": ["defer"],
    "on_lost": ["ignore"],
    "on_unreachable": ["skip"],
    "limit": [0, 1.5, True, None, 1001],
    "rate": [
        0, 5, True, "", "10", "/s", "10/w", "10/ms", "0/s", "-1/s", "1.5/s", "1001/h", "1e3/h",
        "10/0.5 s", "10/86401 s", [10], [10, 0.5], [10, 86_401], [0, 60], [1.5, 60], [True, 60],
        [1001, 60], ["10", 60], [10, "60"], [10, NAN], [10, True], b"10/s",
        {"x:{a}": 5}, {"x:{a}": None}, {"x:{a}": "0/s"}, {"x:{a}": [10, 60, 1]},
    ],
    "fencing": [1, None],
    "unique_for": [0, "60", True, 1e300],
    "unique_until": ["end", None],
    "on_duplicate": ["skip", "replace"],
    "debounce": [0, "60", True, 1e300],
    "debounce_max": [0, "60", True, 1e300],
    "key": [
        7, [], "", ["x:{a}", ""], ["x:{a}", 7], "stock:{nope}", ["stock:{a}", "stock:{nope}"],
        "stock:{a.b}", "stock:{a", "stock:{}", "{a:>1000}", "{a:.1000f}", "{a:{b:>1000}}",
        "{a:>\u0661\u0661\u0661\u0661}",  # digits, too
    ],
    "args": [
        "a", 7, False, {"a": 1}, [7], ["a", ""], ["{a}"], ["nope"], ["a", "task"],
        lambda task, args, kwargs: ["a"],
    ],
}  # fmt: skip


class TestWrongSettings:
    @pytest.mark.parametrize(
        ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
    )
    def test_a_wrong_value_names_level_name_and_value(self, name: str, value: Any) -> None:
        with pytest.raises(SettingsError) as caught:
            plan(**{name: value})
        error = caught.value
        assert (error.level, error.name) == ("task 'shop.f'", f"lock_{name}")
        assert error.value == repr(list(value) if isinstance(value, tuple) else value)
        assert error.hint

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *((name, 10**400) for name in ("ttl", "wait", "max_hold", "max_wait", "limit")),
            ("key", "x" * 1025),
            ("key", ["x", "\u20ac" * 342]),
            ("backoff", {"first": 10**400}),
            ("rate", [10, 10**400]),
            ("rate", {"k" * 5000: "5/s"}),
            ("x" * 5000, 1),
        ],
    )
    def test_a_long_value_is_refused_and_cut_in_the_error(self, name: str, value: Any) -> None:
        with pytest.raises(SettingsError) as caught:
            plan().options_for("q", {name: value})
        assert len(caught.value.value) <= 200

    @pytest.mark.parametrize(
        ("conf", "lock", "named"),
        [
            ({}, {"on_conflict": "merge"}, "task 'shop.f': lock_on_conflict='merge'"),
            ({"redlock_on_conflict": "merge"}, {}, "app: redlock_on_conflict='merge'"),
            (
                {"redlock_queues": {"q": {"on_conflict": "merge"}}},
                {},
                "queue 'q': redlock_queues['q']['on_conflict']='merge'",
            ),
        ],
        ids=["task", "app", "queue"],
    )
    def test_an_unknown_word_for_a_conflict_is_told_with_the_known_ones(
        self, conf: dict[str, Any], lock: dict[str, Any], named: str
    ) -> None:
        with pytest.raises(SettingsError) as caught:
            plan(conf, **lock)
        assert str(caught.value).startswith(named)
        known = ("'defer'", "'skip'", "'fail'", "a callable")
        assert [word for word in known if word not in caught.value.hint] == []

    def test_an_unknown_option_is_refused_with_a_proposal(self) -> None:
        with pytest.raises(SettingsError, match=r"lock_tll.*did you mean 'lock_ttl'"):
            plan(tll=3)

    @pytest.mark.parametrize("on", [name for name in OPTION if name.startswith("on_")])
    def test_an_option_without_its_on_is_unknown_and_the_right_name_is_proposed(
        self, on: str
    ) -> None:
        name = on.removeprefix("on_")
        with pytest.raises(SettingsError, match=f"redlock_{name}=.*did you mean 'redlock_{on}'"):
            plan({f"redlock_{name}": "fail"})
        with pytest.raises(SettingsError, match=f"lock_{name}=.*did you mean 'lock_{on}'"):
            plan(**{name: "fail"})
        with pytest.raises(SettingsError, match=f"'{name}'.*did you mean '{on}'"):
            plan({"redlock_queues": {"q": {name: "fail"}}})
        with pytest.raises(SettingsError, match=f"'{name}'.*did you mean '{on}'"):
            plan().check_call({name: "fail"})

    def test_a_value_that_was_taken_out_says_what_to_take_instead(self) -> None:
        for written, use in (
            ("app: redlock_on_duplicate=", lambda: plan({"redlock_on_duplicate": "replace"})),
            ("lock_on_duplicate='replace'", lambda: plan(on_duplicate="replace")),
            ("call: lock=", lambda: plan().check_call({"on_duplicate": "replace"})),
        ):
            with pytest.raises(
                SettingsError, match=r"the option debounce, .*lock_debounce=30"
            ) as it:
                use()
            assert str(it.value).startswith(written) or written in str(it.value)

    def test_what_contradicts_a_debounce_is_refused(self) -> None:
        twice, late = r'unique_for=9.*lock=\{"debounce": None\}', "debounce_max=3.*debounce=4"
        for match, conf, lock in (
            (twice, {}, {"unique_for": 9, "debounce": 4}),
            (twice, {"redlock_unique_for": 9}, {"debounce": 4}),
            (late, {}, {"debounce": 4, "debounce_max": 3}),
            ("counts sends by the lock's key", {}, {"debounce": 4, "key": False}),
        ):
            with pytest.raises(SettingsError, match=match):
                plan(conf, **lock)
        with pytest.raises(SettingsError, match=r"call.*unique_for=9"):
            plan(debounce=4).check_call({"unique_for": 9})
        assert plan({"redlock_unique_for": 9}, unique_for=None, debounce=4).may_be_unique
        assert plan(debounce=4).check_call({"unique_for": 9, "debounce": None})

    def test_one_that_was_taken_out_says_what_to_take_instead(self) -> None:
        for written, use in (
            ("app: redlock_max_deferrals=3", lambda: plan({"redlock_max_deferrals": 3})),
            ("'max_deferrals'", lambda: plan({"redlock_queues": {"q": {"max_deferrals": 3}}})),
            ("lock_max_deferrals=3", lambda: plan(max_deferrals=3)),
            (
                "call: lock={'max_deferrals': ...}=3",
                lambda: plan().check_call({"max_deferrals": 3}),
            ),
            ("redlock_call_options", lambda: plan({"redlock_call_options": ["max_deferrals"]})),
        ):
            with pytest.raises(SettingsError, match=r"max_wait ends .* on_conflict") as caught:
                use()
            assert written in str(caught.value)

    @pytest.mark.parametrize(
        ("name", "value", "allowed"),
        [
            ("on_conflict", "again", "'defer', 'skip', 'fail'"),
            ("on_unreachable", "again", "'defer', 'fail', 'run'"),
            ("unique_until", "end", "'started', 'finished', 'expired'"),
        ],
    )
    def test_a_value_of_another_name_is_refused_with_those_that_are_allowed(
        self, name: str, value: str, allowed: str
    ) -> None:
        with pytest.raises(SettingsError, match=f"lock_{name}='{value}': must be one of {allowed}"):
            plan(**{name: value})

    @pytest.mark.parametrize("name", ["timeout", "expires", "blocking_timeout", "redlock_ttl"])
    def test_an_option_by_the_word_of_another_lock_is_never_taken_for_a_limit(
        self, name: str
    ) -> None:
        meant = "lock_wait" if name == "blocking_timeout" else "lock_ttl"
        with pytest.raises(SettingsError, match=f"lock_{name}=.*did you mean '{meant}'"):
            plan(**{name: 30})

    def test_a_callable_that_is_no_option_is_the_users_own_method(self) -> None:
        assert plan(account=lambda self: None)

    def test_an_unknown_setting_is_refused_with_a_proposal(self) -> None:
        with pytest.raises(SettingsError, match=r"redlock_node=.*did you mean 'redlock_nodes'"):
            plan({"redlock_node": ["redis://a"]})

    @pytest.mark.parametrize(
        ("written", "meant"),
        [("CELERY_REDLOCK_NODE", "CELERY_REDLOCK_NODES"), ("REDLOCK_NODE", "REDLOCK_NODES")],
    )
    def test_a_proposal_is_spelled_as_the_settings_are(self, written: str, meant: str) -> None:
        with pytest.raises(SettingsError, match=f"{written}=.*did you mean '{meant}'"):
            check_known_names({written: []}, "CELERY")

    def test_an_unknown_option_of_a_queue_names_the_queue(self) -> None:
        with pytest.raises(SettingsError, match=r"queue 'q'.*'wiat'.*did you mean 'wait'"):
            plan({"redlock_queues": {"q": {"wiat": 1}}})

    def test_an_option_of_a_call_by_its_name_at_a_task_is_refused_with_its_own(self) -> None:
        with pytest.raises(SettingsError, match=r"'lock_ttl'.*did you mean 'ttl'"):
            plan().check_call({"lock_ttl": 5})

    def test_an_option_of_a_call_that_stands_alone_is_refused(self) -> None:
        with pytest.raises(SettingsError, match=r'lock_ttl=5: .*lock=\{"ttl": \.\.\.\}'):
            check_outside({"countdown": 1, "lock_ttl": 5})
        check_outside({"lock": {"ttl": 5}, "lock_screen": True, "countdown": 1})

    @pytest.mark.parametrize("value", [lambda task, args, kwargs: "x"])
    def test_a_callable_does_not_stand_in_a_queue_or_a_call(self, value: Any) -> None:
        with pytest.raises(SettingsError, match="a callable is allowed at task and app level only"):
            plan({"redlock_queues": {"q": {"key": value}}})
        with pytest.raises(SettingsError, match="a callable is allowed at task and app level only"):
            plan().options_for("q", {"on_conflict": value})

    @pytest.mark.parametrize(
        ("setting", "value", "words"),
        [
            ("redlock_nodes", [], "one node at least"),
            ("redlock_nodes", "redis://a", "a list of URLs"),
            ("redlock_nodes", ["http://a"], "starts with one of redis://"),
            ("redlock_nodes", [7], "redis-py clients|redis.Redis"),
            ("redlock_nodes", ["redis://localhost", "redis://127.0.0.1:6379/3"], "one vote"),
            ("redlock_nodes", ["redis://a:port"], "not a URL of a node"),
            ("redlock_nodes", ["redis://a?sslx=1"], "a query has options of redis-py"),
            ("redlock_nodes", ["redis://a?ssl_ca_certs=ca.pem"], "those of TLS with rediss://"),
            ("redlock_nodes", ["sentinel://a:1"], "sentinel://host:port"),
            ("redlock_prefix", "a{b", "without"), ("redlock_prefix", "", "not empty"),
            ("redlock_node_timeout", 0, "above 0"), ("redlock_clock_drift", 1, "fraction"),
            ("redlock_max_ttl", -1, "above 0"), ("redlock_restart_guard", "maybe", "'auto'"),
            ("redlock_restart_guard", "on", "take 'strict'"), ("redlock_queues", ["q"], "must map"),
        ],
    )  # fmt: skip
    def test_a_wrong_setting_names_itself_and_the_hint(
        self, setting: str, value: Any, words: str
    ) -> None:
        with pytest.raises(SettingsError, match=words) as caught:
            plan({setting: value})
        assert caught.value.name == setting
        assert caught.value.level == "app"

    def test_the_built_in_ttl_is_checked_like_any_other(self) -> None:
        with pytest.raises(SettingsError) as caught:
            plan({"redlock_node_timeout": 60})
        assert (caught.value.level, caught.value.name) == ("built-in", "ttl")
        assert "4 x redlock_node_timeout = 240 s" in str(caught.value)
        with pytest.raises(SettingsError, match="at least 4 x"):
            plan({"redlock_max_ttl": 0.5})

    def test_a_built_in_ttl_that_holds_for_no_run_is_not_checked(self) -> None:
        slow = {"redlock_node_timeout": 60, "redlock_max_ttl": 600}
        assert plan({**slow, "redlock_ttl": 300}).options_for("q").ttl == 300
        assert plan(slow, ttl=300).options_for("q").ttl == 300
        plan(slow, key=False)

    def test_a_call_that_brings_the_built_in_ttl_into_force_has_it_checked(self) -> None:
        slow = {"redlock_node_timeout": 60, "redlock_max_ttl": 600}
        of_queue = {"redlock_queues": {"*": {"ttl": 300}}}
        assert plan({**slow, **of_queue}).options_for("q").ttl == 300
        with pytest.raises(SettingsError, match="at least 4 x"):
            plan(slow, key=False).options_for("q", {"key": "k"})

    @pytest.mark.parametrize(
        "url",
        [
            "http://:s3cret@a", "redis://user:s3cret@a:port", "sentinel://:s3cret@a", "s3cret@a",
            "redis://a:x?password=s3cret", "redis://:s3cret", "redis://user:s3cret",
            "redis://:12345s3cret/0", ":s3cret", "redis://a:x?password=@s3cret",
            "sentinel://:pa?s3cret@a:1/locks", "sentinel://a:1/locks?passwort=s3cret",
            "sentinel://:s3cret/locks",
        ],
    )  # fmt: skip
    def test_no_password_is_shown(self, url: str) -> None:
        with pytest.raises(SettingsError) as caught:
            plan({"redlock_nodes": [url]})
        assert "s3cret" not in str(caught.value)
        assert "s3cret" not in repr(caught.value)

    @pytest.mark.parametrize("name", ["redlock_url", "redlock_servers", "redlock_queues"])
    def test_no_password_is_shown_wherever_a_url_stands(self, name: str) -> None:
        with pytest.raises(SettingsError) as caught:
            plan({name: ["redis://:s3cret@a"]})
        assert "s3cret" not in str(caught.value)

    def test_settings_do_not_show_passwords(self) -> None:
        assert "s3cret" not in repr(read_app({"redlock_nodes": ["redis://:s3cret@a"]}))


class TestTheTables:
    def test_the_options_are_the_fields_of_a_run_in_the_same_order(self) -> None:
        assert list(OPTION) == list(TaskLockOptions.__dataclass_fields__)

    def test_every_setting_of_the_app_alone_is_a_field_of_its_settings(self) -> None:
        fields = {one.name for one in dataclasses.fields(AppSettings)}
        assert fields - set(APP_SETTING) == {"options", "countdown_cap", "nodes_from"}
        assert set(APP_SETTING) - fields == set()
        assert not set(APP_SETTING) & set(OPTION)

    @pytest.mark.parametrize("name", OPTION)
    def test_a_default_passes_its_own_check(self, name: str) -> None:
        default = OPTION[name].default
        assert OPTION[name].check(*OptionSource.at("app", name), default) == default

    @pytest.mark.parametrize("name", OPTION)
    def test_a_callable_is_taken_by_three_options(self, name: str) -> None:
        refused = None
        try:
            plan(**{name: lambda *_: "x"})
        except SettingsError as error:
            refused = error
        assert (refused is None) == (name in ("key", "on_conflict", "limit"))


class TestOptionsThatExcludeEachOther:
    SEVERAL = ("account:{a}", "account:{b}")

    @pytest.mark.parametrize(
        ("conf", "lock", "words"),
        [
            ({}, {"limit": 3, "fencing": True}, "no fencing tokens"),
            ({}, {"limit": 3, "key": SEVERAL}, "to one resource"),
            ({"redlock_limit": 3}, {"fencing": True}, "no fencing tokens"),
            ({"redlock_fencing": True}, {"limit": 3}, "no fencing tokens"),
            ({"redlock_limit": 3}, {"key": SEVERAL}, "to one resource"),
            ({"redlock_key": ["a:{a}", "b:{b}"]}, {"limit": 3}, "to one resource"),
        ],
    )
    def test_they_are_found_across_the_levels_when_the_task_is_compiled(
        self, conf: dict[str, Any], lock: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(SettingsError, match=rf"task 'shop.f': limit=3: .*{words}"):
            plan(conf, **lock)

    def test_what_the_nearer_level_sets_right_is_right(self) -> None:
        assert plan({"redlock_limit": 3}, fencing=True, limit=1).options_for("q").fencing

    def test_those_of_a_queue_are_found_where_a_run_comes_through_it(self) -> None:
        made = plan({"redlock_queues": {"narrow": {"limit": 3}}}, fencing=True)
        assert made.options_for("other").fencing
        with pytest.raises(SettingsError, match=r"task 'shop.f' in queue 'narrow': limit=3"):
            made.options_for("narrow")

    @pytest.mark.parametrize("call", [{"limit": 3}, {"limit": 2, "key": ["a:{a}", "b:{b}"]}])
    def test_those_of_a_call_are_found_at_the_call_and_in_its_message(
        self, call: dict[str, Any]
    ) -> None:
        made = plan(fencing=True)
        for use in (made.check_call, lambda options: made.options_for("q", options)):
            with pytest.raises(SettingsError, match="call: limit="):
                use(call)

    def test_a_callable_that_returns_several_resources_excludes_permits_too(self) -> None:
        made = plan(limit=2, key=lambda task, args, kwargs: [f"x:{arg}" for arg in args])
        assert resource(made, 1) == resource(made, 1, 1) == "x:1"
        with pytest.raises(SettingsError, match=r"task 'shop.f': limit=2: .*to one resource"):
            resources(made, 1, 2)


CLINIC = ("doctor:{a}", "clinic:{b}")
TEN = {"clinic:{b}": 10}


def limits(made: TaskLockConfig, *args: Any, call: Any = None) -> dict[str, int] | None:
    options, this = made.options_for("celery", call), TaskCall("the task", args, {}, "celery")
    return made.limits(options, this, made.resources(options, this))


@pytest.mark.parametrize("name", ["redlock_key", "lock"])
@pytest.mark.parametrize(("option", "value", "usual"), [("limit", 2, 1), ("rate", "9/m", None)])
def test_what_a_queue_counts_by_its_own_key_counts_no_run_with_another_key(
    name: str, option: str, value: Any, usual: Any
) -> None:
    """Two runs of one sku at once: a queue with a limit of two had ended the task's exclusion."""
    queues = {"redlock_queues": {"celery": {"key": "{queue}", option: value}}}
    assert vars(plan(queues).options_for("celery"))[option] == value
    own = plan(queues, key="stock:{a}")
    assert vars(own.options_for("celery"))[option] == usual
    assert own.effective_options("celery")[option].source.level == "built-in"
    by_call = plan(queues, args=["a"]) if name == "lock" else plan({**queues, name: "x"})
    seen = by_call.options_for("celery", {"key": "stock:{a}"})
    assert vars(seen)[option] == usual
    of_app = {"redlock_key": "all", f"redlock_{option}": value}
    assert vars(plan(of_app).options_for("celery"))[option] == value
    assert vars(plan(of_app, key="stock:{a}").options_for("celery"))[option] == usual
    assert vars(plan({f"redlock_{option}": value}, key="a").options_for("celery"))[option] == value


class TestLimitsPerKey:
    def test_a_mapping_gives_each_template_its_limit_and_the_others_one(self) -> None:
        assert limits(plan(key=CLINIC, limit=TEN), 7, "x") == {"clinic:x": 10}
        assert limits(plan(key=CLINIC, limit=dict.fromkeys(CLINIC, 3)), 7, "x") == {
            "doctor:7": 3, "clinic:x": 3,
        }  # fmt: skip
        assert limits(plan(key=CLINIC, limit={"clinic:{b}": 1}), 7, "x") is None
        assert limits(plan(key=CLINIC, limit={}), 7, "x") is None
        assert limits(plan(key="a", limit={"a": 2}), 7) == limits(plan(key="a", limit=2), 7)

    def test_it_may_stand_at_each_level_and_travel_in_a_message(self) -> None:
        assert limits(plan({"redlock_limit": TEN}, key=CLINIC), 7, "x") == {"clinic:x": 10}
        queues = {"redlock_queues": {"celery": {"key": ["{queue}", "all"], "limit": {"all": 2}}}}
        assert limits(plan(queues), 7) == {"all": 2}
        carried = loads(dumps({"limit": {"clinic:{b}": 4}}))
        assert limits(plan(key=CLINIC, limit=TEN), 7, "x", call=carried) == {"clinic:x": 4}
        assert limits(plan(key=CLINIC, limit=TEN), 7, "x", call={"key": False}) is None

    @pytest.mark.parametrize("args", [("x", "x"), ("x", "x", "more")])
    @pytest.mark.parametrize("limit", [{"k:{a}": 5, "k:{b}": 3}, {"k:{a}": 3, "k:{b}": 5}])
    def test_two_templates_that_give_one_resource_are_one_permit_of_the_smaller_limit(
        self, args: Any, limit: dict[str, int]
    ) -> None:
        assert limits(plan(key=("k:{a}", "k:{b}"), limit=limit), *args) == {"k:x": 3}
        assert limits(plan(key=("k:{a}", "k:{b}"), limit={"k:{a}": 3}), *args) is None

    def test_a_callable_is_asked_each_time_with_the_call(self) -> None:
        asked, answers = [], iter([TEN, {}, dict.fromkeys(CLINIC, 2)])

        def limit(*call: Any) -> Any:
            asked.append(call)
            return next(answers)

        made = plan({"redlock_limit": limit}, key=CLINIC)
        found = [limits(made, 7, "x") for _ in range(3)]
        assert found == [{"clinic:x": 10}, None, {"doctor:7": 2, "clinic:x": 2}]
        assert asked == [("the task", (7, "x"), {})] * 3
        assert limits(plan(key="one", limit=lambda *_: 4), 1) == {"one": 4}
        several = plan(key=lambda *_: ["m", "p"], limit=lambda *_: {"p": 4})
        assert limits(several, 1) == {"p": 4}

    @pytest.mark.parametrize(
        ("returned", "words"),
        [
            (0, "from 1 to 1000"), (1001, "from 1 to 1000"), (None, "from 1 to 1000"),
            (True, "from 1 to 1000"), ({"clinic:{b}": 1.5}, "from 1 to 1000"),
            (2, "to one resource"), ({"clinic:x": 2}, "'clinic:x' is not in the key"),
        ],
    )  # fmt: skip
    def test_what_a_callable_must_not_return_ends_the_run(self, returned: Any, words: str) -> None:
        made = plan(key=CLINIC, limit=lambda *_: returned)
        with pytest.raises(SettingsError, match=rf"task 'shop.f': limit=.*: .*{words}"):
            limits(made, 7, "x")

    def test_what_a_callable_raises_or_returns_beside_fencing_ends_the_run(self) -> None:
        with pytest.raises(SettingsError, match=r"lock_limit=.*the callable raised ZeroDivision"):
            limits(plan(key=CLINIC, limit=lambda *_: 1 // 0), 7, "x")
        with pytest.raises(SettingsError, match="no fencing tokens"):
            limits(plan(key=CLINIC, limit=lambda *_: TEN, fencing=True), 7, "x")
        assert limits(plan(key=CLINIC, limit=lambda *_: {}, fencing=True), 7, "x") is None

    @pytest.mark.parametrize(
        ("lock", "words"),
        [
            ({"key": CLINIC, "limit": {"clinic": 2}}, "'clinic' is not in the key, whose"),
            ({"key": CLINIC, "limit": {7: 2}}, "7 is not in the key"),
            ({"key": CLINIC, "limit": {"clinic:{b}": 0}}, "from 1 to 1000"),
            ({"key": CLINIC, "limit": {"clinic:{b}": 1001}}, "from 1 to 1000"),
            ({"key": CLINIC, "limit": 2}, r"name it, as \{'doctor:\{a\}': 2\}"),
            ({"key": CLINIC, "limit": TEN, "fencing": True}, "no fencing tokens"),
            ({"limit": {"{task}": 2}}, "which has no templates"),
            ({"key": lambda *_: "a", "limit": {"a": 2}}, "which has no templates"),
        ],
    )
    def test_wrong_ones_are_found_when_the_task_is_compiled(
        self, lock: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(SettingsError, match=words) as caught:
            plan(**lock)
        assert caught.value.name in ("limit", "lock_limit")

    def test_a_mapping_is_taken_as_a_dict_of_its_own(self) -> None:
        given = dict(TEN)
        made = plan(key=CLINIC, limit=MappingProxyType(given))
        given["clinic:{b}"] = 3
        assert limits(made, 7, "x") == {"clinic:x": 10}
        carried = loads(dumps(made.check_call({"limit": MappingProxyType(TEN)})))
        assert carried == {"limit": TEN}

    @pytest.mark.parametrize("name", ["key", "limit"])
    def test_a_soft_time_limit_in_a_callable_is_no_wrong_setting(self, name: str) -> None:
        def ends(*_: Any) -> Any:
            raise SoftTimeLimitExceeded

        with pytest.raises(SoftTimeLimitExceeded):
            limits(plan(**{name: ends}), 7, "x")

    @pytest.mark.parametrize(
        ("conf", "level"),
        [
            ({"redlock_key": CLINIC, "redlock_limit": {"clinic": 2}}, "app"),
            ({"redlock_queues": {"q*": {"key": "a", "limit": {"b": 2}}}}, r"queue 'q\*'"),
        ],
    )
    def test_a_mapping_that_misfits_the_key_of_its_level_is_found_as_the_app_is_read(
        self, conf: dict[str, Any], level: str
    ) -> None:
        with pytest.raises(SettingsError, match=f"^{level}: limit=.*is not in the key"):
            read_app(conf)
        read_app({"redlock_limit": TEN, "redlock_queues": {"q": {"limit": {"a": 2}}}})

    def test_no_message_brings_a_callable(self) -> None:
        with pytest.raises(SettingsError, match="task and app level only"):
            plan().check_call({"limit": lambda *_: 2})
        with pytest.raises(SettingsError, match=r"'clinic:\{b\}' is not in the key"):
            plan(key=CLINIC, limit=TEN).check_call({"key": "other"})

    @given(st.lists(st.tuples(st.text(max_size=3), st.integers(1, 3)), min_size=1, max_size=6))
    def test_those_with_one_holder_are_locked_first_and_each_kind_in_order(
        self, drawn: list[tuple[str, int]]
    ) -> None:
        above = {name: limit for name, limit in dict(drawn).items() if limit > 1}
        ordered = in_order([name for name, _ in drawn], above)
        plain = in_order(name for name, _ in drawn if name not in above)
        assert ordered == (*plain, *in_order(above))


def rates(made: TaskLockConfig, *args: Any, call: Any = None) -> dict[str, Rate] | None:
    options, this = made.options_for("celery", call), TaskCall("the task", args, {}, "celery")
    return made.rates(options, made.resources(options, this))


HUNDRED = Rate(100, 3600.0)


class TestRates:
    @pytest.mark.parametrize(
        ("written", "starts", "period"),
        [
            ("10/s", 10, 1), ("100/m", 100, 60), (" 100/h ", 100, 3600), ("5/d", 5, 86_400),
            ("3/2.5 s", 3, 2.5), ((100, 3600), 100, 3600), ([7, 90.25], 7, 90.25),
            (Rate(1000, 1), 1000, 1), ((1, 86_399.999_999), 1, 86_399.999_999),
        ],
    )  # fmt: skip
    def test_each_notation_is_one_rate_also_after_a_message(
        self, written: Any, starts: int, period: float
    ) -> None:
        rate = Rate(starts, period)
        assert rates(plan(key="k:{a}", rate=written), 7) == {"k:7": rate}
        carried = loads(dumps(plan(key="k:{a}").check_call({"rate": written})))
        assert rates(plan(key="k:{a}"), 7, call=carried) == {"k:7": rate}
        mapped = loads(dumps(plan(key="k:{a}").check_call({"rate": {"k:{a}": written}})))
        assert rates(plan(key="k:{a}"), 7, call=mapped) == {"k:7": rate}
        text = plan(rate=written).options_for("q").rate
        assert isinstance(text, str)
        assert Rate.parse(text) == rate

    def test_it_stands_beside_a_limit_at_each_level(self) -> None:
        made = plan({"redlock_rate": "100/h", "redlock_limit": 3}, key="k:{a}")
        assert (rates(made, 7), limits(made, 7)) == ({"k:7": HUNDRED}, {"k:7": 3})
        entry = {"key": "{queue}", "limit": 2, "rate": "100/h"}
        made = plan({"redlock_queues": {"celery": entry}})
        assert (rates(made, 7), limits(made, 7)) == ({"celery": HUNDRED}, {"celery": 2})
        made = plan(key=lambda *_: "k", limit=lambda *_: 2, rate="100/h")
        assert (rates(made, 7), limits(made, 7)) == ({"k": HUNDRED}, {"k": 2})
        call = {"rate": "2/s", "limit": 4}
        assert rates(made, 7, call={"rate": "2/s"}) == {"k": Rate(2, 1)}
        made = plan(key="k:{a}", fencing=True, rate="1/d")
        assert rates(made, 7, call={"rate": "2/s"}) == {"k:7": Rate(2, 1)}
        made = plan({"redlock_rate": "1/d"}, key="k:{a}")
        assert (rates(made, 7, call=call), limits(made, 7, call=call)) == (
            {"k:7": Rate(2, 1)}, {"k:7": 4},
        )  # fmt: skip
        assert rates(plan(rate="100/h", args=[]), 7) == {"shop.f:any-arguments": HUNDRED}

    def test_without_a_rate_or_a_key_there_is_none(self) -> None:
        assert rates(plan(key="k:{a}"), 7) is None
        assert rates(plan({"redlock_rate": "100/h"}, key="k:{a}", rate=None), 7) is None
        assert rates(plan(key="k:{a}", rate={}), 7) is None
        assert rates(plan({"redlock_rate": "100/h"}, key=False), 7) is None
        assert rates(plan({"redlock_rate": {"k:{a}": "100/h"}}, key=False), 7) is None
        assert rates(plan(key="k:{a}", rate="100/h"), 7, call={"key": False}) is None

    def test_a_mapping_gives_the_templates_that_it_names_their_rates(self) -> None:
        made = plan(key=CLINIC, rate=MappingProxyType({"clinic:{b}": (100, 3600)}))
        assert rates(made, 7, "x") == {"clinic:x": HUNDRED}
        made = plan({"redlock_rate": dict.fromkeys(CLINIC, "100/h")}, key=CLINIC)
        assert rates(made, 7, "x") == {"doctor:7": HUNDRED, "clinic:x": HUNDRED}

    @pytest.mark.parametrize("first", ["k:{a}", "k:{b}"])
    def test_two_templates_that_give_one_resource_have_one_rate(self, first: str) -> None:
        second = {"k:{a}": "k:{b}", "k:{b}": "k:{a}"}[first]
        made = plan(key=("k:{a}", "k:{b}"), rate={first: "10/s", second: "500/m"})
        with pytest.raises(SettingsError, match="'k:x' has two rates for these arguments"):
            rates(made, "x", "x")
        made = plan(key=("k:{a}", "k:{b}"), rate={first: "10/s", second: "10/s"})
        assert rates(made, "x", "x") == {"k:x": Rate(10, 1)}
        made = plan(key=("k:{a}", "k:{b}"), rate={first: "10/s"})
        assert rates(made, "x", "x") == {"k:x": Rate(10, 1)}

    @pytest.mark.parametrize(
        ("lock", "words"),
        [
            ({"key": CLINIC, "rate": "100/h"}, r"name it, as \{'doctor:\{a\}': '100/h'\}"),
            ({"key": CLINIC, "rate": {"clinic": "100/h"}}, "'clinic' is not in the key, whose"),
            ({"key": CLINIC, "rate": {7: "100/h"}}, "7 is not in the key"),
            ({"key": CLINIC, "rate": {"clinic:{b}": "1001/h"}}, "token bucket"),
            ({"key": CLINIC, "rate": {"clinic:{b}": "0/h"}}, "one start at least"),
            ({"key": CLINIC, "rate": {"clinic:{b}": (3, 86_401)}}, "to 86400 seconds, a day"),
            ({"rate": {"{task}": "100/h"}}, "which has no templates"),
            ({"key": lambda *_: "a", "rate": {"a": "100/h"}}, "which has no templates"),
            ({"key": False, "rate": "100/h"}, "limits the starts of the lock's key, and key=Fal"),
            ({"key": False, "rate": {"a": "100/h"}}, "limits the starts of the lock's key"),
        ],
    )  # fmt: skip
    def test_wrong_ones_are_found_when_the_task_is_compiled(
        self, lock: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(SettingsError, match=words) as caught:
            plan(**lock)
        assert caught.value.name in ("rate", "lock_rate")
        assert "task 'shop.f'" in caught.value.level

    @pytest.mark.parametrize(
        ("conf", "named"),
        [
            ({"redlock_rate": "100/w"}, "app: redlock_rate='100/w'"),
            ({"redlock_key": CLINIC, "redlock_rate": "100/h"}, "app: rate='100/h'"),
            ({"redlock_queues": {"q": {"rate": 5}}}, "queue 'q': redlock_queues['q']['rate']=5"),
            (
                {"redlock_queues": {"q": {"key": "a", "rate": {"b": "1/s"}}}},
                "queue 'q': rate={'b': '1/s'}",
            ),
            (
                {"redlock_tasks": {"v": {"rate": lambda *_: 1}}},
                "task 'v': redlock_tasks['v']['rate']=<function",
            ),
        ],
    )
    def test_wrong_ones_of_other_levels_are_found_as_the_app_is_read(
        self, conf: dict[str, Any], named: str
    ) -> None:
        with pytest.raises(SettingsError) as caught:
            read_app(conf)
        assert str(caught.value).startswith(named)

    def test_one_of_the_app_beside_several_keys_of_a_task_is_an_error_there(self) -> None:
        with pytest.raises(SettingsError, match=r"task 'shop.f': rate='100/h': .*one resource"):
            plan({"redlock_rate": "100/h"}, key=CLINIC)
        made = plan({"redlock_queues": {"narrow": {"rate": "100/h"}}}, key=CLINIC)
        with pytest.raises(SettingsError, match=r"task 'shop.f' in queue 'narrow': rate='100/h'"):
            made.options_for("narrow")

    def test_those_of_a_call_are_found_at_the_call_and_in_its_message(self) -> None:
        for call, words in (
            ({"rate": "100/w"}, r"call: lock=\{'rate': \.\.\.\}='100/w': must be a text as"),
            ({"rate": lambda *_: "1/s"}, "task and app level only"),
            ({"rate": "100/h", "key": list(CLINIC)}, "call: rate='100/h': one rate applies to one"),
            ({"rate": {"clinic:{b}": "100/h"}}, r"call: rate=.*'clinic:\{b\}' is not in the key"),
        ):
            made = plan(key="k:{a}")
            for use in (made.check_call, lambda options, of=made: of.options_for("q", options)):
                with pytest.raises(SettingsError, match=words):
                    use(call)

    def test_a_callable_key_that_returns_several_resources_excludes_one_rate(self) -> None:
        made = plan(rate="100/h", key=lambda task, args, kwargs: [f"x:{arg}" for arg in args])
        assert rates(made, 1) == rates(made, 1, 1) == {"x:1": HUNDRED}
        with pytest.raises(SettingsError, match=r"task 'shop.f': rate='100/h': .*to one resource"):
            resources(made, 1, 2)


class TestSentinels:
    def test_two_groups_that_use_one_service_name_are_two_nodes(self) -> None:
        groups = ["sentinel://:s3cret@a:1,b:2/locks", "sentinel://c:1/locks"]
        groups.append(Sentinel([("d", 1)]).master_for("locks"))
        found = check_nodes("app", "redlock_nodes", groups)
        names = ["sentinel://a:1,b:2/locks", "sentinel://c:1/locks", "sentinel://d:1/locks"]
        assert [address.name for address in found] == names

    def test_an_ipv6_address_stands_in_brackets(self) -> None:
        url = "sentinel://:s3cret@[::1]:26379,b:2,[fe80::1]:1/locks"
        (found,) = check_nodes("app", "redlock_nodes", [url])
        assert found.name == "sentinel://[::1]:26379,b:2,[fe80::1]:1/locks"
        with pytest.raises(SettingsError, match="not a URL of a node"):
            read_app({"redlock_nodes": ["sentinel://::1:26379/locks"]})

    @pytest.mark.parametrize(
        ("query", "words"),
        [
            ("ssl=true&ssl_ca_cert=/ca.pem", "'ssl_ca_cert'.*did you mean 'ssl_ca_certs'"),
            ("ssl_ca_certs=/ca.pem", "'ssl_ca_certs' without ssl=true"),
            ("ssl=false&ssl_cert_reqs=none", "'ssl_cert_reqs' without ssl=true"),
            ("socket_timeout=3", "'socket_timeout'.*known: db, "),
            ("password=", "'password' without a value"),
            ("db=first", "not a URL of a node"),
            ("true", "not a URL of a node"),
        ],
    )
    def test_what_a_query_names_is_used_or_refused(self, query: str, words: str) -> None:
        with pytest.raises(SettingsError, match=words) as caught:
            read_app({"redlock_nodes": [f"sentinel://a:1,b:2/locks?{query}"]})
        assert "'sentinel://a:1,b:2/locks'" in str(caught.value)

    def test_a_group_that_is_named_twice_is_one_server(self) -> None:
        groups = ["sentinel://localhost:1,b:2/locks", "sentinel://b:2,127.0.0.1:1/locks"]
        with pytest.raises(SettingsError, match="name each server once"):
            read_app({"redlock_nodes": groups})


class TestNodesByDefault:
    def test_one_redis_as_broker_is_the_node(self) -> None:
        assert read_app({"broker_url": "redis://:pw@b:1/2"}).nodes == ("redis://:pw@b:1/2",)

    def test_else_the_result_backend_is(self) -> None:
        conf = {"broker_url": "amqp://x", "result_backend": "redis://r"}
        assert read_app(conf).nodes == ("redis://r",)

    @pytest.mark.parametrize("broker", ["amqp://x", "redis://a;redis://b", "sqs://", None])
    def test_without_one_redis_the_setting_is_asked_for_when_a_lock_is(
        self, broker: str | None
    ) -> None:
        conf = {"broker_url": broker, "result_backend": "rpc://"}
        assert read_app(conf).nodes == ()
        with pytest.raises(SettingsError, match=r"redlock_nodes=.*redis://a"):
            find_nodes(conf)

    def test_a_unix_socket_as_celery_writes_it_becomes_one_of_redis_py(self) -> None:
        assert one_redis("redis+socket:///run/r.sock?virtual_host=3") == "unix:///run/r.sock?db=3"

    def test_celerys_spelling_of_a_certificate_check_becomes_redis_pys(self) -> None:
        url = "rediss://a/0?ssl_cert_reqs=CERT_REQUIRED"
        assert one_redis(url) == "rediss://a/0?ssl_cert_reqs=required"

    def test_ssl_settings_of_the_broker_are_not_taken_over_in_silence(self) -> None:
        conf = {"broker_url": "rediss://a", "broker_use_ssl": {"ssl_cert_reqs": 0}}
        assert read_app(conf).nodes == ()
        with pytest.raises(SettingsError, match="broker_use_ssl"):
            find_nodes(conf)

    def test_it_is_known_which_setting_the_node_comes_from(self) -> None:
        for conf, name in (
            ({"broker_url": "redis://b", "result_backend": "redis://r"}, "broker_url"),
            ({"broker_url": "amqp://x", "result_backend": "redis://r"}, "result_backend"),
            ({"broker_url": "redis://b", "redlock_nodes": NODES}, "redlock_nodes"),
        ):
            assert read_app(conf).nodes_from == name

    def test_the_broker_of_the_environment_is_the_node(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CELERY_BROKER_URL", "redis://shared")
        app = Celery("t", broker="redis://localhost", set_as_default=False)
        assert settings_of(app).nodes == ("redis://shared",)

    def test_celerys_short_form_means_this_machine(self) -> None:
        assert one_redis("redis://") == "redis://localhost"


class TestKeys:
    @pytest.mark.parametrize(
        ("args", "kwargs", "given", "why"),
        [
            ((), {}, "(0 by position)", "missing 1 required positional argument: 'a'"),
            (
                (),
                {"b": "s3cret"},
                "(0 by position, b by name)",
                "missing 1 required positional argument: 'a'",
            ),
            (
                ("s3cret",),
                {"a": 1},
                "(1 by position, a by name)",
                "got multiple values for argument",
            ),
        ],
    )
    def test_arguments_that_do_not_fit_are_named_with_the_task_and_none_is_shown(
        self, args: Any, kwargs: Any, given: str, why: str
    ) -> None:
        made = plan()
        with pytest.raises(SettingsError) as caught:
            made.resources(made.options_for("q"), TaskCall(None, args, kwargs, "q"))
        said = str(caught.value)
        declared = "shop.f(a, b=2, *rest, **options)"
        assert said.startswith(f"task 'shop.f': arguments={given}: do not fit {declared}: {why}")
        assert "lock_unique_for, and lock_for, need all arguments of a run" in said
        assert "another version of the task" in said
        assert "s3cret" not in said

    def test_no_argument_stands_in_a_default_key(self) -> None:
        made = plan()
        key = resource(made, "s3cret", b={"card": "4111111111111111"})
        assert "s3cret" not in key
        assert "4111" not in key
        assert key.startswith("shop.f:")

    def test_a_default_key_has_one_length_however_large_the_arguments(self) -> None:
        made = plan()
        assert len(resource(made, "x" * 1_000_000)) == len(resource(made, 1))

    @pytest.mark.parametrize(("one", "other"), [(1, "1"), (1, True), (0, False), (None, "None")])
    def test_values_that_json_keeps_apart_stay_apart(self, one: Any, other: Any) -> None:
        made = plan()
        assert resource(made, one) != resource(made, other)

    json_values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )

    @given(json_values, json_values)
    def test_two_values_share_a_form_only_where_json_writes_them_alike(
        self, one: Any, other: Any
    ) -> None:
        def written(value: Any) -> str:
            return str(dumps(value, sort_keys=True))

        same_text = written(one) == written(other)
        assert (canonical(one) == canonical(other)) == same_text

    def test_a_value_without_a_stable_form_is_refused_by_name(self) -> None:
        with pytest.raises(SettingsError, match=r"argument 'a'.*no stable form.*lock_key"):
            digest({"a": object()}, "shop.f")

    def test_a_list_of_templates_is_several_resources(self) -> None:
        made = plan(key=["account:{a}", "account:{b}", "{task}"])
        assert resources(made, 1, 2) == ("account:1", "account:2", "shop.f")

    def test_a_list_of_templates_comes_through_a_message(self) -> None:
        rules = plan().options_for("q", loads(dumps({"key": ["account:{a}", "account:{b}"]})))
        assert plan().resources(rules, TaskCall(None, (1, 2), {}, "q")) == (
            "account:1",
            "account:2",
        )

    def test_a_text_without_braces_is_one_lock_whatever_the_arguments(self) -> None:
        assert resource(plan(key="a"), 1) == resource(plan(key=["a"]), 2) == "a"
        assert resources(plan(key=["a", "x:{b}", "ledger"]), 1, 3) == ("a", "x:3", "ledger")

    def test_a_template_reaches_into_rest_and_options(self) -> None:
        made = plan(key="{rest[0]}-{options[sku]}")
        assert resource(made, 1, 2, "r", sku="s") == "r-s"

    def test_an_arguments_name_wins_over_ours(self) -> None:
        def body(task: str) -> None: ...

        assert resource(plan(body=body, key="{task}"), "mine") == "mine"

    @pytest.mark.parametrize(
        ("key", "args"),
        [
            ("{a:{b}}", ("x", ">100000000")), ("{a:{b}f}", (1.5, ".100000000")),
            ("{a:.2f}", (Decimal("1e100000000"),)), ("{a:.2f}", (10**400,)), ("{a}", ("x" * 1025,)),
            ("{a}{b}", ("x" * 1000, "x" * 1000)), ("{a:>999}" * 100, ("x",)),
        ],
    )  # fmt: skip
    def test_a_resource_is_short_whatever_a_message_brings(
        self, key: str, args: tuple[Any, ...]
    ) -> None:
        made, most = plan(key=key), 10_000_000  # bytes
        tracemalloc.start()
        with pytest.raises(SettingsError):
            resource(made, *args)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < most

    def test_a_callable_that_returns_a_long_resource_is_an_error(self) -> None:
        with pytest.raises(SettingsError, match="at most 1024 bytes"):
            resource(plan(key=lambda task, args, kwargs: ["r", "x" * 1025]), 1)

    def test_none_in_a_template_is_an_error_not_a_shared_key(self) -> None:
        with pytest.raises(SettingsError, match="a is None"):
            resource(plan(key="stock:{a}"), None)

    def test_a_missing_item_of_a_template_is_an_error(self) -> None:
        with pytest.raises(SettingsError, match="cannot be filled"):
            resource(plan(key="{rest[0]}"), 1)

    def test_a_callable_gets_task_args_and_kwargs(self) -> None:
        made = plan(key=lambda task, args, kwargs: f"{args[0]}/{kwargs['b']}")
        assert resource(made, 1, b=2) == "1/2"

    def test_a_callable_may_return_several_resources(self) -> None:
        made = plan(key=lambda task, args, kwargs: [f"account:{account}" for account in args])
        assert set(resources(made, "b", "a", "b")) == {"account:a", "account:b"}

    def test_a_callable_that_returns_none_takes_no_lock(self) -> None:
        made = plan(key=lambda task, args, kwargs: None)
        assert resources(made, 1) == ()

    @pytest.mark.parametrize("returned", [7, "", [], ["a", ""], ["a", 7], [None], False])
    def test_a_callable_that_returns_no_text_is_an_error(self, returned: Any) -> None:
        with pytest.raises(SettingsError, match="must return a text"):
            resource(plan(key=lambda task, args, kwargs: returned), 1)

    def test_a_callable_that_raises_is_an_error_that_says_what(self) -> None:
        def key(task: Any, args: Any, kwargs: Any) -> str:
            raise KeyError("sku")

        with pytest.raises(SettingsError, match="the callable raised KeyError: 'sku'"):
            resource(plan(key=key), 1)

    def test_false_takes_no_lock(self) -> None:
        assert resources(plan(key=False), 1) == ()


@pytest.mark.parametrize(
    ("url", "given", "visibility"),
    [
        ("redis://a", None, 3600.0), ("redis://a", 0, 3600.0), (["rediss://a"], 60, 60.0),
        ("redis+socket:///a", None, 3600.0), ("sqs://", None, 1800.0), ("REDIS://a", None, 3600.0),
        ("pgmq://a", 60, 60.0), ("pgmq://a", None, None), ("amqp://a", 60, None),
        (None, None, None),
    ],
)  # fmt: skip
def test_brokers_take_a_message_for_lost_after_a_time_of_their_own(
    url: Any, given: int | None, visibility: float | None
) -> None:
    conf = {"broker_url": url, "broker_transport_options": {"visibility_timeout": given}}
    assert visibility_timeout(conf) == visibility


ON_REDIS = {"broker_url": "redis://a"}


@pytest.mark.parametrize(
    ("conf", "kept_for"),
    [
        ({}, 600.0),
        ({**ON_REDIS, "broker_transport_options": {"visibility_timeout": 120}}, 180.0),
        ({**ON_REDIS, "broker_transport_options": {"visibility_timeout": 7200}}, 600.0),
        ({"redlock_done_ttl": 3600}, 3600.0),
        ({"redlock_done_ttl": None}, 600.0),
    ],
)
def test_a_done_mark_is_kept_until_no_other_delivery_is_to_be_expected(
    conf: dict[str, Any], kept_for: float
) -> None:
    assert read_app({"redlock_nodes": NODES, **conf}).done_ttl == kept_for


@pytest.mark.parametrize(
    ("conf", "cap"),
    [
        ({}, 300.0),
        ({"redlock_done_ttl": 3600}, 900.0),
        ({"redlock_done_ttl": 20}, 10.0),
        ({**ON_REDIS, "broker_transport_options": {"visibility_timeout": 120}}, 30.0),
        ({"broker_transport_options": {"visibility_timeout": 120}}, 300.0),  # no such timeout
        ({"broker_url": "sqs://", "redlock_done_ttl": 3600}, 450.0),
    ],
)
def test_no_countdown_outlives_a_delivery_nor_the_mark_of_another_copys_end(
    conf: dict[str, Any], cap: float
) -> None:
    assert read_app({"redlock_nodes": NODES, **conf}).countdown_cap == cap


@pytest.mark.parametrize("value", [0, -1, "600", True])
def test_a_done_mark_is_kept_for_some_seconds(value: Any) -> None:
    with pytest.raises(SettingsError, match=r"redlock_done_ttl.*seconds above 0"):
        read_app({"redlock_nodes": NODES, "redlock_done_ttl": value})


def test_a_task_class_goes_by_the_settings_of_the_app_that_has_it_now() -> None:
    class Settle(LockedTask):
        name = "shop.settle"

        def run(self, order: int) -> None: ...

    for ttl in (10, 20):
        app = Celery(f"shop{ttl}", broker="memory://", set_as_default=False)
        app.conf.update(redlock_nodes=NODES, redlock_ttl=ttl)
        assert app.register_task(Settle()).lock_options()["ttl"].value == ttl


def test_a_template_of_the_app_that_a_task_cannot_fill_is_an_error_at_the_start() -> None:
    app = Celery("shop", broker="memory://", set_as_default=False)
    app.conf.update(redlock_nodes=NODES, redlock_key="stock:{nope}")

    @app.task(base=LockedTask, shared=False)
    def take(sku: str) -> None: ...

    with pytest.raises(SettingsError, match="no argument 'nope'"):
        app.finalize()
