"""Commands to several nodes: what each handler is told, however a node behaves."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from celery_redlock.lock.transport.command import (
    Command,
    Question,
    Round,
    Script,
    UnexpectedReplyError,
    encode_command,
    read_number,
)
from celery_redlock.lock.transport.node import UNREAD_LIMIT
from celery_redlock.lock.transport.nodes import CONTENDED_AFTER, CONTENDED_FOR
from tests.conftest import eventually
from tests.unit.transport.ends import PATIENCE, Kept, Pairs, echo

SHORT = 0.2  # seconds: a node timeout that a test waits for
MUCH = "x" * 4_000_000  # more than two ends of a socket pair take
SCRIPT = Script("answer", b"return 42")
GET = encode_command("GET", "a")


@pytest.fixture
def node() -> Iterator[Pairs]:
    made = Pairs(1)
    yield made
    made.close()


@pytest.fixture
def two() -> Iterator[Pairs]:
    """Two nodes, of which a test lets one be silent."""
    made = Pairs(2, SHORT)
    yield made
    made.close()


class Noting:
    """A socket that notes its calls. way: whether they keep the GIL."""

    def __init__(self, way: str, sock: Any, seen: list[str]) -> None:
        self._way = way
        self._socket = sock
        self._seen = seen

    def send(self, data: bytes) -> int:
        self._seen.append(self._way)
        return int(self._socket.send(data))

    def recv(self, size: int) -> Any:
        self._seen.append(f"{self._way} in a read")
        return self._socket.recv(size)


def settled(nodes: Pairs, handler: Kept, count: int = 1) -> None:
    """Read until a handler was told the end of so many commands."""

    def is_settled() -> bool:
        nodes.read(nodes.all)
        nodes.report_broken()
        return len(handler.replies) + len(handler.errors) >= count

    eventually(is_settled)


class TestScripts:
    @pytest.mark.parametrize("why", [b"NOSCRIPT No matching script", b"TRYAGAIN Multiple keys"])
    def test_one_that_a_server_could_not_execute_is_sent_with_its_text(
        self, node: Pairs, why: bytes
    ) -> None:
        handler, server = Kept(), node.server()
        node.send(Command(SCRIPT.call(["key"], "word"), handler, SCRIPT))
        digest = server.read_command()
        assert digest[0] == b"EVALSHA"
        server.say(b"-%b\r\n" % why)
        node.read(node.all)
        assert server.read_command() == [b"EVAL", SCRIPT.source, *digest[2:]]
        assert handler.replies == [], "the handler is not told of the first try"
        server.say(b":42\r\n")
        settled(node, handler)
        assert handler.replies == [(0, 42)]

    def test_one_that_nobody_wants_any_more_is_only_loaded(self, node: Pairs) -> None:
        handler, server = Kept(), node.server()
        node.send(Command(SCRIPT.call([]), handler, SCRIPT))
        server.read_command()
        handler.wanted = False
        server.say(b"-NOSCRIPT No matching script\r\n")
        node.read(node.all)
        assert server.read_command() == [b"SCRIPT", b"LOAD", SCRIPT.source]

    def test_one_that_is_refused_with_its_text_too_is_an_error(self, node: Pairs) -> None:
        handler, server = Kept(), node.server()
        node.send(Command(SCRIPT.call([]), handler, SCRIPT))
        for verb in (b"EVALSHA", b"EVAL"):
            assert server.read_command()[0] == verb
            assert handler.replies == []
            server.say(b"-NOSCRIPT No matching script\r\n")
            node.read(node.all)
        assert [str(reply) for _, reply in handler.replies] == ["NOSCRIPT No matching script"]


def test_of_tls_nothing_is_read_while_another_thread_writes(node: Pairs) -> None:
    """Both share one state, which OpenSSL does not guard."""
    one, handler = node.all[0], Kept()
    assert one.connection is not None
    one.connection.is_tls = True
    node.send(echo("a", handler))
    node.server().say(b":1\r\n")
    during: list[object] = []
    assert one.jobs.lock.run(lambda: during.append(one.receive()))
    assert during == [None]
    settled(node, handler)
    assert handler.replies == [(0, 1)]


class TestErrors:
    def test_an_error_reply_is_told_to_the_set_and_to_the_handler(self, node: Pairs) -> None:
        handler = Kept()
        node.send(echo("a", handler))
        node.server().say(b"-OOM command not allowed\r\n")
        settled(node, handler)
        assert node.refused == ["OOM command not allowed"]
        assert [str(reply) for _, reply in handler.replies] == ["OOM command not allowed"]

    def test_a_reply_of_the_wrong_kind_takes_the_replies_behind_it_along(self, node: Pairs) -> None:
        class Picky(Kept):
            def on_reply(self, node: int, sent: float, reply: Any, run_id: str) -> None:
                super().on_reply(node, sent, read_number(reply), run_id)

        before, picky, behind = Kept(), Picky(), Kept()
        node.send(echo("a", before), echo("b", picky), echo("c", behind))
        server = node.server()
        server.say(b":1\r\n$4\r\nword\r\n:3\r\n")
        settled(node, behind)
        assert before.replies == [(0, 1)]
        assert picky.replies == behind.replies == []
        cause = str(UnexpectedReplyError(b"word"))
        assert picky.errors == behind.errors == [(0, cause)]
        server.wait_closed()

    @pytest.mark.parametrize(
        ("said", "cause"),
        [(b"HTTP/1.1 400\r\n", "not a Redis server"), (b":1\r\n:2\r\n", "an unexpected answer")],
    )
    def test_a_connection_that_says_nonsense_is_given_up(
        self, node: Pairs, said: bytes, cause: str
    ) -> None:
        handler = Kept()
        node.send(echo("a", handler))
        server = node.server()
        server.say(said)
        eventually(lambda: node.read(node.all) and node.all[0].connection is None)
        settled(node, handler)
        assert cause in node.changes[0][1]
        server.wait_closed()

    def test_a_handler_that_raises_is_told_twice_and_keeps_nobody_from_its_reply(
        self, node: Pairs
    ) -> None:
        class Faulty(Kept):
            def on_reply(self, node: int, sent: float, reply: Any, run_id: str) -> None:
                super().on_reply(node, sent, reply, run_id)
                raise ZeroDivisionError

        faulty, behind = Faulty(), Kept()
        node.send(echo("a", faulty), echo("b", behind))
        node.server().say(b":1\r\n:2\r\n")
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                settled(node, behind)
        settled(node, behind)
        assert faulty.replies == [(0, 1)] * 2
        assert behind.replies == [(0, 2)]

    def test_a_refused_connection_ends_the_commands_that_wait_for_it(self) -> None:
        nodes, handler = Pairs(1), Kept()
        nodes.refuses = lambda node: nodes.all[node].connection is None
        connection = nodes.all[0].connection
        assert connection is not None
        nodes.all[0].drop(connection, "broken by a test")
        nodes.send(echo("a", handler))
        settled(nodes, handler)
        assert handler.errors == [(0, "not this one")]
        nodes.send(echo("b", handler))
        settled(nodes, handler, 2)
        assert nodes.changes == [(0, "broken by a test")], "told once until it answers again"
        nodes.close()


class TestReconnecting:
    def test_commands_that_wait_for_a_connection_are_written_in_order(self, node: Pairs) -> None:
        handler, connection = Kept(), node.all[0].connection
        assert connection is not None
        node.all[0].drop(connection, "broken by a test")
        node.send(echo("a", handler))
        node.send(echo("b", handler))
        server = eventually(lambda: node.addresses[0].servers[1:])[0]
        assert [server.read_command()[1] for _ in range(2)] == [b"a", b"b"]
        server.say(b":1\r\n:2\r\n")
        settled(node, handler, 2)
        assert handler.replies == [(0, 1), (0, 2)]

    def test_an_idle_connection_is_made_anew_before_it_is_used(self) -> None:
        nodes, handler = Pairs(1, longest_idle=10.0), Kept()
        first, connection = nodes.server(), nodes.all[0].connection
        assert connection is not None
        connection.used_at -= 11.0
        nodes.send(echo("a", handler))
        second = eventually(lambda: nodes.addresses[0].servers[1:])[0]
        assert second.read_command() == [b"ECHO", b"a"]
        nodes.report_broken()
        first.wait_closed()
        assert nodes.changes == [], "the node has not failed"
        nodes.close()

    def test_a_command_is_not_lost_with_a_connection_that_ended_while_idle(
        self, node: Pairs
    ) -> None:
        handler, first, connection = Kept(), node.server(), node.all[0].connection
        assert connection is not None
        first.socket.close()
        connection.opened_at = connection.used_at = connection.used_at - 2 * UNREAD_LIMIT
        node.send(echo("a", handler))
        second = eventually(lambda: node.addresses[0].servers[1:])[0]
        assert second.read_command() == [b"ECHO", b"a"]
        second.say(b":1\r\n")
        settled(node, handler)
        assert (handler.replies, handler.errors, node.changes) == ([(0, 1)], [], [])

    def test_an_idle_connection_that_cannot_be_made_anew_is_told(self) -> None:
        nodes, handler = Pairs(1, longest_idle=10.0), Kept()
        nodes.refuses = lambda node: nodes.all[node].error is not None
        connection = nodes.all[0].connection
        assert connection is not None
        connection.used_at -= 11.0
        nodes.send(echo("a", handler))
        settled(nodes, handler)
        assert nodes.changes == [(0, "not this one")]
        nodes.close()

    def test_a_command_that_nobody_wants_any_more_is_not_written(self, node: Pairs) -> None:
        wanted, unwanted = Kept(), Kept()
        unwanted.wanted = False
        node.send(echo("a", unwanted), echo("b", wanted))
        assert node.server().read_command() == [b"ECHO", b"b"]


class TestSeveralNodes:
    def test_a_query_returns_what_came_in_time(self, two: Pairs) -> None:
        two.server(0).say(b":7\r\n")  # it answers before it is asked, as a near node seems to
        began = two.clock.now()
        assert two.query(GET, read_number) == {0: 7}
        assert two.clock.now() - began >= SHORT
        assert two.server(1).read_command() == [b"GET", b"a"]

    def test_a_query_leaves_out_errors_and_does_not_wait_for_more(self) -> None:
        nodes = Pairs(2)
        nodes.server(0).say(b":7\r\n")
        nodes.server(1).say(b"-NOPERM no\r\n")
        assert nodes.query(GET, read_number) == {0: 7}  # at once: the timeout is a minute
        nodes.close()

    def test_a_query_to_one_node_leaves_the_others_alone(self) -> None:
        nodes = Pairs(2)
        nodes.server(1).say(b":7\r\n")
        assert nodes.query(GET, read_number, nodes=[1]) == {1: 7}
        assert nodes.all[0].connection is not None
        assert not nodes.all[0].outstanding
        nodes.close()

    def test_a_node_that_never_answers_is_given_up_and_told_of_once(self, two: Pairs) -> None:
        handlers = [Kept(), Kept()]
        for handler in handlers:
            two.broadcast(echo("a", handler), two.clock.now())
        two.server(0).say(b":1\r\n:2\r\n")
        eventually(lambda: two.drain() or handlers[1].errors)
        cause = f"no answer within {SHORT:g} s"
        assert [handler.replies for handler in handlers] == [[(0, 1)], [(0, 2)]]
        assert [handler.errors for handler in handlers] == [[(1, cause)], [(1, cause)]]
        two.addresses[1].servers[0].wait_closed()
        assert two.changes == [(1, cause)]

    def test_after_a_broadcast_that_waited_for_the_gil_the_next_ones_keep_it(self) -> None:
        nodes = Pairs(2)
        seen: list[str] = []
        for node in nodes.all:
            connection: Any = node.connection
            yielding, keeping = connection._sockets
            connection._sockets = Noting("yields", yielding, seen), Noting("keeps", keeping, seen)

        def broadcast(sent_at: float) -> list[str]:
            seen.clear()
            nodes.broadcast(echo("a", Kept()), sent_at)
            return [way for way in seen if way in ("yields", "keeps")]

        later = nodes.clock.now() + PATIENCE / 2  # as if no time passed in the next ones
        assert broadcast(later) == ["yields"] * 2
        assert broadcast(nodes.clock.now() - CONTENDED_AFTER) == ["yields"] * 2
        assert broadcast(nodes.clock.now() - CONTENDED_AFTER) == ["keeps"] * 2
        nodes.server(0).say(b":1\r\n")
        question = Question([0], read_number)
        nodes.wait(question, nodes.clock.now())
        assert "yields in a read" not in seen
        assert "keeps in a read" in seen
        assert broadcast(later + CONTENDED_FOR) == ["yields"] * 2
        assert broadcast(later + CONTENDED_FOR) == ["yields"] * 2
        nodes.close()

    def test_each_node_is_written_its_own_batch(self) -> None:
        nodes, handler = Pairs(2), Kept()
        batches = [[echo("a", handler), echo("b", handler)], []]
        now = nodes.clock.now()
        nodes.scatter([[(c, now, c.request) for c in batch] for batch in batches], now)
        assert [nodes.server(0).read_command()[1] for _ in range(2)] == [b"a", b"b"]
        assert not nodes.all[1].outstanding
        nodes.close()

    def test_a_waiter_also_writes_what_its_socket_did_not_take(self) -> None:
        nodes = Pairs(1)
        question = Question([0], read_number)
        nodes.send(Command(encode_command("ECHO", MUCH), question))
        server = nodes.server()
        with ThreadPoolExecutor(1) as elsewhere:
            read = elsewhere.submit(server.read_command)
            elsewhere.submit(server.say, b":1\r\n")
            nodes.wait(question, nodes.clock.now() + PATIENCE)
            assert read.result() == [b"ECHO", MUCH.encode()]
        assert question.replies == {0: 1}
        nodes.close()


class TestReentry:
    """A signal handler or a finalizer may run in the middle of anything, and use the nodes."""

    def test_a_signal_handler_that_sends_inside_a_send_leaves_its_command_behind(
        self, node: Pairs
    ) -> None:
        handler, depth = Kept(), list[int]()

        class Interrupted(Kept):
            @property
            def wanted(self) -> bool:  # type: ignore[override]
                if not depth:
                    depth.append(1)
                    signal.raise_signal(signal.SIGUSR1)
                return True

        def on_signal(*_: object) -> None:
            node.send(echo("inner", handler))

        earlier = signal.signal(signal.SIGUSR1, on_signal)
        try:
            node.send(echo("outer", Interrupted()))
        finally:
            signal.signal(signal.SIGUSR1, earlier)
        assert depth, "the signal came in the middle"
        server = node.server()
        assert [server.read_command()[1] for _ in range(2)] == [b"outer", b"inner"]

    def test_a_finalizer_that_sends_while_replies_are_handed_on_is_written(
        self, node: Pairs
    ) -> None:
        class Finalized:
            def __init__(self) -> None:
                self.itself = self

            def __del__(self) -> None:
                node.send(echo("last", Kept()))

        class Collecting(Kept):
            def on_reply(self, node: int, sent: float, reply: Any, run_id: str) -> None:
                Finalized()
                gc.collect()
                super().on_reply(node, sent, reply, run_id)

        handler, server = Collecting(), node.server()
        node.send(echo("first", handler))
        server.say(b":1\r\n")
        settled(node, handler)
        assert [server.read_command()[1] for _ in range(2)] == [b"first", b"last"]

    def test_who_interrupts_the_reading_does_not_wait_for_itself(self, node: Pairs) -> None:
        began: list[float] = []

        class Waiting(Kept):
            def on_reply(self, index: int, sent: float, reply: Any, run_id: str) -> None:
                began.append(node.clock.now())
                node.wait(Round(), node.clock.now() + 1e6)  # only this thread could end it
                super().on_reply(index, sent, reply, run_id)

        handler = Waiting()
        node.send(echo("a", handler))
        node.server().say(b":1\r\n")
        settled(node, handler)
        assert handler.replies == [(0, 1)]
        assert began
