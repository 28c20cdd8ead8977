"""The manners of a terminal program: exit codes, remarks, Ctrl-C, closed pipes, progress.

Standard output carries what was asked for and nothing else; every remark goes to standard error, in
one line that begins with the program's name. Ctrl-C ends the process at once until something that
needs tidying has begun (`let_interrupts_raise`), because an import that is interrupted half-way may
swallow the exception or turn it into another.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Self

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress, TaskID

PROGRAM = "nanoserve"

EXIT_OK = 0
EXIT_FAULT = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

PROGRESS_DELAY_S = 2.0
SHOW_CURSOR = b"\x1b[?25h"

logger = logging.getLogger(PROGRAM)


def remark(message: str) -> None:
    """One line on standard error, whatever line breaks `message` holds."""
    typer.echo(f"{PROGRAM}: {' '.join(message.split())}", err=True)


class _Remarks(logging.Handler):
    """Log records as remarks; with `--verbose`, the traceback of one that has it."""

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        remark(level + record.getMessage())
        if record.exc_info:
            typer.echo(logging.Formatter().formatException(record.exc_info), err=True)


def show(result: RenderableType) -> None:
    """A table, on standard output; a closed pipe raises, as it does for text.

    What a folder or a model is called is shown as it is: no markup, no emoji.
    """
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(result)
    typer.echo(captured.get(), nl=False)


def be_verbose(wanted: bool) -> None:
    """Callback of `--verbose`: it may stand before the command or after it."""
    if wanted:
        logger.setLevel(logging.INFO)


@contextmanager
def manners() -> Iterator[None]:
    """The process's signals, streams and log while a command runs; put back afterwards."""
    handler = _Remarks()
    level, interrupts = logger.level, signal.getsignal(signal.SIGINT)
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    if interrupts is not signal.SIG_IGN:  # started in the background by a script: not ours to end
        signal.signal(signal.SIGINT, _end_at_once)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, interrupts)
        logger.setLevel(level)
        logger.removeHandler(handler)


def _end_at_once(signum: int, frame: FrameType | None) -> None:
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), SHOW_CURSOR)  # a progress bar may have hidden it
    os._exit(EXIT_INTERRUPTED)


def let_interrupts_raise() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt: there is something to tidy."""
    if signal.getsignal(signal.SIGINT) is _end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def abandon_stdout() -> None:
    """Let nothing more be written to standard output, not even what the exit would flush."""
    try:
        descriptor = sys.stdout.fileno()
    except io.UnsupportedOperation:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def process_age_s() -> float | None:
    """Seconds since this process was started, which is when the return key was hit; Linux only."""
    if sys.platform != "linux":
        return None
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc_pid_stat(5)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


_CONTROLS = {c: "\ufffd" for c in (*range(0x20), *range(0x7F, 0xA0)) if chr(c) not in "\n\t"}


def printable(text: str) -> str:
    """`text` as a terminal may have it: no escape sequence that a model made up reaches it."""
    return text.translate(_CONTROLS)


class LateProgress:
    """A progress bar on standard error, if that is a terminal and the wait lasts two seconds.

    `total` None shows that something goes on, without a length. `wanted` False shows nothing.
    """

    def __init__(
        self,
        title: str,
        total: int | None = None,
        *,
        wanted: bool = True,
        delay_s: float = PROGRESS_DELAY_S,
    ) -> None:
        self._title = title
        self._total = total
        self._wanted = wanted and sys.stderr.isatty()
        self._timer = threading.Timer(delay_s, self._show)
        self._timer.daemon = True
        self._lock = threading.Lock()
        self._done = 0
        self._closed = False
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if self._wanted:
            self._timer.start()
        return self

    def advance(self, amount: int = 1) -> None:
        with self._lock:
            self._done += amount
            if self._bar is not None and self._task is not None:
                self._bar.update(self._task, completed=self._done)

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            self._closed = True
            if self._bar is not None:
                self._bar.stop()

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        with self._lock:
            if self._closed:
                return
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
                redirect_stdout=False,  # what is piped from there must stay there
                redirect_stderr=False,
            )
            self._task = self._bar.add_task(self._title, total=self._total)
            self._bar.update(self._task, completed=self._done)
            self._bar.start()
