"""Runs a program of this folder in the environment of one neighbour."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neighbours import servers
from neighbours.row import Seen
from neighbours.story_setup import VARIABLE, Setup

LOCK_NODES = 3
STORY = "neighbours.story"


@dataclass(frozen=True)
class Run:
    """One run of a neighbour. python: of its environment. folder: its own, empty at the start.

    versions: of servers, by the name that the row gives them; who starts one adds it.
    """

    python: Path
    folder: Path
    versions: dict[str, str] = field(default_factory=dict)

    def story(
        self, env: Mapping[str, str] | None = None, module: str = STORY, **setup: Any
    ) -> Seen:
        """Run the story. env: variables of all its processes. setup: as of `Setup`.

        module: the program that tells it.

        Without a broker, a backend or nodes, it starts Valkey servers for them.
        """
        return self.beside_servers(module, env, **setup)

    def beside_servers(
        self, module: str, env: Mapping[str, str] | None = None, **setup: Any
    ) -> Seen:
        """Run a module as `program` does, beside the servers that its setup does not name."""
        with ExitStack() as stack:
            if not {"broker", "backend"} <= setup.keys():
                valkey = stack.enter_context(servers.valkey())
                setup = {"broker": valkey.url, "backend": valkey.url, **setup}
            if "nodes" not in setup:
                nodes = stack.enter_context(servers.lock_nodes(LOCK_NODES))
                setup["nodes"] = tuple(node.url for node in nodes)
            return self.program(module, Setup(**setup), env)

    def program(self, module: str, setup: Setup, env: Mapping[str, str] | None = None) -> Seen:
        """Run a module, and return the `Seen` that it writes to `seen.json` beside its setup.

        Raises subprocess.CalledProcessError if it fails; what it wrote is on stderr.
        """
        here = self.folder / "neighbours"
        if not here.exists():  # the checkout is not in the path: the package is that of the wheel
            here.symlink_to(Path(__file__).parent)
        path = self.folder / "setup.json"
        setup.write(path)
        variables = {**os.environ, **(env or {}), VARIABLE: str(path), "TMPDIR": str(self.folder)}
        command = [str(self.python), "-m", module]
        subprocess.run(command, check=True, cwd=self.folder, env=variables)
        seen = json.loads((self.folder / "seen.json").read_text())
        return Seen(**{**seen, "differences": tuple(seen["differences"])})
