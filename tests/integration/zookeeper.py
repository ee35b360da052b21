"""A ZooKeeper server of Debian's package, alone and on loopback."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from celery_redlock.testing import WorkerProcess
from celery_redlock.testing.servers import claim_port

JAVA = Path("/usr/share/java")
TICK = 1.0  # s; a session may have a timeout of 2 to 20 ticks
CONFIG = """
clientPort={port}
clientPortAddress=127.0.0.1
dataDir={folder}
tickTime={tick:.0f}
admin.enableServer=false
"""


@dataclass(frozen=True)
class Server:
    """A server, and the address that its clients take."""

    address: str
    process: WorkerProcess


@contextmanager
def zookeeper_server(folder: Path) -> Iterator[Server]:
    """Start a server with its data in a folder, and give it; skip if there is none."""
    jar = JAVA / "zookeeper.jar"
    if not jar.exists() or shutil.which("java") is None:
        pytest.skip("ZooKeeper is not installed: apt-get install zookeeper")
    with closing(claim_port()) as claim:
        port = claim.getsockname()[1]
        config = folder / "zoo.cfg"
        config.write_text(CONFIG.format(port=port, folder=folder, tick=TICK * 1000))
        command = [
            "java", "-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1",
            "-cp", f"{jar}:{JAVA / 'slf4j-simple.jar'}",
            "org.apache.zookeeper.server.quorum.QuorumPeerMain", str(config),
        ]  # fmt: skip
        process = WorkerProcess("zookeeper", name="zookeeper", command=command)
        with ExitStack() as stack:
            stack.push(process)  # removes its log
            stack.callback(process.kill)
            process.launch()
            yield Server(f"127.0.0.1:{port}", process)
