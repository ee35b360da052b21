"""The story on servers of the reader's own: what the options of the command line say of them."""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from neighbours.row import CONTROLS, Neighbour

SERVERS = ("broker", "backend", "nodes")


def add_options(parser: ArgumentParser) -> None:
    """Add the options that name servers, and what an app needs for them."""
    own = parser.add_argument_group("servers of your own, for the story; no row is written")
    own.add_argument("--broker", metavar="URL")
    own.add_argument("--backend", metavar="URL")
    own.add_argument("--node", metavar="URL", action="append", dest="nodes", help="each lock node")
    own.add_argument("--require", metavar="WORD", action="append", default=[], help="for pip")
    own.add_argument(
        "--conf",
        metavar="NAME=JSON",
        action="append",
        default=[],
        type=_setting,
        help='a setting of the app, such as broker_transport_options={"visibility_timeout":30}',
    )


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    try:
        if equals:
            return name, json.loads(value)
    except ValueError:
        pass
    raise ArgumentTypeError(f"{text!r} is not NAME=JSON: write text as NAME='\"text\"'")


def setup_of(options: Namespace) -> dict[str, Any]:
    """Return what the options say of a `Setup`; nothing if they name no server."""
    given = {name: found for name in SERVERS if (found := getattr(options, name))}
    return {**given, "conf": dict(options.conf)} if given else {}


def own_servers(setup: Mapping[str, Any], requirements: Sequence[str]) -> Neighbour:
    """Return what runs the story on servers of the reader's own."""
    return Neighbour(
        "Servers of your own",
        CONTROLS,
        "It is run, and not published.",
        lambda run: run.story(**setup),
        tuple(requirements),
        distributions=("celery",),  # there is no row that would name others
    )
