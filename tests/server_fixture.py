"""A real server for black-box tests: uvicorn on a free loopback port, in a thread of this process.

`serve` runs the app over any engine; `scripted_engine` is one without a model: its executor says
what a test told it to say, fails or breaks a row when told to, and takes a step only when let.
Everything else is the real thing: scheduler, sampler, tokenizer (GPT-2's), bridge, HTTP. `Server`
is a client of plain sockets, so that a test sees the bytes that were sent and nothing tidied up.
"""

from __future__ import annotations

import atexit
import http.client
import json
import re
import select
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from numpy.typing import NDArray

from nanoserve.config import ServerConfig
from nanoserve.engine.batch import SAMPLED, StepBatch, StepResult
from nanoserve.engine.eager import concatenate
from nanoserve.engine.engine import Engine
from nanoserve.engine.executor import Executor
from nanoserve.engine.sampling import sample
from nanoserve.llm import engine_config
from nanoserve.server.app import create_app
from nanoserve.server.connection import Connection
from nanoserve.tokenizer import Tokenizer

Prompt = str | Sequence[int]

EOS = 50_256
VOCAB_SIZE = 50_257
NUM_POSITIONS = 1_024
PATIENCE_S = 30.0
"""What is not there by then never comes: a hang fails its test instead of holding the run."""

_NUM_NOISE_ROWS = 61
_CERTAIN = 60.0  # a scripted token leads by this much: it is drawn at any temperature up to 2
_ROWS_AT_ONCE = 64


@cache
def gpt2_tokenizer() -> Tokenizer:
    return Tokenizer.gpt2()


def ids_of(text: str) -> list[int]:
    """GPT-2's ids; special tokens are parsed, as a prompt's are."""
    return gpt2_tokenizer().encode(text)


@cache
def _noise() -> NDArray[np.float32]:
    """Logits of a model that knows nothing, and never ends a text: [rows, V]."""
    rows = np.random.default_rng(11).normal(0.0, 1.0, (_NUM_NOISE_ROWS, VOCAB_SIZE))
    rows[:, EOS] = -20.0
    return rows.astype(np.float32)


class Gate:
    """Lets steps pass: all of them, or as many as were granted."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._granted: float = float("inf")
        self.num_blocked = 0

    def hold(self) -> None:
        with self._changed:
            self._granted = 0

    def grant(self, num_steps: float = 1) -> None:
        with self._changed:
            self._granted += num_steps
            self._changed.notify_all()

    def open(self) -> None:
        self.grant(float("inf"))

    def pass_through(self) -> None:
        """Wait for a grant and use it up. Raises TimeoutError, which fails the step."""
        with self._changed:
            self.num_blocked += 1
            granted = self._changed.wait_for(lambda: self._granted > 0, PATIENCE_S)
            self.num_blocked -= 1
            if not granted:
                raise TimeoutError("no test let this step pass")
            self._granted -= 1


class ScriptedExecutor:
    """Stands where a model would: what follows a prompt is what `say` said, then end-of-text.

    Prompts without a script are followed by noise that depends on the last token and its position.
    Logits are made up, all that follows is the engine's own: bias, penalties, draws, log-
    probabilities. Public attributes may be set at any time, from any thread.
    """

    def __init__(self, model: Executor) -> None:
        self.spec = model.spec
        self.gate = Gate()
        self.step_s = 0.0
        self.first_step_s = 0.0  # what a lazy set-up would add to the first step
        self.kernels = "made up"
        self.num_steps = 0
        self.num_warm_ups = 0
        self.num_closes = 0
        self.fails = 0  # so many of the next steps raise
        self.broken: set[tuple[int, ...]] = set()  # prompts whose rows are NaN
        self.only: dict[tuple[int, ...], tuple[int, ...]] = {}  # all ids but these are -inf
        self._model = model
        self._scripts: dict[tuple[int, ...], tuple[int, ...]] = {}

    def say(self, prompt: Prompt, reply: Prompt) -> None:
        prompt_ids = ids_of(prompt) if isinstance(prompt, str) else prompt
        reply_ids = ids_of(reply) if isinstance(reply, str) else reply
        self._scripts[tuple(prompt_ids)] = (*reply_ids, EOS)

    def execute(self, batch: StepBatch) -> StepResult:
        self.gate.pass_through()
        time.sleep(self.step_s + (self.first_step_s if self.num_steps == 0 else 0.0))
        self.num_steps += 1
        if self.fails > 0:
            self.fails -= 1
            raise RuntimeError("the machine hiccuped at /secret/path")
        num_rows = len(batch.targets)
        slices = [
            self._sample(batch, range(first, min(first + _ROWS_AT_ONCE, num_rows)))
            for first in range(0, num_rows, _ROWS_AT_ONCE)
        ]
        return slices[0] if len(slices) == 1 else concatenate(slices)

    def _sample(self, batch: StepBatch, rows: range) -> StepResult:
        taken = slice(rows.start, rows.stop)
        return sample(
            np.stack([self._logits(batch, row) for row in rows]),
            batch.targets[taken],
            batch.sampling[taken],
            batch.draws[taken],
            num_token_ids=self.spec.num_token_ids,
        )

    def _logits(self, batch: StepBatch, row: int) -> NDArray[np.float32]:
        """[V], by what the row's sequence holds up to its position."""
        at = int(batch.logit_rows[row])
        token_id, position = int(batch.token_ids[at]), int(batch.positions[at])
        logits = np.array(_noise()[(31 * token_id + position) % _NUM_NOISE_ROWS])
        prompt = tuple(batch.sampling[row].prompt_token_ids)
        step = position + 1 - len(prompt)
        script = self._scripts.get(prompt, ())
        if script and step >= 0:
            logits[script[min(step, len(script) - 1)]] = _CERTAIN
        if prompt in self.only:
            kept = list(self.only[prompt])
            narrow = np.full_like(logits, -np.inf)
            narrow[kept] = logits[kept]
            logits = narrow
        if prompt in self.broken and batch.targets[row] == SAMPLED:
            logits[:] = np.nan
        return logits

    def warm_up(self) -> None:
        self.gate.pass_through()
        self.num_warm_ups += 1

    def synchronize(self) -> None:
        self._model.synchronize()

    def memory_stats(self) -> dict[str, int]:
        return self._model.memory_stats()

    def describe(self) -> dict[str, str]:
        return {**self._model.describe(), "executor": "scripted", "kernels": self.kernels}

    def poison(self, blocks: list[int]) -> None:
        self._model.poison(blocks)

    def close(self) -> None:
        self.num_closes += 1
        self._model.close()


@cache
def _empty_model() -> Path:
    """A config of GPT-2's vocabulary and context with next to nothing between."""
    folder = Path(tempfile.mkdtemp(prefix="nanoserve-server-"))
    atexit.register(shutil.rmtree, folder)
    shape = {"n_embd": 4, "n_layer": 1, "n_head": 1, "n_positions": NUM_POSITIONS}
    config = {"model_type": "gpt2", "vocab_size": VOCAB_SIZE, **shape}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@cache
def _scripted_donor() -> Engine:
    return Engine(
        engine_config(model=str(_empty_model()), load_format="dummy", device="cpu", max_num_seqs=1)
    )


def scripted_engine(**options: Any) -> Engine:
    """An engine over a `ScriptedExecutor`; `options` are the command line's."""
    config = engine_config(model=str(_empty_model()), load_format="dummy", device="cpu", **options)
    engine = Engine(config, donor=_scripted_donor())
    engine.executor = ScriptedExecutor(engine.executor)
    return engine


@cache
def _mini_donor() -> Engine:
    return Engine(engine_config(model="mini", device="cpu", max_num_seqs=1))


def mini_engine(**options: Any) -> Engine:
    """An engine over the embedded model; all share its weights."""
    return Engine(engine_config(model="mini", device="cpu", **options), donor=_mini_donor())


def _no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")


def strict_json(text: str | bytes) -> Any:
    """`json.loads` that refuses NaN and Infinity, which other languages' parsers do."""
    return json.loads(text, parse_constant=_no_constant)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One whole HTTP response. Header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return strict_json(self.body)

    def error(self, status: int) -> dict[str, Any]:
        """The error object, once status and shape (E01) are what they must be."""
        assert self.status == status, (self.status, self.body)
        assert self.headers["content-type"].startswith("application/json")
        (key,), (error,) = zip(*self.json().items(), strict=True)
        assert key == "error"
        assert set(error) == {"message", "type", "param", "code"}, error
        for name in ("message", "type"):
            assert isinstance(error[name], str)
            assert error[name]
        for name in ("param", "code"):
            assert error[name] is None or isinstance(error[name], str)
        return dict(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One line of /metrics."""

    name: str
    labels: Mapping[str, str]
    value: float


class Stream:
    """A response that is being read. Iterating gives each event's object, up to `[DONE]`."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection
        self._response: http.client.HTTPResponse | None = None
        self.is_done = False
        self.num_comments = 0

    @property
    def response(self) -> http.client.HTTPResponse:
        """Waits for the status line and the headers."""
        if self._response is None:
            self._response = self._connection.getresponse()
        return self._response

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while (event := self.next_event()) is not None:
            yield event

    def next_event(self) -> dict[str, Any] | None:
        """The next event, or None for `[DONE]`; the framing of S01 is asserted on the way."""
        line = self.response.readline()
        while line.startswith(b":"):
            self.num_comments += 1
            assert self.response.readline() == b"\n"
            line = self.response.readline()
        assert line.startswith(b"data: "), line
        assert self.response.readline() == b"\n"
        if line == b"data: [DONE]\n":
            assert self.response.read() == b"", "something follows [DONE]"
            self.is_done = True
            return None
        event = strict_json(line.removeprefix(b"data: "))
        assert isinstance(event, dict)
        return event

    def has_answer(self, within_s: float = 0.0) -> bool:
        """Whether anything can be read, if only the status line; only asked before anything was."""
        readable, _, _ = select.select([self._connection.sock], [], [], within_s)
        return bool(readable)

    def reply(self) -> Reply:
        """The whole of it, unread so far."""
        response = self.response
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Reply(status=response.status, headers=headers, body=response.read())

    def close(self) -> None:
        """What a client does that goes away: the socket is shut, read or not."""
        if self._connection.sock is not None:
            self._connection.sock.close()
        if self._response is not None:
            self._response.close()
        self._connection.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Server:
    """What a client sees of one running server, and the engine if it runs in this process."""

    def __init__(
        self,
        engine: Engine | None,
        port: int,
        *,
        model: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.engine = engine
        self.port = port
        self.model = model
        self.headers = dict(headers or {})

    @property
    def executor(self) -> ScriptedExecutor:
        assert self.engine is not None
        assert isinstance(self.engine.executor, ScriptedExecutor)
        return self.engine.executor

    def say(self, prompt: Prompt, reply: Prompt) -> None:
        self.executor.say(prompt, reply)

    @contextmanager
    def held(self) -> Iterator[Gate]:
        """No step is taken inside, but those granted."""
        self.executor.gate.hold()
        try:
            yield self.executor.gate
        finally:
            self.executor.gate.open()

    def open(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Stream:
        """Send a request and return at once; `body` goes as JSON, `data` as it is."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        if data is None and body is not None:
            data = json.dumps(body).encode()
        given = {"Content-Type": "application/json", **self.headers, **(headers or {})}
        connection.request(method, path, body=data, headers=given)
        return Stream(connection)

    def request(self, method: str, path: str, body: object = None, **more: Any) -> Reply:
        with self.open(method, path, body, **more) as stream:
            return stream.reply()

    def get(self, path: str, **more: Any) -> Reply:
        return self.request("GET", path, **more)

    def post(self, path: str, body: object = None, **more: Any) -> Reply:
        return self.request("POST", path, body, **more)

    def completion(self, **fields: Any) -> Reply:
        return self.post("/v1/completions", {"model": self.model, **fields})

    def chat_completion(self, messages: object, **fields: Any) -> Reply:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.post(
            "/v1/chat/completions", {"model": self.model, "messages": messages, **fields}
        )

    def complete(self, **fields: Any) -> dict[str, Any]:
        """The answer of /v1/completions, which must be 200."""
        return answered(self.completion(**fields))

    def chat(self, messages: object, **fields: Any) -> dict[str, Any]:
        """The answer of /v1/chat/completions, which must be 200; a string is one user's turn."""
        return answered(self.chat_completion(messages, **fields))

    def stream(self, **fields: Any) -> Stream:
        """A streamed answer of /v1/completions, or of chat where there are `messages`."""
        path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
        return self.open("POST", path, {"model": self.model, "stream": True, **fields})

    def events(self, **fields: Any) -> list[dict[str, Any]]:
        """All events of a streamed answer, which must end by `[DONE]`."""
        with self.stream(**fields) as stream:
            assert stream.response.status == 200, stream.reply()
            events = list(stream)
        assert stream.is_done
        return events

    def metrics(self) -> list[Sample]:
        reply = self.get("/metrics")
        assert reply.status == 200
        return [parse_sample(line) for line in reply.body.decode().splitlines() if line[0] != "#"]

    def metric(self, name: str, **labels: str) -> float:
        """The sum over all samples of this name that carry these labels; there must be one."""
        found = [
            sample.value
            for sample in self.metrics()
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert found, f"/metrics has no {name} with {labels}"
        return sum(found)

    @property
    def num_unfinished(self) -> float:
        """The gauges of what runs and waits, together."""
        return self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting")

    def assert_idle(self, within_s: float = PATIENCE_S) -> None:
        """Soon nothing runs or waits, every block is free, and the books balance."""
        wait_until(lambda: self.num_unfinished == 0, within_s, "the server never became idle")
        assert self.metric("vllm:kv_cache_usage_perc") == 0
        invariants = self.get("/debug/invariants")
        assert invariants.status == 200, invariants.body


def parse_sample(line: str) -> Sample:
    """One line of Prometheus' text format."""
    match = re.fullmatch(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: \d+)?", line)
    assert match, line
    labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2] or ""))
    return Sample(name=match[1], labels=labels, value=float(match[3]))


def answered(reply: Reply) -> dict[str, Any]:
    """The body of a 200."""
    assert reply.status == 200, (reply.status, reply.body)
    body = reply.json()
    assert isinstance(body, dict)
    return body


def wait_until(condition: Callable[[], bool], within_s: float, complaint: str) -> None:
    """Poll until `condition` holds. Fails with `complaint`."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.002)


@contextmanager
def running(
    engine: Engine, *, headers: Mapping[str, str] | None = None, **settings: Any
) -> Iterator[Server]:
    """A server that was just started and may not be ready; `settings` are `ServerConfig`'s."""
    model = settings.setdefault("served_model_name", "stub")
    app = create_app(engine, ServerConfig(**settings))
    listener = socket.create_server(("127.0.0.1", 0))
    http_server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=Connection,
            lifespan="on",
            ws="none",
            loop="asyncio",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=5,
        )
    )
    thread = threading.Thread(target=http_server.run, args=([listener],), name="http")
    thread.start()
    try:
        port = listener.getsockname()[1]
        yield Server(engine, port, model=model, headers=headers)
    finally:
        if isinstance(engine.executor, ScriptedExecutor):
            engine.executor.gate.open()
        http_server.should_exit = True
        thread.join(PATIENCE_S)
        listener.close()
    assert not thread.is_alive(), "the server did not stop"


@contextmanager
def serve(
    engine: Engine, *, headers: Mapping[str, str] | None = None, **settings: Any
) -> Iterator[Server]:
    """A server that is ready."""
    with running(engine, headers=headers, **settings) as server:
        wait_until(
            lambda: server.get("/health").status == 200, PATIENCE_S, "the server never got ready"
        )
        yield server


def concurrently(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """All at once, each in a thread; their results in order, or what the first to fail raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]
