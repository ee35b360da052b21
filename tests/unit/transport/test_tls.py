"""TLS over a socket pair: what is decrypted already is not what the descriptor shows."""

from __future__ import annotations

import select
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_redlock.lock.transport.connection import (
    Peer,
    RedisConnection,
    UnyieldingTlsSocket,
    receive,
)
from tests.conftest import eventually
from tests.unit.transport.ends import Dialled, Kept, ServerEnd, echo

RECORD = 16384  # Source: RFC 8446 5.1, the most bytes of one record


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Make the certificate and the key of a server."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command")
    folder = tmp_path_factory.mktemp("certificate")
    line = "req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 2 -subj /CN=test"
    subprocess.run([openssl, *line.split()], cwd=folder, check=True, capture_output=True)
    return folder / "cert.pem", folder / "key.pem"


@pytest.fixture
def tls_pair(certificate: tuple[Path, Path]) -> Iterator[tuple[ssl.SSLSocket, ServerEnd]]:
    of_server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    of_server.load_cert_chain(*certificate)
    of_client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    of_client.check_hostname = False
    of_client.verify_mode = ssl.CERT_NONE
    near, far = socket.socketpair()
    accepted: list[ssl.SSLSocket] = []
    thread = threading.Thread(
        target=lambda: accepted.append(of_server.wrap_socket(far, server_side=True))
    )
    thread.start()
    client = of_client.wrap_socket(near)
    thread.join()
    yield client, ServerEnd(accepted[0])
    client.close()
    accepted[0].close()


@pytest.mark.parametrize("keeps_gil", [True, False])
def test_replies_of_several_records_come_whole(
    tls_pair: tuple[ssl.SSLSocket, ServerEnd], keeps_gil: bool
) -> None:
    client, server = tls_pair
    connection = RedisConnection(Dialled(client), Peer())
    assert connection.is_tls
    command = echo("a", Kept())
    connection.write([(command, 0.0, command.request)], keeps_gil=keeps_gil)
    assert server.read_command() == [b"ECHO", b"a"]
    text = b"x" * (3 * RECORD)
    server.say(b"$%d\r\n%b\r\n" % (len(text), text))

    def is_answered() -> bool:
        connection.read(keeps_gil=keeps_gil)  # tickets of a session, too: nothing to hand on
        return bool(connection.replies)

    eventually(is_answered)
    assert [reply for _, reply in connection.replies] == [text]


def test_what_is_decrypted_already_is_read_though_the_descriptor_shows_nothing(
    tls_pair: tuple[ssl.SSLSocket, ServerEnd],
) -> None:
    client, server = tls_pair
    server.say(b"half" + b"rest")
    assert client.recv(4) == b"half"
    client.setblocking(False)
    unyielding = UnyieldingTlsSocket(client)
    assert unyielding.pending() == 4
    assert select.select([client], [], [], 0)[0] == []
    assert unyielding.recv(4) == b"rest"


def test_a_read_takes_what_is_decrypted_but_did_not_fit(
    tls_pair: tuple[ssl.SSLSocket, ServerEnd],
) -> None:
    class Small:
        """A TLS socket that gives a few bytes a call, as one with a larger record would."""

        def __init__(self) -> None:
            self.pending = client.pending

        def recv(self, size: int) -> bytes:
            return client.recv(3)

    client, server = tls_pair
    server.say(b"0123456789")
    assert receive(Small()) == b"0123456789"
