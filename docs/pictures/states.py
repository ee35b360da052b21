"""Draw `states.svg`: the states of a locked task, and what this package adds to Celery's.

Run as `python3 -m docs.pictures.states`.
"""

from __future__ import annotations

from collections.abc import Iterator

from docs.pictures.drawing import (
    BOLD,
    FAINT,
    FOLDER,
    HELD,
    HELD_PALE,
    MIDDLE,
    RIGHT,
    WAIT,
    WAIT_PALE,
    fill,
    path,
    picture,
    rect,
    text,
)

PICTURE = FOLDER / "states.svg"
TITLE = "States of a locked task"
DESCRIPTION = (
    "A task is PENDING until its worker tries to acquire the lock. If the lock is acquired, the "
    "task is STARTED, and then SUCCESS, RETRY or FAILURE. If the lock is taken or there is no "
    "quorum, the task is DEFERRED and tries again. With the option fail, or if it gives up, it "
    "ends as FAILURE; with the option skip as REVOKED. A DEFERRED task that is revoked or expires "
    "is REVOKED, too. A task whose lock is lost ends as FAILURE. A RETRY needs the lock again."
)

HEIGHT = 560
BOX_WIDTH, BOX_HEIGHT = 100, 32
# the middle of each box
PLACES = {
    "PENDING": (132, 82),
    "DEFERRED": (400, 178),
    "STARTED": (132, 310),
    "SUCCESS": (66, 432),
    "RETRY": (182, 432),
    "FAILURE": (298, 432),
    "REVOKED": (414, 432),
}
ADDED = "DEFERRED"  # the one state that is not Celery's
LOCK_X, LOCK_Y = 132, 178
HALF = BOX_HEIGHT / 2


def state(name: str) -> Iterator[str]:
    """Yield the box of a state."""
    at, y = PLACES[name]
    style = f'{fill("#f3f4f5")} stroke="{FAINT}"'
    if name == ADDED:
        style = f'{fill(WAIT_PALE)} stroke="{WAIT}" stroke-width="2"'
    elif name in ("STARTED", "SUCCESS"):
        style = f'{fill(HELD_PALE)} stroke="{HELD}"'
    yield rect(at - BOX_WIDTH / 2, y - HALF, BOX_WIDTH, BOX_HEIGHT, style)
    yield text(at, y + 5, name, f"{MIDDLE} {BOLD}")


def way(d: str, at: float, y: float, turn: str, colour: str = FAINT) -> Iterator[str]:
    """Yield a transition: its line, and the head at its end. turn: "down", "left" or "right"."""
    width = 2 if colour == WAIT else 1.4
    yield path(d, f'stroke="{colour}" stroke-width="{width}"')
    head = {"down": "l-5 -9h10z", "left": "l9 -5v10z", "right": "l-9 -5v10z"}[turn]
    yield f'<path d="M{at:g} {y:g}{head}" {fill(colour)}/>'


def lock() -> Iterator[str]:
    """Yield the try for the lock: no state, but what decides on the next one."""
    d = f"M{LOCK_X - 62} {LOCK_Y}l14 -20h96l14 20l-14 20h-96z"
    yield f'<path d="{d}" fill="#fff" stroke="{WAIT}" stroke-width="2"/>'
    yield text(LOCK_X, LOCK_Y + 5, "acquire lock", f"{MIDDLE} {fill(WAIT)} {BOLD}")


def celery() -> Iterator[str]:
    """Yield the transitions that Celery has."""
    top = PLACES["SUCCESS"][1] - HALF
    yield from way(f"M{LOCK_X} {82 + HALF}V{LOCK_Y - 20}", LOCK_X, LOCK_Y - 20, "down")
    yield text(LOCK_X + 10, 132, "a worker gets the message", fill(FAINT))
    at, y = PLACES["STARTED"]
    yield from way(f"M{at} {LOCK_Y + 20}V{y - HALF}", at, y - HALF, "down", WAIT)
    yield text(at - 10, 260, "acquired", f"{RIGHT} {fill(WAIT)} {BOLD}")
    bottom, middle = y + HALF, 372
    for name in ("SUCCESS", "RETRY"):
        end = PLACES[name][0]
        begin = at - 20 if end < at else at + 20
        d = f"M{begin} {bottom}V{middle}H{end}V{top}"
        yield from way(d, end, top, "down")
    down = PLACES["RETRY"][1] + HALF
    d = f"M{PLACES['RETRY'][0]} {down}V{down + 22}H10V{LOCK_Y}H{LOCK_X - 62}"
    yield from way(d, LOCK_X - 62, LOCK_Y, "right")
    yield text(22, down + 16, "needs the lock again", fill(FAINT))


def added() -> Iterator[str]:
    """Yield the transitions that this package adds."""
    left, top = PLACES[ADDED][0] - BOX_WIDTH / 2, PLACES["FAILURE"][1] - HALF
    right = LOCK_X + 58
    yield from way(f"M{right} {LOCK_Y - 9}H{left}", left, LOCK_Y - 9, "right", WAIT)
    yield text(right + 8, LOCK_Y - 17, "taken, no quorum", f"{fill(WAIT)} {BOLD}")
    yield from way(f"M{left} {LOCK_Y + 9}H{right + 2}", right, LOCK_Y + 9, "left", WAIT)
    yield text(right + 14, LOCK_Y + 27, "next try", fill(WAIT))
    fail, skip = PLACES["FAILURE"][0], PLACES["REVOKED"][0]
    yield from way(
        f"M{LOCK_X + 36} {LOCK_Y + 20}V250H{skip - 38}V{top}", skip - 38, top, "down", WAIT
    )
    yield text(fail + 20, 243, "“skip”", f"{fill(WAIT)} {BOLD}")
    yield from way(f"M{LOCK_X + 20} {LOCK_Y + 20}V276H{fail}V{top}", fail, top, "down", WAIT)
    yield text(LOCK_X + 46, 269, "“fail”, gave up", f"{fill(WAIT)} {BOLD}")
    deferred = PLACES[ADDED][0] + 44
    yield from way(f"M{deferred} {LOCK_Y + HALF}V{top}", deferred, top, "down", WAIT)
    yield text(deferred - 7, 330, "revoked,", f'{RIGHT} {fill(WAIT)} font-size="13"')
    yield text(deferred - 7, 347, "expired", f'{RIGHT} {fill(WAIT)} font-size="13"')
    at, y = PLACES["STARTED"]
    end = fail - 24
    yield from way(f"M{at + BOX_WIDTH / 2} {y}H{end}V{top}", end, top, "down", WAIT)
    yield text(at + BOX_WIDTH / 2 + 8, y - 7, "lock lost", f"{fill(WAIT)} {BOLD}")
    yield text(at + BOX_WIDTH / 2 + 8, y + 18, "or an error", fill(FAINT))


def caption() -> Iterator[str]:
    """Yield what the colours mean."""
    y = 506
    yield path(f"M16 {y - 4}H44", f'stroke="{WAIT}" stroke-width="3"')
    yield text(54, y, "added by celery_redlock; “skip” and “fail” are options")
    yield path(f"M16 {y + 20}H44", f'stroke="{FAINT}" stroke-width="2"')
    yield text(54, y + 24, "as in Celery without this package")


def draw() -> str:
    """Return the picture as the text of an SVG file."""
    states = [part for name in PLACES for part in state(name)]
    parts = [*celery(), *added(), *states, *lock(), *caption()]
    return picture(TITLE, DESCRIPTION, HEIGHT - 10, parts)


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
