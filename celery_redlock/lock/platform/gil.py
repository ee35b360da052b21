"""Calls of the operating system that keep the interpreter's lock (GIL)."""

from __future__ import annotations

import ctypes
import os
import socket
import ssl

_libc = ctypes.PyDLL(None, use_errno=True)  # its calls keep the interpreter's lock (GIL)


def pause_keeping_gil(seconds: float) -> None:
    """Sleep while no other Python thread runs; for times far below a millisecond."""
    _libc.usleep(int(seconds * 1e6))


class UnyieldingSocket:
    """`send` and `recv` of a socket that keep the interpreter's lock (GIL).

    Python's own calls release the GIL and then wait for it. If C code in another thread keeps the
    GIL for a second, each call takes a second. These calls take a microsecond longer instead.
    sock: non-blocking, so that a call only copies bytes.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._send, self._recv = _libc.send, _libc.recv
        for call in (self._send, self._recv):
            call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
            call.restype = ctypes.c_ssize_t

    def send(self, data: bytes) -> int:
        """Return how many bytes the system accepted. Raises OSError; BlockingIOError for none."""
        flags = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)
        return _checked(self._send(self._socket.fileno(), data, len(data), flags))

    def recv(self, size: int) -> bytes:
        """Return the received bytes. Raises OSError; BlockingIOError if there are none."""
        return self._received(size, socket.MSG_DONTWAIT)

    def _received(self, size: int, flags: int) -> bytes:
        buffer = ctypes.create_string_buffer(size)
        count = _checked(self._recv(self._socket.fileno(), buffer, size, flags))
        return buffer.raw[:count]


class UnyieldingTlsSocket(UnyieldingSocket):
    """The same for TLS. It releases the GIL once for a send, and once for received data."""

    _socket: ssl.SSLSocket

    def send(self, data: bytes) -> int:
        """Return how many bytes TLS accepted. Raises OSError, also for none."""
        return self._socket.send(data)

    def recv(self, size: int) -> bytes:
        """Return the received bytes. Raises OSError; BlockingIOError if there are none."""
        if not self._socket.pending():
            self._received(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        return self._socket.recv(size)

    def pending(self) -> int:
        """Return how many decrypted bytes are not read yet."""
        return self._socket.pending()


def _checked(count: int) -> int:
    """Return the result of a C library call; raises OSError if the call failed."""
    if count < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return count
