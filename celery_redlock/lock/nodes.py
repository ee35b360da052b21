"""One node: its address, its one ordered connection, and the scripts that run there.

redis-py makes the connection (URL, TLS, ACL, Sentinel) and is then asked for its socket: commands
are written without waiting, and answers are read in the order of the commands. One connection
means that a release can never overtake a straggling grant. The library's own retries are off.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import ipaddress
import math
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

import hiredis
import redis
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

from celery_redlock.errors import NodeError, SettingsError
from celery_redlock.lock.clock import (
    Alarm,
    Platform,
    UnyieldingSocket,
    UnyieldingTlsSocket,
)
from celery_redlock.lock.keys import decoded, encoded, fence_key, guard_keys
from celery_redlock.lock.votes import UnexpectedReplyError

T = TypeVar("T")

URL_SCHEMES = ("redis", "rediss", "unix", "sentinel")
LONGEST_RECONNECT = 1.0  # s: between tries to reach a node that refuses us
RECONNECT = ExponentialBackoff(cap=LONGEST_RECONNECT, base=0.05)
CUT = "an exception struck in the middle of a command"
BUSY = "another thread was at its connection for too long"
PAUSE, PAUSES = 0.0001, 1000  # s, and how many, for which one waits for another's turn to end
LINGER = 30.0  # s that a thread waits for the next time that its node is to be connected
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: unsent bytes go with the connection
_INCOMPLETE = object()


class Script:
    """A Lua script of this package, by its name, as the bytes that run it."""

    def __init__(self, name: str) -> None:
        source = files("celery_redlock.lock").joinpath("lua").joinpath(f"{name}.lua").read_bytes()
        digest = hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()
        self.name, self.source = name, source
        self._by_source = bulk(b"EVAL") + bulk(source)
        self.by_digest = bulk(b"EVALSHA") + bulk(digest)
        self.load = b"*3\r\n" + bulk(b"SCRIPT") + bulk(b"LOAD") + bulk(source)

    def call(self, keys: Sequence[str], *args: str) -> bytes:
        """Return the request for these keys and arguments, by the script's digest."""
        return self.begin(keys, len(args)) + b"".join(map(packed, args))

    def begin(self, keys: Sequence[str], count: int) -> bytes:
        """Return what each call for these keys begins with; so many packed arguments follow it."""
        words = [str(len(keys)), *keys]
        head = len(words) + count + 2
        return b"*%d\r\n%b%b" % (head, self.by_digest, b"".join(map(packed, words)))

    def with_source(self, request: bytes) -> bytes:
        """Return a request of this script with its text instead of the digest."""
        return request.replace(self.by_digest, self._by_source, 1)


def bulk(word: bytes) -> bytes:
    """Return a word as a RESP bulk string."""
    return b"$%d\r\n%b\r\n" % (len(word), word)


def packed(text: str) -> bytes:
    """Return a text as a RESP bulk string."""
    return bulk(encoded(text))


def encode_words(words: Iterable[str]) -> bytes:
    """Return texts as RESP bulk strings, one behind the other."""
    return b"".join(map(packed, words))


def request_of(*words: str) -> bytes:
    """Return a command as a request."""
    return b"*%d\r\n%b" % (len(words), encode_words(words))


GRANT, RENEW, RELEASE = Script("grant"), Script("renew"), Script("release")
GUARD, TRUST, BREAK = Script("guard"), Script("trust"), Script("break")


class Requests:
    """The requests of all locks under one prefix; what they have in common is packed once.

    A grant ends with what the connection knows of its server (`Peer.suffix`), added as it is
    written.
    """

    def __init__(self, prefix: str) -> None:
        names = b"".join(map(packed, (*guard_keys(prefix), fence_key(prefix)))).replace(b"%", b"%%")
        self._grant = b"*13\r\n" + GRANT.by_digest + b"$1\r\n4\r\n%b" + names + b"%b%b%b"
        self._asking = b"*14\r\n" + GRANT.by_digest + b"$1\r\n5\r\n%b" + names + b"%b%b%b%b"
        self._release = b"*6\r\n" + RELEASE.by_digest + b"$1\r\n1\r\n%b%b%b"
        self._last = b"*9\r\n" + RELEASE.by_digest + b"$1\r\n2\r\n%b%b%b%b%b%b"
        self._fence = packed(fence_key(prefix))

    def grant(self, key: bytes, value: bytes, ttl_ms: bytes, proposal: int | None = None) -> bytes:
        """Return the request for a lock; all but the proposal (a fencing token) packed already."""
        least = _NOTHING if proposal is None else bulk(b"%d" % proposal)
        return self._grant % (key, value, ttl_ms, least)

    def ask(
        self, key: bytes, value: bytes, ttl_ms: bytes, proposal: int | None, mark: bytes
    ) -> bytes:
        """Return the same request of a run that asks whether its end was marked; mark: the key."""
        least = _NOTHING if proposal is None else bulk(b"%d" % proposal)
        return self._asking % (key, mark, value, ttl_ms, least)

    def renewal(self, value: bytes, ttl_ms: bytes, token: int = 0) -> bytes:
        """Return what a request that renews has of each lock behind the keys.

        token: for fencing, 0 where the lock has none.
        """
        return value + ttl_ms + (bulk(b"%d" % token) if token else _NOTHING)

    def renew(self, keys: Sequence[bytes], renewals: Sequence[bytes], note: bytes = b"") -> bytes:
        """Return the request that renews these locks.

        note: the key of a lock's break, packed: then it is the only one, and is set where its key
        is missing.
        """
        names = len(keys) + 1 + bool(note)
        head = b"*%d\r\n%b%b" % (
            3 + names + 3 * len(keys),
            RENEW.by_digest,
            bulk(b"%d" % names),
        )
        return b"".join([head, *keys, self._fence, note, *renewals])

    def release(self, key: bytes, value: bytes, channel: bytes) -> bytes:
        """Return the request that gives a lock back; channel: packed, `_NOTHING` to say nothing."""
        return self._release % (key, value, channel)

    def release_done(
        self, key: bytes, value: bytes, channel: bytes, mark: bytes, at_ms: int, kept_ms: int
    ) -> bytes:
        """Return the request that marks a run as done and gives its lock back; mark: the key.

        at_ms: since 1970, when it was done. kept_ms: for how long the mark stays.
        """
        times = bulk(b"%d" % at_ms), bulk(b"%d" % kept_ms)
        return self._last % (key, mark, value, channel, *times)


_NOTHING = bulk(b"")
SAY_NOTHING = _NOTHING  # instead of a channel
NO_GUARD = _NOTHING * 3


@dataclass(frozen=True)
class Peer:
    """The server at the other end of a connection, as its handshake found it.

    run_id: "" if the server does not name it. suffix: the bytes that every command flagged
    `suffixed` ends with on this connection.
    """

    run_id: str = ""
    suffix: bytes = b""


PING = request_of("PING")


class Handler(Protocol):
    """Whoever sent a command, and is told the end of it for each node, by one thread at a time."""

    @property
    def wanted(self) -> bool:
        """Whether the command may still be written; asked in the turn of the node.

        So nothing that could set a key follows the release of its token: what ends the want comes
        before the release.
        """

    def answered(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Take a node's reply; sent: monotonic s before the command left; run_id: whose it is."""

    def failed(self, node: int, command: Command, error: NodeError) -> None:
        """Learn that no reply will come: the command may have run, or may run later."""


class Command:
    """One request, the same for every node. script: what it calls, where a node may forget it.

    suffixed: it ends with the suffix of its connection (`Peer.suffix`), added as it is written.
    dated: it says what time it is, so that it counts as sent when it was first, however often.
    """

    __slots__ = ("dated", "handler", "request", "script", "suffixed")

    def __init__(
        self,
        request: bytes,
        handler: Handler,
        script: Script | None = None,
        *,
        suffixed: bool = False,
        dated: bool = False,
    ) -> None:
        self.request, self.handler, self.script = request, handler, script
        self.suffixed, self.dated = suffixed, dated


class Unheard:
    """The handler of a command whose answer nobody needs."""

    wanted = True

    def answered(self, node: int, sent: float, reply: Any, run_id: str) -> None:
        """Leave it at that."""

    def failed(self, node: int, command: Command, error: NodeError) -> None:
        """Leave it at that."""


Entry = tuple[Command, float, bytes]  # a command, when it was sent, and as what


@dataclass(frozen=True)
class Address:
    """Where a node is and how to connect to it.

    name: host and port, or path; for logs and errors, never with credentials.
    server: what tells two addresses of one server apart from two servers.
    """

    name: str
    server: str
    pool: redis.ConnectionPool = field(repr=False)
    platform: Platform | None = field(default=None, repr=False)  # None: the machine's

    def dial(self, timeout: float) -> Any:
        """Return a connected and authenticated redis-py connection; timeout: s for each step."""
        options = {
            **self.pool.connection_kwargs,
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            "retry": Retry(NoBackoff(), 0),
            "retry_on_timeout": False,
            "retry_on_error": [],
            "health_check_interval": 0,
            "protocol": 2,
            "decode_responses": False,  # a name need not be a text by a client's own encoding
        }
        connection = self.pool.connection_class(**options)
        # it would tell the server who it is, and lose the reply of one that turns everybody away
        connection.driver_info = connection.lib_name = connection.lib_version = None
        connection.connect()
        return connection

    def ask(self, timeout: float, do: Callable[[Any], T]) -> T:
        """Return what a function gives, called with a connection of its own; timeout: as above."""
        connection = self.dial(timeout)
        try:
            return do(connection)
        finally:
            connection.disconnect()

    def without_secrets(self, text: str) -> str:
        """Return what a server said, without the credentials that some echo."""
        for name in ("password", "username"):
            secret = self.pool.connection_kwargs.get(name)
            text = text.replace(str(secret), "***") if secret else text
        return text


def parse_address(node: Any, level: str, name: str, timeout: float) -> Address:
    """Return the address that a URL or a redis-py client names.

    level, name: of the setting, for the error. timeout: s, for asking Sentinels.
    Raises SettingsError for what is neither, and for a scheme that is not known.
    """
    if isinstance(node, Address):
        return node
    if isinstance(node, redis.Redis):
        pool = node.connection_pool
        return _address_of(pool)
    if not isinstance(node, str):
        hint = f"must be a URL ({', '.join(f'{s}://' for s in URL_SCHEMES)}) or a redis.Redis"
        raise SettingsError(level, name, f"a {type(node).__name__}", hint)
    scheme, separator, _ = node.partition("://")
    if not separator or scheme not in URL_SCHEMES:
        known = ", ".join(f"{s}://" for s in URL_SCHEMES)
        raise SettingsError(
            level, name, repr(masked(node)), f"a node's URL starts with one of {known}"
        )
    try:
        if scheme == "sentinel":
            return _sentinel_address(node, timeout)
        return _address_of(redis.ConnectionPool.from_url(node))
    except (ValueError, TypeError):
        # the library's own text would show parts of the URL, and so of a password
        hint = (
            "is not a URL of a node; in user and password, write special characters with a "
            "percent sign (%2F for /), and Sentinels as sentinel://host:port,host:port/name"
        )
        raise SettingsError(level, name, repr(masked(node)), hint) from None


def masked(url: str) -> str:
    """Return a URL with user, password and query taken out, fit for a log."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return "..." if "@" in url else url
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"


def _address_of(pool: Any) -> Address:
    if getattr(pool, "service_name", None) is not None:
        return _watched_address(pool)
    options = pool.connection_kwargs
    if "path" in options:
        return Address(options["path"], options["path"], pool)
    host, port = _place_of(options)
    return Address(f"{host}:{port}", f"{_canonical(host)}:{port}", pool)


def _place_of(options: Mapping[str, Any]) -> tuple[str, int]:
    return options.get("host", "localhost"), int(options.get("port", 6379))


def _watched_address(pool: Any) -> Address:
    """Return the address of what Sentinels watch: two groups of them may use one service name."""
    sentinels = pool.sentinel_manager.sentinels
    places = [_place_of(one.connection_pool.connection_kwargs) for one in sentinels]
    name = f"sentinel://{','.join(f'{host}:{port}' for host, port in places)}/{pool.service_name}"
    each = sorted(f"{_canonical(host)}:{port}" for host, port in places)
    return Address(name, f"sentinel://{','.join(each)}/{pool.service_name}", pool)


def _canonical(host: str) -> str:
    """Return one spelling for the several ones of a host that need no look-up."""
    if host.lower() in ("localhost", "localhost.localdomain", ""):
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host.lower().rstrip(".")


def _sentinel_address(url: str, timeout: float) -> Address:
    parts = urlsplit(url)
    hosts = [entry.rpartition(":") for entry in parts.netloc.rpartition("@")[2].split(",")]
    service = parts.path.strip("/")
    if not service or not all(host and port.isdigit() for host, _, port in hosts):
        raise ValueError("sentinel://host:port,host:port/name")
    credentials = {
        "username": unquote(parts.username or ""),
        "password": unquote(parts.password or ""),
    }
    sentinel = Sentinel(
        [(host, int(port)) for host, _, port in hosts],
        sentinel_kwargs={"socket_timeout": timeout},
        **{key: value for key, value in credentials.items() if value},
    )
    return _address_of(sentinel.master_for(service).connection_pool)


class Wire:
    """One live connection: what was written and is not answered yet, in order.

    Written in the node's turn, read by one thread at a time. An exception in the middle of
    either ends its use: nobody knows what left or came, and replies must not shift. A command is
    in `pending` or in `answers`, or for a moment in both, until its handler has the answer.
    """

    __slots__ = (
        "_connection",
        "_reader",
        "_ways",
        "answers",
        "cut",
        "discarded",
        "is_tls",
        "opened_at",
        "pending",
        "run_id",
        "socket",
        "struck",
        "suffix",
        "unsent",
        "used_at",
    )

    def __init__(self, connection: Any, peer: Peer) -> None:
        self._connection = connection
        self.run_id, self.suffix = peer.run_id, peer.suffix
        self.cut = False  # an exception from outside struck in the middle of a command
        self.discarded = ""  # why no reply of this connection counts any more
        self.opened_at = self.used_at = 0.0  # monotonic s: connected, last written to
        self.socket = connection._sock
        self.socket.setblocking(False)
        # reading and writing share one TLS state, which two threads must not enter
        self.is_tls = hasattr(self.socket, "pending")
        self._ways = self.socket, _unyielding(self.socket)
        self._reader = hiredis.Reader(notEnoughData=_INCOMPLETE)
        self.pending: deque[Entry] = deque()
        self.answers: deque[tuple[Entry, Any]] = deque()
        self.struck: tuple[Entry, Any] | None = None  # an answer whose handler raised
        self.unsent = b""

    def write(self, entries: Sequence[Entry], *, keeps_gil: bool = True) -> None:
        """Hand commands to the socket; what it does not take stays in `unsent`.

        keeps_gil: as of `Node.send`. Raises OSError; then, too, they are among those that are
        pending.
        """
        try:
            self.pending.extend(entries)
            if self.cut:
                self._refuse()
            suffix = self.suffix
            if len(entries) == 1:
                command, _, text = entries[0]
                data = text + suffix if command.suffixed else text
            else:
                data = b"".join([t + suffix if c.suffixed else t for c, _, t in entries])
            if self.unsent:
                data = self.unsent + data
            try:
                sent = self._ways[keeps_gil].send(data)
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                sent = 0
            if sent < len(data) or self.unsent:
                self.unsent = data[sent:]
        except OSError:
            raise
        except BaseException:
            self.cut = True
            raise

    def _refuse(self) -> None:
        raise OSError(CUT)

    def read(self, *, keeps_gil: bool = True) -> None:
        """Move what has come to `answers`. Raises OSError at the connection's end."""
        if self.cut:
            self._refuse()
        try:
            reader, pending, done = self._reader, self.pending, self.answers.append
            reader.feed(receive(self._ways[keeps_gil]))
            gets = reader.gets
            while (reply := gets()) is not _INCOMPLETE:
                done((pending[0], reply))
                pending.popleft()  # last: cut in between, it is answered and given up, not lost
        except IndexError:
            raise OSError("an answer that nobody asked for") from None
        except OSError:
            raise
        except hiredis.ProtocolError as error:
            raise OSError(f"not a Redis server: {error}") from error
        except BaseException:
            self.cut = True
            raise

    def close(self, *, reset: bool) -> None:
        """End the connection; reset: throw away what has not left this machine."""
        if reset:
            with contextlib.suppress(OSError):  # a unix socket, or one closed already
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self._connection.disconnect()
        self.socket.close()  # where an exception has cut the line above, and this is done again


def _unyielding(sock: Any) -> Any:
    """Return a socket that keeps the GIL, or, of what is no socket of the system, itself."""
    if hasattr(sock, "pending"):
        return UnyieldingTlsSocket(sock)
    return UnyieldingSocket(sock) if isinstance(sock, socket.socket) else sock


def receive(sock: Any) -> bytes:
    """Return what has come on a socket that does not block, b"" for nothing.

    Raises OSError at the connection's end.
    """
    data: bytes | None = None
    try:
        data = sock.recv(65536)
        if data and hasattr(sock, "pending"):  # TLS: decrypted already
            while sock.pending():
                data += sock.recv(65536)
    except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
        return data or b""
    if not data:
        raise OSError("connection closed by the server")
    return data


@dataclass(frozen=True)
class TransportOptions:
    """Times in seconds.

    timeout: for a connect and for a reply. longest_idle: after that long without a write, a
    connection is made anew before it is used.
    """

    timeout: float
    longest_idle: float = math.inf


class NodeOwner(Protocol):
    """The set of nodes that a node is of. Every method is called from any thread."""

    def report(self, node: int, entries: deque[Entry], error: NodeError, wire: Wire | None) -> None:
        """Take word of a connection that broke or could not be made.

        entries: the commands that get no reply. wire: to be closed, where nobody reads from it.
        """

    def rearm(self) -> None:
        """Hear that there is something new to poll for."""

    def handshake(self, connection: Any, node: int) -> Any:
        """Greet the server of a new connection; returns its `Peer`. Raises what refuses it."""

    def admit(self, node: int, info: Any, use: Callable[[], None]) -> None:
        """Call `use` to let a connection be used, or raise NodeError to refuse it.

        info: what `handshake` returned.
        """


class Node:
    """The one ordered connection of this process to one node, made again when it breaks.

    All that changes it is done by whoever has the turn. A caller that finds it taken leaves its
    job behind, in order, and never waits. jobs: that are left to do.
    index: its place in the list of nodes. owner: the set of nodes that it is of.
    """

    def __init__(
        self,
        index: int,
        address: Address,
        options: TransportOptions,
        platform: Platform,
        owner: NodeOwner,
    ) -> None:
        self.index, self.address, self.timeout = index, address, options.timeout
        self._longest_idle = options.longest_idle
        self._platform, self._clock = platform, platform.clock
        self._owner, self._report, self._wake = owner, owner.report, owner.rearm
        self.forget()

    def forget(self) -> None:
        """Start anew without a connection, as a forked child must: the old one is its parent's."""
        self._turn = self._platform.turn()
        self.jobs: deque[Callable[[], None]] = deque()
        self.wire: Wire | None = None
        self.run_id = ""
        self.error: NodeError | None = None
        self._connecting = self._closed = False
        self._connector: Alarm | None = (
            None  # rung for the thread that connects, while there is one
        )
        self._tries, self._retry_at = 0, 0.0
        self._queued: list[Entry] = []

    @property
    def name(self) -> str:
        """Its address, without credentials."""
        return self.address.name

    @property
    def outstanding(self) -> bool:
        """Whether a command waits for its answer, or a job for its turn."""
        wire = self.wire
        return bool(self._queued or self.jobs or (wire is not None and wire.pending))

    @property
    def is_interrupted(self) -> bool:
        """Whether the caller interrupts its own thread as that changes the connection."""
        return self._turn.is_interrupted

    @property
    def is_used(self) -> bool:
        """Whether it has a connection, or a thread that makes one."""
        return self.wire is not None or self._connector is not None

    def send(self, entries: Sequence[Entry], *, keeps_gil: bool = True) -> None:
        """Write commands in order, or keep them until the connection under way stands.

        keeps_gil: next to C code that keeps it, each call that gives it up waits for that code;
        not for what is to be fast otherwise. Never waits. What cannot be written is reported, what
        is not wanted any more is left out.
        """
        if self.jobs or not self._turn.run(self._write, entries, keeps_gil):
            self.jobs.append(functools.partial(self._write, entries))
        if self.jobs:
            self._do_all()

    def receive(self, *, keeps_gil: bool = True) -> Wire | None:
        """Read what has come and return the wire, whose `answers` are to be handed on in order.

        keeps_gil: as of `send`. Never waits. None where there is no connection, or another thread
        is at it.
        """
        wire = self.wire
        if wire is None:
            return None
        try:
            if wire.is_tls:
                if not self._turn.run(functools.partial(wire.read, keeps_gil=keeps_gil)):
                    return None
            else:
                wire.read(keeps_gil=keeps_gil)
        except OSError as error:
            self.drop(wire, self._cause(error))
        if wire.unsent:
            self._do(self._flush)
        elif self.jobs:
            self._do_all()
        return wire

    def overdue(self, now: float) -> bool:
        """Tell whether the oldest command has waited for longer than a node may take."""
        wire = self.wire
        if wire is None or not wire.pending:
            return False
        try:
            latest = now - self.timeout  # that it may have been sent at
            return wire.pending[0][1] < latest and wire.opened_at < latest
        except IndexError:  # another thread has read it meanwhile
            return False

    def drop(self, wire: Wire, cause: str) -> None:
        """Give a connection up and report every command that it takes along."""
        self._do(functools.partial(self._give_up, wire, cause))

    def abandon(self, cause: str) -> None:
        """Give the connection up without touching what one who may still read from it holds."""
        self._do(functools.partial(self._abandon, cause))

    def close(self) -> None:
        """Close the connection for good; what is under way is not reported."""
        self._do(self._close)

    def connect(self) -> None:
        """Begin to connect in the background where there is no connection and one may be tried."""
        if self.wire is None and not self._connecting:
            self._do(self._begin_to_connect)

    def go_on(self) -> None:
        """Do what is left to do; an exception from outside may have cut who was at it."""
        if self.jobs:
            self._do_all()

    def _do(self, job: Callable[[], None]) -> None:
        """Do a job now, or leave it to the one that does another: it looks for more at its end."""
        self.jobs.append(job)
        self._do_all()

    def _do_all(self) -> None:
        try:
            while self.jobs and self._turn.run(self._work):
                pass  # once more: a job may have come as the turn ended
        except BaseException:
            self._wake()  # whoever waits goes on with it
            raise

    def _work(self) -> None:
        jobs = self.jobs
        while jobs:
            jobs[0]()
            jobs.popleft()  # last: a job that is cut is done again, and none is lost

    # the jobs: each does no harm if it is done twice

    def _write(self, entries: Sequence[Entry], keeps_gil: bool = True) -> None:
        wire = self.wire
        if wire is not None and entries and entries[-1][1] - wire.used_at > self._longest_idle:
            cause = "idle for so long that another server may have served meanwhile"
            self._give_up(wire, cause)
            wire = None
        wanted = _wanted(entries)
        if wire is not None:
            try:
                if wanted:
                    wire.write(wanted, keeps_gil=keeps_gil)
                    wire.used_at = wanted[-1][1]
            except OSError as error:
                self._give_up(wire, self._cause(error))
            else:
                if wire.unsent:
                    self._wake()
        elif self._connecting or self._start_connecting():
            self._queued += wanted
        else:
            why = self.error or NodeError(self.name, "not connected")
            self._report(self.index, deque(entries), why, None)

    def _flush(self) -> None:
        wire = self.wire
        if wire is not None and wire.unsent:
            try:
                wire.write(())
            except OSError as error:
                self._give_up(wire, self._cause(error))

    def _give_up(self, wire: Wire, cause: str) -> None:
        if self.wire is not wire:
            return
        error = NodeError(self.name, cause, lost=True)
        # emptied and closed where nobody reads: a reader with an answer in its hands would
        # else find the next command in front, and one at the socket a stranger's descriptor.
        # And first: cut after it, the connection is given up twice, but no command forgotten
        self._report(self.index, wire.pending, error, wire)
        self.wire, self.error, self._retry_at = None, error, 0.0

    def _abandon(self, cause: str) -> None:
        wire = self.wire
        if wire is None:
            return
        wire.cut = True
        error = self.error = NodeError(self.name, cause, lost=True)
        entries = deque(entry for entry, _ in wire.answers.copy())
        entries.extend(wire.pending.copy())
        self._report(self.index, entries, error, None)
        self.wire, self._retry_at = None, 0.0

    def _close(self) -> None:
        wire = self.wire
        if wire is not None:
            wire.close(reset=False)
        self.wire, self._closed = None, True
        self._queued.clear()
        if self._connector is not None:  # last: its thread ends
            self._connector.ring()

    def _begin_to_connect(self) -> None:
        if self.wire is None and not self._connecting:
            self._start_connecting()

    def _start_connecting(self) -> bool:
        if self._closed or self._clock.now() < self._retry_at:
            return False
        if self._connector is None:
            connector = self._platform.alarm()
            self._platform.start_thread(functools.partial(self._serve_connects, connector))
            self._connector = connector
        self._connector.ring()  # first: cut in between, it is one connect too many, not none
        self._connecting = True
        return True

    def _use(self, wire: Wire) -> None:
        self._connecting, self._tries, self.error = False, 0, None
        if self._closed:
            wire.close(reset=False)
            return
        wire.opened_at = wire.used_at = self._clock.now()
        self.wire, self.run_id = wire, wire.run_id
        if self._queued:
            self._write(self._queued)
        self._queued = []
        self._wake()

    def _connect_failed(self, error: NodeError) -> None:
        rest = RECONNECT.compute(self._tries)
        self._report(self.index, deque(self._queued), error, None)
        self._queued = []
        self._connecting, self.error = False, error
        self._tries, self._retry_at = min(self._tries + 1, 16), self._clock.now() + rest

    def _end_connector(self, connector: Alarm) -> None:
        if self._connector is connector:
            self._connector = None
            if self._connecting:  # asked for just now
                self._connecting = False
                self._start_connecting()

    # the thread that connects

    def _serve_connects(self, connector: Alarm) -> None:
        """Connect whenever that is asked for, in a thread of its own.

        It lingers: under gevent each new thread would cost an event loop.
        """
        while connector.sleep(LINGER):
            if self._closed:
                return
            if self.wire is None:
                self._connect()
        self._do(functools.partial(self._end_connector, connector))

    def _begin_to_use(self, wire: Wire) -> None:
        """Use a connection; not as a job, which may be done when it is not admitted any more."""
        for number in range(PAUSES):
            if number:
                self._platform.pause(PAUSE)
            if self._turn.run(self._use, wire):
                self.go_on()
                return
        raise NodeError(self.name, BUSY)

    def adopt(self, connection: Any, info: Any) -> None:
        """Use a connection whose handshake is done, if the owner admits it.

        connection: as of `Address.dial`. info: the `Peer` of the handshake. Raises NodeError.
        """
        wire = Wire(connection, info)
        self._owner.admit(self.index, info, functools.partial(self._begin_to_use, wire))

    def _connect(self) -> None:
        """Connect, and send what has been queued meanwhile."""
        connection = None
        try:
            connection = self.address.dial(self.timeout)
            self.adopt(connection, self._owner.handshake(connection, self.index))
        except Exception as error:  # also what a user's credential provider raises
            if connection is not None:
                connection.disconnect()
            if not isinstance(error, NodeError):
                error = NodeError(self.name, self._cause(error))
            self._do(functools.partial(self._connect_failed, error))

    def _cause(self, error: BaseException) -> str:
        """Return an error in the words of the server or the system, without credentials."""
        text = str(error).strip().rstrip(".") or type(error).__name__
        return self.address.without_secrets(text)


def _wanted(entries: Sequence[Entry]) -> Sequence[Entry]:
    for command, _, _ in entries:
        if not command.handler.wanted:
            return [entry for entry in entries if entry[0].handler.wanted]
    return entries


def read_list(reply: Any, length: int) -> list[Any]:
    """Return a reply that is a list of so many; raises UnexpectedReplyError."""
    if not isinstance(reply, list) or len(reply) != length:
        raise UnexpectedReplyError(reply)
    return reply


def read_number(reply: Any) -> int:
    """Return a reply that is a number; raises UnexpectedReplyError."""
    if type(reply) is not int:
        raise UnexpectedReplyError(reply)
    return reply


def read_text(reply: Any) -> str:
    """Return a reply that is a text; raises UnexpectedReplyError."""
    if not isinstance(reply, (bytes, str)):
        raise UnexpectedReplyError(reply)
    return text_of(reply)


def text_of(reply: Any) -> str:
    """Return a reply as text, for people."""
    return decoded(reply) if isinstance(reply, bytes) else str(reply)
