"""Greenlets acknowledge in turn: as many at once as kombu's channel has connections to spare."""

from __future__ import annotations

from typing import Any

import pytest

from celery_redlock.tasks.delivery.acknowledge import SPARE_CONNECTIONS
from celery_redlock.testing import EmbeddedNode
from tests.contract import stories

pytestmark = stories.TOGETHER

SENT, TURNS = 12, 3
# `inside` names the greenlets that acknowledge: none ends before `go` is set
RECEIVED = """
from gevent.event import Event
from gevent.lock import Semaphore
from kombu import Connection
from celery_redlock.tasks.delivery.acknowledge import in_turn

def received(url, count):
    queue = Connection(url, transport_options=OPTIONS).SimpleQueue("work")
    for number in range(count):
        queue.put(number)
    return [queue.get() for _ in range(count)]

def acknowledge(answer, name):
    inside.append(name)
    try:
        go.wait()
        answer()
    finally:
        inside.remove(name)

inside, go, turns = [], Event(), in_turn(acknowledge, Semaphore)
messages = received(URL, SENT)
greenlets = [spawn(turns, one.ack, number) for number, one in enumerate(messages)]
sleep(0)
first = inside[:]
"""
END = """
go.set()
join(greenlets)
client = messages[0].channel.client
told = {"first": first, "then": then, "left": client.hlen("unacked")}
"""


@pytest.fixture
def url(broker: EmbeddedNode) -> str:
    """Give the address of an empty broker."""
    broker.client().flushall()
    return broker.url


def tell(url: str, story: str, connections: int = TURNS + SPARE_CONNECTIONS) -> Any:
    options = {"max_connections": connections}
    names = f"URL, SENT, OPTIONS = {url!r}, {SENT}, {options}\n"
    return stories.tell(stories.GEVENT, names + RECEIVED + story + END)


@pytest.mark.parametrize(
    ("connections", "turns"), [(TURNS + SPARE_CONNECTIONS, TURNS), (SPARE_CONNECTIONS, 1)]
)
def test_no_more_acknowledge_at_once_and_each_has_its_turn(
    url: str, connections: int, turns: int
) -> None:
    told = tell(url, "then = inside[:]", connections)
    assert told == {"first": [*range(turns)], "then": [*range(turns)], "left": 0}


def test_one_that_is_killed_takes_no_turn_along(url: str) -> None:
    """Neither one that acknowledges, nor one that waits until it can."""
    story = """
for number in (1, 5):
    greenlets[number].kill()
for _ in range(100):  # the next one is woken in a later pass of the hub
    sleep(0)
then = inside[:]
"""
    assert tell(url, story) == {"first": [0, 1, 2], "then": [0, 2, 3], "left": 2}


def test_none_waits_for_those_of_another_channel(url: str) -> None:
    """As after a lost connection, whose acknowledgements may hang; nor with another transport."""
    story = """
for name, of in {"redis": URL, "memory": "memory://"}.items():
    greenlets += [spawn(turns, one.ack, name) for one in received(of, 4)]
sleep(0)
then = inside[TURNS:]
"""
    told = tell(url, f"TURNS = {TURNS}\n{story}")
    assert told == {"first": [0, 1, 2], "then": ["redis"] * 3 + ["memory"] * 4, "left": 0}
