"""Draw `shop.svg` and `shop-recording.svg`: the example shop's last table, and its whole run.

Run as `python3 -m docs.pictures.shop`: it runs `python3 -m example_worker` in a terminal of its
own, which takes two minutes, and writes both files anew.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

from docs.pictures.drawing import FOLDER
from example_worker.bootstrap import REPOSITORY, ensure
from example_worker.options import OWN_SERVERS

TABLE, RECORDING = FOLDER / "shop.svg", FOLDER / "shop-recording.svg"
COMMAND = "python3 -m example_worker"

# the terminal: narrow, so that it can be read on a phone
COLUMNS, ROWS = 76, 40
LASTS, FRAMES = 20.0, 50  # the recording: seconds, and frames at most
SETTLED = 0.05  # seconds without output after which a screen is complete

# the picture, in pixels
CELL, LINE, FONT, LEFT, TOP, BOTTOM = 8, 17, 13, 14, 60, 14
WIDTH = COLUMNS * CELL + 2 * LEFT
GROUND, BAR, INK, FAINT = "#1b1f24", "#2d333b", "#d7dde3", "#9aa5b1"
STYLES = {"": "", "1": "b", "32": "g", "33": "y", "1;31": "r"}  # by the terminal's codes
COLOURS = ".b{font-weight:bold}.g{fill:#56d364}.y{fill:#e3b341}.r{fill:#ff7b72;font-weight:bold}"

_TOKEN = re.compile(r"\x1b\[(?P<code>[?0-9;]*)(?P<kind>[A-Za-z])|(?P<other>[^\x1b])", re.DOTALL)

Style = str
Cell = tuple[str, Style]
Line = tuple[tuple[str, Style], ...]  # runs of one style


@dataclass
class Terminal:
    """What the shop's output makes of a terminal: as much of one as rich uses."""

    lines: list[list[Cell]] = field(default_factory=lambda: [[]])
    row: int = 0
    column: int = 0
    style: Style = ""

    def feed(self, output: str) -> None:
        """Take output; raises ValueError for a sequence that is not known here."""
        for token in _TOKEN.finditer(output):
            if token["other"] is None:
                self._control(token["code"], token["kind"])
            elif token["other"] == "\r":
                self.column = 0
            elif token["other"] == "\n":
                self._next_line()
            else:
                self._put(token["other"])

    def _control(self, code: str, kind: str) -> None:
        if kind == "m":
            self.style = STYLES[code.removeprefix("0")]
        elif kind == "A":
            self.row = max(0, self.row - int(code or 1))
        elif kind == "K":
            self.lines[self.row] = []
        elif not code.startswith("?"):  # the cursor is hidden and shown
            raise ValueError(f"the terminal does not know {code}{kind}")

    def _next_line(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append([])

    def _put(self, letter: str) -> None:
        if self.column == COLUMNS:
            self.column = 0
            self._next_line()
        line = self.lines[self.row]
        line.extend([(" ", "")] * (self.column - len(line) + 1))
        line[self.column] = letter, self.style
        self.column += 1

    def shown(self) -> list[Line]:
        """Return all lines, also those that have scrolled away."""
        return [_joined(line) for line in self.lines]


def _joined(line: Sequence[Cell]) -> Line:
    """Return a line's cells as runs of one style, without the blanks at its end."""
    end = len("".join(letter for letter, _ in line).rstrip())
    cells = [(letter, style if letter != " " else "") for letter, style in line[:end]]
    runs = groupby(cells, key=lambda cell: cell[1])
    return tuple(("".join(letter for letter, _ in run), style) for style, run in runs)


def words_of(line: Line) -> str:
    """Return a line without its styles."""
    return "".join(words for words, _ in line)


@dataclass(frozen=True)
class Frame:
    """What the terminal shows from a moment of the run on; seconds since its begin."""

    at: float
    lines: tuple[Line, ...]


def record() -> list[Frame]:
    """Run the shop in a terminal; return each screen that differs from the one before.

    Raises RuntimeError if the shop fails.
    """
    prompt: Line = ((f"$ {COMMAND}", "b"),)
    process, screen = pty.fork()
    if process == 0:
        _be_the_shop()
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    terminal, frames, started = Terminal(), [Frame(0.0, (prompt,))], time.monotonic()
    output, is_over = b"", False
    while not is_over:
        if select.select([screen], [], [], SETTLED)[0]:
            read = _read(screen)
            output, is_over = output + read, not read
            if not is_over:
                continue
        terminal.feed(output.decode())
        output = b""
        lines = (prompt, *_without_the_hint(terminal.shown()))[-ROWS:]
        if lines != frames[-1].lines:
            frames.append(Frame(time.monotonic() - started, lines))
    _, status = os.waitpid(process, 0)
    if status:
        raise RuntimeError("the shop failed: run it by itself")
    return frames


def _be_the_shop() -> None:
    time.sleep(0.5)  # the terminal gets its size meanwhile
    os.chdir(REPOSITORY)
    env = {name: word for name, word in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command = [sys.executable, *COMMAND.split()[1:]]
    os.execve(sys.executable, command, {**env, "TERM": "xterm-256color"})


def _read(screen: int) -> bytes:
    """Return what the shop has written; nothing once it has ended."""
    try:
        return os.read(screen, 65536)
    except OSError:  # Linux says so of a terminal without a process
        return b""


def _without_the_hint(lines: list[Line]) -> list[Line]:
    """Return lines up to the verdict: what follows says how to use servers of one's own."""
    hint = OWN_SERVERS.partition("\n")[0]
    ends = [number for number, line in enumerate(lines) if line and hint.startswith(words_of(line))]
    kept = lines[: ends[0]] if ends else lines
    while kept and not kept[-1]:
        kept = kept[:-1]
    return kept


def thinned(frames: Sequence[Frame]) -> list[Frame]:
    """Return as many frames as a recording has, the first and the last among them."""
    every = frames[-1].at / (FRAMES - 2)
    by_time = {frame.at // every: frame for frame in frames}
    return [frames[0], *(frame for frame in by_time.values() if frame is not frames[0])]


def last_table(lines: Sequence[Line]) -> list[Line]:
    """Return the table of all items, and the summary of both phases."""
    said = [words_of(line) for line in lines]
    begin = max(number for number, words in enumerate(said) if "no lock" in words)
    end = max(number for number, words in enumerate(said) if words.startswith("seconds "))
    return list(lines[begin : end + 1])


def write_line(line: Line, y: float) -> str:
    """Return the text of one line, as wide as its cells whatever the font is."""
    inner = "".join(
        f'<tspan class="{style}">{escape(words)}</tspan>' if style else escape(words)
        for words, style in line
    )
    length = len(words_of(line)) * CELL
    place = f' y="{y:g}"' if y else ""
    return f'<text x="{LEFT}"{place} textLength="{length}">{inner}</text>'


def baseline(number: int) -> float:
    """Return the y of a line of the terminal."""
    return TOP + number * LINE


def head(height: int, title: str, description: str, style: str, label: str) -> Iterator[str]:
    """Yield the frame: a window with a title bar."""
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" xml:space="preserve" role="img" aria-labelledby="t d">'
    )
    yield f'<title id="t">{escape(title)}</title>'
    yield f'<desc id="d">{escape(description)}</desc>'
    fonts = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
    yield f"<style>text{{white-space:pre;font:{FONT}px {fonts};fill:{INK}}}{COLOURS}{style}</style>"
    yield f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{GROUND}"/>'
    yield f'<path d="M0 36V8a8 8 0 0 1 8 -8H{WIDTH - 8}a8 8 0 0 1 8 8V36z" fill="{BAR}"/>'
    for number in range(3):
        yield f'<circle cx="{22 + number * 20}" cy="18" r="6" fill="#586069"/>'
    middle = WIDTH // 2 + 20
    yield f'<text x="{middle}" y="23" text-anchor="middle" fill="{FAINT}">{escape(label)}</text>'


def draw_table(lines: Sequence[Line]) -> str:
    """Return the picture of the last table."""
    height = TOP + (len(lines) - 1) * LINE + BOTTOM
    said = " ".join(words_of(line).strip() for line in lines)
    title = "The example shop without and with the lock"
    parts = [*head(height, title, said, "", COMMAND)]
    parts += [write_line(line, baseline(number)) for number, line in enumerate(lines) if line]
    return "\n".join([*parts, "</svg>"]) + "\n"


def draw_recording(frames: Sequence[Frame]) -> str:
    """Return the recording: a film of all frames side by side, which moves by one at a time."""
    height = TOP + (ROWS - 1) * LINE + BOTTOM
    moves = "".join(
        f"{100 * frame.at / frames[-1].at:.2f}%{{transform:translateX({-WIDTH * number}px)}}"
        for number, frame in enumerate(frames)
    )
    last = f"transform:translateX({-WIDTH * (len(frames) - 1)}px)"
    style = (
        f"@keyframes film{{{moves}}}.film{{{last};animation:film {LASTS:g}s step-end}}"
        "@media(prefers-reduced-motion:reduce){.film{animation:none}}"
    )
    said = " ".join(words_of(line).strip() for line in frames[-1].lines)
    title = "A run of the example shop, recorded in a terminal"
    label = f"{COMMAND} ({frames[-1].at / LASTS:.0f} times as fast)"
    parts = [*head(height, title, f"At its end: {said}", style, label)]
    names: dict[Line, str] = {}
    for frame in frames:
        for line in frame.lines:
            names.setdefault(line, f"l{len(names)}")
    parts.append("<defs>")
    parts += [
        write_line(line, 0).replace("<text", f'<text id="{name}"', 1)
        for line, name in names.items()
        if line
    ]
    parts += ["</defs>", f'<svg width="{WIDTH}" height="{height}"><g class="film">']
    for number, frame in enumerate(frames):
        uses = "".join(
            f'<use href="#{names[line]}" y="{baseline(row):g}"/>'
            for row, line in enumerate(frame.lines)
            if line
        )
        parts.append(f'<g transform="translate({WIDTH * number})">{uses}</g>')
    return "\n".join([*parts, "</g></svg>", "</svg>"]) + "\n"


def read(picture: str) -> list[str]:
    """Return the lines of a picture of a table, as they stood in the terminal."""
    texts = ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(text.itertext()) for text in texts if text.attrib["x"] == str(LEFT)]


def main() -> None:
    """Run the shop, and write both pictures."""
    ensure("example")
    frames = record()
    TABLE.write_text(draw_table(last_table(frames[-1].lines)), encoding="utf-8")
    RECORDING.write_text(draw_recording(thinned(frames)), encoding="utf-8")
    for made in (TABLE, RECORDING):
        print(f"{made}: {made.stat().st_size} bytes")


if __name__ == "__main__":
    main()
