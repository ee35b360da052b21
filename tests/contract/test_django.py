"""Sends at the end of a transaction of Django's: their claim is made then, and not before."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests import fork_server
from tests.conftest import Nodes, trust_nodes
from tests.integration.conftest import ROOT

# of a send that is not deduplicated, only the message is left
FOUND = {
    "rolled_back": [0, 0],
    "committed": [[0, 0], [1, 1]],
    "sent_twice": [1, 1],
    "sent_with_options": [0, 1],
    "without_transaction": [1, 1],
    "applied": ["SUCCESS", [1]],
}


@pytest.fixture(scope="module")
def found(standing_nodes: Nodes) -> dict[str, Any]:
    trust_nodes(standing_nodes)
    urls = [node.url for node in standing_nodes]
    command = [sys.executable, "-m", "tests.contract.on_commit", *urls]
    ended = fork_server.run(command, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    return dict(json.loads(ended.stdout))


@pytest.mark.parametrize("scenario", FOUND)
def test_claims_and_messages_of_a_send(found: dict[str, Any], scenario: str) -> None:
    assert found[scenario] == FOUND[scenario]


def test_a_wrong_option_of_a_call_is_refused_before_the_commit(found: dict[str, Any]) -> None:
    """After it, the row is there, no message is, and Django drops the later hooks."""
    texts, left = found["wrong_options"]
    wrong = ["did you mean 'ttl'", "lock_ttl=3", "cannot be combined with debounce", "countdown=3"]
    for part, text in zip([*wrong, "expires=1"], texts, strict=True):
        assert part in text
    assert left == [0, 0]


def test_what_is_missing_is_named() -> None:
    code = "import sys; sys.modules['django'] = None"
    code = f"{code}; from celery_redlock.django import LockedDjangoTask"
    ended = fork_server.run([sys.executable, "-c", code], cwd=ROOT)
    assert "celery_redlock.django needs Django: pip" in ended.stderr
