"""What `python3 -m tests.integration.matrix` does."""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path

from celery_redlock.testing import embedded_nodes
from tests.conftest import trust_nodes
from tests.integration.conftest import virtual_host
from tests.integration.matrix.ends import BROKERS, ENDS, POOLS
from tests.integration.matrix.page import PAGE, with_tables
from tests.integration.matrix.stage import Stage, live


def main() -> int:
    """Return the exit status: 0 where all is as expected."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.integration.matrix")
    parser.add_argument("--pool", choices=POOLS, nargs="*", default=POOLS)
    parser.add_argument("--broker", choices=BROKERS, nargs="*", default=BROKERS)
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}; measure nothing")
    words = parser.parse_args()
    if words.page:
        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    cells = [(pool, broker) for pool in words.pool for broker in words.broker]
    return sum(measure(pool, broker) for pool, broker in cells) > 0


def measure(pool: str, broker: str) -> int:
    """Print the cells of one pool on one broker; returns how many are not as expected."""
    started = time.monotonic()
    with ExitStack() as stack:
        *nodes, backend = stack.enter_context(embedded_nodes(4))
        trust_nodes(nodes)
        host = nullcontext(backend.url) if broker == "redis" else virtual_host()
        url = stack.enter_context(host)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stage = Stage(stack, folder, pool, broker, url, backend, nodes)
        try:
            live(stage)
        finally:
            print(stage.report())
            for end in ENDS:
                if pool not in end.pools:
                    print(f"{pool:9} {broker:9} {end.name:56} not in this pool")
            print(f"{time.monotonic() - started:.0f} s", flush=True)
    return sum(bool(cell.wrong) for cell in stage.cells)
