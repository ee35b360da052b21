"""The option `args`: names of arguments that make a task's own key, beside the option `key`."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st
from kombu.utils.json import dumps, loads

from celery_redlock import LockedTask, SettingsError
from celery_redlock.operate.lints import lint
from celery_redlock.tasks.arguments import parameters_of
from celery_redlock.tasks.settings.call import TaskCall
from celery_redlock.tasks.settings.levels import read_app
from celery_redlock.tasks.settings.task_config import TaskLockConfig, compile_config
from celery_redlock.tasks.settings.templates import digest

NODES = ["redis://a", "redis://b", "redis://c"]
QUEUE = {"redlock_queues": {"q": {"args": ["b"]}}}


def take(sku: Any, b: Any = 2, *rest: Any, **options: Any) -> None:
    """Stand for a task's body."""


def plan(conf: dict[str, Any] | None = None, **lock: Any) -> TaskLockConfig:
    app = read_app({"redlock_nodes": NODES, **(conf or {})})
    attributes = {f"lock_{name}": value for name, value in lock.items()}
    return compile_config(app, "shop.take", attributes, parameters_of(take))


def resource(made: TaskLockConfig, *args: Any, call: Any = None, **kwargs: Any) -> str:
    """Return the one resource of a run in queue q."""
    (one,) = made.resources(made.options_for("q", call), TaskCall(None, args, kwargs, "q"))
    return one


class TestOneResource:
    def test_is_made_of_the_named_arguments_alone(self) -> None:
        made = plan(args=["sku"])
        assert resource(made, 1, 2) == resource(made, 1, 3) != resource(made, 2, 2)

    def test_holds_the_tasks_name_and_a_digest(self) -> None:
        made = plan(args=["sku", "b"])
        assert resource(made, "s", 7) == "shop.take:" + digest({"sku": "s", "b": 7}, "shop.take")
        assert resource(plan(args=["sku"]), "s") == "shop.take:aaeb6ec9172ee24479a928cbb0fd8d92"
        assert "secret" not in resource(made, "secret")

    def test_does_not_depend_on_the_order_of_the_names_or_on_a_repetition(self) -> None:
        made = [plan(args=names) for names in (["sku", "b"], ("b", "sku"), ["b", "sku", "b"])]
        assert len({resource(one, "s", 7) for one in made}) == 1
        every = plan(args=["options", "rest", "b", "sku"])
        assert resource(every, "s", 7) == resource(plan(), "s", 7)

    def test_is_one_for_all_arguments_where_none_is_named(self) -> None:
        made = plan(args=[])
        assert resource(made, 1) == resource(made, 2, 3, x=4) == "shop.take:any-arguments"

    def test_tells_rest_and_options_as_wholes(self) -> None:
        made = plan(args=["rest", "options"])
        assert resource(made, 1, 2, 3, x=4) == resource(made, 5, 6, 3, x=4)
        assert resource(made, 1, 2, 3, x=4) != resource(made, 1, 2, 3, x=5)
        assert resource(made, 1, 2, 3, x=4) != resource(made, 1, 2, 4, x=4)

    @given(sku=st.integers() | st.text(), b=st.booleans() | st.text(), as_list=st.booleans())
    def test_is_the_same_however_the_arguments_are_written(
        self, sku: Any, b: Any, as_list: bool
    ) -> None:
        names = ["sku", "b"]
        made = plan(args=names if as_list else tuple(names))
        calls = [resource(made, sku, b), resource(made, sku, b=b), resource(made, b=b, sku=sku)]
        over_the_wire = loads(dumps([[sku], {"b": b, "more": 1}]))
        calls.append(resource(made, *over_the_wire[0], **over_the_wire[1]))
        assert len(set(calls)) == 1
        assert resource(plan(args=names), sku) == resource(plan(args=names), sku, 2)
        assert resource(made, sku, b) != resource(made, [sku], b)


class TestWhatIsWrong:
    def test_one_text_is_to_be_written_as_a_list(self) -> None:
        with pytest.raises(SettingsError, match=r"lock_args='sku': .*write \['sku'\]"):
            plan(args="sku")

    def test_a_template_is_sent_to_the_option_key(self) -> None:
        with pytest.raises(SettingsError, match=r"lock_args=.*without braces.*option key"):
            plan(args=["{sku}"])

    def test_an_empty_name_of_a_queue_is_found_before_any_run(self) -> None:
        with pytest.raises(SettingsError, match="an argument name must be a text, not empty"):
            plan({"redlock_queues": {"q": {"args": [""]}}})

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"lock": {"ttl": 30, "limit": 2}}, "at a task write lock_ttl=, lock_limit="),
            ({"redlock_ttl": 30}, "did you mean lock_ttl?"),
            ({"LOCK_TTL": 30}, "did you mean lock_ttl?"),
            ({"lockkey": "a"}, "did you mean lock_key?"),
            ({"lock_expiry": 60}, "did you mean 'lock_unique_for'?"),
            ({"ttl": 30, "TTL": 30, "clock_key": "a", "locked": True}, ""),
        ],
    )
    def test_a_name_that_is_almost_an_option_is_refused_at_the_task(
        self, options: dict[str, Any], words: str
    ) -> None:
        """`lock` of a class would replace the task's own lock, without a word."""
        app = Celery("shop", broker="memory://", set_as_default=False)
        app.conf.update(redlock_nodes=NODES)
        app.task(base=LockedTask, shared=False, name="shop.t", **options)(take)
        with pytest.raises(SettingsError) if words else contextlib.nullcontext() as refused:
            app.finalize()
        assert words in str(refused.value if refused else "")

    def test_a_call_alone_refuses_such_a_name_too(self) -> None:
        """A test that calls `apply` finalizes no app."""
        app = Celery("shop", broker="memory://", set_as_default=False)
        app.conf.update(redlock_nodes=NODES)
        task = app.task(base=LockedTask, shared=False, name="shop.t", lockkey="a")(take)
        for call in (task.delay, lambda sku: task.apply((sku,)).get()):
            with pytest.raises(SettingsError, match=r"lockkey='a': .*did you mean lock_key\?"):
                call("sku-7")

    def test_an_unknown_argument_is_named_with_a_proposal_of_arguments(self) -> None:
        app = Celery("shop", broker="memory://", set_as_default=False)
        app.conf.update(redlock_nodes=NODES)
        app.task(base=LockedTask, shared=False, name="shop.t", lock_args=["skuu"])(take)
        meant = r"task 'shop.t': lock_args=\['skuu'\]: .*no argument 'skuu'; did you mean 'sku'"
        with pytest.raises(SettingsError, match=meant):
            app.finalize()
        with pytest.raises(SettingsError, match=r"known: b, options, rest, sku\. See "):
            plan(args=["xyzzy"])

        def rare() -> None: ...

        app = Celery("shop", broker="memory://", set_as_default=False)
        app.conf.update(redlock_nodes=NODES)
        app.task(base=LockedTask, shared=False, name="shop.t", lock_args=["sku"])(rare)
        with pytest.raises(SettingsError, match=r"shop\.t takes no arguments\. See"):
            app.finalize()

    def test_an_apps_name_that_a_task_lacks_is_found_when_it_finalizes(self) -> None:
        with pytest.raises(SettingsError, match=r"app: redlock_args=\['nope'\]"):
            plan({"redlock_args": ["nope"]})
        plan({"redlock_args": ["nope"]}, key="x")

    def test_a_queues_name_that_a_task_lacks_is_found_at_the_run(self) -> None:
        made = plan({"redlock_queues": {"q*": {"args": ["nope", "sku"]}}})
        written = r"^queue 'q\*': redlock_queues\['q\*'\]\['args'\]=\['nope', 'sku'\]: "
        with pytest.raises(SettingsError, match=f"{written}.*no argument 'nope'"):
            resource(made, 1)

    def test_a_calls_name_that_a_task_lacks_is_found_at_the_call(self) -> None:
        with pytest.raises(SettingsError, match=r"call: lock=\{'args': \['nope'\]\}: "):
            plan().check_call({"args": ["nope"]})

    @pytest.mark.parametrize("key", ["x", ["x:{sku}", "y"], False, lambda *_: "x"])
    def test_both_at_one_level_are_refused_with_the_hint(self, key: Any) -> None:
        with pytest.raises(SettingsError, match=r"lock_args=.*lock_key is set.*leave one out"):
            plan(key=key, args=["sku"])
        with pytest.raises(SettingsError, match=r"redlock_args=.*redlock_key is set"):
            plan({"redlock_key": key, "redlock_args": []})

    def test_both_in_a_queue_an_entry_or_a_call_are_refused(self) -> None:
        both = {"key": "x", "args": ["sku"]}
        for setting in ("redlock_queues", "redlock_tasks"):
            with pytest.raises(SettingsError, match=rf"{setting}\['x'\]\['args'\].*leave one out"):
                plan({setting: {"x": both}})
        with pytest.raises(SettingsError, match=r"call: lock=\{'args': \['sku'\]\}.*leave one out"):
            plan().check_call(both)

    def test_one_may_be_none_beside_the_other(self) -> None:
        assert resource(plan(key=None, args=[]), 1) == "shop.take:any-arguments"
        assert resource(plan(key="x", args=None), 1) == "x"

    @pytest.mark.parametrize("of_call", ["oops", [("args", [])], None])
    def test_a_call_whose_options_are_no_mapping_is_told_what_it_takes(self, of_call: Any) -> None:
        app = Celery("shop", broker="memory://", set_as_default=False)
        app.conf.update(redlock_nodes=NODES)
        task = app.task(base=LockedTask, shared=False, name="shop.t", lock_unique_for=9)(take)
        with pytest.raises(SettingsError, match=r"call: lock=.*must map option names to values"):
            task.apply_async((1,), lock=of_call)
        if of_call is not None:
            with pytest.raises(SettingsError, match=r"call: lock=.*must map option names"):
                task.lock_options(lock=of_call)


class TestOfTwoLevelsTheNearerDecidesBoth:
    ALL = resource(plan(), 1)

    @pytest.mark.parametrize(
        ("conf", "task", "call", "expected"),
        [
            ({"redlock_key": "far"}, {"args": []}, None, "shop.take:any-arguments"),
            ({"redlock_args": []}, {"key": "near"}, None, "near"),
            ({"redlock_key": False}, {"args": []}, None, "shop.take:any-arguments"),
            ({}, {"args": []}, {"key": "near"}, "near"),
            ({}, {"key": "far"}, {"args": []}, "shop.take:any-arguments"),
            (QUEUE, {"args": []}, None, "shop.take:any-arguments"),
            (QUEUE | {"redlock_key": "far"}, {}, None, resource(plan(args=["b"]), 1)),
            ({"redlock_args": []}, {"ttl": 9}, {"wait": 1}, "shop.take:any-arguments"),
            ({"redlock_key": "far"}, {"args": None}, None, ALL),
            ({"redlock_args": []}, {"key": None}, None, ALL),
            ({"redlock_args": []}, {"args": None}, None, ALL),
            ({}, {"key": "far"}, {"args": None}, ALL),
        ],
    )
    def test_holds(self, conf: Any, task: Any, call: Any, expected: str) -> None:
        assert resource(plan(conf, **task), 1, call=call) == expected

    def test_no_lock_from_afar_does_not_switch_off_what_is_near(self) -> None:
        assert plan({"redlock_key": False}, args=[]).may_lock
        assert not plan({"redlock_args": []}, key=False).may_lock

    def test_permits_are_checked_with_what_is_near(self) -> None:
        conf = {"redlock_key": ["x:{sku}", "y:{sku}"]}
        assert plan(conf, args=["sku"], limit=2).options_for("q").limit == 2
        with pytest.raises(SettingsError, match="to one resource"):
            plan({"redlock_args": []}, limit=2).check_call({"key": ["x", "y"]})
        plan(conf).check_call({"args": [], "limit": 2})

    def test_who_decided_is_told_of_both(self) -> None:
        told = plan({"redlock_key": "far"}, args=["sku"]).effective_options("q")
        assert (told["key"].value, told["args"].value) == (None, ("sku",))
        place = "task 'shop.take': lock_args"
        assert [str(told[name].source) for name in ("key", "args")] == [place, place]
        rows = {line.split()[0]: line for line in str(told).splitlines()[1:]}
        assert "None" in rows["key"]
        assert "['sku']" in rows["args"]
        told = plan({"redlock_args": []}).effective_options("q", {"key": "near"})
        assert (told["key"].value, told["args"].value) == ("near", None)
        assert str(told["args"].source) == "call: lock={'key': ...}"

    def test_each_has_its_own_place_where_both_are_written(self) -> None:
        told = plan(key=None, args=["sku"]).effective_options("q")
        assert str(told["key"].source) == "task 'shop.take': lock_key"
        assert str(told["args"].source) == "task 'shop.take': lock_args"


def test_a_message_carries_the_names_of_its_call_and_nothing_more() -> None:
    carried = loads(dumps(plan(key="far").check_call({"args": ["sku"]})))
    assert carried == {"args": ["sku"]}
    assert resource(plan(key="far"), 1, 9, call=carried) == resource(plan(args=["sku"]), 1)


def test_a_task_whose_key_is_none_or_whose_args_are_set_is_looked_at_by_the_lints() -> None:
    app = Celery("shop", broker="memory://", set_as_default=False)
    app.conf.update(redlock_nodes=NODES)
    locks: dict[str, dict[str, Any]] = {
        "none": {"lock_key": None}, "args": {"lock_args": []}, "no": {"lock_key": False},
    }  # fmt: skip
    for name, lock in locks.items():
        app.task(base=LockedTask, shared=False, name=name, **lock)(take)
    app.finalize()
    (found,) = (one for one in lint(app) if one.setting == "acks_late")
    assert found.hint.startswith("args, none: ")
