"""Draw `handoff.svg`: a release on three nodes names three workers, and the first one runs.

Run as `python docs/pictures/handoff.py`; the file beside this one is written anew. Time goes
downward and is not to scale. y and sizes are pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

PICTURE = Path(__file__).with_name("handoff.svg")

TURN_MS = 100  # between the turns of two workers that one release names
HOLDER, NODES, WAITERS = "W1", ("A", "B", "C"), ("W2", "W3", "W4")
MAJORITY = len(NODES) // 2 + 1

# the picture: as wide as a phone shows it, so that no text becomes too small to read
WIDTH, HEIGHT = 480, 520
X = {"W1": 40, "A": 118, "B": 154, "C": 190, "W2": 282, "W3": 362, "W4": 442}
HEAD, TOP, END = 78, 90, 456
RELEASED, NAMED, STEP = 128, 160, 24  # y of the release, and of the first node's message
ACQUIRE, GRANTED = 238, 262
LOOKS = {"W3": 312, "W4": 378}  # y at which the turn of each comes
ANSWER = 24  # from a question to its answer
BAR = 12

INK, FAINT, RULE = "#1f2933", "#5b6770", "#aeb6bd"
HELD, TURN, NODE = "#1d7a46", "#b26a00", "#e7f0fa"
BOLD, MIDDLE, RIGHT = 'font-weight="bold"', 'text-anchor="middle"', 'text-anchor="end"'


def text(at: float, y: float, words: str, style: str = "") -> str:
    """Return a text; style: its attributes."""
    style = f" {style}" if style else ""
    return f'<text x="{at:g}" y="{y:g}"{style}>{escape(words)}</text>'


def line(x1: float, x2: float, y: float, style: str = f'stroke="{INK}"') -> str:
    """Return a horizontal line."""
    return f'<path d="M{x1:g} {y:g}H{x2:g}" {style}/>'


def arrow(begin: float, ends: Iterator[float], y: float) -> Iterator[str]:
    """Yield a message from one lifeline to others: a line to the farthest, a head at each."""
    reached = list(ends)
    yield line(begin, max(reached, key=lambda end: abs(end - begin)), y)
    for end in reached:
        back = -7 if end > begin else 7
        yield f'<path d="M{end:g} {y:g}l{back} -4v8z"/>'


def bar(name: str, begin: float, end: float, style: str) -> str:
    """Return a bar on a lifeline."""
    left = X[name] - BAR / 2
    box = f'x="{left:g}" y="{begin:g}" width="{BAR}" height="{end - begin:g}"'
    return f'<rect {box} rx="2" {style}/>'


def head() -> Iterator[str]:
    """Yield the frame, the title and the lifelines."""
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="Helvetica, Arial, sans-serif" font-size="14" '
        f'fill="{INK}" role="img" aria-labelledby="t d">'
    )
    yield '<title id="t">One release, one try</title>'
    yield (
        '<desc id="d">Worker W1 releases its lock on the nodes A, B and C. Each node names the '
        "workers W2, W3 and W4. W2 is first: once two of the three nodes have named it, it takes "
        f"the lock and runs. W3 asks the nodes after {TURN_MS} ms, W4 after {2 * TURN_MS} ms. The "
        "lock is taken, so both wait on.</desc>"
    )
    yield (
        f'<pattern id="turn" width="5" height="5" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="5" height="5" fill="#fff3dd"/>'
        f'<path d="M0 0V5" stroke="{TURN}" stroke-width="1.6"/></pattern>'
    )
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#fff"/>'
    yield text(16, 28, "One release, one try", f'{BOLD} font-size="18"')
    nodes = [X[name] for name in NODES]
    box = f'x="{nodes[0] - 18}" y="58" width="{nodes[-1] - nodes[0] + 36}" height="{END - 52}"'
    yield f'<rect {box} rx="6" fill="{NODE}"/>'
    yield text(nodes[1], 54, "nodes", f'{MIDDLE} fill="{FAINT}"')
    yield text(X[HOLDER], 54, "holder", f'{MIDDLE} fill="{FAINT}"')
    yield text(X[WAITERS[1]], 54, "workers that wait", f'{MIDDLE} fill="{FAINT}"')
    for name, at in X.items():
        yield text(at, HEAD, name, f'{MIDDLE} {BOLD} font-size="16"')
        yield f'<path d="M{at} {TOP}V{END}" stroke="{RULE}"/>'


def release() -> Iterator[str]:
    """Yield the release, and what each node makes of it."""
    yield bar(HOLDER, TOP, RELEASED, f'fill="{HELD}"')
    yield from arrow(X[HOLDER], (X[name] for name in NODES), RELEASED)
    yield text(X[HOLDER] + 6, RELEASED - 7, "release")
    for number, node in enumerate(NODES):
        y = NAMED + number * STEP
        yield from arrow(X[node], (X[name] for name in WAITERS), y)
    yield text(X[WAITERS[0]] + 8, NAMED - 9, "1st, 2nd, 3rd")


def first() -> Iterator[str]:
    """Yield the worker that is named first: it acts when a majority has named it."""
    name, at = WAITERS[0], X[WAITERS[0]]
    decided = NAMED + (MAJORITY - 1) * STEP
    yield f'<circle cx="{at}" cy="{decided}" r="6" fill="none" stroke="{HELD}" stroke-width="3"/>'
    yield from arrow(at, (X[node] for node in reversed(NODES)), ACQUIRE)
    yield text(X[NODES[-1]] + 22, ACQUIRE - 7, "acquire")
    yield from arrow(X[NODES[-1]], iter([at]), GRANTED)
    yield text(X[NODES[-1]] + 22, GRANTED - 7, "granted")
    yield bar(name, GRANTED, END, f'fill="{HELD}"')
    yield text(at - 12, END - 10, "W2 runs", f'{RIGHT} {BOLD} fill="{HELD}"')


def others() -> Iterator[str]:
    """Yield the two that ask in their turns, and wait on."""
    for rank, (name, y) in enumerate(LOOKS.items(), start=1):
        at = X[name]
        yield bar(name, NAMED + STEP, y, f'fill="url(#turn)" stroke="{TURN}"')
        words = f"{rank * TURN_MS} ms"
        yield text(at - 11, y - 46, words, f'{RIGHT} {BOLD} fill="{TURN}"')
        yield from arrow(at, (X[node] for node in reversed(NODES)), y)
        yield text(at - 11, y - 7, "free?", RIGHT)
        yield from arrow(X[NODES[-1]], iter([at]), y + ANSWER)
        yield text(at - 11, y + ANSWER - 7, "taken", RIGHT)


def caption() -> Iterator[str]:
    """Yield what the picture says, in words."""
    yield f'<circle cx="24" cy="{END + 27}" r="6" fill="none" stroke="{HELD}" stroke-width="3"/>'
    yield text(40, END + 32, "Two of three nodes have named W2 first: it acts.")
    yield text(16, END + 54, "W3 and W4 only ask, and wait on. No other worker gets a message.")


def draw() -> str:
    """Return the picture as the text of an SVG file."""
    parts = [*head(), *release(), *first(), *others(), *caption(), "</svg>"]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
