"""Draw `lease.svg`: one lease on five nodes, from its request to its loss and release.

Run as `python docs/pictures/lease.py`; the file beside this one is written anew. The story is told
by a few numbers, and every other moment in the picture follows from them by the rules of the lock:
when a node executes a command, when its key ends, what we count on, when the lock is lost.
Times are integer milliseconds; y and sizes are pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

PICTURE = Path(__file__).with_name("lease.svg")

# the terms of the lock
TTL = 1200
MARGIN = 2
QUORUM = 3
NODE_TIMEOUT = 200
QUIET = TTL + 1000  # max_ttl is the ttl here
COUNTED = TTL * 99 // 100 - MARGIN  # ttl less a drift of 1 %, less the margin
ANSWER = 15  # from the execution of a command to its answer
BODY_NOTICES = 115  # from the loss to the release at the body's end

# the picture
WIDTH, HEIGHT = 900, 540
LEFT, END, MS_PER_PIXEL = 100, 4100, 5.25
LANES, LANE = 94, 54
WORD = 46  # the width of one above an arrow
BAR, COUNT = 13, 29  # y of a key's bar and of our count in a lane
LOCK, RIVAL, AXIS, LEGEND = 372, 392, 418, 452

INK, FAINT, RULE = "#1f2933", "#5b6770", "#d5dade"
KEY, OURS, PROBATION, SILENT = "#7fb2e5", "#1d7a46", "#e0a100", "#8e5bb5"
RISK, LOST, AWAY = "#f0b429", "#c62828", "#eceff1"


@dataclass(frozen=True)
class Node:
    """One node of the story.

    delay: from our sending to its executing. deaf: from when to when nothing gets through.
    wiped: when it loses its memory.
    """

    number: int
    delay: int = 15
    deaf: tuple[tuple[int, int], ...] = ()
    wiped: int = END

    def executes(self, sent: int) -> int | None:
        """Return when it executes what we send at `sent`, None for never."""
        at = sent + self.delay
        return None if any(begin <= at < end for begin, end in self.deaf) else at


NODES = (
    Node(1),
    Node(2),
    Node(3, deaf=((2700, END),)),
    Node(4, delay=150, deaf=((2400, END),)),
    Node(5, deaf=((600, 1250), (2400, END)), wiped=600),
)


@dataclass
class Lane:
    """What happens on one node.

    keys: from when to when our key stands there. counts: from when to when we count on it.
    probation: from when to when it has our key but does not count. hits, misses: commands that it
    executed, with the moment, and commands that it never got. end: e_i, once there is one.
    missing: when it said that it has no such key.
    """

    node: Node
    end: int | None = None
    missing: int | None = None
    keys: list[tuple[int, int]] = field(default_factory=list)
    counts: list[tuple[int, int]] = field(default_factory=list)
    probation: list[tuple[int, int]] = field(default_factory=list)
    hits: list[tuple[int, int]] = field(default_factory=list)
    misses: list[int] = field(default_factory=list)

    @property
    def on_probation(self) -> bool:
        """Whether the last repair is not confirmed yet."""
        return bool(self.probation) and self.probation[-1][1] == END

    def hear(self, sent: int) -> int | None:
        """Take a command; return when it is executed, None where it never is."""
        at = self.node.executes(sent)
        if at is None:
            self.misses.append(sent)
        else:
            self.hits.append((sent, at))
        return at

    def keep(self, at: int) -> None:
        """Let the key stand for a whole ttl from `at` on, as GRANT and RENEW do."""
        if self.keys and self.keys[-1][1] > at:
            self.keys[-1] = (self.keys[-1][0], at + TTL)
        else:
            self.keys.append((at, at + TTL))

    def count(self, sent: int, answered: int) -> None:
        """Count on the node for a whole lease from `sent` on."""
        if self.counts and self.counts[-1][1] > answered:
            self.counts[-1] = (self.counts[-1][0], sent + COUNTED)
        else:
            self.counts.append((answered, sent + COUNTED))

    def votes_from(self) -> int:
        """Return when it may grant the lock to somebody else."""
        quiet = 0 if self.missing is None else self.missing + QUIET
        return max(quiet, self.keys[-1][1])


@dataclass
class Story:
    """The whole lease. sends: every round. released: when the release is sent."""

    lanes: list[Lane]
    sends: list[int] = field(default_factory=list)
    released: int = END

    @property
    def valid_until(self) -> int:
        """V: the third-largest e_i of the nodes that count."""
        ends = [lane.end or 0 for lane in self.lanes if not lane.on_probation]
        return sorted(ends)[-QUORUM]

    @property
    def lost(self) -> int:
        """The moment at which `held` turns false."""
        return self.valid_until - MARGIN

    @property
    def rival_from(self) -> int:
        """The first moment at which somebody else can have a quorum."""
        return sorted(lane.votes_from() for lane in self.lanes)[QUORUM - 1]


def tell() -> Story:
    """Return the story: rounds at their times until the lock is lost, then the release."""
    story = Story([Lane(node) for node in NODES])
    sent = 0
    while not story.sends or sent < story.lost:
        story.sends.append(sent)
        good, over = run_round(story, sent), sent + NODE_TIMEOUT
        if any(lane.missing and sent < lane.missing <= over for lane in story.lanes):
            sent = over  # the round that repairs comes at once
        elif good:
            sent += TTL // 3
        else:
            sent = over + min(TTL // 3, max(50, (story.valid_until - over) // 4))
    story.released = story.lost + BODY_NOTICES
    for lane in story.lanes:
        let_go(lane, story.lost, story.released)
    return story


def run_round(story: Story, sent: int) -> bool:
    """Send one round; tell whether a quorum confirmed it."""
    confirmed = [lane for lane in story.lanes if serve(lane, sent)]
    heard = sorted(lane.hits[-1][1] + ANSWER for lane in confirmed if not lane.on_probation)
    for lane in confirmed:
        if lane.on_probation and lane.probation[-1][0] < sent and len(heard) >= QUORUM:
            counts_again = heard[QUORUM - 1]
            lane.probation[-1] = (lane.probation[-1][0], counts_again)
            lane.count(sent, counts_again)
    return len(heard) >= QUORUM


def serve(lane: Lane, sent: int) -> bool:
    """Let a node serve one command; tell whether it confirmed that our key stands there."""
    at = lane.hear(sent)
    if at is None:
        return False
    answered = at + ANSWER
    if at > lane.node.wiped and lane.missing is None:
        lane.keys[-1] = (lane.keys[-1][0], lane.node.wiped)
        lane.missing = at
        return False
    lapsed = lane.end is not None and lane.end <= answered
    lane.keep(at)
    lane.end = sent + COUNTED
    if lapsed:
        lane.probation.append((answered, END))
    elif not lane.on_probation:
        lane.count(sent, answered)
    return True


def let_go(lane: Lane, lost: int, released: int) -> None:
    """End our count with the loss, and the key where the release arrives."""
    begin, end = lane.counts[-1]
    if end > lost + MARGIN:
        lane.counts[-1] = (begin, lost)
    at = lane.hear(released)
    if at is not None:
        lane.keys[-1] = (lane.keys[-1][0], min(lane.keys[-1][1], at))


def x(moment: int) -> float:
    """Return where a moment stands."""
    return LEFT + moment / MS_PER_PIXEL


def rect(begin: int, end: int, y: float, height: float, style: str) -> str:
    """Return a bar from one moment to another."""
    width = (end - begin) / MS_PER_PIXEL
    return f'<rect x="{x(begin):g}" y="{y:g}" width="{width:g}" height="{height:g}" {style}/>'


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    """Return a line."""
    return f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" {style}/>'


def text(at: float, y: float, words: str, style: str = "") -> str:
    """Return a text; style: its attributes."""
    style = f" {style}" if style else ""
    return f'<text x="{at:g}" y="{y:g}"{style}>{escape(words)}</text>'


def cross(at: float, y: float) -> str:
    """Return the mark of a command that never arrives."""
    d = f"M{at - 3:g} {y - 3:g}l6 6m0 -6l-6 6"
    return f'<path d="{d}" stroke="{LOST}" stroke-width="1.6"/>'


def colour(value: str) -> str:
    """Return the attribute of a filled shape or a coloured text."""
    return f'fill="{value}"'


MIDDLE, RIGHT, BOLD = 'text-anchor="middle"', 'text-anchor="end"', 'font-weight="bold"'


def head() -> Iterator[str]:
    """Yield the frame, the patterns and the title."""
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="Helvetica, Arial, sans-serif" font-size="13" '
        f'fill="{INK}" role="img" aria-labelledby="t d">'
    )
    yield '<title id="t">The life of a lease on five nodes</title>'
    yield (
        '<desc id="d">A lock is granted by five nodes and renewed every third of its ttl. Node 4 '
        "is slow. Node 5 loses its memory, abstains, gets the key again and counts after "
        "probation. Nodes 4, 5 and 3 are cut off; the lock is at risk, then lost, before a quorum "
        "of nodes is free for anybody else.</desc>"
    )
    for name, stroke, ground in (("away", "#b4bcc2", AWAY), ("probation", PROBATION, "#fff7df")):
        yield (
            f'<pattern id="{name}" width="5" height="5" patternUnits="userSpaceOnUse" '
            f'patternTransform="rotate(45)"><rect width="5" height="5" fill="{ground}"/>'
            f'<path d="M0 0V5" stroke="{stroke}" stroke-width="1.6"/></pattern>'
        )
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#fff"/>'
    yield text(16, 26, "The life of a lease on five nodes", f'{BOLD} font-size="16"')
    terms = (
        "ttl 1.2 s (short, so that milliseconds can be seen), drift 1 %, quorum 3; a renewal every "
        "ttl/3, sooner after a failed round"
    )
    yield text(16, 44, terms, colour(FAINT))


def sends(story: Story) -> Iterator[str]:
    """Yield the holder's row: what is sent, and when."""
    yield text(16, 72, "we send", BOLD)
    bottom = LANES + LANE * len(story.lanes)
    before = -1.0
    for moment in [*story.sends, story.released]:
        word = {0: "GRANT", story.released: "RELEASE"}.get(moment, "RENEW")
        at = x(moment)
        if at - before > WORD:
            yield text(at, 72, word, f'{MIDDLE} font-size="11.5"')
            before = at
        yield f'<path d="M{at - 4:g} 77h8l-4 7z"/>'
        yield line(at, 84, at, bottom, f'stroke="{RULE}" stroke-dasharray="2 3"')


def lane_frame(lane: Lane, top: float) -> Iterator[str]:
    """Yield a lane's ground: its name, its border, and when nothing gets through."""
    node = lane.node
    yield line(16, top, x(END), top, f'stroke="{RULE}"')
    yield text(16, top + 24, f"node {node.number}", BOLD)
    for begin, end in node.deaf:
        yield rect(begin, end, top + 1, LANE - 2, 'fill="url(#away)"')
        words = "cut off" if end == END else "down"
        yield text(x(end) - 6, top + 49, words, f"{RIGHT} {BOLD} {colour(FAINT)}")


def lane_bars(lane: Lane, top: float) -> Iterator[str]:
    """Yield the key on the node, and what we count on."""
    for begin, end in lane.keys:
        yield rect(begin, min(end, END), top + BAR, 13, f'rx="2" {colour(KEY)} stroke="#3d7dbd"')
    for begin, end in lane.counts:
        yield rect(begin, end, top + COUNT, 6, colour(OURS))
    for begin, end in lane.probation:
        style = f'fill="url(#probation)" stroke="{PROBATION}"'
        yield rect(begin, end, top + COUNT, 6, style)
    for sent, at in lane.hits:
        yield line(x(sent), top - 1, x(at), top + BAR + 6, f'stroke="{INK}"')
        yield f'<circle cx="{x(at):g}" cy="{top + BAR + 6.5:g}" r="2.6"/>'
    for sent in lane.misses:
        yield line(x(sent), top - 1, x(sent) + 3, top + 6, f'stroke="{LOST}"')
        yield cross(x(sent) + 4, top + 8)


def lane_end(lane: Lane, top: float, moment: int) -> Iterator[str]:
    """Yield the mark of an e_i at a moment."""
    yield line(x(moment), top + COUNT - 2, x(moment), top + COUNT + 10, f'stroke="{OURS}"')
    name = "e" + "₁₂₃₄₅"[lane.node.number - 1]
    yield text(x(moment) - 3, top + COUNT + 17, name, f"{RIGHT} {BOLD} {colour(OURS)}")


def notes(story: Story) -> Iterator[str]:
    """Yield what the single lanes are about."""
    tops = [LANES + LANE * number for number in range(len(story.lanes))]
    for lane, top in zip(story.lanes, tops, strict=True):
        for _, end in lane.counts:
            if end != story.lost:
                yield from lane_end(lane, top, end)
    first, slow, back = story.lanes[0], story.lanes[3], story.lanes[4]
    words = f"e₁ and e₂ would run until {(first.end or 0) / 1000:.2f} s: two are no quorum"
    yield text(x(story.lost) - 6, tops[1] + 49, words, f"{RIGHT} {colour(OURS)}")
    words = "slow: the node counts from the dot, we from the sending: ours ends first"
    yield text(x(slow.counts[0][0]), tops[3] + 48, words, colour(FAINT))
    yield from notes_on_the_one_that_forgot(back, tops[4])


def notes_on_the_one_that_forgot(lane: Lane, top: float) -> Iterator[str]:
    """Yield the words on the node that comes back empty."""
    (_, up), _ = lane.node.deaf
    missing, (begin, end) = lane.missing or 0, lane.probation[0]
    yield cross(x(lane.node.wiped), top + BAR + 6.5)
    yield rect(up, missing + QUIET, top + 42, 10, f'{colour(SILENT)} fill-opacity=".2"')
    words = "abstains for 2.2 s from our first contact"
    yield text(x(begin), top + 50.5, words, f'{colour("#5b2f86")} font-size="12"')
    yield text(x(missing) - 5, top + BAR + 10, "“missing”", f"{RIGHT} {colour(FAINT)}")
    yield text(x(begin) + 5, top + BAR + 11, "reclaimed", 'font-size="12"')
    yield text(x(end) + 5, top + BAR + 10, "counts again")


def verdict(story: Story) -> Iterator[str]:
    """Yield the lock's own row and the rival's."""
    begin = sorted(lane.counts[0][0] for lane in story.lanes)[QUORUM - 1]
    until, lost, risk = story.valid_until, story.lost, story.valid_until - TTL // 3
    free = story.rival_from
    yield line(16, LOCK - 8, x(END), LOCK - 8, f'stroke="{RULE}"')
    yield text(16, LOCK + 11, "our lock", BOLD)
    yield rect(begin, risk, LOCK, 15, colour(OURS))
    yield rect(risk, lost, LOCK, 15, colour(RISK))
    yield text(x(begin) + 8, LOCK + 11.5, "held: now < V - margin", f"{colour('#fff')} {BOLD}")
    yield text(x(risk) + 6, LOCK + 11.5, "at risk", BOLD)
    yield text(x(lost) + 6, LOCK + 11.5, "lost", f"{BOLD} {colour(LOST)}")
    yield line(x(until), LANES, x(until), LOCK + 15, f'stroke="{LOST}" stroke-width="1.4"')
    yield text(x(until), LANES - 4, "V", f"{MIDDLE} {BOLD} {colour(LOST)}")
    yield text(16, RIVAL + 11, "others", BOLD)
    yield rect(free, END, RIVAL, 15, colour(SILENT))
    words = f"can have a quorum (nodes 3, 4, 5) from {free / 1000:.3f} s on, after our loss at"
    yield text(x(free) - 6, RIVAL + 11.5, f"{words} {lost / 1000:.3f} s", RIGHT)


def axis() -> Iterator[str]:
    """Yield the time."""
    yield line(x(0), AXIS, x(END), AXIS, f'stroke="{INK}"')
    for moment in range(0, END, TTL // 3):
        yield line(x(moment), AXIS, x(moment), AXIS + 4, f'stroke="{INK}"')
        yield text(x(moment), AXIS + 16, f"{moment / 1000:g} s", f"{MIDDLE} {colour(FAINT)}")


def legend() -> Iterator[str]:
    """Yield what the shapes mean, in three columns."""
    entries = (
        (colour(KEY) + ' stroke="#3d7dbd"', "our key stands on the node"),
        (colour(OURS), "counted, until eᵢ = sending + 1.186 s"),
        (f'fill="url(#probation)" stroke="{PROBATION}"', "on probation: does not count yet"),
        ('fill="url(#away)"', "nothing gets through"),
    )
    places = ((16, 0), (16, 22), (352, 0), (352, 22))
    for (style, words), (at, down) in zip(entries, places, strict=True):
        yield f'<rect x="{at}" y="{LEGEND + down}" width="22" height="9" {style}/>'
        yield text(at + 29, LEGEND + down + 8.5, words)
    yield f'<circle cx="638" cy="{LEGEND + 4.5}" r="2.6"/>'
    yield text(650, LEGEND + 8.5, "the node executes the command")
    yield cross(638, LEGEND + 26.5)
    yield text(650, LEGEND + 30.5, "it is lost, or the memory is")
    words = (
        "V (red line): the third-largest eᵢ of the nodes that count, here e₃.",
        "At risk from V - ttl/3. Lost at V - margin, for ever, whatever nodes 1 and 2 still say.",
    )
    for number, line_of_words in enumerate(words):
        yield text(16, LEGEND + 56 + number * 18, line_of_words)


def draw() -> str:
    """Return the picture as the text of an SVG file."""
    story = tell()
    parts = [*head()]
    tops = [LANES + LANE * number for number in range(len(story.lanes))]
    for lane, top in zip(story.lanes, tops, strict=True):
        parts += lane_frame(lane, top)
    parts += sends(story)
    for lane, top in zip(story.lanes, tops, strict=True):
        parts += lane_bars(lane, top)
    parts += [*notes(story), *verdict(story), *axis(), *legend(), "</svg>"]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
