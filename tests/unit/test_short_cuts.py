"""The short cuts that make a key give the results of Python's own, slower, binding and format."""

from __future__ import annotations

import datetime as dt
import enum
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from celery_redlock.errors import ArgumentsError, SettingsError
from celery_redlock.tasks.settings.conf import read_app
from celery_redlock.tasks.settings.digest import digest
from celery_redlock.tasks.settings.keys import TaskCall
from celery_redlock.tasks.settings.task_config import compile_config
from celery_redlock.tasks.settings.templates import fill, fill_any

APP = read_app({"redlock_nodes": ["redis://a"]})
NAMES = ["sku", "b", "task", "queue", "digest", "missing"]


class Text(str):
    """A text that shows itself differently."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        return "formatted"


class Tag(str, enum.Enum):
    HOT = "hot"


class Size(enum.IntEnum):
    BIG = 3


VALUES = (
    st.text(max_size=4) | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False)
    | st.lists(st.integers() | st.text(max_size=2), max_size=2) | st.binary(max_size=2)
    | st.sampled_from([Text("x"), Tag.HOT, Size.BIG, object(), dt.date(2026, 1, 2), {"k": {1}}])
)  # fmt: skip
LITERALS = st.text("ab:{}é", max_size=4).map(
    lambda text: text.replace("{", "{{").replace("}", "}}")
)
FIELDS = st.builds(
    lambda name, form: "{" + name + form + "}",
    st.sampled_from([*NAMES, "sku[0]", "sku[k]", ""]),
    st.sampled_from(["", "", "", "!r", "!s", ":", ":>5", ":05d"]),
)
TEMPLATES = st.lists(LITERALS | FIELDS, max_size=5).map("".join)


def outcome(make: Callable[..., object], *args: Any) -> object:
    """Return what a function returns, or the kind and the text of its error."""
    try:
        return make(*args)
    except (LookupError, TypeError, ValueError, SettingsError) as error:
        return type(error), str(error)


@given(
    TEMPLATES,
    st.dictionaries(st.sampled_from(NAMES[:-1]), VALUES),
    st.sampled_from(["shop.take", Tag.HOT, Text("t")]),
)
@example("stock:{sku}", {"sku": "7"}, "shop.take")
@example("stock:{sku}", {"sku": None}, "shop.take")
@example("{sku}", {"sku": [{2, 1}]}, "shop.take")
@example("{task}:{queue}:{digest}", {"sku": 1}, "shop.take")
@example("{task}", {}, Tag.HOT)
@example("{sku}{missing}", {"sku": None}, "shop.take")
@example("{b}{sku}", {"sku": True, "b": 1}, "shop.take")
def test_a_filled_template_is_that_of_the_general_formatter(
    template: str, arguments: dict[str, Any], task: str
) -> None:
    call = (template, arguments, task, "celery")
    assert outcome(fill, *call) == outcome(fill_any, *call)


def plain(a: Any, b: Any = 2) -> None: ...
def with_keywords(a: Any, b: Any = 2, *, c: Any, d: Any = 4) -> None: ...
def only_keywords(*, a: Any = 1, b: Any) -> None: ...
def by_position(a: Any, /, b: Any = 2) -> None: ...
def of_any(a: Any, *rest: Any, b: Any = 2, **options: Any) -> None: ...
def without() -> None: ...


@pytest.mark.parametrize(
    "body", [plain, with_keywords, only_keywords, by_position, of_any, without]
)
@given(
    args=st.lists(st.integers(0, 3), max_size=4),
    kwargs=st.dictionaries(st.sampled_from("abcde"), st.integers(4, 7)),
)
def test_arguments_are_bound_as_python_binds_them(
    body: Callable[..., None], args: list[int], kwargs: dict[str, int]
) -> None:
    signature = inspect.signature(body)
    made = compile_config(APP, "shop.take", {}, signature)
    call = TaskCall(None, args, kwargs, "celery")
    expected = by_python(signature, args, kwargs)
    if isinstance(expected, TypeError):
        with pytest.raises(ArgumentsError, match=re.escape(str(expected))):
            made.resources(made.options_for("celery"), call)
    else:
        assert made.resources(made.options_for("celery"), call) == expected


def by_python(signature: inspect.Signature, args: list[int], kwargs: dict[str, int]) -> object:
    """Return the key of these arguments, bound as Python binds them."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        return error
    bound.apply_defaults()
    return (f"shop.take:{digest(bound.arguments, 'shop.take')}",)
