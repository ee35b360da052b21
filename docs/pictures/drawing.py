"""What the diagrams share: colours, text, arrows, and the frame of an SVG file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parent

# as wide as a phone shows it, so that no text becomes too small to read
WIDTH = 480

INK, FAINT, RULE = "#1f2933", "#5b6770", "#aeb6bd"
HELD, HELD_PALE, WAIT, WAIT_PALE = "#1d7a46", "#ddf1e5", "#b26a00", "#fff3dd"
NODE, NODE_LINE, NODE_INK = "#e7f0fa", "#3d7dbd", "#24598f"
LOST, LOST_PALE = "#c62828", "#fdeaea"
BOLD, MIDDLE, RIGHT = 'font-weight="bold"', 'text-anchor="middle"', 'text-anchor="end"'


def fill(colour: str) -> str:
    """Return the attribute of a coloured text or shape."""
    return f'fill="{colour}"'


def text(at: float, y: float, words: str, style: str = "") -> str:
    """Return a text; style: its attributes."""
    style = f" {style}" if style else ""
    return f'<text x="{at:g}" y="{y:g}"{style}>{escape(words)}</text>'


def path(d: str, style: str = f'stroke="{INK}"') -> str:
    """Return a line along a path."""
    return f'<path d="{d}" fill="none" {style}/>'


def rect(x: float, y: float, width: float, height: float, style: str) -> str:
    """Return a box with round corners."""
    box = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {box} rx="4" {style}/>'


def arrow(begin: float, ends: Iterable[float], y: float, colour: str = INK) -> Iterator[str]:
    """Yield a message to the right or to the left: a line to the farthest end, a head at each."""
    reached = list(ends)
    farthest = max(reached, key=lambda end: abs(end - begin))
    yield path(f"M{begin:g} {y:g}H{farthest:g}", f'stroke="{colour}"')
    for end in reached:
        back = -8 if end > begin else 8
        yield f'<path d="M{end:g} {y:g}l{back} -4.5v9z" fill="{colour}"/>'


def hatched(name: str) -> str:
    """Return a pattern of that name: a wait."""
    return (
        f'<pattern id="{name}" width="5" height="5" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="5" height="5" fill="{WAIT_PALE}"/>'
        f'<path d="M0 0V5" stroke="{WAIT}" stroke-width="1.6"/></pattern>'
    )


def picture(title: str, description: str, height: int, parts: Iterable[str]) -> str:
    """Return the text of an SVG file with a title on top; y=44 and below is for the parts."""
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif" font-size="14" '
        f'fill="{INK}" role="img" aria-labelledby="t d">',
        f'<title id="t">{escape(title)}</title>',
        f'<desc id="d">{escape(description)}</desc>',
        f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#fff"/>',
        text(16, 28, title, f'{BOLD} font-size="18"'),
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"
