"""A server without a model, whose times are known: what a load generator says of it is true or not.

Of OpenAI's API it speaks what generators ask for: /health, /v1/models and streamed /v1/completions.
The first token comes a fixed wait after a request has arrived whole, each further one a fixed gap
after the one before. Deadlines are counted from the arrival, so that being late does not add up,
and the answer to one request takes nothing from the others. On the way there is a trap for every
clock that starts, or count that goes, by something else than tokens (see `answer_parts`).

    python scripts/paced_server.py --port 8000 --first-ms 300 --gap-ms 40
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import selectors
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

MODEL = "paced"
LISTENING = "listening: "
MAX_PORT = 65535
TAIL_GAPS = 4
"""So many gaps after the last token the stream still goes on: its end is no token."""

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)

NUM_BOS, TOKENS_A_WORD = 3, 2
"""How this server counts prompts: as no client does by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds from a request's arrival to its first token, and between any two tokens."""

    first_s: float
    gap_s: float

    def token_s(self, number: int) -> float:
        """When token `number`, from 0, is due, counted from the arrival."""
        return self.first_s + number * self.gap_s

    def tokens_per_s(self, due_s: Sequence[float], num_tokens: int) -> float:
        """Of requests with `num_tokens` each: all tokens over first arrival to last token."""
        span_s = due_s[-1] - due_s[0] + self.token_s(num_tokens - 1)
        return len(due_s) * num_tokens / span_s


def count_prompt(prompt: str) -> int:
    return NUM_BOS + TOKENS_A_WORD * len(prompt.split())


# --- what is sent, and when -----------------------------------------------------------------------


def event(
    prompt_tokens: int, num_so_far: int, text: str | None, finish: str | None = None
) -> bytes:
    """One event of a completion; `text` None: it has no choice, only the usage."""
    choice = {"index": 0, "text": text, "finish_reason": finish}
    chunk = {
        "id": "cmpl-paced",
        "object": "text_completion",
        "created": 0,
        "model": MODEL,
        "choices": [] if text is None else [choice],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": num_so_far,
            "total_tokens": prompt_tokens + num_so_far,
        },
    }
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def token_counts(num_tokens: int) -> Iterator[int]:
    """How many tokens there are after each event: one with the first, then two and one by turns."""
    so_far, step = 1, 2
    while so_far < num_tokens:
        yield so_far
        so_far, step = so_far + step, 3 - step
    yield num_tokens


def answer_parts(pace: Pace, prompt: str, num_tokens: int) -> Iterator[tuple[float, bytes]]:
    """(seconds after the arrival, bytes) of a stream, in order.

    Traps: the answer begins in the middle of the wait, by an event without a token; a comment; all
    events in two pieces, half a gap apart, of which the second counts; events with two tokens; one
    whose text is empty, as half a character's is; a usage without a choice long after the last one.
    """
    prompt_tokens = count_prompt(prompt)
    yield pace.first_s / 4, event(prompt_tokens, 0, "")
    yield pace.first_s / 2, b": still here\n\n"
    for number, so_far in enumerate(token_counts(num_tokens)):
        is_last = so_far == num_tokens
        text = "" if number == 2 and not is_last else " word"
        data = event(prompt_tokens, so_far, text, "length" if is_last else None)
        at_s, middle = pace.token_s(so_far - 1), len(data) // 2
        yield at_s - pace.gap_s / 2, data[:middle]
        yield at_s, data[middle:]
    end_s = pace.token_s(num_tokens - 1) + TAIL_GAPS * pace.gap_s
    yield end_s, event(prompt_tokens, num_tokens, None) + b"data: [DONE]\n\n"


# --- HTTP -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """`body` is its JSON, {} for none. `is_last`: the client wants the connection closed then."""

    path: str
    body: dict[str, Any]
    is_last: bool


async def read_request(reader: asyncio.StreamReader) -> Request:
    """The next one of a connection.

    Raises EOFError where the client has gone, ValueError for what is no request.
    """
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    except asyncio.LimitOverrunError as error:
        raise ValueError(str(error)) from error
    request_line, *lines = head.split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    content = await reader.readexactly(int(headers.get("content-length", 0)))
    _, path, _ = request_line.split()
    body = json.loads(content or b"{}")
    if not isinstance(body, dict):
        raise ValueError("the body must be an object")
    is_last = headers.get("connection", "").lower() == "close"
    return Request(path=path, body=body, is_last=is_last)


def asked(body: dict[str, Any]) -> tuple[str, int]:
    """The prompt and the number of tokens. Raises ValueError for anything but a text and some."""
    prompt, num_tokens = body.get("prompt"), body.get("max_tokens")
    if not isinstance(prompt, str) or type(num_tokens) is not int or num_tokens < 1:
        raise ValueError("a text as prompt, and max_tokens of at least 1")
    return prompt, num_tokens


def whole(status: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    return head.encode() + b"\r\n\r\n" + content


async def stream(writer: asyncio.StreamWriter, parts: Iterator[tuple[float, bytes]]) -> None:
    """All parts, each when it is due, counted from now; the head of the answer with the first."""
    loop = asyncio.get_running_loop()
    arrived_s, head = loop.time(), STREAM_HEAD
    for at_s, data in parts:
        await asyncio.sleep(arrived_s + at_s - loop.time())
        writer.write(head + f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await writer.drain()
        head = b""
    writer.write(b"0\r\n\r\n")


async def answer(pace: Pace, request: Request, writer: asyncio.StreamWriter) -> None:
    if request.path == "/v1/completions":
        await stream(writer, answer_parts(pace, *asked(request.body)))
    elif request.path == "/v1/models":
        writer.write(whole("200 OK", {"object": "list", "data": [{"id": MODEL}]}))
    elif request.path == "/health":
        writer.write(whole("200 OK", {}))
    else:
        writer.write(whole("404 Not Found", {"error": {"message": f"no {request.path} here"}}))


async def converse(pace: Pace, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection, as long as the client keeps it."""
    try:
        is_last = False
        while not is_last:
            request = await read_request(reader)
            await answer(pace, request, writer)
            is_last = request.is_last
    except (EOFError, ConnectionError):  # the client has gone
        pass
    except asyncio.CancelledError:  # the server ends; Python 3.11 would show each as a traceback
        pass
    except ValueError as error:
        writer.write(whole("400 Bad Request", {"error": {"message": str(error)}}))
    finally:
        writer.close()


async def serve(pace: Pace, port: int) -> None:
    server = await asyncio.start_server(
        lambda reader, writer: converse(pace, reader, writer), "127.0.0.1", port
    )
    address = server.sockets[0].getsockname()
    print(f"{LISTENING}http://{address[0]}:{address[1]}", flush=True)
    await server.serve_forever()


# --- a process of its own -------------------------------------------------------------------------


@contextmanager
def running(pace: Pace) -> Iterator[str]:
    """The URL of such a server in a process of its own, which ends with the block.

    Raises RuntimeError if it did not start.
    """
    options = (
        "--port",
        "0",
        "--first-ms",
        f"{1e3 * pace.first_s}",
        "--gap-ms",
        f"{1e3 * pace.gap_s}",
    )
    with subprocess.Popen(
        [sys.executable, __file__, *options], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith(LISTENING):
                raise RuntimeError(f"the paced server did not start: exit code {process.wait()}")
            yield line.removeprefix(LISTENING).strip()
        finally:
            process.kill()


def main() -> int:
    """The command; its exit code, 2 for a wrong request."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8000, help="0: a free one")
    parser.add_argument("--first-ms", type=float, default=300.0)
    parser.add_argument("--gap-ms", type=float, default=40.0)
    given = parser.parse_args()
    for option in ("first_ms", "gap_ms"):
        if not 0 <= getattr(given, option) < math.inf:
            parser.error(f"--{option.replace('_', '-')} must be at least 0 and finite")
    if not 0 <= given.port <= MAX_PORT:
        parser.error(f"--port must be between 0 and {MAX_PORT}, got {given.port}")
    return serve_until_interrupted(
        Pace(first_s=given.first_ms / 1e3, gap_s=given.gap_ms / 1e3), given.port
    )


def serve_until_interrupted(pace: Pace, port: int) -> int:
    """The exit code: 1 for a port that cannot be had."""
    # epoll waits in whole milliseconds, select does not.
    with (
        asyncio.Runner(
            loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())
        ) as runner,
        suppress(KeyboardInterrupt),
    ):
        try:
            runner.run(serve(pace, port))
        except OSError as error:
            print(f"paced_server: {error} (--port 0 takes a free one)", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
