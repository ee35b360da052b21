"""The command line of the example. It needs the standard library only, so --help always works."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["OWN_SERVERS", "Options", "parse"]

OWN_SERVERS = """\
With servers of your own (nothing of yours is started, killed or emptied; --trust where these
nodes are new to the lock, for else they do not vote for a minute):
  python3 -m example_worker --broker redis://HOST:6379/0 \\
      --nodes redis://A:6379/0,redis://B:6379/0,redis://C:6379/0 \\
      --database postgresql+psycopg://USER@HOST/NAME"""


@dataclass(frozen=True)
class Options:
    """The options of a run. broker, nodes, database: None starts a server or file for the run.

    orders: the number of orders in each of the two phases.
    workers: False sends and watches only. trust: let new `nodes` vote at once, because no lock is
    held on them. plain: print lines, as without a terminal.
    """

    orders: int = 3000
    broker: str | None = None
    nodes: tuple[str, ...] | None = None
    database: str | None = None
    workers: bool = True
    trust: bool = False
    plain: bool = False


def parse(arguments: Sequence[str]) -> Options:
    """Return the options of a command line. Raises SystemExit for a wrong one, and for --help."""
    parser = _parser()
    namespace = parser.parse_args(arguments)
    if namespace.no_workers and not (namespace.broker and namespace.nodes and namespace.database):
        parser.error("--no-workers needs --broker, --nodes and --database: your workers' own")
    return Options(
        orders=namespace.orders,
        broker=namespace.broker,
        nodes=namespace.nodes,
        database=namespace.database,
        workers=not namespace.no_workers,
        trust=namespace.trust,
        plain=namespace.plain,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 -m example_worker",
        description="A shop whose workers lose updates without the lock, and none with it.",
        epilog=OWN_SERVERS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--orders", type=_orders, default=3000, metavar="N", help="in each phase (default 3000)")
    add("--broker", type=_redis_url, metavar="URL", help="a Redis or Valkey that runs already")
    add("--nodes", type=_nodes, metavar="URL,URL,URL", help="lock nodes that run already")
    add("--database", metavar="URL", help="SQLAlchemy URL (default: a temporary SQLite file)")
    add("--no-workers", action="store_true", help="send and watch only: the workers run elsewhere")
    add("--trust", action="store_true", help="trust new --nodes: no lock is held on them")
    add("--plain", action="store_true", help="plain lines, as without a terminal")
    return parser


def _orders(text: str) -> int:
    orders = int(text)
    # Fewer orders rarely compete, and then the phase without the lock loses no update.
    if orders < 100:
        raise argparse.ArgumentTypeError("at least 100 orders")
    return orders


def _redis_url(text: str) -> str:
    if not text.startswith(("redis://", "rediss://")):
        raise argparse.ArgumentTypeError(f"{text!r} does not start with redis:// or rediss://")
    return text


def _nodes(text: str) -> tuple[str, ...]:
    return tuple(_redis_url(node.strip()) for node in text.split(","))
