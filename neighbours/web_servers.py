"""The web servers that are run, or that are named as not run."""

from __future__ import annotations

from neighbours.row import Neighbour

NEIGHBOURS: tuple[Neighbour, ...] = ()
