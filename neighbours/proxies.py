"""Proxies between clients and lock nodes: programs of this machine on free ports of loopback."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from neighbours import servers

PACKAGES = {"HAProxy": "haproxy", "twemproxy": "nutcracker", "stunnel": "stunnel4"}


def version(name: str) -> str:
    """Return the version of a proxy or Sentinel of this machine, as Debian's package has it."""
    words = ["dpkg-query", "-W", "-f", "${Version}", PACKAGES.get(name, name)]
    text = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    return text.rpartition(":")[2].partition("-")[0].partition("+")[0]


@contextmanager
def haproxy(folder: Path, *ports: int) -> Iterator[int]:
    """Give the port of an HAProxy before servers, which take turns if there are several."""
    config = folder / f"haproxy-{ports[0]}.cfg"
    backends = "".join(f"  server s{port} 127.0.0.1:{port}\n" for port in ports)

    def words(port: int) -> list[str]:
        config.write_text(
            "defaults\n  mode tcp\n  balance roundrobin\n  timeout connect 5s\n"
            "  timeout client 1h\n  timeout server 1h\n"
            f"listen nodes\n  bind 127.0.0.1:{port}\n{backends}"
        )
        return [servers.program("haproxy", "haproxy"), "-f", str(config), "-db"]

    with servers.server(words, folder / "haproxy.log") as port:
        yield port


@contextmanager
def twemproxy(folder: Path, *ports: int) -> Iterator[int]:
    """Give the port of a twemproxy before servers."""
    config = folder / f"nutcracker-{ports[0]}.yml"
    names = "".join(f"    - 127.0.0.1:{port}:1\n" for port in ports)

    def words(port: int) -> list[str]:
        config.write_text(
            f"nodes:\n  listen: 127.0.0.1:{port}\n  hash: fnv1a_64\n  distribution: ketama\n"
            f"  redis: true\n  servers:\n{names}"
        )
        program = servers.program("nutcracker", "nutcracker")
        return [program, "-c", str(config), "-s", str(port + 10_000), "-a", "127.0.0.1"]

    with servers.server(words, folder / "nutcracker.log") as port:
        yield port


@contextmanager
def stunnel(folder: Path, server_port: int) -> Iterator[int]:
    """Give the port of a stunnel that ends TLS before a server; its certificate is `tls.pem`."""
    certificate, config = folder / "tls.pem", folder / f"stunnel-{server_port}.conf"
    if not certificate.exists():
        make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
        make += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
        make += ["-keyout", str(certificate), "-out", str(folder / "certificate.pem")]
        subprocess.run(make, check=True, capture_output=True)
        certificate.write_text(certificate.read_text() + (folder / "certificate.pem").read_text())

    def words(port: int) -> list[str]:
        config.write_text(
            f"foreground = yes\npid =\ncert = {certificate}\n[node]\n"
            f"accept = 127.0.0.1:{port}\nconnect = 127.0.0.1:{server_port}\n"
        )
        return [servers.program("stunnel4", "stunnel4"), str(config)]

    with servers.server(words, folder / "stunnel.log") as port:
        yield port
