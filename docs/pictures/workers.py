"""Draw `workers.svg`: what one task of a hot key costs as workers are added.

Run by `python -m benchmarks.workers --page`, which measures it and writes `benchmarks/costs.json`
first; by itself, `python docs/pictures/workers.py` draws the same figures again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from xml.sax.saxutils import escape

PICTURE = Path(__file__).with_name("workers.svg")
FIGURES = PICTURE.parents[2] / "benchmarks" / "costs.json"
KINDS = {
    "published again": "messages published again, a task",
    "commands a node": "commands on a node, a task",
    "CPU ms": "processor time of all workers, ms a task",
    "tasks/s": "tasks a second on the key (more is better)",
}
WAYS = {"ours": "#3d7dbd", "by hand": "#c9ced3"}

# as wide as a phone shows it, so that no text becomes too small to read
WIDTH, LEFT, RIGHT = 480, 24, 456
TOP, PANEL, TALLEST = 98, 168, 84  # y of the first panel; heights of a panel, and of a bar
BAR, GAP = 44, 4
INK, FAINT, RULE = "#1f2933", "#5b6770", "#d5dade"
BOLD, MIDDLE = 'font-weight="bold"', 'text-anchor="middle"'

Figures = Mapping[str, Mapping[str, Mapping[str, float]]]


def read() -> Figures:
    """Return the figures of the last run, by way, number of workers and kind of figure."""
    figures: Figures = json.loads(FIGURES.read_text(encoding="utf-8"))["workers"]["figures"]
    return figures


def text(at: float, y: float, words: str, style: str = "") -> str:
    """Return a text; style: its attributes."""
    style = f" {style}" if style else ""
    return f'<text x="{at:g}" y="{y:g}"{style}>{escape(words)}</text>'


def short(figure: float) -> str:
    """Return a figure as text: two digits at least."""
    return f"{figure:.2f}" if figure < 1 else f"{figure:.1f}" if figure < 10 else f"{figure:.0f}"


def told(figures: Figures) -> str:
    """Return all figures in words."""
    return "; ".join(
        f"{name}, {way}: {', '.join(short(one[kind]) for one in figures[way].values())}"
        for kind, name in KINDS.items()
        for way in WAYS
    )


def head(figures: Figures) -> Iterator[str]:
    """Yield the frame, the title and what the colours mean."""
    height = TOP + PANEL * len(KINDS)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif" font-size="13" '
        f'fill="{INK}" role="img" aria-labelledby="t d">'
    )
    title = "One task of a hot key, by number of workers"
    yield f'<title id="t">{title}</title>'
    sizes = ", ".join(figures["ours"])
    yield f'<desc id="d">With {sizes} workers. {escape(told(figures))}.</desc>'
    yield f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#fff"/>'
    yield text(16, 30, title, f'{BOLD} font-size="18"')
    words = {"ours": "a locked task, three nodes", "by hand": "redis-py's lock, and a retry"}
    for (way, colour), at in zip(WAYS.items(), (16, 236), strict=True):
        yield f'<rect x="{at}" y="48" width="14" height="14" rx="2" fill="{colour}"/>'
        yield text(at + 22, 60, words[way], 'font-size="14"')


def panel(figures: Figures, kind: str, top: float) -> Iterator[str]:
    """Yield the bars of one kind of figure."""
    yield text(16, top, KINDS[kind], f'{BOLD} font-size="14"')
    ground = top + 24 + TALLEST
    most = max(one[kind] for way in WAYS for one in figures[way].values())
    sizes = list(figures["ours"])
    group = (RIGHT - LEFT) / len(sizes)
    for number, size in enumerate(sizes):
        middle = LEFT + (number + 0.5) * group
        for side, (way, colour) in enumerate(WAYS.items()):
            figure = figures[way][size][kind]
            height = round(TALLEST * figure / most, 1) if most else 0.0
            at = middle + (side - 1) * (BAR + GAP) + GAP / 2
            box = f'x="{at:g}" y="{ground - height:g}" width="{BAR}" height="{height:g}"'
            yield f'<rect {box} rx="2" fill="{colour}"/>'
            yield text(at + BAR / 2, round(ground - height - 5, 1), short(figure), MIDDLE)
        yield text(middle, ground + 17, f"{size} workers", f'{MIDDLE} fill="{FAINT}"')
    yield f'<path d="M16 {ground:g}H{WIDTH - 16}" stroke="{RULE}"/>'


def draw(figures: Figures) -> str:
    """Return the picture as the text of an SVG file."""
    parts = [*head(figures)]
    for number, kind in enumerate(KINDS):
        parts += panel(figures, kind, TOP + number * PANEL)
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw(read()), encoding="utf-8")
