"""The delivery tags of messages that a worker's death moves, and the messages as they are moved."""

from __future__ import annotations

import json
from typing import Any

import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st
from kombu.utils.json import dumps, loads

from celery_redlock import LockedTask
from celery_redlock.tasks.delivery.header import HEADER
from celery_redlock.tasks.recovery.tags import (
    MAX_MOVES,
    MOVES,
    DeliveryTag,
    lease_of,
    may_be_moved,
    moved,
    new_lease,
)

LEASE = f"redlock-{'0123456789abcdef' * 2}"
# names of lists, which may have anything in them: `priority_steps` puts \x06\x16 before a number
names = st.text(min_size=1)
texts = st.one_of(st.text(), st.none(), st.integers(), st.binary())
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner)),
    max_leaves=8,
)
objects = st.dictionaries(st.text(), values, max_size=4)


@given(st.integers(0, 10**12), names)
def test_a_tag_tells_what_it_was_made_of(number: int, name: str) -> None:
    tag = DeliveryTag(new_lease(), number, name)
    assert DeliveryTag.of(str(tag)) == tag
    assert lease_of(str(tag)) == tag.lease


@given(st.integers(0, 99), st.integers(0, 99), names, names)
def test_no_two_deliveries_share_a_tag(one: int, other: int, name: str, second: str) -> None:
    tags = str(DeliveryTag(LEASE, one, name)), str(DeliveryTag(LEASE, other, second))
    assert (tags[0] == tags[1]) == ((one, name) == (other, second))


@given(texts)
def test_any_text_can_be_read(text: object) -> None:
    tag = DeliveryTag.of(text)
    assert tag is None or text == str(tag)


@pytest.mark.parametrize(
    "text",
    [
        None, "", 7, "a3b8f0f0-0000-4000-8000-000000000000", LEASE, f"{LEASE}:", f"{LEASE}:1",
        f"{LEASE}:1:", f"{LEASE}:x:shop", f"{LEASE}:-1:shop", f"{LEASE}:\u0661:shop",
        f"{LEASE}0:1:shop", f"{LEASE[:-1]}:1:shop", f"{LEASE.upper()}:1:shop", f"x{LEASE}:1:shop",
        f"{LEASE}\n:1:shop",
    ],
)  # fmt: skip
def test_what_is_not_ours_is_not_read(text: object) -> None:
    assert DeliveryTag.of(text) is None


def test_the_name_of_a_list_may_have_colons() -> None:
    assert DeliveryTag.of(f"{LEASE}:7:a:b:\x06\x163") == (LEASE, 7, "a:b:\x06\x163")


def test_a_name_of_a_worker_lease_can_be_matched_by_the_server() -> None:
    assert not set(new_lease()) & set("*?[]\\:")
    assert new_lease() != new_lease()


# which messages are tagged


def task_of(levels: dict[str, Any], options: dict[str, Any]) -> Any:
    """Return a locked task. levels: settings of its app. options: its own."""
    app = Celery("unit", broker="memory://", set_as_current=False, set_as_default=False)
    app.conf.update({"redlock_nodes": ["redis://127.0.0.1:1"], **levels})
    attributes = {f"lock_{name}": value for name, value in options.items()}

    @app.task(base=LockedTask, name="t", shared=False, acks_late=True, **attributes)
    def body(a: int) -> int:
        return a

    return app.tasks["t"]


def a_key(call: Any) -> str | None:
    """Stand for a key that is a function."""
    return None


OFF, RUN = {"key": False}, {"on_unreachable": "run"}


@pytest.mark.parametrize(
    ("levels", "options", "call", "is_tagged"),
    [
        pytest.param({}, {}, {}, True, id="built-in"),
        pytest.param({}, {"key": "{a}"}, {}, True, id="a key"),
        pytest.param({}, {"args": ["a"]}, {}, True, id="args"),
        pytest.param({}, {"limit": 3}, {}, True, id="a limit"),
        pytest.param({}, {"on_unreachable": "fail"}, {}, True, id="on_unreachable fails"),
        pytest.param({}, OFF, {}, False, id="no key at the task"),
        pytest.param({}, {"key": a_key}, {}, False, id="a callable key at the task"),
        pytest.param({}, RUN, {}, False, id="runs without at the task"),
        pytest.param({}, {}, OFF, False, id="no key at the call"),
        pytest.param({}, {}, RUN, False, id="runs without at the call"),
        pytest.param({}, OFF, {"key": "{a}"}, True, id="the call's key is nearer"),
        pytest.param({}, OFF, {"args": ["a"]}, True, id="the call's args are nearer"),
        pytest.param({}, RUN, {"on_unreachable": "defer"}, True, id="the call defers"),
        pytest.param({"redlock_queues": {"q": OFF}}, {}, {}, False, id="no key at the queue"),
        pytest.param({"redlock_queues": {"q": RUN}}, {}, {}, False, id="runs without at the queue"),
        pytest.param({"redlock_queues": {"q*": RUN}}, {}, {}, False, id="at a pattern of queues"),
        pytest.param({"redlock_queues": {"other": RUN}}, {}, {}, True, id="at another queue"),
        pytest.param({"redlock_queues": {"q": OFF}}, {"key": "{a}"}, {}, True, id="the task's"),
        pytest.param({"redlock_on_unreachable": "run"}, {}, {}, False, id="without at the app"),
        pytest.param({"redlock_key": False}, {}, {}, False, id="no key at the app"),
        pytest.param({"redlock_key": a_key}, {}, {}, False, id="a callable key at the app"),
        pytest.param({"redlock_key": a_key}, {"key": "{a}"}, {}, True, id="not the app's key"),
        pytest.param({}, {}, {"ttl": 9, "wait": "x"}, True, id="other options do not matter"),
        pytest.param({}, {}, {"key": 7}, False, id="a call that fails"),
        pytest.param({"redlock_call_options": ["ttl"]}, {}, OFF, True, id="no message may say it"),
    ],
)  # fmt: skip
def test_a_message_is_tagged_if_its_run_is_sure_to_hold_a_lock(
    levels: dict[str, Any], options: dict[str, Any], call: dict[str, Any], is_tagged: bool
) -> None:
    carried = {"task": "t", HEADER: {"options": call}} if call else {"task": "t"}
    assert may_be_moved(task_of(levels, options), carried, "q") == is_tagged


@pytest.mark.parametrize("header", [None, "x", 7, [], {}, {"options": None}, {"options": "key"}])
def test_a_header_of_a_stranger_says_nothing(header: Any) -> None:
    assert may_be_moved(task_of({}, {}), {HEADER: header}, "q")
    assert not may_be_moved(task_of({}, OFF), {HEADER: header}, "q")


def test_a_plain_task_is_not_tagged() -> None:
    app = Celery("unit", broker="memory://", set_as_current=False, set_as_default=False)

    @app.task(name="plain", shared=False)
    def plain() -> None: ...

    assert not may_be_moved(plain, {}, "celery")
    assert not may_be_moved(None, {}, "celery")


# a message as it is moved


def entry_of(raw: dict[str, Any]) -> str:
    return str(dumps([raw, "an exchange", "a key"]))


def message_of(**properties: Any) -> dict[str, Any]:
    """Return a message as kombu's Redis transport has it."""
    info = {"exchange": "", "routing_key": "shop"}
    return {
        "body": "W1tdLCB7fSwgbnVsbF0=",
        "content-encoding": "utf-8",
        "headers": {"task": "t", "id": "1"},
        "properties": {"delivery_tag": "tag", "delivery_info": info, "priority": 3, **properties},
    }


def moved_of(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a message after a move."""
    text = moved(entry_of(raw))
    assert text is not None
    made = json.loads(text)
    assert isinstance(made, dict)
    return made


def test_a_moved_message_is_a_redelivery_with_a_tag_of_its_own() -> None:
    raw = message_of()
    made = moved_of(raw)
    assert made["headers"] == {**raw["headers"], "redelivered": True}
    assert made["properties"]["delivery_info"]["redelivered"] is True
    tag = made["properties"]["delivery_tag"]
    assert tag != "tag"
    assert DeliveryTag.of(tag) is None
    assert moved_of(raw)["properties"]["delivery_tag"] != tag


@given(st.text(), objects, objects, objects)
def test_nothing_else_of_a_message_changes(
    body: str, headers: dict[str, Any], properties: dict[str, Any], more: dict[str, Any]
) -> None:
    info = {"exchange": "x", "routing_key": "k"}
    properties |= {"delivery_tag": "tag", "delivery_info": info, MOVES: 0}
    raw = {**more, "body": body, "headers": headers, "properties": properties}
    made = moved_of(raw)
    made["headers"].pop("redelivered")
    made["properties"]["delivery_info"].pop("redelivered")
    made["properties"] |= {"delivery_tag": "tag", MOVES: 0}
    before = loads(entry_of(raw))[0]  # as the broker brought it
    before["headers"].pop("redelivered", None)
    assert json.dumps(made) == json.dumps({**before, "headers": made["headers"]}, default=str)
    assert made["headers"] == before["headers"]


@pytest.mark.parametrize("empty", [{}, []])
def test_what_is_empty_stays_what_it_is(empty: object) -> None:
    raw = message_of()
    raw["headers"]["x"] = empty
    assert moved_of(raw)["headers"]["x"] == empty


def test_a_message_without_headers_gets_the_flag() -> None:
    raw = message_of()
    del raw["headers"], raw["properties"]["delivery_info"]
    made = moved_of(raw)
    assert made["headers"] == {"redelivered": True}
    assert made["properties"]["delivery_info"] == {"redelivered": True}


def test_a_message_counts_its_moves_and_is_moved_so_often_and_no_more() -> None:
    raw = message_of()
    for number in range(1, MAX_MOVES + 1):
        raw = moved_of(raw)
        assert raw["properties"][MOVES] == number
    assert moved(entry_of(raw)) is None


@pytest.mark.parametrize("counted", [None, "9", -1, 1.5, True, [], "x" * 9])
def test_a_count_of_a_stranger_begins_anew(counted: object) -> None:
    assert moved_of(message_of(**{MOVES: counted}))["properties"][MOVES] == 1


@pytest.mark.parametrize("entry", ["", "x", "[]", "{}", "7", "[7]", '[{"properties": 7}]', "[{}]"])
def test_what_kombu_has_not_noted_is_refused_by_an_expected_error(entry: str) -> None:
    with pytest.raises((ValueError, LookupError, TypeError, AttributeError)):
        moved(entry)
