"""An open-loop sender over HTTP: every request at the time of its schedule, whoever is behind.

That avoids coordinated omission: a server that is slow does not thin out what it is asked, and
latencies count from the scheduled time. While answers come, bytes are only kept with the time at
which they came; what they say is read afterwards. Connections are opened a little ahead, as a
client with a pool has them. How late each request was sent is part of what is returned.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from nanoserve.bench.measure import now_s, quiet_collector
from nanoserve.bench.timed_stream import HEAD_END, Piece, TimedAnswer, read_timed

AHEAD_S = 0.1
"""A connection is opened so long before it is needed."""

SPIN_S = 1.5e-3
"""The last of a wait is spent awake: sleeping is exact to a millisecond only."""

LAST_CHUNK = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An OpenAI-compatible server: `base` is the path before /v1. The key is never shown."""

    host: str
    port: int
    base: str = ""
    is_secure: bool = False
    api_key: str | None = field(default=None, repr=False)

    @property
    def is_local(self) -> bool:
        return self.host in ("127.0.0.1", "::1", "localhost")

    def context(self) -> ssl.SSLContext | None:
        return ssl.create_default_context() if self.is_secure else None

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """A whole HTTP/1.1 request; the server is to close the connection after its answer."""
        content = b"" if body is None else json.dumps(body).encode()
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"{method} {self.base}/v1/{path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "Accept: application/json, text/event-stream",
            "Connection: close",
        ]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join(lines).encode() + HEAD_END + content


def parse_url(url: str, api_key: str | None = None) -> Target:
    """`http://host:port`, with or without a path, with or without /v1. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"--url must be like http://host:port, got {url!r}")
    if parts.query or parts.fragment or parts.username:
        raise ValueError(f"--url must be an address and no more (keys by --api-key-env): {url!r}")
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"--url has no usable port: {url!r}") from error
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ValueError("the API key holds characters that no header may have")
    is_secure = parts.scheme == "https"
    return Target(
        host=parts.hostname,
        port=port or (443 if is_secure else 80),
        base=parts.path.rstrip("/").removesuffix("/v1"),
        is_secure=is_secure,
        api_key=api_key,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One request: when it was due and when it was sent, in seconds since the schedule began."""

    due_s: float
    sent_s: float | None
    answer: TimedAnswer

    @property
    def lag_s(self) -> float | None:
        return None if self.sent_s is None else self.sent_s - self.due_s


class Collector(asyncio.Protocol):
    """Keeps what comes over one connection, with its times."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.pieces.append(Piece(now_s(), data))
        if data.endswith(LAST_CHUNK):  # a server that keeps the connection has said all, too
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def wait_until(at_s: float) -> None:
    """On the clock of `now_s`; not at all for what is past."""
    while (left_s := at_s - now_s()) > 0:
        await asyncio.sleep(left_s - SPIN_S if left_s > SPIN_S else 0)


async def exchange(
    target: Target, content: bytes, at_s: float, timeout_s: float, context: ssl.SSLContext | None
) -> tuple[float | None, list[Piece], str]:
    """When it was sent, what came, and what went wrong on the way ("": nothing)."""
    sent_s, collector = None, Collector()
    transport: asyncio.Transport | None = None
    try:
        await wait_until(at_s - AHEAD_S)
        async with asyncio.timeout(timeout_s + AHEAD_S):
            transport, _ = await asyncio.get_running_loop().create_connection(
                lambda: collector, target.host, target.port, ssl=context
            )
            await wait_until(at_s)
            sent_s = now_s()
            transport.write(content)
            await collector.ended
    except TimeoutError:
        return sent_s, collector.pieces, f"no whole answer within {timeout_s:g} s"
    except OSError as error:
        return sent_s, collector.pieces, f"no connection ({type(error).__name__})"
    finally:
        if transport is not None:
            transport.close()
    return sent_s, collector.pieces, ""


async def send_each(
    target: Target, contents: Sequence[bytes], due_s: Sequence[float], timeout_s: float
) -> list[Sent]:
    """All of them; one that fails is among the results like the others."""
    context = target.context()
    started_s = now_s() + 2 * AHEAD_S
    done = await asyncio.gather(
        *(
            exchange(target, content, started_s + at_s, timeout_s, context)
            for content, at_s in zip(contents, due_s, strict=True)
        )
    )
    return [
        Sent(
            due_s=at_s,
            sent_s=None if sent_s is None else sent_s - started_s,
            answer=TimedAnswer(problem=problem)
            if problem
            else read_timed([Piece(p.at_s - started_s, p.data) for p in pieces]),
        )
        for at_s, (sent_s, pieces, problem) in zip(due_s, done, strict=True)
    ]


def send_all(
    target: Target, bodies: Sequence[Mapping[str, Any]], due_s: Sequence[float], timeout_s: float
) -> list[Sent]:
    """Streamed completions, each sent when it is due, seconds from now. Blocks until all ended."""
    contents = [target.request("POST", "completions", body) for body in bodies]
    with quiet_collector():
        return asyncio.run(send_each(target, contents, due_s, timeout_s))


def fetch(target: Target, path: str, timeout_s: float) -> bytes:
    """What a GET brings, raw. Raises OSError (TimeoutError is one) if nothing can be had."""

    async def ask() -> tuple[float | None, list[Piece], str]:
        return await exchange(
            target, target.request("GET", path), now_s(), timeout_s, target.context()
        )

    _, pieces, problem = asyncio.run(ask())
    if problem:
        raise OSError(f"the server at {target.host}:{target.port} gave {problem}")
    return b"".join(piece.data for piece in pieces)
