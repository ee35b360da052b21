"""The rights on a broker that the page of security names: recovery uses each, and no others."""

from __future__ import annotations

import re

import pytest
from kombu.utils.json import dumps
from redis.exceptions import ResponseError

from celery_redlock.tasks.recovery.ledger import Ledger
from celery_redlock.tasks.recovery.tags import DeliveryTag, new_lease
from celery_redlock.testing import EmbeddedNode
from tests.contract.worker_leases import declare_dead, open_ledger
from tests.pages import ROOT

PAGE = (ROOT / "docs" / "operations" / "security.md").read_text(encoding="utf-8")
[WORDS] = re.findall(r"^ACL SETUSER broker (.+)$", PAGE, re.MULTILINE)
RIGHTS = WORDS.split()
OF_KOMBU = ("~unacked*", "~celery*", "+ping", "+multi", "+exec", "+@connection")
MESSAGE = [{"headers": {"task": "take"}, "properties": {"delivery_tag": "x"}, "body": ""}, "", ""]


def ledger_of(broker: EmbeddedNode, rights: list[str]) -> Ledger:
    """Return the worker leases of a broker whose user has these rights beside those of kombu."""
    broker.client().flushall()
    user = ("reset", "on", ">secret", *OF_KOMBU, *rights)
    broker.client().execute_command("ACL", "SETUSER", "broker", *user)
    broker.client().execute_command("ACL", "LOG", "RESET")
    return open_ledger(f"redis://broker:secret@127.0.0.1:{broker.port}/0")


def recover(ledger: Ledger, broker: EmbeddedNode) -> str:
    """Do once all that workers do on the broker; return why a message was not moved, or ""."""
    own, dead = new_lease(), new_lease()
    ledger.beat(own, joins_as="celery@web2")
    broker.client().hset("unacked", str(DeliveryTag(dead, 0, "celery")), dumps(MESSAGE))
    declare_dead(ledger, dead, "celery@web1", claims=False)
    assert ledger.beat(own, claims=True).claimed == dead
    assert ledger.name_of(dead) == "celery@web1"
    done = ledger.move_all(dead)
    assert done.messages == 1 or done.refusal
    late = str(DeliveryTag(dead, 1, "celery"))
    broker.client().hset("unacked", late, dumps(MESSAGE))
    broker.client().zadd("unacked_index", {late: 1})
    ledger.recall()
    return done.refusal


def test_the_rights_of_the_page_are_enough_to_recover_messages(broker: EmbeddedNode) -> None:
    assert recover(ledger_of(broker, RIGHTS), broker) == ""
    assert broker.client().llen("celery") == 1
    assert broker.client().execute_command("ACL", "LOG") == []  # also of what a script was denied


@pytest.mark.parametrize("right", RIGHTS)
def test_recovery_uses_each_right_of_the_page(broker: EmbeddedNode, right: str) -> None:
    ledger = ledger_of(broker, [one for one in RIGHTS if one != right])
    try:
        refused = recover(ledger, broker)
    except ResponseError as error:
        refused = str(error)
    assert re.search("NOPERM|permission", refused), refused


# kombu needs them as well, so it is without them that nothing works
TRIED = [one for one in RIGHTS if one not in ("+hset", "+hget")]


def test_no_right_is_missed_where_all_are_there(broker: EmbeddedNode) -> None:
    ledger = ledger_of(broker, RIGHTS)
    before = broker.client().keys()
    assert ledger.missing_rights() == []
    assert broker.client().keys() == before
    assert broker.client().execute_command("ACL", "LOG") == []


@pytest.mark.parametrize("right", TRIED)
def test_each_right_that_is_missing_is_named(broker: EmbeddedNode, right: str) -> None:
    ledger = ledger_of(broker, [one for one in RIGHTS if one != right])
    assert ledger.missing_rights() == ["~{redlock}:*" if right.startswith("~") else right]
    assert broker.client().keys() == []


def test_a_broker_without_memory_lacks_no_right(broker: EmbeddedNode) -> None:
    ledger = ledger_of(broker, RIGHTS)
    broker.client().config_set("maxmemory", 1)
    try:
        assert ledger.missing_rights() == []
    finally:
        broker.client().config_set("maxmemory", 0)
