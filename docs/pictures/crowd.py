"""Draw `crowd.svg`: what one task costs as more and more wait for its key.

Run by `python -m benchmarks.crowd --picture`, which measures it and writes `crowd.json` first; by
itself, `python docs/pictures/crowd.py` draws the same figures again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import wrap
from xml.sax.saxutils import escape

PICTURE = Path(__file__).with_name("crowd.svg")
FIGURES = PICTURE.with_suffix(".json")  # by how many wait: ratios to the first
KINDS = {
    "published": "messages published",
    "commands": "commands on the nodes",
    "seconds": "processor time of workers",
}
MOST = 1.5  # times what it costs in the smallest crowd

# as wide as a phone shows it, so that no text becomes too small to read
WIDTH, HEIGHT, LEFT, RIGHT = 480, 340, 44, 468
TOP, GROUND, TALLEST = 84, 264, 2.0  # y of the highest ratio and of 0; that ratio
BAR, GAP, GROUP = 36, 6, 144
INK, FAINT, RULE, LIMIT = "#1f2933", "#5b6770", "#d5dade", "#c62828"
BARS = ("#b9d4ef", "#7fb2e5", "#3d7dbd")
BOLD, MIDDLE, END = 'font-weight="bold"', 'text-anchor="middle"', 'text-anchor="end"'

Figures = Mapping[str, Mapping[str, float]]


def read() -> Figures:
    """Return the figures of the last run that was drawn."""
    figures: Figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    return figures


def y(ratio: float) -> float:
    """Return where a ratio stands."""
    return round(GROUND - (GROUND - TOP) * min(ratio, TALLEST) / TALLEST, 1)


def text(at: float, down: float, words: str, style: str = "") -> str:
    """Return a text; style: its attributes."""
    style = f" {style}" if style else ""
    return f'<text x="{at:g}" y="{down:g}"{style}>{escape(words)}</text>'


def rule(ratio: float, style: str) -> str:
    """Return a line across the picture at a ratio."""
    return f'<path d="M{LEFT} {y(ratio):g}H{RIGHT}" {style}/>'


def head(figures: Figures) -> Iterator[str]:
    """Yield the frame, the title and the scale."""
    few, *_, many = figures
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="Helvetica, Arial, sans-serif" font-size="13" '
        f'fill="{INK}" role="img" aria-labelledby="t d">'
    )
    title = "Cost of one task, by number of waiters"
    yield f'<title id="t">{title}</title>'
    told = "; ".join(
        f"{name}: {', '.join(f'{ratios[kind]:.2f}' for ratios in figures.values())}"
        for kind, name in KINDS.items()
    )
    yield (
        f'<desc id="d">Ratios to a crowd of {few}, for {", ".join(figures)} that wait. '
        f"{told}.</desc>"
    )
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#fff"/>'
    yield text(16, 28, title, f'{BOLD} font-size="17"')
    yield text(16, 50, f"{few} to {many} messages for one key; {few} is 1.0", f'fill="{FAINT}"')
    for ratio in (0.5, 1.0, 2.0):
        yield rule(ratio, f'stroke="{RULE}"')
        yield text(LEFT - 8, y(ratio) + 4, f"{ratio:g}", f'{END} fill="{FAINT}"')
    yield rule(MOST, f'stroke="{LIMIT}" stroke-dasharray="5 4"')
    yield text(LEFT - 8, y(MOST) + 4, f"{MOST:g}", f'{END} {BOLD} fill="{LIMIT}"')


def group(figures: Figures, kind: str, left: float) -> Iterator[str]:
    """Yield the bars of one kind of cost."""
    for number, (size, ratios) in enumerate(figures.items()):
        at, ratio = left + number * (BAR + GAP), ratios[kind]
        height = round(GROUND - y(ratio), 1)
        colour = BARS[number % len(BARS)]
        box = f'x="{at:g}" y="{y(ratio):g}" width="{BAR}" height="{height:g}"'
        yield f'<rect {box} rx="2" fill="{colour}"/>'
        yield text(at + BAR / 2, y(ratio) - 6, f"{ratio:.2f}", f"{MIDDLE} {BOLD}")
        yield text(at + BAR / 2, GROUND + 16, size, f'{MIDDLE} fill="{FAINT}"')
    middle = left + (len(figures) * (BAR + GAP) - GAP) / 2
    for number, words in enumerate(wrap(KINDS[kind], 14)):
        yield text(middle, GROUND + 42 + number * 18, words, f"{MIDDLE} {BOLD}")


def draw(figures: Figures) -> str:
    """Return the picture as the text of an SVG file."""
    parts = [*head(figures)]
    for number, kind in enumerate(KINDS):
        parts += group(figures, kind, LEFT + 10 + number * GROUP)
    parts += [f'<path d="M{LEFT} {GROUND}H{RIGHT}" stroke="{INK}"/>', "</svg>"]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw(read()), encoding="utf-8")
