"""scripts/make_demo.py: what the terminal was sent is what is kept, shown when it came."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nanoserve import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import make_demo  # noqa: E402
from make_demo import Capture, DemoError, Event, Painter, Terminal  # noqa: E402

STORY = ("nanoserve", "generate", "The sea", "--max-tokens", "24", "--seed", "3", "--device", "cpu")
MAX_GIF_BYTES = 1_500_000


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def capture(*commands: Sequence[str], timeout_s: float = 60.0) -> Capture:
    return make_demo.capture([("as it is", c) for c in commands], hold_s=0.1, timeout_s=timeout_s)


def screen(made: Capture) -> list[str]:
    """What stands in the terminal at the end, line by line."""
    terminal = Terminal(made.columns, made.rows)
    for event in made.events:
        terminal.write(event.text)
    return ["".join(character for character, _ in row).rstrip() for row in terminal.rows]


def made_of(*events: tuple[float, str]) -> Capture:
    return Capture(
        columns=20,
        rows=4,
        began=0,
        events=tuple(Event(at_s=at_s, text=text) for at_s, text in events),
    )


def durations_ms(path: Path) -> list[int]:
    from PIL import Image

    found = []
    with Image.open(path) as image:
        for number in range(getattr(image, "n_frames", 1)):
            image.seek(number)
            found.append(image.info["duration"])
    return found


def test_the_cast_replays_to_the_text_of_the_run(tmp_path: Path) -> None:
    made = capture(STORY)
    (tmp_path / "demo.cast").write_text(make_demo.cast_of(made), encoding="utf-8")
    read = make_demo.read_cast((tmp_path / "demo.cast").read_text(encoding="utf-8"))
    assert read.text == made.text
    params = SamplingParams(max_tokens=24, seed=3, temperature=0.8, top_p=0.95)
    (output,) = LLM("mini", device="cpu").generate(["The sea"], params)
    remark, typed, *middle, prompt = read.text.split("\r\n")
    assert remark == "\x1b[2m# as it is\x1b[0m"
    assert typed.startswith(make_demo.PROMPT + 'nanoserve generate "The sea" --max-tokens 24')
    assert prompt == make_demo.PROMPT
    shown = "\n".join(middle).rpartition("\x1b[1m")[2]  # a slow start shows a bar before it
    assert re.sub(r"\x1b\[[\d;]*m", "", shown) == "The sea" + output.outputs[0].text
    assert any(line.startswith("The sea") for line in screen(read))


def test_the_moments_are_those_at_which_it_came() -> None:
    code = "import time\nfor i in range(4):\n    print(i, flush=True)\n    time.sleep(0.2)"
    made = capture(python(code))
    at_s = {event.text.strip(): event.at_s for event in made.events if event.text.strip().isdigit()}
    gaps = [at_s[str(i + 1)] - at_s[str(i)] for i in range(3)]
    assert min(gaps) > 0.1  # this process may have been late for one
    assert [event.at_s for event in made.events] == sorted(event.at_s for event in made.events)
    assert made.duration_s >= at_s["3"] + 0.2 + 0.1


def test_a_program_sees_a_terminal_of_that_size() -> None:
    code = (
        "import os, sys; print(sys.stdout.isatty(), *os.get_terminal_size(2), os.environ['TERM'])"
    )
    assert f"True {make_demo.COLUMNS} {make_demo.ROWS} xterm-256color" in capture(python(code)).text


def test_a_character_may_come_in_two_pieces() -> None:
    code = (
        "import os, time\nfor b in ('é→'.encode()[i : i + 1] for i in range(5)):\n"
        "    os.write(1, b)\n    time.sleep(0.02)"
    )
    assert "é→" in capture(python(code)).text


@pytest.mark.parametrize(
    "code, timeout_s, words",
    [
        ("print('no such model'); raise SystemExit(2)", 60.0, r"ended with 2: no such model"),
        ("import time; print('on and on', flush=True); time.sleep(60)", 0.5, "not end in time"),
        ("import os; os.write(1, bytes([255]))", 60.0, "not UTF-8"),
        ("import os; os.write(1, '→'.encode()[:2])", 60.0, "not UTF-8"),
    ],
)
def test_a_capture_that_fails_is_an_error(code: str, timeout_s: float, words: str) -> None:
    began_s = time.monotonic()
    with pytest.raises(DemoError, match=words):
        capture(python(code), timeout_s=timeout_s)
    assert time.monotonic() - began_s < 30


def test_a_failure_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "demo.gif").write_text("of before")
    command = ("nanoserve", "generate", "x", "--model", "no-such-folder/anywhere/at-all")
    monkeypatch.setattr(make_demo, "COMMANDS", (("a remark", command),))
    assert make_demo.main(["--out", str(tmp_path)]) == 1
    assert "make_demo: nanoserve generate x" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["demo.gif"]
    assert (tmp_path / "demo.gif").read_text() == "of before"


def test_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert make_demo.main(["--out", str(tmp_path)]) == 1
    assert "pip install -e '.[demo]'" in capsys.readouterr().err


def test_the_gif_lasts_as_long_as_the_capture(tmp_path: Path) -> None:
    """A thousand tokens 7.3 ms apart: an error of half a centisecond each would add up to 5 s."""
    events = [(0.0073 * i, "x" if i % 15 else "\r\n") for i in range(1000)]
    made = made_of(*events, (7.9, ""))
    path = tmp_path / "demo.gif"
    make_demo.write_gif(path, made, Painter(20, 4))
    durations = durations_ms(path)
    assert abs(sum(durations) / 1000 - 7.9) <= make_demo.GRID_S
    assert min(durations) >= 20  # less, and browsers would play it at 100 ms a frame
    assert len(durations) > 250


def test_each_frame_is_shown_when_its_text_came() -> None:
    made = made_of((0.0, "a"), (0.5, "b"), (0.504, "c"), (1.259, "d"), (1.5, ""))
    shown = [
        (steps, "".join(c for c, _ in rows[0]).rstrip())
        for steps, rows, _ in make_demo.frames(made)
    ]
    assert shown == [(25, "a"), (38, "abc"), (12, "abcd")]


def test_a_capture_with_no_length_has_no_picture(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="too short for a picture"):
        make_demo.write_gif(tmp_path / "x.gif", made_of((0.0, "a"), (0.001, "")), Painter(20, 4))


@pytest.mark.parametrize(
    "text, lines",
    [
        ("one\r\ntwo", ["one", "two"]),
        ("x" * 20 + "\r\nnext", ["x" * 20, "next"]),  # a full line and its end are one break
        ("x" * 21, ["x" * 20, "x"]),
        ("1\r\n2\r\n3\r\n4\r\n5", ["2", "3", "4", "5"]),
        ("a\tb\b\bc", ["a      cb"]),
        ("loading\r\n\x1b[1A\x1b[2Kgone", ["gone"]),
        ("abc\r\x1b[Kx", ["x"]),
        ("abc\x1b[2Gx", ["axc"]),
    ],
)
def test_the_terminal_does_what_terminals_do(text: str, lines: list[str]) -> None:
    whole, torn = made_of((0.0, text)), made_of(*((0.0, character) for character in text))
    for made in (whole, torn):
        assert [line for line in screen(made) if line] == lines


def test_the_terminal_knows_weights_colours_and_the_cursor() -> None:
    terminal = Terminal(20, 1)
    terminal.write("\x1b[1;32ma\x1b[0mb\x1b[2mc\x1b[22md\x1b[91me\x1b[?25l")
    cells = terminal.rows[0]
    assert [(c, s.colour, s.is_bold) for c, s in cells[:5]] == [
        ("a", 2, True),
        ("b", 7, False),
        ("c", make_demo.DIM_COLOUR, False),
        ("d", 7, False),
        ("e", 9, False),
    ]
    assert (terminal.cursor, terminal.shows_cursor) == ((0, 5), False)


@pytest.mark.parametrize(
    "text", ["\x1b]0;title\x07", "\x1b[5n", "\x1b[?1049h", "\x1b[48m", "東", "\a"]
)
def test_the_terminal_guesses_nothing(text: str) -> None:
    with pytest.raises(DemoError, match="the renderer"):
        Terminal(20, 4).write(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", '{"version": 1}', "no", '{"version": 2}\n[1]', "[]", "7"),
        '{"version": 2, "width": 80, "height": 24, "timestamp": 0}',
    ],
)
def test_what_is_no_cast_is_said_to_be_none(text: str) -> None:
    with pytest.raises(DemoError, match="asciicast"):
        make_demo.read_cast(text)


def test_a_picture_shows_every_character_in_its_cell() -> None:
    painter = Painter(20, 4)
    terminal = Terminal(20, 4)
    empty = painter.draw(terminal.rows, None).tobytes()
    terminal.write("\r\n  |")
    image = painter.draw(terminal.rows, None)
    changed: Any = image.convert("L").point(lambda level: 255 if level > 40 else 0).getbbox()
    width = (image.width - 2 * make_demo.MARGIN) / 20
    height = (image.height - 2 * make_demo.MARGIN) / 4
    assert image.tobytes() != empty
    assert changed[0] >= make_demo.MARGIN + 2 * width
    assert changed[2] <= make_demo.MARGIN + 3 * width
    assert changed[1] >= make_demo.MARGIN + height
    assert changed[3] <= make_demo.MARGIN + 2 * height


def test_the_demo_that_is_shown_is_a_capture_at_its_own_pace() -> None:
    """docs/: the GIF lasts as long as the cast, which says what make_demo runs and no path."""
    text = (ROOT / "docs" / "demo.cast").read_text(encoding="utf-8")
    made = make_demo.read_cast(text)
    for _, command in make_demo.COMMANDS:
        assert make_demo.typed(command) in made.text
    durations = durations_ms(ROOT / "docs" / "demo.gif")
    assert abs(sum(durations) / 1000 - made.duration_s) <= make_demo.GRID_S
    assert (ROOT / "docs" / "demo.gif").stat().st_size < MAX_GIF_BYTES
    assert not re.search(r"/(?:home|root|tmp|work|usr)\b", json.dumps(text))
    assert "docs/demo.gif" in (ROOT / "README.md").read_text(encoding="utf-8")
