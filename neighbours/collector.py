"""What an agent reports to: servers on loopback that keep all they are sent.

`http` serves every agent but Scout's, whose `frames` come over a socket. Standard library only: it
runs in the environment of the neighbour.
"""

from __future__ import annotations

import gzip
import json
import socketserver
import ssl
import struct
import subprocess
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

DECODERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.decompress, "deflate": zlib.decompress,
}  # fmt: skip
Answer = Callable[[str], Any]  # of a path: what the agent expects, to be written as JSON


@dataclass(frozen=True)
class Report:
    """One request. path: with its query. body: decompressed."""

    path: str
    body: bytes


@dataclass
class Collector:
    """A server that runs. kept: all reports so far, in the order in which they came."""

    port: int = 0
    kept: list[Report] = field(default_factory=list)


@contextmanager
def http(answer: Answer, certificate: Path | None = None) -> Iterator[Collector]:
    """Keep what is sent by HTTP. certificate: of `make_certificate`, for TLS."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_request(self) -> None:
            body = self._body()
            decode = DECODERS.get(self.headers.get("Content-Encoding", ""), bytes)
            collector.kept.append(Report(self.path, decode(body)))
            reply = json.dumps(answer(self.path)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        do_GET = do_POST = do_PUT = handle_request  # noqa: N815 - names of http.server

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            chunks = []
            while size := int(self.rfile.readline(), 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    yield from _serving(server, collector)


@contextmanager
def frames() -> Iterator[Collector]:
    """Keep messages that are a length and a text of JSON, as those to Scout's core agent."""
    collector = Collector()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while len(size := self.rfile.read(4)) == 4:
                collector.kept.append(Report("", self.rfile.read(*struct.unpack(">I", size))))
                self.wfile.write(struct.pack(">I", 2) + b"{}")

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    yield from _serving(Server(("127.0.0.1", 0), Handler), collector)


def _serving(server: socketserver.TCPServer, collector: Collector) -> Iterator[Collector]:
    collector.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def make_certificate(folder: Path) -> Path:
    """Return a new file with a key and a certificate of 127.0.0.1, made by openssl."""
    file = folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj"]
    command += ["/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    key = folder / "key.pem"
    command += ["-keyout", str(key), "-out", str(file)]
    subprocess.run(command, check=True, capture_output=True)
    file.write_text(file.read_text() + key.read_text())
    return file
