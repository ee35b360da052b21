from __future__ import annotations

import dataclasses
import re
import tracemalloc
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from hypothesis import given
from hypothesis import strategies as st
from kombu.utils.json import dumps, loads
from redis.credentials import CredentialProvider
from redis.sentinel import Sentinel

from celery_redlock import Backoff, LockedTask, SettingsError
from celery_redlock.lock.model.keys import in_order
from celery_redlock.lock.model.rate import Rate
from celery_redlock.lock.transport.address import parse_address
from celery_redlock.lock.validation import check_nodes
from celery_redlock.tasks.arguments import parameters_of
from celery_redlock.tasks.per_app import settings_of
from celery_redlock.tasks.settings.app import APP_SETTING, AppSettings, OptionSource, pattern_for
from celery_redlock.tasks.settings.levels import (
    check_known_names,
    check_outside,
    find_nodes,
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
    return compile_config(app, "shop.f", attributes, parameters_of(body))


def resources(made: TaskLockConfig, *args: Any, queue: str = "q", **kwargs: Any) -> Any:
    """Return what a call locks: the one resource, or a tuple."""
    found = made.resources(made.options_for(queue), TaskCall(None, args, kwargs, queue))
    return found[0] if len(found) == 1 else found


def counts(made: TaskLockConfig, *args: Any, call: Any = None) -> tuple[Any, Any]:
    """Return the limits and the rates of a call, as they are after its message."""
    carried = loads(dumps(made.check_call(call or {})))
    options, this = made.options_for("q", carried), TaskCall("the task", args, {}, "q")
    found = made.keys(options, this, made.resources(options, this))
    return found.limits, found.rates


def raised(*words: str) -> Any:
    return pytest.raises(SettingsError, match=".*".join(words) or None)


class TestLevels:
    def test_none_is_a_value_and_overrides_too(self) -> None:
        made = plan({"redlock_max_wait": 9, "redlock_key": "x:{a}"}, max_wait=None, key=None)
        assert made.options_for("q").max_wait is None
        assert made.options_for("q").key is None

    @pytest.mark.parametrize(
        ("name", "pattern"),
        [("a.b", "a.b"), ("a.c", "a.*"), ("b.c", "*.c"), ("b.d", None), ("a.bc", "a.*")],
    )
    def test_an_exact_name_goes_before_globs_and_globs_in_their_order(
        self, name: str, pattern: str | None
    ) -> None:
        assert pattern_for(name, ["a.*", "*.c", "a.b"]) == pattern


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
    @pytest.mark.parametrize("name", OPTION)
    @pytest.mark.parametrize("queue", ["slow", "slow.eu"], ids=["by name", "by glob"])
    def test_the_nearer_level_wins_and_is_named(self, name: str, queue: str) -> None:
        of_app, of_queue, of_task, of_call = FOUR[name]
        pattern = "slow" if queue == "slow" else "slow.*"
        app = {f"redlock_{name}": of_app}
        globs = {glob: {name: of_app} for glob in ("slow*", "slow[.]*")}
        entry = {pattern: {name: of_queue}}
        # an exact name goes before all globs, and of these the first one
        queues = {"redlock_queues": {**globs, **entry} if queue == "slow" else {**entry, **globs}}
        whole, call = plan(app | queues, **{name: of_task}), {name: of_call}
        if name == "backoff":
            call = {name: of_call.to_message()}
        levels = [
            (plan(), {}, "built-in"),
            (plan(app), {}, f"app: redlock_{name}"),
            (plan(app | queues), {}, f"queue {pattern!r}: redlock_queues[{pattern!r}][{name!r}]"),
            (whole, {}, f"task 'shop.f': lock_{name}"),
            (whole, call, f"call: lock={{{name!r}: ...}}"),
        ]
        default = 30.0 if name == "ttl" else BUILT_IN[name]
        for (made, carried, place), value in zip(levels, [default, *FOUR[name]], strict=True):
            assert getattr(made.options_for(queue, carried), name) == value
            told = made.effective_options(queue, carried)[name]
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
    @pytest.mark.parametrize("named", [None, ["wait"], {"wait"}, []])
    def test_another_one_is_refused_at_a_send_and_ignored_in_a_message(self, named: Any) -> None:
        made, carried = plan({"redlock_call_options": named}), {"key": False, "wait": 3}
        if named is None:  # all, by default
            assert (
                plan().allowed_options(carried)
                == made.allowed_options(carried)
                == made.check_call(carried)
            )
        else:
            with raised(r"call: lock=\{'key': False\}: ", "redlock_call"):
                made.check_call({"key": False})
            assert set(made.allowed_options(carried)) == set(named)

    def test_an_option_that_does_not_exist_stays_an_error(self) -> None:
        made = plan({"redlock_call_options": ["ttl"]})
        with raised(r"^call: lock=\{'tll': 3\}: is not an option; did you mean 'ttl'"):
            made.options_for("q", made.allowed_options({"tll": 3}))

    def test_what_a_call_changes_of_what_is_excluded_is_told(self) -> None:
        made = plan(key="k:{a}")
        for carried, changed in (
            ({"key": False}, {"key": False}),
            ({"args": ["a"]}, {"key": None, "args": ("a",)}),
            ({"limit": 3, "wait": 9}, {"limit": 3}),
            ({"rate": [3, 60], "wait": 9}, {"rate": "3/m"}),
            ({"key": "k:{a}", "limit": 1, "rate": None, "ttl": 9}, {}),
        ):
            assert made.overridden_options("q", made.options_for("q", carried)) == changed


def test_an_entry_for_a_task_of_others_stands_where_a_tasks_own_options_do() -> None:
    entries = {"vendor.*": {"wait": 3, "args": ["a"], "on_conflict": a_callable}}
    app = read_app({"redlock_nodes": NODES, "redlock_ttl": 11, "redlock_tasks": entries})
    made = compile_adopted_config(app, "vendor.sync", "vendor.*", parameters_of(f))
    told = made.effective_options("q", {"wait": 4})
    values = [told[name].value for name in ("args", "ttl", "wait", "on_conflict")]
    assert values == [("a",), 11, 4, a_callable]
    assert str(told["args"].source) == "task 'vendor.*': redlock_tasks['vendor.*']['args']"


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
        "{a:.1000f}", "{a:{b:>1000}}",
        "{a:>\u0661\u0661\u0661\u0661}",  # digits, too
    ],
    "args": [
        "a", 7, False, {"a": 1}, [7], ["a", ""], ["{a}"], ["nope"], ["a", "task"],
        lambda task, args, kwargs: ["a"],
    ],
}  # fmt: skip

NEWEST = {"unique_for": 9, "unique_until": "started", "on_duplicate": "newest"}
CLINIC = ("doctor:{a}", "clinic:{b}")
TEN = {"clinic:{b}": 10}
OURS = "task 'shop.f'"  # a level, as an error names it
SLOW = {"redlock_node_timeout": 60, "redlock_max_ttl": 600}


def a_callable(*_: Any) -> Any:
    """Stand where a callable may, or may not."""


# What is wrong: settings of the app, options of the task and of a call, and how the error begins;
# of two that contradict each other the error names one. A call is looked at as it is sent, and
# again as it comes in a message.
Wrong = tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None, str]


def at_each_level(name: str, value: Any, words: str) -> list[Wrong]:
    """Return one option as a setting, as a queue's, as a task's and as a call's."""
    shown = re.escape(repr(value))
    of_queue = {"redlock_queues": {"q": {name: value}}}
    return [
        ({f"redlock_{name}": value}, {}, None, f"^app: redlock_{name}={shown}: .*{words}"),
        (of_queue, {}, None, rf"^queue 'q': redlock_queues\['q'\]\['{name}'\]={shown}: .*{words}"),
        ({}, {name: value}, None, f"^task 'shop.f': lock_{name}={shown}: .*{words}"),
        ({}, {}, {name: value}, rf"^call: lock=\{{'{name}': {shown}\}}: .*{words}"),
    ]


def of_app(setting: str, *values: tuple[Any, str]) -> list[Wrong]:
    return [({setting: value}, {}, None, f"^app: {setting}=.*{words}") for value, words in values]


REFUSED: dict[str, list[Wrong]] = {
    "an unknown option": [
        *at_each_level("wiat", 1, "did you mean '(redlock_|lock_)?wait'"),
        ({"redlock_node": ["redis://a"]}, {}, None, "redlock_node=.*did you mean 'redlock_nodes'"),
        ({}, {}, {"lock_ttl": 5}, "'lock_ttl'.*did you mean 'ttl'"),
    ],
    "an option without its on": [
        row
        for on in OPTION if on.startswith("on_")
        for row in at_each_level(on[3:], "fail", f"did you mean '(redlock_|lock_)?{on}'")
    ],
    "the word of another lock": [
        ({}, {name: 30}, None, f"lock_{name}=.*did you mean '{meant}'")
        for name, meant in (
            ("timeout", "lock_ttl"), ("expires", "lock_ttl"), ("redlock_ttl", "lock_ttl"),
            ("blocking_timeout", "lock_wait"),
        )
    ],
    "a ttl beside the times of the app": [
        *at_each_level("ttl", 61, "must be at most redlock_max_ttl = 60 s"),
        *at_each_level("ttl", 0.5, "must be at least 4 x node_timeout = 0.8 s"),
    ],
    "an unknown word": [
        *at_each_level("on_conflict", "merge", "'defer', 'skip', 'fail'.*a callable"),
    ],
    "what was taken out": [
        *at_each_level("on_duplicate", "replace", '"newest", .*="started".*debounce=30'),
        *at_each_level("max_deferrals", 3, "max_wait ends .* on_conflict"),
        *of_app("redlock_call_options", *((value, "") for value in (
            "wait", 7, True, [7], {"wait": 1}, ["wiat"], [["wait"]])),
            (["max_deferrals"], "max_wait ends .* on_conflict")),
    ],
    "a callable of a queue or a call": [
        ({"redlock_queues": {"q": {"key": a_callable}}}, {}, None, "at task and app level only"),
        *(
            ({}, {}, {name: a_callable}, "task and app level only")
            for name in ("on_conflict", "limit", "rate")
        ),
    ],
    "a setting": [
        *of_app(
            "redlock_nodes", ([], "one node at least"), ("redis://a", "a list of URLs"),
            (["http://a"], "starts with one of redis://"),
            *(([f"{written}u:se-kret@h/db"], f"'{shown}h/db': .* as postgresql://user:password@")
              for written, shown in (
                ("postgresql+psycopg2://", r"postgresql\+psycopg2://"),
                ("postgresql+psycopg2//", r"postgresql\+psycopg2//"),
                ("postgres+sqlalchemy://", r"postgres\+sqlalchemy://"),
                ("db+postgresql://", r"db\+postgresql://"),
                ("postgresql:/", "postgresql:/"),
            )),
            (["redis:/u:se-kret@h"], "'redis:/h': .* starts with one of redis://"),
            ([7], "redis-py clients|redis.Redis"),
            (["redis://localhost", "redis://127.0.0.1:6379/3"], "one vote"),
            (["redis://a:port"], "not a URL of a node"),
            (["redis://a?sslx=1"], "a query has options of redis-py"),
            (["redis://a?ssl_ca_certs=ca.pem"], "those of TLS with rediss://"),
            (["sentinel://a:1"], "sentinel://host:port"),
            (["sentinel://localhost:1,b:2/l", "sentinel://b:2,127.0.0.1:1/l"], "each server once"),
            (["sentinel://::1:26379/locks"], "not a URL of a node"),
            *(([f"sentinel://a:1,b:2/locks?{query}"], f"'sentinel://a:1,b:2/locks'.*{words}")
              for query, words in (
                ("ssl=true&ssl_ca_cert=/ca.pem", "'ssl_ca_cert'.*did you mean 'ssl_ca_certs'"),
                ("ssl_ca_certs=/ca.pem", "'ssl_ca_certs' without ssl=true"),
                ("ssl=false&ssl_cert_reqs=none", "'ssl_cert_reqs' without ssl=true"),
                ("socket_timeout=3", "'socket_timeout'.*known: db, "),
                ("password=", "'password' without a value"),
                ("db=first", "not a URL of a node"),
                ("true", "not a URL of a node"),
            )),
        ),
        *of_app("redlock_prefix", ("a{b", "without"), ("", "not empty")),
        *of_app("redlock_node_timeout", (0, "above 0")),
        *of_app("redlock_clock_drift", (1, "fraction")),
        *of_app("redlock_max_ttl", (-1, "above 0")),
        *of_app("redlock_restart_guard", ("maybe", "must be one of .*'auto'")),
        *of_app("redlock_restart_guard", ("on", "take 'strict'")),
        *of_app("redlock_queues", (["q"], "must map")),
        *of_app("redlock_store_deferred", ("no", "True or False")),
        *of_app("redlock_done_ttl", *((value, "seconds above 0") for value in (0, -1, "9", True))),
        ({}, {}, {"key": "stock:{skuu}"}, "no argument 'skuu'"),
        ({"redlock_node_timeout": 60}, {}, None, "^built-in: .*4 x redlock_node_timeout = 240 s"),
        ({"redlock_max_ttl": 0.5}, {}, None, "at least 4 x"),
    ],
    "a debounce beside another window": [
        ({}, {"unique_for": 9, "debounce": 4}, None, r'unique_for=9.*lock=\{"debounce": None\}'),
        ({"redlock_unique_for": 9}, {"debounce": 4}, None, r'unique_for=9.*\{"debounce": None\}'),
        ({}, {"debounce": 4, "debounce_max": 3}, None, "debounce_max=3.*debounce=4"),
        ({}, {"debounce": 4, "key": False}, None, "counts sends by the lock's key"),
        ({}, {"debounce": 4}, {"unique_for": 9}, "call.*unique_for=9"),
    ],
    "the newest beside what it cannot replace by": [
        ({}, {**NEWEST, "unique_until": "finished"}, None, 'unique_until=\'finished\'.*="newest"'),
        ({}, {**NEWEST, "unique_until": "expired"}, None, 'unique_until=.*="newest".*"started"'),
        ({}, {**NEWEST, "unique_for": None}, None, 'unique_for=None.*on_duplicate="newest"'),
        ({}, {**NEWEST, "debounce": 4}, None, 'debounce=4.*on_duplicate="newest"'),
        ({}, {**NEWEST, "on_conflict": "skip"}, None, 'on_conflict=.*"newest".*"defer"'),
        ({}, {**NEWEST, "limit": 2}, None, 'limit=2.*"newest".*limit=1'),
        ({"redlock_limit": 2}, NEWEST, None, 'limit=2.*"newest".*limit=1'),
        ({"redlock_on_duplicate": "newest"}, {}, None, 'unique_for=None.*="newest"'),
        ({"redlock_debounce": 4}, NEWEST, None, 'debounce=4.*on_duplicate="newest"'),
        ({}, {"unique_for": 9}, {"on_duplicate": "newest"}, '^call: unique_until=.*="newest"'),
        ({}, NEWEST, {"unique_for": None}, '^call: unique_for=None.*on_duplicate="newest"'),
    ],
    "a limit or a rate of another key": [
        (conf, lock, call, rf"^{level}: (lock_)?{name}=.*{words}")
        for name, value in (("limit", 3), ("rate", "100/h"))
        for conf, lock, call, level, words in (
            ({}, {"key": CLINIC, name: value}, None, OURS, r"name it, as \{'doctor:\{a\}': "),
            ({}, {"key": CLINIC, name: {"clinic": value}}, None, OURS, "'clinic' is not in"),
            ({}, {"key": CLINIC, name: {7: value}}, None, OURS, "7 is not in the key"),
            ({}, {name: {"{task}": value}}, None, OURS, "which has no templates"),
            ({}, {"key": a_callable, name: {"a": value}}, None, OURS, "which has no templates"),
            ({f"redlock_{name}": value}, {"key": CLINIC}, None, OURS, "one resource"),
            ({"redlock_key": ["a:{a}", "b:{b}"]}, {name: value}, None, OURS, "one resource"),
            ({"redlock_key": CLINIC, f"redlock_{name}": value}, {}, None, "app", "one resource"),
            ({"redlock_key": CLINIC, f"redlock_{name}": {"clinic": value}}, {}, None, "app",
             "is not in the key"),
            ({"redlock_queues": {"q*": {"key": "a", name: {"b": value}}}}, {}, None, r"queue 'q\*'",
             "is not in the key"),
            ({}, {"key": "k:{a}"}, {name: value, "key": list(CLINIC)}, "call", "one resource"),
            ({}, {"key": "k:{a}"}, {name: {"c": value}}, "call", "'c' is not in the key"),
        )
    ],
    "a limit": [
        *((conf, lock, None, rf"^{OURS}: (lock_)?limit=.*{words}") for conf, lock, words in (
            ({}, {"limit": 3, "fencing": True}, "no fencing tokens"),
            ({"redlock_limit": 3}, {"fencing": True}, "no fencing tokens"),
            ({"redlock_fencing": True}, {"limit": 3}, "no fencing tokens"),
            ({}, {"key": CLINIC, "limit": TEN, "fencing": True}, "no fencing tokens"),
            ({}, {"key": CLINIC, "limit": {"clinic:{b}": 0}}, "from 1 to 1000"),
            ({}, {"key": CLINIC, "limit": {"clinic:{b}": 1001}}, "from 1 to 1000"),
        )),
        ({}, {"fencing": True}, {"limit": 3}, "^call: limit="),
        ({}, {"key": CLINIC, "limit": TEN}, {"key": "other"}, r"'clinic:\{b\}' is not in the key"),
    ],
    "a rate": [
        *(({}, lock, None, rf"^{OURS}: (lock_)?rate=.*{words}") for lock, words in (
            ({"key": CLINIC, "rate": {"clinic:{b}": "1001/h"}}, "token bucket"),
            ({"key": CLINIC, "rate": {"clinic:{b}": "0/h"}}, "one start at least"),
            ({"key": CLINIC, "rate": {"clinic:{b}": (3, 86_401)}}, "to 86400 seconds, a day"),
            ({"key": False, "rate": "100/h"}, "limits the starts of the lock's key, and key=Fal"),
            ({"key": False, "rate": {"a": "100/h"}}, "limits the starts of the lock's key"),
        )),
        ({}, {}, {"rate": "100/w"}, r"^call: lock=\{'rate': '100/w'\}: must be a text as"),
        ({"redlock_tasks": {"v": {"rate": a_callable}}}, {}, None,
         r"^task 'v': redlock_tasks\['v'\]\['rate'\]=<function"),
    ],
}  # fmt: skip


class TestWhatIsRefused:
    @pytest.mark.parametrize("what", REFUSED)
    def test_it_is_named_with_its_level_and_a_hint(self, what: str) -> None:
        for conf, lock, call, words in REFUSED[what]:
            if call is None:
                with pytest.raises(SettingsError, match=words):
                    plan(conf, **lock)
            else:
                made = plan(conf, **lock)
                for use in (made.check_call, partial(made.options_for, "q")):
                    with pytest.raises(SettingsError, match=words):
                        use(call)

    def test_of_the_app_it_is_found_as_its_settings_are_read(self) -> None:
        rows = [row for rows in REFUSED.values() for row in rows if row[3][1:5] in ("app:", "queu")]
        assert len(rows) > 20
        for conf, _, _, words in rows:
            with pytest.raises(SettingsError, match=words):
                read_app({"redlock_nodes": NODES, **conf})

    @pytest.mark.parametrize("name", WRONG)
    def test_a_wrong_value_names_level_name_and_value(self, name: str) -> None:
        for value in WRONG[name]:
            with pytest.raises(SettingsError) as caught:
                plan(**{name: value})
            error = caught.value
            assert (error.level, error.name) == ("task 'shop.f'", f"lock_{name}"), value
            assert error.value == repr(list(value) if isinstance(value, tuple) else value)
            assert error.hint

    def test_a_callable_is_taken_by_three_options(self) -> None:
        for name in OPTION.keys() - {"key", "on_conflict", "limit"}:
            with raised(f"{OURS}: lock_{name}=<function a_callable"):
                plan(**{name: a_callable})

    def test_a_long_value_is_cut_in_the_error(self) -> None:
        for name, value in (
            *((name, 10**400) for name in ("ttl", "wait", "max_hold", "max_wait", "limit")),
            ("key", "x" * 1025), ("key", ["x", "\u20ac" * 342]), ("backoff", {"first": 10**400}),
            ("rate", [10, 10**400]), ("rate", {"k" * 5000: "5/s"}), ("x" * 5000, 1),
        ):  # fmt: skip
            with pytest.raises(SettingsError) as caught:
                plan().options_for("q", {name: value})
            assert len(caught.value.value) <= 200, name

    def test_what_is_allowed_beside_another_is_not_refused(self) -> None:
        for conf, lock in (({"redlock_ttl": 300}, {}), ({}, {"ttl": 300}), ({}, {"key": False})):
            plan({**SLOW, **conf}, **lock)  # a built-in ttl that holds for no run
        plan({**SLOW, "redlock_queues": {"*": {"ttl": 300}}})
        with raised("at least 4 x"):
            plan(SLOW, key=False).options_for("q", {"key": "k"})
        assert plan({"redlock_max_ttl": 10}).options_for("q").ttl == 10
        assert plan({"redlock_limit": 3}, fencing=True, limit=1).options_for("q").fencing
        assert plan({"redlock_unique_for": 9}, unique_for=None, debounce=4).may_be_unique
        assert plan(account=lambda self: None)  # the user's own method
        assert plan(**NEWEST).may_be_unique
        assert plan(**NEWEST).check_call({"unique_for": None, "on_duplicate": "existing"})
        assert plan(debounce=4).check_call({"unique_for": 9, "debounce": None})
        read_app({"redlock_limit": TEN, "redlock_queues": {"q": {"limit": {"a": 2}}}})

    def test_no_password_is_shown(self) -> None:
        urls = (
            "http://:s3cret@a", "redis://user:s3cret@a:port", "sentinel://:s3cret@a", "s3cret@a",
            "redis://a:x?password=s3cret", "redis://:s3cret", "redis://user:s3cret",
            "redis://:12345s3cret/0", ":s3cret", "redis://a:x?password=@s3cret",
            "sentinel://:pa?s3cret@a:1/locks", "sentinel://a:1/locks?passwort=s3cret",
            "sentinel://:s3cret/locks",
        )  # fmt: skip
        elsewhere = ("redlock_url", "redlock_servers", "redlock_queues")
        for name, url in (
            *(("redlock_nodes", url) for url in urls),
            *((name, "redis://:s3cret@a") for name in elsewhere),
        ):
            with pytest.raises(SettingsError) as caught:
                plan({name: [url]})
            assert "s3cret" not in f"{caught.value} {caught.value!r}", (name, url)
        assert "s3cret" not in repr(read_app({"redlock_nodes": ["redis://:s3cret@a"]}))

    @pytest.mark.parametrize(
        ("written", "meant"),
        [("CELERY_REDLOCK_NODE", "CELERY_REDLOCK_NODES"), ("REDLOCK_NODE", "REDLOCK_NODES")],
    )
    def test_a_proposal_is_spelled_as_the_settings_are(self, written: str, meant: str) -> None:
        with pytest.raises(SettingsError, match=f"{written}=.*did you mean '{meant}'"):
            check_known_names({written: []}, "CELERY")

    @pytest.mark.parametrize(
        ("conf", "namespace", "to_write"),
        [
            ({"BROKER_URL": "redis://", "REDLOCK_NODES": []}, None, "redlock_nodes"),
            ({"CELERY_REDLOCK_TTL": 9, "REDLOCK_NODES": []}, "CELERY", "CELERY_REDLOCK_NODES"),
        ],
    )
    def test_a_name_that_is_not_read_is_refused(
        self, conf: dict[str, object], namespace: str | None, to_write: str
    ) -> None:
        app = Celery("upper", set_as_default=False)
        app.config_from_object(conf, namespace=namespace)
        with pytest.raises(SettingsError, match=f"REDLOCK_NODES=.*is not read: call it {to_write}"):
            check_known_names(app.conf, namespace)
        app.conf.redlock_nodes = ["redis://a"]  # a name of someone else's, from now on
        check_known_names(app.conf, namespace)

    def test_an_option_of_a_call_that_stands_alone_is_refused(self) -> None:
        with pytest.raises(SettingsError, match=r'lock_ttl=5: .*lock=\{"ttl": \.\.\.\}'):
            check_outside({"countdown": 1, "lock_ttl": 5})
        check_outside({"lock": {"ttl": 5}, "lock_screen": True, "countdown": 1})

    @pytest.mark.parametrize(("option", "value"), [("limit", 3), ("rate", "100/h")])
    def test_an_option_of_a_queue_is_found_where_a_run_comes_through_it(
        self, option: str, value: Any
    ) -> None:
        made = plan({"redlock_queues": {"narrow": {option: value}}}, key=CLINIC)
        made.options_for("other")
        with raised(f"task 'shop.f' in queue 'narrow': {option}={value!r}"):
            made.options_for("narrow")

    @pytest.mark.parametrize("counted", [{"limit": 2}, {"rate": "100/h"}])
    def test_a_callable_that_returns_several_resources_excludes_one_count(
        self, counted: dict[str, Any]
    ) -> None:
        made = plan(key=lambda task, args, kwargs: [f"x:{arg}" for arg in args], **counted)
        assert resources(made, 1) == resources(made, 1, 1) == "x:1"
        with raised("task 'shop.f': (limit=2|rate='100/h'): ", "to one resource"):
            resources(made, 1, 2)


class TestTheTables:
    def test_each_default_passes_its_own_check(self) -> None:
        assert set(OPTION) == set(FOUR)
        for name, (check, default) in OPTION.items():
            assert check(*OptionSource.at("app", name), default) == default

    def test_every_setting_of_the_app_alone_is_a_field_of_its_settings(self) -> None:
        fields = {one.name for one in dataclasses.fields(AppSettings)}
        assert fields ^ set(APP_SETTING) == {"options", "countdown_cap", "nodes_from"}
        assert not set(APP_SETTING) & set(OPTION)


@pytest.mark.parametrize("name", ["redlock_key", "lock"])
@pytest.mark.parametrize(("option", "value", "usual"), [("limit", 2, 1), ("rate", "9/m", None)])
def test_what_a_queue_counts_by_its_own_key_counts_no_run_with_another_key(
    name: str, option: str, value: Any, usual: Any
) -> None:
    """Two runs of one sku at once: a queue with a limit of two had ended the task's exclusion."""
    queues = {"redlock_queues": {"q": {"key": "{queue}", option: value}}}
    assert vars(plan(queues).options_for("q"))[option] == value
    own = plan(queues, key="stock:{a}")
    assert vars(own.options_for("q"))[option] == usual
    assert own.effective_options("q")[option].source.level == "built-in"
    by_call = plan(queues, args=["a"]) if name == "lock" else plan({**queues, name: "x"})
    seen = by_call.options_for("q", {"key": "stock:{a}"})
    assert vars(seen)[option] == usual
    of_app = {"redlock_key": "all", f"redlock_{option}": value}
    assert vars(plan(of_app).options_for("q"))[option] == value
    assert vars(plan(of_app, key="stock:{a}").options_for("q"))[option] == usual
    assert vars(plan({f"redlock_{option}": value}, key="a").options_for("q"))[option] == value


HUNDRED = Rate(100, 3600.0)
BOTH = {"key": "{queue}", "limit": 2, "rate": "100/h"}
K = ("k:{a}", "k:{b}")
# settings of the app, options of the task and of a call, the call's arguments; limits, rates
COUNTED: dict[str, list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], Any, Any, Any]]] = {
    "a mapping gives each template its limit, and the others one": [
        ({}, {"key": CLINIC, "limit": TEN}, {}, (7, "x"), {"clinic:x": 10}, None),
        ({}, {"key": CLINIC, "limit": dict.fromkeys(CLINIC, 3)}, {}, (7, "x"),
         {"doctor:7": 3, "clinic:x": 3}, None),
        ({}, {"key": CLINIC, "limit": {"clinic:{b}": 1}}, {}, (7, "x"), None, None),
        ({}, {"key": CLINIC, "limit": {}}, {}, (7, "x"), None, None),
        ({}, {"key": "a", "limit": {"a": 2}}, {}, (7,), {"a": 2}, None),
        ({}, {"key": "a", "limit": 2}, {}, (7,), {"a": 2}, None),
    ],
    "a mapping gives the templates that it names their rates": [
        ({}, {"key": CLINIC, "rate": {"clinic:{b}": (100, 3600)}}, {}, (7, "x"), None,
         {"clinic:x": HUNDRED}),
        ({"redlock_rate": dict.fromkeys(CLINIC, "100/h")}, {"key": CLINIC}, {}, (7, "x"), None,
         {"doctor:7": HUNDRED, "clinic:x": HUNDRED}),
    ],
    "each level may have both, and a message": [
        ({"redlock_limit": TEN}, {"key": CLINIC}, {}, (7, "x"), {"clinic:x": 10}, None),
        ({"redlock_queues": {"q": {"key": ["{queue}", "all"], "limit": {"all": 2}}}}, {}, {}, (7,),
         {"all": 2}, None),
        ({"redlock_queues": {"q": BOTH}}, {}, {}, (7,), {"q": 2}, {"q": HUNDRED}),
        ({"redlock_rate": "100/h", "redlock_limit": 3}, {"key": "k"}, {}, (7,), {"k": 3},
         {"k": HUNDRED}),
        ({}, {"key": lambda *_: "k", "limit": lambda *_: 2, "rate": "100/h"}, {}, (7,), {"k": 2},
         {"k": HUNDRED}),
        ({}, {"key": "k", "fencing": True, "rate": "1/d"}, {"rate": "2/s"}, (7,), None,
         {"k": Rate(2, 1)}),
        ({"redlock_rate": "1/d"}, {"key": "k"}, {"rate": "2/s", "limit": 4}, (7,), {"k": 4},
         {"k": Rate(2, 1)}),
        ({}, {"key": CLINIC, "limit": TEN}, {"limit": MappingProxyType({"clinic:{b}": 4})},
         (7, "x"), {"clinic:x": 4}, None),
        ({}, {}, {"key": ["x:{a}", "{b}"], "limit": {"{b}": 4}}, (7, "x"), {"x": 4}, None),
        ({}, {"rate": "100/h", "args": []}, {}, (7,), None, {"shop.f:any-arguments": HUNDRED}),
    ],
    "without a rate or a key there is none": [
        ({}, {"key": "k"}, {}, (7,), None, None),
        ({"redlock_rate": "100/h"}, {"key": "k", "rate": None}, {}, (7,), None, None),
        ({}, {"key": "k", "rate": {}}, {}, (7,), None, None),
        ({"redlock_rate": "100/h"}, {"key": False}, {}, (7,), None, None),
        ({"redlock_rate": {"k:{a}": "100/h"}}, {"key": False}, {}, (7,), None, None),
        ({}, {"key": "k", "rate": "100/h", "limit": 2}, {"key": False}, (7,), None, None),
        ({}, {"key": CLINIC, "limit": TEN}, {"key": False}, (7, "x"), None, None),
    ],
    "two templates that give one resource are one permit of the smaller limit, and one rate": [
        *(({}, {"key": K, "limit": limit}, {}, args, found, None)
          for args in (("x", "x"), ("x", "x", "more"))
          for limit, found in (({K[0]: 5, K[1]: 3}, {"k:x": 3}), ({K[0]: 3, K[1]: 5}, {"k:x": 3}),
                               ({K[0]: 3}, None))),
        ({}, {"key": K, "rate": dict.fromkeys(K, "10/s")}, {}, ("x", "x"), None,
         {"k:x": Rate(10, 1)}),
        *(({}, {"key": K, "rate": {one: "10/s"}}, {}, ("x", "x"), None, {"k:x": Rate(10, 1)})
          for one in K),
    ],
    "a callable returns what a setting may be": [
        ({}, {"key": CLINIC, "limit": lambda *_: TEN}, {}, (7, "x"), {"clinic:x": 10}, None),
        ({}, {"key": CLINIC, "limit": lambda *_: {}, "fencing": True}, {}, (7, "x"), None, None),
        ({}, {"key": "one", "limit": lambda *_: 4}, {}, (1,), {"one": 4}, None),
        ({}, {"key": lambda *_: ["m", "p"], "limit": lambda *_: {"p": 4}}, {}, (1,), {"p": 4},
         None),
    ],
}  # fmt: skip


class TestLimitsAndRates:
    @pytest.mark.parametrize("what", COUNTED)
    def test_they_are_counted_by_resource(self, what: str) -> None:
        for conf, lock, call, args, limits, rates in COUNTED[what]:
            assert counts(plan(conf, **lock), *args, call=call) == (limits, rates), (conf, lock)

    @pytest.mark.parametrize("first", K)
    def test_one_resource_has_one_rate(self, first: str) -> None:
        made = plan(key=K, rate={**dict.fromkeys(K, "500/m"), first: "10/s"})
        with raised("'k:x' has two rates for these arguments"):
            counts(made, "x", "x")

    def test_a_callable_is_asked_each_time_with_the_call(self) -> None:
        asked: list[Any] = []
        made = plan(key="k", limit=lambda *call: asked.append(call) or len(asked) + 1)
        assert [counts(made, 7, "x")[0] for _ in range(2)] == [{"k": 2}, {"k": 3}]
        assert asked == [("the task", (7, "x"), {})] * 2

    @pytest.mark.parametrize(
        ("returned", "words"),
        [
            (0, "from 1 to 1000"), (1001, "from 1 to 1000"), (None, "from 1 to 1000"),
            (True, "from 1 to 1000"), ({"clinic:{b}": 1.5}, "from 1 to 1000"),
            (2, "to one resource"), ({"clinic:x": 2}, "'clinic:x' is not in the key"),
        ],
    )  # fmt: skip
    def test_what_a_callable_must_not_return_ends_the_run(self, returned: Any, words: str) -> None:
        with raised("task 'shop.f': limit=", words):
            counts(plan(key=CLINIC, limit=lambda *_: returned), 7, "x")

    def test_what_a_callable_raises_or_returns_beside_fencing_ends_the_run(self) -> None:
        with raised("lock_limit=", "the callable raised ZeroDivision"):
            counts(plan(key=CLINIC, limit=lambda *_: 1 // 0), 7, "x")
        with raised("no fencing tokens"):
            counts(plan(key=CLINIC, limit=lambda *_: TEN, fencing=True), 7, "x")

    def test_a_mapping_is_taken_as_a_dict_of_its_own(self) -> None:
        given = dict(TEN)
        made = plan(key=CLINIC, limit=MappingProxyType(given))
        given["clinic:{b}"] = 3
        assert counts(made, 7, "x")[0] == {"clinic:x": 10}

    @pytest.mark.parametrize("name", ["key", "limit"])
    def test_a_soft_time_limit_in_a_callable_is_no_wrong_setting(self, name: str) -> None:
        def ends(*_: Any) -> Any:
            raise SoftTimeLimitExceeded

        with pytest.raises(SoftTimeLimitExceeded):
            counts(plan(**{name: ends}), 7, "x")

    @given(st.lists(st.tuples(st.text(max_size=3), st.integers(1, 3)), min_size=1, max_size=6))
    def test_those_with_one_holder_are_locked_first_and_each_kind_in_order(
        self, drawn: list[tuple[str, int]]
    ) -> None:
        above = {name: limit for name, limit in dict(drawn).items() if limit > 1}
        ordered = in_order([name for name, _ in drawn], above)
        plain = in_order(name for name, _ in drawn if name not in above)
        assert ordered == (*plain, *in_order(above))

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
        for one in (written, {"k:{a}": written}):
            assert counts(plan(key="k:{a}", rate=one), 7) == (None, {"k:7": rate})
            assert counts(plan(key="k:{a}"), 7, call={"rate": one}) == (None, {"k:7": rate})
        text = plan(rate=written).options_for("q").rate
        assert isinstance(text, str)
        assert Rate.parse(text) == rate


class Provider(CredentialProvider):
    def get_credentials(self) -> tuple[str]:
        return ("token",)

    @staticmethod
    def fails() -> None:
        raise ZeroDivisionError


class TestNodes:
    def test_each_group_of_sentinels_is_a_node_by_its_own_servers(self) -> None:
        groups = ["sentinel://:s3cret@a:1,b:2/locks", "sentinel://c:1/locks"]
        groups.append(Sentinel([("d", 1)]).master_for("locks"))
        groups.append("sentinel://:s3cret@[::1]:26379,b:2,[fe80::1]:1/locks")
        found = check_nodes("app", "redlock_nodes", groups)
        names = ["a:1,b:2", "c:1", "d:1", "[::1]:26379,b:2,[fe80::1]:1"]
        assert [address.name for address in found] == [f"sentinel://{n}/locks" for n in names]

    @pytest.mark.parametrize(
        ("conf", "node", "setting"),
        [
            ({"broker_url": "redis://:pw@b:1/2"}, "redis://:pw@b:1/2", "broker_url"),
            ({"broker_url": "redis://b", "result_backend": "redis://r"}, "redis://b", "broker_url"),
            ({"broker_url": "amqp://x", "result_backend": "redis://r"}, "redis://r",
             "result_backend"),
            ({"broker_url": "redis://b", "redlock_nodes": ["redis://a"]}, "redis://a",
             "redlock_nodes"),
            ({"broker_url": "redis+socket:///run/r.sock?virtual_host=3"}, "unix:///run/r.sock?db=3",
             "broker_url"),
            ({"broker_url": "redis://"}, "redis://localhost", "broker_url"),
            ({"broker_url": "rediss://a/0?ssl_cert_reqs=CERT_REQUIRED"},
             "rediss://a/0?ssl_cert_reqs=required", "broker_url"),
        ],
    )  # fmt: skip
    def test_one_redis_is_the_node_as_redis_py_names_it(
        self, conf: dict[str, Any], node: str, setting: str
    ) -> None:
        made = read_app(conf)
        assert (made.nodes, made.nodes_from) == ((node,), setting)

    @pytest.mark.parametrize(
        ("setting", "value", "instead"),
        [
            ("redis_backend_use_ssl", {"ssl_cert_reqs": 0}, "rediss://"),
            ("redis_backend_credential_provider", "identity.Provider", "credential_provider="),
            ("redis_username", "cloud", "redis://user:password@"),
            ("redis_password", "s3cret", "redis://user:password@"),
        ],
    )
    def test_what_stands_beside_the_url_of_a_result_backend_counts_for_no_other_url(
        self, setting: str, value: Any, instead: str
    ) -> None:
        conf = {"broker_url": "amqp://x", "result_backend": "redis://r", setting: value}
        assert read_app(conf).nodes == ()
        with raised(f"{setting} is set, which nodes do not take over: .*{re.escape(instead)}") as e:
            find_nodes(conf)
        assert "s3cret" not in str(e.value)
        own = "redis://u:p@r?credential_provider=identity.Own"
        if not isinstance(value, dict):
            assert find_nodes({**conf, "result_backend": own}) == ([own], "result_backend")
        assert find_nodes({**conf, "broker_url": "redis://b"}) == (["redis://b"], "broker_url")
        amqps = {"broker_url": "amqps://x", "result_backend": "redis://r", "broker_use_ssl": True}
        assert find_nodes(amqps) == (["redis://r"], "result_backend")

    @pytest.mark.parametrize("place", ["u:p@a", "a:1/2", ":p@a:1"])
    @pytest.mark.parametrize("name", [f"{__name__}.Provider", f"{__name__}:Provider"])
    @pytest.mark.parametrize("scheme", ["redis", "rediss", "sentinel"])
    def test_a_provider_of_credentials_is_imported_as_kombu_does(
        self, scheme: str, name: str, place: str
    ) -> None:
        place = "u:p@a:1/locks" if scheme == "sentinel" else place
        url = f"{scheme}://{place}?credential_provider={name}"
        address = parse_address(url, "app", "redlock_nodes")
        given = address.pool.connection_kwargs
        assert isinstance(given["credential_provider"], Provider)
        assert given.get("username") is given.get("password") is None

    @pytest.mark.parametrize(
        ("name", "why"),
        [
            ("no_such_module.Provider", "No module named 'no_such_module'"),
            (f"{__name__}.Missing", "Missing"),
            (f"{__name__}.Provider.fails", "ZeroDivisionError"),
            (f"{__name__}.TestNodes", "derived from redis.CredentialProvider"),
        ],
    )
    @pytest.mark.parametrize("scheme", ["redis", "sentinel"])
    def test_a_provider_that_cannot_be_made_is_a_wrong_setting(
        self, scheme: str, name: str, why: str
    ) -> None:
        url = f"{scheme}://u:s3cret@a:1/0?credential_provider={name}"
        with raised(f"app: redlock_nodes=.*{why}") as error:
            check_nodes("app", "redlock_nodes", [url])
        assert "s3cret" not in str(error.value)

    @pytest.mark.parametrize(
        ("broker", "ssl"),
        [("amqp://x", None), ("redis://a;redis://b", None), ("sqs://", None), (None, None),
         ("rediss://a", {"ssl_cert_reqs": 0})],
    )  # fmt: skip
    def test_without_one_redis_the_setting_is_asked_for_when_a_lock_is(
        self, broker: str | None, ssl: Any
    ) -> None:
        conf = {"broker_url": broker, "result_backend": "rpc://", "broker_use_ssl": ssl}
        assert read_app(conf).nodes == ()
        with raised("broker_use_ssl" if ssl else "redlock_nodes=.*redis://a"):
            find_nodes(conf)

    def test_the_broker_of_the_environment_is_the_node(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CELERY_BROKER_URL", "redis://shared")
        app = Celery("t", broker="redis://localhost", set_as_default=False)
        made = settings_of(app)
        assert (made.nodes, made.nodes_from) == (("redis://shared",), "broker_url")


LONG = "x" * 1025
# options of the task, arguments by position and by name, and what is locked
LOCKED: list[tuple[dict[str, Any], tuple[Any, ...], dict[str, Any], Any]] = [
    ({"key": ["account:{a}", "account:{b}", "{task}"]}, (1, 2), {},
     ("account:1", "account:2", "shop.f")),
    ({"key": "a"}, (1,), {}, "a"),  # a text without braces is one lock whatever the arguments
    ({"key": ["a"]}, (2,), {}, "a"),
    ({"key": ["a", "x:{b}", "ledger"]}, (1, 3), {}, ("a", "x:3", "ledger")),
    ({"key": "{task}", "body": lambda task: None}, ("mine",), {}, "mine"),
    ({"key": "{rest[0]}-{options[sku]}"}, (1, 2, "r"), {"sku": "s"}, "r-s"),
    ({"key": lambda task, args, kwargs: f"{args[0]}/{kwargs['b']}"}, (1,), {"b": 2}, "1/2"),
    ({"key": lambda task, args, kwargs: [f"x:{one}" for one in args]}, ("b", "a", "b"), {},
     ("x:a", "x:b")),
    ({"key": lambda *_: None}, (1,), {}, ()),
    ({"key": False}, (1,), {}, ()),
]  # fmt: skip
NOT_LOCKED: list[tuple[Any, tuple[Any, ...], str]] = [
    (lambda *_: ["r", LONG], (1,), "at most 1024 bytes"),
    ("stock:{a}", (None,), "a is None"),  # not a shared key
    ("{rest[0]}", (1, 2, None), "is None"),
    ("{rest[0]}", (1,), "cannot be filled"),
    (lambda *_: {}["sku"], (1,), "the callable raised KeyError: 'sku'"),
    *((lambda *_, returned=returned: returned, (1,), "must return a text")
      for returned in (7, "", [], ["a", ""], ["a", 7], [None], False)),
    ("{a:.2f}", (Decimal("1e100000000"),), ""), ("{a:.2f}", (10**400,), ""), ("{a}", (LONG,), ""),
    ("{a}{b}", ("x" * 1000, "x" * 1000), ""), ("{a:>999}" * 100, ("x",), ""),
]  # fmt: skip


class TestKeys:
    @pytest.mark.parametrize(("lock", "args", "kwargs", "locked"), LOCKED)
    def test_name_what_is_locked(self, lock: Any, args: Any, kwargs: Any, locked: Any) -> None:
        assert resources(plan(**lock), *args, **kwargs) == locked

    @pytest.mark.parametrize(("key", "args", "words"), NOT_LOCKED)
    def test_are_short_and_whole_whatever_a_message_brings(
        self, key: Any, args: Any, words: str
    ) -> None:
        made, most = plan(key=key), 10_000_000  # bytes
        tracemalloc.start()
        with raised(words):
            resources(made, *args)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < most

    @pytest.mark.parametrize(
        ("args", "kwargs", "given", "why"),
        [
            ((), {}, "(0 by position)", "missing 1 required positional argument: 'a'"),
            ((), {"b": "s3cret"}, "(0 by position, b by name)", "missing 1 required positional"),
            (("s3cret",), {"a": 1}, "(1 by position, a by name)", "got multiple values for"),
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

    def test_a_default_key_is_short_and_shows_no_argument(self) -> None:
        key = resources(plan(), "s3cret", b={"card": "4111111111111111"})
        assert key.startswith("shop.f:")
        assert "s3cret" not in key
        assert "4111" not in key
        assert len(key) == len(resources(plan(), "x" * 1_000_000))

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


LOST_AFTER = {"broker_transport_options": {"visibility_timeout": 120}}


@pytest.mark.parametrize(
    ("conf", "kept_for", "cap"),
    [
        ({}, 600.0, 300.0),
        ({"broker_url": "redis://a", **LOST_AFTER}, 180.0, 30.0),
        ({"broker_url": "redis://a"}, 600.0, 300.0),
        (LOST_AFTER, 600.0, 300.0),  # no such timeout
        ({"redlock_done_ttl": 3600}, 3600.0, 900.0),
        ({"redlock_done_ttl": None}, 600.0, 300.0),
        ({"redlock_done_ttl": 20}, 20.0, 10.0),
        ({"broker_url": "sqs://", "redlock_done_ttl": 3600}, 3600.0, 450.0),
    ],
)
def test_a_done_mark_outlives_deliveries_and_no_countdown_outlives_either(
    conf: dict[str, Any], kept_for: float, cap: float
) -> None:
    made = read_app({"redlock_nodes": NODES, **conf})
    assert (made.done_ttl, made.countdown_cap) == (kept_for, cap)


def test_a_task_class_goes_by_the_settings_of_the_app_that_has_it_now() -> None:
    class Settle(LockedTask):
        name = "shop.settle"

        def run(self, order: int) -> None: ...

    for ttl in (10, 20):
        app = Celery(f"shop{ttl}", broker="memory://", set_as_default=False)
        app.conf.update(redlock_nodes=NODES, redlock_ttl=ttl)
        assert app.register_task(Settle()).lock_options()["ttl"].value == ttl
