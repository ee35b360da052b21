from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from celery_redlock.lock.model.handoff import Named
from celery_redlock.lock.model.keys import (
    lock_key,
    name_of_all,
    parts_of,
    resource_of,
    resources_of,
    value_of,
    waiting_key,
)
from celery_redlock.lock.platform.clock import new_token
from celery_redlock.lock.transport.command import encoded, text_of

# any text at all: with lone surrogates, as of a file name that is no UTF-8; and what looks alike
any_text = st.text(
    st.one_of(st.sampled_from("x#01\n\0\ud800\udcff{}"), st.characters()), min_size=1
)
claims = st.tuples(any_text, st.one_of(st.just(0), st.integers(0, 99)))

resources = st.text(alphabet="ab#0123456789", min_size=1, max_size=8)


def test_the_prefix_is_a_hash_tag() -> None:
    assert lock_key("redlock", "stock:7") == "{redlock}:lock:stock:7"


@given(resources, resources)
def test_two_resources_never_share_a_key(one: str, other: str) -> None:
    assert (lock_key("p", one) == lock_key("p", other)) == (one == other)


@given(resources, resources, st.integers(1, 99))
def test_no_resource_is_another_ones_permit(one: str, other: str, permit: int) -> None:
    assert lock_key("p", one) != f"{lock_key('p', other)}#{permit}"


@given(claims, claims)
@example(("x#1\n", 0), ("x#1\n#", 0))
@example(("x", 1), ("x#1", 0))
def test_two_claims_never_share_a_key_whatever_their_text(
    one: tuple[str, int], other: tuple[str, int]
) -> None:
    keys = [encoded(lock_key("p", *claim)) for claim in (one, other)]
    assert (keys[0] == keys[1]) == (one == other)


@given(any_text)
@example("\ud83d\ude00")  # a pair of surrogates is not the sign that it would mean in UTF-16
def test_a_name_comes_back_out_of_its_keys(name: str) -> None:
    waiting = text_of(encoded(waiting_key("p", name)))
    assert Named.parse(f"0 r {waiting}", "p") == Named(0, "r", name)
    assert resource_of("p", text_of(encoded(lock_key("p", name, 3)))) == (name, 3)


@given(st.binary())
def test_what_a_stranger_wrote_is_some_text(name: bytes) -> None:
    assert isinstance(text_of(name), str)


@pytest.mark.parametrize("digits", ["0", "01", "1" * 5000])
def test_a_strangers_key_that_is_no_permit_of_ours_is_a_resource(digits: str) -> None:
    name = f"x#{digits}"
    assert resource_of("p", f"{{p}}:lock:{name}") == (name, 0)


def test_a_token_is_128_random_bits() -> None:
    tokens = {new_token() for _ in range(1000)}
    assert len(tokens) == 1000
    assert all(len(bytes.fromhex(token)) == 16 for token in tokens)


@given(st.one_of(resources, st.text(min_size=1)), st.integers(0, 99))
def test_a_key_tells_its_resource_and_permit(resource: str, permit: int) -> None:
    assert resource_of("p", lock_key("p", resource, permit)) == (resource, permit)


@given(st.text(), st.integers(1, 1000))
def test_who_since_when_and_of_how_many_come_back_out_of_the_value(label: str, limit: int) -> None:
    value = value_of(new_token(), 1_700_000_000_250, label, 30.0, limit)
    assert parts_of(value) == (label, 1_700_000_000.25, 30.0, limit)


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ("t:1700000000250:x", ("x", 1_700_000_000.25, None, 1)),
        ("t:1700000000250+30000:x", ("x", 1_700_000_000.25, 30.0, 1)),
    ],
)
def test_an_older_value_tells_what_is_in_it(value: str, parts: tuple[object, ...]) -> None:
    assert parts_of(value) == parts


@pytest.mark.parametrize(
    "value",
    ["something else", "a:b:c", "", "one:two", f"t:{'9' * 400}:x", f"t:{'9' * 5000}:x", "t:1+2/:x"],
)
def test_a_strangers_value_is_its_own_label_and_tells_no_time(value: str) -> None:
    assert parts_of(value) == (value, None, None, 1)


several = st.lists(st.text(alphabet="a:,'\" ", min_size=1, max_size=6), min_size=1, max_size=3)


@given(several, several)
@example(["account:1, account:2", "account:3"], ["account:1", "account:2, account:3"])
@example(["'a', 'b'"], ["a", "b"])
def test_two_lists_of_resources_have_two_names(one: list[str], other: list[str]) -> None:
    assert (name_of_all(one) == name_of_all(other)) == (one == other)
    assert resources_of(name_of_all(one)) == tuple(one)


@pytest.mark.parametrize("name", ["'a", "'a', 1", "'a' 'b'", "'a',('b')", "'" + "(" * 900])
def test_the_name_of_another_program_is_one_resource(name: str) -> None:
    assert resources_of(name) == (name,)


def test_one_resource_alone_is_its_own_name() -> None:
    assert name_of_all(("stock:42",)) == "stock:42"
