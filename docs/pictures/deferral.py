"""Draw `deferral.svg`: a task finds its lock taken, waits outside the slots, and runs later.

Run as `python3 -m docs.pictures.deferral`. Time goes downward and is not to scale.
"""

from __future__ import annotations

from collections.abc import Iterator

from docs.pictures.drawing import (
    BOLD,
    FAINT,
    FOLDER,
    HELD,
    INK,
    MIDDLE,
    NODE,
    NODE_INK,
    RIGHT,
    RULE,
    WAIT,
    WAIT_PALE,
    arrow,
    fill,
    hatched,
    path,
    picture,
    rect,
    text,
)

PICTURE = FOLDER / "deferral.svg"
TITLE = "A deferral"
DESCRIPTION = (
    "The broker delivers message 1 to worker 1. Worker 1 acquires the lock on a quorum of the "
    "nodes A, B and C, and runs the task. The broker delivers message 2 to worker 2. The nodes "
    "refuse the lock. Worker 2 stores DEFERRED and republishes message 2 with a countdown. The "
    "broker delivers it to worker 2 again, where it waits in memory. Worker 1 releases the lock, "
    "and the nodes name worker 2. Worker 2 acquires the lock and runs the task."
)
STATE = "DEFERRED"

HEIGHT = 630
BROKER, W1, W2, NODES = 44, 146, 254, {"A": 372, "B": 410, "C": 448}
TOP, END = 88, 560
BAR = 12
# y of each step
FIRST, ACQUIRED, GRANTED = 112, 140, 168
SECOND, TRIED, REFUSED, STORED, BACK = 216, 244, 272, 300, 338
AGAIN, RELEASED, NAMED, RETRIED, GOT = 372, 424, 452, 480, 508


def lifelines() -> Iterator[str]:
    """Yield the components, each with its line."""
    first, *_, last = NODES.values()
    yield rect(first - 18, 66, last - first + 36, END - 60, fill(NODE))
    yield text(NODES["B"], 60, "lock nodes", f"{MIDDLE} {fill(FAINT)}")
    names = {"broker": BROKER, "worker 1": W1, "worker 2": W2, **NODES}
    for name, at in names.items():
        yield text(at, 82, name, f'{MIDDLE} {BOLD} font-size="15"')
        yield path(f"M{at} {TOP}V{END}", f'stroke="{RULE}"')


def to_nodes(begin: float, y: float, words: str) -> Iterator[str]:
    """Yield a message to all nodes."""
    yield from arrow(begin, NODES.values(), y)
    yield text(begin + 12, y - 7, words)


def from_nodes(end: float, y: float, words: str, colour: str = INK) -> Iterator[str]:
    """Yield the answers of all nodes; a dot for each."""
    yield from arrow(NODES["C"], [end], y, colour)
    yield from (f'<circle cx="{at}" cy="{y}" r="4" {fill(colour)}/>' for at in NODES.values())
    yield text(end + 12, y - 7, words, f"{BOLD} {fill(colour)}")


def body(at: float, begin: float, end: float) -> str:
    """Return the bar of a run that holds its lock."""
    return rect(at - BAR / 2, begin, BAR, end - begin, fill(HELD))


def first_run() -> Iterator[str]:
    """Yield the run that gets the lock at once."""
    yield from arrow(BROKER, [W1], FIRST)
    yield text(BROKER + 8, FIRST - 7, "message 1")
    yield from to_nodes(W1, ACQUIRED, "acquire")
    yield from from_nodes(W1, GRANTED, "granted by a quorum", HELD)
    yield body(W1, GRANTED, RELEASED)
    yield text(W1 - 12, GRANTED + 12, "task 1 runs", f"{RIGHT} {BOLD} {fill(HELD)}")


def deferral() -> Iterator[str]:
    """Yield the run that is refused: its message goes back, and waits in a worker."""
    yield from arrow(BROKER, [W2], SECOND)
    yield text(BROKER + 8, SECOND - 7, "message 2")
    yield from to_nodes(W2, TRIED, "acquire")
    yield from from_nodes(W2, REFUSED, "refused", WAIT)
    yield rect(W2 - 44, STORED - 16, 88, 24, f'{fill(WAIT_PALE)} stroke="{WAIT}"')
    yield text(W2, STORED + 1, STATE, f"{MIDDLE} {BOLD} {fill(WAIT)}")
    yield from arrow(W2, [BROKER], BACK)
    yield text(W2 - 12, BACK - 7, "republished", RIGHT)
    yield text(W1 - 12, BACK - 7, "countdown", RIGHT)
    yield from arrow(BROKER, [W2], AGAIN)
    yield text(BROKER + 8, AGAIN - 7, "again")
    yield rect(W2 - BAR / 2, AGAIN, BAR, NAMED - AGAIN, f'fill="url(#wait)" stroke="{WAIT}"')
    yield text(W2 + 12, AGAIN + 16, "waits in", fill(WAIT))
    yield text(W2 + 12, AGAIN + 33, "memory", fill(WAIT))


def second_run() -> Iterator[str]:
    """Yield the release that names the worker, and its run."""
    yield from to_nodes(W1, RELEASED, "release")
    yield text(W1 - 12, RELEASED + 4, "task 1 ends", f"{RIGHT} {BOLD} {fill(HELD)}")
    yield from from_nodes(W2, NAMED, "you are next", NODE_INK)
    yield from to_nodes(W2, RETRIED, "acquire")
    yield from from_nodes(W2, GOT, "granted", HELD)
    yield body(W2, GOT, END)
    yield text(W2 - 12, GOT + 14, "task 2 runs", f"{RIGHT} {BOLD} {fill(HELD)}")
    yield text(W2 - 12, GOT + 32, "STARTED", f"{RIGHT} {BOLD} {fill(HELD)}")


def caption() -> Iterator[str]:
    """Yield what the picture says, in words."""
    yield body(22, END + 18, END + 34)
    yield text(36, END + 31, "holds the lock, uses a worker slot")
    yield rect(16, END + 42, BAR, 16, f'fill="url(#wait)" stroke="{WAIT}"')
    yield text(36, END + 55, "waits in the worker: uses no slot and no retry")


def draw() -> str:
    """Return the picture as the text of an SVG file."""
    parts = [hatched("wait"), *lifelines(), *deferral(), *first_run(), *second_run(), *caption()]
    return picture(TITLE, DESCRIPTION, HEIGHT, parts)


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
