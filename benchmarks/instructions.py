"""Count instructions: `python -m benchmarks.instructions [--quick] [--nodes 1] OLD [NEW]`.

A pair (acquire and release) and a unique send on one node and on three nodes, and a task with and
without a lock in a solo worker, over as many nodes as `--nodes` says, or three. OLD and NEW are git
revisions, or folders that have the package; NEW is the working tree if it is left out. Valgrind's
callgrind counts what the process executes, and not what servers do.

The load of the machine decides how often a process waits and wakes, and so changes a count. Hence
the trees take turns, part by part, and the result is the median of the ratios of all turns. The
counts that are shown are the lower quartile of the parts, in which nothing waited. No node times
out meanwhile, no lock and no worker lease is renewed, no garbage is collected, and no timer of the
worker fires: what that costs is in no figure.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import socket
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory

from celery import Celery

from benchmarks import counted
from benchmarks.figures import Aim, against, table
from celery_redlock.testing import EmbeddedNode, embedded_nodes

ROOT = Path(__file__).parent.parent
PACKAGE = "celery_redlock"
PROGRAM = Path(counted.__file__)
NODES = 3
KINDS = (  # in the order in which they are counted
    "a pair, nodes: 1", f"a pair, nodes: {NODES}",
    "a unique send, nodes: 1", f"a unique send, nodes: {NODES}",
    "a plain task", "a locked task",
)  # fmt: skip
SINGLE = KINDS[:4]  # kinds of which a part has one
BATCH = 5  # tasks of one kind in a part: few, so that most parts have no wait
# parts of each kind of tasks
FULL_PARTS = 24
QUICK_PARTS = 8
SINGLE_PARTS = 3  # parts of each of these kinds, to one of tasks
NEW_TREE = "."  # the working tree
PATIENCE = 3600  # s
AIM = 1.01

Parts = Mapping[str, Sequence[int]]  # instructions of each part, by kind


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instructions", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="some minutes, for a look")
    parser.add_argument("--nodes", type=int, choices=range(1, NODES + 1), default=NODES,
                        help="of the locked task")  # fmt: skip
    parser.add_argument("old", help="a git revision, or a folder that has the package")
    parser.add_argument("new", nargs="?", default=NEW_TREE, help="the same; the working tree")
    arguments = parser.parse_args()
    count = QUICK_PARTS if arguments.quick else FULL_PARTS
    names = (arguments.old, arguments.new)
    with contextlib.ExitStack() as stack:
        trees = [unpacked(name, Path(stack.enter_context(TemporaryDirectory()))) for name in names]
        old, new = counts(trees, count, BATCH, arguments.nodes)
    print(f"nodes of the locked task: {arguments.nodes}\n")
    print(report(names, old, new, BATCH))


def unpacked(name: str, where: Path) -> Path:
    """Return a folder that has the package as of a tree: itself, or a revision unpacked there."""
    if (Path(name) / PACKAGE).is_dir():
        return Path(name).resolve()
    packed = where / "tree.tar"
    git = ["git", "-C", str(ROOT), "archive", "--output", str(packed), name, PACKAGE]
    subprocess.run(git, check=True)
    with tarfile.open(packed) as opened:
        opened.extractall(where, filter="data")
    return where


def counts(trees: Sequence[Path], count: int, batch: int, nodes: int) -> list[Parts]:
    """Return what each part executes with the package of each tree.

    The trees take turns, batch by batch, so that the load is the same for both.
    """
    with contextlib.ExitStack() as stack:
        programs = []
        for tree in trees:
            urls = [node.url for node in stack.enter_context(embedded_nodes(NODES))]
            broker = stack.enter_context(EmbeddedNode())
            send(broker.url, count, batch)
            words = [broker.url, str(SINGLE_PARTS * count), str(nodes), *urls]
            folder = Path(stack.enter_context(TemporaryDirectory()))
            programs.append(Program(tree, words, folder))
            stack.callback(programs[-1].end)
        are_at_a_mark = all(map(Program.has_begun, programs))  # they start at the same time
        while are_at_a_mark:
            are_at_a_mark = all(map(Program.turn, programs))
        return [by_kind(program.parts(), count) for program in programs]


def ratio(old: Sequence[int], new: Sequence[int]) -> float:
    """Return the median of the ratios of two trees, each of the parts of one turn.

    Later parts have more instructions, as some caches grow: those of the same turn are alike.
    """
    return median(new_count / old_count for old_count, new_count in zip(old, new, strict=True))


def of_one(parts: Parts, batch: int) -> Mapping[str, float]:
    """Return the count of one of each kind, from the parts of that kind: their lower quartile.

    A wait or a timer adds to the part that it falls on. The least would be a chance as well: now
    and then the replies of all nodes are there at once, which spares a part some reads.
    """
    return {
        kind: quantiles(counts, method="inclusive")[0] / (1 if kind in SINGLE else batch)
        for kind, counts in parts.items()
    }


def by_kind(parts: Sequence[int], count: int) -> Parts:
    """Return those of the parts that are one batch of a kind each, without the first batch of it.

    The others are the program's start, a batch that fills caches, and the way to the next kind.
    """
    of_single = SINGLE_PARTS * count
    singles = len(SINGLE) * (of_single + 2)
    if len(parts) != 1 + singles + 2 * (count + 1):
        raise RuntimeError(f"{len(parts)} parts were counted, for {count} batches of each kind")
    single_parts = [
        parts[first + 1 : first + 1 + of_single] for first in range(1, 1 + singles, of_single + 2)
    ]
    tasks = parts[1 + singles :]
    return dict(zip(KINDS, [*single_parts, tasks[2::2], tasks[3::2]], strict=True))


def send(broker: str, count: int, batch: int) -> None:
    """Put what the worker is to run into its queue: batches of both kinds by turns, with marks."""
    with Celery("sender", broker=broker, set_as_current=False) as app:
        number = 0
        for _ in range(count + 1):
            for kind in (counted.PLAIN, counted.LOCKED):
                app.send_task(counted.MARK, queue=counted.QUEUE)
                for place in range(counted.UNCOUNTED + batch):
                    if place == counted.UNCOUNTED:
                        app.send_task(counted.BEGIN, queue=counted.QUEUE)
                    number += 1
                    app.send_task(kind, (number,), queue=counted.QUEUE)
        app.send_task(counted.MARK, queue=counted.QUEUE)
        app.send_task(counted.END, queue=counted.QUEUE)


class Program:
    """`benchmarks.counted` under callgrind, with the package of a tree; it waits at each mark."""

    def __init__(self, tree: Path, words: Sequence[str], folder: Path) -> None:
        env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONHASHSEED": "0"}
        script = f"import {PACKAGE}; print({PACKAGE}.__file__)"  # which compiles it, too
        check_command = [sys.executable, "-P", "-c", script]
        package_path = subprocess.run(
            check_command, env=env, check=True, capture_output=True, text=True
        ).stdout
        if not Path(package_path).is_relative_to(tree):
            raise RuntimeError(f"{package_path.strip()} is imported, and not what {tree} has")
        self._command = [
            "valgrind", "--tool=callgrind", "--instr-atstart=no", "--dump-before=getloadavg",
            "--zero-before=getsid", f"--callgrind-out-file={folder / 'out'}",
            sys.executable, "-P", str(PROGRAM), *words,
        ]  # fmt: skip
        self._folder = folder
        self._log = folder / "log"
        self._turns, child_end = socket.socketpair()
        self._turns.settimeout(PATIENCE)
        with child_end, self._log.open("w") as log:
            self._process = subprocess.Popen(
                self._command, env=env, cwd=folder, stdin=child_end.fileno(), stdout=log, stderr=log
            )

    def has_begun(self) -> bool:
        """Wait until it is to be counted, and switch the count on."""
        if not self.is_at_a_mark():
            return False
        switch = ["callgrind_control", "--instr=on", str(self._process.pid)]
        subprocess.run(switch, check=True, capture_output=True)
        return True

    def is_at_a_mark(self) -> bool:
        """Wait for the next mark, or the end."""
        return self._turns.recv(1) == counted.DONE

    def turn(self) -> bool:
        """Go on to the next mark; returns False at the end."""
        self._turns.send(counted.GO)
        return self.is_at_a_mark()

    def parts(self) -> list[int]:
        """Return the instructions of each part up to the last mark, without those of waits."""
        self._turns.close()  # it ends, also if it waits because the other one has failed
        if exit_code := self._process.wait():
            raise RuntimeError(f"{self._command} ended with {exit_code}:\n{self._log.read_text()}")
        return summed(self._folder)

    def end(self) -> None:
        """End the program, also before its end."""
        self._turns.close()
        self._process.kill()
        self._process.wait()


def summed(folder: Path) -> list[int]:
    """Return the instructions of each part that a mark has ended, in their order."""
    parts = sorted(folder.glob("out.*"), key=lambda path: int(path.suffix[1:]))
    counts = []
    for part in parts:
        match = re.search(r"^summary: (\d+)$", part.read_text(), re.MULTILINE)
        if match is None:
            raise RuntimeError(f"{part.name} of callgrind has no summary")
        counts.append(int(match[1]))
    return counts


def report(names: Sequence[str], old: Parts, new: Parts, batch: int) -> str:
    """Return the table and the aims. batch: tasks in a part."""
    ratios = {kind: ratio(old[kind], new[kind]) for kind in old}
    olds = of_one(old, batch)
    news = of_one(new, batch)
    rows = [
        [kind, f"{olds[kind]:,.0f}", f"{news[kind]:,.0f}", f"{value:.4f}"]
        for kind, value in ratios.items()
    ]
    head = ["instructions", *names, "new/old"]
    aims = [Aim(kind, value, AIM) for kind, value in ratios.items()]
    return f"{table(head, rows, left=1)}\n\n{against(aims)}"


if __name__ == "__main__":
    main()
