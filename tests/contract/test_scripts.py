"""Each value that a script's header promises, on a real server, by digest and by source."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from redis import Redis, ResponseError

from celery_redlock.lock.model.keys import (
    broken_key,
    completion_key,
    fence_key,
    guard_keys,
    inbox_channel,
    lock_key,
    tenure_key,
    waiting_key,
)
from celery_redlock.lock.model.lease import Fence, Lease, LockKey
from celery_redlock.lock.model.options import CompletionMarker, LockOptions
from celery_redlock.lock.server.requests import (
    BREAK,
    GRANT,
    GUARD,
    MARKER,
    RELEASE,
    RENEW,
    TRUST,
    Requests,
)
from celery_redlock.lock.transport.command import Script, encode_bulk, encode_text
from celery_redlock.testing import EmbeddedNode
from tests.clocks import HOUR

KEY = lock_key("redlock", "r")
RUN, QUIET = guard_keys("redlock")
TENURE, ELSEWHERE = tenure_key("redlock"), tenure_key("redlock", "other:6379")
KEPT = "2592000000"  # ms
FENCE, BROKEN = fence_key("redlock"), broken_key(KEY, "mine")
DONE = completion_key("redlock", "1:t:0:0")
OTHER = lock_key("redlock", "other")
WAITING, INBOX = waiting_key("redlock", "r"), inbox_channel("redlock", "")
LIMIT = 9007199254740990
ENDED = "600000", "500000"  # ms from the end of a run to that of its marker, and from now on
NO_GUARD = encode_text("") * 2  # what a grant ends with if the restart guard is off


@pytest.fixture(scope="module")
def node() -> Iterator[EmbeddedNode]:
    """Give a node that no client but the tests of this file has ever met."""
    with EmbeddedNode() as server:
        yield server


@pytest.fixture
def client(node: EmbeddedNode) -> Redis:
    client = node.client()
    client.flushall()
    return client


def run(client: Redis, script: Script, keys: list[str], *args: str) -> Any:
    return client.eval(script.source.decode(), len(keys), *keys, *args)


def grant(
    client: Redis,
    value: str = "mine",
    ttl: str = "30000",
    least: str = "",
    guard: tuple[str, str] = ("", ""),
    *,
    asks: bool = False,
) -> Any:
    keys = [KEY, RUN, QUIET, FENCE, *([DONE] if asks else [])]
    return run(client, GRANT, keys, value, ttl, least, *guard)


def guard(client: Redis, *args: str) -> Any:
    """Run the script; args: of the run, then tenures: of the node itself, of another address."""
    own, *others = *args[2:], *[""][: len(args) == 2]
    keys = [RUN, QUIET, TENURE, *[ELSEWHERE][: len(others)]]
    return run(client, GUARD, keys, *args[:2], own, KEPT, *others)


def renew(client: Redis, value: str = "mine", least: str = "", *, repair: bool = False) -> Any:
    keys = [KEY, FENCE, *([BROKEN] if repair else [])]
    (word,) = run(client, RENEW, keys, value, "30000", least)
    return word


class TestGrant:
    def test_it_sets_a_free_key_with_its_ttl(self, client: Redis) -> None:
        assert grant(client) == 1
        assert client.get(KEY) == "mine"
        assert 10_000 < client.pttl(KEY) <= 30_000
        assert client.keys("*") == [KEY]

    def test_our_own_counts_and_is_renewed(self, client: Redis) -> None:
        client.set(KEY, "mine", px=10_000)
        assert grant(client) == 1
        assert client.pttl(KEY) > 10_000

    def test_it_refuses_and_says_who_and_for_how_long(self, client: Redis) -> None:
        client.set(KEY, "theirs:label", px=20_000)
        code, left, value, now_ms = grant(client)
        assert (code, value) == (0, "theirs:label")
        assert abs(now_ms / 1000 - time.time()) < HOUR
        assert 0 < left <= 20_000
        assert client.get(KEY) == "theirs:label"

    def test_of_a_key_without_expiry_it_says_that_its_end_is_not_known(self, client: Redis) -> None:
        client.set(KEY, "theirs")
        assert grant(client)[:3] == [0, -1, "theirs"]


class TestBreak:
    def test_it_deletes_the_value_that_was_seen_and_notes_it(self, client: Redis) -> None:
        client.set(KEY, "theirs", px=30_000)
        assert run(client, BREAK, [KEY, BROKEN, WAITING], "theirs", "9000", INBOX) == 1
        assert not client.exists(KEY)
        assert client.get(BROKEN) == "theirs"
        assert 0 < client.pttl(BROKEN) <= 9000

    def test_what_stands_there_instead_stays(self, client: Redis) -> None:
        client.set(KEY, "anothers", px=30_000)
        assert run(client, BREAK, [KEY, BROKEN, WAITING], "theirs", "9000", INBOX) == 0
        assert client.get(KEY) == "anothers"

    def test_no_repair_brings_back_what_was_not_there_to_be_broken(self, client: Redis) -> None:
        assert run(client, BREAK, [KEY, BROKEN, WAITING], "mine", "9000", INBOX) == 0
        assert renew(client, repair=True) == -1
        assert not client.exists(KEY)


class TestFencing:
    def test_the_first_token_is_the_one_that_is_proposed(self, client: Redis) -> None:
        assert grant(client, least="1000") == [1, 1000]
        assert client.get(FENCE) == "1000"

    def test_the_next_is_greater_whatever_is_proposed(self, client: Redis) -> None:
        client.set(FENCE, "5000")
        assert grant(client, least="1000") == [1, 5001]

    def test_our_own_again_says_the_counter_and_leaves_it(self, client: Redis) -> None:
        grant(client, least="1000")
        assert grant(client, least="9000") == [1, 1000]

    def test_a_refusal_leaves_the_counter(self, client: Redis) -> None:
        client.set(KEY, "theirs")
        grant(client, least="1000")
        assert client.get(FENCE) is None

    def test_it_is_exact_up_to_its_limit_and_sets_no_lock_beyond(self, client: Redis) -> None:
        client.set(FENCE, str(LIMIT - 1))
        assert grant(client, least="1") == [1, LIMIT]
        assert client.get(FENCE) == str(LIMIT)
        client.delete(KEY)
        with pytest.raises(ResponseError, match="FENCE exhausted"):
            grant(client, least="1")
        assert not client.exists(KEY)

    def test_a_counter_that_is_no_number_sets_no_lock(self, client: Redis) -> None:
        client.set(FENCE, "garbage")
        with pytest.raises(ResponseError):
            grant(client, least="1000")
        assert not client.exists(KEY)

    def test_a_renewal_lifts_the_counter_to_the_holders_token_and_never_lowers_it(
        self, client: Redis
    ) -> None:
        client.set(KEY, "mine", px=30_000)
        assert renew(client, least="1000") == [1, 1000]
        assert client.get(FENCE) == "1000"
        assert renew(client, least="7") == [1, 1000]

    def test_a_counter_that_is_no_text_is_left_and_fails_no_renewal(self, client: Redis) -> None:
        values = "mine", "also mine"
        for key, value in zip((KEY, OTHER), values, strict=True):
            client.set(key, value, px=60_000)
        client.rpush(FENCE, "a list of somebody's")
        words = [word for value in values for word in (value, "30000", "")]
        words[2] = "1000"
        assert run(client, RENEW, [KEY, OTHER, FENCE], *words) == [[1, 0], 1]
        assert client.type(FENCE) == "list"

    def test_a_renewal_of_anothers_lock_leaves_the_counter(self, client: Redis) -> None:
        client.set(KEY, "theirs", px=30_000)
        assert renew(client, least="1000") == -1
        assert client.get(FENCE) is None


class TestGuard:
    NEW = ("run-2", "61000")  # ms, which no stall lets pass

    def test_a_node_that_knows_no_run_is_silent_for_as_long_as_it_is_told(
        self, client: Redis
    ) -> None:
        code, left = grant(client, guard=self.NEW)
        assert code == -1
        assert 30_000 < left <= 61_000
        assert client.get(RUN) == "run-2"
        assert not client.exists(KEY)

    def test_a_node_that_knows_another_run_is_silent(self, client: Redis) -> None:
        client.set(RUN, "run-1")
        code, left = grant(client, guard=self.NEW)
        assert code == -1
        assert 30_000 < left <= 61_000

    def test_a_node_that_knows_this_run_votes(self, client: Redis) -> None:
        client.set(RUN, "run-2")
        assert grant(client, guard=self.NEW) == 1

    def test_a_silence_is_never_shortened(self, client: Redis) -> None:
        client.set(QUIET, "1", px=120_000)
        assert grant(client, guard=self.NEW)[1] > 61_000

    def test_a_silent_node_still_says_of_a_lock_who_holds_it(self, client: Redis) -> None:
        client.set(KEY, "theirs", px=20_000)
        assert grant(client, guard=self.NEW)[0] == 0
        assert client.exists(QUIET)

    def test_a_silent_node_confirms_what_is_ours(self, client: Redis) -> None:
        client.set(KEY, "mine", px=20_000)
        assert grant(client, guard=self.NEW) == 1

    def test_the_silence_begins_when_a_node_is_connected(self, client: Redis) -> None:
        left, _ = guard(client, *self.NEW)
        assert 30_000 < left <= 61_000
        assert grant(client, guard=self.NEW)[0] == -1

    def test_a_known_run_is_not_silent(self, client: Redis) -> None:
        client.set(RUN, "run-2")
        assert guard(client, *self.NEW) == [0, "0 run-2"]

    def test_trust_ends_the_silence(self, client: Redis) -> None:
        grant(client, guard=self.NEW)
        assert run(client, TRUST, [RUN, QUIET, TENURE], "run-2") == 1
        assert grant(client, guard=self.NEW) == 1

    def test_trust_ahead_of_it_prevents_the_silence(self, client: Redis) -> None:
        assert run(client, TRUST, [RUN, QUIET, TENURE], "run-2") == 0
        assert grant(client, guard=self.NEW) == 1


class TestTenures:
    NEW = TestGuard.NEW

    def knows(self, client: Redis, tenure: str) -> None:
        """Let the node serve since then."""
        client.set(RUN, "run-2")
        client.set(TENURE, tenure)

    def test_one_begins_with_the_silence_at_the_nodes_own_time(self, client: Redis) -> None:
        _, tenure = guard(client, *self.NEW)
        since, run_id = tenure.split()
        seconds, _ = client.time()
        assert run_id == "run-2"
        assert abs(int(since) - seconds * 1000) < 60_000
        assert client.get(TENURE) == tenure
        assert client.ttl(TENURE) == -1
        assert guard(client, *self.NEW)[1] == tenure

    def test_it_begins_after_all_that_are_known(self, client: Redis) -> None:
        later = 4_000_000_000_000
        assert guard(client, *self.NEW, f"{later} run-1")[1] == f"{later + 1} run-2"
        assert guard(client, "run-3", *self.NEW[1:])[1] == f"{later + 2} run-3"

    @pytest.mark.parametrize("other", ["1001 run-1", "1000 run-1"])
    def test_a_server_that_another_one_followed_is_silent(self, client: Redis, other: str) -> None:
        self.knows(client, "1000 run-2")
        left, tenure = guard(client, *self.NEW, other)
        assert 30_000 < left <= 61_000
        assert int(tenure.split()[0]) > 1001
        client.delete(QUIET)
        assert guard(client, *self.NEW, other) == [0, tenure]

    def test_one_that_followed_another_is_not(self, client: Redis) -> None:
        self.knows(client, "1000 run-2")
        assert guard(client, *self.NEW, "999 run-1") == [0, "1000 run-2"]

    def test_one_that_lost_its_own_note_gets_it_back(self, client: Redis) -> None:
        client.set(RUN, "run-2")
        assert guard(client, *self.NEW, "1000 run-2") == [0, "1000 run-2"]

    def test_a_copy_of_its_primarys_note_is_not_its_own(self, client: Redis) -> None:
        self.knows(client, "1000 run-1")
        assert guard(client, *self.NEW, "1000 run-1")[0] > 30_000

    def test_the_newest_of_another_address_is_kept_and_told(self, client: Redis) -> None:
        self.knows(client, "1000 run-2")
        told = [guard(client, *self.NEW, "", note)[2] for note in ("", "5 a", "4 b", "6 c", "")]
        assert told == ["", "5 a", "5 a", "6 c", "6 c"]
        assert 0 < client.pttl(ELSEWHERE) <= int(KEPT)

    def test_a_note_stays_for_longer_when_it_is_told_again(self, client: Redis) -> None:
        self.knows(client, "1000 run-2")
        guard(client, *self.NEW, "", "5 a")
        client.pexpire(ELSEWHERE, 10_000)
        guard(client, *self.NEW, "", "5 a")
        assert client.pttl(ELSEWHERE) > 10_000

    def test_trust_begins_one_that_no_older_one_ends(self, client: Redis) -> None:
        self.knows(client, "1000 run-2")
        run(client, TRUST, [RUN, QUIET, TENURE], "run-2")
        assert guard(client, *self.NEW, "1001 run-1")[0] == 0


class TestRenew:
    def test_it_prolongs_our_own(self, client: Redis) -> None:
        client.set(KEY, "mine", px=10_000)
        assert renew(client) == 1
        assert client.pttl(KEY) > 10_000

    def test_it_never_shortens(self, client: Redis) -> None:
        client.set(KEY, "mine", px=60_000)
        assert renew(client) == 1
        assert client.pttl(KEY) > 30_000

    def test_it_never_creates_a_key(self, client: Redis) -> None:
        assert renew(client) == 0
        assert not client.exists(KEY)

    def test_it_leaves_anothers_key_alone(self, client: Redis) -> None:
        client.set(KEY, "theirs", px=20_000)
        assert renew(client) == -1
        assert 0 < client.pttl(KEY) <= 20_000

    def test_a_repair_sets_a_missing_key_also_on_a_silent_node(self, client: Redis) -> None:
        client.set(QUIET, "1", px=50_000)
        assert renew(client, repair=True) == 1
        assert client.get(KEY) == "mine"
        assert 10_000 < client.pttl(KEY) <= 30_000

    def test_a_repair_leaves_anothers_key_alone(self, client: Redis) -> None:
        client.set(KEY, "theirs", px=20_000)
        assert renew(client, repair=True) == -1

    def test_a_repair_does_not_bring_back_what_an_operator_broke(self, client: Redis) -> None:
        client.set(BROKEN, "mine", px=20_000)
        assert renew(client, repair=True) == -1
        assert not client.exists(KEY)

    def test_of_several_each_is_answered_by_itself(self, client: Redis) -> None:
        """Also where another program has put a list where a lock was: that fails no other."""
        keys = [lock_key("redlock", name) for name in ("mine", "gone", "theirs", "list", "last")]
        client.set(keys[0], "v0", px=10_000)
        client.set(keys[2], "theirs", px=10_000)
        client.rpush(keys[3], "v3")
        client.set(keys[4], "v4", px=10_000)
        words = [word for n in range(5) for word in (f"v{n}", "30000", "7" if n == 4 else "")]
        assert run(client, RENEW, [*keys, FENCE], *words) == [1, 0, -1, -1, [1, 7]]
        assert [client.pttl(key) > 10_000 for key in keys] == [True, False, False, False, True]


class TestRelease:
    def test_without_a_channel_it_says_nothing(self, client: Redis) -> None:
        client.set(KEY, "mine")
        client.zadd(WAITING, {"w1": 1.0})
        before = client.info("commandstats").get("cmdstat_publish", {}).get("calls", 0)
        assert run(client, RELEASE, [KEY, WAITING], "mine", "", "1") == 1
        assert client.info("commandstats").get("cmdstat_publish", {}).get("calls", 0) == before

    def test_it_leaves_anothers_key_alone(self, client: Redis) -> None:
        client.set(KEY, "theirs")
        assert run(client, RELEASE, [KEY, WAITING], "mine", INBOX, "1") == 0
        assert client.get(KEY) == "theirs"

    def test_of_a_missing_key_it_is_nothing(self, client: Redis) -> None:
        assert run(client, RELEASE, [KEY, WAITING], "mine", INBOX, "1") == 0


class TestDoneMark:
    """The end of a run: each answer to one that asks ends with how long ago that was, or 0."""

    def test_a_release_marks_for_as_long_as_it_is_told(self, client: Redis) -> None:
        client.set(KEY, "mine")
        assert run(client, RELEASE, [KEY, WAITING, DONE], "mine", INBOX, "1", *ENDED) == 1
        assert client.get(DONE) == "600000"
        assert 100_000 < client.pttl(DONE) <= 500_000
        assert not client.exists(KEY)

    def test_a_release_of_what_is_anothers_marks_all_the_same(self, client: Redis) -> None:
        client.set(KEY, "theirs")
        assert run(client, RELEASE, [KEY, WAITING, DONE], "mine", INBOX, "1", *ENDED) == 0
        assert client.get(DONE) == "600000"
        assert client.get(KEY) == "theirs"

    @pytest.mark.parametrize(
        ("mark", "told"), [(None, 0), ("0", 0), ("-7", -7), ("600000", 600001)]
    )
    def test_each_answer_ends_with_the_mark(
        self, client: Redis, mark: str | None, told: int
    ) -> None:
        if mark:
            client.set(DONE, mark)  # it does not expire, so it is as old as it can be
        assert client.eval(MARKER.source.decode(), 1, DONE) == told
        assert grant(client, asks=True) == [1, 0, told]
        refused = grant(client, "theirs", asks=True)
        assert [refused[2], *refused[4:]] == ["mine", told]
        assert grant(client, asks=True, least="7") == [1, 0, told]
        client.delete(KEY)
        assert grant(client, asks=True, least="7") == [1, 7, told]
        client.delete(KEY)
        client.set(QUIET, "1", px=50_000)
        assert grant(client, asks=True)[2:] == [told]

    def test_a_mark_is_as_old_as_what_has_passed_of_its_time(self, client: Redis) -> None:
        client.set(DONE, "600000", px=500_000)
        assert 100_000 <= grant(client, asks=True)[2] < 200_000
        client.set(DONE, "600000", px=700_000)  # where the node's clock was set back
        assert grant(client, asks=True)[2] == 1

    def test_who_does_not_ask_is_not_answered(self, client: Redis) -> None:
        client.set(DONE, "600000")
        assert grant(client) == 1
        assert len(grant(client, "theirs")) == 4

    def test_a_mark_that_is_no_number_is_none(self, client: Redis) -> None:
        client.set(DONE, "garbage")
        assert grant(client, asks=True) == [1, 0, 0]


class TestRequests:
    """What is packed by hand says the same as what a client library would send."""

    REQUESTS = Requests("redlock")
    PLAIN = LockOptions(("r",), ttl=30.0, wait=0.0, renew=False, max_hold=None, label="me")
    MARKER = CompletionMarker("1:t:0:0", kept_for=600.0, asks_since=0.0)

    def lease(self, resource: str = "r", token: int | None = None) -> Lease:
        """Return a key lease. token: for fencing."""
        fence = None if token is None else Fence(1)
        if fence is not None and token is not None:
            fence.choose(token)
        key = LockKey("redlock", resource, 30.0)
        return Lease(key, "mine", 1, 1, 0.01, fence=fence)

    def sent(self, client: Redis, request: bytes) -> Any:
        connection = client.connection_pool.make_connection()
        connection.connect()
        try:
            connection._sock.sendall(request)
            return connection.read_response()
        finally:
            connection.disconnect()

    @pytest.fixture(autouse=True)
    def loaded(self, client: Redis) -> None:
        for script in (GRANT, RENEW, RELEASE):
            client.script_load(script.source.decode())

    def test_a_grant_and_its_release(self, client: Redis) -> None:
        one = self.lease()
        request = self.REQUESTS.acquire(one, self.PLAIN, None)
        assert self.sent(client, request + NO_GUARD) == 1
        assert client.get(KEY) == "mine"
        assert self.sent(client, self.REQUESTS.release(one)) == 1
        assert self.sent(client, self.REQUESTS.release(one, publish=False)) == 0

    def test_a_grant_with_a_fencing_token_and_a_guard(self, client: Redis) -> None:
        client.set(RUN, "run-2")
        guard = b"".join(map(encode_text, TestGuard.NEW))
        request = self.REQUESTS.acquire(self.lease(), self.PLAIN, 1000)
        assert self.sent(client, request + guard) == [1, 1000]

    def test_a_grant_that_asks_and_a_release_that_marks(self, client: Redis) -> None:
        one, asking = self.lease(), replace(self.PLAIN, marker=self.MARKER)
        request = self.REQUESTS.acquire(one, asking, None)
        assert self.sent(client, request + NO_GUARD) == [1, 0, 0]
        assert self.sent(client, self.REQUESTS.release(one, self.MARKER, 100.0)) == 1
        request = self.REQUESTS.acquire(one, asking, 7)
        granted, token, age = self.sent(client, request + NO_GUARD)
        assert (granted, token) == (1, 7)
        assert 100_000 <= age < 200_000

    def test_a_renewal(self, client: Redis) -> None:
        assert self.sent(client, self.REQUESTS.renew([self.lease()])) == [0]
        client.set(KEY, "mine", px=10_000)
        assert self.sent(client, self.REQUESTS.renew([self.lease()])) == [1]

    def test_a_renewal_of_several(self, client: Redis) -> None:
        client.set(KEY, "mine", px=10_000)
        two = [self.lease("other", 1000), self.lease("r", 1000)]
        assert self.sent(client, self.REQUESTS.renew(two)) == [0, [1, 1000]]

    @pytest.mark.parametrize(("token", "reply"), [(None, 1), (1000, [1, 1000])])
    def test_a_repair(self, client: Redis, token: int | None, reply: object) -> None:
        request = self.REQUESTS.renew([self.lease("r", token)], encode_text(BROKEN))
        assert self.sent(client, request) == [reply]
        assert client.get(KEY) == "mine"

    @pytest.mark.parametrize("script", [GRANT, RENEW, RELEASE])
    def test_by_digest_and_by_source_differ_in_the_script_alone(self, script: Script) -> None:
        by_digest = script.call([KEY], "mine", "1")
        by_source, load = script.with_source(by_digest), script.load
        assert load.endswith(encode_bulk(b"LOAD") + encode_bulk(script.source))
        assert by_digest.count(b"EVALSHA") == 1
        assert encode_bulk(script.source) in by_source
        tail = b"".join(
            [b"$1\r\n1\r\n", encode_bulk(KEY.encode()), encode_bulk(b"mine"), encode_bulk(b"1")]
        )
        assert by_digest.endswith(tail)
        assert by_source.endswith(tail)
