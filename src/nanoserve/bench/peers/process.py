"""A peer's process as its experiment holds it: one order, one answer, and silence in between.

Between orders a worker is stopped (SIGSTOP), so whatever its thread pools do while they wait they
do not do beside another engine's step; and so that engines keep the thread settings they come with.
It has a process group of its own: if the experiment is killed, the system ends a stopped worker.
Every fault becomes a `WorkerError` that says in one line what happened, and none ends the run.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nanoserve
from nanoserve.bench.record import ABSOLUTE_PATH

Answer = dict[str, Any]

MAX_REASON = 160
CHUNK = 65_536
CLOSE_TIMEOUT_S = 10.0


class WorkerError(RuntimeError):
    """A worker that died, said no, said nonsense or said nothing; the message is one line."""


def worker_command(engine: str) -> list[str]:
    """This interpreter, with the one peer."""
    return [sys.executable, "-m", "nanoserve.bench.peers.worker", engine]


def worker_environment() -> dict[str, str]:
    """This environment, and the package where this process found it."""
    root = str(Path(nanoserve.__file__).resolve().parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def one_line(text: str) -> str:
    """A reason as it may be recorded: short, on one line, no path of this machine in it."""
    plain = ABSOLUTE_PATH.sub(" [path]", " ".join(text.split()))
    return plain if len(plain) <= MAX_REASON else plain[: MAX_REASON - 1] + "…"


class Worker:
    """One process, started at once and stopped until it is asked. `close` ends it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=worker_environment(),
            process_group=0,
        )
        self._unread = b""
        self._stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, order: Mapping[str, Any], timeout_s: float) -> Answer:
        """The answer to `order`, within so many seconds of silence. Raises WorkerError."""
        self._signal(signal.SIGCONT)
        try:
            answer = self._exchange(json.dumps(order).encode() + b"\n", timeout_s)
        finally:
            self._stop()
        if "error" in answer:
            raise WorkerError(one_line(str(answer["error"])))
        return answer

    def _exchange(self, line: bytes, timeout_s: float) -> Answer:
        assert self._process.stdin is not None, "opened as a pipe"
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(self._last_words()) from None
        text = self._read_line(timeout_s)
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            self._kill()
            raise WorkerError(f"it answered {one_line(text.decode(errors='replace'))!r}, not JSON")
        return answer

    def _read_line(self, timeout_s: float) -> bytes:
        """Up to the next newline. Raises WorkerError for silence, and for a pipe that closed."""
        assert self._process.stdout is not None, "opened as a pipe"
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            if not select.select([pipe], [], [], timeout_s)[0]:
                self._kill()
                raise WorkerError(f"no answer within {timeout_s:g} s")
            chunk = os.read(pipe, CHUNK)
            if not chunk:
                raise WorkerError(self._last_words())
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _last_words(self) -> str:
        """How it ended, and the last line it wrote about that."""
        code = self._process.wait()
        end = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - CHUNK))
        lines = self._errors.read().decode(errors="replace").splitlines()
        said = next((line for line in reversed(lines) if line.strip()), "")
        return one_line(f"its process {end}" + (f": {said}" if said else ""))

    def _stop(self) -> None:
        """Return when it has stopped, or has ended; its exit code is left to whoever asks."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End it, whatever it is doing; closing again does nothing."""
        self._kill()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None and not pipe.closed:
                close_quietly(pipe)


def close_quietly(pipe: Any) -> None:
    """What was buffered for a dead process goes nowhere, which is no fault."""
    try:
        pipe.close()
    except BrokenPipeError:
        return
