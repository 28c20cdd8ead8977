"""An engine behind HTTP, for benchmarks: `nanoserve serve` as a process, and the client's process.

The server is built from the config of an engine that stands here, so both arms of a comparison are
the same engine. It is spoken to over loopback only, and what it says of itself (processor time,
time to the wire, memory) is read between repetitions, off the clock. Server and benchmarks stand on
one floor and import nothing of each other: all they share is the wire.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any

from nanoserve.bench.client import HOST, Ask, Job, Report
from nanoserve.bench.conduct import VoidError
from nanoserve.bench.measure import now_s
from nanoserve.config import SchedulerConfig
from nanoserve.engine.engine import Engine
from nanoserve.llm import CACHE_OPTIONS, ENGINE_OPTIONS, SCHEDULER_OPTIONS
from nanoserve.planner.model import kv_bytes_per_token

SERVED_NAME = "bench"
START_S = 300.0
STOP_S = 30.0
POLL_S = 0.05
REPLY_S = 30.0

METRIC_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


# --- what the server says of itself ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One line of Prometheus' text format."""

    name: str
    labels: Mapping[str, str]
    value: float


def parse_metrics(text: str) -> list[Metric]:
    """Every sample of a `/metrics` page; comments and what else is no sample are passed over."""
    found = []
    for line in text.splitlines():
        if match := METRIC_LINE.match(line):
            name, labels, value = match.groups()
            found.append(
                Metric(name=name, labels=dict(LABEL.findall(labels or "")), value=float(value))
            )
    return found


def total(metrics: Sequence[Metric], name: str, **labels: str) -> float:
    """Sum of all samples of that name and these labels. Raises VoidError if there is none."""
    values = [m.value for m in metrics if m.name == name and labels.items() <= m.labels.items()]
    if not values:
        raise VoidError(f"the server's /metrics lack {name} {labels or ''}".rstrip())
    return sum(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """Counters of the server at one moment, or what they grew by between two.

    Seconds of processor time of the whole process and of two of its threads; and tokens that were
    on the wire within so many seconds of their birth, cumulative.
    """

    process_cpu_s: float
    engine_cpu_s: float
    event_loop_cpu_s: float
    delivered: Mapping[float, float]

    def __sub__(self, before: Readings) -> Readings:
        return Readings(
            process_cpu_s=self.process_cpu_s - before.process_cpu_s,
            engine_cpu_s=self.engine_cpu_s - before.engine_cpu_s,
            event_loop_cpu_s=self.event_loop_cpu_s - before.event_loop_cpu_s,
            delivered={
                bound: count - before.delivered.get(bound, 0.0)
                for bound, count in self.delivered.items()
            },
        )


def readings(metrics: Sequence[Metric]) -> Readings:
    """The counters that a repetition is judged by. Raises VoidError where one is missing."""
    threads = "nanoserve:thread_cpu_seconds_total"
    buckets = "nanoserve:token_delivery_seconds_bucket"
    delivered: dict[float, float] = {}
    for metric in metrics:
        if metric.name == buckets:
            bound = float(metric.labels["le"])
            delivered[bound] = delivered.get(bound, 0.0) + metric.value
    return Readings(
        process_cpu_s=total(metrics, "nanoserve:cpu_seconds_total"),
        engine_cpu_s=total(metrics, threads, thread="engine"),
        event_loop_cpu_s=total(metrics, threads, thread="event_loop"),
        delivered=delivered,
    )


def within_s(delivered: Mapping[float, float], share: float) -> float:
    """The bound within which at least `share` of all tokens were on the wire; infinite beyond all.

    It is a bucket's upper bound, so never less than the quantile itself. Raises ValueError for no
    tokens at all.
    """
    count = max(delivered.values(), default=0.0)
    if not count:
        raise ValueError("a percentile of nothing")
    return min(bound for bound, below in delivered.items() if below >= share * count)


# --- the server -----------------------------------------------------------------------------------


def serve_arguments(engine: Engine, port: int) -> list[str]:
    """`nanoserve serve` with every option of `engine`, what was automatic as it came out.

    The cache holds as many blocks. Only a switch that stands as it does by default is left out.
    """
    config, spec = engine.config, engine.spec
    values: dict[str, object] = {
        **{option: getattr(config, name) for option, name in ENGINE_OPTIONS.items()},
        **{option: getattr(config.cache, name) for option, name in CACHE_OPTIONS.items()},
        **{option: getattr(config.scheduler, name) for option, name in SCHEDULER_OPTIONS.items()},
        "host": HOST,
        "port": port,
        "served_model_name": SERVED_NAME,
        "kv_cache_dtype": spec.cache_dtype,
        "kv_cache_memory_bytes": cache_bytes(engine) or None,
        "max_model_len": spec.max_model_len,
    }
    words, switches = ["serve"], []
    for option, value in values.items():
        name = option.replace("_", "-")
        if isinstance(value, bool):
            if value != getattr(SchedulerConfig(), option):
                switches.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            words += [f"--{name}", str(value)]
    return words + switches


def cache_bytes(engine: Engine) -> int:
    """Bytes of the engine's cache."""
    spec = engine.spec
    return spec.num_blocks * spec.block_size * kv_bytes_per_token(spec.model, spec.cache_dtype)


def free_port() -> int:
    """A port of the loopback interface that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def child_environment() -> dict[str, str]:
    """This process's, without options for servers: only what is passed shall count."""
    return {name: value for name, value in os.environ.items() if not name.startswith("NANOSERVE_")}


class Server:
    """A `nanoserve serve` that is ready. Everything raises VoidError if it has died."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: IO[bytes]) -> None:
        self.port = port
        self._process = process
        self._log = log

    def wait_until_ready(self) -> None:
        """Until a real warm-up step has run."""
        deadline_s = now_s() + START_S
        while not self._is_healthy():
            if now_s() > deadline_s:
                raise VoidError(f"the server was not ready after {START_S:g} s: {self.complaint}")
            self._pause()

    def _is_healthy(self) -> bool:
        try:
            return self._get("/health")[0] == HTTPStatus.OK
        except OSError:  # it does not listen yet
            return False

    def _pause(self) -> None:
        """A moment, or less if the server ends."""
        try:
            code = self._process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            return
        raise VoidError(f"the server ended with exit code {code}: {self.complaint}")

    @property
    def complaint(self) -> str:
        """The last line of what the server wrote."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")

    def _get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=REPLY_S)
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            return reply.status, reply.read().decode()
        finally:
            connection.close()

    def get(self, path: str) -> str:
        """The body of a reply. Raises VoidError for any status but 200."""
        try:
            status, body = self._get(path)
        except (OSError, http.client.HTTPException) as error:
            raise VoidError(
                f"the server did not answer {path} ({error}): {self.complaint}"
            ) from error
        if status != HTTPStatus.OK:
            raise VoidError(f"the server answers {path} with {status}: {body}")
        return body

    def metrics(self) -> list[Metric]:
        return parse_metrics(self.get("/metrics"))

    def readings(self) -> Readings:
        return readings(self.metrics())

    def busy(self) -> dict[str, float]:
        """The gauges that must be 0 when nobody asks anything: requests, and blocks held."""
        metrics = self.metrics()
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return {name: total(metrics, f"vllm:{name}") for name in names}

    def wait_until_idle(self, limit_s: float) -> dict[str, float]:
        """The gauges once they are all 0, or as they are after `limit_s`."""
        deadline_s = now_s() + limit_s
        gauges = self.busy()
        while any(gauges.values()) and now_s() < deadline_s:
            self._pause()
            gauges = self.busy()
        return gauges

    def anonymous_bytes(self) -> int | None:
        """Memory of its own that the process has in RAM; None where /proc does not tell (Linux)."""
        status = Path("/proc") / str(self._process.pid) / "status"
        if not status.exists():
            return None
        found = re.search(r"^RssAnon:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else None

    def stop(self) -> None:
        """End it as an operator would; kill it if it does not listen to that."""
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serving(engine: Engine) -> AbstractContextManager[Server]:
    """A server with an engine like `engine`, as `served_by` gives it."""
    port = free_port()
    return served_by([sys.executable, "-m", "nanoserve", *serve_arguments(engine, port)], port)


@contextmanager
def served_by(command: Sequence[str], port: int) -> Iterator[Server]:
    """A server that `command` starts on `port`, ready; it ends with the block.

    Raises VoidError, with what it said, if it does not come up.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=child_environment(),
        )
        server = Server(process, port, log)
        try:
            server.wait_until_ready()
            yield server
        finally:
            server.stop()


# --- the client -----------------------------------------------------------------------------------


class Client:
    """The process that asks. Between jobs it sleeps."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, server: Server, asks: Sequence[Ask], *, at_once: int) -> Report:
        """Ask and read everything. Raises VoidError if it could not."""
        job = Job(port=server.port, asks=tuple(asks), at_once=at_once)
        line = self._ask(job)
        if not line.endswith("\n"):  # it ended before a word, or in the middle of one
            raise VoidError(f"the client ended with exit code {self._process.wait()}")
        if "failed" in (raw := json.loads(line)):
            raise VoidError(f"the client gave up: {raw['failed']} ({server.complaint})")
        return Report.from_json(line)

    def _ask(self, job: Job) -> str:
        """The line it answers with, whole unless it has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(job.to_json() + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return ""
        return self._process.stdout.readline()


@contextmanager
def asking() -> Iterator[Client]:
    """A client's process; it ends with the block."""
    command = [sys.executable, "-m", "nanoserve.bench.client"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=child_environment()
    ) as process:
        try:
            yield Client(process)
        finally:
            process.kill()  # in the middle of a job nobody waits for it any more
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # of a job that it died before
                process.stdin.close()


def completion_body(prompt: Sequence[int], num_tokens: int, **more: Any) -> dict[str, Any]:
    """A greedy streamed completion of exactly `num_tokens`, whatever they are."""
    return {
        "model": SERVED_NAME,
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }
