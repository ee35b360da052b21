"""Sends at the end of a transaction of Django's: their claim is made then, and not before."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

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
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
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


@pytest.mark.parametrize("missing", ["django", "celery.contrib.django"])
def test_what_is_missing_is_named(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import celery_redlock.django"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "celery_redlock.django needs Django, and Celery 5.4" in ended.stderr
