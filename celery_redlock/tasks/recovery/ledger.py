"""The worker leases in a broker's Redis, for one hash of unacknowledged messages.

Workers with the same hash find each other's worker leases, whatever app they run: a move needs no
knowledge of tasks. Not here: when what is called (`keeper.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, NamedTuple

import redis
from redis.exceptions import NoPermissionError, ResponseError

from celery_redlock.tasks.recovery.observer import QUIET
from celery_redlock.tasks.recovery.tags import PREFIX, DeliveryTag, lease_of, moved

CLAIM = 3.0  # s after which another worker goes on with the messages of a dead one
CHUNK = 500_000  # bytes of messages in one call of a script: a server answers nobody meanwhile
SCANNED = 1000  # entries that a server looks at for one HSCAN
TIMEOUT = 3.0  # s for an answer of the broker
TIME_LIMITS = {"socket_timeout": TIMEOUT, "socket_connect_timeout": TIMEOUT}  # of kombu's transport
OF_KOMBU = "kombu.transport.redis"


def _script(name: str) -> bytes:
    folder = files("celery_redlock.tasks.recovery").joinpath("lua")
    return folder.joinpath(f"{name}.lua").read_bytes()


BEAT_SCRIPT, DECLARE_DEAD, MOVE = map(_script, ("beat", "declare_dead", "move"))
RECALL, TRY_PUSH = map(_script, ("recall", "try_push"))


class Beat(NamedTuple):
    """The answer to a beat. claimed: a dead lease that the caller is to move, or "".

    quiet: what each worker lease that others may have left last wrote.
    """

    is_alive: bool
    claimed: str = ""
    quiet: Mapping[str, str] = {}


@dataclass
class Moved:
    """What became of the messages of a dead worker lease.

    kept: were moved too often, or are not kombu's. refused: why the broker did not take one back,
    or "".
    """

    messages: int = 0
    kept: int = 0
    refused: str = ""


@dataclass(frozen=True)
class Ledger:
    """The worker leases on one broker. Each call is one round trip; it raises redis-py's errors.

    client: a client without kombu's prefixes. at: the broker's `global_keyprefix`. unacked, index:
    kombu's keys, with that prefix. close: ends the connections of the client.
    """

    client: Any = field(repr=False)
    at: str
    unacked: str
    index: str
    leases: str
    dead: str
    names: str
    close: Callable[[], object] = field(default=tuple, repr=False)

    @classmethod
    def of(cls, channel: Any, prefix: str) -> Ledger:
        """Return that of the broker of a channel. prefix: the setting `redlock_prefix`."""
        at = channel.global_keyprefix
        key = channel.unacked_key
        start = f"{at}{{{prefix}}}:worker"
        return cls(
            redis.Redis(connection_pool=channel.pool),
            at,
            at + key,
            at + channel.unacked_index_key,
            f"{start}_leases:{key}",
            f"{start}_leases_dead:{key}",
            f"{start}_names:{key}",
            channel.pool.disconnect,
        )

    def _eval(self, script: bytes, keys: tuple[str, ...], *args: object) -> Any:
        return self.client.eval(script, len(keys), *map(bytes_of, (*keys, *args)))

    def beat(self, lease: str, *, joins_as: str = "", claims: bool = False) -> Beat:
        """Say that a worker lease lives. joins_as: the worker's name, for the first time.

        claims: the caller moves the messages of a dead one, if there is one that nobody moves.
        """
        keys = self.leases, self.dead, self.names
        claim = int(CLAIM * 1000) if claims else ""
        reply = self._eval(BEAT_SCRIPT, keys, lease, joins_as, int(QUIET * 1000), claim)
        if not reply[0]:
            return Beat(False)
        claimed, *rest = map(decoded, reply[1:])
        return Beat(True, claimed, dict(zip(rest[::2], rest[1::2], strict=True)))

    def declare_dead(self, lease: str, beat: str = "", *, claims: bool = True) -> bool:
        """Declare a worker lease dead if its last beat is still the one that was seen; "": any.

        claims: the caller moves its messages, or else any worker. Return whether it is dead now by
        this call.
        """
        keys = self.leases, self.dead
        return bool(self._eval(DECLARE_DEAD, keys, lease, beat, int(claims)))

    def forget(self, lease: str) -> None:
        """Strike a dead worker lease out, as nothing of it is left to move."""
        with self.client.pipeline() as pipe:
            pipe.zrem(self.dead, bytes_of(lease)).hdel(self.names, bytes_of(lease)).execute()

    def name_of(self, lease: str) -> str:
        """Return the name of the worker of a lease, "" if it is not known."""
        name = self.client.hget(self.names, bytes_of(lease))
        return "" if name is None else bytes_of(name).decode(errors="replace")

    def entries(
        self, match: str = "*", between: Callable[[], object] = tuple
    ) -> Iterator[tuple[str, str]]:
        """Yield the delivery tag of each unacknowledged message, and what kombu noted of it.

        between: is called after each round trip.
        """
        cursor = None
        pattern = bytes_of(match)
        while cursor != 0:
            cursor, found = self.client.hscan(self.unacked, cursor or 0, pattern, SCANNED)
            between()
            for tag, entry in found.items():
                yield decoded(tag), decoded(entry)

    def tags(self, between: Callable[[], object] = tuple) -> Iterator[str]:
        """Yield each delivery tag that names a worker lease, some of them twice; see `entries`."""
        cursor: Any = None
        while cursor != 0:
            cursor, found = self.client.zscan(self.index, cursor or 0, f"{PREFIX}*", SCANNED)
            between()
            for tag, _ in found:
                yield decoded(tag)

    def recall(self, between: Callable[[], object] = tuple) -> None:
        """Put forgotten worker leases that still have messages to move among the dead ones again.

        No worker lease joins once there are messages under it, so one of them that is neither among
        the living nor the dead has been dead. Those that were moved too often stay where they are.
        """
        tags: dict[str, list[str]] = {}
        for tag in filter(DeliveryTag.of, self.tags(between)):
            tags.setdefault(lease_of(tag), []).append(tag)
        left = [
            lease for lease in self._recall("0", tags) if self._has_to_move(tags[lease], between)
        ]
        self._recall("1", left)

    def _recall(self, puts: str, leases: Iterable[str]) -> list[str]:
        """Return the forgotten ones of some worker leases. puts: "1" to put them to the dead."""
        some = list(leases)
        if not some:
            return []
        return [decoded(one) for one in self._eval(RECALL, (self.leases, self.dead), puts, *some)]

    def _has_to_move(self, tags: Iterable[str], between: Callable[[], object]) -> bool:
        for tag in tags:
            entry = self.client.hget(self.unacked, bytes_of(tag))
            between()
            if entry is not None and _moved_or_none(decoded(entry)) is not None:
                return True
        return False

    def move_all(
        self, lease: str, between: Callable[[], object] = tuple, *, is_counted: bool = True
    ) -> Moved:
        """Move the messages of a dead worker lease to the heads of their lists, in their order.

        Any number of workers may do it at once, and one may die within: a delivery tag is there
        once, so each message is moved once. The oldest goes last, and so to the very head. between:
        is called after each round trip. is_counted: its worker has died with them.
        """
        entries = dict(self.entries(f"{lease}:*", between))  # a scan may have some of them twice
        found = [(DeliveryTag.of(tag), entry) for tag, entry in entries.items()]
        tagged = [(tag, entry) for tag, entry in found if tag is not None]
        tagged.sort(key=lambda one: one[0].number, reverse=True)
        made = ((str(tag), tag.list, _moved_or_none(entry, is_counted)) for tag, entry in tagged)
        done = self.move(made, lease, between)
        done.kept += len(found) - len(tagged)
        if not done.refused:
            self.forget(lease)
        return done

    def move(
        self,
        messages: Iterable[tuple[str, str, str | None]],
        lease: str = "",
        between: Callable[[], object] = tuple,
    ) -> Moved:
        """Move messages in this order: a delivery tag, its list, and what goes there, each.

        A message of None is kept. lease: the dead worker lease that they have, which is claimed on;
        "" for none.
        """
        done = Moved()
        keys = list[str]()
        args = list[str]()
        size = 0
        for tag, name, payload in messages:
            if payload is None:
                done.kept += 1
                continue
            keys.append(self.at + name)
            args += [tag, payload]
            size += len(payload)
            if size > CHUNK:
                self._move(lease, keys, args, done)
                between()
                keys = []
                args = []
                size = 0
        if keys:
            self._move(lease, keys, args, done)
            between()
        return done

    def _move(self, lease: str, keys: list[str], args: list[str], done: Moved) -> None:
        moved_now, why = self._eval(
            MOVE, (self.unacked, self.index, self.dead, *keys), lease, *args
        )
        done.messages += moved_now
        done.refused = decoded(why) or done.refused

    def missing_rights(self) -> list[str]:
        """Return the rights that worker leases need and the broker's user lacks.

        Tries each command, and changes nothing. Of those that kombu itself needs only `RPUSH` is
        tried: kombu may do without it until it gives messages back at a shutdown.
        """
        key = f"{self.leases}\n"  # nobody has it
        tried: list[tuple[object, ...]] = [
            ("EVAL", "return 1", "1", key), ("TIME",), ("ZSCORE", key, "x"),
            ("ZRANGE", key, "0", "0"), ("ZRANGEBYSCORE", key, "0", "0"), ("HGET", key, "x"),
            ("HSCAN", key, "0"), ("HEXISTS", key, "x"), ("HDEL", key, "x"), ("ZREM", key, "x"),
            ("ZADD", key, "XX", "0", "x"), ("ZSCAN", key, "0"),
        ]  # fmt: skip
        with self.client.pipeline(transaction=False) as pipe:
            for command in (*tried, ("EVAL", TRY_PUSH, "1", key)):
                pipe.execute_command(*command)
            *replies, pushed = pipe.execute(raise_on_error=False)
        missing = dict[str, None]()
        for (name, *_), reply in zip(tried, replies, strict=True):
            if _is_denied(reply):
                of_keys = "to run the" not in str(reply)
                missing[self._keys if of_keys else f"+{str(name).lower()}"] = None
        if not missing and _is_denied(pushed):
            missing["+rpush"] = None
        return list(missing)

    @property
    def _keys(self) -> str:
        return f"~{self.leases.partition(':worker_')[0]}:*"


def _is_denied(reply: object) -> bool:
    """Return whether a reply is the error of a right that a user lacks, also within a script.

    Redis 7.0 and Valkey 7.2 each have words of their own for the latter, and no code.
    """
    in_scripts = "executing the script can't", "ACL failure in script"
    is_one = isinstance(reply, ResponseError)
    return isinstance(reply, NoPermissionError) or (
        is_one and any(text in str(reply) for text in in_scripts)
    )


def _moved_or_none(entry: str, is_counted: bool = True) -> str | None:
    try:
        return moved(entry, is_counted=is_counted)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # not kombu's
        return None


def decoded(reply: bytes | str) -> str:
    """Return a reply as a text that goes back as the same bytes, as a key has to."""
    return reply.decode(errors="surrogateescape") if isinstance(reply, bytes) else reply


def bytes_of(word: Any) -> Any:
    """Return a text as the bytes that it was read from: the name of a list may be no UTF-8."""
    return word.encode(errors="surrogateescape") if isinstance(word, str) else word


def is_kombus(channel: Any) -> bool:
    """Return whether a channel is one of kombu's own Redis transport, with acknowledgements.

    Other transports, also those that derive from it, may keep messages in another way.
    """
    is_own = type(channel).__module__ == OF_KOMBU
    return is_own and bool(getattr(channel, "ack_emulation", False))


def ledger_beside(connection: Any, prefix: str) -> Ledger:
    """Return the worker leases on the broker of a connection, over others, with time limits.

    prefix: the setting `redlock_prefix`. Raises redis-py's errors.
    """
    more = 2**31  # each thread of a pool may ask at once
    options = {**(connection.transport_options or {}), **TIME_LIMITS, "max_connections": more}
    beside = connection.clone(transport_options=options)
    # raises the errors of a broker that is away, for which its default channel would wait
    return Ledger.of(beside.channel(), prefix)
