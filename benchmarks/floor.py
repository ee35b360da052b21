"""The floor: the cost of one uncontended lock in I/O alone, with almost no Python around it.

It records the requests of the library once, and writes them to bare sockets. It polls until a
quorum has answered. Late replies, and those to releases, are read in the next round, as the library
does. It has no token for each round, no deadlines, no threads and no error handling, so it is no
usable lock.
"""

from __future__ import annotations

import contextlib
import re
import select
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

from redis import Redis
from redis.client import Monitor

from celery_redlock import Redlock

RESOURCE = "floor"
TTL = 30.0  # s
# the longest wait for a reply
PATIENCE = 10.0  # s
PATIENCE_MS = 10_000
_WORD = re.compile(rb'"((?:[^"\\]|\\.)*)"')  # as MONITOR quotes it


@dataclass(frozen=True)
class Requests:
    """What the library writes to one node for one lock, packed.

    key, value: of the lock, as they stand on the node.
    """

    key: bytes
    value: bytes
    grant: bytes
    renew: bytes
    release: bytes


class Floor:
    """One lock on N nodes over N bare sockets.

    urls: of the nodes. prefix: of its key, which nobody else may use.
    script: grant by the library's own script instead of a plain SET, so that what the script costs
    the servers can be told from what the library costs its own process.
    """

    def __init__(self, urls: Sequence[str], prefix: str, *, script: bool = False) -> None:
        self._quorum = len(urls) // 2 + 1
        self._by_descriptor: dict[int, socket.socket] = {}
        self._wires: list[tuple[int, socket.socket, bytes, bytes]] = []  # with grant and release
        for url, requests in zip(urls, overheard(urls, prefix), strict=True):
            sock = connected(url)
            grant = requests.grant if script else _plain(requests)
            self._granted, self._released = _tried(url, sock, requests, grant)
            sock.setblocking(False)
            self._by_descriptor[sock.fileno()] = sock
            self._wires.append((sock.fileno(), sock, grant, requests.release))
        self._unread_bytes = dict.fromkeys(self._by_descriptor, 0)  # bytes of replies not read yet
        self._poll = select.poll()
        for descriptor in self._by_descriptor:
            self._poll.register(descriptor, select.POLLIN)

    def acquire(self) -> None:
        """Ask all nodes; return when a quorum granted. Raises RuntimeError where none does."""
        unread_bytes = self._unread_bytes
        granted = self._granted
        for descriptor, sock, grant, _ in self._wires:
            sock.send(grant)
            unread_bytes[descriptor] += len(granted)
        votes = 0
        while votes < self._quorum:
            ready = self._poll.poll(PATIENCE_MS)
            if not ready:
                raise RuntimeError("the floor got no answer: is a node down?")
            for descriptor, _ in ready:
                data = self._by_descriptor[descriptor].recv(65536)
                unread_bytes[descriptor] -= len(data)
                if unread_bytes[descriptor] == 0:  # the last reply that is due is the grant's
                    if not data.endswith(granted):
                        raise RuntimeError(f"the floor was not granted its lock: {data!r}")
                    votes += 1

    def release(self) -> None:
        """Write the release to all nodes; the next round reads what they say."""
        unread_bytes = self._unread_bytes
        released = len(self._released)
        for descriptor, sock, _, release in self._wires:
            sock.send(release)
            unread_bytes[descriptor] += released

    def close(self) -> None:
        """Close the sockets."""
        for sock in self._by_descriptor.values():
            sock.close()


def overheard(urls: Sequence[str], prefix: str) -> list[Requests]:
    """Return what the library writes to each node for one lock, by listening on the nodes.

    So nothing here has to know how its scripts are called, and it always does the same work.
    """
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(Redis.from_url(url, socket_timeout=PATIENCE)) for url in urls]
        redlock = stack.enter_context(Redlock(urls, prefix=prefix))
        redlock.trust()
        lock = redlock.lock(RESOURCE, ttl=TTL)
        lock.acquire(PATIENCE)  # connections, and the scripts on the nodes
        lock.release()
        monitors = [stack.enter_context(node.monitor()) for node in nodes]
        lock.acquire(PATIENCE)
        key, value = _standing(nodes)
        lock.extend()
        lock.release()
        return [Requests(key, value, *_heard(monitor, value)) for monitor in monitors]


def packed(*words: bytes) -> bytes:
    """Return a request as the protocol has it."""
    return b"*%d\r\n" % len(words) + b"".join(
        b"$%d\r\n%b\r\n" % (len(word), word) for word in words
    )


def connected(url: str) -> socket.socket:
    """Return a socket to a node that sends at once, as the library's do."""
    parts = urlsplit(url)
    sock = socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 6379), PATIENCE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _standing(nodes: Sequence[Redis]) -> tuple[bytes, bytes]:
    """Return the lock's key and value, from a node that has granted it by now."""
    for node in nodes:
        for key in cast("list[bytes]", node.keys(f"*:{RESOURCE}")):
            return key, cast("bytes", node.get(key))
    raise RuntimeError("the lock is held, and stands on no node")


def _heard(monitor: Monitor, value: bytes) -> tuple[bytes, bytes, bytes]:
    """Return the three requests with this value that reached a node, in their order.

    The commands that its scripts call are heard as well, and left out.
    """
    requests: list[bytes] = []
    while len(requests) < 3:
        line: bytes = monitor.connection.read_response()
        words = [_unquoted(word) for word in _WORD.findall(line)]
        if value in words and b" lua] " not in line:
            requests.append(packed(*words))
    grant, renew, release = requests
    return grant, renew, release


def _unquoted(word: bytes) -> bytes:
    return word.decode("unicode_escape").encode("latin-1")


def _plain(requests: Requests) -> bytes:
    """Return the least that grants a lock."""
    ttl_ms = b"%d" % (TTL * 1000)
    return packed(b"SET", requests.key, requests.value, b"NX", b"PX", ttl_ms)


def _tried(url: str, sock: socket.socket, requests: Requests, grant: bytes) -> tuple[bytes, bytes]:
    """Return a node's replies to a grant and its release, once it is seen that they do it."""
    replies = []
    with Redis.from_url(url) as node:
        for request, is_stored in ((grant, True), (requests.release, False)):
            sock.sendall(request)
            replies.append(sock.recv(65536))
            if bool(node.exists(requests.key)) is not is_stored:
                raise RuntimeError(f"the floor's request was answered with {replies[-1]!r}")
    granted, released = replies
    return granted, released
