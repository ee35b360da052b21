"""The story on servers of the reader's own: what the options of the command line say of them."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
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
        "--conf", metavar="NAME=JSON", action="append", default=[], help="a setting of the app"
    )


def setup_of(options: Namespace) -> dict[str, Any]:
    """Return what the options say of a `Setup`; nothing if they name no server."""
    given = {name: found for name in SERVERS if (found := getattr(options, name))}
    if not given:
        return {}
    conf = dict(setting.split("=", 1) for setting in options.conf)
    return {**given, "conf": {name: json.loads(value) for name, value in conf.items()}}


def own_servers(setup: Mapping[str, Any], requirements: Sequence[str]) -> Neighbour:
    """Return what runs the story on servers of the reader's own."""
    return Neighbour(
        "Servers of your own",
        CONTROLS,
        "It is run, and not published.",
        lambda run: run.story(**setup),
        tuple(requirements),
    )
