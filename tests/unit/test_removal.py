from __future__ import annotations

from celery_redlock.lock.model.keys import (
    broken_key,
    completion_key,
    fence_key,
    format_key,
    guard_keys,
    lock_key,
    order_key,
    rate_keys,
    settings_key,
    tenure_key,
    unique_key,
    waiting_key,
)
from celery_redlock.lock.removal import EXPIRES, GOES, STAYS, key_groups

PREFIX = "shop"
RUN, QUIET = guard_keys(PREFIX)
LASTING = [RUN, tenure_key(PREFIX), settings_key(PREFIX), format_key(PREFIX)]
LOCK = lock_key(PREFIX, "stock:7", 2)
EXPIRING = {
    LOCK: "locks",
    broken_key(LOCK, "value"): "broken locks",
    rate_keys(PREFIX, "r")[0]: "starts of rates",
    waiting_key(PREFIX, "r"): "waiting processes",
    completion_key(PREFIX, "run"): "completion markers",
    unique_key(PREFIX, "r"): "claims",
    order_key(PREFIX, "r"): "order of calls",
    QUIET: "restart guard",
    tenure_key(PREFIX, "a:6379"): "restart guard",
}


def fates(*keys: tuple[str, int]) -> list[tuple[str, int, str, str | None]]:
    groups = key_groups("a:6379", PREFIX, keys, 0.0)
    assert {group.place for group in groups} <= {"a:6379"}
    return [(group.what, group.count, group.fate, group.until) for group in groups]


def test_only_the_names_that_clients_write_anew_go() -> None:
    assert fates(*((name, -1) for name in LASTING)) == [
        ("restart guard", 2, GOES, None),
        ("shared settings", 2, GOES, None),
    ]


def test_a_fencing_counter_stays() -> None:
    assert fates((fence_key(PREFIX), -1)) == [("fencing counter", 1, STAYS, None)]


def test_what_expires_stays_until_then_whatever_its_name() -> None:
    for name, what in EXPIRING.items():
        assert fates((name, 1500)) == [(what, 1, EXPIRES, "1970-01-01T00:00:02+00:00")]
    for name in LASTING:
        assert [fate for _, _, fate, _ in fates((name, 0))] == [EXPIRES]


def test_the_last_one_of_a_kind_says_when_all_have_expired() -> None:
    claims = [(unique_key(PREFIX, str(number)), 1000 * number) for number in (3, 9, 6)]
    assert fates(*claims) == [("claims", 3, EXPIRES, "1970-01-01T00:00:09+00:00")]


def test_what_another_program_wrote_without_an_expiry_stays() -> None:
    assert fates((LOCK, -1), (f"{{{PREFIX}}}:runs", -1), (f"{{{PREFIX}}}:run:x", -1)) == [
        ("keys of another program", 1, STAYS, None),
        ("locks", 1, STAYS, None),
        ("restart guard", 1, STAYS, None),
    ]


def test_worker_leases_on_a_node_are_the_brokers() -> None:
    assert fates((f"{{{PREFIX}}}:worker_leases_dead:unacked", -1)) == []
