"""Draw `fencing.svg`: a task that was paused writes late, and the database refuses it.

Run as `python3 -m docs.pictures.fencing`. It is the story of `example_worker/late_write.py`. Time
goes downward and is not to scale.
"""

from __future__ import annotations

from collections.abc import Iterator

from docs.pictures.drawing import (
    BOLD,
    FAINT,
    FOLDER,
    HELD,
    LOST,
    LOST_PALE,
    MIDDLE,
    NODE,
    NODE_LINE,
    RIGHT,
    RULE,
    WAIT,
    arrow,
    fill,
    hatched,
    path,
    picture,
    rect,
    text,
)

PICTURE = FOLDER / "fencing.svg"
FIRST, SECOND = 33, 34  # fencing tokens
UPDATE = "UPDATE ... SET fence = :token ... WHERE fence <= :token"
TITLE = "A fencing token refuses a late write"
DESCRIPTION = (
    f"Task 1 gets the lock with fencing token {FIRST} and is paused. Its lock expires. Task 2 gets "
    f"the lock with token {SECOND} and writes; the database stores {SECOND} with the row. Task 1 "
    f"goes on and writes with token {FIRST}. The database refuses the write, because {FIRST} is "
    f"less than {SECOND}."
)

HEIGHT = 560
ONE, LOCK, TWO, DATABASE = 64, 176, 284, 412
TOP, END = 86, 478
BAR = 12
# y of each step
GRANTED, PAUSED, EXPIRED, TAKEN, WRITTEN, GOES_ON, REFUSED = 120, 158, 226, 272, 322, 366, 416


def lifelines() -> Iterator[str]:
    """Yield the components, each with its line."""
    yield rect(DATABASE - 56, 58, 112, END - 52, fill(NODE))
    names = {"task 1": ONE, "lock": LOCK, "task 2": TWO, "database": DATABASE}
    for name, at in names.items():
        yield text(at, 78, name, f'{MIDDLE} {BOLD} font-size="15"')
        yield path(f"M{at} {TOP}V{END}", f'stroke="{RULE}"')


def bar(at: float, begin: float, end: float, style: str) -> str:
    """Return a bar on a lifeline."""
    return rect(at - BAR / 2, begin, BAR, end - begin, style)


def row(y: float, fence: int) -> Iterator[str]:
    """Yield the row of the database: the greatest token so far."""
    yield rect(DATABASE - 46, y - 15, 92, 22, f'fill="#fff" stroke="{NODE_LINE}"')
    yield text(DATABASE, y + 1, f"fence = {fence}", f"{MIDDLE} {BOLD}")


def first() -> Iterator[str]:
    """Yield the task that gets the lock, is paused, and loses it without noticing."""
    yield from arrow(LOCK, [ONE], GRANTED, HELD)
    yield text(LOCK - 8, GRANTED - 7, f"token {FIRST}", f"{RIGHT} {BOLD} {fill(HELD)}")
    yield bar(ONE, GRANTED, PAUSED, fill(HELD))
    yield bar(ONE, PAUSED, GOES_ON, f'fill="url(#wait)" stroke="{WAIT}"')
    yield text(ONE + 12, PAUSED + 20, "paused", f"{BOLD} {fill(WAIT)}")
    yield bar(LOCK, GRANTED, EXPIRED, fill(HELD))
    yield text(LOCK + 12, EXPIRED + 4, "the lock expires", fill(FAINT))


def second() -> Iterator[str]:
    """Yield the task that gets the lock next, and writes."""
    yield from arrow(LOCK, [TWO], TAKEN, HELD)
    yield text(LOCK + 12, TAKEN - 7, f"token {SECOND}", f"{BOLD} {fill(HELD)}")
    yield bar(LOCK, TAKEN, REFUSED + 34, fill(HELD))
    yield bar(TWO, TAKEN, REFUSED + 34, fill(HELD))
    yield from arrow(TWO, [DATABASE - 46], WRITTEN, HELD)
    yield text(TWO + 12, WRITTEN - 9, "write", f"{BOLD} {fill(HELD)}")
    yield text(TWO + 12, WRITTEN + 18, f"with {SECOND}", fill(HELD))
    yield from row(WRITTEN, SECOND)


def late() -> Iterator[str]:
    """Yield the late write."""
    yield text(ONE + 12, GOES_ON + 4, "goes on", f"{BOLD} {fill(LOST)}")
    yield from arrow(ONE, [DATABASE - 46], REFUSED, LOST)
    yield text(ONE + 12, REFUSED - 9, "write", f"{BOLD} {fill(LOST)}")
    yield text(ONE + 12, REFUSED + 18, f"with {FIRST}", fill(LOST))
    yield rect(DATABASE - 46, REFUSED - 15, 92, 44, f'{fill(LOST_PALE)} stroke="{LOST}"')
    yield text(DATABASE, REFUSED + 1, "refused", f"{MIDDLE} {BOLD} {fill(LOST)}")
    yield text(DATABASE, REFUSED + 20, f"{FIRST} < {SECOND}", f"{MIDDLE} {fill(LOST)}")


def caption() -> Iterator[str]:
    """Yield what the picture says, in words."""
    yield text(
        16, END + 30, "The database makes the check in the same statement:", 'font-size="15"'
    )
    yield text(16, END + 56, UPDATE, 'font-family="monospace" font-size="14"')


def draw() -> str:
    """Return the picture as the text of an SVG file."""
    parts = [hatched("wait"), *lifelines(), *row(112, 0), *late(), *first(), *second(), *caption()]
    return picture(TITLE, DESCRIPTION, HEIGHT, parts)


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
