"""Draw `nodes.svg`: the same lock with three nodes up, with two, and with one.

Run as `python3 -m docs.pictures.nodes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from docs.pictures.drawing import (
    BOLD,
    FAINT,
    FOLDER,
    HELD,
    HELD_PALE,
    LOST,
    LOST_PALE,
    MIDDLE,
    NODE,
    NODE_LINE,
    WIDTH,
    fill,
    path,
    picture,
    rect,
    text,
)

PICTURE = FOLDER / "nodes.svg"
TITLE = "One of three lock nodes may fail"
DESCRIPTION = (
    "Three panels. All three nodes are up: the lock stands on 3 of 3. One node is down: the lock "
    "stands on 2 of 3, which is a quorum, so tasks run on. Two nodes are down: 1 of 3 is no "
    "quorum, so no lock is granted or renewed, and tasks wait as DEFERRED."
)
NODES = ("A", "B", "C")
QUORUM = len(NODES) // 2 + 1

HEIGHT, PANEL, TOP = 520, 152, 48
X, BOX = (48, 108, 168), 52
WORDS = 214


@dataclass(frozen=True)
class Panel:
    """One state of the nodes: those that are up, the verdict, and what it means for tasks."""

    up: str
    verdict: str
    meaning: Sequence[str]

    @property
    def has_quorum(self) -> bool:
        """Whether a lock can be granted and renewed."""
        return len(self.up) >= QUORUM


PANELS = (
    Panel("ABC", "3 of 3: locked", ("The task runs. Other tasks", "for this lock wait.")),
    Panel(
        up="AC",
        verdict="2 of 3: still locked",
        meaning=("A quorum is 2 of 3.", "Locks are granted, renewed", "and released as before."),
    ),
    Panel(
        up="A",
        verdict="1 of 3: no quorum",
        meaning=(
            "No lock is granted or renewed.",
            "New tasks wait (DEFERRED).",
            "A task that runs loses its",
            "lock within one ttl.",
        ),
    ),
)


def node(name: str, at: float, y: float, *, up: bool) -> Iterator[str]:
    """Yield a node: a box with its name, and a lock or a cross in it."""
    style = f'{fill(NODE)} stroke="{NODE_LINE}"'
    if not up:
        style = f'{fill("#f3f4f5")} stroke="{FAINT}" stroke-dasharray="4 3"'
    yield rect(at - BOX / 2, y, BOX, 76, style)
    yield text(at, y + 22, name, f'{MIDDLE} {BOLD} font-size="16"')
    if up:
        yield path(f"M{at - 7} {y + 46}v-7a7 7 0 0 1 14 0v7", f'stroke="{HELD}" stroke-width="3"')
        yield rect(at - 11, y + 46, 22, 17, fill(HELD))
    else:
        yield path(f"M{at - 8} {y + 36}l16 16m0 -16l-16 16", f'stroke="{LOST}" stroke-width="3"')
        yield text(at, y + 68, "down", f'{MIDDLE} font-size="13" {fill(LOST)}')


def panel(shown: Panel, top: float) -> Iterator[str]:
    """Yield one panel: the nodes on the left, the words on the right."""
    ink, ground = (HELD, HELD_PALE) if shown.has_quorum else (LOST, LOST_PALE)
    yield rect(12, top, WIDTH - 24, PANEL - 12, fill(ground))
    for name, at in zip(NODES, X, strict=True):
        yield from node(name, at, top + 32, up=name in shown.up)
    yield text(WORDS, top + 40, shown.verdict, f'{BOLD} font-size="17" {fill(ink)}')
    for number, words in enumerate(shown.meaning):
        yield text(WORDS, top + 64 + number * 20, words)


def draw() -> str:
    """Return the picture as the text of an SVG file."""
    parts = [
        part for number, shown in enumerate(PANELS) for part in panel(shown, TOP + number * PANEL)
    ]
    return picture(TITLE, DESCRIPTION, HEIGHT - 8, parts)


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
