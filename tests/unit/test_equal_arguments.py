"""Equal arguments give one key: in every process, before and after every serializer."""

from __future__ import annotations

import datetime as dt
import enum
import os
import pickle
import re
import subprocess
import sys
import uuid
from collections import OrderedDict, UserDict
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st
from kombu.exceptions import DecodeError, EncodeError
from kombu.serialization import dumps, loads

from celery_redlock import LockedTask, SettingsError
from celery_redlock.tasks.arguments import parameters_of
from celery_redlock.tasks.settings.call import TaskCall
from celery_redlock.tasks.settings.levels import read_app
from celery_redlock.tasks.settings.task_config import TaskLockConfig, compile_config

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "keys.md"
SERIALIZERS = ["json", "pickle", "yaml", "msgpack"]
TOKYO = ZoneInfo("Asia/Tokyo")
# the default key, and templates
KEYS: list[Any] = [None, "x:{a}", "{task}:{digest}"]


def f(a: Any, *rest: Any, **options: Any) -> None:
    """Stand for a task's body."""


def plan(
    key: Any = None, body: Any = f, args: tuple[str, ...] | None = None, **conf: Any
) -> TaskLockConfig:
    app = read_app({"redlock_nodes": ["redis://a"], **conf})
    attributes = {"lock_key": key, "lock_args": args}
    return compile_config(app, "shop.f", attributes, parameters_of(body))


PLANS = [*(plan(key) for key in KEYS), plan(args=("a",))]


def keys(value: Any) -> list[str]:
    return [
        made.resources(made.options_for("q"), TaskCall(None, (value,), {}, "q"))[0]
        for made in PLANS
    ]


def filled(template: str, *args: Any, **kwargs: Any) -> str:
    made = plan(template)
    return made.resources(made.options_for("q"), TaskCall(None, args, kwargs, "q"))[0]


def over_the_wire(value: Any, serializer: str) -> Any:
    """Return an argument as a run gets it."""
    content_type, encoding, body = dumps(((value,), {}, {}), serializer=serializer)
    return loads(body, content_type, encoding, accept={content_type})[0][0]


class Colour(enum.Enum):
    RED = "red"


class Tag(str, enum.Enum):  # noqa: UP042 - its own text differs
    HOT = "hot"


class Size(enum.IntEnum):
    BIG = 3


class Spoken(str):
    """A text that shows itself differently."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"spoken {super().__str__()}"


class Moment(dt.datetime):
    """One that shows itself differently, as pendulum's does."""

    def __str__(self) -> str:
        return f"at {self.isoformat()}"


class Reduced:
    """One that says what JSON makes of it."""

    def __json__(self) -> Any:
        return {"b": 2, "a": (1,)}


class Bare:
    """One of which Python shows the address."""


class Named(Bare):
    """One with a text of its own."""

    def __str__(self) -> str:
        return "spoken"


SETS = {
    "a set": {"red", "green", "blue", "x", "y", "z"},
    "a set in lists and dicts": {"k": [{"red", "green", "blue"}, {"x", "y"}]},
    "a set of sets": {frozenset({"a", "b", "c"}), frozenset({"d", "e"}), frozenset()},
    "a set of mixed kinds": {"1", 2, None, b"3", (4, "5"), 6.0, dt.date(2026, 1, 2)},
    "a dict of mixed keys": {"b": 1, 2: {"y", "x"}, None: 3, (1, 2): 4, 2.5: 5, b"z": 6},
    "sets of enums": {Colour.RED, Tag.HOT, "x", "y"},
}
PRINT = "import pickle, sys; from tests.unit.test_equal_arguments import keys\n" \
        "for value in pickle.load(sys.stdin.buffer): print(*keys(value), sep='\\n')"  # fmt: skip


def test_sets_give_one_key_in_processes_of_every_hash_seed() -> None:
    """Of a seed of its own, and of this process's, which is a new one at each run."""
    made = subprocess.run(
        [sys.executable, "-c", PRINT], env={**os.environ, "PYTHONHASHSEED": "1"},
        input=pickle.dumps(list(SETS.values())), stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    expected = [key for value in SETS.values() for key in keys(value)]
    assert made.stdout.decode().splitlines() == expected


WIRE: dict[str, Any] = {
    **SETS,
    "a dict": {"b": 1, "a": {"d": (1, 2), "c": [None, True]}},
    "an ordered one": OrderedDict(b=1, a=2),
    "a dict of numbers": {2: "two", 10: "ten", 1.5: "x", float("inf"): "y"},
    "a tuple": (1, (2, "x")),
    "a dict of such as JSON has": {7: "x", None: 2, True: 3, 1.5: (4,)},
    "an enum": Colour.RED,
    "a number that is an enum": Size.BIG,
    "plain ones": [1.5, "grün", None],
    "a text of another class": Spoken("x"),
    "enums": [Tag.HOT, {Tag.HOT: Tag.HOT}],
    "bytes": b"\xff\x00",
    "a byte array": bytearray(b"x"),
    "a moment": dt.datetime(2026, 7, 1, 12, 30, tzinfo=ZoneInfo("Europe/Berlin")),
    "a moment without a zone": dt.datetime(2026, 7, 1, 12, 30),
    "a moment of another class": Moment(2026, 7, 1, tzinfo=dt.UTC),
    "moments": [dt.date(2026, 7, 1), dt.time(1, 2), dt.time(1, 2, tzinfo=TOKYO)],
    "an hour": dt.time(1, 2, tzinfo=TOKYO),
    "numbers": [uuid.UUID(int=7), Decimal("1.20"), 1e20, -3],
    "a number": Decimal("1.20"),
    "what JSON reduces": Reduced(),
    "several of it": [Reduced(), Reduced()],
}


@pytest.mark.parametrize("serializer", SERIALIZERS)
def test_what_a_run_gets_makes_the_key_that_its_sender_made(serializer: str) -> None:
    if serializer == "msgpack":
        pytest.importorskip("msgpack")
    carried = []
    for name, value in WIRE.items():
        try:
            got = over_the_wire(value, serializer)
        except (EncodeError, DecodeError):
            continue  # this serializer does not take such a value
        carried.append(name)
        assert keys(got) == keys(value), name
    assert {"a dict", "a tuple"} <= set(carried)


@pytest.mark.parametrize("serializer", ["json", "pickle", "yaml"])
@pytest.mark.parametrize(
    ("template", "args", "kwargs"),
    [
        ("{a[7]}", ({7: "seven"},), {}), ("{a[x][0]}", ({"x": ["y"]},), {}),
        ("{rest[0]}", (1, (2, {"b": 1, "a": 2})), {}), ("{options[sku]:>9}", (1,), {"sku": "s"}),
        ("{options[at]:%H %Z}", (1,), {"at": dt.datetime(2026, 7, 1, tzinfo=TOKYO)}),
        ("{a:>30}", ({"grün": {"ü"}},), {}),
    ],
)  # fmt: skip
def test_items_and_formats_are_of_the_value_as_a_run_gets_it(
    template: str, args: Any, kwargs: Any, serializer: str
) -> None:
    try:
        got = over_the_wire((args, kwargs), serializer)
    except EncodeError:
        assert serializer == "json"  # which takes no sets
        return
    assert filled(template, *got[0], **got[1]) == filled(template, *args, **kwargs)


leaves = (
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.floats(allow_nan=False)
    | st.binary(max_size=3) | st.decimals(allow_nan=False) | st.uuids() | st.datetimes()
)  # fmt: skip
hashable = st.recursive(
    leaves, lambda inner: st.frozensets(inner) | st.tuples(inner, inner), max_leaves=4
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.dictionaries(hashable, inner) | st.sets(hashable),
    max_leaves=6,
)


def reordered(value: Any) -> Any:
    """Return an equal value, of other classes where JSON makes them one, in another order."""
    if isinstance(value, Mapping):
        return OrderedDict((reordered(k), reordered(value[k])) for k in reversed(list(value)))
    if isinstance(value, (set, frozenset)):
        return frozenset(reordered(item) for item in reversed(list(value)))
    if isinstance(value, (list, tuple)):
        return tuple(map(reordered, value))
    return value


@given(values)
def test_equal_arguments_make_equal_keys(value: Any) -> None:
    if value is not None and len(repr(value)) < 200:  # so that no key is too long
        assert keys(reordered(value)) == keys(value)


class TestATemplate:
    def test_shows_mappings_sorted_by_key_and_sets_sorted(self) -> None:
        assert filled("{a}", {"b": [1, "x"], "a": {2}}) == "{'a': set(2), 'b': [1, 'x']}"
        assert filled("{a}", {"c", "a", "b"}) == filled("{a}", frozenset("bac"))
        assert filled("{a}", UserDict(b=1, a=2)) == filled("{a}", {"a": 2, "b": 1})

    def test_keeps_apart_what_json_keeps_apart(self) -> None:
        assert len({filled("{a}", [value]) for value in (1, "1", True, 1.0, None)}) == 5

    def test_takes_the_text_that_a_class_has_of_its_own(self) -> None:
        assert filled("{a}", Named()) == "spoken"

    @pytest.mark.parametrize("value", [Bare(), [Bare()], {"k": Bare()}, f, Bare, {Named()}])
    def test_refuses_a_value_without_a_stable_text(self, value: Any) -> None:
        with pytest.raises(SettingsError, match="is not a plain value"):
            filled("x:{a}", value)


BARE = Bare()


class Mapped:
    """An object of an ORM: its id is an attribute, and only `repr` shows it."""

    id = 7

    def __repr__(self) -> str:
        return "<Mapped 7>"


@pytest.mark.parametrize("made", PLANS)
def test_an_object_that_no_template_reads_is_refused_with_a_key_that_reads_it(
    made: TaskLockConfig,
) -> None:
    call = TaskCall(None, (Mapped(),), {}, "q")
    with pytest.raises(SettingsError, match="Use a callable key") as caught:
        made.resources(made.options_for("q"), call)
    (line,) = re.findall(r'lambda .+?args\[0\]\.id\}"', str(caught.value))
    assert f'"key": {line}' in PAGE.read_text(encoding="utf-8")
    by_callable = plan(eval(line))
    assert by_callable.resources(by_callable.options_for("q"), call) == ("event:7",)


class TestADefaultWithoutAStableForm:
    @staticmethod
    def body(a: Any, b: Any = BARE, c: Any = None, d: Any = {"k": BARE, "n": 1}) -> None:  # noqa: B006
        """Stand for a task's body."""

    @pytest.mark.parametrize(
        "key", [None, "x:{b}", "x:{b:>9}", "{digest}", ["x:{a}", "y:{d}"], "{d[k]}"]
    )
    def test_is_an_error_of_the_declaration_where_it_enters_the_key(self, key: Any) -> None:
        with pytest.raises(SettingsError, match=r"task 'shop.f': default of '[bd].*no stable form"):
            plan(key, self.body)

    @pytest.mark.parametrize(
        "key",
        ["x", "b", "{a}", ["a", "b"], "{c}", "{c[0]}", "{d[n]}", "{d[x]}", False, lambda *_: "x"],
    )
    def test_is_none_where_it_does_not(self, key: Any) -> None:
        assert plan(key, self.body)

    def test_counts_only_where_args_names_it(self) -> None:
        with pytest.raises(SettingsError, match="default of 'b'"):
            plan(None, self.body, args=("a", "b"))
        assert plan(None, self.body, args=("a", "c"))
        assert plan(None, self.body, args=())

    def test_is_told_when_the_app_finalizes(self) -> None:
        app = Celery("t", set_as_default=False)
        app.conf.redlock_nodes = ["redis://a"]

        @app.task(base=LockedTask, shared=False, lock_key="x:{b}")
        def g(a: int, b: Any = BARE) -> None: ...

        with pytest.raises(SettingsError, match="default of 'b'"):
            app.finalize()

    def test_is_found_for_the_key_of_the_app_and_of_a_call(self) -> None:
        with pytest.raises(SettingsError, match="default of 'b'"):
            compile_config(
                read_app({"redlock_nodes": ["redis://a"], "redlock_key": "x:{b}"}),
                "shop.f", {}, parameters_of(self.body),
            )  # fmt: skip
        with pytest.raises(SettingsError, match="default of 'b'"):
            plan(False, self.body).check_call({"key": None})
