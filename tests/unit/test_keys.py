from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from celery_redlock.lock.keys import (
    label_of,
    lock_key,
    name_of_all,
    new_token,
    resource_of,
    since_of,
    value_of,
)

resources = st.text(alphabet="ab#0123456789", min_size=1, max_size=8)


def test_the_prefix_is_a_hash_tag() -> None:
    assert lock_key("redlock", "stock:7") == "{redlock}:lock:stock:7"


@given(resources, resources)
def test_two_resources_never_share_a_key(one: str, other: str) -> None:
    assert (lock_key("p", one) == lock_key("p", other)) == (one == other)


@given(resources, resources, st.integers(1, 99))
def test_no_resource_is_another_ones_permit(one: str, other: str, permit: int) -> None:
    assert lock_key("p", one) != f"{lock_key('p', other)}#{permit}"


def test_a_token_is_128_random_bits() -> None:
    tokens = {new_token() for _ in range(1000)}
    assert len(tokens) == 1000
    assert all(len(bytes.fromhex(token)) == 16 for token in tokens)


@given(st.one_of(resources, st.text(min_size=1)), st.integers(0, 99))
def test_a_key_tells_its_resource_and_permit(resource: str, permit: int) -> None:
    assert resource_of("p", lock_key("p", resource, permit)) == (resource, permit)


@given(st.text())
def test_who_and_since_when_come_back_out_of_the_value(label: str) -> None:
    value = value_of(new_token(), 1_700_000_000_250, label)
    assert (label_of(value), since_of(value)) == (label, 1_700_000_000.25)


@pytest.mark.parametrize("value", ["something else", "a:b:c", "", "one:two"])
def test_a_strangers_value_is_its_own_label_and_tells_no_time(value: str) -> None:
    assert (label_of(value), since_of(value)) == (value, None)


several = st.lists(st.text(alphabet="a:,'\" ", min_size=1, max_size=6), min_size=1, max_size=3)


@given(several, several)
@example(["account:1, account:2", "account:3"], ["account:1", "account:2, account:3"])
@example(["'a', 'b'"], ["a", "b"])
def test_two_lists_of_resources_have_two_names(one: list[str], other: list[str]) -> None:
    assert (name_of_all(one) == name_of_all(other)) == (one == other)


def test_one_resource_alone_is_its_own_name() -> None:
    assert name_of_all(("stock:42",)) == "stock:42"
