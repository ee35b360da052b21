"""The servers that tests and the example start."""

from __future__ import annotations

import random

import pytest

from celery_redlock.testing import EmbeddedNode


def test_the_port_of_a_killed_node_is_given_to_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedNode() as node:
        node.kill()
        draw = random.randrange
        drawn = [node.port]
        monkeypatch.setattr(
            random, "randrange", lambda *ends: drawn.pop() if drawn else draw(*ends)
        )
        with EmbeddedNode() as other:
            assert not drawn
            assert other.port != node.port
        assert node.start().client().ping()
