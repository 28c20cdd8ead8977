"""The outer layers of the app, plain ASGI: ids, paths, the last word on errors; keys; bodies.

`Front` is outermost: every response carries `x-request-id`, every request ends in one line of the
log, and whatever was not foreseen becomes an error of OpenAI's shape. `KeyCheck` lets in who knows
the key. Nothing here holds a response back: each message is passed on as it comes.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from time import perf_counter
from typing import Any

from nanoserve.server import refusals
from nanoserve.server.errors import ApiError, dump
from nanoserve.server.logs import describe, request_id_of
from nanoserve.server.metrics import ServerMetrics
from nanoserve.server.tickets import ClientGoneError
from nanoserve.server.visits import SCOPE_KEY, Visit

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

logger = logging.getLogger(__name__)

SEND_KEY = "nanoserve.send"
"""Where the scope holds the HTTP server's own `send`: every layer on the way costs each token."""

OPEN_PATHS = frozenset({"/health", "/live"})
"""What a prober may ask without a key."""

_SLASHES = re.compile("/{2,}")


class Front:
    """Wraps the whole app. `root_path` is the prefix under which a proxy shows it, "" for none."""

    def __init__(self, app: App, *, metrics: ServerMetrics, root_path: str = "") -> None:
        self._app = app
        self._metrics = metrics
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        visit = Visit(
            request_id=request_id_of(header(scope, b"x-request-id")),
            method=scope["method"],
            path=scope["path"],
            received_s=perf_counter(),
        )
        id_header = (b"x-request-id", visit.request_id.encode("ascii"))

        async def pass_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                visit.status, visit.first_byte_s = message["status"], perf_counter()
                message = {**message, "headers": [*message.get("headers", ()), id_header]}
            await send(message)

        inner = inner_scope(scope, visit)
        inner["root_path"] = self._root_path or scope.get("root_path", "")
        try:
            await self._app({**inner, SEND_KEY: send}, receive, pass_on)
        except asyncio.CancelledError:  # the HTTP server ends, and its patience too
            if visit.status is not None:
                raise
            await send_error(pass_on, refusals.not_serving("the server is shutting down"))
        except Exception:
            logger.exception(describe("unforeseen", id=visit.request_id))
            if visit.status is not None:
                raise  # too late for an error: the connection must not look complete
            await send_error(pass_on, refusals.unforeseen())
        finally:
            self._note(visit)

    def _note(self, visit: Visit) -> None:
        visit.ended_s = perf_counter()
        self._metrics.statuses["none" if visit.status is None else str(visit.status)] += 1
        level = logging.DEBUG if visit.path in OPEN_PATHS else logging.INFO
        if logger.isEnabledFor(level):
            line = describe(
                "request",
                id=visit.request_id,
                method=visit.method,
                path=visit.path,
                status=visit.status,
                ms=(visit.ended_s - visit.received_s) * 1e3,
                reply=visit.reply_id,
                prompt_tokens=visit.num_prompt_tokens,
                outcome=visit.outcome,
            )
            logger.log(level, "%s", line)


class KeyCheck:
    """401 for everything but health and preflights, unless the request knows `api_key`."""

    def __init__(self, app: App, *, api_key: str) -> None:
        self._app = app
        self._expected = api_key.encode("utf-8")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._may_enter(scope):
            await self._app(scope, receive, send)
        else:
            await send_error(send, refusals.wrong_key())

    def _may_enter(self, scope: Scope) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if scope["method"] == "OPTIONS" or path in OPEN_PATHS:
            return True
        scheme, _, key = (header(scope, b"authorization") or b"").partition(b" ")
        is_same = hmac.compare_digest(key.strip(), self._expected)
        return scheme.lower() == b"bearer" and is_same


def inner_scope(scope: Scope, visit: Visit) -> Scope:
    """A copy for the inside: HEAD asks as GET does, and `//` or a last `/` changes no path."""
    path = _SLASHES.sub("/", scope["path"])
    if len(path) > 1:
        path = path.removesuffix("/")
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    return {**scope, "path": path, "method": method, SCOPE_KEY: visit}


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of this name, which is in lower case."""
    return next((value for key, value in scope["headers"] if key == name), None)


async def read_body(scope: Scope, receive: Receive) -> bytes:
    """The whole body. Raises ApiError 413 beyond `MAX_BODY_BYTES`, ClientGoneError."""
    limit = refusals.MAX_BODY_BYTES
    announced = header(scope, b"content-length") or b""
    if announced.isdigit() and int(announced[:20]) > limit:
        raise refusals.body_too_large()
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        body += message.get("body", b"")
        if len(body) > limit:
            raise refusals.body_too_large()
        if not message.get("more_body", False):
            return bytes(body)


async def send_start(send: Send, status: int, headers: Mapping[str, str]) -> None:
    """Status and headers; the body is to follow."""
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})


async def send_bytes(send: Send, status: int, headers: Mapping[str, str], body: bytes) -> None:
    """A whole response."""
    await send_start(send, status, {**headers, "content-length": str(len(body))})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError) -> None:
    """An error as a whole response."""
    headers = {**error.headers, "content-type": "application/json"}
    await send_bytes(send, error.status, headers, dump(error.body()).encode())
