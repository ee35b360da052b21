from __future__ import annotations

import pytest

from celery_redlock.lock.server.handshake import is_in_cluster


@pytest.mark.parametrize("name", ["redis_mode", "server_mode", "redict_mode"])
def test_a_cluster_member_is_known_under_each_servers_own_name(name: str) -> None:
    assert is_in_cluster({name: "cluster"})
    assert not is_in_cluster({name: "standalone"})
