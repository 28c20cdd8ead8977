"""Make docs/demo.cast and docs/demo.gif: `nanoserve generate` as it streamed, played back at 1x.

    python scripts/make_demo.py              # runs COMMANDS here, in a terminal that nobody sees
    python scripts/make_demo.py --out DIR

Nothing is staged: every command runs in a pseudo-terminal, and each piece of its output is kept
with the moment at which it came, the start of Python included. Only what a shell would show is
added, the line that was typed and the prompt it comes back to. The cast (asciicast v2) holds the
pieces as they came; the GIF shows them on a grid of GRID_S, each moment rounded from the start of
the capture, so that no error adds up. A command that fails is an error, and what was there before
stays. Needs the extra `demo`: Pillow draws, in the DejaVu Sans Mono that matplotlib brings.
"""

from __future__ import annotations

import argparse
import codecs
import errno
import fcntl
import json
import os
import re
import select
import shlex
import struct
import subprocess
import sys
import termios
import time
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COLUMNS, ROWS = 104, 26  # the widest line of --stats; both runs say what a token took
STORY = (
    "nanoserve",
    "generate",
    "Once upon a time",
    "--max-tokens",
    "160",
    "--seed",
    "7",
    "--stats",
)
COMMANDS = (
    ("no KV cache: every token computes all before it again", (*STORY, "--kv-layout", "recompute")),
    ("with it: the same story", STORY),
)
"""A remark, and the command that is typed below it."""

PROMPT = "\x1b[1;32m$\x1b[0m "
HOLD_S = 4.0
"""How long the terminal is watched after the last command, so that its end can be read."""
TIMEOUT_S = 120.0
GRID_S = 0.02
"""Browsers show a frame of less than 20 ms for 100 ms, so the grid of a GIF is this coarse."""


class DemoError(RuntimeError):
    """The capture or its picture cannot be made; the message says why."""


# ------------------------------------------------------------------------------------------ capture


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Text that reached the terminal, `at_s` seconds after the capture began."""

    at_s: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """What a terminal of this size was sent. The last event, maybe empty, says how long it took."""

    columns: int
    rows: int
    began: int  # seconds since 1970
    events: tuple[Event, ...]

    @property
    def duration_s(self) -> float:
        return self.events[-1].at_s

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)


def capture(
    commands: Iterable[tuple[str, Sequence[str]]],
    *,
    columns: int = COLUMNS,
    rows: int = ROWS,
    hold_s: float = HOLD_S,
    timeout_s: float = TIMEOUT_S,
) -> Capture:
    """Run one command after the other in one terminal.

    Raises DemoError for a command that fails or takes longer than `timeout_s`.
    """
    began, start_s = int(time.time()), time.monotonic()
    events = []

    def note(text: str) -> None:
        events.append(Event(at_s=time.monotonic() - start_s, text=text))

    for remark, command in commands:
        note(f"\x1b[2m# {remark}\x1b[0m\r\n{PROMPT}{typed(command)}\r\n")
        for text in output_of(command, columns, rows, time.monotonic() + timeout_s):
            note(text)
    note(PROMPT)
    time.sleep(hold_s)
    note("")
    return Capture(columns=columns, rows=rows, began=began, events=tuple(events))


def typed(command: Sequence[str]) -> str:
    """The command as a person would type it."""
    return " ".join(f'"{word}"' if shlex.quote(word) != word else word for word in command)


def output_of(command: Sequence[str], columns: int, rows: int, deadline_s: float) -> Iterator[str]:
    """What the command writes to its terminal, each piece as soon as it is there."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    process = subprocess.Popen(
        runnable(command),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(),
        start_new_session=True,
    )
    os.close(theirs)
    decoder = codecs.getincrementaldecoder("utf-8")()  # a character may come in two pieces
    last = ""
    try:
        while data := read(ours, deadline_s):
            if text := decoder.decode(data):
                last = (last + text)[-200:]
                yield text
        decoder.decode(b"", final=True)  # an end in the middle of a character is an error
        code = process.wait(timeout=max(0.0, deadline_s - time.monotonic()))
    except (TimeoutError, subprocess.TimeoutExpired):
        raise DemoError(f"{typed(command)} did not end in time") from None
    except UnicodeDecodeError as error:
        raise DemoError(f"{typed(command)} wrote what is not UTF-8: {error}") from error
    finally:
        os.close(ours)
        process.kill()
        process.wait()
    if code != 0:
        raise DemoError(f"{typed(command)} ended with {code}: {' '.join(last.split())}")


def read(terminal: int, deadline_s: float) -> bytes:
    """The next piece; b"" when the program has gone. Raises TimeoutError."""
    ready, _, _ = select.select([terminal], [], [], max(0.0, deadline_s - time.monotonic()))
    if not ready:
        raise TimeoutError
    try:
        return os.read(terminal, 65_536)
    except OSError as error:
        if error.errno == errno.EIO:  # how Linux says that nobody holds the other end any more
            return b""
        raise


def runnable(command: Sequence[str]) -> list[str]:
    """`nanoserve` is that of this Python and this tree, wherever PATH leads."""
    if command[0] == "nanoserve":
        return [sys.executable, "-m", "nanoserve", *command[1:]]
    return list(command)


def environment() -> dict[str, str]:
    """Ours, without what would change the picture and is not on it."""
    hidden = ("NANOSERVE_", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), kept.get("PYTHONPATH"))))
    return kept | {"TERM": "xterm-256color", "PYTHONPATH": path}


def cast_of(made: Capture) -> str:
    """The file: asciicast v2, a header and one event a line."""
    header = {
        "version": 2,
        "width": made.columns,
        "height": made.rows,
        "timestamp": made.began,
        "env": {"TERM": "xterm-256color"},
    }
    lines: list[Any] = [header, *([round(e.at_s, 6), "o", e.text] for e in made.events)]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def read_cast(text: str) -> Capture:
    """Inverse of `cast_of`. Raises DemoError for what is not such a file."""
    try:
        header, *events = (json.loads(line) for line in text.splitlines())
        if header["version"] != 2:
            raise DemoError(f"this is version {header['version']} of asciicast, not 2")
        shown = tuple(Event(at_s=at_s, text=data) for at_s, kind, data in events if kind == "o")
        if not shown:
            raise DemoError("this asciicast shows nothing")
        return Capture(
            columns=header["width"],
            rows=header["height"],
            began=header["timestamp"],
            events=shown,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DemoError(f"this is not an asciicast: {error!r}") from error


# ----------------------------------------------------------------------------------------- terminal

DEFAULT_COLOUR = 7
DIM_COLOUR = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How a character looks: its colour (0-15 as terminals count them, 16 dim) and weight."""

    colour: int = DEFAULT_COLOUR
    is_bold: bool = False


Cell = tuple[str, Style]
Rows = tuple[tuple[Cell, ...], ...]
BLANK: Cell = (" ", Style())
SEQUENCE = re.compile(r"\x1b\[(\??)([\d;]*)([A-Za-z])")


class Terminal:
    """As much of a terminal as a command of ours asks for. Raises DemoError for anything else."""

    def __init__(self, columns: int, rows: int) -> None:
        self._columns, self._num_rows = columns, rows
        self._rows = [[BLANK] * columns for _ in range(rows)]
        self._row = self._column = 0
        self._style = Style()
        self._torn = ""
        self.shows_cursor = True

    @property
    def rows(self) -> Rows:
        return tuple(map(tuple, self._rows))

    @property
    def cursor(self) -> tuple[int, int]:
        """Row and column, both from 0."""
        return self._row, min(self._column, self._columns - 1)

    def write(self, text: str) -> None:
        """Show it. An escape sequence that has not come whole waits for the rest."""
        text, at = self._torn + text, 0
        self._torn = ""
        while at < len(text):
            if text[at] != "\x1b":
                self._put(text[at])
                at += 1
            elif found := SEQUENCE.match(text, at):
                self._obey(*found.groups())
                at = found.end()
            elif re.fullmatch(r"\x1b(\[\??[\d;]*)?", text[at:]):
                self._torn, at = text[at:], len(text)
            else:
                raise DemoError(f"the renderer does not know what {text[at : at + 8]!r} begins")

    def _put(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._feed()
        elif character == "\t":
            self._column = min(self._column // 8 * 8 + 8, self._columns - 1)
        elif character == "\b":
            self._column = max(0, self._column - 1)
        elif unicodedata.category(character)[0] in "CM" or unicodedata.east_asian_width(
            character
        ) in ("W", "F"):
            raise DemoError(f"the renderer has no single cell for {character!r}")
        else:
            if self._column == self._columns:  # a full line breaks when the next character comes
                self._column = 0
                self._feed()
            self._rows[self._row][self._column] = (character, self._style)
            self._column += 1

    def _feed(self) -> None:
        if self._row + 1 < self._num_rows:
            self._row += 1
        else:
            self._rows = [*self._rows[1:], [BLANK] * self._columns]

    def _obey(self, private: str, parameters: str, final: str) -> None:
        numbers = [int(number or 0) for number in parameters.split(";")]
        first = numbers[0]
        if private and final in "hl" and numbers == [25]:
            self.shows_cursor = final == "h"
        elif private:
            raise DemoError(f"the renderer does not know the mode ?{parameters}{final}")
        elif final == "m":
            for number in numbers:
                self._style = restyled(self._style, number)
        elif final == "A":
            self._row = max(0, self._row - max(1, first))
        elif final == "G":
            self._column = min(max(1, first), self._columns) - 1
        elif final == "K" and first in (0, 2):
            start = 0 if first == 2 else self._column
            self._rows[self._row][start:] = [BLANK] * (self._columns - start)
        else:
            raise DemoError(f"the renderer does not know the sequence [{parameters}{final}")


def restyled(style: Style, number: int) -> Style:
    """The style after one parameter of SGR (ECMA-48, 8.3.117)."""
    if number == 0:
        return Style()
    if number == 1:
        return replace(style, is_bold=True)
    if number == 2:
        return replace(style, colour=DIM_COLOUR)
    if number == 22:
        return Style() if style.colour == DIM_COLOUR else replace(style, is_bold=False)
    if number == 39:
        return replace(style, colour=DEFAULT_COLOUR)
    for first, colour in ((30, 0), (90, 8)):
        if first <= number < first + 8:
            return replace(style, colour=number - first + colour)
    raise DemoError(f"the renderer does not know the style {number}")


# ---------------------------------------------------------------------------------------------- GIF

FONT_SIZE = 14
MARGIN = 12
SHADES = 15
BACKGROUND = (22, 24, 29)
COLOURS = (
    *((98, 104, 116), (224, 108, 117), (126, 200, 120), (229, 192, 123)),
    *((97, 175, 239), (208, 132, 226), (86, 182, 194), (204, 208, 216)),
    *((130, 137, 150), (240, 140, 148), (160, 220, 150), (240, 210, 150)),
    *((140, 200, 250), (225, 160, 240), (120, 210, 220), (255, 255, 255)),
    (128, 134, 146),
)
"""The sixteen of a terminal, as they read on BACKGROUND, and dim."""


def palette() -> bytes:
    """RGB: the background, then the way from it to each colour in SHADES steps."""
    steps = [tuple(BACKGROUND)]
    for colour in COLOURS:
        for shade in range(1, SHADES + 1):
            pairs = zip(BACKGROUND, colour, strict=True)
            steps.append(tuple(round(b + (c - b) * shade / SHADES) for b, c in pairs))
    return bytes(channel for step in steps for channel in step)


class Painter:
    """Draws screens as images whose pixels are indices into `palette()`."""

    def __init__(self, columns: int, rows: int) -> None:
        import matplotlib as mpl
        from PIL import ImageFont

        folder = Path(mpl.get_data_path()) / "fonts" / "ttf"
        names = {False: "DejaVuSansMono.ttf", True: "DejaVuSansMono-Bold.ttf"}
        self._fonts = {
            bold: ImageFont.truetype(str(folder / name), FONT_SIZE) for bold, name in names.items()
        }
        ascent, descent = self._fonts[False].getmetrics()
        self._cell = (round(self._fonts[False].getlength("M")), ascent + descent + 2)
        width, height = self._cell
        self._size = (columns * width + 2 * MARGIN, rows * height + 2 * MARGIN)
        self._glyphs: dict[Cell, Any] = {}

    def draw(self, rows: Rows, cursor: tuple[int, int] | None) -> Any:
        """An image of the screen, in mode P."""
        from PIL import Image

        image = Image.new("P", self._size, 0)
        image.putpalette(palette())
        for row, cells in enumerate(rows):
            for column, cell in enumerate(cells):
                if cell[0] != " ":
                    image.paste(self._glyph(cell), self._corner(row, column))
        if cursor:
            left, top = self._corner(*cursor)
            width, height = self._cell
            image.paste(
                first_index(DEFAULT_COLOUR) + SHADES - 5, (left, top, left + width, top + height)
            )
        return image

    def _corner(self, row: int, column: int) -> tuple[int, int]:
        return MARGIN + column * self._cell[0], MARGIN + row * self._cell[1]

    def _glyph(self, cell: Cell) -> Any:
        from PIL import Image, ImageDraw

        if cell not in self._glyphs:
            character, style = cell
            mask = Image.new("L", self._cell, 0)
            ImageDraw.Draw(mask).text((0, 1), character, fill=255, font=self._fonts[style.is_bold])
            first = first_index(style.colour)
            shades = [round(level / 255 * SHADES) for level in range(256)]
            self._glyphs[cell] = mask.point([first + s - 1 if s else 0 for s in shades])
            self._glyphs[cell] = Image.frombytes("P", self._cell, self._glyphs[cell].tobytes())
        return self._glyphs[cell]


def first_index(colour: int) -> int:
    """Of the faintest shade of a colour in `palette()`."""
    return 1 + colour * SHADES


def frames(made: Capture) -> Iterator[tuple[int, Rows, tuple[int, int] | None]]:
    """How many steps of GRID_S each screen stood, the screen, and its cursor if that shows.

    Moments are rounded, not durations: frames add up to the capture, however many there are.
    """
    terminal = Terminal(made.columns, made.rows)
    since = 0
    for event in made.events:
        step = round(event.at_s / GRID_S)
        if step > since:
            yield step - since, terminal.rows, terminal.cursor if terminal.shows_cursor else None
            since = step
        terminal.write(event.text)


def write_gif(path: Path, made: Capture, painter: Painter) -> None:
    """Played once through it lasts as long as the capture; then it begins again."""
    durations_ms, images = [], []
    for steps, rows, cursor in frames(made):
        durations_ms.append(round(steps * GRID_S * 1000))
        images.append(painter.draw(rows, cursor))
    if not images:
        raise DemoError(f"a capture of {made.duration_s:.3f} s is too short for a picture")
    images[0].save(
        path,
        format="GIF",
        save_all=True,
        append_images=images[1:],
        duration=durations_ms,
        loop=0,
        optimize=False,
    )


def make(out: Path) -> None:
    """Both files, both or none."""
    painter = Painter(COLUMNS, ROWS)  # first, because what it needs may be missing
    made = capture(COMMANDS)
    out.mkdir(parents=True, exist_ok=True)
    new = {name: out / f".{name}.new" for name in ("demo.cast", "demo.gif")}
    try:
        new["demo.cast"].write_text(cast_of(made), encoding="utf-8")
        write_gif(new["demo.gif"], made, painter)
        for name, path in new.items():
            path.replace(out / name)
            print(f"{out / name}: {made.duration_s:.2f} s, {(out / name).stat().st_size:,} bytes")
    finally:
        for path in new.values():
            path.unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="a folder (docs)")
    options = parser.parse_args(arguments)
    try:
        make(options.out)
    except ModuleNotFoundError as error:
        print(f"make_demo: {error.name} is missing: pip install -e '.[demo]'", file=sys.stderr)
        return 1
    except (DemoError, OSError) as error:
        print(f"make_demo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
