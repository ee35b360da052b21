"""Calls of the operating system that keep the interpreter's lock (GIL)."""

from __future__ import annotations

import ctypes
import os
import socket
import ssl

_libc = ctypes.PyDLL(None, use_errno=True)  # its calls keep the interpreter's lock (GIL)


def pause_keeping_gil(seconds: float) -> None:
    """Let so many s pass in which no other thread of Python runs; far below 1 ms."""
    _libc.usleep(int(seconds * 1e6))


class UnyieldingSocket:
    """The `send` and `recv` of a socket, without giving up the interpreter's lock (GIL).

    Python's own give it up in each call, and get it back when the thread that took it lets go: next
    to C code that keeps it for a second, each call takes a second. These cost a microsecond more.
    sock: does not block, so that a call is a copy and no more.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._send, self._recv = _libc.send, _libc.recv
        for call in (self._send, self._recv):
            call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
            call.restype = ctypes.c_ssize_t

    def send(self, data: bytes) -> int:
        """Return how many bytes the system took. Raises OSError, BlockingIOError for none."""
        flags = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)
        return _checked(self._send(self._socket.fileno(), data, len(data), flags))

    def recv(self, size: int) -> bytes:
        """Return what has come. Raises OSError, BlockingIOError for nothing."""
        return self._received(size, socket.MSG_DONTWAIT)

    def _received(self, size: int, flags: int) -> bytes:
        buffer = ctypes.create_string_buffer(size)
        count = _checked(self._recv(self._socket.fileno(), buffer, size, flags))
        return buffer.raw[:count]


class UnyieldingTlsSocket(UnyieldingSocket):
    """The same for TLS, which gives the GIL up once for what is sent, and for what has come."""

    _socket: ssl.SSLSocket

    def send(self, data: bytes) -> int:
        """Return how many bytes TLS took. Raises OSError, also for none."""
        return self._socket.send(data)

    def recv(self, size: int) -> bytes:
        """Return what has come. Raises OSError, BlockingIOError for nothing."""
        if not self._socket.pending():
            self._received(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        return self._socket.recv(size)

    def pending(self) -> int:
        """Return how many bytes are decrypted and not read yet."""
        return self._socket.pending()


def _checked(count: int) -> int:
    """Return what a call of the C library returned; raises the OSError of one that failed."""
    if count < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return count
