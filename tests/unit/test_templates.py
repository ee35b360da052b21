"""Arguments are bound as Python binds them, and a template is filled as `str.format` fills it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from celery_redlock.errors import ArgumentsError, SettingsError
from celery_redlock.tasks.arguments import Parameters
from celery_redlock.tasks.settings.call import TaskCall
from celery_redlock.tasks.settings.levels import read_app
from celery_redlock.tasks.settings.task_config import compile_config
from celery_redlock.tasks.settings.templates import digest, fill

APP = read_app({"redlock_nodes": ["redis://a"]})

LITERALS = st.text("ab:{}é", max_size=4).map(
    lambda text: text.replace("{", "{{").replace("}", "}}")
)
FIELDS = st.builds(
    lambda name, form: "{" + name + form + "}",
    st.sampled_from(["sku", "b", "task", "queue", "digest", "missing", "rows[1]", "rows[0][k-1]"]),
    st.sampled_from(["", "", "", ":", ":>5", ":05d", ":.3", ":%d.%m"]),
)
VALUES = st.text(max_size=4) | st.integers() | st.booleans() | st.floats() | st.dates()


@given(
    st.lists(LITERALS | FIELDS, max_size=5).map("".join),
    st.fixed_dictionaries({"sku": VALUES, "b": st.integers(0, 9) | st.text(max_size=2)}),
)
@example("{sku}{{}}{missing}", {"sku": "7", "b": 1})
def test_a_template_is_filled_as_python_formats_it(
    template: str, arguments: dict[str, Any]
) -> None:
    passed = {**arguments, "rows": [{"k-1": 5}, "x"]} if "rows[" in template else arguments
    known = {**passed, "task": "shop.take", "queue": "q", "digest": digest(passed, "shop.take")}
    try:
        expected = template.format_map(known)
    except (LookupError, TypeError, ValueError):
        with pytest.raises((LookupError, TypeError, ValueError)):
            fill(template, passed, "shop.take", "q")
    else:
        assert fill(template, passed, "shop.take", "q") == expected


NO_TEMPLATES = "{ {a a} {} {0} {a.b} {a[0].b} {a[]} {a[0]x} {a!x} {a:1000}"


@pytest.mark.parametrize("template", NO_TEMPLATES.split())
def test_what_is_no_template_is_an_error_of_every_level(template: str) -> None:
    written = re.escape(repr(template))
    with pytest.raises(SettingsError, match=rf"app: redlock_key={written}: is not a template"):
        read_app({"redlock_nodes": ["redis://a"], "redlock_key": ["x", template]})
    with pytest.raises(SettingsError, match="is not a template"):
        read_app({"redlock_nodes": ["redis://a"], "redlock_queues": {"q": {"key": template}}})


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("x:{a!r}", "the conversion !r"), ("{a!s}", "the conversion !s"),
        ("{a!a:>7}", "the conversion !a"), ("{a:{b}}", "a field in a format, {b}"),
        ("{a:>{b[0]}}", "a field in a format, >{b[0]}"),
        ("{a:{{b}}}", "a field in a format, {{b}}"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("level", ["app", "queue", "task", "call"])
def test_what_a_template_cannot_write_is_an_error_that_names_a_callable(
    template: str, what: str, level: str
) -> None:
    nodes = {"redlock_nodes": ["redis://a"]}
    parameters = Parameters(inspect.signature(plain))
    declare: dict[str, Callable[[], object]] = {
        "app": lambda: read_app({**nodes, "redlock_key": template}),
        "queue": lambda: read_app({**nodes, "redlock_queues": {"q": {"key": template}}}),
        "task": lambda: compile_config(APP, "shop.take", {"lock_key": template}, parameters),
        "call": lambda: compile_config(APP, "t", {}, parameters).check_call({"key": template}),
    }
    with pytest.raises(SettingsError) as caught:
        declare[level]()
    assert caught.value.value == repr(template)
    assert caught.value.hint.startswith(f"is not a template: it has {what}: use a callable key")


def plain(a: Any, b: Any = 2) -> Any: ...
def with_keywords(a: Any, b: Any = 2, *, c: Any, d: Any = 4) -> Any: ...
def only_keywords(*, a: Any = 1, b: Any) -> Any: ...
def by_position(a: Any, /, b: Any = 2) -> Any: ...
def of_any(a: Any, *rest: Any, b: Any = 2, **options: Any) -> Any: ...
def without() -> Any: ...


@pytest.mark.parametrize(
    "body", [plain, with_keywords, only_keywords, by_position, of_any, without]
)
@given(
    args=st.lists(st.integers(0, 3), max_size=4),
    kwargs=st.dictionaries(st.sampled_from("abcde"), st.integers(4, 7)),
)
def test_arguments_are_bound_as_python_binds_them(
    body: Callable[..., Any], args: list[int], kwargs: dict[str, int]
) -> None:
    signature = inspect.signature(body)
    made = compile_config(APP, "shop.take", {}, Parameters(signature))
    call = TaskCall(None, args, kwargs, "celery")
    try:
        body(*args, **kwargs)
    except TypeError as error:
        why = str(error).removeprefix(f"{body.__name__}() ")
        with pytest.raises(ArgumentsError, match=re.escape(why)):
            made.resources(made.options_for("celery"), call)
    else:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        key = f"shop.take:{digest(bound.arguments, 'shop.take')}"
        assert made.resources(made.options_for("celery"), call) == (key,)
