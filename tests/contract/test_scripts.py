"""Each value that a script's header promises, on a real server and on a simulated one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import ANY

import pytest
from redis import Redis

from celery_redlock.lock.model.fencing import Fence
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
from celery_redlock.lock.model.lease import Lease, LockKey
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
from tests.contract.servers import Command, real, simulated
from tests.simulation.nodes import Node, library
from tests.simulation.world import World

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


NEW = ("run-2", "61000")  # a run, and ms of silence, which no stall lets pass
HELD = ("mine", 10_000, 30_000)
SILENT = ("1", 30_000, 61_000)
MARK = ("600000", 100_000, 500_000)
NOTED = {BROKEN: ("theirs", 9000)}


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


@pytest.fixture(params=["real", "simulated"])
def server(request: pytest.FixtureRequest) -> Command:
    """Give an empty server, to which a test gives commands."""
    if request.param == "real":
        return real(request.getfixturevalue("client"))
    return simulated(Node(World(0), 0, rate=1.0, offset=time.time(), scripts=library()))


def call(script: Script, keys: list[str], *args: str) -> tuple[str, ...]:
    """Return the words of a command that runs a script."""
    return "EVAL", script.source.decode(), str(len(keys)), *keys, *args


def grant(
    value: str = "mine", least: str = "", guard: tuple[str, str] = ("", ""), *, asks: bool = False
) -> tuple[str, ...]:
    keys = [KEY, RUN, QUIET, FENCE, *([DONE] if asks else [])]
    return call(GRANT, keys, value, "30000", least, *guard)


def guard(*args: str) -> tuple[str, ...]:
    """Return the words; args: of the run, then tenures: of the node itself, of another address."""
    own, *others = *args[2:], *[""][: len(args) == 2]
    keys = [RUN, QUIET, TENURE, *[ELSEWHERE][: len(others)]]
    return call(GUARD, keys, *args[:2], own, KEPT, *others)


def renew(value: str = "mine", least: str = "", *, repair: bool = False) -> tuple[str, ...]:
    return call(RENEW, [KEY, FENCE, *([BROKEN] if repair else [])], value, "30000", least)


def release(*ended: str, inbox: str = INBOX) -> tuple[str, ...]:
    return call(RELEASE, [KEY, WAITING, *([DONE] if ended else [])], "mine", inbox, "1", *ended)


BREAKS = call(BREAK, [KEY, BROKEN, WAITING], "theirs", "9000", INBOX)
TRUSTS = call(TRUST, [RUN, QUIET, TENURE], "run-2")


@dataclass(frozen=True)
class Between:
    """A number of a reply: more than `least`, and `most` at the most."""

    least: float
    most: float

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and self.least < other <= self.most


class Now:
    """A server's own time in ms."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and abs(other / 1000 - time.time()) < HOUR


class Error:
    """A reply that is an error with these words."""

    def __init__(self, words: str = "") -> None:
        self.words = words

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Exception) and self.words in str(other)


LEFT, SILENCE = Between(0, 20_000), Between(30_000, 61_000)
State = dict[str, Any]
Row = tuple[tuple[str, ...], Any, State, State | None]
# what is called, the reply, what stands on the server before, and afterwards: None, the same.
# A value alone does not expire; others do after ms, at most so many, or between two numbers.
# fmt: off
ROWS: dict[str, Row] = {
    "a grant sets a free key with its ttl": (grant(), 1, {}, {KEY: HELD}),
    "a grant renews our own": (grant(), 1, {KEY: ("mine", 10_000)}, {KEY: HELD}),
    "a refusal says who and for how long":
        (grant(), [0, LEFT, "theirs:label", Now()], {KEY: ("theirs:label", 20_000)}, None),
    "of a key without expiry a refusal says that its end is not known":
        (grant(), [0, -1, "theirs", Now()], {KEY: "theirs"}, None),

    "the first token is the one that is proposed":
        (grant(least="1000"), [1, 1000], {}, {KEY: HELD, FENCE: "1000"}),
    "the next token is greater whatever is proposed":
        (grant(least="1000"), [1, 5001], {FENCE: "5000"}, {KEY: HELD, FENCE: "5001"}),
    "our own again says the counter and leaves it":
        (grant(least="9000"), [1, 1000], {KEY: "mine", FENCE: "1000"}, {KEY: HELD, FENCE: "1000"}),
    "a refusal leaves the counter":
        (grant(least="1000"), [0, -1, "theirs", Now()], {KEY: "theirs"}, None),
    "tokens are exact up to their limit":
        (grant(least="1"), [1, LIMIT], {FENCE: str(LIMIT - 1)}, {KEY: HELD, FENCE: str(LIMIT)}),
    "beyond the limit of tokens no lock is set":
        (grant(least="1"), Error("FENCE exhausted"), {FENCE: str(LIMIT)}, None),
    "a counter that is no number sets no lock":
        (grant(least="1000"), Error(), {FENCE: "garbage"}, None),
    "a renewal lifts the counter to the holder's token":
        (renew(least="1000"), [[1, 1000]], {KEY: ("mine", 30_000)}, {KEY: HELD, FENCE: "1000"}),
    "a renewal never lowers the counter":
        (renew(least="7"), [[1, 1000]], {KEY: ("mine", 30_000), FENCE: "1000"}, None),
    "a renewal of another's lock leaves the counter":
        (renew(least="1000"), [-1], {KEY: ("theirs", 30_000)}, None),

    "a node that knows no run is silent":
        (grant(guard=NEW), [-1, SILENCE], {}, {RUN: "run-2", QUIET: SILENT}),
    "a node that knows another run is silent":
        (grant(guard=NEW), [-1, SILENCE], {RUN: "run-1"}, {RUN: "run-2", QUIET: SILENT}),
    "a node that knows this run votes":
        (grant(guard=NEW), 1, {RUN: "run-2"}, {RUN: "run-2", KEY: HELD}),
    "a silence is never shortened":
        (grant(guard=NEW), [-1, Between(61_000, 120_000)], {QUIET: ("1", 120_000)},
         {RUN: "run-2", QUIET: ("1", 61_000, 120_000)}),
    "a silent node still says of a lock who holds it":
        (grant(guard=NEW), [0, LEFT, "theirs", Now()], {KEY: ("theirs", 20_000)},
         {KEY: ("theirs", 20_000), RUN: "run-2", QUIET: SILENT}),
    "a silent node confirms what is ours":
        (grant(guard=NEW), 1, {KEY: "mine"}, {KEY: HELD, RUN: "run-2", QUIET: SILENT}),
    "a silence begins when a node is connected":
        (guard(*NEW), [SILENCE, ANY], {}, {RUN: "run-2", QUIET: SILENT, TENURE: ANY}),
    "a known run is not silent":
        (guard(*NEW), [0, "0 run-2"], {RUN: "run-2"}, {RUN: "run-2", TENURE: "0 run-2"}),
    "trust ends a silence":
        (TRUSTS, 1, {RUN: "run-2", QUIET: ("1", 61_000)}, {RUN: "run-2", TENURE: ANY}),
    "trust ahead of it prevents a silence": (TRUSTS, 0, {}, {RUN: "run-2", TENURE: ANY}),

    "a renewal prolongs our own": (renew(), [1], {KEY: ("mine", 10_000)}, {KEY: HELD}),
    "a renewal never shortens":
        (renew(), [1], {KEY: ("mine", 60_000)}, {KEY: ("mine", 30_000, 60_000)}),
    "a renewal never creates a key": (renew(), [0], {}, None),
    "a renewal leaves another's key alone": (renew(), [-1], {KEY: ("theirs", 20_000)}, None),
    "a repair sets a missing key also on a silent node":
        (renew(repair=True), [1], {QUIET: ("1", 50_000)}, {QUIET: ("1", 50_000), KEY: HELD}),
    "a repair leaves another's key alone":
        (renew(repair=True), [-1], {KEY: ("theirs", 20_000)}, None),
    "a repair does not bring back what an operator broke":
        (renew(repair=True), [-1], {BROKEN: ("mine", 20_000)}, None),

    "a release deletes what is ours": (release(), 1, {KEY: "mine"}, {}),
    "a release leaves another's key alone": (release(), 0, {KEY: "theirs"}, None),
    "a release of a missing key is nothing": (release(), 0, {}, None),
    "a release marks for as long as it is told": (release(*ENDED), 1, {KEY: "mine"}, {DONE: MARK}),
    "a release of what is another's marks all the same":
        (release(*ENDED), 0, {KEY: "theirs"}, {KEY: "theirs", DONE: MARK}),

    "a break deletes the value that was seen and notes it":
        (BREAKS, 1, {KEY: ("theirs", 30_000)}, NOTED),
    "a break leaves what stands there instead":
        (BREAKS, 0, {KEY: ("anothers", 30_000)}, {KEY: ("anothers", 30_000), **NOTED}),
    "a break of what was not there is noted": (BREAKS, 0, {}, NOTED),
}
# fmt: on


def entries(state: State) -> list[tuple[str, Any]]:
    return [(key, value if isinstance(value, tuple) else (value,)) for key, value in state.items()]


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_a_script(server: Command, row: Row) -> None:
    words, reply, before, after = row
    for key, (value, *ms) in entries(before):
        server("SET", key, value, *(("PX", str(ms[-1])) if ms else ()))
    assert server(*words) == reply
    after = before if after is None else after
    assert sorted(server("KEYS", "*")) == sorted(after)
    for key, (value, *ms) in entries(after):
        assert server("GET", key) == value, key
        left = server("PTTL", key)
        assert (left == -1) if not ms else ([0, *ms][-2] < left <= ms[-1]), (key, left)


def test_a_counter_that_is_no_text_is_left_and_fails_no_renewal(client: Redis) -> None:
    values = "mine", "also mine"
    for key, value in zip((KEY, OTHER), values, strict=True):
        client.set(key, value, px=60_000)
    client.rpush(FENCE, "a list of somebody's")
    words = [word for value in values for word in (value, "30000", "")]
    words[2] = "1000"
    assert real(client)(*call(RENEW, [KEY, OTHER, FENCE], *words)) == [[1, 0], 1]
    assert client.type(FENCE) == "list"


def test_of_several_renewals_each_is_answered_by_itself(client: Redis) -> None:
    """Also where another program has put a list where a lock was: that fails no other."""
    keys = [lock_key("redlock", name) for name in ("mine", "gone", "theirs", "list", "last")]
    client.set(keys[0], "v0", px=10_000)
    client.set(keys[2], "theirs", px=10_000)
    client.rpush(keys[3], "v3")
    client.set(keys[4], "v4", px=10_000)
    words = [word for n in range(5) for word in (f"v{n}", "30000", "7" if n == 4 else "")]
    assert real(client)(*call(RENEW, [*keys, FENCE], *words)) == [1, 0, -1, -1, [1, 7]]
    assert [client.pttl(key) > 10_000 for key in keys] == [True, False, False, False, True]


def test_a_release_without_a_channel_says_nothing(client: Redis) -> None:
    client.set(KEY, "mine")
    client.zadd(WAITING, {"w1": 1.0})
    client.config_resetstat()
    assert real(client)(*release(inbox="")) == 1
    assert "cmdstat_publish" not in str(client.info("commandstats"))


def answer(server: Command, *args: str) -> Any:
    return server(*guard(*args))


class TestTenures:
    def knows(self, server: Command, tenure: str) -> None:
        """Let the node serve since then."""
        server("SET", RUN, "run-2")
        server("SET", TENURE, tenure)

    def test_one_begins_with_the_silence_at_the_nodes_own_time(self, server: Command) -> None:
        _, tenure = answer(server, *NEW)
        since, run_id = tenure.split()
        assert run_id == "run-2"
        assert int(since) == Now()
        assert server("GET", TENURE) == tenure
        assert server("PTTL", TENURE) == -1
        assert answer(server, *NEW)[1] == tenure

    def test_it_begins_after_all_that_are_known(self, server: Command) -> None:
        later = 4_000_000_000_000
        assert answer(server, *NEW, f"{later} run-1")[1] == f"{later + 1} run-2"
        assert answer(server, "run-3", *NEW[1:])[1] == f"{later + 2} run-3"

    @pytest.mark.parametrize("other", ["1001 run-1", "1000 run-1"])
    def test_a_server_that_another_one_followed_is_silent(
        self, server: Command, other: str
    ) -> None:
        self.knows(server, "1000 run-2")
        left, tenure = answer(server, *NEW, other)
        assert 30_000 < left <= 61_000
        assert int(tenure.split()[0]) > 1001
        server("DEL", QUIET)
        assert answer(server, *NEW, other) == [0, tenure]

    def test_one_that_followed_another_is_not(self, server: Command) -> None:
        self.knows(server, "1000 run-2")
        assert answer(server, *NEW, "999 run-1") == [0, "1000 run-2"]

    def test_one_that_lost_its_own_note_gets_it_back(self, server: Command) -> None:
        server("SET", RUN, "run-2")
        assert answer(server, *NEW, "1000 run-2") == [0, "1000 run-2"]

    def test_a_copy_of_its_primarys_note_is_not_its_own(self, server: Command) -> None:
        self.knows(server, "1000 run-1")
        assert answer(server, *NEW, "1000 run-1")[0] > 30_000

    def test_the_newest_of_another_address_is_kept_and_told(self, server: Command) -> None:
        self.knows(server, "1000 run-2")
        told = [answer(server, *NEW, "", note)[2] for note in ("", "5 a", "4 b", "6 c", "")]
        assert told == ["", "5 a", "5 a", "6 c", "6 c"]
        assert 0 < server("PTTL", ELSEWHERE) <= int(KEPT)

    def test_a_note_stays_for_longer_when_it_is_told_again(self, server: Command) -> None:
        self.knows(server, "1000 run-2")
        answer(server, *NEW, "", "5 a")
        server("PEXPIRE", ELSEWHERE, "10000")
        answer(server, *NEW, "", "5 a")
        assert server("PTTL", ELSEWHERE) > 10_000

    def test_trust_begins_one_that_no_older_one_ends(self, server: Command) -> None:
        self.knows(server, "1000 run-2")
        server(*TRUSTS)
        assert answer(server, *NEW, "1001 run-1")[0] == 0


def asked(server: Command, value: str = "mine", least: str = "") -> Any:
    """Ask for a grant, and whether the run is done."""
    return server(*grant(value, least, asks=True))


class TestDoneMark:
    """The end of a run: each answer to one that asks ends with how long ago that was, or 0."""

    @pytest.mark.parametrize(
        ("mark", "told"), [(None, 0), ("0", 0), ("-7", -7), ("600000", 600001)]
    )
    def test_each_answer_ends_with_the_mark(
        self, server: Command, mark: str | None, told: int
    ) -> None:
        if mark:
            server("SET", DONE, mark)  # it does not expire, so it is as old as it can be
        assert server(*call(MARKER, [DONE])) == told
        assert asked(server) == [1, 0, told]
        refused = asked(server, "theirs")
        assert [refused[2], *refused[4:]] == ["mine", told]
        assert asked(server, least="7") == [1, 0, told]
        server("DEL", KEY)
        assert asked(server, least="7") == [1, 7, told]
        server("DEL", KEY)
        server("SET", QUIET, "1", "PX", "50000")
        assert asked(server)[2:] == [told]

    def test_a_mark_is_as_old_as_what_has_passed_of_its_time(self, server: Command) -> None:
        server("SET", DONE, "600000", "PX", "500000")
        assert 100_000 <= asked(server)[2] < 200_000
        server("SET", DONE, "600000", "PX", "700000")  # where the node's clock was set back
        assert asked(server)[2] == 1

    def test_who_does_not_ask_is_not_answered(self, server: Command) -> None:
        server("SET", DONE, "600000")
        assert server(*grant()) == 1
        assert len(server(*grant("theirs"))) == 4

    def test_a_mark_that_is_no_number_is_none(self, server: Command) -> None:
        server("SET", DONE, "garbage")
        assert asked(server) == [1, 0, 0]


class TestRequests:
    """What is packed by hand says the same as what a client library would send."""

    REQUESTS = Requests("redlock", 0.0)
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
        guard = b"".join(map(encode_text, NEW))
        request = self.REQUESTS.acquire(self.lease(), self.PLAIN, 1000)
        assert self.sent(client, request + guard) == [1, 1000]

    def test_a_grant_that_asks_and_a_release_that_marks(self, client: Redis) -> None:
        one, asking = self.lease(), self.PLAIN._replace(marker=self.MARKER)
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
