"""What HTTP costs: the lean client, the server's own counters, the experiment and its findings.

The client reads from a scripted socket; the experiment runs once on fakes, whose costs are known,
and once for real: a server's process, a client's process and the tiny model.
"""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from fake_bench import FakeClock
from helpers import tiny_config, tiny_engine, tiny_model

from nanoserve.bench import client as client_module
from nanoserve.bench import measure as measuring
from nanoserve.bench import runner, served, session
from nanoserve.bench.client import Answer, Ask, Job, Report, read_answer, run_job
from nanoserve.bench.conduct import VoidError
from nanoserve.bench.experiments import serving
from nanoserve.bench.findings.serving import (
    beyond_engine_s,
    cost_table,
    delivery_sentence,
    delivery_table,
    serving_findings,
    serving_numbers,
    serving_paragraph,
    throughput_table,
    verdict,
)
from nanoserve.bench.measure import Rules
from nanoserve.bench.metrics import describe
from nanoserve.bench.proxies import SilentExecutor
from nanoserve.bench.record import Run
from nanoserve.bench.served import Readings, parse_metrics, readings, total, within_s
from nanoserve.bench.session import Options, Screen
from nanoserve.engine.batch import StepBatch, StepResult
from nanoserve.engine.engine import Engine
from nanoserve.llm import CACHE_OPTIONS, ENGINE_OPTIONS, SCHEDULER_OPTIONS

QUIET = Screen(quiet=True)


# --- the client -----------------------------------------------------------------------------------


def chunk(text: str, token_ids: Sequence[int] = ()) -> str:
    choice = {"index": 0, "text": text, "token_ids": list(token_ids), "finish_reason": None}
    return f"data: {json.dumps({'choices': [choice], 'usage': None})}\n\n"


def stream_of(*events: str) -> bytes:
    """A 200 in chunked transfer encoding, one HTTP chunk an event."""
    head = (
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    body = "".join(f"{len(event.encode()):x}\r\n{event}\r\n" for event in events)
    return (head + body + "0\r\n\r\n").encode()


USAGE = f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': 3}})}\n\n"
WHOLE = stream_of(
    ": keep-alive\n\n", chunk("a", [1]), chunk("é", [2, 3]), USAGE, "data: [DONE]\n\n"
)


def test_a_stream_is_put_together_again() -> None:
    for pieces in ([WHOLE], [WHOLE[i : i + 1] for i in range(len(WHOLE))]):
        assert read_answer(pieces) == Answer(
            status=200, text="aé", token_ids=(1, 2, 3), num_tokens=3, num_chunks=2, is_whole=True
        )


@pytest.mark.parametrize(
    "raw, status, problem",
    [
        (stream_of(chunk("a")), 200, "the stream broke off"),
        (
            stream_of(chunk("a"), 'data: {"error": {"message": "lost"}}\n\n', "data: [DONE]\n\n"),
            200,
            "lost",
        ),
        (WHOLE[:-5], 0, "not whole"),
        (b"", 0, "no HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\ndata: {x", 200, "no stream of events"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\ndata: 7", 200, "no stream of events"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n\xff", 200, "no stream of events"),
        (b"HTTP/1.1 429 Too Many\r\ncontent-length: 4\r\n\r\nfull", 429, "full"),
    ],
)
def test_an_answer_that_is_not_whole_says_why(raw: bytes, status: int, problem: str) -> None:
    answer = read_answer([raw])
    assert answer.status == status
    assert not answer.is_whole
    assert problem in answer.problem


class Scripted:
    """A server that sends what it is told, in small pieces, and remembers what it saw."""

    def __init__(self, reply: bytes, *, pieces: int = 7, holds: int = 0) -> None:
        self.reply = reply
        self.pieces = pieces
        self.holds = holds
        self.requests: list[bytes] = []
        self.num_open = self.most_open = self.num_broken = 0
        self._lock = threading.Lock()
        self._gathered = threading.Barrier(holds) if holds else None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._threads: list[threading.Thread] = []
        self._acceptor = threading.Thread(target=self._accept)
        self._acceptor.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._answer, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            self.requests.append(self._read(connection))
            with self._lock:
                self.num_open += 1
                self.most_open = max(self.most_open, self.num_open)
            if self._gathered:
                self._gathered.wait(10)
            try:
                for start in range(0, len(self.reply), self.pieces):
                    connection.sendall(self.reply[start : start + self.pieces])
                    time.sleep(0.0005)
            except OSError:
                with self._lock:
                    self.num_broken += 1
            with self._lock:
                self.num_open -= 1

    @staticmethod
    def _read(connection: socket.socket) -> bytes:
        data = b""
        while b"\r\n\r\n" not in data:
            data += connection.recv(4096)
        head, _, body = data.partition(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        while len(body) < length:
            body += connection.recv(4096)
        return body

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in (self._acceptor, *self._threads):
            thread.join(10)


@contextmanager
def scripted(*args: Any, **kwargs: Any) -> Iterator[Scripted]:
    server = Scripted(*args, **kwargs)
    try:
        yield server
    finally:
        server.close()


def asks(count: int, **more: Any) -> tuple[Ask, ...]:
    return tuple(Ask(body={"number": number}, **more) for number in range(count))


def test_all_streams_are_open_at_once_and_no_more() -> None:
    with scripted(WHOLE, holds=4) as server:
        report = run_job(Job(port=server.port, asks=asks(12), at_once=4))
        assert [answer and answer.text for answer in report.answers] == ["aé"] * 12
        assert server.most_open == 4  # the barrier would hang with fewer
        assert sorted(json.loads(body)["number"] for body in server.requests) == list(range(12))
    assert report.wall_s > 0
    assert 0 < report.cpu_s < 5


@pytest.mark.parametrize("resets", [False, True])
def test_a_client_leaves_when_it_was_told_to(resets: bool) -> None:
    reply = stream_of(*[chunk("x" * 50)] * 400)
    with scripted(reply, pieces=200) as server:
        leaving = (*asks(3, leaves_after=2, resets=resets), *asks(3, leaves_after=0, resets=resets))
        report = run_job(Job(port=server.port, asks=(*leaving, *asks(1)), at_once=2))
        assert report.answers[:6] == (None,) * 6
        assert report.answers[6] is not None
        assert report.answers[6].text == "x" * 50 * 400
    assert server.num_broken >= 3


def test_a_server_that_falls_silent_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "SILENCE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(TimeoutError, match=r"nothing came from the server for 0\.05 s"):
            run_job(Job(port=port, asks=asks(1), at_once=1))


def test_jobs_and_reports_survive_the_pipe() -> None:
    job = Job(port=1, asks=asks(2, leaves_after=3, resets=True), at_once=2)
    assert Job.from_json(job.to_json()) == job
    answers = (None, Answer(status=200, text="é", token_ids=(1,), num_tokens=1, is_whole=True))
    report = Report(wall_s=1.5, cpu_s=0.25, answers=answers)
    assert Report.from_json(report.to_json()) == report


def test_a_job_that_failed_leaves_the_client_ready_for_the_next() -> None:
    out = io.StringIO()
    nobody = Job(port=served.free_port(), asks=asks(1), at_once=1)
    with scripted(WHOLE) as server:
        somebody = Job(port=server.port, asks=asks(1), at_once=1)
        client_module.serve_jobs([nobody.to_json(), somebody.to_json()], out)
    first, second = out.getvalue().splitlines()
    assert "ConnectionRefusedError" in json.loads(first)["failed"]
    assert Report.from_json(second).answers[0] is not None


def test_a_client_that_was_killed_voids_the_job() -> None:
    with served.asking() as client:
        client._process.kill()
        client._process.wait()
        server = served.Server(client._process, 1, io.BytesIO())  # type: ignore[arg-type]
        for _ in range(2):
            with pytest.raises(VoidError, match="the client ended with exit code -9"):
                client.run(server, asks(1), at_once=1)


# --- what the server says of itself ---------------------------------------------------------------

PAGE = """
# HELP vllm:num_requests_running Running.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="a \\"b\\", c"} 2.0
nanoserve:cpu_seconds_total{model_name="m"} 3.5
nanoserve:thread_cpu_seconds_total{model_name="m",thread="engine"} 2.0
nanoserve:thread_cpu_seconds_total{model_name="m",thread="event_loop"} 1.25
nanoserve:token_delivery_seconds_bucket{le="0.001",model_name="m"} 90.0
nanoserve:token_delivery_seconds_bucket{le="0.01",model_name="m"} 99.0
nanoserve:token_delivery_seconds_bucket{le="+Inf",model_name="m"} 100.0
nanoserve:token_delivery_seconds_count{model_name="m"} 100.0
"""


def test_metrics_are_read_with_their_labels() -> None:
    metrics = parse_metrics(PAGE)
    assert total(metrics, "vllm:num_requests_running") == 2.0
    assert total(metrics, "nanoserve:thread_cpu_seconds_total", thread="engine") == 2.0
    assert total(metrics, "nanoserve:thread_cpu_seconds_total") == 3.25
    assert metrics[0].labels == {"model_name": 'a \\"b\\", c'}
    with pytest.raises(VoidError, match="lack nanoserve:unheard_of"):
        total(metrics, "nanoserve:unheard_of")


def test_readings_are_differences() -> None:
    after = readings(parse_metrics(PAGE))
    before = Readings(
        process_cpu_s=1.0, engine_cpu_s=0.5, event_loop_cpu_s=0.25, delivered={0.001: 80.0}
    )
    spent = after - before
    assert (spent.process_cpu_s, spent.engine_cpu_s, spent.event_loop_cpu_s) == (2.5, 1.5, 1.0)
    assert spent.delivered == {0.001: 10.0, 0.01: 99.0, float("inf"): 100.0}
    with pytest.raises(VoidError, match="lack nanoserve:cpu_seconds_total"):
        readings(parse_metrics(PAGE.replace(":cpu", ":other")))


def test_a_percentile_is_bounded_from_above() -> None:
    delivered = {0.001: 90.0, 0.01: 99.0, float("inf"): 100.0}
    assert within_s(delivered, 0.5) == 0.001
    assert within_s(delivered, 0.99) == 0.01
    assert within_s(delivered, 0.995) == float("inf")
    with pytest.raises(ValueError, match="a percentile of nothing"):
        within_s({0.001: 0.0}, 0.5)
    with pytest.raises(VoidError, match="later than"):
        serving.delivery_seconds({0.001: 10.0, float("inf"): 100.0})
    assert serving.delivery_seconds({0.001: 367.0}) == {"delivery p50": 0.001}
    assert set(serving.delivery_seconds({0.001: 368.0})) == {"delivery p50", "delivery p99"}


def test_only_the_event_loop_counts_where_several_threads_compute() -> None:
    seconds = {"server cpu": 10.0, "engine cpu": 6.0, "event loop cpu": 1.0}
    assert beyond_engine_s(seconds, 1) == 4.0
    assert beyond_engine_s(seconds, 2) == 1.0


# --- the server's process -------------------------------------------------------------------------


def test_a_server_is_told_all_that_the_engine_is_made_of() -> None:
    engine = tiny_engine(max_num_seqs=3, max_num_batched_tokens=48, enable_prefix_caching=False)
    words = served.serve_arguments(engine, 4242)
    given = dict(zip(words[1:-1:2], words[2:-1:2], strict=True))
    assert words[0] == "serve"
    assert words[-1] == "--no-enable-prefix-caching"
    assert given["--port"] == "4242"
    assert given["--model"] == engine.config.model
    assert given["--max-num-seqs"] == "3"
    assert given["--max-num-batched-tokens"] == "48"
    assert given["--kv-cache-dtype"] == "float32"
    per_token = served.kv_bytes_per_token(engine.model_config, "float32")
    cache = int(given["--kv-cache-memory-bytes"])
    assert cache == engine.spec.num_blocks * engine.spec.block_size * per_token
    assert "--revision" not in given
    assert "--threads" not in given


def test_a_server_is_told_of_every_option_that_an_engine_has() -> None:
    engine = tiny_engine(
        context_overflow="slide",
        slide_window=5,
        enable_prefix_caching=True,
        batching="static",
        batching_timeout=0.5,
    )
    engine.config = replace(
        engine.config, quantization="int8", revision="main", tokenizer="gpt2", threads=1
    )
    words = served.serve_arguments(engine, 4242)
    given = dict(zip(words[1::2], words[2::2], strict=True))
    switches = {"enable_prefix_caching", "strict_context"}  # both as they are by default
    options = {*ENGINE_OPTIONS, *CACHE_OPTIONS, *SCHEDULER_OPTIONS} - switches
    wanted = {f"--{option.replace('_', '-')}" for option in options}
    assert given.keys() == wanted | {"--host", "--port", "--served-model-name"}
    assert given["--quantization"] == "int8"
    assert given["--context-overflow"] == "slide"
    assert given["--slide-window"] == "5"
    assert given["--batching-timeout"] == "0.5"
    assert served.serve_arguments(tiny_engine(strict_context=True), 4242)[-1] == "--strict-context"


def test_options_for_servers_in_the_environment_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NANOSERVE_API_KEY", "secret")
    environment = served.child_environment()
    assert not [name for name in environment if name.startswith("NANOSERVE_")]
    assert environment["PATH"] == os.environ["PATH"]


def test_a_server_that_does_not_come_up_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(max_num_seqs=2)
    wrong = ["serve", "--no-such-option"]
    monkeypatch.setattr(served, "serve_arguments", lambda *_: wrong)
    complaint = r"ended with exit code 2: .*--no-such-option"
    with pytest.raises(VoidError, match=complaint), served.serving(engine):
        pass


def test_memory_is_the_processs_own() -> None:
    code = "import sys; block = b'x' * 64_000_000; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        size = served.Server(process, 0, io.BytesIO()).anonymous_bytes()
    if sys.platform == "linux":
        assert size is not None
        assert 64_000_000 < size < 100_000_000
    else:
        assert size is None


# --- the experiment, on fakes ---------------------------------------------------------------------

STEP_S, HTTP_S = 4e-3, 1e-3
"""A step of the engine, and what HTTP adds to one."""

BEYOND_S, ENGINE_S, CLIENT_S = 60e-6, 200e-6, 30e-6
"""Processor time per token."""


class SteadyExecutor(SilentExecutor):
    """No model: a step takes `STEP_S`, and draws the number of the step modulo 7."""

    def __init__(self, inner: Any, clock: FakeClock) -> None:
        super().__init__(inner)
        self.clock = clock

    def execute(self, batch: StepBatch) -> StepResult:
        self.clock.sleep(STEP_S)
        result = super().execute(batch)
        drawn = [params.output_token_ids for params in batch.sampling]
        return replace(result, token_ids=result.token_ids + [len(ids) % 7 for ids in drawn])


class FakeServer:
    """Counters that a fake client drives."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.now = Readings(
            process_cpu_s=9.0, engine_cpu_s=8.0, event_loop_cpu_s=0.5, delivered={0.002: 0.0}
        )
        self.gauges = {"num_requests_running": 0.0, "num_requests_waiting": 0.0}
        self.memory = [100_000_000, 101_000_000]
        self.asked: list[str] = []

    def readings(self) -> Readings:
        return self.now

    def anonymous_bytes(self) -> int:
        return self.memory.pop(0)

    def wait_until_idle(self, _limit_s: float) -> dict[str, float]:
        return self.gauges

    def get(self, path: str) -> str:
        self.asked.append(path)
        return "{}"

    def count(self, num_tokens: int) -> None:
        now = self.now
        self.now = Readings(
            process_cpu_s=now.process_cpu_s + num_tokens * (ENGINE_S + BEYOND_S),
            engine_cpu_s=now.engine_cpu_s + num_tokens * ENGINE_S,
            event_loop_cpu_s=now.event_loop_cpu_s + num_tokens * BEYOND_S,
            delivered={0.002: now.delivered[0.002] + num_tokens},
        )


class FakeClient:
    """Answers from the server's engine, `HTTP_S` a step later than it would."""

    def __init__(self, clock: FakeClock, tamper: Callable[[Answer], Answer]) -> None:
        self.clock = clock
        self.tamper = tamper

    def run(self, server: FakeServer, asked: Sequence[Ask], *, at_once: int) -> Report:
        started_ns = self.clock()
        answers: list[Answer | None] = []
        for start in range(0, len(asked), at_once):
            answers += self.answer(server, asked[start : start + at_once])
        num_tokens = sum(answer.num_tokens for answer in answers if answer)
        return Report(
            wall_s=(self.clock() - started_ns) / 1e9,
            cpu_s=num_tokens * CLIENT_S,
            answers=tuple(answers),
        )

    def answer(self, server: FakeServer, asked: Sequence[Ask]) -> list[Answer | None]:
        prompts = [ask.body["prompt"] for ask in asked]
        num_tokens = asked[0].body["max_tokens"]
        load = serving.Load(
            prompts=tuple(map(tuple, prompts)), output=num_tokens, expected=(), is_exact=True
        )
        texts = serving.run_offline(server.engine, load)
        self.clock.sleep(HTTP_S * num_tokens)
        server.count(len(prompts) * num_tokens)
        return [
            None
            if ask.leaves_after is not None
            else self.tamper(
                Answer(
                    status=200,
                    text=text,
                    token_ids=tuple(i % 7 for i in range(num_tokens)),
                    num_tokens=num_tokens,
                    num_chunks=num_tokens,
                    is_whole=True,
                )
            )
            for ask, text in zip(asked, texts, strict=True)
        ]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(measuring, "perf_counter_ns", fake)
    return fake


@pytest.fixture
def measured(
    monkeypatch: pytest.MonkeyPatch, clock: FakeClock, tmp_path: Any
) -> Callable[..., tuple[Run, FakeServer]]:
    """A function that runs the whole experiment on fakes; answers go through `tamper`."""

    def run(
        tamper: Callable[[Answer], Answer] = lambda answer: answer, **changes: Any
    ) -> tuple[Run, FakeServer]:
        servers = []

        def open_engine(*args: Any, **kwargs: Any) -> Engine:
            engine = session.open_engine(*args, **kwargs)
            engine.executor = SteadyExecutor(engine.executor, clock)
            return engine

        @contextmanager
        def fake_serving(engine: Engine) -> Iterator[FakeServer]:
            servers.append(FakeServer(engine))
            for name, value in changes.items():
                setattr(servers[-1], name, value)
            yield servers[-1]

        @contextmanager
        def fake_asking() -> Iterator[FakeClient]:
            yield FakeClient(clock, tamper)

        scale = replace(
            serving.FULL,
            streams=(8, 4),
            prompt=8,
            output=100,
            num_settling=16,
            num_short=40,
            num_leaving=20,
            rules=Rules(dropped_rounds=1, min_rounds=6, max_rounds=6),
        )
        monkeypatch.setattr(serving, "FULL", scale)
        monkeypatch.setattr(serving, "open_engine", open_engine)
        monkeypatch.setattr(serving, "serving", fake_serving)
        monkeypatch.setattr(serving, "asking", fake_asking)
        monkeypatch.setattr(serving.machine, "num_usable_cores", lambda: 2)
        options = Options(
            out=tmp_path, model=str(tiny_model().folder), device="cpu", seed=1, threads=1
        )
        return serving.measure(options, QUIET), servers[-1]

    return run


def test_the_share_is_that_of_the_known_costs(
    measured: Callable[..., tuple[Run, FakeServer]],
) -> None:
    run, server = measured()
    findings = serving_findings(run)
    assert [point.streams for point in findings.points] == [8, 4]
    for point in findings.points:
        assert point.offline.median == pytest.approx(100 * STEP_S, rel=0.02)
        assert point.share.median == pytest.approx(STEP_S / (STEP_S + HTTP_S), rel=0.01)
        assert point.http_tokens_per_s == pytest.approx(point.streams / (STEP_S + HTTP_S), rel=0.02)
        assert point.beyond.median == pytest.approx(BEYOND_S)
        assert point.engine_http.median == pytest.approx(ENGINE_S)
        assert point.client.median == pytest.approx(CLIENT_S)
        assert point.delivery_p50.median == 0.002
        assert point.predicted_delivery_s == pytest.approx(point.streams * BEYOND_S)
        # one of two cores is free for the client
        taken_s = point.num_tokens * BEYOND_S
        assert point.predicted_share == pytest.approx(0.4 / (0.4 + taken_s))
    assert findings.main.worst_p99 == 0.002
    assert findings.lightest.delivery_p99 is not None
    assert run.checks[-1]["median"] == 1.0
    assert server.asked == ["/debug/invariants"]


def test_where_no_core_is_free_the_engine_waits_for_the_client_too() -> None:
    load = serving.Load(prompts=((1,),) * 4, output=10, expected=(), is_exact=True)
    http = {"server cpu": 9.0, "engine cpu": 1.0, "event loop cpu": 0.2, "client cpu": 0.3}
    rehearsed = {"offline": {"run": 2.0}, "http": http}
    busy = serving.predict(rehearsed, load, threads=2, cores=2)
    assert busy["share"] == pytest.approx(2.0 / 2.5)
    assert busy["delivery_s"] == pytest.approx(4 * 0.2 / 40)
    roomy = serving.predict(rehearsed, load, threads=2, cores=4)
    assert roomy["share"] == pytest.approx(2.0 / 2.2)


def test_what_the_server_lived_through_is_told(
    measured: Callable[..., tuple[Run, FakeServer]],
) -> None:
    findings = serving_findings(measured()[0])
    endurance = findings.endurance
    assert (endurance.num_short, endurance.num_leaving, endurance.num_left) == (40, 20, 20)
    assert endurance.growth_bytes == 1_000_000
    assert endurance.is_flat
    assert endurance.left_nothing
    text = serving_paragraph(findings)
    assert "8 streams through HTTP get" in text
    assert "misses the goal of 90%" in text
    assert "with 4 streams 99 % of the tokens are on the wire within 2.00 ms" in text.lower()
    assert "60 µs of processor time (requests of 100 tokens" in text
    assert "Over 40 requests its memory went from 95.4 MiB (after 16) to 96.3 MiB" in text
    assert "no request and no block behind" in text
    for table in (throughput_table, delivery_table, cost_table):
        heads, rows = table(findings)
        assert len(rows) == 2
        assert {len(row) for row in rows} == {len(heads)}
    numbers = serving_numbers(findings)
    assert numbers["share"] == "80%"
    assert numbers["delivery_streams"] == "4"


@pytest.mark.parametrize(
    "values, noise, is_least, expected",
    [
        ((0.95, 0.95, 0.96), 0.01, True, "which reaches the goal of G"),
        ((0.95, 0.95, 0.96), 0.2, True, "too near to the goal of G to be told from it here"),
        ((0.80, 0.98, 0.99), 0.01, True, "too near to the goal of G to be told from it here"),
        ((0.70, 0.75, 0.76), 0.01, True, "which misses the goal of G"),
        ((0.70, 0.75, 0.76), 0.01, False, "which reaches the goal of G"),
        ((0.95, 0.95, 0.96), 0.01, False, "which misses the goal of G"),
        ((0.95, 0.95, 0.96), None, True, "too few repetitions to hold it to the goal of G"),
    ],
)
def test_a_goal_is_claimed_only_beyond_the_noise(
    values: tuple[float, ...], noise: float | None, is_least: bool, expected: str
) -> None:
    measured = describe([value for value in values for _ in range(3)])
    assert verdict(measured, 0.9, "G", noise=noise, is_least=is_least) == expected
    assert verdict(describe(values), 0.9, "G", noise=0.0).startswith("too few repetitions")


def test_the_verdict_on_the_wire_stands_before_the_worst_repetition(
    measured: Callable[..., tuple[Run, FakeServer]],
) -> None:
    point = replace(serving_findings(measured()[0]).lightest, worst_p99=0.02)
    assert delivery_sentence(point).endswith(
        "within 2.00 ms of their birth, which reaches the goal of 10.0 ms (in the worst "
        "repetition within 20.0 ms). "
    )


def test_a_share_is_said_to_be_paired(measured: Callable[..., tuple[Run, FakeServer]]) -> None:
    """The two medians beside it may have another ratio."""
    text = serving_paragraph(serving_findings(measured()[0]))
    assert "(medians over all rounds). Paired inside a round the former is 80.0%" in text


def test_what_is_left_behind_is_said(measured: Callable[..., tuple[Run, FakeServer]]) -> None:
    run, _ = measured(gauges={"num_requests_running": 3.0, "num_requests_waiting": 0.0})
    assert "left something behind: num_requests_running 3." in serving_paragraph(
        serving_findings(run)
    )


def test_memory_that_grows_or_is_not_told(
    measured: Callable[..., tuple[Run, FakeServer]],
) -> None:
    grown, _ = measured(memory=[100_000_000, 110_000_000])
    assert "which is not flat" in serving_paragraph(serving_findings(grown))
    untold, _ = measured(memory=[None, None])
    text = serving_paragraph(serving_findings(untold))
    assert "40 short requests were all answered" in text


@pytest.mark.parametrize(
    "change, message",
    [
        ({"token_ids": (1,) * 100}, "token 0: the engine offline emits 0, the server 1"),
        ({"token_ids": (0,) * 99}, "99 tokens came through HTTP, 100 offline"),
        ({"num_tokens": 99}, "answer 0 is not whole"),
        ({"is_whole": False, "problem": "the stream broke off"}, "the stream broke off"),
    ],
)
def test_another_answer_voids_the_run(
    measured: Callable[..., tuple[Run, FakeServer]],
    tmp_path: Any,
    change: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(VoidError, match=message):
        measured(lambda answer: replace(answer, **change))
    assert not list(tmp_path.glob("*/*.jsonl"))


def test_a_timed_answer_is_held_to_the_gates(
    measured: Callable[..., tuple[Run, FakeServer]],
) -> None:
    seen = []

    def tamper(answer: Answer) -> Answer:
        seen.append(answer)
        return replace(answer, text="other") if len(seen) == 8 + 8 + 1 else answer

    with pytest.raises(VoidError, match="is not the one that passed the gate"):
        measured(tamper)


def test_half_precision_is_rated_by_the_offline_arm() -> None:
    tokens = [serving.TokenLogprob(token_id=5, logprob=-1.0, top=((5, -1.0), (6, -1.05)))]
    gate = serving.Gate(is_exact=False)
    gate.compare("here", [tokens], [serving.rated_by(tokens, [6])], names=("offline", "http"))
    with pytest.raises(VoidError, match="offline emits 5, http 7"):
        gate.compare("here", [tokens], [serving.rated_by(tokens, [7])], names=("offline", "http"))


# --- the experiment, for real ---------------------------------------------------------------------


def test_a_real_server_and_a_real_client(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both processes, the tiny model, every number there; what is fast here proves nothing."""
    scale = replace(
        serving.QUICK,
        streams=(4, 2),
        prompt=8,
        output=16,
        num_settling=10,
        num_short=30,
        num_leaving=24,
        rules=Rules(dropped_rounds=0, min_rounds=2, max_rounds=2),
    )
    monkeypatch.setattr(serving, "QUICK", scale)
    options = Options(
        out=tmp_path,
        model=str(tiny_config().model),
        device="cpu",
        quick=True,
        threads=1,
        seed=1,
    )
    runner.run(["serving"], options)
    shown = " ".join(capsys.readouterr().out.split())
    assert "4 streams through HTTP get" in shown
    assert "no request and no block behind" in shown
    (path,) = tmp_path.glob("*/serving-*.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert records[-1]["status"] == "complete"
    header = records[0]
    assert header["endurance"]["num_left"] > 0
    assert header["endurance"]["gauges"] == {
        "num_requests_running": 0.0,
        "num_requests_waiting": 0.0,
        "kv_cache_usage_perc": 0.0,
    }
    http = [r["seconds"] for r in records if r["kind"] == "sample" and r["arm"] == "http"]
    assert len(http) == 4
    for seconds in http:
        assert seconds["server cpu"] > seconds["engine cpu"] > 0
        assert seconds["event loop cpu"] > 0
        assert 0 < seconds["delivery p50"] < 10
