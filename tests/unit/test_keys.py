from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from celery_redlock.lock.keys import label_of, lock_key, new_token, value_of

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


@given(st.text())
def test_the_label_comes_back_out_of_the_value(label: str) -> None:
    assert label_of(value_of(new_token(), label)) == label


def test_a_strangers_value_is_its_own_label() -> None:
    assert label_of("something else") == "something else"
