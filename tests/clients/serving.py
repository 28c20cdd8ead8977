"""`nanoserve serve` as its own process, clients that are programs, and what docs/ tells to type.

SERVER_PYTHON names the interpreter that serves (by default the one that tests), so that a server
with the tested versions can be driven by clients that want others.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "clients.md"
DOCUMENTED_URL = "http://localhost:8000"

PATIENCE_S = 60.0
"""What is not there by then never comes."""
KEY = "sk-of-the-tests"
SAMPLE = re.compile(r"(?m)^(?P<name>[\w:]+)(?P<labels>\{[^}]*\})? (?P<value>\S+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """`url` is without a path; most clients want `base_url`."""

    url: str

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    def metric(self, name: str, **labels: str) -> float:
        """The sum of all samples of that name that have these labels, as /metrics shows it."""
        found = list(SAMPLE.finditer(get(f"{self.url}/metrics")))
        assert name in {sample["name"] for sample in found}
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            float(sample["value"])
            for sample in found
            if sample["name"] == name and all(pair in (sample["labels"] or "") for pair in wanted)
        )

    def wait_idle(self, within_s: float = PATIENCE_S) -> None:
        """Until nothing runs or waits."""
        gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        wait_until(lambda: not any(self.metric(name) for name in gauges), within_s)

    def wait_busy(self) -> None:
        """Until something runs."""
        wait_until(lambda: self.metric("vllm:num_requests_running") > 0)


def get(url: str) -> str:
    """The body at `url`, asked for with the key that one of our servers wants."""
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(asked, timeout=PATIENCE_S) as response:
        return str(response.read().decode())


def wait_until(happened: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.01)


def environment(**more: str) -> dict[str, str]:
    """Of a child process: this one's, without anyone's keys, and with nowhere to download from."""
    kept = {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")}
    return {**kept, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", **more}


@contextmanager
def serving(*options: str) -> Iterator[RunningServer]:
    """A server with these options, once it is healthy. SIGTERM ends it, and it must end with 0."""
    python = os.environ.get("SERVER_PYTHON", sys.executable)
    command = [python, "-m", "nanoserve", "serve", "--port", "0", "--device", "cpu", *options]
    log: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        # Somebody has to read: a full pipe would hold the server up.
        reader = threading.Thread(target=log.extend, args=(process.stdout,))
        reader.start()
        try:
            yield RunningServer(url=wait_for_url(process, log))
            process.terminate()
            assert process.wait(PATIENCE_S) == 0, "".join(log)
        finally:
            process.kill()
            reader.join()


def wait_for_url(process: subprocess.Popen[str], log: Sequence[str]) -> str:
    """The address that the server prints, once it says that it is well."""
    deadline = time.monotonic() + PATIENCE_S
    while process.poll() is None and time.monotonic() < deadline:
        found = re.search(r"listening: (\S+)", "".join(log))
        if found and is_healthy(found[1]):
            return found[1]
        time.sleep(0.05)
    raise AssertionError(f"no server within {PATIENCE_S} s:\n{''.join(log)}")


def is_healthy(url: str) -> bool:
    try:
        get(f"{url}/health")
    except OSError:  # it warms up
        return False
    return True


def run_program(command: Sequence[str | Path], *, cwd: Path | None = None, **env: str) -> str:
    """What it prints on standard output. Fails, with all that it said, unless it ends with 0."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        env=environment(**env),
        cwd=cwd,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def script(name: str) -> Path:
    """A program that pip put beside the interpreter of these tests."""
    return Path(sys.executable).parent / name


def documented(language: str) -> list[str]:
    """The blocks in that language, in the order of docs/clients.md."""
    text = DOCUMENT.read_text(encoding="utf-8")
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", text)


def documented_command(program: str, server: RunningServer, **places: Path) -> list[str]:
    """The one block that begins with `program`, as arguments, with this server in its address.

    `places` are where this test wants what `--name` or `,name=` says.
    """
    (block,) = (block for block in documented("bash") if block.startswith(f"{program} "))
    line = block.replace(DOCUMENTED_URL, server.url).replace("\\\n", " ")
    for name, place in places.items():
        line, num_found = re.subn(rf"((?:--{name} |,{name}=))[^\s,]+", rf"\g<1>{place}", line)
        assert num_found == 1
    return [str(script(program)), *shlex.split(line)[1:]]
