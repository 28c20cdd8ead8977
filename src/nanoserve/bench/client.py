"""A client that reads many answers at once and costs next to nothing while it does.

Run as a process of its own (`python -m nanoserve.bench.client`), so that neither the server's time
nor the offline arm's is in its clock. While answers arrive it only reads sockets; what they said is
taken apart afterwards, off the clock. One `Job` a line on standard input, one report a line on
standard output.
"""

from __future__ import annotations

import http.client
import io
import json
import selectors
import socket
import struct
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from typing import IO, Any

from nanoserve.bench.measure import now_s, process_cpu_s, quiet_collector

HOST = "127.0.0.1"
READ_BYTES = 65_536
SILENCE_S = 120.0
"""A server from which nothing at all comes for so long has lost an answer."""

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER on, for 0 seconds: closing the socket resets the connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One streamed completion. `leaves_after` so many reads the client goes away; None: never.

    `resets`: it leaves without a goodbye, as a process that is killed does.
    """

    body: dict[str, Any]
    leaves_after: int | None = None
    resets: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Asks for one server, in order, `at_once` of them open at any time."""

    port: int
    asks: tuple[Ask, ...]
    at_once: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        raw = json.loads(text)
        return cls(**{**raw, "asks": tuple(Ask(**ask) for ask in raw["asks"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one ask got. `is_whole`: status 200, no error among the events, and [DONE] at the end.

    `num_tokens` are those that the server counted in its usage; `problem` says what it complained
    of, or what was wrong with the answer, "" for nothing.
    """

    status: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    num_tokens: int = 0
    num_chunks: int = 0
    is_whole: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Seconds from the first connection to the last byte, and of the client's processor time.

    An answer is None where the client left.
    """

    wall_s: float
    cpu_s: float
    answers: tuple[Answer | None, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Report:
        raw = json.loads(text)
        answers = tuple(
            answer and Answer(**{**answer, "token_ids": tuple(answer["token_ids"])})
            for answer in raw["answers"]
        )
        return cls(wall_s=raw["wall_s"], cpu_s=raw["cpu_s"], answers=answers)


@dataclass(slots=True, eq=False)
class Stream:
    """One connection. `left_at` counts down the reads until the client leaves."""

    number: int
    connection: socket.socket
    left_at: int | None
    received: list[bytes] = field(default_factory=list)


class Reader:
    """Works through one job; `received` are the raw answers, None where the client left."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._requests = [request_bytes(ask.body) for ask in job.asks]
        self._waiting = deque(range(len(job.asks)))
        self._selector = selectors.DefaultSelector()
        self.received: list[list[bytes] | None] = [None] * len(job.asks)

    def run(self) -> None:
        """Raises TimeoutError if the server falls silent, OSError if it cannot be reached."""
        try:
            self._top_up()
            while self._selector.get_map():
                ready = self._selector.select(SILENCE_S)
                if not ready:
                    raise TimeoutError(f"nothing came from the server for {SILENCE_S:g} s")
                for key, _ in ready:
                    self._read(key.data)
                self._top_up()
        finally:
            for key in list(self._selector.get_map().values()):
                key.data.connection.close()
            self._selector.close()

    def _top_up(self) -> None:
        """Open as many connections as may be open at once. One left at once makes room again."""
        while self._waiting and len(self._selector.get_map()) < self._job.at_once:
            self._open(self._waiting.popleft())

    def _open(self, number: int) -> None:
        ask = self._job.asks[number]
        connection = socket.create_connection((HOST, self._job.port))
        connection.sendall(self._requests[number])
        connection.setblocking(False)
        if ask.resets:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        stream = Stream(number, connection, ask.leaves_after)
        self._selector.register(connection, selectors.EVENT_READ, stream)
        if stream.left_at == 0:
            self._close(stream)

    def _read(self, stream: Stream) -> None:
        try:
            data = stream.connection.recv(READ_BYTES)
        except ConnectionError:  # the server broke off; what is missing shows in the answer
            data = b""
        if not data:
            self.received[stream.number] = stream.received
            self._close(stream)
            return
        stream.received.append(data)
        if stream.left_at is not None:
            stream.left_at -= 1
            if stream.left_at == 0:
                self._close(stream)

    def _close(self, stream: Stream) -> None:
        self._selector.unregister(stream.connection)
        stream.connection.close()


def request_bytes(body: dict[str, Any]) -> bytes:
    """The whole request. The server is to close the connection: that is the end of the answer."""
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content


class Bytes:
    """Received bytes in the place of a socket, for `http.client` to read."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, _mode: str) -> IO[bytes]:
        return io.BytesIO(self._data)


def read_answer(received: Sequence[bytes]) -> Answer:
    """What a raw answer says."""
    reply = http.client.HTTPResponse(Bytes(b"".join(received)))  # type: ignore[arg-type]
    try:
        reply.begin()
        body = reply.read()
    except http.client.HTTPException as error:
        return Answer(status=0, problem=f"the answer is no HTTP or not whole: {error!r}")
    if reply.status != HTTPStatus.OK:
        return Answer(status=reply.status, problem=body.decode(errors="replace"))
    try:
        return read_events(list(events_in(body.decode())))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return Answer(status=reply.status, problem=f"the answer is no stream of events: {error!r}")


def events_in(text: str) -> Iterator[str]:
    """The data of each server-sent event; comments (keep-alive) are none."""
    for event in text.split("\n\n"):
        if event.startswith("data:"):
            yield event.removeprefix("data:").strip()


def read_events(events: Sequence[str]) -> Answer:
    """A streamed completion with one choice, put together again."""
    is_done = bool(events) and events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
    errors = [json.dumps(chunk["error"]) for chunk in chunks if "error" in chunk]
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    return Answer(
        status=200,
        text="".join(choice["text"] for choice in choices),
        token_ids=tuple(i for choice in choices for i in choice.get("token_ids") or ()),
        num_tokens=usages[-1]["completion_tokens"] if usages else 0,
        num_chunks=len(choices),
        is_whole=is_done and not errors,
        problem="; ".join(errors) or ("" if is_done else "the stream broke off"),
    )


def run_job(job: Job) -> Report:
    """Ask, read, and only then look at what came."""
    with quiet_collector():
        reader = Reader(job)
        started_s, started_cpu_s = now_s(), process_cpu_s()
        reader.run()
        wall_s, cpu_s = now_s() - started_s, process_cpu_s() - started_cpu_s
    answers = tuple(raw if raw is None else read_answer(raw) for raw in reader.received)
    return Report(wall_s=wall_s, cpu_s=cpu_s, answers=answers)


def serve_jobs(lines: Iterable[str], out: IO[str]) -> None:
    """A report for each job; one that failed gives an object with the key `failed`."""
    for line in lines:
        try:
            report = run_job(Job.from_json(line)).to_json()
        except OSError as error:  # TimeoutError is one
            report = json.dumps({"failed": f"{type(error).__name__}: {error}"})
        print(report, file=out, flush=True)


if __name__ == "__main__":
    serve_jobs(sys.stdin, sys.stdout)
