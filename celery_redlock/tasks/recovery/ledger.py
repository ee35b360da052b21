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
from celery_redlock.tasks.recovery.tags import PREFIX, DeliveryTag, lease_of, lease_start, moved

CLAIM_TIMEOUT = 3.0  # s after which another worker goes on with the messages of a dead one
CHUNK_BYTES = (
    500_000  # bytes of messages in one call of a script: a server answers nobody meanwhile
)
SCAN_COUNT = 1000  # entries that a server looks at for one HSCAN
BROKER_TIMEOUT = 3.0  # s for an answer of the broker
TIME_LIMITS = {
    "socket_timeout": BROKER_TIMEOUT,
    "socket_connect_timeout": BROKER_TIMEOUT,
}  # of kombu's transport
KOMBU_REDIS = "kombu.transport.redis"


def _script(name: str) -> bytes:
    folder = files("celery_redlock.tasks.recovery").joinpath("lua")
    return folder.joinpath(f"{name}.lua").read_bytes()


BEAT_SCRIPT, DECLARE_DEAD, MOVE = map(_script, ("beat", "declare_dead", "move"))
RECALL, TRY_PUSH = map(_script, ("recall", "try_push"))


class Beat(NamedTuple):
    """The reply to a beat.

    is_alive: False if the lease was declared dead. claimed: a dead lease whose messages the caller
    has to move, or "". quiet: the last beats of the leases without a beat for `QUIET` s.
    """

    is_alive: bool
    claimed: str = ""
    quiet: Mapping[str, str] = {}


@dataclass
class MoveResult:
    """What became of the messages of a dead worker lease.

    messages: how many were moved. kept: how many were not, since they were moved too often or are
    not kombu's. refusal: why the broker did not take one back, or "".
    """

    messages: int = 0
    kept: int = 0
    refusal: str = ""


@dataclass(frozen=True)
class Ledger:
    """The worker leases on one broker. Each call is one round trip; it raises redis-py's errors.

    client: a client without kombu's prefixes. key_prefix: the broker's `global_keyprefix`. unacked,
    index: kombu's keys, with that prefix. close: ends the connections of the client. lease_start:
    of the names of its worker leases; others are of workers with another `redlock_prefix`.
    """

    client: Any = field(repr=False)
    key_prefix: str
    unacked: str
    index: str
    leases: str
    dead: str
    names: str
    close: Callable[[], object] = field(default=tuple, repr=False)
    lease_start: str = PREFIX

    @classmethod
    def of(cls, channel: Any, prefix: str) -> Ledger:
        """Return the ledger on a channel's broker. prefix: the setting `redlock_prefix`."""
        key_prefix = channel.global_keyprefix
        key = channel.unacked_key
        key_start = f"{key_prefix}{{{prefix}}}:worker"
        return cls(
            redis.Redis(connection_pool=channel.pool),
            key_prefix,
            key_prefix + key,
            key_prefix + channel.unacked_index_key,
            f"{key_start}_leases:{key}",
            f"{key_start}_leases_dead:{key}",
            f"{key_start}_names:{key}",
            channel.pool.disconnect,
            lease_start(prefix),
        )

    def _eval(self, script: bytes, keys: tuple[str, ...], *args: object) -> Any:
        return self.client.eval(script, len(keys), *map(bytes_of, (*keys, *args)))

    def beat(self, lease: str, *, joins_as: str = "", claims: bool = False) -> Beat:
        """Write a beat of a worker lease. joins_as: the worker's name with the first beat.

        claims: the caller moves the messages of a dead lease, if no other worker does.
        """
        keys = self.leases, self.dead, self.names
        claim = int(CLAIM_TIMEOUT * 1000) if claims else ""
        reply = self._eval(BEAT_SCRIPT, keys, lease, joins_as, int(QUIET * 1000), claim)
        if not reply[0]:
            return Beat(False)
        claimed, *beats = map(decoded, reply[1:])
        return Beat(True, claimed, dict(zip(beats[::2], beats[1::2], strict=True)))

    def declare_dead(self, lease: str, beat: str = "", *, claims: bool = True) -> bool:
        """Declare a worker lease dead if its last beat is still the one that was seen; "": any.

        claims: the caller moves its messages; otherwise any worker may. Return whether this call
        has declared it dead.
        """
        keys = self.leases, self.dead
        return bool(self._eval(DECLARE_DEAD, keys, lease, beat, int(claims)))

    def forget(self, lease: str) -> None:
        """Delete a dead worker lease that has no messages to move."""
        with self.client.pipeline() as pipe:
            pipe.zrem(self.dead, bytes_of(lease)).hdel(self.names, bytes_of(lease)).execute()

    def name_of(self, lease: str) -> str:
        """Return the name of the worker of a lease, "" if it is not known."""
        name = self.client.hget(self.names, bytes_of(lease))
        return "" if name is None else bytes_of(name).decode(errors="replace")

    def entries(
        self, match: str = "*", after_round_trip: Callable[[], object] = tuple
    ) -> Iterator[tuple[str, str]]:
        """Yield the delivery tag of each unacknowledged message, and the entry that kombu wrote.

        after_round_trip: called after each round trip.
        """
        cursor = None
        pattern = bytes_of(match)
        while cursor != 0:
            cursor, batch = self.client.hscan(self.unacked, cursor or 0, pattern, SCAN_COUNT)
            after_round_trip()
            for tag, entry in batch.items():
                yield decoded(tag), decoded(entry)

    def tags(
        self, after_round_trip: Callable[[], object] = tuple, match: str = f"{PREFIX}*"
    ) -> Iterator[str]:
        """Yield each delivery tag that names a worker lease, some of them twice; see `entries`."""
        cursor: Any = None
        while cursor != 0:
            cursor, batch = self.client.zscan(self.index, cursor or 0, match, SCAN_COUNT)
            after_round_trip()
            for tag, _ in batch:
                yield decoded(tag)

    def recall(self, after_round_trip: Callable[[], object] = tuple) -> None:
        """Put forgotten worker leases that still have messages to move among the dead ones again.

        No worker lease joins once there are messages under it, so one of them that is neither among
        the living nor the dead has been dead. Those that were moved too often stay where they are.
        Whether one of workers with another `redlock_prefix` is dead is unknown here.
        """
        tags: dict[str, list[str]] = {}
        own_tags = self.tags(after_round_trip, f"{self.lease_start}*")
        for tag in filter(DeliveryTag.of, own_tags):
            tags.setdefault(lease_of(tag), []).append(tag)
        leases_with_messages = [
            lease
            for lease in self._recall("0", tags)
            if self._has_to_move(tags[lease], after_round_trip)
        ]
        self._recall("1", leases_with_messages)

    def _recall(self, puts: str, leases: Iterable[str]) -> list[str]:
        """Return those worker leases that are forgotten. puts: "1" puts them among the dead."""
        candidates = list(leases)
        if not candidates:
            return []
        return [
            decoded(lease)
            for lease in self._eval(RECALL, (self.leases, self.dead), puts, *candidates)
        ]

    def _has_to_move(self, tags: Iterable[str], after_round_trip: Callable[[], object]) -> bool:
        for tag in tags:
            entry = self.client.hget(self.unacked, bytes_of(tag))
            after_round_trip()
            if entry is not None and _moved_message_or_none(decoded(entry)) is not None:
                return True
        return False

    def move_all(
        self, lease: str, after_round_trip: Callable[[], object] = tuple, *, is_counted: bool = True
    ) -> MoveResult:
        """Move the messages of a dead worker lease to the heads of their lists, in their order.

        Several workers may do it at once, and a worker may die meanwhile: each tag is there once,
        so each message is moved once. The oldest message goes last, to the very head.
        after_round_trip: called after each round trip. is_counted: its worker has died with them.
        """
        entries = dict(
            self.entries(f"{lease}:*", after_round_trip)
        )  # a scan may have some of them twice
        parsed = [(DeliveryTag.of(tag), entry) for tag, entry in entries.items()]
        tagged = [(tag, entry) for tag, entry in parsed if tag is not None]
        tagged.sort(key=lambda message: message[0].number, reverse=True)
        messages = (
            (str(tag), tag.list, _moved_message_or_none(entry, is_counted)) for tag, entry in tagged
        )
        result = self.move(messages, lease, after_round_trip)
        result.kept += len(parsed) - len(tagged)
        if not result.refusal:
            self.forget(lease)
        return result

    def move(
        self,
        messages: Iterable[tuple[str, str, str | None]],
        lease: str = "",
        after_round_trip: Callable[[], object] = tuple,
    ) -> MoveResult:
        """Move messages in this order. messages: delivery tag, list and payload of each.

        A payload of None keeps the message. lease: the dead worker lease of the messages; its claim
        is renewed. "" for none.
        """
        result = MoveResult()
        keys = list[str]()
        args = list[str]()
        size = 0
        for tag, name, payload in messages:
            if payload is None:
                result.kept += 1
                continue
            keys.append(self.key_prefix + name)
            args += [tag, payload]
            size += len(payload)
            if size > CHUNK_BYTES:
                self._move(lease, keys, args, result)
                after_round_trip()
                keys = []
                args = []
                size = 0
        if keys:
            self._move(lease, keys, args, result)
            after_round_trip()
        return result

    def _move(self, lease: str, keys: list[str], args: list[str], result: MoveResult) -> None:
        moved_count, refusal = self._eval(
            MOVE, (self.unacked, self.index, self.dead, *keys), lease, *args
        )
        result.messages += moved_count
        result.refusal = decoded(refusal) or result.refusal

    def missing_rights(self) -> list[str]:
        """Return the rights that worker leases need and the broker's user lacks.

        Tries each command, and changes nothing. Of those that kombu itself needs only `RPUSH` is
        tried: kombu may do without it until it gives messages back at a shutdown.
        """
        key = f"{self.leases}\n"  # nobody has it
        commands: list[tuple[object, ...]] = [
            ("EVAL", "return 1", "1", key), ("TIME",), ("ZSCORE", key, "x"),
            ("ZRANGE", key, "0", "0"), ("ZRANGEBYSCORE", key, "0", "0"), ("HGET", key, "x"),
            ("HSCAN", key, "0"), ("HEXISTS", key, "x"), ("HDEL", key, "x"), ("ZREM", key, "x"),
            ("ZADD", key, "XX", "0", "x"), ("ZSCAN", key, "0"),
        ]  # fmt: skip
        with self.client.pipeline(transaction=False) as pipe:
            for command in (*commands, ("EVAL", TRY_PUSH, "1", key)):
                pipe.execute_command(*command)
            *replies, push_reply = pipe.execute(raise_on_error=False)
        missing = dict[str, None]()
        for (verb, *_), reply in zip(commands, replies, strict=True):
            if _is_denied(reply):
                of_keys = "to run the" not in str(reply)
                missing[self._key_pattern if of_keys else f"+{str(verb).lower()}"] = None
        if not missing and _is_denied(push_reply):
            missing["+rpush"] = None
        return list(missing)

    @property
    def _key_pattern(self) -> str:
        return f"~{self.leases.partition(':worker_')[0]}:*"


def _is_denied(reply: object) -> bool:
    """Return whether a reply is the error of a right that a user lacks, also within a script.

    Redis 7.0 and Valkey 7.2 each have words of their own for the latter, and no code.
    """
    script_errors = "executing the script can't", "ACL failure in script"
    is_error = isinstance(reply, ResponseError)
    return isinstance(reply, NoPermissionError) or (
        is_error and any(text in str(reply) for text in script_errors)
    )


def _moved_message_or_none(entry: str, is_counted: bool = True) -> str | None:
    try:
        return moved(entry, is_counted=is_counted)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # not kombu's
        return None


def decoded(reply: bytes | str) -> str:
    """Return a reply as a text that goes back as the same bytes, as a key has to."""
    return reply.decode(errors="surrogateescape") if isinstance(reply, bytes) else reply


def bytes_of(text: Any) -> Any:
    """Return a text as the bytes that it was read from: the name of a list may be no UTF-8."""
    return text.encode(errors="surrogateescape") if isinstance(text, str) else text


def is_kombus(channel: Any) -> bool:
    """Return whether a channel is one of kombu's own Redis transport, with acknowledgements.

    Other transports, also those that derive from it, may keep messages in another way.
    """
    is_own = type(channel).__module__ == KOMBU_REDIS
    return is_own and bool(getattr(channel, "ack_emulation", False))


def ledger_beside(connection: Any, prefix: str) -> Ledger:
    """Return the ledger on the broker of a connection; its own connections have time limits.

    prefix: the setting `redlock_prefix`. Raises redis-py's errors.
    """
    unlimited = 2**31  # each thread of a pool may ask at once
    options = {**(connection.transport_options or {}), **TIME_LIMITS, "max_connections": unlimited}
    clone = connection.clone(transport_options=options)
    # a channel raises the errors of a broker that is away; the default channel would wait for it
    return Ledger.of(clone.channel(), prefix)
