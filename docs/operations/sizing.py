"""The load of a lock node, for planning: `python sizing.py --tasks 1000 --body 2`.

The tables of the page beside this file are what these functions give; a test compares them. It
needs Python alone.
"""

from __future__ import annotations

import argparse
from inspect import signature
from math import ceil, comb

SCRIPT, RENEWAL = 0.05e-3, 0.017e-3  # s of a core: of a script, of a renewed lock
LOCKS_OF_A_SCRIPT = 100  # that one script renews
LOCK, MARK, TRAFFIC = 220, 180, 600  # bytes: of a lock, of a completion marker, of traffic
CORES, CONNECTIONS = 0.5, 20_000  # the most of a node


def node_for(
    tasks: float,
    body: float = 1.0,
    refused: float = 0.5,
    ttl: float = 30.0,
    done_ttl: float = 600.0,
    of_a_process: float = 1.0,
) -> dict[str, float]:
    """Return the load of each node. Rates are a second, times in s.

    refused: tries of each task. done_ttl: 0 with early acknowledgement. of_a_process: the locks
    that one process holds at a time.
    """
    held = tasks * body
    renewals = held / (ttl / 3) if body > ttl / 3 else 0.0
    batch = max(1.0, min(of_a_process, LOCKS_OF_A_SCRIPT))
    scripts = tasks * (2 + 2 * refused) + renewals / batch
    return {
        "scripts": scripts,
        "cores": scripts * SCRIPT + renewals * RENEWAL,
        "megabytes": (held * LOCK + tasks * done_ttl * MARK) / 1e6,
        "megabits": tasks * (1 + refused) * TRAFFIC * 8 / 1e6,
        "connections": ceil(held / of_a_process) * 2,
    }


def sets_for(node: dict[str, float]) -> int:
    """Return how many sets of nodes share such a load."""
    return max(1, ceil(node["cores"] / CORES), ceil(node["connections"] / CONNECTIONS))


def available(nodes: int, up: float) -> float:
    """Return the share of time with a quorum. up: the share of one node."""
    return sum(
        comb(nodes, n) * up**n * (1 - up) ** (nodes - n) for n in range(nodes // 2 + 1, nodes + 1)
    )


def main() -> None:
    """Print the load of each node for the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, parameter in signature(node_for).parameters.items():
        needed = parameter.default is parameter.empty
        default = None if needed else parameter.default
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=float, required=needed, default=default
        )
    node = node_for(**vars(parser.parse_args()))
    for name, value in {**node, "sets of nodes": sets_for(node)}.items():
        print(f"{name:14}{float(f'{value:.3g}'):12,.10g}")


if __name__ == "__main__":
    main()
