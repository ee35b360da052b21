"""A broker as kombu's Redis transport uses it, with the shipped scripts of worker leases in a Lua.

Of a Redis it has what kombu and the scripts ask for: hashes, sorted sets, lists, a clock that may
be set, and clients that wait for replies, time out, and lose what is on its way.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import redis
from lupa.lua51 import LuaRuntime, lua_type

from celery_redlock.tasks.recovery.ledger import BEAT_SCRIPT
from tests.simulation.network import Path
from tests.simulation.world import World, running

if TYPE_CHECKING:
    from tests.simulation.recovery import Delivery, Worker

PAGE = 4  # entries of an HSCAN: few, so that much may happen in between
CLOSES = 0.03  # s after a process' death at which the broker learns of it
UNACKED, INDEX = "unacked", "unacked_index"
RUN = """
function(call)
  redis = {}
  function redis.pcall(...)
    local fine, reply = call(...)
    if fine then
      return reply
    end
    return {err = reply}
  end
  function redis.call(...)
    local fine, reply = call(...)
    if not fine then
      error({err = reply}, 0)
    end
    return reply
  end
  return function(body, keys, arguments)
    KEYS, ARGV = keys, arguments
    local fine, reply = pcall(body)
    if fine then
      return true, reply
    end
    return false, type(reply) == 'table' and reply.err or tostring(reply)
  end
end
"""


_changed: dict[bytes, bytes] = {}


@contextlib.contextmanager
def patched_texts(texts: dict[bytes, bytes]) -> Iterator[None]:
    """Let brokers run other texts for some scripts for a while."""
    _changed.update(texts)
    try:
        yield
    finally:
        _changed.clear()


class Engine:
    """The Lua that all brokers of one process share. broker: the one whose script is run."""

    broker: Broker

    def __init__(self) -> None:
        self._lua = lua = LuaRuntime(unpack_returned_tuples=True)
        self._run = lua.eval(RUN)(self._call)
        make = lua.eval("function(text) return assert(loadstring(text)) end")
        self._compiled = functools.lru_cache(maxsize=32)(make)

    def run(self, broker: Broker, script: bytes, keys: list[str], arguments: list[str]) -> Any:
        """Run a script; raises redis-py's error for one that fails."""
        self.broker = broker
        table = self._lua.table_from
        body = self._compiled(_changed.get(script, script).decode())
        fine, reply = self._run(body, table(keys), table(arguments))
        if not fine:
            raise redis.ResponseError(reply)
        return self._converted(reply)

    def _call(self, name: str, *words: Any) -> tuple[bool, Any]:
        try:
            reply = self.broker.call(name, *map(text_of, words))
        except redis.ResponseError as error:
            return False, str(error)
        if isinstance(reply, list):
            return True, self._lua.table_from(reply)
        return True, False if reply is None else reply

    def _converted(self, reply: Any) -> Any:
        if lua_type(reply) == "table":
            return [self._converted(item) for item in reply.values()]
        return int(reply) if isinstance(reply, float) else reply


@functools.lru_cache(maxsize=1)
def engine() -> Engine:
    return Engine()


def text_of(word: Any) -> str:
    """Return a word of a command as a client sends it."""
    if isinstance(word, float):
        return f"{word:.17g}"
    return word.decode() if isinstance(word, bytes) else str(word)


def number_of(text: str) -> float:
    """Return a score or a bound of scores."""
    return float(text)


class Broker:
    """One Redis: what it keeps, its clock, and who waits for a message.

    offset: s that its clock is ahead of real time. refusing: lists that take nothing, as another
    program has written something else there. no_joins_until: real s until which it refuses joins.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.offset = 1_700_000_000.0 + world.random.random()
        self.down = False
        self.life = 0  # new with each loss of all connections
        self.frozen_until = 0.0  # real s
        self.no_joins_until = 0.0
        self.refusing: set[str] = set()
        self.hashes: dict[str, dict[str, str]] = {}
        self.sets: dict[str, dict[str, float]] = {}
        self.lists: dict[str, list[str]] = {}  # each with its head, that is taken next, at the end
        self.asked: dict[Question, None] = {}  # in their order: what has no reply yet
        self._blocked: list[tuple[Question, tuple[str, ...]]] = []

    @property
    def ms(self) -> int:
        """Ms of its clock."""
        return int((self.world.now + self.offset) * 1000)

    # commands

    def call(self, name: str, *words: Any) -> Any:
        """Run one command; raises redis-py's error for one that it refuses."""
        command: Callable[..., Any] = getattr(self, f"_{name.lower()}")
        return command(*words)

    def _time(self) -> list[str]:
        seconds, ms = divmod(self.ms, 1000)
        return [str(seconds), str(ms * 1000)]

    def _zadd(self, key: str, *words: str) -> int:
        found = self.sets.setdefault(key, {})
        *options, score, member = words
        added = member not in found
        if not (added and options == ["XX"]):
            found[member] = number_of(score)
        return int(added and not options)

    def _zscore(self, key: str, member: str) -> str | None:
        score = self.sets.get(key, {}).get(member)
        return None if score is None else f"{score:.17g}"

    def _zrem(self, key: str, *members: str) -> int:
        found = self.sets.get(key, {})
        return sum(found.pop(member, None) is not None for member in members)

    def _zrange(self, key: str, first: str, last: str, withscores: str) -> list[str]:
        assert withscores == "WITHSCORES"
        return self._shown(self._ranked(key)[int(first) : int(last) + 1])

    def _zrangebyscore(self, key: str, least: str, most: str, *options: str) -> list[str]:
        assert options[:3] == ("WITHSCORES", "LIMIT", "0")
        low, high = number_of(least), number_of(most)
        found = [one for one in self._ranked(key) if low <= one[0] <= high]
        return self._shown(found[: int(options[3])])

    def _ranked(self, key: str) -> list[tuple[float, str]]:
        return sorted((score, member) for member, score in self.sets.get(key, {}).items())

    def _shown(self, ranked: list[tuple[float, str]]) -> list[str]:
        return [text for score, member in ranked for text in (member, f"{score:.17g}")]

    def _hset(self, key: str, field: str, value: str) -> int:
        found = self.hashes.setdefault(key, {})
        is_new = field not in found
        found[field] = value
        return int(is_new)

    def _hget(self, key: str, field: str) -> str | None:
        return self.hashes.get(key, {}).get(field)

    def _hexists(self, key: str, field: str) -> int:
        return int(field in self.hashes.get(key, {}))

    def _hdel(self, key: str, *fields: str) -> int:
        found = self.hashes.get(key, {})
        return sum(found.pop(field, None) is not None for field in fields)

    def _hscan(self, key: str, prefix: str, seen: set[str]) -> list[tuple[str, str]]:
        found = self.hashes.get(key, {}).items()
        page = [one for one in found if one[0].startswith(prefix) and one[0] not in seen][:PAGE]
        if self.world.random.random() >= 0.1:  # else they come twice, as while the table grows
            seen.update(tag for tag, _ in page)
        return page

    def _zscan(self, key: str, prefix: str, seen: set[str]) -> list[tuple[str, float]]:
        found = self.sets.get(key, {}).items()
        page = [one for one in found if one[0].startswith(prefix) and one[0] not in seen][:PAGE]
        seen.update(member for member, _ in page)
        return page

    def _rpush(self, key: str, value: str) -> int:
        if key in self.refusing:
            raise redis.ResponseError("WRONGTYPE Operation against a key of another type")
        return self._insert(key, value, head=True)

    def _insert(self, key: str, value: str, *, head: bool) -> int:
        found = self.lists.setdefault(key, [])
        found.insert(len(found) if head else 0, value)
        return len(found)

    def _lpush(self, key: str, value: str) -> int:
        return self._insert(key, value, head=False)

    def execute(self, question: Question | None, *all_words: Any) -> Any:
        """Do what a client asks for, in one step; an error of the broker is a reply."""
        verb, *words = all_words
        try:
            if verb == "EVAL":
                script, keys, arguments = words
                self._look_at_join(script, arguments)
                reply: Any = engine().run(self, script, keys, arguments)
            elif verb == "MULTI":
                reply = [self.call(*command) for command in words]
            elif verb == "RESTORE":
                reply = self._restore(*words)
            else:
                reply = self.call(verb, *words)
        except redis.ResponseError as error:
            reply = error
        self.world.witness.executed(question, all_words, reply)
        if self._blocked:
            self._serve()
        return reply

    def _look_at_join(self, script: bytes, arguments: list[str]) -> None:
        if script == BEAT_SCRIPT and arguments[1] and self.no_joins_until > self.world.now:
            raise redis.ResponseError("MISCONF Errors writing to the AOF file")

    def _restore(self, tag: str, leftmost: bool) -> int:
        """Give back an entry as kombu's `restore_by_tag` does, in one transaction."""
        entry = self.hashes.get(UNACKED, {}).get(tag)
        if entry is None:
            return 0
        raw, _, name = json.loads(entry)
        self._zrem(INDEX, tag)
        self._hdel(UNACKED, tag)
        self._insert(name, json.dumps(raw), head=not leftmost)
        return 1

    # who waits for a message

    def block(self, question: Question, names: tuple[str, ...]) -> None:
        """Let a client wait for a message of some lists."""
        self._blocked.append((question, names))
        self._serve()

    def unblock(self, question: Question) -> bool:
        """Let a client wait no more; whether it did."""
        before = len(self._blocked)
        self._blocked = [one for one in self._blocked if one[0] is not question]
        return len(self._blocked) < before

    def _serve(self) -> None:
        for one in list(self._blocked):
            question, names = one
            name = next((name for name in names if self.lists.get(name)), None)
            if name is not None:
                self._blocked.remove(one)
                item = self.lists[name].pop()
                self.world.witness.taken(item)
                question.reply_later((name, item))

    # what befalls it

    def refuse(self, name: str) -> None:
        """Let a list take nothing more."""
        self.world.note("%s takes nothing", name)
        self.refusing.add(name)
        self.world.witness.refused(name)

    def take_again(self, name: str) -> None:
        """Let a list take what comes again."""
        self.world.note("%s takes messages again", name)
        self.refusing.discard(name)

    def stop(self) -> None:
        """Lose all connections, with what is on its way; keep all data."""
        self.world.note("the broker stops")
        self.down = True
        self.life += 1
        self._blocked.clear()
        for question in list(self.asked):
            question.fail()

    def start(self) -> None:
        """Serve again."""
        self.world.note("the broker is back")
        self.down = False


class Question:
    """One command of a client, on its way, and its reply. about: the delivery that it is for."""

    def __init__(
        self,
        client: Client,
        words: tuple[Any, ...],
        waits: float,
        about: Delivery | None,
    ) -> None:
        self.broker, self.worker, self.path = client.broker, client.worker, client.path
        self.words, self.about = words, about
        broker, path = self.broker, self.path
        self.world = broker.world
        self.thread = running()
        self.sent = self.world.now
        self.look = self.world.witness.look_of(self.worker)  # what its worker knows as it asks
        self.answers: list[Any] = []
        self._waits = waits  # s that the broker may keep it, for a message to come
        self._is_over, self._life = False, broker.life
        broker.asked[self] = None
        self.world.at(self.sent + path.delay(self.sent), self._arrive)

    def _arrive(self) -> None:
        broker, now = self.broker, self.world.now
        if self._life != broker.life or (self._is_over and self.words[0] == "BRPOP"):
            return  # of a timeout the command still comes in
        if broker.frozen_until > now:
            self.world.at(broker.frozen_until, self._arrive)
        elif self.words[0] == "BRPOP":
            self.world.at(now + self._waits, self._wait_no_more)
            broker.block(self, self.words[1])
        else:
            self.reply_later(broker.execute(self, *self.words))

    def _wait_no_more(self) -> None:
        if self.broker.unblock(self):
            self.reply_later(None)

    def reply_later(self, reply: Any) -> None:
        """Send the reply."""
        self.world.at(self.world.now + self.path.delay(self.world.now), self._answer, reply)

    def _answer(self, reply: Any) -> None:
        if not self._is_over:
            self.answers.append(reply)
            if self.thread is not None:
                self.thread.wake()

    def fail(self) -> None:
        """Lose the connection: neither the command nor the reply comes through."""
        self.over()
        self.answers.append(redis.ConnectionError("Connection closed by server."))
        if self.thread is not None:
            self.thread.wake()

    def over(self) -> None:
        """Wait no more for the reply."""
        self._is_over = True
        self.broker.asked.pop(self, None)


class Client:
    """What the shipped ledger takes for a client of redis-py, and what kombu's channel asks.

    timeout: s of the process's clock for a reply.
    """

    def __init__(self, worker: Worker, broker: Broker, path: Path, timeout: float) -> None:
        self.worker, self.broker, self.path, self.timeout = worker, broker, path, timeout

    def ask(self, *words: Any, waits: float = 0.0, about: Delivery | None = None) -> Any:
        """Send a command and wait for the reply; raises redis-py's errors."""
        try:
            question = self._ask(words, waits, about)
        except redis.RedisError:
            self.broker.world.witness.failed(self.worker, words)
            raise
        reply = question.answers[0]
        if isinstance(reply, Exception):
            self.broker.world.witness.failed(self.worker, words)
            raise reply
        self.broker.world.witness.answered(question)
        return reply

    def _ask(self, words: tuple[Any, ...], waits: float, about: Delivery | None) -> Question:
        worker = self.worker
        worker.pass_io()
        if self.broker.down:
            raise redis.ConnectionError("Connection refused.")
        thread = running()
        assert thread is not None
        question = Question(self, words, waits, about)
        until = worker.clock.real(self.timeout) if self.timeout < math.inf else math.inf
        while not question.answers and self.broker.world.now < until:
            thread.rest(until)
        question.over()
        worker.pass_io()
        if not question.answers:
            raise redis.TimeoutError("Timeout reading from socket")
        return question

    def eval(self, script: bytes, count: int, *words: Any) -> Any:
        """Run a script."""
        texts = [text_of(word) for word in words]
        return self.ask("EVAL", script, texts[:count], texts[count:])

    def hget(self, key: str, field: bytes) -> Any:
        """Return a field of a hash."""
        return self.ask("HGET", key, text_of(field))

    def hscan(self, key: str, cursor: Any, match: bytes, count: int) -> tuple[Any, dict[str, str]]:
        """Return what is there all the time, and some of what comes or goes meanwhile.

        cursor: 0 for the first page. The first of the reply is that of the next one, 0 at the end.
        """
        seen: set[str] = cursor or set()
        page = self.ask("HSCAN", key, text_of(match).removesuffix("*"), seen)
        return (seen if page else 0), dict(page)

    def zscan(
        self, key: str, cursor: Any, match: str, count: int
    ) -> tuple[Any, list[tuple[str, float]]]:
        """Return what is there all the time, as `hscan` does."""
        seen: set[str] = cursor or set()
        page = self.ask("ZSCAN", key, match.removesuffix("*"), seen)
        return (seen if page else 0), page

    def pipeline(self) -> Pipeline:
        """Return what collects commands for a transaction."""
        return Pipeline(self)


class Pipeline:
    """Commands that a client sends as one transaction."""

    def __init__(self, client: Client) -> None:
        self._client, self._commands = client, list[tuple[str, ...]]()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *error: object) -> None:
        """Forget what was not executed."""

    def zrem(self, key: str, member: bytes) -> Pipeline:
        """Take a member out of a sorted set."""
        self._commands.append(("ZREM", key, text_of(member)))
        return self

    def hdel(self, key: str, field: bytes) -> Pipeline:
        """Take a field out of a hash."""
        self._commands.append(("HDEL", key, text_of(field)))
        return self

    def execute(self) -> Any:
        """Execute all of them."""
        return self._client.ask("MULTI", *self._commands)
