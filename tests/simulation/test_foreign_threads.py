"""The simulation leaves threads alone that are not its own."""

from __future__ import annotations

import threading

from celery_redlock import Redlock
from celery_redlock.lock.inspection import ask_nodes
from celery_redlock.testing import EmbeddedNode
from tests.conftest import eventually, settle
from tests.simulation.clients import simulated_system


def test_a_real_redlock_that_was_left_open_connects_as_ever(nodes: list[EmbeddedNode]) -> None:
    with Redlock([node.url for node in nodes], node_timeout=2.0) as redlock:
        settle(redlock)
        for node in nodes:  # the next connect is made in a thread
            node.client().client_kill_filter(_type="normal", skipme=True)
        answers = []

        def ask() -> None:
            answers.append(eventually(lambda: ask_nodes(redlock).answering == len(nodes)))

        with simulated_system():
            foreign = threading.Thread(target=ask)
            foreign.start()
            foreign.join()
        assert answers == [True]
